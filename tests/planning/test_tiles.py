"""`budget` computes wide parts of layers in tiles where that is what keeps the step under the peak, and says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from profiled import most_allocated
from small_budgets import budget, trained
from steps import ATEN
from torch import nn

import aot_hooks
from aot_hooks.errors import BudgetError
from aot_hooks.planning import trials
from aot_hooks.planning.assignment import Assignment
from aot_hooks.planning.chunks import _Form, _Search

WIDTH, WIDE, TOKENS = 16, 512, 2048  # Wide values of 4 MiB are the least that is worth tiles.


class Model(nn.Module):
    def __init__(self, returns_wide: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, WIDE, bias=False) for _ in range(2))
        self.down, self.returns_wide = nn.Linear(WIDE, WIDTH), returns_wide

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(x)
        h = F.silu(self.gate(y)) * self.up(y)
        loss = (x + self.down(h)).square().mean()
        return (loss, h) if self.returns_wide else loss


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(2, TOKENS // 2, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def stock(x: torch.Tensor) -> aot_hooks.Plan:
    return aot_hooks.plan(Model(), x, policy=aot_hooks.KEEP, inner="aten")


def test_a_budget_that_only_tiles_can_meet_has_tiles_and_a_loaded_plan_has_them_again(
    x: torch.Tensor, stock: aot_hooks.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = Model(), tmp_path / "plans.json"
    model(x).backward()
    expected = [p.grad for p in model.parameters()]
    policy = budget(int(0.4 * stock.peak_bytes), allow=("tile",))
    found, plan, run = trained(model, x, policy)
    for a, b in zip(found[1:], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    (row,) = plan.tiled
    assert row.done and row.count >= 2 and plan.recipe.tiles.startswith("again")
    assert plan.peak_bytes <= 0.4 * stock.peak_bytes and plan.live_before == stock.live_before
    assert f"a part in {row.count} tiles" in aot_hooks.format_report(plan)
    model.zero_grad(set_to_none=True)
    assert most_allocated(lambda: run(x).backward(), tmp_path) <= plan.peak_bytes + 2**20
    assert aot_hooks.save_plans(path) == 1
    monkeypatch.setattr(trials, "search", None)
    again, loaded, _ = trained(Model(), x, policy, path)
    assert loaded.recipe == plan.recipe and loaded.tiled == plan.tiled
    assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))


def test_without_tile_in_allow_wide_values_stay_whole(x: torch.Tensor, stock: aot_hooks.Plan) -> None:
    policy = budget(int(0.4 * stock.peak_bytes), allow=("recompute", "chunk"))
    with pytest.raises(BudgetError) as e:
        aot_hooks.plan(Model(), x, policy=policy, inner="aten")
    assert "tiles" not in str(e.value)


def test_a_step_that_fits_stays_as_it_is(x: torch.Tensor, stock: aot_hooks.Plan) -> None:
    plan = aot_hooks.plan(Model(), x, policy=budget(2 * stock.peak_bytes, allow=("tile",)), inner="aten")
    assert plan.tiled == () and plan.step_ratio == 1.0


def test_the_number_of_tokens_that_the_user_chose_stays(x: torch.Tensor, stock: aot_hooks.Plan) -> None:
    policy = budget(2 * stock.peak_bytes, allow=("tile",))
    run = torch.compile(Model(), backend="aot_hooks", options={**ATEN, "tile": 1024, "policy": policy})
    plan = aot_hooks.plan(run, x)
    assert [(row.done, row.tokens) for row in plan.tiled] == [(True, 1024)]


@pytest.mark.slow
def test_where_nothing_can_be_in_tiles_the_error_says_why(x: torch.Tensor, stock: aot_hooks.Plan) -> None:
    policy = budget(int(0.4 * stock.peak_bytes), allow=("tile",))
    with pytest.raises(BudgetError, match=r"Parts of layers: .*the program returns"):
        aot_hooks.plan(Model(returns_wide=True), x, policy=policy, inner="aten")


@pytest.mark.slow
def test_the_lowest_peak_has_tiles_within_its_time(x: torch.Tensor, stock: aot_hooks.Plan) -> None:
    plan = aot_hooks.plan(Model(), x, policy=budget(max_slowdown=0.5, max_error=0), inner="aten")
    assert [row.done for row in plan.tiled] == [True]
    assert plan.peak_bytes < 0.4 * stock.peak_bytes and plan.step_ratio <= 1.5


@pytest.mark.parametrize(
    ("form_ms", "lossy", "is_slow"), [(1.05, False, True), (1.05, True, False), (1.02, False, False)]
)
def test_tiles_as_slow_as_the_best_plan_are_not_planned_unless_they_may_round_less(
    form_ms: float, lossy: bool, is_slow: bool
) -> None:
    """The best plan takes 1.05 of the time without hooks; the form with tiles, 1.05 or 1.02 as it is."""
    row = SimpleNamespace(hook=SimpleNamespace(lossy=lossy), saved_bytes=1)
    plan: Any = SimpleNamespace(before_ms=1.0, after_ms=1.05, step_ratio=1.05, decisions=(row,))
    best: Any = SimpleNamespace(plan=plan)
    joint, form = torch.fx.GraphModule({}, torch.fx.Graph()), torch.fx.GraphModule({}, torch.fx.Graph())
    ms_of = {joint: 1.0, form: form_ms}.__getitem__
    given = Assignment.of(budget(1 << 20))
    search = _Search(given, ("tile",), None, None, ms_of, joint, _Form(joint, {}), 0, _Form(joint, {}), best, best)  # type: ignore[arg-type]
    assert search.is_too_slow(_Form(form, {}, tiles="backward")) == is_slow
