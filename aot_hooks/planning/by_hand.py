"""The ways that a user can type, as candidates for a graph that many calls of a step run.

      for each way: hook of the library, pointwise results computed again or not
         the graph's forward and backward, rewritten as for a user who types it     --> bytes and times of a call, items
         the step around its calls, with its items sent as plan.py plans them       --> peak and time of the step
      the fastest way that stays under the budget, if it is faster than what was solved for

What is solved for one graph hides the copies of a call in that call's own compute. `offload(across_graphs=True)` hides
them in the whole step: each call decides when it runs what it sends, so the first calls send, and the last ones keep.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.fx import GraphModule

from ..graphs.roofline import link_ms
from ..graphs.speeds import Rates, measured_rates
from ..hook import KEEP, Hook
from ..library.float8 import float8
from ..library.integer import int8
from ..library.lossless import lossless
from ..offloading.hook import for_budget, offload
from ..offloading.transfers import COPIES
from ..passes.live_bytes import LivePoint
from ..passes.plan import Plan
from ..settings.setting import Setting
from ..steps.memory import Bytes
from ..steps.moments import Instant
from ..steps.plan import Sends, Terms, plan_step
from ..steps.recorder import Event, Phase, Trace
from ..steps.schedule import DECIDED_LATER
from ..torch_private import aot
from .kernels import split_and_hold
from .options import Graphs, error_of
from .step import COMPUTED

_STALLS = (0.01, 0.03, 0.1, 0.3, math.inf)  # Shares of a step that copies may hold it up, tried in this order.
_HALVED = 3  # So many times the interval between the last share that is too short and the first that fits is halved.
# At run time copies may hold a step up this many times longer than planned, and by this share of it more: what is
# sent must not be less than planned if the compute is faster than predicted.
_STALL_ROOM, _STALL_SHARE = 1.5, 0.01
_MIN_BYTES = 1 << 20  # Smaller tensors stay on the device, as in `offload()`.
_IN_FLIGHT = 768 << 20  # Bytes of copies that are started and not waited for, at most; measured with 16 blocks of 8B.
_IN_FLIGHT_SHARE = 0.125  # The same as a share of the budget.
_NOTHING = Bytes(0, 0, 0)


class Point(NamedTuple):
    """An event of a step, as the calls of one graph see it."""

    phase: str  # "forward" or "backward"
    call: int  # the number of the graph's call that runs; -1: another graph runs
    nbytes: int  # what is alive beside the graph's calls: other graphs, gradients, gathered parameters
    ms: float  # the time of the other graph's call


@dataclass(frozen=True)
class Whole:
    """The step around the calls of one graph. This is data, a part of the budget that the graph is compiled with.

    Attributes:
        points: in the order in which they come.
        peak: bytes that the whole step may take.
        link_share: the share of the link that the graph's copies may use, beside those of other graphs.
    """

    points: tuple[Point, ...]
    peak: int
    link_share: float = 1.0

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
    """The step of `instants` around the calls of `graph`, which run backward in the reverse order of their forwards.

    None if one of them has no forward.

    Args:
        of, ms: return the bytes of another graph's call, and its time in a phase.
    """
    found: list[Point] = []
    waiting: list[int] = []
    numbers = itertools.count()
    for instant in instants:
        beside = instant.nbytes(lambda other: _NOTHING if other == graph else of(other))
        if instant.runs != graph:
            found.append(Point(instant.phase, -1, beside, ms(instant.runs, instant.phase)))
        elif instant.phase == "forward":
            waiting.append(next(numbers))
            found.append(Point("forward", waiting[-1], beside, 0.0))
        elif waiting:
            found.append(Point("backward", waiting.pop(), beside, 0.0))
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


def predicted(whole: Whole, call: Call, in_flight: float, max_stall_ms: float, rates: Rates | None) -> Predicted:
    """The peak and the time of a step. It may get `max_stall_ms` longer; `rates` are None where nothing is sent."""
    own, others = Sends(call.items, Terms(in_flight, max_stall_ms, 0.0, 0.0)), Sends((), Terms(0.0, 0.0, 0.0, 0.0))
    calls: list[Sends] = []
    events: list[Event] = []
    at_ms, now, number = [], 0.0, {}  # the number in the trace of each call of the graph
    for m in whole.points:
        forward = m.phase == "forward"
        if m.call < 0 or forward:
            number[m.call] = len(calls)
            calls.append(own if m.call >= 0 else others)
        events.append(Event(Phase.FORWARD if m.call < 0 or forward else Phase.BACKWARD, number[m.call]))
        took = m.ms if m.call < 0 else (call.forward_ms if forward else call.backward_ms)
        at_ms.append(now + took if forward else now)  # a forward's items start at its end
        now += took
    live, stall_ms, sent_bytes = [sum(call.items) * n for n in _holding(whole)], 0.0, 0
    if rates is not None and call.items:
        link = whole.link_share * rates.to_host, whole.link_share * rates.to_device
        plan = plan_step(Trace(tuple(calls), tuple(events)), at_ms, *link)
        live, sent_bytes = [*plan.live_bytes], plan.sent_bytes
        stall_ms = plan.at_ms[-1] - (at_ms[-1] - at_ms[0]) + link_ms(sent_bytes, rates)
    count = max(1, whole.calls)
    ms = call.forward_ms + call.backward_ms + stall_ms / count
    return Predicted(max(_alive(whole, call, live)), ms, stall_ms)


def _holding(whole: Whole) -> list[int]:
    """How many calls of the graph hold their items from each moment to the next; one that runs backward counts."""
    found, count = [], 0
    for m in whole.points:
        found.append(count + (m.call >= 0 and m.phase == "forward"))
        count += 0 if m.call < 0 else 1 if m.phase == "forward" else -1
    return found


def _alive(whole: Whole, call: Call, live: Sequence[int]) -> Iterator[int]:
    """What is alive at each moment. `live`: bytes of items on the device from each moment to the next."""
    base, waiting = call.nbytes.held - sum(call.items), 0
    for i, m in enumerate(whole.points):
        forward, ours = m.phase == "forward", m.call >= 0
        items = (live[i - 1] if i else 0) if forward else live[i]
        if ours and not forward:  # its own items count as a part of what its backward takes
            waiting -= 1
            items -= sum(call.items)
        yield m.nbytes + waiting * base + items + (getattr(call.nbytes, m.phase) if ours else 0)
        waiting += ours and forward


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


# --- ways -------------------------------------------------------------------------------------------------------------


class Typed(NamedTuple):
    """A graph that is compiled in a way that a user can type."""

    name: str  # "offload(then=float8), pointwise results computed again"
    fw: GraphModule
    bw: GraphModule
    plan: Plan
    live: tuple[LivePoint, ...]
    call: Call
    step: Predicted


@dataclass(frozen=True)
class Ways:
    """What may be typed for one graph, and how it is judged.

    Attributes:
        wholes: the steps that the graph runs in. Each must stay under its peak; the time of the last one counts.
        allow, max_error: of the budget.
        scope: of the setting.
        graphs_of: splits the joint graph anew.
        rewrite: puts the hooks of a setting into two graphs, in place.
        saved_bytes: what crosses to the backward without a budget.
    """

    wholes: tuple[Whole, ...]
    allow: tuple[Any, ...]
    max_error: float
    scope: str | None
    graphs_of: Callable[[], Graphs]
    rewrite: Callable[[GraphModule, GraphModule, Setting], Plan]
    saved_bytes: int

    def fastest(self, most_ms: float, only: str = "") -> Typed | None:
        """The fastest way of those that take less than `most_ms` a call; None if there is none.

        `only`: the name of the one way to look at; "": all.
        """
        best: Typed | None = None
        for again in (False, True) if "recompute" in self.allow else (False,):
            with aot.recomputing_pointwise(again):
                graphs = self.graphs_of()
            rates = _link(graphs) if "offload" in self.allow and graphs.launched else None
            for name, then in self._forms().items():
                may_send = rates is not None and (then is None or isinstance(then, Hook))
                for sends in (False, True) if may_send else (False,):
                    found = None
                    if only and _name(name, sends=sends, again=again) != only:
                        continue
                    if sends or again or then is not None:  # else it is as without a budget, which is over the peak
                        found = self._typed(graphs, name, then, rates if sends else None, again=again)
                    if found is not None and found.step.call_ms < (most_ms if best is None else best.step.call_ms):
                        best = found
        return best

    def _forms(self) -> dict[str, Any]:
        """The hooks or policies for the form in which tensors are stored, by name; None: as they are."""
        forms: dict[str, Any] = {"": None}
        if "lossless" in self.allow:
            forms["lossless"] = lossless()
        rounded = {"float8": float8(), "int8": int8(128, power_of_two=True)}  # the fastest first, one is enough
        allowed = [name for name in rounded if name in self.allow and error_of(rounded[name]) <= self.max_error]
        return forms | {name: rounded[name] for name in allowed[:1]}

    def _typed(self, graphs: Graphs, form: str, then: Any, rates: Rates | None, *, again: bool) -> Typed | None:
        """One way, with copies that hold the step up as little as its peak allows; None if it is over the peak."""
        in_flight = min(_IN_FLIGHT, *(int(_IN_FLIGHT_SHARE * whole.peak) for whole in self.wholes))

        def sending(max_stall_ms: float) -> Any:
            if rates is None:
                return KEEP if then is None else then
            limits: dict[str, Any] = {"in_flight_bytes": in_flight, "max_stall_ms": max_stall_ms, "rates": rates}
            return for_budget(offload(_MIN_BYTES, then, across_graphs=True, **limits))

        found, plan, live = self._rewritten(graphs, sending(0.0), again=again)
        if _error(plan, then, self.saved_bytes) > self.max_error:
            return None
        call = _call(found, plan, live)
        step_ms = self.wholes[-1].calls * (call.forward_ms + call.backward_ms)

        def steps(max_stall_ms: float) -> list[Predicted] | None:
            """The steps with copies that may hold them up so long; None if one is over its peak."""
            found = [predicted(whole, call, in_flight, max_stall_ms, rates) for whole in self.wholes]
            fits = all(step.peak <= whole.peak for step, whole in zip(found, self.wholes, strict=True))
            return found if fits else None

        stall_ms, best = _least_stall(steps, step_ms) if rates is not None else (0.0, steps(0.0))
        if best is None:
            return None
        if rates is not None:  # with the stall that is needed, which the first time was not known
            hook = sending(_STALL_ROOM * stall_ms + _STALL_SHARE * step_ms)
            found, plan, live = self._rewritten(graphs, hook, again=again)
        named = _name(form, sends=rates is not None, again=again)
        return Typed(named, found.fw, found.bw, plan, live, call, best[-1])

    def _rewritten(self, graphs: Graphs, hook: Any, *, again: bool) -> tuple[Graphs, Plan, tuple[LivePoint, ...]]:
        """A copy of `graphs` with a hook for all, as the backend makes it for users who type it."""
        found = replace(graphs, fw=aot.copied(graphs.fw), bw=aot.copied(graphs.bw))
        plan = self.rewrite(found.fw, found.bw, Setting(hook, self.scope))
        if again and graphs.fused:
            split_and_hold(found.fw, found.bw, num_fwd_outputs=graphs.num_fwd_outputs, roots=graphs.roots)
        return found, plan, found.live()


def _name(form: str, *, sends: bool, again: bool) -> str:
    """The name of a way: "offload(then=float8), pointwise results computed again"."""
    stored = f"offload({f'then={form}' if form else ''})" if sends else form
    return ", ".join(filter(None, (stored, "pointwise results computed again" if again else "")))


def _least_stall(
    steps: Callable[[float], list[Predicted] | None], step_ms: float
) -> tuple[float, list[Predicted] | None]:
    """About the shortest stall with which steps stay under their peaks, and these steps; None if there is none."""
    low, high, best = 0.0, 0.0, steps(0.0)
    for share in _STALLS:
        if best is None:
            low, high = high, share * step_ms
            best = steps(high)
    for _ in range(_HALVED if best is not None and math.isfinite(high) and high else 0):
        if (found := steps((low + high) / 2)) is None:
            low = (low + high) / 2
        else:
            high, best = (low + high) / 2, found
    return high, best


def _call(graphs: Graphs, plan: Plan, live: Sequence[LivePoint]) -> Call:
    nbytes = Bytes.of(*([p.live_bytes for p in live if p.phase == phase] for phase in ("forward", "backward")))
    items = tuple(t.nbytes for t in plan.transfers if t.placement.reason == DECIDED_LATER)
    forward, backward = (sum(ms for n, ms in each.items() if n.target not in COPIES) for each in graphs.times)
    longer = graphs.ms(plan.transfers) / (forward + backward) if forward + backward else 1.0  # if the host takes longer
    return Call(nbytes, items, longer * forward, longer * backward)


def _error(plan: Plan, then: Any, saved_bytes: int) -> float:
    """The relative error of the gradient, estimated from bytes: of what the backward reads, a part is rounded, and a
    part is computed from it again, which may be twice as wrong."""
    rounded = sum(d.saved_bytes for d in plan.decisions if d.hook is not KEEP and d.hook.lossy)
    saved = sum(d.saved_bytes for d in plan.decisions)
    if not rounded:
        return 0.0
    all_bytes = max(saved, saved_bytes)
    again = rounded / saved * (all_bytes - saved)
    return error_of(then) * math.sqrt((rounded + COMPUTED * again) / all_bytes)


def _link(graphs: Graphs) -> Rates | None:
    """The rates of the one CUDA device of a graph; None: its copies would not run beside its compute."""
    devices = {value.row.device for value in graphs.boundary.tensors if value.row.device.type == "cuda"}
    return measured_rates(devices.pop()) if len(devices) == 1 else None
