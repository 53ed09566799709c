"""The plan of a step: which items are sent, where to wait for their copies out, and where to start the copies back.

      trace    forward 0 (items 0 1), ... forward 4 (items 8 9) | backward 4, ... backward 0        and when each ran
      plan     forward 0 [send] 0 1 ... forward 3 [join 0] 6 7 ... | backward 4 [fetch 6] ... backward 0

An item is one tensor that a call saves. Item n is the n-th of the step. A pure function of a trace and its times:
follow.py records these, and follows the plan.

Two things limit what is sent. A hook that a user types says how long its copies may hold the step up: as much is sent
as fits into that. A budget says how many bytes may be on the device: as little is sent as that needs.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from .recorder import Phase, Trace
from .schedule import LINK, Item, Limits, Schedule, schedule

# Of the bytes that are sent. Up to this sum the smallest tensors stay: each takes the host as long as a large one.
_SMALL = 0.02


class Terms(NamedTuple):
    """The conditions under which an operator sends its tensors. The operator takes them as a list of numbers."""

    in_flight_bytes: float
    max_stall_ms: float
    to_host: float  # bytes a second; 0 measures the link
    to_device: float
    ends_graph: float = True  # no other operator of its graph comes after this one
    is_symbolic: float = False  # the bytes of its tensors differ from call to call
    min_bytes: float = 0.0  # what has less when it runs stays, also if a plan sends it
    room: tuple[float, ...] = ()
    """Of a budget: the bytes that items may take on the device, beside those of the call that runs. (): no budget.

    The first half is for forwards, the second for backwards. Entry n is for n other calls of the graph that hold items.
    """

    @staticmethod
    def of(numbers: Sequence[float]) -> Terms:
        in_flight_bytes, max_stall_ms, to_host, to_device, ends_graph, is_symbolic, min_bytes, *room = numbers
        return Terms(in_flight_bytes, max_stall_ms, to_host, to_device, ends_graph, is_symbolic, min_bytes, tuple(room))

    def numbers(self) -> list[float]:
        *single, room = self
        return [*map(float, single), *room]


class Sends(NamedTuple):
    """What a run of an operator that sends tensors is, as a call of a step."""

    nbytes: tuple[int, ...]  # of each of its tensors
    terms: Terms


class Do(Enum):
    """What to do before an event of a step."""

    JOIN = "join"
    """Wait for the copy out of an item, and release the tensor on the device."""
    FETCH = "fetch"
    """Start the copy back of an item."""


Action = tuple[Do, int]  # with the number of the item
_ACTIONS = {"wait": Do.JOIN, "reload": Do.FETCH}  # by what a schedule calls them


@dataclass(frozen=True)
class StepPlan:
    """The decisions for the calls of one step.

    Attributes:
        sends: for each item, whether it is sent.
        actions: by event, what to do before it. A join may name an item that starts in that event: its copy out is then
            waited for as soon as it has started.
        graph_count: how many calls of graphs send or could send.
        nbytes, sent_bytes: bytes that could be sent in the step, and those that are.
        held_bytes: the most bytes of items on the device in the forward, and in the backward, if nothing is kept for a
            second backward.
        excess_bytes: by how much items take more than a budget has room for; below 0 if less. None: no budget.
        stall_ms: how much longer the step gets by waiting for copies, as predicted.
        forward_ms, backward_ms: from the first event to the first backward, and from there to the last, without stalls.
        allowed_ms: how much longer the step may get by the limits of its hooks.
        to_host: the speed of copies out that the plan counts on, in bytes a second.
    """

    sends: tuple[bool, ...]
    actions: dict[int, list[Action]]
    graph_count: int
    nbytes: int
    sent_bytes: int
    held_bytes: tuple[int, int]
    excess_bytes: float | None
    stall_ms: float
    forward_ms: float
    backward_ms: float
    allowed_ms: float = 0.0
    to_host: float = 0.0


def graph_count(trace: Trace) -> int:
    """How many calls of graphs a trace of operators has."""
    return sum(bool(sends.terms.ends_graph) for sends in trace.calls)


class _Items(NamedTuple):
    """The items of a trace, by number."""

    nbytes: list[int]
    call: list[int]  # the call that saves each
    begin: list[int]  # the event that starts each
    read: dict[int, int]  # the event of its first backward, if it has one
    terms: list[Terms]
    backward: int  # the first event that reads an item
    event_count: int

    @classmethod
    def of(cls, trace: Trace) -> _Items:
        numbers = [*itertools.accumulate((len(sends.nbytes) for sends in trace.calls), initial=0)]
        nbytes = [n for sends in trace.calls for n in sends.nbytes]
        terms = [sends.terms for sends in trace.calls for _ in sends.nbytes]
        begin, read = [0] * len(nbytes), dict[int, int]()
        for i, event in enumerate(trace.events):
            for number in range(numbers[event.call], numbers[event.call + 1]):
                if event.phase is Phase.FORWARD:
                    begin[number] = i
                else:
                    read.setdefault(number, i)
        call = [number for number, sends in enumerate(trace.calls) for _ in sends.nbytes]
        return cls(nbytes, call, begin, read, terms, min(read.values(), default=len(trace.events)), len(trace.events))


def plan_step(
    trace: Trace, at_ms: Sequence[float], to_host: float, to_device: float, spare_bytes: float = 0
) -> StepPlan:
    """Plan a step whose events ran `at_ms`. `to_host`, `to_device`: bytes a second over the link.

    Sends items in the order in which they start: the first have the most time to go and to come back. So the last ones
    stay. Items that start after the first backward stay, too.

    With a budget it sends the fewest that leave each moment of the step within its room, with `spare_bytes` more than
    that. If nothing fits, it sends the fewest that come as near to it as all would. Without one it sends as long as
    compute hides the copies.

    The smallest stay, up to 2% of the bytes that are sent: if larger ones leave as much room, or without a budget if no
    more than that is held besides.
    """
    items = _Items.of(trace)
    limits: dict[Limits, int] = {}
    chosen: list[tuple[int, Item]] = []  # those that may be sent, with their numbers
    for number, (nbytes, begin, terms) in enumerate(zip(items.nbytes, items.begin, items.terms, strict=True)):
        if begin < items.backward and number in items.read and nbytes:
            stall_ms = math.inf if terms.room else terms.max_stall_ms
            kind = limits.setdefault(Limits(terms.in_flight_bytes, stall_ms), len(limits))
            chosen.append((number, Item(nbytes, begin - 1, items.read[number] - items.backward, kind)))
    took = [b - a for a, b in itertools.pairwise([*at_ms, at_ms[-1]])]
    rooms = list(_rooms(trace))
    allowed_ms = max((limit.max_stall_ms for limit in limits), default=0.0)
    place = functools.partial(schedule, to_host=to_host, to_device=to_device, limits=[*limits])

    def plan_of(sent: Sequence[tuple[int, Item]]) -> StepPlan:
        """The plan that sends no items but `sent`."""
        numbers, parts = [number for number, _ in sent], (took[: items.backward], took[items.backward :])
        free = _room_in_flight(items, {*numbers}, rooms, spare_bytes)
        room = (free[: items.backward], free[items.backward :]) if rooms else None
        found = place([item for _, item in sent], *parts, room=room)
        plan = _as_plan(trace, items, numbers, found, rooms)
        excess_bytes = None if plan.excess_bytes is None else plan.excess_bytes - spare_bytes
        return replace(plan, excess_bytes=excess_bytes, allowed_ms=allowed_ms, to_host=to_host * LINK)

    def best_of(several: Sequence[tuple[int, Item]]) -> StepPlan:
        """Returns the best plan that sends none but `several`: the fewest for a budget, else all that compute hides."""
        plan = plan_of(several)
        return _with_fewest(plan, len(several), lambda count: plan_of(several[:count])) if rooms else plan

    plan = best_of(chosen)
    sizes = sorted(item.nbytes for _, item in chosen)
    small_bytes = _SMALL * plan.sent_bytes
    small = bisect.bisect(list(itertools.accumulate(sizes)), small_bytes)
    if not (rooms or math.isfinite(allowed_ms)) or not 0 < small < len(sizes):
        return plan
    larger = best_of([each for each in chosen if each[1].nbytes >= sizes[small]])
    if rooms:
        excess = larger.excess_bytes or 0.0
        return larger if math.isfinite(excess) and excess <= max(0.0, plan.excess_bytes or 0.0) else plan
    holds_more = any(a > b + small_bytes for a, b in zip(larger.held_bytes, plan.held_bytes, strict=True))
    return plan if holds_more else larger


def _with_fewest(most: StepPlan, count: int, plan_of: Callable[[int], StepPlan]) -> StepPlan:
    """The plan that sends the fewest of `count` items, and is no more over its room than `most`, which sends all.

    `plan_of` makes the plan that sends the first n of them.
    """
    least = max(0.0, most.excess_bytes or 0.0)
    if math.isinf(least):  # the room is unknown
        return most
    return plan_of(bisect.bisect_left(range(count), True, key=lambda n: (plan_of(n).excess_bytes or 0.0) <= least))


def _as_plan(
    trace: Trace,
    items: _Items,
    numbers: Sequence[int],
    found: Schedule,
    rooms: Sequence[_Room],
) -> StepPlan:
    """The plan of a schedule `found` for the items `numbers`."""
    sent = {number for number, placement in zip(numbers, found.placements, strict=True) if placement.offloaded}
    actions: dict[int, list[Action]] = {}
    for first, events in ((0, found.forward), (items.backward, found.backward)):
        for gap, what, i in events:
            if what in _ACTIONS:
                actions.setdefault(first + gap, []).append((_ACTIONS[what], numbers[i]))
    at = {action: i for i, each in actions.items() for action in each}
    live = _Live.of(items, at, len(trace.events))
    held = max(live.total[: items.backward], default=0), max(live.total[items.backward :], default=0)
    return StepPlan(
        tuple(number in sent for number in range(len(items.nbytes))),
        actions,
        graph_count(trace),
        sum(items.nbytes),
        sum(items.nbytes[number] for number in sent),
        held,
        max(live.of_others(room) - room.nbytes for room in rooms) if rooms else None,
        found.stall_ms,
        found.forward_ms,
        found.backward_ms,
    )


class _Live(NamedTuple):
    """The bytes of items on the device from each event to the next. They are there until the event after their read."""

    total: list[int]
    of_call: dict[int, list[int]]  # those of each call

    @classmethod
    def of(cls, items: _Items, at: Mapping[Action, int], event_count: int) -> _Live:
        """`at`: the event of each action."""
        change: dict[int, list[int]] = defaultdict(lambda: [0] * (event_count + 2))
        for number, (nbytes, call, begin) in enumerate(zip(items.nbytes, items.call, items.begin, strict=True)):
            gone = items.read.get(number, event_count) + 1
            held = [(begin, gone)]
            if (Do.JOIN, number) in at:
                held = [(begin, at[Do.JOIN, number]), (at[Do.FETCH, number], gone)]
            for first, last in held:
                change[call][first] += nbytes
                change[call][last] -= nbytes
        of_call = {call: list(itertools.accumulate(each))[:event_count] for call, each in change.items()}
        return cls([sum(each) for each in zip(*of_call.values(), strict=True)] or [0] * event_count, of_call)

    def of_others(self, room: _Room) -> int:
        """The bytes that count against a room."""
        return sum(self.of_call[call][room.event] for call in room.others if call in self.of_call)


def _room_in_flight(items: _Items, sent: Collection[int], rooms: Sequence[_Room], spare_bytes: float) -> list[float]:
    """The bytes that sent items may take from each event to the next, beside the others."""
    staying = [0 if number in sent else nbytes for number, nbytes in enumerate(items.nbytes)]
    live = _Live.of(items._replace(nbytes=staying), {}, items.event_count)
    found = [math.inf] * items.event_count
    for room in rooms:
        found[room.event] = min(found[room.event], room.nbytes + spare_bytes - live.of_others(room))
    return found


class _Room(NamedTuple):
    """The bytes that items of some calls may take from an event of the step to the next."""

    event: int
    others: list[int]  # these calls: those of the graphs of a budget, without the graph that runs
    nbytes: float


def _rooms(trace: Trace) -> Iterator[_Room]:
    """The rooms of a step under budgets, see `Terms.room`. A state that no budget knows has no room.

          event                    forward 0    forward 1   |   backward 1    backward 0
          runs until the next      forward 1    the loss    |   backward 1    backward 0
          others hold items        0            0, 1        |   0             -

    Items of a forward start at its end, and items of a backward are read at its begin.
    """
    graph_of = [*itertools.accumulate((bool(sends.terms.ends_graph) for sends in trace.calls), initial=0)]
    for table in {sends.terms.room: None for sends in trace.calls if sends.terms.room}:
        yield _Room(0, [], table[0])  # the first forward has run
        holding: dict[int, list[int]] = {}  # graphs that hold items, with their calls
        for i, event in enumerate(trace.events):
            after = trace.events[i + 1] if i + 1 < len(trace.events) else None
            if trace.calls[event.call].terms.room == table:
                if event.phase is Phase.FORWARD:
                    holding.setdefault(graph_of[event.call], []).append(event.call)
                else:
                    holding.pop(graph_of[event.call], None)
            runs = None if after is None or after.phase is Phase.BACKWARD else graph_of[after.call]
            others = [call for graph, calls in holding.items() if graph != runs for call in calls]
            count, half = len(holding) - (runs in holding), len(table) // 2
            phases = {event.phase} if after is None else {event.phase, after.phase}
            rooms = [table[half * (phase is Phase.BACKWARD) + count] for phase in phases if count < half]
            yield _Room(i, others, min(rooms, default=-math.inf))
