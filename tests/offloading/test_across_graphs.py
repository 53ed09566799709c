"""Many graphs in a step: what each call sends is decided when it runs, and its copies may end in another graph."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import late_copies
import pytest
import torch
from offloading import Block, copies  # noqa: F401
from torch import nn
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks.offloading import steps, transfers
from aot_hooks.offloading.steps import Event, StepPlan, Terms, graph_count, plan_step

pytestmark = pytest.mark.filterwarnings("error::aot_hooks.errors.UnusedWarning")

# Compute is instant to the plan of a graph alone, so that it sends nothing. A step takes the time of the fixture's
# clock: 1 ms from event to event.
RATES = aot_hooks.Rates(to_host=3e6, to_device=3e6, memory=1e15, operations=1e18, operations32=1e18)
HOOK = aot_hooks.offload(0, rates=RATES, across_graphs=True)
TERMS = Terms(False, 1 << 30, 0.0, None)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    now = 0.0

    def mark(device: torch.device) -> float:
        nonlocal now
        now += 1e-3
        return now

    monkeypatch.setattr(transfers, "_mark", mark)
    yield
    torch._dynamo.reset()
    assert not transfers._entries and not transfers._kept


def by_blocks(hook: aot_hooks.Hook | None, layers: int = 6, *, inner: str = "aten") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(layers)))
    for block in model:
        block.compile(backend="aot_hooks", options={"inner": inner, "policy": hook})
    return model


def step(model: nn.Sequential, x: torch.Tensor, run: Callable[..., torch.Tensor] | None = None) -> list[torch.Tensor]:
    model.zero_grad()
    loss = (model if run is None else run)(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b) > 1
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def counted(run: Callable[[], Any]) -> tuple[int, int]:
    """Tensors sent and fetched by `run`."""
    before = aot_hooks.offload_stats()
    run()
    after = aot_hooks.offload_stats()
    return after["sent_count"] - before["sent_count"], after["fetched_count"] - before["fetched_count"]


# --- the plan: a pure function ----------------------------------------------------------------------------------------


def layers(count: int, nbytes: int) -> list[Event]:
    forward = [event for n in range(count) for event in (("start", nbytes, TERMS), ("wait", n))]
    return [*forward, *(("reload", n) for n in reversed(range(count)))]


def traced(trace: list[Event], plan: StepPlan) -> list[str]:
    """The trace with what the plan does, in order: "send 0 | join 0 | fetch 0"."""
    found, started = [], 0
    for i, event in enumerate(trace):
        found += [f"{what} {n}" for what, n in plan.actions.get(i, ())]
        if event[0] == "start":
            found += [f"send {started}"] * plan.sends[started]
            started += 1
        elif event[0] == "reload":
            found.append(f"use {event[1]}")
    return found


def test_the_first_layers_are_sent_and_fetched_during_other_layers() -> None:
    trace = layers(6, 1000)  # 2 ms a layer forward, 2 ms a layer backward; 1 ms and a bit a copy
    at_ms = [*range(12), *range(12, 24, 2)]
    plan = plan_step(trace, at_ms, 1e6, 1e6)
    assert (plan.graph_count, plan.nbytes, plan.sent_bytes) == (6, 6000, 5000)
    assert traced(trace, plan) == (
        "send 0,join 0,send 1,join 1,send 2,join 2,send 3,join 3,send 4,join 4".split(",")
        + "fetch 4,use 5,fetch 3,use 4,fetch 2,use 3,fetch 1,use 2,fetch 0,use 1,use 0".split(",")
    )


def test_without_time_nothing_is_sent_unless_a_stall_is_allowed() -> None:
    trace, at_ms = layers(4, 1000), [0.001 * i for i in range(12)]
    assert plan_step(trace, at_ms, 1e6, 1e6).sent_bytes == 0
    free = [(e[0], e[1], Terms(False, 1 << 30, math.inf, None)) if e[0] == "start" else e for e in trace]
    assert (
        plan_step(free, [1.0 * i for i in range(12)], 3e5, 3e5).sent_bytes
        > plan_step(trace, [1.0 * i for i in range(12)], 3e5, 3e5).sent_bytes
    )


def test_few_large_tensors_are_sent_rather_than_many_small_ones() -> None:
    def planned(sizes: list[int]) -> tuple[bool, ...]:
        forward = [event for n, size in enumerate(sizes) for event in (("start", size, TERMS), ("wait", n))]
        trace = [*forward, *(("reload", n) for n in reversed(range(len(sizes))))]
        return plan_step(trace, [float(i) for i in range(len(trace))], 1e6, 1e6).sends

    assert planned([1000, 10] * 8) == (True, False) * 7 + (False, False)
    assert sum(planned([1000] * 4 + [100] * 40)) > 30, "as many bytes as the large ones have: worth their copies"


class SharedLink:
    """Steps of six layers on a device whose steps take longer from the third tensor on that is sent."""

    def __init__(self, stall_ms: float, *, adapts: bool = True, terms: Terms = TERMS, behind_ms: float = 0.0) -> None:
        self.now, self.stall_ms, self.terms, self.behind_ms, self.marks = 0.0, stall_ms, terms, behind_ms, 0
        self.steps = steps.Steps(self.mark, self.times, self.plan, adapts)

    def mark(self) -> float:
        self.marks += 1
        return self.now

    def times(self, runs: list[list[float]]) -> list[list[float]] | None:
        if any(mark + self.behind_ms > self.now for run in runs for mark in run):
            return None  # the device has not reached it
        return [[mark - run[0] for mark in run] for run in runs]

    @staticmethod
    def plan(trace: tuple[Event, ...], at_ms: list[float], share: float) -> StepPlan:
        return plan_step(trace, at_ms, 1e6 * share, 1e6 * share)

    def run(self, more_ms: float = 0.0) -> int:
        """A step in which each tensor takes `more_ms` more, sent or not; returns how many it sends."""
        entries = []
        for _ in range(6):
            entry, _ = self.steps.start(1000, self.terms)
            entries.append(entry)
            self.now += 1
            self.steps.event("wait", entry)
            self.now += 1 + more_ms
        sent = sum(entry.sends for entry in entries)
        self.now += self.stall_ms * max(0, sent - 2)
        for entry in reversed(entries):
            self.steps.event("reload", entry)
            self.now += 2
            self.steps.drop(entry)
        return sent


def test_a_plan_that_makes_steps_slower_than_predicted_is_replaced() -> None:
    link = SharedLink(stall_ms=1.0)
    sent = [link.run() for _ in range(24)]
    assert sent[:6] == [0, 0, 0, 5, 5, 5]
    assert sent[6] < 5 and 0 < sent[-1] <= 2, sent
    assert len(set(sent[-6:])) == 1, "the last plan stays"


def test_fewer_copies_that_are_no_faster_bring_back_the_plan_with_more() -> None:
    link = SharedLink(0.0)
    assert [link.run() for _ in range(4)] == [0, 0, 0, 5]
    sent = []
    for _ in range(14):  # other work makes all steps slower, whatever they send
        sent.append(link.run(more_ms=0.5))
    assert min(sent) < 5 and sent[-6:] == [5] * 6, sent


def test_hooks_that_allow_a_stall_keep_their_plan() -> None:
    for allowed_ms in (4.0, math.inf):
        link = SharedLink(1.0, terms=Terms(False, 1 << 30, allowed_ms, None))
        assert len({link.run() for _ in range(3)} | {0}) == 1
        assert len({link.run() for _ in range(9)}) == 1


def test_a_host_that_is_ahead_of_the_device_takes_no_marks_without_end() -> None:
    link = SharedLink(1.0, behind_ms=60.0)  # more than two steps
    sent = [link.run() for _ in range(40)]
    assert 5 in sent and 0 < sent[-1] <= 2, sent
    assert link.marks < 150, "two runs of 18 events, and two marks in each run of a plan"


@pytest.mark.parametrize("link", [SharedLink(0.0), SharedLink(1.0, adapts=False)], ids=["hidden", "no copy engine"])
def test_a_plan_stays_where_copies_are_hidden_or_cannot_be(link: SharedLink) -> None:
    assert [link.run() for _ in range(12)] == [0, 0, 0] + [5] * 9


def test_what_starts_after_the_first_reload_or_has_no_backward_stays() -> None:
    begin: list[Event] = [("start", 8, TERMS), ("wait", 0), ("start", 8, TERMS), ("wait", 1), ("start", 8, TERMS)]
    trace = [*begin, ("wait", 2), ("reload", 1), ("start", 8, TERMS), ("wait", 3), ("reload", 3), ("reload", 0)]
    plan = plan_step(trace, [10.0 * i for i in range(len(trace))], 1e9, 1e9)
    assert plan.sends == (True, False, False, False)  # 1 is needed at once, 2 never, 3 is of the backward


def test_graphs_are_counted_by_what_waits_at_their_end() -> None:
    own = Terms(True, 1 << 30, 0.0, None)
    one: list[Event] = [
        ("start", 8, own),
        ("start", 8, TERMS),
        ("wait", 0),
        ("start", 8, TERMS),
        ("wait", 1),
        ("wait", 2),
    ]
    assert graph_count([*one, ("reload", 0)]) == 1
    assert graph_count(layers(5, 8)) == 5
    assert graph_count([]) == 0


def test_terms_are_a_text_in_the_graph() -> None:
    for terms in (TERMS, Terms(True, 0, math.inf, (1e9, 2.5e9))):
        assert Terms.parse(str(terms)) == terms


# --- steps that run ---------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("at_wait", [False, True])
@pytest.mark.parametrize("then", [None, aot_hooks.cast(torch.bfloat16)], ids=str)
def test_blocks_have_the_gradients_of_blocks_without(at_wait: bool, then: aot_hooks.Hook | None) -> None:
    late_copies.at_wait = at_wait
    plain, hooked = by_blocks(then), by_blocks(aot_hooks.offload(0, then, rates=RATES, across_graphs=True))
    for i in range(6):
        x = torch.randn(64, 16)
        expected, before = step(plain, x), aot_hooks.offload_stats()
        assert_equal(step(hooked, x), expected)
        after = aot_hooks.offload_stats()
        sent, fetched = (after[f"{what}_count"] - before[f"{what}_count"] for what in ("sent", "fetched"))
        assert (0 < sent == fetched) if i > 2 else (sent == fetched == 0), "one step is recorded, two are timed"
    assert after["step_graph_count"] == 6
    assert 0 < after["step_sent_bytes"] < after["step_bytes"], "the last layers stay"


def test_copies_end_in_other_graphs() -> None:
    hooked, x = by_blocks(HOOK), torch.randn(64, 16)
    for _ in range(4):
        step(hooked, x)
    late_copies.log = []
    hooked(x).sum()
    log = late_copies.log
    ends = [i for i, what in enumerate(log) if what == "wait"]
    assert ends and any(log[i - 1] == "start" and "start" in log[i:] for i in ends), log
    assert log.count("start") > 4


class Saturating(nn.Module):
    """Saves its input and its output, whose memory the program has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(torch.sigmoid(self.up(x))))


def test_nothing_is_sent_that_the_plan_of_the_step_does_not_send() -> None:
    slower = aot_hooks.Rates(to_host=3e9, to_device=3e9, memory=1e10, operations=1e18, operations32=1e18)
    torch.manual_seed(0)
    plain = nn.Sequential(*(Saturating() for _ in range(6)))
    hooked = copy.deepcopy(plain)
    hook = aot_hooks.offload(0, rates=slower, across_graphs=True)
    for block in hooked:
        block.compile(backend="aot_hooks", options={"inner": "aten", "policy": hook, "scope": "all"})
    for _ in range(5):
        x = torch.randn(64, 16)
        assert_equal(step(hooked, x), step(plain, x))
    sent, _ = counted(partial(step, hooked, x))
    assert sent == 5, "the hidden values of all blocks but the last, and no input or output"
    stay = [
        t
        for plan in aot_hooks.last_plans(hooked)
        for t in plan.transfers
        if "which the program may" in t.placement.reason
    ]
    assert stay and not any(t.placement.offloaded for t in stay)


def test_the_last_graph_of_the_forward_may_differ() -> None:
    """A skipped layer, another length, an evaluation with gradients: right at once, and planned when it comes again."""
    plain, hooked = by_blocks(None, 8), by_blocks(HOOK, 8)
    ways = [lambda m, x: m(x), lambda m, x: m[:5](x), lambda m, x: m[3:](m[0](x)), lambda m, x: m(m[:2](x))]
    for which in (0, 0, 0, 1, 0, 1, 1, 1, 2, 3, 3, 3, 0, 2, 1, 3, 2, 2):
        x = torch.randn(64, 16)
        assert_equal(*(step(m, x, partial(ways[which], m)) for m in (plain, hooked)))
        with torch.no_grad():
            assert torch.equal(plain(x), hooked(x))
        evaluated = plain(x), hooked(x)  # without a backward
        assert torch.equal(*evaluated)
        del evaluated
    for way in ways:  # all of them are known
        assert counted(partial(step, hooked, x, partial(way, hooked)))[0] > 0


def test_shapes_that_change_are_planned_each() -> None:
    plain, hooked = by_blocks(None), by_blocks(HOOK)
    for i in range(15):
        x = torch.randn((64, 48, 32)[i % 3], 16)
        assert_equal(step(hooked, x), step(plain, x))
    assert counted(lambda: step(hooked, torch.randn(48, 16)))[0] > 0


@pytest.mark.parametrize("order", ["0 1", "1 0"])
def test_two_microbatches_in_flight(order: str) -> None:
    plain, hooked = by_blocks(None), by_blocks(HOOK)

    def both(model: nn.Sequential, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        losses = [model(x).square().mean() for x in xs]
        for n in map(int, order.split()):
            losses[n].backward()
        return [*losses, *(p.grad.clone() for p in model.parameters())]

    for i in range(5):
        xs = [torch.randn(64, 16) for _ in range(2)]
        assert_equal(both(hooked, xs), both(plain, xs))
        assert (aot_hooks.offload_stats()["sent_count"] > 0) == (i > 2)


def test_one_forward_one_backward_in_turn() -> None:
    plain, hooked = by_blocks(None), by_blocks(HOOK)

    def pipeline(model: nn.Sequential, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        losses = [model(xs[0]).square().mean(), model(xs[1]).square().mean()]
        for n in range(4):
            losses[n].backward()
            if n < 2:
                losses.append(model(xs[n + 2]).square().mean())
        return [*losses, *(p.grad.clone() for p in model.parameters())]

    for _ in range(6):
        xs = [torch.randn(64, 16) for _ in range(4)]
        assert_equal(pipeline(hooked, xs), pipeline(plain, xs))
    assert counted(lambda: pipeline(hooked, xs))[0] > 0


@pytest.mark.parametrize("inner", ["aten", "inductor"])
# torch refuses a second backward of what was compiled before without one, because that takes donated buffers
@torch._functorch.config.patch(donated_buffer=False)
def test_retain_graph_gives_the_same_gradients_again(inner: str) -> None:
    plain, hooked = by_blocks(None, 4, inner=inner), by_blocks(HOOK, 4, inner=inner)
    for _ in range(5):
        x = torch.randn(64, 16)
        found = []
        for model in (plain, hooked):
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            first = [p.grad.clone() for p in model.parameters()]
            loss.backward(retain_graph=True)
            loss.backward()
            found.append([*first, *(p.grad.clone() for p in model.parameters())])
            for a, b in zip(first, model.parameters(), strict=True):
                torch.testing.assert_close(3 * a, b.grad)
        assert_equal(*found)


@pytest.mark.slow
def test_inductor_writes_over_no_tensor_that_stays_or_is_on_its_way() -> None:
    late_copies.at_wait = True
    plain, hooked = by_blocks(None, inner="inductor"), by_blocks(HOOK, inner="inductor")
    for _ in range(5):
        x = torch.randn(64, 16)
        for a, b in zip(step(hooked, x), step(plain, x), strict=True):
            torch.testing.assert_close(a, b)
    assert aot_hooks.offload_stats()["sent_count"] > 0


def test_an_exception_half_way_leaves_nothing_behind() -> None:
    plain, hooked = by_blocks(None), by_blocks(HOOK)

    class Boom(Exception):
        pass

    def fails(*_: Any) -> None:
        raise Boom

    for i in range(8):
        x = torch.randn(64, 16)
        broken = hooked[3].register_forward_pre_hook(fails) if i % 2 else None
        if broken is not None:
            with pytest.raises(Boom):
                hooked(x)
            broken.remove()
            y = hooked[:4](x)
            y.register_hook(fails)
            with pytest.raises(Boom):
                hooked[4:](y).sum().backward()
            del y
        assert_equal(step(hooked, x), step(plain, x))
    gc.collect()
    assert aot_hooks.offload_stats()["host_leased_bytes"] == 0
    assert counted(lambda: step(hooked, x))[0] > 0


def test_an_output_that_is_held_disturbs_no_step() -> None:
    plain, hooked = by_blocks(None), by_blocks(HOOK)
    held = hooked(torch.randn(64, 16))
    for _ in range(4):
        x = torch.randn(64, 16)
        assert_equal(step(hooked, x), step(plain, x))
    held.sum().backward()
    for _ in range(4):
        assert_equal(step(hooked, x), step(plain, x))
    assert counted(lambda: step(hooked, x))[0] > 0


def test_a_step_that_never_ends_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_MOST_EVENTS", 100)  # a step has 90
    plain, hooked = by_blocks(None), by_blocks(HOOK)
    held = [hooked(torch.randn(64, 16))]
    for _ in range(8):
        x = torch.randn(64, 16)
        assert_equal(step(hooked, x), step(plain, x))
    assert counted(lambda: step(hooked, x))[0] > 0, "what is held is of another step"
    held.clear()


def test_checkpointed_blocks() -> None:
    plain, hooked = by_blocks(None), by_blocks(HOOK)

    def some(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(model):
            x = checkpoint(block, x, use_reentrant=False) if i % 3 == 1 else block(x)
        return x

    def each(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    x = torch.randn(64, 16)
    assert_equal(step(hooked, x), step(plain, x))  # in a checkpoint they'd compile without hooks
    for way in (some, some, some, some, each, each, each, each, some, some):
        x = torch.randn(64, 16)
        assert_equal(*(step(m, x, partial(way, m)) for m in (plain, hooked)))
    assert counted(lambda: step(hooked, x, partial(some, hooked)))[0] > 0


def test_graph_breaks() -> None:
    def forward(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = block(x)
            torch._dynamo.graph_break()
        return x

    found = []
    for hook in (None, HOOK):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(6)))
        run = torch.compile(forward, backend="aot_hooks", options={"inner": "aten", "policy": hook})
        torch.manual_seed(1)
        found.append([step(model, torch.randn(64, 16), partial(run, model)) for _ in range(5)])
    for a, b in zip(*found, strict=True):
        assert_equal(a, b)
    assert aot_hooks.offload_stats()["step_sent_bytes"] > 0


def test_a_hook_that_copies_what_is_saved_ends_in_an_error() -> None:
    hooked, x = by_blocks(HOOK), torch.randn(64, 16)
    step(hooked, x)  # compiled inside of that context, it would have no hooks of ours
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        loss = hooked(x).sum()
    with pytest.raises(RuntimeError, match="A saved-tensor hook around the compiled function has copied it"):
        loss.backward()


def test_a_capture_of_the_backward_alone_reads_nothing_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked, x = by_blocks(HOOK), torch.randn(64, 16)
    loss = hooked(x).sum()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="what a forward outside of it left here"):
        patch.setattr(transfers, "_capturing", lambda device: True)
        loss.backward()


def test_in_a_capture_of_both_the_graphs_go_by_their_own_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, hooked, x = by_blocks(None), by_blocks(HOOK), torch.randn(64, 16)
    for _ in range(4):
        step(hooked, x)
    before = aot_hooks.offload_stats()["sent_count"]
    monkeypatch.setattr(transfers, "_capturing", lambda device: True)
    assert_equal(step(hooked, x), step(plain, x))
    assert aot_hooks.offload_stats()["sent_count"] == before


def test_a_step_that_can_send_nothing_says_so() -> None:
    slow = aot_hooks.Rates(to_host=1e3, to_device=1e3, memory=1e15, operations=1e18, operations32=1e18)
    hooked, x = by_blocks(aot_hooks.offload(0, rates=slow, across_graphs=True)), torch.randn(64, 16)
    for _ in range(3):
        step(hooked, x)
    with pytest.warns(aot_hooks.errors.UnusedWarning, match="a step of 6 calls of compiled graphs sends none of its"):
        step(hooked, x)


def test_memory_on_the_host_is_flat() -> None:
    hooked, x = by_blocks(HOOK), torch.randn(64, 16)
    for _ in range(5):
        step(hooked, x)
    before = aot_hooks.offload_stats()
    for _ in range(20):
        step(hooked, x)
    after = aot_hooks.offload_stats()
    assert (after["host_bytes"], after["host_blocks_made"]) == (before["host_bytes"], before["host_blocks_made"])
    assert after["sent_bytes"] > before["sent_bytes"]


def test_plans_of_a_model_are_those_of_its_blocks() -> None:
    hooked, x = by_blocks(HOOK), torch.randn(64, 16)
    with pytest.raises(aot_hooks.errors.OptionError, match=r"last_plans takes what torch\.compile returned"):
        aot_hooks.last_plans(nn.Sequential(Block()))
    assert aot_hooks.last_plans(hooked) == ()
    for _ in range(6):
        step(hooked, x)
    first, others = aot_hooks.last_plans(hooked)  # the first block's input has no gradient; the others share a graph
    assert {p.host_bytes for p in (first, others)} == {0}, "alone, a graph sends nothing"
    stats = aot_hooks.offload_stats()
    in_step = [sum(t.nbytes for t in plan.transfers) for plan in (first, others)]
    assert stats["step_bytes"] == in_step[0] + 5 * in_step[1]
    assert 0 < stats["step_sent_bytes"] < stats["step_bytes"]
