"""Calls of one graph that are planned apart: the first of a step hold the least, the last ones more."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from typing import Any

import many_blocks
import pytest
import torch
from many_blocks import WIDTH, Block, assert_equal, compile_blocks, gradients, measured, model_of, peak_of, train
from profiled import most_allocated
from small_budgets import budget
from torch import nn

import aot_hooks
from aot_hooks.errors import BudgetError
from aot_hooks.passes.plan import InStep, Plan
from aot_hooks.planning import apart, many, within
from aot_hooks.planning.apart import Ways, tried_counts
from aot_hooks.planning.recipe import Recipe
from aot_hooks.planning.step import RECOMPUTE, Apart, Option, Value
from aot_hooks.planning.step import Step as PlannedStep
from aot_hooks.planning.trials import Planned
from aot_hooks.planning.versions import Mode, Version
from aot_hooks.steps.memory import Bytes
from aot_hooks.steps.moments import Instant, moments_of, tight_peak
from aot_hooks.steps.recorder import Call, Step
from aot_hooks.torch_private import aot

x, compiled_kinds = many_blocks.x, many_blocks.compiled_kinds  # fixtures
COUNT, SHARE = 8, 0.45


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """For each call under a plan, "tight" or "loose"."""
    found: list[str] = []
    called = many.Group.on_forward_end

    def noted(group: Any, version: Any, *args: Any) -> Any:
        if version.mode is Mode.PLANNED:
            found.append("tight" if version.is_tight else "loose")
        return called(group, version, *args)

    monkeypatch.setattr(many.Group, "on_forward_end", noted)
    return found


def planned(x: torch.Tensor, **options: Any) -> tuple[nn.Sequential, list[torch.Tensor], int]:
    """Blocks after three steps, the gradients without hooks, and the budget."""
    model = model_of(*[Block] * COUNT)
    expected, peak = gradients(model, x), peak_of(model, x, SHARE)
    compile_blocks(model, budget(peak, max_error=0), **options)
    for _ in range(3):
        assert_equal(train(model, x), expected)
    return model, expected, peak


@pytest.mark.core
@pytest.mark.filterwarnings("error::aot_hooks.errors.BudgetWarning")
def test_the_first_calls_hold_the_least_and_the_step_is_faster(x, ran, compiled_kinds, tmp_path, monkeypatch):
    model, expected, peak = planned(x)
    (plan,) = aot_hooks.last_plans(model)
    step = plan.in_step
    assert step.calls == COUNT and 0 < step.tight_calls < COUNT and step.tight_bytes < step.held_bytes
    assert f"the first {step.tight_calls} of them hold the least" in aot_hooks.format_report([plan])
    assert compiled_kinds == ["alone", "least", "planned"]
    ran.clear()
    assert_equal(train(model, x), expected)
    assert ran == ["tight"] * step.tight_calls + ["loose"] * (COUNT - step.tight_calls)
    taken = measured(model, x, tmp_path)
    assert plan.peak_bytes <= peak and abs(taken - plan.peak_bytes) <= 0.06 * plan.peak_bytes

    aot_hooks.reset()
    torch._dynamo.reset()
    monkeypatch.setattr(apart, "GAIN", 1.0)  # all alike
    model, *_ = planned(x)
    (alike,) = aot_hooks.last_plans(model)
    assert alike.in_step.tight_calls == 0 and alike.peak_bytes <= peak
    assert plan.step_ratio < 1.14 and alike.step_ratio > 1.19


def test_fewer_calls_are_within_the_budget_and_more_are_planned_once(x, compiled_kinds, tmp_path):
    model, _, peak = planned(x)
    few = model[: COUNT // 2]
    few.zero_grad()
    found = train(few, x)
    assert_equal(found, gradients(few, x))
    assert measured(few, x, tmp_path) <= peak
    more = nn.Sequential(*model, *model[:2])
    for _ in range(4):
        train(more, x)
    assert measured(more, x, tmp_path) <= peak
    assert compiled_kinds.count("planned") == 2


def test_no_more_calls_hold_much_than_were_planned_in_whatever_order(x, ran):
    """Microbatches in flight: the call that ran first is the first to run backward, and new ones come in."""
    model, *_ = planned(x)
    (plan,) = aot_hooks.last_plans(model)
    tight = plan.in_step.tight_calls
    (group,) = many._groups.values()
    most: Counter[str] = Counter()
    waiting = []
    for i in range(24):
        waiting.append(model[i % COUNT](x).square().sum())
        held = Counter("tight" if c.what.is_tight else "loose" for c in group.step.holding.values())
        assert held["loose"] <= COUNT - tight
        assert held["tight"] >= min(tight, held.total())
        most |= held
        if len(waiting) == COUNT:
            waiting.pop(0).backward()
    assert most["loose"] > 0
    for each in waiting:
        each.backward()


def test_an_exception_between_calls_leaves_nothing(x, ran):
    model, expected, _ = planned(x)
    with pytest.raises(ZeroDivisionError):
        model[:6](x)[0, 0].item() / 0
    gc.collect()
    ran.clear()
    assert_equal(train(model, x), expected)
    (plan,) = aot_hooks.last_plans(model)
    assert ran.count("tight") == plan.in_step.tight_calls


@pytest.mark.slow
def test_a_warm_start_takes_both_versions_and_solves_nothing(x, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters = torch._dynamo.utils.counters["aot_autograd"]
    with torch._functorch.config.patch(bundled_autograd_cache=True):
        _, expected, _ = planned(x)
        missed = counters["autograd_cache_miss"]
        assert missed
        aot_hooks.reset()
        torch._dynamo.reset()
        monkeypatch.delattr(apart, "solve")
        model, *_ = planned(x)
        assert counters["autograd_cache_miss"] == missed
        assert_equal(train(model, x), expected)
    (plan,) = aot_hooks.last_plans(model)
    assert plan.in_step.tight_calls > 0


def test_a_graph_that_is_compiled_twice_keeps_what_tells_parameters_from_inputs(x):
    def check(gm: Any, _: Any) -> Any:
        twin = aot.twin(gm)
        assert twin._param_name_to_source == gm._param_name_to_source and twin.meta == gm.meta
        inputs = zip(*(g.graph.find_nodes(op="placeholder") for g in (twin, gm)), strict=True)
        assert all(own._dynamo_source is not None and own._dynamo_source == of._dynamo_source for own, of in inputs)
        twin.graph.erase_node(twin.graph.output_node())
        return gm  # which still runs

    block = Block()
    assert torch.equal(torch.compile(block, backend=check)(x), block(x))


def holding(*versions: Version) -> Step:
    """A step in which calls of `versions` hold saved tensors."""
    return Step(holding={i: Call(0, i, version) for i, version in enumerate(versions)})


def test_a_version_without_a_tight_one_runs_every_call():
    alone = Version(None, Mode.PLANNED, Bytes(1, 1, 1))
    assert alone.for_next_call(holding(alone, alone)) is alone
    tight = Version(None, Mode.PLANNED, Bytes(1, 1, 1), is_tight=True)
    loose = Version(None, Mode.PLANNED, Bytes(3, 3, 3), tight, tight_calls=1, loose_calls=1)
    held = [(), (tight,), (tight, loose)]
    assert [loose.for_next_call(holding(*each)) for each in held] == [tight, loose, tight]
    assert loose.for_next_call(holding(loose)) is tight  # the tight one is gone: too few hold little


def test_as_many_calls_hold_the_least_as_make_the_step_fastest(monkeypatch):
    """A call holds one value, whole or not at all: those that are alike leave a part of the budget unused."""
    monkeypatch.setattr(apart, "_OFF", 0.0)
    size, again = 10 << 20, Option(RECOMPUTE, ms=1.0)
    value = Value(("v",), size, 1, 2, begin=2, options=(again,))
    step = PlannedStep((size,) * 4, (value,), (4.0,), forward_count=2)
    trace = [Instant(phase, "g", {"g": i}) for phase in ("forward", "backward") for i in range(6)]

    def best(mib: int) -> tuple[int, float]:
        found, *_ = _fastest(step, 6, mib, trace) or [None]
        return (0, 0.0) if found is None else (found.tight_calls, round(24 * found.ratio))

    counts = [best(mib) for mib in (60, 59, 45, 30, 20, 10, 9)]
    assert counts == [(1, 25), (1, 25), (2, 26), (3, 27), (4, 28), (5, 29), (0, 0)]


def _fastest(step: PlannedStep, calls: int, mib: int, trace: list[Instant]) -> tuple[Apart, ...]:
    counts = [(n, moments_of("g", [trace], lambda _: Bytes(0, 0, 0), (n, 0)), 0) for n in tried_counts(calls)]
    return Ways(step, 5.0, calls, mib << 20, 0.0, tuple(counts)).fastest()


def test_what_runs_beside_the_calls_that_hold_the_least_counts():
    """The last backwards are theirs, beside all gradients."""
    trace = [Instant("forward", "g", {"g": i}) for i in range(4)]
    trace += [Instant("backward", "g", {"g": 3 - i}, 100 * i) for i in range(4)]
    assert tight_peak("g", trace, lambda _: Bytes(0, 0, 0), 2, Bytes(50, 10, 300)) == 300 + 300
    assert tight_peak("g", trace, lambda _: Bytes(0, 0, 0), 0, Bytes(50, 10, 300)) == 0


def test_versions_of_equal_graphs_are_counted_together():
    """Blocks whose guards differ have a version each, of one graph."""
    graph = object()
    versions = []
    for _ in range(4):
        tight = Version(graph, Mode.PLANNED, Bytes(1, 1, 1), is_tight=True)
        versions.append(Version(graph, Mode.PLANNED, Bytes(3, 3, 3), tight, tight_calls=2, loose_calls=2))
    chosen: list[Version] = []
    for version in versions:
        chosen.append(version.for_next_call(holding(*chosen)))
    assert [v.is_tight for v in chosen] == [True, True, False, False]


@pytest.mark.slow
def test_calls_that_run_backward_in_the_order_of_their_forwards_are_alike_and_within_the_budget(x, tmp_path):
    """Apart, the first backwards would compute much again while the calls that hold more still hold it."""
    model = model_of(*[Block] * COUNT)
    peak = peak_of(model, x, SHARE)
    compile_blocks(model, budget(peak, max_error=0))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        losses = [block(x).square().sum() for block in model]
        while losses:
            losses.pop(0).backward()

    for _ in range(4):
        step()
    (plan,) = aot_hooks.last_plans(model)
    assert plan.in_step.calls == COUNT and plan.in_step.tight_calls == 0
    x.grad = None
    assert most_allocated(step, tmp_path) <= peak


class Tanh(nn.Module):
    """Its output is saved, and is the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(nn.functional.gelu(self.up(x)).sin()))


@pytest.mark.slow
def test_both_versions_are_right_with_inductor_and_without_caches(x, ran):
    """Both are compiled in one call of the backend then, and their backwards later."""
    model = model_of(*[Tanh] * COUNT)
    expected, peak = gradients(model, x), peak_of(model, x, SHARE)
    with torch._inductor.config.patch(force_disable_caches=True):
        for block in model:
            block.compile(backend="aot_hooks", options={"policy": budget(peak, max_error=0)})
        for _ in range(4):
            assert all(map(torch.allclose, train(model, x), expected))
    assert {"tight", "loose"} <= set(ran)


def test_a_compilation_apart_leaves_its_facts_in_a_context_of_its_own(x):
    def check(gm: Any, _: Any) -> Any:
        context = torch._guards.TracingContext.get()
        context.fw_metadata = "of the graph"
        with aot.isolated_compilation():
            inside = torch._guards.TracingContext.get()
            assert inside is not context and inside.guards_context is context.guards_context
            inside.fw_metadata = "of another version"
        assert torch._guards.TracingContext.get() is context and context.fw_metadata == "of the graph"
        assert not aot.cuts_for_ddp()
        context.fakify_first_call = True  # as torch does for the parts of a graph that it cuts for DDP
        assert aot.cuts_for_ddp()
        context.fakify_first_call = False
        return gm

    torch.compile(Block(), backend=check)(x)


def test_calls_are_apart_if_their_graphs_are_faster_so_not_if_the_program_says_it():
    """Ways, the fastest by the program first: one that does not fit, one that is slower than said, one that is not."""
    ways = [Apart((), count, 4, 1.2, ratio) for count, ratio in ((1, 1.0), (2, 1.05), (3, 1.08), (3, 1.19))]
    loose = {1: None, 2: 1.3, 3: 0.8}
    asked = []

    def plan(ratio: float) -> Any:
        times = {"before_ms": 10.0, "after_ms": 10.0 * ratio}
        return Planned(None, None, Plan((), in_step=InStep(4, 0), recipe=Recipe(), **times))

    def planned(way: Apart) -> Any:
        asked.append(way.tight_calls)
        if (ratio := loose[way.tight_calls]) is None:
            raise BudgetError("it does not fit")
        return plan(ratio)

    def tight(ratio: float | None, ways: Any = ways) -> int:
        asked.clear()
        alike = None if ratio is None else plan(ratio)
        found = within._or_apart(alike, ways, planned)
        return -1 if found is None else found.plan.in_step.tight_calls

    assert tight(1.2) == 3 and asked == [1, 2, 3]
    assert tight(1.055) == 0 and asked == [1]  # the others gain less than a hundredth
    assert tight(1.2, ways=()) == 0
    assert tight(None) == 2 and tight(None, ways[:1]) == -1  # none that are alike fit
    assert within._or_apart(plan(1.2), (), planned).plan.in_step.tight_calls == 0


def test_ways_to_plan_apart_are_not_near_each_other():
    size, again = 10 << 20, Option(RECOMPUTE, ms=1.0)
    step = PlannedStep((size,) * 4, (Value(("v",), size, 1, 2, begin=2, options=(again,)),), (4.0,), forward_count=2)
    trace = [Instant(phase, "g", {"g": i}) for phase in ("forward", "backward") for i in range(16)]
    ways = _fastest(step, 16, 200, trace)
    counts = [way.tight_calls for way in ways]
    assert len(counts) == 3 and all(b - a > 2 for a, b in itertools.pairwise(counts))
    assert [way.ratio for way in ways] == sorted(way.ratio for way in ways)
