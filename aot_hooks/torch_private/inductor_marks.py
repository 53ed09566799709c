"""What the rewrite says of its nodes to Inductor's scheduler: marks in their `meta`.

inline, place --PACKED_ROW, mark_alone--> nodes of (fw', bw') --lowered--> inductor/scheduling reads them
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule, Node

__all__ = ["ALONE", "PACKED_ROW", "mark_alone", "marks_of"]

PACKED_ROW = "aot_hooks_node"  # on nodes that a hook put into the graph
ALONE = "aot_hooks_alone"


def mark_alone(nodes: Sequence[Node], name: str) -> None:
    """Keep Inductor from fusing `nodes` with any but each other."""
    for node in nodes:
        node.meta[ALONE] = name


def marks_of(graph: GraphModule) -> str:
    """All marks in a graph, by position; as text."""
    marks = [(i, n.meta.get(ALONE), PACKED_ROW in n.meta) for i, n in enumerate(graph.graph.nodes)]
    return repr([mark for mark in marks if any(mark[1:])])
