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
from ..passes.live_bytes import LivePoint, live_bytes
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

    def __call__(self, saved: SavedTensor) -> Hook:
        return dict(self.hooks).get(saved.name, KEEP)

    def why_kept(self, saved: SavedTensor) -> str:
        return dict(self.reasons).get(saved.name, "budget: nothing to decide")

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
    before = _live(graphs)
    cross = graphs.boundary()
    peak = _peak(budget, groups)
    max_ms = None if budget.max_slowdown is None else step.ms * budget.max_slowdown
    limit: float | None = peak
    least = step.peak_bytes
    attempts = 0
    while True:
        solution = None
        if attempts < _ATTEMPTS:
            solution = solve(step, peak=limit, max_error=budget.max_error, max_ms=max_ms)
        if solution is None:  # the lowest peak, by the program's bounds: with work, then without
            attempts = max(attempts, _ATTEMPTS)
            with_work = attempts == _ATTEMPTS
            solution = solve(step, peak=None, max_error=budget.max_error, max_ms=max_ms, with_work=with_work)
        attempts += 1
        if solution is None:
            raise BudgetError(f"{budget!r}: no plan is within {budget.max_slowdown} times the step without hooks")
        chosen = {i for i, option in enumerate(solution.options) if option.name == "recompute"}
        with aot.recomputed(joint, *chains(cross, groups, chosen)) if chosen else contextlib.nullcontext():
            found = read(*split())
        saved = {v.row.name: storage_of(v.fw_node) for v in found.boundary().tensors}
        plan = rewrite(found.fw, found.bw, Setting(_policy(solution, step), setting.scope))
        after = _live(found)
        got = max((p.live_bytes for p in after), default=0)
        if peak is None or got <= peak:
            break
        least = min(least, got)
        if attempts > _ATTEMPTS + 1:
            raise BudgetError(_infeasible(budget, step, peak, least, solution))
        assert limit is not None
        limit -= 1.05 * (got - peak)
    plan = _with_recomputed(plan, cross, groups, saved, solution, step)
    after_ms = step_ms(found.fw, found.bw, fused, COPIES) + sum(t.placement.stall_ms for t in plan.transfers)
    return (
        found.fw,
        found.bw,
        dataclasses.replace(
            plan,
            decisions=tuple(dataclasses.replace(d, settings=(setting.key,)) for d in plan.decisions),
            live_before=before,
            live_after=after,
            before_ms=step_ms(graphs.fw, graphs.bw, fused),
            after_ms=after_ms,
        ),
    )


def _live(graphs: Graphs) -> tuple[LivePoint, ...]:
    return live_bytes(
        graphs.fw,
        graphs.bw,
        num_fwd_outputs=graphs.num_fwd_outputs,
        static_inputs=graphs.static_inputs,
        fused=graphs.fused,
        roots=graphs.roots,
    )


def _peak(budget: Budget, groups: Sequence[Sequence[SavedValue]]) -> int | None:
    if budget.peak != "fit":
        return budget.peak  # type: ignore[return-value]
    devices = {group[0].row.device for group in groups if group[0].row.device.type == "cuda"}
    if not devices:
        raise BudgetError(
            'budget("fit") asks a CUDA device for its free memory, and the saved tensors are on none; '
            "give the peak in bytes"
        )
    return int(_FIT * min(torch.cuda.mem_get_info(device)[0] + _reserved_and_free(device) for device in devices))


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
    new = {name for name, key in saved.items() if key not in before}
    rows = [dataclasses.replace(d, saved_bytes=0) if d.saved.name in new else d for d in plan.decisions]
    offset = max((d.saved.storage for d in rows), default=-1) + 1
    for i, group in enumerate(groups):
        if storage_of(group[0].fw_node) in saved.values():
            continue
        chosen = solution.options[i].name == "recompute"
        reason = _why(solution, step, i) if chosen else "budget: what is recomputed anyway gives it too"
        for k, value in enumerate(group):
            row = dataclasses.replace(value.row, storage=offset)
            rows.append(Decision(row, RECOMPUTED, reason, 0, 0 if k else row.nbytes))
        offset += 1
    return dataclasses.replace(plan, decisions=tuple(rows))


# --- what can't be ----------------------------------------------------------------------------------------------------


def _infeasible(budget: Budget, step: Step, peak: int, least: int, lowest: Solution) -> str:
    where = max(range(len(step.live)), key=step.live.__getitem__)
    kept = [v for v, option in zip(step.values, lowest.options, strict=True) if option is KEPT] or step.values
    largest = sorted(kept, key=lambda value: -value.nbytes)[:3]
    names = ", ".join(f"'{v.names[0]}' {_mib(v.nbytes)} ({v.where})" for v in largest)
    within = "" if budget.max_slowdown is None else f" within {budget.max_slowdown} times the time"
    return (
        f"{budget!r}: expected a step under {_mib(peak)}{within}, but the least that was found takes "
        f"{_mib(least)}. Without hooks it takes {_mib(step.peak_bytes)}, the most at "
        f"{step.labels[where]}. The largest that stay as they are: {names}. Gradients, outputs and what a single layer "
        "works with can't be stored otherwise: raise the peak, allow more means or more error, or take smaller batches"
    )


def _mib(nbytes: float) -> str:
    return f"{nbytes / _MIB:.4g} MiB"
