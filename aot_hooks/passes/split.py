"""Operators of a backward that decide and multiply at once, written as the two: each part has its own way then.

      before    gx, gw = _prelu_kernel_backward(g, x, w)            reads x by its sign and by its numbers
      after     m = x > 0                                           a decision: one bit a number, from the unrounded x
                gx = where(m, g, w * g)   gw = masked_fill(x * g, m, 0)  products: x may be rounded

The results have the same bits. Under Inductor torch itself does this.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch.fx import GraphModule, Node

from ..graphs.nodes import seen_from
from .edits import call, described_as

_aten = torch.ops.aten


def split_decisions(bw: GraphModule, slots: Collection[Node]) -> None:
    """Write such operators of `bw` as their parts, in place, where they read a tensor that may be rounded.

    `slots`: the inputs of `bw` for these tensors. The parts take more kernels and memory than the one operator.
    """
    graph = bw.graph
    every = [node for node in graph.nodes if str(node.target) == "aten._prelu_kernel_backward.default"]
    nodes = [node for node in every if not set(seen_from(node.args[1])).isdisjoint(slots)]
    for node in nodes:
        g, x, w = node.args
        with graph.inserting_before(node), described_as(node):
            positive = call(graph, _aten.gt.Scalar, x, 0)
            parts = (
                call(graph, _aten.where.self, positive, g, call(graph, _aten.mul.Tensor, w, g)),
                call(graph, _aten.masked_fill.Scalar, call(graph, _aten.mul.Tensor, x, g), positive, 0),
            )
        for user in list(node.users):
            if user.target is operator.getitem:
                user.replace_all_uses_with(parts[int(str(user.args[1]))])
                graph.erase_node(user)
        if not node.users:
            graph.erase_node(node)
    if nodes:
        graph.eliminate_dead_code()
