"""The predicted live bytes of a step, against what the allocator saw."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from profiled import measured
from torch import nn

import aot_hooks
from aot_hooks.passes.live_bytes import LivePoint, joined_points

TOLERANCE = 0.1  # of the larger one: what operators allocate inside themselves is not predicted


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


class WithHead(nn.Module):
    """A wide output: the peak stands where it is made, not where layers save."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Block(32), nn.Linear(32, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.head(self.body(x)), -1).square().mean()


def predicted(points: tuple[LivePoint, ...]) -> tuple[int, int, int]:
    forward = [p.live_bytes for p in points if p.phase == "forward"]
    backward = [p.live_bytes for p in points if p.phase == "backward"]
    return forward[-1], max(forward), max(backward)


MODELS = {
    "blocks": (lambda: nn.Sequential(*(Block(32) for _ in range(6))), (64, 8, 32)),
    "attention": (lambda: nn.Sequential(Attention(32), Block(32), Attention(32)), (8, 64, 32)),
    "head": (WithHead, (256, 32)),
}


@pytest.mark.core
@pytest.mark.parametrize("name", MODELS)
def test_prediction_is_what_a_step_takes(name: str, tmp_path: Path) -> None:
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    plan = aot_hooks.plan(model, x, policy=aot_hooks.float8(), inner="aten")
    for points, hook in ((plan.live_before, aot_hooks.KEEP), (plan.live_after, aot_hooks.float8())):
        for what, got, expected in zip(
            ("after forward", "forward", "backward"), predicted(points), measured(model, x, hook, tmp_path), strict=True
        ):
            assert abs(got - expected) <= TOLERANCE * max(got, expected), (what, hook, got, expected)


def test_after_the_forward_lives_what_is_saved_and_what_is_returned() -> None:
    model, x = Block(32), torch.randn(64, 32)
    plan = aot_hooks.plan(model, x, policy=aot_hooks.float8(), inner="aten")
    returned = 64 * 32 * 4
    assert predicted(plan.live_before)[0] == plan.saved_bytes + returned
    assert predicted(plan.live_after)[0] == plan.packed_bytes + returned


def test_points_say_where() -> None:
    plan = aot_hooks.plan(nn.Sequential(Block(32), Block(32)), torch.randn(64, 32), inner="aten")
    peak = max(plan.live_before, key=lambda p: p.live_bytes)
    assert peak.module_path.split(".")[0] in "01" and "test_live.py" in peak.source_line


@pytest.mark.parametrize("inner", ["aten", "inductor"])
def test_keeping_everything_changes_nothing(inner: str) -> None:
    plan = aot_hooks.plan(Block(32), torch.randn(64, 32), inner=inner)
    assert plan.live_before == plan.live_after and len(plan.live_before) > 10


def test_inductor_is_predicted_to_take_less_than_the_graphs_as_they_are() -> None:
    model, x = nn.Sequential(*(Block(32) for _ in range(3))), torch.randn(64, 32)
    peaks = {
        inner: max(p.live_bytes for p in aot_hooks.plan(model, x, inner=inner).live_before)
        for inner in ("aten", "inductor")
    }
    assert 0 < peaks["inductor"] < peaks["aten"]


def test_graphs_are_joined_into_one_step() -> None:
    def graph(held: int, grads: int) -> list[LivePoint]:
        return [LivePoint("forward", "f", held, "", ""), LivePoint("backward", "b", held + grads, "", "")]

    points = joined_points([graph(10, 1), graph(100, 2)])
    assert [(p.phase, p.live_bytes) for p in points] == [
        ("forward", 10),
        ("forward", 110),
        ("backward", 112),
        ("backward", 11 + 102),
    ]
