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

from ...torch_private.inductor_lowering import PackedAsm
from ..scales import (
    INVERSE,
    LOW,
    MASK,
    OVER,
    ROUND_UP,
    STEP_INT8,
    TOP_INT8,
    full_word,
    largest_scale,
    least_exponent,
    rounding_up,
    smallest_scale,
    smallest_step,
    top_power,
)

__all__ = [
    "FROM_INT8",
    "TO_INT8",
    "amax_bits",
    "amax_exponent",
    "amax_word",
    "from_float8",
    "from_int8",
    "to_float8",
    "to_int8",
]


def _number(x: float) -> str:
    """A float32 as PTX writes it."""
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


_INFINITY, _NAN = _number(float("inf")), "0f7FC00000"
_STEP = 0x00800000  # one exponent step
_BITS = "{ .reg .b32 t; mov.b32 t, $1; and.b32 t, t, 0x7FFFFFFF; add.s32 $0, t, 0x00800000; }"


_WORD = "{ .reg .b32 t; mov.b32 t, $1; and.b32 t, t, 0x7FFFFFFF; add.s32 t, t, 0x00800000; shr.s32 $0, t, 16; }"
# Without its sign and one step more, an infinity or NaN has no exponent left; those of numbers stand above bit 24
_EXPONENT = (
    "{ .reg .b32 t; mov.b32 t, $1; shl.b32 t, t, 1; add.s32 t, t, 0x01000000; shr.u32 t, t, 17; "
    f"add.s32 t, t, {ROUND_UP - 128}; shr.s32 $0, t, 7; }}"
)


def _amax(word: str, dtype: torch.dtype) -> str:
    """Leaves at least the largest finite magnitude in register f; `loops._loop_word_amax`."""
    full, largest = full_word(dtype), torch.finfo(dtype).max
    instead = f"setp.eq.f32 p, f, {_number(full)}; selp.f32 f, {_number(largest)}, f, p; " if full != largest else ""
    return (
        f".reg .b32 t; .reg .f32 f; .reg .pred p; shl.b32 t, {word}, 16; or.b32 t, t, {LOW}; max.s32 t, t, {_STEP}; "
        f"sub.s32 t, t, {_STEP}; mov.b32 f, t; {instead}max.f32 f, f, {_number(TOP_INT8 * smallest_step(dtype))};"
    )


def _power(exponent: str, dtype: torch.dtype) -> str:
    """Leaves the bits of the scale in register t; `loops._loop_exponent_scale`."""
    return f".reg .b32 t; max.s32 t, {exponent}, {least_exponent(dtype)}; sub.s32 t, t, {OVER}; shl.b32 t, t, 23;"


@functools.cache
def _int8_inverse(dtype: torch.dtype, power: bool) -> str:
    if power:
        return f"{{ {_power('$1', dtype)} sub.s32 t, {INVERSE}, t; mov.b32 $0, t; }}"
    return f"{{ {_amax('$1', dtype)} div.full.f32 $0, {_number(TOP_INT8)}, f; }}"


@functools.cache
def _int8_step(dtype: torch.dtype, power: bool) -> str:
    if not power:
        return f"{{ {_amax('$1', dtype)} mul.f32 $0, f, {_number(STEP_INT8)}; }}"
    top, instead = map(_number, top_power(dtype))
    return (
        f"{{ {_power('$1', dtype)} .reg .f32 f; .reg .pred p; mov.b32 f, t; setp.eq.f32 p, f, {top}; "
        f"selp.f32 $0, {instead}, f, p; }}"
    )


def _scale(bits: str, top: float, of: torch.dtype) -> str:
    """Leaves the bits of the scale in register t; `loops._loop_scale`."""
    least, add = rounding_up(top, smallest_scale(of, top))
    return f".reg .s32 t; max.s32 t, {bits}, {least + _STEP}; add.s32 t, t, {add - _STEP}; and.b32 t, t, {MASK};"


@functools.cache
def _float8_inverse(top: float, of: torch.dtype) -> str:
    return f"{{ {_scale('$1', top, of)} sub.s32 t, {INVERSE}, t; mov.b32 $0, t; }}"


@functools.cache
def _float8_back(top: float, inf: float, of: torch.dtype) -> str:
    largest = _number(largest_scale(of, top))
    return (
        f"{{ {_scale('$2', top, of)} .reg .f32 f, a; .reg .pred p; mov.b32 f, t; min.f32 f, f, {largest}; "
        f"abs.f32 a, $1; setp.eq.f32 p, a, {_number(inf)}; selp.f32 f, {_INFINITY}, f, p; mul.f32 $0, $1, f; }}"
    )


_ROUNDING = 12582912.0 + 127  # 1.5 * 2**23, and what codes are stored with

# Four int8 codes are one register. Adding 1.5 * 2**23 + 127 rounds x / scale to an integer and leaves code + 127 in the
# last byte, as which the hardware's infinities are 0 and its NaN is 255. Byte permutations gather four of these and,
# from the sign, 0xFF or 0, which makes -infinity 254: 9 instructions for four values.
INT8_CODES = (
    "{ .reg .f32 f<4>; .reg .b32 a, b, c; "
    + " ".join(f"fma.rn.f32 f{i}, ${i + 1}, ${i + 5}, {_number(_ROUNDING)};" for i in range(4))
    + " prmt.b32 a, f0, f1, 0xFB40; prmt.b32 b, f2, f3, 0xFB40; prmt.b32 c, a, b, 0x5410; prmt.b32 a, a, b, 0x7632; "
    "lop3.b32 $0, c, a, 0xFEFEFEFE, 0xF8; }"  # c | (a & 0xFE...)
)
INT8_CODE = (
    f"{{ .reg .f32 f; .reg .b32 a, c; fma.rn.f32 f, $1, $2, {_number(_ROUNDING)}; "
    "prmt.b32 c, f, 0, 0x4440; prmt.b32 a, f, 0, 0x444B; lop3.b32 $0, c, a, 0xFE, 0xF8; }"
)


def _from_bytes(q: str, selector: str, low: str, high: str) -> str:
    """The codes in two bytes of `q` as float32.

    As float16 two at once: 0x64 before a byte is 1024 + code + 127. Times 519, 127 and -127 overflow and no other code
    does, times 513 only 128 does. Times 2**-24 what is finite gets lost in the code's rounding; 127 and -127 become an
    infinity of the other sign, and 128 one infinity less another.
    """

    def pair(half: int) -> str:
        return f"0x{half:04X}{half:04X}"

    return (
        f"prmt.b32 c, {q}, {pair(0x6464)}, {selector}; mov.b32 k, {pair(0xE47F)}; add.f16x2 c, c, k; "
        f"mov.b32 k, {pair(0x600E)}; mul.f16x2 t, c, k; mov.b32 k, {pair(0x6002)}; mul.f16x2 u, c, k; "
        f"mov.b32 k, {pair(0x8001)}; fma.rn.f16x2 c, t, k, c; mov.b32 k, {pair(0x0001)}; fma.rn.f16x2 c, u, k, c; "
        f"mov.b32 {{l, h}}, c; cvt.f32.f16 {low}, l; cvt.f32.f16 {high}, h;"
    )


_BACK = "{ .reg .b32 c, t, u, k; .reg .b16 l, h; .reg .f32 f<4>;"
INT8_BACK = (
    f"{_BACK} {_from_bytes('$4', '0x4140', 'f0', 'f1')} {_from_bytes('$4', '0x4342', 'f2', 'f3')} "
    + " ".join(f"mul.f32 f{i}, f{i}, ${i + 5};" for i in range(4))
    + " ".join(f" mov.b32 ${i}, f{i};" for i in range(4))  # last: they may lie where an input does
    + " }"
)
INT8_BACK_ONE = f"{_BACK} {_from_bytes('$1', '0x4040', 'f0', 'f1')} mul.f32 $0, f0, $2; }}"


def _emit(ops: Any, asm: str, dtype: torch.dtype, constraints: str, *inputs: Any) -> Any:
    return ops.inline_asm_elementwise(*inputs, asm=asm, constraints=constraints, dtype=dtype, is_pure=True, pack=1)


def amax_bits(ops: Any, x: Any) -> Any:
    return _emit(ops, _BITS, torch.int32, "=r,f", ops.to_dtype(x, torch.float32))


def amax_word(ops: Any, x: Any) -> Any:
    return _emit(ops, _WORD, torch.int32, "=r,f", ops.to_dtype(x, torch.float32))


def amax_exponent(ops: Any, x: Any) -> Any:
    return _emit(ops, _EXPONENT, torch.int32, "=r,f", ops.to_dtype(x, torch.float32))


def to_float8(ops: Any, x: Any, bits: Any, dtype: torch.dtype, top: float, of: torch.dtype) -> Any:
    inverse = _emit(ops, _float8_inverse(top, of), torch.float32, "=f,r", bits)
    scaled = ops.mul(ops.to_dtype(x, torch.float32), inverse)
    if dtype is not torch.float8_e4m3fn:  # Triton's conversion to e4m3 takes infinity to the largest number by itself
        inf = torch.finfo(dtype).max
        scaled = ops.minimum(ops.maximum(scaled, ops.constant(-inf, torch.float32)), ops.constant(inf, torch.float32))
    return ops.to_dtype(scaled, dtype)


def from_float8(ops: Any, q: Any, bits: Any, dtype: torch.dtype, top: float, inf: float) -> Any:
    y = ops.to_dtype(q, torch.float32)
    return ops.to_dtype(_emit(ops, _float8_back(top, inf, dtype), torch.float32, "=f,f,r", y, bits), dtype)


def to_int8(ops: Any, x: Any, scale: Any, dtype: torch.dtype, power: bool) -> Any:
    scale = ops.to_dtype(scale, torch.int32)
    inverse = _emit(ops, _int8_inverse(dtype, power), torch.float32, "=f,r", scale)
    return TO_INT8(ops, ops.to_dtype(x, torch.float32), inverse)


def from_int8(ops: Any, q: Any, scale: Any, dtype: torch.dtype, power: bool) -> Any:
    scale = ops.to_dtype(scale, torch.int32)
    step = _emit(ops, _int8_step(dtype, power), torch.float32, "=f,r", scale)
    return ops.to_dtype(FROM_INT8(ops, q, step), dtype)


TO_INT8 = PackedAsm(torch.uint8, INT8_CODES, "=r,f,f,f,f,f,f,f,f", INT8_CODE, "=r,f,f")
FROM_INT8 = PackedAsm(torch.float32, INT8_BACK, "=f,=f,=f,=f,r,f,f,f,f", INT8_BACK_ONE, "=f,r,f")
