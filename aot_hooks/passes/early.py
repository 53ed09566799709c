"""Values that are computed early, so that less is alive: in the forward for the backward, and in the backward.

      left alone    y = relu(x)   ...many layers...   mask = y <= 0    return z, mask      x lives to the end
      moved         y = relu(x)   mask = y <= 0   ...many layers...    return z, mask      only the mask does

A partitioner leaves such nodes at the end of the forward, and Inductor fuses no nodes that are far apart.

      fused         d = mm(g, w)   h, d_up, d_gate = f(gate, up, d)   mm(g, h)             all four are alive at once
      apart         h = f(gate, up)   mm(g, h)   d = mm(g, w)   d_up, d_gate = f(gate, up, d)
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from cudagraph.placeholder import results_of

from ..graphs.lifetimes import Kernels, fuses, last_readers, on_cuda, written_storages
from ..graphs.nodes import input_storages, is_view, output_storages, storage_bytes, storage_of, storages
from ..graphs.roofline import has_formula
from ..torch_private import aot
from ..torch_private.inductor_fusion import FROM_HOOK, mark_alone


def compute_early(fw: GraphModule, num_fwd_outputs: int) -> None:
    """Move such nodes behind their inputs, or behind a kernel with the same inputs, if that frees memory earlier.

    In place. Hooks are put in afterwards: they pack a value where it is computed.
    """
    nodes = list(fw.graph.nodes)
    outputs, inputs = output_storages(fw.graph), input_storages(fw.graph)
    asked_for = set(results_of(fw.graph)[:num_fwd_outputs])
    late = {n for n in nodes if _is_for_backward(n) and n not in asked_for and storage_of(n) in outputs}
    if not late:
        return
    counted = written_storages(nodes, fuse_loops=True) | outputs | inputs
    kernels = Kernels.of(nodes, counted)
    ends: dict[Any, int] = {}  # by storage, the position of its last reader
    for node, last in last_readers(nodes, counted).items():
        ends[storage_of(node)] = max(last, ends.get(storage_of(node), last))
    position = {node: i for i, node in enumerate(nodes)}
    moved: set[Node] = set()
    for node in (node for node in nodes if node in late):
        if not any(nodes[ends[key]] in late for key in set(kernels.reads[node]) - outputs - inputs):
            continue  # what it reads is alive later anyway
        chain = _computed_for(node)
        sources = {n for each in chain for n in each.all_input_nodes} - chain
        beside = nodes[kernels.at[node]]  # the kernel that reads the same, if there is one
        at = max(sources | ({beside} - chain), key=position.__getitem__)
        if at.op == "placeholder" or not moved.isdisjoint({at, *sources}):
            continue
        for each in sorted(chain, key=position.__getitem__):
            at.append(each)
            at = each
        moved |= chain
    fw.graph.lint()
    fw.recompile()


def _is_for_backward(node: Node) -> bool:
    """Whether only the graph's output reads `node`, which a compiler fuses with others."""
    only_output = all(user.op == "output" for user in node.users)
    return node.op == "call_function" and only_output and fuses(node) and not is_view(node)


def _computed_for(node: Node) -> set[Node]:
    """`node`, and what is computed for it alone and fused with it."""
    chain, stack = {node}, [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source.op == "call_function" and fuses(source) and chain.issuperset(source.users):
                chain.add(source)
                stack.append(source)
    return chain


def compute_apart(bw: GraphModule) -> None:
    """Let Inductor fuse no value that the backward computes again for a weight's gradient with several other gradients.

    Such a value stands just before its product. In one kernel with gradients, which come later and read the same
    tensors, it is alive beside all of them: in the backward of a gated block 5.3 instead of 4.4 of its widest tensors,
    in generated code. Values beside a single gradient are left: some blocks would gain, others lose the kernel that
    writes over an input. CUDA only. There are such values with `recompute_pointwise` or checkpoints.
    """
    nodes = list(bw.graph.nodes)
    gradients: set[Node] = set()  # and all else that is computed from the backward's tangents
    for node in nodes:
        if aot.is_tangent(node) or not gradients.isdisjoint(node.all_input_nodes):
            gradients.add(node)
    for_products = storages(
        n for node in nodes if node in gradients and has_formula(node) for n in node.all_input_nodes
    )
    pointwise = [n for n in nodes if fuses(n) and not is_view(n)]
    again = [n for n in pointwise if n not in gradients and FROM_HOOK not in n.meta and storage_of(n) in for_products]
    if not again or not on_cuda(again):
        return
    written = written_storages(nodes, fuse_loops=True) | output_storages(bw.graph) | input_storages(bw.graph)
    reads = Kernels.of(nodes, written).reads
    late = [n for n in pointwise if n in gradients and storage_of(n) in written]
    for node in again:
        size = storage_bytes(node.meta["val"])
        beside = [n for n in late if storage_bytes(n.meta["val"]) == size and set(reads[n]) & set(reads[node])]
        if len(beside) > 1:
            mark_alone([node], f"again {node.name}")
