"""The loss in chunks as a means of a budget: the joint graph is planned with whole logits and with chunks of them.

      joint ----------------------> within the budget --+
        |                                               +--> the faster one, or the one with the lower peak
        '--chunked(finer=1, 4)----> within the budget --+

Chunks are exact: the same sums in another order. A step that fits as it is stays as it is. Peaks and times of both are
predicted in the same way. Times are over that of the step without hooks and chunks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from torch.fx import GraphModule

from ..errors import BudgetError
from ..hook import KEEP
from ..passes.chunk import Chunked, chunked, with_peak
from ..passes.live_bytes import LivePoint
from ..passes.plan import Plan
from .assignment import Assignment
from .recipe import Refused, warn_of_refused
from .trials import Planned

log = logging.getLogger("aot_hooks")
CHUNK = "chunk"  # the name of the means in `allow`

# Chunks of the size that `options["chunk"]` chooses, and chunks of a quarter of it. The second ones are planned if the
# first ones need other means beside them.
_FINER = (1, 4)
# Chunks are planned if they lower the peak of the step without hooks to this share of it, or further. Planning a graph
# with chunks takes as long as planning it without.
_LOWER = 0.98
# The share of the time, or of the peak, by which one plan must beat another: predictions differ by more than that from
# one partition to another.
_GAIN = 0.002


class Within(Protocol):
    """Plans a joint graph. Arguments as of `partition_within`, which says what it raises."""

    def __call__(self, gm: GraphModule, lenient: bool, follows: bool | None = None) -> Planned: ...


class _Tightest(NamedTuple):
    """The joint graph whose step without hooks has the lowest peak, with how fine its chunks are, and their rows."""

    gm: GraphModule
    finer: int
    rows: tuple[Chunked, ...]


@dataclass
class _Search:
    """Plans of one joint graph, without chunks and with them.

    Attributes:
        rows: of the plan that is taken: what was done with each last layer.
    """

    budget: Assignment
    joint: GraphModule
    within: Within
    tightest: _Tightest
    rows: tuple[Chunked, ...] = ()
    errors: list[BudgetError] = field(default_factory=list)

    def tried(self, gm: GraphModule, finer: int = 0) -> Planned | None:
        try:
            return _with_finer(self.within(gm, False, follows=False), finer)
        except BudgetError as e:
            self.errors.append(e)
            return None

    def best(self, whole: Planned | None, stock: Callable[[GraphModule], Sequence[LivePoint]]) -> Planned | None:
        """`whole`, the plan without chunks, or a better one with them; None if nothing fits."""
        best, lowest = whole, _peak(stock(self.joint))
        for finer in _FINER:
            gm, found = chunked(self.joint, None, finer=finer)
            self.rows = self.rows or found
            if not any(each.done for each in found) or (peak := _peak(stock(gm))) > _LOWER * lowest:
                break
            lowest, self.tightest = peak, _Tightest(gm, finer, found)
            one = self.tried(gm, finer)
            if one is None or not _is_in_time(self.budget, one.plan, whole):
                continue
            if best is None or _is_better(self.budget, one.plan, best.plan):
                best, self.rows = one, found
            if all(d.hook is KEEP for d in one.plan.decisions):
                break
        if best is None and self.budget.lenient:
            gm, finer, rows = self.tightest
            best, self.rows = _with_finer(self.within(gm, True, follows=False), finer), rows or self.rows
        if best is not None and (best is whole or not best.plan.recipe.finer):
            self.rows = tuple(row.left("the step is predicted to be better with whole logits") for row in self.rows)
        return best


def with_chunks(
    budget: Assignment,
    joint: GraphModule,
    within: Within,
    stock: Callable[[GraphModule], Sequence[LivePoint]],
) -> Planned:
    """The plan of `joint`, or of `joint` with its loss in chunks if that is better.

    The plan has a row for each loss that is in chunks, and for each one whose logits hold the peak.

    Args:
        within: plans a joint graph.
        stock: the live bytes of a joint graph without hooks.
    """
    if CHUNK not in budget.allow:
        return within(joint, True)
    top = max(stock(joint), key=lambda point: point.live_bytes, default=None)  # and merges what repeats in `joint`
    peak_node = "" if top is None else top.node
    if budget.recipe is not None:
        try:
            return _as_before(budget.recipe.finer, joint, within, peak_node)
        except Refused as e:
            warn_of_refused(budget, e)
    search = _Search(budget, joint, within, _Tightest(joint, 0, ()))
    whole = search.tried(joint)
    if whole is not None and _fits_as_it_is(budget, whole.plan):
        return whole
    best = search.best(whole, stock)
    rows = with_peak(joint, search.rows, peak_node)
    rows = tuple(row for row in rows if row.done or row.holds_peak)
    if best is None:
        error = min(search.errors, key=lambda e: e.least_bytes or math.inf)
        if not rows:
            raise error
        raise _with_rows(error, rows) from None
    for row in rows:
        log.info("%r: %s", budget, row)
    return best._replace(plan=replace(best.plan, chunked=rows))


def _as_before(finer: int, joint: GraphModule, within: Within, peak_node: str) -> Planned:
    """The plan of a recipe, whose chunks are that fine. Raises `Refused` if it can't be followed."""
    gm, rows = chunked(joint, None, finer=finer) if finer else (joint, ())
    found = _with_finer(within(gm, True, follows=True), finer)
    rows = with_peak(joint, [row for row in rows if row.done], peak_node)
    return found._replace(plan=replace(found.plan, chunked=rows))


def _with_finer(planned: Planned, finer: int) -> Planned:
    recipe = planned.plan.recipe
    if recipe is None:
        return planned
    return planned._replace(plan=replace(planned.plan, recipe=replace(recipe, finer=finer)))


def _with_rows(error: BudgetError, rows: Sequence[Chunked]) -> BudgetError:
    found = BudgetError(f"{error}. The last layer and its loss: {'; '.join(map(str, rows))}")
    found.least_bytes = error.least_bytes
    return found


def _peak(points: Sequence[LivePoint]) -> int:
    return max((point.live_bytes for point in points), default=0)


def _is_for_lowest(budget: Assignment) -> bool:
    """Whether the plan with the lowest peak is asked for, not the fastest one."""
    return budget.least or (budget.peak is None and budget.total is None)


def _fits_as_it_is(budget: Assignment, plan: Plan) -> bool:
    """Whether `plan`, which has no chunks, costs nothing: no time, and no rounding."""
    return not _is_for_lowest(budget) and not _ratio(plan) > 1 + _GAIN and not _rounded_bytes(plan)


def _ratio(plan: Plan) -> float:
    return plan.step_ratio if plan.before_ms else 1.0


def _rounded_bytes(plan: Plan) -> int:
    return sum(d.saved_bytes for d in plan.decisions if d.hook.lossy)


def _is_in_time(budget: Assignment, plan: Plan, whole: Planned | None) -> bool:
    """Casts of parameters may take their time under any budget, so the plan `whole` may take longer than it says."""
    limit = max(budget.step_ratio, 0.0 if whole is None else _ratio(whole.plan))
    return _ratio(plan) <= limit * (1 + _GAIN)


def _is_better(budget: Assignment, plan: Plan, other: Plan) -> bool:
    if _is_for_lowest(budget):
        return plan.peak_bytes < (1 - _GAIN) * other.peak_bytes
    if abs(plan.after_ms - other.after_ms) > _GAIN * other.after_ms:
        return plan.after_ms < other.after_ms
    return _rounded_bytes(plan) < _rounded_bytes(other)
