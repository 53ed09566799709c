"""Memory layouts: the order of a tensor's dimensions in memory, and strides with or without gaps.

      query bf16[b, h, s, d], in memory [b, s, h, d] --in_memory_order--> y bf16[b, s, h, d] contiguous, (0, 2, 1, 3)
                                                     <-from_memory_order-

A hook packs the permuted tensor from front to back. What unpack returned gets the strides of the saved tensor by
`restride`. Sizes and strides alone decide, without a guard on symbolic ones: their example values suggest an order,
which is taken only if it is contiguous for every value.

The strides of a trace are those that torch's fake kernels predict, and real kernels may return others. Inductor's code
compares them when it runs. A graph that runs operator by operator does not, so it has three functions as nodes:

      forward    y = laid_out(x, ...)       x in the strides that the hook was traced with: itself, or else a copy
                 strides = layout_of(x)     the real strides, as sizes of a tensor without elements
                 q, s = pack(y)
      backward   x' = in_layout(unpack(q, s), strides)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


def restride(out: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`out` with the memory order of fake `like`, which the backward's views were built on."""
    if all(same_size(a, b) for a, b in zip(out.stride(), like.stride(), strict=True)):
        return out
    is_one_number = all(same_size(s, 0) or same_size(n, 1) for s, n in zip(like.stride(), like.shape, strict=True))
    if is_one_number or same_size(like.numel(), 0):
        return out
    order = sorted(range(like.dim()), key=lambda d: (-hint(like.stride(d)), d))
    if order == list(range(like.dim())):
        return out.contiguous()
    return from_memory_order(out.permute(order).contiguous(), order)


# --- layouts in graphs that run operator by operator ------------------------------------------------------------------


@dataclass(frozen=True)
class TracedLayout:
    """The layout that a hook is traced with: the arguments of `laid_out`."""

    order: tuple[int, ...]  # dimensions in the order of memory; those of stride 0 are left out
    strides: tuple[int, ...] | None  # None: no gaps between the values, for any sizes


def traced_layout(x: torch.Tensor, *, expanded_for_certain: bool) -> TracedLayout:
    """The layout to trace a hook with on fake `x`: that of `x`, or a dense one if a size is symbolic.

    A stride of 0 is kept if `expanded_for_certain`; else real rows may differ where the trace has one row. Overlaps are
    not kept: torch 2.11 predicts some for results that have none, as of `rfftn` of a permuted tensor on CUDA.
    """
    expanded = expanded_dimensions(x)
    certain = expanded_for_certain or not expanded
    rows = [d for d in range(x.dim()) if d not in expanded or not certain]
    order = tuple(sorted(rows, key=lambda d: (0, 0) if same_size(x.shape[d], 1) else (1, -hint(x.stride(d)))))
    known = certain and all(isinstance(n, int) for n in (*x.shape, *x.stride())) and not _reach(x.shape, x.stride())[1]
    return TracedLayout(order, tuple(x.stride()) if known else None)


def fake_in(layout: TracedLayout, x: torch.Tensor) -> torch.Tensor:
    """The fake value of `laid_out` for fake `x`."""
    if layout.strides is not None:
        return x
    laid = x.new_empty_strided(x.shape, _dense_strides(x.shape, layout.order))
    return laid.conj() if x.is_conj() else laid


def laid_out(x: torch.Tensor, order: Sequence[int], strides: Sequence[int] | None) -> torch.Tensor:
    """`x` in a `TracedLayout`: itself, or a copy if an operator gave it another layout than its trace.

    Strides of dimensions of size 1 are those of the trace, too: a view as another dtype checks them.
    """
    strides = _dense_strides(x.shape, order) if strides is None else strides
    if x.stride() == strides:
        return x
    # a copy would resolve the promise to conjugate, which the hook's trace starts with
    return with_strides(x.conj(), strides).conj() if x.is_conj() else with_strides(x, strides)


def layout_of(x: torch.Tensor) -> torch.Tensor:
    """The strides of `x`, as the sizes of a tensor without elements after the first, which is 0.

    A tensor crosses to the backward like any other; a number would need a symbol.
    """
    return x.new_empty_strided((0, *x.stride()), (0,) * (x.dim() + 1))


def in_layout(y: torch.Tensor, layout: torch.Tensor, with_gaps: bool) -> torch.Tensor:
    """`y` with the strides in `layout`, those of dimensions of size 1 included, or a copy that has them.

    Without `with_gaps`, a copy has the same order in memory, but no gaps.
    """
    strides: Sequence[int] = layout.shape[1:]
    if y.stride() == strides:
        return y
    if not with_gaps and y.numel():
        moving = [d for d in range(y.dim()) if strides[d] != 0 and y.shape[d] != 1]
        dense = _dense_strides(y.shape, sorted(moving, key=lambda d: -strides[d]))
        strides = [dense[d] if d in moving else strides[d] for d in range(y.dim())]
    return with_strides(y, strides)


def with_strides(y: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """`y` with exactly these `strides`: a view if its values lie so, else a copy."""
    if y.numel() == 0:
        return y.new_empty_strided(y.shape, strides)
    return y.as_strided(y.shape, strides) if _same_strides(y, strides) else _copied_into(y, strides)


def _same_strides(x: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether the values of `x` lie as `strides` say; the stride of a dimension of size 1 means nothing."""
    return all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True))


def _dense_strides(shape: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """Strides without gaps for the dimensions in `order`, the outermost first; 0 for all others."""
    strides: list[Any] = [0] * len(shape)
    expected: Any = 1
    for d in reversed(order):
        strides[d] = expected
        expected = expected * shape[d]
    return tuple(strides)


def _reach(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, bool]:
    """How many numbers lie from the first to the last, and whether some share memory other than by a stride of 0."""
    reached, overlaps = 1, False
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if stride != 0 and n != 1:
            overlaps = overlaps or stride < reached
            reached += (n - 1) * stride
    return reached, overlaps


def _copied_into(y: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy of `y` with `strides`; the numbers in gaps are arbitrary, nobody reads them."""
    reached, overlaps = _reach(y.shape, strides)
    rows = y[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    memory = y.new_empty((reached,))
    if overlaps:  # equal values share memory, which `copy_` refuses to write to
        positions = torch.zeros(rows.shape, dtype=torch.int64, device=y.device)
        for d, n in enumerate(rows.shape):
            steps = torch.arange(n, device=y.device) * strides[d]
            positions = positions + steps.view([-1 if i == d else 1 for i in range(y.dim())])
        memory[positions.flatten()] = rows.flatten()
    else:
        memory.as_strided(rows.shape, strides).copy_(rows)
    return memory.as_strided(y.shape, strides)
