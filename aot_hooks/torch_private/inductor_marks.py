"""Marks in the `meta` of graph nodes, by which the rewrite tells Inductor's scheduler about them.

passes.inline --PACKED_ROW, mark_alone--> nodes of (fw', bw') --lowered--> inductor_fusion reads the marks
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node

PACKED_ROW = "aot_hooks_node"  # on nodes that a hook put into the graph
ALONE = "aot_hooks_alone"
ALONE_IF_WRITTEN = "aot_hooks_alone_if_written"  # counts where no node of a kernel has the mark above


def mark_alone(nodes: Sequence[Node], name: str, key: str = ALONE) -> None:
    """Let Inductor fuse `nodes` with each other only."""
    for node in nodes:
        node.meta[key] = name


def marks_of(graph: GraphModule) -> str:
    """All marks of a graph's nodes with their positions, as text for cache keys."""
    keys = (ALONE, ALONE_IF_WRITTEN)
    marks = [(i, *map(n.meta.get, keys), PACKED_ROW in n.meta) for i, n in enumerate(graph.graph.nodes)]
    return repr([mark for mark in marks if any(mark[1:])])
