"""Partition a joint graph so that its step stays within a budget.

      joint --split--> fw, bw --step_of--> Step --solve--> options --+--> nodes to recompute: the joint is split again
                                                                     +--> hooks: a policy for the rewrite
      the rewritten graphs' live bytes are above the peak: again, with less

The partitioner gets the choice as marks on the joint graph, the same that `torch.utils.checkpoint` leaves there. It
puts what is recomputed just before its first reader.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from ..errors import BudgetError
from ..graphs.nodes import storage_of
from ..graphs.roofline import step_ms
from ..graphs.saved import Boundary, SavedTensor, SavedValue
from ..hook import KEEP, Hook
from ..offloading.transfers import COPIES
from ..passes.plan import Decision, Plan
from ..settings.setting import Setting
from ..torch_private import aot
from .budget import Budget
from .options import Graphs, chains, step_of
from .solver import Solution, solve
from .step import KEPT, Option, Step

__all__ = ["RECOMPUTED", "partition_within"]


def _recompute(x: Any) -> Any:
    raise AssertionError("stands in plans only")


RECOMPUTED = Hook("recompute", _recompute, _recompute)
"""Stands in plans for the hook of a value that the backward computes again. Never run."""

_ATTEMPTS = 4
_ROUNDING = 1e-6  # of ratios of sums
_FIT = 0.95  # share of the device's free memory that "fit" may take
_MIB = 1 << 20

Split = Callable[[], tuple[GraphModule, GraphModule]]


@dataclass(frozen=True)
class _Chosen:
    """The policy of a solved budget: hooks and reasons by the saved tensor's name."""

    hooks: tuple[tuple[str, Hook], ...]
    reasons: tuple[tuple[str, str], ...]

    @property
    def looks_at_modules(self) -> bool:
        return False

    @functools.cached_property
    def _by_name(self) -> tuple[dict[str, Hook], dict[str, str]]:
        return dict(self.hooks), dict(self.reasons)

    def __call__(self, saved: SavedTensor) -> Hook:
        return self._by_name[0].get(saved.name, KEEP)

    def why_kept(self, saved: SavedTensor) -> str:
        return self._by_name[1].get(saved.name, "budget: nothing to decide")

    why_packed = why_kept


def partition_within(
    joint: GraphModule,
    split: Split,
    rewrite: Callable[[GraphModule, GraphModule, Setting], Plan],
    setting: Setting,
    *,
    num_fwd_outputs: int,
    static_inputs: Sequence[int],
    roots: Mapping[str, str],
    fused: bool,
) -> tuple[GraphModule, GraphModule, Plan]:
    """The two graphs with the budget of `setting` met, and their plan with live bytes and times.

    Args:
        split: partitions `joint`; called again after marks have changed.
        rewrite: puts the hooks of a setting into two graphs, in place.

    Raises:
        BudgetError: no choice stays under the peak.
    """
    budget: Any = setting.rule
    assert isinstance(budget, Budget)

    def read(fw: GraphModule, bw: GraphModule) -> Graphs:
        return Graphs(fw, bw, num_fwd_outputs, tuple(static_inputs), roots, fused)

    graphs = read(*split())  # stays as it is, for chains
    step, groups = step_of(graphs, setting.scope, budget.allow, budget.max_error)
    before, before_ms = graphs.live(), step_ms(graphs.fw, graphs.bw, fused)
    cross = graphs.boundary()
    peak = _peak(budget, cross, groups)
    slowest = math.inf if budget.max_slowdown is None else budget.max_slowdown

    def tried(solution: Solution) -> _Tried:
        """What comes of `solution`: graphs with its hooks, and a plan with its live bytes and times."""
        chosen = {i for i, option in enumerate(solution.options) if option.name == "recompute"}
        with aot.recomputed(joint, *chains(cross, groups, chosen)) if chosen else contextlib.nullcontext():
            found = read(*split())
        saved = {v.row.name: storage_of(v.fw_node) for v in found.boundary().tensors}
        plan = rewrite(found.fw, found.bw, Setting(_policy(solution, step), setting.scope))
        plan = _with_recomputed(plan, cross, groups, saved, solution, step)
        after_ms = step_ms(found.fw, found.bw, fused, COPIES) + sum(t.placement.stall_ms for t in plan.transfers)
        decisions = tuple(dataclasses.replace(d, settings=(setting.key,)) for d in plan.decisions)
        plan = dataclasses.replace(plan, decisions=decisions, live_before=before, live_after=found.live())
        return _Tried(found, dataclasses.replace(plan, before_ms=before_ms, after_ms=after_ms), solution)

    def solved(limit: float | None, ratio: float, with_work: bool = True) -> Solution | None:
        max_ms = step.ms * ratio if math.isfinite(ratio) else None
        return solve(step, peak=limit, max_error=budget.max_error, max_ms=max_ms, with_work=with_work)

    best, least = _search(step, peak, slowest, solved, tried)
    if best is None:
        raise BudgetError(_infeasible(budget, step, peak, least))
    return best.graphs.fw, best.graphs.bw, best.plan


@dataclass(frozen=True)
class _Tried:
    graphs: Graphs
    plan: Plan
    solution: Solution

    def fits(self, peak: float | None, slowest: float) -> bool:
        in_time = not self.plan.before_ms or self.plan.step_ratio <= slowest * (1 + _ROUNDING)
        return in_time and (peak is None or self.plan.peak_bytes <= peak)


def _search(
    step: Step,
    peak: int | None,
    slowest: float,
    solved: Callable[..., Solution | None],
    tried: Callable[[Solution], _Tried],
) -> tuple[_Tried | None, _Tried]:
    """The best plan that fits, None if none was found, and the one with the lowest peak.

    The program bounds bytes and times; the graphs that come of its choice tell them. Each attempt asks for less by as
    much as the one before was off.
    """
    keep = Solution((KEPT,) * len(step.values), step.peak_bytes, step.ms, 0.0)
    fitting: list[_Tried] = []
    all_tried: list[_Tried] = []
    limit, ratio = None if peak is None else float(peak), slowest
    for _ in range(_ATTEMPTS):
        solution = solved(limit, ratio)
        if solution is None:
            break
        found = tried(solution)
        all_tried.append(found)
        if found.fits(peak, slowest):
            fitting.append(found)
            break
        if peak is not None and limit is not None:
            limit -= 1.05 * max(0, found.plan.peak_bytes - peak)
        if found.plan.before_ms and found.plan.step_ratio > slowest:
            ratio -= 1.05 * (found.plan.step_ratio - slowest)
    for with_work in (True, False):  # the lowest peak, by the program's bounds: with work, then without
        if not fitting and peak is not None and (solution := solved(None, ratio, with_work)) is not None:
            found = tried(solution)
            all_tried.append(found)
            if found.fits(peak, slowest):
                fitting.append(found)
                # the program's bound is off by this much there; once more, with that
                nearer = solved(peak - (found.plan.peak_bytes - solution.peak_bytes), ratio, with_work)
                if nearer is not None and (other := tried(nearer)).fits(peak, slowest):
                    fitting.append(other)
    untried = all(found.solution.options != keep.options for found in all_tried)
    if untried and (peak is None or step.peak_bytes <= peak or not all_tried):
        all_tried.append(tried(keep))
        if all_tried[-1].fits(peak, slowest):
            fitting.append(all_tried[-1])

    def fastest(found: _Tried) -> tuple[float, float]:
        return (found.plan.after_ms, found.plan.peak_bytes)

    def lowest(found: _Tried) -> tuple[float, float]:
        return (found.plan.peak_bytes, found.plan.after_ms)

    return min(fitting, key=lowest if peak is None else fastest, default=None), min(all_tried, key=lowest)


def _peak(budget: Budget, cross: Boundary, groups: Sequence[Sequence[SavedValue]]) -> int | None:
    """The peak in bytes. None: the lowest is asked for, or there is nothing to decide."""
    if budget.peak != "fit":
        return budget.peak  # type: ignore[return-value]
    devices = {v.row.device for v in cross.tensors if v.row.device.type == "cuda"}
    if not devices and groups:
        raise BudgetError(
            'budget("fit") asks a CUDA device for its free memory, and the saved tensors are on none; '
            "give the peak in bytes"
        )
    free = [torch.cuda.mem_get_info(device)[0] + _reserved_and_free(device) for device in devices]
    return int(_FIT * min(free)) if groups else None


def _reserved_and_free(device: torch.device) -> int:
    """Bytes that torch's allocator has reserved and can give out."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


# --- what was chosen --------------------------------------------------------------------------------------------------


def _policy(solution: Solution, step: Step) -> _Chosen:
    hooks, reasons = [], []
    for i, (value, option) in enumerate(zip(step.values, solution.options, strict=True)):
        for name in value.names:
            if option.hook is not None:
                hooks.append((name, option.hook))
            reasons.append((name, _why(solution, step, i)))
    return _Chosen(tuple(hooks), tuple(reasons))


def _why(solution: Solution, step: Step, number: int) -> str:
    """What the choice for a value gives and costs, and the next best of its other options."""
    value, option = step.values[number], solution.options[number]
    others = [o for o in value.options if o.name != option.name]
    if option is KEPT:
        best = min(others, key=_ms_per_byte(value.nbytes), default=None)
        return (
            "budget: kept, nothing else can store it" if best is None else f"budget: kept; {_offer(best, value.nbytes)}"
        )
    text = f"budget: {_offer(option, value.nbytes)}"
    best = min(others, key=_ms_per_byte(value.nbytes), default=None)
    return text if best is None else f"{text}; next best {_offer(best, value.nbytes)}"


def _ms_per_byte(nbytes: int) -> Callable[[Option], float]:
    return lambda option: option.ms / max(1, nbytes - option.packed_bytes)


def _offer(option: Option, nbytes: int) -> str:
    return f"{option.name} frees {(nbytes - option.packed_bytes) / _MIB:.1f} MiB for {option.ms:.3f} ms"


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
    rows = [dataclasses.replace(d, saved_bytes=0) if d.saved.name in new else d for d in plan.decisions]
    offset = max((d.saved.storage for d in rows), default=-1) + 1
    for i, group in enumerate(groups):
        names = {value.row.name for value in group}
        if storage_of(group[0].fw_node) in saved.values() or names & saved.keys():
            continue
        chosen = solution.options[i].name == "recompute"
        reason = _why(solution, step, i) if chosen else "budget: what is recomputed anyway gives it too"
        for k, value in enumerate(group):
            row = dataclasses.replace(value.row, storage=offset)
            rows.append(Decision(row, RECOMPUTED, reason, 0, 0 if k else row.nbytes))
        offset += 1
    return dataclasses.replace(plan, decisions=tuple(rows))


# --- what can't be ----------------------------------------------------------------------------------------------------


def _infeasible(budget: Budget, step: Step, peak: int | None, least: _Tried) -> str:
    where = max(range(len(step.live)), key=step.live.__getitem__)
    options = least.solution.options
    kept = [v for v, option in zip(step.values, options, strict=True) if option is KEPT] or step.values
    largest = sorted(kept, key=lambda value: -value.nbytes)[:3]
    names = ", ".join(f"'{v.names[0]}' {_mib(v.nbytes)} ({v.where})" for v in largest) or "none"
    within = "" if budget.max_slowdown is None else f" within {budget.max_slowdown} times the time"
    return (
        f"{budget!r}: expected a step under {_mib(peak or 0)}{within}, but the least that was found takes "
        f"{_mib(least.plan.peak_bytes)}, and {least.plan.step_ratio:.3f} times the time. Without hooks it takes "
        f"{_mib(step.peak_bytes)}, the most at {step.labels[where] if step.labels else 'no node'}. The largest that "
        f"stay as they are: {names}. Gradients, outputs and what a single layer works with can't be stored otherwise: "
        "raise the peak, allow more means, time or error, or take smaller batches"
    )


def _mib(nbytes: float) -> str:
    return f"{nbytes / _MIB:.4g} MiB"
