"""The search for a plan: choices that the solver finds, tried in the graphs, until one fits and is near the peak.

      solve --> what to recompute --> graphs --solve--> hooks --tried--> live bytes, times
        ^                                       ^                            |
        '---- another limit --------------------'------ by how much it was off

The solver sees a program of numbers; what the rewritten graphs take is known only after they are rewritten.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import BudgetError
from ..passes.live_bytes import LivePoint
from ..passes.plan import Plan
from .budget import mib
from .options import Graphs
from .solver import Solution, solve
from .step import ALONE, KEPT, Step

_OUT_OF_REACH = 1.25
"""So many times the peak is the lowest one of the first program where a graph is left that has tighter forms.

The least that was found for three forms of a Llama with LoRA, as it is, in chunks, and in tiles, held 1.02, 1.37 and
0.94 times the program's lowest.
"""
_PARTITIONS = 2  # So many choices of what to recompute are tried.
_PARTITIONS_OF_MANY = 4  # Likewise, for a graph that many calls of a step run: what it is off by counts as often.
_ATTEMPTS = 4  # So many choices of hooks are tried for each of them, at most.
_ROUNDING = 1e-6  # Ratios of sums differ by this share.
_MORE = 1.05  # Times what a plan is over a limit: the next one is asked for as much less.
_LESS = 0.003  # The share of the peak that each attempt asks for less, for what changes with the choice.
NEAR = 0.98  # The share of the peak that a plan takes at least, if it is not improved.


@dataclass(frozen=True)
class Limits:
    peak: int | None
    slowdown: float
    error: float
    casts: float = 1.0  # times the step without hooks: a step that only casts again, before anything is chosen
    finely: bool = True  # look for the lowest peak between what is predicted and what was found
    has_tighter: bool = False  # other forms of the graph hold less: raise `OutOfReach` where this one is far over


class OutOfReach(BudgetError):
    """The program's lowest peak, `least_bytes`, is far over the budget. Nothing was tried."""

    def __init__(self, least_bytes: int) -> None:
        super().__init__(f"by the program of its saved tensors it takes {mib(least_bytes)} at least")
        self.least_bytes = least_bytes


@dataclass(frozen=True)
class Tried:
    without_hooks: Graphs
    graphs: Graphs
    plan: Plan
    step: Step
    solution: Solution
    live: tuple[LivePoint, ...]  # with every kernel split that can be
    peak: int  # of the step, with all of its calls
    chooses: Any = None  # the policy that chose the hooks

    def fits(self, limits: Limits) -> bool:
        in_time = not self.plan.before_ms or self.plan.step_ratio <= limits.slowdown * (1 + _ROUNDING)
        return in_time and (limits.peak is None or self.peak <= limits.peak)


class Found(NamedTuple):
    """What a search has found.

    Attributes:
        best: the best plan that fits, None if there is none.
        least: the one with the lowest peak.
        bound_ms: no choice under the peak is faster, by the relaxed program; 0 if it knows none.
        predicted: the peak that the first program predicts.
    """

    best: Tried | None
    least: Tried
    bound_ms: float = 0.0
    predicted: int = 0


def search(
    step: Step,
    limits: Limits,
    partitioned: Callable[[Solution], tuple[Graphs, Step]],
    tried: Callable[[Graphs, Solution, Step, Solution], Tried],
) -> Found:
    """The best plan that fits, and the one with the lowest peak.

    Without a peak, the program's lowest one is tried first. If the graphs take clearly more than it says, it is asked
    for peaks in between, until one can't be reached. Raises `OutOfReach` if the graph has tighter forms.
    """
    found = _search(step, limits, partitioned, tried)
    low = found.predicted
    while limits.finely and limits.peak is None and found.best is not None and low < NEAR * found.best.peak:
        best = found.best
        middle = (low + best.peak) // 2
        lower = _search(step, dataclasses.replace(limits, peak=middle), partitioned, tried)
        for one in (lower.best, lower.least):
            best = best if one is None or not one.fits(limits) else min(best, one, key=operator.attrgetter("peak"))
        found = Found(best, best)
        low = middle if lower.best is None else low
    return found


def _search(
    step: Step,
    limits: Limits,
    partitioned: Callable[[Solution], tuple[Graphs, Step]],
    tried: Callable[[Graphs, Solution, Step, Solution], Tried],
) -> Found:
    """`search` for one peak, or for the program's lowest one.

    First it chooses what to recompute, with a guess of the hooks, then the hooks for the graphs that result. These
    graphs, rewritten, show the program's error. If all are over the peak, the program is asked for a lower one, and if
    they stay far below it, for a higher one. If no plan fits, the lowest peak is tried.
    """
    asked = None if limits.peak is None else float(limits.peak)
    max_ms = None if math.isinf(limits.slowdown) else step.ms * limits.slowdown / limits.casts
    solved = functools.partial(solve, step, max_error=limits.error, max_ms=max_ms)
    low, high = -math.inf, math.inf  # the last limit whose graphs fitted, and the last one whose graphs did not
    all_tried: list[Tried] = []
    first: Solution | None = None
    known: set[tuple[int, ...]] = set()  # choices of what to recompute, by their options

    def try_for(peak: float | None) -> tuple[Solution, list[Tried]]:
        nonlocal first
        chosen = solved(peak=peak) or nothing(step)  # no time at all
        if first is None and limits.has_tighter and limits.peak and chosen.peak_bytes > _OUT_OF_REACH * limits.peak:
            raise OutOfReach(chosen.peak_bytes)
        first = first or chosen
        if (options := tuple(map(id, chosen.options))) in known:
            return chosen, []
        known.add(options)
        graphs, own = partitioned(chosen)
        found = [*_hooked(own, limits, max_ms, functools.partial(tried, graphs, chosen))]
        all_tried.extend(found)
        return chosen, found

    for _ in range(_PARTITIONS if step.moments == ALONE else _PARTITIONS_OF_MANY):
        chosen, found = try_for(asked)
        if asked is None or limits.peak is None or not found:  # none is as fast as was predicted
            break
        most = max((one.peak for one in found if one.fits(limits)), default=None)
        if most is None:
            high, asked = asked, asked - _MORE * _over(found, limits.peak)
        elif most < NEAR * limits.peak and set(chosen.options) != {KEPT}:  # less to recompute may do
            low, asked = asked, asked + NEAR * limits.peak - most
        else:
            break
        if not low < asked < high:
            asked = (low + high) / 2 if math.isfinite(low + high) else NEAR * limits.peak
    if limits.peak is not None and not any(one.fits(limits) for one in all_tried):
        try_for(None)
    if min((one.peak for one in all_tried), default=math.inf) > step.peak_bytes:  # the program was wrong about all
        graphs, own = partitioned(nothing(step))
        all_tried.append(tried(graphs, nothing(step), own, nothing(own)))
    predicted, bound_ms = (step.peak_bytes, 0.0) if first is None else (first.peak_bytes, first.bound_ms)
    return Found(*_best_and_least(all_tried, limits), bound_ms, min(step.peak_bytes, predicted))


def _over(found: Sequence[Tried], peak: int) -> int:
    """By how many bytes the recomputation program is to be asked for less, if all that was `found` is over `peak`."""
    nearest = min(found, key=operator.attrgetter("peak"))
    over = nearest.peak - peak
    # Where the program of hooks alone is over the peak, ask for what it is over. What the graphs take more than that
    # program says, its next attempts may correct.
    if nearest.solution.peak_bytes > peak:
        over = min(over, nearest.solution.peak_bytes - peak)
    return max(0, over)


def _best_and_least(found: Sequence[Tried], limits: Limits) -> tuple[Tried | None, Tried]:
    """The best of `found` that fits, and the one with the lowest peak."""
    fastest, lowest = operator.attrgetter("plan.after_ms", "peak"), operator.attrgetter("peak", "plan.after_ms")
    fitting = [one for one in found if one.fits(limits)]
    best = min(fitting, key=lowest if limits.peak is None else fastest, default=None)
    return best, min(found, key=lowest)


def nothing(step: Step) -> Solution:
    """The choice to keep every value."""
    return Solution((KEPT,) * len(step.values), step.live, step.peak_bytes, step.ms, 0.0)


def _hooked(
    step: Step, limits: Limits, max_ms: float | None, tried: Callable[[Step, Solution], Tried]
) -> Iterator[Tried]:
    """Attempts with hooks for the values of `step`, each nearer to the limits.

    An attempt tells how far the program was off at each position, which is added before the next solve. Where an
    attempt stays far below the peak, the program that it came from is asked for a higher one.
    """
    program, asked = step, math.inf if limits.peak is None else float(limits.peak)
    fitted = False
    known: set[tuple[int, ...]] = set()  # choices that were tried, by their options, which all programs share
    for attempt in range(_ATTEMPTS):
        lowest = limits.peak is None or (attempt == _ATTEMPTS - 1 and not fitted)
        solution = None
        if not lowest:
            solution = solve(program, peak=asked, max_error=limits.error, max_ms=max_ms)
        if solution is None:
            solution = solve(program, peak=None, max_error=limits.error, max_ms=max_ms)
        if solution is None or (options := tuple(map(id, solution.options))) in known:
            return
        known.add(options)
        found = tried(program, solution)
        yield found
        if limits.peak is None or (fitted and not found.fits(limits)):  # with more, it no longer does
            return
        if attempt == 0 and solution.peak_bytes > (1 + _LESS) * limits.peak:  # out of reach
            return
        if found.fits(limits):
            if found.peak >= NEAR * limits.peak or set(solution.options) == {KEPT}:
                return
            fitted, asked = True, asked + limits.peak - found.peak  # the program was too careful
            continue
        off = _prediction_errors(found.live, step.nodes, solution.live)
        program = dataclasses.replace(program, live=tuple(map(operator.add, program.live, off)))
        asked = limits.peak * (1 - (attempt + 1) * _LESS)
        if max_ms is not None and found.plan.before_ms:
            max_ms -= _MORE * max(0.0, found.plan.after_ms - found.plan.before_ms * limits.slowdown)


def _prediction_errors(points: Sequence[LivePoint], nodes: Sequence[str], predicted: Sequence[int]) -> list[int]:
    """By how many bytes `points` are above what was `predicted` at each of `nodes`.

    A node of a hook counts for the one before it in the forward, and for the one after it in the backward.
    """
    position = {node: i for i, node in enumerate(nodes)}
    most: dict[int, int] = {}
    at, waiting = 0, 0
    for point in points:
        own = position.get(f"{point.phase} {point.node}")
        if point.phase == "forward":
            at = at if own is None else own
            most[at] = max(most.get(at, 0), point.live_bytes)
        else:
            waiting = max(waiting, point.live_bytes)
            if own is not None:
                most[own], waiting = waiting, 0
    return [most.get(i, nbytes) - nbytes for i, nbytes in enumerate(predicted)]
