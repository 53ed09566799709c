"""Steps under a budget whose calls hold nothing, in a checkpoint, or for ever, with a kept output."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

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
from torch import nn
from torch.utils.checkpoint import checkpoint

from aot_hooks.errors import BudgetError, BudgetWarning, UnusedWarning, unwrapped
from aot_hooks.planning import many
from aot_hooks.steps import recorder
from aot_hooks.torch_private import dynamo

x, compiled_kinds = many_blocks.x, many_blocks.compiled_kinds  # fixtures


def mark_count() -> int:
    (group,) = many._groups.values()
    return len(group.step.events)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def checkpointed(model: nn.Sequential, x: torch.Tensor, every: Callable[[int], bool], *, reentrant: bool) -> None:
    """A step in which those blocks are checkpointed for whose number `every` is true."""
    y = x
    for i, block in enumerate(model):
        y = checkpoint(block, y, use_reentrant=reentrant) if every(i) else block(y)
    y.sin().sum().backward()


def test_a_budget_says_once_for_each_function_that_what_is_checkpointed_does_not_count(x):
    model = model_of(Block, Other, Block, Block, Other)
    expected = gradients(model, x)
    compile_blocks(model, budget(peak_of(model, x, 5.0), max_error=0))
    with pytest.warns(UnusedWarning, match="torch.utils.checkpoint calls") as caught:
        for _ in range(3):
            found = train(model, x, lambda: checkpointed(model, x, lambda i: i > 1, reentrant=False))
            assert_equal(found, expected)
    names = [f"forward (many_blocks.py:{kind.forward.__code__.co_firstlineno})" for kind in (Block, Other)]
    says = [str(w.message) for w in caught]
    assert [name in text and "on top of the budget" in text for name, text in zip(names, says, strict=True)] == [
        True
    ] * 2


@pytest.mark.core
@pytest.mark.parametrize("first", [0, 1])
def test_blocks_beside_checkpointed_ones_are_planned(x, compiled_kinds, first):
    """Whichever is compiled first, at each of the budget's own compilations."""
    model = model_of(*[Block] * 8)
    expected, peak = gradients(model, x), peak_of(model[:4], x, 0.8)
    compile_blocks(model, budget(peak, max_error=0))
    for _ in range(4):
        found = train(model, x, lambda: checkpointed(model, x, lambda i: i % 2 == first, reentrant=False))
        assert_equal(found, expected)
    assert compiled_kinds == ["alone", "least", "planned"]


def test_a_budget_that_cannot_be_met_raises_beside_checkpointed_blocks(x):
    model = model_of(*[Block] * 8)
    compile_blocks(model, budget(peak_of(model[:4], x, 0.1), max_error=0))
    with pytest.raises(Exception, match="expected a step under") as caught:
        for _ in range(3):
            checkpointed(model, x, lambda i: i % 2 == 0, reentrant=False)
    assert isinstance(unwrapped(caught.value), BudgetError)


def test_a_call_is_of_the_step_while_checkpoints_run_its_graph_in_the_backward(x):
    model = model_of(*[Block] * 8)
    expected = gradients(model, x)
    compile_blocks(model, budget(peak_of(model, x, 5.0), max_error=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        for _ in range(3):
            found = train(model, x, lambda: checkpointed(model, x, bool, reentrant=True))
            assert_equal(found, expected)


# --- kept outputs -----------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_an_evaluation_that_is_kept_with_its_graph_is_left_out_of_steps(x, compiled_kinds, tmp_path):
    model = model_of(*[Block] * 6)
    expected, peak = gradients(model, x), peak_of(model, x, 0.6)
    compile_blocks(model, budget(peak, max_error=0))
    kept = [model(x)]
    with pytest.warns(BudgetWarning, match=r"6 calls of compiled graphs keep .*, and 48 others .*no_grad") as caught:
        for _ in range(14):
            assert_equal(train(model, x), expected)
    assert len([w for w in caught if issubclass(w.category, BudgetWarning)]) == 1
    assert compiled_kinds == ["alone", "least", "planned"]
    assert mark_count() == 12
    assert measured(model, x, tmp_path) <= peak
    kept.pop().sum().backward()
    assert mark_count() == 12
    assert_equal(train(model, x), expected)


def test_an_evaluation_of_other_sizes_is_left_out_later(x, compiled_kinds, monkeypatch):
    monkeypatch.setattr(recorder, "_MOST_AFTER", 40)
    model = model_of(*[Block] * 4)
    expected = gradients(model, x)
    compile_blocks(model, budget(peak_of(model, x, 0.6), max_error=0), dynamic=False)
    kept = [model(torch.randn(ROWS // 2, WIDTH))]
    with pytest.warns(BudgetWarning, match="40 others have come and gone since"):
        for _ in range(14):
            assert_equal(train(model, x), expected)
    assert compiled_kinds[-1] == "planned"
    assert mark_count() == 8
    assert kept


def test_an_evaluation_whose_output_is_kept_until_the_next_one(x, compiled_kinds, tmp_path):
    model = model_of(*[Block] * 4)
    expected = gradients(model, x)
    peak = peak_of(model, x, 0.6)
    compile_blocks(model, budget(peak, max_error=0))
    kept = []
    with pytest.warns(BudgetWarning, match="calls of compiled graphs keep .*no_grad") as caught:
        for _ in range(12):
            assert_equal(train(model, x), expected)
            kept = [model(x)]
    assert len([w for w in caught if issubclass(w.category, BudgetWarning)]) == 1
    assert compiled_kinds[-1] == "planned"
    assert kept
    assert measured(model, x, tmp_path) <= peak  # with what is kept as before it


def test_evaluation_with_gradients_has_no_step_without_an_end(x, monkeypatch):
    """Its last output is there until the next one is, so there is no point at which nothing is saved."""
    monkeypatch.setattr(recorder, "_MOST_EVENTS", 50)
    model = model_of(*[Block] * 4)
    compile_blocks(model, budget(peak_of(model, x, 5.0), max_error=0))
    with pytest.warns(BudgetWarning, match="torch.no_grad"):
        for _ in range(20):
            out = model(x)
            assert mark_count() <= 54
    del out
    train(model, x)
    train(model, x)
    assert mark_count() == 8


# --- kept graphs, threads, and warnings -------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("share", [0.3, 0.6, 0.8, 1.0])  # at 0.8 and 1.0 gradients alone exceed it
def test_a_backward_that_keeps_its_graph_is_said_once(x, share, tmp_path):
    model = model_of(*[Block] * 6)
    peak = peak_of(model, x, share)

    def step() -> None:
        out = loss_of(model, x)
        out.backward(retain_graph=True)
        out.backward()

    compile_blocks(model, budget(peak, max_error=0))
    with pytest.warns(BudgetWarning, match=r"retain_graph=True keeps .* may take [\d.]+ MiB") as caught:
        for _ in range(4):
            train(model, x, step)
    (said,) = (str(w.message) for w in caught if "retain_graph" in str(w.message))
    model.zero_grad(set_to_none=True)
    x.grad = None
    most = float(re.search(r"may take ([\d.]+) MiB", said)[1]) * 2**20
    assert peak < most_allocated(step, tmp_path) <= 1.05 * most


def test_a_step_is_planned_once_no_other_thread_compiles_its_functions(x, compiled_kinds, monkeypatch, tmp_path):
    model = model_of(*[Block] * 6)
    expected, peak = gradients(model, x), peak_of(model, x, 0.6)
    compile_blocks(model, budget(peak, max_error=0))
    monkeypatch.setattr(dynamo, "why_not_anew", lambda code: dynamo.BUSY)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)  # it passes by itself
        for _ in range(4):
            assert_equal(train(model, x), expected)
    assert compiled_kinds == ["alone"]
    with pytest.warns(BudgetWarning, match="a thread was compiling them"):
        for _ in range(8):
            train(model, x)
    monkeypatch.undo()
    for _ in range(4):
        assert_equal(train(model, x), expected)
    assert measured(model, x, tmp_path) <= peak


def test_a_later_step_that_takes_more_is_said_again(x, monkeypatch):
    monkeypatch.setattr(many, "_MOST_COMPILED", 2)
    rule = budget(peak_of(model_of(*[Block] * 4), x, 0.6), max_error=0)
    counts = []
    for depth in (4, 12, 12, 60):
        model = model_of(*[Block] * depth)
        compile_blocks(model, rule)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", BudgetWarning)
            for _ in range(4):
                train(model, x)
        counts.append(sum("Its functions are not compiled again" in str(w.message) for w in caught))
    assert counts == [0, 1, 0, 1]
