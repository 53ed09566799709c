"""Chunks and tiles of tokens as means of a budget: the joint graph is planned as it is, and in parts.

      joint --------------------------> within the budget --+
        |                                                   |
        |--chunked(finer=1, then 4)---> within the budget --+--> the fastest one, or the one with the lowest peak
        |                                                   |
        '--tiled(...) of the above----> within the budget --+

Both are exact: the same sums in another order. A step that fits as it is stays as it is. Peaks and times of all are
predicted in the same way. Times are over that of the step without hooks, chunks and tiles. A form that is too slow
without hooks is neither split nor planned: that takes as long as for the joint graph as it is.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from torch.fx import GraphModule

from ..errors import BudgetError
from ..hook import KEEP
from ..passes.chunk import Chunked, chunked, with_peak
from ..passes.live_bytes import LivePoint
from ..passes.plan import Plan
from ..passes.tile import Tiled, tiled
from .assignment import Assignment
from .recipe import Recipe, Refused, warn_of_refused
from .search import OutOfReach
from .trials import Planned

log = logging.getLogger("aot_hooks")
CHUNK, TILE = "chunk", "tile"  # the names of the means in `allow`

# The tokens that `options["chunk"]` chooses are divided by these. Each is planned if those before it do not lower the
# peak, or need other means beside them.
_FINER = (1, 4)
# Ways to have layers in tiles, by their names in recipes, with the arguments of `tiled`. The first one computes nothing
# again. Each is planned if those before it need other means beside them.
_TILES: dict[str, dict[str, Any]] = {"backward": {"again": False}, "again": {}}
# The share of the step's time that tiles take at least: layers of 8B's shape take 0.08, or 0.18 if they are computed
# again. A plan that takes less is not compared with them, since to write them takes a fifth of the time of planning.
_TILES_TAKE = 0.02
# Chunks and tiles are planned if they lower the peak of the step without hooks to this share of it, or further.
# Planning a graph with them takes as long as planning it without.
_LOWER = 0.98
# The share of the time, or of the peak, by which one plan must beat another: predictions differ by more than that from
# one partition to another.
_GAIN = 0.002


class Within(Protocol):
    """Plans a joint graph. Arguments as of `partition_within`, which says what it raises."""

    def __call__(
        self, gm: GraphModule, lenient: bool, follows: bool | None = None, has_tighter: bool = False
    ) -> Planned: ...


_Made = dict[tuple[GraphModule, int | str], tuple[GraphModule, tuple[Any, ...]]]
"""Joint graphs in chunks or tiles with their rows, by the graph before and the kind: several plans share them."""


class _Form(NamedTuple):
    """A joint graph in chunks and tiles, as a recipe names them, with a row for each last layer and each part."""

    gm: GraphModule
    made: _Made
    finer: int = 0
    tiles: str = ""
    chunks: tuple[Chunked, ...] = ()
    parts: tuple[Tiled, ...] = ()

    def chunked(self, finer: int) -> _Form:
        if (self.gm, finer) not in self.made:
            self.made[self.gm, finer] = chunked(self.gm, None, finer=finer)
        gm, rows = self.made[self.gm, finer]
        return self._replace(gm=gm, finer=0 if gm is self.gm else finer, chunks=rows)

    def tiled(self, how: str) -> _Form:
        if how not in _TILES:
            raise Refused(f"it has tiles of an unknown kind, {how!r}")
        if (self.gm, how) not in self.made:
            self.made[self.gm, how] = tiled(self.gm, None, **_TILES[how])
        gm, rows = self.made[self.gm, how]
        return self._replace(gm=gm, tiles="" if gm is self.gm else how, parts=rows)


@dataclass
class _Search:
    """Plans of one joint graph, as it is and in chunks and tiles.

    Attributes:
        means: those of chunks and tiles that may be planned.
        within: plans a joint graph.
        stock: the live bytes of a joint graph without hooks.
        ms_of: the time of the nodes of a joint graph, without splitting it.
        tightest: the form whose step without hooks has the lowest peak, `lowest` bytes.
        best, taken: the best plan so far, and its form.
        chunks, parts: what is known of last layers and parts that the best plan has not in chunks or tiles.
        left: forms that were left without a search, since their programs are far over the peak. They are searched if
            no other one fits.
    """

    budget: Assignment
    means: Collection[str]
    within: Within
    stock: Callable[[GraphModule], Sequence[LivePoint]]
    ms_of: Callable[[GraphModule], float]
    joint: GraphModule
    tightest: _Form
    lowest: int
    taken: _Form
    best: Planned | None = None
    whole: Planned | None = None
    chunks: tuple[Chunked, ...] = ()
    parts: tuple[Tiled, ...] = ()
    errors: list[BudgetError] = field(default_factory=list)
    left: list[_Form] = field(default_factory=list)

    def tried(self, form: _Form, has_tighter: bool = True) -> Planned | None:
        try:
            return _with_form(self.within(form.gm, False, follows=False, has_tighter=has_tighter), form)
        except OutOfReach:
            self.left.append(form)
        except BudgetError as e:
            self.errors.append(e)
        return None

    def lowers(self, form: _Form) -> bool:
        """Whether the step without hooks has a lower peak in this form. If so, the form is the tightest."""
        peak = _peak(self.stock(form.gm))
        if peak > _LOWER * self.lowest:
            return False
        self.lowest, self.tightest = peak, form
        return True

    def is_fine_enough(self, form: _Form, has_tighter: bool = True) -> bool:
        """Take the plan of this form if it is better. Returns whether no finer one is tried.

        That is so if the plan has no hooks.
        """
        one = self.tried(form, has_tighter)
        if one is None or not _is_in_time(self.budget, _ratio(one.plan), self.whole):
            return False
        if self.best is None or _is_better(self.budget, one.plan, self.best.plan):
            self.best, self.taken = one, form
        return all(d.hook is KEEP for d in one.plan.decisions)

    def is_too_slow(self, form: _Form) -> bool:
        """Whether no plan of this form, or of a finer one, can be taken: hooks save no time by what is counted."""
        if self.best is None or self.whole is None or not self.whole.plan.before_ms:
            return False
        before_ms = self.whole.plan.before_ms
        ms = before_ms + self.ms_of(form.gm) - self.ms_of(self.joint)
        if not _is_in_time(self.budget, min(1.0, _ratio(self.whole.plan)) * ms / before_ms, self.whole):
            return True
        gain = _GAIN if _rounded_bytes(self.best.plan) else -_GAIN  # one that is as fast may round less
        return not _is_for_lowest(self.budget) and ms > (1 + gain) * self.best.plan.after_ms

    def search(self, joint: _Form) -> None:
        if CHUNK in self.means:
            for finer in _FINER:
                form = joint.chunked(finer)
                self.chunks = self.chunks or form.chunks
                if form.finer and (self.is_too_slow(form) or (self.lowers(form) and self.is_fine_enough(form))):
                    break
                if not self.chunks:
                    break
        if TILE in self.means and self.may_be_in_tiles():
            base = self.tightest
            for how in _TILES:
                form = base.tiled(how)
                if not self.parts or not any(row.done for row in form.parts):
                    self.parts = form.parts
                if not form.parts or (form.tiles and self.is_too_slow(form)):
                    break
                if form.tiles and self.lowers(form) and self.is_fine_enough(form):
                    break
        for form in reversed(self.left):  # the tightest first
            if self.best is None:
                self.is_fine_enough(form, has_tighter=False)
        if self.best is None and self.budget.lenient:
            form = self.tightest
            self.best, self.taken = _with_form(self.within(form.gm, True, follows=False), form), form

    def may_be_in_tiles(self) -> bool:
        """Whether a plan with tiles may be better than the best one so far."""
        return self.best is None or _is_for_lowest(self.budget) or _ratio(self.best.plan) > 1 + _TILES_TAKE

    def rows(self) -> tuple[tuple[Chunked, ...], tuple[Tiled, ...]]:
        """What was done with last layers and parts in the best plan; without one, in those that did not fit."""
        if self.best is None:
            return self.chunks, self.parts
        why = "the step is predicted to be better"
        chunks = self.taken.chunks or tuple(row.left(f"{why} with whole logits") for row in self.chunks)
        parts = self.taken.parts or tuple(row.left(f"{why} without tiles") for row in self.parts)
        return chunks, parts


def with_chunks(
    budget: Assignment,
    joint: GraphModule,
    within: Within,
    stock: Callable[[GraphModule], Sequence[LivePoint]],
    ms_of: Callable[[GraphModule], float],
    chosen: Collection[str] = (),
    made: _Made | None = None,
) -> Planned:
    """The plan of `joint`, or of `joint` with its loss in chunks and its layers in tiles if that is better.

    The plan has a row for each loss that is in chunks, for each one whose logits hold the peak, and, if tiles were
    tried, for each part of a layer.

    Args:
        within: plans a joint graph.
        stock: the live bytes of a joint graph without hooks.
        ms_of: the time of the nodes of a joint graph, without splitting it.
        chosen: "chunk" or "tile" if the user has chosen how `joint` has them.
        made: the graphs in chunks and tiles that other plans of `joint` have made; None: there are none.
    """
    means = {CHUNK, TILE} & {*budget.allow} - {*chosen}
    if not means:
        return within(joint, True)
    points = stock(joint)  # and merges what repeats in `joint`
    top = max(points, key=lambda point: point.live_bytes, default=None)
    peak_node = "" if top is None else top.node
    if budget.recipe is not None:
        try:
            return _as_before(budget.recipe, joint, within, peak_node)
        except Refused as e:
            warn_of_refused(budget, e)
    form = _Form(joint, {} if made is None else made)
    search = _Search(budget, means, within, stock, functools.cache(ms_of), joint, form, _peak(points), form)
    search.best = search.whole = whole = search.tried(form)
    if whole is not None and _fits_as_it_is(budget, whole.plan):
        return whole
    search.search(form)
    chunks, parts = search.rows()
    chunks = tuple(row for row in with_peak(joint, chunks, peak_node) if row.done or row.holds_peak)
    if search.best is None:
        error = min(search.errors, key=lambda e: e.least_bytes or math.inf)
        alone = tuple(row for row in parts if not row.done)
        if not chunks and not alone:
            raise error
        raise _with_rows(error, chunks, alone) from None
    for line in dict.fromkeys(map(str, (*chunks, *parts))):
        log.info("%r: %s", budget, line)
    return search.best._replace(plan=replace(search.best.plan, chunked=chunks, tiled=parts))


def _as_before(recipe: Recipe, joint: GraphModule, within: Within, peak_node: str) -> Planned:
    """The plan of a recipe, in the chunks and tiles that it names. Raises `Refused` if it can't be followed."""
    form = _Form(joint, {})
    form = form.chunked(recipe.finer) if recipe.finer else form
    form = form.tiled(recipe.tiles) if recipe.tiles else form
    found = _with_form(within(form.gm, True, follows=True), form)
    chunks = with_peak(joint, [row for row in form.chunks if row.done], peak_node)
    return found._replace(plan=replace(found.plan, chunked=chunks, tiled=form.parts))


def _with_form(planned: Planned, form: _Form) -> Planned:
    recipe = planned.plan.recipe
    if recipe is None:
        return planned
    named = replace(recipe, finer=form.finer, tiles=form.tiles)
    return planned._replace(plan=replace(planned.plan, recipe=named))


def _with_rows(error: BudgetError, chunks: Sequence[Chunked], parts: Sequence[Tiled]) -> BudgetError:
    text = str(error)
    for title, rows in (("The last layer and its loss", chunks), ("Parts of layers", parts)):
        if rows:
            text += f". {title}: {'; '.join(dict.fromkeys(map(str, rows)))}"
    found = BudgetError(text)
    found.least_bytes = error.least_bytes
    return found


def _peak(points: Sequence[LivePoint]) -> int:
    return max((point.live_bytes for point in points), default=0)


def _is_for_lowest(budget: Assignment) -> bool:
    """Whether the plan with the lowest peak is asked for, not the fastest one."""
    return budget.least or (budget.peak is None and budget.total is None)


def _fits_as_it_is(budget: Assignment, plan: Plan) -> bool:
    """Whether `plan`, which has neither chunks nor tiles, costs nothing: no time, and no rounding."""
    return not _is_for_lowest(budget) and not _ratio(plan) > 1 + _GAIN and not _rounded_bytes(plan)


def _ratio(plan: Plan) -> float:
    return plan.step_ratio if plan.before_ms else 1.0


def _rounded_bytes(plan: Plan) -> int:
    return sum(d.saved_bytes for d in plan.decisions if d.hook.lossy)


def _is_in_time(budget: Assignment, ratio: float, whole: Planned | None) -> bool:
    """Casts of parameters may take their time under any budget, so the plan `whole` may take longer than it says."""
    limit = max(budget.step_ratio, 0.0 if whole is None else _ratio(whole.plan))
    return ratio <= limit * (1 + _GAIN)


def _is_better(budget: Assignment, plan: Plan, other: Plan) -> bool:
    if _is_for_lowest(budget):
        return plan.peak_bytes < (1 - _GAIN) * other.peak_bytes
    if abs(plan.after_ms - other.after_ms) > _GAIN * other.after_ms:
        return plan.after_ms < other.after_ms
    return _rounded_bytes(plan) < _rounded_bytes(other)
