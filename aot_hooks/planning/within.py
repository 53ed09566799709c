"""Partition a joint graph so that its step stays within a budget.

      joint --split--> fw, bw --step_of--> Step --solve--> options --+--> nodes to recompute: the joint is split again
                                                                     +--> hooks: a policy for the rewrite
      the rewritten graphs' live bytes are above the peak: again, with less

The partitioner gets the choice as marks on the joint graph, the same that `torch.utils.checkpoint` leaves there. It
puts what is recomputed just before its first reader.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from ..errors import BudgetError, BudgetWarning, warn_user
from ..graphs.lifetimes import on_cuda
from ..graphs.nodes import storage_of
from ..graphs.roofline import has_formula
from ..graphs.saved import Boundary, SavedTensor, SavedValue, place_of
from ..hook import KEEP, Hook
from ..passes.answers import in_plans_only
from ..passes.live_bytes import LivePoint, beside_loss
from ..passes.plan import NOTHING, Decision, InStep, Plan, Unpacked
from ..passes.units import Trace, tracer
from ..settings.setting import Setting
from ..torch_private import aot
from . import by_hand, candidates, progress
from .apart import GAIN, Ways, as_data, is_faster
from .budget import Budget, fitted, mib
from .kernels import hold_kernels, join_kernels, multiply_early, split_kernels, unpack_early, write_when_made
from .options import Graphs, layers_of, step_of
from .recipe import Recipe, Refused, chosen_again, picks_of, warn_of_refused
from .recomputation import of_blocks
from .search import NEAR, Limits, Tried, nothing, search
from .solver import Solution
from .step import ALONE, COMPUTED, KEPT, RECOMPUTE, Apart, Bytes, Moment, Option, Step

log = logging.getLogger("aot_hooks")
_Planned = tuple[GraphModule, GraphModule, Plan]  # forward, backward
RECOMPUTED = Hook(RECOMPUTE, in_plans_only, in_plans_only)
"""Stands in plans for the hook of a value that the backward computes again. Never run."""

UNSEEN = 0.003  # of the peak, on CUDA: what the allocator rounds up, and kernels' small workspaces
_ERROR = 0.9  # of `max_error`, for what errors add up to beyond the estimate
_MIB = 1 << 20
_FEW = 64  # values of a graph whose calls may be planned apart: no step has many calls of a large one
_MANY = 63  # other calls of a graph of which nobody knows yet how many there are
_UNKNOWN = (Moment("forward", _MANY), Moment("backward", _MANY))


@dataclass(frozen=True, eq=False)
class _Chosen:
    """The policy of a solved budget: hooks and reasons by the saved tensor's name."""

    hooks: Mapping[str, Hook]
    reasons: Mapping[str, str]

    def __call__(self, saved: SavedTensor) -> Hook:
        return self.hooks.get(saved.name, KEEP)

    def why_kept(self, saved: SavedTensor) -> str:
        return self.reasons.get(saved.name, "budget: nothing to decide")

    why_packed = why_kept


def partition_within(
    joint: GraphModule,
    split: Callable[[], tuple[GraphModule, GraphModule]],
    without_hooks: Callable[[], tuple[tuple[LivePoint, ...], float]],
    rewrite: Callable[[GraphModule, GraphModule, Setting, Trace | None], Plan],
    setting: Setting,
    *,
    num_fwd_outputs: int,
    static_inputs: Sequence[int],
    roots: Mapping[str, str],
    fused: bool,
    launched: bool,
    unpacked: Unpacked = NOTHING,
    lenient: bool = True,
    follows: bool | None = None,
) -> _Planned:
    """The two graphs with the budget of `setting` met, and their plan with live bytes and times.

    Args:
        split: partitions `joint`; called again after marks have changed.
        without_hooks: the live bytes and the milliseconds of the graphs as torch partitions them, once `split` ran.
        rewrite: puts the hooks of a setting into two graphs, in place.
        launched: the host launches each kernel, not a CUDA graph.
        unpacked: saved tensors that no hook may round.
        lenient: if nothing fits and the budget is lenient, take the least.
        follows: whether the budget's recipe is followed. None: if it can be; otherwise a warning says why not.

    Raises:
        BudgetError: no choice stays under the peak.
        Refused: the recipe can't be followed, and `follows` is True.
    """
    budget: Any = setting.rule
    assert isinstance(budget, Budget)
    trace = tracer(fused)

    def graphs(*, drops_others: bool = False) -> Graphs:
        fw, bw = split()
        parts = num_fwd_outputs, tuple(static_inputs), roots, fused, trace, launched, unpacked
        return Graphs(fw, bw, *parts, drops_others=drops_others)

    within = functools.partial(_partition, joint, graphs, without_hooks, rewrite, setting)
    if budget.recipe is not None and follows is not False:
        try:
            return _made_again(budget, joint, graphs, without_hooks, rewrite, setting)
        except Refused as e:
            if follows:
                raise
            warn_of_refused(budget, e)
    budget = replace(budget, recipe=None)
    strict = replace(budget, lenient=False)
    ways = [strict]
    if strict.moments_at_least:  # other graphs hold their least, in place of their share of the budget
        ways.append(replace(strict, moments=strict.moments_at_least))
    exact = budget.exact
    if budget.max_error and exact and exact != budget.allow:  # the search tries few choices, and these are fewer
        ways.append(replace(ways[-1], allow=exact, max_error=0.0))
    found: _Planned | None = None
    errors: list[BudgetError] = []
    for way in ways:
        try:
            planned = within(way)
        except BudgetError as error:
            errors.append(error)
            continue
        if found is None or planned[2].peak_bytes < found[2].peak_bytes:
            found = planned
        # The least is that of all ways: more means must not find a higher one. A first version of a graph, which runs
        # until its step is known, takes the first way that lowers the peak.
        if (
            budget.peak is not None
            or budget.total is not None
            or (budget.least and found[2].packed_bytes < found[2].saved_bytes)
        ):
            break
    found = _or_apart(found, budget.apart, lambda apart: within(replace(strict, moments=apart.moments)))
    if budget.wholes:
        found = _or_by_hand(found, setting, graphs, without_hooks, rewrite)
    if found is None and budget.moments == ALONE and not budget.lenient and beside_loss(split()[0], num_fwd_outputs):
        # Whether the user keeps the logits until the backward has run, nobody knows here. The first steps are measured.
        dropping = functools.partial(graphs, drops_others=True)
        try:
            fw, bw, plan = _partition(joint, dropping, without_hooks, rewrite, setting, strict)
            found = fw, bw, replace(plan, recipe=replace(plan.recipe, drops_others=True))
            log.info("%r: outputs beside the loss count as dropped before the backward", budget)
        except BudgetError as error:
            errors.append(error)
    if found is not None:
        progress.say("compiling forward and backward")
        return found
    if budget.lenient and lenient:
        return within(budget)
    raise min(errors, key=lambda error: error.least_bytes or math.inf)


def _or_apart(found: _Planned | None, ways: Ways | None, planned: Callable[[Apart], _Planned]) -> _Planned | None:
    """The plan to take: `found`, or a faster one with some calls of the graph at their least.

    Args:
        found: the plan with equal calls; None if none fits.
        ways: how many calls may hold the least, with the time that the program predicts.
        planned: makes the plan of the other calls for one of `ways`. Raises `BudgetError` if none fits.
    """
    ratio = math.inf if found is None else found[2].step_ratio
    if ways is None or not is_faster(1.0, ratio):
        return found
    for apart in (way for way in ways.fastest() if is_faster(way.ratio, ratio)):
        with contextlib.suppress(BudgetError):
            fw, bw, plan = planned(apart)
            if plan.in_step is not None and is_faster(apart.ratio_with(plan.step_ratio), ratio):
                return fw, bw, _with_apart(plan, apart)
    return found


def _with_apart(plan: Plan, apart: Apart) -> Plan:
    """`plan` with `apart`. It is the plan of some calls; `apart` says how many other calls hold the least."""
    step = None if plan.in_step is None else replace(plan.in_step, tight_calls=apart.tight_calls)
    return replace(plan, in_step=step, recipe=replace(plan.recipe, apart=apart))


def _made_again(
    budget: Budget,
    joint: GraphModule,
    graphs: Callable[..., Graphs],
    without_hooks: Callable[[], tuple[tuple[LivePoint, ...], float]],
    rewrite: Callable[[GraphModule, GraphModule, Setting, Trace | None], Plan],
    setting: Setting,
) -> _Planned:
    """The graphs and the plan of `budget.recipe`, without a search.

    Raises:
        Refused: the recipe is for other graphs, or takes more than the budget here.
    """
    recipe, moments = budget.recipe, budget.moments
    assert recipe is not None
    if recipe.by_hand:
        found = _or_by_hand(None, setting, graphs, without_hooks, rewrite, only=recipe.by_hand)
        if found is None:
            raise Refused(f"it has {recipe.by_hand} for each call, with which this step is over the budget")
        return found
    if recipe.apart is not None:
        moments = recipe.apart.moments
    split = functools.partial(graphs, drops_others=recipe.drops_others)
    made = functools.partial(_partition, joint, split, without_hooks, rewrite, setting)
    try:
        fw, bw, plan = made(replace(budget, moments=moments))
    except Refused:
        if not budget.moments_at_least or recipe.apart is not None:
            raise
        fw, bw, plan = made(replace(budget, moments=budget.moments_at_least))
    plan = replace(plan, recipe=replace(plan.recipe, drops_others=recipe.drops_others))
    return fw, bw, plan if recipe.apart is None else _with_apart(plan, recipe.apart)


def _or_by_hand(
    found: _Planned | None,
    setting: Setting,
    graphs: Callable[[], Graphs],
    without_hooks: Callable[[], tuple[tuple[LivePoint, ...], float]],
    rewrite: Callable[[GraphModule, GraphModule, Setting, Trace | None], Plan],
    only: str = "",
) -> _Planned | None:
    """The plan to take: `found`, or a way that a user can type if the step is faster with it. See `_or_apart`.

    `only`: the name of the way that a recipe has; it is taken if the step stays under the budget.
    """
    budget: Any = setting.rule
    ratio = budget.step_ratio if found is None else _average_ratio(found[2], budget.apart)
    stock = graphs().boundary
    before, before_ms = without_hooks()
    saved = sum(v.row.nbytes for v in stock.tensors)
    ways = by_hand.Ways(
        budget.wholes,
        budget.allow,
        _ERROR * budget.max_error,
        setting.scope,
        graphs,
        lambda fw, bw, typed: rewrite(fw, bw, typed, None),
        saved,
    )
    most_ms = math.inf if only else min(before_ms * budget.step_ratio, before_ms * ratio * (1 - GAIN))
    typed = ways.fastest(most_ms, only) if budget.wholes else None
    if typed is None:
        return found
    reasons = tuple(
        replace(d, settings=(setting.key,), reason=f"budget: {typed.name}; {d.reason}") for d in typed.plan.decisions
    )
    plan = replace(typed.plan, decisions=reasons, live_before=before, live_after=typed.live)
    plan = replace(plan, before_ms=before_ms, after_ms=typed.step.call_ms, recipe=Recipe(by_hand=typed.name))
    own = bytes_of(typed.live)
    held = min(by_hand.held_on_average(whole, own, whole.peak) for whole in budget.wholes)
    plan = _in_step(plan, budget.moments, held)
    log.info("%r: %s for %d calls of a graph", budget, typed.name, budget.wholes[-1].calls)
    return typed.fw, typed.bw, plan


def _average_ratio(plan: Plan, ways: Ways | None) -> float:
    """The time of a call over that without hooks, of all calls if some of them are to hold the least."""
    tight_calls = 0 if plan.in_step is None else plan.in_step.tight_calls
    if ways is None or not tight_calls:
        return plan.step_ratio
    return (tight_calls * ways.tight_ms / ways.step.ms + (ways.calls - tight_calls) * plan.step_ratio) / ways.calls


def _partition(
    joint: GraphModule,
    split: Callable[[], Graphs],
    without_hooks: Callable[[], tuple[tuple[LivePoint, ...], float]],
    rewrite: Callable[[GraphModule, GraphModule, Setting, Trace | None], Plan],
    setting: Setting,
    budget: Budget,
) -> _Planned:
    """`partition_within` for one `budget`. Error messages name the budget of `setting`."""
    rule: Any = setting.rule
    stock = split()
    on_device = stock.fused and on_cuda(stock.bw.graph.nodes)
    moments = _UNKNOWN if budget.least and budget.moments == ALONE else budget.moments
    before, before_ms = without_hooks()
    if on_device:
        multiply_early(stock.bw)
    step, groups = step_of(stock, setting.scope, budget.allow, budget.max_error)
    again = _recomputations(step)
    step = replace(step, moments=moments)
    cross = stock.boundary
    peak = None if budget.least else _peak(budget, groups)
    less = budget.over + (int(UNSEEN * peak) if peak is not None and on_cuda(stock.bw.graph.nodes) else 0)
    casts = stock.ms() / before_ms if before_ms else 1.0  # no means that a budget chooses: they may take their time
    slowdown = max(budget.step_ratio, casts)
    limits = Limits(None if peak is None else peak - less, slowdown, _ERROR * budget.max_error, casts)
    hooks_only = [name for name in budget.allow if name != RECOMPUTE]

    def partitioned(chosen: Solution) -> tuple[Graphs, Step]:
        """The graphs that compute again the values that `chosen` recomputes, and their step."""
        again, kept = _marks(chosen, cross, groups)
        with aot.recomputed(joint, again, kept):
            graphs = split()
        if on_device:
            multiply_early(graphs.bw)
        reached = _reached(chosen, step, groups)
        own = step_of(graphs, setting.scope, hooks_only, budget.max_error, reached)[0]
        return graphs, replace(own, moments=moments, weighed_bytes=step.saved_bytes)

    def tried(graphs: Graphs, chosen: Solution, own: Step, solution: Solution) -> Tried:
        """A copy of `graphs` with the hooks of `solution`, and its plan with live bytes and times."""
        one = hooked(graphs, _policy(solution, own, again), chosen, own, solution, stock.trace)
        recipe = Recipe(picks_of(step, chosen), picks_of(own, solution))
        return replace(one, plan=replace(one.plan, recipe=recipe))

    def hooked(
        graphs: Graphs, chooses: Any, chosen: Solution, own: Step, solution: Solution, trace: Trace | None
    ) -> Tried:
        """A copy of `graphs` with the hooks that the policy or hook `chooses` asks for, and its plan.

        `trace`: None for what a user can type, which is rewritten as it is without a budget.
        """
        found = replace(graphs, fw=aot.copied(graphs.fw), bw=aot.copied(graphs.bw))
        saved = {v.row.name: storage_of(v.fw_node) for v in graphs.boundary.tensors}
        plan = rewrite(found.fw, found.bw, Setting(chooses, setting.scope), trace)
        if on_device:
            unpack_early(found.bw)
            split_kernels(found.bw)
        live = after = found.live()
        if limits.peak is not None:
            within = NEAR * limits.peak - bytes_of(live).beside(moments, "backward")
            after = found.live() if join_kernels(found.bw, live, within) else live
        plan = _with_recomputed(plan, cross, groups, saved, chosen, step)
        after_ms = found.ms(plan.transfers)
        plan = replace(
            plan,
            decisions=tuple(replace(d, settings=(setting.key,)) for d in plan.decisions),
            live_before=before,
            live_after=after,
            before_ms=before_ms,
            after_ms=after_ms,
        )
        peak_bytes = bytes_of(plan.live_after).peak(moments)
        progress.tried(peak_bytes)
        return Tried(graphs, found, plan, own, solution, live, peak_bytes, chooses)

    def typed(again: str, found: Sequence[candidates.Way], peak: float, most_ms: float) -> Iterator[Tried]:
        """The candidates `found` that may take at most `peak` bytes, and less than `most_ms`."""
        graphs, own = stock, step
        if again:
            computing = _computing_again(again, joint, split, stock, groups, most_ms)
            if computing is None:
                return
            graphs = computing
            if on_device:
                multiply_early(graphs.bw)
            if graphs.ms() >= most_ms:
                return
            own = replace(step_of(graphs, setting.scope, hooks_only, budget.max_error)[0], moments=moments)
        for way in candidates.promising(own, found, peak, most_ms):
            one = hooked(graphs, way.rule, nothing(step), own, nothing(own), None)
            reasons = (
                d if d.hook is KEEP else replace(d, reason=f"budget: {way}; {d.reason}") for d in one.plan.decisions
            )
            yield replace(one, plan=replace(one.plan, decisions=tuple(reasons), recipe=Recipe(typed=(again, way.name))))

    sends = on_cuda(stock.bw.graph.nodes)  # a CPU's copies free nothing
    means = [name for name in budget.allow if sends or name != "offload"]
    if budget.recipe is not None:
        ways = candidates.ways(means, budget.max_error)
        least = _as_before(budget.recipe, step, partitioned, tried, ways, typed)
        if not budget.least and not least.fits(limits):
            raise Refused(_over(least, limits))
        best: Tried | None = least
    else:
        best, least = search(step, limits, partitioned, tried)
        if not budget.least and not budget.wholes:  # in a step of many calls these are judged by the whole step
            best, least = _or_typed(best, least, limits, candidates.ways(means, budget.max_error), typed)
    if best is None and peak is not None and least.fits(replace(limits, peak=peak)):
        best = least  # nothing is tighter; the next steps are measured again
    if best is None:
        if budget.lenient:
            _warn(rule, peak, least)
        elif not budget.least:
            error = BudgetError(_infeasible(rule, step, limits.peak, least))
            error.least_bytes = least.peak
            raise error
        best = least
    for gm, phase in ((best.graphs.fw, "forward"), (best.graphs.bw, "backward")):
        if on_device:
            points = [point for point in best.plan.live_after if point.phase == phase]
            write_when_made(gm)
            hold_kernels(gm, points, best.peak - bytes_of(best.plan.live_after).beside(moments, phase))
    if budget.around is not None:
        best = _around(budget.around, best, rewrite, setting)
    if not budget.least:
        plan = _in_step(best.plan, moments)
    elif len(step.values) <= _FEW:
        plan = replace(best.plan, program=(as_data(step), limits.error))
    else:
        plan = best.plan
    if stock.fused:
        return best.graphs.fw, best.graphs.bw, plan
    return aot.copied(best.graphs.fw, lazily=False), aot.copied(best.graphs.bw, lazily=False), plan


def _as_before(
    recipe: Recipe,
    step: Step,
    partitioned: Callable[[Solution], tuple[Graphs, Step]],
    tried: Callable[[Graphs, Solution, Step, Solution], Tried],
    ways: Mapping[str, Sequence[candidates.Way]],
    typed: Callable[[str, Sequence[candidates.Way], float, float], Iterator[Tried]],
) -> Tried:
    """What `recipe` chose, in these graphs. Raises `Refused` if they don't have it."""
    if recipe.typed is None:
        chosen = chosen_again(step, recipe.partition)
        graphs, own = partitioned(chosen)
        return tried(graphs, chosen, own, chosen_again(own, recipe.hooks))
    again, name = recipe.typed
    found = [way for way in ways.get(again, ()) if way.name == name]
    one = next(typed(again, found, math.inf, math.inf), None)
    if one is None:
        raise Refused(f"it has {name or 'no hook'} with {again or 'nothing'} computed again, which is no way here")
    return one


def _over(found: Tried, limits: Limits) -> str:
    if limits.peak is not None and found.peak > limits.peak:
        return f"it takes {mib(found.peak)} here, more than the {mib(limits.peak)} that there are"
    return f"it takes {found.plan.step_ratio:.3f} times the time here, more than {limits.slowdown:.3f}"


def _or_typed(
    best: Tried | None,
    least: Tried,
    limits: Limits,
    ways: Mapping[str, Sequence[candidates.Way]],
    typed: Callable[[str, Sequence[candidates.Way], float, float], Iterator[Tried]],
) -> tuple[Tried | None, Tried]:
    """`best` and `least` of a search, or better ones that a user can type. `typed` tries those that may be better."""
    before_ms = least.plan.before_ms
    for again, found in ways.items():
        if limits.peak is None:
            peak, most_ms = least.peak * (1 - candidates.GAIN), before_ms * limits.slowdown
        else:
            now = before_ms * limits.slowdown if best is None else best.plan.after_ms
            peak, most_ms = float(limits.peak), (1 - candidates.GAIN) * now
            if best is not None and best.plan.step_ratio <= 1 + candidates.GAIN:
                break
        for one in typed(again, found, peak, most_ms):
            if not one.fits(limits):
                least = min(least, one, key=operator.attrgetter("peak"))
            elif limits.peak is None:
                best = least = min(best or one, one, key=operator.attrgetter("peak"))
            else:
                best = min(best or one, one, key=operator.attrgetter("plan.after_ms"))
    return best, least


def _computing_again(
    again: str,
    joint: GraphModule,
    split: Callable[[], Graphs],
    stock: Graphs,
    groups: Sequence[Sequence[SavedValue]],
    most_ms: float,
) -> Graphs | None:
    """The graphs that compute again what `again` says, see candidates.py.

    None if there is nothing like that, or if products alone take `most_ms`: a split takes as long as a compilation's.
    """
    if again == candidates.BLOCKS:
        nodes = [n for n in stock.fw.graph.nodes if n.op == "call_function"]
        block_of = dict(zip(nodes, layers_of([place_of(n, stock.roots)[0] for n in nodes]), strict=True))
        if (found := of_blocks(groups, block_of)) is None:
            return None
        names, gone, reads = found
        forward, backward = ({n.name: ms for n, ms in each.items() if has_formula(n)} for each in stock.times)
        twice = sum(ms for name, ms in forward.items() if name in names)
        if sum(forward.values()) + sum(backward.values()) + twice >= most_ms:
            return None
        kept = {v.fw_node.name for v in stock.boundary.tensors if storage_of(v.fw_node) not in gone}
        with aot.recomputed(joint, names, (kept | reads) - names):
            return split()
    with aot.recomputing_pointwise(again == candidates.POINTWISE):
        return split()


def _around(
    around: Callable[[Hook], Hook],
    found: Tried,
    rewrite: Callable[[GraphModule, GraphModule, Setting, Trace | None], Plan],
    setting: Setting,
) -> Tried:
    """`found` with graphs that use `around(hook)` in place of each lossy hook."""
    bare = found.without_hooks
    graphs = replace(bare, fw=aot.copied(bare.fw), bw=aot.copied(bare.bw))
    chooses = found.chooses
    trace = None if isinstance(chooses, Hook) else bare.trace
    if isinstance(chooses, Hook):  # a candidate
        chooses = around(chooses) if chooses.lossy else chooses
    elif isinstance(chooses, _Chosen):
        hooks = {name: around(hook) if hook.lossy else hook for name, hook in chooses.hooks.items()}
        chooses = _Chosen(hooks, chooses.reasons)
    rewrite(graphs.fw, graphs.bw, Setting(chooses, setting.scope), trace)
    return replace(found, graphs=graphs)


def bytes_of(points: Sequence[LivePoint]) -> Bytes:
    """The bytes of a call with the live bytes of `points`."""
    return Bytes.of(*([p.live_bytes for p in points if p.phase == phase] for phase in ("forward", "backward")))


def own_bytes(plan: Plan) -> Bytes:
    """The bytes of a call with `plan`, without those of others beside it, see `_in_step`."""
    found = bytes_of(plan.live_after)
    if (share := plan.in_step) is None:
        return found
    return Bytes(found.forward - share.beside_forward, share.held_bytes, found.backward - share.beside_backward)


def _in_step(plan: Plan, moments: Sequence[Moment], held: int | None = None) -> Plan:
    """`plan` with the bytes of the other calls of its step, if there are any.

    `held`: what each call holds, if its live bytes don't say it.
    """
    if moments == ALONE:
        return plan

    def bytes_of_call(points: Sequence[LivePoint]) -> Bytes:
        own = bytes_of(points)
        return own if held is None else own._replace(held=min(held, own.held))

    def shifted(points: Sequence[LivePoint]) -> tuple[LivePoint, ...]:
        own = bytes_of_call(points)
        beside = {phase: own.beside(moments, phase) for phase in ("forward", "backward")}
        return tuple(replace(p, live_bytes=p.live_bytes + beside[p.phase]) for p in points)

    own, running = bytes_of_call(plan.live_after), [m for m in moments if m.phase]
    share = InStep(
        1 + max(m.calls for m in running),
        own.held,
        max(m.nbytes for m in moments),
        own.beside(moments, "forward"),
        own.beside(moments, "backward"),
        own.beside(moments, ""),
    )
    before, after = shifted(plan.live_before), shifted(plan.live_after)
    return replace(plan, live_before=before, live_after=after, in_step=share)


def _marks(chosen: Solution, cross: Boundary, groups: Sequence[Sequence[SavedValue]]) -> tuple[set[str], set[str]]:
    """The names of the nodes to compute again, and of those to save for that."""
    options = [option for option in chosen.options if option.name == RECOMPUTE]
    gone = {storage_of(g[0].fw_node) for g, o in zip(groups, chosen.options, strict=False) if o.name == RECOMPUTE}
    again = {name for option in options for name in option.again}
    if not again:
        return set(), set()
    kept = {v.fw_node.name for v in cross.tensors if storage_of(v.fw_node) not in gone}
    return again, (kept | {name for option in options for name in option.reads}) - again


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


def _peak(budget: Budget, groups: Sequence[Sequence[SavedValue]]) -> int | None:
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


# --- what was chosen --------------------------------------------------------------------------------------------------


def _recomputations(step: Step) -> dict[str, Option]:
    """The first recompute option of each value, by its name. Options that read only saved values come first."""
    found = ((v, next((o for o in v.options if o.name == RECOMPUTE), None)) for v in step.values)
    return {name: option for value, option in found if option is not None for name in value.names}


def _policy(solution: Solution, step: Step, again: Mapping[str, Option]) -> _Chosen:
    """The policy of `solution`. `again`: the recompute option of each value, which `step` does not have."""
    hooks: dict[str, Hook] = {}
    reasons: dict[str, str] = {}
    for i, (value, option) in enumerate(zip(step.values, solution.options, strict=True)):
        reasons |= dict.fromkeys(value.names, _why(solution, step, i, again.get(value.names[0])))
        if option.hook is not None:
            hooks |= dict.fromkeys(value.names, option.hook)
    return _Chosen(hooks, reasons)


def _why(solution: Solution, step: Step, number: int, again: Option | None = None) -> str:
    """The reason for a choice: what it frees and costs, and the next best of the value's options and `again`."""
    value, option = step.values[number], solution.options[number]
    others = [o for o in (*value.options, again) if o is not None and o.name != option.name]
    best = min(others, key=lambda o: o.ms / max(1, value.nbytes - o.packed_bytes), default=None)
    offer = "nothing else can store it" if best is None else _offer(best, value.nbytes, "would free")
    if option is KEPT:
        return f"budget: kept{',' if best is None else ';'} {offer}"
    text = f"budget: {_offer(option, value.nbytes, 'frees')}"
    return text if best is None else f"{text}; next best {offer}"


def _offer(option: Option, nbytes: int, frees: str) -> str:
    return f"{option.name} {frees} {(nbytes - option.packed_bytes) / _MIB:.1f} MiB for {option.ms:.3f} ms"


def _with_recomputed(
    plan: Plan,
    stock: Boundary,
    groups: Sequence[Sequence[SavedValue]],
    saved: Mapping[str, Any],
    solution: Solution,
    step: Step,
) -> Plan:
    """`plan` with a row for each value that the backward computes again, and without hooks' bytes for values that are
    saved for that only. `saved` has the storages that cross now, by name, `stock` what crosses without a budget."""
    before = {storage_of(v.fw_node) for v in stock.tensors}
    known = {v.row.name for v in stock.tensors}
    new = {name for name, key in saved.items() if key not in before and name not in known}
    rows = [replace(d, saved_bytes=0) if d.saved.name in new else d for d in plan.decisions]
    offset = max((d.saved.storage for d in rows), default=-1) + 1
    for i, group in enumerate(groups):
        names = {value.row.name for value in group}
        if storage_of(group[0].fw_node) in saved.values() or names & saved.keys():
            continue
        chosen = solution.options[i].name == RECOMPUTE
        reason = _why(solution, step, i) if chosen else "budget: what is recomputed anyway gives it too"
        for k, value in enumerate(group):
            row = replace(value.row, storage=offset)
            rows.append(Decision(row, RECOMPUTED, reason, 0, 0 if k else row.nbytes))
        offset += 1
    return replace(plan, decisions=tuple(rows))


# --- what can't be ----------------------------------------------------------------------------------------------------


def _infeasible(budget: Budget, step: Step, peak: int | None, least: Tried) -> str:
    where = max(range(len(step.live)), key=step.live.__getitem__)
    top = f"{step.nodes[where]} ({step.places[where]})" if step.nodes else "no node"
    options = zip(least.step.values, least.solution.options, strict=True)
    kept = [v for v, option in options if option is KEPT] or least.step.values
    largest = sorted(kept, key=lambda value: -value.nbytes)[:3]
    names = ", ".join(f"'{v.names[0]}' {mib(v.nbytes)} ({v.where})" for v in largest) or "none"
    within = "" if budget.max_slowdown is None else f" within {budget.step_ratio:g} times the time"
    outside = f" beside {budget.outside}" if budget.outside else ""
    before = bytes_of(least.plan.live_before).peak(step.moments)
    calls = _calls(least.plan, step.moments) or " Other compiled calls of the step, if there are any, come on top."
    return (
        f"{budget!r}: expected a step under {mib(peak or 0)}{within}{outside}, but the least that was found takes "
        f"{mib(least.peak)}, and {least.plan.step_ratio:.3f} times the time.{calls} Without hooks it takes "
        f"{mib(before)}, the most at {top}. The largest that stay as they are: "
        f"{names}. Gradients, outputs and what a single layer works with can't be stored otherwise: raise the peak, "
        "allow more means, time or error, or take smaller batches"
    )


def _calls(plan: Plan, moments: Sequence[Moment]) -> str:
    """A sentence on the other calls of the step, for messages; "" if there are none."""
    if (share := _in_step(plan, moments).in_step) is None:
        return ""
    return (
        f" The step has {share.calls} calls of this graph at the same time, each of which then holds "
        f"{mib(share.held_bytes)}, and beside them {mib(share.other_bytes)} of other graphs, gradients and gathered "
        "parameters."
    )


def _warn(budget: Budget, peak: int | None, least: Tried) -> None:
    warn_user(
        f"aot_hooks: {budget!r}: no plan of a later step, with more calls or larger sizes, stays under the budget. "
        f"The least that was found for it takes {mib(least.peak)}, as predicted, "
        f"{mib(least.peak - (peak or 0))} more than the budget, and is taken."
        f"{_calls(least.plan, least.step.moments)} Raise the peak, or allow more means, time or error",
        BudgetWarning,
    )
