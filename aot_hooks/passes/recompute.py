"""Has the backward compute nodes of the forward once more, in place of getting what they were saved for.

      forward                  forward               backward                 backward
        a = gelu(x)              a = gelu(x)           g = mm(gy, a)            a = gelu(x)
        y = mm(a, w)     -->     y = mm(a, w)                          -->      g = mm(gy, a)
        return y, a              return y, x

As in torch's partition, such a node stands just before the first node that needs it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.fx import GraphModule, Node

from cudagraph.graph.snapshots import SNAPSHOT

from ..graphs.nodes import is_view
from ..graphs.repeats import twins
from ..graphs.saved import crossing_pairs
from .edits import with_inputs
from .repeats import slots_of, stop_saving


def recompute_nodes(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int, again: Collection[str]) -> None:
    """Have `bw` compute the nodes of `fw` that are named in `again`. What they read is saved. Edits both in place."""
    position = {node: i for i, node in enumerate(fw.graph.nodes)}
    pairs = [(n, slot) for n, slot in crossing_pairs(fw, bw, num_fwd_outputs) if isinstance(n, Node)]
    copies: dict[Any, Node] = {
        n.args[0]: slot for n, slot in pairs if n.meta.get(SNAPSHOT)
    }  # of inputs that may be written to
    twin_of = twins(fw, bw, num_fwd_outputs, {slot: n for n, slot in copies.items()})
    there = {node: twin for twin, node in twin_of.items() if twin.op == "call_function"} | copies
    saved = {n for n, _ in pairs}
    ends = [node for node in position if node.op == "call_function" and node.name in again]

    def is_read(node: Node) -> bool:  # a view is made again from what it is a view of
        return node.name not in again and (node in there or node in saved or not is_view(node))

    nodes = sorted(with_inputs(ends, is_read), key=position.__getitem__)
    reads = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if is_read(n) and n not in there)
    known = there | slots_of(fw, bw, num_fwd_outputs, reads) | copies
    order = list(bw.graph.nodes)
    for node in nodes:
        if node not in there:
            with bw.graph.inserting_before(bw.graph.output_node()):
                there[node] = bw.graph.node_copy(node, known.__getitem__)
        known[node] = there[node]
    crossing = [(n, slot) for n, slot in crossing_pairs(fw, bw, num_fwd_outputs) if n in known and n.name in again]
    for node, slot in crossing:
        slot.replace_all_uses_with(known[node])
    stop_saving(fw, bw, num_fwd_outputs, crossing)
    waiting = {twin: position[node] for node, twin in there.items() if twin.op != "placeholder"}
    for reader in order:
        if reader.op != "placeholder" and reader not in waiting:
            first = sorted(with_inputs(reader.all_input_nodes, lambda n: n not in waiting), key=waiting.__getitem__)
            for node in first:
                reader.prepend(node)
                del waiting[node]
