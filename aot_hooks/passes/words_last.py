"""Losses of transposed logits, `cross_entropy(logits.transpose(1, 2), labels)`, as losses of logits as they are.

      permute(z, [0, 2, 1])     [B, V, T]                 z                    [B, T, V]
      log_softmax(., 1)                            -->    log_softmax(z, 2)
      gather(., 1, i)           [B, 1, T]                 gather(., 2, permute(i, [0, 2, 1]))
      squeeze(., 1)             [B, T]                    squeeze(., 2)

A permutation of logits is moved behind what reads it, as far as that is known to work in any order of dimensions. There
it meets the permutation of the gradient, or the words are gone. So all tokens' dimensions stand side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..graphs.nodes import argument_called, is_tensor
from ..graphs.rows import (
    ALONG,
    PERMUTES,
    REDUCTIONS,
    VIEWS,
    is_elementwise,
    order_of,
    reduced_dims,
    shape_of,
)
from ..torch_private.values import same_size
from .edits import run_on_fakes

_aten = torch.ops.aten
_TOTALS = ("aten.sum.default", "aten.mean.default")
_META = ("custom", "stack_trace", "nn_module_stack")


@dataclass(frozen=True)
class _Moved:
    """A node that is `source.permute(order)`."""

    source: Node
    order: tuple[int, ...]

    def inverse(self) -> list[int]:
        return [self.order.index(d) for d in range(len(self.order))]


@dataclass
class _Pass:
    graph: Graph
    at: Node  # the node that is rewritten; new ones stand before it
    moved: dict[Node, _Moved] = field(default_factory=dict)

    def add(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update({k: v for k, v in self.at.meta.items() if k in _META})
        run_on_fakes(node, self.at.meta["val"].fake_mode)
        return node

    def in_order(self, value: Any, like: _Moved) -> Any:
        """`value`, an input of a node that `like` is an input of, with its dimensions in the order of `like.source`."""
        if not is_tensor(value) or not shape_of(value):
            return value
        if (known := self.moved.get(value)) is not None and known.order == like.order:
            return known.source
        for _ in range(len(like.order) - len(shape_of(value))):
            value = self.add(_aten.unsqueeze.default, value, 0)
        return self.add(_aten.permute.default, value, like.inverse())


def words_last(graph: Graph, logits: Collection[Node]) -> None:
    """Move the permutations of `logits` that have words before tokens, in place. All are values of `graph`."""
    seeds = [n for n in graph.nodes if n in logits and str(n.target) in PERMUTES and len(shape_of(n)) > 2]
    seeds = [n for n in seeds if order_of(n)[-1] != len(shape_of(n)) - 1]
    if not seeds:
        return
    nodes = list(graph.nodes)
    state = _Pass(graph, seeds[0])
    for node in nodes:
        if node.op != "call_function" or not is_tensor(node):
            continue
        state.at = node
        if node in seeds and node.args[0] not in state.moved:
            _set(state, node, node.args[0], order_of(node))
        elif (first := next((state.moved[n] for n in node.all_input_nodes if n in state.moved), None)) is not None:
            _move(state, node, first)
    for node in reversed(nodes):  # those stay that are read by what could not follow, or are outputs
        if node in state.moved and not node.users:
            graph.erase_node(node)


def _set(state: _Pass, node: Node, source: Any, order: Sequence[int]) -> None:
    """`node` is `source.permute(order)`. Where that is `source`, others read that; an output keeps its strides."""
    if list(order) == list(range(len(order))):
        node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")
    state.moved[node] = _Moved(source, tuple(order))


def _move(state: _Pass, node: Node, first: _Moved) -> None:
    """Compute `node` in the order of its input `first.source`, if its operator is known to work in any."""
    name, ndim = str(node.target), len(first.order)
    source: Any = node.args[0]
    if name in PERMUTES:
        _set(state, node, first.source, [first.order[d] for d in order_of(node)])
    elif name in _TOTALS:
        _set(state, node, state.add(node.target, first.source, *node.args[1:], **node.kwargs), ())
    elif name in REDUCTIONS:
        if (dims := reduced_dims(node)) is not None:
            _reduce(state, node, first, dims)
    elif name in VIEWS:
        _view(state, node, first)
    elif name == "aten.expand.default" and len(shape_of(node)) == ndim and source in state.moved:
        sizes: Any = node.args[1]
        sizes = [sizes[d] for d in first.inverse()]
        _set(state, node, state.add(node.target, first.source, sizes), first.order)
    elif len(shape_of(node)) == ndim and (name in ALONG or is_elementwise(node)):
        position = ALONG.get(name)
        given: Any = map_arg(node.args, lambda n: state.in_order(n, first))
        args: list[Any] = list(given)
        if name == "aten.cat.default":
            args[0] = list(args[0])
        if position is not None:
            if len(args) <= position:
                return
            args[position] = first.order[args[position] % ndim]
        if name == "aten.slice_backward.default":
            args[1] = [args[1][d] for d in first.inverse()]
        kwargs = {k: v for k, v in node.kwargs.items() if k != "memory_format"}
        _set(state, node, state.add(node.target, *args, **kwargs), first.order)


def _reduce(state: _Pass, node: Node, first: _Moved, dims: Sequence[int]) -> None:
    """Reduce the tensor before it was permuted, over the same dimensions."""
    where = [first.order[d] for d in dims]
    single = not isinstance(node.args[1], list | tuple)
    made = state.add(node.target, first.source, where[0] if single else where, *node.args[2:], **node.kwargs)
    if argument_called("keepdim", node):
        _set(state, node, made, first.order)
    else:
        _set(state, node, made, _without(first.order, dims))


def _without(order: Sequence[int], dims: Collection[int]) -> list[int]:
    """`order` once the dimensions `dims` of the permuted tensor are gone."""
    left = [d for i, d in enumerate(order) if i not in dims]
    return [sorted(left).index(d) for d in left]


def _view(state: _Pass, node: Node, first: _Moved) -> None:
    """A view that adds and takes away sizes of 1 only."""
    before, after = shape_of(node.args[0]), shape_of(node)  # type: ignore[arg-type]
    ones = [i for i, size in enumerate(before) if same_size(size, 1)]
    new = [i for i, size in enumerate(after) if same_size(size, 1)]
    kept = [[s for i, s in enumerate(shape) if i not in out] for shape, out in ((before, ones), (after, new))]
    if len(kept[0]) != len(kept[1]) or not all(map(same_size, *kept)):
        return
    made, order = first.source, list(first.order)
    if ones:
        made = state.add(_aten.squeeze.dims, made, [order[i] for i in ones])
        order = _without(order, ones)
    for i in new:  # beside the dimension that follows it in the view, or behind all
        at = order[i] if i < len(order) else order[-1] + 1 if order else 0
        made = state.add(_aten.unsqueeze.default, made, at)
        order = [d + (d >= at) for d in order]
        order.insert(i, at)
    _set(state, node, made, order)
