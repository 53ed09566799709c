"""Which plan of a step is tried next, by what steps with the last one took. It knows no device: times come in.

      typed by a user    the plan for the speed of the link --> for the speed that copies had, or for three quarters of
                         the last speed, while steps get faster --> of those about as fast as the fastest, the one that
                         sends most
      of a budget        the plan for the speed of the link --> if copies were slower, one for their speed --> the
                         faster of the two

Both plans of a budget send no more than it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from .plan import StepPlan

_AS_FAST = 1.008  # A step counts as fast as another that takes up to this many times longer.
_NEXT_SHARE = 0.75  # The next plan counts on this share of the speed that the last one did.
_LEAST_SHARE = 0.25  # No plan is tried for less than this share of the link's speed.
_MISSES = 2  # After this many plans in a row that are no faster, no other is tried.
_SLOWER = 0.97  # Copies are slower than planned if they had less than this share of the speed planned with.


@dataclass(eq=False)
class StepPlans:
    """The plans of one step.

    Attributes:
        make: plans the step for a share of the link's speed.
        plan: the plan to follow now.
        share: the share that it counts on.
        is_over: the plan stays, and nothing needs to be timed.
        tried: the plans that were timed, with the ms of a step. Only the second may send more than the first.
        misses: how many plans in a row were no faster than one before.
    """

    make: Callable[[float], StepPlan]
    plan: StepPlan
    share: float = 1.0
    is_over: bool = False
    tried: list[tuple[StepPlan, float]] = field(default_factory=list)
    misses: int = 0

    @classmethod
    def begin(cls, make: Callable[[float], StepPlan], *, adapts: bool) -> StepPlans:
        """`adapts`: copies run beside the compute, so that other plans may be faster."""
        plan = make(1.0)
        return cls(make, plan, is_over=not adapts or (math.isinf(plan.allowed_ms) and plan.excess_bytes is None))

    def judge(self, took_ms: float | None, speed: float) -> None:
        """Take the next plan, or the best if there is none to try.

        Args:
            took_ms: the time of a step; None if the steps that ran were of other sizes, whose times are no measure.
            speed: bytes a second of copies out in these steps; 0 if there were none.
        """
        if took_ms is not None:
            self.tried.append((self.plan, took_ms))
        if took_ms is None or self.plan.excess_bytes is not None:
            self._judge_speed(speed / self.plan.to_host)
        else:
            self._judge_time(took_ms, speed / self.plan.to_host)

    def again(self) -> None:
        """Plan the step again, which has another room now."""
        self.plan = self.make(self.share)
        self.tried.clear()

    def _judge_speed(self, speed: float) -> None:
        """Plan for the speed that copies had, once, if that is lower: a share of the speed planned with."""
        if self.share == 1.0 and 0 < speed < _SLOWER:
            self.share = max(speed, _LEAST_SHARE)
            self.plan = self.make(self.share)
            return
        self.is_over = True
        if self.tried:
            self.plan, _ = min(self.tried, key=lambda each: each[1])

    def _judge_time(self, took_ms: float, speed: float) -> None:
        """Try plans that send less, while steps get faster.

        The steps before the first plan are no measure: they wait for each copy.
        """
        fastest_ms = min((ms for _, ms in self.tried[:-1]), default=math.inf)
        sends_more = self.plan.sent_bytes > self.tried[0][0].sent_bytes
        self.misses = 0 if sends_more or _AS_FAST * took_ms <= fastest_ms else self.misses + 1
        found = self.plan
        if len(self.tried) == 1 and _SLOWER * speed > 1:  # the link was busy when its speed was measured
            found = self.make(self.share * speed)
        if found.sends == self.plan.sends and self.misses < _MISSES:
            found = self._for_less(speed if 0 < speed < _SLOWER else _NEXT_SHARE)
        if found.sends != self.plan.sends and found.sent_bytes:
            self.plan = found
            return
        self.is_over = True  # none is left to try
        most_ms = _AS_FAST * min(took_ms, fastest_ms) + found.allowed_ms
        self.plan = max((plan for plan, ms in self.tried if ms <= most_ms), key=lambda plan: plan.sent_bytes)

    def _for_less(self, part: float) -> StepPlan:
        """The plan for `part` of the speed, or for less, that sends other items than `plan`; `plan` if none does."""
        found = self.plan
        while found.sends == self.plan.sends and self.share >= _LEAST_SHARE:
            self.share, part = self.share * part, _NEXT_SHARE
            found = self.make(self.share)
        return found
