"""Inputs whose address repeats are read where they are; see `cudagraph.tree.node.StableInputProbe`."""

from __future__ import annotations

import itertools

import pytest
import torch
from tree_programs import same

from cudagraph import counters
from cudagraph.tree import dispatch
from cudagraph.tree.node import PROBED_CALLS

DECIDED = PROBED_CALLS + 2  # calls after which it is decided: a warm-up and a recording come first


def filled(x):
    """`x` with other values at the same address."""
    return x.copy_(torch.randn_like(x))


def test_a_buffer_that_is_filled_again_is_not_copied(world):
    x = world.randn(5)
    f = world.function(lambda x: [x.sin(), x + 1])
    for _ in range(DECIDED + 4):
        dispatch.mark_step_begin()
        filled(x)
        same(world, f(x), [x.sin(), x + 1])
    counts = counters.stats()
    assert (counts["recordings"], counts["rerecordings"], counts["replays"]) == (2, 1, PROBED_CALLS - 1 + 4)
    assert counts["copies"] == PROBED_CALLS - 1


def test_one_that_moves_is_copied_again_and_nothing_is_recorded(world):
    x = world.randn(5)
    f = world.function(lambda x: [x.sin()])
    for step in range(DECIDED + 8):
        dispatch.mark_step_begin()
        given = world.randn(5) if step in (DECIDED + 1, DECIDED + 5) else filled(x)
        same(world, f(given), [given.sin()])
    counts = counters.stats()
    assert (counts["recordings"], counts["skips"]) == (2, 0)
    assert counts["copies"] == PROBED_CALLS - 1 + 7  # from the first move on


def test_inputs_in_turns_are_copied_for_good(world):
    xs = [world.randn(5), world.randn(5)]
    f = world.function(lambda x, y: [x - y])
    for step in range(2 * DECIDED):
        dispatch.mark_step_begin()
        x, y = filled(xs[step % 2]), filled(xs[0])
        same(world, f(x, y), [x - y])
    counts = counters.stats()
    assert (counts["recordings"], counts["copies"]) == (1, 2 * counts["replays"])


def test_of_a_path_only_the_last_is_recorded_once_more(world):
    """Recordings that follow would have to be recorded again, too."""
    count = 5
    xs = [world.randn(5) for _ in range(count)]
    fs = [world.function(lambda h, x: [(h * x).sin()]) for _ in range(count)]
    for _ in range(3 * DECIDED):
        dispatch.mark_step_begin()
        h = e = filled(xs[0])
        for f, x in zip(fs, xs, strict=True):
            e = (e * x).sin()
            (h,) = f(h, x)
        same(world, [h], [e])
        del h
    assert counters.stats()["recordings"] == count + 1


def test_training_copies_for_good(world):
    x, g = world.randn(4, 4), world.randn(4, 4)
    w = world.randn(4, 4, requires_grad=True)
    f = torch.compile(lambda x, w: torch.tanh(x @ w), backend=world.backend())
    for _ in range(2 * DECIDED):
        dispatch.mark_step_begin()
        filled(x), filled(g)
        w.grad = None
        f(x, w).backward(g)
        expected = x.t() @ ((1 - torch.tanh(x @ w.detach()) ** 2) * g)
        same(world, [w.grad], [expected])
    counts = counters.stats()
    assert (counts["recordings"], counts["rerecordings"]) == (2, 0)


@pytest.mark.parametrize("marked", [False, True])
def test_two_forwards_in_flight_on_buffers(world, marked):
    """A product saves only its inputs. Their copies show that the backward is still to come."""
    xs = [world.randn(4, 4), world.randn(4, 4)]
    w = world.randn(4, 4, requires_grad=True)
    f = torch.compile(lambda x, w: x @ w, backend=world.backend())
    for _ in range(3 * DECIDED):
        w.grad = None
        x, y = map(filled, xs)
        if marked:
            dispatch.mark_step_begin()
        a = f(x, w)
        if marked:
            dispatch.mark_step_begin()
        b = f(y, w)
        (a * b).sum().backward()
        same(world, [w.grad], [x.t() @ (y @ w.detach()) + y.t() @ (x @ w.detach())])
        del a, b


def test_a_tangent_that_is_negated_in_the_same_place(world):
    """Only its negative bit changes, and no guard checks the inputs of a backward."""
    x, g = world.randn(4, 4), world.randn(4, 4)
    w = world.randn(4, 4, requires_grad=True)
    f = torch.compile(lambda x, w: torch.sin(x @ w), backend=world.backend())
    for step in range(2 * DECIDED + 6):
        dispatch.mark_step_begin()
        w.grad = None
        tangent = g if step < 2 * DECIDED or step % 2 else torch._neg_view(g)
        f(x, w).backward(tangent)
        same(world, [w.grad], [x.t() @ (torch.cos(x @ w.detach()) * tangent)])


def test_a_weight_that_moves_later(world):
    x, weights = world.randn(5), [world.randn(5), world.randn(5)]
    f = world.function(lambda x, w: [x * w], static=(1,))
    for which in [0] * (DECIDED + 2) + [1] * (DECIDED + 2) + [0, 1, 0]:
        dispatch.mark_step_begin()
        filled(x)
        same(world, f(x, weights[which]), [x * weights[which]])
    counts = counters.stats()
    assert counts["recordings"] == 3, "the other weight has a recording of its own, and that copies"
    assert counts["skips"] == 0


def test_no_limit_of_recordings_counts_it_and_none_forbids_it(world):
    x, weights = world.randn(5), [world.randn(5), world.randn(5)]
    for limit, recordings in ((0, 1), (1, 3)):
        dispatch.reset()
        f = world.function(lambda x, w: [x * w], static=(1,), options={"rerecord_limit": limit})
        for which in [0] * (DECIDED + 2) + [1] * (limit * 3):
            dispatch.mark_step_begin()
            filled(x)
            same(world, f(x, weights[which]), [x * weights[which]])
        assert (counters.stats()["recordings"], counters.stats()["skips"]) == (recordings, 0)


def test_where_it_cannot_be_recorded_once_more(world):
    runs = itertools.count(1)

    def fn(x):
        if next(runs) == 3:
            raise RuntimeError("out of memory")
        return [x.sin()]

    x = world.randn(5)
    f = world.function(fn)
    for _ in range(DECIDED + 4):
        dispatch.mark_step_begin()
        filled(x)
        same(world, f(x), [x.sin()])
    assert next(runs) == 4, "it was tried, once"
    counts = counters.stats()
    assert (counts["recordings"], counts["skips"], counts["copies"]) == (1, 0, counts["replays"])


def test_two_inputs_on_one_storage_are_copied_for_good(world):
    """On storages of their own, a view of one input could be taken for a view of the other."""
    f = world.function(lambda a, b: [a.view(2, 2), b + 1])
    x = world.randn(8)
    for _ in range(DECIDED + 4):
        dispatch.mark_step_begin()
        filled(x)
        same(world, f(x[:4], x[4:]), [x[:4].view(2, 2), x[4:] + 1])
    assert counters.stats()["recordings"] == 1


def test_outputs_that_are_inputs(world):
    x = world.randn(4, 4)
    f = world.function(lambda x: [x, x.t(), x + 1])
    for _ in range(DECIDED + 2):
        dispatch.mark_step_begin()
        filled(x)
        out = f(x)
        same(world, out, [x, x.t(), x + 1])
    assert out[0] is x and out[1].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
