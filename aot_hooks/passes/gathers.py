"""Rows that are gathered from a saved tensor by saved indices: the backward gathers them again, and they don't cross.

      forward                               backward, before              backward, after
        r = mm(h, router)                     dr = mm(h.t(), ...)           dr = mm(h.t(), ...)
        x = index(h, [token])                                               x = index(h, [token])
        y = grouped_mm(x, w, ends)            dw = grouped_mm(x.t(), ...)   dw = grouped_mm(x.t(), ...)
        saved: h, token, x                    inputs: h, token, x           inputs: h, token

A mixture of experts gathers each token once for each expert that it goes to: x has top-k times the bytes of h. The
router's backward reads h, and the gather's backward reads the indices. The partitioner saves x nevertheless.
Indices are whole numbers, so no hook rounds them. Gathering commutes with packing by rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graphs.lifetimes import fuses
from ..graphs.nodes import is_float, is_tensor, is_view, lasting_storages, storage_of, target_name
from ..graphs.read_tables import MOVES, MOVES_BY_INDEX
from ..graphs.saved import crossing_nodes
from ..hook import KEEP
from ..torch_private.inductor_fusion import WRITTEN
from .edits import run_on_fakes
from .permutations import QUOTIENTS
from .plan import Choice, Plan, stand_in, with_rows
from .repeats import stop_saving

_aten = torch.ops.aten
_GATHERS = MOVES_BY_INDEX - MOVES
GATHERED = stand_in("gathered again")  # the backward gathers the value again


def regather(
    fw: GraphModule, bw: GraphModule, num_fwd_outputs: int, choices: Sequence[Choice], *, also_kept: bool
) -> tuple[Choice, ...]:
    """Have the backward gather again what a hook would pack. Edits both graphs in place.

    The gathered tensor must stay as it is, or have the same hook. With `also_kept` values without a hook are gathered
    again, too: `lossless` means to save bytes, and this is an exact way. Returns the choices for values that
    no longer cross.
    """
    gathered = _gathered(fw)
    if not gathered:
        return ()
    pairs = crossing_nodes(fw, bw, num_fwd_outputs)
    slots = dict(pairs)
    alive = lasting_storages(fw, num_fwd_outputs)
    times = Counter(storage_of(n) for n, _ in pairs)
    hooks = {c.value.fw_node: c.uses[0][0] if len(c.uses) == 1 else None for c in choices}
    gone: list[tuple[Any, Node]] = []
    found: list[Choice] = []
    for choice in choices:
        node, slot = choice.value.fw_node, choice.value.bw_node
        own = hooks[node]
        if node not in gathered or own is None or (own is KEEP and not also_kept) or not slot.users:
            continue
        if storage_of(node) in alive or times[storage_of(node)] > 1:  # its bytes stay alive anyway
            continue
        sources = {n: s for n, s in slots.items() if n is not node}
        undone = _undone(sources)
        chain = _made_from(node, sources, undone)
        if not any(n not in undone and str(n.target) not in MOVES for n in chain):
            continue
        data = [undone[n].saved if n in undone else n.all_input_nodes[0] for n in chain]
        same = (own, KEEP) if own.lossy or own.error == 0 or own is KEEP else ()  # a user's functions run as asked
        if all(hooks.get(n, KEEP) in same for n in data if n in sources and is_float(n)):
            _replace(slot, _made_again(bw, chain, sources, undone, min(slot.users)))
            del slots[node]
            gone.append((node, slot))
            found.append(choice)
    stop_saving(fw, bw, num_fwd_outputs, gone)
    return tuple(found)


def _replace(slot: Node, made: Node) -> None:
    """Have all that reads `slot` read `made`. Inductor would write a transpose once for each product that reads it."""
    slot.replace_all_uses_with(made)
    if sum(not fuses(reader) for reader in made.users) > 1:
        while is_view(made):
            (made,) = made.all_input_nodes
        made.meta[WRITTEN] = True


def _gathered(fw: GraphModule) -> set[Node]:
    """What a gather and moves after it have made. In most graphs there is nothing, and nothing else is looked at."""
    found: set[Node] = set()
    for node in fw.graph.nodes:
        name = str(node.target)
        if name in _GATHERS or (name in MOVES and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def with_gathers(plan: Plan, choices: Sequence[Choice]) -> Plan:
    """`plan` with a row for each of `choices`, which `regather` returned: they cross without hooks only."""
    why = "the backward gathers it again from a saved tensor, by saved indices"
    count = len(plan.decisions)
    plan = with_rows(plan, [choice.value.row for choice in choices], GATHERED, why)
    own = (replace(d, settings=c.settings) for d, c in zip(plan.decisions[count:], choices, strict=True))
    return replace(plan, decisions=(*plan.decisions[:count], *own))


@dataclass(frozen=True)
class _Undone:
    """How to make a value of the forward from a transpose or reshaped view of it that is saved."""

    saved: Node  # the view
    target: Any  # of the operator that undoes it, whose arguments after the view are `args`
    args: tuple[Any, ...]


def _undone(sources: Iterable[Node]) -> dict[Node, _Undone]:
    """What `sources` are views of with the same numbers, such as h if `h.t()` is saved."""
    found: dict[Node, _Undone] = {}
    for node in sources:
        while (undone := _inverse(node)) is not None:
            (node,) = node.all_input_nodes
            if node in sources or node in found:
                break
            found[node] = undone
    return found


def _inverse(node: Node) -> _Undone | None:
    """What undoes `node`, if it is a transpose, or a view between constant sizes."""
    if node.op != "call_function" or len(node.all_input_nodes) != 1:
        return None
    args: Any = node.args
    if not is_tensor(node.all_input_nodes[0]):  # of several results
        return None
    base = node.all_input_nodes[0].meta["val"]
    if node.target in (_aten.t.default, _aten.transpose.int):
        dimensions = args[1:] or (0, base.dim() - 1)
        return _Undone(node, _aten.transpose.int, dimensions)
    if node.target is _aten.permute.default:
        order = [d % base.dim() for d in args[1]]
        return _Undone(node, _aten.permute.default, (sorted(range(len(order)), key=order.__getitem__),))
    if node.target is _aten.view.default and all(isinstance(n, int) for n in base.shape):
        return _Undone(node, _aten.view.default, (list(base.shape),))
    return None


def _made_from(node: Node, sources: Mapping[Node, Node], undone: Mapping[Node, _Undone]) -> list[Node]:
    """The moves, gathers and quotients of indices that make `node` from `sources`, in order; [] if more is needed."""
    chain: dict[Node, None] = {}

    def is_allowed(n: Node) -> bool:
        """Whether `n` only selects or moves numbers, or computes indices: row // 8 is the token of a row."""
        if target_name(n) in QUOTIENTS:
            return _is_whole(n)
        indices = filter(is_tensor, n.all_input_nodes[1:])  # none, if `n` is a move
        return target_name(n) in MOVES_BY_INDEX and all(map(_is_whole, indices))

    def is_made(n: Node) -> bool:
        if n in sources or n in chain:
            return True
        inputs = [undone[n].saved] if n in undone else n.all_input_nodes
        found = (n in undone or is_allowed(n)) and all(map(is_made, inputs))
        if found:
            chain[n] = None
        return found

    return list(chain) if is_made(node) else []


def _is_whole(indices: Node) -> bool:
    """Whether `indices` are numbers of rows, not a mask, whose count of rows is known from its values only."""
    return indices.meta["val"].dtype in (torch.int32, torch.int64)


def _made_again(
    bw: GraphModule,
    chain: Sequence[Node],
    sources: Mapping[Node, Node],
    undone: Mapping[Node, _Undone],
    reader: Node,
) -> Node:
    """Copies `chain`, nodes of the forward, to before `reader` in the backward; returns the last copy.

    A region is the part of a program that one hook is set for. The copies belong to the region of `reader`, whose hook
    packs what they read.
    """
    copies: dict[Node, Node] = dict(sources)
    with bw.graph.inserting_before(reader):
        for node in chain:
            if (how := undone.get(node)) is not None:
                made = bw.graph.call_function(how.target, (copies[how.saved], *how.args))
            else:
                made = bw.graph.node_copy(node, copies.__getitem__)
            made.meta = {k: v for k, v in node.meta.items() if k in ("stack_trace", "original_aten", "nn_module_stack")}
            if "custom" in reader.meta:
                made.meta["custom"] = reader.meta["custom"]
            run_on_fakes(made)
            copies[node] = made
    return copies[chain[-1]]
