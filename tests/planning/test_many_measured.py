"""The peaks that steps of many compiled calls are measured to have, beside their budget."""

from __future__ import annotations

import warnings
from typing import Any

import many_blocks
import pytest
import torch
from many_blocks import (
    Block,
    Other,
    assert_equal,
    compile_blocks,
    gradients,
    loss_of,
    model_of,
    peak_of,
    train,
)
from profiled import most_allocated
from small_budgets import budget
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import aot_hooks
from aot_hooks.errors import BudgetWarning
from aot_hooks.planning import many
from aot_hooks.planning import measured as measuring
from aot_hooks.planning.before_step import BeforeStep
from aot_hooks.steps import parameters
from aot_hooks.steps.recorder import Recorder, Step

x, compiled_kinds = many_blocks.x, many_blocks.compiled_kinds  # fixtures


@pytest.fixture(autouse=True)
def no_loss(monkeypatch):
    """The counters of these tests say what whole steps take. test_many_loss.py has what a loss takes."""
    monkeypatch.setattr(BeforeStep, "forward_ended", lambda self: None)


class Scripted:
    """Counters that say what each step took, once it is measured alone; before that, too much."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.restarts, self.taken = iter(steps), 0, 1 << 40

    def __call__(self, device: torch.device) -> Scripted:
        self.taken = 1 << 40
        return self

    def allocated(self) -> int:
        return 1000

    def most(self) -> int:
        return 1000 + self.taken

    def restart(self) -> None:
        self.taken, self.restarts = next(self.steps), self.restarts + 1


def measured_steps(
    model: nn.Module, x: torch.Tensor, counters: Scripted, monkeypatch: Any, share: float = 0.7
) -> list[str]:
    """Twelve steps with `counters`, under a budget of a share of what they take without; their warnings."""
    expected = gradients(model, x)
    compile_blocks(model, budget(peak_of(model, x, share), max_error=0))
    monkeypatch.setattr(measuring, "Counters", counters)
    monkeypatch.setattr(measuring, "_cuda_device", lambda plans: torch.device("cpu"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(12):
            assert_equal(train(model, x), expected)
    return [str(w.message) for w in seen if w.category is BudgetWarning]


@pytest.mark.parametrize("kinds", [(Block,) * 5, (Other, Block, Block, Block)])
def test_a_measured_step_over_the_budget_gets_one_tighter_plan(x, kinds, compiled_kinds, monkeypatch):
    model = model_of(*kinds)
    peak, excess = peak_of(model, x, 0.7), 64 << 10
    counters = Scripted(peak + excess, peak - excess)
    assert not measured_steps(model, x, counters, monkeypatch)
    assert max(plan.peak_bytes for plan in aot_hooks.last_plans(model)) <= peak - excess
    assert compiled_kinds.count("planned") == 2 * len(set(kinds))
    assert counters.restarts == 2


def test_a_tighter_plan_that_is_over_the_budget_too_is_a_warning(x, compiled_kinds, monkeypatch):
    model = model_of(*[Block] * 5)
    peak = peak_of(model, x, 0.7)
    (text,) = measured_steps(model, x, Scripted(peak + 1000, peak + 5000), monkeypatch)
    assert "with a plan that is tighter" in text
    assert "for the compiled graphs of the step" in text
    assert compiled_kinds.count("planned") == 2


def test_a_measured_step_within_the_budget_keeps_its_plan(x, compiled_kinds, monkeypatch):
    model = model_of(*[Block] * 5)
    counters = Scripted(peak_of(model, x, 0.7))
    assert not measured_steps(model, x, counters, monkeypatch)
    assert compiled_kinds == ["alone", "least", "planned"]
    assert counters.restarts == 1


def test_calls_that_fit_together_without_a_plan_get_one_if_their_step_is_over(x, compiled_kinds, monkeypatch):
    model = model_of(Other, Block)
    peak, excess = peak_of(model, x, 4.0), 64 << 10
    counters = Scripted(peak + excess, peak - excess)
    assert not measured_steps(model, x, counters, monkeypatch, 4.0)
    assert max(plan.peak_bytes for plan in aot_hooks.last_plans(model)) <= peak - excess
    assert compiled_kinds[:2] == ["alone", "alone"] and compiled_kinds[-2:] == ["planned", "planned"]
    assert counters.restarts == 2


class Gathered(nn.Module):
    """A block whose parameters have memory while it runs, as with FSDP2."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.kept = {p: p.detach().clone() for p in block.parameters()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gather()
        y = self.block(x)
        self.free()
        x.register_hook(self.free)
        y.register_hook(self.gather)
        return y

    def gather(self, *_: torch.Tensor) -> None:
        for p, value in self.kept.items():
            if not p.untyped_storage().nbytes():
                p.untyped_storage().resize_(value.nbytes)
                p.data.copy_(value)

    def free(self, *_: torch.Tensor) -> None:
        for p in self.kept:
            p.untyped_storage().resize_(0)


@pytest.mark.parametrize("first", [True, False])
def test_parameters_that_are_gathered_for_the_first_call_are_of_the_step(x, first, monkeypatch):
    """Also if only later calls show that somebody gathers: whether those of the first are gathered is not known."""
    x.requires_grad_()
    model = model_of(*[Block] * 5)
    expected = gradients(model, x)
    compile_blocks(model, budget(peak_of(model, x, 0.7), max_error=0))
    begun = []
    monkeypatch.setattr(measuring, "Counters", Scripted(*[1000] * 12))
    monkeypatch.setattr(measuring, "_cuda_device", lambda plans: torch.device("cpu"))
    monkeypatch.setattr(measuring, "checked", lambda run, *_: run)
    monkeypatch.setattr(measuring.StepCheck, "ended", lambda self, before, predicted: begun.append(before) or 0)
    gathered = nn.Sequential(*(Gathered(block) if first or i else block for i, block in enumerate(model)))
    for _ in range(6):
        assert_equal(train(gathered, x), expected)
    parameter_bytes = sum(p.numel() * p.element_size() for p in model[0].parameters())
    assert begun[-1] == 1000 - 2 * parameter_bytes
    (group,) = many._groups.values()
    assert {event.gathered_bytes for trace in group.traces for event in trace} == {2 * parameter_bytes}
    plan = aot_hooks.last_plans(model)[0]
    assert plan.in_step is not None and plan.in_step.other_bytes >= 2 * parameter_bytes


class Allocated(Scripted):
    """Counters with as many bytes allocated as `now` says."""

    now = 0

    def allocated(self) -> int:
        return self.now


def test_what_a_step_allocates_before_its_first_call_is_of_the_step(x, monkeypatch):
    """As the embedding that FSDP2 gathers, where no compiled block has it: in the plan, and in what is measured."""
    embedding, held = 1 << 20, 1000
    x.requires_grad_()
    model = model_of(*[Block] * 5)
    expected = gradients(model, x)
    compile_blocks(model, budget(peak_of(model, x, 0.7) + embedding, max_error=0))
    begun: list[int] = []
    counters = Allocated(*[1000] * 12)
    monkeypatch.setattr(measuring, "Counters", counters)
    monkeypatch.setattr(measuring, "_cuda_device", lambda plans: torch.device("cpu"))
    monkeypatch.setattr(measuring, "checked", lambda run, *_: run)
    monkeypatch.setattr(measuring.StepCheck, "ended", lambda self, before, predicted: begun.append(before) or 0)
    later = iter([True])  # the first plan is made after the second step, as on CUDA where copies may help
    monkeypatch.setattr(measuring.StepTime, "waits", lambda *_: next(later, False))
    gathered = nn.Sequential(*(Gathered(block) for block in model))
    other = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([other])
    for _ in range(6):
        counters.now = held + embedding
        assert_equal(train(gathered, x), expected)
        other.grad = torch.ones(1000)
        counters.now = held + other.nbytes
        optimizer.step()
        optimizer.zero_grad()
    assert begun[-1] == held
    (group,) = many._groups.values()
    assert {event.gathered_bytes for trace in group.traces for event in trace} == {embedding}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_stay_are_allocated_before_a_step(set_to_none):
    first, second = (nn.Parameter(torch.zeros(n)) for n in (100, 10))
    counters = Allocated()
    before = BeforeStep(counters)
    for p in (first, second):
        p.grad = torch.zeros_like(p)
        counters.now = 5000
        optimizer = torch.optim.SGD([p], lr=0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        counters.now -= set_to_none * p.nbytes
    # the first optimizer's gradient went before the second one stepped: its bytes are none of those 5000
    assert before.eager_bytes() == 0
    assert before.eager_bytes() is None  # no optimizer has stepped since
    optimizer.step()
    counters.now += 70
    assert before.eager_bytes() == 70
    before.close()
    optimizer.step()
    assert before.eager_bytes() is None


def test_freed_memory_is_seen_in_tensors_of_any_kind():
    whole, freed = torch.ones(3), torch.ones(3)
    freed.untyped_storage().resize_(0)
    assert parameters._is_freed(freed) and not parameters._is_freed(whole) and not parameters._is_freed(torch.ones(0))
    assert not parameters._is_freed(torch.eye(3).to_sparse())
    two = TwoTensor(whole, freed)
    assert [parameters._is_freed(part) for part in parameters.plain_parts(two)] == [False, True]


def test_what_a_tensor_consists_of_beside_tensors_is_left_out():
    """As the mesh of a DTensor, which torch 2.13 names among its parts."""

    class Meshed:
        local, mesh = torch.ones(3), object()

        def __tensor_flatten__(self):
            return ["local", "mesh"], None

    assert [*parameters.plain_parts(Meshed())] == [Meshed.local]


def step_of(*read: nn.Parameter) -> Step:
    recorder = Recorder("", "", BudgetWarning, lambda step: None, step=Step(notes_parameters=True))
    for parameter in read:
        recorder.saves("graph", [parameter])
    return recorder.step


def test_only_calls_whose_parameters_are_taken_away_count_as_gathered():
    """The first one's may be here again by the next step. A large block that stays is no part of what is gathered."""
    small, freed, large = (nn.Parameter(torch.ones(n)) for n in (2, 5, 1000))
    freed.untyped_storage().resize_(0)
    assert parameters.gathered_bytes(step_of(small, freed, large)) == (2 * 20, 2 * 8)
    assert parameters.gathered_bytes(step_of(small, large)) == (0, 0)


def test_a_budget_that_gathered_parameters_make_impossible_is_a_warning(x):
    """Their bytes are an estimate, so the least is taken."""
    x.requires_grad_()
    model = model_of(*[Block] * 5)
    expected, peak = gradients(model, x), peak_of(model, x, 0.33)
    compile_blocks(model, budget(peak, max_error=0))
    gathered = nn.Sequential(*map(Gathered, model))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(5):
            assert_equal(train(gathered, x), expected)
    (text,) = {str(w.message) for w in seen if w.category is BudgetWarning}
    assert "The least that was found for it takes" in text and "gathered parameters" in text
    assert aot_hooks.last_plans(model)[0].peak_bytes > peak


class Exceeded:
    """Counters by which steps take too much until `done`, whether they are measured alone or not."""

    done = False

    def __call__(self, device: torch.device) -> Exceeded:
        return self

    def allocated(self) -> int:
        return 1000

    def most(self) -> int:
        return 1000 + (0 if self.done else 1 << 40)

    def restart(self) -> None: ...


@pytest.mark.parametrize("steps_alone", [0, 3])
def test_a_first_block_of_another_graph_is_planned_with_the_others(steps_alone, monkeypatch, tmp_path):
    """Its input has no gradient. It is not the whole step, so the step's peak says nothing of its plan.

    `steps_alone`: steps of it alone before, which are over the budget, so that it has a tighter one by then.
    """
    torch.manual_seed(0)
    model, x = model_of(*[Block] * 6), torch.randn(64, many_blocks.WIDTH)
    expected, peak, counters = gradients(model, x), 400_000, Exceeded()
    monkeypatch.setattr(measuring, "Counters", counters)
    monkeypatch.setattr(measuring, "_cuda_device", lambda plans: torch.device("cpu"))
    compile_blocks(model, budget(peak, max_error=0))
    for step in range(steps_alone + 7):
        counters.done = step - steps_alone > 2
        model.zero_grad(set_to_none=False)  # the first step makes the gradients, and is no measure
        run = model[:1] if step < steps_alone else model
        taken = most_allocated(lambda run=run: loss_of(run, x).backward(), tmp_path)
        if step >= steps_alone:
            assert_equal([p.grad for p in model.parameters()], expected)
    plans = aot_hooks.last_plans(model)
    assert [plan.in_step and plan.in_step.calls for plan in plans] == [1, 5]
    scalars = 64  # bytes of the loss, which is eager
    assert taken - scalars <= max(plan.peak_bytes for plan in plans) <= peak and taken <= peak


def test_calls_of_a_step_that_fits_are_not_measured_for_ever(x, monkeypatch):
    """Each call would read the counters in each step, although the step has a check of its own."""
    read = []

    class Counted(Exceeded):
        def allocated(self):
            read.append(step)
            return 1000

        def most(self):
            return 2000

    monkeypatch.setattr(measuring, "Counters", Counted())
    monkeypatch.setattr(measuring, "_cuda_device", lambda plans: torch.device("cpu"))
    model = model_of(*[Block] * 3)
    compile_blocks(model, budget(peak_of(model, x, 4), max_error=0))
    for step in range(6):  # noqa: B007
        train(model, x)
    assert read and max(read) < 4
