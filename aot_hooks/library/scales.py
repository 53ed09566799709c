"""Scales on the bits of float32 numbers: powers of two, exact and a few integer instructions, and short ones.

      amax f32 --power_of_two--> 2**k, the least with amax / 2**k <= top, and no less than 2**-126

      bits   [ exponent | mantissa ]           top = 416 = 1.625 * 2**8
      + add  rounds the exponent up where the mantissa is larger than top's, and takes top's exponent off
      & MASK leaves the exponent: the bits of 2**k. Those of 2**-k are INVERSE less them.

`loops.py`, `ptx.py` and `kernels.py` do the same with these numbers.

      step f32 --short--> bf16, the next that is no smaller
"""

from __future__ import annotations

import math
import struct

import torch

from .blocks import SMALLEST_NORMAL

__all__ = [
    "INVERSE",
    "LOW",
    "MASK",
    "OVER",
    "ROUND_UP",
    "STEP_INT8",
    "TOP_INT8",
    "TOP_POWER",
    "from_exponent",
    "full_word",
    "largest_scale",
    "least_exponent",
    "power_of_two",
    "rounding_up",
    "short",
    "smallest_scale",
    "smallest_step",
    "to_exponent",
    "top_power",
]

MASK = 0x7F800000
INVERSE = 0x7F000000
TOP_INT8 = 126.0  # the largest code that is a number
# Of a scale that is a power of two, less than that: what Inductor rounds to bfloat16 only after its scale was found is
# 126 at most then. 126.5 would be rounded to 127, an infinity.
TOP_POWER = TOP_INT8 - 2.0**-17
STEP_INT8 = (1 - 2.0**-21) / TOP_INT8  # of the largest value; a little less, so that times 126 it is no infinity
LOW = 0xFFFF  # what 16 bits do not keep of the largest value is taken for as large as it can be
OVER = 6  # 126 begins with 2**6: a scale's exponent is that much below the largest value's
ROUND_UP = 128 - 124  # added to 7 bits of fraction: from 124 on, 126 / 64, the next power of two is taken
_STEP = 0x00800000  # one exponent step
_MANTISSA = _STEP - 1


def smallest_step(dtype: torch.dtype) -> float:
    """No step of int8 is smaller: its reciprocal is finite, and all numbers of `dtype` are its multiples then.

    Else what is rounded to float16 only after its scale was found, to one of the multiples of 2**-24 that are all that
    float16 has below 2**-14, would leave the codes: 0.6 of that one becomes 1.
    """
    of = torch.finfo(dtype)
    return max(SMALLEST_NORMAL, of.tiny * of.eps)


def smallest_scale(dtype: torch.dtype, top: float) -> float:
    """The same of float8 where its largest code is `top`: up to that, all numbers of `dtype` are codes then."""
    divisor = int(top) & -int(top)  # of 416 = 13 * 32
    return max(SMALLEST_NORMAL, torch.finfo(dtype).tiny * torch.finfo(dtype).eps / divisor)


def least_exponent(dtype: torch.dtype) -> int:
    """That of the largest value which has the smallest step, with 127 added, if steps are powers of two."""
    return (_as_bits(smallest_step(dtype)) >> 23) + OVER


def rounding_up(top: float, smallest: float = SMALLEST_NORMAL) -> tuple[int, int]:
    """(least, add): max(bits of amax, least) + add, and MASK, are the bits of the power of two for `top`, which is no
    less than `smallest`."""
    fraction, exponent = math.frexp(top)  # 416 = 0.8125 * 2**9
    mantissa = int((2 * fraction - 1) * _STEP)
    return _as_bits(smallest) + (exponent - 1) * _STEP, _MANTISSA - mantissa - (exponent - 1) * _STEP


def power_of_two(amax: torch.Tensor, top: float, smallest: float = SMALLEST_NORMAL) -> torch.Tensor:
    """f32, of the shape of `amax`, which is f32, finite and not negative."""
    least, add = rounding_up(top, smallest)
    return ((amax.view(torch.int32).clamp(min=least) + add) & MASK).view(torch.float32)


def short(step: torch.Tensor) -> torch.Tensor:
    """bf16, of the shape of `step`, which is f32 and no larger than a 126th of its largest number."""
    return ((step.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def to_exponent(scale: torch.Tensor) -> torch.Tensor:
    """u8: the exponent of a power of two, with 127 added (E8M0 of OCP's microscaling formats)."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def from_exponent(exponent: torch.Tensor) -> torch.Tensor:
    """f32: what `to_exponent` was given."""
    return (exponent.to(torch.int32) << 23).view(torch.float32)


def largest_scale(dtype: torch.dtype, top: float) -> float:
    """What a scale is limited to when a code is multiplied by it: a value that was rounded up, to a power of two no
    larger than `top`, then is the largest number of `dtype` at most."""
    return torch.finfo(dtype).max / 2.0 ** (math.frexp(top)[1] - 1)


def full_word(dtype: torch.dtype) -> float:
    """What the 16 bits of the largest number of `dtype` are taken for: an infinity there, so that number is meant."""
    return _as_float(_as_bits(torch.finfo(dtype).max) | LOW)


def top_power(dtype: torch.dtype) -> tuple[float, float]:
    """The scale of the largest number of `dtype`, by which its code would be an infinity, and what is used instead."""
    largest = torch.finfo(dtype).max
    least, add = rounding_up(TOP_POWER)
    return _as_float((max(_as_bits(largest), least) + add) & MASK), largest_scale(dtype, TOP_POWER)


def _as_bits(x: float) -> int:
    (bits,) = struct.unpack("<i", struct.pack("<f", x))
    return int(bits)


def _as_float(bits: int) -> float:
    (x,) = struct.unpack("<f", struct.pack("<i", bits))
    return float(x)
