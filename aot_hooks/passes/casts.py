"""Saved casts of parameters: the backward casts again, exactly, from the parameter, which is alive anyway.

      forward                                forward
        wb = convert(w, bfloat16)              wb = convert(w, bfloat16)
        y = mm(x, t(wb))                       y = mm(x, t(wb))
        return y, x, wb                  -->   return y, x, w

      backward                               backward
        gx = mm(gy, wb)                        wb' = convert(w, bfloat16)
                                               gx = mm(gy, wb')

Under autocast these copies may be most of what a graph saves, 2 bytes a parameter. What else is a cast or a change of
layout of an input that crosses anyway is made again as well. Policies and hooks see the input in place of the copy.

Autograd checks the version of an input that is saved. So a write to the parameter between forward and backward raises,
as it does without autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cudagraph.graph.snapshots import SNAPSHOT, written_inputs

from ..graphs.nodes import NO_VERSION_CHECK, is_view, lasting_storages, region_output, storage_of, target_name
from ..graphs.read_tables import CONVERSIONS, MOVES
from ..graphs.roofline import has_formula
from ..graphs.saved import SavedTensor, crossing_nodes, rows_of
from ..torch_private.values import same_size
from .plan import Plan, stand_in, with_rows
from .repeats import slots_of, stop_saving

RECAST = stand_in("cast again")  # the backward casts the value again from an input
_OPERATORS = CONVERSIONS | MOVES


@dataclass(frozen=True)
class _Copy:
    """A saved value, and how it is made from an input of the forward."""

    node: Node
    slot: Node  # its input of the backward
    source: Node
    chain: tuple[Node, ...]  # the operators from the source to the value


def recast(
    fw: GraphModule,
    bw: GraphModule,
    num_fwd_outputs: int,
    *,
    parameters: Collection[Node],
    is_wanted: Callable[[Node], bool],
    fused: bool,
    roots: Mapping[str, str],
) -> tuple[SavedTensor, ...]:
    """Save inputs in place of their casts, and cast in the backward. Edits both graphs in place.

    Args:
        parameters: inputs of `fw` that are alive until the backward, and that nobody writes before it.
        is_wanted: whether a reader of the backward may get its values so.
        fused: a compiler may fuse readers with the cast, and then doesn't round. Only products are known to read a
            rounded copy from memory, so the copies of other readers stay saved.

    Values that share a storage are made again all or not at all. Returns a row for each value that no longer crosses.
    """
    pairs = crossing_nodes(fw, bw, num_fwd_outputs)
    written = {storage_of(n) for n in written_inputs(fw, num_fwd_outputs)}
    crossing = {n for n, _ in pairs if n.op == "placeholder"}
    sources = {n for n in {*parameters} | crossing if storage_of(n) not in written and not n.meta.get(NO_VERSION_CHECK)}
    alive = lasting_storages(fw, num_fwd_outputs)
    found: list[_Copy] = []
    left: set[Any] = set()  # storages that stay saved
    for node, slot in pairs:
        key = storage_of(node)
        if key is None or key in alive:
            continue
        readers = _readers(slot)
        repeatable = not node.meta.get(NO_VERSION_CHECK) and not node.meta.get(SNAPSHOT)
        read = bool(readers) and all(
            r.op != "output" and is_wanted(r) and (has_formula(r) or not fused) for r in readers
        )
        copy = _made_from(node, slot, sources) if repeatable and read else None
        if copy is None:
            left.add(key)
        else:
            found.append(copy)
    copies = [copy for copy in found if storage_of(copy.node) not in left]
    rows = rows_of([(copy.node, copy.slot) for copy in copies], roots)
    if copies:
        _save_sources(fw, bw, num_fwd_outputs, copies)
    return tuple(rows)


def with_casts(plan: Plan, rows: Collection[SavedTensor]) -> Plan:
    """`plan` with the rows that `recast` returned: values that are saved without hooks, and not with them."""
    reason = "a cast of an input that is alive anyway; the backward casts it again"
    return with_rows(plan, rows, RECAST, reason)


def _made_from(node: Node, slot: Node, sources: Collection[Node]) -> _Copy | None:
    """How `node` is made from one of `sources` by casts and moves; None if it isn't."""
    chain: list[Node] = []
    current = node
    while current not in sources:
        if not _is_exact(current):
            return None
        chain.insert(0, current)
        current = current.all_input_nodes[0]
    return _Copy(node, slot, current, tuple(chain)) if chain else None


def _is_exact(node: Node) -> bool:
    """Whether `node` casts or moves one tensor, on its device, and not only to have a copy of it.

    A program that clones a tensor may do so because it writes to the original. So a clone counts as a change of layout
    only if it changes the strides.
    """
    if node.op != "call_function" or target_name(node) not in _OPERATORS or region_output(node) is not None:
        return False
    if len(node.all_input_nodes) != 1 or not isinstance(node.args[0], Node):
        return False  # symbolic sizes are no inputs of the backward
    value, source = node.meta.get("val"), node.args[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(source, torch.Tensor) or value.device != source.device:
        return False
    if is_view(node):
        return True
    return value.dtype != source.dtype or not all(map(same_size, value.stride(), source.stride()))


def _readers(node: Node) -> list[Node]:
    """The readers of `node`, and of views of it."""
    return [r for user in node.users for r in (_readers(user) if is_view(user) and user.users else [user])]


def _save_sources(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int, copies: Collection[_Copy]) -> None:
    """Let the sources of `copies` cross, each once, and make the copies before their first readers."""
    sources = dict.fromkeys(copy.source for copy in copies)
    slots = slots_of(fw, bw, num_fwd_outputs, sources)
    made = {source: slots[source] for source in sources}
    position = {node: i for i, node in enumerate(bw.graph.nodes)}
    first = {copy: min(copy.slot.users, key=position.__getitem__) for copy in copies}
    for copy in sorted(copies, key=lambda copy: position[first[copy]]):
        with bw.graph.inserting_before(first[copy]):
            for node in copy.chain:
                if node not in made:
                    made[node] = bw.graph.node_copy(node, made.__getitem__)
        copy.slot.replace_all_uses_with(made[copy.node])
    stop_saving(fw, bw, num_fwd_outputs, [(copy.node, copy.slot) for copy in copies])
