"""Saved activations in 8-bit floating point.

      x bf16[n, m] --pack--> q f8[n, m], scale f32[n, 1] --unpack--> x' bf16[n, m]

      amax  = max |x| over the row's finite values          # f32[n, 1]
      scale = the least power of two with amax / scale <= TOP, and no less than 2**-126, so a row of zeros is safe
      q     = float8(clamp(x / scale, -INF, INF))           # +-INF, the format's largest number, stands for infinity
      x'    = +-inf where q is +-INF, else q * scale        # NaN is NaN in both formats

TOP is the format's second largest number (e4m3: 416 of 448), so that no finite value is ever taken for an infinity:
attention masks hold -inf, and e4m3 has none. Error: e4m3 has 3 mantissa bits, so at most 2**-4 of the value, plus
scale * 2**-10 (half its smallest step) near zero; e5m2 2**-3 and scale * 2**-17. Half the bytes of bfloat16.

The scale is a power of two because a value then comes back with no more mantissa bits than it was stored with, and the
matrix products that read it draw less power: on a GPU at its power limit they take less time, by more than 1% of a
training step (H200). It costs nothing: the format's own exponent makes up for the scale's, but for values below 2**-14
of the largest. Where q * scale could leave the range of x's dtype, in rows that reach its upper end, what is stored is
the dtype's largest number / 2**8 (e5m2: 2**15), slightly less than the power of two: the error near zero then is larger
by a factor of up to 1 + 2**-4.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433); COAT (arXiv:2410.19313); scales as
powers of two: Rouhani et al., "Microscaling Data Formats for Deep Learning" (arXiv:2310.10537).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import OptionError
from ..hook import Hook, interned
from .blocks import FLOATS, Declines, beside, in_blocks
from .layout import from_memory_order, in_memory_order
from .loops import operators
from .scales import largest_scale, power_of_two
from .triton import ops

__all__ = ["float8"]

_BLOCKS = {"tensorwise": None, "rowwise": 0, "blockwise": 128}  # values along a row that share a scale; 0: the row
# format -> (second largest number, largest number)
_RANGE = {torch.float8_e4m3fn: (416.0, 448.0), torch.float8_e5m2: (49152.0, 57344.0)}


@dataclass(frozen=True)
class _Pack:
    dtype: torch.dtype
    scaling: str
    declines: Declines
    lossy = True

    @property
    def __name__(self) -> str:  # as a function has one: a hook made of this pack alone is shown by it
        return f"float8({str(self.dtype).removeprefix('torch.float8_')}, {self.scaling})"

    def __call__(self, x: torch.Tensor) -> Any:
        if x.dtype not in FLOATS or x.dim() == 0 or x.numel() == 0:
            return x
        top, inf = _RANGE[self.dtype]
        block = _BLOCKS[self.scaling]
        y, permutation = in_memory_order(x)
        if block is not None and ops.has_kernel(y, self.dtype):
            q, scale = ops.pack_float8(y, block, self.dtype)
            return q, scale, x.dtype, permutation
        rows = in_blocks(y, block) if block else y
        if operators.taken(y):
            scale = operators.amax_bits(rows)
            if block is None:
                scale = scale.amax(list(range(scale.dim())), keepdim=True)
        else:
            size = rows.float().abs()
            amax = torch.where(size < torch.inf, size, 0.0).amax(_dims(rows, block), keepdim=True)
            scale = power_of_two(amax, top)
        if block:
            scale = scale.squeeze(-1)
        rows, beside_rows = beside(y, scale, block) if block else (y, scale)
        if scale.dtype is torch.int32:
            q = operators.to_float8(rows, beside_rows, self.dtype, top, x.dtype)
        else:
            q = (rows.float() * (1.0 / beside_rows)).clamp(-inf, inf).to(self.dtype)
            scale = scale.clamp(max=largest_scale(x.dtype, top))
        return q.view(y.shape) if block else q, scale, x.dtype, permutation


@dataclass(frozen=True)
class _Unpack:
    dtype: torch.dtype
    scaling: str

    def __call__(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        q, scale, dtype, permutation = packed
        top, inf = _RANGE[self.dtype]
        block = _BLOCKS[self.scaling]
        if block is not None and ops.has_kernel(q, self.dtype):
            return from_memory_order(ops.unpack_float8(q, scale, block, dtype), permutation)
        rows, beside_rows = beside(q, scale, block) if block else (q, scale)
        if scale.dtype is torch.int32:
            y = operators.from_float8(rows, beside_rows, dtype, top, inf)
        else:
            code = rows.float()
            y = torch.where(code.abs() == inf, code * torch.inf, code * beside_rows).to(dtype)
        return from_memory_order(y.view(q.shape) if block else y, permutation)


def _dims(x: torch.Tensor, block: int | None) -> list[int]:
    return list(range(x.dim())) if block is None else [-1]


@interned
def float8(dtype: torch.dtype = torch.float8_e4m3fn, scaling: str = "rowwise") -> Hook:
    """Store floating-point tensors (bfloat16, float16, float32) in 8 bits.

    Args:
        dtype: `torch.float8_e4m3fn` (more precise) or `torch.float8_e5m2` (more range).
        scaling: one float32 scale, a power of two, for the "tensorwise" whole, for each row along the last dimension
            ("rowwise"), or for each block of 128 along it ("blockwise").

    Error of a value: at most 2**-4 (e4m3) or 2**-3 (e5m2) of it, or 2**-10 (e5m2: 2**-17) of the scale if that is more,
    times 1 + 2**-4 where the largest is more than 3/4 of what the dtype can hold; the scale is less than the largest
    finite value that shares it / 208 (e5m2: 24576), or 2**-126. Infinities and NaN come back as they were. Integers,
    0-d and empty tensors, rows too short to gain and what the backward does not read smoothly are left as they are.

    Raises:
        OptionError: for another dtype or scaling.
    """
    if dtype not in _RANGE:
        raise OptionError(f"float8: dtype must be one of {', '.join(map(str, _RANGE))}, got {dtype}")
    if scaling not in _BLOCKS:
        raise OptionError(f"float8: scaling must be one of {', '.join(map(repr, _BLOCKS))}, got {scaling!r}")
    declines = Declines("float8", 8, 4, _BLOCKS[scaling] or 1 << 62)
    pack = _Pack(dtype, scaling, declines)
    return Hook(pack.__name__, pack, _Unpack(dtype, scaling), lossy=True, declines=declines)
