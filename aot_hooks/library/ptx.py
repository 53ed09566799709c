"""The arithmetic of loops.py, a PTX sequence for each step: one operation where Inductor's own language takes ten.

    bits = and, add                 (x)          q = clamp(x * inverse(bits))          x' = q * scale(bits), or infinity

What Inductor does for a loop it does for each operation in it, several times: types, ranges, common subexpressions,
printing. Four Llama blocks with float8 took a quarter fewer Python calls over stock in generating code this way.

For NVIDIA GPUs. What each computes is what the function of the same name in loops.py does, which is tested to agree.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch

from .scales import INVERSE, MASK, largest_scale, rounding_up

__all__ = ["amax_bits", "from_float8", "from_int8", "to_float8", "to_int8"]


def _number(x: float) -> str:
    """A float32 as PTX writes it."""
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


_INFINITY, _NAN = _number(float("inf")), "0f7FC00000"
_STEP = 0x00800000  # one exponent step
_BITS = "{ .reg .b32 t; mov.b32 t, $1; and.b32 t, t, 0x7FFFFFFF; add.s32 $0, t, 0x00800000; }"


def _amax(bits: str, top: float) -> str:
    """Leaves the largest finite magnitude in register f; `loops._loop_amax`."""
    return (
        f".reg .s32 t; .reg .f32 f; max.s32 t, {bits}, 0x00800000; sub.s32 t, t, 0x00800000; mov.b32 f, t; "
        f"max.f32 f, f, {_number(top * 2.0**-126)};"
    )


@functools.cache
def _inverse(top: float) -> str:
    return f"{{ {_amax('$1', top)} div.full.f32 $0, {_number(top)}, f; }}"


def _scale(bits: str, top: float) -> str:
    """Leaves the bits of the scale in register t; `loops._loop_scale`."""
    least, add = rounding_up(top)
    return f".reg .s32 t; max.s32 t, {bits}, {least + _STEP}; add.s32 t, t, {add - _STEP}; and.b32 t, t, {MASK};"


@functools.cache
def _float8_inverse(top: float) -> str:
    return f"{{ {_scale('$1', top)} sub.s32 t, {INVERSE}, t; mov.b32 $0, t; }}"


@functools.cache
def _float8_back(top: float, inf: float, largest: float) -> str:
    return (
        f"{{ {_scale('$2', top)} .reg .f32 f, a; .reg .pred p; mov.b32 f, t; min.f32 f, f, {_number(largest)}; "
        f"abs.f32 a, $1; setp.eq.f32 p, a, {_number(inf)}; selp.f32 f, {_INFINITY}, f, p; mul.f32 $0, $1, f; }}"
    )


@functools.cache
def _int8_code(rounding: float, rounding_bits: int) -> str:
    return (
        f"{{ .reg .f32 f; .reg .s32 t; .reg .pred p; fma.rn.f32 f, $1, $2, {_number(rounding)}; mov.b32 t, f; "
        f"max.s32 t, t, {rounding_bits - 127}; min.s32 t, t, {rounding_bits + 127}; setp.nan.f32 p, $1, $1; "
        f"selp.b32 t, {rounding_bits - 128}, t, p; sub.s32 $0, t, {rounding_bits}; }}"
    )


@functools.cache
def _int8_back(top: float, step: float) -> str:
    return (
        f"{{ {_amax('$2', top)} .reg .f32 a; .reg .pred p; mul.f32 f, f, {_number(step)}; abs.f32 a, $1; "
        f"setp.gt.f32 p, a, {_number(126.0)}; selp.f32 f, {_INFINITY}, f, p; mul.f32 f, $1, f; "
        f"setp.lt.f32 p, $1, {_number(-127.0)}; selp.f32 $0, {_NAN}, f, p; }}"
    )


def _emit(ops: Any, asm: str, dtype: torch.dtype, constraints: str, *inputs: Any) -> Any:
    return ops.inline_asm_elementwise(*inputs, asm=asm, constraints=constraints, dtype=dtype, is_pure=True, pack=1)


def amax_bits(ops: Any, x: Any) -> Any:
    return _emit(ops, _BITS, torch.int32, "=r,f", ops.to_dtype(x, torch.float32))


def to_float8(ops: Any, x: Any, bits: Any, dtype: torch.dtype, top: float) -> Any:
    scaled = ops.mul(ops.to_dtype(x, torch.float32), _emit(ops, _float8_inverse(top), torch.float32, "=f,r", bits))
    if dtype is not torch.float8_e4m3fn:  # Triton's conversion to e4m3 takes infinity to the largest number by itself
        inf = torch.finfo(dtype).max
        scaled = ops.minimum(ops.maximum(scaled, ops.constant(-inf, torch.float32)), ops.constant(inf, torch.float32))
    return ops.to_dtype(scaled, dtype)


def from_float8(ops: Any, q: Any, bits: Any, dtype: torch.dtype, top: float, inf: float) -> Any:
    y = ops.to_dtype(q, torch.float32)
    back = _float8_back(top, inf, largest_scale(dtype, top))
    return ops.to_dtype(_emit(ops, back, torch.float32, "=f,f,r", y, bits), dtype)


def to_int8(ops: Any, x: Any, bits: Any, top: float, rounding: float, rounding_bits: int) -> Any:
    inverse = _emit(ops, _inverse(top), torch.float32, "=f,r", bits)
    x = ops.to_dtype(x, torch.float32)
    code = _emit(ops, _int8_code(rounding, rounding_bits), torch.int32, "=r,f,f", x, inverse)
    return ops.to_dtype(code, torch.int8)


def from_int8(ops: Any, q: Any, bits: Any, dtype: torch.dtype, top: float, step: float) -> Any:
    code = ops.to_dtype(q, torch.float32)
    return ops.to_dtype(_emit(ops, _int8_back(top, step), torch.float32, "=f,f,r", code, bits), dtype)
