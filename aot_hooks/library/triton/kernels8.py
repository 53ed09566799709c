"""float8, int8 and bit masks as Triton kernels, one for each pack and unpack, where no compiler fuses the tensor code.

      x [..., m], contiguous: rows of ceil(m / size) groups, each with a scale of its own

      [ g0 | g1 | g2 . ][ g0 | g1 | g2 . ]   a program takes a tile of `P` groups, `W` lanes each (a power of two):
      `---- row 0 -----'`---- row 1 -----'   reads it once, finds the scales, writes codes and scales

A group is a block (128, 32) or a row. Rows that do not fit in registers are read twice. The arithmetic is that of
integer.py and float8.py, operation by operation, with fused multiply-adds off, so that the same bits come out.
A value is rounded by adding 1.5 * 2**23: the last bits of the sum are the integer.

Stochastic rounding takes 16 random bits a value, so the expected value is off by at most 2**-16 of a step. They come
from a hash of seed and position with two multiplications, as in Wellons' lowbias32. Philox would cost more than the
memory traffic that the kernel saves.

Nearly all int8 tiles hold no infinity or NaN. Such a tile takes a branch that neither replaces them nor clamps: the
scale is large enough that no finite value leaves the codes. Codes and random bits are laid out so that each thread
computes and stores those of the 16 bytes that it has loaded. Nothing here reads a value on the host, so CUDA graphs can
capture all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .. import scales
from ..scales import FLOAT8_RANGE, SMALLEST_NORMAL, TOP_INT8, TOP_POWER
from .ops import packed_like

_LANES = 4096  # of a tile; 16 values a thread with 8 warps
_LONGEST = 16384  # a group up to this length is held in registers
# format -> (what the largest value is divided by to give the scale, the code of infinity)
_RANGE = {torch.int8: (TOP_INT8 / scales.SLACK, 127.0), **FLOAT8_RANGE}
_EXPONENT_MASK = tl.constexpr(scales.EXPONENT_MASK)
_ROUND_TO_INTEGER = tl.constexpr(scales.ROUND_TO_INTEGER)


@triton.jit
def _nan_or_larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(x, axis: tl.constexpr):
    """The maximum along `axis`, NaN if there is one."""
    return tl.reduce(x, axis, _nan_or_larger)


@triton.jit
def hashes(seed_ptr, P: tl.constexpr, W: tl.constexpr, K: tl.constexpr):
    """32 random bits for each `K` neighbours, uint32 [P, W / K, 1, 1]: a hash of seed and position."""
    seed = tl.load(seed_ptr)
    first = tl.program_id(0).to(tl.uint32) * (P * (W // K))
    position = first + tl.reshape(tl.arange(0, P * (W // K)), [P, W // K, 1, 1]).to(tl.uint32)
    h = (position ^ seed.to(tl.uint32)) * 0x7FEB352D
    h = (h ^ (h >> 15) ^ (seed >> 32).to(tl.uint32)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def _noise(h, P: tl.constexpr, W: tl.constexpr, K: tl.constexpr):
    """Uniform random numbers in [-1/2, 1/2), float32 [P, W]. A hash gives K: two of 16 bits in each of K / 2 multiples.

    Call it right before they are used. Computed before the values are loaded, they fill the registers.
    """
    odd = tl.arange(0, K // 2).to(tl.uint32) * 0x9E3779B8 + 1
    words = (h * odd[None, None, None, :]) ^ (h >> 16)
    half = (16 * tl.arange(0, 2)).to(tl.uint32)
    bits = ((words >> half[None, None, :, None]) & 0xFFFF) | 0x4B000000  # the float32 2**23 + 16 bits
    return tl.reshape(tl.fma(bits.to(tl.float32, bitcast=True), 1.0 / 65536, -128.5), [P, W])


@triton.jit
def finite_magnitudes(x):
    """Magnitudes, with 0 for infinities and NaN."""
    a = tl.abs(x)
    return tl.where(a < float("inf"), a, 0.0)


@triton.jit
def _scale(amax, per_top, smallest, least, add, POWER: tl.constexpr):
    """The scale of each group, from its largest finite value: a power of two, or a bfloat16 that is rounded up."""
    if POWER:
        bits = tl.maximum(amax.to(tl.int32, bitcast=True), least) + add
        scale = (bits & _EXPONENT_MASK).to(tl.float32, bitcast=True)
    else:
        bits = tl.maximum(amax * per_top, smallest).to(tl.int32, bitcast=True) + 0xFFFF
        scale = (bits & -0x10000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _encode(x, inverse, noise, limit, DTYPE: tl.constexpr):
    """The codes of `x` in float32; `limit` is the code of infinity."""
    y = x * inverse + noise if DTYPE == tl.int8 else x * inverse
    nan = x != x
    y = tl.minimum(tl.maximum(y, -limit), limit)
    if DTYPE == tl.int8:
        q = (tl.where(nan, -128.0, y) + _ROUND_TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        q = tl.where(nan, x, y).to(DTYPE)
    return q


@triton.jit
def groups_of_program(groups, count, size, length, P: tl.constexpr):
    """The `P` groups of this program: numbers, rows, first columns, and lengths, which are 0 past the last group."""
    g = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    row = g // count
    column = ((g - row * count) * size).to(tl.int32)
    left = tl.minimum(length - column, size)
    return g, row, column, tl.where(g < groups, left, 0)


@triton.jit
def _pack8(
    x_ptr, q_ptr, scale_ptr, seed_ptr, groups, count, size, length, per_top, limit, smallest, least, add, largest_scale,
    P: tl.constexpr, W: tl.constexpr, POWER: tl.constexpr, STOCHASTIC: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    V: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth  # values that a thread loads at once
    g, row, column, left = groups_of_program(groups, count, size, length, P)
    lane = tl.arange(0, W)
    if EVEN:
        at = tl.program_id(0).to(tl.int64) * (P * W)
        places = tl.arange(0, P)[:, None] * W + lane[None, :]
    else:
        at = tl.program_id(0).to(tl.int64) * 0
        places = (row * length + column)[:, None] + lane[None, :]
    # With EVEN, a group is as long as the tile is wide or absent, so the mask is one value a group.
    mask = (left > 0)[:, None] if EVEN else lane[None, :] < left[:, None]
    x = tl.load(x_ptr + at + places, mask, other=0.0).to(tl.float32)
    h = hashes(seed_ptr, P, W, V) if STOCHASTIC else 0
    # No branch for float8: Triton 3.6 on an H200 gave each 16th code that leaves a branch another code's bits.
    largest = largest_of(tl.abs(x), 1) if DTYPE == tl.int8 else 0.0
    if largest_of(largest, 0) < float("inf") if DTYPE == tl.int8 else False:
        scale = _scale(largest, per_top, smallest, least, add, POWER)
        inverse = tl.div_rn(1.0, scale)[:, None]
        y = tl.fma(x, inverse, _noise(h, P, W, V)) if STOCHASTIC else x * inverse
        q = (y + _ROUND_TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        scale = _scale(tl.max(finite_magnitudes(x), 1), per_top, smallest, least, add, POWER)
        noise = _noise(h, P, W, V) if STOCHASTIC else 0.0
        q = _encode(x, tl.div_rn(1.0, scale)[:, None], noise, limit, DTYPE)
    if DTYPE != tl.int8:
        scale = tl.minimum(scale, largest_scale)
    elif EVEN:
        places = tl.multiple_of(places, [1, V])  # a thread stores the codes of the values that it has loaded
    tl.store(q_ptr + at + places, q, mask)
    if DTYPE == tl.int8 and POWER:
        scale = scale.to(tl.int32, bitcast=True) >> 23
    tl.store(scale_ptr + g, scale.to(scale_ptr.dtype.element_ty), left > 0)


@triton.jit
def _pack8_long(
    x_ptr, q_ptr, scale_ptr, length, per_top, limit, smallest, least, add, largest_scale,
    W: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Packs one row for each program, which reads it twice. Only float8 needs it: blocks of integers are shorter."""
    g = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, W)
    amax = tl.zeros([W], tl.float32)
    for i in range(CHUNKS):
        start = i * W
        x = tl.load(x_ptr + g * length + start + lane, start + lane < length, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, finite_magnitudes(x))
    scale = _scale(tl.max(amax, 0), per_top, smallest, least, add, True)
    inverse = tl.div_rn(1.0, scale)
    for i in range(CHUNKS):
        start = i * W
        mask = start + lane < length
        x = tl.load(x_ptr + g * length + start + lane, mask, other=0.0).to(tl.float32)
        tl.store(q_ptr + g * length + start + lane, _encode(x, inverse, 0.0, limit, q_ptr.dtype.element_ty), mask)
    tl.store(scale_ptr + g, tl.minimum(scale, largest_scale))


@triton.jit
def _unpack8(
    q_ptr, scale_ptr, y_ptr, groups, count, size, length, largest, limit,
    P: tl.constexpr, W: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    g, row, column, left = groups_of_program(groups, count, size, length, P)
    lane = tl.program_id(1) * W + tl.arange(0, W)
    offsets = (row * length + column)[:, None] + lane[None, :]
    mask = (left > 0)[:, None] if EVEN else lane[None, :] < left[:, None]
    scale = tl.load(scale_ptr + g, left > 0, other=0)
    if scale_ptr.dtype.element_ty == tl.uint8:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        scale = scale.to(tl.float32)
    code = tl.load(q_ptr + offsets, mask).to(tl.float32)
    y = code * scale[:, None]
    if q_ptr.dtype.element_ty == tl.int8:
        special = tl.where(code < -127.0, float("nan"), code * float("inf"))
        y = tl.where(tl.abs(code) > 126.0, special, tl.minimum(tl.maximum(y, -largest), largest))
    else:
        y = tl.where(tl.abs(code) == limit, code * float("inf"), y)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def _pack1(x_ptr, q_ptr, length, W: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * W + tl.arange(0, W)
    place = tl.arange(0, 8)
    offsets = i[:, None] * 8 + place[None, :]
    bits = tl.load(x_ptr + offsets, offsets < length, other=0).to(tl.int32)
    tl.store(q_ptr + i, tl.sum(bits << place[None, :], 1).to(tl.uint8), i * 8 < length)


@triton.jit
def _unpack1(q_ptr, y_ptr, length, W: tl.constexpr, N: tl.constexpr):
    """Unpacks each byte of `q` to N elements of `y`: 8 bools, or 2 words of four bools."""
    i = tl.program_id(0).to(tl.int64) * W + tl.arange(0, W)
    place = tl.arange(0, N)
    offsets = i[:, None] * N + place[None, :]
    byte = tl.load(q_ptr + i, i * N < length, other=0).to(tl.int32)
    if N == 8:
        y = (byte[:, None] >> place[None, :]) & 1
    else:  # the product spreads the four bits of half a byte to the lowest bits of four bytes
        y = (((byte[:, None] >> (4 * place)[None, :]) & 15) * 0x00204081) & 0x01010101
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), offsets < length)


def tiles(groups: int, length: int, size: int, lanes: int, *, one_warp: bool) -> tuple[int, int, int, int, int]:
    """Returns (groups in a row, length of a row, groups in a program, lanes of a group, warps).

    Rows of whole groups count as rows of one group each, which spares the kernel a division. One warp finds without a
    barrier whether the tile holds an infinity.
    """
    count, length = (1, size) if length % size == 0 else (triton.cdiv(length, size), length)
    w = triton.next_power_of_2(lanes)
    p = max(1, min((1024 if one_warp else _LANES) // w, triton.next_power_of_2(groups)))
    return count, length, p, w, 1 if one_warp else min(max(p * w // 512, 1), 16)


def _pack(
    x: torch.Tensor, block: int, dtype: torch.dtype, scale_dtype: torch.dtype, seed: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    x, size = x.contiguous(), block or x.shape[-1]
    q, scale = packed_like(x, x.shape[-1], dtype, size, scale_dtype)
    top, limit = (TOP_POWER, 127.0) if scale_dtype == torch.uint8 else _RANGE[dtype]
    smallest = scales.smallest_scale(x.dtype) if dtype == torch.int8 else SMALLEST_NORMAL
    limits = (1.0 / top, limit, smallest, *scales.rounding_up(top, smallest), scales.largest_scale(x.dtype, top))
    groups = scale.numel()
    count, length, p, w, warps = tiles(groups, x.shape[-1], size, size, one_warp=dtype == torch.int8)
    with torch.cuda.device_of(x):
        if size > _LONGEST:
            _pack8_long[(groups,)](
                x, q, scale, length, *limits, W=_LANES, CHUNKS=triton.cdiv(length, _LANES),
                num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
        else:
            _pack8[(triton.cdiv(groups, p),)](
                x, q, scale, scale if seed is None else seed, groups, count, size, length, *limits,
                P=p, W=w, POWER=scale_dtype != torch.bfloat16, STOCHASTIC=seed is not None, EVEN=length == w,
                num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
    return q, scale


def pack_int8(x: torch.Tensor, block: int, power: bool, seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`integer.pack_int8`; stochastic with a `seed`, int64[1]."""
    return _pack(x, block, torch.int8, torch.uint8 if power else torch.bfloat16, seed)


def pack_float8(x: torch.Tensor, block: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [..., m] to (float8[..., m], float32[..., ceil(m / block)]); a block of 0 is the row."""
    return _pack(x, block, dtype, torch.float32, None)


def unpack8(q: torch.Tensor, scale: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    """Undoes `pack_int8` or `pack_float8`, in `dtype`."""
    y, size = torch.empty_like(q, dtype=dtype), block or q.shape[-1]
    groups = scale.numel()
    count, length, p, w, warps = tiles(groups, q.shape[-1], size, min(size, _LANES), one_warp=False)
    with torch.cuda.device_of(q):
        _unpack8[(triton.cdiv(groups, p), triton.cdiv(min(size, length), w))](
            q, scale, y, groups, count, size, length, torch.finfo(dtype).max, _RANGE[q.dtype][1],
            P=p, W=w, EVEN=length == size and size % w == 0, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def pack_bits(x: torch.Tensor) -> torch.Tensor:
    """`bitmask.pack_bits`."""
    x = x.contiguous().view(torch.uint8)
    q = torch.empty(triton.cdiv(x.numel(), 8), dtype=torch.uint8, device=x.device)
    with torch.cuda.device_of(x):
        _pack1[(triton.cdiv(q.numel(), 512),)](x, q, x.numel(), W=512, num_warps=4)
    return q


def unpack_bits(q: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`bitmask.unpack_bits`."""
    y = torch.empty(shape, dtype=torch.bool, device=q.device)
    words = y.numel() % 4 == 0 and y.numel() > 0
    out, n, w = (y.view(-1).view(torch.int32), 2, 1024) if words else (y.view(torch.uint8), 8, 512)
    with torch.cuda.device_of(q):
        _unpack1[(triton.cdiv(out.numel(), n * w),)](q, out, out.numel(), W=w, N=n, num_warps=4)
    return y
