"""Decides which kernels Inductor may fuse, so that a graph holds little: with a budget, or with `recompute_pointwise`.

      one kernel   d_up, d_gate = f(d, gate, up)         d, d_up and d_gate alive, beside the codes of gate and up
      split        d_up = f(d, gate)                     then d_gate takes the memory of d
                   d_gate = f(d, gate, up)

Inductor writes a result over an input only if no other node of the kernel reads that input. A second kernel reads its
inputs once more, so where there is room, parts are joined again. CUDA only.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graphs.lifetimes import (
    SPLIT,
    GraphMemory,
    Kernels,
    fuses,
    is_loop,
    last_readers,
    late_products,
    lifetimes,
    on_cuda,
)
from ..graphs.nodes import is_view, storage_bytes, storage_of
from ..graphs.roofline import has_formula, is_attention
from ..graphs.workspaces import workspace_bytes
from ..passes.edits import call, with_inputs
from ..passes.live_bytes import LivePoint, live_bytes
from ..torch_private import aot
from ..torch_private.inductor_fusion import ALONE, ALONE_IF_WRITTEN, FROM_HOOK, WRITTEN, mark_alone

_EARLY = "aot_hooks_early"  # in the `meta` of a split node, the name of that whose kernel would compute it


def split_and_hold(fw: GraphModule, bw: GraphModule, **of_outputs: Any) -> None:
    """Split the kernels of the backward where it is predicted to hold most, and fix which others may be fused.

    In place, on CUDA only. It is for a backward that computes values again. Inductor may fuse such a value with
    gradients that come later and read the same tensors; then it is alive beside all of them.

    Where the forward has the peak of the step, its kernels are fixed too. Inductor could compute the codes of an MLP's
    gate and the product of both projections in one kernel, which writes over none of its inputs.

    A budget also calls `write_when_made`, which makes its prediction exact, but can take more bytes. `of_outputs` are
    the arguments of `live_bytes`.
    """
    if not on_cuda(bw.graph.nodes):
        return

    of_fw, of_bw = GraphMemory(fw), GraphMemory(bw)

    def points() -> tuple[list[LivePoint], list[LivePoint]]:
        found = live_bytes(of_fw, of_bw, fused=True, **of_outputs)
        return [p for p in found if p.phase == "forward"], [p for p in found if p.phase == "backward"]

    def most(live: list[LivePoint]) -> int:
        return max((point.live_bytes for point in live), default=0)

    unpack_early(of_bw)
    split_kernels(of_bw)
    of_forward, live = points()
    if join_kernels(of_bw, live, most(live)):
        of_forward, live = points()
    hold_kernels(of_bw, live, most(live))
    if most(of_forward) > most(live):
        hold_kernels(of_fw, of_forward, most(of_forward))


def multiplied_early(gm: GraphModule) -> GraphModule:
    """`gm`, or a copy that computes each product where it stands, if Inductor would compute one with a sum far behind.

    In a model with tied weights the gradients of all logits would live to the end of the backward. Inductor does not
    see a product through a view.
    """
    if not late_products(list(gm.graph.nodes)):
        return gm
    gm = aot.copied(gm)
    for node in late_products(list(gm.graph.nodes)).values():
        with gm.graph.inserting_before(node):
            parts = [call(gm.graph, torch.ops.aten.unsqueeze.default, n, 0) for n in node.args]
            total = call(gm.graph, torch.ops.aten.add.Tensor, *parts)
            node.replace_all_uses_with(call(gm.graph, torch.ops.aten.squeeze.dim, total, 0))
        gm.graph.erase_node(node)
    return gm


def write_when_made(gm: GraphModule | GraphMemory) -> None:
    """Mark each value that goes to memory, in place, so that Inductor writes it at its position in the graph.

    If the kernel came after other readers, Inductor would compute the value a second time for these. The inputs of the
    value would be alive until then.
    """
    memory = GraphMemory.of(gm)
    for node in memory.nodes:
        if node.op == "call_function" and fuses(node) and not is_view(node) and memory.keys[node] in memory.written:
            node.meta[WRITTEN] = True


def unpack_early(gm: GraphModule | GraphMemory) -> None:
    """Move the nodes that unpack a value for a fused kernel in front of that kernel, in place.

    Hooks put them in front of the first node that reads the value. But a kernel runs at the first of its nodes, which
    may stand before that. The kernel would become two, and the inputs of the first would live until the second.
    """
    memory = GraphMemory.of(gm)
    nodes, counted, keys = memory.nodes, memory.counted, memory.keys
    unpacking = {n for n in nodes if FROM_HOOK in n.meta and n.op == "call_function"}
    if not unpacking:
        return
    position = {node: i for i, node in enumerate(nodes)}
    written = [node for node in nodes if keys[node] in counted]
    kernels = Kernels.of(nodes, counted, unpacking, keys=keys)
    begins = kernels.begins(node for node in written if node not in unpacking)
    for node in (node for node in written if node in unpacking):
        begin = begins.get(keys[node], len(nodes))
        if begin < position[node]:

            def is_before(n: Node, begin: int = begin) -> bool:
                return position[n] <= begin

            chain = with_inputs([node], is_before)
            if unpacking.issuperset(chain):
                for each in sorted(chain, key=position.__getitem__):
                    nodes[begin].prepend(each)
    memory.changed_order()


def split_kernels(gm: GraphModule | GraphMemory) -> None:
    """Split kernels so that less is alive, in place.

    - A second part that then takes an input's memory moves to the end of the first.
    - A part that stands behind a later product stays there, if what it reads is alive until then anyway. In one kernel
      with what stands earlier and reads the same it would be computed there.
    """
    memory = GraphMemory.of(gm)
    nodes, counted, kernels, key_of = memory.nodes, memory.counted, memory.kernels, memory.keys.__getitem__
    first, last = lifetimes(
        nodes,
        counted,
        to_end=memory.outputs,
        last_reader=last_readers(nodes, counted, kernels, key_of),
        nbytes=lambda node: 0 if node.name.startswith(("primals", "tangents")) else storage_bytes(node.meta["val"]),
        kernels=kernels,
        key_of=key_of,
    )
    reused = {first[key][0] for key in kernels.reuses(first, last)}
    made: dict[int, list[Node]] = defaultdict(list)
    for position, _, node in first.values():
        if fuses(node) and node.op == "call_function":
            made[position].append(node)
    for position, results in made.items():
        if len(results) < 2 or position in reused:
            continue
        *_, anchor, node = results
        value = node.meta["val"]
        read_last = (key for key in kernels.reads[node] if key not in memory.inputs and last[key] == position)
        taken_over = (first[key][2].meta["val"] for key in read_last)
        if any(v.dtype == value.dtype and storage_bytes(v) == storage_bytes(value) for v in taken_over):
            _move_behind(node, anchor, counted)
    products = list(itertools.accumulate(has_formula(n) or is_attention(n) for n in nodes))
    free = {key_of(node) for node in nodes if node.op == "placeholder" and node.name.startswith("primals")}
    for own, node in enumerate(nodes):
        early = first[key][0] if (key := key_of(node)) in first and first[key][2] is node else own
        if fuses(node) and SPLIT not in node.meta and products[early] < products[own]:
            if all(key in free or last[key] >= own for key in kernels.reads[node]):
                node.meta[SPLIT], node.meta[_EARLY] = node.name, nodes[early].name
    memory.changed_order()


def join_kernels(gm: GraphModule | GraphMemory, live: Sequence[LivePoint], most: float) -> bool:
    """Undo each split without which the step stays under `most` bytes; returns whether there were any.

    `live` are the points of `gm`.
    """
    memory = GraphMemory.of(gm)
    at = {point.node: i for i, point in enumerate(live)}
    alive = [point.live_bytes for point in live]
    joined: set[str] = set()
    for node in memory.nodes:
        if node.meta.get(SPLIT) == node.name:
            lives = range(at[node.meta.get(_EARLY, node.name)], at[node.name] + 1)
            nbytes = storage_bytes(node.meta["val"])
            if max(alive[i] for i in lives) + nbytes <= most:
                joined.add(node.name)
                for i in lives:
                    alive[i] += nbytes
    for node in memory.nodes:
        if node.meta.get(SPLIT) in joined:
            del node.meta[SPLIT]
            node.meta.pop(_EARLY, None)
    memory.changed_order()
    return bool(joined)


def _move_behind(node: Node, anchor: Node, counted: Collection[Any]) -> None:
    """Move `node`, what it is computed of and its views behind `anchor` and its views, if they can, and mark them."""
    order = {each: i for i, each in enumerate(node.graph.nodes)}
    moved = set(with_inputs([node], lambda n: n <= anchor))
    computed = [n for n in moved if n is not node and not is_view(n)]
    if any(storage_of(n) in counted or not (fuses(n) or is_loop(n)) for n in computed):
        return
    for each in moved:
        each.meta[SPLIT] = node.name
    views = [node]
    for view in views:
        views += [
            user
            for user in view.users
            if is_view(user)
            and all(n in moved or n in views or order[n] <= order[anchor] for n in user.all_input_nodes)
        ]
    moved.update(views)
    at = anchor
    while at.next in moved or storage_of(at.next) == storage_of(anchor):
        at = at.next
    for each in sorted(moved, key=order.__getitem__):
        if order[each] > order[at]:
            at.append(each)
            at = each


def hold_kernels(gm: GraphModule | GraphMemory, live: Sequence[LivePoint], peak: int) -> None:
    """Let Inductor fuse only what the prediction of live bytes has in one kernel, except where any order stays low.

    Left alone, it computes a tensor again together with a later kernel that reads the same, when both of their results
    and all of their inputs are alive. `live` are the predicted points of `gm`, `peak` the bytes that no fusion may
    exceed.
    """
    memory = GraphMemory.of(gm)
    nodes, written, kernels, keys = memory.nodes, memory.written | memory.outputs, memory.kernels, memory.keys
    products = list(itertools.accumulate(has_formula(n) or is_attention(n) for n in nodes))
    alive = {point.node: point.live_bytes for point in live}
    at_start, writes = [0] * (products[-1] + 1), [0] * (products[-1] + 1)
    seen = {None, *memory.inputs}
    for node, number in zip(nodes, products, strict=True):
        at_start[number] = at_start[number] or alive.get(node.name, 0)
        writes[number] += workspace_bytes(node)
        if (key := keys[node]) in written and key not in seen:
            seen.add(key)
            writes[products[kernels.at[node]]] += storage_bytes(node.meta["val"])
    zones = fusion_zones(at_start, writes, peak)
    for node in nodes:
        if node.op == "call_function" and not is_view(node) and ALONE not in node.meta:
            key = ALONE if keys[node] in written else ALONE_IF_WRITTEN
            zone = f"split {node.name}" if SPLIT in node.meta else f"zone {zones[products[kernels.at[node]]]}"
            mark_alone([node], zone, key)


def fusion_zones(at_start: Sequence[int], writes: Sequence[int], peak: int) -> list[int]:
    """For each stretch of a graph between two products, the number of its zone; kernels are fused within a zone only.

    Several stretches are one zone if all that they write fits under `peak` bytes, with nothing freed. `at_start` has
    the bytes alive at the start of each stretch, `writes` those that it writes.
    """
    zones: list[int] = []
    alive = math.inf
    for start, written in zip(at_start, writes, strict=True):
        alive = max(alive, start) + written
        if alive <= peak:
            zones.append(zones[-1])
        else:
            zones.append(zones[-1] + 1 if zones else 0)
            alive = start + written
    return zones
