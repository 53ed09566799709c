"""Saved multiples of another saved tensor: the backward multiplies again, so that one of the two is not saved.

      forward                                backward, before             backward, after
        n = x * rstd * w   (an RMS norm)       gw = mm(g, n)                n' = x * rstd * w
        y = mm(n, ...)                         gx = f(x, rstd, w)           gw = mm(g, n')
        return y, x, rstd, w, n                                             gx = f(x, rstd, w)

It is done for hooks that are off by a share of each number: a multiple is off by the same share, so the error stays as
it is, as long as the numbers are in the normal range of the hook's format. The factors are exact: copies of small
parameters, which a program may write past autograd's versions before the backward, and one number a row, which no hook
packs then. A product of two tensors that are both rounded has the errors of both;
`options["recompute_pointwise"]` computes these again, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from cudagraph.graph.snapshots import SNAPSHOT, written_inputs

from ..graphs.nodes import (
    FACTOR,
    NO_VERSION_CHECK,
    is_float,
    lasting_storages,
    region_output,
    storage_of,
    target_name,
)
from ..graphs.read_tables import CONVERSIONS, MOVES
from ..graphs.saved import SavedTensor, crossing_nodes, rows_of
from ..torch_private.values import hint, same_size
from .edits import call
from .plan import Plan, stand_in, with_rows
from .repeats import slots_of, stop_saving

MULTIPLE = stand_in("multiplied again")  # the backward computes the value as a multiple of another one
_COPIES = MOVES | CONVERSIONS
_SMALL = 8  # A factor is at most this part of the multiple, so that a copy of it is worth what is not saved.


class _Multiple(NamedTuple):
    """A saved value, and how it is made of others."""

    node: Node
    slot: Node  # its input of the backward
    chain: tuple[Node, ...]  # the operators, in order
    sources: tuple[Node, ...]  # the saved values that they read


def multiply_anew(
    fw: GraphModule,
    bw: GraphModule,
    num_fwd_outputs: int,
    *,
    parameters: Collection[Node],
    roots: Mapping[str, str],
) -> tuple[tuple[SavedTensor, ...], frozenset[str]]:
    """Have `bw` compute multiples of other saved tensors. Edits both graphs in place.

    `parameters`: inputs of `fw` that are parameters. Returns a row for each multiple, and the names of copies of
    parameters, which are saved in their place.
    """
    pairs = crossing_nodes(fw, bw, num_fwd_outputs)
    written = {storage_of(n) for n in written_inputs(fw, num_fwd_outputs)}
    slots = {
        n: slot
        for n, slot in pairs
        if is_float(n) and storage_of(n) not in written and not (n.meta.get(NO_VERSION_CHECK) or n.meta.get(SNAPSHOT))
    }
    alive = lasting_storages(fw, num_fwd_outputs)
    views = Counter(storage_of(n) for n, _ in pairs)
    single = {n for n, slot in slots.items() if storage_of(n) not in alive and views[storage_of(n)] == 1 and slot.users}
    found = _multiples(slots, single, {n for n in slots if n in parameters or _one_a_row(n)})
    rows = rows_of([(each.node, each.slot) for each in found], roots)
    for n in {n for each in found for n in each.sources if _one_a_row(n)}:
        n.meta[FACTOR] = True  # a hook of the user's could take it
    copies = _copies(fw, dict.fromkeys(n for each in found for n in each.sources if n in parameters))
    slots |= slots_of(fw, bw, num_fwd_outputs, copies.values())
    for each in found:  # a source that is found later here is made before its readers, so before this one
        made = {source: slots[copies.get(source, source)] for source in each.sources}
        with bw.graph.inserting_before(min(each.slot.users)):
            for node in each.chain:
                made[node] = bw.graph.node_copy(node, made.__getitem__)
        each.slot.replace_all_uses_with(made[each.node])
    if found:
        stop_saving(fw, bw, num_fwd_outputs, [(each.node, each.slot) for each in found])
    return tuple(rows), frozenset(copy.name for copy in copies.values())


def _multiples(slots: dict[Node, Node], single: Collection[Node], factors: Collection[Node]) -> list[_Multiple]:
    """Those of `single` that are multiples of other keys of `slots` by `factors`, the last of the forward first.

    The source of one may be found as well, since it comes later here; one that was found is no source of the next.
    """
    found: list[_Multiple] = []
    sources = dict.fromkeys(slots)
    for node in reversed(slots):
        if node in single and (chain := _chain_of(node, sources.keys() - {node}, set(factors) - {node})):
            read = dict.fromkeys(a for n in chain for a in n.all_input_nodes if a not in chain)
            found.append(_Multiple(node, slots[node], tuple(sorted(chain)), tuple(read)))
            del sources[node]
    return found


def _one_a_row(node: Node) -> bool:
    x: torch.Tensor = node.meta["val"]
    return x.dim() > 0 and same_size(x.shape[-1], 1)


def _copies(fw: GraphModule, parameters: Iterable[Node]) -> dict[Node, Node]:
    """A copy of each parameter, made where the forward begins. No hook packs it."""
    *_, last = fw.graph.find_nodes(op="placeholder")
    found = {}
    for parameter in parameters:
        with fw.graph.inserting_after(last):
            found[parameter] = call(fw.graph, torch.ops.aten.clone.default, parameter)
        found[parameter].meta[FACTOR] = True
    return found


def with_multiples(plan: Plan, rows: Collection[SavedTensor], copies: Collection[str]) -> Plan:
    """`plan` with what `multiply_anew` returned: `rows` are saved without hooks only, `copies` with them only."""
    reason = "a multiple of another saved tensor; the backward multiplies again"
    return with_rows(plan, rows, MULTIPLE, reason, instead=copies)


def _chain_of(node: Node, sources: Collection[Node], factors: Collection[Node]) -> list[Node]:
    """The operators that make `node` of one of `sources`, of as many numbers, and of `factors`; [] if it isn't so."""
    chain: list[Node] = []
    is_product = False
    current = node
    while current not in sources:
        if current.op != "call_function" or region_output(current) is not None or not is_float(current):
            return []
        chain.append(current)
        read = current.all_input_nodes
        if target_name(current) in _COPIES and len(read) == 1:
            current = read[0]
        elif current.target is torch.ops.aten.mul.Tensor and len(read) == 2:
            whole = [n for n in read if same_size(n.meta["val"].numel(), current.meta["val"].numel())]
            if len(whole) != 1:
                return []
            (factor,) = (n for n in read if n is not whole[0])
            if _SMALL * hint(factor.meta["val"].numel()) > hint(current.meta["val"].numel()):
                return []
            while factor not in factors:
                if target_name(factor) not in _COPIES or len(factor.all_input_nodes) != 1:
                    return []
                chain.append(factor)
                factor = factor.all_input_nodes[0]
            is_product, current = True, whole[0]
        else:
            return []
    return chain if is_product else []
