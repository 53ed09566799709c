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
from typing import Any

from ..passes.live_bytes import LivePoint
from ..passes.plan import Plan
from .options import Graphs
from .solver import Solution, solve
from .step import ALONE, KEPT, Step

_PARTITIONS = 2  # choices of what to recompute that are tried
_PARTITIONS_OF_MANY = 6  # likewise, for a graph that many calls of a step run: what it is off by counts as often
_LOWER = 0.92  # share of the peak that the last of these asks for: 16 calls in 3.7 GiB then took 1.19, not 1.21
_ATTEMPTS = 5  # choices of hooks for each
_ROUNDING = 1e-6  # of ratios of sums
# Near the lowest peak, the recomputation program may predict too many bytes, by up to this share. So the choice for a
# peak that is higher by it is tried as well, if it saves this share of the time.
_TOO_MUCH, _SHORTER = 0.03, 0.004
_LESS = 0.003  # of the peak that each attempt asks for less, for what changes with the choice
NEAR = 0.98  # of the peak: a plan this near to it is not improved


@dataclass(frozen=True)
class Limits:
    peak: int | None
    slowdown: float
    error: float
    casts: float = 1.0  # times the step without hooks: a step that only casts again, before anything is chosen


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


def search(
    step: Step,
    limits: Limits,
    partitioned: Callable[[Solution], tuple[Graphs, Step]],
    tried: Callable[[Graphs, Solution, Step, Solution], Tried],
) -> tuple[Tried | None, Tried]:
    """The best plan that fits, None if none was found, and the one with the lowest peak.

    Without a peak, the program's lowest one is tried first. If the graphs take clearly more than it says, it is asked
    for peaks in between, until one can't be reached.
    """
    if limits.peak is not None:
        return _search(step, limits, partitioned, tried)[:2]
    best, least, low = _search(step, limits, partitioned, tried)
    while best is not None and low < NEAR * best.peak:
        middle = (low + best.peak) // 2
        lower, other, _ = _search(step, dataclasses.replace(limits, peak=middle), partitioned, tried)
        found = [one for one in (lower, other) if one is not None and one.fits(limits) and one.peak < best.peak]
        best = least = min(found, key=operator.attrgetter("peak"), default=best)
        if lower is None:
            low = middle
    return best, least


def _search(
    step: Step,
    limits: Limits,
    partitioned: Callable[[Solution], tuple[Graphs, Step]],
    tried: Callable[[Graphs, Solution, Step, Solution], Tried],
) -> tuple[Tried | None, Tried, int]:
    """`search` for one peak, or for the program's lowest one; also the peak that the first program predicts.

    First it chooses what to recompute, with a guess of the hooks, then the hooks for the graphs that result. These
    graphs, rewritten, show the program's error at each position, which is added before the next solve. If no plan fits
    after some attempts, the lowest peak is tried.
    """
    all_tried: list[Tried] = []
    limit = None if limits.peak is None else float(limits.peak)
    max_ms = None if math.isinf(limits.slowdown) else step.ms * limits.slowdown / limits.casts
    low, high = -math.inf, math.inf  # the last limit whose graphs fitted, and the last one whose graphs did not
    reached: int | None = 0
    partitions = _PARTITIONS if step.moments == ALONE else _PARTITIONS_OF_MANY
    shorter: Solution | None = None
    known: dict[tuple[int, ...], list[Tried]] = {}  # by the options of the choice of what to recompute
    predicted = step.peak_bytes
    for attempt in range(partitions + 1):
        last = attempt == partitions
        if last and any(one.fits(limits) for one in all_tried):
            break
        # calls begin their backward with nothing fetched; the program may not know how early they read it
        early = attempt % 2 == 1 and reached is None and step.moments != ALONE
        peak = None if last else limit
        chosen = shorter or solve(step, peak=peak, max_error=limits.error, max_ms=max_ms, fetch_early=early)
        chosen = chosen or nothing(step)  # no time at all
        predicted = min(predicted, chosen.peak_bytes)
        options = tuple(map(id, chosen.options))
        if options not in known:
            graphs, own = partitioned(chosen)
            known[options] = list(_hooked(own, limits, max_ms, functools.partial(tried, graphs, chosen)))
        found = known[options]
        all_tried += found
        if last or limit is None or limits.peak is None or not found:  # none is as fast as was predicted
            break
        reached = max((one.peak for one in found if one.fits(limits)), default=None)
        if reached is None:
            high = limit
            limit -= 1.05 * _over(found, limits.peak)
        elif reached < NEAR * limits.peak and set(chosen.options) != {KEPT}:  # less to recompute may do
            low = limit
            limit += NEAR * limits.peak - reached
        elif attempt == 0 and step.moments == ALONE:
            low = limit
            limit *= 1 + _TOO_MUCH
            shorter = solve(step, peak=limit, max_error=limits.error, max_ms=max_ms, under=True)
            if shorter is None or shorter.ms > (1 - _SHORTER) * chosen.ms:
                break
            continue
        else:
            break
        shorter = None
        if not low < limit < high:
            limit = (low + high) / 2 if math.isfinite(low + high) else _LOWER * limit
        if attempt == _PARTITIONS_OF_MANY - 2:  # what is far from these may be faster
            limit = _LOWER * limits.peak

    if min((one.peak for one in all_tried), default=math.inf) > step.peak_bytes:  # the program was wrong about all
        graphs, own = partitioned(nothing(step))
        all_tried.append(tried(graphs, nothing(step), own, nothing(own)))

    return *_best_and_least(all_tried, limits), predicted


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

    An attempt tells how far the program was off. There are two ways to do better: add at each position what it was off
    there, or ask the program as it was for a lower peak. The first is wrong for other hooks, the second too careful
    elsewhere, so the faster of the two plans is tried. Where an attempt stays far below the peak, the program that it
    came from is asked for a higher one.
    """
    solved = functools.partial(solve, max_error=limits.error)
    asked = math.inf if limits.peak is None else limits.peak
    programs: list[tuple[Step, float]] = [(step, asked)]  # with the peak that each is asked for
    fitted = False
    known: dict[tuple[int, ...], Tried] = {}  # by the options, which are those of `step` in all programs
    for attempt in range(_ATTEMPTS):
        plans: list[tuple[bool, float, int, Solution]] = []
        if limits.peak is not None and (fitted or attempt < _ATTEMPTS - 1):
            for used, (program, asked) in enumerate(programs):
                if (one := solved(program, peak=asked, max_ms=max_ms, under=used > 0)) is not None:
                    plans.append((one.peak_bytes > asked + 1, one.ms, used, one))
        if not plans and (one := solved(programs[-1][0], peak=None, max_ms=max_ms)) is not None:
            plans = [(True, one.ms, len(programs) - 1, one)]
        if not plans:
            return
        *_, used, solution = min(plans, key=operator.itemgetter(0, 1, 2))
        program, asked = programs[used]
        options = tuple(map(id, solution.options))
        if options not in known:
            known[options] = tried(program, solution)
            yield known[options]
        found = known[options]
        if limits.peak is None or (fitted and not found.fits(limits)):  # with more, it no longer does
            return
        fitted = fitted or found.fits(limits)
        if attempt == 0 and solution.peak_bytes > (1 + _LESS) * limits.peak:  # out of reach
            return
        if found.fits(limits) and (found.peak >= NEAR * limits.peak or set(solution.options) == {KEPT}):
            return
        if fitted:  # the program was too careful
            programs = [(program, asked + limits.peak - found.peak)]
            continue
        if used == 0:
            over = found.peak - limits.peak
            # a program that is asked for a few bytes less gives the same plan again
            less = max(1.05 * over, (attempt + 1) * _LESS * limits.peak) if over > 0 else 0
            programs[0] = (step, asked - less)
        off = _prediction_errors(found.live, step.nodes, solution.live)
        corrected = dataclasses.replace(program, live=tuple(map(operator.add, program.live, off)))
        programs[1:] = [(corrected, limits.peak * (1 - (attempt + 1) * _LESS))]
        if max_ms is not None and found.plan.before_ms:
            max_ms -= 1.05 * max(0.0, found.plan.after_ms - found.plan.before_ms * limits.slowdown)


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
