"""The fastest choice under a peak, as a mixed-integer linear program for HiGHS.

      minimize    sum of ms                  over x[value, option] in {0, 1}, at most one option of a value
      subject to  live[p] + delta[p]  <= peak         at every position p
                  delta[p] = delta[p-1] + what options give back or take at p
                  sum of squared errors, weighted by bytes  <=  max_error ** 2
                  bytes over the link, each way, fit beside the compute

A value that is recomputed reads its sources from the begin of its segment on. If a source is stored in another way, it
is there from that point, unpacked. A source outside of the segment must not be recomputed itself.

A value that is recomputed has the error of its sources, doubled. That is an estimate: a chain may multiply it.

The same step gives the same choice: the search is bounded by nodes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from .step import KEPT, Option, Step

__all__ = ["Solution", "solve"]

_GAP = 2e-3  # of the objective; a plan this near to the best is taken
_NODES = 500
_SECONDS = 30  # a guard: nodes end the search long before
_MIB = float(1 << 20)
_BESIDE = 0.75  # share of the compute's time in which copies are planned
_COMPUTED = 4.0  # squared: what is computed from a rounded value may be twice as wrong
_TIE = 1e-6  # ms for each MiB and unit of error, so that equal plans keep more and round less


@dataclass(frozen=True)
class Solution:
    """An option for each value of a step, and what the program predicts of them.

    Attributes:
        options: in the order of the values.
        peak_bytes: of the step, by the program's bound.
        ms: predicted time of the step.
        error: predicted relative error of the gradient.
    """

    options: tuple[Option, ...]
    peak_bytes: int
    ms: float
    error: float


class _Rows:
    """Rows `low <= sum of coefficient * column <= high` of a sparse matrix."""

    def __init__(self) -> None:
        self.data: list[float] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: dict[int, float], low: float, high: float) -> None:
        for column, coefficient in terms.items():
            if coefficient:
                self.data.append(coefficient)
                self.rows.append(len(self.low))
                self.columns.append(column)
        self.low.append(low)
        self.high.append(high)

    def constraint(self, column_count: int) -> Any:
        from scipy import optimize, sparse  # type: ignore[import-untyped]

        matrix = sparse.csr_array((self.data, (self.rows, self.columns)), shape=(len(self.low), column_count))
        return optimize.LinearConstraint(matrix, self.low, self.high)


def solve(
    step: Step,
    *,
    peak: float | None,
    max_error: float = math.inf,
    max_ms: float | None = None,
    with_work: bool = True,
) -> Solution | None:
    """The fastest choice whose peak is at most `peak` bytes; with `peak=None` the lowest peak that `max_ms` allows.

    Args:
        max_error: predicted relative error of the gradient.
        max_ms: the most that the step may take.
        with_work: count what is alive while a value is packed or unpacked. It may be counted too high.

    Returns None if there is no such choice.
    """
    # 0.2 s, for those who set a budget
    import numpy
    from scipy import optimize

    choices = [(v, option) for v, value in enumerate(step.values) for option in value.options]
    columns: dict[int, list[int]] = defaultdict(list)
    recompute: dict[int, int] = {}
    for column, (v, option) in enumerate(choices):
        columns[v].append(column)
        if option.name == "recompute":
            recompute[v] = column
    early, starts = _early_sources(step, recompute)
    first_early = len(choices)
    groups = _groups(step, starts)
    # a value that is computed from a rounded one has at least its error; one column for each such pair
    worst = _worst_errors(step, recompute)
    sources = [(v, u) for v in recompute for u in step.values[v].sources if math.isfinite(max_error) and worst[u]]
    first_pair = first_early + len(early)
    pairs = {pair: column for column, pair in enumerate(sources, first_pair)}
    first_delta = first_pair + len(pairs)
    peak_column = first_delta + len(groups)
    count = peak_column + 1

    rows = _Rows()
    for own in columns.values():
        rows.add(dict.fromkeys(own, 1.0), 0, 1)
    for v, column in recompute.items():
        for u in step.values[v].sources:
            if u in early:
                terms = {column: 1.0, first_early + early[u]: -1.0} | dict.fromkeys(columns[u], 1.0)
                rows.add(terms, -math.inf, 1.0)  # read early, unless it is kept anyway
            if u in recompute and step.values[u].segment != step.values[v].segment:
                rows.add({column: 1.0, recompute[u]: 1.0}, 0, 1)
    change: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))  # position -> column -> MiB
    work: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)  # alive while a value is packed, or unpacked
    for column, (v, option) in enumerate(choices):
        value = step.values[v]
        end = value.segment_first if option.name == "recompute" else value.first
        if end > value.gone:
            change[value.gone][column] += (option.packed_bytes - value.nbytes) / _MIB
            change[end][column] -= (option.packed_bytes - value.nbytes) / _MIB
        # while it is packed, the value is there and the packed bytes count already; unpacked, the value counts already
        packing = option.work_bytes + value.nbytes - option.packed_bytes
        if option.work_bytes and with_work:
            work[v, value.gone][column] = packing / _MIB
            work[v, value.first][column] = max(0, option.work_bytes + option.packed_bytes - value.nbytes) / _MIB
    for u, number in early.items():
        change[starts[u]][first_early + number] += step.values[u].nbytes / _MIB
        change[step.values[u].first][first_early + number] -= step.values[u].nbytes / _MIB
    for g, (position, most) in enumerate(groups):
        terms = {first_delta + g: -1.0} | ({first_delta + g - 1: 1.0} if g else {}) | change.get(position, {})
        rows.add(terms, 0, 0)
        rows.add({first_delta + g: 1.0, peak_column: -1.0}, -math.inf, -most / _MIB)
    group_at = {position: first_delta + g for g, (position, _) in enumerate(groups)}
    for (_, position), terms in work.items():  # between two nodes
        between = min(step.live[max(0, position - 1) : position + 1])
        rows.add(terms | {group_at[position]: 1.0, peak_column: -1.0}, -math.inf, -between / _MIB)
    total = sum(value.nbytes for value in step.values) or 1
    if math.isfinite(max_error):
        scale = 1e4
        terms = {c: scale * step.values[v].nbytes / total * o.error**2 for c, (v, o) in enumerate(choices)}
        for (v, u), column in pairs.items():
            row = {c: -scale * choices[c][1].error ** 2 for c in columns[u]}
            row |= {pairs[u, w]: -1.0 for w in step.values[u].sources if (u, w) in pairs}
            rows.add(row | {column: 1.0, recompute[v]: -scale * worst[u]}, -scale * worst[u], math.inf)
            terms[column] = _COMPUTED * step.values[v].nbytes / total
        rows.add(terms, 0, scale * max_error**2 + 1e-9)
    for rate, ms in ((step.to_host, step.forward_ms), (step.to_device, step.backward_ms)):
        if math.isfinite(rate):
            rows.add({c: o.link_bytes / rate * 1e3 for c, (_, o) in enumerate(choices)}, 0, _BESIDE * ms)
    times = numpy.zeros(count)
    times[:first_early] = [o.ms for _, o in choices]
    if max_ms is not None:
        rows.add({c: o.ms for c, (_, o) in enumerate(choices)}, -math.inf, max_ms - step.ms)

    cost = times.copy()
    cost[:first_early] += [_TIE * (1 + o.error) * step.values[v].nbytes / _MIB for v, o in choices]
    cost[first_early:first_pair] = _TIE  # no more than the constraints ask for
    if peak is None:
        cost *= 1e-6
        cost[peak_column] = 1.0
    upper = numpy.full(count, math.inf)
    upper[:first_pair] = 1.0
    upper[peak_column] = math.inf if peak is None else peak / _MIB
    lower = numpy.zeros(count)
    lower[first_delta:peak_column] = -math.inf
    integrality = numpy.zeros(count)
    integrality[:first_early] = 1
    found = optimize.milp(
        cost,
        constraints=rows.constraint(count),
        bounds=optimize.Bounds(lower, upper),
        integrality=integrality,
        options={"mip_rel_gap": _GAP, "node_limit": _NODES, "time_limit": _SECONDS},
    )
    if found.x is None:
        return None
    options = [KEPT] * len(step.values)
    for column, (v, option) in enumerate(choices):
        if found.x[column] > 0.5:
            options[v] = option
    deltas = found.x[first_delta:peak_column]
    bound = max((most + _MIB * deltas[g] for g, (_, most) in enumerate(groups)), default=0)
    chosen = [o.error**2 for o in options]
    again = {v for v in recompute if options[v].name == "recompute"}

    def squared(v: int) -> float:
        return sum(squared(u) for u in step.values[v].sources) if v in again else chosen[v]

    squares = [squared(v) * (_COMPUTED if v in again else 1) for v in range(len(options))]
    error = sum(value.nbytes / total * e for value, e in zip(step.values, squares, strict=True)) ** 0.5
    return Solution(tuple(options), round(bound), step.ms + sum(o.ms for o in options), error)


def _worst_errors(step: Step, recompute: dict[int, int]) -> list[float]:
    """For each value the largest squared error that it can have, by its options or by what it is computed from."""
    known: dict[int, float] = {}

    def most(v: int) -> float:
        if v not in known:
            own = max((o.error**2 for o in step.values[v].options), default=0.0)
            known[v] = max(own, sum(most(u) for u in step.values[v].sources) if v in recompute else 0.0)
        return known[v]

    return [most(v) for v in range(len(step.values))]


def _early_sources(step: Step, recompute: dict[int, int]) -> tuple[dict[int, int], dict[int, int]]:
    """Values that a recomputation may read before their own first reader: numbers for them, and from where on."""
    starts: dict[int, int] = {}
    for v in recompute:
        for u in step.values[v].sources:
            if step.values[v].segment_first < step.values[u].first:
                starts[u] = min(starts.get(u, step.values[u].first), step.values[v].segment_first)
    return {u: number for number, u in enumerate(starts)}, starts


def _groups(step: Step, starts: dict[int, int]) -> list[tuple[int, int]]:
    """Runs of positions in which no option changes anything: the first of each, and the most that is alive in it."""
    ends = {0, *starts.values()}
    for value in step.values:
        ends |= {value.gone, value.first, value.segment_first}
    firsts = sorted(p for p in ends if p < len(step.live))
    limits = [*firsts[1:], len(step.live)][: len(firsts)]
    return [(a, max(step.live[a:b])) for a, b in zip(firsts, limits, strict=True)]
