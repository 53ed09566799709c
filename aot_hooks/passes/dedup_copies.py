"""Saved values that are copies of others: packed once, at their smallest.

      k     f[2, 8, t, d]          what rope made                     k (or a saved transpose of it) is packed,
      k4    f[2, 32, t, d]         expand + clone: each head 4 times  the copy is made again after unpack,
      sdpa(q, k4, v4)              saves k4                           a quarter of the bytes crosses

Each packed value is followed back over the operators that only move data. If they start from another value that the
same hook packs, the backward makes the copy again from that one. Otherwise, if the data was smaller before, the smaller
tensor is packed. Moving data commutes with rounding, so the same numbers come back. Only scales differ: they are those
of the rows before the move. A value that no hook may round is saved as the smaller tensor, unrounded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ..graphs.nodes import storage_bytes, storage_of, target_name
from ..graphs.read_tables import MOVES
from ..graphs.saved import SavedValue
from ..hook import KEEP
from ..torch_private import values as torch_values
from .plan import UNCOPIED, Choice

_ALIASES = {"aten.alias.default", "aten.detach.default"}
_PERMUTATIONS = {"aten.permute.default", "aten.transpose.int", "aten.t.default"} | _ALIASES
_COPIES = MOVES - {"aten.select.int", "aten.slice.Tensor", "aten.squeeze.default"}  # the result has all elements


def dedup_copies(choices: Sequence[Choice], kept_storages: Collection[Any]) -> tuple[Choice, ...]:
    """The choices, with `view_of` or `source`, and `replay`, for values that are copies.

    `kept_storages` are those of the graph's inputs and of the user's outputs, which no hook packs.
    """
    current = {choice.value: choice for choice in choices}
    packed_at = {_without_aliases(c.value.fw_node): c.value for c in choices if _is_simple(c)}
    heads = {c.view_of for c in choices}  # others come back from these: they stay as they are
    saved = Counter(storage_of(c.value.fw_node) for c in choices)
    uncopied: dict[Any, Choice] = {}  # by the storage of its source
    for value, choice in current.items():
        if choice.was_declined and saved[storage_of(value.fw_node)] == 1:
            current[value] = found = _uncopied(choice, {*kept_storages, *saved}, uncopied)
            if found.source is not None:
                uncopied[storage_of(found.source)] = found
        if _is_simple(choice) and value not in heads:
            current[value] = _transposed(choice) or _copied(choice, current, packed_at, kept_storages)
            heads.add(current[value].view_of)
    return tuple(current.values())


def _copied(
    choice: Choice, current: dict[SavedValue, Choice], packed_at: dict[Node, SavedValue], kept_storages: Collection[Any]
) -> Choice:
    """The choice for a value that may be a copy: made again from another packed value, or packed before the copying."""
    node, best = choice.value.fw_node, None
    smallest = _numel(node)
    for source, replay in _moved_from(node, _COPIES):
        other = packed_at.get(_without_aliases(source))
        if other is not None and other is not choice.value and _is_simple(current[other]):
            if current[other].uses[0][0] == choice.uses[0][0]:
                return replace(choice, view_of=other, replay=replay, reason=f"a copy of '{source.name}'")
        if storage_of(source) not in kept_storages and _numel(source) < smallest:
            smallest, best = _numel(source), (source, replay)
    return choice if best is None else _packed_before(choice, *best, "packed before it was copied from '{}'")


def _uncopied(choice: Choice, taken: Collection[Any], others: Mapping[Any, Choice]) -> Choice:
    """`choice`, with the smallest tensor that its value was copied from saved in place of the value.

    Unchanged if no such tensor has fewer elements and takes fewer bytes. A storage crosses only once, because the
    backward may write over each tensor that it gets. So if one of `others` saves that tensor, the value is made from
    that one; if another view of the same storage is saved there, `choice` is unchanged.
    """
    node, best = choice.value.fw_node, None
    smallest = _numel(node)
    for source, replay in _moved_from(node, _COPIES):
        in_less = storage_bytes(source.meta["val"]) < storage_bytes(node.meta["val"])
        smaller = _numel(source) < smallest and in_less and storage_of(source) not in taken
        # of several views the first, which other copies have come from as well
        earlier = best is not None and _numel(source) == smallest and storage_of(source) == storage_of(best[0])
        if smaller or earlier:
            smallest, best = _numel(source), (source, replay)
    if best is None:
        return choice
    source, replay = best
    saved = _packed_before(choice, source, replay, "saved before it was copied from '{}'")
    saved = replace(saved, uses=((UNCOPIED, choice.readers),))
    if (other := others.get(storage_of(source))) is None:
        return saved
    return replace(saved, source=None, view_of=other.value) if other.source is source else choice


def _transposed(choice: Choice) -> Choice | None:
    """`choice`, packed before it was transposed; None if its rows lie in memory.

    For the gradient of `h @ w` the partitioner saves `h.t()`. The rows of h lie in memory, as eager mode packs them.
    """
    node = choice.value.fw_node
    for source, replay in () if _rows_in_memory(node) else _moved_from(node, _PERMUTATIONS):
        if _rows_in_memory(source):
            return _packed_before(choice, source, replay, "packed as '{}', which it is the transpose of")
    return None


def _moved_from(node: Node, operators: Collection[str]) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """Each node that `operators` made `node` from, the nearest first, with the nodes that make `node` from it again."""
    replay: tuple[Node, ...] = ()
    while _moves(node, operators) and isinstance(node.args[0], Node):
        node, replay = node.args[0], (node, *replay)
        yield node, replay


def _packed_before(choice: Choice, source: Node, replay: tuple[Node, ...], why: str) -> Choice:
    """`choice`, packed as `source`, from which `replay` makes the value again."""
    reason = f"{choice.reason}; {why.format(source.name)}"
    return replace(choice, source=source, replay=replay, reason=reason)


def _is_simple(choice: Choice) -> bool:
    """Whether one hook packs the value for all its readers, and it is not made from another value."""
    return len(choice.uses) == 1 and choice.uses[0][0] is not KEEP and choice.view_of is None and choice.source is None


def _without_aliases(node: Node) -> Node:
    while _moves(node, _ALIASES):
        (node,) = node.all_input_nodes
    return node


def _moves(node: Node, operators: Collection[str]) -> bool:
    """Whether `node` is one of `operators`, called with constant sizes."""
    return node.op == "call_function" and target_name(node) in operators and len(node.all_input_nodes) == 1


def _rows_in_memory(node: Node) -> bool:
    """Whether the last dimension of a tensor is contiguous; True for what has no rows."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided or val.dim() == 0:
        return True
    return torch_values.same_size(val.stride(-1), 1) or torch_values.same_size(val.shape[-1], 1)


def _numel(node: Node) -> float:
    """The number of elements; infinite if a size is symbolic."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor) and all(isinstance(n, int) for n in val.shape):
        return val.numel()
    return math.inf
