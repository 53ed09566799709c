"""What the hooks that store numbers in few bits share.

      x [..., m] --in_blocks--> [..., ceil(m / block), block] --amax--> scale [..., ceil(m / block)]
      x, scale --beside--> two that broadcast: each value beside the scale of its block

The last block of a row is filled up with zeros, to find its scale only. Sizes may be symbolic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import OptionError
from ..graphs.saved import SavedTensor
from ..torch_private.values import same_size
from .layout import is_contiguous

__all__ = [
    "FLOATS",
    "SMALLEST_NORMAL",
    "Declines",
    "beside",
    "check_block_size",
    "check_bool",
    "cut",
    "in_blocks",
    "padded",
]

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SMALLEST_NORMAL = 2.0**-126  # of float32; scales are no smaller, so that their reciprocals are finite


def padded(x: torch.Tensor, multiple: int, length: Any = None) -> torch.Tensor:
    """`x` [..., m], filled up with zeros to a multiple along the last dimension; `length` is m."""
    length = x.shape[-1] if length is None else length
    # The count first, not -m % multiple: so the sum of both is known to be count * multiple for a symbolic m.
    rest = _count(length, multiple) * multiple - length
    if same_size(rest, 0):
        return x
    if not isinstance(rest, int) and not is_contiguous(x):
        # Filled up with nothing, which no trace knows of, a tensor keeps its strides; with anything, it is contiguous.
        x = x.clone(memory_format=torch.contiguous_format)
    return torch.nn.functional.pad(x, (0, rest))


def in_blocks(x: torch.Tensor, block: int, length: Any = None) -> torch.Tensor:
    """`x` [..., m] as [..., ceil(m / block), block], filled up with zeros; `length` is m."""
    length = x.shape[-1] if length is None else length
    blocks: torch.Tensor = padded(x, block, length).unflatten(-1, (_count(length, block), block))
    return blocks


def beside(x: torch.Tensor, scale: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [..., m] and `scale` [..., ceil(m / block)] in shapes that broadcast, of as many elements as `x`."""
    if same_size(_count(x.shape[-1], block) * block, x.shape[-1]):
        return x.unflatten(-1, (scale.shape[-1], block)), scale.unsqueeze(-1)
    # Not in blocks that are filled up and cut again: Inductor's C++ code for that is wrong (2.13 and 2.15).
    index = torch.arange(x.shape[-1], device=x.device) // block
    return x, scale.index_select(-1, index)


def cut(y: torch.Tensor, length: Any) -> torch.Tensor:
    """The first `length` along the last dimension, contiguous."""
    if same_size(y.shape[-1], length):
        return y
    # not by slicing: that asks whether the result is contiguous, which for a symbolic length leaves a guard
    return y.index_select(-1, torch.arange(length, device=y.device))


def _count(length: Any, block: int) -> Any:
    return (length + block - 1) // block


@dataclass(frozen=True)
class Declines:
    """Why a hook leaves a saved tensor alone, or None: of another dtype, too small to gain, or a logarithm.

    Args:
        name: of the hook, for the message.
        bits: of a packed element.
        scale_bytes: of the scale of each `block` elements along the last dimension.
        dtypes: which it takes.
    """

    name: str
    bits: int
    scale_bytes: int = 0
    block: int = 1
    dtypes: tuple[torch.dtype, ...] = FLOATS

    def __call__(self, saved: SavedTensor) -> str | None:
        if saved.dtype not in self.dtypes:
            return f"{self.name} leaves {str(saved.dtype).removeprefix('torch.')} as it is"
        row = saved.shape[-1] if saved.shape else 0
        packed_bytes = (row * self.bits + 7) // 8 + _count(row, self.block) * self.scale_bytes
        # A row that shrinks by a quarter or less isn't worth its error: int4 would take a norm's reciprocal, one number
        # a row, from 4 bytes to 3, and scale the norm's whole gradient by up to 2**-7.
        if 0 in saved.shape or 4 * packed_bytes >= 3 * row * saved.dtype.itemsize:
            return f"{self.name} would save too little on rows this short"
        if _is_logarithm(saved):
            return f"{self.name} leaves logarithms that the backward exponentiates as they are"
        return None


def _is_logarithm(saved: SavedTensor) -> bool:
    """Whether an operator of eager code made a logarithm that its backward exponentiates: there reads are not known."""
    made = saved.op.lower().replace("_", "")
    return any(name in made for name in ("logsumexp", "logsoftmax"))


def check_block_size(name: str, block_size: object) -> None:
    """Raises `OptionError` unless `block_size` is a power of two from 8 to 1024."""
    if not isinstance(block_size, int) or block_size not in (8, 16, 32, 64, 128, 256, 512, 1024):
        raise OptionError(f"{name}: block_size must be a power of two from 8 to 1024, got {block_size!r}")


def check_bool(name: str, option: str, value: object) -> None:
    """Raises `OptionError` unless `value` is True or False: "no" is true."""
    if not isinstance(value, bool):
        raise OptionError(f"{name}: {option} must be True or False, got {value!r}")
