"""Saved activations as integers: 8 bits, or 4 with two values a byte, with one scale a block along the last dimension.

      x bf16[..., m] --pack--> q int8[..., m],             scale bf16[..., ceil(m / 64)]  --unpack--> x' bf16[..., m]
                               the same,                   scale u8[..., ceil(m / 32)]    if it is a power of two
                               q uint8[..., ceil(m / 2)],  scale i16[..., ceil(m / 32)]   int4

      int8    step = max(amax / 126, 2**-126), in 8 bits   # amax: the largest |x| of the block's finite values;
              q    = round(x / step)                       #   never zero, so a block of zeros is safe
      or      step = 2**k, the least with amax / 2**k < 126
      int4    step = max((above + below) / 14, 2**-126)    # the largest of x and of -x, at least 0
              zero = ceil(below / step)                    # the code of 0: 0 to 14
              q    = round(x / step) + zero                # 0 to 15: ceil(below / step) + ceil(above / step) <= 15
      both    x'   = (q - zero) * step                     # zero is 0 for int8

Stochastic rounding: round(x / step + u), u uniform in [-1/2, 1/2). Values lie in the memory order of `x`.

Infinities and NaN have codes of their own. In int8, +-127 are the infinities and -128 is NaN. With 4 bits that would
cost every block three of its 16 numbers. So only an int4 block that holds such a value pays. It stores 15 as its zero
but uses 8; its step is amax / 6; codes 0 and 15 are the infinities, and 1 is NaN.

An int8 scale is a bfloat16, rounded up, or the exponent of a power of two. An int4 scale is 16 bits: 12 of the step's
float32, without the sign and rounded up by at most 2**-4, and 4 of the zero. Where values lie to one side of 0, or a
few are far larger than the rest, a zero is worth more than further bits of the step.

Steps are too large by a factor of 1 + 2**-20, so that rounding errors in finding them take no value past the codes.
Codes of finite values are clamped to numbers all the same: Inductor may find a step from float32 values and then read
the same values as they were stored, rounded up.

Sources: stochastic rounding of saved activations: Chen et al., "ActNN" (arXiv:2104.14129); blocks: Dettmers et al.,
"8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861); powers of two in blocks of 32: MXINT8 of OCP's
"Microscaling Formats (MX) Specification", which clips the largest values where this takes the next power.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import OptionError
from ..graphs.layout import from_memory_order, in_memory_order
from ..hook import Hook, Pack, hook_of, interned
from . import scales
from .blocks import FLOATS, Declines, broadcast_scales, first_elements, in_blocks, is_empty, padded, rounded
from .loops import operators
from .scales import SLACK, SMALLEST_NORMAL
from .triton import ops

_STEP_BITS = ~0x7FFFF  # of a float32 int4 keeps the exponent and 4 bits of fraction


def pack_int8(x: torch.Tensor, block: int, stochastic: bool, power: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [..., m] to (int8[..., m], scale[..., ceil(m / block)]): bfloat16, or uint8 for a power of two."""
    amax, smallest = scales.finite_magnitudes(in_blocks(x, block)).amax(-1), scales.smallest_scale(x.dtype)
    if power:
        step = scales.power_of_two(amax, scales.TOP_POWER, smallest)
        scale = (step.view(torch.int32) >> 23).to(torch.uint8)
    else:
        scale = scales.round_up_to_bfloat16((amax * (SLACK / scales.TOP_INT8)).clamp(min=smallest))
        step = scale.float()
    rows, inverse = broadcast_scales(x, 1.0 / step, block)
    q = _rounded(rows * inverse, stochastic)
    special = torch.where(q.isnan(), -128.0, q.clamp(-127, 127))
    return torch.where(q.abs() < torch.inf, q.clamp(-126, 126), special).to(torch.int8).view(x.shape), scale


def unpack_int8(q: torch.Tensor, scale: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    """Undoes `pack_int8`, in `dtype`."""
    step = scales.from_exponent(scale) if scale.dtype is torch.uint8 else scale.float()
    rows, step = broadcast_scales(q, step, block)
    code = rows.float()
    other = torch.where(code < -127, torch.nan, code * torch.inf)
    return torch.where(code.abs() > 126, other, _finite(code * step, dtype)).to(dtype).view(q.shape)


def pack_int4(x: torch.Tensor, block: int, stochastic: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [..., m] to (uint8[..., ceil(m / 2)], int16[..., ceil(m / block)])."""
    values = in_blocks(x, block).float()
    finite = values.abs() < torch.inf
    values = torch.where(finite, values, 0.0)
    above, below = values.amax(-1).clamp(min=0.0), -values.amin(-1).clamp(max=0.0)
    plain = finite.all(-1)
    span = above * (SLACK / 14) + below * (SLACK / 14)  # not (above + below), which may be infinite
    step = torch.where(plain, span, torch.maximum(above, below) * (SLACK / 6)).clamp(min=SMALLEST_NORMAL)
    bits = (step.view(torch.int32) + ~_STEP_BITS) & _STEP_BITS  # rounded up
    inverse = 1.0 / bits.view(torch.float32)
    zero = torch.where(plain, (below * inverse).ceil(), 8.0)
    even = padded(x, 2)
    rows, inverse = broadcast_scales(even, inverse, block)
    q = _rounded(rows * inverse, stochastic) + broadcast_scales(even, zero, block)[1]
    # Codes of finite values: 0 to 15, or 2 to 14 beside those of infinities and NaN. So the largest is 15 - lowest / 2.
    lowest = broadcast_scales(even, torch.where(plain, 0.0, 2.0), block)[1]
    special = torch.where(q.isnan(), 1.0, q.clamp(0, 15))
    q = torch.where(q.abs() < torch.inf, q.maximum(lowest).minimum(15 - lowest / 2), special)
    q = q.view(even.shape).unflatten(-1, (even.shape[-1] // 2, 2))
    byte = (q[..., 0] + q[..., 1] * 16).to(torch.uint8)  # the first in the low half
    word = (bits >> 15) + torch.where(plain, zero, 15.0).to(torch.int32)
    return byte, (word - ((word & 0x8000) << 1)).to(torch.int16)  # the bits of an unsigned 16-bit word


def unpack_int4(q: torch.Tensor, scale: torch.Tensor, length: Any, block: int, dtype: torch.dtype) -> torch.Tensor:
    """Undoes `pack_int4` for rows of `length`, in `dtype`."""
    shifts = torch.arange(0, 8, 4, dtype=torch.uint8, device=q.device)
    codes = ((q.unsqueeze(-1) >> shifts) & 15).flatten(-2)
    word = scale.to(torch.int32)
    rows, step = broadcast_scales(codes, ((word & 0xFFF0) << 15).view(torch.float32), block)
    zero = broadcast_scales(codes, word & 15, block)[1]
    special = zero == 15
    code = (rows - torch.where(special, 8, zero)).float()
    other = torch.where(code == -7, torch.nan, code * torch.inf)
    y = torch.where(special & (code.abs() > 6), other, _finite(code * step, dtype)).to(dtype)
    return first_elements(y.view(codes.shape), length)


def _rounded(x: torch.Tensor, stochastic: bool) -> torch.Tensor:
    return (x + (torch.rand_like(x) - 0.5) if stochastic else x).round()


def _finite(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`y` clamped to the range of `dtype`, which it may leave because scales are slightly too large."""
    largest = torch.finfo(dtype).max
    return y.clamp(-largest, largest)


@dataclass(frozen=True)
class _Pack(Pack):
    bits: int
    block: int
    stochastic: bool
    power: bool

    def __call__(self, x: torch.Tensor) -> Any:
        if x.dtype not in FLOATS or x.dim() == 0 or is_empty(x):
            return x
        y, permutation = in_memory_order(x)
        y = rounded(y) if x.dtype is torch.float16 else y  # else what overflows sets the scale of others
        block, is8 = self.block, self.bits == 8
        if is8 and not self.stochastic and operators.use_operators(y):
            amax = operators.amax_exponent if self.power else operators.amax_word
            scale = amax(in_blocks(y, block)).squeeze(-1)
            q = operators.to_int8(*broadcast_scales(y, scale, block), x.dtype, self.power).view(y.shape)
        elif ops.has_kernel(y, beats_inductor=self.stochastic or not is8):
            seed = torch.randint(1 << 62, (1,), device=y.device) if self.stochastic else None
            q, scale = ops.pack_int8(y, block, self.power, seed) if is8 else ops.pack_int4(y, block, seed)
        elif is8:
            q, scale = pack_int8(y, block, self.stochastic, self.power)
        else:
            q, scale = pack_int4(y, block, self.stochastic)
        return q, scale, x.dtype, y.shape[-1], permutation


@dataclass(frozen=True)
class _Unpack:
    bits: int
    block: int

    def __call__(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        q, scale, dtype, length, permutation = packed
        kernel = ops.has_kernel(q, beats_inductor=self.bits == 4)
        if q.dtype is torch.uint8 and self.bits == 8:  # packed by `operators`
            power = scale.dtype is torch.uint8
            y = operators.from_int8(*broadcast_scales(q, scale, self.block), dtype, power).view(q.shape)
        elif self.bits == 8:
            y = (ops.unpack8 if kernel else unpack_int8)(q, scale, self.block, dtype)
        else:
            y = (ops.unpack_int4 if kernel else unpack_int4)(q, scale, length, self.block, dtype)
        return from_memory_order(y, permutation)


# Upper bounds of the relative error of normal data, root mean square, above what tests/library/test_stated_errors.py
# measures: in 8 bits by whether rounding is stochastic, a tenth more for blocks above 128; in 4 bits by the size of
# blocks, a third above what stochastic rounding has.
_ERRORS8 = {False: 0.01, True: 0.015}
_ERRORS4 = {8: 0.12, 16: 0.145, 32: 0.165, 64: 0.19, 128: 0.21, 256: 0.23, 512: 0.245, 1024: 0.26}


def _integer_hook(bits: int, block: Any, stochastic: Any, power: Any = False) -> Hook:
    """The hook of `int8` or `int4`. `power`: scales are powers of two. Raises `OptionError`."""
    if not isinstance(block, int) or block not in (8, 16, 32, 64, 128, 256, 512, 1024):
        raise OptionError(f"int{bits}: block_size must be a power of two from 8 to 1024, got {block!r}")
    for option, value in (("stochastic", stochastic), ("power_of_two", power)):
        if not isinstance(value, bool):  # a truthy "no" would turn the option on
            raise OptionError(f"int{bits}: {option} must be True or False, got {value!r}")
    options = (", stochastic" if stochastic else "") + (", power of two" if power else "")
    # A scale counts 16 bits even where it has 8: a row of one number, off by up to a 126th, isn't worth packing.
    declines = Declines(f"int{bits}", bits, 2, block)
    error = _ERRORS4[block] if bits == 4 else _ERRORS8[stochastic] * (1.1 if block > 128 else 1.0)
    name = f"int{bits}({block}{options})"
    pack = _Pack(name, declines, bits, block, stochastic, power, error=error, digits=bits)
    return hook_of(pack, _Unpack(bits, block))


@interned
def int8(block_size: int = 64, stochastic: bool = False, *, power_of_two: bool = False) -> Hook:
    """Store floating-point tensors (bfloat16, float16, float32) in 8 bits and a scale of 16 bits a block.

    Args:
        block_size: how many values along the last dimension share a scale: a power of two from 8 to 1024.
        stochastic: round up or down at random, so that the expected value after unpacking is the saved value. Each step
            draws anew from torch's random state (`torch.manual_seed`).
        power_of_two: scales that are powers of two, of 8 bits each. Unpacked values then have fewer digits that are not
            zero. Matrix products take less power for them, and a GPU at its power limit less time. The error is up to
            twice as large, 1.5 times on the whole. At the same number of bytes it is a quarter larger: blocks of 32
            with this option, and of 64 without.

    Error of a value: half a step, or a whole one when stochastic, then the rounding of its own dtype. A step is at most
    the largest finite value of the block / 125, or / 63 if it is a power of two. It is at least 2**-126, or for float16
    its smallest number, 2**-24. If it is a power of two, the error may be a quarter of a step more in a block that
    holds a number within a 64th of its dtype's largest.

    Infinities and NaN come back as they were. What stays as it is: docs/hooks.md.

    Raises:
        OptionError: for another block_size, or an argument of another type.
    """
    return _integer_hook(8, block_size, stochastic, power_of_two)


@interned
def int4(block_size: int = 32, stochastic: bool = True) -> Hook:
    """Store floating-point tensors (bfloat16, float16, float32) in 4 bits and a scale of 16 bits a block.

    Takes the arguments of `int8` and leaves the same tensors as they are. Stochastic rounding is the default: rounded
    to the nearest, small values all become zero, and gradients that sum over many values keep that bias.

    Error of a value: half a step, or a whole one when stochastic, then the rounding of its own dtype. A step is at most
    (above + below) / 14 * (1 + 2**-4 + 2**-18) and at least 2**-126. Here above and below are the magnitudes of the
    block's largest positive and negative value, 0 where there is none. In a block that holds an infinity or NaN, which
    come back as they were, a step is a sixth of the largest magnitude, times that factor.

    Raises:
        OptionError: for another block_size, or an argument of another type.
    """
    return _integer_hook(4, block_size, stochastic)
