"""Bytes alive at every node of a step, predicted from its two graphs.

      forward   n0  n1  n2 ... output | backward  m0  m1  m2 ... output
      live      --/---------\\________|----------/----\\_____________     over what was alive before the step:
                  saved tensors and outputs stay to the end    parameters, buffers and inputs count nothing

A value lives from its node to its last reader; Inductor writes fewer values to memory, see graphs/lifetimes.py.
Outputs that the user gets live to the end of the step, gradients from the node that makes them. Outputs beside a loss,
such as logits, may also count as dropped before the backward, as in `model(...).loss.backward()`. Each output has one
tangent, which counts; torch 2.11 holds it to the end of the backward. Memory that an operator allocates inside itself
is counted where it is known, see graphs/workspaces.py. A tensor that `offload` sends lives until the wait for its copy,
and again from the start of the copy back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from cudagraph.placeholder import results_of

from ..graphs.lifetimes import GraphMemory, alive_along, last_readers
from ..graphs.nodes import storage_bytes, storage_of, storages
from ..graphs.saved import crossing_nodes, place_of
from ..graphs.workspaces import workspace_bytes
from ..offloading.transfers import offload_wait, reload_start
from ..torch_private import aot
from ..torch_private.inductor_fusion import pads_no_rows


@dataclass(frozen=True)
class LivePoint:
    """What is alive while one node runs. A node of unknown module and line has those of the node before it, or ""."""

    phase: str  # "forward" or "backward"
    node: str  # its name in the graph; "(end)" when the graph has run
    live_bytes: int  # bytes alive, over what was alive before the step
    module_path: str
    source_line: str  # the user's


def live_bytes(
    fw: GraphModule | GraphMemory,
    bw: GraphModule | GraphMemory,
    *,
    num_fwd_outputs: int,
    fused: bool,
    roots: Mapping[str, str],
    planned: bool = False,
    drops_others: bool = False,
) -> tuple[LivePoint, ...]:
    """The points of a forward and its backward, in the order they run; with `fused`, as a fusing compiler allocates.

    The graphs are as the partitioner gives them, with hooks in or without. `planned`: Inductor will pad no rows in
    them, as a budget asks it to. `drops_others`: the user keeps none of the outputs `beside_loss`. The other arguments
    are `saved.boundary`'s.
    """
    of_fw, of_bw = GraphMemory.of(fw, fused), GraphMemory.of(bw, fused)
    fw, bw = of_fw.gm, of_bw.gm
    dropped = beside_loss(fw, num_fwd_outputs) - of_fw.inputs if drops_others else set()
    returned = {storage_of(n): _bytes(n) for n in results_of(fw.graph)[:num_fwd_outputs] if isinstance(n, Node)}
    for key in dropped:
        del returned[key]
    fw_inputs = _Inputs(dict.fromkeys(fw.graph.find_nodes(op="placeholder"), 0))
    bw_inputs = _inputs_of_backward(fw, bw, num_fwd_outputs, of_fw.inputs | set(returned), dropped)
    returned_bytes = sum(nbytes for key, nbytes in returned.items() if key not in of_fw.inputs)
    return (
        *_points(of_fw, fw_inputs, "forward", 0, roots=roots, planned=planned),
        *_points(of_bw, bw_inputs, "backward", returned_bytes, roots=roots, planned=planned),
    )


def _inputs_of_backward(
    fw: GraphModule, bw: GraphModule, num_fwd_outputs: int, counted: Collection[Any], dropped: Collection[Any]
) -> _Inputs:
    """The inputs of `bw`. Storages that are `counted` elsewhere have no bytes here; the user has `dropped` outputs."""
    pairs = crossing_nodes(fw, bw, num_fwd_outputs)
    saved = {slot: storage_of(node) for node, slot in pairs}
    on_host = {slot for node, slot in pairs if node.target is offload_wait}
    known = set(counted)
    nbytes: dict[Node, int] = {}
    for node in bw.graph.find_nodes(op="placeholder"):
        key = saved.get(node, storage_of(node))
        nbytes[node] = 0 if key in known or node in on_host else _bytes(node)
        known.add(key)
    tangents = {n for n in nbytes if n not in saved and aot.is_tangent(n)} if aot.keeps_tangents() else set()
    return _Inputs(nbytes, tangents, {storage_of(slot) for slot, key in saved.items() if key in dropped})


def beside_loss(fw: GraphModule, num_fwd_outputs: int) -> set[Any]:
    """The storages of outputs that a model returns beside its loss, a number: logits, hidden states."""
    found = [n for n in results_of(fw.graph)[:num_fwd_outputs] if isinstance(n, Node)]
    values = {n: n.meta["val"] for n in found if isinstance(n.meta.get("val"), torch.Tensor)}
    floats = [n for n, value in values.items() if value.is_floating_point()]
    numbers = [n for n in floats if values[n].dim() == 0]
    return storages(n for n in floats if n not in numbers) if numbers else set()


class _Inputs(NamedTuple):
    """The inputs of a graph."""

    nbytes: Mapping[Node, int]
    to_end: Iterable[Node] = ()  # those that live to the end of the graph
    lent: Iterable[Any] = ()  # storages that a program may refer to, so that nothing is written over them


def _points(
    memory: GraphMemory, inputs: _Inputs, phase: str, base: int, *, roots: Mapping[str, str], planned: bool
) -> list[LivePoint]:
    """The bytes alive while each node of a graph runs. `base`: bytes that are alive from its begin to its end."""
    nodes, key_of = memory.nodes, memory.keys.__getitem__
    outputs = memory.outputs | storages(inputs.to_end)
    kernels = None
    if memory.fused and memory.on_cuda:  # `Kernels` says what Inductor does on CUDA; its C++ kernels differ
        pads_rows = not planned and not pads_no_rows(memory.gm)
        kernels = replace(memory.kernels, pads_rows=pads_rows, lent=set(inputs.lent))
    readers = last_readers(nodes, memory.counted, kernels, key_of)
    # `reload_start` returns the memory that it fills. The wait for it, its last reader, counts that memory itself.
    last = {n: i - 1 if n.target is reload_start else i for n, i in readers.items()}
    sizes = {n: inputs.nbytes.get(n, _bytes(n)) for n in nodes}
    bytes_alive = alive_along(
        nodes,
        memory.counted,
        to_end=outputs,
        last_reader=last,
        nbytes=sizes.__getitem__,
        kernels=kernels,
        key_of=key_of,
    )
    points, where = [], ("", "")  # `where`: module and line of the last node that has them
    for node, alive in zip(nodes, bytes_alive, strict=True):
        if node.op != "placeholder":
            own = place_of(node, roots)
            where = own if any(own) else where
            alive += base + workspace_bytes(node)
            points.append(LivePoint(phase, "(end)" if node.op == "output" else node.name, alive, *where))
    return points


def _bytes(node: Node) -> int:
    """Bytes that `node` takes on the device. A copy back takes its memory when it starts, a copy out none."""
    source = node.all_input_nodes[0] if node.target is reload_start else node
    value = source.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or node.target is offload_wait:
        return 0
    return storage_bytes(value)


def joined_points(graphs: Sequence[Sequence[LivePoint]], *, apart: bool = False) -> tuple[LivePoint, ...]:
    """One step of several graphs: their forwards in order, then their backwards in reverse order.

    The bytes that the other graphs have alive at that time are added to those of each graph. With `apart` the points
    contain them already.
    """
    points: list[LivePoint] = []
    before: list[int] = []  # bytes alive before each graph
    alive = gradients = 0  # `gradients`: bytes that backwards have left so far
    for graph in graphs:
        before.append(alive)
        points += (found := _shifted(graph, "forward", alive))
        alive = found[-1].live_bytes if found and not apart else alive
    for graph, base in reversed(list(zip(graphs, before, strict=True))):
        points += (found := _shifted(graph, "backward", base + gradients))
        gradients = found[-1].live_bytes - base if found and not apart else gradients
    return tuple(points)


def _shifted(graph: Sequence[LivePoint], phase: str, nbytes: int) -> list[LivePoint]:
    return [replace(p, live_bytes=p.live_bytes + nbytes) for p in graph if p.phase == phase]
