"""Operators that decide and multiply at once, as two: the same bits with an exact hook, and packed by a lossy one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aot_hooks


def loss(x: torch.Tensor, w: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    h = F.prelu(x @ w, slope)
    return (h * torch.cos(torch.arange(h.numel())).view_as(h).to(h.dtype)).sum()


@pytest.mark.core
@pytest.mark.parametrize(("dtype", "slopes"), [(torch.float32, 1), (torch.bfloat16, 64)])
def test_prelu_keeps_its_signs_as_bits_and_is_packed(dtype: torch.dtype, slopes: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 64)
    x[0], x[1, 0] = 0, -0.0
    w, slope = torch.eye(64).to(dtype), torch.full((slopes,), 0.25).to(dtype)
    inputs = (x.to(dtype), w.requires_grad_(), slope.requires_grad_())

    def gradients(policy: object) -> tuple[tuple[torch.Tensor, ...], aot_hooks.Plan]:
        torch._dynamo.reset()
        compiled = torch.compile(loss, backend="aot_hooks", options={"inner": "aten", "policy": policy})
        found = torch.autograd.grad(compiled(*inputs), inputs[1:])
        return found, aot_hooks.last_plans(compiled)[0]

    exact = torch.autograd.grad(loss(*inputs), inputs[1:])
    rounded, plan = gradients(aot_hooks.float8())
    (mask,) = (d for d in plan.decisions if "compare" in str(d.hook))
    assert mask.packed_bytes == 32 * 64 // 8
    assert torch.equal(rounded[0], exact[0])  # read by signs alone
    terms = (torch.where(x < 0, x, 0).square().sum() / 2).sqrt()  # the slope's gradient: a sum that may cancel
    assert (rounded[1] - exact[1]).norm() <= 0.06 * max(terms, exact[1].norm()), (rounded[1], exact[1])
    same, _ = gradients(aot_hooks.Hook("as it is", lambda t: t.clone(), lambda t: t))
    assert all(torch.equal(a, b) for a, b in zip(same, exact, strict=True))
