"""The simulator by itself: it allocates, captures and replays as CUDA would, and catches what it is there to catch."""

from __future__ import annotations

import pytest
import torch
from capture_simulator import CPU, Arena, OutOfArena

from cudagraph.torch_private import cuda as torch_cuda
from cudagraph.tree.liveness import Layout, tensor_on


def tensor_in(arena, values):
    with arena.staging():
        x = torch.empty_strided(values.shape, values.stride())
        x.copy_(values)
    return x


def unowned(x):
    storage = x.untyped_storage()
    return tensor_on(
        torch_cuda.storage_at(storage.data_ptr(), CPU, storage.nbytes()), Layout(tuple(x.shape), x.stride(), 0, x.dtype)
    )


def test_first_fit_and_free():
    arena = Arena(4096)
    a, b, c = (arena.allocate(100) for _ in range(3))
    assert b.data_ptr() - a.data_ptr() == 128 and c.data_ptr() - b.data_ptr() == 128
    address = b.data_ptr()
    del b
    assert arena.live_blocks() == {a.data_ptr(), c.data_ptr()}
    assert arena.allocate(200).data_ptr() > c.data_ptr()  # does not fit in between
    assert arena.allocate(128).data_ptr() == address
    with pytest.raises(OutOfArena):
        arena.allocate(4096)


def test_what_is_freed_on_the_way_is_scribbled_over():
    arena = Arena(4096)
    x = tensor_in(arena, torch.randn(6))
    seen = []

    def run():
        a = x + 1
        seen.append(unowned(a))  # keeps nothing alive
        b = a * 2
        del a
        return b.add_(1)  # in place: nothing is made where `a` was

    graph, out = arena.capture(run, [])
    graph.replay()
    torch.testing.assert_close(out, (x + 1) * 2 + 1)
    assert seen[0].numel() == 6 and seen[0].isnan().all()


def test_a_missed_copy_gives_wrong_numbers():
    """The input is freed after its last use and its memory reused: only a copy makes the next replay right."""
    arena = Arena(4096)
    given = [tensor_in(arena, torch.ones(6))]
    destination = unowned(given[0])

    def run():
        a = given.pop() * 2
        return a.exp() - a

    graph, out = arena.capture(run, [])
    graph.replay()
    assert torch.equal(out, torch.full((6,), 2.0).exp() - 2)
    graph.replay()
    assert not torch.equal(out, torch.full((6,), 2.0).exp() - 2)
    destination.fill_(1)
    graph.replay()
    assert torch.equal(out, torch.full((6,), 2.0).exp() - 2)


def test_a_liveness_error_gives_wrong_numbers():
    """A second capture that was told that the first one's output is dead writes over it."""
    arena = Arena(4096)
    x = tensor_in(arena, torch.randn(6))
    first, out = arena.capture(lambda: x.sin(), [])
    kept = unowned(out)
    del out  # wrongly
    second, _ = arena.capture(lambda: x.cos(), [])
    first.replay()
    torch.testing.assert_close(kept, x.sin())
    second.replay()
    assert not torch.allclose(kept, x.sin())


def test_restore_wants_every_block_accounted_for():
    arena = Arena(4096)
    a, b = arena.allocate(64), arena.allocate(64)
    addresses = a.data_ptr(), b.data_ptr()
    state = arena.checkpoint()
    with pytest.raises(AssertionError, match="between recordings"):
        arena.restore(state, [], [])
    del a, b
    owner = torch_cuda.storage_at(addresses[0], CPU, 64)
    with pytest.raises(AssertionError, match="owned or given back"):
        arena.restore(state, [owner], [])
    arena.restore(state, [owner], [addresses[1]])
    assert arena.live_blocks() == {addresses[0]}
    del owner
    assert arena.live_blocks() == set()
