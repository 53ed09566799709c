"""One plan for all graphs of a step: which tensors are sent in which call, where to wait, where to fetch.

      first step     start 0 1, start 2 3 ... | reload 2 3, reload 0 1       recorded: the trace; all is sent
      two more       the same, and when each of them runs; the faster counts  plan_step --> StepPlan
      five more      start 0 [send] 1 ... start 6 [join 0] 7 ... | reload 8 9 [fetch 6] ... reload 6 7
      five more      a plan for the speed that the link had, or for three quarters of the speed planned with before;
                     and so on, until two plans in a row that send less made steps no faster
      then           the plan that sends most, of those that are nearly as fast as the fastest

A graph that is compiled once runs for every layer, so what differs between layers is read at run time: at_run_time.py
notes each of its operators here as an event, and gets the actions for it. Item n is the n-th tensor that the step
starts. A step begins when a tensor is started while none is saved from before, or only kept ones are.

The plan holds for as long as events come as in its trace. At the first other event all copies in flight are joined.
A step of symbolic sizes may follow the plan of one whose sizes are a bit larger.
In the first steps of a program, and in those of new symbolic sizes, all tensors are sent, and waited for at the next
operator: they may not fit otherwise.
Later, what has no plan stays, unless its hook allows any stall.
Nothing here touches a device.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UnusedWarning, warn_user
from ..torch_private import autograd
from .step_plan import Event, StepPlan, Terms, bytes_of

log = logging.getLogger("aot_hooks")
_MOST_TRACES = 32
_ALIKE = 0.8  # a step may follow a plan for larger symbolic sizes, if each of its own is at least this share of them
_MOST_PLANNED = 24  # plans for symbolic sizes: no more are made, and a step may follow one for any larger sizes
_TIMED = 2  # runs with times before a plan: the allocator may grow in one of them
_TRIED = 5  # runs of a plan before it is judged: new sizes are pinned in the first, which takes long
_AS_FAST = 1.008  # a step counts as fast as another that takes up to this many times longer
_NEXT_SHARE = 0.75  # the next plan counts on this share of the speed that the last one did
_LEAST_SHARE = 0.25  # of the link's speed; no plan for less is tried
_MISSES = 2  # after this many plans in a row that are no faster, no other is tried
_SLOWER = 0.97  # of the speed planned with: if copies were slower than this, the next plan counts on their speed
_MOST_EVENTS = 1 << 17  # of a step
# Saved tensors count as kept, and not as a part of the step, at any of these limits, see `Steps._is_endless`:
_KEPT_AFTER, _KEPT_AGAIN = 8, 2  # later runs of the operators that saved them; the second limit holds after a warning
_MOST_AFTER = 4096  # later events of any operators
_RAISED = 8  # times the limit of runs, each time that a backward reads kept tensors after all
_FIRST = 6  # as many steps send all if there is no plan
_MOST_DIFFERENT = 32  # steps in a row without a plan before a warning


def _key(event: Event) -> Event:
    """`event` without symbolic sizes."""
    is_symbolic = event[0] == "start" and event[2].is_symbolic
    return ("start", len(event[1]), event[2]) if is_symbolic else event


@dataclass(eq=False, slots=True)
class Entry:
    """A tensor from its start to the end of its backward. at_run_time.py sets the attributes from `joined` on."""

    sends: bool
    number: int = -1  # in its step; -1 outside of steps
    step: int = -1
    event: int = -1  # the position of its start in the trace
    timed: bool = False  # whether to time its copy out, see `Steps.copied`
    joined: bool = False  # whether the wait for its copy out has been reached, even if that copy has not started
    value: Any = None  # the tensor, if it stays on the device
    out: Any = None  # the copy out, while it holds the tensor
    host: Any = None  # its copy on the host
    back: Any = None  # the copy back that has been started ahead


@dataclass(eq=False)
class _Known:
    """A step that has run.

    Attributes:
        trace: its events.
        runs: the marks of each run since the last plan: before the first plan two marks of each event,
            before and after what the device waits for there; then one of the first and one of the last event.
        copies: the bytes of each copy out in these runs, and the marks at its begin and end.
        plan: the plan that it follows now.
        share: the share of the link's speed that the plan counts on.
        alike_count: how many steps of smaller symbolic sizes followed its plan.
        settled: no other plan is tried any more.
        misses: how many plans in a row were no faster than one before.
        at_ms: when each event runs if nothing is waited for.
        tried: the plans that were timed, with the ms of a step. Only the second may send more than the first.
    """

    trace: tuple[Event, ...]
    runs: list[list[Any]] = field(default_factory=list)
    copies: list[tuple[int, list[Any]]] = field(default_factory=list)
    plan: StepPlan | None = None
    share: float = 1.0
    alike_count: int = 0
    settled: bool = False
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
        return any(event[0] == "start" and event[2].is_symbolic for event in self.trace)


@dataclass(eq=False)
class Steps:
    """The steps of one device.

    Args:
        mark: returns a mark at this point of the device's work.
        times: turns the marks of several runs into ms from the first of each; None while the device has not reached
            them all.
        plan: plans a trace by its times, for a share of the link's speed.
        adapts: whether copies run beside the compute, so that fewer of them may be faster.
    """

    mark: Callable[[], Any]
    times: Callable[[list[list[Any]]], list[list[float]] | None]
    plan: Callable[[tuple[Event, ...], Sequence[float], float], StepPlan]
    adapts: bool
    last: StepPlan | None = None  # of the last step that followed a plan to its end
    _lock: Any = field(default_factory=threading.RLock)
    _dropped: deque[Entry] = field(default_factory=deque)  # without the lock: a collection may run in its holder
    _known: list[_Known] = field(default_factory=list)  # the last to run is the last
    _followed: _Known | None = None
    _trace: list[Event] = field(default_factory=list)
    _marks: list[Any] | None = None
    _copies: list[tuple[int, list[Any]]] = field(default_factory=list)
    _entries: list[Entry] = field(default_factory=list)
    _unplanned: list[Entry] = field(default_factory=list)  # sent by the last event without a plan
    _alive: dict[int, None] = field(default_factory=dict)  # numbers of the entries that are saved, in order
    _number: int = 0
    _ended: int = 0  # steps
    _sends_all: bool = False  # this step, what has no plan
    _planned: int = 0  # plans for symbolic sizes among the known
    _different: int = 0  # steps in a row that had no plan, and sent nothing
    _kept_after: int = _KEPT_AFTER
    _warned: bool = False
    _is_part: bool = False  # this step began without what it has read

    def start(self, nbytes: Sequence[int], terms: Terms) -> tuple[list[Entry], list[tuple[str, Entry]]]:
        """Note that tensors start. Returns their entries, which say whether to send them, and the actions before."""
        with self._lock:
            while self._dropped:
                entry = self._dropped.popleft()
                if entry.step == self._number:
                    self._alive.pop(entry.number, None)
            if self._trace and (not self._alive or len(self._trace) >= _MOST_EVENTS):
                self._end()
            elif self._trace and self._is_endless():
                self._leave_out()
            first, at = len(self._entries), len(self._trace)
            if at == 0:
                self._sends_all = self._ended < _FIRST and all(known.plan is None for known in self._known)
            is_new = terms.is_symbolic and self._planned < _MOST_PLANNED  # it will have a plan
            sends = self._sends_all or is_new or math.isinf(terms.max_stall_ms)
            entries = [Entry(sends, first + i, self._number, at) for i in range(len(nbytes))]
            self._entries += entries
            self._alive |= dict.fromkeys(entry.number for entry in entries)
            try:
                actions = self._note(("start", tuple(nbytes), terms))
            except BaseException:  # also a warning that the program has made an error
                self._dropped += entries
                raise
            if self._followed is not None and self._followed.plan is not None:
                for entry in entries:
                    entry.sends, entry.timed = self._followed.plan.sends[entry.number], self._marks is not None
            elif sends:
                self._unplanned += entries
            return entries, actions

    def reload(self, entries: Sequence[Entry]) -> list[tuple[str, Entry]]:
        """Note that tensors are needed again. Returns the actions before that."""
        with self._lock:
            if any(-1 < entry.step < self._number for entry in entries):  # it was kept for a backward
                self._kept_after = min(_RAISED * self._kept_after, _MOST_AFTER)
                self._known.clear()  # they may be parts of steps, as this one is
                self._planned = 0
                self._is_part = True
            numbers = tuple(entry.number for entry in entries if entry.step == self._number)
            return self._note(("reload", numbers)) if numbers else []

    def waited(self) -> None:
        """Note that the device has done what the last event waits for."""
        with self._lock:
            if self._marks is not None and len(self._marks) % 2 and getattr(self._followed, "plan", None) is None:
                self._marks.append(self.mark())

    def copied(self, entry: Entry, nbytes: int, begin: Any, end: Any) -> None:
        """Note the marks at the begin and the end of a copy out."""
        with self._lock:
            if entry.step == self._number:
                self._copies.append((nbytes, [begin, end]))

    def drop(self, entry: Entry) -> None:
        """`entry` is not saved any more. Takes no lock: the garbage collector may call it anywhere."""
        self._dropped.append(entry)

    def forget(self) -> None:
        with self._lock:
            self._end()
            self._known.clear()
            self.last, self._kept_after, self._warned = None, _KEPT_AFTER, False
            self._different = self._ended = self._planned = 0

    def _note(self, event: Event) -> list[tuple[str, Entry]]:
        at, known = len(self._trace), self._followed
        self._trace.append(event)
        actions = [("join", entry) for entry in self._unplanned]
        self._unplanned = []
        if at == 0:
            self._follow()
            known = self._followed
            if known is None:  # the times of a step of new symbolic sizes are of use if its graphs are compiled
                is_timed = _key(event) != event and any(_key(each.trace[0]) == _key(event) for each in self._known)
            else:
                is_timed = not (known.settled or known.is_timed)
            self._marks = [] if is_timed else None
        elif known is not None and not (at < len(known.trace) and self._fits(known.trace[at], event)):
            self._marks = None
            self._follow()
            actions = [("join", entry) for entry in self._entries]
        known = self._followed
        if self._marks is not None and (known is None or known.plan is None or at in (0, len(known.trace) - 1)):
            self._marks.append(self.mark())
        if known is not None and known.plan is not None:
            actions += [(what, self._entries[number]) for what, number in known.plan.actions.get(at, ())]
        return actions

    def _fits(self, planned: Event, event: Event) -> bool:
        """Whether `event` can be the one that a plan has as `planned`: it is equal, or of smaller symbolic sizes."""
        if planned == event or _key(planned) != _key(event):
            return planned == event
        least = _ALIKE if self._planned < _MOST_PLANNED else 0.0
        return all(least * most <= nbytes <= most for most, nbytes in zip(planned[1], event[1], strict=True))

    def _follow(self) -> None:
        """From now on follow a known step that began as this one has: one with a plan, if there is one.

        Of several that of the nearest sizes, and of these the last.
        """
        begun = tuple(self._trace)
        found = [k for k in self._known if len(k.trace) >= len(begun) and all(map(self._fits, k.trace, begun))]
        for known in found:
            self._decide(known)
        found = [k for k in found if k.plan is not None or k.trace[: len(begun)] == begun]
        self._followed = max(
            reversed(found), key=lambda k: (k.plan is not None, -bytes_of(k.trace[: len(begun)])), default=None
        )

    def _decide(self, known: _Known) -> None:
        """Plan a step that has run often enough, and compare its plan with one that sends less."""
        if known.settled or not known.is_timed or (known.plan is None and self._planned >= _MOST_PLANNED):
            return
        times = self.times([*known.runs, *(marks for _, marks in known.copies)])
        if times is None:
            return
        times, copies_ms = times[: len(known.runs)], sum(run[-1] for run in times[len(known.runs) :])
        speed = 1e3 * sum(nbytes for nbytes, _ in known.copies) / copies_ms if copies_ms else 0.0  # 0: no copy
        known.runs, known.copies, known.alike_count = [], [], 0
        if known.plan is None:  # the host may have held up one run here and one there
            steps = [[b - a for a, b in zip(run[1::2], run[2::2], strict=False)] for run in times]
            known.at_ms = list(itertools.accumulate(map(min, zip(*steps, strict=True)), initial=0.0))
            known.plan = self.plan(known.trace, known.at_ms, known.share)
            known.settled = not self.adapts or not math.isfinite(known.plan.allowed_ms)
            self._planned += known.is_symbolic
        elif len(times) < _TRIED:  # the times of steps of other sizes are no measure; the speed of their copies is
            known.settled = not 0 < speed < _SLOWER * known.plan.to_host or known.share < _LEAST_SHARE
            if not known.settled:
                known.share *= speed / known.plan.to_host
                known.plan = self.plan(known.trace, known.at_ms, known.share)
        else:  # steps without a plan are no measure: each graph's own copies hold them up
            took = sorted(run[-1] for run in times)[1]  # the fastest but one
            fastest = min((ms for _, ms in known.tried), default=math.inf)
            sends_more = bool(known.tried) and known.plan.sent_bytes > known.tried[0][0].sent_bytes
            known.tried.append((known.plan, took))
            known.misses = 0 if sends_more or _AS_FAST * took <= fastest else known.misses + 1
            faster = speed / known.plan.to_host
            if len(known.tried) == 1 and _SLOWER * faster > 1:  # the link was busy when its speed was measured
                known.plan = self.plan(known.trace, known.at_ms, known.share * faster)
            if known.plan.sends == known.tried[-1][0].sends and known.misses < _MISSES:
                share = faster if 0 < faster < _SLOWER else _NEXT_SHARE
                while known.plan.sends == known.tried[-1][0].sends and known.share >= _LEAST_SHARE:
                    known.share, share = known.share * share, _NEXT_SHARE
                    known.plan = self.plan(known.trace, known.at_ms, known.share)
            if known.plan.sends == known.tried[-1][0].sends or not known.plan.sent_bytes:  # none is left to try
                most_ms = _AS_FAST * min(took, fastest) + known.plan.allowed_ms
                known.plan = max((plan for plan, ms in known.tried if ms <= most_ms), key=lambda plan: plan.sent_bytes)
                known.settled = True
        log.info(
            "offload: a step sends %d of %d bytes and holds %d, by a plan for %.2f of the link's speed; "
            "steps so far took %s ms%s",
            known.plan.sent_bytes,
            known.plan.nbytes,
            max(known.plan.held_bytes),
            known.share,
            [round(ms, 1) for _, ms in known.tried],
            f"; the last copies had {1e-9 * speed:.1f} GB/s" if speed else "",
        )

    def _is_endless(self) -> bool:
        """Whether the entries that are alive are kept, as by the output of an evaluation.

        False in a backward: a checkpoint may run many graphs there before the first goes backward.
        """
        newest = next(reversed(self._alive))
        if len(self._entries) - 1 - newest < len(self._alive) or autograd.current_backward() != -1:
            return False
        since = self._trace[self._entries[newest].event + 1 :]
        ran = Counter(_key(event) for event in since if event[0] == "start")
        kept = Counter(_key(self._trace[at]) for at in {self._entries[number].event for number in self._alive})
        return len(since) >= _MOST_AFTER or all(ran[e] >= self._kept_after * n for e, n in kept.items())

    def _leave_out(self) -> None:
        """End the step without what is alive. With a warning, for the first time."""
        count, warns = len(self._alive), not self._warned
        gone_since = len(self._entries) - 1 - next(reversed(self._alive))
        if warns:
            self._kept_after, self._warned = _KEPT_AGAIN, True
        self._end()
        if warns:
            warn_user(
                f"aot_hooks: offload(across_graphs=True): {count} saved tensors are kept, and {gone_since} others came "
                "and went since. A step ends where nothing is saved, so none of these had an end, or a plan. The kept "
                "tensors stay where they are, and steps end without them from now on. Is the output of an evaluation "
                "kept, or an exception? Compute it under torch.no_grad(), or keep output.detach()",
                UnusedWarning,
            )

    def _end(self) -> None:
        trace, known, marks = tuple(self._trace), self._followed, self._marks
        if known is not None and len(known.trace) == len(trace) and all(map(self._fits, known.trace, trace)):
            known.copies += self._copies if marks is not None else []
        else:
            known = next((each for each in self._known if each.trace == trace), None) or _Known(trace)
            marks = marks if self._followed is None else None
        if known.trace != trace:
            known.alike_count += marks is not None
        elif marks is not None and len(marks) == (2 * len(trace) if known.plan is None else 2):
            known.runs.append(marks)
        if known.plan is not None:
            self.last = known.plan
        if any(event[0] == "reload" for event in trace) and not self._is_part:
            sends = known.plan is not None or any(entry.sends for entry in self._entries)
            is_new = all(known is not each for each in self._known)
            self._different, self._ended = 0 if sends else self._different + is_new, self._ended + 1
            self._known = [*(k for k in self._known if k is not known), known]
            if len(self._known) > _MOST_TRACES:
                gone = next((k for k in self._known[:-1] if k.plan is None), self._known[0])
                self._known.remove(gone)
                self._planned -= gone.plan is not None and gone.is_symbolic
        self._followed, self._marks, self._is_part = None, None, False
        self._alive.clear()
        self._trace, self._entries, self._unplanned, self._copies = [], [], [], []
        self._number += 1
        if self._different == _MOST_DIFFERENT:  # said once
            self._different += 1
            warn_user(
                f"aot_hooks: offload(across_graphs=True): the last {_MOST_DIFFERENT} steps all differ from others, so "
                "none had a plan, and nothing was sent. Steps need the same graphs in the same order; sizes may differ "
                "where they are symbolic (dynamic=True). Or take offload(), which plans each graph alone",
                UnusedWarning,
            )
