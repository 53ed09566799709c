"""The plan of a step: which items are sent, where to wait for their copies out, and where to start the copies back.

      trace    forward 0 (items 0 1), ... forward 4 (items 8 9) | backward 4, ... backward 0        and when each ran
      plan     forward 0 [send] 0 1 ... forward 3 [join 0] 6 7 ... | backward 4 [fetch 6] ... backward 0

An item is one tensor that a call saves. Item n is the n-th of the step. A pure function of a trace and its times:
follow.py records these, and follows the plan.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
    # The sender is a budget, which relies on the bytes that leave the device. So every operator sends all its tensors
    # until a plan exists, and no plan is tried that sends less.
    for_budget: float = False


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
        live_bytes: bytes of items on the device from each event to the next, if nothing is kept for a second backward.
        held_bytes: the most of `live_bytes` in the forward, and in the backward.
        at_ms: when each event runs, with the stalls that are predicted.
        forward_ms, backward_ms: from the first event to the first backward, and from there to the last, without stalls.
        allowed_ms: how much longer the step may get by the limits of its hooks.
        to_host: the speed of copies out that the plan counts on, in bytes a second.
    """

    sends: tuple[bool, ...]
    actions: dict[int, list[Action]]
    graph_count: int
    nbytes: int
    sent_bytes: int
    live_bytes: tuple[int, ...]
    held_bytes: tuple[int, int]
    at_ms: tuple[float, ...]
    forward_ms: float
    backward_ms: float
    allowed_ms: float
    to_host: float


def graph_count(trace: Trace) -> int:
    """How many calls of graphs a trace of operators has."""
    return sum(bool(sends.terms.ends_graph) for sends in trace.calls)


class _Items(NamedTuple):
    """The items of a trace, by number."""

    nbytes: list[int]
    begin: list[int]  # the event that starts each
    read: dict[int, int]  # the event of its first backward, if it has one
    terms: list[Terms]
    backward: int  # the first event that reads an item

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
        return cls(nbytes, begin, read, terms, min(read.values(), default=len(trace.events)))


def plan_step(trace: Trace, at_ms: Sequence[float], to_host: float, to_device: float) -> StepPlan:
    """Plan a step whose events ran `at_ms`. `to_host`, `to_device`: bytes a second over the link.

    Sends items in the order in which they start, as long as compute hides the copies. The smallest of them stay, up to
    2% of the bytes that are sent, if no more than that is held besides. So do items that start after the first
    backward.
    """
    items = _Items.of(trace)
    kinds: dict[Limits, int] = {}
    chosen: list[tuple[int, Item]] = []  # those that may be sent, with their numbers
    for number, (nbytes, begin, terms) in enumerate(zip(items.nbytes, items.begin, items.terms, strict=True)):
        if begin < items.backward and number in items.read and nbytes:
            kind = kinds.setdefault(Limits(terms.in_flight_bytes, terms.max_stall_ms), len(kinds))
            chosen.append((number, Item(nbytes, begin - 1, items.read[number] - items.backward, kind)))
    took = [b - a for a, b in itertools.pairwise([*at_ms, at_ms[-1]])]
    parts = took[: items.backward], took[items.backward :]
    place = functools.partial(schedule, to_host=to_host, to_device=to_device, limits=[*kinds])
    allowed_ms = max((limit.max_stall_ms for limit in kinds), default=0.0)

    def plan_larger(least_bytes: int) -> StepPlan:
        """The plan that sends items of `least_bytes` or more."""
        larger = [(number, item) for number, item in chosen if item.nbytes >= least_bytes]
        found = place([item for _, item in larger], *parts)
        return _as_plan(trace, items, [number for number, _ in larger], found, took, allowed_ms, to_host * LINK)

    plan = plan_larger(0)
    sizes = sorted(item.nbytes for _, item in chosen)
    small_bytes = _SMALL * plan.sent_bytes
    small = bisect.bisect(list(itertools.accumulate(sizes)), small_bytes)
    if not math.isfinite(allowed_ms) or not 0 < small < len(sizes):
        return plan
    larger = plan_larger(sizes[small])
    holds_more = any(a > b + small_bytes for a, b in zip(larger.held_bytes, plan.held_bytes, strict=True))
    return plan if holds_more else larger


def _as_plan(
    trace: Trace,
    items: _Items,
    numbers: Sequence[int],
    found: Schedule,
    took: Sequence[float],
    allowed_ms: float,
    to_host: float,
) -> StepPlan:
    """The plan of a schedule `found` for the items `numbers`, in a step whose events `took` so many milliseconds."""
    sent = {number for number, placement in zip(numbers, found.placements, strict=True) if placement.offloaded}
    actions: dict[int, list[Action]] = {}
    for first, events in ((0, found.forward), (items.backward, found.backward)):
        for gap, what, i in events:
            if what in _ACTIONS:
                actions.setdefault(first + gap, []).append((_ACTIONS[what], numbers[i]))
    live = _live_items(items, actions, sent, len(trace.events))
    held = max(live[: items.backward], default=0), max(live[items.backward :], default=0)
    return StepPlan(
        tuple(number in sent for number in range(len(items.nbytes))),
        actions,
        graph_count(trace),
        sum(items.nbytes),
        sum(items.nbytes[number] for number in sent),
        tuple(live),
        held,
        tuple(_with_stalls(found, took, items.backward)),
        found.forward_ms,
        found.backward_ms,
        allowed_ms,
        to_host,
    )


def _live_items(
    items: _Items, actions: Mapping[int, Sequence[Action]], sent: Collection[int], event_count: int
) -> list[int]:
    """The bytes of items on the device from each event to the next. Each is there until the event after its read."""
    at = {action: i for i, found in actions.items() for action in found}
    change = [0] * (event_count + 2)
    for number, (nbytes, begin) in enumerate(zip(items.nbytes, items.begin, strict=True)):
        gone = items.read.get(number, event_count) + 1
        held = [(begin, gone)]
        if number in sent:
            held = [(begin, at[Do.JOIN, number]), (at[Do.FETCH, number], gone)]
        for first, last in held:
            change[first] += nbytes
            change[last] -= nbytes
    return list(itertools.accumulate(change))[:event_count]


def _with_stalls(found: Schedule, took: Sequence[float], backward: int) -> list[float]:
    """When each event runs: what those before it `took`, with the stalls of the waits in a schedule."""
    late = [0.0] * (len(took) + 1)  # by the waits before an event
    stalled = 0.0
    for first, events, times in ((0, found.forward, took[:backward]), (backward, found.backward, took[backward:])):
        gaps, before = [*itertools.accumulate(times, initial=0.0)], stalled
        for gap, what, i in events:
            if what in ("wait", "use"):
                placement = found.placements[i]
                at_ms = placement.wait_ms if what == "wait" else placement.use_ms
                late[first + gap] = stalled = max(stalled, before + at_ms - gaps[gap])
    at = itertools.accumulate(took[:-1], initial=0.0)
    return [ms + stall for ms, stall in zip(at, itertools.accumulate(late, max), strict=False)]
