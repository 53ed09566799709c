"""Saved activations in a narrower floating-point type.

      x f32[...] --pack--> bf16[...] --unpack--> x' f32[...]

A finite value out of the narrower type's range becomes its largest, not infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import OptionError
from ..hook import Hook, Pack, hook_of, interned
from .blocks import FLOATS, Declines, convert_back

# Upper bounds of the relative error of normal data, root mean square, a fifth or more above what
# tests/library/test_stated_errors.py measures; and significant binary digits.
_ERRORS = {torch.bfloat16: 0.0021, torch.float16: 0.00027, torch.float32: 3.3e-8}
_DIGITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
_WIDER = {2: (torch.float32, torch.float64), 4: (torch.float64,)}  # bytes of an element -> dtypes worth casting to it


@dataclass(frozen=True)
class _Pack(Pack):
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> Any:
        if x.dtype not in _WIDER[self.dtype.itemsize] or x.dim() == 0:
            return x
        largest = torch.finfo(self.dtype).max
        return torch.where(x.isinf(), x, x.clamp(-largest, largest)).to(self.dtype), x.dtype


@interned
def cast(dtype: torch.dtype) -> Hook:
    """Store floating-point tensors that are wider than `dtype` in `dtype`.

    Args:
        dtype: `torch.bfloat16` or `torch.float16` (for float32 and float64), or `torch.float32` (for float64).

    Relative error of a value within the range of `dtype`: 2**-8, 2**-11, 2**-24; below its smallest normal number half
    its smallest subnormal. Infinities and NaN come back as they were; a finite value that is too large comes back as
    the largest number of `dtype`. What stays as it is: docs/hooks.md.

    Raises:
        OptionError: for another dtype. For 8 bits there is `float8`, which scales.
    """
    if dtype not in FLOATS:
        raise OptionError(f"cast: dtype must be one of {', '.join(map(str, FLOATS))}, got {dtype}")
    name = f"cast({str(dtype).removeprefix('torch.')})"
    declines = Declines(name, 8 * dtype.itemsize, dtypes=_WIDER[dtype.itemsize])
    pack = _Pack(name, declines, dtype, error=_ERRORS[dtype], digits=_DIGITS[dtype], relative=True)
    return hook_of(pack, convert_back)
