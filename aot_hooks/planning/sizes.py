"""The sizes that a plan is for, where a graph has symbolic ones: larger ones are compiled, and so planned, anew.

compiled at 12 rows     fits under the peak up to 15 rows: a guard of the compiled graph
called with 20          misses the guard: compiled for 20, as another graph of the step, see `many.graph_of`

Bytes are taken to grow as the product of the symbolic sizes does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ..errors import BudgetWarning
from ..passes.plan import Plan
from ..torch_private.values import hint, symbols_of, upper_bound
from .budget import Budget
from .recorded import Version
from .within import UNSEEN

MOST_GROWN = 4  # times that a graph is planned for larger sizes
_MIB = 1 << 20


def symbolic_sizes(gm: GraphModule) -> dict[int, torch.SymInt]:
    """The symbolic numbers among the inputs of a graph of Dynamo that are sizes of its tensors, by their place."""
    inputs = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    shapes = {symbol for x in inputs if isinstance(x, torch.Tensor) for n in x.shape for symbol in symbols_of(n)}
    return {i: n for i, n in enumerate(inputs) if isinstance(n, torch.SymInt) and symbols_of(n) & shapes and hint(n)}


def product_of(sizes: Mapping[int, torch.SymInt]) -> int:
    """The product of the example values of `sizes`; 1 if there is none."""
    return math.prod(map(hint, sizes.values()))


def guarded(
    run: Callable[..., Any], version: Version, plans: Sequence[Plan], sizes: Mapping[int, torch.SymInt]
) -> Callable[..., Any]:
    """`run`, a compiled `version` of a graph with `plans`, for sizes that stay under the budget.

    Larger ones miss a guard. Where there can't be one, or the graph was planned anew often, `run` warns of them, once.
    """
    graph = version.graph
    graph.most = math.inf
    if not sizes or version.kind == "least":  # the next one is planned
        return run
    peak, predicted = graph.group.peak_bytes, max(plan.peak_bytes for plan in plans)
    product = product_of(sizes)
    most = max(int(product * (1 - UNSEEN) * peak / predicted), product if predicted <= peak else 0)
    if most >= product and graph.grown < MOST_GROWN and all(upper_bound(size) is None for size in sizes.values()):
        graph.most = most
        assert math.prod(sizes.values()) <= most  # evaluated while Dynamo compiles, this is a guard
        return run
    return _warning(run, graph.group.budget, peak, predicted, {i: hint(size) for i, size in sizes.items()})


def _warning(
    run: Callable[..., Any], budget: Budget, peak: int, predicted: int, planned: Mapping[int, int]
) -> Callable[..., Any]:
    """`run`, which warns once of larger sizes than `planned`, by their place, if they are too large for the budget."""
    warned = False

    def run_and_compare(*args: Any) -> Any:
        nonlocal warned
        growth = math.prod(args[i] / size for i, size in planned.items()) if not warned else 0.0
        if growth * predicted > peak and growth > 1:
            warned = True
            sizes = ", ".join(f"{args[i]} in place of {size}" for i, size in planned.items() if args[i] != size)
            warnings.warn(
                f"aot_hooks: {budget!r}: a graph runs with sizes that it was not planned for ({sizes}). It may "
                f"take {growth * predicted / _MIB:.1f} MiB, more than the budget of {peak / _MIB:.1f}, and is not "
                "compiled again: it was, several times, nothing takes less, or its sizes have bounds of their own. "
                "Run the largest sizes first, or compile with dynamic=False, for a plan for each size",
                BudgetWarning,
                stacklevel=2,
            )
        return run(*args)

    return run_and_compare
