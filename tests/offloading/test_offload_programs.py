"""Offload with what programs do: policies, regions, breaks, checkpoints, threads, errors in mid-step."""

from __future__ import annotations

import gc
import math
import threading
from typing import Any

import pytest
import torch
from offloading import ALL, copies, sent, stack  # noqa: F401
from steps import ATEN, assert_same, compiled, step, with_backward
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks import policies


def test_policies_choose() -> None:
    model, x = stack(4), torch.randn(8, 16, requires_grad=True)
    fn = compiled(model)
    with aot_hooks.saved_tensors_policy(policies.only_these_modules({"1.*": ALL, "2.*": aot_hooks.int8(16)})):
        out = fn(x)
    out.sum().backward()
    (plan,) = aot_hooks.last_plans(fn)
    assert {d.saved.module_path.split(".")[0] for d in plan.decisions if d.hook.name == "offload"} == {"1"}
    assert {d.saved.module_path.split(".")[0] for d in plan.decisions if "int8" in d.hook.name} == {"2"}


def test_a_region_inside_a_compiled_function() -> None:
    model, x = stack(4), torch.randn(8, 16, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        x = model[1](model[0](x))
        with aot_hooks.saved_tensors_hooks(ALL):
            x = model[2](x)
        return model[3](x)

    fn = compiled(f, fullgraph=True)
    assert_same(step(fn, x), step(f, x), exactly=False)
    (plan,) = aot_hooks.last_plans(fn)
    assert 0 < sum(t.placement.offloaded for t in plan.transfers) < len(plan.decisions)


def test_a_graph_break_offloads_on_both_sides_and_between() -> None:
    model, x = stack(3), torch.randn(8, 16, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        x = model[0](x)
        torch._dynamo.graph_break()
        return model[2](model[1](x))

    fn = compiled(f)
    assert_same(step(fn, x, hook=ALL), step(f, x), exactly=False)
    assert len(aot_hooks.last_plans(fn)) == 2
    stats = aot_hooks.offload_stats()
    assert stats["sent_count"] == stats["fetched_count"] > 0


def test_checkpointed_blocks_save_their_inputs_on_the_host() -> None:
    model, x = stack(3), torch.randn(8, 16, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = checkpoint(block, x * 1.5, use_reentrant=False)
        return x

    expected = step(compiled(f), x)
    torch._dynamo.reset()
    assert_same(step(compiled(f), x, hook=ALL), expected)
    assert sent() > 0
    assert_same(step(f, x, hook=ALL), step(f, x))


def test_two_forwards_in_flight_and_their_backwards_in_any_order() -> None:
    model = stack(3)
    inputs = [torch.randn(8, 16) for _ in range(3)]
    fn = compiled(model)

    def grads(f: Any, order: list[int], hook: Any) -> list[torch.Tensor]:
        losses = []
        for x in inputs:
            with aot_hooks.saved_tensors_hooks(hook):
                losses.append(f(x).square().sum())
        for i in order:
            losses[i].backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return found

    same = aot_hooks.Hook("same", lambda x: (x,), lambda p: p[0])
    for order in ([0, 1, 2], [2, 0, 1]):
        assert_same(grads(fn, order, ALL), grads(compiled(lambda x: model(x)), order, same))


def test_retain_graph_fetches_again() -> None:
    model, x = stack(2), torch.randn(8, 16, requires_grad=True)
    fn = compiled(model)
    with aot_hooks.saved_tensors_hooks(ALL):
        loss = fn(x).square().sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    loss.backward()
    assert_same(x.grad, first)
    assert aot_hooks.offload_stats()["fetched_count"] == 2 * sent()


def test_an_exception_in_mid_step_leaves_nothing_behind() -> None:
    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("in mid-step")

    model, x = stack(3), torch.randn(8, 16, requires_grad=True)
    fn = [compiled(block) for block in model]
    expected = step(lambda x: fn[2](fn[1](fn[0](x))), x)
    with aot_hooks.saved_tensors_hooks(ALL):
        y = fn[2](with_backward(fail)(fn[1](fn[0](x))))
    with pytest.raises(ValueError, match="in mid-step"):
        y.sum().backward()
    del y
    gc.collect()
    assert aot_hooks.offload_stats()["host_leased_bytes"] == 0
    x.grad = None
    model.zero_grad(set_to_none=True)
    assert_same(step(lambda x: fn[2](fn[1](fn[0](x))), x, hook=ALL), expected)


def test_a_forward_whose_backward_never_runs_gives_its_host_memory_back() -> None:
    model, x = stack(2), torch.randn(8, 16, requires_grad=True)
    fn = compiled(model)
    for _ in range(3):
        with aot_hooks.saved_tensors_hooks(ALL):
            y = fn(x)
        assert aot_hooks.offload_stats()["host_leased_bytes"] > 0
        del y
        assert aot_hooks.offload_stats()["host_leased_bytes"] == 0
    assert aot_hooks.offload_stats()["host_blocks_made"] <= sent() // 3


def test_backward_in_another_thread() -> None:
    model, x = stack(2), torch.randn(8, 16, requires_grad=True)
    expected = step(compiled(model), x)[1]
    torch._dynamo.reset()
    fn = compiled(model)
    step(fn, x, hook=ALL)  # compiled in this thread
    for f in (fn, model):
        leaf = x.detach().clone().requires_grad_()
        with aot_hooks.saved_tensors_hooks(ALL):
            y = f(leaf)
        weights = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).view(y.shape)
        loss = (y.double() * weights).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert_same(leaf.grad, expected[0], exactly=f is fn)
        model.zero_grad(set_to_none=True)


def test_a_setting_made_anew_is_the_same_and_another_number_recompiles() -> None:
    model, x = stack(2), torch.randn(8, 16, requires_grad=True)
    fn = compiled(model)
    for _ in range(3):
        step(fn, x, hook=aot_hooks.offload(0, max_stall_ms=math.inf))
    assert len(aot_hooks.last_plans(fn)) == 1
    step(fn, x, hook=aot_hooks.offload(1000, max_stall_ms=math.inf))
    assert len(aot_hooks.last_plans(fn)) == 2


def test_the_options_of_torch_compile() -> None:
    model, x = stack(2), torch.randn(8, 16, requires_grad=True)
    fn = torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": ALL})
    assert_same(step(fn, x), step(model, x), exactly=False)
    assert sent() > 0
