"""At run time: records the steps of a device, has them planned, and returns the plan's actions for each event.

      first step     forward 0, forward 1 ... | backward 1, backward 0       recorded: the trace; all is sent
      two more       the same, timed event by event; the faster counts        plan_step --> StepPlan
      then           forward 0 [send] 0 ... forward 3 [join 0] ... | backward 4 [fetch 6] ... backward 0
                     five steps are timed, and trials.py may take another plan; and so on

A graph that is compiled once runs for every layer, so what differs between layers is decided at run time:
offloading/at_run_time.py notes each of its operators here, and gets the actions before it.

The plan holds for as long as events come as in its trace. At the first other event all copies in flight are joined.
In the first steps of a program, and in those of new symbolic sizes, all tensors are sent, and waited for at the next
operator: they may not fit otherwise. Later, what has no plan stays, unless its hook allows any stall, or is a budget's.
Nothing here touches a device.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UnusedWarning, warn_user
from .known import KnownStep, KnownSteps, kind_of
from .plan import Do, Sends, StepPlan, Terms
from .recorder import Recorder, Step, Trace
from .saved import CapturedStep, ItemAction, SavedItem
from .trials import StepPlans

log = logging.getLogger("aot_hooks")
_FIRST = 6  # The first so many steps send all if there is no plan.
_MOST_DIFFERENT = 32  # After so many steps in a row without a plan there is a warning.


@dataclass(eq=False)
class _Run:
    """The step that runs.

    Attributes:
        sends_all: what has no plan is sent.
        items: by number.
        unplanned: those that the last event sent without a plan.
        follows: the known step that it is like, so far.
        marks, copies: see `KnownStep`; no marks if it is not timed.
    """

    step: Step
    sends_all: bool = False
    items: list[SavedItem] = field(default_factory=list)
    unplanned: list[SavedItem] = field(default_factory=list)
    follows: KnownStep | None = None
    marks: list[Any] | None = None
    copies: list[tuple[int, list[Any]]] = field(default_factory=list)

    @property
    def plan(self) -> StepPlan | None:
        return None if self.follows is None else self.follows.plan


class Follower:
    """The steps of one device, and the plans that they follow.

    Args:
        mark: returns a mark at this point of the device's work.
        times: turns the marks of several runs into ms from the first of each; None while the device has not reached
            them all.
        plan: plans a trace by its times, for a share of the link's speed, with bytes more than a budget has room for.
        adapts: whether copies run beside the compute, so that fewer of them may be faster.

    Attributes:
        last: the plan of the last step that followed one to its end.
        unsettled_count: how many steps have run whose plan was not made, or may be replaced.
    """

    def __init__(
        self,
        mark: Callable[[], Any],
        times: Callable[[list[list[Any]]], list[list[float]] | None],
        plan: Callable[[Trace, Sequence[float], float, int], StepPlan],
        adapts: bool,
    ) -> None:
        self.mark, self.times, self.plan, self.adapts = mark, times, plan, adapts
        self.last: StepPlan | None = None
        self.unsettled_count = 0
        self._captured = CapturedStep(None)
        effect = "the tensors that they saved stay where they are"
        self.recorder = Recorder("offload(across_graphs=True)", effect, UnusedWarning, self._ended, kind_of)
        self.known = KnownSteps()
        self.run = _Run(self.recorder.step)
        self._lock: threading.RLock = self.recorder.lock
        self._ended_count = 0  # steps
        self._different_count = 0  # steps in a row that had no plan, and sent nothing

    # --- events -------------------------------------------------------------------------------------------------------

    def start(self, nbytes: Sequence[int], terms: Terms) -> tuple[list[SavedItem], list[ItemAction]]:
        """Note that tensors start. Returns their items, which say whether to send them, and the actions before."""
        with self._lock:
            step = self.recorder.before_call()
            if not step.events:
                sends_all = self._ended_count < _FIRST and all(known.plan is None for known in self.known.steps)
                self.run = _Run(step, sends_all)
            run = self.run
            is_new = terms.is_symbolic and self.known.may_plan_sizes  # it will have a plan
            sends = bool(run.sends_all or is_new or math.isinf(terms.max_stall_ms) or terms.room)
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
                planned = [(known.trace, known.plan) for known in self.known.steps if known.plan is not None]
                self._captured = CapturedStep(
                    next(((trace, plan) for trace, plan in reversed(planned) if trace.calls[0] == sends), None)
                )
            return self._captured.start(sends)

    def reload(self, items: Sequence[SavedItem]) -> list[ItemAction]:
        """Note that the tensors of a call are needed again. Returns the actions before that."""
        if items and (captured := items[0].captured) is not None:
            return captured.reload(items)
        call = items[0].call if items else None
        if call is None:
            return []
        with self._lock:
            if self.recorder.reads(call):
                return self._actions()
            self.known.steps.clear()  # a call was kept for a backward: known steps may be parts, as this one is
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
            self.known.steps.clear()
            self.run, self.last = _Run(self.recorder.step), None
            self._different_count = self._ended_count = 0

    def _actions(self) -> list[ItemAction]:
        """The actions before the last event of the step. Finds the known step to follow, and marks the time.

        At the first event that the followed step does not have, all copies in flight are joined.
        """
        run = self.run
        at = len(run.step.events) - 1
        actions = [(Do.JOIN, item) for item in run.unplanned]
        run.unplanned = []
        if at == 0:
            for known in self.known.steps:
                self._decide(known)
            run.follows = self.known.like(run.step)
            run.marks = [] if self._is_timed(run) else None
        elif run.follows is not None and not self.known.fits(run.follows, run.step, at):
            run.marks, run.follows = None, self.known.like(run.step)
            actions = [(Do.JOIN, item) for item in run.items]
        is_end = run.follows is None or at in (0, len(run.follows.trace.events) - 1)
        if run.marks is not None and (run.plan is None or is_end):
            run.marks.append(self.mark())
        if run.plan is not None:
            actions += [(what, run.items[number]) for what, number in run.plan.actions.get(at, ())]
        return actions

    def _is_timed(self, run: _Run) -> bool:
        """Whether to time a step that begins. The times of one of new symbolic sizes are of use if its graphs are
        compiled."""
        if run.follows is not None:
            return not run.follows.is_settled and not run.follows.is_timed
        first: Sends = run.step.calls[0].what
        known = (kind_of(known.trace.calls[0]) for known in self.known.steps)
        return bool(first.terms.is_symbolic) and kind_of(first) in known

    # --- plans --------------------------------------------------------------------------------------------------------

    def leave_free(self, spare_bytes: int) -> bool:
        """The step that ran, a budget's, left `spare_bytes` free as measured: its next plan may send less.

        Below 0: it took more than its budget, and the next plan sends more. Returns whether there is another plan.
        """
        with self._lock:
            known = self.run.follows
            if known is None or known.trials is None or known.trials.plan.excess_bytes is None:
                return False
            known.spare_bytes += spare_bytes
            before = known.trials.plan.actions
            known.trials.again()
            known.forget_runs()
            self.unsettled_count += 1
            self._log(known, 0.0)
            return known.trials.plan.actions != before

    def _decide(self, known: KnownStep) -> None:
        """Plan a step that has run often enough, or judge its plan."""
        if known.is_settled or not known.is_timed or (known.plan is None and not self.known.may_plan_sizes):
            return
        times = self.times([*known.runs, *(marks for _, marks in known.copies)])
        if times is None:
            return
        runs, copies_ms = times[: len(known.runs)], sum(run[-1] for run in times[len(known.runs) :])
        speed = 1e3 * sum(nbytes for nbytes, _ in known.copies) / copies_ms if copies_ms else 0.0  # 0: no copy
        known.forget_runs()
        if known.trials is None:
            at_ms = known.at_ms(runs)
            make = lambda share: self.plan(known.trace, at_ms, share, known.spare_bytes)  # noqa: E731
            known.trials = StepPlans.begin(make, adapts=self.adapts)
        else:
            known.trials.judge(known.took_ms(runs), speed)
        self._log(known, speed)

    def _log(self, known: KnownStep, speed: float) -> None:
        assert known.trials is not None
        plan = known.trials.plan
        log.info(
            "offload: a step sends %d of %d bytes and holds %d%s, by a plan for %.2f of the link's speed; "
            "steps so far took %s ms%s",
            plan.sent_bytes,
            plan.nbytes,
            max(plan.held_bytes),
            "" if plan.excess_bytes is None else f", {-plan.excess_bytes:.0f} less than there is room for",
            known.trials.share,
            [round(ms, 1) for _, ms in known.trials.tried],
            f"; the last copies had {1e-9 * speed:.1f} GB/s" if speed else "",
        )

    # --- the end of a step --------------------------------------------------------------------------------------------

    def _ended(self, step: Step) -> None:
        """Note a step that has ended, as a run of a known step or as a new one. Warn if steps never come again."""
        run = self.run
        if run.step is not step:  # it began, and was dropped, before it had items
            return
        trace, known, marks = step.trace(with_dropped=False), run.follows, run.marks
        is_whole = known is not None and len(trace.events) == len(known.trace.events)
        if known is None or not is_whole or not self.known.begins_as(known, step):
            marks = marks if known is None else None
            known = self.known.of(trace)
        known.ran(trace, marks, run.copies)
        self.last = known.plan or self.last
        if any(call.was_read for call in step.calls) and not step.is_part:
            sends = known.plan is not None or any(item.sends for item in run.items)
            is_new = all(known is not each for each in self.known.steps)
            self._different_count = 0 if sends else self._different_count + is_new
            self._ended_count += 1
            self.unsettled_count += not known.is_settled
            self.known.remember(known)
        if self._different_count == _MOST_DIFFERENT:  # said once
            self._different_count += 1
            self.run = _Run(step)  # the warning may be an error
            _warn_of_different()


def _warn_of_different() -> None:
    warn_user(
        f"aot_hooks: offload(across_graphs=True): the last {_MOST_DIFFERENT} steps all differ from others, so "
        "none had a plan, and nothing was sent. Steps need the same graphs in the same order; sizes may differ "
        "where they are symbolic (dynamic=True). Or take offload(), which plans each graph alone",
        UnusedWarning,
    )
