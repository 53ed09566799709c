"""Inputs that a graph writes to after it has read them: gradients are those of what was read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from steps import BITS

import aot_hooks
from aot_hooks import KEEP, last_plans, saved_tensors_hooks

Tensor = torch.Tensor


def also_inductor(first: Any, *others: Any) -> list[Any]:
    """Each program with operators one by one, one with Inductor: the copy is made before either gets the graph."""
    aten = [
        pytest.param(program, "aten", each, marks=pytest.mark.core) for program in PROGRAMS for each in (first, *others)
    ]
    return [*aten, pytest.param("twice", "inductor", first, marks=pytest.mark.slow)]


def running_mean(x: Tensor, state: Tensor, w: Tensor) -> Any:
    out = (x - state) * w
    state.lerp_(x.detach().mean(0), 0.1)
    return out, state


def part_of_it(x: Tensor, state: Tensor, w: Tensor) -> Any:
    out = (x - state[2:]) * w[2:] if x.shape[1] == 6 else (x - state) * w
    state[2:4].mul_(3)
    return out, None


def through_a_view(x: Tensor, state: Tensor, w: Tensor) -> Any:
    seen = state.view(2, 4).t()
    out = (x.view(-1, 2, 4).transpose(1, 2) - seen) * w.view(4, 2)
    state.data.mul_(2)
    return out, None


def twice(x: Tensor, state: Tensor, w: Tensor) -> Any:
    out = (x - state) * w
    state.add_(1)
    out = out + (x * 2 - state).sin() * w
    torch._foreach_mul_([state], 2)
    return out, state


PROGRAMS = {f.__name__: f for f in (running_mean, part_of_it, through_a_view, twice)}


def train(
    fn: Callable[..., Any],
    needs_grad: bool = False,
    context: Any = contextlib.nullcontext,
    batches: tuple[int, ...] = (5, 7),
) -> list[Any]:
    """All forwards, then their backwards: gradients of the input, the weight and the state, and the state."""
    torch.manual_seed(1)
    first = torch.randn(8, requires_grad=needs_grad)
    state, w = first * 1 if needs_grad else first, torch.randn(8, requires_grad=True)
    xs = [torch.randn(n, 8, requires_grad=True) for n in batches]
    total = torch.zeros(())
    for x in xs:
        with context():
            out, _ = fn(x, state, w)
        total = total + out.square().sum()
    (total + state.sum() if needs_grad else total).backward()
    return [*(x.grad for x in xs), w.grad, first.grad, state.detach().clone()]


def assert_same(got: list[Any], expected: list[Any]) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("program", "inner", "needs_grad"), also_inductor(False, True))
def test_without_hooks(program: str, inner: str, needs_grad: bool) -> None:
    expected = train(PROGRAMS[program], needs_grad)
    call = torch.compile(PROGRAMS[program], backend="aot_hooks", options={"inner": inner})
    assert_same(train(call, needs_grad), expected)
    assert last_plans(call) == ()


@pytest.mark.parametrize(("program", "inner", "scope"), also_inductor("donated", "no_static", "all"))
def test_with_hooks(program: str, inner: str, scope: str) -> None:
    expected = train(PROGRAMS[program])
    call = torch.compile(PROGRAMS[program], backend="aot_hooks", options={"inner": inner}, dynamic=True)
    assert_same(train(call, context=lambda: saved_tensors_hooks(BITS, scope=scope)), expected)
    rows = [d for plan in last_plans(call) for d in plan.decisions]
    kept = [d for d in rows if "as it was before the graph" in d.reason]
    assert kept and all(d.hook is KEEP and d.saved_bytes == d.packed_bytes > 0 for d in kept)


@pytest.mark.parametrize("policy", [aot_hooks.float8(), aot_hooks.lossless()], ids=str)
@pytest.mark.core
def test_with_a_policy(policy: Any) -> None:
    expected = train(running_mean)
    call = torch.compile(running_mean, backend="aot_hooks", options={"inner": "aten", "policy": policy})
    assert_same(train(call), expected)


@pytest.mark.core
def test_torch_alone_is_wrong_there() -> None:
    """That the tests above can fail; if this one does, torch has mended it."""
    got = train(torch.compile(running_mean, backend="aot_eager"), batches=(16,))[1]
    expected = train(running_mean, batches=(16,))[1]
    assert (got - expected).norm() / expected.norm() > 0.01


@pytest.mark.slow
def test_a_partitioner_of_the_users_own_stays() -> None:
    from torch._functorch.partitioners import default_partition
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    ran = []

    class Own(CustomPartitionerFn):  # type: ignore[misc]
        def __call__(self, gm: Any, joint_inputs: Any, compiler: Any = None, **kwargs: Any) -> Any:
            ran.append(gm)
            return default_partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> str:
            return "own"

    call = torch.compile(running_mean, backend="aot_hooks", options={"inductor": {"custom_partitioner_fn": Own()}})
    with torch._inductor.config.patch(force_disable_caches=True):
        train(call)
    assert ran
