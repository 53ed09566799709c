"""Random numbers under torch's `activation_memory_budget`: the backward uses those that the forward drew."""

from __future__ import annotations

import logging

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from capture_simulator import Simulator
from places import backend_with
from torch import Tensor, nn

import cudagraph


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        kept = []
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.3, training=True)
            kept.append(x.detach() != 0)
        return x, kept


@pytest.mark.core
@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_dropout_under_a_memory_budget_of_torch(budget: float, caplog: pytest.LogCaptureFixture) -> None:
    """torch alone draws the masks anew: gradients are 0.73 off."""
    cudagraph.reset()
    torch.manual_seed(0)
    net, x = Net(), torch.randn(64, 32)
    compiled = torch.compile(net, backend=backend_with(Simulator()))
    with torch._functorch.config.patch(activation_memory_budget=budget), caplog.at_level(logging.WARNING, "cudagraph"):
        for _ in range(4):
            out, kept = compiled(x)
            found = torch.autograd.grad(out.square().mean(), [*net.parameters()])
            h = x
            for layer, mask in zip(net.layers, kept, strict=True):
                assert 0.1 < mask.float().mean() < 0.9
                h = F.gelu(layer(h)) * mask / 0.7
            expected = torch.autograd.grad(h.square().mean(), [*net.parameters()])
            for a, b in zip(found, expected, strict=True):
                assert (a - b).norm() < 1e-5 * b.norm()
    assert cudagraph.stats()["replays"] > 0
    assert ("activation_memory_budget" in caplog.text) == (budget < 1)
