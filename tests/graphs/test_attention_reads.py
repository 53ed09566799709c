"""Fused attention with large scores: what its backward reads through an exponential is not rounded.

Scores of trained models have a standard deviation of several units, fresh ones of less than one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks.graphs.read_tables import ATTENTION, ATTENTION_BACKWARD
from aot_hooks.graphs.roofline import is_attention
from aot_hooks.torch_private.values import operator_names

SCORES = 10.0  # their standard deviation


class Attention(nn.Module):
    """Grouped-query attention [8, 128, 64] whose scores are large, and a product with its result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(64, width, bias=False) for width in (64, 32, 32, 64))
        nn.init.normal_(self.q.weight, std=SCORES / 8)
        nn.init.normal_(self.k.weight, std=1 / 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, 16)).transpose(1, 2).mul(1.0).contiguous() for layer in (self.q, self.k, self.v)
        )
        y = scaled_dot_product_attention(q, *(t.repeat_interleave(2, dim=1) for t in (k, v)), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)).tanh()


class Checkpointed(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x.mul(1.0), use_reentrant=False)


def gradient(model: nn.Module, policy: object, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    x, cotangent = torch.randn(8, 128, 64), torch.randn(8, 128, 64)
    x = x.to(dtype).requires_grad_()
    model = model.to(dtype)
    run = model
    if policy is not None:
        torch._dynamo.reset()
        run = torch.compile(model, backend="aot_hooks", options={"inner": "aten", "policy": policy})
    grads = torch.autograd.grad(run(x), [x, *model.parameters()], cotangent.to(dtype))
    return torch.cat([g.flatten().double() for g in grads])


def layers() -> nn.Module:
    return nn.Sequential(*(Attention() for _ in range(3)))


@functools.cache
def exact(make: Callable[[], nn.Module] = Attention) -> Tensor:
    return gradient(make(), None, torch.float64)


@pytest.mark.core
@pytest.mark.parametrize("make", [Attention, Checkpointed])
@pytest.mark.parametrize(
    ("policy", "most"),
    [(aot_hooks.float8(), 0.1), (aot_hooks.int8(), 0.03), (aot_hooks.int4(), 0.6)],
    ids=["float8", "int8", "int4"],
)
def test_large_scores_do_not_amplify_errors(make, policy, most):
    """What is left are values and results. With rounded queries and keys float8 would be off by 0.5, int4 by 3."""
    found = gradient(make(), policy)
    assert (found - exact()).norm() <= most * exact().norm()


@pytest.mark.core
def test_queries_and_keys_stay_and_values_are_packed():
    model = Attention()
    plan = aot_hooks.plan(model, torch.randn(8, 128, 64), policy=aot_hooks.float8(), inner="aten")
    attention = [d for d in plan.decisions if any("attention" in r.op for r in d.saved.backward_reads)]
    assert len(attention) >= 2 and all(d.hook is aot_hooks.KEEP and "attention" in d.reason for d in attention), plan
    assert any(d.hook is not aot_hooks.KEEP for d in plan.decisions)


def test_budgets_round_no_queries_and_keys():
    x = torch.randn(8, 128, 64)
    stock = aot_hooks.plan(layers(), x, policy=aot_hooks.KEEP, inner="aten").peak_bytes
    found = gradient(layers(), aot_hooks.budget(f"{int(0.75 * stock)}B"))
    assert (found - exact(layers)).norm() <= 0.1 * exact(layers).norm()


def test_torchs_operators_of_fused_attention_are_in_the_tables() -> None:
    """Offload starts copies before them, as before other kernels of their own."""
    names = {name.split("::")[1].split(".")[0] for name in operator_names() if name.startswith("aten::")}
    fused = {name for name in names if re.search("(dot_product|flash|efficient|cudnn).*attention", name)}
    others = {"scaled_dot_product_attention", "_scaled_dot_product_attention_math"}  # made of other operators
    others |= {"_scaled_dot_product_attention_math_for_mps", "_flash_attention_forward_no_dropout_inplace"}
    assert fused - others == (ATTENTION | ATTENTION_BACKWARD) - {"flex_attention", "flex_attention_backward"}
    for name in fused - others:
        node = torch.fx.Graph().call_function(getattr(torch.ops.aten, name).default)
        assert is_attention(node) and node.target.namespace == "aten"
    assert not is_attention(torch.fx.Graph().call_function(torch.ops.aten.mm.default))
