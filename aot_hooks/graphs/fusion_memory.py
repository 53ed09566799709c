"""Bytes alive along a graph, as a fusing compiler allocates them.

      position        0    1    2    3   ...          alive[i]: bytes of intermediates alive while node i runs
      v1              |---------|                     a storage lives from its first node to its last reader
      v2 (saved)           |---------------------     saved as it is: to the end
      v3 (packed)          |----|.................    packed: to its last reader, then its packed bytes to the end

Only an estimate. A fusing compiler writes a value to memory if it is an output, or if an operator that is not
pointwise makes or reads it. A value between two pointwise operators stays in registers. Inputs count nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .nodes import is_view, output_storages, storage_bytes, storage_of, storages

__all__ = ["Lifetime", "alive_along", "alive_bytes", "fuses", "last_readers", "lifetimes", "written_storages"]


@dataclass(frozen=True)
class Lifetime:
    """Bytes that are alive from the node at position `first` to the one at `last`, both included."""

    first: int
    last: int
    nbytes: int


def fuses(node: Node) -> bool:
    """Whether a compiler fuses `node` with its neighbours: pointwise operators and views."""
    if node.op != "call_function":
        return False
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return pointwise or is_view(node) or str(node.target) == "prims.convert_element_type.default"  # has no tag


def alive_bytes(gm: GraphModule, packed: Mapping[Node, int]) -> dict[Node, int]:
    """Bytes alive while each node runs.

    Args:
        gm: the forward graph, before hooks are put in.
        packed: packed bytes of each saved node that will be packed.
    """
    nodes = list(gm.graph.nodes)
    outputs = output_storages(gm.graph)
    written = written_storages(nodes) | outputs
    found = lifetimes(
        nodes,
        written - storages(gm.graph.find_nodes(op="placeholder")),
        to_end=outputs - storages(packed),
        last_reader=last_readers(nodes, written),
    )
    ends = {node: found[storage_of(node)].last if storage_of(node) in found else 0 for node in packed}
    crossing = [Lifetime(ends[node], len(nodes), count) for node, count in packed.items()]
    return dict(zip(nodes, alive_along(len(nodes), [*found.values(), *crossing]), strict=True))


def lifetimes(
    nodes: Sequence[Node],
    counted: Collection[Any],
    *,
    to_end: Collection[Any],
    last_reader: Mapping[Node, int],
    nbytes: Callable[[Node], int] = lambda node: storage_bytes(node.meta["val"]),
) -> dict[Any, Lifetime]:
    """When each of the `counted` storages is alive: from its first node to its last reader, or to the end.

    Args:
        to_end: storages that outlive the graph.
        last_reader: positions, see `last_readers`.
        nbytes: bytes of a storage, by its first node.
    """
    found: dict[Any, Lifetime] = {}
    for i, node in enumerate(nodes):
        key = storage_of(node)
        if key is None or key not in counted:
            continue
        before = found.get(key) or Lifetime(i, i, nbytes(node))
        last = len(nodes) if key in to_end else max(before.last, last_reader[node])
        found[key] = Lifetime(before.first, last, before.nbytes)
    return found


def alive_along(count: int, found: Iterable[Lifetime]) -> list[int]:
    """The sum of the bytes alive at each of `count` positions."""
    change = [0] * (count + 2)
    for life in found:
        change[life.first] += life.nbytes
        change[life.last + 1] -= life.nbytes
    return list(itertools.accumulate(change))[:count]


def last_readers(nodes: Sequence[Node], written: Collection[Any]) -> dict[Node, int]:
    """For each node the position of the last node of the kernel that reads it last.

    A reader that is not in `written` stays in registers, so the kernels of its own readers read the node.
    """
    position = {node: i for i, node in enumerate(nodes)}
    last: dict[Node, int] = {}
    for node in reversed(nodes):
        readers = [u for u in node.users if u.op != "output"]
        last[node] = max(
            (
                position[u] if storage_of(u) in written and not is_view(u) else max(position[u], last[u])
                for u in readers
            ),
            default=position[node],
        )
    return last


def written_storages(nodes: Sequence[Node]) -> set[Any]:
    """Storages that an operator which is not pointwise makes or reads; with None, that of a tuple of tensors."""
    kernels = [node for node in nodes if not fuses(node) and node.op != "output"]
    return {storage_of(n) for node in kernels for n in (node, *node.all_input_nodes)}
