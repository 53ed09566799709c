"""The plan of a step of many graphs: which items are sent, where to wait for them, and where to fetch them.

      trace    start 0 1, start 2 3, ... start 8 9 | reload 8 9, ... reload 2 3, reload 0 1     and when each ran
      plan     start 0 [send] 1 ... start 6 [join 0] 7 ... | reload 8 9 [fetch 6] ... reload 6 7

A pure function of a trace and its times: steps.py records these, and follows the plan.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .schedule import LINK, Item, Limits, schedule

# Of the bytes that are sent. Up to this sum the smallest tensors stay: each takes the host as long as a large one.
_SMALL = 0.02

Event = tuple[Any, ...]  # of an operator: ("start", the bytes of its tensors, Terms) or ("reload", their items)
Action = tuple[str, int]  # "join" (wait for the copy out) or "fetch" (start the copy back), and the item


class Terms(NamedTuple):
    """The conditions under which an operator sends its tensors. The operator takes them as a list of numbers."""

    in_flight_bytes: float
    max_stall_ms: float
    to_host: float  # bytes a second; 0 measures the link
    to_device: float
    ends_graph: float = True  # no other operator of its graph comes after this one
    is_symbolic: float = False  # the bytes of its tensors differ from call to call


@dataclass(frozen=True)
class StepPlan:
    """The decisions for the calls of one step.

    Attributes:
        sends: for each item, whether it is sent.
        actions: by event, what to do before it. A join may name an item that starts in that event: its copy out is then
            waited for as soon as it has started.
        graph_count: how many calls of graphs send or could send.
        nbytes, sent_bytes: bytes that could be sent in the step, and those that are.
        held_bytes: the most of them that are on the device at once, in the forward and in the backward, if nothing is
            kept for a second backward.
        forward_ms, backward_ms: from the first event to the first reload, and from there to the last.
        allowed_ms: how much longer the step may get by the limits of its hooks.
        to_host: the speed of copies out that the plan counts on, in bytes a second.
    """

    sends: tuple[bool, ...]
    actions: dict[int, list[Action]]
    graph_count: int
    nbytes: int
    sent_bytes: int
    held_bytes: tuple[int, int]
    forward_ms: float
    backward_ms: float
    allowed_ms: float
    to_host: float


def graph_count(trace: Sequence[Event]) -> int:
    """How many calls of graphs a trace has."""
    return sum(event[0] == "start" and bool(event[2].ends_graph) for event in trace)


def bytes_of(trace: Sequence[Event]) -> int:
    """What the operators of a trace start, in bytes."""
    return sum(sum(event[1]) for event in trace if event[0] == "start")


def plan_step(trace: Sequence[Event], at_ms: Sequence[float], to_host: float, to_device: float) -> StepPlan:
    """Plan a step whose events ran `at_ms`. `to_host`, `to_device`: bytes a second over the link.

    Sends items in the order in which they start, as long as compute hides the copies. The smallest of them stay, up to
    2% of the bytes that are sent, if no more than that is held besides. So do items that start after the first reload.
    """
    starts = [(i, nbytes, event[2]) for i, event in enumerate(trace) if event[0] == "start" for nbytes in event[1]]
    reloads = {n: i for i, event in reversed([*enumerate(trace)]) if event[0] == "reload" for n in event[1]}
    backward = min(reloads.values(), default=len(trace))
    kinds: dict[Limits, int] = {}
    items: list[Item] = []
    numbers: list[int] = []  # of the items in the step
    for number, (i, nbytes, terms) in enumerate(starts):
        if i < backward and number in reloads and nbytes:
            kind = kinds.setdefault(Limits(terms.in_flight_bytes, terms.max_stall_ms), len(kinds))
            items.append(Item(nbytes, i - 1, reloads[number] - backward, kind))
            numbers.append(number)
    took = [b - a for a, b in itertools.pairwise([*at_ms, at_ms[-1]])]
    place = functools.partial(schedule, to_host=to_host, to_device=to_device, limits=[*kinds])
    allowed_ms = max((limit.max_stall_ms for limit in kinds), default=0.0)

    def plan_larger(least_bytes: int) -> StepPlan:
        """The plan that sends items of `least_bytes` or more."""
        chosen = [i for i, item in enumerate(items) if item.nbytes >= least_bytes]
        found = place([items[i] for i in chosen], took[:backward], took[backward:])
        sent = {numbers[i] for i, placement in zip(chosen, found.placements, strict=True) if placement.offloaded}
        actions: dict[int, list[Action]] = {}
        names = {"wait": "join", "reload": "fetch"}
        for first, events in ((0, found.forward), (backward, found.backward)):
            for gap, what, i in events:
                if what in names:
                    actions.setdefault(first + gap, []).append((names[what], numbers[chosen[i]]))
        held = _held_bytes(starts, reloads, actions, sent, len(trace))
        return StepPlan(
            tuple(number in sent for number in range(len(starts))),
            actions,
            graph_count(trace),
            bytes_of(trace),
            sum(starts[number][1] for number in sent),
            (max(held[:backward], default=0), max(held[backward:], default=0)),
            found.forward_ms,
            found.backward_ms,
            allowed_ms,
            to_host * LINK,
        )

    plan = plan_larger(0)
    sizes = sorted(item.nbytes for item in items)
    small_bytes = _SMALL * plan.sent_bytes
    small = bisect.bisect(list(itertools.accumulate(sizes)), small_bytes)
    if not math.isfinite(allowed_ms) or not 0 < small < len(sizes):
        return plan
    larger = plan_larger(sizes[small])
    holds_more = any(a > b + small_bytes for a, b in zip(larger.held_bytes, plan.held_bytes, strict=True))
    return plan if holds_more else larger


def _held_bytes(
    starts: Sequence[tuple[int, int, Terms]],
    reloads: Mapping[int, int],
    actions: Mapping[int, Sequence[Action]],
    sent: Collection[int],
    event_count: int,
) -> list[int]:
    """The bytes of items on the device from each event to the next. Each is there until the event after its reload."""
    at = {action: i for i, found in actions.items() for action in found}
    change = [0] * (event_count + 2)
    for number, (start, nbytes, _) in enumerate(starts):
        gone = reloads.get(number, event_count) + 1
        held = [(start, at["join", number]), (at["fetch", number], gone)] if number in sent else [(start, gone)]
        for begin, end in held:
            change[begin] += nbytes
            change[end] -= nbytes
    return list(itertools.accumulate(change))
