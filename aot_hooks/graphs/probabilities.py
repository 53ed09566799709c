"""Probabilities that were rounded are divided by their sum, so that the derivative of softmax bears the rounding.

      y * (g - sum(g * y))  =  y * sum(y_j * (g - g_j))        only if the numbers of y add up to one

The right side is made of products of the other numbers, so 6% of each is some percent of it. The left side is a
difference. Of a token that a router sends to one expert with 0.99, the terms are 100 times the difference: a y that
adds up to 1.03 is 3 times as far off as the gradient is large. The same holds for a head that attends to one token.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.fx import Node

from cudagraph.placeholder import nearest_first

from . import read_tables as tables
from .nodes import op_name, target_name, view_source

_aten = torch.ops.aten
# The second gives zeros for a row of scores that are all masked; attention made of single operators calls it.
_SOFTMAX = frozenset(("aten._softmax.default", "aten._safe_softmax.default"))
# Views that have whole rows of the argument, if the last size is the same. A column of a square matrix is no such row.
_SAME_ROWS = frozenset(
    f"aten.{name}.default" for name in ("alias", "detach", "expand", "unsqueeze", "view", "_unsafe_view")
)


def summed_dimension(node: Node) -> int | None:
    """The dimension along which softmax divides the numbers of `node` by their sum, or did; None if it does not.

    `node` is a result of softmax, or the exponentials that become one. Views count if softmax is along the last
    dimension and they keep it.
    """
    value = node.meta["val"]
    moved = False
    while (source := view_source(node)) is not None:
        if target_name(node) not in _SAME_ROWS:
            return None
        moved |= node.target not in (_aten.alias.default, _aten.detach.default)
        node = source
    dimension = _dimension_of(node)
    if dimension is None or value.dim() == 0:
        return None
    rank = node.meta["val"].dim()
    if not moved:
        return int(dimension % rank)
    is_last = dimension % rank == rank - 1 and value.shape[-1] == node.meta["val"].shape[-1]
    return int(value.dim()) - 1 if is_last else None


def _dimension_of(node: Node) -> int | None:
    """The dimension of the softmax whose result, or whose exponentials, `node` computes."""
    if target_name(node) in _SOFTMAX:
        return cast("int", node.args[1])
    if op_name(node) not in _SOFTMAX:  # a piece of it, for Inductor
        return None
    if node.target is _aten.where.self:  # zeros, where a row is masked
        node = cast("Node", node.args[2])
    exponentials = node.args[0] if node.target is _aten.div.Tensor else node
    if not isinstance(exponentials, Node) or exponentials.target is not _aten.exp.default:
        return None
    totals = [user for user in exponentials.users if user.target is _aten.sum.dim_IntList]
    return cast("list[int]", totals[0].args[1])[0] if totals else None


def chooses(node: Node) -> bool:
    """Whether the program chooses by the probabilities `node`: a router's, which are small beside its experts.

    The smallest of them decide the gradient of a router that is sure, and `int8` rounds them to zero.
    """
    if node.target is not _aten.div.Tensor and str(node.target) not in _SOFTMAX:
        while (source := view_source(node)) is not None:
            node = source
    copies = tables.MOVES | tables.CONVERSIONS
    readers = nearest_first([node], lambda n: [u for u in n.users if n is node or str(n.target) in copies])
    return op_name(node) in _SOFTMAX and any(str(reader.target) in tables.CHOOSE for reader in readers)


def is_division_by_sum(node: Node, exponentials: Node) -> bool:
    """Whether `node` is the piece of softmax that makes probabilities of `exponentials`."""
    return op_name(node) in _SOFTMAX and node.target is _aten.div.Tensor and node.args[0] is exponentials


def as_probabilities(y: torch.Tensor, dimension: int, *, keeps_exact: bool = False) -> torch.Tensor:
    """`y`, divided by its sum along `dimension`; at least in single precision inside.

    `keeps_exact`: a sum that is one but for roundings counts as one.
    """
    wide = y if y.dtype is torch.float64 else y.float()
    total = wide.sum(dimension, keepdim=True)
    total = torch.where(total == 0, 1.0, total)  # rounded to zeros
    if keeps_exact:
        rounding = max(tables.NOISE, torch.finfo(y.dtype).eps)
        total = torch.where((total - 1.0).abs() <= rounding, 1.0, total)
    return (wide / total).to(y.dtype)
