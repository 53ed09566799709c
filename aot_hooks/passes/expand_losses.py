"""Operators of losses in parts that treat each token alike: `nll_loss_forward` and its backward, means.

      nll_loss_forward(logp, target, weight, mean, ignored)  -->  -gather(logp, 1, target), where, sum, / sum of weights

Inductor's graphs have them in parts already. Graphs that run as they are (`inner="aten"`) have them whole.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from ..graphs.nodes import target_name
from ..graphs.rows import shape_of
from .edits import call

_aten, _convert = torch.ops.aten, torch.ops.prims.convert_element_type.default
_FORWARDS = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")  # with words in dimension 1
_BACKWARDS = ("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
_MEAN = 1  # torch's numbers of reductions: none, mean, sum
_NONE = 0


def expand_losses(graph: Graph) -> None:
    """Replace such operators in `graph`, in place."""
    for node in list(graph.nodes):
        name = target_name(node)
        if name in _FORWARDS and len(shape_of(node.args[0])) > 1:
            _nll_forward(graph, node)
        elif name in _BACKWARDS and len(shape_of(node.args[1])) > 1:
            _nll_backward(graph, node)
        elif name in ("aten.new_zeros.default", "aten.new_ones.default"):  # of whose first argument no value is read
            value = node.meta["val"]
            number = float(name == "aten.new_ones.default")
            with graph.inserting_before(node):
                made = graph.call_function(
                    _aten.full.default, (node.args[1], number), {"dtype": value.dtype, "device": value.device}
                )
            _replace(graph, node, made)
        elif name == "aten.mean.default" and _is_exact_mean(node):
            with graph.inserting_before(node):
                total = call(graph, _aten.sum.default, node.args[0], **node.kwargs)
                mean = call(graph, _aten.div.Tensor, total, node.args[0].meta["val"].numel())
            _replace(graph, node, mean)


def _is_exact_mean(node: Node) -> bool:
    """Whether the sum over the count rounds as the mean does, and the count is known."""
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    return len(value.shape) > 1 and isinstance(value.numel(), int) and value.dtype in (torch.float32, torch.float64)


def _replace(graph: Graph, node: Node, by: Node) -> None:
    by.meta = node.meta | by.meta
    node.replace_all_uses_with(by)
    graph.erase_node(node)


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _targets(graph: Graph, target: Any, ignored: Any) -> tuple[Node, Node]:
    """Which tokens count, and their targets, 0 for the others."""
    valid = call(graph, _aten.ne.Scalar, target, ignored)
    counted = call(graph, _aten.mul.Tensor, target, valid)
    return valid, counted


def _masked(graph: Graph, values: Node, valid: Node) -> Node:
    zero = call(graph, _aten.zeros_like.default, values)
    return call(graph, _aten.where.self, valid, values, zero)


def _weights(graph: Graph, valid: Node, counted: Node, weight: Any, dtype: torch.dtype) -> Node:
    """The weight of each token: its class's, or 1; 0 for those that don't count."""
    if weight is None:
        return call(graph, _convert, valid, dtype)
    flat = call(graph, _aten.reshape.default, counted, [-1])
    chosen = call(graph, _aten.index_select.default, weight, 0, flat)
    chosen = _masked(graph, call(graph, _aten.view_as.default, chosen, counted), valid)
    return chosen if _dtype(chosen) == dtype else call(graph, _convert, chosen, dtype)


def _nll_forward(graph: Graph, node: Node) -> None:
    logp, target, weight, reduction, ignored = node.args
    with graph.inserting_before(node):
        valid, counted = _targets(graph, target, ignored)
        column = call(graph, _aten.unsqueeze.default, counted, 1)
        picked = call(graph, _aten.squeeze.dim, call(graph, _aten.gather.default, logp, 1, column), 1)
        dtype = _dtype(picked)
        if dtype in (torch.float16, torch.bfloat16):  # torch's kernels add in float32 as well
            picked = call(graph, _convert, picked, torch.float32)
        loss = call(graph, _aten.neg.default, picked)
        weights = _weights(graph, valid, counted, weight, _dtype(loss))
        if weight is not None:
            loss = call(graph, _aten.mul.Tensor, loss, weights)
        loss = _masked(graph, loss, valid)
        total = call(graph, _aten.sum.default, weights)
        if reduction != _NONE:
            loss = call(graph, _aten.sum.default, loss)
        if reduction == _MEAN:
            loss = call(graph, _aten.div.Tensor, loss, total)
        if _dtype(loss) != dtype:
            loss, total = (call(graph, _convert, each, dtype) for each in (loss, total))
    for item in list(node.users):
        if item.target is operator.getitem:
            _replace(graph, item, (loss, total)[item.args[1]])  # type: ignore[index]
    graph.erase_node(node)


def _nll_backward(graph: Graph, node: Node) -> None:
    grad: Any
    logp: Any
    grad, logp, target, weight, reduction, ignored, total = node.args
    with graph.inserting_before(node):
        valid, counted = _targets(graph, target, ignored)
        if reduction == _MEAN:
            grad = call(graph, _aten.div.Tensor, grad, total)
        grad = call(graph, _aten.neg.default, grad)
        if weight is not None:
            grad = call(graph, _aten.mul.Tensor, grad, _weights(graph, valid, counted, weight, _dtype(logp)))
        zero = call(graph, _aten.full_like.default, grad, 0)
        grad = call(graph, _aten.where.self, valid, grad, zero)
        column = call(graph, _aten.unsqueeze.default, grad, 1)
        zeros = call(graph, _aten.zeros_like.default, logp)
        index = call(graph, _aten.unsqueeze.default, counted, 1)
        result = call(graph, _aten.scatter.src, zeros, 1, index, column)
    _replace(graph, node, result)
