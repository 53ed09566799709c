"""A part of a layer that can be computed in tiles of tokens: what belongs to it, or why there is none.

      mm(x, w) --wide--> silu, mul, ... --wide--> mm(h, u)      forward
      mm(grad_o, t(u)) --wide--> ... --> mm(grad_g, t(w))       backward, and sums over tokens: mm(t(h), grad_o)

From the first product on, all values that are as wide are followed, forward and backward. Products and sums that make
them narrow end the part. See tile.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cudagraph.placeholder import nearest_first

from ..graphs.nodes import has_tag, is_tensor, is_view, name_and_line, target_name, type_text
from ..graphs.rows import VIEWS, TokenStep, is_elementwise, shape_of, token_step
from ..torch_private.values import hint
from .regions import (
    PRODUCTS,
    LeftWhole,
    TokenRegion,
    depends_on,
    known_count,
    outputs_of,
    steps_around,
    tangents_of,
    why_read,
)

# An adapter's rank is at most such a part of what it reads and makes. MLPs are 2 to 4 times as wide as their tokens.
_RANKS = 8
_TERMS = "aot_hooks_terms"  # in the `meta` of products


@dataclass(frozen=True)
class Part(TokenRegion):
    """A region with whether a node has more numbers than the input of the first product."""

    is_wide: Callable[[Node], bool] = bool


def part_of(gm: GraphModule, seed: Node, tried: set[str], *, again: bool) -> Part:
    """The part that begins with `seed`. The names of its products are added to `tried`. Raises `LeftWhole`."""
    narrow = known_count(seed) * terms_of(seed)

    def is_wide(node: Node) -> bool:
        return is_tensor(node) and hint(node.meta["val"].numel()) > narrow

    nodes = list(gm.graph.nodes)
    tangents = tangents_of(gm)
    steps = steps_around(nodes, seed, is_wide)
    tried |= {n.name for n in steps if target_name(n) in PRODUCTS}
    if sum(target_name(n) in PRODUCTS and n not in tangents for n in steps) < 2:
        raise LeftWhole(_why_alone(seed, steps, is_wide))
    if not again:  # products of the forward stay saved
        steps = _without_forward(steps, tangents)
    steps = _with_sums_of_results(nodes, steps)
    outputs = outputs_of(steps, [n for n in steps if again or n in tangents], is_wide, why_read)
    part = Part(seed, steps, tuple(outputs), tangents, is_wide=is_wide)
    part = replace(part, steps={n: steps[n] for n in part.needed(outputs)})
    _check_inputs(part, again=again)
    _check_order(nodes, part)
    return part


def note_terms(gm: GraphModule) -> None:
    """Note `terms_of` each product, in place: in tiles, a first product is one no more."""
    for node in gm.graph.nodes:
        if target_name(node) in PRODUCTS and is_tensor(node):
            node.meta[_TERMS] = terms_of(node)


def terms_of(product: Node) -> Any:
    """The columns of what `product` reads; of an adapter, the second product of `(x @ a) @ b`, those of `x`."""
    if _TERMS in product.meta:
        return product.meta[_TERMS]
    source, width = product.args[-2], shape_of(product)[1]
    terms = shape_of(source)[1]  # type: ignore[arg-type]
    while isinstance(source, Node) and (keeps_memory(source) or is_elementwise(source)):
        tensors = [n for n in source.all_input_nodes if is_tensor(n)]
        source = tensors[0] if len(tensors) == 1 else None
    if not isinstance(source, Node) or target_name(source) not in PRODUCTS:
        return terms
    before = shape_of(source.args[-2])[1]  # type: ignore[arg-type]
    known = all(isinstance(n, int) for n in (before, terms, width))
    return before if known and _RANKS * terms <= min(before, width) else terms


def _without_forward(steps: Mapping[Node, TokenStep], tangents: Collection[Node]) -> dict[Node, TokenStep]:
    """`steps` without products of the forward, and what can't be computed again from their results."""
    found: dict[Node, TokenStep] = {}
    for node, step in steps.items():
        if node in tangents or is_elementwise(node) or keeps_memory(node):
            found[node] = step
    return found


def _with_sums_of_results(nodes: Iterable[Node], steps: Mapping[Node, TokenStep]) -> dict[Node, TokenStep]:
    """`steps` with additions whose inputs are all results of tokens: grad_x is a sum of two products, in two views."""
    known = {n: step.out for n, step in steps.items() if step.out is not None}
    views: dict[Node, TokenStep] = {}
    more: dict[Node, TokenStep] = {}
    for node in nodes:
        inputs = node.all_input_nodes
        if node in steps or not inputs or not all(n in known for n in inputs) or not is_tensor(node):
            continue
        adds = target_name(node) == "aten.add.Tensor" and len(inputs) == 2
        if not (adds or keeps_memory(node)):
            continue
        step = token_step(node, {n: known[n] for n in inputs})
        if step is None or step.out is None:
            continue
        known[node] = step.out
        if not adds:
            views[node] = step
            continue
        more[node] = step
        stack = list(node.all_input_nodes)
        while stack:
            source = stack.pop()
            if source in views:
                more[source] = views.pop(source)
                stack += source.all_input_nodes
    found = {**steps, **more}
    return {n: found[n] for n in nodes if n in found}


def _check_inputs(part: Part, *, again: bool) -> None:
    """What the part reads must be narrow, or an input of the graph, or saved anyway."""
    if not part.outputs:
        raise LeftWhole("nothing of it is read")
    for node in part.cut_inputs():
        if not part.is_wide(node) or node.op == "placeholder":
            continue
        if has_tag(node, torch.Tag.nondeterministic_seeded):
            raise LeftWhole(f"its random numbers are drawn for all tokens at once ({name_and_line(node)})")
        if again or node in part.tangents:
            raise LeftWhole(
                f"it reads {type_text(node)} ({name_and_line(node)}), which is not known to treat tokens alike"
            )


def _check_order(nodes: list[Node], part: Part) -> None:
    """No token may need another token's result in the same loop."""
    position = {node: i for i, node in enumerate(nodes)}
    for backward in (False, True):
        outputs = part.outputs_of(backward=backward)
        inputs = part.inputs(part.needed(outputs))
        first = min((position[n] for n in outputs), default=0)
        last = max((position[n] for n in inputs), default=0)  # nothing behind it leads to an input
        late = inputs & (depends_on(nodes[first : last + 1], outputs) - part.steps.keys())
        if not backward:
            late |= inputs.intersection(part.tangents)
        if late:
            raise LeftWhole(f"a token needs results of others ({name_and_line(min(late, key=nodes.index))})")


def _why_alone(seed: Node, steps: Mapping[Node, TokenStep], is_wide: Callable[[Node], bool]) -> str:
    """Why a part with one product has no second one; "" if none follows, as behind most products."""

    def next_of(node: Node) -> list[Node]:
        goes_on = node is seed or (target_name(node) not in PRODUCTS and (is_wide(node) or not is_tensor(node)))
        return [user for user in node.users if user.op != "output"] if goes_on else []

    seen = set(nearest_first([seed], next_of))
    if not any(target_name(n) in PRODUCTS and n is not seed for n in seen):
        return ""
    readers = ((n, user) for n in steps if is_wide(n) for user in n.users if user not in steps and user in seen)
    return next((why_read(*each) for each in readers), "")


def keeps_memory(node: Node) -> bool:
    return node.op == "call_function" and (is_view(node) or target_name(node) in VIEWS)
