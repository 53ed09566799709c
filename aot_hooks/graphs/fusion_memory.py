"""Bytes alive along the forward graph, to know where memory is tight.

      place of node   0    1    2    3   ...          alive[i]: bytes of intermediates alive while node i runs
      v1              |---------|                     a storage lives from its first node to its last reader
      v2 (saved)           |---------------------     saved as it is: to the end
      v3 (packed)          |----|.................    packed: to its last reader, then its packed bytes to the end

Only an estimate. It counts what a fusing compiler writes to memory: what an operator that is not pointwise makes or
reads, and outputs. What lies between two pointwise operators stays in registers, and its reader is their kernel.
Inputs, which are alive anyway, count nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..torch_private import values as torch_values
from .nodes import is_view, storage_of

__all__ = ["alive_bytes", "fuses", "last_readers", "written_storages"]


def fuses(node: Node) -> bool:
    """Whether a compiler fuses `node` with its neighbours: pointwise operators and views."""
    if node.op != "call_function":
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or is_view(node) or str(node.target).startswith("prims.convert_element_type")


def alive_bytes(gm: GraphModule, packed: Mapping[Node, int]) -> dict[Node, int]:
    """Bytes alive while each node runs.

    Args:
        gm: the forward graph, before hooks are put in.
        packed: packed bytes of each saved node that will be packed.
    """
    nodes = list(gm.graph.nodes)
    outputs = {storage_of(n) for n in torch_values.pytree.tree_leaves(nodes[-1].args) if isinstance(n, Node)}
    inputs = {storage_of(n) for n in nodes if n.op == "placeholder"}
    written = written_storages(nodes) | outputs
    packed_keys = {storage_of(n) for n in packed}
    last = last_readers(nodes, written)
    born: dict[Any, int] = {}
    dies: dict[Any, int] = {}
    size: dict[Any, int] = {}
    for i, node in enumerate(nodes):
        key = storage_of(node)
        if key is None or key in inputs or key not in written:
            continue
        born.setdefault(key, i)
        size[key] = torch_values.hint(node.meta["val"].untyped_storage().nbytes())
        stays = key in outputs and key not in packed_keys
        dies[key] = len(nodes) if stays else max(dies.get(key, i), last[node])
    change = [0] * (len(nodes) + 2)
    for key, start in born.items():
        change[start] += size[key]
        change[min(dies[key] + 1, len(nodes))] -= size[key]
    for node, count in packed.items():
        change[min(dies.get(storage_of(node), 0), len(nodes))] += count
    alive, total = {}, 0
    for node, step in zip(nodes, change, strict=False):
        total += step
        alive[node] = total
    return alive


def last_readers(nodes: list[Node], written: set[Any]) -> dict[Node, int]:
    """For each node the place of the last node of the kernel that reads it last; what is not in `written` stays in
    registers, so its readers are read for it."""
    place = {node: i for i, node in enumerate(nodes)}
    last: dict[Node, int] = {}
    for node in reversed(nodes):
        readers = [u for u in node.users if u.op != "output"]
        last[node] = max(
            (place[u] if storage_of(u) in written and not is_view(u) else max(place[u], last[u]) for u in readers),
            default=place[node],
        )
    return last


def written_storages(nodes: list[Node]) -> set[Any]:
    """Storages that an operator which is not pointwise makes or reads."""
    found: set[Any] = set()
    for node in nodes:
        if not fuses(node) and node.op != "output":
            found.add(storage_of(node))
            found.update(storage_of(n) for n in node.all_input_nodes)
    return found
