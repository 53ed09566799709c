"""The fastest choice under a peak, as a mixed-integer linear program for HiGHS.

      minimize    sum of ms, what the host takes longer than the device, and a high price for each byte over the peak
                  x[value, option] in {0, 1}, at most one option of a value
      subject to  live[p] + delta[p] + queued[p] + fetched[p] <= peak + over     at every position p
                  delta[p]   = delta[p-1] + what options give back or take at p
                  queued[p]  >= queued[p-1] + bytes to send from p-1 on - what the link sends meanwhile
                                0 in the backward
                  fetched[p] >= fetched[p+1] + bytes read first at p+1 - what the link brings meanwhile
                                0 before the backward
                  in a step of many calls, at each of its moments: live[p] + delta[p] + ... + what others hold
                                + number of other calls * (live[f] + delta[f]) <= peak + over, f the forward's end
                  sum of squared errors, weighted by bytes  <=  max_error ** 2
                  computed[v] >= squared errors of what v is computed from again, if it is

A value that is packed is whole from its first reader on, unless its readers unpack it in registers. A value that is
recomputed reads its sources from its own begin on. If a source is stored in another way, it
is there from that point, unpacked. A source outside of the segment must not be recomputed itself.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .program import MOST_OVER, Program, integer_solution
from .step import COMPUTED, KEPT, RECOMPUTE, Moment, Option, Step, Value

_OVER = 0.01  # of the peak: being over it by as much costs as much as the whole step
_MIB = float(1 << 20)
# shares of the link's rates that the schedule of offload plans with, and most MiB that may be on their way
_SENT, _BROUGHT, _IN_FLIGHT = 0.89, 0.76, 1024.0
_UNITS = 1e4  # of squared errors, which are small beside what the solver takes for 0
_CHAINED = 4  # roundings that what is computed again from others may sum up
_TIE = 1e-6  # ms for each MiB and unit of error, so that equal plans keep more and round less


_Terms = dict[int, float]  # coefficients by column


@dataclass(frozen=True)
class Solution:
    """An option for each value of a step, and what the program predicts of them.

    Attributes:
        options: in the order of the values.
        live: bytes alive at each position, with what packing there works with.
        peak_bytes: of the step, with what is alive beside the graph.
        ms: predicted time of the step.
        error: predicted relative error of the gradient.
        bound_ms: no choice under the peak is faster, by the relaxed program; 0 if that is over the peak.
    """

    options: tuple[Option, ...]
    live: tuple[int, ...] = field(repr=False)
    peak_bytes: int
    ms: float
    error: float
    bound_ms: float = 0.0


def solve(
    step: Step,
    *,
    peak: float | None,
    max_error: float = math.inf,
    max_ms: float | None = None,
    under: bool = False,
) -> Solution | None:
    """The fastest choice whose peak is at most `peak` bytes; with `peak=None` the lowest peak that `max_ms` allows.

    If no choice stays under `peak`, or none is found, the peak of the one that is returned is above it by little: each
    byte has a price. Searching for a choice that does not exist took 20 s for 16 layers.

    Args:
        max_error: predicted relative error of the gradient.
        max_ms: the most that the step may take.
        under: return None, in a tenth of the time, if the relaxed program is over the peak already.

    Returns None if no choice is within `max_error` and `max_ms`.
    """
    model = _Model.of(step, peak)
    waits = _add_host(model)
    _add_sources(model)
    _note_bytes(model)
    _note_early_reads(model)
    alive = _add_peaks(model)
    program = model.program
    if math.isfinite(max_error):
        _add_errors(model, max_error)
    if max_ms is not None:
        program.row({c: o.ms for c, (_, o) in enumerate(model.choices)} | waits, -math.inf, max_ms - step.device_ms)
    relaxed = program.solved(0)
    if relaxed is None or (under and relaxed[program.over] > MOST_OVER):
        return None
    x = integer_solution(program, relaxed, [own for own in model.columns if own], model.allowed)
    bound = program.objective(relaxed) if peak is not None and relaxed[program.over] <= MOST_OVER else 0.0
    return None if x is None else _solution(model, alive, x, bound)


@dataclass(eq=False)
class _Model:
    """A step as a program, while its rows are added. All bytes are in MiB.

    Attributes:
        allowed: the peak; 0 if the lowest is asked for.
        scale: of time beside the peak.
        choices: for each of the first columns, a value and the option that the column stands for.
        columns: those of each value; `recompute`: likewise of options to compute it again.
        starts: see `_early_starts`; `early`: for each of these values, the column that says whether it is read early.
        change: by position, what the options of columns add to the bytes alive from there on.
        sent, fetched: by position, what columns send from there on, and what is read there first.
        work: by value and position, what is alive while the value is packed or unpacked there.
        groups, deltas: runs of positions, and for each the column of what all options add there.
    """

    step: Step
    allowed: float
    scale: float
    program: Program
    choices: list[tuple[int, Option]]
    columns: list[list[int]]
    recompute: list[list[int]]
    starts: dict[int, int]
    early: dict[int, int] = field(default_factory=dict)
    change: dict[int, _Terms] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    sent: dict[int, _Terms] = field(default_factory=lambda: defaultdict(dict))
    fetched: dict[int, _Terms] = field(default_factory=lambda: defaultdict(dict))
    work: dict[tuple[int, int], _Terms] = field(default_factory=lambda: defaultdict(dict))
    groups: list[tuple[int, int]] = field(default_factory=list)
    deltas: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, step: Step, peak: float | None) -> _Model:
        """The columns of `step`, with what they cost."""
        choices = [(v, option) for v, value in enumerate(step.values) for option in value.options]
        columns: list[list[int]] = [[] for _ in step.values]
        for c, (v, _) in enumerate(choices):
            columns[v].append(c)
        program, allowed, scale = Program(), 0.0 if peak is None else peak / _MIB, 1.0 if peak is not None else 1e-6
        price = 1.0 if peak is None else max(step.ms, 1.0) / (_OVER * max(allowed, 1.0))
        for v, o in choices:
            program.column(0, 1, scale * (o.ms + _TIE * (1 + o.error) * step.values[v].nbytes / _MIB))
        program.over = program.column(0, math.inf, price)
        if peak is not None:
            program.column(1, 1, step.device_ms)  # so that the gap is a share of the step
        starts = _early_starts(step)
        recompute = [[c for c in own if choices[c][1].name == RECOMPUTE] for own in columns]
        return cls(step, allowed, scale, program, choices, columns, recompute, starts)


def _add_host(model: _Model) -> _Terms:
    """A column for the time that the host takes longer than the device, if it may; returns its terms."""
    step, program = model.step, model.program
    longer = {c: o.host_ms - o.ms for c, (_, o) in enumerate(model.choices)}
    most = sum(max(0.0, *(longer[c] for c in own)) for own in model.columns if own)
    if step.host_ms + most <= step.device_ms:
        return {}
    waits = program.column(0, math.inf, model.scale)
    program.row(longer | {waits: -1.0}, -math.inf, step.device_ms - step.host_ms)
    return {waits: 1.0}


def _add_sources(model: _Model) -> None:
    """Rows for what a value is computed again from: it is there, exact where it must be, and of the same segment."""
    step, program, columns = model.step, model.program, model.columns
    model.early |= {u: program.column(0, 1, _TIE * model.scale) for u in model.starts}
    for own in columns:
        program.row(dict.fromkeys(own, 1.0), 0, 1)
    for c, (v, option) in enumerate(model.choices):
        for u in option.sources:
            stored = dict.fromkeys(columns[u], 1.0)
            if not step.values[u].saved:
                program.row({c: -1.0} | stored, 0, math.inf)  # saved for this
            elif u in model.starts:
                program.row({c: 1.0, model.early[u]: -1.0} | stored, -math.inf, 1.0)  # unless it is kept anyway
            if u in option.exact:
                program.row({c: 1.0} | {k: 1.0 for k in columns[u] if model.choices[k][1].error}, 0, 1)
            if model.recompute[u] and step.values[u].segment != step.values[v].segment:
                program.row({c: 1.0} | dict.fromkeys(model.recompute[u], 1.0), 0, 1)


def _note_bytes(model: _Model) -> None:
    """Note for each option: its bytes alive, its copies, and the working memory of its packing."""
    for c, (v, option) in enumerate(model.choices):
        value = model.step.values[v]
        end = value.last + 1 if option.in_registers else value.first
        if end > value.gone:
            more = (option.packed_bytes - (value.nbytes if value.saved else 0)) / _MIB
            if option.in_registers:  # what was fetched
                model.change[value.first][c] += option.link_bytes / _MIB
                model.change[value.last + 1][c] -= option.link_bytes / _MIB
            model.change[value.gone][c] += more
            model.change[end][c] -= more
        if option.link_bytes:
            model.sent[value.gone][c] = model.fetched[value.first][c] = option.link_bytes / _MIB
        # while it is packed, the value is there and the packed bytes count already; unpacked, the value counts already
        if option.work_bytes:
            packing = option.work_bytes + value.nbytes - option.packed_bytes
            model.work[v, value.gone][c] = packing / _MIB
            model.work[v, value.first][c] = max(0, option.work_bytes + option.packed_bytes - value.nbytes) / _MIB


def _note_early_reads(model: _Model) -> None:
    """Note that a value is back when another one is computed again from it, before its own first reader."""
    for u, c in model.early.items():
        value, start = model.step.values[u], model.starts[u]
        model.change[start][c] += value.nbytes / _MIB
        model.change[value.first][c] -= value.nbytes / _MIB


def _add_peaks(model: _Model) -> list[_Terms]:
    """Rows for the bytes alive at each position and moment; returns for each group the terms of what options add."""
    step, program = model.step, model.program
    model.groups = groups = _groups(step, model.starts)
    model.deltas = deltas = [program.column(-math.inf) for _ in groups]
    alive = _in_flight_terms(model, groups)
    for g, (position, _) in enumerate(groups):
        terms = {deltas[g]: -1.0} | ({deltas[g - 1]: 1.0} if g else {}) | model.change.get(position, {})
        program.row(terms, 0, 0)
        alive[g] |= {deltas[g]: 1.0}
    held, held_at = step.bytes_of(step.live).held, _held_at(model)

    def limit(terms: _Terms, nbytes: int, moments: Sequence[Moment]) -> None:
        """At `moments`, `nbytes` with `terms` added are under the peak."""
        for moment in moments:
            row = terms | {program.over: -1.0}
            if held_at is not None:
                row[deltas[held_at]] = row.get(deltas[held_at], 0.0) + moment.calls
            program.row(row, -math.inf, model.allowed - (nbytes + moment.calls * held + moment.nbytes) / _MIB)

    for g, (position, most) in enumerate(groups):
        limit(alive[g], most, step.moments_at(position))
    limit({}, 0, [moment for moment in step.moments if not moment.phase])
    group_at = {position: g for g, (position, _) in enumerate(groups)}
    for (_, position), terms in model.work.items():  # between two nodes
        between = min(step.live[max(0, position - 1) : position + 1])
        there = alive[group_at[position]]
        limit({c: terms.get(c, 0.0) + there.get(c, 0.0) for c in terms | there}, between, step.moments_at(position))
    return alive


def _held_at(model: _Model) -> int | None:
    """The group at the end of the forward."""
    forward = (g for g, (position, _) in enumerate(model.groups) if position < model.step.forward_count)
    return max(forward, default=None)


def _add_errors(model: _Model, max_error: float) -> None:
    """The row that limits the sum of squared errors."""
    step, program = model.step, model.program
    terms = {c: _UNITS * _share(step, step.values[v]) * o.error**2 for c, (v, o) in enumerate(model.choices)}
    terms |= _recompute_error_rows(model)
    program.errors = len(program.low)
    program.row(terms, 0, _UNITS * max_error**2 + 1e-9)


def _solution(model: _Model, alive: Sequence[_Terms], x: Any, bound: float) -> Solution:
    """The choice that the columns `x` stand for. `alive`: of `_add_peaks`; `bound`: its `bound_ms`."""
    step, groups = model.step, model.groups
    options = [KEPT] * len(step.values)
    for c, (v, option) in enumerate(model.choices):
        if x[c] > 0.5:
            options[v] = option

    def total(terms: _Terms) -> float:
        return float(sum(coefficient * x[c] for c, coefficient in terms.items()))

    added = [total(terms) for terms in alive]
    ends = [*(position for position, _ in groups[1:]), len(step.live)]
    spans = zip(added, groups, ends, strict=False)  # no position: no group
    live = [nbytes + _MIB * mib for mib, (start, _), end in spans for nbytes in step.live[start:end]]
    group_at = {position: g for g, (position, _) in enumerate(groups)}
    for (_, position), terms in model.work.items():
        needed = total(terms)
        if needed > 1e-6 and position:  # a value is packed after the position before, unpacked before this one
            at = position if position >= step.forward_count else position - 1
            beside = min(step.live[position - 1 : position + 1]) + _MIB * (added[group_at[position]] + needed)
            live[at] = max(live[at], beside)
    found = tuple(map(round, live))
    one, held_at = step.bytes_of(found), _held_at(model)
    if held_at is not None:  # what waits to be sent at the end of the forward is gone before another call
        one = one._replace(held=round(step.bytes_of(step.live).held + _MIB * x[model.deltas[held_at]]))
    ms, error = step.ms_with(options), _error(step, options)
    return Solution(tuple(options), found, one.peak(step.moments), ms, error, bound)


def _recompute_error_rows(model: _Model) -> _Terms:
    """Terms for the row of errors: those of values that are computed again from rounded ones. Adds rows for them."""
    step, program, columns = model.step, model.program, model.columns
    computed = {v: program.column() for v, own in enumerate(model.recompute) if own}
    squared = [_UNITS * option.error**2 for _, option in model.choices]

    # The most error that one source adds, capped at `limit`. Where sources exceed the cap, a value counts even if it is
    # not recomputed: too much, never too little. Without the cap it doubles with each layer of a residual network.
    limit = _CHAINED * max(squared, default=0.0)
    most: dict[int, float] = {}
    for v in sorted(range(len(columns)), key=lambda v: step.values[v].gone):  # sources first
        sums = [squared[c] + sum(most.get(u, limit) for u in model.choices[c][1].sources) for c in columns[v]]
        most[v] = min(limit, max(sums, default=0.0))
    for v in computed:
        for c in model.recompute[v]:
            option = model.choices[c][1]
            rounded = {u: {k: squared[k] for k in columns[u] if squared[k]} for u in option.sources}
            errors = {k: -rounded[u][k] for u in option.sources for k in rounded[u]}
            unless = sum(most[u] for u in option.sources)
            terms = errors | {computed[u]: -1.0 for u in option.sources if u in computed}
            program.row({computed[v]: 1.0, c: -unless} | terms, -unless, math.inf)
            # The row above is weak in the relaxed program: a value that is computed again by two thirds counts nothing,
            # as a third of the bound, an error of int4, is more than the error of float8. So there is a row for each
            # smaller error, in which larger ones count as much as it, and with a bound as small.
            for level in sorted({-error for error in errors.values()})[:-1]:
                unless = level * sum(map(bool, rounded.values()))
                terms = {k: max(error, -level) for k, error in errors.items()}
                program.row({computed[v]: 1.0, c: -unless} | terms, -unless, math.inf)
            for u in (u for u in option.exact if u in computed):
                program.row({computed[u]: 1.0, c: most[u]}, 0, most[u])
    return {c: COMPUTED * _share(step, step.values[v]) for v, c in computed.items()}


def _error(step: Step, options: Sequence[Option]) -> float:
    """The relative error of the gradient, predicted."""

    @functools.cache
    def squared(v: int) -> float:
        return options[v].error ** 2 + sum(map(squared, options[v].sources))

    total = 0.0
    for v, (value, option) in enumerate(zip(step.values, options, strict=True)):
        total += (COMPUTED if option.name == RECOMPUTE else 1) * _share(step, value) * squared(v)
    return math.sqrt(total)


def _share(step: Step, value: Value) -> float:
    """The weight of an error of `value`: the bytes that it makes wrong, as a share of all saved bytes."""
    return (value.reached_bytes or value.nbytes) / (step.weighed_bytes or step.saved_bytes or 1)


def _in_flight_terms(model: _Model, groups: list[tuple[int, int]]) -> list[_Terms]:
    """For each group of positions: the terms of the MiB that wait to be sent, and of the MiB that are back early."""
    step, program, sent, fetched = model.step, model.program, model.sent, model.fetched
    if not sent:
        return [{} for _ in groups]
    clock = list(itertools.accumulate(step.copies_ms or step.node_ms, initial=0.0))
    begins = [clock[min(position, len(clock) - 1)] for position, _ in groups]
    lasts = [*begins[1:], clock[-1]]
    in_backward = [position >= step.forward_count for position, _ in groups]
    queued = [program.column(0, 0 if backward else _IN_FLIGHT) for backward in in_backward]
    early = [program.column(0, _IN_FLIGHT if backward else 0) for backward in in_backward]
    to_host = 1e-3 * _SENT * min(step.to_host, 1e15) / _MIB  # MiB a millisecond
    to_device = 1e-3 * _BROUGHT * min(step.to_device, 1e15) / _MIB
    terms: list[_Terms] = []
    for g, (position, _) in enumerate(groups):
        queue = {queued[g]: 1.0} | sent.get(position, {})
        if g + 1 < len(groups):
            program.row({queued[g + 1]: -1.0} | queue, -math.inf, to_host * (lasts[g] - begins[g]))
        needed = {early[g + 1]: 1.0} | fetched.get(groups[g + 1][0], {}) if g + 1 < len(groups) else {}
        brought = to_device * (lasts[g] - begins[g]) if in_backward[g] else 0.0
        program.row({early[g]: -1.0} | needed, -math.inf, brought)
        terms.append(queue | needed)
    return terms


def _early_starts(step: Step) -> dict[int, int]:
    """For each value that a recomputation may read before its own first reader, the position of that read."""
    starts: dict[int, int] = {}
    for value in step.values:
        for u in (u for option in value.options for u in option.sources if step.values[u].saved):
            if value.begin < step.values[u].first:
                starts[u] = min(starts.get(u, step.values[u].first), value.begin)
    return starts


def _groups(step: Step, starts: dict[int, int]) -> list[tuple[int, int]]:
    """Runs of positions within which no option changes a byte: (first position, most bytes alive in the run)."""
    ends = {0, step.forward_count, *starts.values()}
    for value in step.values:
        ends |= {value.gone, value.first, value.last + 1, value.begin}
    firsts = sorted(p for p in ends if p < len(step.live))
    limits = [*firsts[1:], len(step.live)][: len(firsts)]
    return [(a, max(step.live[a:b])) for a, b in zip(firsts, limits, strict=True)]
