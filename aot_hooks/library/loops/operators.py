"""float8 and int8 in three operators each, which Inductor compiles as one loop each on NVIDIA GPUs.

      x --amax_bits--> i32[n, 1]              where x is computed
      x, bits --to_float8--> f8[n, m]         after x's last use
      q, bits --from_float8--> bf16[n, m]     in the backward

      x --amax_word--> i16[n, blocks, 1]      int8: the same in blocks, q u8[n, m]; the upper half of these bits,
      x --amax_exponent--> u8[n, blocks, 1]   or the exponent of a scale that is a power of two

Inductor makes some twenty nodes a saved tensor from the hooks' plain tensor code. An operator is one node, and its PTX
takes fewer instructions a number: at 8 bits arithmetic costs as much time as moving the bytes.
Compile time grows with nodes and buffers. So a row stores the result of its reduction, the bits of its largest value,
and not its scale: with the scale as a buffer of its own, four Llama blocks had 114 kernels instead of 102.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...hook import compiled_by
from ...torch_private.inductor_lowering import emits_ptx, lower_to_loop, new_operator
from .. import scales
from ..scales import EXPONENT_STEP, LOW_HALF, ROUND_UP, TOP_INT8
from . import ptx


def use_operators(x: Tensor) -> bool:
    """Whether these operators should pack `x`: Inductor compiles it, for an NVIDIA GPU."""
    return emits_ptx(x.device) and compiled_by() == "inductor"


def _operator(arguments: str, result: torch.dtype | None = None, *, reduces: bool = False) -> Callable[..., Any]:
    """Makes an operator of its tensor code. Inductor compiles the function of the same name in ptx.py.

    Args:
        arguments: types and names, for the schema.
        result: dtype of the result; None: the third argument says it.
        reduces: the result is a maximum over rows.
    """

    def dtype_of(*args: Any) -> torch.dtype:
        dtype: torch.dtype = args[2] if result is None else result
        return dtype

    def fake(x: Tensor, *others: Any) -> Tensor:  # without the arithmetic, which would cost compile time
        dtype = dtype_of(x, *others)
        return x.new_empty((*x.shape[:-1], 1), dtype=dtype) if reduces else torch.empty_like(x, dtype=dtype)

    def define(tensor_code: Callable[..., Tensor]) -> Any:
        name = tensor_code.__name__
        tags = (torch.Tag.reduction,) if reduces else ()
        op = new_operator(f"{name}({arguments}) -> Tensor", tensor_code, fake, tags)
        lower_to_loop(op, getattr(ptx, name), dtype_of, reduce_last="amax" if reduces else None)
        return op

    return define


def _amax_bits(x: Tensor) -> Tensor:
    # Bits of |x| are ordered as |x|. One exponent step more makes those of infinity and NaN negative, so that any
    # finite number is larger. That takes four integer instructions a number, comparing floats nine: reading a wide row
    # for its scale is bound by arithmetic, not by bytes.
    return ((x.float().view(torch.int32) & ptx.MAGNITUDE_MASK) + EXPONENT_STEP).amax(-1, keepdim=True)


@_operator("Tensor x", torch.int32, reduces=True)
def amax_bits(x: Tensor) -> Tensor:
    return _amax_bits(x)


@_operator("Tensor x", torch.int16, reduces=True)
def amax_word(x: Tensor) -> Tensor:
    return (_amax_bits(x) >> 16).to(torch.int16)


@_operator("Tensor x", torch.uint8, reduces=True)
def amax_exponent(x: Tensor) -> Tensor:
    step = EXPONENT_STEP >> 16
    return (((_amax_bits(x) >> 16).clamp(min=step) + (ROUND_UP - step)) >> 7).to(torch.uint8)


def _amax_of_bits(bits: Tensor) -> Tensor:
    return (bits.clamp(min=EXPONENT_STEP) - EXPONENT_STEP).view(torch.float32)


def _scale_of_bits(bits: Tensor, top: float, dtype: torch.dtype) -> Tensor:
    return scales.power_of_two(_amax_of_bits(bits), top, scales.smallest_scale(dtype, top))


@_operator("Tensor x, Tensor bits, ScalarType fmt, float top, ScalarType dtype")
def to_float8(x: Tensor, bits: Tensor, fmt: torch.dtype, top: float, dtype: torch.dtype) -> Tensor:
    return scales.float8_codes(x, _scale_of_bits(bits, top, dtype), fmt)


@_operator("Tensor q, Tensor bits, ScalarType dtype, float top, float inf")
def from_float8(q: Tensor, bits: Tensor, dtype: torch.dtype, top: float, inf: float) -> Tensor:
    scale = _scale_of_bits(bits, top, dtype).clamp(max=scales.largest_scale(dtype, top))
    return scales.float8_values(q, scale, dtype)


def _amax_of_word(word: Tensor, dtype: torch.dtype) -> Tensor:
    """f32: at least the largest finite |x|, and large enough for the smallest step."""
    amax = _amax_of_bits((word.to(torch.int32) << 16) | LOW_HALF)
    amax = torch.where(amax == scales.full_word(dtype), torch.finfo(dtype).max, amax)
    return amax.clamp(min=TOP_INT8 * scales.smallest_scale(dtype))


def _scale_of_exponent(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    bounded = exponent.to(torch.int32).clamp(min=scales.smallest_exponent(dtype))
    return scales.from_exponent(bounded - scales.TOP_EXPONENT)


@_operator("Tensor x, Tensor scale, ScalarType dtype, bool power", torch.uint8)
def to_int8(x: Tensor, scale: Tensor, dtype: torch.dtype, power: bool) -> Tensor:
    inverse = 1.0 / _scale_of_exponent(scale, dtype) if power else TOP_INT8 / _amax_of_word(scale, dtype)
    q = (x.double() * inverse.double() + ptx.CODE_OF_ZERO).round()  # in float64, so that it is rounded once
    q = torch.where(x.isnan(), 255.0, torch.where(x == -torch.inf, 254.0, torch.where(x == torch.inf, 0.0, q)))
    return q.to(torch.uint8)


@_operator("Tensor q, Tensor scale, ScalarType dtype, bool power")
def from_int8(q: Tensor, scale: Tensor, dtype: torch.dtype, power: bool) -> Tensor:
    if power:
        top, instead = scales.top_power(dtype)
        step = _scale_of_exponent(scale, dtype)
        step = torch.where(step == top, instead, step)
    else:
        step = _amax_of_word(scale, dtype) * scales.STEP_INT8
    code = q.float()
    y = (code - ptx.CODE_OF_ZERO) * step
    special = torch.where(code > 254, torch.nan, torch.where(code > 0, -torch.inf, torch.inf))
    return torch.where((code > 0) & (code < 254), y, special).to(dtype)
