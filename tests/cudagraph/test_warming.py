"""Memory of warm-ups: in training it is a pool of its own."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
import torch
from places import backend_with
from tree_programs import World, layer, same, takes_list

from cudagraph import counters
from cudagraph.tree import dispatch


def layer_of(world, seen):
    """A forward and its backward, by hand. `seen` gets the number of warm-up pools in use when they ran."""

    def forward(x, w):
        seen.append(("forward", len(world.driver.warming)))
        h = torch.tanh(x * w)
        return [h.sum(0), h, x, w]

    @takes_list
    def backward(inputs):
        seen.append(("backward", len(world.driver.warming)))
        h, x, w, g = inputs
        inputs.clear()
        inner = g * (1 - h * h)
        return [inner * w, (inner * x).sum(0), g]

    return (
        world.function(forward, static=(1,), is_inference=False, saved_outputs=(1, 2, 3)),
        world.function(backward, static=(0, 1, 2), is_inference=False, is_backward=True),
    )


def test_training_warms_up_in_memory_of_its_own(simulated, monkeypatch):
    world, seen = simulated, []
    moves = []

    def copy_out(storages, original=world.driver.copy_out):
        moves.append(
            (len(storages), [pool in [p() for p in world.driver.warm_pools[:1]] for pool in world.driver.warming])
        )
        original(storages)

    monkeypatch.setattr(world.driver, "copy_out", copy_out)
    forward, backward = layer_of(world, seen)

    def head(y):
        seen.append(("inference", len(world.driver.warming)))
        return [y * 2]

    head = world.function(head)
    w = world.randn(6)
    for step in range(3):
        dispatch.mark_step_begin()
        x, g = world.randn(4, 6), world.randn(6)
        y, *saved = forward(x, w)
        same(world, head(y), [torch.tanh(x * w).sum(0) * 2])
        del y
        gradients = backward(*saved, g)
        h = torch.tanh(x * w)
        same(world, gradients, [g * (1 - h * h) * w, (g * (1 - h * h) * x).sum(0), g])
        if step == 0:
            assert seen == [("forward", 1), ("inference", 0), ("backward", 1)]
            # to memory that is not the activations'; what is the tangent stays
            assert moves == ([(2, [False])] if world.driver.can_move else [])
        del saved, gradients
    assert not any(count for _, count in seen[3:])
    assert [pool() for pool in world.driver.warm_pools] == [None, None][: 2 if world.driver.can_move else 1]
    assert (counters.stats()["warmups"], counters.stats()["recordings"]) == (3, 3)


def test_gradients_are_moved_whose_storages_lie_where_saved_ones_lay(simulated, monkeypatch):
    """A saved tensor's storage is freed, and the next gradient's storage often gets its address."""
    world, moves = simulated, []
    if not world.driver.can_move:
        monkeypatch.setattr(world.driver, "can_copy_out", lambda storage: True)
    monkeypatch.setattr(world.driver, "copy_out", lambda storages: moves.append(len(storages)))
    count = 64

    @takes_list
    def backward(inputs):
        gradients = []
        while inputs:
            gradients.append(inputs.pop() * 2)
        return gradients

    backward = world.function(backward, is_inference=False, is_backward=True)
    dispatch.mark_step_begin()
    backward.call([torch.ones(6) for _ in range(count)])
    assert moves == [count]


def test_memory_of_a_warm_up_goes_with_its_step(simulated):
    """No backward comes, and nothing is ever recorded."""
    world, seen = simulated, []
    forward, _ = layer_of(world, seen)
    options = {"warmup_steps": 1000}
    never = world.function(lambda x: [x + 1], options=options, is_inference=False)
    w = world.randn(6)
    dispatch.mark_step_begin()
    forward(world.randn(4, 6), w)
    never(w)
    gc.collect()
    assert [pool() is not None for pool in world.driver.warm_pools] == [True]
    dispatch.mark_step_begin()
    never(w)
    assert [pool() is not None for pool in world.driver.warm_pools] == [False, True]
    dispatch.reset()
    assert not any(pool() for pool in world.driver.warm_pools)


def test_a_warm_up_that_raises_leaves_its_memory(simulated):
    world = simulated

    def failing(x):
        raise ValueError("of the test")

    f = world.function(failing, is_inference=False)
    g = world.function(lambda x: [x.sin()])
    with pytest.raises(ValueError, match="of the test"):
        f(world.randn(4))
    gc.collect()
    assert not world.driver.warming
    assert [pool() for pool in world.driver.warm_pools] == [None]  # who catches it and takes less has all memory
    for _ in range(3):
        dispatch.mark_step_begin()
        x = world.randn(4)
        same(world, g(x), [x.sin()])
    assert counters.stats()["recordings"] == 1


def test_gradients_stay_where_there_is_no_room_for_both(simulated, monkeypatch):
    world = simulated

    def no_room(storages, original=world.driver.copy_out):
        if world.driver.warming:
            raise torch.OutOfMemoryError("of the test")
        original(storages)

    monkeypatch.setattr(world.driver, "copy_out", no_room)
    f = torch.compile(lambda x, w: torch.tanh(x * w), backend=world.backend())
    w = world.randn(6, requires_grad=True)
    for _ in range(5):
        w.grad = None
        dispatch.mark_step_begin()
        x = world.randn(6)
        f(x, w).sum().backward()
        same(world, [w.grad], [((1 - torch.tanh(x * w) ** 2) * x).detach()])
        assert not world.driver.warming
    assert (counters.stats()["warmups"], counters.stats()["recordings"]) == (2, 2)


def test_a_backward_in_another_thread_warms_up_once(simulated):
    """The thread never runs a forward, so its backwards use the tree of no thread. All its calls are in a backward."""
    world = simulated
    f = torch.compile(lambda x, w: torch.tanh(x * w), backend=backend_with(world.driver))
    w = world.randn(6, requires_grad=True)
    for _ in range(8):
        w.grad = None
        x = world.randn(6)
        loss = f(x, w).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        same(world, [w.grad], [((1 - torch.tanh(x * w) ** 2) * x).detach()])
    counts = counters.stats()
    assert (counts["warmups"], counts["recordings"], counts["replays"], counts["skips"]) == (2, 2, 12, 0)


def test_a_saved_parameter_waits_for_no_backward(simulated):
    """Validation with gradients on: no backward comes, and the forward's saved tensors are dropped."""
    world = simulated
    f = torch.compile(lambda x, w: torch.tanh(x * w), backend=world.backend())
    w = world.randn(6, requires_grad=True)
    for _ in range(8):
        x = world.randn(6)
        same(world, [f(x, w)], [torch.tanh(x * w).detach()])
    assert (counters.stats()["warmups"], counters.stats()["replays"]) == (1, 6)


def test_what_comes_after_a_warm_up_in_its_step_is_not_recorded(simulated):
    """It would be recorded at a node where it never comes again. A function that comes again begins a step."""
    world = simulated
    f, g, h = (world.function(lambda x, k=k: [torch.sin(x * k)]) for k in (1, 2, 3))
    seen = []
    for path in ("fg", "fg", "hg", "hgf", "hgf"):
        for each in path:
            x = world.randn(4)
            k = "fgh".index(each)
            same(world, (f, g, h)[k](x), [torch.sin(x * (k + 1))])
        seen.append((counters.stats()["warmups"], counters.stats()["recordings"]))
    assert seen == [(2, 0), (2, 2), (4, 2), (4, 5), (4, 5)]


def test_nothing_is_recorded_in_a_warm_up(simulated):
    """A function that a warm-up calls may begin a step. Recorded there, it would use the memory of the warm-up."""
    world = simulated
    inner = world.function(lambda x: [x.cos()])

    def calling(x):
        dispatch.mark_step_begin()
        return [*inner(x), x.sin()]

    outer = world.function(calling, is_inference=False)
    x = world.randn(4)
    dispatch.mark_step_begin()
    inner(x)
    dispatch.mark_step_begin()
    same(world, outer(x), [x.cos(), x.sin()])
    assert (counters.stats()["warmups"], counters.stats()["recordings"]) == (3, 0)
    for _ in range(3):
        dispatch.mark_step_begin()
        same(world, inner(x), [x.cos()])
    assert counters.stats()["recordings"] == 1


@pytest.mark.gpu
def test_a_warm_up_in_a_pool_of_the_callers_own():
    """Also while another thread allocates from a pool: releasing a warm-up's memory must leave that pool alone."""
    dispatch.reset()
    world = World("cuda")
    f = torch.compile(lambda x, w: torch.tanh(x * w), backend=world.backend())
    w = world.randn(1 << 20, requires_grad=True)
    own = torch.cuda.MemPool()
    stop, inside = threading.Event(), threading.Event()

    def allocate():
        other = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(other):
            inside.set()
            stop.wait(60)

    thread = threading.Thread(target=allocate)
    thread.start()
    inside.wait(60)
    try:
        for step in range(6):
            w.grad = None
            dispatch.mark_step_begin()
            with torch.cuda.use_mem_pool(own) if step % 2 == 0 else contextlib.nullcontext():
                x = world.randn(1 << 20)
                f(x, w).sum().backward()
            same(world, [w.grad], [((1 - torch.tanh(x * w) ** 2) * x).detach()])
    finally:
        stop.set()
        thread.join()
    assert counters.stats()["recordings"] >= 2 and not counters.stats()["skips"]
    dispatch.reset()


@pytest.mark.gpu
def test_what_an_optimizer_keeps_pins_no_activations():
    """Its state is made after the first backward. None of that backward's memory stays reserved for it."""
    dispatch.reset()
    world = World("cuda")
    size = 1 << 23
    weights = [world.randn(size, requires_grad=True) for _ in range(4)]

    def step(f, state):
        x = world.randn(size)
        for w in weights:
            x = f(x, w)
        x.sum().backward()
        del x
        for w in weights:
            state.setdefault(w, torch.zeros_like(w)).add_(w.grad)
        for w in weights:
            w.grad = None

    def kept(f):
        """Bytes other than the state and pools when a recording could begin."""
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        state = {}
        dispatch.mark_step_begin()
        step(f, state)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - before - sum(s.nbytes for s in state.values())

    f = torch.compile(layer, backend=world.backend())
    assert kept(f) <= 8 << 20
    dispatch.mark_step_begin()
    step(f, {})
    expected = [w.detach().clone() for w in weights]
    assert counters.stats()["recordings"] == 8 and len(expected) == 4
    dispatch.reset()
