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
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Ways:
    """The ways to have some calls of a graph, the first ones, hold the least that it can, and the others more.

    This is data, a part of the budget that the graph is compiled with and so of cache keys: only a compilation solves.

    Attributes:
        step: of one call, see `as_data`.
        tight_ms: the time of a call that holds the least.
        calls: how many there are.
        peak: bytes that the whole step may take.
        max_error: see `solve`.
        counts: of calls that hold the least; each with what is alive beside one of the others, and the bytes of the
            step while a call that holds the least runs.
    """

    step: Step
    tight_ms: float
    calls: int
    peak: int
    max_error: float
    counts: tuple[tuple[int, tuple[Moment, ...], int], ...]

    @staticmethod
    def of(
        step: Step,
        tight_ms: float,
        calls: int,
        peak: int,
        max_error: float,
        moments: Callable[[int], tuple[Moment, ...]],
        tight_peak: Callable[[int], int] = lambda count: 0,
    ) -> Ways:
        """The ways with the rest of `counts` as functions of a count."""
        tried = sorted({round(calls * k / _TRIED) for k in range(1, _TRIED)} - {0, calls})
        return Ways(step, tight_ms, calls, peak, max_error, tuple((n, moments(n), tight_peak(n)) for n in tried))

    def fastest(self) -> tuple[Apart, ...]:
        """Few, the fastest first, with counts that are not near each other: where the program is wrong about one, it is
        about its neighbours."""
        off = _OFF * self.step.bytes_of(self.step.live).held
        ways = []
        for count, beside, tight_peak in self.counts:
            if tight_peak > self.peak:
                continue
            asked = self.peak - off * (self.calls - count)
            program = dataclasses.replace(self.step, moments=beside)
            found = solve(program, peak=asked, max_error=self.max_error, under=True)
            if found is None or found.peak_bytes > asked * (1 + _ROUNDING):
                continue
            ms = (count * self.tight_ms + (self.calls - count) * found.ms) / self.calls
            ways.append(Apart(beside, count, self.calls, self.tight_ms / self.step.ms, ms / self.step.ms))
        taken: list[Apart] = []
        for way in sorted(ways, key=lambda way: way.ratio):
            apart = all(abs(way.tight_calls - other.tight_calls) > self.calls // _WAYS // 2 for other in taken)
            if len(taken) < _WAYS and apart:
                taken.append(way)
        return tuple(taken)
