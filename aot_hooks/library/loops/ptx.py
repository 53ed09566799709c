"""The operators of operators.py in PTX, for NVIDIA GPUs. Each step is one assembly operation in Inductor's loop.

In Inductor's own language a step takes ten operations, and Inductor handles each several times: types, ranges, common
subexpressions, printing. With one operation a step, generating code for four Llama blocks with float8 took a quarter
fewer Python calls over stock. Each function has the name of the operator in operators.py that it compiles.
"""

from __future__ import annotations

import functools
import itertools
import struct
from typing import Any

import torch

from .. import scales
from ..scales import EXPONENT_MASK, EXPONENT_STEP, LOW_HALF, ROUND_UP, TOP_INT8

MAGNITUDE_MASK = 0x7FFFFFFF
CODE_OF_ZERO = 127  # codes are stored with 127 added; 0, 254 and 255 stand for infinity, -infinity and NaN

_Instructions = tuple[str, ...]


def _block(*instructions: str) -> str:
    return "{ " + " ".join(f"{each};" for each in instructions) + " }"


def _f32(x: float) -> str:
    """A float32 as PTX writes it."""
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


def _f16x2(x: float) -> str:
    """The bits of a float16, twice in a register."""
    (bits,) = struct.unpack("<H", struct.pack("<e", x))
    return f"0x{bits:04X}{bits:04X}"


def _emit(ops: Any, asm: str, dtype: torch.dtype, constraints: str, *inputs: Any) -> Any:
    return ops.inline_asm_elementwise(*inputs, asm=asm, constraints=constraints, dtype=dtype, is_pure=True, pack=1)


_MAGNITUDE = (".reg .b32 bits", "mov.b32 bits, $1", f"and.b32 bits, bits, {MAGNITUDE_MASK}")


def _amax(asm: str, ops: Any, x: Any) -> Any:
    return _emit(ops, asm, torch.int32, "=r,f", ops.to_dtype(x, torch.float32))


amax_bits = functools.partial(_amax, _block(*_MAGNITUDE, f"add.s32 $0, bits, {EXPONENT_STEP}"))
amax_word = functools.partial(
    _amax, _block(*_MAGNITUDE, f"add.s32 bits, bits, {EXPONENT_STEP}", "shr.s32 $0, bits, 16")
)
amax_exponent = functools.partial(
    _amax,
    _block(
        ".reg .b32 bits",
        "mov.b32 bits, $1",
        "shl.b32 bits, bits, 1",  # without the sign: the exponent is in the highest byte
        f"add.s32 bits, bits, {EXPONENT_STEP << 1}",  # the exponent of an infinity or NaN becomes 0
        "shr.u32 bits, bits, 17",  # exponent and 7 bits of fraction
        f"add.s32 bits, bits, {ROUND_UP - 128}",  # 128: the exponent step that was added
        "shr.s32 $0, bits, 7",
    ),
)


def _amax_of_word(dtype: torch.dtype) -> _Instructions:
    """Sets register `amax` to a bound of the largest finite magnitude, from its upper 16 bits in `$1`."""
    full, largest = scales.full_word(dtype), torch.finfo(dtype).max
    replace_full = (f"setp.eq.f32 full, amax, {_f32(full)}", f"selp.f32 amax, {_f32(largest)}, amax, full")
    return (
        ".reg .b32 bits",
        ".reg .f32 amax",
        ".reg .pred full",
        "shl.b32 bits, $1, 16",
        f"or.b32 bits, bits, {LOW_HALF}",
        f"max.s32 bits, bits, {EXPONENT_STEP}",
        f"sub.s32 bits, bits, {EXPONENT_STEP}",
        "mov.b32 amax, bits",
        *(replace_full if full != largest else ()),
        f"max.f32 amax, amax, {_f32(TOP_INT8 * scales.smallest_scale(dtype))}",
    )


def _scale_of_exponent(dtype: torch.dtype) -> _Instructions:
    """Sets register `scale` to the bits of the scale, from the exponent in `$1`."""
    return (
        ".reg .b32 scale",
        f"max.s32 scale, $1, {scales.smallest_exponent(dtype)}",
        f"sub.s32 scale, scale, {scales.TOP_EXPONENT}",
        "shl.b32 scale, scale, 23",
    )


def _scale_of_bits(bits: str, top: float, dtype: torch.dtype) -> _Instructions:
    """Sets register `scale` to the bits of the row's scale, from its `amax_bits`; x / scale is then at most `top`."""
    least, add = scales.rounding_up(top, scales.smallest_scale(dtype, top))
    return (
        ".reg .s32 scale",
        f"max.s32 scale, {bits}, {least + EXPONENT_STEP}",
        f"add.s32 scale, scale, {add - EXPONENT_STEP}",
        f"and.b32 scale, scale, {EXPONENT_MASK}",
    )


_INVERT_SCALE = (f"sub.s32 scale, {scales.RECIPROCAL}, scale", "mov.b32 $0, scale")


@functools.cache
def _int8_inverse(dtype: torch.dtype, power: bool) -> str:
    if power:
        return _block(*_scale_of_exponent(dtype), *_INVERT_SCALE)
    return _block(*_amax_of_word(dtype), f"div.full.f32 $0, {_f32(TOP_INT8)}, amax")


@functools.cache
def _int8_step(dtype: torch.dtype, power: bool) -> str:
    """Sets `$0` to the step between two codes, from the stored scale in `$1`."""
    if not power:
        return _block(*_amax_of_word(dtype), f"mul.f32 $0, amax, {_f32(scales.STEP_INT8)}")
    top, instead = scales.top_power(dtype)
    return _block(
        *_scale_of_exponent(dtype),
        ".reg .f32 step",
        ".reg .pred is_top",
        "mov.b32 step, scale",
        f"setp.eq.f32 is_top, step, {_f32(top)}",
        f"selp.f32 $0, {_f32(instead)}, step, is_top",
    )


@functools.cache
def _float8_inverse(top: float, dtype: torch.dtype) -> str:
    return _block(*_scale_of_bits("$1", top, dtype), *_INVERT_SCALE)


@functools.cache
def _float8_value(top: float, inf: float, dtype: torch.dtype) -> str:
    """Sets `$0` to the number of the code in `$1`, from `amax_bits` in `$2`; codes of magnitude `inf` are infinite."""
    return _block(
        *_scale_of_bits("$2", top, dtype),
        ".reg .f32 factor, size",
        ".reg .pred is_inf",
        "mov.b32 factor, scale",
        f"min.f32 factor, factor, {_f32(scales.largest_scale(dtype, top))}",
        "abs.f32 size, $1",
        f"setp.eq.f32 is_inf, size, {_f32(inf)}",
        f"selp.f32 factor, {_f32(float('inf'))}, factor, is_inf",
        "mul.f32 $0, $1, factor",
    )


# A sum with this ends in round(x / scale) + 127. In its last byte infinities are 0, and the hardware's NaN is 255.
_ROUND_TO_CODE = _f32(scales.ROUND_TO_INTEGER + CODE_OF_ZERO)
_LOP3_OR_AND = 0xF8  # a | (b & c)

_TO_INT8 = _block(
    ".reg .f32 sum",
    ".reg .b32 sign, code",
    f"fma.rn.f32 sum, $1, $2, {_ROUND_TO_CODE}",
    "prmt.b32 code, sum, 0, 0x4440",
    "prmt.b32 sign, sum, 0, 0x444B",
    f"lop3.b32 $0, code, sign, 0xFE, 0x{_LOP3_OR_AND:02X}",
)


def _times_step() -> str:
    """Sets `$0` to the code in `$1`, times the step in `$2`.

    The code less 127, as float16, is -127 to 128. Of these, -127, 127 and 128 overflow in `over127`, and 128 alone in
    `over128`. Both products are added back, times -2**-24 and 2**-24. A finite one is lost in the rounding. An infinite
    one is not: +-127 become an infinity of the other sign, and 128 becomes NaN.
    """
    steps = (
        ("add.f16x2 codes, codes, factor", -1024 - CODE_OF_ZERO),
        ("mul.f16x2 over127, codes, factor", 519),
        ("mul.f16x2 over128, codes, factor", 513),
        ("fma.rn.f16x2 codes, over127, factor, codes", -(2.0**-24)),
        ("fma.rn.f16x2 codes, over128, factor, codes", 2.0**-24),
    )
    return _block(
        ".reg .b32 codes, over127, over128, factor",
        ".reg .b16 low, high",
        ".reg .f32 value",
        "prmt.b32 codes, $1, 0x64646464, 0x4040",  # 0x64 before a byte is 1024 + the byte
        *itertools.chain(*((f"mov.b32 factor, {_f16x2(factor)}", step) for step, factor in steps)),
        "mov.b32 {low, high}, codes",
        "cvt.f32.f16 value, low",
        "mul.f32 $0, value, $2",
    )


_FROM_INT8 = _times_step()


def to_float8(ops: Any, x: Any, bits: Any, fmt: torch.dtype, top: float, dtype: torch.dtype) -> Any:
    inverse = _emit(ops, _float8_inverse(top, dtype), torch.float32, "=f,r", bits)
    scaled = ops.mul(ops.to_dtype(x, torch.float32), inverse)
    if fmt is not torch.float8_e4m3fn:  # Triton's conversion to e4m3 takes infinity to the largest number by itself
        inf = torch.finfo(fmt).max
        scaled = ops.minimum(ops.maximum(scaled, ops.constant(-inf, torch.float32)), ops.constant(inf, torch.float32))
    return ops.to_dtype(scaled, fmt)


def from_float8(ops: Any, q: Any, bits: Any, dtype: torch.dtype, top: float, inf: float) -> Any:
    y = ops.to_dtype(q, torch.float32)
    return ops.to_dtype(_emit(ops, _float8_value(top, inf, dtype), torch.float32, "=f,f,r", y, bits), dtype)


def to_int8(ops: Any, x: Any, scale: Any, dtype: torch.dtype, power: bool) -> Any:
    scale = ops.to_dtype(scale, torch.int32)
    inverse = _emit(ops, _int8_inverse(dtype, power), torch.float32, "=f,r", scale)
    codes = _emit(ops, _TO_INT8, torch.int32, "=r,f,f", ops.to_dtype(x, torch.float32), inverse)
    return ops.to_dtype(codes, torch.uint8)


def from_int8(ops: Any, q: Any, scale: Any, dtype: torch.dtype, power: bool) -> Any:
    scale = ops.to_dtype(scale, torch.int32)
    step = _emit(ops, _int8_step(dtype, power), torch.float32, "=f,r", scale)
    y = _emit(ops, _FROM_INT8, torch.float32, "=f,r,f", ops.to_dtype(q, torch.int32), step)
    return ops.to_dtype(y, dtype)
