"""The search for a plan, with graphs that take other peaks than their program says."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

from aot_hooks.planning.search import Limits, search
from aot_hooks.planning.solver import Solution
from aot_hooks.planning.step import KEPT, RECOMPUTE, Option, Step, Value

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Tried:
    solution: Solution
    peak: int
    plan: Any
    live: tuple[Any, ...] = ()

    def fits(self, limits: Limits) -> bool:
        return limits.peak is None or self.peak <= limits.peak


def test_the_lowest_peak_is_searched_for_where_the_program_is_wrong() -> None:
    """The program says that one value may be computed again for a peak of 600 MiB, but the graphs then take 1100.

    Without a peak, this choice is not the last one: another value, for 800 MiB, is found as well.
    """
    wrong, right = Option(RECOMPUTE, None, 0, 2.0), Option(RECOMPUTE, None, 0, 1.0)
    values = (
        Value(("a",), 400 * MIB, gone=1, first=3, last=3, options=(wrong,)),
        Value(("b",), 200 * MIB, gone=1, first=3, last=3, options=(right,)),
    )
    live = (600 * MIB, 1000 * MIB, 1000 * MIB, 600 * MIB)
    step = Step(live, values, (25.0, 25.0, 25.0, 25.0), forward_count=2)
    peaks = []

    def partitioned(chosen: Solution) -> tuple[Any, Step]:
        peak = 1100 if wrong in chosen.options else 800 if right in chosen.options else 1000
        own = tuple(dataclasses.replace(value, options=()) for value in values)
        return chosen, dataclasses.replace(step, live=(peak * MIB,) * 4, values=own, node_ms=(chosen.ms / 4,) * 4)

    def tried(graphs: Any, chosen: Solution, own: Step, solution: Solution) -> Any:
        plan = SimpleNamespace(after_ms=own.ms, before_ms=step.ms, step_ratio=own.ms / step.ms)
        peaks.append(own.peak_bytes // MIB)
        return Tried(chosen, own.peak_bytes, plan)

    found = search(step, Limits(None, math.inf, 0.0), partitioned, tried)
    best, least = found.best, found.least
    assert best is not None and best.peak == least.peak == 800 * MIB
    assert best.solution.options == (KEPT, right)
    assert len(peaks) <= 12
