"""The plan of a step of many graphs: a function of its trace and times, and judged by what steps with it take."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from aot_hooks.steps import follow, known
from aot_hooks.steps import plan as plans
from aot_hooks.steps.plan import Sends, StepPlan, Terms, graph_count, plan_step
from aot_hooks.steps.recorder import Event, Phase, Trace

TERMS = Terms(1 << 30, 0.0, 0.0, 0.0)


def trace_of(sizes: Sequence[Sequence[int]], backward: Sequence[int], terms: Terms = TERMS) -> Trace:
    """A forward of one call for each of `sizes`, and then a backward of the calls in `backward`."""
    calls = tuple(Sends(tuple(each), terms) for each in sizes)
    events = [Event(Phase.FORWARD, n) for n in range(len(calls))] + [Event(Phase.BACKWARD, n) for n in backward]
    return Trace(calls, tuple(events))


def in_reverse(sizes: Sequence[Sequence[int]], terms: Terms = TERMS) -> Trace:
    return trace_of(sizes, [*reversed(range(len(sizes)))], terms)


def layers(count: int, nbytes: int, terms: Terms = TERMS) -> Trace:
    return in_reverse([(nbytes,)] * count, terms)


def traced(trace: Trace, plan: StepPlan) -> list[str]:
    """The trace with what the plan does, in order: "send 0 | join 0 | fetch 0"."""
    items: list[range] = []
    found: list[str] = []
    for i, event in enumerate(trace.events):
        found += [f"{what.value} {n}" for what, n in plan.actions.get(i, ())]
        if event.phase is Phase.FORWARD:
            first = items[-1].stop if items else 0
            items.append(range(first, first + len(trace.calls[event.call].nbytes)))
            found += [f"send {n}" for n in items[-1] if plan.sends[n]]
        else:
            found += [f"use {n}" for n in items[event.call]]
    return found


def test_the_first_layers_are_sent_and_fetched_during_other_layers() -> None:
    trace = layers(6, 1000)  # 2 ms a layer forward, 2 ms a layer backward; 1 ms and a bit a copy
    at_ms = [*range(0, 24, 2)]
    plan = plan_step(trace, at_ms, 1e6, 1e6)
    assert (plan.graph_count, plan.nbytes, plan.sent_bytes) == (6, 6000, 5000)
    assert traced(trace, plan) == (
        "send 0,join 0,send 1,join 1,send 2,join 2,send 3,join 3,send 4,join 4".split(",")
        + "fetch 4,use 5,fetch 3,use 4,fetch 2,use 3,fetch 1,use 2,fetch 0,use 1,use 0".split(",")
    )


def test_without_time_nothing_is_sent_unless_a_stall_is_allowed() -> None:
    trace, at_ms = layers(4, 1000), [0.001 * i for i in range(8)]
    assert plan_step(trace, at_ms, 1e6, 1e6).sent_bytes == 0
    free = layers(4, 1000, Terms(1 << 30, math.inf, 0.0, 0.0))
    assert (
        plan_step(free, [2.0 * i for i in range(8)], 3e5, 3e5).sent_bytes
        > plan_step(trace, [2.0 * i for i in range(8)], 3e5, 3e5).sent_bytes
    )


def test_few_large_tensors_are_sent_rather_than_many_small_ones() -> None:
    def planned(sizes: list[int]) -> tuple[bool, ...]:
        trace = in_reverse([(size,) for size in sizes])
        return plan_step(trace, [2.0 * i for i in range(len(trace.events))], 1e6, 1e6).sends

    assert planned([1000, 10] * 8) == (True, False) * 8
    assert sum(planned([1000] * 4 + [100] * 40)) > 30, "as many bytes as the large ones have: worth their copies"


def test_small_tensors_are_sent_where_they_would_be_held_at_the_peak() -> None:
    """The large tensors of all layers but the last have as many bytes as all tensors of fewer layers. But then the
    small ones of all layers are there when the backward begins."""
    sizes, count = (500, 60, 60, 60), 12
    at_ms = [0.5 * i for i in range(count)] + [0.5 * count + 2.0 * i for i in range(count)]

    def planned(sizes: tuple[int, ...]) -> StepPlan:
        return plan_step(in_reverse([sizes] * count), at_ms, 1e6, 1e6)

    plan, only_large = planned(sizes), planned(sizes[:1])
    assert only_large.sent_bytes > 0.95 * plan.sent_bytes
    assert only_large.held_bytes[1] + count * sum(sizes[1:]) > 1.2 * plan.held_bytes[1]
    assert plan.sends[:4] == (True,) * 4 and plan.sends[-4:] == (False,) * 4


def test_small_tensors_that_are_more_than_two_percent_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """If they may be more, more is sent in all, but each layer keeps its small tensor to the end."""
    trace = in_reverse([(1000, 60)] * 14)
    at_ms = [1.0 * i for i in range(14)] + [14 + 2.0 * i for i in range(14)]
    plan = plan_step(trace, at_ms, 1e6, 1e6)
    assert (plan.sent_bytes, plan.held_bytes) == (12780, (3180, 2120))
    monkeypatch.setattr(plans, "_SMALL", 0.2)
    larger = plan_step(trace, at_ms, 1e6, 1e6)
    assert (larger.sent_bytes, larger.held_bytes) == (13000, (3840, 2840))


def test_early_layers_are_sent_whole_for_the_peak_may_be_in_the_middle_of_the_backward() -> None:
    """Gradients and gathered parameters come to what is held from the second layer on, which a plan does not know."""
    parts = ((8, 16, 64, 32, 1), (64, 112, 112))  # MiB, as a Llama layer saves them
    count, each = 16, sum(map(len, parts))
    trace = in_reverse([tuple(mib << 20 for mib in part) for _ in range(count) for part in parts])
    at_ms = [3.6 * i for i in range(2 * count)] + [115 + 7.3 * i for i in range(2 * count)]
    plan = plan_step(trace, at_ms, 50e9, 50e9)
    assert plan.sent_bytes < 0.9 * plan.nbytes
    sizes = [nbytes for call in trace.calls for nbytes in call.nbytes]
    stay = [nbytes for nbytes, sends in zip(sizes[: each * 8], plan.sends, strict=False) if not sends]
    assert sum(stay) <= 0.02 * plan.sent_bytes


@pytest.mark.parametrize("seed", [428, 504, 811, 968, *range(10)])
def test_what_stays_as_small_adds_no_more_than_its_own_bytes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the small tensors other copies may end later, so that more is held than what stays."""
    rng = random.Random(seed)
    layer_count = rng.randint(2, 24)

    def sizes() -> tuple[int, ...]:
        return tuple(int(2 ** rng.uniform(0, 8) * 2**20) for _ in range(rng.randint(1, 5)))

    kinds = [[sizes() for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 2))]
    stall_ms, in_flight = rng.choice([0, 0, 3, 8]), rng.choice([1 << 28, 1 << 30, 1 << 31])
    terms, now = Terms(in_flight, float(stall_ms), 0.0, 0.0), 0.0
    parts: list[tuple[int, ...]] = []
    at_ms: list[float] = []
    for layer in range(layer_count):
        for part in kinds[layer % len(kinds)]:
            parts.append(part)
            at_ms.append(now := now + rng.uniform(0.5, 6))
    for _ in parts:
        at_ms.append(now)
        now += rng.uniform(1, 10)
    trace = in_reverse(parts, terms)
    speed = rng.uniform(20e9, 60e9)
    plan = plan_step(trace, at_ms, speed, speed)
    small = plans._SMALL
    monkeypatch.setattr(plans, "_SMALL", 0.0)
    whole = plan_step(trace, at_ms, speed, speed)
    assert all(a <= b + small * whole.sent_bytes for a, b in zip(plan.held_bytes, whole.held_bytes, strict=True))


def test_held_bytes_are_those_from_each_event_to_the_next() -> None:
    trace = layers(6, 1000)
    plan = plan_step(trace, [*range(0, 24, 2)], 1e6, 1e6)
    assert plan.held_bytes == (1000, 2000), "in the backward, the one that is fetched beside the one in use"
    assert plan_step(trace, [0.001 * i for i in range(12)], 1e6, 1e6).held_bytes == (6000, 6000)


class SharedLink:
    """Steps of six layers on a device whose steps take longer from the third tensor on that is sent by a plan.

    Without a plan each operator waits for 5 ms.
    """

    def __init__(
        self,
        stall_ms: float,
        *,
        adapts: bool = True,
        terms: Terms = TERMS,
        behind_ms: float = 0.0,
        copy_ms: float | None = None,
    ) -> None:
        self.copy_ms, self.shares, self.planned_bytes = copy_ms, list[float](), list[int]()
        self.now, self.stall_ms, self.terms, self.behind_ms, self.marks = 0.0, stall_ms, terms, behind_ms, 0
        self.steps = follow.Follower(self.mark, self.times, self.plan, adapts)

    def mark(self) -> float:
        self.marks += 1
        return self.now

    def times(self, runs: list[list[float]]) -> list[list[float]] | None:
        if any(mark + self.behind_ms > self.now for run in runs for mark in run):
            return None  # the device has not reached it
        return [[mark - run[0] for mark in run] for run in runs]

    def plan(self, trace: Trace, at_ms: list[float], share: float, spare_bytes: int) -> StepPlan:
        self.shares.append(share)
        self.planned_bytes.append(trace.calls[0].nbytes[0])
        return plan_step(trace, at_ms, 1e6 * share, 1e6 * share, spare_bytes)

    def is_planned(self) -> bool:
        return self.steps.run.plan is not None

    def wait(self) -> None:
        self.now += 0 if self.is_planned() else 5
        self.steps.waited()

    def run(self, more_ms: float = 0.0, nbytes: int = 1000) -> int:
        """A step in which each tensor takes `more_ms` more, sent or not; returns how many it sends."""
        items = []
        for _ in range(6):
            (item,), _ = self.steps.start([nbytes], self.terms)
            self.wait()
            if item.timed and item.sends and self.copy_ms is not None:
                self.steps.copied(item, nbytes, self.now, self.now + self.copy_ms * nbytes / 1000)
            items.append(item)
            self.now += 2 + more_ms
        sent = sum(item.sends for item in items)
        if self.is_planned():
            self.now += self.stall_ms * max(0, sent - 2)
        for item in reversed(items):
            self.steps.reload([item])
            self.wait()
            self.now += 2
            self.steps.drop([item])
        return sent


def test_plans_that_send_less_are_tried_while_steps_get_faster() -> None:
    link = SharedLink(stall_ms=1.0)
    sent = [link.run() for _ in range(36)]
    assert sent[:8] == [6, 6, 6, 5, 5, 5, 5, 5]
    assert sent[8] < 5 and 0 < sent[-1] <= 2, sent
    assert len(set(sent[-10:])) == 1, "the last plan stays"


def test_the_next_plan_counts_on_the_speed_that_copies_had_in_the_step() -> None:
    link = SharedLink(stall_ms=1.0, copy_ms=2.0)  # 1.05 ms were planned
    sent = [link.run() for _ in range(36)]
    assert link.shares[1] == pytest.approx(0.5 / 0.95) and link.shares[2] < link.shares[1], link.shares
    assert sent[3] == 5 > sent[8] and 0 < sent[-1] <= 2, sent
    as_planned = SharedLink(stall_ms=1.0, copy_ms=1.05)
    for _ in range(36):
        as_planned.run()
    assert as_planned.shares[1] == 0.75


@pytest.mark.parametrize(("stall_ms", "last"), [(0.0, 5), (9.0, 2)], ids=["hidden", "slow"])
def test_copies_that_were_faster_than_planned_let_the_next_plan_send_more(stall_ms: float, last: int) -> None:
    link = SharedLink(stall_ms, copy_ms=1.0)
    plan = link.steps.plan
    link.steps.plan = lambda trace, at_ms, share, spare: plan(
        trace, at_ms, 0.4 * share, spare
    )  # measured on a busy link
    sent = [link.run() for _ in range(48)]
    assert sent[3] < sent[8] == 5, sent
    assert sent[13] < sent[3], "then less than the first"
    assert sent[-1] == last, sent


def test_a_plan_is_not_judged_by_its_first_steps() -> None:
    link = SharedLink(stall_ms=1.0)
    sent = [link.run() for _ in range(8)]
    sent += [link.run(more_ms=9.0) for _ in range(3)]  # host memory of other sizes is pinned
    sent += [link.run() for _ in range(25)]
    assert sent[8] < 5 and 0 < sent[-1] <= 2, sent


def test_the_plan_with_most_copies_stays_of_those_that_are_as_fast() -> None:
    link = SharedLink(stall_ms=0.04)  # 0.12 ms for five tensors, of 24 ms a step: half a percent
    sent = [link.run() for _ in range(36)]
    assert sent[:8] == [6, 6, 6, 5, 5, 5, 5, 5] and min(sent[8:]) < 5 and sent[-6:] == [5] * 6, sent


def test_a_plan_that_sends_nothing_replaces_none() -> None:
    link = SharedLink(stall_ms=1.0)
    plan = link.steps.plan
    link.steps.plan = lambda trace, at_ms, share, spare: plan(trace, at_ms, share if share == 1.0 else 1e-9, spare)
    sent = [link.run() for _ in range(24)]
    assert sent[3:] == [5] * 21, sent


@pytest.mark.parametrize("more_ms", [0.0, 0.5], ids=["hidden", "other work makes all steps slower"])
def test_fewer_copies_that_are_no_faster_bring_back_the_plan_with_more(more_ms: float) -> None:
    link = SharedLink(0.0)
    assert [link.run() for _ in range(8)] == [6, 6, 6, 5, 5, 5, 5, 5]
    sent = [link.run(more_ms) for _ in range(17)]
    assert max(sent[:10]) < 5 and sent[10:] == [5] * 7, "two plans that are no faster are tried"


def test_hooks_that_allow_a_stall_keep_their_plan() -> None:
    sent = []
    for allowed_ms in (4.0, math.inf):
        link = SharedLink(1.0, terms=Terms(1 << 30, allowed_ms, 0.0, 0.0))
        sent.append([link.run() for _ in range(36)])
    for runs in sent:
        assert 0 < runs[3] == runs[-1], "the first plan comes back, however fast others were"
    assert len({*sent[1][3:]}) == 1, "without a limit no other is tried"


def test_a_host_that_is_ahead_of_the_device_takes_no_marks_without_end() -> None:
    link = SharedLink(1.0, behind_ms=60.0)  # more than two steps
    sent = [link.run() for _ in range(40)]
    assert 5 in sent and 0 < sent[-1] <= 2, sent
    assert link.marks < 150, "two runs of 12 events with two marks each, and two marks in each run of a plan"


def test_a_plan_stays_where_no_copies_run_beside_the_compute() -> None:
    link = SharedLink(1.0, adapts=False)
    assert [link.run() for _ in range(12)] == [6, 6, 6] + [5] * 9


def test_only_the_first_steps_send_what_has_no_plan() -> None:
    link = SharedLink(1.0)
    assert [link.run(nbytes=nbytes) for nbytes in range(1, 10)] == [6] * 6 + [0] * 3
    planned = SharedLink(1.0)
    assert [planned.run() for _ in range(4)] == [6, 6, 6, 5]
    assert planned.run(nbytes=500) == 0, "there is a plan, if of another step"
    anything = SharedLink(1.0, terms=Terms(1 << 30, math.inf, 0.0, 0.0))
    assert [anything.run(nbytes=nbytes) for nbytes in range(1, 10)] == [6] * 9, "any stall is allowed"


def test_steps_that_break_off_do_not_push_out_the_plan() -> None:
    """As a step whose loss reads fewer of its graphs: it begins as the planned one, and ends before it."""
    link = SharedLink(1.0, adapts=False)
    assert [link.run() for _ in range(5)][-1] == 5
    for _ in range(40):
        for _ in range(6):
            (item,), _ = link.steps.start([1000], link.terms)
            link.now += 2
        link.steps.reload([item])
        for gone in link.steps.run.items:
            link.steps.drop([gone])
    assert link.run() == 5 and len(link.steps.known.steps) == 2


SYMBOLIC = TERMS._replace(is_symbolic=True)


def test_symbolic_sizes_follow_a_plan_for_sizes_a_bit_larger() -> None:
    link = SharedLink(stall_ms=0.0, terms=SYMBOLIC)
    assert [link.run(nbytes=nbytes) for nbytes in (700, 1000)] == [6, 6], "the first compiles, the second is timed"
    assert [link.run(nbytes=nbytes) for nbytes in (800, 990, 850)] == [5, 5, 5] and link.planned_bytes == [1000]
    assert [link.run(nbytes=nbytes) for nbytes in (1001, 1001)] == [6, 5], "larger: timed, and planned by these times"
    assert [link.run(nbytes=nbytes) for nbytes in (790, 790)] == [6, 5], "much smaller: likewise"
    assert [link.run(nbytes=nbytes) for nbytes in (850, 1001, 640)] == [5, 5, 5], "each follows the nearest"
    assert link.planned_bytes == [1000, 1001, 790]


def test_plans_for_symbolic_sizes_hold_to_the_times_of_their_own_sizes() -> None:
    """Each operator takes 2 ms, whatever its sizes, so a step of large sizes can hide fewer copies."""
    link = SharedLink(stall_ms=0.0, terms=SYMBOLIC)
    sent = {nbytes: [link.run(nbytes=nbytes) for _ in range(3)][-1] for nbytes in (500, 1000, 4000, 8000)}
    assert sent[1000] == 5 > sent[4000] > sent[8000], sent


def test_copies_that_are_slower_than_planned_are_noticed_at_other_sizes() -> None:
    slow = SharedLink(stall_ms=1.0, terms=SYMBOLIC, copy_ms=2.0)
    for nbytes in (1000, 1000, 990, 980, 970, 960, 950, 940, 930, 920):
        slow.run(nbytes=nbytes)
    assert slow.shares == [1.0, pytest.approx(0.5 / 0.95)]


def test_few_plans_are_made_for_sizes_that_hardly_come_again() -> None:
    """Two sizes, each of its own. Steps go on sending after the last plan has been made."""
    link = SharedLink(stall_ms=0.0, terms=SYMBOLIC)
    generator = random.Random(0)
    sent = []
    for _ in range(1200):
        sizes = [int(2 ** generator.uniform(7, 12)) for _ in range(2)]
        items = []
        for i in range(6):
            items += link.steps.start([sizes[i // 3]], SYMBOLIC)[0]
            link.wait()
            link.now += 5
        sent.append(sum(item.sends for item in items))
        for item in reversed(items):
            link.steps.reload([item])
            link.wait()
            link.now += 5
            link.steps.drop([item])
    assert len(link.planned_bytes) <= 2 * known._MOST_PLANNED and len(link.steps.known.steps) <= known._MOST_TRACES
    last = sent[-400:]
    assert sum(n > 0 for n in last) > 0.8 * len(last), last


def test_static_sizes_have_a_plan_each() -> None:
    link = SharedLink(stall_ms=0.0)
    assert [link.run(nbytes=nbytes) for nbytes in [500, 1000, 500, 1000, 500, 1000]] == [6] * 6
    assert link.run(nbytes=500) > 0 and link.planned_bytes == [500, 1000]


def test_what_starts_after_the_first_reload_or_has_no_backward_stays() -> None:
    calls = tuple(Sends(nbytes, TERMS) for nbytes in ((8, 0), (8,), (8,), (8,)))
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    events = [Event(forward, 0), Event(forward, 1), Event(forward, 2), Event(backward, 1), Event(forward, 3)]
    trace = Trace(calls, (*events, Event(backward, 3), Event(backward, 0)))
    plan = plan_step(trace, [10.0 * i for i in range(len(trace.events))], 1e9, 1e9)
    # 1 has no bytes, 2 is needed at once, 3 never, 4 is of the backward
    assert plan.sends == (True, False, False, False, False)


def test_graphs_are_counted_by_their_last_operators() -> None:
    first = Terms(1 << 30, 0.0, 0.0, 0.0, ends_graph=False)
    assert graph_count(Trace((Sends((8, 8), first), Sends((8,), TERMS)), ())) == 1
    assert graph_count(layers(5, 8)) == 5
    assert graph_count(Trace((), ())) == 0


def test_a_plan_says_how_long_its_copies_hold_the_step_up() -> None:
    at_ms = [2.0 * i for i in range(12)]
    assert plan_step(layers(6, 1000), at_ms, 1e6, 1e6).stall_ms == 0.0, "its copies are hidden"
    stalled = plan_step(layers(6, 1000, Terms(1 << 30, 3.0, 0.0, 0.0)), at_ms, 4e5, 4e5)
    assert 0 < stalled.stall_ms <= 3.0
    assert stalled.sent_bytes > plan_step(layers(6, 1000), at_ms, 4e5, 4e5).sent_bytes
