"""Gradients of rows that a permutation has gathered: they are gathered as well, in place of added to zeros.

      forward                            backward, before                         after
        order = sort(expert).indices
        back = sort(order).indices
        x = h[order // 8]                dh = index_put(zeros, [order // 8], dx)  dh = dx[back].view(-1, 8, n).sum(1)
        z = y[back]                      dy = index_put(zeros, [back], dz)        dy = dz[order]

So a mixture of experts sorts each token's 8 copies by expert, and takes the results back. To add rows of bfloat16 a GPU
sorts the indices once more and runs a kernel of its own, whose operands are in memory; a gather is fused. The numbers
are the same, but for sums, which are rounded once and not after each row, and for the sign of zeros.

If two products read x, as the gate and the up projection of experts do, dx is a sum. Each term is gathered by itself
then, at once, so only one has all its rows in memory: (a + b)[back] ... .sum(1) is a[back] ... .sum(1) + b[back] ...
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from ..graphs.nodes import target_name
from ..graphs.read_tables import CONVERSIONS
from ..torch_private.values import same_size
from .edits import call, described_as

_aten = torch.ops.aten
_PUTS = ("aten.index_put.default", "aten._unsafe_index_put.default", "aten.index_add.default")
_ZEROS = ("aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default")
QUOTIENTS = ("aten.floor_divide.default", "aten.div.Tensor_mode")
_COPIES = ("aten.clone.default", "aten.alias.default", "aten.detach.default")
_SORTS = ("aten.sort.default", "aten.sort.stable")
_SAME = (*_COPIES, "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")


class _Quotients(NamedTuple):
    """Numbers of rows: those of a permutation, each divided by `divisor` and rounded down. None: 0, 1, 2, ..."""

    permutation: Node | None
    divisor: int


def gather_gradients(joint: GraphModule, *, sums: bool) -> None:
    """Have the backward of `joint` gather rows that it adds to zeros, where each sum has equally many, in place.

    `sums`: also sums of several rows, which have other last digits then.
    """
    puts = [node for node in joint.graph.nodes if target_name(node) in _PUTS]
    replaced = [put for put in puts if put.meta.get("partitioner_tag") == "is_backward" and _replace(put, sums)]
    if replaced:
        joint.graph.eliminate_dead_code()
        joint.recompile()


def _operands(put: Node) -> tuple[Any, Any, Any] | None:
    """The tensor that `put` adds to, the numbers of the rows, and what it adds; None if it does not add to rows."""
    args: Any = put.args
    if put.target is _aten.index_add.default:
        return (args[0], *args[2:]) if args[1] == 0 and not put.kwargs else None
    return (args[0], args[1][0], args[2]) if len(args[1]) == 1 and args[3:] == (True,) else None


def _replace(put: Node, sums: bool) -> bool:
    """Have the rows that `put` adds to zeros gathered instead. False, with nothing changed, if that is not possible."""
    operands = _operands(put)
    if operands is None or not _is_zeros(operands[0]) or (found := _quotients(operands[1])) is None:
        return False
    _, numbers, rows = operands
    result, own = put.meta["val"], rows.meta["val"]
    width, count = result.shape[1:], numbers.meta["val"].shape[0]
    if own.shape[1:] != width or own.dtype != result.dtype or not all(type(n) is int for n in width):
        return False
    if not same_size(own.shape[0], count) or not same_size(count, result.shape[0] * found.divisor):
        return False
    if found.divisor > 1 and not sums:
        return False
    graph = put.graph
    with described_as(put):  # torch marks what belongs to the backward
        with graph.inserting_before(put):
            back = None if found.permutation is None else _inverse(found.permutation)
            if back is None and found.permutation is not None:  # index_put would sort, too
                back = call(graph, operator.getitem, call(graph, _aten.sort.default, found.permutation), 1)
        terms = _terms(rows) if found.divisor > 1 else [rows]
        made = [_summed(put, term, back, (found.divisor, *width)) for term in terms]
        with graph.inserting_before(put):
            result = functools.reduce(functools.partial(call, graph, _aten.add.Tensor), made)
    put.replace_all_uses_with(result)
    graph.erase_node(put)
    return True


def _terms(rows: Node) -> list[Node]:
    """The terms of `rows`, if it is a sum that nothing else reads, as of gradients by two products. Each is summed up
    by itself, so no two of them are in memory at the same time."""
    terms, readers = rows.all_input_nodes, [n for n in rows.users if target_name(n) not in _ZEROS]
    if target_name(rows) != "aten.add.Tensor" or rows.kwargs or len(readers) > 1 or len(terms) != 2:
        return [rows]
    value = rows.meta["val"]
    alike = all(n.meta["val"].shape == value.shape and n.meta["val"].dtype == value.dtype for n in terms)
    return [each for term in terms for each in _terms(term)] if alike else [rows]


def _summed(put: Node, rows: Node, back: Node | None, sizes: Sequence[int]) -> Node:
    """`rows` in the order `back`, and of each `sizes[0]` of them the sum: before `put`, as soon as both are there."""
    graph, made, (divisor, *width) = put.graph, rows, sizes
    with graph.inserting_before(put if rows.op == "placeholder" else max(rows, back or rows).next):
        if back is not None:
            made = _gathered(graph, rows, back)
        if divisor > 1:
            made = call(graph, _aten.view.default, made, [-1, divisor, *width])
            made = call(graph, _aten.sum.dim_IntList, made, [1])
    return made


def _gathered(graph: Graph, rows: Node, back: Node) -> Node:
    """A tensor that has in row j what `rows` has in row `back[j]`."""
    repeated = _repeated(rows)
    if repeated is not None:
        rows, times = repeated
        back = call(graph, _aten.div.Tensor_mode, back, times, rounding_mode="floor")
    return call(graph, _aten.index.Tensor, rows, [back])


def _inverse(permutation: Node) -> Node | None:
    """The inverse of `permutation`, whose sort gives it, or which is the sort of it."""
    (source,) = _sort_of(permutation).all_input_nodes
    found = _quotients(source)
    if found is not None and found.divisor == 1:
        return found.permutation
    graph = permutation.graph
    for target in (_aten.sort.default, _aten.sort.stable):
        for sort in graph.find_nodes(op="call_function", target=target):
            if _quotients(sort.all_input_nodes[0]) == (permutation, 1):
                return next((user for user in sort.users if user.args[1] == 1), None)
    return None


def _sort_of(permutation: Node) -> Node:
    (sort,) = permutation.all_input_nodes
    return sort


def _is_zeros(node: Any) -> bool:
    return target_name(node) in _ZEROS or (target_name(node) == "aten.full.default" and node.args[1] == 0)


def _quotients(numbers: Any) -> _Quotients | None:
    """Which rows `numbers` are, a node of the graph; None if they may be any."""
    divisor = 1
    while isinstance(numbers, Node) and isinstance(value := numbers.meta.get("val"), torch.Tensor):
        if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
            return None
        name = target_name(numbers)
        args: Any = numbers.args
        if name in QUOTIENTS and type(args[1]) is int and args[1] > 0:
            if name == "aten.div.Tensor_mode" and numbers.kwargs.get("rounding_mode") != "floor":
                return None
            divisor *= args[1]
        elif (repeated := _repeated(numbers)) is not None:  # 0, 0, 1, 1, ... of 0, 1, ...
            base, times = repeated
            return _Quotients(None, divisor * times) if _quotients(base) == (None, 1) else None
        elif name in ("aten.arange.default", "prims.iota.default"):
            plain = name == "aten.arange.default" or (numbers.kwargs["start"], numbers.kwargs["step"]) == (0, 1)
            return _Quotients(None, divisor) if plain else None
        elif name == "aten.index.Tensor" and len(args[1]) == 1:  # (0, 0, 1, 1, ...)[order] is order // 2
            of, at = _quotients(args[0]), _quotients(args[1][0])
            if of is None or of.permutation is not None or at is None or at.divisor > 1:
                return None
            return _Quotients(at.permutation, divisor * of.divisor)
        elif numbers.target is operator.getitem and args[1] == 1 and target_name(args[0]) in _SORTS:
            return _Quotients(numbers, divisor)
        elif name not in (*_SAME, *CONVERSIONS):
            return None
        numbers = args[0]
    return None


def _repeated(rows: Node) -> tuple[Node, int] | None:
    """A node and a number n, if `rows` has each row of that node n times in turn: a, a, b, b, ... of a, b, ..."""
    node = rows
    while target_name(node) in _SAME and node.meta["val"].shape == rows.meta["val"].shape:
        node = node.args[0]  # type: ignore[assignment]
    while target_name(node) in _COPIES:
        node = node.args[0]  # type: ignore[assignment]
    if node is rows or target_name(node) != "aten.expand.default":
        return None
    single: Any = node.args[0]
    if target_name(single) != "aten.unsqueeze.default" or single.args[1] != 1:
        return None
    base, shape = single.args[0], node.meta["val"].shape
    own, times = base.meta["val"].shape, shape[1]
    widths = (shape[2:], own[1:], rows.meta["val"].shape[1:])
    plain = type(times) is int and all(type(n) is int for width in widths for n in width) and len({*widths}) == 1
    return (base, times) if plain and same_size(shape[0], own[0]) else None
