"""The search for a plan, with graphs that take other peaks than their program says."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest

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


@pytest.mark.parametrize(("too_much", "fits"), [(30, True), (0, False)])
def test_a_choice_that_the_program_takes_to_be_over_the_peak(too_much: int, fits: bool) -> None:
    """All kept is 2% over the peak, says the program. To compute the value again takes 10 ms of 100. What the graphs
    take decides: `too_much` MiB less than the program says, or as much.
    """
    again = Option(RECOMPUTE, None, 0, 10.0)
    value = Value(("h",), 30 * MIB, gone=1, first=2, last=2, options=(again,))
    step = Step((980 * MIB, 1020 * MIB, 980 * MIB), (value,), (30.0, 30.0, 40.0), forward_count=2)

    def partitioned(chosen: Solution) -> tuple[Any, Step]:
        more = 10.0 if chosen.options[0] is again else 0.0
        own = dataclasses.replace(
            step,
            live=tuple(nbytes - too_much * MIB for nbytes in chosen.live) if not more else chosen.live,
            values=(dataclasses.replace(value, options=()),),
            node_ms=(30.0 + more, 30.0, 40.0),
        )
        return chosen, own

    def tried(graphs: Any, chosen: Solution, own: Step, solution: Solution) -> Any:
        plan = SimpleNamespace(after_ms=own.ms, before_ms=step.ms, step_ratio=own.ms / step.ms)
        return Tried(chosen, own.peak_bytes, plan)

    best, _ = search(step, Limits(1000 * MIB, math.inf, 0.0), partitioned, tried)
    assert best is not None
    assert best.peak <= 1000 * MIB
    assert (best.solution.options[0] == KEPT) == fits


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

    best, least = search(step, Limits(None, math.inf, 0.0), partitioned, tried)
    assert best is not None and best.peak == least.peak == 800 * MIB
    assert best.solution.options == (KEPT, right)
    assert len(peaks) <= 12
