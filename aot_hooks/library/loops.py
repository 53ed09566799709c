"""float8 in three operators that Inductor compiles into its loops as they stand.

      x --amax_bits--> i32[n, 1]              where x is made
      x, bits --to_float8--> f8[n, m]         after x's last use
      q, bits --from_float8--> bf16[n, m]     in the backward

They compute what float8.py writes as tensor code, which Inductor takes apart into some twenty nodes a saved tensor.
Compile time is per node and per buffer, so what is stored for a row is not its scale but what the reduction gives, the
bits of its largest value: with the scale as a buffer of its own, four Llama blocks had 12 kernels more and took 4 of 16
seconds longer to compile.

Only for graphs that Inductor compiles to Triton; they run anywhere, and are tested on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _compat

__all__ = ["amax_bits", "from_float8", "to_float8"]

_MAGNITUDE = 0x7FFFFFFF
_STEP = 0x00800000  # one exponent step
_SMALLEST_NORMAL = 2.0**-126

_library = torch.library.Library("aot_hooks", "FRAGMENT")
_library.define("amax_bits(Tensor x) -> Tensor", tags=(torch.Tag.reduction,))
_library.define("to_float8(Tensor x, Tensor bits, ScalarType dtype, float top) -> Tensor")
_library.define("from_float8(Tensor q, Tensor bits, ScalarType dtype, float top, float inf) -> Tensor")

amax_bits = torch.ops.aot_hooks.amax_bits.default
to_float8 = torch.ops.aot_hooks.to_float8.default
from_float8 = torch.ops.aot_hooks.from_float8.default


def _amax_bits(x: torch.Tensor) -> torch.Tensor:
    return ((x.float().view(torch.int32) & _MAGNITUDE) + _STEP).amax(-1, keepdim=True)


def _amax(bits: torch.Tensor, top: float) -> torch.Tensor:
    """f32: the largest finite |x|, and no less than what gives the smallest normal scale."""
    return (bits.clamp(min=_STEP) - _STEP).view(torch.float32).clamp(min=top * _SMALLEST_NORMAL)


def _to_float8(x: torch.Tensor, bits: torch.Tensor, dtype: torch.dtype, top: float) -> torch.Tensor:
    inf = torch.finfo(dtype).max
    return (x.float() * (top / _amax(bits, top))).clamp(-inf, inf).to(dtype)


def _from_float8(q: torch.Tensor, bits: torch.Tensor, dtype: torch.dtype, top: float, inf: float) -> torch.Tensor:
    y = q.float()
    return (y * torch.where(y.abs() == inf, torch.inf, _amax(bits, top) * (1.0 / top))).to(dtype)


for _name, _fn in (("amax_bits", _amax_bits), ("to_float8", _to_float8), ("from_float8", _from_float8)):
    _library.impl(_name, _fn, "CompositeExplicitAutograd")

# what they give, without the arithmetic: tracing on fake tensors is compile time
torch.library.register_fake("aot_hooks::amax_bits", lambda x: x.new_empty((*x.shape[:-1], 1), dtype=torch.int32))
torch.library.register_fake("aot_hooks::to_float8", lambda x, bits, dtype, top: torch.empty_like(x, dtype=dtype))
torch.library.register_fake("aot_hooks::from_float8", lambda q, bits, dtype, *_: torch.empty_like(q, dtype=dtype))


def _loop_bits(ops: Any, x: Any) -> Any:
    # Bits of |x| are ordered as |x|; adding one exponent step makes infinity and NaN negative, so that any finite
    # number is larger. Four integer instructions a number, where comparing floats takes nine: reading a wide row for
    # its scale is bound by arithmetic, not by bytes.
    bits = ops.to_dtype_bitcast(ops.to_dtype(x, torch.float32), torch.int32, torch.float32)
    magnitude = ops.bitwise_and(bits, ops.constant(_MAGNITUDE, torch.int32))
    return ops.add(magnitude, ops.constant(_STEP, torch.int32))


def _loop_amax(ops: Any, bits: Any, top: float) -> Any:
    step = ops.constant(_STEP, torch.int32)
    amax = ops.to_dtype_bitcast(ops.sub(ops.maximum(bits, step), step), torch.float32, torch.int32)
    return ops.maximum(amax, ops.constant(top * _SMALLEST_NORMAL, torch.float32))


def _loop_to_float8(ops: Any, x: Any, bits: Any, dtype: torch.dtype, top: float) -> Any:
    inverse = ops.truediv(ops.constant(top, torch.float32), _loop_amax(ops, bits, top))
    scaled = ops.mul(ops.to_dtype(x, torch.float32), inverse)
    if dtype is not torch.float8_e4m3fn:  # Triton's conversion to e4m3 takes infinity to the largest number by itself
        inf = torch.finfo(dtype).max
        scaled = ops.minimum(ops.maximum(scaled, ops.constant(-inf, torch.float32)), ops.constant(inf, torch.float32))
    return ops.to_dtype(scaled, dtype)


def _loop_from_float8(ops: Any, q: Any, bits: Any, dtype: torch.dtype, top: float, inf: float) -> Any:
    y = ops.to_dtype(q, torch.float32)
    scale = ops.mul(_loop_amax(ops, bits, top), ops.constant(1.0 / top, torch.float32))
    is_inf = ops.eq(ops.abs(y), ops.constant(inf, torch.float32))  # the largest number stands for infinity
    return ops.to_dtype(ops.mul(y, ops.where(is_inf, ops.constant(float("inf"), torch.float32), scale)), dtype)


_compat.lower_to_loop(amax_bits, _loop_bits, lambda x: torch.int32, reduce_last="amax")
_compat.lower_to_loop(to_float8, _loop_to_float8, lambda x, bits, dtype, *_: dtype)
_compat.lower_to_loop(from_float8, _loop_from_float8, lambda q, bits, dtype, *_: dtype)
