"""Replays that are called without AOTAutograd's runtime around them, where that would do nothing."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
from places import backend_with

import cudagraph
from cudagraph import backend, counters
from cudagraph.tree import dispatch
from cudagraph.tree.function import Function
from cudagraph.tree.node import PROBED_CALLS

W = torch.randn(4, 4)
CALLS = PROBED_CALLS + 6
INNER = {"simulator": ("aten",), "cuda": ("aten", "inductor")}


@pytest.fixture
def runtimes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """For each compiled graph: how often AOTAutograd's runtime was called, and whether only it ever is."""
    made: list[Any] = []
    shortcut = backend.shortcut

    def counted(compiled: Any, captured: Any, inputs: Any) -> Any:
        entry = {"calls": 0}

        def runtime(*arguments: Any) -> Any:
            entry["calls"] += 1
            return compiled(*arguments)

        short = shortcut(runtime, captured, inputs)
        entry["always"] = short is runtime
        made.append(entry)
        return short

    monkeypatch.setattr(backend, "shortcut", counted)
    return made


def compiled(world: Any, fn: Any, inner: str = "aten") -> Any:
    return torch.compile(fn, backend=backend_with(world.driver, {"inner": inner}), fullgraph=True)


def test_replays_of_inference_graphs_pass_the_runtime_by(world, runtimes):
    w = W.to(world.device)
    for inner in INNER[world.kind]:
        f = compiled(world, lambda x: (torch.tanh(x @ w), (y := x + 1), y.t()), inner)
        with torch.no_grad():
            for _ in range(CALLS):
                dispatch.mark_step_begin()
                x = world.randn(4, 4)
                a, b, c = f(x)
                got = world.read(a), world.read(b), world.read(c)
                torch.testing.assert_close(got, (torch.tanh(x @ w), x + 1, (x + 1).t()), rtol=1e-4, atol=1e-4)
                assert b.untyped_storage().data_ptr() == c.untyped_storage().data_ptr()
                del a, b, c
        assert runtimes.pop() == {"calls": 2, "always": False}, "for the warm-up and the recording"


def test_numbers_and_sizes_among_the_inputs(world, runtimes):
    f = torch.compile(lambda x, n: x * n, backend=backend_with(world.driver), dynamic=True)
    for step in range(12):
        dispatch.mark_step_begin()
        x, n = world.randn(3 + step % 2, 4), 2 + step % 3
        torch.testing.assert_close(world.read(f(x, n)), x * n)


def test_gradients_that_are_on_are_not_recorded(world, runtimes):
    x = world.randn(4, 4)
    f = compiled(world, lambda x: x * 2)
    for _ in range(CALLS):
        dispatch.mark_step_begin()
        y = f(x.normal_())
        assert not y.requires_grad and y.is_leaf
        torch.testing.assert_close(world.read(y), x * 2)
        del y
    assert counters.stats()["recordings"] == 2
    assert runtimes == [{"calls": 2, "always": False}]


@pytest.mark.parametrize("refused", [False, True], ids=["read in place", "refused"])
def test_autocast_is_off(world, runtimes, refused, monkeypatch):
    """Autograd and autocast are off also where the runtime that turns them off is not called."""
    if refused:
        monkeypatch.setattr(Function, "reason_against", lambda *_: "it is not to be")
    x, w = world.randn(4, 4), W.to(world.device)

    def fn(x):
        with torch.autocast(world.device.type, enabled=False):
            return x @ w

    f = compiled(world, fn)
    with torch.no_grad(), torch.autocast(world.device.type, dtype=torch.bfloat16):
        for _ in range(CALLS):
            dispatch.mark_step_begin()
            y = f(x.normal_())
            torch.testing.assert_close(world.read(y), fn(x))
            del y
    assert counters.stats()["recordings"] == (0 if refused else 2)
    assert runtimes == [{"calls": 2, "always": False}]


def writes(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


@pytest.mark.parametrize("fn", [writes, lambda x: x.t()], ids=["an input is written to", "an output is a view of it"])
def test_a_runtime_that_does_more_is_called(world, runtimes, fn):
    f = compiled(world, fn)
    with torch.no_grad():
        for _ in range(5):
            dispatch.mark_step_begin()
            x = world.randn(4, 4)
            other = x.clone()
            got, expected = f(x), fn(other)
            torch.testing.assert_close(world.read(got), expected)
            torch.testing.assert_close(x, other)
            del got
    assert runtimes == [{"calls": 5, "always": True}]


def test_so_is_that_of_training(world, runtimes):
    w = W.to(world.device, copy=True).requires_grad_()
    f = compiled(world, lambda x: x @ w)
    for _ in range(4):
        dispatch.mark_step_begin()
        x = world.randn(4, 4)
        w.grad = None
        f(x).sum().backward()
        torch.testing.assert_close(world.read(w.grad), x.t() @ torch.ones(4, 4, device=world.device))
    assert runtimes == [{"calls": 4, "always": True}]


@pytest.mark.slow
@pytest.mark.parametrize("always", [False, True], ids=["it does nothing", "an output is a view of an input"])
def test_a_warm_start_passes_it_by_where_the_cold_one_did(world, runtimes, always):
    """Nothing is left of the first start but torch's cache."""
    w = W.to(world.device)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(x @ w), x.t() if always else x + 1

    seen: list[Any] = []
    counters = torch._dynamo.utils.counters["aot_autograd"]
    counters.clear()
    ours = {"fallback_by_default": world.kind == "simulator"}  # calls of aten, which the simulator can capture
    with torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex), torch._inductor.config.patch(ours):
        for hits in range(3):
            torch._dynamo.reset()
            cudagraph.reset()
            call = compiled(world, f, "inductor")
            with torch.no_grad():
                torch.manual_seed(0)
                for _ in range(CALLS):
                    dispatch.mark_step_begin()
                    x = world.randn(4, 4)
                    got = call(x)
                    torch.testing.assert_close(tuple(map(world.read, got)), f(x), rtol=1e-4, atol=1e-4)
                    del got
            seen.append((cudagraph.stats(), runtimes.pop()))
            assert counters["autograd_cache_hit"] == hits
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][1]["always"] == always and (seen[0][1]["calls"] == CALLS) == always
    assert seen[0][0]["replays"] > 0
