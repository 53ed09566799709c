"""Blocks along the last dimension, and what else the hooks that store numbers in few bits share.

      x [..., m] --in_blocks--> [..., ceil(m / block), block] --amax--> scale [..., ceil(m / block)]
      x, scale --broadcast_scales--> both in shapes that broadcast: each value with the scale of its block

To find its scale, the last block of a row is padded with zeros. Sizes may be symbolic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..graphs.layout import is_contiguous
from ..graphs.saved import Dim, SavedTensor
from ..hook import compiled_by
from ..torch_private.values import hint, same_size

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def is_empty(x: torch.Tensor, *, or_unknown: bool = False) -> bool:
    """Whether `x` has no elements for certain; with `or_unknown`, whether it may turn out so at run time.

    Asks without a guard: how many tokens an expert gets is known from the data only.
    """
    return any(hint(n) == 0 if or_unknown else same_size(n, 0) for n in x.shape)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """`x`, of 16-bit numbers, as the backward would have read it.

    Inductor computes in float32 and gives a fused reader the number before it is rounded, and before it overflows. A
    view as bits forces the rounded number. Lossy hooks need it for float16 alone: bfloat16 has the range of float32, up
    to the last 0.4%.
    """
    return x.view(torch.int16).view(x.dtype) if compiled_by() == "inductor" else x


def padded(x: torch.Tensor, multiple: int, length: Any = None) -> torch.Tensor:
    """`x` [..., m], padded with zeros to a multiple along the last dimension; `length` is m."""
    length = x.shape[-1] if length is None else length
    # By the count and not by -m % multiple: the padded length is then known to be count * multiple for a symbolic m.
    rest = _count(length, multiple) * multiple - length
    if same_size(rest, 0):
        return x
    if not isinstance(rest, int) and not is_contiguous(x):
        # A pad of 0 keeps the strides, any other makes `x` contiguous. A trace with symbolic sizes can't tell which.
        x = x.clone(memory_format=torch.contiguous_format)
    return torch.nn.functional.pad(x, (0, rest))


def in_blocks(x: torch.Tensor, block: int, length: Any = None) -> torch.Tensor:
    """`x` [..., m] as [..., ceil(m / block), block], padded with zeros; `length` is m."""
    length = x.shape[-1] if length is None else length
    blocks: torch.Tensor = padded(x, block, length).unflatten(-1, (_count(length, block), block))
    return blocks


def broadcast_scales(x: torch.Tensor, scale: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [..., m] and `scale` [..., ceil(m / block)], reshaped to broadcast; `x` keeps its number of elements."""
    if same_size(_count(x.shape[-1], block) * block, x.shape[-1]):
        return x.unflatten(-1, (scale.shape[-1], block)), scale.unsqueeze(-1)
    # Blocks that are padded and cut again would do, but Inductor's C++ code for them is wrong (2.13 and 2.15).
    index = torch.arange(x.shape[-1], device=x.device) // block
    return x, scale.index_select(-1, index)


def first_elements(y: torch.Tensor, length: Any) -> torch.Tensor:
    """The first `length` elements along the last dimension, contiguous."""
    if same_size(y.shape[-1], length):
        return y
    # A slice would check whether the result is contiguous, which leaves a guard on a symbolic length.
    return y.index_select(-1, torch.arange(length, device=y.device))


def _count(length: Any, block: int) -> Any:
    return (length + block - 1) // block


@dataclass(frozen=True)
class Declines:
    """Returns why a hook leaves a saved tensor as it is: its dtype, short rows, or a logarithm. None if it packs.

    Args:
        name: the hook's, for the message.
        bits: bits of a packed element.
        scale_bytes: bytes of the scale of each `block` elements along the last dimension.
        dtypes: the dtypes that the hook packs.
    """

    name: str
    bits: int
    scale_bytes: int = 0
    block: int = 1
    dtypes: tuple[torch.dtype, ...] = FLOATS

    def __call__(self, saved: SavedTensor) -> str | None:
        if saved.dtype not in self.dtypes:
            return leaves(self.name, saved.dtype)
        row = saved.shape[-1] if saved.shape else 0
        packed_bytes = (row * self.bits + 7) // 8 + _count(row, self.block) * self.scale_bytes
        # A row that shrinks by a quarter or less isn't worth its error. A norm's reciprocal, one number a row, would
        # shrink from 4 bytes to 3 with int4, and its error scale the norm's whole gradient by up to 2**-7.
        empty = any(n == 0 and not isinstance(n, Dim) for n in saved.shape)  # a `Dim` of 0: not known before it runs
        if empty or 4 * packed_bytes >= 3 * row * saved.dtype.itemsize:
            return f"{self.name} would save too little on rows this short"
        op = saved.op.lower().replace("_", "")  # by name, because eager code has no graph with the backward's reads
        if any(name in op for name in _LOGARITHMS):
            return f"{self.name} leaves logarithms that the backward exponentiates as they are"
        if op == "compiledfunctionbackward":
            return f"{self.name} leaves what eager code saves of a compiled function, which may be a logarithm"
        return None


_LOGARITHMS = "logsumexp", "logsoftmax", "ctcloss"  # in the names of operators


def leaves(name: str, dtype: torch.dtype) -> str:
    return f"{name} leaves {str(dtype).removeprefix('torch.')} as it is"


def convert_back(packed: torch.Tensor | tuple[torch.Tensor, torch.dtype]) -> torch.Tensor:
    return packed if isinstance(packed, torch.Tensor) else packed[0].to(packed[1])
