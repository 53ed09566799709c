"""The program that chooses under a peak, held against trying every choice."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest

from aot_hooks.planning.solver import solve
from aot_hooks.planning.step import KEPT, Option, Step, Value

MIB = 1 << 20


def brute_force(step: Step, peak: float, max_error: float = math.inf) -> float | None:
    """The shortest time of all choices whose live bytes stay under `peak`; None if there is none.

    Only for steps without sources: then every choice changes its own interval.
    """
    total = sum(v.nbytes for v in step.values)
    best = None
    for options in itertools.product(*([KEPT, *v.options] for v in step.values)):
        live = list(step.live)
        for value, option in zip(step.values, options, strict=True):
            if option is not KEPT:
                end = value.segment_first if option.name == "recompute" else value.first
                for p in range(value.gone, end):
                    live[p] -= value.nbytes - option.packed_bytes
        error = math.sqrt(sum(v.nbytes / total * o.error**2 for v, o in zip(step.values, options, strict=True)))
        if max(live) <= peak and error <= max_error:
            ms = step.ms + sum(o.ms for o in options)
            best = ms if best is None else min(best, ms)
    return best


def random_step(seed: int) -> Step:
    choose = random.Random(seed)
    count, length = choose.randint(1, 5), 24
    values, live = [], [choose.randint(0, 20) * MIB for _ in range(length)]
    for i in range(count):
        gone, first, nbytes = choose.randint(1, 10), choose.randint(12, 22), choose.randint(1, 40) * MIB
        options = [
            Option(f"hook {k}", object(), nbytes // choose.randint(2, 8), choose.random(), choose.random() / 10)
            for k in range(choose.randint(0, 3))
        ]
        if choose.random() < 0.5:
            options.append(Option("recompute", ms=choose.random()))
        for p in range(gone, first + 1):
            live[p] += nbytes
        segment = choose.randint(11, first)
        values.append(Value((f"v{i}",), nbytes, gone, first, i, segment, tuple(options)))
    return Step(tuple(live), tuple(values), 10.0)


@pytest.mark.parametrize("seed", range(60))
def test_it_finds_what_trying_every_choice_finds(seed):
    step = random_step(seed)
    for share in (1.0, 0.8, 0.6, 0.4):
        peak = share * step.peak_bytes
        expected = brute_force(step, peak, max_error=0.05)
        found = solve(step, peak=peak, max_error=0.05)
        assert (found is None) == (expected is None)
        if found is not None:
            assert found.peak_bytes <= peak + 1 and found.error <= 0.05 + 1e-6
            assert found.ms <= expected * 1.002 + 1e-3
    assert solve(step, peak=0.7 * step.peak_bytes) == solve(step, peak=0.7 * step.peak_bytes)


def test_without_need_everything_is_kept():
    step = random_step(3)
    assert solve(step, peak=step.peak_bytes).options == (KEPT,) * len(step.values)


def test_of_equal_options_the_exact_one_is_taken():
    options = tuple(Option(name, object(), MIB, 1.0, error) for name, error in (("a", 0.1), ("b", 0.0), ("c", 0.1)))
    value = Value(("v",), 4 * MIB, 1, 3, options=options)
    step = Step((0, 4 * MIB, 4 * MIB, 0, 0), (value,), 1.0)
    assert solve(step, peak=2 * MIB).options[0].name == "b"


def test_a_recomputation_brings_its_source_back_early():
    """`b` is made of `a` at the begin of its segment, at 4. Sent away until 6, `a` is back at 4, too."""
    away, recompute = Option("away", object(), 0, -1.0), Option("recompute", ms=-1.0)
    a = Value(("a",), 8 * MIB, 1, 6, 0, 4, (away,))
    b = Value(("b",), 8 * MIB, 2, 5, 0, 4, (recompute,), (0,))
    live = (0, 8 * MIB, 16 * MIB, 16 * MIB, 17 * MIB, 16 * MIB, 8 * MIB, 0)
    both = solve(Step(live, (a, b), 1.0), peak=32 * MIB)
    assert both.options == (away, recompute) and both.peak_bytes == 17 * MIB
    alone = solve(Step(live, (a, dataclasses.replace(b, sources=())), 1.0), peak=32 * MIB)
    assert alone.options == (away, recompute) and alone.peak_bytes == 9 * MIB


def test_a_chain_over_two_segments_is_cut():
    """A source in another segment must be there, so only one of the two is recomputed."""
    recompute = (Option("recompute", ms=1.0),)
    a = Value(("a",), 8 * MIB, 1, 6, 1, 6, recompute)
    b = Value(("b",), 8 * MIB, 1, 4, 0, 4, recompute, (0,))
    step = Step((0, 16 * MIB, 16 * MIB, 16 * MIB, 16 * MIB, 8 * MIB, 8 * MIB, 0), (a, b), 1.0)
    found = solve(step, peak=None)
    assert [o.name for o in found.options].count("recompute") <= 1


def test_the_link_bounds_what_is_sent():
    options = (Option("offload()", object(), 0, 0.0, link_bytes=8 * MIB),)
    values = tuple(Value((f"v{i}",), 8 * MIB, 1, 3, options=options) for i in range(4))
    live = (0, 32 * MIB, 32 * MIB, 0)
    slow = Step(live, values, 2.0, 1.0, 1.0, to_host=16e9, to_device=16e9)  # 8 MiB take 0.52 ms of 0.75
    assert sum(o is not KEPT for o in solve(slow, peak=None).options) == 1
    fast = Step(live, values, 2.0, 1.0, 1.0, to_host=1e12, to_device=1e12)
    assert sum(o is not KEPT for o in solve(fast, peak=None).options) == 4


@pytest.mark.parametrize("live", [(), (0,), (5 * MIB,)])
def test_a_step_that_saves_nothing(live):
    step = Step(live, (), 1.0)
    assert solve(step, peak=5 * MIB).options == ()
    assert (solve(step, peak=4 * MIB) is None) == bool(step.peak_bytes)


@pytest.mark.slow
def test_eighty_equal_layers_are_solved_quickly():
    """Not timed: that it ends at all, with every value decided, is what is asserted."""
    layers, per_layer = 80, 6
    values, live = [], [0] * (2 * layers * per_layer + 2)
    count = layers * per_layer
    for i in range(count):
        gone, first = i + 1, 2 * count - i
        options = tuple(
            Option(n, object(), size * MIB, ms, e)
            for n, size, ms, e in (
                ("float8()", 4, 0.02, 0.032),
                ("int4()", 2, 0.03, 0.165),
                ("lossless()", 6, 0.03, 0.0),
            )
        )
        sources = (i - 1,) if i % per_layer else ()
        values.append(
            Value(
                (f"v{i}",),
                8 * MIB,
                gone,
                first,
                i // per_layer,
                2 * count - (i // per_layer + 1) * per_layer + 1,
                (*options, Option("recompute", ms=0.1 + 0.05 * (i % 3))),
                sources,
            )
        )
        for p in range(gone, first + 1):
            live[p] += 8 * MIB
    step = Step(tuple(live), tuple(values), 100.0)
    found = solve(step, peak=0.5 * step.peak_bytes, max_error=0.05)
    assert found is not None and found.peak_bytes <= 0.5 * step.peak_bytes + 1
