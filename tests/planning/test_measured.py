"""The check of a step's measured peak: with counters that say what the test wants, on a CPU; and with real ones."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from small_budgets import budget
from steps import ATEN
from torch import nn

import aot_hooks
from aot_hooks.errors import BudgetWarning
from aot_hooks.planning import measured

KIB = 1 << 10


class Scripted:
    """Counters that say that a step took what `steps` lists; an earlier peak of `earlier` bytes hides less."""

    def __init__(self, steps: list[int], earlier: int = 0) -> None:
        self.steps, self.top, self.restarts = iter(steps), earlier, 0

    def __call__(self, device: torch.device) -> Scripted:
        return self

    def allocated(self) -> int:  # a step begins
        self.step = next(self.steps)
        return 1000

    def most(self) -> int:
        self.top = max(self.top, 1000 + self.step)
        return self.top

    def restart(self) -> None:
        self.top, self.restarts = 1000, self.restarts + 1


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Tanh()]
    return nn.Sequential(*layers)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(256, 32)


@pytest.fixture
def peak(model: nn.Module, x: torch.Tensor) -> int:
    return int(0.9 * aot_hooks.plan(model, x, policy=aot_hooks.KEEP, inner="aten").peak_bytes)


@pytest.fixture
def train(model, x, peak, monkeypatch) -> Any:
    """Steps with scripted counters: the plans' peaks after each step, and the warnings."""
    monkeypatch.setattr(measured, "_cuda_device", lambda plans: torch.device("cpu"))

    def run(counters: Scripted, steps: int, compiled_loss: bool = False) -> tuple[list[int], list[str]]:
        torch._dynamo.reset()
        monkeypatch.setattr(measured, "Counters", counters)
        policy = budget(peak, max_error=0)

        def step(x: torch.Tensor) -> torch.Tensor:
            return model(x)

        compiled = torch.compile(step, backend="aot_hooks", options={**ATEN, "policy": policy})
        expected = torch.autograd.grad(model(x).sin().sum(), [*model.parameters()])
        peaks = []
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(steps):
                model.zero_grad(set_to_none=True)
                compiled(x).sin().sum().backward()
                assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
                peaks.append(aot_hooks.last_plans(compiled)[-1].peak_bytes)
        return peaks, [str(w.message) for w in seen if w.category is BudgetWarning]

    return run


def test_a_step_within_its_budget_is_measured_once(train, peak):
    counters = Scripted([peak])
    peaks, said = train(counters, 4)
    assert peaks[0] == peaks[-1] <= peak
    assert not said
    assert counters.restarts == 0


def test_a_step_whose_earlier_peak_hides_it_is_measured_alone(train, peak):
    counters = Scripted([100, 100], earlier=10 * peak)
    _, said = train(counters, 4)
    assert not said
    assert counters.restarts == 1


def test_what_compiling_left_in_cycles_is_gone_before_a_step_is_measured_alone():
    class Node:
        pass

    node = Node()
    node.itself, alive = node, weakref.ref(node)
    check = measured.StepCheck(budget(100), 100, Scripted([50, 50]), tighter=False, alone=True)
    gc.disable()
    try:
        del node
        assert check.begins() == 1000
        assert alive() is None
    finally:
        gc.enable()


def test_a_step_over_its_budget_gets_one_tighter_plan(train, peak):
    excess = 16 * KIB
    counters = Scripted([peak + 9 * excess, peak + excess, peak - excess, peak - excess])
    peaks, said = train(counters, 5)
    assert peaks[0] == peaks[1]  # the plan of the first two steps
    assert peaks[2] <= peak - excess
    assert peaks[2] == peaks[-1]
    assert not said


def test_a_tighter_plan_leaves_free_what_the_first_did_not_foresee(train, peak):
    """That is more than the first was over the budget, if it was planned below it."""
    taken = peak + KIB
    peaks, _ = train(Scripted([taken, taken, peak, peak]), 4)
    assert peaks[0] < peak and peaks[-1] <= peak - 1.25 * (taken - peaks[0])


def test_a_tighter_plan_that_is_over_the_budget_too_is_a_warning(train, peak):
    counters = Scripted([peak + 16 * KIB] * 4)
    peaks, said = train(counters, 6)
    assert peaks[-1] <= peak - 16 * KIB
    (text,) = said
    assert "more than the budget, with a plan that is tighter" in text
    assert f"{(peak + 16 * KIB) / (1 << 20):.1f} MiB over what was allocated" in text
    assert f"budget({peak}, max_error=0.0)" in text


def test_a_tighter_plan_that_does_not_exist_is_a_warning_and_the_least_is_taken(train, peak):
    counters = Scripted([3 * peak] * 4)
    peaks, said = train(counters, 6)
    assert peaks[-1] <= peaks[0] <= peak
    assert len(said) == 1


def test_a_backward_inside_of_the_compiled_function_is_a_warning_at_once(model, x, peak, monkeypatch):
    monkeypatch.setattr(measured, "_cuda_device", lambda plans: torch.device("cpu"))
    monkeypatch.setattr(measured, "Counters", Scripted([2 * peak] * 4))

    def step(x: torch.Tensor) -> None:
        loss = model(x).sin().sum()
        torch._dynamo.graph_break()
        loss.backward()

    compiled = torch.compile(step, backend="aot_hooks", options={**ATEN, "policy": budget(peak, max_error=0)})
    with pytest.warns(BudgetWarning, match="more than the budget\\. Predicted") as seen:
        for _ in range(4):
            compiled(x)
    assert len([w for w in seen if w.category is BudgetWarning]) == 1


def test_a_second_backward_of_a_call_is_not_measured(model, x, peak, monkeypatch):
    counters = Scripted([100] * 4, earlier=10 * peak)  # an earlier peak hides all steps
    monkeypatch.setattr(measured, "_cuda_device", lambda plans: torch.device("cpu"))
    monkeypatch.setattr(measured, "Counters", counters)
    compiled = torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": budget(peak, max_error=0)})
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        warnings.filterwarnings("ignore", ".*a backward with retain_graph=True keeps", BudgetWarning)
        for _ in range(3):
            loss = compiled(x).sin().sum()
            loss.backward(retain_graph=True)
            loss.backward()
    assert counters.restarts == 1
    assert len(aot_hooks.last_plans(compiled)) == 1


def test_calls_without_a_backward_restart_the_counters_a_few_times_only(model, x, peak, monkeypatch):
    counters = Scripted([2 * peak] * 40)
    monkeypatch.setattr(measured, "_cuda_device", lambda plans: torch.device("cpu"))
    monkeypatch.setattr(measured, "Counters", counters)
    compiled = torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": budget(peak, max_error=0)})
    compiled(x).sum().backward()
    with pytest.warns(BudgetWarning, match="none of the next 3 could be measured") as seen:
        for _ in range(10):
            compiled(x)
    assert len([w for w in seen if w.category is BudgetWarning]) == 1
    assert counters.restarts == 3


def test_a_tighter_plan_is_not_made_where_the_stance_forbids_to_compile(train, peak):
    with torch.compiler.set_stance("default"):  # resets the stance on exit, also after a failure
        counters = Scripted([peak + 16 * KIB] * 4)
        restart = counters.restart

        def stop_compiling() -> None:
            restart()
            torch.compiler.set_stance("fail_on_recompile")

        counters.restart = stop_compiling
        peaks, said = train(counters, 4)
    assert len(set(peaks)) == 1
    assert len(said) == 1


def test_reset_forgets_which_steps_were_over(train, peak):
    train(Scripted([2 * peak] * 2), 2)
    assert measured._tighter.known
    torch._dynamo.reset()
    assert not measured._tighter.known


@pytest.mark.gpu
def test_memory_that_the_loss_takes_makes_the_plan_tighter():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(m for _ in range(4) for m in (nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)))
    ).cuda()
    x = torch.randn(8192, 512, device="cuda")
    stock = aot_hooks.plan(model, x, policy=aot_hooks.KEEP)
    peak = int(0.9 * stock.peak_bytes)
    compiled = torch.compile(model, backend="aot_hooks", options={"policy": budget(peak, max_error=0)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        for _ in range(5):
            model.zero_grad(set_to_none=True)
            y = compiled(x)
            held = torch.empty(peak // 8, dtype=torch.uint8, device="cuda")  # the loss holds this
            y.square().sum().backward()
            del held
    first, *_, last = aot_hooks.last_plans(compiled)
    assert last.peak_bytes < first.peak_bytes


@pytest.mark.parametrize(
    ("taken", "per_byte", "expected"),
    [
        (700, 1.0, [297]),
        (999, 1.0, []),
        (700, 0.5, [297, 149]),  # the peak is elsewhere for a part of it
        (700, 1.5, [297, -297]),  # back to the plan that was measured before
        (1100, 1.0, [-103]),
    ],
    ids=["less", "tight", "slowly", "too much", "over"],
)
def test_copies_at_run_time_send_less_by_what_steps_left_free(taken, per_byte, expected):
    given, counters = [], Scripted([])
    counters.allocated = lambda: 1000
    counters.most = lambda: 1000 + int(taken + per_byte * sum(given))
    leave_free = lambda nbytes: given.append(nbytes) or True  # noqa: E731
    check = measured.StepCheck(budget(1000), 1000, counters, False, alone=True, waits=2, leave_free=leave_free)
    for _ in range(12):
        assert check.ended(check.begins(), 900) == 0
    assert given == expected and check.done and counters.restarts <= 3
    assert counters.most() <= 2000, "the last plan is under the peak"


def test_steps_that_stay_over_get_a_tighter_plan():
    given, counters = [], Scripted([1100] * 9)
    leave_free = lambda nbytes: given.append(nbytes) or True  # noqa: E731
    check = measured.StepCheck(budget(1000), 1000, counters, False, alone=True, leave_free=leave_free)
    assert [check.ended(check.begins(), 950) for _ in range(5)] == [0, 0, 188, 0, 0]
    assert given == [-103, -103]


def test_a_step_that_sends_all_and_is_over_gets_a_tighter_plan():
    check = measured.StepCheck(budget(1000), 1000, Scripted([1100]), False, alone=True, leave_free=lambda nbytes: False)
    assert check.ended(check.begins(), 950) == 188, "5 / 4 of what the plan did not foresee"
