"""Gradients of embeddings in low precision, without a whole one in float32 beside them.

      zeros = full([V, D], 0, float32)                       sum_rows(rows, ids, mask, V, bfloat16)
      sums = index_put(zeros, [ids], rows, True)      -->       for some columns at a time: sums in float32, rounded
      gradient = convert(sums, bfloat16)                        into their columns of the result

That is how Inductor decomposes the backward of an embedding. It holds 6 bytes for each weight, at the end of the step,
beside all other gradients. In slices of columns it holds 2, and one slice. Each element is the same sum, in the same
order, so results are bitwise the same wherever they are without slices: not where a GPU adds by atomic operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graphs.nodes import target_name, tensor_bytes
from ..graphs.workspaces import ROW_SUMS_BYTES, columns_at_once
from ..torch_private.inductor_lowering import new_operator
from .edits import call

# The share of the float32 sums that slices must spare, at least. A call of the operator takes the host longer than a
# kernel, and what it reads is written to memory, which a fused kernel would compute.
_LEAST_SPARED = 0.25


def _sum_rows(
    rows: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None, count: int, dtype: torch.dtype
) -> torch.Tensor:
    """The sums of `rows` by their `ids`, from 0 to `count`, in `dtype`. Rows outside of `mask` count nothing."""
    columns = rows.shape[-1]
    rows, ids = rows.reshape(-1, columns), ids.reshape(-1)
    if mask is not None:
        mask = mask.reshape(-1, 1)
        ids = torch.where(mask[:, 0], ids, 0)  # these rows add zeros to the first sum
    ids = torch.where(ids < 0, ids + count, ids)
    found = torch.empty(count, columns, dtype=dtype, device=rows.device)
    width = columns_at_once(count, columns)
    for own, result in zip(rows.split(width, 1), found.split(width, 1), strict=True):
        sums = torch.zeros(result.shape, dtype=rows.dtype, device=rows.device)
        own = own if mask is None else torch.where(mask, own, 0)
        if rows.device.type == "cpu":
            sums.index_put_((ids,), own, accumulate=True)
        else:  # index_put_ would sort the indices again for each slice
            sums.index_add_(0, ids, own)
        result.copy_(sums)
        del sums  # before the next ones are there
    return found


sum_rows = new_operator(
    "sum_rows(Tensor rows, Tensor ids, Tensor? mask, SymInt count, ScalarType dtype) -> Tensor",
    _sum_rows,
    lambda rows, _ids, _mask, count, dtype: rows.new_empty((count, rows.shape[-1]), dtype=dtype),
)

_PUT = ("aten.index_put.default", "aten._unsafe_index_put.default")  # torch 2.11
_PUT_MASKED = "aten._unsafe_masked_index_put_accumulate.default"  # torch 2.13


def sum_rows_in_slices(bw: GraphModule) -> None:
    """Have large gradients of embeddings made in slices of columns, in place."""
    changed = False
    rounded: Any  # and so its arguments
    for rounded in bw.graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default):
        sums, dtype = rounded.args
        found = _rows_of(sums) if dtype in (torch.bfloat16, torch.float16) else None
        if found is None or not _pays(sums, found[0]):
            continue
        rows, ids, mask = found
        with bw.graph.inserting_before(rounded):
            made = call(bw.graph, sum_rows, rows, ids, mask, sums.meta["val"].shape[0], dtype)
        made.meta.update({k: v for k, v in rounded.meta.items() if k not in made.meta})
        rounded.replace_all_uses_with(made)
        bw.graph.erase_node(rounded)
        bw.graph.erase_node(sums)
        changed = True
    if changed:
        bw.graph.eliminate_dead_code()
        bw.recompile()


def _pays(sums: Node, rows: Node) -> bool:
    """Whether the sums are large, and slices of them take enough less."""
    whole = tensor_bytes(sums.meta["val"])
    count, columns = sums.meta["val"].shape
    beside = 4 * count * columns_at_once(count, columns) + tensor_bytes(rows.meta["val"])
    return whole > ROW_SUMS_BYTES and whole - beside >= _LEAST_SPARED * whole


def _rows_of(sums: Any) -> tuple[Node, Node, Node | None] | None:
    """The rows that `sums` adds to zeros, where, and which of them, if nothing but its rounding reads `sums`."""
    mask: Node | None = None
    if target_name(sums) in _PUT and sums.args[3:] == (True,):
        zeros, indices, rows = sums.args[:3]
    elif target_name(sums) == _PUT_MASKED:
        zeros, mask, indices, rows = sums.args
    else:
        return None
    if len(sums.users) > 1 or len(indices) != 1 or target_name(zeros) != "aten.full.default" or zeros.args[1] != 0:
        return None
    value, ids, parts = (n.meta["val"] for n in (sums, indices[0], rows))
    if value.dim() != 2 or not all(isinstance(n, int) for n in value.shape) or value.dtype != torch.float32:
        return None
    if ids.dtype not in (torch.int64, torch.int32) or parts.shape != (*ids.shape, value.shape[1]):
        return None
    if mask is not None and mask.meta["val"].shape != (*ids.shape, 1):
        return None
    return rows, indices[0], mask
