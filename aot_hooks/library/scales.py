"""Scales of the 8-bit hooks, found on the bits of float32 numbers: powers of two, and bfloat16 rounded up.

      amax f32 --power_of_two--> 2**k, the least with amax / 2**k <= top, and at least 2**-126

      bits             [ exponent | mantissa ]             top = 416 = 1.625 * 2**8
      + add            carries into the exponent where the mantissa exceeds top's, and subtracts top's exponent
      & EXPONENT_MASK  leaves the exponent: the bits of 2**k. Those of 2**-k are RECIPROCAL - bits.

      step f32 --round_up_to_bfloat16--> bf16, the next that is no smaller

The table in `loops/__init__.py` names the other files that compute with these numbers.
"""

from __future__ import annotations

import math
import struct

import torch

# format -> (second largest number, largest number); the largest stands for infinity
FLOAT8_RANGE = {torch.float8_e4m3fn: (416.0, 448.0), torch.float8_e5m2: (49152.0, 57344.0)}
SMALLEST_NORMAL = 2.0**-126  # of float32; no scale is smaller, so that every reciprocal is finite
SLACK = 1 + 2.0**-20  # steps are too large by this factor, so that no finite value leaves the codes
ROUND_TO_INTEGER = 12582912.0  # 1.5 * 2**23: a sum with it ends in round(x), as an integer

EXPONENT_MASK = 0x7F800000
EXPONENT_STEP = 0x00800000  # the lowest bit of the exponent
RECIPROCAL = 0x7F000000

TOP_INT8 = 126.0  # the largest code that is a number
# A power-of-two scale is found for a bit less than 126. Inductor may round to bfloat16 only after the scale was found,
# and the rounded value is then 126 at most. From 126.5 on it would become 127, an infinity.
TOP_POWER = TOP_INT8 - 2.0**-17
STEP_INT8 = (1 - 2.0**-21) / TOP_INT8  # step of a largest value of 1; slightly less, or 126 steps could be an infinity
LOW_HALF = 0xFFFF  # a 16-bit word lacks the low half of the largest value's bits: all ones, the most that it can be
TOP_EXPONENT = 6  # 126 is 1.97 * 2**6: the scale's exponent is the largest value's less 6
ROUND_UP = 128 - 124  # added to 7 bits of fraction: from 124, 126 / 64, on the next power of two is taken


def smallest_scale(dtype: torch.dtype, top: float = 1) -> float:
    """The smallest scale: its reciprocal is finite, and the numbers of `dtype` up to `top` times it are codes.

    The second matters for float16, whose numbers below 2**-14 are multiples of 2**-24. Inductor may round to them only
    after the scale was found, so that 0.6 of a multiple becomes 1, which a smaller scale would push out of the codes.
    With the `top` of 1, for int8, every number of `dtype` is a multiple of it.
    """
    limits = torch.finfo(dtype)
    divisor = int(top) & -int(top)  # 32 of 416 = 13 * 32
    return max(SMALLEST_NORMAL, limits.tiny * limits.eps / divisor)


def smallest_exponent(dtype: torch.dtype) -> int:
    """The biased exponent of the largest value whose power-of-two step is the smallest one."""
    return (_as_bits(smallest_scale(dtype)) >> 23) + TOP_EXPONENT


def rounding_up(top: float, smallest: float = SMALLEST_NORMAL) -> tuple[int, int]:
    """Returns (least, add): the scale's bits are `(max(bits of amax, least) + add) & EXPONENT_MASK`.

    The scale is the least power of two with amax / scale <= `top`, and at least `smallest`.
    """
    above_one = _as_bits(top) - _as_bits(1.0)  # top's exponent, without its bias, and its mantissa
    return _as_bits(smallest) + (above_one & EXPONENT_MASK), EXPONENT_STEP - 1 - above_one


def finite_magnitudes(x: torch.Tensor) -> torch.Tensor:
    """f32 of the shape of `x`: |x|, and 0 for infinities and NaN."""
    size = x.float().abs()
    return torch.where(size < torch.inf, size, 0.0)


def power_of_two(amax: torch.Tensor, top: float, smallest: float = SMALLEST_NORMAL) -> torch.Tensor:
    """f32 of the shape of `amax`, which is f32, finite and not negative."""
    least, add = rounding_up(top, smallest)
    return ((amax.view(torch.int32).clamp(min=least) + add) & EXPONENT_MASK).view(torch.float32)


def float8_codes(x: torch.Tensor, scale: torch.Tensor, fmt: torch.dtype) -> torch.Tensor:
    inf = torch.finfo(fmt).max
    return (x.float() * (1.0 / scale)).clamp(-inf, inf).to(fmt)


def float8_values(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    code = q.float()
    return torch.where(code.abs() == torch.finfo(q.dtype).max, code * torch.inf, code * scale).to(dtype)


def round_up_to_bfloat16(step: torch.Tensor) -> torch.Tensor:
    """bf16 of the shape of `step`, which is f32 and at most a 126th of the largest number."""
    return ((step.view(torch.int32) + LOW_HALF) & ~LOW_HALF).view(torch.float32).to(torch.bfloat16)


def from_exponent(exponent: torch.Tensor) -> torch.Tensor:
    """f32: the power of two with this biased exponent (E8M0 of OCP's microscaling formats)."""
    return (exponent.to(torch.int32) << 23).view(torch.float32)


def largest_scale(dtype: torch.dtype, top: float) -> float:
    """The largest scale that a code may be multiplied by without leaving the range of `dtype`.

    The product is then the largest number of `dtype` for a value that was rounded up to the power of two below `top`.
    """
    return torch.finfo(dtype).max / 2.0 ** (math.frexp(top)[1] - 1)


def full_word(dtype: torch.dtype) -> float:
    """The value that a 16-bit word stands for when it holds the upper half of the largest number of `dtype`.

    In a 16-bit dtype it exceeds that number and would come back as an infinity, so readers take the number instead.
    """
    return _as_float(_as_bits(torch.finfo(dtype).max) | LOW_HALF)


def top_power(dtype: torch.dtype) -> tuple[float, float]:
    """Returns (scale, instead): the power-of-two scale of the largest number of `dtype`, and what replaces it.

    126 times that scale would be an infinity.
    """
    least, add = rounding_up(TOP_POWER)
    bits = (max(_as_bits(torch.finfo(dtype).max), least) + add) & EXPONENT_MASK
    return _as_float(bits), largest_scale(dtype, TOP_POWER)


def _as_bits(x: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", x))[0])  # Dynamo 2.11 traces no int.from_bytes


def _as_float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])
