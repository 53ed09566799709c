"""Budgets of blocks that tensor parallelism splits: one of four ranks, in one process, whose exchanges do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from many_blocks import WIDTH, compile_blocks, loss_of, model_of, train
from profiled import _events, most_allocated
from small_budgets import budget
from steps import ATEN
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import aot_hooks
from aot_hooks.errors import BudgetWarning
from aot_hooks.steps.parameters import gradient_bytes
from aot_hooks.steps.recorder import Recorder, Step

RANKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield init_device_mesh("cpu", (RANKS,))
    finally:
        dist.destroy_process_group()


def split_over(mesh: Any, count: int) -> nn.Sequential:
    model = model_of(*[Block] * count)
    ways = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh, ways, src_data_rank=None)  # each rank takes its part, and sends none
    return model


def local(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]


def exchanges_of(step: Any, folder: Any) -> int:
    """How often `step` adds up what ranks have."""
    return sum(event.get("name") == "_c10d_functional::all_reduce" for event in _events(step, folder))


@pytest.mark.parametrize(("share", "max_error"), [(0.6, 0.0), (0.4, 0.0), (0.7, 0.05)])
def test_a_budget_of_split_blocks_takes_what_was_predicted(mesh, share, max_error, tmp_path):
    """It has eager mode's gradients, bit for bit with exact means, and computes no exchange again."""
    x = torch.randn(2048, WIDTH, requires_grad=True)
    model = split_over(mesh, 8)

    def step() -> None:
        loss_of(model, x).backward()

    expected = [g.clone() for g in local(train(model, x))]
    assert all(g.isfinite().all() and g.any() for g in expected)
    model.zero_grad(set_to_none=True)
    exchanges, stock = exchanges_of(step, tmp_path), most_allocated(step, tmp_path)
    allow = ("float8", "int8") if max_error else ("recompute",)
    compile_blocks(model, budget(int(share * stock), max_error=max_error, allow=allow))
    for _ in range(4):
        x.grad = None
        found = local(train(model, x))
        if max_error:
            apart = torch.cat([(f - e).flatten() for f, e in zip(found, expected, strict=True)])
            assert 0 < apart.norm() <= max_error * torch.cat([e.flatten() for e in expected]).norm()
        else:
            assert all(map(torch.equal, found, expected))
    model.zero_grad(set_to_none=True)
    x.grad = None
    assert exchanges_of(step, tmp_path) == exchanges
    model.zero_grad(set_to_none=True)
    x.grad = None
    taken, (plan,) = most_allocated(step, tmp_path), aot_hooks.last_plans(model)
    assert plan.in_step is not None and plan.in_step.calls == 8
    scalars = 64  # bytes of the loss, which is eager
    assert abs(taken - plan.peak_bytes) <= scalars and plan.peak_bytes <= share * stock


@pytest.mark.core
@pytest.mark.parametrize("scope", ["donated", "no_static", "all"])
def test_parts_of_split_weights_are_parameters(mesh, scope):
    """From torch 2.13 on, each is two inputs of the graph. With another scope a hook would round weights."""
    block = split_over(mesh, 1)[0]
    x = torch.randn(64, WIDTH, requires_grad=True)
    block.compile(backend="aot_hooks", options={**ATEN, "policy": aot_hooks.float8(), "scope": scope})
    loss_of(block, x).backward()
    (plan,) = aot_hooks.last_plans(block)
    inputs = [d.saved for d in plan.decisions if d.saved.is_input]
    assert sum(saved.is_static for saved in inputs) == 4, "a norm's weight, and three matrices"
    assert [saved.shape for saved in inputs if not saved.is_static] == [x.shape]
    packed = {d.saved.is_static for d in plan.decisions if d.hook.lossy}
    assert packed == {False, *[True][: scope == "all"]}


def test_of_a_split_gradient_the_part_of_this_rank_counts(mesh):
    model = split_over(mesh, 1)
    step = Step(notes_parameters=True)
    recorder = Recorder("", "", BudgetWarning, lambda ended: None, step=step)
    parameters = [*model.parameters()]
    call = recorder.saves("graph", parameters)
    train(model, torch.randn(4, WIDTH))
    recorder.reads(call)
    step.release(call)
    after = recorder.saves("graph", parameters)
    recorder.reads(after)
    matrix = 4 * WIDTH * 4 * WIDTH
    assert sum(p.grad.nbytes for p in parameters) == 4 * WIDTH + 3 * matrix
    assert gradient_bytes(step, made_before=False) == [0, 0, *[4 * WIDTH + 3 * matrix // RANKS] * 2]
