"""Functions that run without a graph: limits, the caller's own memory, failed captures."""

from __future__ import annotations

import logging

import pytest
import torch
from tree_programs import World, same, steps

from cudagraph import counters
from cudagraph.errors import NotCapturableError, OptionError
from cudagraph.options import Options
from cudagraph.torch_private import cuda as torch_cuda
from cudagraph.tree import dispatch
from cudagraph.tree.driver import CaptureDriver


def test_too_many_addresses(world, caplog):
    f = world.function(lambda x, w: [x @ w], static=(1,), options={"rerecord_limit": 2})
    weights = [world.randn(4, 4) for _ in range(5)]
    with caplog.at_level(logging.WARNING, logger="cudagraph"):
        for i in [0, 0, 1, 2, 3, 4, 3, 0, 1, 2]:
            dispatch.mark_step_begin()
            x = world.randn(3, 4)
            same(world, f(x, weights[i]), [x @ weights[i]])
    counts = counters.stats()
    assert (counts["recordings"], counts["replays"], counts["skips"]) == (3, 3, 3)
    assert len([r for r in caplog.records if "rerecord_limit" in r.getMessage()]) == 1


def test_sizes(world, caplog):
    f = world.function(lambda x, n: [x.sum() + n, n], options={"size_limit": 3})
    with caplog.at_level(logging.WARNING, logger="cudagraph"):
        for n in [2, 2, 3, 2, 4, 5, 6, 3, 4]:
            dispatch.mark_step_begin()
            x = world.randn(n)
            same(world, f(x, n), [x.sum() + n, n])
    counts = counters.stats()
    assert (counts["recordings"], counts["skips"]) == (3, 2)
    assert len([r for r in caplog.records if "size_limit" in r.getMessage()]) == 1


@pytest.mark.parametrize("why", ["what it does", "an input"])
def test_sizes_of_what_is_refused(world, caplog, why):
    """They take no memory each, and are not logged one by one."""
    fns = {
        "what it does": lambda x, n: [x * n if x.sum().item() > 0 else x],
        "an input": lambda x, n: [x.add_(n)],
    }
    f = world.function(
        fns[why], mutated=(0,) if why == "an input" else (), options={"size_limit": 5}, name="the refused"
    )
    with caplog.at_level(logging.WARNING, logger="cudagraph"):
        for n in range(1, 40):
            dispatch.mark_step_begin()
            x = world.randn(n) + 3
            expected = fns[why](x.clone(), n)[0]
            same(world, f(x, n), [expected])
    (mine,) = [t for t in dispatch.local.trees.values() if t.driver is world.driver]
    nodes = [mine.root, *mine.root.recordings()]
    assert sum(len(node.refusals) for node in nodes) <= 5 and sum(len(node.edges) for node in nodes) <= 5
    assert 1 <= len([r for r in caplog.records if "the refused" in r.getMessage()]) <= 2  # and the limit


def test_or_error(world):
    f = world.function(lambda x: [x.add_(1)], mutated=(0,), options={"or_error": True}, name="the writer")
    f(world.randn(3))
    dispatch.mark_step_begin()
    with pytest.raises(NotCapturableError, match=r"the writer can't run as a CUDA graph.*mutates input 0"):
        f(world.randn(3))


def tree_is_capturing(world):
    if world.kind == "cuda":
        return torch.cuda.is_current_stream_capturing()
    return any(pool.tape is not None for pool in world.driver.pools)


@pytest.mark.core
@pytest.mark.parametrize("in_capture_alone", [True, False])
def test_an_error_in_a_capture_leaves_nothing_behind(world, in_capture_alone):
    """An error is the program's only if the uncaptured run raises it, too."""
    trouble = [None]

    def fn(x):
        y = x * 2
        if trouble[0] is not None and (tree_is_capturing(world) or not in_capture_alone):
            raise trouble[0]
        return [y + torch.rand_like(y) * 0]

    f = world.function(fn)
    before = world.function(lambda x: [x + 1])
    for error in (None, ValueError("mine"), MemoryError("none left"), None, None):
        dispatch.mark_step_begin()
        trouble[0] = error
        x = world.randn(4)
        (h,) = before(x)
        if error is None or in_capture_alone:
            same(world, f(h), [(x + 1) * 2])
        else:
            with pytest.raises(type(error), match=str(error)):
                f(h)
        same(world, [h], [x + 1])
    counts = counters.stats()
    assert (counts["recordings"], counts["skips"]) == (2, 2)
    # and random numbers go on as in eager
    torch.manual_seed(0)
    a = torch.rand(3, device=world.device)
    torch.manual_seed(0)
    assert torch.equal(a, torch.rand(3, device=world.device))


def test_an_error_in_every_capture_is_told_once(world, caplog):
    """After a few tries nothing is captured any more."""

    def fn(x):
        if tree_is_capturing(world):
            raise MemoryError("none left")
        return [x.sin()]

    f = world.function(fn, name="the greedy")
    with caplog.at_level(logging.WARNING, logger="cudagraph"):
        steps(world, f, lambda x: [x.sin()], lambda: (world.randn(4),), count=9)
    assert counters.stats()["skips"] == 8 and counters.stats()["recordings"] == 0
    told = [r.getMessage() for r in caplog.records if "the greedy" in r.getMessage()]
    assert len(told) == 1 and "capturing it raised MemoryError: none left" in told[0]


def test_an_error_in_a_replay_is_raised_at_once(world):
    f = world.function(lambda x: [x.sin()])
    steps(world, f, lambda x: [x.sin()], lambda: (world.randn(4),))
    (mine,) = [t for t in dispatch.local.trees.values() if t.driver is world.driver]
    (node,) = mine.root.recordings()
    launch, calls = node.launch, []

    def failing():
        calls.append(1)
        raise RuntimeError("of the test")

    node.launch = failing
    dispatch.mark_step_begin()
    with pytest.raises(RuntimeError, match="of the test"):
        f(world.randn(4))
    assert len(calls) == 1
    node.launch = launch
    steps(world, f, lambda x: [x.sin()], lambda: (world.randn(4),))
    assert counters.stats()["recordings"] == 1


@pytest.mark.parametrize("marked", [False, True])
def test_no_room_for_what_is_held_leaves_the_step_to_be_ended(world, marked, monkeypatch):
    """The call after the one that raised ends the step, with the copies, and replays."""
    if not torch_cuda.can_swap():
        pytest.skip("this torch can't point a storage elsewhere twice")
    f = world.function(lambda x: [x.sin()], options={"held_outputs": "copy"})
    kept = []
    for step in range(6):
        if marked:
            dispatch.mark_step_begin()
        x = world.randn(4)
        if step == 3:
            with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError, match="of the test"):
                patched.setattr(type(world.driver), "copy_out", no_room)
                f(x)
        kept.append((f(x)[0], x.sin()))
        same(world, [ours for ours, _ in kept], [eager for _, eager in kept])
    assert (counters.stats()["warmups"], counters.stats()["recordings"], counters.stats()["held_outputs"]) == (1, 1, 4)


def no_room(self, storages):
    raise torch.OutOfMemoryError("of the test")


@pytest.mark.gpu
def test_out_of_memory_in_a_capture():
    dispatch.reset()
    world = World("cuda")
    free, _ = torch.cuda.mem_get_info()
    huge = [False]

    def fn(x):
        y = x.repeat(free // 2) if huge[0] and torch.cuda.is_current_stream_capturing() else x
        return [y[:4] + torch.rand_like(x) * 0]

    f = world.function(fn)
    g = world.function(lambda x: [x * 2])
    x = world.randn(4)
    f(x), g(x)
    for _ in range(2):
        huge[0] = True
        dispatch.mark_step_begin()
        (h,) = g(x)
        same(world, f(h), [x * 2])  # as it is, there is room
        same(world, [h], [x * 2])
    huge[0] = False
    torch.cuda.empty_cache()
    for _ in range(3):
        dispatch.mark_step_begin()
        same(world, f(g(x)[0]), [x * 2])
    assert counters.stats()["recordings"] == 2 and counters.stats()["skips"] == 2
    assert torch.cuda.memory_reserved() < free // 4
    dispatch.reset()


@pytest.mark.core
@pytest.mark.parametrize("how", ["asks", "leaks"])
def test_a_failed_capture_takes_nothing_away_from_its_step(world, how):
    """Outputs of the step stay valid, a pending backward has its saved tensors, and recording stops after a while."""
    leaked = []

    def fails(x):
        if how == "asks":
            return [x * 2 if x.sum().item() > -1e9 else x]
        leaked.append(x * 3)
        return [x * 2]

    before = world.function(lambda x: [x.sin()])
    middle = world.function(fails)
    after = world.function(lambda x: [x + 1])
    layer = torch.compile(lambda x, w: torch.tanh(x * w), backend=world.backend())
    w = world.randn(6, requires_grad=True)
    for step in range(8):
        dispatch.mark_step_begin()
        w.grad = None
        x = world.randn(6)
        (a,) = before(x)
        y = layer(x, w)
        (c,) = middle(a)
        same(world, after(c), [x.sin() * 2 + 1])
        same(world, [a, c], [x.sin(), x.sin() * 2])
        y.sum().backward()
        same(world, [w.grad], [((1 - torch.tanh(x * w) ** 2) * x).detach()])
        del a, c, y
        if step == 4:
            settled = counters.stats()
    counts = counters.stats()
    assert counts["warmups"] == settled["warmups"] and counts["recordings"] == settled["recordings"]
    assert counts["replays"] > settled["replays"]


def test_a_step_that_never_ends_stops_recording(world):
    """The first function's output is held all the time, and the second one is called again and again."""
    f = world.function(lambda x: [x.sin()])
    g = world.function(lambda x: [x.cos()])
    for _ in range(2):
        x = world.randn(4)
        (first,) = f(x)
        g(x)
    for _ in range(80):
        y = world.randn(4)
        same(world, g(y), [y.cos()])
    same(world, [first], [x.sin()])
    counts = counters.stats()
    assert counts["recordings"] < 30 and counts["skips"] > 40


def test_an_allocator_that_restores_nothing(caplog):
    """Known before a capture, so nothing is captured."""
    dispatch.reset()
    world = World("simulator")
    world.driver.refusal = "memory comes from another allocator"
    f = torch.compile(lambda x, w: torch.tanh(x * w), backend=world.backend())
    w = world.randn(6, requires_grad=True)
    with caplog.at_level(logging.WARNING, logger="cudagraph"):
        for _ in range(4):
            w.grad = None
            x = world.randn(6)
            f(x, w).sum().backward()
            same(world, [w.grad], [((1 - torch.tanh(x * w) ** 2) * x).detach()])
    counts = counters.stats()
    assert (counts["warmups"], counts["recordings"], counts["skips"]) == (0, 0, 8)
    assert not world.driver.pools and not world.driver.warm_pools
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 2 and all("memory comes from another allocator" in text for text in told)  # one a graph
    strict = world.function(lambda x: [x.sin()], options={"or_error": True})
    with pytest.raises(NotCapturableError, match="another allocator"):
        strict(world.randn(3))


@pytest.mark.parametrize(
    ("allocator", "captures"), [("native", True), ("cudaMallocAsync", False), ("pluggable", False)]
)
def test_which_allocators_can_be_captured_with(allocator, captures, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: allocator)
    reason = CaptureDriver().why_not()
    assert reason is None if captures else repr(allocator) in reason and "PYTORCH_CUDA_ALLOC_CONF" in reason


@pytest.mark.core
def test_options():
    assert Options.parse({}) == Options()
    for wrong in (
        {"no": 1},
        {"inner": "x"},
        {"or_error": 1},
        {"held_outputs": "x"},
        {"warmup_steps": 0},
        {"size_limit": 1.5},
    ):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            Options.parse(wrong)


@pytest.mark.core
@pytest.mark.parametrize("variable", ["CUDAGRAPH_OR_ERROR", "TORCHINDUCTOR_CUDAGRAPH_OR_ERROR"])
def test_or_error_from_the_environment(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert Options.parse().or_error
    assert not Options.parse({"or_error": False}).or_error
    monkeypatch.setenv(variable, "0")
    assert not Options.parse().or_error
