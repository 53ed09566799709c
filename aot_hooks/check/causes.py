"""The saved tensors that make gradients wrong, found by running the backward again with some of them rounded.

      all rounded         0.23     as far off as with hooks, so rounding explains it
      one kind rounded    0.22, 0.03, 0.01, ...
      without the worst   0.04     below the limit: the worst one is the cause

Equal layers are measured once: their tensors are of one `Kind` and are rounded together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..graphs.saved import Kind, SavedTensor
from ..hook import KEEP, Hook
from ..identity.frozen import described
from ..passes.answers import ANSWERS
from ..passes.plan import Plan
from .comparison import Error

_EXPLAINED = 0.5  # of the error with hooks: what is left is rounding in another order, which no tensor causes


@dataclass(frozen=True)
class Kinds:
    """Saved tensors of one kind in a graph without hooks: their positions, and the hook that rounds them with hooks."""

    hook: Hook
    saved: SavedTensor  # the first
    positions: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Causes:
    """What was found: the causes, the worst first, each with the error that it makes alone; none if rounding explains
    nothing. The errors are of all gradients together, or of one alone if only one is above the limit."""

    found: tuple[tuple[Kinds, float], ...]
    all_together: float


def rounded_kinds(plans: Sequence[Plan], without: Plan) -> dict[Kind, Kinds]:
    """What the hooks of `plans` may round of the tensors that the graph with the plan `without` hooks saves."""
    hooks: dict[Kind, Hook] = {}
    for decision in (d for plan in plans for d in plan.decisions):
        if decision.hook not in (KEEP, ANSWERS) and (decision.hook.lossy or described(decision.hook).own):
            hooks.setdefault(Kind.of(decision.saved), decision.hook)
    found: dict[Kind, Kinds] = {}
    for position, decision in enumerate(without.decisions):
        kind = Kind.of(decision.saved)
        if kind in hooks:
            found.setdefault(kind, Kinds(hooks[kind], decision.saved)).positions.append(position)
    return found


def find(
    kinds: Mapping[Kind, Kinds], error_with: Callable[[Collection[Kind]], Error], seen: Error, limit: float
) -> Causes:
    """The kinds without which the error is below `limit`; as few as there are.

    Args:
        error_with: runs the backward with the kinds that it gets rounded.
        seen: the error with hooks.
    """

    def shown(error: Error) -> float:
        return error.most if seen.most > limit else error.of_one

    everything = error_with([*kinds]) if kinds else Error(0.0, 0.0, None)
    if not everything.above(limit) and everything.severity < _EXPLAINED * seen.severity:
        return Causes((), shown(everything))
    alone = {kind: error_with([kind]) for kind in kinds} if len(kinds) > 1 else dict.fromkeys(kinds, everything)
    order = sorted(kinds, key=lambda kind: alone[kind].severity, reverse=True)
    count = 1
    while count < len(order) and error_with(order[count:]).above(limit):
        count += 1
    return Causes(tuple((kinds[kind], shown(alone[kind])) for kind in order[:count]), shown(everything))
