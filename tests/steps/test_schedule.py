"""The schedule of copies on made-up timelines, by hand and by hypothesis, checked by an independent simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aot_hooks.steps.schedule import NO_TIME, TOO_SOON, CopyEvent, Item, Limits, Schedule, schedule

pytestmark = pytest.mark.core
MB = 10**6
LINK = 50e9  # 50 MB a millisecond


def plan(items: list[Item], forward: list[float], backward: list[float], **kwargs: Any) -> Schedule:
    """Calls `schedule` with `limits`, or with one kind of limits given by name."""
    one = {name: kwargs.pop(name) for name in ("in_flight_bytes", "max_stall_ms") if name in kwargs}
    return schedule(
        items, forward, backward, **{"to_host": LINK, "to_device": LINK, "limits": [Limits(**one)], **kwargs}
    )


def stack(layers: int, nbytes: int) -> list[Item]:
    """One value a layer; the backward of a layer takes two steps and needs it in the first."""
    return [Item(nbytes, i, 2 * (layers - 1 - i)) for i in range(layers)]


def simulate(items: list[Item], found: Schedule, forward: list[float], backward: list[float], link: float) -> float:
    """How long the compute waits, event by event. The copies of each way run one at a time, in the order they start."""
    stall = 0.0
    for times, events in ((forward, found.forward), (backward, found.backward)):
        gaps = [0.0, *accumulate(times)]
        stalled = free_at = 0.0
        done: dict[int, float] = {}
        for gap, what, i in events:
            now = gaps[gap] + stalled
            if what in ("start", "reload"):
                free_at = max(free_at, now) + items[i].nbytes / link * 1e3
                done[i] = free_at
            else:
                stalled += max(0.0, done[i] - now)
        stall += stalled
    return stall


def most_under_way(items: list[Item], events: tuple[CopyEvent, ...]) -> int:
    change = {"start": 1, "reload": 1, "wait": -1, "use": -1}
    return max(accumulate(change[what] * items[i].nbytes for _, what, i in events), default=0)


def test_what_fits_beside_the_compute_is_sent_and_waited_for_with_slack() -> None:
    items = stack(10, 10 * MB)
    found = plan(items, [1.0] * 10, [1.0] * 20)
    sent = [i for i, p in enumerate(found.placements) if p.offloaded]
    assert sent == list(range(9))  # the last is needed at once
    assert found.stall_ms == 0.0
    for i in sent:
        p = found.placements[i]
        assert p.start == i + 1 < p.wait
        assert p.reload < p.use == items[i].used
        assert p.use - p.reload <= 2, "it would hold memory for longer than it has to"
        assert p.slack_ms > 0.2


def test_the_last_layers_stay() -> None:
    found = plan(stack(10, 60 * MB), [1.0] * 10, [1.0] * 20)
    assert [p.offloaded for p in found.placements[:6]] == [True] * 6
    assert not found.placements[9].offloaded and found.placements[9].reason == TOO_SOON


def test_a_link_that_is_too_slow_sends_what_it_can_and_says_what_all_would_cost() -> None:
    items = stack(10, 200 * MB)  # 4 ms each, in 10 ms
    found = plan(items, [1.0] * 10, [1.0] * 20)
    sent = sum(p.offloaded for p in found.placements)
    assert sent == 2
    assert {p.reason for p in found.placements if not p.offloaded} == {NO_TIME, TOO_SOON}
    assert found.stall_ms == 0.0 < found.full_stall_ms
    everything = plan(items, [1.0] * 10, [1.0] * 20, max_stall_ms=math.inf)
    assert everything.stall_ms == pytest.approx(found.full_stall_ms)
    assert sum(p.offloaded for p in everything.placements) > sent
    some = plan(items, [1.0] * 10, [1.0] * 20, max_stall_ms=found.full_stall_ms / 2)
    assert sent <= sum(p.offloaded for p in some.placements) < sum(p.offloaded for p in everything.placements)
    assert some.stall_ms <= found.full_stall_ms / 2


def test_bytes_under_way_are_bounded() -> None:
    items = stack(20, 50 * MB)
    for bound in (50, 120, 400):
        found = plan(items, [1.0] * 20, [1.0] * 40, in_flight_bytes=bound * MB, max_stall_ms=math.inf)
        assert most_under_way(items, found.forward) <= bound * MB
        assert most_under_way(items, found.backward) <= bound * MB


def test_limits_hold_for_the_items_of_their_kind() -> None:
    forward, backward = [1.0] * 20, [1.0] * 40
    items = [replace(item, kind=i % 2) for i, item in enumerate(stack(20, 80 * MB))]  # 1.7 ms each, in 1 ms

    def of_kind(found: Schedule, kind: int) -> int:
        return sum(p.offloaded and item.kind == kind for item, p in zip(items, found.placements, strict=True))

    free, strict = Limits(max_stall_ms=math.inf), Limits()
    both_strict = plan(items, forward, backward, limits=[strict, strict])
    mixed = plan(items, forward, backward, limits=[strict, free])
    assert (
        of_kind(mixed, 1) == of_kind(plan(items, forward, backward, limits=[free, free]), 1) > of_kind(both_strict, 1)
    )
    assert mixed.stall_ms > 0.0
    few = [Limits(100 * MB, math.inf), Limits(max_stall_ms=math.inf)]
    found = plan(items, forward, backward, limits=few)
    for kind, bound in ((0, 100 * MB), (1, math.inf)):
        for events in (found.forward, found.backward):
            assert most_under_way(items, tuple(e for e in events if items[e[2]].kind == kind)) <= bound
    assert most_under_way(items, found.forward) > 200 * MB, "the other kind is not held to it"


def test_a_value_that_is_there_before_the_first_step_is_sent_at_once() -> None:
    found = plan([Item(50 * MB, -1, 19)], [1.0] * 10, [1.0] * 20)
    assert found.placements[0].start == 0


def test_an_instant_link_sends_all_but_what_is_needed_at_once() -> None:
    found = schedule(stack(4, MB), [1e-6] * 4, [1e-6] * 8, to_host=math.inf, to_device=math.inf)
    assert [p.offloaded for p in found.placements] == [True, True, True, False]


def test_waits_and_copies_back_stand_where_they_may() -> None:
    items = stack(10, 20 * MB)
    found = plan(items, [1.0] * 10, [1.0] * 20, gaps=([3, 6], [5, 10, 15]))
    assert {p.wait for p in found.placements if p.offloaded} == {3, 6, 10}
    assert {p.reload for p in found.placements if p.offloaded} <= {0, 5, 10, 15}
    assert found.stall_ms == 0.0


def test_of_copies_back_in_one_gap_the_first_to_be_used_starts_first() -> None:
    items = [Item(100 * MB, 0, 9), Item(MB, 1, 8)]
    found = plan(items, [5.0] * 10, [1.0] * 20, gaps=(None, [6]))
    large, small = found.placements
    assert large.reload == small.reload == 6
    assert found.stall_ms == 0 and small.back_ms < large.back_ms


def test_nothing_to_place() -> None:
    found = plan([], [1.0], [1.0, 1.0])
    assert (found.placements, found.stall_ms, found.forward_ms, found.backward_ms) == ((), 0.0, 1.0, 2.0)


def test_one_item_larger_than_the_bound_goes_alone() -> None:
    items = stack(10, 100 * MB)
    found = plan(items, [10.0] * 10, [10.0] * 20, in_flight_bytes=1)
    assert all(p.offloaded for p in found.placements[:9])
    assert most_under_way(items, found.forward) == 100 * MB


@st.composite
def timelines(draw: st.DrawFn) -> tuple[list[Item], list[float], list[float]]:
    times = st.floats(0.0, 5.0)
    forward = draw(st.lists(times, min_size=1, max_size=12))
    backward = draw(st.lists(times, min_size=1, max_size=12))
    item = st.builds(
        Item,
        st.integers(1, 300 * MB),
        st.integers(-1, len(forward) - 1),
        st.integers(0, len(backward) - 1),
        st.integers(0, 1),
    )
    return draw(st.lists(item, max_size=10)), forward, backward


@settings(max_examples=300, deadline=None)
@given(
    timelines(),
    st.tuples(
        *[st.builds(Limits, st.sampled_from([1.0, 400.0 * MB, math.inf]), st.sampled_from([0.0, 3.0, math.inf]))] * 2
    ),
    st.sampled_from([{}, {"gaps": ([], [])}, {"gaps": ([1], [0, 1])}]),
)
def test_any_timeline(
    timeline: tuple[list[Item], list[float], list[float]],
    limits: tuple[Limits, Limits],
    gaps: dict[str, list[int]],
) -> None:
    items, forward, backward = timeline
    found = plan(items, forward, backward, limits=limits, **gaps)
    max_stall_ms = sum(limit.max_stall_ms for limit in limits)
    assert len(found.placements) == len(items)
    for item, p in zip(items, found.placements, strict=True):
        if p.offloaded:
            assert p.start == item.made + 1 <= p.wait <= len(forward)
            assert 0 <= p.reload <= p.use == item.used
            assert p.reason == "" and p.stall_ms >= 0.0
        else:
            assert p.reason in (TOO_SOON, NO_TIME)
    assert found.stall_ms <= max_stall_ms + 1e-9
    assert found.stall_ms == pytest.approx(sum(p.stall_ms for p in found.placements))
    if all(limit.max_stall_ms == math.inf for limit in limits):
        assert all(p.offloaded or p.reason == TOO_SOON for p in found.placements)
        assert found.stall_ms == found.full_stall_ms
    for events, first, last in ((found.forward, "start", "wait"), (found.backward, "reload", "use")):
        assert [gap for gap, _, _ in events] == sorted(gap for gap, _, _ in events)
        for i, p in enumerate(found.placements):
            own = [(gap, what) for gap, what, item in events if item == i]
            assert own == ([(getattr(p, first), first), (getattr(p, last), last)] if p.offloaded else [])
        for kind, limit in enumerate(limits):
            largest = max((item.nbytes for item in items), default=0)
            of_kind = tuple(event for event in events if items[event[2]].kind == kind)
            assert most_under_way(items, of_kind) <= max(limit.in_flight_bytes, largest)
    # the schedule's prediction is on the safe side of a plain simulation at the link's full speed
    assert simulate(items, found, forward, backward, LINK) <= found.stall_ms + 1e-6


@pytest.mark.parametrize(("link", "sent", "could", "peak"), [(25e9, 7, 14, 25), (50e9, 14, 22, 18)])
def test_copies_that_go_on_into_the_backward_would_lower_no_peak(link: float, sent: int, could: int, peak: int) -> None:
    """Why each copy out is waited for in its forward; the numbers are in docs/offload.md."""
    layers, took = 32, 100 * MB / (link * 0.95) * 1e3
    items = [Item(100 * MB, i, layers - 1 - i) for i in range(layers)]
    found = plan(items, [1.0] * layers, [2.0] * layers, to_host=link, to_device=link)
    now = {i: (p.wait_ms, layers + p.reload_ms) for i, p in enumerate(found.placements) if p.offloaded}
    going_on, free_at = {}, 0.0
    for i in range(layers):  # as many as are back in time on an idle link
        free_at = max(free_at, i + 1.0) + took
        used = layers + 2.0 * (layers - 1 - i)
        if free_at + took < used:
            going_on[i] = (free_at, used - took)
        else:
            free_at -= took

    def most_on_the_device(gone: dict[int, tuple[float, float]]) -> int:
        def there(i: int, ms: float) -> bool:
            leaves, returns = gone.get(i, (math.inf, 0.0))
            return i + 1 <= ms < layers + 2 * (layers - i) and not leaves <= ms < returns

        return max(sum(there(i, quarter / 4) for i in range(layers)) for quarter in range(12 * layers))

    assert (len(now), len(going_on)) == (sent, could)
    assert most_on_the_device(now) == most_on_the_device(going_on) == peak


def test_the_simulation_tells_a_schedule_that_starts_too_late() -> None:
    items = [Item(100 * MB, 0, 9)]
    good = plan(items, [1.0] * 10, [1.0] * 10)
    assert simulate(items, good, [1.0] * 10, [1.0] * 10, LINK) == 0.0
    late = replace(good, backward=((9, "reload", 0), (9, "use", 0)))
    assert simulate(items, late, [1.0] * 10, [1.0] * 10, LINK) == pytest.approx(2.0)
