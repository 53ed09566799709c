"""Parameters whose memory moves: once, in each step, or from layer to layer; see `cudagraph.tree.moves`.

A step has `calls` of captured functions. None of them is recorded more than twice if its parameters move in each step.
"""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from gathered import Gathered
from places import backend_with
from torch import nn
from tree_programs import World, same

from cudagraph import counters
from cudagraph.errors import NotCapturableError
from cudagraph.tree import dispatch
from cudagraph.tree.moves import EARNED

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def stack(world: World, count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(count))).to(world.device)


def train(model: nn.Sequential, world: World, count: int, before_step: Any = lambda i: None) -> list[torch.Tensor]:
    """Losses and gradients of `count` steps, in each of which the parameters learn."""
    found = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(count):
        before_step(i)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(i)).to(world.device)
        x.requires_grad_()  # as what later blocks get: all share one graph
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()  # gradients come at new addresses, too
    return found


def trained_like_uncaptured(world: World, layers: int, count: int, before_step: Any) -> nn.Sequential:
    """Train a stack whose blocks share one captured graph. `before_step(model, i)` may move its parameters."""
    expected = train(stack(world, layers), world, count)
    model = stack(world, layers)
    backend = backend_with(world.driver)  # one for all: Dynamo compiles once
    for block in model:
        block.compile(backend=backend)
    got = train(model, world, count, lambda i: before_step(model, i))
    for a, b in zip(got, expected, strict=True):
        if world.kind == "simulator":
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    return model


def gather(model: nn.Module, _: int) -> None:
    """All parameters of `model` go elsewhere."""
    if not hasattr(model, "gathered"):
        model.gathered = Gathered(*model.parameters())
    model.gathered.gather()


def test_layers_that_share_a_graph_are_recorded_once_each(world):
    trained_like_uncaptured(world, 16, 6, lambda model, i: None)
    counts = counters.stats()
    assert (counts["recordings"], counts["replays"], counts["given_up"]) == (2 * 16, 4 * 2 * 16, 0)


def test_layers_without_gradients_are_recorded_once_each(world):
    """Each call begins a step, so that all layers are recorded at the same place."""
    model, backend = stack(world, 16), backend_with(world.driver)
    compiled = [torch.compile(block, backend=backend) for block in model]
    recordings = []
    for _ in range(6):
        x = h = world.randn(4, WIDTH)
        with torch.no_grad():
            for block in compiled:
                h = block(h)
            torch.testing.assert_close(world.read(h), model(x), rtol=1e-5, atol=1e-5)
        recordings.append(counters.stats()["recordings"])
    counts = counters.stats()
    assert recordings[3] == recordings[-1] <= 2 * 16, (
        recordings
    )  # before torch 2.13 they form a path, the first time without the layer that warms up
    assert (counts["given_up"], counts["skips"]) == (0, 0)


@pytest.mark.parametrize("layers", [1, 16])
def test_parameters_that_move_in_each_step_end_the_captures(world, layers, caplog):
    with caplog.at_level(logging.WARNING, logger="cudagraph"):
        trained_like_uncaptured(world, layers, 8, gather)
    counts = counters.stats()
    assert counts["recordings"] == 2 * (2 * layers), "twice each, then it is known"
    assert (counts["given_up"], counts["replays"]) == (1, 0)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2 and "forward" in said[0] and "backward" in said[1], said
    for part in ("test_moving_inputs.py", "new addresses in each step", "whole_step", "cudagraph.reset()"):
        assert part in said[0]


def test_what_is_recorded_in_vain_is_freed():
    world = World("simulator")
    w = world.randn(4, 4)
    gather = Gathered(w).gather
    f = world.function(lambda x, w: [x @ w], static=(1,))
    kept = world.function(lambda x: [x.sin()])
    for _ in range(8):
        dispatch.mark_step_begin()
        gather()
        x = world.randn(3, 4)
        same(world, f(x, w), [x @ w])
    assert len(world.driver.pools) == 1 and world.driver.pools[0].released
    for _ in range(4):  # other functions of the same tree
        dispatch.mark_step_begin()
        x = world.randn(4)
        same(world, kept(x), [x.sin()])
    assert counters.stats()["replays"] == 2


def test_the_functions_before_and_after_stay_captured(world):
    w = world.randn(4, 4)
    gather = Gathered(w).gather
    before, after = world.function(lambda x: [x.sin()]), world.function(lambda y: [y.cos()])
    f = world.function(lambda x, w: [x @ w], static=(1,))
    for _ in range(12):
        dispatch.mark_step_begin()
        gather()
        x = world.randn(3, 4)
        (h,) = before(x)
        (y,) = f(h, w)
        same(world, after(y), [(x.sin() @ w).cos()])
        del h, y
    counts = counters.stats()
    assert counts["given_up"] == 1
    assert counts["recordings"] == 1 + 2 + 3, "what follows is recorded after each, and once without"
    assert (counts["skips"], counts["replays"]) == (12 - 3, 2 * 12 - 2 - 1 - 3)


def test_several_functions_are_found_out_at_once(world):
    """Not one after the other: each would cost recordings of all that follow."""
    weights = [world.randn(4) for _ in range(6)]
    gather = Gathered(*weights).gather
    fs = [world.function(lambda x, w: [x * w], static=(1,)) for _ in weights]
    for _ in range(8):
        dispatch.mark_step_begin()
        gather()
        h = e = world.randn(4)
        for f, w in zip(fs, weights, strict=True):
            (h,), e = f(h, w), e * w
        same(world, [h], [e])
        del h
    counts = counters.stats()
    assert (counts["recordings"], counts["given_up"]) == (2 * len(fs), len(fs))


@pytest.mark.parametrize("after", [2, 5])
@pytest.mark.parametrize("how", ["assign", "data", "storage"])
def test_parameters_that_move_once_are_captured_again(world, how, after):
    def move(model, i):
        if i != after:
            return
        if how == "assign":
            state = {name: p.detach().clone() for name, p in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        elif how == "data":
            for p in model.parameters():
                p.data = p.detach().clone()
        else:
            gather(model, i)

    count = 10
    model = stack(world, 4)
    backend = backend_with(world.driver)  # one for all: Dynamo compiles once
    for block in model:
        block.compile(backend=backend)
    for i in range(count):
        move(model, i)
        model(world.randn(4, WIDTH, requires_grad=True)).square().mean().backward()
        model.zero_grad()
    counts = counters.stats()
    assert (counts["recordings"], counts["given_up"], counts["skips"]) == (2 * 2 * 4, 0, 0)
    assert counts["replays"] == (count - 3) * 2 * 4


def test_what_moves_after_many_replays_is_recorded_each_time(world):
    w = world.randn(4, 4)
    gather = Gathered(w).gather
    f = world.function(lambda x, w: [x @ w], static=(1,), is_inference=False)
    for _ in range(4):
        gather()
        for _ in range(EARNED + 2):
            dispatch.mark_step_begin()
            x = world.randn(3, 4)
            same(world, f(x, w), [x @ w])
    counts = counters.stats()
    assert (counts["recordings"], counts["given_up"]) == (4, 0)


def test_replays_that_read_all_inputs_in_place_count(world):
    x, w = world.randn(3, 4), world.randn(4, 4)
    gather = Gathered(w).gather
    f = world.function(lambda x, w: [x @ w], static=(1,))
    for count in (EARNED + 2, 2, 2):
        gather()
        for _ in range(count):
            dispatch.mark_step_begin()
            x.copy_(torch.randn_like(x))
            same(world, f(x, w), [x @ w])
    assert counters.stats()["given_up"] == 0, "the first move was after many replays"


def test_two_moves_with_many_replays_between_them_are_not_in_a_row(world):
    """Also where the function was recorded at another place of the path meanwhile."""
    w = world.randn(4, 4)
    gather = Gathered(w).gather
    f = world.function(lambda x, w: [x @ w], static=(1,))
    g = world.function(lambda x: [x.sin()])

    def step(x):
        dispatch.mark_step_begin()
        same(world, f(x, w), [x @ w])

    def longer_step(x):
        dispatch.mark_step_begin()
        (h,) = g(x)
        same(world, f(h, w), [x.sin() @ w])
        del h

    for kind, count in ((step, 2), (step, EARNED + 2), (longer_step, 3), (longer_step, 4)):
        if count != 3:
            gather()
        for _ in range(count):
            kind(world.randn(3, 4))
    assert counters.stats()["given_up"] == 0


def test_what_moves_in_every_second_step_is_not_recorded_for_ever(world):
    w = world.randn(4, 4)
    gather = Gathered(w).gather
    f = world.function(lambda x, w: [x @ w], static=(1,))
    for i in range(20):
        dispatch.mark_step_begin()
        if i % 2:
            gather()
        x = world.randn(3, 4)
        same(world, f(x, w), [x @ w])
    assert (counters.stats()["recordings"], counters.stats()["given_up"]) == (2, 1)


def test_a_forward_that_is_given_up_takes_its_backward_along(world):
    """Captured, the backward would copy all that the forward saved in ordinary memory."""
    x = world.randn(4, 4)
    w = nn.Parameter(world.randn(4, 4))
    gather = Gathered(w).gather
    model = nn.Linear(4, 4, bias=False, device=world.device)
    model.weight = w
    f = torch.compile(
        lambda x: torch.tanh(model(x)), backend=backend_with(world.driver)
    )  # its backward does not read `w`
    for _ in range(2):
        before = counters.stats()["replays"]  # CUDA's allocator may put `w` where it was two steps before
        for _ in range(8):
            dispatch.mark_step_begin()
            gather()
            w.grad = None
            f(x).sum().backward()
            expected = (x.t() @ (1 - torch.tanh(x @ w.detach().t()) ** 2)).t()
            same(world, [w.grad], [expected.contiguous()])
    counts = counters.stats()
    assert (counts["recordings"], counts["given_up"], counts["replays"]) == (4, 1, before)


def test_evaluation_stays_captured_where_training_is_not(world):
    model, backend = stack(world, 2), backend_with(world.driver)
    compiled = [torch.compile(block, backend=backend) for block in model]

    def run(x):
        for block in compiled:
            x = block(x)
        return x

    for _ in range(6):
        gather(model, 0)
        run(world.randn(4, WIDTH, requires_grad=True)).sum().backward()
        model.zero_grad()
    assert counters.stats()["given_up"] == 1
    for _ in range(4):
        x = world.randn(4, WIDTH)
        with torch.no_grad():
            torch.testing.assert_close(world.read(run(x)), model(x), rtol=1e-5, atol=1e-5)
    assert counters.stats()["replays"] >= 4 and counters.stats()["given_up"] == 1


def test_a_buffer_that_moves_and_is_written(world):
    total = world.randn(4)
    expected = total.clone()
    gather = Gathered(total).gather
    f = world.function(lambda x, total: [total.add_(x) * 2], static=(1,), mutated=(1,))
    for _ in range(6):
        dispatch.mark_step_begin()
        gather()
        x = world.randn(4)
        expected += x
        same(world, [*f(x, total), total], [expected * 2, expected])
    assert (counters.stats()["recordings"], counters.stats()["given_up"]) == (2, 1)


def test_or_error_raises_where_captures_end(world):
    w = world.randn(4, 4)
    gather = Gathered(w).gather
    f = world.function(lambda x, w: [x @ w], static=(1,), options={"or_error": True})
    for _ in range(3):
        dispatch.mark_step_begin()
        gather()
        f(world.randn(3, 4), w)
    gather()
    with pytest.raises(NotCapturableError, match="new addresses in each step"):
        f(world.randn(3, 4), w)


def test_reset_tries_again(world):
    w = world.randn(4, 4)
    gather = Gathered(w).gather
    f = world.function(lambda x, w: [x @ w], static=(1,))
    for _ in range(6):
        gather()
        f(world.randn(3, 4), w)
    assert counters.stats()["given_up"] == 1
    dispatch.reset()
    for _ in range(6):  # they stay where they are now
        dispatch.mark_step_begin()
        x = world.randn(3, 4)
        same(world, f(x, w), [x @ w])
    counts = counters.stats()
    assert (counts["recordings"], counts["replays"], counts["given_up"]) == (1, 4, 0)


def test_parameters_are_forgotten_with_the_program(world):
    w = world.randn(4, 4)
    f = world.function(lambda x, w: [x @ w], static=(1,))
    for _ in range(3):
        dispatch.mark_step_begin()
        f(world.randn(3, 4), w)
    (mine,) = [t for t in dispatch.local.trees.values() if t.driver is world.driver]
    known = next(iter(mine.states.values())).moves
    assert len(known) == 1
    del w
    assert len(known) == 0


def test_a_dropped_function_dies_although_another_was_recorded_after_it(world):
    class Constant:
        pass

    constant, w = Constant(), world.randn(8)
    alive = weakref.ref(constant)

    def function(held: Any) -> Any:
        return world.function(lambda x: [x.cos() if held else x])

    f = function(constant)
    g, h = world.function(lambda x, w: [x * w], static=(1,)), world.function(lambda x: [x.sin()])
    del constant
    for _ in range(4):
        dispatch.mark_step_begin()
        x = world.randn(8)
        f(x), g(x, w), h(x)
    del f
    for _ in range(4):
        dispatch.mark_step_begin()
        h(world.randn(8))
        gc.collect()
    assert alive() is None
