"""Gives each view in the backward the region of its readers.

      h is saved; v = h.t() is called in region A, v @ w in region B
      backward   v = h.t() [A] --> mm [B]       becomes       v = h.t() [B] --> mm [B]

A region covers what its operators save. `mm` saved v, but the backward computes v from h again, so the view reads h.
A view with readers in several regions becomes one view for each region.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ..graphs.nodes import REGION, annotation, view_source


def label_views(graph: Graph) -> None:
    """Give each view in `graph`, a backward, the region of its readers, in place."""
    for node in reversed(graph.nodes):
        if node.op != "call_function" or view_source(node) is None:
            continue
        readers: dict[str | None, list[Node]] = {}
        for user in node.users:
            if user.op != "output":
                readers.setdefault(annotation(user, REGION), []).append(user)
        for number, (region, users) in enumerate(readers.items()):
            view = node
            if number:
                with graph.inserting_after(node):
                    view = graph.node_copy(node)
                for user in users:
                    user.replace_input_with(node, view)
            if annotation(view, REGION) != region:
                custom = {key: value for key, value in (view.meta.get("custom") or {}).items() if key != REGION}
                view.meta["custom"] = custom if region is None else {**custom, REGION: region}
