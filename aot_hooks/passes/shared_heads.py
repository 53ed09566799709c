"""Attention whose keys and values were repeated for several heads of queries: it reads them once for all of these.

      before    k [2, 4, n, d] --unsqueeze, expand, clone, view--> k8 [2, 32, n, d]     attention(q, k8, v8)
                dk8 [2, 32, n, d] --view, sum over 8--> dk [2, 4, n, d]
      after     attention(q, k, v), whose backward returns dk                           as with `enable_gqa=True`

Models repeat them by hand for the kernels that don't know shared heads; cuDNN's and a CPU's do. In blocks of
Qwen3-30B-A3B's shape 256 MiB of keys and values become 32, and as many of their gradients, which cuDNN makes for each
head first: 256 MiB inside. The outputs are the same, and sums over heads have other last digits. CUDA's flash attention
has these gradients twice inside, so it would hold more than with repeated heads.

Kernels read a head's numbers side by side, as they lie in the repeated copy. Where a graph runs operator by operator,
the strides of a trace may not be the real ones, so attention reads a copy of the few heads there.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graphs.nodes import argument_called, target_name
from .edits import call, described_as, run_on_fakes

_KERNELS = ("cudnn_attention", "flash_attention_for_cpu")
_FORWARD = tuple(f"aten._scaled_dot_product_{name}.default" for name in _KERNELS)
_BACKWARD = tuple(f"aten._scaled_dot_product_{name}_backward.default" for name in _KERNELS)
_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_KEPT = (*_VIEWS, "aten.clone.default")  # the same numbers


def share_heads(joint: GraphModule, *, fused: bool) -> None:
    """Have attention in `joint` read keys and values before they are repeated, in place.

    `fused`: Inductor compiles the graph, and sees to it that tensors lie as in the trace.
    """
    copies: dict[Node, Node] | None = None if fused else {}
    attentions = [node for node in joint.graph.nodes if target_name(node) in (*_FORWARD, *_BACKWARD)]
    if any([_share(node, copies) for node in attentions]):
        joint.graph.eliminate_dead_code()
        joint.recompile()


def _share(attention: Node, copies: dict[Node, Node] | None) -> bool:
    """Whether `attention`, a forward or a backward, has other keys and values now.

    `copies`: of keys and values, which are read in their place; None: they are read themselves.
    """
    backward = target_name(attention) in _BACKWARD
    at = 2 if backward else 1  # a backward takes the gradient of the result first
    repeated: Any = attention.args[at : at + 2]
    shared = [_before_repeating(node) for node in repeated]
    masks = (argument_called(name, attention) for name in ("attn_bias", "attn_mask"))
    head_counts = {0 if node is None else int(node.meta["val"].shape[1]) for node in shared}
    if any(mask is not None for mask in masks) or len(head_counts) > 1:
        return False
    sums: dict[Node, Node] = {}
    for i, node in enumerate(shared, start=1):
        if node is None:
            return False
        for gradient in attention.users if backward else ():
            if gradient.target is operator.getitem and gradient.args[1] == i:
                if (found := _summed(gradient, node.meta["val"].shape)) is None:
                    return False
                sums[gradient] = found
    if copies is not None:
        shared = [_copied(node, attention, copies) for node in shared if node is not None]
    attention.args = (*attention.args[:at], *shared, *attention.args[at + 2 :])
    run_on_fakes(attention)
    for user in attention.users:
        run_on_fakes(user)
    for gradient, summed in sums.items():
        made = gradient
        if gradient.meta["val"].stride() != summed.meta["val"].stride():
            with attention.graph.inserting_after(gradient), described_as(gradient):
                made = call(
                    attention.graph, torch.ops.aten.clone.default, gradient, memory_format=torch.contiguous_format
                )
        summed.replace_all_uses_with(made)
    return True


def _copied(node: Node, reader: Node, copies: dict[Node, Node]) -> Node:
    """The contiguous copy of `node`, made in front of the first attention that reads it."""
    if node not in copies:
        with reader.graph.inserting_before(reader), described_as(reader):
            copy = call(reader.graph, torch.ops.aten.clone.default, node, memory_format=torch.contiguous_format)
        copies[node] = copy
    return copies[node]


def _before_repeating(heads: Any) -> Node | None:
    """[batch, fewer heads, length, width] of which `heads` has each head several times in turn; None without."""
    if not isinstance(heads, Node) or heads.meta["val"].dim() != 4:
        return None
    batch, count, *rest = shape = tuple(heads.meta["val"].shape)
    node: Any = heads
    while target_name(node) in _KEPT:
        node = node.args[0]
    if target_name(node) != "aten.expand.default" or not all(type(n) is int for n in shape):
        return None
    single: Any = node.args[0]
    while target_name(single) == "aten.slice.Tensor" and single.meta["val"].shape == single.args[0].meta["val"].shape:
        single = single.args[0]
    if target_name(single) != "aten.unsqueeze.default" or single.args[1] != 2:
        return None
    base: Any = single.args[0]
    fewer = base.meta["val"].shape[1]
    if base.meta["val"].stride(-1) != 1:  # kernels read a head's numbers side by side, as in the repeated copy
        return None
    fits = tuple(base.meta["val"].shape) == (batch, fewer, *rest) and count % fewer == 0 and fewer < count
    return base if fits and tuple(node.meta["val"].shape) == (batch, fewer, count // fewer, *rest) else None


def _summed(gradient: Node, shape: torch.Size) -> Node | None:
    """The sum of `gradient` over the heads that share one, of this `shape`; None if anything else reads `gradient`."""
    batch, fewer, *rest = shape
    node, is_summed = gradient, False
    while not (is_summed and node.meta["val"].shape == shape):
        readers = [*node.users]
        if len(readers) != 1:
            return None
        node = readers[0]
        if target_name(node) == "aten.sum.dim_IntList":
            source: Any = node.args[0]
            groups = (batch, fewer, gradient.meta["val"].shape[1] // fewer, *rest)
            if is_summed or tuple(source.meta["val"].shape) != groups or node.args[1] != [2] or node.kwargs:
                return None
            is_summed = True
        elif target_name(node) not in (*_VIEWS, "aten.squeeze.dim"):
            return None
    return node if node.meta["val"].is_contiguous() else None
