"""`aot_hooks.frontier`: how much memory a step can do without, and what that costs.

without hooks ... peak 24.0 GiB, step 1.000
budget(p1)        peak p1,       step 1.01         budgets between the lowest peak and that without hooks;
...                                                points that another point beats are left out
the lowest peak

A step of several compiled calls also gets the plan in which each call holds the least between its forward and its
backward: that is what adds up, while the budget with the lowest peak of each call alone may hold more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import BudgetError, OptionError, error_behind
from ..hook import KEEP
from ..passes.plan import Plan, joined
from ..planning.assignment import Assignment
from ..planning.budget import ALLOWED, Budget, budget
from ..settings.byte_sizes import parse_size, size_text
from .dry_run import check_arguments, dry_run
from .trial import unwrap_compiled

_POINTS = 8  # parts that the range of peaks is cut into, with a budget between each two
_OF_GPU = 0.95  # share of a GPU's memory that a process can have


@dataclass(frozen=True)
class FrontierPoint:
    """One plan of a frontier.

    Attributes:
        peak_bytes: of the step, over what is allocated before it, as predicted.
        step_ratio: its time over that without hooks, as predicted.
        plan: what is done with each saved tensor.
        policy: what gives this plan: for `options={"policy": ...}` or a context.
    """

    peak_bytes: int
    step_ratio: float
    plan: Plan = field(repr=False)
    policy: Budget | None


@dataclass(frozen=True)
class Frontier:
    """Plans sorted by peak. No plan is both slower and larger than another one.

    `str()` is a table; iterating gives the points.

    Attributes:
        points: those of the lowest peak first.
        in_parts: the step has several compiled calls: planned one by one here, by a budget in training together.
    """

    points: tuple[FrontierPoint, ...]
    in_parts: bool = False

    def __iter__(self) -> Iterator[FrontierPoint]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def __str__(self) -> str:
        lines = [f"{'peak MiB':>10}  {'step':>6}  saved bytes by what is done with them"]
        for point in self.points:
            lines.append(f"{point.peak_bytes / 2**20:10.1f}  {point.step_ratio:6.3f}  {_means(point.plan)}")
        if self.in_parts:
            lines.append(
                "The step has several compiled calls, which are planned one by one here. In training a budget plans "
                "them together:\nit reaches peaks between these, and may reach a lower one."
            )
        return "\n".join(lines)


def _means(of: Plan) -> str:
    """The share of saved bytes by hook: "keep 40%, float8(...) 60%"; before it chunks and tiles, "loss in 8 chunks"."""
    shares: dict[str, int] = defaultdict(int)
    for decision in of.decisions:
        shares["keep" if decision.hook == KEEP else decision.hook.name] += decision.saved_bytes
    total = sum(shares.values()) or 1
    found = sorted(shares.items(), key=lambda item: -item[1])
    chunks = [f"loss in {row.count} chunks" for row in of.chunked if row.done]
    tiles = max((row.count for row in of.tiled if row.done), default=0)
    chunks += [f"layers in {tiles} tiles"] if tiles else []
    return ", ".join([*chunks, *(f"{name} {100 * nbytes / total:.0f}%" for name, nbytes in found if nbytes)])


def frontier(
    fn: Callable[..., Any],
    *args: Any,
    allow: Sequence[str] = ALLOWED,
    max_error: float = 0.05,
    scope: str | None = None,
    inner: str | None = None,
    **kwargs: Any,
) -> Frontier:
    """What memory a step of `fn(*args, **kwargs)` can do without, and what that costs. Nothing runs on real tensors.

    Args:
        fn, args, kwargs, scope, inner: see `plan`.
        allow, max_error: see `budget`.

    Raises as `plan` and `budget` do.
    """

    inside, _, _ = unwrap_compiled("aot_hooks.frontier", fn)
    check_arguments("aot_hooks.frontier", inside, args, kwargs, ("allow", "max_error", "scope", "inner"))

    of_graphs: list[Frontier | None] = []

    def explore(stock: Plan, plan_with: Callable[[Budget], Plan]) -> None:
        # of the first graph, as if it were the whole step: whether another one follows is known later
        found = None
        if not of_graphs and stock.decisions:
            found = frontier_of(joined([stock]), lambda rule: joined([plan_with(rule)]), allow, max_error)
        of_graphs.append(found)

    stock, _ = dry_run(fn, args, kwargs, explore, policy=KEEP, scope=scope, inner=inner)
    if len(of_graphs) == 1 and of_graphs[0] is not None and not _has_several_calls(stock):
        return of_graphs[0]

    def plan_with(policy: Any) -> Plan:
        return dry_run(fn, args, kwargs, policy=policy, scope=scope, inner=inner)[0]  # without its warning

    return frontier_of(stock, plan_with, allow, max_error)


def _has_several_calls(stock: Plan) -> bool:
    """Whether the step of `stock`, a plan without hooks, has several compiled calls: each has an end of a forward."""
    return sum(point.phase == "forward" and point.node == "(end)" for point in stock.live_after) > 1


def frontier_of(
    stock: Plan, plan_with: Callable[[Any], Plan], allow: Sequence[str] = ALLOWED, max_error: float = 0.05
) -> Frontier:
    """The frontier of a step whose plan without hooks is `stock`; `plan_with(policy)` gives that of a budget."""
    if not stock.decisions:
        raise OptionError("frontier: expected a function that saves tensors for backward, but it saves none")
    in_parts = _has_several_calls(stock)
    found = [FrontierPoint(stock.peak_bytes, 1.0, stock, None)]

    def try_out(policy: Budget) -> None:
        try:
            planned = plan_with(policy)
        except Exception as e:
            if error_behind(e, BudgetError) is None:
                raise
            return  # the solver's bounds lie a little under what it can reach
        found.append(FrontierPoint(planned.peak_bytes, planned.step_ratio, planned, policy))

    lowest = budget(max_slowdown=float("inf"), allow=allow, max_error=max_error)
    try_out(lowest)
    if in_parts:
        try_out(Assignment.of(lowest, least=True))
    least, most = min(point.peak_bytes for point in found), stock.peak_bytes
    for peak in sorted({least + (most - least) * k // _POINTS for k in range(1, _POINTS)} - {0}):
        try_out(budget(f"{peak}B", allow=allow, max_error=max_error))
    found.sort(key=lambda point: (point.peak_bytes, point.step_ratio))
    best: list[FrontierPoint] = []
    for point in found:
        if not best or point.step_ratio < best[-1].step_ratio:
            best.append(point)
    return Frontier(tuple(best), in_parts)


def on_gpu(plan_with: Callable[[Any], Plan], size: str, **of_budget: Any) -> str:
    """What fits on a GPU of `size`, such as "24GiB": the policy, its predicted peak and time; or why nothing does.

    A twentieth of the GPU is left to kernels, to fragments and to other processes.
    """
    policy = budget(total=f"{int(_OF_GPU * parse_size(size, 'gpu'))}B", **of_budget)
    try:
        planned = plan_with(policy)
    except Exception as e:
        found = error_behind(e, BudgetError)
        if found is None:
            raise
        return f"does not fit. {found}"
    before = size_text(planned.stock_peak_bytes or 0)
    return (
        f"aot_hooks.{policy!r}: a step takes {size_text(planned.peak_bytes)} of {before} and {planned.step_ratio:.3f} "
        "times the time, as predicted"
    )
