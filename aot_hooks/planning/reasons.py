"""What was chosen, in words: the policy of a solved budget, rows of what is computed again, and why nothing fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import BudgetWarning, warn_user
from ..graphs.nodes import storage_of
from ..graphs.saved import Boundary, SavedTensor, SavedValue
from ..hook import KEEP, Hook
from ..passes.plan import Decision, Plan, stand_in
from .assignment import Assignment
from .budget import mib
from .in_step import bytes_of, in_step
from .search import Tried
from .solver import Solution
from .step import KEPT, RECOMPUTE, Moment, Option, Step

RECOMPUTED = stand_in(RECOMPUTE)
_MIB = 1 << 20


@dataclass(frozen=True, eq=False)
class Chosen:
    """The policy of a solved budget: hooks and reasons by the saved tensor's name."""

    hooks: Mapping[str, Hook]
    reasons: Mapping[str, str]

    def __call__(self, saved: SavedTensor) -> Hook:
        return self.hooks.get(saved.name, KEEP)

    def why_kept(self, saved: SavedTensor) -> str:
        return self.reasons.get(saved.name, "budget: nothing to decide")

    why_packed = why_kept


def recomputations(step: Step) -> dict[str, Option]:
    """The first recompute option of each value, by its name. Options that read only saved values come first."""
    found = ((v, next((o for o in v.options if o.name == RECOMPUTE), None)) for v in step.values)
    return {name: option for value, option in found if option is not None for name in value.names}


def policy_of(solution: Solution, step: Step, again: Mapping[str, Option]) -> Chosen:
    """The policy of `solution`. `again`: the recompute option of each value, which `step` does not have."""
    hooks: dict[str, Hook] = {}
    reasons: dict[str, str] = {}
    for i, (value, option) in enumerate(zip(step.values, solution.options, strict=True)):
        reasons |= dict.fromkeys(value.names, _why(solution, step, i, again.get(value.names[0])))
        if option.hook is not None:
            hooks |= dict.fromkeys(value.names, option.hook)
    return Chosen(hooks, reasons)


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


def with_recomputed(
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


def infeasible(budget: Assignment, step: Step, peak: int | None, least: Tried) -> str:
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
    if (share := in_step(plan, moments).in_step) is None:
        return ""
    return (
        f" The step has {share.calls} calls of this graph at the same time, each of which then holds "
        f"{mib(share.held_bytes)}. Other graphs, a loss outside of graphs, gathered parameters and gradients "
        f"that the step makes hold up to {mib(share.other_bytes)}, maybe later."
    )


def warn_of_least(budget: Assignment, peak: int | None, least: Tried) -> None:
    warn_user(
        f"aot_hooks: {budget!r}: no plan of a later step, with more calls or larger sizes, stays under the budget. "
        f"The least that was found for it takes {mib(least.peak)}, as predicted, "
        f"{mib(least.peak - (peak or 0))} more than the budget, and is taken."
        f"{_calls(least.plan, least.step.moments)} Raise the peak, or allow more means, time or error",
        BudgetWarning,
    )
