"""Saved activations in 8-bit floating point.

      x bf16[n, m] --pack--> q f8[n, m], scale f32[n, 1] --unpack--> x' bf16[n, m]

      amax  = max |x| over the row's finite values          # f32[n, 1]
      scale = max(amax / TOP, 2**-126)                      # never zero, so a row of zeros is safe
      q     = float8(clamp(x / scale, -INF, INF))           # +-INF, the format's largest number, stands for infinity
      x'    = +-inf where q is +-INF, else q * scale        # NaN is NaN in both formats

TOP is the format's second largest number (e4m3: 416 of 448), so that no finite value is ever taken for an infinity:
attention masks hold -inf, and e4m3 has none. Error: e4m3 has 3 mantissa bits, so at most 2**-4 of the value, plus
scale * 2**-10 (half its smallest step) near zero; e5m2 2**-3 and scale * 2**-17. Half the bytes of bfloat16.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433); COAT (arXiv:2410.19313).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import OptionError
from ..hook import Hook, compiled_by
from ..saved import SavedTensor

__all__ = ["float8"]

_SCALINGS = ("tensorwise", "rowwise", "blockwise")
_BLOCK = 128
# format -> (second largest number, largest number)
_RANGE = {torch.float8_e4m3fn: (416.0, 448.0), torch.float8_e5m2: (49152.0, 57344.0)}
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_EXPONENTIATED = ("logsumexp", "logsoftmax")
_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class _Pack:
    dtype: torch.dtype
    scaling: str

    @property
    def declines(self) -> Any:
        return _declines

    def __call__(self, x: torch.Tensor) -> Any:
        if x.dtype not in _FLOATS or x.dim() == 0 or x.numel() == 0:
            return x
        top, inf = _RANGE[self.dtype]
        rows = _in_blocks(x) if self.scaling == "blockwise" else x
        dims = list(range(rows.dim())) if self.scaling == "tensorwise" else [-1]
        amax = _largest_finite(rows, dims)  # f32[1, ..., 1] or f32[..., 1]
        scale = (amax * (1.0 / top)).clamp(min=_SMALLEST_NORMAL)
        y = rows.float() * (1.0 / scale)
        if not (self.dtype is torch.float8_e4m3fn and _fuses_on_cuda(x)):
            y = y.clamp(-inf, inf)
        return y.to(self.dtype), scale, x.dtype, x.shape


@dataclass(frozen=True)
class _Unpack:
    dtype: torch.dtype
    scaling: str

    def __call__(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        q, scale, dtype, shape = packed
        _, inf = _RANGE[self.dtype]
        y = q.float()
        y = torch.where(y.abs() == inf, y * torch.inf, y * scale).to(dtype)
        return _from_blocks(y, shape) if self.scaling == "blockwise" else y


def _fuses_on_cuda(x: torch.Tensor) -> bool:
    """Whether `x` goes through Triton, whose conversion to e4m3 takes infinity to the largest number by itself
    (`cvt.rn.satfinite`), as the clamp would; elsewhere it gives NaN."""
    return x.device.type == "cuda" and compiled_by() == "inductor"


def _largest_finite(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """max |x| over `dims` (kept, as 1) of what is finite, 0 if nothing is; float32."""
    if not _fuses_on_cuda(x):
        size = x.float().abs()
        return torch.where(size < torch.inf, size, 0.0).amax(dims, keepdim=True)
    # The same on the bits, in four integer instructions a number where the above takes nine: reading a wide row for its
    # scale is bound by arithmetic, not by bytes. Bits of |x| are ordered as |x|; adding one exponent step makes
    # infinity and NaN negative, so that any finite number is larger.
    step = 0x00800000
    bits = (x.float().view(torch.int32) & 0x7FFFFFFF) + step
    return (bits.amax(dims, keepdim=True).clamp(min=step) - step).view(torch.float32)


def _in_blocks(x: torch.Tensor) -> torch.Tensor:
    """`x` [..., m] as [..., ceil(m / 128), 128], filled up with zeros."""
    rest = -x.shape[-1] % _BLOCK
    if rest != 0:
        x = torch.nn.functional.pad(x, (0, rest))
    blocks: torch.Tensor = x.unflatten(-1, (x.shape[-1] // _BLOCK, _BLOCK))
    return blocks


def _from_blocks(y: torch.Tensor, shape: Any) -> torch.Tensor:
    y = y.flatten(-2)
    return y if y.shape[-1] == shape[-1] else y.narrow(-1, 0, shape[-1])


def _declines(saved: SavedTensor) -> str | None:
    """Why float8 leaves a tensor alone, or None."""
    if saved.dtype not in _FLOATS:
        return f"float8 leaves {str(saved.dtype).removeprefix('torch.')} as it is"
    if not saved.shape or 0 in saved.shape or saved.shape[-1] * (saved.dtype.itemsize - 1) <= 4:
        return "float8 would save nothing on rows this short"
    if is_statistic(saved):
        return "float8 leaves logarithms that the backward exponentiates as they are"
    return None


def is_statistic(saved: SavedTensor) -> bool:
    """Whether a backward exponentiates `saved`, so that an error relative to it is none relative to the result: the
    log-sum-exp of attention, log-probabilities, and logits that only a log-softmax reads."""
    made, *read = (op.lower().replace("_", "") for op in (saved.op, *saved.backward_ops))
    if any(name in made for name in _EXPONENTIATED) or (
        read and all(any(n in r for n in _EXPONENTIATED) for r in read)
    ):
        return True
    return "scaled_dot_product" in saved.op and len(saved.shape) == 3 and saved.dtype is torch.float32


@functools.cache
def float8(dtype: torch.dtype = torch.float8_e4m3fn, scaling: str = "rowwise") -> Hook:
    """Store floating-point tensors (bfloat16, float16, float32) in 8 bits.

    Args:
        dtype: `torch.float8_e4m3fn` (more precise) or `torch.float8_e5m2` (more range).
        scaling: one float32 scale for the "tensorwise" whole, for each row along the last dimension ("rowwise"), or for
            each block of 128 along it ("blockwise").

    Relative error of a value: at most 2**-4 (e4m3) or 2**-3 (e5m2), plus half the format's smallest step times the
    scale near zero. Infinities and NaN come back as they were. Integers, 0-d and empty tensors, rows too short to
    gain and what is a logarithm (log-sum-exp, log-softmax) are left as they are.

    Raises:
        OptionError: for another dtype or scaling.
    """
    if dtype not in _RANGE:
        raise OptionError(f"float8: dtype must be one of {', '.join(map(str, _RANGE))}, got {dtype}")
    if scaling not in _SCALINGS:
        raise OptionError(f"float8: scaling must be one of {', '.join(map(repr, _SCALINGS))}, got {scaling!r}")
    name = f"float8({str(dtype).removeprefix('torch.float8_')}, {scaling})"
    return Hook(name, _Pack(dtype, scaling), _Unpack(dtype, scaling), declines=_declines)
