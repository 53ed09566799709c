"""Functions on several devices in one thread: a tree each. Two simulators stand for two devices."""

from __future__ import annotations

import pytest
import torch
from tree_programs import World, same

from cudagraph import counters
from cudagraph.options import Options
from cudagraph.tree import dispatch
from cudagraph.tree.function import Function


@pytest.fixture
def worlds():
    dispatch.reset()
    yield World("simulator"), World("simulator")
    dispatch.reset()


@pytest.mark.parametrize("marked", [False, True])
def test_a_model_in_two_halves(worlds, marked):
    """What one device gives out the other one copies; steps and backwards in flight are those of each tree."""
    here, there = worlds
    v, w = (here.randn(6, requires_grad=True) for _ in range(2))
    first = torch.compile(lambda x, w: torch.tanh(x * w), backend=here.backend())
    second = torch.compile(lambda h, w: torch.sin(h * w) + h, backend=there.backend())
    if marked and not here.driver.can_move:
        pytest.skip("this torch can't point a storage elsewhere")
    for step in range(8):
        if marked:
            dispatch.mark_step_begin()
        v.grad = w.grad = None
        xs = [here.randn(6) for _ in range(1 + step % 2)]
        expected = [torch.tanh(x * v) for x in xs]
        expected = [torch.sin(h * w) + h for h in expected]
        ys = [second(first(x, v), w) for x in xs]
        same(here, [here.read(there.read(y)) for y in ys], [y.detach() for y in expected])
        grads = torch.autograd.grad(sum(y.sum() for y in expected), [v, w])
        for y in ys[:: 1 if step % 3 else -1]:
            y.sum().backward()
        same(here, [there.read(v.grad), there.read(w.grad)], grads)
        del ys, y
    assert len(here.driver.pools) == len(there.driver.pools) == 1
    trees = [t for t in dispatch.local.trees.values() if t.driver in (here.driver, there.driver)]
    assert all(t.root.children and not t.is_broken for t in trees) and len(trees) == 2
    assert counters.stats()["replays"] > 16 and counters.stats()["skips"] == 0


def test_one_device_is_given_back_alone(worlds):
    here, there = worlds
    functions = [world.function(lambda x: [x.sin()]) for world in worlds]
    for _ in range(4):
        dispatch.mark_step_begin()
        x = here.randn(4)
        for world, f in zip(worlds, functions, strict=True):
            same(world, f(x), [x.sin()])
    del f, functions[0]
    assert here.driver.pools[0].released and not there.driver.pools[0].released
    dispatch.mark_step_begin()
    same(there, functions[0](x), [x.sin()])


@pytest.mark.parametrize("static", [(), (1,)])
def test_a_meta_tensor_is_no_reason(worlds, static):
    """It has no memory. What is computed of it has none, either."""
    world, _ = worlds
    f = world.function(lambda x, shape: [x * 2, shape + 1, shape], static=static)
    for _ in range(4):
        dispatch.mark_step_begin()
        x, shape = world.randn(4), torch.empty(4, 2, device="meta")
        doubled, *metas = f(x, shape)
        same(world, [doubled], [x * 2])
        assert all(y.is_meta and y.shape == (4, 2) for y in metas)
    counts = counters.stats()
    assert (counts["recordings"], counts["skips"]) == (1, 0)


def test_an_input_on_another_device_is_a_reason():
    device = torch.device("cuda", 1)
    function = Function(dispatch.Piece("the graph", list, device), Options(), World("simulator").driver)
    x = torch.randn(3)
    assert function.reason_against([x], copied=[0], static=[]) == "input 0 of the graph is on cpu, not on cuda:1"
    assert function.reason_against([x], copied=[], static=[0]) is None  # memory of an offload operator
