"""Scales that are powers of two, on the bits of float32 numbers: exact, and a few integer instructions.

      amax f32 --power_of_two--> 2**k, the least with amax / 2**k <= top, and no less than 2**-126

      bits   [ exponent | mantissa ]           top = 416 = 1.625 * 2**8
      + add  rounds the exponent up where the mantissa is larger than top's, and takes top's exponent off
      & MASK leaves the exponent: the bits of 2**k. Those of 2**-k are INVERSE less them.

`loops.py`, `ptx.py` and `kernels.py` do the same with these numbers.
"""

from __future__ import annotations

import math

import torch

__all__ = ["INVERSE", "MASK", "largest_scale", "power_of_two", "rounding_up"]

MASK = 0x7F800000
INVERSE = 0x7F000000
_STEP = 0x00800000  # one exponent step
_MANTISSA = _STEP - 1


def rounding_up(top: float) -> tuple[int, int]:
    """(least, add): max(bits of amax, least) + add, and MASK, are the bits of the power of two for `top`."""
    fraction, exponent = math.frexp(top)  # 416 = 0.8125 * 2**9
    mantissa = int((2 * fraction - 1) * _STEP)
    return exponent * _STEP, _MANTISSA - mantissa - (exponent - 1) * _STEP


def power_of_two(amax: torch.Tensor, top: float) -> torch.Tensor:
    """f32, of the shape of `amax`, which is f32, finite and not negative."""
    least, add = rounding_up(top)
    return ((amax.view(torch.int32).clamp(min=least) + add) & MASK).view(torch.float32)


def largest_scale(dtype: torch.dtype, top: float) -> float:
    """What a scale is limited to when a code is multiplied by it: a value that was rounded up, to a power of two no
    larger than `top`, then is the largest number of `dtype` at most."""
    return torch.finfo(dtype).max / 2.0 ** (math.frexp(top)[1] - 1)
