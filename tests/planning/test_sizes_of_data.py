"""Budgets of graphs whose sizes only the data give: a loop over experts, whose tokens are counted on the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import total_error
from profiled import most_allocated
from torch import Tensor

import aot_hooks
from aot_hooks import KEEP, budget
from aot_hooks.errors import BudgetError, BudgetWarning, unwrapped
from aot_hooks.planning.sizes import DataSizes

TOKENS, WIDTH, HIDDEN, EXPERTS = 1024, 64, 128, 2
SHARE = 0.8  # of the peak without hooks
FEW, MORE = (0.0, 0.3, -0.3), 1.5  # added to the logits of the first expert


@pytest.fixture(autouse=True)
def sizes_of_data() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def loss_of(x: Tensor, shift: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = F.rms_norm(x, (WIDTH,))
    score, expert = (h @ router + shift).softmax(-1).topk(1)
    out = x
    for i in range(EXPERTS):
        token, place = torch.where(expert == i)
        y = F.silu(h[token] @ up[i]) @ down[i]
        out = out.index_add(0, token, y * score[token, place, None])
    return out.square().mean()


class Run:
    """The layer, compiled with a policy; its gradients, and the most that a step allocates."""

    def __init__(self, policy: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = (TOKENS, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
        self.x, *self.weights = (torch.randn(s, generator=generator).div(s[-2] ** 0.5) for s in shapes)
        for weight in self.weights:
            weight.requires_grad_().grad = torch.zeros_like(weight)
        self.fn = torch.compile(loss_of, backend="aot_hooks", options={"inner": "aten", "policy": policy})

    def step(self, by: float) -> None:
        self.fn(self.x, torch.tensor([by, 0.0]), *self.weights).backward()

    def error(self, by: float) -> float:
        """Of a step's gradients, beside eager mode in float64."""
        shift = torch.tensor([by, 0.0])
        found = torch.autograd.grad(self.fn(self.x, shift, *self.weights), self.weights)
        weights = [weight.detach().double().requires_grad_() for weight in self.weights]
        exact = torch.autograd.grad(loss_of(self.x.double(), shift, *weights), weights)
        return total_error([g.double() for g in found], [*exact])


@pytest.mark.slow
def test_a_loop_over_experts_stays_within_its_budget(tmp_path: Path) -> None:
    """First the plan is for all data, then for those of the first steps with a margin, then for more that came."""

    def most(run: Run, by: float) -> int:
        return most_allocated(lambda: run.step(by), tmp_path)

    stock = Run(KEEP)
    stock.step(0.0)
    peak = int(SHARE * most(stock, 0.0))
    run = Run(budget(peak))
    ratios = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        run.step(FEW[0])
        for by in FEW * 3:
            assert most(run, by) <= peak
            ratios.append(aot_hooks.last_plans(run.fn)[-1].step_ratio)
    assert ratios[-1] < ratios[0], "a plan for what the data are takes less time than one for all data"
    assert run.error(FEW[1]) <= 0.06
    with pytest.warns(BudgetWarning, match="larger than planned"):
        run.step(MORE)
    run.step(MORE)
    assert all(most(run, by) <= peak for by in (MORE, *FEW))
    assert run.error(MORE) <= 0.06


def test_sizes_are_planned_with_a_margin_and_never_beyond_their_bounds() -> None:
    sizes = DataSizes({"u0": 100, "u1": 100, "u2": 0}, {"u0": 100, "u1": 100, "u2": 0})
    assert not sizes.is_due()
    for n in (30, 40, 20):
        sizes.note(["u0", "u1", "u2", "s0"], [n, 90, 8, 7])
    assert sizes.is_due(), "u2 has no bound, and was larger than the 0 that it was planned as"
    sizes.plan()
    assert sizes.planned == {"u0": 50, "u1": 100, "u2": 10}
    assert sizes.is_due(), "the first steps are over"
    sizes.note(["u0"], [50])
    assert not sizes.is_due()
    sizes.note(["u0"], [51])
    assert sizes.is_due()


def test_an_expert_without_tokens_is_not_warned_of_as_one_of_unknown_sizes() -> None:
    run = Run(budget("2MiB"))
    alone = 1000.0  # the second expert gets no tokens
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        for _ in range(5):
            run.step(alone)
    assert run.error(alone) <= 0.06
    with pytest.warns(BudgetWarning, match="larger than planned"):
        run.step(0.0)
    assert run.error(0.0) <= 0.06


@pytest.mark.parametrize("layers", [1, 3])
def test_a_budget_that_is_too_low_is_said_where_the_backward_needs_no_size_of_the_data(layers: int) -> None:
    """With one layer nothing can have a hook."""

    def loss(x: Tensor, mask: Tensor, *weights: Tensor) -> Tensor:
        share = torch.nonzero(mask).float().mean()
        for weight in weights:
            x = F.gelu(x @ weight)
        return (x * share).square().mean()

    x, mask = torch.randn(8 * TOKENS, WIDTH), torch.arange(TOKENS) % 2
    weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(layers)]
    options = {"inner": "aten", "policy": budget("1MiB", allow=("recompute",))}
    fn = torch.compile(loss, backend="aot_hooks", options=options)
    for _ in range(3):
        fn(x, mask, *weights).backward()
    with pytest.raises(Exception) as e:
        fn(x, mask, *weights)
    assert isinstance(unwrapped(e.value), BudgetError)


def test_calls_of_one_graph_follow_the_data_once(tmp_path: Path) -> None:
    """Three calls in a step: planned for the bounds, then once for what was measured; then nothing is compiled."""
    torch.manual_seed(0)
    weights = [
        torch.randn(s).div(s[-2] ** 0.5) for s in ((WIDTH, EXPERTS), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    ]
    layers = [[w.clone().requires_grad_() for w in weights] for _ in range(3)]
    for weight in (w for layer in layers for w in layer):
        weight.grad = torch.zeros_like(weight)

    def block(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
        h = F.rms_norm(x, (WIDTH,))
        score, expert = (h @ router).softmax(-1).topk(1)
        out = x
        for i in range(EXPERTS):
            token, place = torch.where(expert == i)
            y = F.silu(h[token] @ up[i]) @ down[i]
            out = out.index_add(0, token, y * score[token, place, None])
        return out

    def step(fn: Any, seed: int) -> Tensor:
        x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(seed))
        for layer in layers:
            x = fn(x, *layer)
        loss = x.square().mean()
        loss.backward()
        return loss.detach()

    stock = torch.compile(block, backend="aot_hooks", options={"inner": "aten"})
    step(stock, 0)
    limit = int(0.8 * most_allocated(lambda: step(stock, 0), tmp_path))
    policy = budget(f"{limit}B", max_error=0)
    fn = torch.compile(block, backend="aot_hooks", options={"inner": "aten", "policy": policy})
    compiled: list[int] = []
    for seed in range(9):
        torch._dynamo.utils.counters.clear()
        loss = step(fn, seed)
        compiled.append(torch._dynamo.utils.counters["frames"]["ok"])
        assert float(loss) == pytest.approx(float(step(block, seed)), rel=1e-5)
    taken = most_allocated(lambda: step(fn, 9), tmp_path)
    assert not any(compiled[6:]), compiled
    assert taken <= limit, (taken, limit)
