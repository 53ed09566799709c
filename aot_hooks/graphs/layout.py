"""Memory layouts: the order of a tensor's dimensions in memory, and strides with or without gaps.

      query bf16[b, h, s, d], in memory [b, s, h, d] --in_memory_order--> y bf16[b, s, h, d] contiguous, (0, 2, 1, 3)
                                                     <-from_memory_order-

A hook packs the permuted tensor from front to back. What unpack returned gets the strides of the saved tensor by
`restride`. Sizes and strides alone decide, without a guard on symbolic ones: their example values suggest an order,
which is taken only if it is contiguous for every value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..torch_private.values import hint, same_size


def in_memory_order(x: torch.Tensor, *, keep_rows: bool = True) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """`x` with its dimensions permuted so that it is contiguous, and the permutation.

    Returns `(x, None)` if it is contiguous already, or if no permutation is certain to make it so: it may have gaps or
    overlaps. `keep_rows` leaves the last dimension last: a hook's scales along it are those of the program's rows.
    """
    order = tuple(range(x.dim()))
    if is_contiguous(x):
        return x, None
    moved, last = (order[:-1], order[-1:]) if keep_rows else (order, ())
    # Dimensions of size 1 go first, because their strides mean nothing.
    order = *sorted(moved, key=lambda d: (0, 0) if same_size(x.shape[d], 1) else (1, -hint(x.stride(d)))), *last
    return (x.permute(order), order) if is_contiguous(x, order) else (x, None)


def from_memory_order(y: torch.Tensor, permutation: Sequence[int] | None) -> torch.Tensor:
    """Undoes `in_memory_order`: `y` with the sizes and strides of its argument, but for strides of dimensions of 1."""
    if permutation is None:
        return y
    return y.permute(sorted(range(len(permutation)), key=lambda d: permutation[d]))


def is_contiguous(x: torch.Tensor, order: Sequence[int] | None = None) -> bool:
    """Whether `x`, or `x.permute(order)`, is contiguous for certain; leaves no guard."""
    expected: Any = 1
    for d in reversed(range(x.dim()) if order is None else order):
        if same_size(x.shape[d], 1):
            continue
        if not same_size(x.stride(d), expected):
            return False
        expected = expected * x.shape[d]
    return True


def expanded_dimensions(like: torch.Tensor) -> list[int]:
    """The dimensions of stride 0 with several rows, which are one in memory."""
    several = (d for d in range(like.dim()) if not same_size(like.shape[d], 1) and not same_size(like.shape[d], 0))
    return [d for d in several if same_size(like.stride(d), 0)]


def _strided_dimensions(like: torch.Tensor) -> list[int]:
    """The dimensions along which the address of a value changes."""
    return [d for d in range(like.dim()) if not same_size(like.stride(d), 0) and not same_size(like.shape[d], 1)]


def restride(out: torch.Tensor, like: torch.Tensor, stride: Sequence[Any] | None) -> torch.Tensor:
    """`out` with the memory order of `like`, which the backward's views were built on.

    With `stride`, the strides of a `like` that has gaps between its values, the result has the same gaps. For a kernel
    of ATen may take the rows one by one or all at once, depending on the gaps between them, and round differently.
    """
    if all(same_size(a, b) for a, b in zip(out.stride(), like.stride(), strict=True)):
        return out
    if stride is not None:
        return _with_gaps(out, like, stride)
    if not _strided_dimensions(like) or same_size(like.numel(), 0):
        return out
    order = sorted(range(like.dim()), key=lambda d: (-hint(like.stride(d)), d))
    if order == list(range(like.dim())):
        return out.contiguous()
    return from_memory_order(out.permute(order).contiguous(), order)


def has_gaps(like: torch.Tensor) -> bool:
    """Whether there is memory between the values of `like` that is not its own; False if the values overlap."""
    dense, reached = True, 1
    expected: Any = 1
    for d in sorted(_strided_dimensions(like), key=lambda d: (hint(like.stride(d)), -d)):
        if hint(like.stride(d)) < reached:
            return False
        reached += (hint(like.shape[d]) - 1) * hint(like.stride(d))
        dense = dense and same_size(like.stride(d), expected)
        expected = expected * like.shape[d]
    return not dense and not same_size(like.numel(), 0)


def _with_gaps(out: torch.Tensor, like: torch.Tensor, stride: Sequence[Any]) -> torch.Tensor:
    """A copy of `out` with `stride`, that of `like`; the numbers in the gaps are arbitrary, nobody reads them."""
    rows = out
    for d in range(like.dim()):
        if same_size(like.stride(d), 0):
            rows = rows.narrow(d, 0, 1)
    span: Any = 1
    for d in _strided_dimensions(like):
        span = span + (out.shape[d] - 1) * stride[d]
    memory = torch.as_strided_scatter(out.new_empty((span,)), rows, rows.shape, stride, 0)
    return memory.as_strided(out.shape, stride, 0)
