"""The model of CUDA's caching allocator that bench_cudagraph_memory.py reckons with."""

from __future__ import annotations

import pathlib
import random
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))
import itertools

from packing import CachingAllocator, live_peak, placed

MIB = 1 << 20


def random_trace(seed, count=400):
    rng = random.Random(seed)
    trace, alive = [], []
    for number in range(count):
        trace.append((rng.choice([600, 300_000, 3 * MIB, 12 * MIB, 64 * MIB + 512, 128 * MIB, 448 * MIB]), number))
        alive.append(number)
        while alive and rng.random() < 0.5:
            trace.append((None, alive.pop(rng.randrange(len(alive)))))
    return trace


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2 * MIB),
        ([MIB], 2 * MIB),
        ([MIB, MIB, 512], 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([9 * MIB, 9 * MIB], 20 * MIB),
        ([9 * MIB, 9 * MIB, 9 * MIB], 40 * MIB),
        ([10 * MIB], 10 * MIB),
        ([11 * MIB], 12 * MIB),
        ([11 * MIB + 1], 12 * MIB),
        ([11 * MIB, MIB + 1], 32 * MIB),  # what is left of the first segment is too little to be a block
    ],
)
def test_segments_are_those_of_the_allocator(sizes, reserved):
    assert CachingAllocator().run([(size, i) for i, size in enumerate(sizes)]).reserved == reserved


def test_the_smallest_block_that_fits_is_taken_and_neighbours_merge():
    pool = CachingAllocator()
    large, small = pool.allocate(64 * MIB), pool.allocate(32 * MIB)
    pool.release(large)
    pool.release(small)
    assert pool.allocate(30 * MIB) == small
    first = pool.allocate(16 * MIB)
    assert first == large
    second = pool.allocate(48 * MIB)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(64 * MIB) == large and pool.reserved == 96 * MIB


def test_an_expandable_segment_grows_by_what_is_missing():
    pool = CachingAllocator(expandable=True)
    first, second = pool.allocate(40 * MIB), pool.allocate(40 * MIB)
    pool.release(second)
    assert pool.allocate(50 * MIB) == second and pool.reserved == 100 * MIB
    pool.release(first)
    assert pool.allocate(10 * MIB) == first and pool.reserved == 100 * MIB


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("scale", [1, 256])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_never_overlap(expandable, scale, seed):
    trace = [(None if n is None else -(-n // scale), i) for n, i in random_trace(seed)]
    pool = CachingAllocator(expandable=expandable, scale=scale)
    at = {}
    for nbytes, number in trace:
        if nbytes is None:
            pool.release(at.pop(number)[0])
        else:
            at[number] = pool.allocate(nbytes), nbytes
        taken = sorted(at.values())
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(taken))
        assert {a for a, block in pool.blocks.items() if not block.free} == {a for a, _ in taken}
    assert sum(block.nbytes for block in pool.blocks.values()) == pool.reserved == sum(pool.segments.values())
    assert live_peak(trace) <= placed(trace)
    assert live_peak(trace) <= pool.reserved


def test_blocks_are_placed_where_nothing_else_lives():
    trace = [(4, 0), (2, 1), (None, 0), (3, 2), (1, 3)]
    assert placed(trace) == live_peak(trace) == 6  # 1 over 0; 2 where 0 was, 3 beside it
    assert placed([]) == live_peak([]) == 0
