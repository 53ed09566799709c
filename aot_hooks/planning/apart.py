"""How many calls of a graph should hold the least, so that the others in a step may hold more.

      all alike     each call may hold 200 MiB, and the best that fits there holds 117 and takes 1.21 of the time
      apart         8 calls hold 64 MiB at 1.21, and 8 hold 320 at 1.04

The time of a call falls in jumps as it may hold more, where one more value is kept instead of computed again. Between
two jumps calls that are alike leave a part of the budget unused. How much is known when their graphs are planned: the
program takes calls that are alike to be faster than their graphs turn out, as much as by 8%.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .solver import solve
from .step import Apart, Moment, Step, Value

_GAIN = 0.01  # of the time of all calls: for less they are not planned apart, which takes another compilation
_TRIED, _WAYS = 16, 3  # counts that are solved for, and that are returned at most
# Of what a call holds without hooks: by so much plans of Llama-3-8B's blocks hold more than the first program says, the
# one for what to compute again. The more calls are alike, the more this comes to.
_OFF = 0.02
_ROUNDING = 1e-6


def as_data(step: Step) -> Step:
    """`step` to be stored: what `solve` reads of it, without hooks and without names of the program."""

    def bare(value: Value) -> Value:
        options = tuple(dataclasses.replace(o, hook=None, again=(), reads=()) for o in value.options)
        return dataclasses.replace(value, names=(), where="", options=options)

    return dataclasses.replace(step, values=tuple(map(bare, step.values)), nodes=(), places=())


def is_faster(ratio: float, than: float) -> bool:
    """Whether calls that are planned apart, in `ratio` of the time without hooks, are faster enough than others."""
    return ratio < (1 - _GAIN) * than


def ways_apart(
    step: Step,
    tight_ms: float,
    calls: int,
    peak: int,
    moments: Callable[[int], tuple[Moment, ...]],
    max_error: float,
    tight_peak: Callable[[int], int] = lambda count: 0,
) -> tuple[Apart, ...]:
    """The fastest ways to have some of `calls`, the first ones, hold the least that `step` can, in `tight_ms`.

    Args:
        peak: bytes that the whole step may take.
        moments: given how many calls hold the least, what is alive beside one of the others.
        tight_peak: given the same, the bytes of the step while a call that holds the least runs.

    Returns few, the fastest first, with numbers that are not near each other: where the program is wrong about one, it
    is about its neighbours.
    """
    off = _OFF * step.bytes_of(step.live).held
    ways = []
    for count in sorted({round(calls * k / _TRIED) for k in range(1, _TRIED)} - {0, calls}):
        if tight_peak(count) > peak:
            continue
        beside, asked = moments(count), peak - off * (calls - count)
        found = solve(dataclasses.replace(step, moments=beside), peak=asked, max_error=max_error, under=True)
        if found is None or found.peak_bytes > asked * (1 + _ROUNDING):
            continue
        ms = count * tight_ms + (calls - count) * found.ms
        ratios = round(tight_ms / step.ms, 3), round(ms / (calls * step.ms), 3)  # in keys of caches
        ways.append(Apart(beside, count, calls, *ratios))
    taken: list[Apart] = []
    for way in sorted(ways, key=lambda way: way.ratio):
        if len(taken) < _WAYS and all(
            abs(way.tight_calls - other.tight_calls) > calls // _WAYS // 2 for other in taken
        ):
            taken.append(way)
    return tuple(taken)
