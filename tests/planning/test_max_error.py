"""What a budget counts as the error of a gradient: at least that of normal data, and what must stay exact."""

from __future__ import annotations

import pytest
import torch
from small_budgets import budget
from torch import nn

import aot_hooks
from aot_hooks.planning import options, search
from aot_hooks.planning.solver import solve


@pytest.mark.parametrize("means", ["float8", "int8", "int4"])
def test_the_error_that_is_counted_is_at_least_that_of_normal_data(means):
    torch.manual_seed(0)
    x = torch.randn(512, 1024).bfloat16()
    hook = options._rules((means,), 1.0)[f"{means}()"]
    back = hook.unpack(hook.pack(x))
    assert 0 < (back.float() - x.float()).norm() / x.float().norm() <= hook.error


def test_what_a_statistic_is_computed_from_again_must_be_exact(monkeypatch):
    steps = []

    def noted(step, **kwargs):
        steps.append(step)
        return solve(step, **kwargs)

    monkeypatch.setattr(search, "solve", noted)

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            scale = torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
            return self.down(nn.functional.silu(h * scale))

    model, x = nn.Sequential(*(Norm() for _ in range(3))), torch.randn(256, 32)
    peak = int(0.9 * aot_hooks.plan(model, x, policy=aot_hooks.KEEP, inner="aten").peak_bytes)
    aot_hooks.plan(model, x, policy=budget(peak, allow=("recompute", "float8")), inner="aten")
    again = [o for value in steps[0].values for o in value.options if o.name == "recompute" and o.sources]
    statistic = [o for o in again if any("rsqrt" in name for name in o.again)]
    smooth = [o for o in again if any("silu" in name or "mul" in name for name in o.again) and o not in statistic]
    assert statistic and all(o.exact == o.sources for o in statistic)
    assert smooth and all(len(o.exact) < len(o.sources) for o in smooth)  # the statistic only


def test_a_tenth_of_the_error_is_left(monkeypatch):
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
    asked = []

    def noted(*args, **named):
        asked.append(named["max_error"])
        return solve(*args, **named)

    monkeypatch.setattr(search, "solve", noted)
    aot_hooks.plan(model, torch.randn(256, 32), policy=budget(max_slowdown=1.0, max_error=0.05), inner="aten")
    with_rounding = [error for error in asked if error]  # exact means alone are tried as well
    assert with_rounding and all(error == pytest.approx(0.045) for error in with_rounding)
