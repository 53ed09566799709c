"""Partition a joint graph so that its step stays within a budget: which plans are made, in which order, and the best.

a recipe                 the plan that was made before; refused, if it does not fit here
all calls alike          with what other graphs may hold | with their least | with exact means only
calls apart              some calls of the graph hold the least, so that the others may hold more
ways of a whole step     what a user can type, with copies that all calls of the step hide
outputs dropped          if nothing fits: as if the user kept no output but the loss
the least                if nothing fits, and the budget is lenient
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..errors import BudgetError
from ..passes.live_bytes import beside_loss
from ..passes.plan import Plan
from . import progress
from .apart import Ways as ApartWays
from .apart import is_faster
from .assignment import Assignment, TightCalls
from .candidates import GAIN, Simulation
from .in_step import bytes_of, in_step
from .options import Joint
from .recipe import Recipe, Refused, warn_of_refused
from .search import OutOfReach
from .simulated import held_on_average
from .step import ALONE, Apart
from .trials import Planned, Trials, planned

log = logging.getLogger("aot_hooks")
_FEW = 64  # So many values a graph has at most whose calls are planned apart: no step has many calls of a large one.


def partition_within(
    joint: Joint, *, lenient: bool = True, follows: bool | None = None, has_tighter: bool = False
) -> Planned:
    """The two graphs of `joint` with the budget of its setting met, and their plan with live bytes and times.

    Args:
        lenient: if nothing fits and the budget is lenient, take the least.
        follows: whether the budget's recipe is followed. None: if it can be; otherwise a warning says why not.
        has_tighter: the graph has tighter forms, so that it may be left where its program is far over the peak.

    Raises:
        BudgetError: no choice stays under the peak.
        OutOfReach: likewise, but nothing was tried.
        Refused: the recipe can't be followed, and `follows` is True.
    """
    budget: Any = joint.setting.rule
    assert isinstance(budget, Assignment)
    if budget.recipe is not None and follows is not False:
        try:
            return _made_again(joint, budget, budget.recipe)
        except Refused as e:
            if follows:
                raise
            warn_of_refused(budget, e)
    alone = budget.moments == ALONE and not budget.wholes  # no other call counts, and no way of a whole step is tried
    budget = replace(budget, recipe=None)
    strict = replace(budget, lenient=False)
    errors: list[BudgetError] = []
    found = _alike(joint, strict, errors, has_tighter and alone)
    if budget.apart is not None and (found is None or is_faster(1.0, found.plan.step_ratio)):
        found = _or_apart(
            found, _apart(joint, strict), lambda way: planned(joint, replace(strict, moments=way.moments))
        )
    if budget.wholes:
        found = _or_in_step(found, joint, budget)
    if found is None:
        found = _dropping(joint, budget, errors)
    if found is not None:
        progress.say("compiling forward and backward")
        return found
    if budget.lenient and lenient:
        return planned(joint, budget)
    raise min(errors, key=lambda error: error.least_bytes or math.inf)


def _alike(joint: Joint, budget: Assignment, errors: list[BudgetError], has_tighter: bool) -> Planned | None:
    """The plan with all calls of the graph alike; None if none fits. Errors of what was tried go to `errors`."""
    ways = [budget]
    if budget.moments_at_least:  # other graphs hold their least, in place of their share of the budget
        ways.append(replace(budget, moments=budget.moments_at_least))
    if budget.max_error and budget.exact not in ((), budget.allow):  # the search tries few choices; these are fewer
        ways.append(replace(ways[-1], allow=budget.exact, max_error=0.0))
    found: Planned | None = None
    for way in ways:
        try:
            one = planned(joint, way, has_tighter)
        except OutOfReach:
            raise  # other ways have fewer means
        except BudgetError as error:
            errors.append(error)
            continue
        if found is None or one.plan.peak_bytes < found.plan.peak_bytes:
            found = one
        # The least is that of all ways: more means must not find a higher one. A first version of a graph, which runs
        # until its step is known, takes the first way that lowers the peak.
        lowers = budget.least and found.plan.packed_bytes < found.plan.saved_bytes
        if budget.peak is not None or budget.total is not None or lowers:
            break
    return found


# --- calls apart ------------------------------------------------------------------------------------------------------


def _or_apart(found: Planned | None, ways: Sequence[Apart], made: Callable[[Apart], Planned]) -> Planned | None:
    """The plan to take: `found`, or a faster one with some calls of the graph at their least.

    Args:
        found: the plan with equal calls; None if none fits.
        ways: how many calls may hold the least, with the time that the program predicts.
        made: makes the plan of the other calls for one of `ways`. Raises `BudgetError` if none fits.
    """
    ratio = math.inf if found is None else found.plan.step_ratio
    for apart in (way for way in ways if is_faster(way.ratio, ratio)):
        with contextlib.suppress(BudgetError):
            one = made(apart)
            if one.plan.in_step is not None and is_faster(apart.ratio_with(one.plan.step_ratio), ratio):
                return _with_apart(one, apart)
    return found


def _apart(joint: Joint, budget: Assignment) -> Sequence[Apart]:
    """The ways to have some calls hold the least, the fastest by the program first. Ratios are over `before_ms`."""
    tight, trials = budget.apart, Trials(joint, budget)
    if tight is None or len(trials.step.values) > _FEW or not trials.before_ms:
        return ()
    step, casts = trials.step, trials.step.ms / trials.before_ms
    ways = ApartWays(step, tight.ms, tight.calls, tight.peak, trials.limits.error, tight.counts)
    return [way._replace(tight_ratio=casts * way.tight_ratio, ratio=casts * way.ratio) for way in ways.fastest()]


def _with_apart(made: Planned, apart: Apart) -> Planned:
    """`made` with `apart`. It is the plan of some calls; `apart` says how many other calls hold the least."""
    plan = made.plan
    step = None if plan.in_step is None else replace(plan.in_step, tight_calls=apart.tight_calls)
    return made._replace(plan=replace(plan, in_step=step, recipe=replace(plan.recipe, apart=apart)))


def _average_ratio(plan: Plan, tight: TightCalls | None) -> float:
    """The time of a call over that without hooks, of all calls if some of them are to hold the least."""
    count = 0 if plan.in_step is None else plan.in_step.tight_calls
    if tight is None or not count:
        return plan.step_ratio
    return (count * tight.ms / plan.before_ms + (tight.calls - count) * plan.step_ratio) / tight.calls


# --- ways of a whole step, and recipes --------------------------------------------------------------------------------


def _or_in_step(
    found: Planned | None, joint: Joint, budget: Assignment, only: tuple[str, str] | None = None
) -> Planned | None:
    """The plan to take: `found`, or a way that a user can type if the step is faster with it.

    `only`: the way that a recipe has; it is taken if the step stays under the budget.
    """
    stock = joint.graphs()
    before, before_ms = joint.without_hooks()
    ratio = budget.step_ratio if found is None else _average_ratio(found.plan, budget.apart)
    most_ms = math.inf if only else before_ms * min(budget.step_ratio, ratio * (1 - GAIN))
    simulation = Simulation(budget.wholes, budget.moments, budget.allow, budget.max_error, joint, stock)
    typed = simulation.fastest(most_ms, only) if budget.wholes else None
    if typed is None:
        return found
    rows = tuple(
        replace(d, settings=(joint.setting.key,), reason=f"budget: {typed.way}; {d.reason}")
        for d in typed.plan.decisions
    )
    recipe = Recipe(typed=(typed.way.again, typed.way.name), across_graphs=True)
    plan = replace(typed.plan, decisions=rows, live_before=before, live_after=typed.live, recipe=recipe)
    plan = replace(plan, before_ms=before_ms, after_ms=typed.step.call_ms)
    # what decides at run time what it sends fills the budget
    most = [whole.peak if typed.call.items else min(whole.peak, typed.step.peak) for whole in budget.wholes]
    held = min(map(held_on_average, budget.wholes, [bytes_of(typed.live)] * len(most), most))
    log.info("%r: %s for %d calls of a graph", budget, typed.way, budget.wholes[-1].calls)
    return Planned(typed.fw, typed.bw, in_step(plan, budget.moments, held))


def _made_again(joint: Joint, budget: Assignment, recipe: Recipe) -> Planned:
    """The graphs and the plan of `recipe`, without a search.

    Raises:
        Refused: the recipe is for other graphs, or takes more than the budget here.
    """
    if recipe.across_graphs:
        found = _or_in_step(None, joint, budget, recipe.typed)
        if found is None:
            way = " with ".join(filter(None, reversed(recipe.typed or ())))
            raise Refused(f"it has {way} for each call, with which this step is over the budget")
        return found
    joint = _with_dropped(joint) if recipe.drops_others else joint
    moments = budget.moments if recipe.apart is None else recipe.apart.moments
    try:
        made = planned(joint, replace(budget, moments=moments))
    except Refused:
        if not budget.moments_at_least or recipe.apart is not None:
            raise
        made = planned(joint, replace(budget, moments=budget.moments_at_least))
    plan = replace(made.plan, recipe=replace(made.plan.recipe, drops_others=recipe.drops_others))
    made = made._replace(plan=plan)
    return made if recipe.apart is None else _with_apart(made, recipe.apart)


# --- outputs beside the loss ------------------------------------------------------------------------------------------


def _dropping(joint: Joint, budget: Assignment, errors: list[BudgetError]) -> Planned | None:
    """The plan if the user keeps no output but the loss; None if there are no others, or none fits.

    Whether the logits are kept until the backward has run, nobody knows here. The first steps are measured.
    """
    if budget.moments != ALONE or budget.lenient:
        return None
    if not beside_loss(joint.graphs().fw, joint.parts["num_fwd_outputs"]):
        return None
    try:
        made = planned(_with_dropped(joint), budget)
    except BudgetError as error:
        errors.append(error)
        return None
    log.info("%r: outputs beside the loss count as dropped before the backward", budget)
    return made._replace(plan=replace(made.plan, recipe=replace(made.plan.recipe, drops_others=True)))


def _with_dropped(joint: Joint) -> Joint:
    return replace(joint, drops_others=True)
