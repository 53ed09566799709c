"""Saves a result, such as a sum, in place of the values that the backward computes it from.

The values must not be rounded, and a hook may round the result:

      forward                        backward, before             backward, after
        y = mm(h, w)                   s = add(x, y)                (s is an input)
        s = add(x, y)                  g = mul(tangents, s)         g = mul(tangents, s)
        return ..., y                  y stays: the terms of a      s is packed: it is read in a product
                                       sum must not be rounded

The partitioner saves the terms or the sum, which take the same bytes. Eager mode saves the sum, and so does this pass,
unless it takes more bytes than what is no longer saved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.fx import GraphModule, Node

from cudagraph.graph.snapshots import SNAPSHOT

from ..graphs.backward_reads import BackwardReads
from ..graphs.nodes import NO_VERSION_CHECK, is_float, lasting_storages, storage_bytes, storage_of
from ..graphs.repeats import draws, twins
from ..graphs.saved import SavedTensor, crossing_nodes, rows_of
from .edits import with_inputs
from .plan import Plan, stand_in, with_rows
from .repeats import erase_unused, save_instead

RESULT = stand_in("result saved")  # what is computed from the value crosses


def save_results(
    fw: GraphModule, bw: GraphModule, num_fwd_outputs: int, roots: Mapping[str, str]
) -> tuple[tuple[SavedTensor, ...], frozenset[str]]:
    """Save results in place of values that no hook may round. Edits both graphs in place.

    Returns a row for each value that no longer crosses, and the names of those that cross in their place.
    """
    pairs = crossing_nodes(fw, bw, num_fwd_outputs)
    alive = lasting_storages(fw, num_fwd_outputs)
    reads = BackwardReads(fw, bw, pairs)
    donated = {slot: n for n, slot in pairs if is_float(n) and storage_of(n) not in alive}
    blocked = [slot for slot, n in donated.items() if _may_move(n) and not _is_smooth(reads, slot)]
    same = twins(fw, bw, num_fwd_outputs) if blocked else {}
    cut: dict[Node, None] = {}
    gone: set[Node] = set()
    for slot in blocked:
        found = None if slot in gone else _smooth_results(slot, same, reads, alive)
        if found is None:
            continue
        read = with_inputs([bw.graph.output_node()], {*cut, *found}.__contains__)
        unread = {s for s in donated if s.users and s not in read}
        left = {storage_of(n) for n, s in pairs if s not in unread}
        freed = _bytes_of((donated[s] for s in unread - gone), left)
        if _bytes_of((same[n] for n in found if n not in cut), left) <= freed:
            cut.update(found)
            gone |= unread
    if not cut:
        return (), frozenset()
    rows = rows_of([(n, slot) for slot, n in donated.items() if slot in gone], roots)
    names = frozenset(same[node].name for node in cut)
    save_instead(fw, bw, num_fwd_outputs, cut, same)
    erase_unused(fw, bw, num_fwd_outputs, cut)
    return tuple(rows), names


def with_results(plan: Plan, rows: Collection[SavedTensor], names: Collection[str]) -> Plan:
    """`plan` with what `save_results` returned: `rows` cross without hooks only, `names` with them only."""
    reason = "no hook may round it; what the backward computes from it is saved instead"
    return with_rows(plan, rows, RESULT, reason, instead=names)


def _smooth_results(
    slot: Node, same: Mapping[Node, Node], reads: BackwardReads, alive: Collection[Any]
) -> dict[Node, None] | None:
    """The first values that the backward computes from `slot`, as the forward does, and that may be rounded.

    None if it reads the value in another way, too.
    """
    found: dict[Node, None] = {}
    waiting = [slot]
    for node in waiting:  # grows
        for user in node.users:
            twin = same.get(user)
            if twin is None or not is_float(twin) or not _may_move(twin) or storage_of(twin) in alive:
                return None
            if user in found or user in waiting:
                continue
            if _is_smooth(reads, user):
                found[user] = None
            else:
                waiting.append(user)
    return found


def _is_smooth(reads: BackwardReads, node: Node) -> bool:
    return all(found.read.answered for found in reads.of(node))


def _may_move(node: Node) -> bool:
    """Whether nothing but its numbers counts: no snapshot, no random numbers, and torch checks its version."""
    return not (node.meta.get(NO_VERSION_CHECK) or node.meta.get(SNAPSHOT) or draws(node))


def _bytes_of(nodes: Any, left: Collection[Any]) -> float:
    """Bytes of the storages of `nodes`, each once, without those that are `left` saved anyway."""
    found = {storage_of(n): storage_bytes(n.meta["val"]) for n in nodes}
    return sum(nbytes for key, nbytes in found.items() if key not in left)
