"""A budget for a step of many compiled calls: planned together after the first steps, and not compiled for ever."""

from __future__ import annotations

import gc
import math
import threading
import warnings
from typing import Any

import many_blocks
import pytest
import torch
from many_blocks import (
    ROWS,
    WIDTH,
    Block,
    Other,
    assert_equal,
    compile_blocks,
    gradients,
    loss_of,
    measured,
    model_of,
    peak_of,
    train,
)
from profiled import most_allocated
from small_budgets import budget
from steps import ATEN
from torch import nn
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks.errors import BudgetError, BudgetWarning, unwrapped
from aot_hooks.planning import many
from aot_hooks.report.text import report_as_data

x, compiled_kinds = many_blocks.x, many_blocks.compiled_kinds  # fixtures


# --- equal blocks -----------------------------------------------------------------------------------------------------


def in_place(model: nn.Sequential, options: dict[str, Any]) -> nn.Module:
    for block in model:
        block.compile(backend="aot_hooks", options=options)
    return model


def one_by_one(model: nn.Sequential, options: dict[str, Any]) -> nn.Module:
    return nn.Sequential(*(torch.compile(block, backend="aot_hooks", options=options) for block in model))


@pytest.mark.core
@pytest.mark.parametrize(
    ("share", "compiled"),
    [
        (0.45, in_place),
        (0.75, one_by_one),
        pytest.param(0.45, one_by_one, marks=pytest.mark.slow),
        pytest.param(0.75, in_place, marks=pytest.mark.slow),
    ],
)
def test_the_third_step_of_equal_blocks_stays_under_the_budget(x, compiled, share, compiled_kinds, tmp_path):
    model = model_of(*[Block] * 6)
    expected, peak = gradients(model, x), peak_of(model, x, share)
    blocks = compiled(model, {**ATEN, "policy": budget(peak, max_error=0)})
    for _ in range(2):
        assert_equal(train(blocks, x), expected)
    assert measured(blocks, x, tmp_path) <= peak
    for _ in range(2):
        assert_equal(train(blocks, x), expected)
    assert compiled_kinds == ["alone", "least", "planned"]
    (plan,) = aot_hooks.last_plans(blocks)
    assert plan.in_step.calls == 6
    assert plan.peak_bytes <= peak
    assert abs(plan.peak_bytes - measured(blocks, x, tmp_path)) <= 0.06 * plan.peak_bytes


@pytest.mark.parametrize("kept", ["nothing", "hidden states", "a view of the last one"])
def test_what_a_call_returned_counts_in_its_backward_if_the_program_holds_it(x, kept, tmp_path):
    """What a block returned is free before its own backward, if only the next one has read it."""
    model, held = model_of(*[Block] * 6), []
    expected, peak = gradients(model, x), peak_of(model, x, 0.6)
    compile_blocks(model, budget(peak, max_error=0, allow=("recompute",)))

    def forward() -> torch.Tensor:
        y = x
        for block in model:
            y = block(y)
            if kept == "hidden states":
                held.append(y)
        if kept == "a view of the last one":
            held.append(y.detach()[0])
        return y.sin().sum()

    def step() -> None:
        held.clear()
        forward().backward()

    for _ in range(4):
        assert_equal(train(model, x, step), expected)
    (group,) = many._groups.values()
    freed = [instant.freed_bytes for instant in group.traces[-1]]
    found = {"nothing": [1] * 6, "hidden states": [0, -1, -2, -3, -4, -5], "a view of the last one": [0] * 6}[kept]
    assert freed == [0] * 6 + [n * x.nbytes for n in found]
    held.clear()
    model.zero_grad(set_to_none=True)
    most = most_allocated(step, tmp_path)
    (plan,) = aot_hooks.last_plans(model)
    assert plan.peak_bytes <= peak
    assert most - plan.peak_bytes == 8, "the loss and its gradient, which no graph has made"


class Written(Block):
    """It returns a buffer that it has written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("result", torch.zeros(ROWS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.result.copy_(super().forward(x))


def test_blocks_that_return_a_buffer_are_planned(x, compiled_kinds, tmp_path):
    model = model_of(*[Written] * 6)
    expected, peak = gradients(model_of(*[Block] * 6), x), peak_of(model_of(*[Block] * 6), x, 0.5)

    def step() -> None:
        for block in model:
            block.result.detach_()
        loss_of(model, x).backward()

    compile_blocks(model, budget(peak, max_error=0))
    for _ in range(4):
        assert_equal(train(model, x, step), expected)
    assert compiled_kinds[-1] == "planned"
    model.zero_grad(set_to_none=True)
    x.grad = None
    (plan,) = aot_hooks.last_plans(model)
    assert most_allocated(step, tmp_path) <= plan.peak_bytes <= peak


def test_logits_that_the_program_keeps_count_in_all_backwards(tmp_path):
    """As in `out = model(x)`, `out.loss.backward()`. The gradients of wide blocks put the peak at the end."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(x).tanh())

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Linear(WIDTH, 2048)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight(x)

    x, model, kept = torch.randn(160, WIDTH, requires_grad=True), model_of(*[Wide] * 5, Head), []
    expected, peak = gradients(model, x), peak_of(model, x, 0.85)
    compile_blocks(model, budget(peak, max_error=0, allow=("recompute",)))

    def step() -> None:
        kept[:] = [model(x)]
        kept[0].sin().sum().backward()

    for _ in range(4):
        assert_equal(train(model, x, step), expected)
    kept.clear()
    model.zero_grad(set_to_none=True)
    x.grad = None
    (group,) = many._groups.values()
    most = most_allocated(step, tmp_path)
    assert most <= peak
    assert most - group.predicted == 8


def test_a_step_that_holds_more_outputs_than_the_planned_one_is_planned_again(tmp_path):
    """The first step, which is planned, drops what the last block returned; the others keep it for a while."""
    x, model, kept = torch.randn(256, WIDTH, requires_grad=True), model_of(*[Block] * 6), []
    expected = gradients(model, x)

    def step() -> None:
        y = model(x)
        loss = y.sin().sum()
        kept[:] = [y] if is_planned() else []
        del y
        loss.backward()

    def is_planned() -> bool:
        return any(group.traces for group in many._groups.values())

    def peaks(budgeted: int) -> tuple[int, int]:
        torch._dynamo.reset()
        many._groups.clear()
        compile_blocks(model, budget(budgeted, max_error=0, allow=("recompute",)))
        for _ in range(5):
            assert_equal(train(model, x, step), expected)
        kept.clear()
        model.zero_grad(set_to_none=True)
        x.grad = None
        (group,) = many._groups.values()
        return group.predicted, most_allocated(step, tmp_path)

    peak = int(0.75 * peak_of(model, x, 1))
    predicted, most = peaks(peak)
    assert most - predicted == 8 and predicted <= peak
    tight = predicted - x.nbytes // 2  # fits where the output is dropped, and not where it is kept
    predicted, most = peaks(tight)
    assert most - predicted == 8 and predicted <= tight


def test_the_graph_that_is_planned_first_says_what_the_step_takes(tmp_path):
    """Its plan counts the shares of graphs that are planned after it, which take less."""
    x, model = torch.randn(ROWS, WIDTH), model_of(*[Block] * 6)  # no gradient: the first block has a graph of its own
    expected, peak = gradients(model, x), peak_of(model, x, 0.35)
    compile_blocks(model, budget(peak, max_error=0, allow=("recompute",)))
    for _ in range(4):
        assert_equal(train(model, x), expected)
    plans = aot_hooks.last_plans(model)
    assert len(plans) == 2 and all(plan.in_step is not None for plan in plans)
    assert measured(model, x, tmp_path) - max(plan.peak_bytes for plan in plans) == 8


def test_a_plan_for_each_block_alone_is_far_over_the_budget(x, tmp_path, monkeypatch):
    model = model_of(*[Block] * 6)
    peak = peak_of(model, x, 0.6)
    monkeypatch.setattr(many, "noted", lambda run, version: run)
    compile_blocks(model, budget(peak, max_error=0))
    train(model, x)
    train(model, x)
    assert measured(model, x, tmp_path) > 1.5 * peak


def test_the_first_step_is_under_the_budget_too_where_blocks_are_small(x, tmp_path):
    model = model_of(*[Block] * 10)
    peak = peak_of(model, x, 0.5)
    compile_blocks(model, budget(peak, max_error=0))
    assert measured(model, x, tmp_path) <= peak


def test_rounding_means_stay_within_the_error_and_the_budget(x, tmp_path):
    model = model_of(*[Block] * 5)
    expected, peak = gradients(model, x), peak_of(model, x, 0.7)
    compile_blocks(model, budget(peak, allow=("int8", "float8")))
    for _ in range(3):
        found = train(model, x)
        apart = sum((f - e).square().sum() for f, e in zip(found, expected, strict=True))
        assert 0 < math.sqrt(apart / sum(e.square().sum() for e in expected)) <= 0.05
    assert measured(model, x, tmp_path) <= 1.03 * peak


def test_a_whole_model_in_one_graph_is_compiled_once(x, compiled_kinds):
    model = model_of(*[Block] * 3)
    policy = budget(peak_of(model, x, 0.7), max_error=0)
    expected = aot_hooks.plan(model, x, policy=policy, inner="aten")
    compiled = torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": policy})
    for _ in range(3):
        train(compiled, x)
    assert compiled_kinds == ["alone"]
    (plan,) = aot_hooks.last_plans(compiled)
    assert plan.decisions == expected.decisions
    assert plan.in_step is None


def test_blocks_that_fit_as_they_are_are_compiled_once(x, compiled_kinds):
    model = model_of(*[Block] * 4)
    compile_blocks(model, budget(peak_of(model, x, 5.0), max_error=0))
    for _ in range(3):
        train(model, x)
    assert compiled_kinds == ["alone"]


def test_a_context_around_the_calls(x, tmp_path):
    model = model_of(*[Block] * 6)
    expected, peak = gradients(model, x), peak_of(model, x, 0.6)
    for block in model:
        block.compile(backend="aot_hooks", options=ATEN)

    def step() -> None:
        with aot_hooks.saved_tensors_policy(budget(peak, max_error=0)):
            loss = loss_of(model, x)
        loss.backward()

    for _ in range(3):
        assert_equal(train(model, x, step), expected)
    model.zero_grad(set_to_none=True)
    x.grad = None
    assert most_allocated(step, tmp_path) <= peak


# --- different graphs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kinds",
    [
        (Block, Other) * 3,
        pytest.param((Other, Block, Block, Block), marks=pytest.mark.slow),
        (Block, Block, Block, Other),
    ],
)
def test_different_blocks_share_the_budget(x, kinds, compiled_kinds, tmp_path):
    model = model_of(*kinds)
    expected, peak = gradients(model, x), peak_of(model, x, 0.7)
    compile_blocks(model, budget(peak, max_error=0))
    for _ in range(3):
        assert_equal(train(model, x), expected)
    assert measured(model, x, tmp_path) <= peak
    count = len(compiled_kinds)
    assert count <= 6
    plans = aot_hooks.last_plans(model)
    assert len(plans) == 2
    assert max(plan.peak_bytes for plan in plans) <= peak
    for _ in range(3):
        assert_equal(train(model, x), expected)
    assert len(compiled_kinds) == count


def test_a_first_block_without_a_gradient_of_its_input_is_another_graph(compiled_kinds, tmp_path):
    model, x = model_of(*[Block] * 6), torch.randn(ROWS, WIDTH)
    expected, peak = gradients(model, x), peak_of(model, x, 0.6)
    compile_blocks(model, budget(peak, max_error=0))
    for _ in range(3):
        assert_equal(train(model, x), expected)
    assert measured(model, x, tmp_path) <= peak
    assert len(compiled_kinds) <= 7


@pytest.mark.core
def test_a_graph_break_in_the_middle(x, compiled_kinds, tmp_path):
    first, second = model_of(Block, Block), model_of(Other)
    model = nn.Sequential(first, second)

    def both(x: torch.Tensor) -> torch.Tensor:
        y = first(x)
        torch._dynamo.graph_break()
        return second(y).sin().sum()

    expected, peak = train(model, x, lambda: both(x).backward()), peak_of(model, x, 0.75)
    compiled = torch.compile(both, backend="aot_hooks", options={**ATEN, "policy": budget(peak, max_error=0)})
    for _ in range(4):
        assert_equal(train(model, x, lambda: compiled(x).backward()), expected)
    assert compiled_kinds.count("planned") == 2
    count = len(compiled_kinds)
    assert count <= 6
    model.zero_grad(set_to_none=True)
    x.grad = None
    assert most_allocated(lambda: compiled(x).backward(), tmp_path) <= peak
    assert len(compiled_kinds) == count
    assert max(plan.peak_bytes for plan in aot_hooks.last_plans(compiled)) <= peak


# --- what is no change of a step --------------------------------------------------------------------------------------


def test_inference_and_more_batches_before_the_optimizer_change_nothing(x, compiled_kinds):
    model = model_of(*[Block] * 5)
    expected = gradients(model, x)
    compile_blocks(model, budget(peak_of(model, x, 0.6), max_error=0))
    for _ in range(2):
        with torch.no_grad():
            model(x)
        assert_equal(train(model, x), expected)
        with torch.no_grad():
            model(x)
    count = len(compiled_kinds)
    model.zero_grad(set_to_none=True)
    for _ in range(3):
        loss_of(model, x).backward()
    with torch.inference_mode():
        model.eval()(x)
    model.train()
    assert_equal(train(model, x), expected)
    assert len(compiled_kinds) == count == 3


def test_activation_checkpointing_holds_nothing_that_counts(x, compiled_kinds):
    model = model_of(*[Block] * 5)
    expected, peak = gradients(model, x), peak_of(model, x, 0.6)
    compile_blocks(model, budget(peak, max_error=0))
    train(model[:1], x)  # outside of a checkpoint first

    def step() -> None:
        y = x
        for block in model:
            y = checkpoint(block, y, use_reentrant=False)
        y.sin().sum().backward()

    for _ in range(3):
        assert_equal(train(model, x, step), expected)
    assert compiled_kinds == ["alone"]


def test_fewer_calls_keep_the_plan(x, compiled_kinds):
    model = model_of(*[Block] * 6)
    compile_blocks(model, budget(peak_of(model, x, 0.6), max_error=0))
    for _ in range(3):
        train(model, x)
    count = len(compiled_kinds)
    for size in (3, 1, 5):
        train(model[:size], x)
    assert len(compiled_kinds) == count


# --- what is ----------------------------------------------------------------------------------------------------------


def test_more_calls_are_planned_for_once(x, compiled_kinds, tmp_path):
    model = model_of(*[Block] * 8)
    expected, peak = gradients(model, x), peak_of(model, x, 0.5)
    compile_blocks(model, budget(peak, max_error=0))
    for _ in range(3):
        train(model[:4], x)
    assert compiled_kinds == ["alone", "least", "planned"]
    for _ in range(3):
        assert_equal(train(model, x), expected)
    assert measured(model, x, tmp_path) <= peak
    assert compiled_kinds[3:] == ["planned"]
    for _ in range(2):
        train(model[:4], x)
        train(model, x)
    assert len(compiled_kinds) == 4


@pytest.mark.slow
def test_steps_that_change_again_and_again_are_a_warning_in_the_end(x, compiled_kinds):
    model = model_of(*[Block] * 12)
    expected = gradients(model, x)
    compile_blocks(model, budget(peak_of(model, x, 0.35), max_error=0))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for size in (3, 4, 5, 6, 7, 8, 9, 10, 11, 12):
            for _ in range(3):
                train(model[:size], x)
        assert_equal(train(model, x), expected)
    said = [str(w.message) for w in seen if w.category is BudgetWarning]
    assert 1 <= len(said) <= 2, "a second one for a step that takes much more"
    assert all("more than the budget. Its functions are not compiled again: they were" in text for text in said)
    assert len(compiled_kinds) <= 1 + many._MOST_COMPILED


def test_a_first_plan_that_can_not_be_is_an_error_at_the_call_and_names_the_step(x):
    model = model_of(*[Block] * 6)
    least = aot_hooks.plan(Block(), x, policy=budget(max_slowdown=math.inf, max_error=0), inner="aten").peak_bytes
    compile_blocks(model, budget(int(1.05 * least), max_error=0))
    with pytest.raises(Exception, match="expected a step under") as wrapped:
        for _ in range(4):
            train(model, x)
    error = unwrapped(wrapped.value)
    assert isinstance(error, BudgetError)
    assert "The step has 6 calls of this graph at the same time, each of which then holds" in str(error)
    least = float(str(error).split("least that was found takes ")[1].split(" MiB")[0])
    del wrapped, error
    torch._dynamo.reset()
    expected = gradients(model_of(*[Block] * 6), x)
    compile_blocks(model, budget(int((least + 0.02) * 2**20), max_error=0))
    for _ in range(3):
        assert_equal(train(model, x), expected)


def test_gradients_from_before_a_step_are_none_of_its_bytes(tmp_path):
    """The budget is below the gradients and what a backward takes. The first step makes them, later ones add."""
    torch.manual_seed(0)
    model, x = model_of(*[Block] * 6), torch.randn(64, WIDTH, requires_grad=True)
    expected, peak = gradients(model, x), 400_000
    compile_blocks(model, budget(peak, max_error=0))
    for step in range(5):
        model.zero_grad(set_to_none=False)
        taken = most_allocated(lambda: loss_of(model, x).backward(), tmp_path)
        assert taken <= peak or step == 0
        assert_equal([p.grad for p in model.parameters()], expected)
    assert all(plan.in_step is not None and plan.in_step.other_bytes == 0 for plan in aot_hooks.last_plans(model))
    with pytest.warns(BudgetWarning, match="gradients that the step makes hold up to"):
        for _ in range(4):  # each makes them again
            assert_equal(train(model, x), expected)


def test_a_later_plan_that_can_not_be_is_a_warning_and_the_least_is_taken(x):
    model = model_of(*[Block] * 24)
    expected, peak = gradients(model, x), peak_of(model[:4], x, 0.6)
    compile_blocks(model, budget(peak, max_error=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        for _ in range(3):
            train(model[:4], x)
    with pytest.warns(BudgetWarning, match="The least that was found for it takes") as seen:
        for _ in range(4):
            assert_equal(train(model, x), expected)
    assert len([w for w in seen if w.category is BudgetWarning]) == 1


# --- clean states -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", [1, 4])
def test_an_exception_in_the_first_step_leaves_nothing(x, fails_at, compiled_kinds, tmp_path):
    model = model_of(*[Block] * 6)
    expected, peak = gradients(model, x), peak_of(model, x, 0.6)
    compile_blocks(model, budget(peak, max_error=0))

    def fails(*_: Any) -> None:
        raise KeyError("a hook of the user's")

    handle = model[fails_at].register_forward_pre_hook(fails)
    with pytest.raises(KeyError):
        train(model, x)
    handle.remove()
    gc.collect()
    for _ in range(3):
        assert_equal(train(model, x), expected)
    assert aot_hooks.last_plans(model)[-1].in_step.calls == 6
    assert measured(model, x, tmp_path) <= peak
    (group,) = many._groups.values()
    assert not group.step.holding


def test_outputs_without_a_backward_do_not_add_to_the_next_step(x, compiled_kinds):
    model = model_of(*[Block] * 4)
    compile_blocks(model, budget(peak_of(model, x, 0.6), max_error=0))
    for _ in range(4):
        train(model, x)
        model(x)  # dropped at once
    assert aot_hooks.last_plans(model)[-1].in_step.calls == 4
    assert len(compiled_kinds) == 3


def test_threads_have_steps_of_their_own(x):
    models = [model_of(*[Block] * 5) for _ in range(2)]
    expected = gradients(models[0], x)
    policy = budget(peak_of(models[0], x, 0.6), max_error=0)
    for model in models:
        compile_blocks(model, policy)
    train(models[0], x)  # compiles; Dynamo does that in one thread at a time anyway
    found: list[list[torch.Tensor]] = [[], []]
    meet = threading.Barrier(2)

    def run(number: int) -> None:
        own = x.detach().clone().requires_grad_()
        for _ in range(4):
            model = models[number]
            model.zero_grad(set_to_none=True)
            loss = loss_of(model, own)
            meet.wait()  # both hold what they saved
            loss.backward()
            meet.wait()
        found[number] = [p.grad for p in model.parameters()]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        assert_equal(each, expected)
    plans = [plan for model in models for plan in aot_hooks.last_plans(model)]
    assert {plan.in_step.calls for plan in plans} == {5}


def test_reset_forgets_steps(x):
    model = model_of(*[Block] * 4)
    compile_blocks(model, budget(peak_of(model, x, 0.6), max_error=0))
    train(model, x)
    assert many._groups
    torch._dynamo.reset()
    assert not many._groups


def test_a_graph_compiled_beside_what_never_had_a_backward_is_compiled_for_its_own_steps(x, compiled_kinds):
    model, other = model_of(*[Block] * 4), model_of(Other)
    policy = budget(peak_of(model, x, 0.6), max_error=0)
    compile_blocks(model, policy)
    compile_blocks(other, policy)
    held = model(x)
    train(other, x)
    assert compiled_kinds[-1] == "least"
    del held
    gc.collect()
    for _ in range(3):
        train(other, x)
    assert compiled_kinds[-1] == "alone"
    assert aot_hooks.last_plans(other)[-1].in_step is None


def test_where_the_stance_forbids_to_compile_steps_go_on_with_one_warning(x, compiled_kinds):
    model = model_of(*[Block] * 6)
    expected = gradients(model, x)
    compile_blocks(model, budget(peak_of(model, x, 0.5), max_error=0))
    train(model[:1], x)
    with torch.compiler.set_stance("default"):  # resets the stance on exit, also after a failure
        torch.compiler.set_stance("fail_on_recompile")
        with pytest.warns(BudgetWarning, match="set_stance forbids it") as seen:
            for _ in range(5):
                assert_equal(train(model, x), expected)
    assert len([w for w in seen if w.category is BudgetWarning]) == 1
    assert compiled_kinds == ["alone"]


def test_compiled_autograd_gives_the_same(x):
    model = model_of(*[Block] * 3)
    expected = gradients(model, x)
    compile_blocks(model, budget(peak_of(model, x, 0.75), max_error=0))
    for _ in range(3):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            assert_equal(train(model, x), expected)


# --- warm starts ------------------------------------------------------------------------------------------------------


def test_a_warm_start_takes_the_stored_plans_and_another_model_does_not(x, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def run(model: nn.Module) -> tuple[aot_hooks.Plan, dict[str, Any]]:
        torch._dynamo.reset()
        compile_blocks(model, policy)
        for _ in range(3):
            train(model, x)
        (plan,) = aot_hooks.last_plans(model)
        return plan, aot_hooks.cache_stats()

    policy = budget(peak_of(model_of(*[Block] * 5), x, 0.6), max_error=0)
    with torch._functorch.config.patch(bundled_autograd_cache=True):
        cold, seen = run(model_of(*[Block] * 5))
        assert seen["misses"] == 3  # the least is a hit, where the first calls run it beside the plan
        warm, seen = run(model_of(*[Block] * 5))
        assert seen["misses"] == 0
        assert (warm.decisions, warm.in_step, warm.peak_bytes) == (cold.decisions, cold.in_step, cold.peak_bytes)
        longer, seen = run(model_of(*[Block] * 7))
        assert seen["misses"] == 1
        assert longer.in_step.calls == 7


# --- reports ----------------------------------------------------------------------------------------------------------


def test_a_report_says_what_the_other_calls_hold(x):
    model = model_of(*[Block] * 5)
    compile_blocks(model, budget(peak_of(model, x, 0.6), max_error=0))
    for _ in range(3):
        train(model, x)
    plans = aot_hooks.last_plans(model)
    text = aot_hooks.format_report(plans)
    assert f"-> {plans[0].peak_bytes / 2**10:.2f} KiB" in text
    assert "of a step in which 5 calls of one graph hold saved tensors at the same time" in text


def test_a_report_of_several_graphs_has_the_peaks_of_the_step(x):
    """Live bytes of a plan count the other graphs as planned, also those without hooks."""
    model = model_of(Block, Other, Block)
    stock = peak_of(model, x, 1.0)
    compile_blocks(model, budget(int(0.8 * stock), max_error=0))
    for _ in range(4):
        train(model, x)
    plans = aot_hooks.last_plans(model)
    assert len(plans) == 2
    (peak,) = {plan.peak_bytes for plan in plans}
    stock -= x.nbytes  # nothing holds what the last block returned once its backward begins
    for given in (plans, plans[::-1]):
        text = aot_hooks.format_report(given)
        assert f": {stock / 2**20:.2f} -> {peak / 2**20:.2f} MiB" in text
        assert "other tensors are alive" not in text
    totals = report_as_data(plans)["totals"]
    assert (totals["predicted_peak_before_bytes"], totals["predicted_peak_after_bytes"]) == (stock, peak)
