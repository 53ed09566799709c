"""The derivative of softmax reads rounded probabilities divided by their sum: sharp ones bear rounding, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from oracle import total_error
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import aot_hooks
from aot_hooks import KEEP, float8, int8
from aot_hooks.graphs.probabilities import as_probabilities

ROWS, WIDTH, EXPERTS = 64, 64, 64
SHARP = 30.0  # the mean of the largest probabilities is then 0.95


def gradients(fn: Callable[..., Tensor], logits: Tensor, weights: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(fn(logits, weights), [logits]))


def scores(h: Tensor, w: Tensor) -> Tensor:
    """A loss of probabilities: only softmax's derivative reads a tensor that a hook takes."""
    return (torch.softmax(h * 1.0, -1) * w).sum()


def of_heads(h: Tensor, w: Tensor) -> Tensor:
    """As attention has it: probabilities of two heads, read by their product with the values as well."""
    p = torch.softmax((h * 1.0).view(2, ROWS // 2, EXPERTS), -1)
    return (torch.bmm(p, w.view(2, EXPERTS, ROWS // 2)) * w[: ROWS // 2, : ROWS // 2]).sum()


def of_masked_scores(h: Tensor, w: Tensor) -> Tensor:
    """The softmax of torch's own attention by single operators; a row without scores has zeros, no sum of one."""
    masked = torch.arange(ROWS)[:, None] == 3
    return (torch.ops.aten._safe_softmax((h * 1.0).masked_fill(masked, -torch.inf), -1) * w).sum()


def of_attention(h: Tensor, w: Tensor) -> Tensor:
    """Attention that torch makes of single operators. Queries times keys are the scores, so these are sharp as well."""
    q, eye, v = (t.view(1, 2, ROWS // 2, EXPERTS) for t in (h * 8**0.5, torch.eye(EXPERTS).to(h.dtype), w))
    with sdpa_kernel(SDPBackend.MATH):
        return (F.scaled_dot_product_attention(q, eye, v) * w.view(v.shape)).sum()


def of_columns(h: Tensor, w: Tensor) -> Tensor:
    return (torch.softmax(h * 1.0, 0) * w).sum()


def data(scale: float = SHARP, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits, weights = (torch.randn(ROWS, EXPERTS, generator=generator) for _ in range(2))
    return (logits * scale).to(dtype).requires_grad_(), weights.to(dtype)


@pytest.mark.parametrize("fn", [scores, of_heads, of_columns, of_masked_scores, of_attention])
def test_gradients_through_sharp_probabilities(fn: Callable[..., Tensor]) -> None:
    args = data()
    exact = gradients(fn, *args)
    of_int8 = 0.03 if fn is of_attention else 0.02  # values are rounded, too
    for hook, bound in ((float8(), 0.03), (int8(), of_int8)):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="aot_hooks", options={"inner": "aten", "policy": hook})
        found = total_error(gradients(compiled, *args), exact)
        packed = {d.saved.op for plan in aot_hooks.last_plans(compiled) for d in plan.decisions if d.hook is not KEEP}
        with aot_hooks.saved_tensors_policy(hook):
            eager = total_error(gradients(fn, *args), exact)

        assert packed & {"aten._softmax.default", "aten._safe_softmax.default"}
        assert 0 < found <= bound
        assert eager <= bound


@pytest.mark.parametrize("hook", [float8(), int8()], ids=str)
def test_probabilities_by_which_a_router_chooses_stay(hook: aot_hooks.Hook) -> None:
    """They are few, and int8 would round the small ones to zero, of which a sure router's gradient is made."""

    def route(h: Tensor, w: Tensor) -> Tensor:
        score, expert = torch.softmax(h * 1.0, -1).topk(2)
        return ((score / score.sum(-1, keepdim=True)) * w.gather(1, expert)).sum()

    args = data()
    compiled = torch.compile(route, backend="aot_hooks", options={"inner": "aten", "policy": hook})
    assert total_error(gradients(compiled, *args), gradients(route, *args)) <= 0.005
    decisions = [d for plan in aot_hooks.last_plans(compiled) for d in plan.decisions]
    assert [d.hook for d in decisions if d.saved.op == "aten._softmax.default"] == [KEEP]


def test_a_hook_that_is_not_lossy_gives_what_it_gives() -> None:
    """A user's functions are applied as asked."""
    args = data()
    half = aot_hooks.Hook("half", lambda x: x * 0.5, lambda p: p)
    compiled = torch.compile(scores, backend="aot_hooks", options={"inner": "aten", "policy": half})

    y = torch.softmax(args[0].detach(), -1) * 0.5
    expected = y * (args[1] - (y * args[1]).sum(-1, keepdim=True))
    assert torch.allclose(gradients(compiled, *args)[0], expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_probabilities_add_up_to_one(dtype: torch.dtype) -> None:
    y = torch.softmax(data(1.0, dtype)[0], -1) * torch.linspace(0.9, 1.1, ROWS, dtype=dtype)[:, None]
    made = as_probabilities(y, -1)

    assert made.dtype is dtype
    assert (made.double().sum(-1) - 1).abs().max() <= 2 * torch.finfo(dtype).eps * 2


@pytest.mark.parametrize(
    "view", [lambda p: p[:, :, 0], lambda p: p.diagonal(dim1=1, dim2=2)], ids=["column", "diagonal"]
)
def test_other_views_of_probabilities_are_not_divided(view: Callable[[Tensor], Tensor]) -> None:
    """A column and the diagonal of a square matrix have as many numbers as a row, but another sum."""

    def fn(h: Tensor, w: Tensor) -> Tensor:
        return (view(torch.softmax(h * 3.0, -1)) * w).sum()

    make = torch.Generator().manual_seed(0)
    h, w = torch.randn(4, WIDTH, WIDTH, generator=make), torch.randn(4, WIDTH, generator=make).requires_grad_()
    compiled = torch.compile(fn, backend="aot_hooks", options={"inner": "aten", "policy": float8()})
    (exact,), (found,) = (torch.autograd.grad(run(h, w), [w]) for run in (fn, compiled))
    assert any(d.hook == float8() for plan in aot_hooks.last_plans(compiled) for d in plan.decisions)
    assert 0 < total_error([found], [exact]) <= 0.04


def test_probabilities_that_are_rounded_to_zeros_stay_zeros() -> None:
    """They have no sum to be divided by."""
    sparse = aot_hooks.Hook("sparse", lambda x: torch.where(x.abs() > 0.05, x, 0), lambda p: p, lossy=True)
    args = data(0.01)
    assert torch.softmax(args[0].detach(), -1).max() < 0.05
    compiled = torch.compile(scores, backend="aot_hooks", options={"inner": "aten", "policy": sparse})
    assert torch.equal(gradients(compiled, *args)[0], torch.zeros(ROWS, EXPERTS))
    with aot_hooks.saved_tensors_policy(sparse):
        assert torch.isfinite(gradients(scores, *args)[0]).all()


@pytest.mark.slow
def test_exponentials_become_probabilities_with_inductor() -> None:
    """There the forward may save the exponentials, and the backward divides them by their sum."""
    args = data()
    compiled = torch.compile(lambda h, w: scores(F.silu(h) * 2, w), backend="aot_hooks", options={"policy": float8()})
    exact = gradients(lambda h, w: scores(F.silu(h) * 2, w), *args)
    assert total_error(gradients(compiled, *args), exact) <= 0.03
