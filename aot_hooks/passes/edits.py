"""Small edits of graphs that several passes make. A new node gets its value by running it on fake tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..graphs.nodes import NO_VERSION_CHECK
from ..graphs.saved import SavedValue
from ..torch_private import values as torch_values

__all__ = [
    "after_inputs",
    "call",
    "clean_name",
    "insert_backward_input",
    "last_use",
    "positions",
    "share_version_check",
]


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call of `target` at the graph's insertion point; the first argument is a node that holds a tensor."""
    node = graph.call_function(target, args, kwargs)
    values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    with torch_values.tracing_on_fakes(values[0].fake_mode):
        node.meta["val"] = target(*values, **kwargs)
    return node


def after_inputs(node: Node) -> Node:
    """`node`, or the last of the graph's inputs if it is an input: nodes are inserted after the inputs."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node


def positions(graph: Graph) -> dict[Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def last_use(node: Node, position: Mapping[Node, int] | None = None) -> Node:
    """The last node of the forward that reads the storage of `node`, through views as well; not the output."""
    position = positions(node.graph) if position is None else position
    key = torch_values.storage_key(node.meta["val"])
    last, stack = node, [node]
    while stack:
        for user in stack.pop().users:
            if user.op == "output" or user not in position:
                continue
            last = max(last, user, key=position.__getitem__)
            val = user.meta.get("val")
            if isinstance(val, torch.Tensor) and val.layout is torch.strided and torch_values.storage_key(val) == key:
                stack.append(user)
    return last


def clean_name(name: str) -> str:
    """`name` without "tangents" and "primals": AOTAutograd tells a graph's inputs apart by these words."""
    return name.replace("tangents", "tan").replace("primals", "prim")


def insert_backward_input(bw: GraphModule, before: Node, name: str, val: Any, like: SavedValue) -> Node:
    """A new input of the backward that holds `val`, described to AOTAutograd as the one of `like`."""
    with bw.graph.inserting_before(before):
        placeholder = bw.graph.placeholder(clean_name(name))
    placeholder.target = placeholder.name  # the argument's name in the code; two packings of one value need two
    placeholder.meta = {"val": val}
    if "desc" in like.bw_node.meta:
        placeholder.meta["desc"] = like.bw_node.meta["desc"]
    return placeholder


def share_version_check(node: Node, like: SavedValue) -> None:
    """Save the forward's `node` without torch's check of versions, if `like` is saved so."""
    if like.fw_node.meta.get(NO_VERSION_CHECK):
        node.meta[NO_VERSION_CHECK] = True
