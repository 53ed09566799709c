"""At run time: records the steps of a device, has them planned, and returns the plan's actions for each event.

      first step     forward 0, forward 1 ... | backward 1, backward 0       recorded: the trace; all is sent
      two more       the same, and when each of them runs; the faster counts  plan_step --> StepPlan
      five more      forward 0 [send] 0 ... forward 3 [join 0] ... | backward 4 [fetch 6] ... backward 0
      five more      a plan for the speed that the link had, or for three quarters of the speed planned with before;
                     and so on, until two plans in a row that send less made steps no faster
      then           the plan that sends most, of those that are nearly as fast as the fastest

A graph that is compiled once runs for every layer, so what differs between layers is decided at run time:
offloading/at_run_time.py notes each of its operators here, and gets the actions before it.

The plan holds for as long as events come as in its trace. At the first other event all copies in flight are joined.
A step of symbolic sizes may follow the plan of one whose sizes are a bit larger.
In the first steps of a program, and in those of new symbolic sizes, all tensors are sent, and waited for at the next
operator: they may not fit otherwise. Later, what has no plan stays, unless its hook allows any stall, or is a budget's.
Nothing here touches a device.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..errors import UnusedWarning, warn_user
from .plan import Do, Sends, StepPlan, Terms
from .recorder import Call, Event, Phase, Recorder, Step, Trace

log = logging.getLogger("aot_hooks")
_MOST_TRACES = 32  # So many steps are known at once; the oldest is forgotten first, one without a plan before others.
_ALIKE = 0.8  # A step follows a plan for larger symbolic sizes if each of its own is at least this share of them.
_MOST_PLANNED = 24  # So many plans are made for symbolic sizes. Then a step may follow one for any larger sizes.
_TIMED = 2  # So many runs are timed before a plan is made: the allocator may grow in one of them.
_TRIED = 5  # A plan is judged after so many runs: new sizes are pinned in the first, which takes long.
_AS_FAST = 1.008  # A step counts as fast as another that takes up to this many times longer.
_NEXT_SHARE = 0.75  # The next plan counts on this share of the speed that the last one did.
_LEAST_SHARE = 0.25  # No plan is tried for less than this share of the link's speed.
_MISSES = 2  # After this many plans in a row that are no faster, no other is tried.
_SLOWER = 0.97  # If copies had less than this share of the speed planned with, the next plan counts on their speed.
_FIRST = 6  # The first so many steps send all if there is no plan.
_MOST_DIFFERENT = 32  # After so many steps in a row without a plan there is a warning.


class Progress(Enum):
    """How far the plan of a step is."""

    TIMED = "timed"
    """There is none. Each event of the step is timed, and all items are sent."""
    TRIED = "tried"
    """Whole steps are timed, to compare the plan with others that send less, or more."""
    SETTLED = "settled"
    """The plan stays. Nothing is timed."""


@dataclass(eq=False, slots=True)
class SavedItem:
    """A tensor from its start to the end of its backward. at_run_time.py sets the attributes from `joined` on.

    Attributes:
        sends: whether it is sent to the host.
        call: the run of the operator that saved it; None in a CUDA graph, whose replays belong to no step.
        number: in its step.
        timed: whether to time its copy out, see `Follower.copied`.
        joined: the wait for its copy out has been reached, even if that copy has not started.
        value: the tensor, if it stays on the device.
        out, host, back: the copy out while it holds the tensor, the tensor on the host, the copy back if it has begun.
        captured: the step that a CUDA graph captures, if it is in one.
    """

    sends: bool
    call: Call | None = None
    number: int = -1
    timed: bool = False
    joined: bool = False
    value: Any = None
    out: Any = None
    host: Any = None
    back: Any = None
    captured: CapturedStep | None = None


ItemAction = tuple[Do, SavedItem]


def kind_of(sends: Sends) -> Hashable:
    """What a run of an operator is, without symbolic sizes."""
    return (len(sends.nbytes), sends.terms) if sends.terms.is_symbolic else sends


@dataclass(eq=False)
class _Known:
    """A step that has run.

    Attributes:
        runs: the marks of each run since the last plan: before the first plan two marks of each event,
            before and after what the device waits for there; then one of the first and one of the last event.
        copies: the bytes of each copy out in these runs, and the marks at its begin and end.
        plan: the plan that it follows now.
        share: the share of the link's speed that the plan counts on.
        alike_count: how many steps of smaller symbolic sizes followed its plan.
        misses: how many plans in a row were no faster than one before.
        at_ms: when each event runs if nothing is waited for.
        tried: the plans that were timed, with the ms of a step. Only the second may send more than the first.
    """

    trace: Trace
    progress: Progress = Progress.TIMED
    runs: list[list[Any]] = field(default_factory=list)
    copies: list[tuple[int, list[Any]]] = field(default_factory=list)
    plan: StepPlan | None = None
    share: float = 1.0
    alike_count: int = 0
    misses: int = 0
    at_ms: list[float] = field(default_factory=list)
    tried: list[tuple[StepPlan, float]] = field(default_factory=list)

    @property
    def is_timed(self) -> bool:
        """Whether it has run often enough to plan it, or to judge its plan. Symbolic sizes may not come again."""
        if self.plan is not None:
            return max(len(self.runs), self.alike_count) >= _TRIED
        return len(self.runs) >= (1 if self.is_symbolic else _TIMED)

    @property
    def is_symbolic(self) -> bool:
        return any(sends.terms.is_symbolic for sends in self.trace.calls)

    def begins_with(self, step: Step) -> bool:
        """Whether its first events are those of `step`, in equal sizes."""
        calls = tuple(call.what for call in step.calls)
        return self.trace.calls[: len(calls)] == calls and self.trace.events[: len(step.events)] == tuple(step.events)

    def bytes_of_first(self, call_count: int) -> int:
        return sum(sum(sends.nbytes) for sends in self.trace.calls[:call_count])


@dataclass(eq=False)
class _Run:
    """The step that runs.

    Attributes:
        sends_all: what has no plan is sent.
        items: by number.
        unplanned: those that the last event sent without a plan.
        follows: the known step that it is like, so far.
        marks, copies: see `_Known`; no marks if it is not timed.
    """

    step: Step
    sends_all: bool = False
    items: list[SavedItem] = field(default_factory=list)
    unplanned: list[SavedItem] = field(default_factory=list)
    follows: _Known | None = None
    marks: list[Any] | None = None
    copies: list[tuple[int, list[Any]]] = field(default_factory=list)

    @property
    def plan(self) -> StepPlan | None:
        return None if self.follows is None else self.follows.plan


@dataclass(eq=False)
class CapturedStep:
    """A step while a CUDA graph captures it. Replays repeat what it decides, so the recorder knows nothing of it.

    Attributes:
        known: an earlier step, whose plan this one follows. None once an event differs from that step's.
        items: by number.
        calls: the number of the call of each item.
        begun, open: how many calls have saved tensors, and how many of them hold some.
        at: the number of the next event.
    """

    known: _Known | None
    items: list[SavedItem] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    begun: int = 0
    open: int = 0
    at: int = 0

    def start(self, sends: Sends) -> tuple[list[SavedItem], list[ItemAction]]:
        call, first = self.begun, len(self.items)
        items = [SavedItem(False, number=first + i, captured=self) for i in range(len(sends.nbytes))]
        self.items += items
        self.calls += [call] * len(items)
        self.begun, self.open = call + 1, self.open + 1
        if self.known is not None and self.known.trace.calls[call : call + 1] != (sends,):
            self.known = None
        actions = self.before(Phase.FORWARD, call)
        for item in items:
            item.sends = self.known is not None and self.known.plan is not None and self.known.plan.sends[item.number]
        return items, actions

    def before(self, phase: Phase, call: int) -> list[ItemAction]:
        """The actions before an event."""
        at, self.at = self.at, self.at + 1
        plan = None if self.known is None else self.known.plan
        if self.known is None or plan is None or self.known.trace.events[at : at + 1] != (Event(phase, call),):
            self.known = None
            return [(Do.JOIN, item) for item in self.items]
        return [(what, self.items[number]) for what, number in plan.actions.get(at, ())]


class Follower:
    """The steps of one device, and the plans that they follow.

    Args:
        mark: returns a mark at this point of the device's work.
        times: turns the marks of several runs into ms from the first of each; None while the device has not reached
            them all.
        plan: plans a trace by its times, for a share of the link's speed.
        adapts: whether copies run beside the compute, so that fewer of them may be faster.

    Attributes:
        last: the plan of the last step that followed one to its end.
        unsettled_count: how many steps have run whose plan was not made, or may be replaced.
    """

    def __init__(
        self,
        mark: Callable[[], Any],
        times: Callable[[list[list[Any]]], list[list[float]] | None],
        plan: Callable[[Trace, Sequence[float], float], StepPlan],
        adapts: bool,
    ) -> None:
        self.mark, self.times, self.plan, self.adapts = mark, times, plan, adapts
        self.last: StepPlan | None = None
        self.unsettled_count = 0
        self._captured = CapturedStep(None)
        effect = "the tensors that they saved stay where they are"
        self.recorder = Recorder("offload(across_graphs=True)", effect, UnusedWarning, self._ended, kind_of)
        self.known: list[_Known] = []  # the last to run is the last
        self.run = _Run(self.recorder.step)
        self._lock: threading.RLock = self.recorder.lock
        self._ended_count = 0  # steps
        self._planned_count = 0  # plans for symbolic sizes among the known
        self._different_count = 0  # steps in a row that had no plan, and sent nothing

    def start(self, nbytes: Sequence[int], terms: Terms) -> tuple[list[SavedItem], list[ItemAction]]:
        """Note that tensors start. Returns their items, which say whether to send them, and the actions before."""
        with self._lock:
            step = self.recorder.before_call()
            if not step.events:
                sends_all = self._ended_count < _FIRST and all(known.plan is None for known in self.known)
                self.run = _Run(step, sends_all)
            run = self.run
            is_new = terms.is_symbolic and self._planned_count < _MOST_PLANNED  # it will have a plan
            sends = bool(run.sends_all or is_new or math.isinf(terms.max_stall_ms) or terms.for_budget)
            call = self.recorder.saves(Sends(tuple(nbytes), terms))
            items = [SavedItem(sends, call, len(run.items) + i) for i in range(len(nbytes))]
            run.items += items
            try:
                actions = self._actions()
            except BaseException:  # also a warning that the program has made an error
                self.recorder.drop(call)
                raise
            if run.plan is not None:
                for item in items:
                    item.sends, item.timed = run.plan.sends[item.number], run.marks is not None
            elif sends:
                run.unplanned += items
            return items, actions

    def start_captured(self, nbytes: Sequence[int], terms: Terms) -> tuple[list[SavedItem], list[ItemAction]]:
        """As `start`, in a capture. Without a plan nothing is sent."""
        with self._lock:
            sends = Sends(tuple(nbytes), terms)
            if not self._captured.open:
                planned = [known for known in self.known if known.plan is not None and known.trace.calls[0] == sends]
                self._captured = CapturedStep(planned[-1] if planned else None)
            return self._captured.start(sends)

    def reload(self, items: Sequence[SavedItem]) -> list[ItemAction]:
        """Note that the tensors of a call are needed again. Returns the actions before that."""
        if items and (captured := items[0].captured) is not None:
            return captured.before(Phase.BACKWARD, captured.calls[items[0].number])
        call = items[0].call if items else None
        if call is None:
            return []
        with self._lock:
            if self.recorder.reads(call):
                return self._actions()
            self.known.clear()  # the call was kept for a backward. What is known may be parts of steps, as this one is
            self._planned_count = 0
            return []

    def waited(self) -> None:
        """Note that the device has done what the last event waits for."""
        with self._lock:
            marks = self.run.marks
            if marks is not None and len(marks) % 2 and self.run.plan is None:
                marks.append(self.mark())

    def copied(self, item: SavedItem, nbytes: int, begin: Any, end: Any) -> None:
        """Note the marks at the begin and the end of a copy out."""
        with self._lock:
            if item.call is not None and item.call.step == self.run.step.number:
                self.run.copies.append((nbytes, [begin, end]))

    def drop(self, items: Sequence[SavedItem]) -> None:
        """The `items` of a call are not saved any more. Takes no lock, see `Recorder.drop`."""
        if items and (captured := items[0].captured) is not None:
            captured.open -= 1
        if items and items[0].call is not None:
            self.recorder.drop(items[0].call)

    def forget(self) -> None:
        with self._lock:
            self.recorder.forget()
            self.known.clear()
            self.run, self.last = _Run(self.recorder.step), None
            self._different_count = self._ended_count = self._planned_count = 0

    def _actions(self) -> list[ItemAction]:
        """The actions before the last event of the step. Finds the known step to follow, and marks the time."""
        run = self.run
        at = len(run.step.events) - 1
        actions = [(Do.JOIN, item) for item in run.unplanned]
        run.unplanned = []
        if at == 0:
            run.follows = self._like(run.step)
            run.marks = [] if self._is_timed(run) else None
        elif run.follows is not None and not self._fits(run.follows.trace, run.step, at):
            run.marks, run.follows = None, self._like(run.step)
            actions = [(Do.JOIN, item) for item in run.items]
        known = run.follows
        is_end = known is None or at in (0, len(known.trace.events) - 1)
        if run.marks is not None and (run.plan is None or is_end):
            run.marks.append(self.mark())
        if run.plan is not None:
            actions += [(what, run.items[number]) for what, number in run.plan.actions.get(at, ())]
        return actions

    def _is_timed(self, run: _Run) -> bool:
        """Whether to time a step that begins. The times of one of new symbolic sizes are of use if its graphs are
        compiled."""
        if run.follows is not None:
            return run.follows.progress is not Progress.SETTLED and not run.follows.is_timed
        first: Sends = run.step.calls[0].what
        return bool(first.terms.is_symbolic) and any(kind_of(k.trace.calls[0]) == kind_of(first) for k in self.known)

    def _fits(self, planned: Trace, step: Step, at: int) -> bool:
        """Whether event `at` of `step` can be that of a planned trace: it is equal, or of smaller symbolic sizes."""
        if at >= len(planned.events) or planned.events[at] != step.events[at]:
            return False
        phase, number = step.events[at]
        sends, most = step.calls[number].what, planned.calls[number]
        if phase is Phase.BACKWARD or sends == most:
            return True
        least = _ALIKE if self._planned_count < _MOST_PLANNED else 0.0
        return kind_of(sends) == kind_of(most) and all(
            least * most <= nbytes <= most for most, nbytes in zip(most.nbytes, sends.nbytes, strict=True)
        )

    def _like(self, step: Step) -> _Known | None:
        """The known step to follow from now on: one that began as `step` has; with a plan, if there is one.

        Of several that of the nearest sizes, and of these the last.
        """
        count = len(step.events)
        found = [known for known in self.known if all(self._fits(known.trace, step, at) for at in range(count))]
        for known in found:
            self._decide(known)
        found = [known for known in found if known.plan is not None or known.begins_with(step)]
        calls = len(step.calls)
        return max(reversed(found), key=lambda k: (k.plan is not None, -k.bytes_of_first(calls)), default=None)

    # --- plans --------------------------------------------------------------------------------------------------------

    def _decide(self, known: _Known) -> None:
        """Plan a step that has run often enough, or compare its plan with others."""
        if known.progress is Progress.SETTLED or not known.is_timed:
            return
        if known.plan is None and self._planned_count >= _MOST_PLANNED:
            return
        times = self.times([*known.runs, *(marks for _, marks in known.copies)])
        if times is None:
            return
        runs, copies_ms = times[: len(known.runs)], sum(run[-1] for run in times[len(known.runs) :])
        speed = 1e3 * sum(nbytes for nbytes, _ in known.copies) / copies_ms if copies_ms else 0.0  # 0: no copy
        known.runs, known.copies, known.alike_count = [], [], 0
        if known.plan is None:
            plan = self._first_plan(known, runs)
        elif len(runs) < _TRIED:  # the times of steps of other sizes are no measure; the speed of their copies is
            plan = self._plan_for_speed(known, known.plan, speed)
        else:
            plan = self._next_plan(known, known.plan, runs, speed)
        known.plan = plan
        log.info(
            "offload: a step sends %d of %d bytes and holds %d, by a plan for %.2f of the link's speed; "
            "steps so far took %s ms%s",
            plan.sent_bytes,
            plan.nbytes,
            max(plan.held_bytes),
            known.share,
            [round(ms, 1) for _, ms in known.tried],
            f"; the last copies had {1e-9 * speed:.1f} GB/s" if speed else "",
        )

    def _first_plan(self, known: _Known, runs: list[list[float]]) -> StepPlan:
        """The plan by the times of each event. The host may have held up one run here and one there."""
        steps = [[b - a for a, b in zip(run[1::2], run[2::2], strict=False)] for run in runs]
        known.at_ms = list(itertools.accumulate(map(min, zip(*steps, strict=True)), initial=0.0))
        plan = self.plan(known.trace, known.at_ms, known.share)
        counted_on = any(sends.terms.for_budget for sends in known.trace.calls)
        adapts = self.adapts and math.isfinite(plan.allowed_ms) and not counted_on
        known.progress = Progress.TRIED if adapts else Progress.SETTLED
        self._planned_count += known.is_symbolic
        return plan

    def _plan_for_speed(self, known: _Known, plan: StepPlan, speed: float) -> StepPlan:
        """A plan for the speed that copies had, if that is lower than planned with."""
        if not 0 < speed < _SLOWER * plan.to_host or known.share < _LEAST_SHARE:
            known.progress = Progress.SETTLED
            return plan
        known.share *= speed / plan.to_host
        return self.plan(known.trace, known.at_ms, known.share)

    def _next_plan(self, known: _Known, plan: StepPlan, runs: list[list[float]], speed: float) -> StepPlan:
        """The next plan to try after `plan`, or the best of those that were tried.

        Steps without a plan are no measure: each graph's own copies hold them up.
        """
        took_ms = sorted(run[-1] for run in runs)[1]  # the fastest but one
        fastest_ms = min((ms for _, ms in known.tried), default=math.inf)
        sends_more = bool(known.tried) and plan.sent_bytes > known.tried[0][0].sent_bytes
        known.tried.append((plan, took_ms))
        known.misses = 0 if sends_more or _AS_FAST * took_ms <= fastest_ms else known.misses + 1
        faster, found = speed / plan.to_host, plan
        if len(known.tried) == 1 and _SLOWER * faster > 1:  # the link was busy when its speed was measured
            found = self.plan(known.trace, known.at_ms, known.share * faster)
        if found.sends == plan.sends and known.misses < _MISSES:
            share = faster if 0 < faster < _SLOWER else _NEXT_SHARE
            while found.sends == plan.sends and known.share >= _LEAST_SHARE:
                known.share, share = known.share * share, _NEXT_SHARE
                found = self.plan(known.trace, known.at_ms, known.share)
        if found.sends != plan.sends and found.sent_bytes:
            return found
        known.progress = Progress.SETTLED  # none is left to try
        most_ms = _AS_FAST * min(took_ms, fastest_ms) + found.allowed_ms
        return max((tried for tried, ms in known.tried if ms <= most_ms), key=lambda tried: tried.sent_bytes)

    # --- the end of a step --------------------------------------------------------------------------------------------

    def _ended(self, step: Step) -> None:
        run = self.run
        if run.step is not step:  # it began, and was dropped, before it had items
            return
        trace, known, marks = step.trace(with_dropped=False), run.follows, run.marks
        if known is not None and self._is_whole(known.trace, step):
            known.copies += run.copies if marks is not None else []
        else:
            known = next((each for each in self.known if each.trace == trace), None) or _Known(trace)
            marks = marks if run.follows is None else None
        if known.trace != trace:
            known.alike_count += marks is not None
        elif marks is not None and len(marks) == (2 * len(trace.events) if known.plan is None else 2):
            known.runs.append(marks)
        if known.plan is not None:
            self.last = known.plan
        if any(call.was_read for call in step.calls) and not step.is_part:
            sends = known.plan is not None or any(item.sends for item in run.items)
            is_new = all(known is not each for each in self.known)
            self._different_count = 0 if sends else self._different_count + is_new
            self._ended_count += 1
            self.unsettled_count += known.progress is not Progress.SETTLED
            self._remember(known)
        if self._different_count == _MOST_DIFFERENT:  # said once
            self._different_count += 1
            self.run = _Run(step)  # the warning may be an error
            _warn_of_different()

    def _is_whole(self, planned: Trace, step: Step) -> bool:
        count = len(step.events)
        return len(planned.events) == count and all(self._fits(planned, step, at) for at in range(count))

    def _remember(self, known: _Known) -> None:
        """Make `known` the last of the known steps, and forget one if there are too many."""
        self.known = [*(each for each in self.known if each is not known), known]
        if len(self.known) > _MOST_TRACES:
            gone = next((each for each in self.known[:-1] if each.plan is None), self.known[0])
            self.known.remove(gone)
            self._planned_count -= gone.plan is not None and gone.is_symbolic


def _warn_of_different() -> None:
    warn_user(
        f"aot_hooks: offload(across_graphs=True): the last {_MOST_DIFFERENT} steps all differ from others, so "
        "none had a plan, and nothing was sent. Steps need the same graphs in the same order; sizes may differ "
        "where they are symbolic (dynamic=True). Or take offload(), which plans each graph alone",
        UnusedWarning,
    )
