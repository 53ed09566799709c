"""Runs the PTX of `aot_hooks/library/loops/ptx.py` on the CPU: what its inline assembly computes, for many elements.

run(asm, outputs, *inputs)      32-bit registers $0, $1, ... as numpy arrays of any 32-bit dtype

Knows the instructions that stand there, and raises `KeyError` for others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def f32(x: Array) -> Array:
    return x.view(np.float32)


def bits(x: Any) -> Array:
    """As a result is stored: NaN as the hardware makes it."""
    x = np.asarray(x, np.float32)
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), x.view(np.uint32)).astype(np.uint32)


def s32(op: Callable[..., Any]) -> Callable[..., Array]:
    return lambda *a: np.asarray(op(*(x.view(np.int32) for x in a))).astype(np.int32).view(np.uint32)


def f16x2(op: Callable[..., Any]) -> Callable[..., Array]:
    """Each half by itself, in float64, in which products and sums of these are exact, then rounded once."""

    def both(*a: Array) -> Array:
        halves = [x.copy().view(np.float16).astype(np.float64) for x in a]
        return np.asarray(op(*halves)).astype(np.float16).view(np.uint32)

    return both


def prmt(a: Array, b: Array, selector: Array) -> Array:
    out = np.zeros_like(a)
    pair = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    for i in range(4):
        nibble = selector >> np.uint32(4 * i) & np.uint32(15)
        byte = (pair >> (np.uint64(8) * (nibble & np.uint32(7)))).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        out |= np.where(nibble & np.uint32(8), sign, byte).astype(np.uint32) << np.uint32(8 * i)
    return out


def lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    out = np.zeros_like(a)
    for i in range(8):
        term = np.full_like(a, 0xFFFFFFFF)
        for x, bit in ((a, 4), (b, 2), (c, 1)):
            term &= x if i & bit else ~x
        out |= np.where(table >> np.uint32(i) & np.uint32(1), term, np.uint32(0)).astype(np.uint32)
    return out


OPERATIONS: dict[str, Callable[..., Array]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "shr.s32": s32(lambda a, b: a >> b),
    "add.s32": s32(lambda a, b: a + b),
    "sub.s32": s32(lambda a, b: a - b),
    "max.s32": s32(np.maximum),
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "add.f16x2": f16x2(lambda a, b: a + b),
    "mul.f16x2": f16x2(lambda a, b: a * b),
    "fma.rn.f16x2": f16x2(lambda a, b, c: a * b + c),
    "fma.rn.f32": lambda a, b, c: bits(f32(a).astype(np.float64) * f32(b).astype(np.float64) + f32(c)),
    "mul.f32": lambda a, b: bits(f32(a) * f32(b)),
    "max.f32": lambda a, b: bits(np.fmax(f32(a), f32(b))),
    "min.f32": lambda a, b: bits(np.fmin(f32(a), f32(b))),
    "abs.f32": lambda a: a & np.uint32(0x7FFFFFFF),
    "setp.eq.f32": lambda a, b: (f32(a) == f32(b)).astype(np.uint32),
    "selp.f32": lambda a, b, p: np.where(p, a, b),
    "div.full.f32": lambda a, b: bits(f32(a) / f32(b)),
    "cvt.f32.f16": lambda a: bits(a.astype(np.uint16).view(np.float16)),
}


def run(asm: str, outputs: int, *inputs: Array) -> list[Array]:
    count = len(inputs[0])
    registers = {f"${outputs + i}": np.ascontiguousarray(x).view(np.uint32).copy() for i, x in enumerate(inputs)}

    def value(name: str) -> Array:
        if name.startswith("0f"):
            return np.full(count, int(name[2:], 16), np.uint32)
        if re.fullmatch(r"-?\d+|0x[0-9A-Fa-f]+", name):
            return np.full(count, int(name, 0) & 0xFFFFFFFF, np.uint32)
        return registers[name]

    statements = asm.strip()[1:-1].split(";")
    with np.errstate(all="ignore"):
        for statement in (s.strip() for s in statements):
            if not statement or statement.startswith(".reg"):
                continue
            name, rest = statement.split(" ", 1)
            if halves := re.fullmatch(r"\{(\w+), (\w+)\}, (\w+)", rest):
                low, high, source = halves.groups()
                registers[low], registers[high] = value(source) & np.uint32(0xFFFF), value(source) >> np.uint32(16)
                continue
            target, *operands = (part.strip() for part in rest.split(","))
            registers[target] = OPERATIONS[name](*map(value, operands))
    return [registers[f"${i}"] for i in range(outputs)]
