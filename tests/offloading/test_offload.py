"""Offload in compiled graphs, on the CPU: gradients, where copies stand, what stays and what the report says."""

from __future__ import annotations

import dataclasses
import importlib
import math
from dataclasses import replace
from typing import Any

import late_copies
import pytest
import torch
from offloading import SLOW, copies, stack  # noqa: F401
from steps import assert_same, compiled, step

import aot_hooks
from aot_hooks import Rates, policies
from aot_hooks.offloading import transfers


@pytest.mark.core
@pytest.mark.parametrize("at_wait", [False, True])
@pytest.mark.parametrize("rates", [None, SLOW], ids=["instant", "slow"])
def test_gradients_are_those_without_bit_for_bit(rates: Rates | None, at_wait: bool) -> None:
    late_copies.at_wait = at_wait
    model, x = stack(), torch.randn(8, 16, requires_grad=True)
    expected = step(compiled(model), x)
    torch._dynamo.reset()
    fn = compiled(model)
    hook = aot_hooks.offload(0, rates=rates)
    for _ in range(3):
        assert_same(step(fn, x, hook=hook), expected)
    (plan,) = aot_hooks.last_plans(fn)
    offloaded = [t for t in plan.transfers if t.placement.offloaded]
    assert len(offloaded) >= 8
    assert plan.host_bytes == sum(t.nbytes for t in offloaded) > 0
    assert plan.packed_bytes < plan.saved_bytes
    stats = aot_hooks.offload_stats()
    assert stats["sent_count"] == stats["fetched_count"] == 3 * len(offloaded)
    assert stats["host_blocks_made"] <= len(offloaded), "the second step makes no new blocks"


@pytest.mark.core
def test_in_the_graph_starts_come_early_and_waits_late() -> None:
    model, x = stack(), torch.randn(8, 16, requires_grad=True)
    fn = compiled(model)
    late_copies.log = []
    step(fn, x, hook=aot_hooks.offload(0, rates=SLOW))
    what = late_copies.log
    count = what.count("start")
    assert count == what.count("wait") == what.count("reload") == what.count("use") > 8
    forward, backward = what[: 2 * count], what[2 * count :]
    assert set(forward) == {"start", "wait"} and set(backward) == {"reload", "use"}
    # not one after the other, as hooks without a schedule would have it
    assert forward[:2] == ["start", "start"] and forward[-1] == "wait" and backward[0] == "reload"


@pytest.mark.core
def test_the_last_layers_stay_on_the_device() -> None:
    model, x = stack(), torch.randn(8, 16, requires_grad=True)
    fn = compiled(model)
    slower = dataclasses.replace(SLOW, to_host=1e8, to_device=1e8)
    step(fn, x, hook=aot_hooks.offload(0, rates=slower))
    (plan,) = aot_hooks.last_plans(fn)
    stays = [t for t in plan.transfers if not t.placement.offloaded]
    assert stays and stays[-1].name == plan.transfers[-1].name
    reasons = ("back on the device too soon to be worth sending", "no compute left to hide its copies")
    assert stays[-1].placement.reason in reasons
    kept = next(d for d in plan.decisions if d.saved.name == stays[-1].name)
    assert kept.hook is aot_hooks.KEEP and kept.packed_bytes == kept.saved_bytes
    assert stays[-1].placement.reason in kept.reason


def test_what_does_not_hide_stays_and_the_report_says_what_it_would_cost() -> None:
    model, x = stack(), torch.randn(8, 16, requires_grad=True)
    slow_link = Rates(to_host=1e8, to_device=1e8, memory=1e9, operations=1e10, operations32=1e9)
    plan = aot_hooks.plan(model, x, inner="aten", policy=aot_hooks.offload(0, rates=slow_link))
    report = aot_hooks.format_report(plan)
    assert "the compute is too short for the rest" in report and "no compute left to hide its copies" in report
    all_of_it = aot_hooks.plan(model, x, inner="aten", policy=aot_hooks.offload(0, rates=slow_link, max_stall_ms=1e9))
    assert all_of_it.host_bytes > plan.host_bytes
    stall = sum(t.placement.stall_ms for t in all_of_it.transfers)
    assert stall == pytest.approx(plan.transfers[0].full_stall_ms) and stall > 0
    assert f"predicted stall {stall:.1f} ms" in aot_hooks.format_report(all_of_it)
    rows = all_of_it.transfers
    assert f"{sum(r.nbytes for r in rows if r.placement.offloaded) / 1024:.2f} of" in aot_hooks.format_report(all_of_it)


def test_predicted_peak_falls() -> None:
    model, x = stack(8), torch.randn(64, 16, requires_grad=True)
    before = aot_hooks.plan(model, x, inner="aten")
    after = aot_hooks.plan(model, x, inner="aten", policy=aot_hooks.offload(0, rates=SLOW))
    peak = lambda points: max(p.live_bytes for p in points)  # noqa: E731
    assert peak(after.live_before) == peak(before.live_before)
    falls = peak(after.live_before) - peak(after.live_after)
    assert 0.5 * after.host_bytes < falls <= after.host_bytes


@pytest.mark.parametrize("then", [aot_hooks.int8(16), aot_hooks.cast(torch.bfloat16)], ids=str)
def test_what_another_hook_makes_is_offloaded(then: aot_hooks.Hook) -> None:
    model, x = stack(), torch.randn(8, 16, requires_grad=True)
    expected = step(compiled(model), x, hook=then)
    torch._dynamo.reset()
    fn = compiled(model)
    got = step(fn, x, hook=aot_hooks.offload(0, then=then, max_stall_ms=math.inf))
    assert_same(got, expected)
    (plan,) = aot_hooks.last_plans(fn)
    assert plan.packed_bytes + plan.host_bytes < plan.saved_bytes
    names = {d.hook.name for d in plan.decisions}
    assert f"offload({then.name})" in names


def test_small_parts_of_what_another_hook_makes_stay() -> None:
    fn = compiled(lambda x, w: torch.tanh(torch.tanh(x @ w) @ w) @ w)
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    step(fn, x, w, hook=aot_hooks.offload(2048, then=aot_hooks.int8(64), max_stall_ms=math.inf))
    (plan,) = aot_hooks.last_plans(fn)
    assert {t.nbytes for t in plan.transfers} == {64 * 64}  # the codes, not the scales
    assert plan.packed_bytes % (64 * 4) == 0 and plan.packed_bytes > 0


@pytest.mark.slow
def test_a_graph_that_sends_has_no_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor 2.11 reads views with padded strides of memory that has none."""
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    inner, seen = compile_fx.compile_fx_inner, []

    def compiled_inner(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        sends = any("offload_start" in str(node.target) for node in gm.graph.nodes)
        seen.append((sends, torch._inductor.config.comprehensive_padding))
        return inner(gm, *args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compiled_inner)
    before = torch._inductor.config.comprehensive_padding
    options = {"policy": aot_hooks.offload(0, max_stall_ms=math.inf)}
    model, x = stack(), torch.randn(8, 16, requires_grad=True)
    torch.compile(model, backend="aot_hooks", options=options)(x).sum().backward()
    assert (True, False) in seen and (False, before) in seen
    assert torch._inductor.config.comprehensive_padding == before


def test_min_bytes() -> None:
    model, x = stack(2), torch.randn(8, 16, requires_grad=True)
    fn = compiled(model)
    step(fn, x, hook=aot_hooks.offload(1000, max_stall_ms=math.inf))
    (plan,) = aot_hooks.last_plans(fn)
    assert {d.saved.nbytes >= 1000 for d in plan.decisions if d.hook is not aot_hooks.KEEP} == {True}
    assert any("smaller than min_bytes=1000" in d.reason for d in plan.decisions)


@pytest.mark.core
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"min_bytes": -1}, "min_bytes must be a number of bytes, an int of at least 0, got -1"),
        ({"min_bytes": 1.5}, "min_bytes must be a number of bytes, an int of at least 0, got 1.5"),
        ({"in_flight_bytes": -1}, "in_flight_bytes must be a number of bytes"),
        ({"max_stall_ms": -0.5}, "max_stall_ms must be a number of at least 0"),
        ({"max_stall_ms": math.nan}, "max_stall_ms must be a number of at least 0"),
        ({"rates": 3}, "rates must be None or aot_hooks.Rates, got 3"),
        ({"then": aot_hooks.offload()}, "then must say in which form tensors wait"),
        ({"max_host_bytes": -1}, "max_host_bytes must be a number of bytes"),
        ({"then": aot_hooks.Hook("e", lambda x: x, lambda x: x, eager=True)}, "then must be a Hook that is traced"),
        ({"then": "int8"}, "then must be a Hook that is traced"),
    ],
    ids=str,
)
def test_wrong_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(aot_hooks.errors.OptionError, match=message):
        aot_hooks.offload(**kwargs)


def test_a_report_of_several_graphs_and_devices_adds_up() -> None:
    model, x = stack(3), torch.randn(64, 16)
    link = Rates(to_host=1e7, to_device=1e7, memory=1e9, operations=1e10, operations32=1e9)
    one = aot_hooks.plan(model, x, inner="aten", policy=aot_hooks.offload(0, rates=link, max_stall_ms=1.0))
    stall, first = sum(t.placement.stall_ms for t in one.transfers), one.transfers[0]
    assert 0.5 < stall <= 1.0 < first.full_stall_ms
    compute = first.forward_ms + first.backward_ms
    report = aot_hooks.format_report([one] * 3)
    assert f"predicted stall {3 * stall:.1f} ms of a step of {3 * compute:.1f} ms" in report
    assert f"would stall it {3 * first.full_stall_ms:.1f} ms" in report
    # two devices of one graph: its steps count once, the stalls of both devices add up
    other = tuple(replace(t, device="cuda:1", forward_ms=9 * t.forward_ms) for t in one.transfers)
    report = aot_hooks.format_report(replace(one, transfers=one.transfers + other))
    assert f"predicted stall {2 * stall:.1f} ms of a step of {compute:.1f} ms" in report
    assert f"would stall it {2 * first.full_stall_ms:.1f} ms" in report


def test_each_hook_of_a_graph_has_limits_of_its_own() -> None:
    model, x = stack(4), torch.randn(64, 16)
    link = Rates(to_host=3e7, to_device=3e7, memory=1e9, operations=1e10, operations32=1e9)
    strict, free = (aot_hooks.offload(0, rates=link, max_stall_ms=ms) for ms in (0.0, math.inf))

    def stalls(first: aot_hooks.Hook, second: aot_hooks.Hook) -> tuple[list[int], float]:
        """How many tensors of each half are sent, and the stall."""
        policy = policies.only_these_modules({"[01].*": first, "[23].*": second})
        plan = aot_hooks.plan(model, x, inner="aten", policy=policy)
        module = {d.saved.name: d.saved.module_path for d in plan.decisions}
        sent = [t for t in plan.transfers if t.placement.offloaded]
        counts = [sum(module[t.name][0] in half for t in sent) for half in ("01", "23")]
        return counts, sum(t.placement.stall_ms for t in sent)

    both_strict, both_free = stalls(strict, strict), stalls(free, free)
    assert both_strict[1] == 0.0 < both_free[1]
    counts, stall = stalls(strict, free)
    assert counts[0] == both_strict[0][0] < both_free[0][0], "the first module is as strict as alone"
    assert counts[1] == both_free[0][1] > both_strict[0][1]
    assert 0.0 < stall < both_free[1]


@pytest.mark.core
def test_a_capture_without_a_free_block_fails_in_words_that_cudagraph_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudagraph.tree.driver import cuda_driver

    monkeypatch.setattr(transfers, "capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="no pinned block of 400 bytes is free") as raised:
        transfers.send(torch.randn(100), None)
    assert cuda_driver().is_capture_error(raised.value)
