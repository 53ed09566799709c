"""Saved values that are copies of others: packed once, at their smallest.

      k     f[2, 8, t, d]          what rope made                     k (or a saved transpose of it) is packed,
      k4    f[2, 32, t, d]         expand + clone: each head 4 times  the copy is made again after unpack,
      sdpa(q, k4, v4)              saves k4                           a quarter of the bytes crosses

`look_through(choices)` walks from each packed value back over operators that only move data (views, permutations,
expansions, clones). Where it meets another value that the same hook packs, the copy comes back from that one; else,
where the data was smaller before, that is packed. Values come back as they would have: moving data commutes with a
hook's rounding, but for scales that are now taken over the rows before the move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..graphs.nodes import storage_of
from ..hook import KEEP
from ..torch_private import values as torch_values
from .plan import Choice

__all__ = ["look_through"]

_ALIASES = {"aten.alias.default", "aten.detach.default"}
_PERMUTATIONS = {"aten.permute.default", "aten.transpose.int", "aten.t.default"} | _ALIASES
_MOVES = _PERMUTATIONS | {
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.expand.default",
    "aten.clone.default",
}


def look_through(choices: Sequence[Choice], kept_storages: set[Any]) -> None:
    """Set `view_of` or `source`, and `replay`, on choices whose value is a copy.

    Args:
        kept_storages: storages of the graph's inputs and of what the user gets, which no hook packs.
    """
    heads = {id(c.view_of) for c in choices if c.view_of is not None}
    by_node = {_without_aliases(c.value.fw_node): c for c in choices if _simple(c)}
    for choice in choices:
        if not _simple(choice) or id(choice.value) in heads or _straighten(choice):
            continue
        hook = choice.uses[0][0]
        chain: list[Node] = []
        node = choice.value.fw_node
        smallest, smallest_at = _numel(node), 0
        while _moves(node) and isinstance(node.args[0], Node):
            chain.append(node)
            node = node.args[0]
            other = by_node.get(_without_aliases(node))
            if other is not None and other is not choice and _simple(other) and other.uses[0][0] == hook:
                choice.view_of, choice.replay = other.value, tuple(reversed(chain))
                choice.reason = f"a copy of '{node.name}'"
                heads.add(id(other.value))
                break
            if storage_of(node) not in kept_storages and _numel(node) < smallest:
                smallest, smallest_at = _numel(node), len(chain)
        else:
            if smallest_at:
                choice.replay = tuple(reversed(chain[:smallest_at]))
                choice.source = choice.replay[0].all_input_nodes[0]
                choice.reason += f"; packed before it was copied from '{choice.source.name}'"


def _simple(choice: Choice) -> bool:
    """Packed by one hook for all its readers, and not brought back by another value."""
    return len(choice.uses) == 1 and choice.uses[0][0] is not KEEP and choice.view_of is None and choice.source is None


def _without_aliases(node: Node) -> Node:
    while _moves(node, _ALIASES):
        (node,) = node.all_input_nodes
    return node


def _moves(node: Node, moves: set[str] = _MOVES) -> bool:
    """Whether `node` only moves data, by numbers that are known."""
    return node.op == "call_function" and str(node.target) in moves and len(node.all_input_nodes) == 1


def _straighten(choice: Choice) -> bool:
    """For the gradient of `h @ w` the partitioner saves `h.t()`: pack h, whose rows lie in memory, as eager does."""
    node, chain = choice.value.fw_node, []
    while not _rows_in_memory(node) and _moves(node, _PERMUTATIONS) and isinstance(node.args[0], Node):
        chain.append(node)
        node = node.args[0]
    if not chain or not _rows_in_memory(node):
        return False
    choice.source, choice.replay = node, tuple(reversed(chain))
    choice.reason += f"; packed as '{node.name}', which it is the transpose of"
    return True


def _rows_in_memory(node: Node) -> bool:
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided or val.dim() == 0:
        return True
    return torch_values.same_size(val.stride(-1), 1) or torch_values.same_size(val.shape[-1], 1)


def _numel(node: Node) -> float:
    """Elements, infinite where not known."""
    val = node.meta.get("val")
    known = isinstance(val, torch.Tensor) and all(isinstance(n, int) for n in val.shape)
    return val.numel() if known and isinstance(val, torch.Tensor) else math.inf
