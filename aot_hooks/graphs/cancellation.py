"""Sums and differences that a backward computes again, and powers of powers: there a small relative error may grow.

      d = x - x.mean()     eager mode saves d, and rounds it: off by a share of d
      gelu(d)              a backward that saved x computes d again from the rounded x: off by the same share of x,
                           which is more than d itself where d is small beside x

The pieces of an operator that is smooth as a whole (a norm, a loss) do not count: in eager mode it reads the same
rounded numbers. The pieces of an operator that no table lists do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from . import read_tables as tables

_aten = torch.ops.aten


def may_cancel(user: Node) -> bool:
    """Whether `user` adds up numbers that may be of either sign.

    Every total counts, also one of squares, and every sum with a factor such as `alpha`.
    """
    name, whole = str(user.target), str(user.meta.get("original_aten") or user.target)
    sums = tables.SUMS | tables.TOTALS
    if name not in sums or (whole not in sums and whole in tables.WHOLES):
        return False
    if name in tables.TOTALS or user.kwargs or len(user.args) != 2:
        return True
    if constants := [a for a in user.args if not isinstance(a, Node)]:  # 1 + tanh(x), 1 - sigmoid(x)
        return str(user.all_input_nodes[0].target) not in tables.AT_MOST_ONE or constants not in ([1], [-1])
    return name != "aten.add.Tensor" or not _same_sign(*user.args)


def too_high_power(user: Node) -> bool:
    """Whether `user` is a power of a power, or a high one: x ** n has n times the relative error of x."""
    if user.target is _aten.pow.Tensor_Scalar:
        exponent: Any = user.args[1]
        high = not isinstance(exponent, int | float) or abs(exponent) > tables.MOST_POWER
        return high or (_is_power(user.args[0]) and exponent != 1)
    return user.target is _aten.mul.Tensor and user.args[0] is user.args[1] and _is_power(user.args[0])


def _is_power(node: Any) -> bool:
    """Whether `node` is a square, or a power with another exponent than -1 to 1."""
    if not isinstance(node, Node):
        return False
    if node.target is _aten.mul.Tensor:
        return node.args[0] is node.args[1]
    exponent = node.args[1] if node.target is _aten.pow.Tensor_Scalar else 1
    return not (isinstance(exponent, int | float) and abs(exponent) <= 1)


def _same_sign(a: Any, b: Any) -> bool:
    """Whether two terms have the same sign: x and a positive number times x ** 3, as in the usual formula of GELU."""
    for term, base in ((a, b), (b, a)):
        while isinstance(term, Node) and term.target is _aten.mul.Tensor:
            first, second = term.args
            number, other = (first, second) if isinstance(first, int | float) else (second, first)
            if not isinstance(number, int | float) or number < 0:
                break
            term = other
        if term is base:
            return True
        if isinstance(term, Node) and term.target is _aten.pow.Tensor_Scalar and term.args[0] is base:
            return isinstance(term.args[1], int | float) and term.args[1] % 2 == 1
    return False
