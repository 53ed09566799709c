"""Attention is computed again where a budget asks for it, bit for bit, unless it draws random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aot_hooks
from aot_hooks.planning import recomputation
from aot_hooks.torch_private import aot

aten = torch.ops.aten


class Attends(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def gradients(model: nn.Module, fn: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(fn(x).square().mean(), tuple(model.parameters()))


@pytest.mark.parametrize("by_tag", [False, True])
def test_a_budget_computes_attention_again(by_tag: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`by_tag`: as if torch's partition looked at the operator's tag alone. From 2.15 it looks at the dropout."""
    if by_tag:
        monkeypatch.setattr(aot, "has", lambda _: False)
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Attends(64) for _ in range(2))), torch.randn(2, 128, 64)
    stock = aot_hooks.plan(model, x, policy=aot_hooks.KEEP)
    policy = aot_hooks.budget(max_slowdown=1.0, allow=("recompute",))
    torch._dynamo.reset()
    fn = torch.compile(model, backend="aot_hooks", options={"policy": policy, "inner": "aten"})
    found = gradients(model, fn, x)
    (plan,) = aot_hooks.last_plans(fn)
    again = [d for d in plan.decisions if d.hook.name == "recompute" and "flash_attention" in d.saved.op]
    assert again
    assert plan.peak_bytes <= 0.75 * stock.peak_bytes
    assert all(map(torch.equal, found, gradients(model, model, x)))


def calls() -> dict[Any, tuple[Any, ...]]:
    """Each operator of attention that is trained with, with the arguments before and after its dropout."""
    return {
        aten._scaled_dot_product_flash_attention.default: ((), (True,)),
        aten._scaled_dot_product_efficient_attention.default: ((None, True), (True,)),
        aten._scaled_dot_product_cudnn_attention.default: ((None, True), (True,)),
        aten._scaled_dot_product_flash_attention_for_cpu.default: ((), (True,)),
        aten._scaled_dot_product_fused_attention_overrideable.default: ((None,), (True,)),
    }


@pytest.mark.parametrize("operator", calls())
def test_attention_is_repeatable_without_dropout(operator: Any) -> None:
    before, after = calls()[operator]

    def node(*rest: Any) -> torch.fx.Node:
        graph = torch.fx.Graph()
        inputs = [graph.placeholder(name) for name in "qkv"]
        return graph.call_function(operator, (*inputs, *rest))

    assert recomputation._repeatable(node(*before, 0.0, *after))
    assert not recomputation._repeatable(node(*before, 0.1, *after))
    assert recomputation._repeatable(node(*before))  # the default
