"""A part of a layer that can be computed in tiles of tokens: what belongs to it, or why there is none.

      mm(x, w) --wide--> silu, mul, ... --wide--> mm(h, u)      forward
      mm(grad_o, t(u)) --wide--> ... --> mm(grad_g, t(w))       backward, and sums over tokens: mm(t(h), grad_o)

From the first product on, all values that are as wide are followed, forward and backward. Products and sums that make
them narrow end the part. See tile.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from ..graphs.nodes import has_tag, is_view, name_and_line, target_name, type_text
from ..graphs.rows import VIEWS, Rows, Step, is_elementwise, is_tensor, shape_of, step_of
from ..torch_private import aot
from ..torch_private.values import hint, symbols_of
from .chunk_order import PRODUCTS, depends_on


class NotTiled(Exception):
    """Why a part is left as it is; "" if it is none."""


@dataclass(frozen=True)
class Part:
    """What is computed in tiles.

    Attributes:
        steps: of the nodes, in order.
        outputs: the nodes that others read.
        tangents: all nodes of the graph that belong to the backward.
        is_wide: whether a node has more numbers than the input of the first product.
    """

    seed: Node
    steps: Mapping[Node, Step]
    outputs: tuple[Node, ...]
    tangents: Collection[Node]
    is_wide: Callable[[Node], bool]

    def outputs_of(self, *, backward: bool) -> list[Node]:
        return [n for n in self.outputs if (n in self.tangents) == backward]

    def needed(self, outputs: Iterable[Node]) -> list[Node]:
        """The nodes of the part, in order, that `outputs` are computed from."""
        found: set[Node] = set()
        stack = list(outputs)
        while stack:
            node = stack.pop()
            if node in self.steps and node not in found:
                found.add(node)
                stack += node.all_input_nodes
        return [n for n in self.steps if n in found]

    def inputs(self, nodes: Iterable[Node]) -> set[Node]:
        return {n for node in nodes for n in node.all_input_nodes} - self.steps.keys()

    def cut_inputs(self, nodes: Iterable[Node]) -> set[Node]:
        """Inputs that have tokens."""
        return {n for node in nodes for n, read in self.steps[node].reads.items() if read.cut and n not in self.steps}


def part_of(gm: GraphModule, seed: Node, tried: set[str], *, again: bool) -> Part:
    """The part that begins with `seed`. The names of its products are added to `tried`. Raises `NotTiled`."""
    count = shape_of(seed)[0]
    if symbols_of(count) and not hint(count):
        raise NotTiled(f"the number of tokens, {count}, is made by an operator of the program")
    narrow = hint(count) * shape_of(seed.args[-2])[1]  # type: ignore[arg-type]

    def is_wide(node: Node) -> bool:
        return is_tensor(node) and hint(node.meta["val"].numel()) > narrow

    nodes = list(gm.graph.nodes)
    tangents = depends_on(nodes, filter(aot.is_tangent, gm.graph.find_nodes(op="placeholder")))
    grown = _grown(seed, is_wide)
    tried |= {n.name for n in grown if target_name(n) in PRODUCTS}
    steps = _confirmed(nodes, grown, is_wide)
    if sum(target_name(n) in PRODUCTS and n not in tangents for n in steps) < 2:
        raise NotTiled(_why_alone(seed, steps, is_wide))
    if not again:  # products of the forward stay saved
        steps = _without_forward(steps, tangents)
    steps = _with_sums_of_results(nodes, steps)
    outputs = []
    for node in steps:
        reader = next((user for user in node.users if user not in steps), None)
        if reader is None or (not again and node not in tangents):
            continue
        if is_wide(node) and steps[node].out is not None:
            raise NotTiled(_why_read(node, reader))
        outputs.append(node)
    part = Part(seed, steps, tuple(outputs), tangents, is_wide)
    part = replace(part, steps={n: steps[n] for n in part.needed(outputs)})
    _check_inputs(part, again=again)
    _check_order(nodes, part)
    return part


def _grown(seed: Node, is_wide: Callable[[Node], bool]) -> dict[Node, Rows | None]:
    """What treats the tokens of `seed` alike, up to results of products, and the wide values that it is made from.

    Each node has the dimensions of its tokens; None for a sum over them.
    """
    found: dict[Node, Rows | None] = {seed: Rows(0)}
    first = step_of(seed, {}, Rows(0))
    if first is None:
        raise NotTiled("its weight has tokens too")
    stack = [(seed, first)]
    while stack:
        node, step = stack.pop()
        for source, read in step.reads.items():
            if source in found or not read.cut or read.like or not is_wide(source):
                continue
            made = step_of(source, _known(source, found), read.rows)
            if made is not None and made.out == read.rows:
                found[source] = made.out
                stack.append((source, made))
        if step.out is None or (target_name(node) in PRODUCTS and not is_wide(node)):
            continue
        for user in node.users:
            made = step_of(user, _known(user, found)) if user not in found else None
            if made is not None:
                found[user] = made.out
                stack.append((user, made))
    return found


def _known(node: Node, found: Mapping[Node, Rows | None]) -> dict[Node, Rows]:
    return {n: rows for n in node.all_input_nodes if (rows := found.get(n)) is not None}


def _confirmed(
    nodes: Iterable[Node], found: Mapping[Node, Rows | None], is_wide: Callable[[Node], bool]
) -> dict[Node, Step]:
    """The steps of wide values, of what lies between them, and of what reads them. In order.

    A step is made anew once all of its inputs are known: all must have the same tokens.
    """
    nodes = [n for n in nodes if n in found]
    kept: set[Node] = set()
    for node in reversed(nodes):
        product = target_name(node) in PRODUCTS and not is_wide(node)
        if found[node] is not None and (is_wide(node) or (not product and not kept.isdisjoint(node.users))):
            kept.add(node)
    wide = {n for n in kept if is_wide(n)}
    inside = {n: found[n] for n in nodes if n in kept or not wide.isdisjoint(n.all_input_nodes)}
    steps: dict[Node, Step] = {}
    for node, rows in inside.items():
        step = step_of(node, _known(node, inside), rows)
        if step is None or step.out != rows:
            raise NotTiled(f"{name_and_line(node)} has its tokens elsewhere than what it reads")
        if any(n in inside and inside[n] is None for n in node.all_input_nodes):
            raise NotTiled(f"{name_and_line(node)} needs a sum over all tokens")
        steps[node] = step
    return steps


def _without_forward(steps: Mapping[Node, Step], tangents: Collection[Node]) -> dict[Node, Step]:
    """`steps` without products of the forward, and what can't be computed again from their results."""
    found: dict[Node, Step] = {}
    for node, step in steps.items():
        if node in tangents or is_elementwise(node) or keeps_memory(node):
            found[node] = step
    return found


def _with_sums_of_results(nodes: Iterable[Node], steps: Mapping[Node, Step]) -> dict[Node, Step]:
    """`steps` with additions whose inputs are all results of tokens: grad_x is a sum of two products, in two views."""
    known = {n: step.out for n, step in steps.items() if step.out is not None}
    views: dict[Node, Step] = {}
    more: dict[Node, Step] = {}
    for node in nodes:
        if node in steps or not is_tensor(node):
            continue
        adds = target_name(node) == "aten.add.Tensor" and len(node.all_input_nodes) == 2
        if not (adds or keeps_memory(node)) or not all(n in known for n in node.all_input_nodes):
            continue
        step = step_of(node, {n: known[n] for n in node.all_input_nodes})
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
        raise NotTiled("nothing of it is read")
    for node in part.cut_inputs(part.steps):
        if not part.is_wide(node) or node.op == "placeholder":
            continue
        if has_tag(node, torch.Tag.nondeterministic_seeded):
            raise NotTiled(f"its random numbers are drawn for all tokens at once ({name_and_line(node)})")
        if again or node in part.tangents:
            raise NotTiled(
                f"it reads {type_text(node)} ({name_and_line(node)}), which is not known to treat tokens alike"
            )


def _check_order(nodes: list[Node], part: Part) -> None:
    """No token may need another token's result in the same loop."""
    for backward in (False, True):
        outputs = part.outputs_of(backward=backward)
        after = depends_on(nodes, outputs) - part.steps.keys()
        late = part.inputs(part.needed(outputs)) & (after if backward else after | set(part.tangents))
        if late:
            raise NotTiled(f"a token needs results of others ({name_and_line(min(late, key=nodes.index))})")


def _why_alone(seed: Node, steps: Mapping[Node, Step], is_wide: Callable[[Node], bool]) -> str:
    """Why a part with one product has no second one; "" if none follows, as behind most products."""
    stack, seen = [seed], {seed}
    while stack:
        for user in stack.pop().users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            if target_name(user) not in PRODUCTS and (is_wide(user) or not is_tensor(user)):
                stack.append(user)
    if not any(target_name(n) in PRODUCTS and n is not seed for n in seen):
        return ""
    readers = ((n, user) for n in steps if is_wide(n) for user in n.users if user not in steps and user in seen)
    return next((_why_read(*each) for each in readers), "")


def _why_read(node: Node, reader: Node) -> str:
    if reader.op == "output":
        return f"the program returns {type_text(node)} ({name_and_line(node)})"
    return f"{name_and_line(reader)} reads {type_text(node)} and is not known to treat tokens alike"


def keeps_memory(node: Node) -> bool:
    return node.op == "call_function" and (is_view(node) or target_name(node) in VIEWS)
