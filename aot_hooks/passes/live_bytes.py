"""Bytes alive at every node of a step, predicted from its two graphs.

      forward   n0  n1  n2 ... output | backward  m0  m1  m2 ... output
      live      --/---------\\________|----------/----\\_____________     over what was alive before the step:
                  saved tensors and outputs stay to the end    parameters, buffers and inputs count nothing

A value lives from its node to its last reader, as in the code that AOTAutograd's graphs run as ("aten"). Inductor
writes less: there, as in `memory`, only what an operator that is not pointwise makes or reads, and outputs, count.
Outputs that the user gets live to the end of the step, gradients from where they are made, and one tangent for each
output is given. What an operator allocates inside itself is not seen. What `offload` sends lives until it is waited
for, and again from where its copy back starts; host memory counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graphs.fusion_memory import last_readers, written_storages
from ..graphs.nodes import storage_of
from ..graphs.saved import boundary, place_of
from ..offloading.transfers import offload_wait, reload_start
from ..torch_private import values as torch_values

__all__ = ["LivePoint", "join", "live_bytes"]


@dataclass(frozen=True)
class LivePoint:
    """What is alive while one node runs.

    Attributes:
        phase: "forward" or "backward".
        node: its name in the graph; "(end)" when the graph has run.
        live_bytes: bytes alive, over what was alive before the step.
        module_path, source_line: where in the model and in the user's code; of the node before if it does not say, ""
            if none does.
    """

    phase: str
    node: str
    live_bytes: int
    module_path: str
    source_line: str


def live_bytes(
    fw: GraphModule,
    bw: GraphModule,
    *,
    num_fwd_outputs: int,
    static_inputs: Iterable[int],
    fused: bool,
    roots: Mapping[str, str] = MappingProxyType({}),
) -> tuple[LivePoint, ...]:
    """The points of a forward and its backward, in the order they run.

    Args:
        fw, bw: as the partitioner gives them, with hooks in or without.
        num_fwd_outputs, static_inputs, roots: see `saved.boundary`.
        fused: count as a fusing compiler allocates.
    """
    cross = boundary(fw, bw, num_fwd_outputs, static_inputs, roots)
    outputs = {storage_of(n): _bytes(n) for n in cross.user_outputs if isinstance(n, Node)}
    anyway = {storage_of(n) for n in fw.graph.find_nodes(op="placeholder")}
    forward = _simulate(fw, {}, anyway, "forward", fused, roots)
    # what comes into the backward, by its placeholder: what is alive anyway, an output that stays, or a saved tensor
    held = sum(size for key, size in outputs.items() if key not in anyway)
    given: dict[Node, int] = {}
    known: set[Any] = set()
    saved = {id(v.bw_node): storage_of(v.fw_node) for v in cross.tensors}
    on_host = {v.bw_node for v in cross.tensors if v.fw_node.target is offload_wait}
    for node in bw.graph.find_nodes(op="placeholder"):
        key = saved.get(id(node), storage_of(node))
        free = key in anyway or key in outputs or key in known or node in on_host
        given[node] = 0 if free else _bytes(node)
        known.add(key)
    backward = _simulate(bw, given, set(), "backward", fused, roots, base=held)
    return (*forward, *backward)


def _simulate(
    gm: GraphModule,
    given: dict[Node, int],
    anyway: set[Any],
    phase: str,
    fused: bool,
    roots: Mapping[str, str],
    base: int = 0,
) -> list[LivePoint]:
    nodes = list(gm.graph.nodes)
    outputs = {storage_of(n) for n in torch_values.pytree.tree_leaves(nodes[-1].args) if isinstance(n, Node)}
    everything = {storage_of(n) for n in nodes}
    inputs = {storage_of(n) for n in given}
    written = (written_storages(nodes) | outputs | inputs) if fused else everything
    last = last_readers(nodes, written)
    born: dict[Any, int] = {}
    dies: dict[Any, int] = {}
    size: dict[Any, int] = {}
    for i, node in enumerate(nodes):
        key = storage_of(node)
        if key is None or key in anyway or key not in written:
            continue
        if node in given:
            born[key] = 0
            size[key] = max(size.get(key, 0), given[node])
        elif key not in born:
            born[key], size[key] = i, _bytes(node)
        # the memory that a copy back fills is that of its wait's result from there on
        until = last[node] - 1 if node.target is reload_start else last[node]
        dies[key] = len(nodes) if key in outputs else max(dies.get(key, 0), until)
    change = [0] * (len(nodes) + 2)
    for key, start in born.items():
        change[start] += size[key]
        change[dies[key] + 1] -= size[key]
    points, total, place = [], base, ("", "")
    for node, step in zip(nodes, change, strict=False):
        total += step
        if node.op != "placeholder":
            own = place_of(node, roots)
            place = own if any(own) else place  # what a hook put there says nothing itself
            module_path, source_line = place
            name = "(end)" if node.op == "output" else node.name
            points.append(LivePoint(phase, name, total, module_path, source_line))
    return points


def _bytes(node: Node) -> int:
    source = node.all_input_nodes[0] if node.target is reload_start else node  # a ticket stands for what it fetches
    value = source.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or node.target is offload_wait:
        return 0
    return torch_values.hint(value.untyped_storage().nbytes())


def join(graphs: Sequence[Sequence[LivePoint]]) -> tuple[LivePoint, ...]:
    """One step of several graphs: their forwards in order, their backwards in reverse, each over what the others
    hold then."""
    points: list[LivePoint] = []
    held = [next((p.live_bytes for p in reversed(g) if p.phase == "forward"), 0) for g in graphs]
    for i, graph in enumerate(graphs):
        points += _shifted(graph, "forward", sum(held[:i]))
    done = 0  # what the backwards that have run leave behind
    for i, graph in reversed(list(enumerate(graphs))):
        points += _shifted(graph, "backward", sum(held[:i]) + done)
        done += next((p.live_bytes for p in reversed(graph) if p.phase == "backward"), 0)
    return tuple(points)


def _shifted(graph: Sequence[LivePoint], phase: str, by: int) -> list[LivePoint]:
    return [
        LivePoint(p.phase, p.node, p.live_bytes + by, p.module_path, p.source_line) for p in graph if p.phase == phase
    ]
