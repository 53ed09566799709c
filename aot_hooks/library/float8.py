"""Saved activations in 8-bit floating point.

      x bf16[n, m] --pack--> q f8[n, m], scale f32[n, 1] --unpack--> x' bf16[n, m]

      amax  = max |x| over the row's finite values          # f32[n, 1]
      scale = the least power of two with amax / scale <= TOP, and at least 2**-126, so a row of zeros is safe
      q     = float8(clamp(x / scale, -INF, INF))           # +-INF, the format's largest number, stands for infinity
      x'    = +-inf where q is +-INF, else q * scale        # NaN is NaN in both formats

TOP is the format's second largest number (e4m3: 416 of 448), so no finite value is ever taken for an infinity:
attention masks hold -inf, and e4m3 has none.

Why a power of two: a value then comes back with no more mantissa bits than it was stored with, and matrix products that
read it draw less power. A GPU at its power limit saves time by it, more than 1% of a training step (H200). Precision is
lost only below 2**-14 of the largest value, because the format's own exponent makes up for the scale's.
In rows that reach the upper end of the range of x's dtype, q * scale could leave that range. The stored scale then is
the dtype's largest number / 2**8 (e5m2: 2**15), slightly less than the power of two.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433); COAT (arXiv:2410.19313); scales as
powers of two: Rouhani et al., "Microscaling Data Formats for Deep Learning" (arXiv:2310.10537).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import OptionError
from ..graphs.layout import from_memory_order, in_memory_order
from ..hook import Hook, Pack, hook_of, interned
from .blocks import FLOATS, Declines, broadcast_scales, in_blocks, is_empty, rounded
from .loops import operators
from .scales import FLOAT8_RANGE, finite_magnitudes, float8_codes, float8_values, largest_scale, power_of_two
from .triton import ops

_BLOCKS = {"tensorwise": None, "rowwise": 0, "blockwise": 128}  # values along a row that share a scale; 0: the row


@dataclass(frozen=True)
class _Pack(Pack):
    dtype: torch.dtype
    scaling: str

    def __call__(self, x: torch.Tensor) -> Any:
        if x.dtype not in FLOATS or x.dim() == 0:
            return x
        top, _ = FLOAT8_RANGE[self.dtype]
        block = _BLOCKS[self.scaling]
        if is_empty(x, or_unknown=block is None):  # the largest of no numbers is an error
            return x
        y, permutation = in_memory_order(x)
        y = rounded(y) if x.dtype is torch.float16 else y  # else what overflows sets the scale of others
        if block is not None and ops.has_kernel(y, self.dtype):
            q, scale = ops.pack_float8(y, block, self.dtype)
            return q, scale, x.dtype, permutation
        rows = in_blocks(y, block) if block else y
        shared = list(range(rows.dim())) if block is None else -1
        if as_operator := operators.use_operators(y):
            scale = operators.amax_bits(rows)
            scale = scale.amax(shared, keepdim=True) if block is None else scale
        else:
            scale = power_of_two(finite_magnitudes(rows).amax(shared, keepdim=True), top)
        scale = scale.squeeze(-1) if block else scale
        rows, row_scale = broadcast_scales(y, scale, block) if block else (y, scale)
        if as_operator:
            q = operators.to_float8(rows, row_scale, self.dtype, top, x.dtype)
        else:
            q = float8_codes(rows, row_scale, self.dtype)
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
        block = _BLOCKS[self.scaling]
        if block is not None and ops.has_kernel(q, self.dtype):
            return from_memory_order(ops.unpack8(q, scale, block, dtype), permutation)
        rows, row_scale = broadcast_scales(q, scale, block) if block else (q, scale)
        if scale.dtype is torch.int32:  # packed by `operators`
            y = operators.from_float8(rows, row_scale, dtype, *FLOAT8_RANGE[self.dtype])
        else:
            y = float8_values(rows, row_scale, dtype)
        return from_memory_order(y.view(q.shape) if block else y, permutation)


# Upper bounds of the relative error of normal data, root mean square, a fifth or more above what
# tests/library/test_stated_errors.py measures; and significant binary digits.
_ERRORS = {torch.float8_e4m3fn: 0.032, torch.float8_e5m2: 0.064}
_DIGITS = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 3}


@interned
def float8(dtype: torch.dtype = torch.float8_e4m3fn, scaling: str = "rowwise") -> Hook:
    """Store floating-point tensors (bfloat16, float16, float32) in 8 bits.

    Args:
        dtype: `torch.float8_e4m3fn` (more precise) or `torch.float8_e5m2` (more range).
        scaling: one float32 scale, a power of two, for the "tensorwise" whole, for each row along the last dimension
            ("rowwise"), or for each block of 128 along it ("blockwise").

    Error of a value: at most 2**-4 (e4m3) or 2**-3 (e5m2) of it, or 2**-10 (e5m2: 2**-17) of the scale if that is more.
    This is times 1 + 2**-4 where the largest value exceeds 3/4 of the dtype's largest number. The scale is less than
    the largest finite value that shares it / 208 (e5m2: 24576), or 2**-126.

    Infinities and NaN come back as they were. What stays as it is: docs/hooks.md.

    Raises:
        OptionError: for another dtype or scaling.
    """
    if dtype not in tuple(FLOAT8_RANGE):  # an argument may have no hash
        raise OptionError(f"float8: dtype must be one of {', '.join(map(str, FLOAT8_RANGE))}, got {dtype}")
    if scaling not in tuple(_BLOCKS):
        raise OptionError(f"float8: scaling must be one of {', '.join(map(repr, _BLOCKS))}, got {scaling!r}")
    name = f"float8({str(dtype).removeprefix('torch.float8_')}, {scaling})"
    declines = Declines("float8", 8, 4, _BLOCKS[scaling] or 1 << 62)
    stated: dict[str, Any] = {"error": _ERRORS[dtype], "digits": _DIGITS[dtype], "relative": True}
    return hook_of(_Pack(name, declines, dtype, scaling, **stated), _Unpack(dtype, scaling))
