"""Memory order: a tensor permuted so that packing reads it, and unpacking writes it, from front to back.

      query bf16[b, h, s, d], in memory [b, s, h, d] --in_memory_order--> y bf16[b, s, h, d] contiguous, (0, 2, 1, 3)
                                                     <-from_memory_order-

Sizes and strides alone decide, without a guard on symbolic ones: their example values suggest an order, which is taken
only if it is contiguous for every value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..torch_private.values import hint, same_size

__all__ = ["from_memory_order", "in_memory_order", "is_contiguous"]


def in_memory_order(x: torch.Tensor, *, keep_rows: bool = True) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """`x` with its dimensions permuted so that it is contiguous, and the permutation.

    Returns `(x, None)` if it is contiguous already, or if no permutation is certain to make it so: it may have gaps or
    overlaps.

    Args:
        keep_rows: leave the last dimension last. A hook's scales along it then are those of the program's rows.
    """
    order = tuple(range(x.dim()))
    if is_contiguous(x):
        return x, None
    moved, last = (order[:-1], order[-1:]) if keep_rows else (order, ())
    # Dimensions of size 1 go first, because their strides mean nothing.
    order = *sorted(moved, key=lambda d: (0, 0) if same_size(x.shape[d], 1) else (1, -hint(x.stride(d)))), *last
    return (x.permute(order), order) if _contiguous(x, order) else (x, None)


def from_memory_order(y: torch.Tensor, permutation: Sequence[int] | None) -> torch.Tensor:
    """Undoes `in_memory_order`: `y` with the sizes and strides of its argument, but for strides of dimensions of 1."""
    if permutation is None:
        return y
    return y.permute(sorted(range(len(permutation)), key=lambda d: permutation[d]))


def is_contiguous(x: torch.Tensor) -> bool:
    """Whether `x` is contiguous for certain; leaves no guard."""
    return _contiguous(x, range(x.dim()))


def _contiguous(x: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether `x.permute(order)` is contiguous for certain."""
    expected: Any = 1
    for d in reversed(order):
        if same_size(x.shape[d], 1):
            continue
        if not same_size(x.stride(d), expected):
            return False
        expected = expected * x.shape[d]
    return True
