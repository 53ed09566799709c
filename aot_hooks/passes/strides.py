"""Memory layouts of unpacked tensors: the strides of the saved tensor come back, with its gaps if a hook is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..torch_private import values as torch_values

__all__ = ["expanded_dimensions", "has_gaps", "restride"]


def expanded_dimensions(like: torch.Tensor) -> list[int]:
    """The dimensions of stride 0: all their rows are one in memory."""
    return [
        d
        for d in range(like.dim())
        if torch_values.same_size(like.stride(d), 0) and not torch_values.same_size(like.shape[d], 1)
    ]


def restride(out: torch.Tensor, like: torch.Tensor, stride: Sequence[Any] | None) -> torch.Tensor:
    """`out` with the memory order of `like`, which the backward's views were built on.

    With `stride`, the strides of a `like` that has gaps between its values, the result has the same gaps. For a kernel
    of ATen may take the rows one by one or all at once, depending on the gaps between them, and round differently.
    """
    if all(torch_values.same_size(a, b) for a, b in zip(out.stride(), like.stride(), strict=True)):
        return out
    if stride is not None:
        return _with_gaps(out, like, stride)
    dims = _dimensions(like)
    if not dims or torch_values.same_size(like.numel(), 0):
        return out
    order = sorted(range(like.dim()), key=lambda d: (-torch_values.hint(like.stride(d)), d))
    back = [order.index(d) for d in range(like.dim())]
    if order == list(range(like.dim())):
        return out.contiguous()
    return out.permute(order).contiguous().permute(back)


def has_gaps(like: torch.Tensor) -> bool:
    """Whether there is memory between the values of `like` that is not its own; False if the values overlap."""
    dense, reached = True, 1
    expected: Any = 1
    for d in sorted(_dimensions(like), key=lambda d: (torch_values.hint(like.stride(d)), -d)):
        if torch_values.hint(like.stride(d)) < reached:
            return False
        reached += (torch_values.hint(like.shape[d]) - 1) * torch_values.hint(like.stride(d))
        dense = dense and torch_values.same_size(like.stride(d), expected)
        expected = expected * like.shape[d]
    return not dense and not torch_values.same_size(like.numel(), 0)


def _dimensions(like: torch.Tensor) -> list[int]:
    """The dimensions along which the address of a value changes."""
    return [
        d
        for d in range(like.dim())
        if not torch_values.same_size(like.stride(d), 0) and not torch_values.same_size(like.shape[d], 1)
    ]


def _with_gaps(out: torch.Tensor, like: torch.Tensor, stride: Sequence[Any]) -> torch.Tensor:
    """A copy of `out` with `stride`, that of `like`; the numbers in the gaps are arbitrary, nobody reads them."""
    rows = out
    span: Any = 1
    for d in range(like.dim()):
        if torch_values.same_size(like.stride(d), 0):
            rows = rows.narrow(d, 0, 1)
    for d in _dimensions(like):
        span = span + (out.shape[d] - 1) * stride[d]
    memory = torch.as_strided_scatter(out.new_empty((span,)), rows, rows.shape, stride, 0)
    return memory.as_strided(out.shape, stride, 0)
