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

The tensor code here defines the operators. It runs wherever PTX does not, and PTX is tested against it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...hook import compiled_by
from ...torch_private.inductor_lowering import emits_ptx, lower_to_loop
from ..scales import (
    EXPONENT_STEP,
    LOW_HALF,
    ROUND_UP,
    STEP_INT8,
    TOP_EXPONENT,
    TOP_INT8,
    float8_codes,
    float8_values,
    from_exponent,
    full_word,
    largest_scale,
    least_exponent,
    power_of_two,
    smallest_scale,
    smallest_step,
    top_power,
)
from . import ptx

__all__ = [
    "amax_bits",
    "amax_exponent",
    "amax_word",
    "from_float8",
    "from_int8",
    "to_float8",
    "to_int8",
    "use_operators",
]


def use_operators(x: torch.Tensor) -> bool:
    """Whether these operators should pack `x`: Inductor compiles it, for an NVIDIA GPU."""
    return emits_ptx(x.device) and compiled_by() == "inductor"


def _amax_bits(x: torch.Tensor) -> torch.Tensor:
    # Bits of |x| are ordered as |x|. One exponent step more makes those of infinity and NaN negative, so that any
    # finite number is larger. That takes four integer instructions a number, comparing floats nine: reading a wide row
    # for its scale is bound by arithmetic, not by bytes.
    return ((x.float().view(torch.int32) & ptx.MAGNITUDE_MASK) + EXPONENT_STEP).amax(-1, keepdim=True)


def _amax_word(x: torch.Tensor) -> torch.Tensor:
    return (_amax_bits(x) >> 16).to(torch.int16)


def _amax_exponent(x: torch.Tensor) -> torch.Tensor:
    step = EXPONENT_STEP >> 16
    return (((_amax_bits(x) >> 16).clamp(min=step) + (ROUND_UP - step)) >> 7).to(torch.uint8)


def _scale_of_bits(bits: torch.Tensor, top: float, dtype: torch.dtype) -> torch.Tensor:
    amax = (bits.clamp(min=EXPONENT_STEP) - EXPONENT_STEP).view(torch.float32)
    return power_of_two(amax, top, smallest_scale(dtype, top))


def _to_float8(x: torch.Tensor, bits: torch.Tensor, fmt: torch.dtype, top: float, dtype: torch.dtype) -> torch.Tensor:
    return float8_codes(x, _scale_of_bits(bits, top, dtype), fmt)


def _from_float8(q: torch.Tensor, bits: torch.Tensor, dtype: torch.dtype, top: float, inf: float) -> torch.Tensor:
    return float8_values(q, _scale_of_bits(bits, top, dtype).clamp(max=largest_scale(dtype, top)), dtype)


def _amax_of_word(word: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """f32: at least the largest finite |x|, and large enough for the smallest step."""
    bits = (word.to(torch.int32) << 16) | LOW_HALF
    amax = (bits.clamp(min=EXPONENT_STEP) - EXPONENT_STEP).view(torch.float32)
    amax = torch.where(amax == full_word(dtype), torch.finfo(dtype).max, amax)
    return amax.clamp(min=TOP_INT8 * smallest_step(dtype))


def _scale_of_exponent(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return from_exponent(exponent.to(torch.int32).clamp(min=least_exponent(dtype)) - TOP_EXPONENT)


def _to_int8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, power: bool) -> torch.Tensor:
    inverse = 1.0 / _scale_of_exponent(scale, dtype) if power else TOP_INT8 / _amax_of_word(scale, dtype)
    q = (x.double() * inverse.double() + ptx.CODE_OF_ZERO).round()  # in float64, so that it is rounded once
    q = torch.where(x.isnan(), 255.0, torch.where(x == -torch.inf, 254.0, torch.where(x == torch.inf, 0.0, q)))
    return q.to(torch.uint8)


def _from_int8(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, power: bool) -> torch.Tensor:
    if power:
        top, instead = top_power(dtype)
        step = _scale_of_exponent(scale, dtype)
        step = torch.where(step == top, instead, step)
    else:
        step = _amax_of_word(scale, dtype) * STEP_INT8
    code = q.float()
    y = (code - ptx.CODE_OF_ZERO) * step
    special = torch.where(code > 254, torch.nan, torch.where(code > 0, -torch.inf, torch.inf))
    return torch.where((code > 0) & (code < 254), y, special).to(dtype)


_library = torch.library.Library("aot_hooks", "FRAGMENT")


def _operator(
    schema: str,
    tensor_code: Callable[..., torch.Tensor],
    body: Callable[..., Any],
    dtype_of: Callable[..., torch.dtype],
    *,
    reduces: bool = False,
) -> Any:
    """Defines an operator; `dtype_of` gives its result's dtype, and `reduces` means a maximum over rows."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.reduction,) if reduces else ())
    _library.impl(name, tensor_code, "CompositeExplicitAutograd")

    def fake(x: torch.Tensor, *others: Any) -> torch.Tensor:  # without the arithmetic, which would cost compile time
        dtype = dtype_of(x, *others)
        return x.new_empty((*x.shape[:-1], 1), dtype=dtype) if reduces else torch.empty_like(x, dtype=dtype)

    torch.library.register_fake(f"aot_hooks::{name}", fake)
    op = getattr(torch.ops.aot_hooks, name).default
    lower_to_loop(op, body, dtype_of, reduce_last="amax" if reduces else None)
    return op


def _third(x: Any, y: Any, dtype: torch.dtype, *_: Any) -> torch.dtype:
    return dtype


amax_bits = _operator("amax_bits(Tensor x) -> Tensor", _amax_bits, ptx.amax_bits, lambda x: torch.int32, reduces=True)
amax_word = _operator("amax_word(Tensor x) -> Tensor", _amax_word, ptx.amax_word, lambda x: torch.int16, reduces=True)
amax_exponent = _operator(
    "amax_exponent(Tensor x) -> Tensor", _amax_exponent, ptx.amax_exponent, lambda x: torch.uint8, reduces=True
)
to_float8 = _operator(
    "to_float8(Tensor x, Tensor bits, ScalarType fmt, float top, ScalarType dtype) -> Tensor",
    _to_float8,
    ptx.to_float8,
    _third,
)
from_float8 = _operator(
    "from_float8(Tensor q, Tensor bits, ScalarType dtype, float top, float inf) -> Tensor",
    _from_float8,
    ptx.from_float8,
    _third,
)
to_int8 = _operator(
    "to_int8(Tensor x, Tensor scale, ScalarType dtype, bool power) -> Tensor",
    _to_int8,
    ptx.to_int8,
    lambda *_: torch.uint8,
)
from_int8 = _operator(
    "from_int8(Tensor q, Tensor scale, ScalarType dtype, bool power) -> Tensor", _from_int8, ptx.from_int8, _third
)
