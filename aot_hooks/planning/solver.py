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

from .program import MOST_OVER, Program, integer_solution
from .step import COMPUTED, KEPT, RECOMPUTE, Moment, Option, Step, Value

_ROOM = 0.02  # of the peak, left free in the relaxed program: no whole choice lies near one that uses it up
_OVER = 0.01  # of the peak: being over it by as much costs as much as the whole step
_MIB = float(1 << 20)
# shares of the link's rates that the schedule of offload plans with, and most MiB that may be on their way
_SENT, _BROUGHT, _IN_FLIGHT = 0.89, 0.76, 1024.0
_UNITS = 1e4  # of squared errors, which are small beside what the solver takes for 0
_CHAINED = 4  # roundings that what is computed again from others may sum up
_TIE = 1e-6  # ms for each MiB and unit of error, so that equal plans keep more and round less


@dataclass(frozen=True)
class Solution:
    """An option for each value of a step, and what the program predicts of them.

    Attributes:
        options: in the order of the values.
        live: bytes alive at each position, with what packing there works with.
        peak_bytes: of the step, with what is alive beside the graph.
        ms: predicted time of the step.
        error: predicted relative error of the gradient.
    """

    options: tuple[Option, ...]
    live: tuple[int, ...] = field(repr=False)
    peak_bytes: int
    ms: float
    error: float


def solve(
    step: Step,
    *,
    peak: float | None,
    max_error: float = math.inf,
    max_ms: float | None = None,
    under: bool = False,
    fetch_early: bool = False,
) -> Solution | None:
    """The fastest choice whose peak is at most `peak` bytes; with `peak=None` the lowest peak that `max_ms` allows.

    If no choice stays under `peak`, or none is found, the peak of the one that is returned is above it by little: each
    byte has a price. Searching for a choice that does not exist took 20 s for 16 layers.

    Args:
        max_error: predicted relative error of the gradient.
        max_ms: the most that the step may take.
        under: return None, in a tenth of the time, if the relaxed program is over the peak already.
        fetch_early: what is read to compute another value again is fetched before all of its segment is, not before
            its own first reader. Which is right depends on the order that the graphs get.

    Returns None if no choice is within `max_error` and `max_ms`.
    """
    choices = [(v, option) for v, value in enumerate(step.values) for option in value.options]
    columns: dict[int, list[int]] = {v: [] for v in range(len(step.values))}
    for c, (v, _) in enumerate(choices):
        columns[v].append(c)
    program = Program()
    scale = 1.0 if peak is not None else 1e-6  # of time beside the peak
    allowed = 0.0 if peak is None else peak / _MIB
    price = 1.0 if peak is None else max(step.ms, 1.0) / (_OVER * max(allowed, 1.0))
    for v, o in choices:
        program.column(0, 1, scale * (o.ms + _TIE * (1 + o.error) * step.values[v].nbytes / _MIB))
    program.over = program.column(0, math.inf, price)
    if peak is not None:
        program.column(1, 1, step.device_ms)  # so that the gap is a share of the step
    longer = {c: o.host_ms - o.ms for c, (_, o) in enumerate(choices)}
    most = sum(max(0.0, *(longer[c] for c in own)) for own in columns.values() if own)
    waits: dict[int, float] = {}  # by how much the host takes longer
    if step.host_ms + most > step.device_ms:
        waits = {program.column(0, math.inf, scale): 1.0}
        program.row(longer | {c: -1.0 for c in waits}, -math.inf, step.device_ms - step.host_ms)

    starts = _early_starts(step)
    early_columns = {u: program.column(0, 1, _TIE * scale) for u in starts}
    recompute = {v: [c for c in own if choices[c][1].name == RECOMPUTE] for v, own in columns.items()}
    for own in columns.values():
        program.row(dict.fromkeys(own, 1.0), 0, 1)
    for c, (v, option) in enumerate(choices):
        for u in option.sources:
            stored = dict.fromkeys(columns[u], 1.0)
            if not step.values[u].saved:
                program.row({c: -1.0} | stored, 0, math.inf)  # saved for this
            elif u in starts:
                program.row({c: 1.0, early_columns[u]: -1.0} | stored, -math.inf, 1.0)  # unless it is kept anyway
            if u in option.exact:
                program.row({c: 1.0} | {k: 1.0 for k in columns[u] if choices[k][1].error}, 0, 1)
            if recompute[u] and step.values[u].segment != step.values[v].segment:
                program.row({c: 1.0} | dict.fromkeys(recompute[u], 1.0), 0, 1)

    change: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))  # position -> column -> MiB
    sent: dict[int, dict[int, float]] = defaultdict(dict)
    fetched: dict[int, dict[int, float]] = defaultdict(dict)
    work: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)  # alive while a value is packed, or unpacked
    for c, (v, option) in enumerate(choices):
        value = step.values[v]
        end = value.last + 1 if option.in_registers else value.first
        if end > value.gone:
            more = (option.packed_bytes - (value.nbytes if value.saved else 0)) / _MIB
            if option.in_registers:  # what was fetched
                change[value.first][c] += option.link_bytes / _MIB
                change[value.last + 1][c] -= option.link_bytes / _MIB
            change[value.gone][c] += more
            change[end][c] -= more
        if option.link_bytes:
            sent[value.gone][c] = fetched[value.first][c] = option.link_bytes / _MIB
        # while it is packed, the value is there and the packed bytes count already; unpacked, the value counts already
        packing = option.work_bytes + value.nbytes - option.packed_bytes
        if option.work_bytes:
            work[v, value.gone][c] = packing / _MIB
            work[v, value.first][c] = max(0, option.work_bytes + option.packed_bytes - value.nbytes) / _MIB
    for u, c in early_columns.items():
        change[starts[u]][c] += step.values[u].nbytes / _MIB
        change[step.values[u].first][c] -= step.values[u].nbytes / _MIB
        links = {k: choices[k][1].link_bytes / _MIB for k in columns[u] if choices[k][1].link_bytes}
        if links and fetch_early:  # what is fetched early: all that was sent, if the value is read early
            most = max(links.values())
            fetched_early = program.column(0, most)
            program.row({fetched_early: 1.0} | {k: -mib for k, mib in links.items()}, -math.inf, 0)
            program.row(links | {fetched_early: -1.0, c: most}, -math.inf, most)
            program.row({fetched_early: 1.0, c: -most}, -math.inf, 0)
            fetched[starts[u]][fetched_early] = 1.0
            fetched[step.values[u].first][fetched_early] = -1.0

    groups = _groups(step, starts)
    deltas = [program.column(-math.inf) for _ in groups]
    alive = _in_flight_terms(step, program, groups, sent, fetched)
    for g, (position, _) in enumerate(groups):
        terms = {deltas[g]: -1.0} | ({deltas[g - 1]: 1.0} if g else {}) | change.get(position, {})
        program.row(terms, 0, 0)
        alive[g] |= {deltas[g]: 1.0}
    held = step.bytes_of(step.live).held
    held_at = max((g for g, (position, _) in enumerate(groups) if position < step.forward_count), default=None)

    def limit(terms: dict[int, float], nbytes: int, moments: Sequence[Moment]) -> None:
        """At `moments`, `nbytes` with `terms` added are under the peak."""
        for moment in moments:
            row = terms | {program.over: -1.0}
            if held_at is not None:
                row[deltas[held_at]] = row.get(deltas[held_at], 0.0) + moment.calls
            program.row(row, -math.inf, allowed - (nbytes + moment.calls * held + moment.nbytes) / _MIB)

    for g, (position, most) in enumerate(groups):
        limit(alive[g], most, step.moments_at(position))
    limit({}, 0, [moment for moment in step.moments if not moment.phase])
    group_at = {position: g for g, (position, _) in enumerate(groups)}
    for (_, position), terms in work.items():  # between two nodes
        between = min(step.live[max(0, position - 1) : position + 1])
        there = alive[group_at[position]]
        limit({c: terms.get(c, 0.0) + there.get(c, 0.0) for c in terms | there}, between, step.moments_at(position))
    if math.isfinite(max_error):
        terms = {c: _UNITS * _share(step, step.values[v]) * o.error**2 for c, (v, o) in enumerate(choices)}
        terms |= _recompute_error_rows(step, program, columns, recompute)
        program.errors = len(program.low)
        program.row(terms, 0, _UNITS * max_error**2 + 1e-9)
    if max_ms is not None:
        program.row({c: o.ms for c, (_, o) in enumerate(choices)} | waits, -math.inf, max_ms - step.device_ms)

    if under and ((relaxed := program.solved(0)) is None or relaxed[program.over] > MOST_OVER):
        return None
    decided = [own for own in columns.values() if own]
    x = integer_solution(program, decided, _ROOM * allowed)
    if x is None:
        return None
    options = [KEPT] * len(step.values)
    for c, (v, option) in enumerate(choices):
        if x[c] > 0.5:
            options[v] = option

    def total(terms: dict[int, float]) -> float:
        return float(sum(coefficient * x[c] for c, coefficient in terms.items()))

    added = [total(terms) for terms in alive]
    ends = [*(position for position, _ in groups[1:]), len(step.live)]
    spans = zip(added, groups, ends, strict=False)  # no position: no group
    live = [nbytes + _MIB * mib for mib, (start, _), end in spans for nbytes in step.live[start:end]]
    for (_, position), terms in work.items():
        needed = total(terms)
        if needed > 1e-6 and position:  # a value is packed after the position before, unpacked before this one
            at = position if position >= step.forward_count else position - 1
            beside = min(step.live[position - 1 : position + 1]) + _MIB * (added[group_at[position]] + needed)
            live[at] = max(live[at], beside)
    found = tuple(map(round, live))
    one = step.bytes_of(found)
    if held_at is not None:  # what waits to be sent at the end of the forward is gone before another call
        one = one._replace(held=round(held + _MIB * x[deltas[held_at]]))
    return Solution(tuple(options), found, one.peak(step.moments), step.ms_with(options), _error(step, options))


def _recompute_error_rows(
    step: Step, program: Program, columns: dict[int, list[int]], recompute: dict[int, list[int]]
) -> dict[int, float]:
    """Terms for the row of errors: those of values that are computed again from rounded ones. Adds rows for them."""
    options = {v: step.values[v].options for v in columns}
    of_column = {c: option for v, own in columns.items() for c, option in zip(own, options[v], strict=True)}
    computed = {v: program.column() for v, own in recompute.items() if own}

    # The most error that one source adds, capped at `limit`. Where sources exceed the cap, a value counts even if it is
    # not recomputed: too much, never too little. Without the cap it doubles with each layer of a residual network.
    limit = _CHAINED * _UNITS * max((option.error**2 for option in of_column.values()), default=0.0)
    most: dict[int, float] = {}
    for v in sorted(columns, key=lambda v: step.values[v].gone):  # sources first
        sums = [_UNITS * o.error**2 + sum(most.get(u, limit) for u in o.sources) for o in options[v]]
        most[v] = min(limit, max(sums, default=0.0))
    for v, own in recompute.items():
        for c in own:
            sources = of_column[c].sources
            rounded = {
                u: {k: _UNITS * of_column[k].error ** 2 for k in columns[u] if of_column[k].error} for u in sources
            }
            errors = {k: -error for u in sources for k, error in rounded[u].items()}
            unless = sum(most[u] for u in sources)
            terms = errors | {computed[u]: -1.0 for u in sources if u in computed}
            program.row({computed[v]: 1.0, c: -unless} | terms, -unless, math.inf)
            # The row above is weak in the relaxed program: a value that is computed again by two thirds counts nothing,
            # as a third of the bound, an error of int4, is more than the error of float8. So there is a row for each
            # smaller error, in which larger ones count as much as it, and with a bound as small.
            for level in sorted({-error for error in errors.values()})[:-1]:
                unless = level * sum(map(bool, rounded.values()))
                terms = {k: max(error, -level) for k, error in errors.items()}
                program.row({computed[v]: 1.0, c: -unless} | terms, -unless, math.inf)
            for u in (u for u in of_column[c].exact if u in computed):
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


def _in_flight_terms(
    step: Step,
    program: Program,
    groups: list[tuple[int, int]],
    sent: dict[int, dict[int, float]],
    fetched: dict[int, dict[int, float]],
) -> list[dict[int, float]]:
    """For each group of positions: the terms of the MiB that wait to be sent, and of the MiB that are back early."""
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
    terms = []
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
