"""Masks at one bit an element: exact.

      mask bool[b, s, d] --pack--> bits uint8[ceil(b * s * d / 8)] --unpack--> mask bool[b, s, d]

      bit j of byte i is element 8 i + j, in memory order; the last byte is padded with zeros

torch stores the mask of a comparison, a dropout or a ReLU in a byte an element.
Source: Jain et al., "Gist" (ISCA 2018).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..graphs.layout import from_memory_order, in_memory_order
from ..graphs.saved import SavedTensor
from ..hook import Hook, Pack, hook_of, interned
from .blocks import first_elements, in_blocks, leaves
from .triton import ops


def pack_bits(x: torch.Tensor) -> torch.Tensor:
    """bool[...] to uint8[ceil(numel / 8)]."""
    length = math.prod(x.shape)
    # The view's own length can't be used: in a trace with symbolic sizes it is at times the view's, at times x's.
    bits = in_blocks(x.reshape(length).to(torch.uint8), 8, length)
    return (bits << _bit_numbers(x.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, shape: Any) -> torch.Tensor:
    """Undoes `pack_bits` for a tensor of `shape`."""
    bits = ((packed.unsqueeze(-1) >> _bit_numbers(packed.device)) & 1).to(torch.bool).flatten()
    return first_elements(bits, math.prod(shape)).view(shape)


def _bit_numbers(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _declines(saved: SavedTensor) -> str | None:
    if saved.dtype is not torch.bool:
        return leaves("bitmask", saved.dtype)
    if not saved.shape or math.prod(saved.shape) < 2:
        return "bitmask would save nothing on so few elements"
    return None


@dataclass(frozen=True)
class _Pack(Pack):
    def __call__(self, x: torch.Tensor) -> Any:
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


def bits_instead(hook: Hook, saved: SavedTensor) -> Hook | None:
    """`bitmask()` for a mask that a lossy `hook` of the library leaves; None for any other tensor or hook."""
    return bitmask() if hook.lossy and not hook.is_own and saved.dtype is torch.bool else None


@interned
def bitmask() -> Hook:
    """Store bool tensors at one bit an element: an eighth of the bytes, exact.

    Any size and shape. Other dtypes are left as they are, even integers that are all 0 and 1, because a pack cannot
    read values. So are 0-d and empty tensors and single elements.
    """
    return hook_of(_Pack("bitmask", _declines, lossy=False, error=0.0), _unpack)
