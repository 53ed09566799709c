"""The sizes that a plan is for, where a graph has symbolic ones: larger ones are compiled, and so planned, anew.

compiled at 12 rows     fits under the peak up to 15 rows: a guard of the compiled graph
called with 20          misses the guard: compiled for 20, as another graph of the step, see `many.graph_of`
sizes of data           those of `nonzero`: first their bounds, then what the first steps had, see `DataSizes`

Bytes are taken to grow as fast as the product of symbolic sizes in the shape of some tensor that grows fastest: for
attention without a fused kernel that is batch * length * length.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from ..errors import BudgetWarning, warn_user
from ..passes.plan import Plan
from ..torch_private import dynamo
from ..torch_private.values import bounds_of_data, hint, pytree, symbols_of, upper_bound
from .assignment import UNSEEN
from .versions import Mode, Version

MOST_GROWN = 4  # times that a graph is planned for larger sizes
_MEASURED_STEPS = 3  # plans are then made for the sizes that the data have had
_MARGIN = 1.25  # plans take the largest size of these steps times this; argued, not measured
_MIB = 1 << 20
Product = tuple[tuple[int, int], ...]  # of inputs' places and exponents


@dataclass(frozen=True)
class Sizes:
    """The symbolic sizes of a graph.

    Attributes:
        numbers: the symbolic sizes among its inputs, by the position of the input.
        products: products of sizes that bytes of tensors are multiples of: input positions with exponents.
        bounded: some of `numbers` had an upper bound before it was compiled. Inductor adds bounds, which don't count.
        of_data: the symbols of sizes that only the data give, as those of `nonzero`, or that `mark_unbacked` has, each
            with the most that it can be; 0 if torch knows no bound.
    """

    numbers: Mapping[int, torch.SymInt]
    products: tuple[Product, ...]
    bounded: bool
    of_data: Mapping[str, int]

    @staticmethod
    def of(gm: GraphModule) -> Sizes:
        """The sizes of Dynamo's graph `gm`. Numbers that are not sizes of tensors are left out."""
        values = [node.meta.get("example_value") for node in gm.graph.nodes]
        inputs = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
        places = {symbol: i for i, n in enumerate(inputs) if hint(n) for symbol in symbols_of(n)}
        found: set[Product] = set()
        of_data: dict[str, int] = {}
        for x in pytree.tree_leaves(values):
            if isinstance(x, torch.Tensor):
                symbols = [symbol for n in x.shape for symbol in symbols_of(n)]
                of_data |= {str(symbol): most for n in x.shape for symbol, most in bounds_of_data(n).items()}
                found.add(tuple(sorted(Counter(places[symbol] for symbol in symbols if symbol in places).items())))
        used = {i for product in found for i, _ in product}
        numbers = {i: n for i, n in enumerate(inputs) if i in used}
        bounded = any(upper_bound(n) is not None for n in numbers.values())
        return Sizes(numbers, tuple(sorted(found - {()})), bounded, {n: of_data[n] for n in sorted(of_data)})

    def hints(self) -> dict[Product, int]:
        """The products at the sizes that the graph is compiled for."""
        hints = {i: hint(n) for i, n in self.numbers.items()}
        return {product: value_of(product, hints) for product in self.products}


NO_SIZES = Sizes({}, (), bounded=False, of_data={})


@dataclass(eq=False)
class DataSizes:
    """The sizes of a graph that only the data give, as how many tokens an expert gets, by their symbols.

    first plan    the most that each can be: of `nonzero(x)` the elements of x. It holds for all data
    first steps   the most that each has been in a call
    then          that with a margin, at most the bound: the graph is compiled again, unless it has no hooks
    larger ones   likewise, a few times

    Attributes:
        bounds: see `Sizes.of_data`.
        planned: what plans are made for.
        most: the most that was measured; {} before the first step.
        steps: how many were measured.
        grown: how many plans were outgrown.
    """

    bounds: Mapping[str, int]
    planned: Mapping[str, int]
    most: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    grown: int = 0

    @property
    def unknown(self) -> bool:
        """Whether a size is planned as 0 that no call has shown. An expert may have got no tokens."""
        return any(not n and symbol not in self.most for symbol, n in self.planned.items())

    def note(self, symbols: Sequence[str], values: Sequence[Any]) -> None:
        """Note the sizes of a call, which its forward has saved for its backward."""
        for symbol, value in zip(symbols, values, strict=False):
            if symbol in self.bounds:
                self.most[symbol] = max(self.most.get(symbol, 0), int(value))

    def plan(self) -> None:
        """Plan for what was measured, if anything was."""
        if self.most:
            known = {symbol: math.ceil(_MARGIN * n) for symbol, n in self.most.items()}
            self.planned = {s: min(known.get(s, most), most or known.get(s, 0)) for s, most in self.bounds.items()}

    def is_due(self) -> bool:
        """A step has ended: whether plans should be for other sizes from now on."""
        self.steps += 1
        over = any(n > self.planned[symbol] for symbol, n in self.most.items())
        self.grown += over
        return (over and self.grown <= MOST_GROWN) or self.steps == _MEASURED_STEPS


def value_of(product: Product, numbers: Any) -> Any:
    """The value of a product, of ints or of symbolic sizes by their place."""
    return math.prod(numbers[i] ** power for i, power in product)


def guarded(run: Callable[..., Any], version: Version, plans: Sequence[Plan], sizes: Sizes) -> Callable[..., Any]:
    """`run`, a compiled `version` of a graph with `plans`, for sizes that stay under the budget.

    Larger ones miss a guard. Where there can't be one, or the graph was planned anew often, `run` warns of them, once.
    """
    graph = version.graph
    if version.mode is Mode.LEAST:  # the next one is planned
        return run
    if graph.data is not None and graph.data.unknown:
        warn_user(
            f"aot_hooks: {graph.group.budget!r}: a graph has sizes that nobody knows when it is compiled, as those of "
            "mark_unbacked, or of nonzero() of a tensor with symbolic sizes. Tensors of such sizes count nothing until "
            "the first steps have shown them, so these may take more. Leave room for them, or give these sizes an "
            "example value (mark_dynamic)",
            BudgetWarning,
        )
    if not sizes.products:
        return run
    peak, predicted = graph.group.peak_bytes, max(plan.peak_bytes for plan in plans)
    most_growth = max((1 - UNSEEN) * peak / predicted, 1.0)
    again = graph.grown < MOST_GROWN and dynamo.may_recompile(dynamo.code_being_compiled())
    if predicted <= peak and again and not sizes.bounded:
        for product, value in sizes.hints().items():
            bool(value_of(product, sizes.numbers) <= int(most_growth * value))  # while Dynamo compiles this is a guard
        return run
    warned = False
    planned, products = {i: hint(n) for i, n in sizes.numbers.items()}, sizes.hints()

    def run_and_compare(*args: Any) -> Any:
        nonlocal warned
        growth = 0.0 if warned else max(value_of(product, args) / value for product, value in products.items())
        if growth * predicted > peak and growth > 1:
            warned = True
            larger = ", ".join(f"{args[i]} in place of {size}" for i, size in planned.items() if args[i] != size)
            warn_user(
                f"aot_hooks: {graph.group.budget!r}: a graph runs with sizes that it was not planned for ({larger}). "
                f"It may take {growth * predicted / _MIB:.1f} MiB, more than the budget of {peak / _MIB:.1f}, and is "
                "not compiled again: it was, several times, nothing takes less, its sizes have bounds of their own, or "
                "its function has half of the versions that torch._dynamo.config.recompile_limit allows. Run the "
                "largest sizes first, or compile with dynamic=False, for a plan for each size",
                BudgetWarning,
            )
        return run(*args)

    return run_and_compare
