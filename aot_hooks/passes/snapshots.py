"""Saved inputs that the forward writes to: the backward must read what the forward read.

      forward                                       forward
        out = mul(sub(x, mean), w)                    was = clone(mean)
        copy_(mean, lerp(mean, x_mean, .1))   -->     out = mul(sub(x, mean), w)
        return out, x, mean, w                        copy_(mean, lerp(mean, x_mean, .1))
                                                      return out, x, was, w

torch's partitioner may save an input, a running mean say, and recompute a value from it in the backward, though the
graph writes to that input meanwhile. Eager mode saves `x - mean` there. Here copies are saved in their place, made
before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cudagraph.placeholder import results_of, written_nodes

from ..graphs.nodes import SNAPSHOT, input_storages, storage_of
from ..graphs.saved import crossing_pairs
from .edits import after_inputs, call


def save_what_was_read(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int) -> None:
    """Save a copy of each saved input that `fw`, or torch after it, writes to. Edits both graphs in place."""
    written = written_inputs(fw, num_fwd_outputs)
    outputs = results_of(fw.graph)
    saved = outputs[num_fwd_outputs:]
    found = dict.fromkeys(n for n in saved if isinstance(n, Node) and storage_of(n) in written)
    copies = {n: _copy(n) for n in found}
    if not copies:
        return
    for node, placeholder in crossing_pairs(fw, bw, num_fwd_outputs):
        if node in copies:
            placeholder.meta["val"] = copies[node].meta["val"]
    fw.graph.output_node().args = ([*outputs[:num_fwd_outputs], *(copies.get(n, n) for n in saved)],)


def written_inputs(fw: GraphModule, num_fwd_outputs: int) -> set[Any]:
    """The storages of inputs that `fw`, or torch after it, writes to."""
    return input_storages(fw.graph).intersection(_written_storages(fw, num_fwd_outputs))


def _written_storages(fw: GraphModule, num_fwd_outputs: int) -> Iterator[Any]:
    """Storages that operators of `fw` write to, and inputs that torch writes to after `fw` ran.

    AOTAutograd describes the output with such an input's new value as that of a mutated input.
    """
    for node in fw.graph.nodes:
        yield from map(storage_of, written_nodes(node))
    descriptions = (fw.graph.output_node().meta.get("desc") or ())[:num_fwd_outputs]
    mutated = [getattr(d, "mutated_input", None) for d in descriptions]
    for node in fw.graph.find_nodes(op="placeholder"):
        if node.meta.get("desc") is not None and node.meta["desc"] in mutated:
            yield storage_of(node)


def _copy(node: Node) -> Node:
    """A copy of `node`, an input or a view of one, made right after it: every write comes later."""
    with node.graph.inserting_after(after_inputs(node)):
        copy = call(node.graph, torch.ops.aten.clone.default, node)
    copy.meta |= {k: v for k, v in node.meta.items() if k not in ("val", "desc")} | {SNAPSHOT: True}
    return copy
