"""Saved inputs that the forward writes to: the backward must read what the forward read.

      forward                                       forward
        out = mul(sub(x, mean), w)                    was = clone(mean)
        copy_(mean, lerp(mean, x_mean, .1))   -->     out = mul(sub(x, mean), w)
        return out, x, mean, w                        copy_(mean, lerp(mean, x_mean, .1))
                                                      return out, x, was, w

torch's partitioner may save an input and compute again from it what the backward reads, also where the graph writes to
that input afterwards: a running mean, say. Eager mode saves `x - mean` there. `save_what_was_read(fw, ...)` puts copies
in their place, made before anything is written; no other graph is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graphs.nodes import storage_of
from ..graphs.saved import is_size
from ..torch_private import values as torch_values

__all__ = ["SNAPSHOT", "save_what_was_read"]

SNAPSHOT = "aot_hooks_snapshot"  # the key under meta of such a copy


def save_what_was_read(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int) -> None:
    """Save a copy of each saved input that `fw`, or torch after it, writes to. Edits both graphs in place."""
    written = set(_written(fw, num_fwd_outputs))
    output = fw.graph.output_node()
    outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    saved = [n for n in outputs[num_fwd_outputs:] if isinstance(n, Node) and storage_of(n) in written]
    given = {storage_of(n) for n in fw.graph.find_nodes(op="placeholder")}
    copies = {n: _copy(n) for n in dict.fromkeys(saved) if storage_of(n) in given}
    if not copies:
        return
    after = outputs[num_fwd_outputs:]
    output.args = ([*outputs[:num_fwd_outputs], *(copies.get(n, n) for n in after)],)
    # sizes come last here and first there
    others = [n for n in after if not (isinstance(n, Node) and is_size(n))]
    placeholders = bw.graph.find_nodes(op="placeholder")[len(after) - len(others) :]
    for node, placeholder in zip(others, placeholders, strict=False):
        if node in copies:
            placeholder.meta["val"] = copies[node].meta["val"]
    fw.graph.lint()
    fw.recompile()


def _written(fw: GraphModule, num_fwd_outputs: int) -> Iterator[Any]:
    """Storages that operators of `fw` write to, and those of inputs to which torch copies an output of `fw` after it
    ran, as AOTAutograd's descriptions of the outputs say."""
    for node in fw.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
                yield from (storage_of(n) for n in torch_values.pytree.tree_leaves(value) if isinstance(n, Node))
    descriptions = (fw.graph.output_node().meta.get("desc") or ())[:num_fwd_outputs]
    mutated = [getattr(d, "mutated_input", None) for d in descriptions]
    for node in fw.graph.find_nodes(op="placeholder"):
        if node.meta.get("desc") is not None and node.meta["desc"] in mutated:
            yield storage_of(node)


def _copy(node: Node) -> Node:
    """A copy of `node`, an input or a view of one, made right after it: every write comes later."""
    at = node
    while at.op == "placeholder" and at.next.op == "placeholder":
        at = at.next
    with node.graph.inserting_after(at):
        copy = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = {k: v for k, v in node.meta.items() if k not in ("val", "desc")} | {SNAPSHOT: True}
    value = node.meta["val"]
    with torch_values.tracing_on_fakes(value.fake_mode):
        copy.meta["val"] = torch.ops.aten.clone.default(value)
    return copy
