"""Whole choices of a mixed-integer linear program, by HiGHS.

      relaxed --fix what is nearest to whole--> relaxed --...--> few are open: solved whole     a dive
      the best of two dives --far from the relaxed program--> all values are open, a node of the search

A large program is solved relaxed first. The values that come out nearest to whole are fixed, and it is solved again,
until so few are open that they can be solved whole. While many are open, the relaxed programs get tighter limits:
near a relaxed choice that uses up its limits there is no whole one. If the result is above the peak, or poor, values
are fixed again for a lower one. If that is poor as well, the whole program is solved, under the peak, but its search
ends early. If nothing is under the peak then, some values at a time are solved again beside the others, until all is
under it or nothing helps. Where the lowest peak is asked for, a part of the values at a time is solved again instead.
The same program gives the same choice: the search is bounded by counts.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

MOST_OVER = 1e-3  # MiB over the peak, for rounding
_GAP = 1e-3  # of the step's time, or of the peak; a plan this near to the best is taken
_WHOLE = 300  # integer columns of a program that is solved whole
_NODES = 40
_OPEN = 100  # integer columns of a large program that are solved whole at once
_NODES_AGAIN = 1  # of a program that is solved after dives
_AT_ONCE, _SURE = 8, 0.8  # values that are fixed at once if they are as near to whole as this
_DIVES = 2
_COSTLY = 0.2  # of what the relaxed program adds to the step
_FURTHER, _LOWER = 1.05, 1.0  # times the last dive's excess, times the room: the next dive aims lower by the larger
_PASSED = 2  # times in a row that a repair is of no use, in each order, before the next values follow
_EACH = 0.05  # price of a MiB over the peak at each position, as a share of the price at the highest one
_FIRST_REPAIRS, _REPAIRS = 6, 24  # times, at most, without costly columns and with them
_HIGH = 0.3  # of the most that a position is over the peak
_NEAR = 0.004  # of what the relaxed program has: a whole choice this near to it is taken
_SECONDS = 100  # a guard: nodes end the search long before, on a busy machine as well
_ERROR_ROOM = 0.35  # of the sum of squared errors, which the first relaxed program leaves free


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

    def each_over(self) -> tuple[Program, dict[int, int]]:
        """The program with an `over` column of its own for each row that has `over`; and the row of each new column."""
        apart = replace(self, cost=[*self.cost], lower=[*self.lower], upper=[*self.upper], columns=[])
        overs: dict[int, int] = {}
        for row, column in zip(self.rows, self.columns, strict=True):
            if column == self.over:
                column = apart.column(cost=_EACH * self.cost[self.over])
                overs[column] = row
            apart.columns.append(column)
        return apart, overs

    def excess(self, x: Any) -> list[float]:
        """For each row by how much it is above its limit, with `over` at 0."""
        found = [-high for high in self.high]
        for row, column, coefficient in zip(self.rows, self.columns, self.data, strict=True):
            found[row] += coefficient * x[column] * (column != self.over)
        return found

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


def integer_solution(program: Program, by_value: Sequence[Sequence[int]], room: float) -> Any:
    """A value for each column, with those of `by_value` whole. None if there are none.

    Args:
        by_value: for each value its columns, which must be whole; at most one of them is 1.
        room: MiB that the first relaxed program leaves free, 0 if the lowest peak is asked for.
    """
    whole = sum(map(len, by_value))
    best: Any = program.solved(whole) if whole <= _WHOLE else None
    if best is not None and best[program.over] <= MOST_OVER:
        return best
    guide = program.solved(0)
    if guide is None or (best is not None and guide[program.over] > MOST_OVER):
        return best
    near = (1 + _NEAR) * program.objective(guide)
    least = room == 0  # asked for: no peak is out of reach
    best = _dives(program, best, by_value, room, near)
    if best is None or program.objective(best) <= near:
        return best
    if least:
        count = -(-whole // _OPEN)
        for part in range(count):  # layer by layer
            left = by_value[part * len(by_value) // count :][: len(by_value) // count + 1]
            best = _improve(program, best, by_value, left)
            if program.objective(best) < near:
                break
        return best
    if guide[program.over] > MOST_OVER:
        return best
    # dives end poorly where all options cost alike, as those of the host do
    under = replace(program, upper=[*program.upper])
    under.upper[program.over] = 0.0
    found = under.solved(whole, _NODES_AGAIN)
    best = best if found is None else min(best, found, key=program.objective)
    return _repair_peak(program, best, guide, by_value) if best[program.over] > MOST_OVER else best


def _repair_peak(program: Program, best: Any, guide: Any, by_value: Sequence[Sequence[int]]) -> Any:
    """A choice near `best` that is under the peak, or over it by less; `best` if none is found.

    Several positions may be as high as the highest. So here each position pays for its own bytes over the peak. Values
    are solved again in turns: those furthest from the relaxed program, and those nearest to the highest positions. If
    neither helps, the next values in both orders follow.
    """
    apart, overs = program.each_over()
    excess = program.excess(best)
    start = [*best, *(max(0.0, excess[row]) for row in overs.values())]
    start[program.over] = 0.0
    costly = [c for c in _costly(program, guide, by_value) if best[c] < 0.5]
    x = start
    for without, most in ((costly, _FIRST_REPAIRS), ([], _REPAIRS)):
        if x is not start and max(x[c] for c in overs) <= MOST_OVER:
            break
        apart.upper[: len(program.upper)] = program.upper
        for c in without:
            apart.upper[c] = 0.0
        x, passed, turn = start, 0, 0
        while passed < 3 * _PASSED and turn < most and max(x[c] for c in overs) > MOST_OVER:
            order = _nearest(apart, x, overs, by_value) if turn % 2 else _furthest(x, guide, by_value)
            found = _improve(apart, x, by_value, _next_batch(order, passed // 2 * _OPEN // 2))
            passed = 0 if apart.objective(found) < (1 - _GAP) * apart.objective(x) else passed + 1
            x, turn = found, turn + 1
    excess = program.excess(x)
    x = x[: len(program.cost)]
    x[program.over] = max(0.0, *(excess[row] for row in overs.values()))
    return min(best, x, key=program.objective)


def _next_batch(order: Sequence[Sequence[int]], without: int) -> list[Sequence[int]]:
    """The values of `order` after the first `without` columns that have at most `_OPEN` columns together."""
    ends = itertools.accumulate(map(len, order))
    return [own for own, end in zip(order, ends, strict=True) if without < end <= without + _OPEN]


def _furthest(best: Any, guide: Any, by_value: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    return sorted(by_value, key=lambda own: -sum(abs(best[c] - guide[c]) for c in own))


def _nearest(
    program: Program, x: Any, overs: Mapping[int, int], by_value: Sequence[Sequence[int]]
) -> list[Sequence[int]]:
    """The values nearest to the highest positions first, by a search through rows and continuous columns."""
    of_row, of_column = defaultdict(list), defaultdict(list)
    for row, column in zip(program.rows, program.columns, strict=True):
        of_row[row].append(column)
        of_column[column].append(row)
    value = {c: v for v, own in enumerate(by_value) for c in own}
    most = max(x[c] for c in overs)
    rows = [row for c, row in overs.items() if x[c] > _HIGH * most]
    seen, found = {*rows, program.errors}, dict[int, None]()
    for row in rows:  # grows
        for c in of_row[row]:
            if c in value:
                found[value[c]] = None
            else:
                new = [r for r in of_column.pop(c, ()) if r not in seen]
                rows += new
                seen.update(new)
    return [by_value[v] for v in found]


def _costly(program: Program, guide: Any, by_value: Sequence[Sequence[int]]) -> list[int]:
    """Columns of expensive options, such as computing one matrix product again.

    An option is expensive if it costs more than the share `_COSTLY` of the time that the relaxed program adds. Those
    that the relaxed program uses are left out.
    """
    fixed = sum(cost for cost, low in zip(program.cost, program.lower, strict=True) if low)
    most = _COSTLY * (program.objective(guide) - fixed)
    return [c for own in by_value for c in own if program.cost[c] > most and guide[c] < 0.5]


def _dives(program: Program, best: Any, by_value: Sequence[Sequence[int]], room: float, near: float) -> Any:
    """The best of `best` and of some dives, each for a lower peak, until one is `near`."""
    spare = 0.0
    solved: dict[tuple[float, ...], Any] = {}  # by the bounds of a program few of whose values were open
    for _ in range(_DIVES):
        found = _dive(program, by_value, room, spare, solved)
        if found is None:
            break
        best = found if best is None else min(best, found, key=program.objective)
        if program.objective(best) <= near:
            break
        spare += max(_FURTHER * found[program.over], _LOWER * room)
    return best


def _dive(
    program: Program, by_value: Sequence[Sequence[int]], room: float, spare: float, solved: dict[tuple[float, ...], Any]
) -> Any:
    """The values of the columns, most of them fixed in turns; None if there are none.

    What is fixed stays `spare` MiB below the peak, if it can. What earlier dives have found is in `solved`.
    """
    if (relaxed := _relaxed(program, spare + room, _ERROR_ROOM)) is None:
        return None
    part = replace(program, lower=[*program.lower], upper=[*program.upper])
    _fix_most(part, relaxed, by_value, room, spare)
    fixed, whole = (*part.lower, *part.upper), sum(map(len, by_value))
    found = solved[fixed] if fixed in solved else part.solved(whole)
    if found is None:  # it takes long
        found = program.solved(whole)
    solved[fixed] = found
    return found


def _improve(program: Program, best: Any, by_value: Sequence[Sequence[int]], left: Sequence[Sequence[int]]) -> Any:
    """A better solution than `best` that differs from it in the values `left` only; `best` if none is found."""
    part = replace(program, lower=[*program.lower], upper=[*program.upper])
    for c in {c for own in by_value for c in own} - {c for own in left for c in own}:
        part.lower[c] = part.upper[c] = float(round(best[c]))
    found = part.solved(sum(map(len, by_value)), _NODES_AGAIN)
    return best if found is None or program.objective(found) > program.objective(best) else found


def _fix_most(program: Program, relaxed: Any, by_value: Sequence[Sequence[int]], room: float, spare: float) -> None:
    """Fix what is nearest to whole in `relaxed`, and solve again, until few values are left open.

    If that leaves no solution, it is undone, and half as many values are fixed at once.
    """
    lower, upper, left, most = list(program.lower), list(program.upper), list(by_value), len(by_value)
    while sum(map(len, left)) > _OPEN and most:
        near = {own[0]: max(1 - sum(relaxed[c] for c in own), *(relaxed[c] for c in own)) for own in left}
        left.sort(key=lambda own: -near[own[0]])
        settled = sum(near[own[0]] > 1 - 1e-6 for own in left)
        sure = sum(near[own[0]] > _SURE for own in left[settled:])
        most = min(most, max(1, min(sure, _AT_ONCE), (len(left) - settled) // 20))
        fixed = left[: settled + most]
        for own in fixed:
            likely = max(own, key=relaxed.__getitem__)
            kept = relaxed[likely] < 1 - sum(relaxed[c] for c in own)
            for c in own:
                program.lower[c] = program.upper[c] = float(c == likely and not kept)
        undecided = len(left[len(fixed) :]) / len(by_value)
        error_room = 1 - (1 - _ERROR_ROOM) * undecided
        found = _relaxed(program, spare + undecided * room, error_room)
        found = _relaxed(program, spare, 1.0) if found is None else found
        if found is not None:
            left, relaxed, most = left[len(fixed) :], found, len(by_value)
            continue
        for c in (c for own in fixed[settled:] for c in own):
            program.lower[c], program.upper[c] = lower[c], upper[c]
        most //= 2


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
