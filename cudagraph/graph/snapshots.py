"""Saved inputs that the forward writes to: the backward must read what the forward read.

      forward                                       forward
        out = mul(sub(x, mean), w)                    was = clone(mean)
        copy_(mean, lerp(mean, x_mean, .1))   -->     out = mul(sub(x, mean), w)
        return out, x, mean, w                        copy_(mean, lerp(mean, x_mean, .1))
                                                      return out, x, was, w

torch's partitioner may save an input, a running mean say, and recompute a value from it in the backward, though the
graph writes to that input meanwhile. Eager mode saves `x - mean` there. Here copies are saved in their place, made
before anything is written. `aot_hooks` uses the same rule.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..placeholder import after_inputs, results_of, written_nodes
from ..torch_private import compilers
from ..torch_private import cuda as torch_cuda
from .partition import memory_of

log = logging.getLogger("cudagraph")
SNAPSHOT = "cudagraph_snapshot"  # key of a node's meta: a copy of an input, made before the graph writes to the input


def partition(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """torch's own partition of `joint`; a saved input that the forward writes to is copied first.

    With `activation_memory_budget` below 1 torch may draw random numbers anew in the backward. Such a graph is
    partitioned without that budget.
    """
    fw, bw = compilers.min_cut_partition(joint, joint_inputs, **kwargs)
    if drawn := _drawn_twice(fw, bw):
        log.warning(
            "cudagraph: under torch's activation_memory_budget the backward would draw the random numbers of %s once "
            "more, and others than the forward: the graph is partitioned without that budget. "
            "aot_hooks saves them and keeps the budget: backend='aot_hooks', options={'cudagraphs': True}",
            ", ".join(sorted(drawn)),
        )
        fw, bw = compilers.min_cut_partition(joint, joint_inputs, whole_budget=True, **kwargs)
    if save_what_was_read(fw, bw, kwargs["num_fwd_outputs"]):
        for gm in (fw, bw):
            gm.graph.lint()
            gm.recompile()
    return fw, bw


def _drawn_twice(fw: GraphModule, bw: GraphModule) -> set[str]:
    """The operators of nodes that draw random numbers in both graphs. torch copies a node with its name.

    What torch runs with a state of the generator that it passes on is a higher-order operator, which has no tags.
    """
    tag = torch.Tag.nondeterministic_seeded
    drawn = {(n.name, n.target) for n in fw.graph.nodes if tag in getattr(n.target, "tags", ())}
    return {str(n.target) for n in bw.graph.nodes if (n.name, n.target) in drawn}


def save_what_was_read(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int, others: Collection[Node] = ()) -> bool:
    """Save a copy of each saved input that `fw`, or torch after it, writes to, and of `others`. Edits both graphs.

    Returns whether it has changed them. Call it right after the partition: the backward's inputs have the names of
    what the forward saves.
    """
    targets = _written(fw, num_fwd_outputs)
    if not targets and not others:  # as in most graphs
        return False
    memory = memory_of(fw.graph.nodes)
    written = set().union(*(memory[node] for node in targets))
    written &= set().union(*(memory[node] for node in fw.graph.find_nodes(op="placeholder")))
    outputs = results_of(fw.graph)
    saved = dict.fromkeys(value for value in outputs[num_fwd_outputs:] if isinstance(value, Node))
    copies = {node: _copy(node) for node in saved if node in others or not memory[node].isdisjoint(written)}
    if not copies:
        return False
    by_name = {node.name: node for node in bw.graph.find_nodes(op="placeholder")}
    for node, copy in copies.items():
        _rename(by_name[node.name], copy)
    kept = (copies.get(value, value) for value in outputs[num_fwd_outputs:])
    fw.graph.output_node().args = ([*outputs[:num_fwd_outputs], *kept],)
    return True


def written_inputs(fw: GraphModule, num_fwd_outputs: int) -> list[Node]:
    """The inputs of `fw` whose memory `fw`, or torch after it, writes to."""
    targets = _written(fw, num_fwd_outputs)
    if not targets:
        return []
    memory = memory_of(fw.graph.nodes)
    written = set().union(*(memory[node] for node in targets))
    return [node for node in fw.graph.find_nodes(op="placeholder") if not memory[node].isdisjoint(written)]


def _written(fw: GraphModule, num_fwd_outputs: int) -> list[Node]:
    """The nodes that operators of `fw` write to, and the inputs that torch writes to after `fw` ran.

    AOTAutograd describes the output with such an input's new value as that of a mutated input.
    """
    descriptions = (fw.graph.output_node().meta.get("desc") or ())[:num_fwd_outputs]
    mutated = [getattr(description, "mutated_input", None) for description in descriptions]
    inputs = [node for node in fw.graph.find_nodes(op="placeholder") if node.meta.get("desc") is not None]
    by_operators = [target for node in fw.graph.nodes for target in written_nodes(node)]
    return by_operators + [node for node in inputs if node.meta["desc"] in mutated]


def _copy(node: Node) -> Node:
    """A copy of `node`, an input or a view of one, made right after it: every write comes later."""
    value = node.meta["val"]
    with node.graph.inserting_after(after_inputs(node)):
        copy = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    with torch.no_grad(), torch_cuda.without_autocast(), torch_cuda.fake_mode_of(value):
        copy.meta["val"] = torch.ops.aten.clone.default(value)
    copy.meta |= {k: v for k, v in node.meta.items() if k not in ("val", "desc")} | {SNAPSHOT: True}
    return copy


def _rename(placeholder: Node, copy: Node) -> None:
    """Give the backward's input the name and the value of `copy`. By the name of a parameter or buffer it would count
    as a static input."""
    with placeholder.graph.inserting_before(placeholder):
        renamed = placeholder.graph.placeholder(copy.name)
    renamed.target = renamed.name  # the argument's name in the code
    renamed.meta = {**placeholder.meta, "val": copy.meta["val"]}
    placeholder.replace_all_uses_with(renamed)
    placeholder.graph.erase_node(placeholder)
