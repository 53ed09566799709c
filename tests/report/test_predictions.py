"""Plans without a budget have a predicted peak and time too, whoever makes them: a compilation or `aot_hooks.plan`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import ATEN
from torch import nn

import aot_hooks
from aot_hooks import budget, float8
from aot_hooks.graphs import roofline
from aot_hooks.passes.plan import joined

pytestmark = pytest.mark.core


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 64))


def plan_of(policy: Any, model: nn.Module, x: torch.Tensor) -> Any:
    """The plan of one training step under `policy`."""
    compiled = torch.compile(model)
    with aot_hooks.enable(policy, options=ATEN):
        compiled(x).square().mean().backward()
    (plan,) = aot_hooks.last_plans(compiled)
    return plan


@pytest.mark.parametrize("policy", [float8(), aot_hooks.int8(), budget(max_slowdown=0.5)], ids=str)
def test_a_compilation_predicts_what_a_dry_run_predicts(policy: Any) -> None:
    model, x = net(), torch.randn(64, 64)
    plan, dry = plan_of(policy, model, x), aot_hooks.plan(model, x, policy=policy, inner="aten")
    assert plan.peak_bytes == dry.peak_bytes > dry.packed_bytes > 0
    assert plan.step_ratio == dry.step_ratio > 0


def test_without_a_policy_a_dry_run_is_the_stock_step() -> None:
    plan = aot_hooks.plan(net(), torch.randn(64, 64), inner="aten")
    assert plan.step_ratio == 1.0 and plan.peak_bytes >= plan.saved_bytes > 0


def test_hooks_that_round_lower_the_peak_and_take_time() -> None:
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU())))
    x = torch.randn(512, 64)
    stock, packed = aot_hooks.plan(model, x, inner="aten"), plan_of(float8(), model, x)
    assert packed.peak_bytes < stock.peak_bytes and packed.step_ratio > 1


def test_plans_of_one_step_hold_what_the_graphs_before_them_saved() -> None:
    plan = plan_of(float8(), net(), torch.randn(64, 64))
    assert joined([plan, plan]).peak_bytes == plan.packed_bytes + plan.peak_bytes
    assert joined([plan, plan]).step_ratio == pytest.approx(plan.step_ratio)


def test_a_device_without_memory_to_measure_in_gives_no_time_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(roofline, "measured_rates", full)
    plan = plan_of(float8(), net(), torch.randn(64, 64))
    assert plan.step_ratio != plan.step_ratio and plan.peak_bytes > 0
