"""What the hooks of this library compute, each as one Triton kernel, for where no compiler fuses them.

      x [..., m], contiguous: rows of ceil(m / size) groups, each with a scale of its own

      [ g0 | g1 | g2 . ][ g0 | g1 | g2 . ]   a program takes a tile of `P` groups, `W` lanes each (a power of two):
      `---- row 0 -----'`---- row 1 -----'   reads it once, finds the scales, writes codes and scales

A group is a block (128, 32) or a row. Rows longer than fits in registers are read twice. The arithmetic is that of
integer.py and float8.py, operation by operation: the same bits come out, so fused multiply-adds are off. Rounding to an
integer is adding 1.5 * 2**23, whose last bits then are that integer. Random bits are 16 a value, so the expected value
is off by at most 2**-16 of a step, from a hash of seed and position, two multiplications as in Wellons' lowbias32:
Philox costs more than the memory traffic that the kernel is there to save.

Arithmetic, not bytes, is what limits a kernel at 4 bits. A tile without infinities and NaN, and all are but a few,
takes a branch that neither looks for them nor clamps: the scale is large enough that no finite value leaves the codes.
Such a program is one warp, which finds out without a barrier. Codes, words of codes and random bits are laid out so
that each thread makes and stores those of the 16 bytes that it has loaded.

Nothing here synchronizes or reads a value on the host, so all of it can be captured in CUDA graphs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import SMALLEST_NORMAL

__all__ = [
    "pack_bits",
    "pack_float8",
    "pack_int4",
    "pack_int8",
    "unpack_bits",
    "unpack_float8",
    "unpack_int4",
    "unpack_int8",
]

_LANES = 4096  # of a tile; 16 values a thread with 8 warps
_LONGEST = 16384  # a group up to this length is held in registers
_FORMATS = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
_SLACK = 1 + 2.0**-20
# format -> what the largest value is divided by, and the code of infinity
_TOP = {torch.int8: (126.0 / _SLACK, 127.0), torch.float8_e4m3fn: (416.0, 448.0), torch.float8_e5m2: (49152.0, 57344.0)}


@triton.jit
def _nan_or_larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x, axis: tl.constexpr):
    """NaN if there is one."""
    return tl.reduce(x, axis, _nan_or_larger)


@triton.jit
def _random(seed_ptr, P: tl.constexpr, W: tl.constexpr, K: tl.constexpr):
    """2**23 and 16 random bits, as float32 [P, W / K, 2, K / 2]: each `K` neighbours have a hash of seed and place, of
    which K / 2 multiples have two values each, their halves."""
    seed = tl.load(seed_ptr)
    first = tl.program_id(0).to(tl.uint32) * (P * (W // K))
    place = first + tl.reshape(tl.arange(0, P * (W // K)), [P, W // K, 1, 1]).to(tl.uint32)
    h = (place ^ seed.to(tl.uint32)) * 0x7FEB352D
    h = (h ^ (h >> 15) ^ (seed >> 32).to(tl.uint32)) * 0x846CA68B
    h = h ^ (h >> 16)
    odd = tl.arange(0, K // 2).to(tl.uint32) * 0x9E3779B8 + 1
    words = (h * odd[None, None, None, :]) ^ (h >> 16)
    half = (16 * tl.arange(0, 2)).to(tl.uint32)
    return (((words >> half[None, None, :, None]) & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _scale(x, per_top, smallest):
    """By the largest finite value of each group."""
    a = tl.abs(x)
    amax = tl.max(tl.where(a < float("inf"), a, 0.0), 1)
    return tl.maximum(amax * per_top, smallest)


@triton.jit
def _encode(x, inverse, noise, limit, FORMAT: tl.constexpr):
    """float32 to codes; `limit` is the code of infinity."""
    y = x * inverse + noise if FORMAT == 0 else x * inverse
    nan = x != x
    y = tl.minimum(tl.maximum(y, -limit), limit)
    if FORMAT == 0:
        q = (tl.where(nan, -128.0, y) + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    elif FORMAT == 1:
        q = tl.where(nan, x, y).to(tl.float8e4nv)
    else:
        q = tl.where(nan, x, y).to(tl.float8e5)
    return q


@triton.jit
def _decode(q, scale, largest, limit, FORMAT: tl.constexpr):
    code = q.to(tl.float32)
    y = code * scale
    if FORMAT == 0:
        special = tl.where(code < -127.0, float("nan"), code * float("inf"))
        y = tl.where(tl.abs(code) > 126.0, special, tl.minimum(tl.maximum(y, -largest), largest))
    else:
        y = tl.where(tl.abs(code) == limit, code * float("inf"), y)
    return y


@triton.jit
def _groups(groups, count, size, length, P: tl.constexpr):
    """The `P` groups of this program: numbers, rows, first columns, and lengths, 0 where there is none."""
    g = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    row = g // count
    column = ((g - row * count) * size).to(tl.int32)
    left = tl.minimum(length - column, size)
    return g, row, column, tl.where(g < groups, left, 0)


@triton.jit
def _mask(lane, left, EVEN: tl.constexpr):
    """EVEN: groups are as long as the tile is wide, or absent, so a whole group is masked and not each of its lanes."""
    if EVEN:
        mask = (left > 0)[:, None]
    else:
        mask = lane[None, :] < left[:, None]
    return mask


@triton.jit
def _pack8(
    x_ptr, q_ptr, scale_ptr, seed_ptr, groups, count, size, length, per_top, limit, smallest,
    P: tl.constexpr, W: tl.constexpr, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    V: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth  # values that a thread loads at once
    g, row, column, left = _groups(groups, count, size, length, P)
    lane = tl.arange(0, W)
    if EVEN:
        at = tl.program_id(0).to(tl.int64) * (P * W)
        places = tl.arange(0, P)[:, None] * W + lane[None, :]
    else:
        at = tl.program_id(0).to(tl.int64) * 0
        places = (row * length + column)[:, None] + lane[None, :]
    mask = _mask(lane, left, EVEN)
    x = tl.load(x_ptr + at + places, mask, other=0.0).to(tl.float32)
    if STOCHASTIC:
        noise = tl.reshape(tl.fma(_random(seed_ptr, P, W, V), 1.0 / 65536, -128.5), [P, W])
    else:
        noise = 0.0
    # No branch for float8: of codes that leave one, Triton 3.6 gave each 16th another one's bits on an H200.
    if FORMAT == 0:
        largest = _largest(tl.abs(x), 1)
        if _largest(largest, 0) < float("inf"):
            scale = tl.maximum(largest * per_top, smallest)
            inverse = tl.div_rn(1.0, scale)[:, None]
            y = tl.fma(x, inverse, noise) if STOCHASTIC else x * inverse
            q = (y + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
        else:
            scale = _scale(x, per_top, smallest)
            q = _encode(x, tl.div_rn(1.0, scale)[:, None], noise, limit, FORMAT)
        if EVEN:
            places = tl.multiple_of(places, [1, V])  # a thread stores the codes of what it has loaded
    else:
        scale = _scale(x, per_top, smallest)
        q = _encode(x, tl.div_rn(1.0, scale)[:, None], noise, limit, FORMAT)
    tl.store(q_ptr + at + places, q, mask)
    tl.store(scale_ptr + g, scale, left > 0)


@triton.jit
def _pack8_long(
    x_ptr, q_ptr, scale_ptr, length, per_top, limit, smallest,
    W: tl.constexpr, CHUNKS: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """A row a program, read twice."""
    g = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, W)
    amax = tl.zeros([W], tl.float32)
    for i in range(CHUNKS):
        start = i * W
        x = tl.load(x_ptr + g * length + start + lane, start + lane < length, other=0.0).to(tl.float32)
        a = tl.abs(x)
        amax = tl.maximum(amax, tl.where(a < float("inf"), a, 0.0))
    scale = tl.maximum(tl.max(amax, 0) * per_top, smallest)
    inverse = tl.div_rn(1.0, scale)
    for i in range(CHUNKS):
        start = i * W
        mask = start + lane < length
        x = tl.load(x_ptr + g * length + start + lane, mask, other=0.0).to(tl.float32)
        tl.store(q_ptr + g * length + start + lane, _encode(x, inverse, 0.0, limit, FORMAT), mask)
    tl.store(scale_ptr + g, scale)


@triton.jit
def _unpack8(
    q_ptr, scale_ptr, y_ptr, groups, count, size, length, largest, limit,
    P: tl.constexpr, W: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    g, row, column, left = _groups(groups, count, size, length, P)
    lane = tl.program_id(1) * W + tl.arange(0, W)
    offsets = (row * length + column)[:, None] + lane[None, :]
    mask = _mask(lane, left, EVEN)
    scale = tl.load(scale_ptr + g, left > 0, other=0.0)
    q = tl.load(q_ptr + offsets, mask)
    y = _decode(q, scale[:, None], largest, limit, FORMAT)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def _places(groups, count, length, P: tl.constexpr, W: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    """The `P` groups of this program, up to `W` values each: numbers, which there are, where values stand and which
    there are, where words of `K` codes stand and which there are. Places count from a scalar, which stands before them:
    in 32 bits if EVEN, when rows are as long as the tile is wide."""
    start = tl.program_id(0).to(tl.int64) * P
    n = tl.arange(0, P)
    lane = tl.arange(0, W)
    i = tl.arange(0, W // K)
    if EVEN:
        there = n < tl.minimum(groups - start, P).to(tl.int32)
        at, at_words = start * W, start * (W // K)
        places, words = n[:, None] * W + lane[None, :], n[:, None] * (W // K) + i[None, :]
        mask = there[:, None]
        word_mask = there[:, None]
    else:
        g = start + n
        row = g // count
        column = ((g - row * count) * W).to(tl.int32)
        left = tl.where(g < groups, tl.minimum(length - column, W), 0)
        there = left > 0
        at, at_words = start * 0, start * 0
        places = (row * length + column)[:, None] + lane[None, :]
        words = (row * ((length + K - 1) // K) + column // K)[:, None] + i[None, :]
        mask = lane[None, :] < left[:, None]
        word_mask = (i * K)[None, :] < left[:, None]
    # One word a thread, that of its values: if it had two to store at once, they would come from other threads
    words = tl.multiple_of(words, [1, 1])
    return start + n, there, at, places, mask, at_words, words, word_mask


@triton.jit
def _up_to_16_bits(scale):
    """The next bfloat16, as float32."""
    return ((scale.to(tl.int32, bitcast=True) + 0xFFFF) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _word(bits, P: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """`K` codes a word, from float32 bits of 1.5 * 2**23 + 8 + code: the bits above a code are the same in all, and
    leave the sum by a subtraction."""
    shift = 4 * tl.arange(0, K)
    return tl.sum(tl.reshape(bits, [P, N, K]) << shift[None, None, :], 2) - 0x3F400000


@triton.jit
def _pack4(
    x_ptr, q_ptr, scale_ptr, seed_ptr, groups, count, length, per_7, per_6, smallest,
    P: tl.constexpr, W: tl.constexpr, K: tl.constexpr, STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    g, there, at, places, mask, at_words, words, word_mask = _places(groups, count, length, P, W, K, EVEN)
    x = tl.load(x_ptr + at + places, mask, other=0.0).to(tl.float32)
    random = _random(seed_ptr, P, W, K) if STOCHASTIC else 0.0
    largest = _largest(tl.abs(x), 1)
    plain = largest < float("inf")
    if _largest(largest, 0) < float("inf"):
        scale = _up_to_16_bits(tl.maximum(largest * per_7, smallest))
        inverse = tl.div_rn(1.0, scale)
        if STOCHASTIC:
            # code + 8 and a fraction of 16 bits, to which as many at random are added; then without it, two a word
            # (not x * (inverse * 65536): that factor may be infinite, where x is zero)
            fixed = tl.fma(x * inverse[:, None], 65536.0, 4194304.0 + 8 * 65536.0)
            bits = (tl.reshape(fixed, [P, W // K, 2, K // 2]) + random).to(tl.int32, bitcast=True)
            half = tl.arange(0, 2)[None, None, :, None]
            pair = tl.sum(tl.where(half == 0, (bits >> 16) & 0xFFFF, bits & -65536), 2)
            shift = 4 * tl.arange(0, K // 2)
            word = tl.sum(pair << shift[None, None, :], 2) - (0x44443F40 if K == 8 else -0x00BB00C0)
            if K == 4:
                word = (word & 0xFF) | ((word >> 8) & 0xFF00)
            elif K == 2:
                word = (word & 0xF) | ((word >> 12) & 0xF0)
        else:
            code = x * inverse[:, None] + 12582920.0
            word = _word(code.to(tl.int32, bitcast=True), P, W // K, K)
    else:
        a = tl.abs(x)
        amax = tl.max(tl.where(a < float("inf"), a, 0.0), 1)
        scale = _up_to_16_bits(tl.maximum(tl.where(plain, amax * per_7, amax * per_6), smallest))
        y = x * tl.div_rn(1.0, scale)[:, None]
        if STOCHASTIC:
            y += tl.reshape(tl.fma(random, 1.0 / 65536, -128.5), [P, W])
        y = tl.where(x != x, -8.0, tl.minimum(tl.maximum(y, -7.0), 7.0)) + 12582920.0
        word = _word(y.to(tl.int32, bitcast=True), P, W // K, K)
    tl.store(q_ptr + at_words + words, word.to(q_ptr.dtype.element_ty), word_mask)
    tl.store(scale_ptr + g, tl.where(plain, scale, -scale).to(tl.bfloat16), there)


@triton.jit
def _unpack4(
    q_ptr, scale_ptr, y_ptr, groups, count, length, largest,
    P: tl.constexpr, W: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    g, there, at, places, mask, at_words, words, word_mask = _places(groups, count, length, P, W, K, EVEN)
    word = tl.load(q_ptr + at_words + words, word_mask, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + g, there, other=0.0).to(tl.float32)
    # A code stays at its bits, 0, 4, 8 or 12 of 2**23: times a power of two, by which its step is divided
    k = tl.arange(0, K)
    place = 4 * (k % 4)
    bits = ((word[:, :, None] >> (16 * (k // 4))[None, None, :]) & (15 << place)[None, None, :]) | 0x4B000000
    zero = ((8 << place) | 0x4B000000).to(tl.float32, bitcast=True)
    part = ((127 - place) << 23).to(tl.float32, bitcast=True)
    shifted = bits.to(tl.float32, bitcast=True) - zero[None, None, :]
    # a scale below 1 / 8 of the largest number leaves its range with no code; a negative one is larger as bits
    last = tl.max(scale.to(tl.uint32, bitcast=True), 0)
    if (last < 0x80000000) & (last.to(tl.float32, bitcast=True) < largest * 0.125):
        y = tl.reshape(shifted * (scale[:, None, None] * part[None, None, :]), [P, W])
    else:
        code = tl.reshape(shifted * part[None, None, :], [P, W])
        step = scale[:, None]
        y = tl.minimum(tl.maximum(code * tl.abs(step), -largest), largest)
        special = tl.where(code < -7.0, float("nan"), code * float("inf"))
        y = tl.where((step < 0.0) & (tl.abs(code) > 6.0), special, y)
    tl.store(y_ptr + at + places, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def _pack1(x_ptr, q_ptr, length, W: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * W + tl.arange(0, W)
    place = tl.arange(0, 8)
    offsets = i[:, None] * 8 + place[None, :]
    bits = tl.load(x_ptr + offsets, offsets < length, other=0).to(tl.int32)
    tl.store(q_ptr + i, tl.sum(bits << place[None, :], 1).to(tl.uint8), i * 8 < length)


@triton.jit
def _unpack1(q_ptr, y_ptr, length, W: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * W + tl.arange(0, W)
    place = tl.arange(0, 8)
    offsets = i[:, None] * 8 + place[None, :]
    byte = tl.load(q_ptr + i, i * 8 < length, other=0).to(tl.int32)
    tl.store(y_ptr + offsets, ((byte[:, None] >> place[None, :]) & 1).to(tl.uint8), offsets < length)


@triton.jit
def _unpack1_words(q_ptr, y_ptr, length, W: tl.constexpr):
    """Four bools a word: multiplied, the four bits of half a byte land at the lowest bits of four bytes."""
    i = tl.program_id(0).to(tl.int64) * W + tl.arange(0, W)
    half = tl.arange(0, 2)
    offsets = i[:, None] * 2 + half[None, :]
    byte = tl.load(q_ptr + i, i * 2 < length, other=0).to(tl.int32)
    words = (((byte[:, None] >> (4 * half)[None, :]) & 15) * 0x00204081) & 0x01010101
    tl.store(y_ptr + offsets, words, offsets < length)


def _tile(groups: int, size: int) -> tuple[int, int, int]:
    """Groups a program, lanes a group, warps."""
    lanes = triton.next_power_of_2(size)
    per_program = max(1, min(_LANES // lanes, triton.next_power_of_2(groups)))
    return per_program, lanes, min(max(per_program * lanes // 512, 1), 16)


def _rows(length: int, size: int) -> tuple[int, int]:
    """Length and groups of a row; rows of whole groups may as well be taken for as many rows of one group, which spares
    the kernel a division."""
    return (size, 1) if length % size == 0 else (length, triton.cdiv(length, size))


def _small_tile(groups: int, size: int) -> tuple[int, int, int]:
    """The same for one warp: whether there is an infinity is then found without a barrier."""
    lanes = triton.next_power_of_2(size)
    return max(1, min(1024 // lanes, triton.next_power_of_2(groups))), lanes, 1


def _pack(
    x: torch.Tensor, size: int, dtype: torch.dtype, seed: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    q = torch.empty_like(x, dtype=dtype)
    scale = torch.empty((*x.shape[:-1], triton.cdiv(x.shape[-1], size)), dtype=torch.float32, device=x.device)
    top, limit = _TOP[dtype]
    groups = scale.numel()
    length, count = _rows(x.shape[-1], size)
    with torch.cuda.device_of(x):
        if size > _LONGEST:
            _pack8_long[(groups,)](
                x, q, scale, length, 1.0 / top, limit, SMALLEST_NORMAL,
                W=_LANES, CHUNKS=triton.cdiv(length, _LANES), FORMAT=_FORMATS[dtype],
                num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
        else:
            p, w, warps = (_small_tile if dtype == torch.int8 else _tile)(groups, size)
            _pack8[(triton.cdiv(groups, p),)](
                x, q, scale, scale if seed is None else seed, groups, count, size, length, 1.0 / top, limit,
                SMALLEST_NORMAL, P=p, W=w, FORMAT=_FORMATS[dtype], STOCHASTIC=seed is not None,
                EVEN=length == w, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
    return q, scale


def _unpack(q: torch.Tensor, scale: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty_like(q, dtype=dtype)
    groups = scale.numel()
    length, count = _rows(q.shape[-1], size)
    p, w, warps = _tile(groups, min(size, _LANES))
    with torch.cuda.device_of(q):
        _unpack8[(triton.cdiv(groups, p), triton.cdiv(min(size, length), w))](
            q, scale, y, groups, count, size, length, torch.finfo(dtype).max, _TOP[q.dtype][1],
            P=p, W=w, FORMAT=_FORMATS[q.dtype], EVEN=length == size and size % w == 0,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def _codes(q: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """4-bit codes as they are read and written: those of 16 bytes of values in a word, which a thread has, or 2 a byte
    where rows are no whole words."""
    word, k = (torch.int32, 8) if dtype.itemsize == 2 else (torch.int16, 4)
    if q.shape[-1] % word.itemsize == 0 and q.storage_offset() % word.itemsize == 0:
        return q.view(word), k
    return q, 2


def pack_int8(x: torch.Tensor, block: int, seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`integer.pack_int8`; stochastic with a `seed`, int64[1]."""
    return _pack(x, block, torch.int8, seed)


def unpack_int8(q: torch.Tensor, scale: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    """`integer.unpack_int8`."""
    return _unpack(q, scale, block, dtype)


def pack_float8(x: torch.Tensor, block: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` [..., m] to (float8[..., m], float32[..., ceil(m / block)]); a block of 0 is the row."""
    return _pack(x, block or x.shape[-1], dtype, None)


def unpack_float8(q: torch.Tensor, scale: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    """What `pack_float8` was given, in `dtype`."""
    return _unpack(q, scale, block or q.shape[-1], dtype)


def pack_int4(x: torch.Tensor, block: int, seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`integer.pack_int4`; stochastic with a `seed`, int64[1]."""
    x = x.contiguous()
    q = torch.empty((*x.shape[:-1], (x.shape[-1] + 1) // 2), dtype=torch.uint8, device=x.device)
    scale = torch.empty((*x.shape[:-1], triton.cdiv(x.shape[-1], block)), dtype=torch.bfloat16, device=x.device)
    words, k = _codes(q, x.dtype)
    length, count = _rows(x.shape[-1], block)
    p, w, warps = _small_tile(scale.numel(), block)
    with torch.cuda.device_of(x):
        _pack4[(triton.cdiv(scale.numel(), p),)](
            x, words, scale, scale if seed is None else seed, scale.numel(), count, length, _SLACK / 7, _SLACK / 6,
            SMALLEST_NORMAL, P=p, W=w, K=k, STOCHASTIC=seed is not None, EVEN=length == w,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return q, scale


def unpack_int4(q: torch.Tensor, scale: torch.Tensor, length: int, block: int, dtype: torch.dtype) -> torch.Tensor:
    """`integer.unpack_int4`."""
    y = torch.empty((*q.shape[:-1], length), dtype=dtype, device=q.device)
    words, k = _codes(q, dtype)
    length, count = _rows(length, block)
    p, w, warps = _small_tile(scale.numel(), block)
    with torch.cuda.device_of(q):
        _unpack4[(triton.cdiv(scale.numel(), p),)](
            words, scale, y, scale.numel(), count, length, torch.finfo(dtype).max,
            P=p, W=w, K=k, EVEN=length == w, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return y


def pack_bits(x: torch.Tensor) -> torch.Tensor:
    """`bitmask.pack_bits`."""
    x = x.contiguous().view(torch.uint8)
    q = torch.empty(triton.cdiv(x.numel(), 8), dtype=torch.uint8, device=x.device)
    with torch.cuda.device_of(x):
        _pack1[(triton.cdiv(q.numel(), 512),)](x, q, x.numel(), W=512, num_warps=4)
    return q


def unpack_bits(q: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`bitmask.unpack_bits`."""
    y = torch.empty(shape, dtype=torch.bool, device=q.device)
    with torch.cuda.device_of(q):
        if y.numel() % 4 == 0 and y.numel() > 0:
            words = y.view(-1).view(torch.int32)
            _unpack1_words[(triton.cdiv(words.numel(), 2048),)](q, words, words.numel(), W=1024, num_warps=4)
            return y
        _unpack1[(triton.cdiv(q.numel(), 512),)](q, y.view(torch.uint8), y.numel(), W=512, num_warps=4)
    return y
