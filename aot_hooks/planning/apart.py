"""How many calls of a graph should hold the least, so that the others in a step may hold more.

      all alike     each call may hold 200 MiB, and the best that fits there holds 117 and takes 1.21 of the time
      apart         8 calls hold 64 MiB at 1.21, and 8 hold 320 at 1.04

A call gets faster in jumps as it may hold more bytes: at each jump one more value is kept instead of recomputed.
Between two jumps, equal calls leave a part of the budget unused. Only the planned graphs show how much: for equal
calls, the program predicts times that are up to 8% too short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..passes.plan import Plan
from ..steps.memory import Bytes, Moment
from .solver import solve
from .step import Apart, Step
from .versions import Version

GAIN = 0.01  # of the time of all calls: for less they are not planned apart, which takes another compilation
_TRIED, _WAYS = 16, 3  # counts that are solved for, and that are returned at most
# How much more a planned call holds than the recomputation program predicts, as a share of what it holds without hooks.
# It adds up over the calls that may hold more than the least.
_OFF = 0.02
_ROUNDING = 1e-6


def is_faster(ratio: float, than: float) -> bool:
    """Whether `ratio` is below `than` by more than the share `GAIN`. Both are times over the time without hooks."""
    return ratio < (1 - GAIN) * than


def averaged(loose: Plan, tight: Plan, version: Version, tight_peak: int) -> tuple[Plan, Bytes]:
    """The plan of the loose version with the average time of a call; and the bytes of a call, the held ones averaged.

    `tight_peak`: the most that is alive in the step while one of the tighter calls runs.
    """
    assert version.tight is not None
    own, other, counts = version.nbytes, version.tight.nbytes, (version.loose_calls, version.tight_calls)
    calls = sum(counts)

    def average(*numbers: float) -> float:
        return sum(count * number for count, number in zip(counts, numbers, strict=True)) / calls

    held = math.ceil(average(own.held, other.held))
    share = Bytes(max(own.forward, other.forward), held, max(own.backward, other.backward))
    step = loose.in_step
    if step is not None:
        beside = max(0, step.other_bytes - version.tight_calls * other.held)
        elsewhere = max(step.elsewhere_bytes, tight_peak)
        step = replace(step, calls=calls, other_bytes=beside, elsewhere_bytes=elsewhere, tight_bytes=other.held)
    return replace(loose, after_ms=average(loose.after_ms, tight.after_ms), in_step=step), share


def tried_counts(calls: int) -> list[int]:
    return sorted({round(calls * k / _TRIED) for k in range(1, _TRIED)} - {0, calls})


@dataclass(frozen=True)
class Ways:
    """The ways to have some calls of a graph, the first ones, hold the least that it can, and the others more.

    Attributes:
        step: of one call.
        tight_ms: the time of a call that holds the least.
        calls: how many there are.
        peak: bytes that the whole step may take.
        max_error: see `solve`.
        counts: a tuple for each of `tried_counts`: the number of calls that hold the least, what is alive beside one of
            the other calls, and the bytes of the step while a call that holds the least runs.
    """

    step: Step
    tight_ms: float
    calls: int
    peak: int
    max_error: float
    counts: tuple[tuple[int, tuple[Moment, ...], int], ...]

    def fastest(self) -> tuple[Apart, ...]:
        """At most `_WAYS` ways, the fastest first. Their counts lie apart: an error of the program at one count also
        affects the counts next to it."""
        off = _OFF * self.step.bytes_of(self.step.live).held
        ways = []
        for count, beside, tight_peak in self.counts:
            if tight_peak > self.peak:
                continue
            asked = self.peak - off * (self.calls - count)
            program = replace(self.step, moments=beside)
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
