"""What a budget recomputes does not depend on how modules are named, or on whether blocks are compiled one by one."""

from __future__ import annotations

import math

import torch
from torch import nn

import aot_hooks


class Named(nn.Module):
    """`blocks` as children with `names`."""

    def __init__(self, blocks: list[nn.Module], names: str) -> None:
        super().__init__()
        self.names = names.split()
        for name, block in zip(self.names, blocks, strict=True):
            setattr(self, name, block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = getattr(self, name)(x)
        return x


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)))).tanh()


def test_the_least_does_not_depend_on_the_names_of_modules():
    """A value is computed again from another of its layer, whatever marks the layer off."""
    least, x = aot_hooks.budget(max_slowdown=math.inf, max_error=0), torch.randn(256, 32, requires_grad=True)
    blocks = [Residual() for _ in range(4)]
    models = [nn.Sequential(*blocks), Named(blocks, "a b c d"), Named(blocks, "l0 l1 l2 l3")]
    peaks = [aot_hooks.plan(model, x, policy=least, inner="aten").peak_bytes for model in models]
    assert peaks[0] == peaks[1] == peaks[2] < 0.6 * aot_hooks.plan(models[0], x, inner="aten").peak_bytes


def test_a_block_alone_is_one_layer():
    """It has no path but those of its children, which are no layers."""
    blocks, x = [Residual() for _ in range(6)], torch.randn(256, 32)
    for block in blocks:
        options = {"inner": "aten", "policy": aot_hooks.budget(1_000_000, max_error=0)}
        block.compile(backend="aot_hooks", options=options)
    for _ in range(4):  # 1.27 MiB is the least where each child is a layer of its own
        y = x * 1
        for block in blocks:
            y = block(y)
        y.square().mean().backward()
    plans = [plan for block in blocks for plan in aot_hooks.last_plans(block)]
    assert plans and max(plan.peak_bytes for plan in plans) <= 1_000_000
