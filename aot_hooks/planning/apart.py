"""How many calls of a graph should hold the least, so that the others in a step may hold more.

      all alike     each call may hold 200 MiB, and the best that fits there holds 117 and takes 1.21 of the time
      apart         8 calls hold 64 MiB at 1.21, and 8 hold 320 at 1.04

The time of a call falls in jumps as it may hold more, where one more value is kept instead of computed again. Between
two jumps calls that are alike leave a part of the budget unused.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from .solver import solve
from .step import Moment, Step, Value

_GAIN = 0.01  # of the time of all calls: for less they are not planned apart, which takes another compilation
_TRIED = 16  # counts
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


def tight_calls(
    step: Step,
    tight_ms: float,
    calls: int,
    peak: int,
    moments: Callable[[int], Sequence[Moment]],
    max_error: float,
    tight_peak: Callable[[int], int] = lambda count: 0,
) -> int:
    """How many of `calls`, the first ones, should hold the least that `step` can, in `tight_ms`; 0: all are alike.

    Args:
        peak: bytes that the whole step may take.
        moments: what is alive beside one of the others if that many calls hold the least.
        tight_peak: the most that is alive while one of that many calls that hold the least runs.
    """
    solved = functools.partial(solve, max_error=max_error)
    off = _OFF * step.bytes_of(step.live).held

    def ms(count: int) -> float:
        asked = peak - off * (calls - count)
        found = solved(dataclasses.replace(step, moments=tuple(moments(count))), peak=asked, under=True)
        if found is None or found.peak_bytes > asked * (1 + _ROUNDING):
            return math.inf
        return count * tight_ms + (calls - count) * found.ms

    best, best_ms = 0, (1 - _GAIN) * min(ms(0), calls * tight_ms)
    for count in sorted({round(calls * k / _TRIED) for k in range(1, _TRIED)} - {0, calls}):
        if tight_peak(count) <= peak and (total := ms(count)) < best_ms:
            best, best_ms = count, total
    return best
