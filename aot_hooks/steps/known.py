"""The steps that have run: which of them a new step is like, and so which plan it follows.

A step of symbolic sizes may follow the plan of one whose sizes are a bit larger.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .plan import Sends, StepPlan
from .recorder import Phase, Step, Trace
from .trials import StepPlans

_MOST_TRACES = 32  # So many steps are known at once; the oldest is forgotten first, one without a plan before others.
_ALIKE = 0.8  # A step follows a plan for larger symbolic sizes if each of its own is at least this share of them.
_MOST_PLANNED = 24  # So many plans are made for symbolic sizes. Then a step may follow one for any larger sizes.
_TIMED = 2  # So many runs are timed before a plan is made: the allocator may grow in one of them.
_TRIED = 5  # A plan is judged after so many runs: new sizes are pinned in the first, which takes long.


def kind_of(sends: Sends) -> Hashable:
    """What a run of an operator is, without symbolic sizes."""
    return (len(sends.nbytes), sends.terms) if sends.terms.is_symbolic else sends


@dataclass(eq=False)
class KnownStep:
    """A step that has run.

    Attributes:
        trials: its plans; None as long as it is timed to make the first one.
        runs: the marks of each run since the last plan: before the first plan two marks of each event,
            before and after what the device waits for there; then one of the first and one of the last event.
        copies: the bytes of each copy out in these runs, and the marks at its begin and end.
        alike_count: how many steps of smaller symbolic sizes followed its plan.
        spare_bytes: of a budget: bytes beyond its room that items may take, as measured steps left them free.
    """

    trace: Trace
    trials: StepPlans | None = None
    runs: list[list[Any]] = field(default_factory=list)
    copies: list[tuple[int, list[Any]]] = field(default_factory=list)
    alike_count: int = 0
    spare_bytes: int = 0
    is_symbolic: bool = False

    def __post_init__(self) -> None:
        self.is_symbolic = any(sends.terms.is_symbolic for sends in self.trace.calls)

    @property
    def plan(self) -> StepPlan | None:
        return None if self.trials is None else self.trials.plan

    @property
    def is_settled(self) -> bool:
        return self.trials is not None and self.trials.is_over

    @property
    def is_timed(self) -> bool:
        """Whether it has run often enough to plan it, or to judge its plan. Symbolic sizes may not come again."""
        if self.plan is not None:
            return max(len(self.runs), self.alike_count) >= _TRIED
        return len(self.runs) >= (1 if self.is_symbolic else _TIMED)

    def ran(self, step_trace: Trace, marks: list[Any] | None, copies: list[tuple[int, list[Any]]]) -> None:
        """Note a run of this step, or of one that followed its plan. `marks`: None if it was not timed."""
        if marks is None:
            return
        self.copies += copies
        if self.trace != step_trace:
            self.alike_count += 1
        elif len(marks) == (2 * len(self.trace.events) if self.plan is None else 2):
            self.runs.append(marks)

    def forget_runs(self) -> None:
        self.runs, self.copies, self.alike_count = [], [], 0

    def at_ms(self, runs: Sequence[Sequence[float]]) -> list[float]:
        """When each event runs if nothing is waited for. The host may have held up one run here and one there."""
        steps = [[b - a for a, b in zip(run[1::2], run[2::2], strict=False)] for run in runs]
        return list(itertools.accumulate(map(min, zip(*steps, strict=True)), initial=0.0))

    def took_ms(self, runs: Sequence[Sequence[float]]) -> float | None:
        """What a step with its plan takes: the time of the fastest run but one. None if too few were of its sizes."""
        return sorted(run[-1] for run in runs)[1] if len(runs) >= _TRIED else None

    def bytes_of_first(self, call_count: int) -> int:
        return sum(sum(sends.nbytes) for sends in self.trace.calls[:call_count])


@dataclass(eq=False)
class KnownSteps:
    """All known steps of a device. The last to run is the last."""

    steps: list[KnownStep] = field(default_factory=list)

    @property
    def may_plan_sizes(self) -> bool:
        """Whether another plan for symbolic sizes may be made."""
        return sum(known.is_symbolic and known.plan is not None for known in self.steps) < _MOST_PLANNED

    def fits(self, known: KnownStep, step: Step, at: int) -> bool:
        """Whether event `at` of `step` is that of a known step: it is equal, or has smaller symbolic sizes."""
        trace = known.trace
        if at >= len(trace.events) or trace.events[at] != step.events[at]:
            return False
        phase, number = step.events[at]
        sends, most = step.calls[number].what, trace.calls[number]
        if phase is Phase.BACKWARD or sends == most:
            return True
        if known.plan is None or kind_of(sends) != kind_of(most):
            return False
        least = _ALIKE if self.may_plan_sizes else 0.0
        return all(least * most <= nbytes <= most for most, nbytes in zip(most.nbytes, sends.nbytes, strict=True))

    def begins_as(self, known: KnownStep, step: Step) -> bool:
        """Whether all events of `step` so far are those of a known step."""
        return all(self.fits(known, step, at) for at in range(len(step.events)))

    def like(self, step: Step) -> KnownStep | None:
        """The known step to follow from now on: one that began as `step` has; with a plan, if there is one.

        Of several that of the nearest sizes, and of these the last.
        """
        found = [known for known in self.steps if self.begins_as(known, step)]
        calls = len(step.calls)
        return max(reversed(found), key=lambda k: (k.plan is not None, -k.bytes_of_first(calls)), default=None)

    def of(self, trace: Trace) -> KnownStep:
        """The step of a trace, which may be new."""
        return next((known for known in self.steps if known.trace == trace), None) or KnownStep(trace)

    def remember(self, known: KnownStep) -> None:
        """Make `known` the last of the known steps, and forget one if there are too many."""
        self.steps = [*(each for each in self.steps if each is not known), known]
        if len(self.steps) > _MOST_TRACES:
            self.steps.remove(next((each for each in self.steps[:-1] if each.plan is None), self.steps[0]))
