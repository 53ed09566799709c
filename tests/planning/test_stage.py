"""A stage of a pipeline: microbatches overlap, and the first in is the first out.

F F F F  B F B F B F B F  B B B B     stage 0 of 4, with 8 microbatches: four of them hold what they saved
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import many_blocks
import pytest
import torch
from planned_programs import Part
from profiled import most_allocated
from small_budgets import budget
from steps import ATEN
from torch import nn
from torch.utils.checkpoint import checkpoint

import aot_hooks

HELD, MICROBATCHES, ROWS, WIDTH = 4, 8, 128, 64
compiled_kinds = many_blocks.compiled_kinds  # a fixture


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.mlp = Part("attention", WIDTH, WIDTH), Part("gated", WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.mixer(x))


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.receive(torch.float32)

    def receive(self, dtype: torch.dtype) -> Stage:
        generator = torch.Generator().manual_seed(1)
        made = (torch.randn(2, ROWS, WIDTH, generator=generator) for _ in range(MICROBATCHES))
        self.received = [x.to(dtype).requires_grad_() for x in made]
        return self.to(dtype)

    def compiled(self, policy: Any) -> Stage:
        torch._dynamo.reset()
        for block in self.blocks:
            block.compile(backend="aot_hooks", options={**ATEN, "policy": policy})
        return self

    def run(self, x: torch.Tensor, checkpointed: bool) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return x

    def step(self, *, checkpointed: bool = False) -> list[torch.Tensor]:
        """The gradients of a step, whose outputs the schedule holds until their backwards. What the stage receives has
        memory from before the step, but for gradients of its outputs: a backward counts these."""
        left, waiting = [*self.received], []
        for what in "F" * HELD + "BF" * (MICROBATCHES - HELD) + "B" * HELD:
            if what == "F":
                x = left.pop(0)
                waiting.append((x, self.run(x, checkpointed)))
            else:
                x, y = waiting.pop(0)
                y.backward(torch.ones_like(y))
                x.grad = None
                del x, y
        found = [p.grad for p in self.parameters() if p.grad is not None]
        self.zero_grad()
        return found


@pytest.mark.parametrize("share", [0.5, pytest.param(0.75, marks=pytest.mark.slow), "checkpointing"])
def test_a_budget_holds_in_a_stage_of_a_pipeline(share: Any, compiled_kinds: list[str], tmp_path: Path) -> None:
    stock, exact = Stage().compiled(aot_hooks.KEEP), Stage().receive(torch.float64)
    expected, reference, by_hand = stock.step(), exact.step(), share == "checkpointing"
    stock.step(checkpointed=by_hand)  # compiles, and frees what compiling has left
    peak = int(most_allocated(lambda: stock.step(checkpointed=by_hand), tmp_path) * (1 if by_hand else share))
    compiled_kinds.clear()
    stage = Stage().compiled(budget(peak, max_error=0))
    for _ in range(4):
        for found, same, exactly in zip(stage.step(), expected, reference, strict=True):
            assert torch.equal(found, same)
            assert (found - exactly).norm() <= 1e-5 * exactly.norm()
    taken = most_allocated(stage.step, tmp_path)
    (plan,) = aot_hooks.last_plans(stage)
    assert plan.in_step is not None and plan.in_step.calls == 2 * HELD
    assert 0.98 * plan.peak_bytes <= taken <= plan.peak_bytes <= peak
    assert plan.step_ratio <= (1.27 if by_hand else 1.2), "checkpointing runs each forward twice"
    assert compiled_kinds.count("planned") <= 2
