"""A hook that takes small numbers to zero still answers exactly what the backward only compares: ReLU's `x <= 0`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from steps import compiled
from torch import Tensor

from aot_hooks import KEEP, Hook, float8, int4, int8, last_plans, policies, saved_tensors_hooks, saved_tensors_policy

HOOKS = [int8(), int4(stochastic=False)]


def linear_layers(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """What ReLU gives is read twice: compared, for x and w, and multiplied, for v."""
    return (torch.relu(x @ w) @ v).sum()


def leaky_layers(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = torch.nn.functional.hardtanh(torch.nn.functional.leaky_relu(x @ w, 0.5), -1.0, 2.0)
    return (h @ v).sum()


def gradients(fn: Any, context: Any, dtype: torch.dtype = torch.float32, shape: Any = (64, 32)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*size, generator=generator).to(dtype) for size in (shape, (shape[-1], 128), (128, 8))]
    for leaf in leaves:
        leaf.requires_grad_()
    with context:
        loss = fn(*leaves)
    loss.backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def without_hooks(fn: Any, inner: str, **how: Any) -> list[Tensor]:
    torch._dynamo.reset()
    return gradients(compiled(fn, inner), torch.enable_grad(), **how)


def assert_compared_exactly(got: list[Tensor], exact: list[Tensor]) -> None:
    assert torch.equal(got[0], exact[0]) and torch.equal(got[1], exact[1])
    off = (got[2] - exact[2]).norm() / exact[2].norm()
    assert 0 < off < 0.2  # this one reads the rounded numbers


@pytest.mark.core
@pytest.mark.parametrize("hook", HOOKS, ids=repr)
@pytest.mark.parametrize(
    ("fn", "dtype", "shape"),
    [
        (linear_layers, torch.float32, (64, 32)),
        (linear_layers, torch.bfloat16, (4, 16, 32)),
        (leaky_layers, torch.float32, (4, 16, 32)),
    ],
)
def test_comparisons_keep_their_answers(fn: Any, hook: Hook, dtype: torch.dtype, shape: Any) -> None:
    exact = without_hooks(fn, "aten", dtype=dtype, shape=shape)
    torch._dynamo.reset()
    call = compiled(fn)
    got = gradients(call, saved_tensors_hooks(hook), dtype, shape)
    assert_compared_exactly(got, exact)
    (plan,) = last_plans(call)
    # of h: the numbers, with their scales, and the answers; the leaves are inputs
    numel = 64 * 128
    bits = 8 if hook.name.startswith("int8") else 4
    assert plan.saved_bytes >= numel * dtype.itemsize
    assert plan.packed_bytes <= numel * (bits + 4) / 8 + numel
    assert any("comparisons keep their answers" in d.reason for d in plan.decisions)


@pytest.mark.slow
def test_comparisons_keep_their_answers_with_inductor() -> None:
    exact = without_hooks(linear_layers, "inductor")
    torch._dynamo.reset()
    assert_compared_exactly(gradients(compiled(linear_layers, "inductor"), saved_tensors_hooks(HOOKS[-1])), exact)


def test_without_it_they_would_not() -> None:
    exact = without_hooks(linear_layers, "aten")
    torch._dynamo.reset()
    plain = dataclasses.replace(int8(), lossy=False)
    got = gradients(compiled(linear_layers), saved_tensors_hooks(plain))
    off = (got[0] - exact[0]).norm() / exact[0].norm()
    assert off > 0.03


def test_ways_to_ask_for_it() -> None:
    exact = without_hooks(linear_layers, "aten")
    hook = int8()
    pair = saved_tensors_hooks(hook.pack, hook.unpack)
    renamed = saved_tensors_hooks(hook, dataclasses.replace(hook, name="other"))
    policy = saved_tensors_policy(policies.larger_than(1024, hook))
    for context in (pair, renamed, policy):
        torch._dynamo.reset()
        assert_compared_exactly(gradients(compiled(linear_layers), context), exact)


def test_several_saved_views_of_one_storage() -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = torch.relu(x @ w)
        halves = h.view(-1, 2, 64)
        return (halves[:, 0].sin() + halves[:, 1].cos()).sum() + (h @ v).sum()

    exact = without_hooks(fn, "aten")
    torch._dynamo.reset()
    got = gradients(compiled(fn), saved_tensors_hooks(int8()))
    for g, e in zip(got, exact, strict=True):
        assert (g - e).norm() / e.norm() < 0.02  # sin and cos read rounded numbers, so nothing is exact


@pytest.mark.core
@pytest.mark.parametrize("scope", ["no_static", "all"])
@pytest.mark.parametrize("fn", [torch.minimum, lambda x, y: torch.maximum(x.t(), y[:, None])])
def test_inputs_that_the_backward_only_compares_stay(fn: Any, scope: str) -> None:
    x, y = torch.randn(16, 32, requires_grad=True), torch.randn(32, requires_grad=True)
    exact = torch.autograd.grad(fn(x, y).sum(), (x, y))
    call = compiled(fn)
    with saved_tensors_hooks(int8(), scope=scope):
        got = torch.autograd.grad(call(x, y).sum(), (x, y))
    assert all(map(torch.equal, got, exact))
    (plan,) = last_plans(call)
    inputs = [d for d in plan.decisions if d.saved.is_input]
    assert len(inputs) == 2 and all(d.hook is KEEP and d.packed_bytes == 0 for d in inputs)


class InFormat(torch.autograd.Function):
    """`h * k`, with `k` in a narrow format, which the backward reads."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, dtype: torch.dtype) -> Tensor:
        k = (h.abs() * 16).to(dtype)
        ctx.save_for_backward(k)
        return h * k.to(h.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * ctx.saved_tensors[0].to(grad.dtype), None


@pytest.mark.parametrize("hook", [float8(), int8(), int4(stochastic=False)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint8], ids=str)
def test_what_is_rounded_to_a_coarse_format_is_that_of_the_unrounded_number(dtype: torch.dtype, hook: Hook) -> None:
    """Rounded once more, a sixteenth becomes a quarter (e5m2) or a factor of two (e8m0)."""

    def layers(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (InFormat.apply(torch.nn.functional.gelu(x @ w), dtype) @ v.detach()).sum()  # type: ignore[no-untyped-call]

    def smooth(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (torch.nn.functional.gelu(x @ w) * 2 @ v.detach()).sum()

    def off(fn: Any) -> float:
        exact = without_hooks(fn, "aten")
        torch._dynamo.reset()
        found = gradients(compiled(fn, "aten"), saved_tensors_policy(hook))
        assert all(exact[i].norm() > 1 for i in range(2))
        return max(float((found[i] - exact[i]).norm() / exact[i].norm()) for i in range(2))

    assert off(layers) < 1.5 * off(smooth)
