"""Masks at one bit an element: exact.

      mask bool[b, s, d] --pack--> bits uint8[ceil(b * s * d / 8)] --unpack--> mask bool[b, s, d]

      bit j of byte i is element 8 i + j, in memory order; what is missing in the last byte is zero

What a comparison, a dropout or a ReLU saves is a byte an element. Source: Jain et al., "Gist" (ISCA 2018).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from ..graphs.saved import SavedTensor
from ..hook import Hook, interned
from .blocks import cut, in_blocks
from .layout import from_memory_order, in_memory_order
from .triton import ops

__all__ = ["bitmask", "pack_bits", "unpack_bits"]


def pack_bits(x: torch.Tensor) -> torch.Tensor:
    """bool[...] to uint8[ceil(numel / 8)]."""
    length = _count(x.shape)
    # the length is said, not asked of the view: traced, a symbolic one is now the view's, now the tensor's
    bits = in_blocks(x.reshape(length).to(torch.uint8), 8, length)
    return (bits << _places(x.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, shape: Any) -> torch.Tensor:
    """What `pack_bits` was given, of `shape`."""
    bits = ((packed.unsqueeze(-1) >> _places(packed.device)) & 1).to(torch.bool).flatten()
    return cut(bits, _count(shape)).view(shape)


def _count(shape: Any) -> Any:
    return functools.reduce(lambda a, b: a * b, shape)


def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _pack(x: torch.Tensor) -> Any:
    if x.dtype is not torch.bool or x.dim() == 0 or 0 in x.shape:
        return x
    y, permutation = in_memory_order(x)
    return (ops.pack_bits if ops.has_kernel(y) else pack_bits)(y), y.shape, permutation


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    bits, shape, permutation = packed
    y = (ops.unpack_bits if ops.has_kernel(bits) else unpack_bits)(bits, shape)
    return from_memory_order(y, permutation)


def _declines(saved: SavedTensor) -> str | None:
    if saved.dtype is not torch.bool:
        return f"bitmask leaves {str(saved.dtype).removeprefix('torch.')} as it is"
    if not saved.shape or _count(saved.shape) < 2:
        return "bitmask would save nothing on so few elements"
    return None


@dataclass(frozen=True)
class _Pack:
    """`_pack`, with what it declines beside it."""

    declines: Any = _declines

    @property
    def __name__(self) -> str:  # as a function has one: a hook made of this pack alone is shown by it
        return "bitmask"

    def __call__(self, x: torch.Tensor) -> Any:
        return _pack(x)


@interned
def bitmask() -> Hook:
    """Store bool tensors at one bit an element: an eighth of the bytes, exact.

    Any size and shape. Other dtypes are left alone, also integers that happen to be 0 and 1: a pack cannot look at
    values. 0-d and empty tensors and single elements are left alone.
    """
    return Hook("bitmask", _Pack(), _unpack, declines=_declines)
