"""Bytes that an operator takes while it runs, beside its arguments and results, where that is known.

On a CPU these are upper bounds, by the sizes of the tensors: oneDNN reorders what a convolution reads and writes, and
which order it takes depends on the processor. tests/graphs/test_workspaces.py measures operators beside them. Not
counted: buffers of one thread, and what products in half precision take, which differs more between processors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from ..torch_private import values as torch_values
from .nodes import argument_called, target_name, tensor_bytes
from .read_tables import ATTENTION_BACKWARD

# Bytes of the sums in float32 by which passes/row_sums.py makes the gradient of an embedding, some columns at a time.
# Its kernels run at the speed of memory from some MiB on; fewer columns take more calls, each 10 us of the host.
ROW_SUMS_BYTES = 128 << 20
_HALVES = (torch.float16, torch.bfloat16)
_LANES = 16  # float32 numbers of a vector register: oneDNN rounds the channels of a 3d convolution up to it

_TEMPORARIES = {
    "binary_cross_entropy": (0, 2),
    "binary_cross_entropy_with_logits": (2, 4),
    "huber_loss": (1, 3),
    "logsumexp": (1, 1),
    "mse_loss": (2, 4),
    "native_dropout_backward": (1, 1),
    "smooth_l1_loss": (2, 4),
    "soft_margin_loss": (0, 2),
}
"""What losses and dropout take on a CPU, in sizes of their first argument: in float32, and in half precision.

With `reduction="none"` they take less. A result of `mse_loss` is a number in memory for all elements.
"""


def workspace_bytes(node: Node) -> int:
    """Bytes that the operator of `node` takes while it runs, where that is known."""
    if node.op != "call_function":
        return 0
    name = target_name(node).removeprefix("aten.").partition(".")[0]
    first = next((n.meta.get("val") for n in node.all_input_nodes), None)
    if name in ATTENTION_BACKWARD:
        return _attention_backward(node)
    if name == "aot_hooks":
        return _slice_of_sums(node) if target_name(node) == "aot_hooks.sum_rows.default" else 0
    if not isinstance(first, torch.Tensor) or first.layout is not torch.strided or first.device.type != "cpu":
        return 0
    if name == "convolution":
        return _convolution(node, _value(node, "input"), _value(node, "weight"), node.meta["val"])
    if name == "convolution_backward":
        return _convolution(node, _value(node, "input"), _value(node, "weight"), _value(node, "grad_output"), True)
    if name == "native_dropout":  # the mask as numbers of the argument's dtype
        return tensor_bytes(first) if argument_called("train", node) is not False else 0
    if name in ("scatter", "scatter_add", "scatter_reduce"):  # computed in float32
        return 4 * torch_values.hint(first.numel()) if first.dtype in _HALVES else 0
    if name in _TEMPORARIES:
        return tensor_bytes(first) * _TEMPORARIES[name][first.dtype in _HALVES]
    if name == "native_batch_norm_backward":
        return tensor_bytes(first)
    if name.startswith("upsample_"):  # both in channels-last order
        made = node.meta["val"]
        return tensor_bytes(first) + tensor_bytes(made) if isinstance(made, torch.Tensor) else 0
    return 0


def columns_at_once(count: int, columns: int) -> int:
    """How many columns of `count` sums are made at once."""
    return max(1, min(columns, ROW_SUMS_BYTES // (4 * max(1, count))))


def _slice_of_sums(node: Node) -> int:
    """Bytes of one slice of `row_sums`: some columns of the sums, and with a mask of the rows, in float32."""
    rows, mask = _value(node, "rows"), argument_called("mask", node)
    count, columns = map(torch_values.hint, node.meta["val"].shape)
    width = columns_at_once(count, columns)
    masked = torch_values.hint(rows.numel()) // columns * width if mask is not None else 0
    return 4 * (count * width + masked)


def _attention_backward(node: Node) -> int:
    """On CUDA the gradient of the queries is summed in float32, with a float32 for each of their rows. Measured on an
    H200 for cuDNN's, flash and memory-efficient attention.

    Where heads share keys and values, their gradients are made for each head first and then added up, for which flash
    attention has them twice: 385 MiB beside 80 of gradients, for 32 heads with 4 of keys and values, [2, heads, 4096,
    128] in bfloat16. cuDNN's takes at most 1.01 times what is counted (one H200, torch 2.11).
    """
    queries, *shared = [n.meta.get("val") if isinstance(n, Node) else None for n in node.args[1:4]] or [None]
    if not isinstance(queries, torch.Tensor) or queries.device.type != "cuda":
        return 0
    count = torch_values.hint(queries.numel())
    nbytes = 4 * (count + count // max(1, torch_values.hint(queries.shape[-1])))
    for value in shared if target_name(node).startswith("aten._scaled") else ():
        if isinstance(value, torch.Tensor):  # [batch, heads, length, width]
            heads, fewer = (torch_values.hint(each.shape[1]) for each in (queries, value))
            times = 0 if heads == fewer else 2 if "flash" in target_name(node) else 1
            nbytes += times * tensor_bytes(value) // max(1, fewer) * heads
    return nbytes


def _convolution(node: Node, x: Any, w: Any, y: Any, backward: bool = False) -> int:
    """Bytes that a convolution of `x` by `w` to `y` allocates inside, or its backward, which has a gradient for each.

    What is read and what is written are reordered, at different times in the forward. Half precision is computed in
    float32 where the processor does not know it, and its results are there beside.
    """
    tensors = (x, w, y)
    if not all(isinstance(t, torch.Tensor) for t in tensors):
        return 0
    volumes = x.dim() > 4
    read, weight, written = (_reordered(t, channels_at=1, padded=volumes) for t in tensors)
    transposed = argument_called("transposed", node) is True
    if backward:
        blocks = read + weight + written
    else:
        blocks = max(read + weight, written * (2 if transposed else 1))
    if x.dtype in _HALVES:
        blocks += (read + written + (weight if backward else 0)) // 2
    if torch_values.hint(x.shape[0]) == 1 and not transposed:  # a single image is unfolded into columns
        window = math.prod(torch_values.hint(n) for n in w.shape[1:])
        blocks = max(blocks, 4 * window * math.prod(torch_values.hint(n) for n in y.shape[2:]))
    return blocks


def _reordered(value: torch.Tensor, *, channels_at: int, padded: bool) -> int:
    """Bytes of `value` in float32, with channels rounded up to full vectors if it is `padded`."""
    count, channels = torch_values.hint(value.numel()), max(1, torch_values.hint(value.shape[channels_at]))
    return 4 * count // channels * (-(-channels // _LANES) * _LANES if padded else channels)


def _value(node: Node, name: str) -> Any:
    argument = argument_called(name, node)
    return argument.meta.get("val") if isinstance(argument, Node) else None
