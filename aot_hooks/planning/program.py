"""Whole choices of a mixed-integer linear program, by HiGHS.

      relaxed --fix the quarter nearest to whole--> relaxed --...--> few are open: solved whole

The relaxed program has the best choice that need not be whole: no whole one is better. The values that come out nearest
to whole are fixed, and it is solved again, until so few are open that they can be solved whole. While many are open,
the relaxed programs get tighter limits: near a relaxed choice that uses up its limits there is no whole one. If the
result is far from the relaxed program, all is done again with limits that are tighter still.
The same program gives the same choice: the search is bounded by counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

MOST_OVER = 1e-3  # MiB over the peak that count as rounding.
_GAP = 1e-3  # HiGHS takes a plan whose time, or peak, is at most this share above the best.
_OPEN = 150  # So many integer columns are solved whole at once: 4 layers take 0.4 s then, and 16 take 0.5 s.
_FIXED = 0.25  # The share of the open values that are fixed at a time. With half of them 8 layers took 0.0004 more.
# While more columns than that are open, half of the values are fixed at a time. A choice for 16 layers is 0.00005 of
# the step slower, and takes 0.9 s of a CPU in place of 3.0.
_MANY, _FIXED_OF_MANY = 800, 0.5
_NODES = 20  # The most nodes of a search for whole numbers.
_NEAR = 0.002  # A whole choice whose cost is at most this share above the relaxed program's is taken at once.
# How often a whole choice is looked for, until one is near. For each time the shares of the peak that the first relaxed
# program leaves free, and of the sum of squared errors that it takes. Of 50 programs, 9 take 0.0025 to 0.0067 of the
# step less than with the second pair alone. With that one 4 end over a peak that the relaxed program meets, with all 1.
_DIVES = ((0.005, 0.9), (0.02, 0.35), (0.06, 0.9))
_SECONDS = 100  # A guard: nodes end the search long before, on a busy machine as well.


@dataclass(eq=False)
class Program:
    """Columns with a cost each, and rows `low <= sum of coefficient * column <= high`.

    `over` is the column of MiB over the peak, `errors` the row that limits the errors, None if nothing does.
    """

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    data: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    over: int = -1
    errors: int | None = None

    def column(self, lower: float = 0.0, upper: float = math.inf, cost: float = 0.0) -> int:
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        return len(self.cost) - 1

    def row(self, terms: dict[int, float], low: float, high: float) -> None:
        for column, coefficient in terms.items():
            if coefficient:
                self.data.append(coefficient)
                self.rows.append(len(self.low))
                self.columns.append(column)
        self.low.append(low)
        self.high.append(high)

    def objective(self, x: Any) -> float:
        return float(sum(cost * value for cost, value in zip(self.cost, x, strict=True)))

    def solved(self, whole: int, nodes: int = _NODES) -> Any:
        """The values of the columns, the first `whole` of them whole numbers; None if there are none."""
        # 0.2 s, for those who set a budget
        import numpy
        from scipy import optimize, sparse  # type: ignore[import-untyped]

        shape = (len(self.low), len(self.cost))
        matrix = sparse.csr_array((self.data, (self.rows, self.columns)), shape=shape)
        integrality = numpy.zeros(len(self.cost))
        integrality[:whole] = 1
        return optimize.milp(
            self.cost,
            constraints=optimize.LinearConstraint(matrix, self.low, self.high),
            bounds=optimize.Bounds(self.lower, self.upper),
            integrality=integrality,
            options={"mip_rel_gap": _GAP, "node_limit": nodes, "time_limit": _SECONDS},
        ).x


def integer_solution(program: Program, guide: Any, by_value: Sequence[Sequence[int]], peak: float) -> Any:
    """A value for each column, with those of `by_value` whole. None if there are none.

    Args:
        guide: the values of the columns in the relaxed program.
        by_value: for each value its columns, which must be whole; at most one of them is 1.
        peak: in MiB, 0 if the lowest one is asked for.
    """
    if (whole := sum(map(len, by_value))) <= _OPEN:
        return program.solved(whole)
    near = (1 + _NEAR) * program.objective(guide)
    best = None
    for room, errors in _DIVES:
        found = _rounded(program, by_value, room * peak, errors)
        if found is not None:
            best = found if best is None else min(best, found, key=program.objective)
        if best is not None and (guide[program.over] > MOST_OVER or program.objective(best) <= near):
            break
    return best


def _rounded(program: Program, by_value: Sequence[Sequence[int]], room: float, errors: float) -> Any:
    """The values of the columns, most of them fixed in turns; None if there are none.

    If fixing leaves no solution, it is undone, and fewer values are fixed at once.

    Args:
        room: MiB that the first relaxed program leaves free.
        errors: the share of the errors that it takes.
    """
    whole = sum(map(len, by_value))
    if (relaxed := _relaxed(program, room, errors)) is None:
        relaxed = _relaxed(program, 0.0, 1.0)
    part = replace(program, lower=[*program.lower], upper=[*program.upper])
    left, fewer = list(by_value), 1.0
    while relaxed is not None and (count_open := sum(map(len, left))) > _OPEN:
        at_once = fewer * (_FIXED_OF_MANY if count_open > _MANY else _FIXED)
        if not int(at_once * len(left)):
            break
        near = {own[0]: max(1 - sum(relaxed[c] for c in own), *(relaxed[c] for c in own)) for own in left}
        left.sort(key=lambda own: -near[own[0]])
        are_whole = sum(near[own[0]] > 1 - 1e-6 for own in left)
        count = are_whole + int(at_once * (len(left) - are_whole))
        before = [*part.lower], [*part.upper]
        for own in left[:count]:
            likely = max(own, key=relaxed.__getitem__)
            kept = relaxed[likely] < 1 - sum(relaxed[c] for c in own)
            for c in own:
                part.lower[c] = part.upper[c] = float(c == likely and not kept)
        open_share = (len(left) - count) / len(by_value)
        found = _relaxed(part, open_share * room, 1 - (1 - errors) * open_share)
        found = _relaxed(part, 0.0, 1.0) if found is None else found
        if found is None:
            (part.lower, part.upper), fewer = before, fewer / 4
        else:
            left, relaxed = left[count:], found
    found = part.solved(whole)
    return program.solved(whole) if found is None else found  # it takes long


def _relaxed(program: Program, room: float, error_room: float) -> Any:
    """The columns of the relaxed program that leaves `room` MiB free and takes a part of the errors; None if none."""
    part = replace(program, lower=[*program.lower], high=[*program.high])
    part.lower[part.over] = -room
    if part.errors is not None:
        part.high[part.errors] *= error_room
    found = part.solved(0)
    if found is not None:
        found[program.over] = max(0.0, found[program.over])
    return found
