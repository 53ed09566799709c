"""One joint graph under one assignment: choices that are put into the graphs, and the best of them.

      joint --split--> fw, bw --step_of--> Step --search--> options --+--> nodes to recompute: the joint is split again
                                                                      +--> hooks: a policy for the rewrite
      the rewritten graphs' live bytes are above the peak: again, with less
      ways that a user can type: rewritten, if they may be better

The partitioner gets the choice as marks on the joint graph, the same that `torch.utils.checkpoint` leaves there. It
puts what is recomputed just before its first reader.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch.fx import GraphModule

from ..errors import BudgetError
from ..graphs.lifetimes import on_cuda
from ..graphs.nodes import storage_of
from ..graphs.saved import SavedValue
from ..hook import KEEP, Hook
from ..passes.plan import Plan
from ..torch_private import aot
from . import progress
from .assignment import UNSEEN, Assignment, fitted
from .budget import mib
from .candidates import (
    BLOCKS,
    ERROR,
    GAIN,
    NOTHING,
    WHOLE_BLOCKS,
    WHOLE_GRAPH,
    Way,
    computed_again,
    error_within,
    promising,
    ways,
)
from .in_step import bytes_of, in_step
from .kernels import hold_kernels, join_kernels, split_kernels, unpack_early, write_when_made
from .options import Graphs, Joint, in_one_part, step_of
from .reasons import Chosen, infeasible, policy_of, recomputations, warn_of_least, with_recomputed
from .recipe import Recipe, Refused, chosen_again, picks_of
from .recomputation import marks
from .search import NEAR, Found, Limits, Tried, nothing, search
from .solver import Solution
from .step import ALONE, COMPUTED, RECOMPUTE, Bytes, Moment, Step

_MANY = 63  # So many other calls of a graph are assumed while nobody knows how many there are.
_NEAR = 0.003  # A plan whose time is at most this share above the relaxed program's is good enough.
# A graph of as many values at most is also planned as one part; a block of experts has 33. At checkpointing's peak 8 of
# these are predicted at 1.16 of their step in parts, and at 1.07 as one. Larger graphs have several layers.
_ONE_PART = 64
_UNKNOWN = (Moment("forward", _MANY), Moment("backward", _MANY))


class Planned(NamedTuple):
    """A joint graph that is planned within a budget."""

    fw: GraphModule
    bw: GraphModule
    plan: Plan


def planned(joint: Joint, budget: Assignment, has_tighter: bool = False) -> Planned:
    """The graphs of `joint` and their plan within `budget`. `has_tighter` as of `partition_within`.

    Raises:
        BudgetError: nothing that was tried fits. Its message names the budget of the user.
        OutOfReach: likewise, but nothing was tried.
        Refused: the recipe of `budget` is for other graphs, or takes more here.
    """
    return Trials(joint, budget, has_tighter).planned()


class Trials:
    """Plans of one joint graph for one assignment, each put into the graphs.

    Attributes:
        stock: the graphs as torch partitions them.
        step, groups: their step, and their saved values by storage.
        limits: what a plan must stay under. `peak`: the same without what is left free for the allocator.
    """

    def __init__(self, joint: Joint, budget: Assignment, has_tighter: bool = False) -> None:
        self.joint, self.budget = joint, budget
        self.stock = stock = joint.graphs().multiplied_early
        self.on_cuda = on_cuda(stock.bw.graph.nodes)
        self.before, self.before_ms = joint.without_hooks()
        self.moments = _UNKNOWN if budget.least and budget.moments == ALONE else budget.moments
        step, self.groups = step_of(stock, joint.setting.scope, budget.allow, budget.max_error)
        self.step = replace(step, moments=self.moments)
        self.again = recomputations(step)
        self.peak = None if budget.least else _peak(budget, self.groups)
        less = budget.over + (int(UNSEEN * self.peak) if self.peak is not None and self.on_cuda else 0)
        casts = stock.ms() / self.before_ms if self.before_ms else 1.0  # no means of a budget: they may take their time
        slowdown = max(budget.step_ratio, casts)
        # how many calls there are is a guess for the first least, which soon gets another plan
        finely, peak = self.moments != _UNKNOWN, None if self.peak is None else self.peak - less
        self.limits = Limits(peak, slowdown, ERROR * budget.max_error, casts, finely, has_tighter)

    def planned(self) -> Planned:
        """The best plan, in graphs that are ready to be compiled."""
        best = self._best()
        for memory, phase in zip(best.graphs.memory, ("forward", "backward"), strict=True):
            if self._holds_kernels:
                points = [point for point in best.plan.live_after if point.phase == phase]
                write_when_made(memory)
                hold_kernels(memory, points, best.peak - bytes_of(best.plan.live_after).beside(self.moments, phase))
        if self.budget.around is not None:
            best = self._around(self.budget.around, best)
        plan = best.plan if self.budget.least else in_step(best.plan, self.moments)
        if self.stock.fused:
            return Planned(best.graphs.fw, best.graphs.bw, plan)
        return Planned(aot.copied(best.graphs.fw, lazily=False), aot.copied(best.graphs.bw, lazily=False), plan)

    def _best(self) -> Tried:
        """The plan to take."""
        budget, limits = self.budget, self.limits
        if budget.recipe is not None:
            least = self._as_before(budget.recipe)
            if not budget.least and not least.fits(limits):
                raise Refused(_over(least, limits))
            return least
        found = self._searched()
        best, least = found.best, found.least
        if not budget.wholes:  # in a step of many calls these are judged by the whole step
            best, least = self._or_typed(found)
        if best is None and self.peak is not None and least.fits(replace(limits, peak=self.peak)):
            return least  # nothing is tighter; the next steps are measured again
        if best is not None or budget.least:
            return best or least
        rule: Any = self.joint.setting.rule
        if budget.lenient:
            if not budget.tentative:
                warn_of_least(rule, self.peak, least)
            return least
        error = BudgetError(infeasible(rule, self.step, limits.peak, least))
        error.least_bytes = least.peak
        raise error

    def _searched(self) -> Found:
        """The best plan that the solver finds. A small graph of a step of many calls, such as a block, is also tried as
        one part: what is computed again in a part of the backward may be read in another one then."""
        found = search(self.step, self.limits, self._partitioned, self._tried)
        several = (
            self.limits.peak is not None and self.moments != ALONE and len({v.segment for v in self.step.values}) > 1
        )
        slow = found.best is None or found.best.plan.step_ratio > 1 + GAIN
        if several and slow and len(self.step.values) <= _ONE_PART:
            other = search(in_one_part(self.step), self.limits, self._partitioned, self._tried)
            if other.best is not None and (found.best is None or other.best.plan.after_ms < found.best.plan.after_ms):
                return other
        return found

    # --- choices in the graphs ----------------------------------------------------------------------------------------

    @property
    def _holds_kernels(self) -> bool:
        """Whether the budget says which kernels are fused."""
        return self.stock.fused and self.on_cuda

    def _fits(self, nbytes: Bytes) -> bool:
        return self.limits.peak is not None and nbytes.peak(self.moments) <= self.limits.peak

    def _step_of(self, graphs: Graphs, *reached: Any) -> Step:
        """The step of graphs that compute something again already, so that only hooks are left to choose."""
        hooks = [name for name in self.budget.allow if name != RECOMPUTE]
        own, _ = step_of(graphs, self.joint.setting.scope, hooks, self.budget.max_error, *reached)
        return replace(own, moments=self.moments)

    def _partitioned(self, chosen: Solution) -> tuple[Graphs, Step]:
        """The graphs that compute again the values that `chosen` recomputes, and their step."""
        recomputed = {i: option for i, option in enumerate(chosen.options) if option.name == RECOMPUTE}
        again, kept = marks(recomputed, self.stock.fw.graph, self.stock.boundary, self.groups)
        graphs = self.joint.computing_again(again, kept, self.stock, self._fits).multiplied_early
        own = self._step_of(graphs, _reached(chosen, self.step, self.groups))
        return graphs, replace(own, weighed_bytes=self.step.saved_bytes)

    def _tried(self, graphs: Graphs, chosen: Solution, own: Step, solution: Solution) -> Tried:
        """A copy of `graphs` with the hooks of `solution`, and its plan with live bytes and times."""
        one = self._hooked(graphs, policy_of(solution, own, self.again), chosen, own, solution)
        return replace(one, plan=replace(one.plan, recipe=Recipe(picks_of(self.step, chosen), picks_of(own, solution))))

    def _hooked(self, graphs: Graphs, chooses: Any, chosen: Solution, own: Step, solution: Solution) -> Tried:
        """A copy of `graphs` with the hooks that the policy or hook `chooses` asks for, and its plan."""
        saved = {v.row.name: storage_of(v.fw_node) for v in graphs.boundary.tensors}
        found, plan = self.joint.hooked(graphs, chooses, self._trace_of(chooses))
        if self._holds_kernels:
            unpack_early(found.memory[1])
            split_kernels(found.memory[1])
        live = after = found.live()
        if self.limits.peak is not None:
            room = NEAR * self.limits.peak - bytes_of(live).beside(self.moments, "backward")
            after = found.live() if join_kernels(found.memory[1], live, room) else live
        plan = with_recomputed(plan, self.stock.boundary, self.groups, saved, chosen, self.step)
        rows = tuple(replace(d, settings=(self.joint.setting.key,)) for d in plan.decisions)
        plan = replace(plan, before_ms=self.before_ms, after_ms=found.ms(plan.transfers))
        plan = replace(plan, decisions=rows, live_before=self.before, live_after=after)
        peak_bytes = bytes_of(after).peak(self.moments)
        progress.tried(peak_bytes)
        return Tried(graphs, found, plan, own, solution, live, peak_bytes, chooses)

    def _trace_of(self, chooses: Any) -> Any:
        """How hooks are traced. None for what a user can type, which is rewritten as it is without a budget."""
        return self.stock.trace if isinstance(chooses, Chosen) else None

    def _around(self, around: Callable[[Hook], Hook], found: Tried) -> Tried:
        """`found` with graphs that use `around(hook)` in place of each lossy hook."""
        chooses = found.chooses
        trace = self._trace_of(chooses)
        if isinstance(chooses, Hook):  # a candidate
            chooses = around(chooses) if chooses.lossy else chooses
        elif isinstance(chooses, Chosen):
            hooks = {name: around(hook) if hook.lossy else hook for name, hook in chooses.hooks.items()}
            chooses = Chosen(hooks, chooses.reasons)
        return replace(found, graphs=self.joint.hooked(found.without_hooks, chooses, trace)[0])

    # --- ways that a user can type ------------------------------------------------------------------------------------

    def _ways(self) -> list[Way]:
        # a CPU's copies free nothing
        found = ways([name for name in self.budget.allow if self.on_cuda or name != "offload"], self.budget.max_error)
        return [*found, Way(WHOLE_GRAPH)] if self.moments != ALONE and RECOMPUTE in self.budget.allow else found

    def _typed(self, again: str, found: Sequence[Way], peak: float, most_ms: float) -> Iterator[Tried]:
        """Those of `found`, which compute `again`, that may take at most `peak` bytes and less than `most_ms`."""
        graphs, own = self.stock, self.step
        if again != NOTHING:
            computing = computed_again(again, self.joint, self.stock, self._fits, most_ms)
            if computing is None or computing.multiplied_early.ms() >= most_ms:
                return
            graphs = computing.multiplied_early
            own = self._step_of(graphs)
        fitting: set[bool] = set()  # `Way.sends` of those that fit and round. The first is the fastest: forms come so
        for way in promising(own, found, peak, most_ms):
            if way.rounds and way.sends in fitting:
                continue
            one = self._hooked(graphs, way.rule(), nothing(self.step), own, nothing(own))
            if again == BLOCKS and error_within(one.plan, way, self.stock) > self.limits.error:
                continue
            rows = one.plan.decisions
            rows = tuple(d if d.hook is KEEP else replace(d, reason=f"budget: {way}; {d.reason}") for d in rows)
            if way.rounds and self.limits.peak is not None and one.fits(self.limits):
                fitting.add(way.sends)
            yield replace(one, plan=replace(one.plan, decisions=rows, recipe=Recipe(typed=(again, way.name))))

    def _or_typed(self, found: Found) -> tuple[Tried | None, Tried]:
        """The best and the least of a search, or better ones that a user can type.

        The relaxed program has all means but blocks that are computed again. So where the best is near its bound only
        these are tried. What holds the least in a step of many calls holds no more than the inputs of a call.
        """
        limits, best, least = self.limits, found.best, found.least
        near = best is not None and best.plan.after_ms <= (1 + _NEAR) * found.bound_ms
        blocks = [WHOLE_BLOCKS, WHOLE_GRAPH] if self.budget.least else [BLOCKS, WHOLE_BLOCKS, WHOLE_GRAPH]
        tried = [way for way in self._ways() if way.again in blocks or not (near or self.budget.least)]
        for again, several in itertools.groupby(tried, operator.attrgetter("again")):
            if limits.peak is None:
                peak, most_ms = least.peak * (1 - GAIN), self.before_ms * limits.slowdown
            else:
                now = self.before_ms * limits.slowdown if best is None else best.plan.after_ms
                peak, most_ms = float(limits.peak), (1 - GAIN) * now
                if best is not None and best.plan.step_ratio <= 1 + GAIN:
                    break
            for one in self._typed(again, [*several], peak, most_ms):
                if not one.fits(limits):
                    least = min(least, one, key=operator.attrgetter("peak"))
                elif limits.peak is None:
                    best = least = min(best or one, one, key=operator.attrgetter("peak"))
                else:
                    best = min(best or one, one, key=operator.attrgetter("plan.after_ms"))
        return best, least

    def _as_before(self, recipe: Recipe) -> Tried:
        """What `recipe` chose, in these graphs. Raises `Refused` if they don't have it."""
        if recipe.typed is None:
            chosen = chosen_again(self.step, recipe.partition)
            graphs, own = self._partitioned(chosen)
            return self._tried(graphs, chosen, own, chosen_again(own, recipe.hooks))
        again, name = recipe.typed
        found = [way for way in self._ways() if (way.again, way.name) == recipe.typed]
        one = next(self._typed(again, found, math.inf, math.inf), None)
        if one is None:
            raise Refused(f"it has {name or 'no hook'} with {again or 'nothing'} computed again, which is no way here")
        return one


def _over(found: Tried, limits: Limits) -> str:
    if limits.peak is not None and found.peak > limits.peak:
        return f"it takes {mib(found.peak)} here, more than the {mib(limits.peak)} that there are"
    return f"it takes {found.plan.step_ratio:.3f} times the time here, more than {limits.slowdown:.3f}"


def _reached(chosen: Solution, step: Step, groups: Sequence[Sequence[SavedValue]]) -> dict[Any, int]:
    """For each storage the bytes of all values that are computed again from it, weighted by `COMPUTED`."""
    readers: dict[int, list[int]] = defaultdict(list)
    for v, option in enumerate(chosen.options):
        for source in option.sources:
            readers[source].append(v)

    @functools.cache
    def reached(v: int) -> int:
        return sum(COMPUTED * step.values[reader].nbytes + reached(reader) for reader in readers[v])

    return {storage_of(group[0].fw_node): reached(v) for v, group in enumerate(groups)}


def _peak(budget: Assignment, groups: Sequence[Sequence[SavedValue]]) -> int | None:
    """The peak in bytes. None: the lowest is asked for, or there is nothing to decide."""
    if budget.peak_bytes is not None:
        return budget.peak_bytes
    found = fitted(budget, (v.row.device for group in groups for v in group)).peak_bytes
    if budget.peak == "fit" and groups and found is None:
        raise BudgetError(
            'budget("fit") asks a CUDA device for its free memory, and the saved tensors are on none; '
            "give the peak in bytes"
        )
    return found
