"""float8 and int8 in three operators each, which Inductor compiles into its loops as they stand.

      x --amax_bits--> i32[n, 1]              where x is made
      x, bits --to_float8--> f8[n, m]         after x's last use
      q, bits --from_float8--> bf16[n, m]     in the backward

      x --amax_word--> i16[n, blocks, 1]      int8 likewise, in blocks, q u8[n, m]: the upper half of these bits
      x --amax_exponent--> u8[n, blocks, 1]   or the exponent of a scale that is a power of two

They compute what float8.py and integer.py write as tensor code, which Inductor takes apart into some twenty nodes a
saved tensor, and in fewer instructions a number: at 8 bits arithmetic costs as much time as moving the bytes.
Compile time is per node and per buffer, so what is stored for a row is not its scale but what the reduction gives, the
bits of its largest value: with the scale as a buffer of its own, four Llama blocks had 114 kernels instead of 102.

Only for graphs that Inductor compiles to Triton; they run anywhere, and are tested on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from ...hook import compiled_by
from ...torch_private.inductor_lowering import lower_to_loop
from ..scales import (
    INVERSE,
    LOW,
    MASK,
    OVER,
    ROUND_UP,
    STEP_INT8,
    TOP_INT8,
    from_exponent,
    full_word,
    largest_scale,
    least_exponent,
    power_of_two,
    rounding_up,
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
    "taken",
    "to_float8",
    "to_int8",
]

_MAGNITUDE = 0x7FFFFFFF
_STEP = 0x00800000  # one exponent step
_CODE_ZERO = 127.0  # a code is stored with 127 added; 0, 254 and 255 stand for infinity, -infinity and NaN
_ROUNDING = 12582912.0  # 1.5 * 2**23

_library = torch.library.Library("aot_hooks", "FRAGMENT")
_library.define("amax_bits(Tensor x) -> Tensor", tags=(torch.Tag.reduction,))
_library.define("to_float8(Tensor x, Tensor bits, ScalarType dtype, float top, ScalarType of) -> Tensor")
_library.define("from_float8(Tensor q, Tensor bits, ScalarType dtype, float top, float inf) -> Tensor")
_library.define("amax_word(Tensor x) -> Tensor", tags=(torch.Tag.reduction,))
_library.define("amax_exponent(Tensor x) -> Tensor", tags=(torch.Tag.reduction,))
_library.define("to_int8(Tensor x, Tensor scale, ScalarType dtype, bool power) -> Tensor")
_library.define("from_int8(Tensor q, Tensor scale, ScalarType dtype, bool power) -> Tensor")

amax_bits = torch.ops.aot_hooks.amax_bits.default
to_float8 = torch.ops.aot_hooks.to_float8.default
from_float8 = torch.ops.aot_hooks.from_float8.default
amax_word = torch.ops.aot_hooks.amax_word.default
amax_exponent = torch.ops.aot_hooks.amax_exponent.default
to_int8 = torch.ops.aot_hooks.to_int8.default
from_int8 = torch.ops.aot_hooks.from_int8.default


def taken(x: torch.Tensor) -> bool:
    """Whether `x` goes through Inductor to Triton, so that these operators should pack it."""
    return x.device.type == "cuda" and compiled_by() == "inductor"


def _amax_bits(x: torch.Tensor) -> torch.Tensor:
    return ((x.float().view(torch.int32) & _MAGNITUDE) + _STEP).amax(-1, keepdim=True)


def _amax_word(x: torch.Tensor) -> torch.Tensor:
    return (_amax_bits(x) >> 16).to(torch.int16)


def _amax_exponent(x: torch.Tensor) -> torch.Tensor:
    return (((_amax_bits(x) >> 16).clamp(min=_STEP >> 16) + (ROUND_UP - (_STEP >> 16))) >> 7).to(torch.uint8)


def _scale(bits: torch.Tensor, top: float, of: torch.dtype) -> torch.Tensor:
    return power_of_two((bits.clamp(min=_STEP) - _STEP).view(torch.float32), top, smallest_scale(of, top))


def _to_float8(x: torch.Tensor, bits: torch.Tensor, dtype: torch.dtype, top: float, of: torch.dtype) -> torch.Tensor:
    inf = torch.finfo(dtype).max
    return (x.float() * (1.0 / _scale(bits, top, of))).clamp(-inf, inf).to(dtype)


def _from_float8(q: torch.Tensor, bits: torch.Tensor, dtype: torch.dtype, top: float, inf: float) -> torch.Tensor:
    y = q.float()
    scale = _scale(bits, top, dtype).clamp(max=largest_scale(dtype, top))
    return (y * torch.where(y.abs() == inf, torch.inf, scale)).to(dtype)


def _word_amax(word: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """f32: at least the largest finite |x|, and no less than what gives the smallest step."""
    bits = (word.to(torch.int32) << 16) | LOW
    amax = (bits.clamp(min=_STEP) - _STEP).view(torch.float32)
    return torch.where(amax == full_word(dtype), torch.finfo(dtype).max, amax).clamp(
        min=TOP_INT8 * smallest_step(dtype)
    )


def _exponent_scale(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return from_exponent(exponent.to(torch.int32).clamp(min=least_exponent(dtype)) - OVER)


def _to_int8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, power: bool) -> torch.Tensor:
    inverse = 1.0 / _exponent_scale(scale, dtype) if power else TOP_INT8 / _word_amax(scale, dtype)
    q = (x.double() * inverse.double() + _CODE_ZERO).round()  # in float64, so that it is rounded once
    q = torch.where(x.isnan(), 255.0, torch.where(x == -torch.inf, 254.0, torch.where(x == torch.inf, 0.0, q)))
    return q.to(torch.uint8)


def _from_int8(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, power: bool) -> torch.Tensor:
    if power:
        top, instead = top_power(dtype)
        step = _exponent_scale(scale, dtype)
        step = torch.where(step == top, instead, step)
    else:
        step = _word_amax(scale, dtype) * STEP_INT8
    code = q.float()
    y = (code - _CODE_ZERO) * step
    special = torch.where(code > 254, torch.nan, torch.where(code > 0, -torch.inf, torch.inf))
    return torch.where((code > 0) & (code < 254), y, special).to(dtype)


for _name, _fn in (
    ("amax_bits", _amax_bits),
    ("to_float8", _to_float8),
    ("from_float8", _from_float8),
    ("amax_word", _amax_word),
    ("amax_exponent", _amax_exponent),
    ("to_int8", _to_int8),
    ("from_int8", _from_int8),
):
    _library.impl(_name, _fn, "CompositeExplicitAutograd")

# what they give, without the arithmetic: tracing on fake tensors is compile time
for _name, _dtype in (("amax_bits", torch.int32), ("amax_word", torch.int16), ("amax_exponent", torch.uint8)):
    torch.library.register_fake(
        f"aot_hooks::{_name}", lambda x, dtype=_dtype: x.new_empty((*x.shape[:-1], 1), dtype=dtype)
    )
torch.library.register_fake("aot_hooks::to_float8", lambda x, bits, dtype, *_: torch.empty_like(x, dtype=dtype))
torch.library.register_fake("aot_hooks::from_float8", lambda q, bits, dtype, *_: torch.empty_like(q, dtype=dtype))
torch.library.register_fake("aot_hooks::to_int8", lambda x, *_: torch.empty_like(x, dtype=torch.uint8))
torch.library.register_fake("aot_hooks::from_int8", lambda q, scale, dtype, _: torch.empty_like(q, dtype=dtype))


def _loop_bits(ops: Any, x: Any) -> Any:
    # Bits of |x| are ordered as |x|; adding one exponent step makes infinity and NaN negative, so that any finite
    # number is larger. Four integer instructions a number, where comparing floats takes nine: reading a wide row for
    # its scale is bound by arithmetic, not by bytes.
    bits = ops.to_dtype_bitcast(ops.to_dtype(x, torch.float32), torch.int32, torch.float32)
    magnitude = ops.bitwise_and(bits, ops.constant(_MAGNITUDE, torch.int32))
    return ops.add(magnitude, ops.constant(_STEP, torch.int32))


def _loop_upper(ops: Any, x: Any) -> Any:
    return ops.bitwise_right_shift(_loop_bits(ops, x), ops.constant(16, torch.int32))


def _loop_word(ops: Any, x: Any) -> Any:
    return ops.to_dtype(_loop_upper(ops, x), torch.int16)


def _loop_exponent(ops: Any, x: Any) -> Any:
    smallest = _STEP >> 16
    word = ops.maximum(_loop_upper(ops, x), ops.constant(smallest, torch.int32))
    rounded = ops.add(word, ops.constant(ROUND_UP - smallest, torch.int32))
    return ops.to_dtype(ops.bitwise_right_shift(rounded, ops.constant(7, torch.int32)), torch.uint8)


def _loop_word_amax(ops: Any, word: Any, dtype: torch.dtype) -> Any:
    step = ops.constant(_STEP, torch.int32)
    upper = ops.bitwise_left_shift(ops.to_dtype(word, torch.int32), ops.constant(16, torch.int32))
    bits = ops.maximum(ops.bitwise_or(upper, ops.constant(LOW, torch.int32)), step)
    amax = ops.to_dtype_bitcast(ops.sub(bits, step), torch.float32, torch.int32)
    is_full = ops.eq(amax, ops.constant(full_word(dtype), torch.float32))
    amax = ops.where(is_full, ops.constant(torch.finfo(dtype).max, torch.float32), amax)
    return ops.maximum(amax, ops.constant(TOP_INT8 * smallest_step(dtype), torch.float32))


def _loop_exponent_scale(ops: Any, exponent: Any, dtype: torch.dtype) -> Any:
    """The bits of the scale."""
    own = ops.maximum(ops.to_dtype(exponent, torch.int32), ops.constant(least_exponent(dtype), torch.int32))
    own = ops.sub(own, ops.constant(OVER, torch.int32))
    return ops.bitwise_left_shift(own, ops.constant(23, torch.int32))


def _loop_scale(ops: Any, bits: Any, top: float, of: torch.dtype) -> Any:
    """The bits of the scale."""
    least, add = rounding_up(top, smallest_scale(of, top))
    bits = ops.maximum(bits, ops.constant(least + _STEP, torch.int32))
    return ops.bitwise_and(ops.add(bits, ops.constant(add - _STEP, torch.int32)), ops.constant(MASK, torch.int32))


def _loop_to_float8(ops: Any, x: Any, bits: Any, dtype: torch.dtype, top: float, of: torch.dtype) -> Any:
    inverse = ops.sub(ops.constant(INVERSE, torch.int32), _loop_scale(ops, bits, top, of))
    inverse = ops.to_dtype_bitcast(inverse, torch.float32, torch.int32)
    scaled = ops.mul(ops.to_dtype(x, torch.float32), inverse)
    if dtype is not torch.float8_e4m3fn:  # Triton's conversion to e4m3 takes infinity to the largest number by itself
        inf = torch.finfo(dtype).max
        scaled = ops.minimum(ops.maximum(scaled, ops.constant(-inf, torch.float32)), ops.constant(inf, torch.float32))
    return ops.to_dtype(scaled, dtype)


def _loop_from_float8(ops: Any, q: Any, bits: Any, dtype: torch.dtype, top: float, inf: float) -> Any:
    y = ops.to_dtype(q, torch.float32)
    scale = ops.to_dtype_bitcast(_loop_scale(ops, bits, top, dtype), torch.float32, torch.int32)
    scale = ops.minimum(scale, ops.constant(largest_scale(dtype, top), torch.float32))
    is_inf = ops.eq(ops.abs(y), ops.constant(inf, torch.float32))  # the largest number stands for infinity
    return ops.to_dtype(ops.mul(y, ops.where(is_inf, ops.constant(float("inf"), torch.float32), scale)), dtype)


def _loop_to_int8(ops: Any, x: Any, scale: Any, dtype: torch.dtype, power: bool) -> Any:
    if power:
        inverse = ops.sub(ops.constant(INVERSE, torch.int32), _loop_exponent_scale(ops, scale, dtype))
        inverse = ops.to_dtype_bitcast(inverse, torch.float32, torch.int32)
    else:
        inverse = ops.truediv(ops.constant(TOP_INT8, torch.float32), _loop_word_amax(ops, scale, dtype))
    x = ops.to_dtype(x, torch.float32)
    # Adding 1.5 * 2**23 rounds to an integer and leaves it in the last bits; rounding and converting take a slow unit.
    rounded = ops.add(ops.mul(x, inverse), ops.constant(_ROUNDING + _CODE_ZERO, torch.float32))
    code = ops.bitwise_and(ops.to_dtype_bitcast(rounded, torch.int32, torch.float32), ops.constant(255, torch.int32))
    for value, own in ((float("inf"), 0), (-float("inf"), 254)):
        code = ops.where(ops.eq(x, ops.constant(value, torch.float32)), ops.constant(own, torch.int32), code)
    return ops.to_dtype(ops.where(ops.ne(x, x), ops.constant(255, torch.int32), code), torch.uint8)


def _loop_from_int8(ops: Any, q: Any, scale: Any, dtype: torch.dtype, power: bool) -> Any:
    if power:
        top, instead = top_power(dtype)
        step = ops.to_dtype_bitcast(_loop_exponent_scale(ops, scale, dtype), torch.float32, torch.int32)
        is_top = ops.eq(step, ops.constant(top, torch.float32))
        step = ops.where(is_top, ops.constant(instead, torch.float32), step)
    else:
        step = ops.mul(_loop_word_amax(ops, scale, dtype), ops.constant(STEP_INT8, torch.float32))
    code = ops.to_dtype(q, torch.float32)
    y = ops.mul(ops.sub(code, ops.constant(_CODE_ZERO, torch.float32)), step)
    for least, value in ((254.0, -float("inf")), (255.0, float("nan"))):
        y = ops.where(ops.ge(code, ops.constant(least, torch.float32)), ops.constant(value, torch.float32), y)
    is_inf = ops.eq(code, ops.constant(0.0, torch.float32))
    return ops.to_dtype(ops.where(is_inf, ops.constant(float("inf"), torch.float32), y), dtype)


lower_to_loop(amax_bits, _loop_bits, lambda x: torch.int32, nvidia=ptx.amax_bits, reduce_last="amax")
lower_to_loop(to_float8, _loop_to_float8, lambda x, bits, dtype, *_: dtype, nvidia=ptx.to_float8)
lower_to_loop(from_float8, _loop_from_float8, lambda q, bits, dtype, *_: dtype, nvidia=ptx.from_float8)
lower_to_loop(amax_word, _loop_word, lambda x: torch.int16, nvidia=ptx.amax_word, reduce_last="amax")
lower_to_loop(amax_exponent, _loop_exponent, lambda x: torch.uint8, nvidia=ptx.amax_exponent, reduce_last="amax")
lower_to_loop(to_int8, _loop_to_int8, lambda *_: torch.uint8, nvidia=ptx.to_int8)
lower_to_loop(from_int8, _loop_from_int8, lambda q, scale, dtype, _: dtype, nvidia=ptx.from_int8)
