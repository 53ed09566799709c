"""A tensor as it lies in memory, so that packing reads it, and unpacking writes it, from front to back.

      query bf16[b, h, s, d], in memory [b, s, h, d] --in_memory_order--> y bf16[b, s, h, d] contiguous, (0, 2, 1, 3)
                                                     <-from_memory_order-

Only leading dimensions move: rows stay rows, so what a hook finds along the last dimension is the same. Decided from
sizes and strides alone, without a guard on symbolic ones: an order is tried by their example values and taken only if
the result is contiguous for certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..torch_private.values import hint, same_size

__all__ = ["from_memory_order", "in_memory_order", "is_contiguous"]


def in_memory_order(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """`x` with its leading dimensions permuted so that it is contiguous, and the permutation.

    `(x, None)` if it is contiguous already, or if no such order exists for certain: the last dimension is not the
    innermost, or there are gaps or overlaps.
    """
    order = tuple(range(x.dim()))
    if x.dim() < 3 or _contiguous(x, order):
        return x, None
    ones = tuple(d for d in order[:-1] if same_size(x.shape[d], 1))  # their strides say nothing: out of the way
    rest = sorted((d for d in order[:-1] if d not in ones), key=lambda d: -hint(x.stride(d)))
    order = (*ones, *rest, order[-1])
    return (x.permute(order), order) if _contiguous(x, order) else (x, None)


def from_memory_order(y: torch.Tensor, permutation: Sequence[int] | None) -> torch.Tensor:
    """What `in_memory_order` was given, from the two that it returned: sizes and strides (but for those of size 1)."""
    if permutation is None:
        return y
    back = sorted(range(len(permutation)), key=lambda d: permutation[d])
    return y.permute(back)


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
