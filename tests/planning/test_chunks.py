"""`budget` computes the loss in chunks where that is what keeps the step under the peak, and says so."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from profiled import most_allocated
from small_budgets import budget, trained
from steps import ATEN
from torch import nn
from torch.fx import GraphModule, symbolic_trace

import aot_hooks
from aot_hooks.errors import BudgetError, CacheWarning, error_behind
from aot_hooks.passes.chunk import Chunked
from aot_hooks.passes.live_bytes import LivePoint
from aot_hooks.planning import chunks, search, trials
from aot_hooks.planning.assignment import Assignment
from aot_hooks.planning.budget import ALLOWED

WORDS, WIDTH, TOKENS = 4096, 32, 1024  # Logits of 16 MiB are the least that is worth chunks.


class Model(nn.Module):
    """A block, a last layer, and a loss of as many bytes as chunks are made for."""

    def __init__(self, returns_logits: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.returns_logits = returns_logits

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(x)))
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, -2), ids.flatten())
        return (loss, logits) if self.returns_logits else loss


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(WORDS, (2, TOKENS // 2), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def stock(ids: torch.Tensor) -> aot_hooks.Plan:
    return aot_hooks.plan(Model(), ids, policy=aot_hooks.KEEP, inner="aten")


def rows(plan: aot_hooks.Plan) -> list[Chunked]:
    return list(plan.chunked)


def test_a_budget_that_only_chunks_can_meet_has_chunks(
    ids: torch.Tensor, stock: aot_hooks.Plan, tmp_path: Path
) -> None:
    model = Model()
    expected = trained(model, ids, aot_hooks.KEEP)[0]
    peak = stock.peak_bytes // 2
    found, plan, run = trained(model, ids, budget(peak, max_error=0))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    (row,) = rows(plan)
    assert row.done and row.holds_peak and row.count == TOKENS // row.tokens
    assert row.logit_bytes == 4 * TOKENS * WORDS and row.chunk_bytes == row.logit_bytes // row.count
    assert plan.peak_bytes <= peak and max(p.live_bytes for p in plan.live_before) == stock.peak_bytes
    text = aot_hooks.format_report(plan)
    assert f"loss in {row.count} chunks" in text and f"{row.tokens} tokens and 4.00 MiB of 16.00 MiB" in text
    model.zero_grad(set_to_none=True)
    measured = most_allocated(lambda: run(ids).backward(), tmp_path)
    assert measured <= plan.peak_bytes + 2**20


def test_where_all_tokens_are_one_chunk_a_budget_takes_smaller_ones() -> None:
    words, tokens = 16384, 256  # as many as a chunk has on a CPU
    head = nn.Linear(WIDTH, words, bias=False)

    def loss(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(x), labels)

    inputs = torch.randn(tokens, WIDTH, requires_grad=True), torch.randint(words, (tokens,))
    stock = aot_hooks.plan(loss, *inputs, policy=aot_hooks.KEEP, inner="aten")
    (row,) = rows(stock)
    assert not row.done and "one chunk of 256" in row.how
    plan = aot_hooks.plan(loss, *inputs, policy=budget(stock.peak_bytes // 2, max_error=0), inner="aten")
    (row,) = rows(plan)
    assert row.done and row.tokens <= 128 and plan.peak_bytes <= stock.peak_bytes // 2


def test_without_chunk_in_allow_logits_stay_whole(ids: torch.Tensor, stock: aot_hooks.Plan) -> None:
    policy = budget(stock.peak_bytes // 2, allow=("recompute", "lossless"))
    with pytest.raises(BudgetError) as e:
        aot_hooks.plan(Model(), ids, policy=policy, inner="aten")
    assert "in chunks" not in str(e.value)


def test_a_step_that_fits_stays_as_it_is(ids: torch.Tensor, stock: aot_hooks.Plan) -> None:
    model = Model()
    expected = trained(model, ids, aot_hooks.KEEP)[0]
    found, plan, _ = trained(model, ids, budget(2 * stock.peak_bytes))
    assert rows(plan) == [] and plan.step_ratio == 1.0
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_the_lowest_peak_has_chunks_within_its_time(ids: torch.Tensor, stock: aot_hooks.Plan) -> None:
    plan = aot_hooks.plan(Model(), ids, policy=budget(max_slowdown=0.5, max_error=0), inner="aten")
    assert [row.done for row in rows(plan)] == [True]
    assert plan.peak_bytes < 0.3 * stock.peak_bytes and plan.step_ratio <= 1.5


def test_where_logits_can_not_be_in_chunks_the_error_and_the_report_say_why(ids: torch.Tensor) -> None:
    model = Model(returns_logits=True)
    kept = aot_hooks.plan(model, ids, policy=aot_hooks.KEEP, inner="aten")
    (row,) = rows(kept)
    assert row.holds_peak and not row.done and "the program returns" in row.how
    assert "logits of 16.00 MiB hold the peak and stay whole" in aot_hooks.format_report(kept)
    with pytest.raises(Exception, match="not in chunks, the program returns") as e:
        aot_hooks.plan(model, ids, policy=budget(kept.peak_bytes // 2, max_error=0), inner="aten")
    assert error_behind(e.value, BudgetError).least_bytes is not None


def test_a_report_without_chunks_says_that_logits_hold_the_peak(stock: aot_hooks.Plan) -> None:
    (row,) = rows(stock)
    assert row.holds_peak and not row.done
    assert "options={'chunk': True} does that" in aot_hooks.format_report(stock)


def test_the_number_of_tokens_that_the_user_chose_stays(ids: torch.Tensor, stock: aot_hooks.Plan) -> None:
    run = torch.compile(
        Model(), backend="aot_hooks", options={**ATEN, "chunk": 128, "policy": budget(stock.peak_bytes)}
    )
    run(ids).backward()
    ((row,),) = (rows(plan) for plan in aot_hooks.last_plans(run))
    assert row.tokens == 128


def test_a_warm_start_has_the_chunks_and_other_means_miss(
    ids: torch.Tensor, stock: aot_hooks.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    peak, model = stock.peak_bytes // 2, Model()
    found = []
    with torch._functorch.config.patch(bundled_autograd_cache=True):
        for policy in (budget(peak, max_error=0), budget(peak, max_error=0)):
            gradients, plan, _ = trained(model, ids, policy)
            found.append((gradients, plan, aot_hooks.cache_stats()["hits"]))
        assert [hits for *_, hits in found] == [0, 1]
        trained(model, ids, budget(2 * stock.peak_bytes, max_error=0))
        without = tuple(name for name in ALLOWED if name != "chunk")
        trained(model, ids, budget(2 * stock.peak_bytes, max_error=0, allow=without))
        assert aot_hooks.cache_stats()["hits"] == 0
    (made, plan, _), (loaded, stored, _) = found
    assert rows(stored) == rows(plan) and rows(plan)[0].done
    assert (rows(plan)[0].place.startswith("test_chunks.py:"), rows(stored)[0].place) == (
        True,
        "",
    )  # another program may take it
    assert all(torch.equal(a, b) for a, b in zip(made, loaded, strict=True))


@pytest.mark.filterwarnings("error:aot_hooks")
def test_a_loaded_plan_has_the_chunks_of_the_saved_one(
    ids: torch.Tensor, stock: aot_hooks.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, policy = tmp_path / "plans.json", budget(stock.peak_bytes // 2, max_error=0)
    expected, saved, _ = trained(Model(), ids, policy)
    assert saved.recipe.finer >= 1
    assert aot_hooks.save_plans(path) == 1
    monkeypatch.setattr(trials, "search", None)
    found, plan, _ = trained(Model(), ids, policy, path)
    assert plan.recipe == saved.recipe and rows(plan) == rows(saved)
    assert (plan.before_ms, plan.after_ms, plan.peak_bytes) == (saved.before_ms, saved.after_ms, saved.peak_bytes)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_a_loaded_plan_that_does_not_fit_is_searched_for_with_chunks(
    ids: torch.Tensor, stock: aot_hooks.Plan, tmp_path: Path
) -> None:
    """It was saved without an optimizer, whose state takes a part of the total."""
    path = tmp_path / "plans.json"
    weights = sum(4 * p.numel() for p in Model().parameters())
    policy = budget(total=weights + 8 * ids.numel() + int(1.01 * stock.peak_bytes), max_error=0)
    _, saved, _ = trained(Model(), ids, policy)
    assert saved.recipe.finer == 0 and aot_hooks.save_plans(path) == 1
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())  # it is found by its parameters
    with pytest.warns(CacheWarning, match="planned anew"):
        _, plan, _ = trained(model, ids, policy, path)
    assert plan.recipe.finer >= 1 and [row.done for row in rows(plan)] == [True]
    del optimizer


@pytest.mark.parametrize("ms, planned", [(10.5, 2), (11.5, 1)])
def test_chunks_that_are_too_slow_without_hooks_are_not_planned(
    ms: float, planned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    joint, in_chunks = (symbolic_trace(nn.Identity()) for _ in range(2))
    monkeypatch.setattr(chunks, "chunked", lambda *_, **__: (in_chunks, ()))
    monkeypatch.setattr(chunks, "tiled", lambda gm, *_, **__: (gm, ()))
    peaks, times, seen = {joint: 100, in_chunks: 50}, {joint: 10.0, in_chunks: ms}, []

    def within(gm: GraphModule, *_: Any, **__: Any) -> trials.Planned:
        seen.append(gm)
        return trials.Planned(gm, gm, aot_hooks.Plan((), before_ms=10.0, after_ms=11.0 if gm is joint else ms))

    def stock(gm: GraphModule) -> tuple[LivePoint, ...]:
        return (LivePoint("forward", "mm", peaks[gm], "", ""),)

    found = chunks.with_chunks(Assignment.of(budget("1MiB")), joint, within, stock, times.__getitem__)
    assert seen == [joint, in_chunks][:planned]
    assert found.fw is seen[-1]


def test_a_form_that_is_far_over_the_peak_is_not_searched_where_another_fits(
    ids: torch.Tensor, stock: aot_hooks.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits alone are over this budget. The plan in chunks is the one of a search of both forms."""
    searched: list[bool] = []
    made = trials.Trials._partitioned
    monkeypatch.setattr(trials.Trials, "_partitioned", lambda *a: searched.append(True) or made(*a))

    def planned() -> tuple[aot_hooks.Plan, int]:
        searched.clear()
        return aot_hooks.plan(Model(), ids, policy=budget(stock.peak_bytes // 4), inner="aten"), len(searched)

    plan, few = planned()
    monkeypatch.setattr(search, "_OUT_OF_REACH", math.inf)
    expected, many = planned()
    assert few < many
    assert [row.done for row in rows(plan)] == [True] and plan.peak_bytes <= stock.peak_bytes // 4
    assert (plan.peak_bytes, plan.step_ratio) == (expected.peak_bytes, expected.step_ratio)


def test_where_no_form_fits_all_are_searched_for_the_least(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def error() -> BudgetError:
        with pytest.raises(Exception, match="the least that was found takes") as caught:
            aot_hooks.plan(Model(), ids, policy=budget(2**20), inner="aten")
        found = error_behind(caught.value, BudgetError)
        assert found is not None
        return found

    found = error()
    monkeypatch.setattr(search, "_OUT_OF_REACH", math.inf)
    assert str(found) == str(error())
