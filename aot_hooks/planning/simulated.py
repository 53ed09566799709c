"""A step around the calls of one graph, simulated: its peak and its time if all these calls are compiled in one way.

      points    forward 0   another graph   forward 1 | backward 1   another graph   backward 0
      call      its bytes, what it may send, its times --plan_step--> copies of the whole step --> peak, time

Copies of a call hide in the whole step: the first calls send, and the last ones keep what the peak has room for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..graphs.roofline import link_ms
from ..graphs.speeds import Rates
from ..steps.memory import Bytes
from ..steps.moments import Instant
from ..steps.plan import Sends, Terms, plan_step
from ..steps.recorder import Event, Phase, Trace

_NOTHING = Bytes(0, 0, 0)


class Point(NamedTuple):
    """An event of a step, as the calls of one graph see it."""

    phase: str  # "forward" or "backward"
    call: int  # the number of the graph's call that runs; -1: another graph runs
    nbytes: int  # what is alive beside the graph's calls: other graphs, gradients, gathered parameters, a loss
    ms: float  # the time of the other graph's call


@dataclass(frozen=True)
class Whole:
    """The step around the calls of one graph. This is data, a part of the budget that the graph is compiled with.

    Attributes:
        points: in the order in which they come.
        peak: bytes that the whole step may take.
        link_share: the share of the link that the graph's copies may use, beside those of other graphs.
        frees_inputs: what one call of the graph returns is read by the next one, and nothing else holds it.
        slowness: the time of a measured step over the predicted time of its calls. Copies hide in the measured one.
    """

    points: tuple[Point, ...]
    peak: int
    link_share: float = 1.0
    frees_inputs: bool = False
    slowness: float = 1.0

    @property
    def calls(self) -> int:
        return sum(m.call >= 0 and m.phase == "forward" for m in self.points)


def whole_of(
    graph: Any,
    instants: Sequence[Instant],
    of: Callable[[Any], Bytes],
    ms: Callable[[Any, str], float],
    peak: int,
    link_share: float,
) -> Whole | None:
    """The step of `instants` around the calls of `graph`. None if one of them runs backward without a forward.

    Args:
        of, ms: return the bytes of another graph's call, and its time in a phase. The program's own code counts as
            another graph that takes no time.
    """
    found: list[Point] = []
    number: dict[int, int] = {}  # of each call that waits for its backward
    numbers = itertools.count()
    for instant in instants:
        beside = instant.nbytes(lambda other: _NOTHING if other == graph else of(other))
        if not instant.phase:
            found.append(Point("forward", -1, beside, 0.0))
        elif instant.runs != graph:
            found.append(Point(instant.phase, -1, beside, ms(instant.runs, instant.phase)))
        elif instant.phase == "forward":
            number[instant.call] = next(numbers)
            found.append(Point("forward", number[instant.call], beside, 0.0))
        elif instant.call in number:
            found.append(Point("backward", number.pop(instant.call), beside, 0.0))
        else:
            return None
    return Whole(tuple(found), peak, link_share)


class Call(NamedTuple):
    """A call of a graph that is compiled in one way."""

    nbytes: Bytes  # with all its items on the device
    items: tuple[int, ...]  # the bytes of the tensors that it may send
    forward_ms: float
    backward_ms: float


class Predicted(NamedTuple):
    """A step whose calls are all compiled in one way."""

    peak: int
    call_ms: float  # of a call, on average, with its part of the stalls
    stall_ms: float  # of the step


def predicted(whole: Whole, call: Call, rates: Rates | None) -> Predicted:
    """The peak and the time of a step that sends as little as its peak needs. `rates`: None if nothing is sent.

    `Predicted.call_ms` is a predicted time: a stall counts as the share of the step that it is in a measured one.
    """
    call = call if rates else call._replace(items=())
    own = Sends(call.items, Terms(math.inf, 0.0, 0.0, 0.0, room=room_of([whole], call)))
    others = Sends((), Terms(0.0, 0.0, 0.0, 0.0))
    calls: list[Sends] = []
    events: list[Event] = []
    at_ms, now, number = [], 0.0, {}  # the number in the trace of each call of the graph
    for m in whole.points:
        forward = m.phase == "forward"
        if m.call < 0 or forward:
            number[m.call] = len(calls)
            calls.append(own if m.call >= 0 else others)
        events.append(Event(Phase.FORWARD if m.call < 0 or forward else Phase.BACKWARD, number[m.call]))
        took = whole.slowness * (m.ms if m.call < 0 else call.forward_ms if forward else call.backward_ms)
        at_ms.append(now + took if forward else now)  # a forward's items start at its end
        now += took
    link = (whole.link_share * rates.to_host, whole.link_share * rates.to_device) if rates else (1.0, 1.0)
    plan = plan_step(Trace(tuple(calls), tuple(events)), at_ms, *link)
    stall_ms = plan.stall_ms + (link_ms(plan.sent_bytes, rates) if rates else 0.0)
    ms = call.forward_ms + call.backward_ms + stall_ms / (max(1, whole.calls) * whole.slowness)
    return Predicted(whole.peak + int(plan.excess_bytes or 0), ms, stall_ms)


def room_of(wholes: Sequence[Whole], call: Call) -> tuple[float, ...]:
    """The bytes that items of other calls may take on the device while a call runs in these steps, see `Terms.room`."""
    count = 1 + max(whole.calls for whole in wholes)
    room = {phase: [float(max(whole.peak for whole in wholes))] * count for phase in ("forward", "backward")}
    base = call.nbytes.held - sum(call.items)
    for whole in wholes:
        waiting = 0
        for m in whole.points:
            ours, forward = m.call >= 0, m.phase == "forward"
            waiting -= ours and not forward
            beside = m.nbytes + waiting * base + (getattr(call.nbytes, m.phase) if ours else 0)
            room[m.phase][waiting] = min(room[m.phase][waiting], whole.peak - beside)
            waiting += ours and forward
    return (*room["forward"], *room["backward"])


def held_on_average(whole: Whole, nbytes: Bytes, peak: int) -> int:
    """What each call may count as held so that the step counts as taking `peak`, if all calls count alike."""
    held, waiting = [nbytes.held], 0
    for m in whole.points:
        forward, ours = m.phase == "forward", m.call >= 0
        waiting -= ours and not forward
        if waiting:
            held.append((peak - m.nbytes - (getattr(nbytes, m.phase) if ours else 0)) // waiting)
        waiting += ours and forward
    return max(0, min(held))
