"""Held outputs of an earlier step as inputs of a graph of a later one."""

from __future__ import annotations

import pytest
import torch
from tree_programs import World, same, steps

from cudagraph import counters
from cudagraph.errors import StaleOutputError
from cudagraph.torch_private import cuda as torch_cuda
from cudagraph.tree import dispatch
from cudagraph.tree.liveness import STALE


def test_a_stale_input_is_an_error(world):
    if not world.raises_on_access:
        pytest.skip("this build of torch can't make reads fail")
    f = world.function(lambda x: [x.sin()])
    g = world.function(lambda h: [h + 1])
    for _ in range(3):
        dispatch.mark_step_begin()
        (h,) = f(world.randn(4))
        g(h)
    dispatch.mark_step_begin()
    f(world.randn(4))
    with pytest.raises(StaleOutputError, match="output 0 of graph"):
        g(h)
    steps(world, f, lambda x: [x.sin()], lambda: (world.randn(4),))


def test_a_stale_input_between_the_parts_of_a_graph_is_the_same_error(world):
    """torch raises a RuntimeError, whose text `poison` gave it."""
    f = world.function(lambda x: [x.sin()])
    f(world.randn(4))  # the thread has a tree

    def reads_stale(inputs):
        inputs.clear()
        raise RuntimeError(f"output 0 of graph 0 is {STALE}")

    with pytest.raises(StaleOutputError, match="output 0 of graph 0"):
        dispatch.in_parts(reads_stale, world.device, world.driver)([world.randn(4)])


@pytest.mark.skipif(not torch_cuda.can_swap(), reason="this torch can't point a storage elsewhere")
def test_copies_where_torch_moves_only_what_it_allocated():
    """Before torch 2.13 a storage can be moved once. Afterwards such an output is copied when it is given out."""
    dispatch.reset()
    world = World("simulator", moves="made")
    f = world.function(lambda x: [x.sin(), x.cos()], options={"held_outputs": "copy"})
    g = world.function(lambda a, b: [a * b])
    kept = []
    for i in range(10):
        dispatch.mark_step_begin()
        x = world.randn(6)
        a, b = f(x)
        same(world, g(a, b), [x.sin() * x.cos()])
        if i % 3 != 2:
            kept.append((a, x.sin()))
        del a, b
        for ours, eager in kept:
            same(world, [ours], [eager])
    assert world.driver.copied_out == 1
    dispatch.reset()
    for ours, eager in kept:
        same(world, [ours], [eager])


@pytest.mark.skipif(not torch_cuda.can_swap(), reason="this torch can't point a storage elsewhere")
def test_copies_on_another_stream(monkeypatch):
    """Copies wait for the graph that wrote the values, and a reader on the stream before waits for the copies."""
    dispatch.reset()
    world = World("simulator")
    f = world.function(lambda x: [x.sin()], options={"held_outputs": "copy"})
    waits, kept = [], []

    def copy_out(storages, original=world.driver.copy_out):
        if storages:
            waits.append([pair for pair in world.driver.ordered if pair[0] is not None])
        original(storages)

    monkeypatch.setattr(world.driver, "copy_out", copy_out)
    for stream in [0, 0, 0, 1]:
        world.driver.current_stream = stream
        dispatch.mark_step_begin()
        x = world.randn(6)
        kept.append((f(x)[0], x.sin()))
    assert waits == [[], [(0, 1)]]
    assert [pair for pair in world.driver.ordered if pair[0] is not None] == [(0, 1), (1, 0)]
    for ours, eager in kept:
        same(world, [ours], [eager])
    dispatch.reset()


def test_held_inputs_keep_their_layout(world):
    seen = set()

    def fn(x):
        seen.add(x.stride())
        return [x * 2, x.view(-1) if x.is_contiguous() else x + 1]

    f = world.function(lambda x: [x.sin()])
    g = world.function(fn)
    for _ in range(5):
        dispatch.mark_step_begin()
        x = world.randn(4, 6)
        (h,) = f(x)
        kept = h[:, ::2]
        del h
        dispatch.mark_step_begin()
        same(world, g(kept)[:1], [(x.sin() * 2)[:, ::2].clone(memory_format=torch.preserve_format)])
        del kept
    assert seen == {(6, 2)}


@pytest.mark.parametrize("moves", ["all", "made"])
def test_fed_back_and_written_to_again_and_again(moves):
    if not torch_cuda.can_swap():
        pytest.skip("this torch can't point a storage elsewhere")
    dispatch.reset()
    world = World("simulator", moves=moves)
    produce = world.function(lambda x: [x.sin()])
    accumulate = world.function(lambda state, x: [state.add_(x) * 2], mutated=(0,))
    for _ in range(5):
        dispatch.mark_step_begin()
        x = world.randn(6)
        (state,) = produce(x)
        expected = x.sin()
        for _ in range(2):
            dispatch.mark_step_begin()
            x = world.randn(6)
            expected = expected + x
            same(world, [*accumulate(state, x), state], [expected * 2, expected])
        del state
    dispatch.reset()


def test_a_mark_between_two_backwards(world):
    f = torch.compile(lambda x, w: torch.tanh(x * w), backend=world.backend())
    w = world.randn(6, requires_grad=True)
    for first in [0, 1, 0, 1, 0]:
        w.grad = None
        dispatch.mark_step_begin()
        xs = [world.randn(6), world.randn(6)]
        losses = [f(x, w).sum() for x in xs]
        losses[first].backward()
        dispatch.mark_step_begin()
        f(world.randn(6), w.detach())
        losses[1 - first].backward()
        same(world, [w.grad], [sum((1 - torch.tanh(x * w) ** 2) * x for x in xs).detach()])
        del losses


@pytest.mark.parametrize("moves", ["all", "made"])
def test_copies_of_aliases_share_their_storage(moves):
    """A later graph returns a view of an earlier one's output: a write to one is a write to both."""
    if not torch_cuda.can_swap():
        pytest.skip("this torch can't point a storage elsewhere")
    dispatch.reset()
    aliases_as_in_eager(World("simulator", moves=moves))
    dispatch.reset()


@pytest.mark.gpu
def test_copies_of_aliases_share_their_storage_on_cuda():
    dispatch.reset()
    aliases_as_in_eager(World("cuda"))
    dispatch.reset()


def aliases_as_in_eager(world):
    options = {"held_outputs": "copy"}
    f = world.function(lambda x: [(h := x.sin()), h[2:], x.cos()], options=options)
    g = world.function(lambda h, c: [h[1:], h.view(2, -1), c * 2], options=options)
    kept = []
    for step in range(9):
        dispatch.mark_step_begin()
        x = world.randn(6)
        h, tail, c = f(x)
        view, square, _ = g(h, c)
        assert len({each.untyped_storage().data_ptr() for each in (h, tail, view, square)}) == 1
        if step % 4 != 3:  # held over some steps, not over others
            kept.append((h, tail, view, square, x.sin()))
        del h, tail, c, view, square, _
        for h, tail, view, square, expected in kept:
            assert len({each.untyped_storage().data_ptr() for each in (h, tail, view, square)}) == 1
            same(world, [h, tail, view, square], [expected, expected[2:], expected[1:], expected.view(2, -1)])
            view.mul_(2)  # in place, through one of them
            expected[1:].mul_(2)
        h = tail = view = square = expected = None
    assert world.kind == "cuda" or world.driver.copied_out > 0


def test_a_view_of_a_copied_input_is_the_callers(world):
    """The view is one of the caller's tensor and not of the graph's copy, also with a conjugate or negative bit."""
    f = world.function(lambda x: [x[1:], x * 2, x])
    for step in range(6):
        dispatch.mark_step_begin()
        x = torch.view_as_complex(world.randn(4, 2, 2))
        x = x.conj().imag if step == 4 else x.imag
        view, double, whole = f(x)
        same(world, [view, double, whole], [x[1:], x * 2, x])
        if not x.is_neg():
            assert len({each.untyped_storage().data_ptr() for each in (view, whole, x)}) == 1
            x.zero_()
            assert not view.any() and not whole.any()
    assert counters.stats()["skips"] == 0
