"""Blocks that are compiled one by one under a budget, and what tests of such steps measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from profiled import most_allocated
from steps import ATEN
from torch import nn

import aot_hooks
from aot_hooks.planning import many

WIDTH, ROWS = 32, 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Other(nn.Module):
    """Another block, which saves more."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)).tanh())


def model_of(*kinds: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for kind in kinds))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=True)


@pytest.fixture
def compiled_kinds(monkeypatch) -> list[str]:
    """For each compilation with a backward under a budget: "alone", "least" or "planned"."""
    kinds: list[str] = []
    compiled = many.Graph.compiled

    def counted(graph: Any, *args: Any) -> Any:
        version = compiled(graph, *args)
        if version is not None:
            kinds.append(version.mode.value)
        return version

    monkeypatch.setattr(many.Graph, "compiled", counted)
    return kinds


_peaks: dict[Any, int] = {}


def peak_of(model: nn.Module, x: torch.Tensor, share: float) -> int:
    """A share of what the step takes if it is one graph, without hooks. Planned once for models that are alike."""
    tensors = tuple((p.shape, p.dtype, p.requires_grad) for p in (x, *model.parameters()))
    alike = (tuple(type(part) for part in model.modules()), repr(model), tensors)
    if alike not in _peaks:
        _peaks[alike] = aot_hooks.plan(model, x, policy=aot_hooks.KEEP, inner="aten").peak_bytes
    return int(share * _peaks[alike])


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sin().sum()


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss_of(model, x), [*model.parameters()]))


def train(model: nn.Module, x: torch.Tensor, step: Callable[[], Any] | None = None) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    if step is None:
        loss_of(model, x).backward()
    else:
        step()
    return [p.grad for p in model.parameters()]


def assert_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert all(map(torch.equal, found, expected))


def compile_blocks(model: nn.Module, policy: Any, **others: Any) -> None:
    for block in model:
        block.compile(backend="aot_hooks", options={**ATEN, "policy": policy}, **others)


def measured(model: nn.Module, x: torch.Tensor, folder: Any) -> int:
    model.zero_grad(set_to_none=True)
    x.grad = None
    return most_allocated(lambda: loss_of(model, x).backward(), folder)
