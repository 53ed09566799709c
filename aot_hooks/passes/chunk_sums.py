"""The operator by which chunks add up the gradient of a weight, in float32 and in one tensor.

    grad_w = mm(t(grad_0), h_0)                          float32[V, D]
    grad_w = add_product(grad_w, t(grad_1), h_1)         in the memory of the first, if nothing else reads that

ATen has no such operator for factors in bfloat16 with fake tensors. As a product and a sum, Inductor would put off the
sum: then the products, and the gradients of logits that they read, are alive for all chunks at once.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import register_flop_formula

from ..torch_private.inductor_lowering import lower_in_place, new_operator
from .chunk_order import wait_for

# The rows of a product that is added in pieces are of this many bytes in float32: the memory that it takes beside.
_PIECE_BYTES = 64 << 20
_aten = torch.ops.aten
_wide_product = _aten.mm.dtype


def _add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add `a @ b` to `total`, in place and in its dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif _adds_to_wider(total.device, a.dtype):
        _aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        count = max(1, _PIECE_BYTES // (4 * total.shape[1]))
        for rows, left in zip(total.split(count), a.split(count), strict=True):
            rows += _wide_product(left, b, total.dtype)


def _adds_to_wider(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch adds products of `dtype` to float32 in place; older versions want a sum of the same dtype."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # no place to compare results
        return False
    return _found_to_add(device, dtype)


@functools.cache
def _found_to_add(device: torch.device, dtype: torch.dtype) -> bool:
    total = torch.ones(16, 16, device=device)
    factor = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        _aten.addmm.dtype_out(total, factor, factor, torch.float32, out=total)
    except RuntimeError:  # NotImplementedError is one
        return False
    return bool((total == 17).all())


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    found = total.clone()
    _add_product_(found, a, b)
    return found


add_product = new_operator(
    "add_product(Tensor sum, Tensor a, Tensor b) -> Tensor", _add_product, lambda total, *_: torch.empty_like(total)
)
add_product_ = new_operator("add_product_(Tensor(a!) sum, Tensor a, Tensor b) -> ()", _add_product_, lambda *_: None)


@register_flop_formula(torch.ops.aot_hooks.add_product)
def _operations(_total: Any, a: Any, b: Any, *_args: Any, **_named: Any) -> int:
    return int(2 * a[0] * a[1] * b[1])


_FRESH = (add_product, _aten.mm.default, _aten.mm.dtype)  # return memory that nobody else has


def _takes_over(node: Node) -> bool:
    """Whether `node`, an `add_product`, may write its result over its sum. `wait_for` reads it before, if at all."""
    total = node.args[0]
    if not isinstance(total, Node) or total.target not in _FRESH:
        return False
    return all(user is node or user.target is wait_for for user in total.users)


lower_in_place(add_product, add_product_, _takes_over)


def add_in_place(gm: GraphModule) -> GraphModule:
    """`gm`, changed so that each `add_product` writes over its sum, where it may. For graphs that run as they are."""
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=add_product):
        if _takes_over(node):
            with gm.graph.inserting_before(node):
                gm.graph.call_function(add_product_, node.args)
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
            changed = True
    if changed:
        gm.recompile()
    return gm
