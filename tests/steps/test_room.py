"""Steps of a budget: what is sent for its room, on links of several speeds. The step is one of 16 large blocks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from aot_hooks.planning.simulated import Call, Point, Whole, room_of
from aot_hooks.steps.follow import Follower
from aot_hooks.steps.memory import Bytes
from aot_hooks.steps.plan import Do, Sends, StepPlan, Terms, plan_step
from aot_hooks.steps.recorder import Event, Phase, Trace
from aot_hooks.steps.saved import SavedItem

MIB = 1 << 20
CALLS = 16
CALL = Call(
    Bytes(890 * MIB, 442 * MIB, 1138 * MIB), tuple(n * MIB for n in (64, 16, 8, 1, 32, 1, 112, 112, 32)), 6.9, 13.5
)
KEPT = 8600 * MIB  # about the peak of a step that sends nothing


def whole(peak: int) -> Whole:
    points = [Point("forward", n, 832 * MIB, 0.0) for n in range(CALLS)]
    return Whole((*points, *(Point("backward", n, 832 * MIB, 0.0) for n in reversed(range(CALLS)))), peak)


def trace_of(peak: int, parts: int = 1, calls: int = CALLS) -> Trace:
    """The step, with the items of each call in several operators."""
    room = room_of([whole(peak)], CALL)
    found = [
        Sends(CALL.items[i::parts], Terms(768 * MIB, 0.0, 0.0, 0.0, ends_graph=i == parts - 1, room=room))
        for _ in range(calls)
        for i in range(parts)
    ]
    forward = [Event(Phase.FORWARD, n) for n in range(len(found))]
    return Trace(tuple(found), (*forward, *(Event(Phase.BACKWARD, event.call) for event in reversed(forward))))


def times_of(trace: Trace) -> list[float]:
    """When each event runs: items start at the end of a forward."""
    parts = len(trace.calls) // CALLS
    took = [CALL.forward_ms / parts] * (len(trace.calls) - 1) + [0.1] + [CALL.backward_ms / parts] * len(trace.calls)
    return [*itertools.accumulate(took[:-1], initial=0.0)]


def fits(plan: StepPlan) -> bool:
    return plan.excess_bytes is not None and plan.excess_bytes <= 0


class Link:
    """A step on a device with a link of `rate` bytes a second each way: what waits for what, and what is alive."""

    def __init__(self, trace: Trace, rate: float) -> None:
        self.trace, self.bytes_per_ms = trace, rate / 1e3
        self.items = [n for sends in trace.calls for n in sends.nbytes]
        first = [*itertools.accumulate((len(sends.nbytes) for sends in trace.calls), initial=0)]
        self.of_call = [range(a, b) for a, b in itertools.pairwise(first)]

    def run(self, plan: StepPlan) -> float:
        """The ms of a step."""
        at_ms = times_of(self.trace)
        took = [b - a for a, b in itertools.pairwise(at_ms)] + [0.0]
        now = out_free = back_free = 0.0
        out, back, joined, live = dict[int, float](), dict[int, float](), set[int](), set[int]()
        for i, (phase, call) in enumerate(self.trace.events):
            for what, number in plan.actions.get(i, ()):
                if what is Do.FETCH:
                    back_free = back[number] = max(now, back_free) + self.items[number] / self.bytes_per_ms
                    live.add(number)
                else:
                    joined.add(number)
                    now = max(now, out.get(number, now))
                    live.discard(number)
            for number in self.of_call[call]:
                if phase is Phase.BACKWARD:
                    now = max(now, back.get(number, now))
                    live.discard(number)
                    continue
                live.add(number)
                if plan.sends[number]:
                    out_free = out[number] = max(now, out_free) + self.items[number] / self.bytes_per_ms
                if number in joined:
                    now = max(now, out[number])
                    live.discard(number)
            now += took[i]
        assert not live and len(out) == len(back) == sum(plan.sends)
        return now


@pytest.mark.parametrize(("share", "smallest"), [(0.8, 8), (0.6, 8), (0.4, 8), (0.34, 1)])
def test_small_items_stay_unless_all_have_to_go(share: float, smallest: int) -> None:
    """Each copy takes the host as long as a large one: seven of nine items of a call are sent, not all."""
    trace = trace_of(int(share * KEPT))
    plan = plan_step(trace, times_of(trace), 55e9, 55e9)
    sizes = [n for sends in trace.calls for n in sends.nbytes]
    assert min(n for n, is_sent in zip(sizes, plan.sends, strict=True) if is_sent) == smallest * MIB
    assert fits(plan) == (smallest > 1)


@pytest.mark.parametrize("parts", [1, 3], ids=["one operator a call", "three"])
@pytest.mark.parametrize("rate", [55e9, 36e9, 20e9])
def test_a_budget_sends_what_its_peak_needs_and_no_more(rate: float, parts: int) -> None:
    sent, ms = [], []
    for share in (1.0, 0.8, 0.6, 0.45):
        trace = trace_of(int(share * KEPT), parts)
        plan = plan_step(trace, times_of(trace), rate, rate)
        assert fits(plan)
        if plan.sent_bytes:
            assert plan.excess_bytes is not None and plan.excess_bytes > -128 * MIB, "one item more is over"
        sent.append(plan.sent_bytes)
        ms.append(Link(trace, rate * 0.95).run(plan))
    assert sent == sorted(sent) and sent[0] == 0, "less room, more copies"
    assert all(a <= b * 1.001 for a, b in itertools.pairwise(ms)), "no step is slower than one with less room"
    stalls = [each - ms[0] for each in ms]
    if rate == 55e9:
        assert stalls[1] < 0.1 and stalls[2] < 1.0, stalls


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_a_link_of_two_thirds_of_its_speed_stalls_nothing_where_there_is_room(share: float) -> None:
    trace = trace_of(int(share * KEPT))
    link = Link(trace, 36e9)
    plan = plan_step(trace, times_of(trace), 55e9, 55e9)
    assert plan.sent_bytes > 1 << 30
    planned_for = plan_step(trace, times_of(trace), 36e9, 36e9)
    assert link.run(plan) <= 1.002 * link.run(planned_for) <= 1.01 * times_of(trace)[-1]


@pytest.mark.parametrize("seed", range(30))
def test_items_stay_within_the_room_of_each_moment(seed: int) -> None:
    """Against a count of what is alive at each moment, written apart from the plan."""
    chosen = random.Random(seed)
    calls = chosen.randrange(2, 8)
    items = tuple(chosen.randrange(1, 50) for _ in range(chosen.randrange(1, 4)))
    own = Bytes(sum(items) + chosen.randrange(90), sum(items) + chosen.randrange(30), sum(items) + chosen.randrange(90))
    call = Call(own, items, chosen.uniform(1, 3), chosen.uniform(1, 6))
    points = [Point("forward", n, chosen.randrange(50), 0.0) for n in range(calls)]
    points += [Point("backward", n, chosen.randrange(90), 0.0) for n in reversed(range(calls))]
    kept = max(p.nbytes + getattr(own, p.phase) + own.held * p.call for p in points)
    peak = int(chosen.uniform(0.3, 1.1) * kept)
    room = room_of([Whole(tuple(points), peak)], call)
    terms = Terms(1e9, 0.0, 0.0, 0.0, room=room)
    events = [Event(Phase.FORWARD if p.phase == "forward" else Phase.BACKWARD, p.call) for p in points]
    trace = Trace((Sends(items, terms),) * calls, tuple(events))
    now, at_ms = 0.0, []
    for p in points:
        at_ms.append(now + (call.forward_ms if p.phase == "forward" else 0.0))
        now += call.forward_ms if p.phase == "forward" else call.backward_ms
    speed = chosen.uniform(2e3, 4e4)
    plan = plan_step(trace, at_ms, speed, speed)
    count = len(items)
    joins = {n: i for i, each in plan.actions.items() for what, n in each if what is Do.JOIN}
    fetches = {n: i for i, each in plan.actions.items() for what, n in each if what is Do.FETCH}
    most = 0
    for i, p in enumerate(points):  # `i`: while it runs, events up to it have come, and in a forward up to the last
        seen = i if p.phase == "backward" else i - 1
        alive = p.nbytes + getattr(own, p.phase)
        for other in range(calls):
            began, read = other, 2 * calls - 1 - other
            if other == p.call or not began <= seen < read:
                continue
            alive += own.held - sum(items)
            for n in range(other * count, (other + 1) * count):
                away = n in joins and joins[n] <= seen and (n not in fetches or fetches[n] > seen)
                alive += 0 if away else items[n % count]
        most = max(most, alive)
    assert plan.excess_bytes is not None
    assert most <= peak + max(0, plan.excess_bytes), (most, peak, plan.excess_bytes)
    fast = plan_step(trace, at_ms, 1e9, 1e9)
    assert fast.excess_bytes is not None and max(0, plan.excess_bytes) == pytest.approx(max(0, fast.excess_bytes)), (
        "a slow link makes steps slow, but not larger"
    )


def test_a_step_that_no_budget_knows_sends_all_that_it_can() -> None:
    """As one of more calls than were planned: nobody knows what it has room for."""
    trace = trace_of(int(0.6 * KEPT))
    longer = Trace(trace.calls * 2, trace_of(0, calls=2 * CALLS).events)
    plan = plan_step(longer, [7.0 * i for i in range(len(longer.events))], 55e9, 55e9)
    assert not fits(plan) and plan.sent_bytes > 0.9 * plan.nbytes
    fewer = Trace(trace.calls[:4], trace_of(0, calls=4).events)
    assert plan_step(fewer, [7.0 * i for i in range(8)], 55e9, 55e9).sent_bytes == 0, "they have room"


class Steps:
    """The steps of a device with a link of `rate`, which was measured as `planned_rate` when it was idle."""

    def __init__(self, peak: int, rate: float, planned_rate: float) -> None:
        self.trace = trace_of(peak)
        self.link, self.planned_rate = Link(self.trace, rate), planned_rate
        self.now, self.made, self.took = 0.0, list[StepPlan](), list[tuple[float, StepPlan | None]]()
        self.follower = Follower(lambda: self.now, self.times, self.plan, adapts=True)

    def times(self, runs: list[list[float]]) -> list[list[float]]:
        return [[mark - run[0] for mark in run] for run in runs]

    def plan(self, trace: Trace, at_ms: Sequence[float], share: float, spare_bytes: int) -> StepPlan:
        self.made.append(plan_step(trace, at_ms, *[share * self.planned_rate] * 2, spare_bytes))
        return self.made[-1]

    def run(self) -> float:
        """A step with the copies of its plan: their waits hold up its events."""
        follower, began = self.follower, self.now
        items: list[list[SavedItem]] = []
        at_ms = times_of(self.trace)
        total = 0.0
        for i, (phase, call) in enumerate(self.trace.events):
            plan = follower.run.plan if i else None
            self.now = began + (at_ms[i] if plan is None else at_ms[i] + total * at_ms[i] / at_ms[-1])
            if phase is Phase.FORWARD:
                sends = self.trace.calls[call]
                items.append(follower.start(sends.nbytes, sends.terms)[0])
                if not i and follower.run.plan is not None:
                    total = self.link.run(follower.run.plan) - at_ms[-1]
            else:
                follower.reload(items[call])
            follower.waited()
            if follower.run.plan is not None and phase is Phase.FORWARD:
                for item in items[call]:
                    if item.sends and item.timed:
                        nbytes = self.link.items[item.number]
                        follower.copied(item, nbytes, 0.0, nbytes / self.link.bytes_per_ms)
            if phase is Phase.BACKWARD:
                follower.drop(items[call])
        self.took.append((self.now - began, follower.run.plan))
        return self.now - began


@pytest.mark.parametrize("rate", [52e9, 36e9, 20e9])
@pytest.mark.parametrize("share", [0.42, 0.6, 1.2])
def test_a_slower_link_than_planned_is_planned_for_once(rate: float, share: float) -> None:
    steps = Steps(int(share * KEPT), rate, 55e9)
    times = [steps.run() for _ in range(20)]
    assert len(steps.made) <= 2 and steps.follower.known.steps[0].is_settled
    assert all(map(fits, steps.made)), "no plan is over the peak"
    assert times[-1] <= min(times[3:]) * 1.0001, "the fastest stays"
    assert max(times[13:]) == pytest.approx(min(times[13:]))
    if share == 1.2:
        assert times[-1] == pytest.approx(times_of(steps.trace)[-1]) and steps.made[-1].sent_bytes == 0


def test_what_a_measured_step_left_free_is_sent_no_more() -> None:
    steps = Steps(int(0.6 * KEPT), 55e9, 55e9)
    for _ in range(12):
        steps.run()
    (known,) = steps.follower.known.steps
    before = known.plan
    assert before is not None and steps.follower.leave_free(500 * MIB)
    after = known.plan
    assert after is not None and fits(after)
    assert 400 * MIB < before.sent_bytes - after.sent_bytes <= 500 * MIB
    assert steps.follower.leave_free(-500 * MIB) and known.plan is not None
    assert known.plan.sends == before.sends, "taken back"
    assert not steps.follower.leave_free(0)


def test_a_budget_sends_all_before_it_has_a_plan() -> None:
    steps = Steps(int(1.2 * KEPT), 55e9, 55e9)
    steps.run()
    assert all(item.sends for item in steps.follower.run.items), "they may not fit"


def test_terms_of_a_budget_are_numbers_and_back() -> None:
    terms = Terms(1.0, 2.0, 3.0, 4.0, True, False, 7.0, (5.0, 6.0))
    assert Terms.of(terms.numbers()) == terms
    plain = terms._replace(room=())
    assert Terms.of(plain.numbers()) == plain and len(plain.numbers()) == 7
