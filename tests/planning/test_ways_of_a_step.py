"""Ways that a user can type, as candidates for a budget of many calls: steps that run."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import many_blocks
import pytest
import torch
from many_blocks import Block, assert_equal, compile_blocks, gradients, measured, model_of, peak_of, train
from profiled import most_allocated
from small_budgets import budget

import aot_hooks
from aot_hooks.errors import BudgetWarning
from aot_hooks.offloading import at_run_time
from aot_hooks.planning import candidates, many
from aot_hooks.planning import measured as measuring
from aot_hooks.planning.measured import slowness
from aot_hooks.planning.recomputation import exact_order
from aot_hooks.planning.step import Option, Value

x, compiled_kinds = many_blocks.x, many_blocks.compiled_kinds  # fixtures


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int, int]]:
    """A CPU whose copies run beside the compute; for each way that fits the time of a call, the peak and the budget."""
    rates = aot_hooks.Rates(to_host=3e10, to_device=3e10, memory=2e10, operations=1e11, operations32=1e11)
    monkeypatch.setattr(candidates, "_link", lambda graphs: rates)
    monkeypatch.setattr(candidates, "_MIN_BYTES", 0)
    clock = itertools.count(0.0, 0.25e-3)
    monkeypatch.setattr(at_run_time, "_mark", lambda device: next(clock))
    found: list[tuple[float, int, int]] = []
    typed = candidates.Simulation._typed

    def noted(ways: candidates.Simulation, *args: Any, **named: Any) -> Any:
        way = typed(ways, *args, **named)
        if way is not None:
            found.append((way.step.call_ms, way.step.peak, ways.wholes[-1].peak))
        return way

    monkeypatch.setattr(candidates.Simulation, "_typed", noted)
    return found


def test_a_budget_takes_the_copies_of_a_whole_step_where_they_are_faster(x, link, compiled_kinds, tmp_path, caplog):
    caplog.set_level(logging.INFO, "aot_hooks")
    model = model_of(*[Block] * 16)
    expected, peak = gradients(model, x), peak_of(model, x, 0.25)
    compile_blocks(model, budget(peak, max_error=0, allow=("recompute", "offload")))
    for _ in range(8):
        assert_equal(train(model, x), expected)
    assert compiled_kinds == ["alone", "least", "planned"]
    lines = [r.getMessage() for r in caplog.records if "is compiled again" in r.getMessage()]
    assert len(lines) == 2 and "step 1 holds" in lines[0] and "step 1 peaks at" in lines[1], lines
    (plan,) = aot_hooks.last_plans(model)
    assert plan.in_step.calls == 16 and plan.peak_bytes <= peak
    assert plan.transfers and all(d.reason.startswith("budget: offload()") for d in plan.decisions)
    assert aot_hooks.offload_stats()["step_graph_count"] == 16 and aot_hooks.offload_stats()["step_sent_bytes"] > 0
    assert link and all(most <= whole_peak for _, most, whole_peak in link)
    assert plan.after_ms <= min(ms for ms, _, _ in link)
    assert 0.9 * peak < measured(model, x, tmp_path) <= peak, "it sends what its peak needs, and no more"
    assert aot_hooks.offload_stats()["step_sent_bytes"] < 0.9 * aot_hooks.offload_stats()["step_bytes"]


@pytest.mark.slow
def test_a_way_that_is_no_faster_changes_nothing(x, link, compiled_kinds) -> None:
    """At 0.7 of the peak some calls compute a bit again, which takes less than copies do."""
    model = model_of(*[Block] * 6)
    expected = gradients(model, x)
    compile_blocks(model, budget(peak_of(model, x, 0.7), max_error=0, allow=("recompute",)))
    for _ in range(4):
        assert_equal(train(model, x), expected)
    (plan,) = aot_hooks.last_plans(model)
    assert plan.after_ms <= min((ms for ms, _, _ in link), default=math.inf)
    assert not aot_hooks.offload_stats()["sent_count"] and not plan.transfers


@pytest.mark.slow
def test_rounded_ways_stay_within_the_error(x, link) -> None:
    model = model_of(*[Block] * 8)
    expected = gradients(model, x)
    compile_blocks(model, budget(peak_of(model, x, 0.25), allow=("recompute", "offload", "float8"), max_error=0.06))
    for _ in range(5):
        found = train(model, x)
        apart = sum((f - e).square().sum() for f, e in zip(found, expected, strict=True))
        assert torch.as_tensor(apart).sqrt() <= 0.06 * torch.cat([e.flatten() for e in expected]).norm()
    assert aot_hooks.last_plans(model)[-1].peak_bytes <= peak_of(model_of(*[Block] * 8), x, 0.25)


@pytest.mark.parametrize("kept", ["nothing", "hidden states", "detached"])
def test_inputs_of_blocks_wait_on_the_host_if_nothing_else_holds_them(link, kept, tmp_path) -> None:
    """With what 14 blocks return on the device a step takes 9 MiB. A program that keeps it gets no other plan."""
    x = torch.randn(4 * many_blocks.ROWS, many_blocks.WIDTH, requires_grad=True)
    model = model_of(*[Block] * 14)
    expected, peak = gradients(model, x), 30 * x.nbytes
    compile_blocks(model, budget(peak, max_error=0, allow=("recompute", "offload")))

    def step() -> None:
        hidden, all_hidden = x, []
        for block in model:
            hidden = block(hidden)
            if kept != "nothing":
                all_hidden.append(hidden.detach() if kept == "detached" else hidden)
        hidden.sin().sum().backward()

    if kept != "nothing":
        with pytest.raises(Exception, match="but the least that was found takes 9"):
            for _ in range(4):
                train(model, x, step)
        return
    for _ in range(4):
        assert_equal(train(model, x, step), expected)
    (plan,) = aot_hooks.last_plans(model)
    assert plan.recipe.across_graphs and plan.recipe.typed == ("blocks computed again", "offload()")
    sent = {d.saved.name for d in plan.decisions if d.hook is not aot_hooks.KEEP}
    assert [d.saved.is_input for d in plan.decisions if d.saved.name in sent] == [True]
    assert 0.8 * plan.peak_bytes < measured(model, x, tmp_path) <= plan.peak_bytes <= peak


def test_a_loss_of_each_block_that_saves_what_it_returned_gets_another_plan(link, tmp_path) -> None:
    """It is gone when the step ends. With it on the device a step takes 9 MiB at least."""
    x = torch.randn(4 * many_blocks.ROWS, many_blocks.WIDTH, requires_grad=True)
    model = model_of(*[Block] * 14)

    def step() -> None:
        hidden, losses = x, []
        for block in model:
            hidden = block(hidden)
            losses.append(hidden.square().mean())  # autograd saves `hidden` until the backward of `block` begins
        (hidden.sin().sum() + sum(losses)).backward()

    expected, peak = [g.clone() for g in train(model, x, step)], 30 * x.nbytes
    compile_blocks(model, budget(peak, max_error=0, allow=("recompute", "offload")))
    with pytest.warns(BudgetWarning, match=r"holds what compiled calls return .* a step took 3.25 MiB more") as caught:
        for _ in range(6):
            assert_equal(train(model, x, step), expected)
    _, least = (str(w.message) for w in caught if w.category is BudgetWarning)
    assert "stays under the budget. The least that was found for it takes 9.031 MiB" in least
    model.zero_grad(set_to_none=True)
    x.grad = None
    (plan,) = aot_hooks.last_plans(model)
    assert most_allocated(step, tmp_path) - plan.peak_bytes in range(64 + 1), "losses, which no graph has made"


@pytest.mark.parametrize("kept", ["nothing", "another tensor of its memory", "hidden states"])
def test_inputs_of_blocks_are_rounded_if_nothing_else_holds_them(link, kept, tmp_path, monkeypatch) -> None:
    """FSDP2 hands each block another tensor, of the memory that the block before has returned."""
    way = candidates.Way(candidates.NOTHING, aot_hooks.float8(), sends=True)
    monkeypatch.setattr(candidates, "ways", lambda *_: [way])
    x = torch.randn(4 * many_blocks.ROWS, many_blocks.WIDTH, requires_grad=True)
    model = model_of(*[Block] * 14)
    expected, peak = gradients(model, x), 40 * x.nbytes
    compile_blocks(model, budget(peak, allow=("offload", "float8"), max_error=0.06))

    all_hidden: list[torch.Tensor] = []

    def step() -> None:
        hidden = x
        for block in model:
            hidden = block(hidden.view_as(hidden) if kept == "another tensor of its memory" else hidden)
            if kept == "hidden states":
                all_hidden.append(hidden)
        hidden.sin().sum().backward()

    if kept == "hidden states":
        with pytest.raises(Exception, match="but the least that was found takes 21"):
            for _ in range(4):  # the third waits for one that begins with gradients
                train(model, x, step)
        return
    for _ in range(8):
        found = train(model, x, step)
        apart = sum((f - e).square().sum() for f, e in zip(found, expected, strict=True))
        assert torch.as_tensor(apart).sqrt() <= 0.06 * torch.cat([e.flatten() for e in expected]).norm()
    (plan,) = aot_hooks.last_plans(model)
    assert plan.recipe.across_graphs and plan.recipe.typed[1] == "offload(then=float8())"
    rounded = {d.saved.name for d in plan.decisions if d.saved.is_input and d.hook is not aot_hooks.KEEP}
    assert len(rounded) == 1
    model.zero_grad(set_to_none=True)
    x.grad = None
    assert 0.85 * plan.peak_bytes < most_allocated(step, tmp_path) <= plan.peak_bytes <= peak


class Scaled(Block):
    """It also returns what has a gradient, as scores of a router, and reads a tensor that is no parameter."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        y = super().forward(x * scale)
        return y, y * y


def test_a_leaf_that_all_blocks_read_is_no_result_of_the_block_before(x, link, monkeypatch) -> None:
    """The program holds it, so a copy in 8 bits frees nothing."""
    way = candidates.Way(candidates.NOTHING, aot_hooks.float8(), sends=True)
    monkeypatch.setattr(candidates, "ways", lambda *_: [way])
    scale, blocks = torch.rand_like(x).requires_grad_(), torch.nn.ModuleList(Scaled() for _ in range(14))

    def step() -> None:
        hidden, scores = x, torch.zeros(())
        for block in blocks:
            hidden, score = block(hidden, scale)
            scores = scores + score.mean()
        (hidden.sin().sum() + scores).backward()

    compile_blocks(blocks, budget(60 * x.nbytes, allow=("offload", "float8"), max_error=0.06))
    for _ in range(5):
        step()
    (plan,) = aot_hooks.last_plans(blocks)
    assert plan.recipe.across_graphs
    inputs = [d for d in plan.decisions if d.saved.is_input and not d.saved.is_static]
    assert len(inputs) == 2 and all(d.hook is aot_hooks.KEEP for d in inputs)


def test_a_slow_link_sends_less_and_computes_values_again(x, link, tmp_path, monkeypatch) -> None:
    """What is computed again from the block's input takes less time than its copies stall."""
    slow = aot_hooks.Rates(to_host=1e9, to_device=1e9, memory=2e10, operations=1e11, operations32=1e11)
    fastest = candidates.Simulation.fastest
    monkeypatch.setattr(candidates, "_link", lambda graphs: slow)
    monkeypatch.setattr(candidates.Simulation, "fastest", lambda self, most_ms, only: fastest(self, math.inf, only))
    way = candidates.Way(candidates.POINTWISE, sends=True)
    monkeypatch.setattr(candidates, "ways", lambda *_: [way])
    model = model_of(*[Block] * 16)
    expected, peak = gradients(model, x), peak_of(model, x, 0.25)
    compile_blocks(model, budget(peak, max_error=0, allow=("recompute", "offload")))
    for _ in range(8):
        assert_equal(train(model, x), expected)
    (plan,) = aot_hooks.last_plans(model)
    assert plan.recipe.typed[0].startswith(candidates._WITH_MORE) and plan.transfers
    times = [ms for ms, _, _ in link]
    assert plan.after_ms == min(times) < 0.97 * times[0]
    assert measured(model, x, tmp_path) <= peak


def test_values_computed_again_in_place_of_copies_are_the_cheapest_exact_ones() -> None:
    def value(name: str, nbytes: int, *options: Option) -> Value:
        return Value((name,), nbytes, 0, 0, options=options)

    def again(*nodes: str, sources: tuple[int, ...] = ()) -> Option:
        return Option("recompute", sources=sources, again=nodes)

    times = {"norm": 1.0, "q": 1.0, "k": 0.4, "mlp": 0.3}
    rounded = Option("float8()", packed_bytes=2, error=0.03)
    values = [
        value("k", 1, again("norm", "k")),
        value("q", 4, again("norm", "q")),
        value("rounded", 4, rounded),
        value("of rounded", 9, again("mlp", sources=(2,))),
        value("of q", 9, again("mlp", sources=(1,))),
        value("small", 0, again("mlp")),
        value("v", 4, rounded, again("norm", "q")),
    ]

    def names(count: int) -> list[str]:
        return [values[i].names[0] for i, _ in exact_order(values[:count], "float8()", 1, times)]

    # the norm is computed once; what is rounded, or is computed again itself, is no source
    assert names(4) == ["q", "k"] and names(6) == ["of q", "k"]
    assert names(7) == ["of q", "v", "k"], "what is sent in 8 bits saves half of its bytes"
    parts = [Value(("q", "k"), 4, 0, 0, options=()), value("of q", 4, again("mlp", sources=(0,)))]
    assert exact_order(parts, "float8()", 1, times) == [], "each part of a projection is rounded by itself"


def test_of_forms_that_round_only_the_fastest_is_tried() -> None:
    allow = ("recompute", "lossless", "offload", "float8", "int8")
    found = candidates.Simulation((), (), allow, 0.05, joint=None, stock=None)._ways()  # type: ignore[arg-type]
    named = {(way.again, way.name) for way in found}
    for again in ("", candidates.POINTWISE, candidates.BLOCKS):
        assert {(again, "float8()"), (again, "offload()"), (again, "offload(then=float8())")} <= named
    assert ("", "lossless()") in named and not any("int8" in name for _, name in named)


class Clock:
    """That of a device on which each step takes a second."""

    def now(self) -> None:
        pass

    def ms_since(self, began: Any) -> float:
        return 1e3

    def link_share(self) -> float:
        return 0.7


def test_a_plan_that_may_send_waits_for_a_step_that_is_timed(x, link, compiled_kinds, caplog, monkeypatch) -> None:
    """The first step compiles, so its time says nothing. The second one takes longer than its graphs: copies hide."""
    seen: list[float] = []
    shares: list[float] = []
    whole_of = many.whole_of
    monkeypatch.setattr(measuring, "clock_of", lambda plans: Clock())
    monkeypatch.setattr(measuring, "slowness", lambda ms, predicted_ms: seen.append(predicted_ms) or 2.5)
    monkeypatch.setattr(many, "whole_of", lambda *args: seen.append(0.0) or shares.append(args[-1]) or whole_of(*args))
    caplog.set_level(logging.INFO, "aot_hooks")
    model = model_of(*[Block] * 8)
    expected = gradients(model, x)
    compile_blocks(model, budget(peak_of(model, x, 0.25), max_error=0, allow=("recompute", "offload")))
    for step in range(4):
        assert_equal(train(model, x), expected)
        assert compiled_kinds == ["alone", "least", *["planned"] * (step >= 2)], step
    (predicted_ms, *planned), text = seen, "".join(r.getMessage() for r in caplog.records)
    assert predicted_ms > 0 and planned and not any(planned)  # timed once, before the plan
    assert "takes 2.50 times as long as predicted" in text and "step 2 peaks at" in text
    assert shares[-1] == 0.7 and "copies have 0.7 of the link's speed" in text


def test_slowness_is_the_time_over_the_predicted_time_in_quarters() -> None:
    assert [slowness(ms, 10.0) for ms in (9.0, 12.4, 12.5, 19.9, 1e6)] == [1.0, 1.0, 1.25, 1.25, 1.25]
    assert slowness(1.0, 0.0) == 1.0
