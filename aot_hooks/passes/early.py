"""Values for the backward that are computed where their inputs are, not at the end of the forward: less is alive.

      left alone    y = relu(x)   ...many layers...   mask = y <= 0    return z, mask      x lives to the end
      moved         y = relu(x)   mask = y <= 0   ...many layers...    return z, mask      only the mask does

A partitioner leaves them at the end, and Inductor fuses no nodes that are far apart.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from cudagraph.placeholder import results_of

from ..graphs.lifetimes import GraphMemory, fuses, last_readers
from ..graphs.nodes import is_view


def compute_early(fw: GraphModule, num_fwd_outputs: int) -> None:
    """Move nodes that are for the backward alone behind their inputs, if that frees an input earlier. In place.

    If a kernel reads the same inputs, they move behind that one. Hooks are put in afterwards: they pack a value where
    it is computed.
    """
    memory = GraphMemory(fw)
    nodes, outputs, inputs = memory.nodes, memory.outputs, memory.inputs
    returned = set(results_of(fw.graph)[:num_fwd_outputs])
    late = {n for n in nodes if _is_for_backward(n) and n not in returned and memory.keys[n] in outputs}
    if not late:
        return
    ends: dict[Any, int] = {}  # by storage, the position of its last reader
    for node, last in last_readers(nodes, memory.counted).items():
        ends[memory.keys[node]] = max(last, ends.get(memory.keys[node], last))
    position = {node: i for i, node in enumerate(nodes)}
    moved: set[Node] = set()
    for node in filter(late.__contains__, nodes):
        read = set(memory.kernels.reads[node]) - outputs - inputs
        if not any(nodes[ends[key]] in late for key in read):
            continue  # a reader that stays late keeps each of them alive: a move frees nothing
        chain = _computed_for(node)
        sources = {n for each in chain for n in each.all_input_nodes} - chain
        kernel = nodes[memory.kernels.at[node]]  # the first node of the kernel that reads the same, or `node` itself
        target = max(sources | ({kernel} - chain), key=position.__getitem__)
        if target.op == "placeholder" or not moved.isdisjoint({target, *sources}):
            continue  # `position` does not know where moved nodes are now
        for each in sorted(chain, key=position.__getitem__):
            target.append(each)
            target = each
        moved |= chain


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
