"""A loss that is not compiled, between the forwards and the backwards of many compiled calls: its bytes count.

A CPU has no counters. Here they say what torch's profiler has measured for the loss alone.
"""

from __future__ import annotations

from typing import Any

import many_blocks
import pytest
import torch
from many_blocks import Block, assert_equal, compile_blocks, model_of, peak_of, train
from profiled import most_allocated
from small_budgets import budget

import aot_hooks
from aot_hooks.errors import BudgetWarning
from aot_hooks.planning import many
from aot_hooks.planning import measured as measuring
from aot_hooks.planning.before_step import BeforeStep
from aot_hooks.steps.memory import Bytes, Moment
from aot_hooks.steps.moments import Instant, instants_of, moments_of, shares
from aot_hooks.steps.recorder import Recorder, Step

x, compiled_kinds = many_blocks.x, many_blocks.compiled_kinds  # fixtures


class Counters:
    """Those of a device on which a loss takes `loss_bytes`, and a step what was predicted."""

    def __init__(self, loss_bytes: int) -> None:
        self.loss_bytes, self.restarts = loss_bytes, 0

    def __call__(self, device: torch.device) -> Counters:
        return self

    def allocated(self) -> int:
        return 1000

    def most(self) -> int:
        return 1000 + self.loss_bytes

    def restart(self) -> None:
        self.restarts += 1


def loss_of(y: torch.Tensor) -> torch.Tensor:
    """It takes more than the backward of a block."""
    return torch.cat([y.double()] * 4, dim=-1).pow(2).mean()


@pytest.mark.parametrize("share", [0.7, 0.5])
@pytest.mark.parametrize("counts", [True, False])
def test_a_loss_that_takes_more_than_a_backward_is_planned_for(x, share, counts, monkeypatch, tmp_path):
    """It is seen in the first step. Without that, the step is over the budget."""
    model = model_of(*[Block] * 8)
    eager = torch.autograd.grad(loss_of(model(x)), [*model.parameters()])
    y = torch.randn_like(x).requires_grad_()
    alone = most_allocated(lambda: loss_of(y).backward(), tmp_path)
    peak = peak_of(model, x, share)
    counters = Counters(alone if counts else 0)
    monkeypatch.setattr(measuring, "Counters", counters)
    monkeypatch.setattr(measuring, "_cuda_device", lambda plans: torch.device("cpu"))
    compile_blocks(model, budget(peak, max_error=0))

    def step() -> None:
        loss_of(model(x)).backward()

    for _ in range(4):
        assert_equal(train(model, x, step), eager)
    restarts = counters.restarts
    model.zero_grad(set_to_none=True)
    taken, (plan,) = most_allocated(step, tmp_path), aot_hooks.last_plans(model)
    assert plan.in_step is not None and plan.in_step.calls == 8
    if counts:
        assert 0.97 * plan.peak_bytes < taken <= plan.peak_bytes <= peak
    else:
        assert taken > 1.03 * plan.peak_bytes
    assert counters.restarts == restarts, "only a step that may be planned is counted"


def test_a_loaded_plan_counts_the_loss_without_measuring_it(x, compiled_kinds, monkeypatch, tmp_path):
    model, counters = model_of(*[Block] * 8), Counters(120_000)
    eager, peak = torch.autograd.grad(loss_of(model(x)), [*model.parameters()]), peak_of(model, x, 0.7)
    monkeypatch.setattr(measuring, "Counters", counters)
    monkeypatch.setattr(measuring, "_cuda_device", lambda plans: torch.device("cpu"))

    def plans() -> tuple[aot_hooks.Plan, ...]:
        compile_blocks(model, budget(peak, max_error=0))
        for _ in range(4):
            assert_equal(train(model, x, lambda: loss_of(model(x)).backward()), eager)
        return aot_hooks.last_plans(model)

    (planned,) = plans()
    assert aot_hooks.save_plans(tmp_path / "plans.json") == 1
    torch._dynamo.reset()
    aot_hooks.reset()
    compiled_kinds.clear()
    aot_hooks.load_plans(tmp_path / "plans.json")
    restarts = counters.restarts
    (loaded,) = plans()
    assert loaded.in_step == planned.in_step and loaded.peak_bytes == planned.peak_bytes
    assert compiled_kinds == ["planned"] and counters.restarts == restarts
    (group,) = many._groups.values()
    assert group.loss_bytes == max(each.loss_bytes for each in group.traces[-1]) > 0


def test_the_loss_is_an_instant_at_which_all_calls_hold_something() -> None:
    step = Step()
    recorder = Recorder("", "", BudgetWarning, lambda ended: None, step=step)
    calls = [recorder.saves(what) for what in "aab"]
    for call in reversed(calls):
        recorder.reads(call)
        step.release(call)
    found = instants_of(step.trace(), str, [0, 0, 0, 0, 5, 9], 1, loss_bytes=100)
    assert found[3] == Instant("", None, {"a": 2, "b": 1}, 0, 1, loss_bytes=100)
    assert [*found[:3], *found[4:]] == instants_of(step.trace(), str, [0, 0, 0, 0, 5, 9], 1)
    sizes = {"a": Bytes(20, 10, 30), "b": Bytes(7, 3, 8)}
    assert found[3].nbytes(sizes.__getitem__) == 100 + 1 + 2 * 10 + 3
    assert Moment("", 2, 100 + 1 + 3) in moments_of("a", [found], sizes.__getitem__)
    assert Moment("", 1, 100 + 1 + 20) in moments_of("b", [found], sizes.__getitem__)
    least = dict.fromkeys("ab", Bytes(0, 0, 0))
    assert shares(found, least, sizes, 110) == (110 - 101) / 23


def test_microbatches_of_a_pipeline_each_have_a_loss() -> None:
    step = Step()
    recorder = Recorder("", "", BudgetWarning, lambda ended: None, step=step)
    calls = [recorder.saves("a"), recorder.saves("a")]
    for number in range(3):
        recorder.reads(calls[number])
        step.release(calls[number])
        calls += [recorder.saves("a")] if not number else []
    backwards = [("backward", 1), ("backward", 0)]
    found = [(i.phase, i.holding.get("a", 0)) for i in instants_of(step.trace(), str, loss_bytes=1)]
    assert found == [("forward", 0), ("forward", 1), ("", 2), ("backward", 1), ("forward", 1), ("", 2), *backwards]


def test_what_a_loss_takes_is_counted_from_the_last_forward() -> None:
    counters: Any = Counters(1000)
    before = BeforeStep(counters)
    assert before.loss_bytes() is None
    before.forward_ended()
    before.forward_ended()
    assert counters.restarts == 2 and before.loss_bytes() == 1000 and before.loss_bytes() is None
    for nbytes, rounded in ((100, 100), (603_979_776, 603_979_776), (604_000_000, 612_368_384), (-5, 0)):
        counters.loss_bytes = nbytes
        before.forward_ended()
        assert before.loss_bytes() == rounded and rounded <= max(0, nbytes) * (1 + 1 / 64)
    before.close()
