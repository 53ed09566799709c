"""The Triton kernels of int4: two codes a byte, a scale of 16 bits for each group.

      x [..., m] --_pack4--> words of K codes, low bits first, scale i16[..., ceil(m / W)] --_unpack4--> [..., m]

Tiles are those of int8, see kernels8.py. These kernels are limited by arithmetic, not by bytes, so no code is moved by
itself.
Packing sums whole float32 bit patterns, whose last bits are codes. The bits above sum to a constant, which it subtracts
from the word. Unpacking leaves a code's bits where they are in the word and reads them as a float32 that is too large
by a power of two. Stochastic rounding adds 12 random bits to 12 bits of fraction, for two values in a word at once. The
expected value is the packed one up to 2**-13 of a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..scales import ROUND_TO_INTEGER, SLACK, SMALLEST_NORMAL
from .kernels8 import groups_of_program, hashes, largest_of, tiles
from .ops import packed_like

_ROUND_TO_INTEGER = tl.constexpr(ROUND_TO_INTEGER)


@triton.jit
def _places(groups, count, length, P: tl.constexpr, W: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    """The `P` groups of this program, up to `W` values each, in words of `K` codes.

    Returns group numbers and their mask; for values, then for words: a scalar start, offsets from it, and their mask.
    EVEN means that rows are as long as the tile is wide. Offsets then have 32 bits.
    """
    g, row, column, left = groups_of_program(groups, count, W, length, P)
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
        there = left > 0
        at, at_words = start * 0, start * 0
        places = (row * length + column)[:, None] + lane[None, :]
        words = (row * ((length + K - 1) // K) + column // K)[:, None] + i[None, :]
        mask = lane[None, :] < left[:, None]
        word_mask = (i * K)[None, :] < left[:, None]
    # One word a thread, of its own values: Triton must not let it store two, whose values other threads hold
    words = tl.multiple_of(words, [1, 1])
    return g, there, at, places, mask, at_words, words, word_mask


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float_of_bits(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _step_of(span, smallest):
    """Returns the step's bits and its reciprocal: `span`, at least `smallest`, rounded up to 4 bits of fraction."""
    bits = (_bits(tl.maximum(span, smallest)) + 0x7FFFF) & -0x80000
    return bits, tl.div_rn(1.0, _float_of_bits(bits))


@triton.jit
def _with_special_values(x, span, below, per_6, smallest):
    """For groups with infinities or NaN: `x` with the numbers of their codes in their place; then for each group the
    reciprocal of the step, the zero and the scale."""
    a, plain = tl.abs(x), span < float("inf")
    amax = tl.max(tl.where(a < float("inf"), a, 0.0), 1)
    span = tl.where(plain, span, amax * per_6)
    bits, inverse = _step_of(span, smallest)
    zero = tl.where(plain, tl.ceil(tl.where(plain, below * inverse, 0.0)), 8.0).to(tl.int32)
    scale = (bits >> 15) | tl.where(plain, zero, 15)
    large = span > 2.0**100  # scaled by 2**-8, so that 8 steps are finite
    part, whole = tl.where(large, 2.0**-8, 1.0), tl.where(large, 2.0**8, 1.0)
    step = tl.where(plain, float("inf"), _float_of_bits(bits) * part)[:, None]
    x *= part[:, None]
    x = tl.where(x != x, -7.0 * step, tl.minimum(tl.maximum(x, -8.0 * step), 7.0 * step))
    return x, inverse * whole, zero, scale


@triton.jit
def _random_12_bits(h, K: tl.constexpr):
    """12 bits for each value, two a word, uint32 [P, W / K, K / 2]; as in `kernels8._noise`."""
    odd = tl.arange(0, K // 2).to(tl.uint32) * 0x9E3779B8 + 1
    h = tl.reshape(h, [h.shape[0], h.shape[1], 1])
    return ((h * odd[None, None, :]) ^ (h >> 16)) & 0x0FFF0FFF


@triton.jit
def _pack4(
    x_ptr, q_ptr, scale_ptr, seed_ptr, groups, count, length, per_14, per_6, smallest,
    P: tl.constexpr, W: tl.constexpr, K: tl.constexpr, STOCHASTIC: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`integer.pack_int4` of `P` groups of `W` values, in words of `K` codes. See `_places` for the rest."""
    g, there, at, places, mask, at_words, words, word_mask = _places(groups, count, length, P, W, K, EVEN)
    x = tl.load(x_ptr + at + places, mask, other=0.0).to(tl.float32)
    above = tl.maximum(largest_of(x, 1), 0.0, propagate_nan=tl.PropagateNan.ALL)
    below = -tl.minimum(tl.min(x, 1), 0.0)
    h = hashes(seed_ptr, P, W, K) if STOCHASTIC else 0
    span = above * per_14 + below * per_14
    if largest_of(span, 0) < float("inf"):
        bits, inverse = _step_of(span, smallest)
        zero = tl.ceil(below * inverse).to(tl.int32)
        scale = (bits >> 15) | zero
    else:
        x, inverse, zero, scale = _with_special_values(x, span, below, per_6, smallest)
    if STOCHASTIC:
        # The bits of a sum with 1.5 * 2**11 end in the code and 12 bits of fraction. To these 12 random bits are added,
        # for two values in a word. The higher value's offset is smaller by the lower one's bits above its code.
        half = tl.arange(0, 2)
        offset = _float_of_bits((zero[:, None] << 12) + (0x45400000 - 0x4540 * half)[None, :])
        halves = tl.reshape(x, [P, W // K, 2, K // 2])
        fixed = _bits(tl.fma(halves, inverse[:, None, None, None], offset[:, None, :, None]))
        pair = tl.sum(fixed << (16 * half)[None, None, :, None], 2).to(tl.uint32) + _random_12_bits(h, K)
        shift = 4 * tl.arange(0, K // 2)[None, None, :].to(tl.uint32)
        word = tl.sum((pair >> (12 - shift)) & (0x000F000F << shift), 2).to(tl.int32)
        if K == 4:
            word = (word & 0xFF) | ((word >> 8) & 0xFF00)
        elif K == 2:
            word = (word & 0xF) | ((word >> 12) & 0xF0)
    else:
        # The bits of a sum with 1.5 * 2**23 end in round(x / step). The bits above are the same in all K values, so a
        # constant removes them from the word.
        rounded = tl.reshape(_bits(x * inverse[:, None] + _ROUND_TO_INTEGER), [P, W // K, K])
        word = tl.sum(rounded << (4 * tl.arange(0, K))[None, None, :], 2) - 0x3F400000 + zero[:, None] * 0x11111111
    tl.store(q_ptr + at_words + words, word.to(q_ptr.dtype.element_ty), word_mask)
    tl.store(scale_ptr + g, scale.to(tl.int16), there)


@triton.jit
def _unpack4(
    q_ptr, scale_ptr, y_ptr, groups, count, length, largest,
    P: tl.constexpr, W: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`integer.unpack_int4` of `P` groups. `largest`: of the dtype of the result."""
    g, there, at, places, mask, at_words, words, word_mask = _places(groups, count, length, P, W, K, EVEN)
    word = tl.load(q_ptr + at_words + words, word_mask, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + g, there, other=0).to(tl.int32)
    zero = scale & 15
    bits = (scale & 0xFFF0) << 15
    step = _float_of_bits(bits)
    # A code stays where it is, from bit 0, 4, 8 or 12 on. Read there it is 2**shift too large, so its step is divided.
    k = tl.arange(0, K)
    shift = 4 * (k % 4)
    codes = ((word[:, :, None] >> (16 * (k // 4))[None, None, :]) & (15 << shift)[None, None, :]) | 0x4B000000
    zeros = _float_of_bits((zero[:, None] << shift[None, :]) + 0x4B000000)
    part = _float_of_bits((127 - shift) << 23)
    shifted = _float_of_bits(codes) - zeros[:, None, :]
    # With a step below 1/16 of the dtype's largest number no code leaves the range. 0x7FFFFFFF is NaN, which fails it.
    last = tl.max(tl.where(zero == 15, 0x7FFFFFFF, bits), 0)
    if _float_of_bits(last) < largest * 0.0625:
        y = tl.reshape(shifted * (step[:, None, None] * part[None, None, :]), [P, W])
    else:
        special = (zero == 15)[:, None]
        code = tl.reshape(shifted * part[None, None, :], [P, W]) + tl.where(special, 7.0, 0.0)  # the zero is 8, not 15
        y = tl.minimum(tl.maximum(code * step[:, None], -largest), largest)
        other = tl.where(code == -7.0, float("nan"), code * float("inf"))
        y = tl.where(special & (tl.abs(code) > 6.0), other, y)
    tl.store(y_ptr + at + places, y.to(y_ptr.dtype.element_ty), mask)


def _codes(q: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Returns a view of `q` in the words that a thread reads and writes, and the number of codes in one.

    A word has the codes of 16 bytes of values. Rows that are no whole words are read by the byte, with 2 codes.
    """
    word, k = (torch.int32, 8) if dtype.itemsize == 2 else (torch.int16, 4)
    if q.shape[-1] % word.itemsize == 0 and q.storage_offset() % word.itemsize == 0:
        return q.view(-1).view(word), k  # flat: `view(dtype)` refuses odd strides of dimensions of size 1
    return q, 2


def pack_int4(x: torch.Tensor, block: int, seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`integer.pack_int4`; stochastic with a `seed`, int64[1]."""
    x = x.contiguous()
    q, scale = packed_like(x, (x.shape[-1] + 1) // 2, torch.uint8, block, torch.int16)
    words, k = _codes(q, x.dtype)
    count, length, p, w, warps = tiles(scale.numel(), x.shape[-1], block, block, one_warp=True)
    with torch.cuda.device_of(x):
        _pack4[(triton.cdiv(scale.numel(), p),)](
            x, words, scale, scale if seed is None else seed, scale.numel(),
            count, length, SLACK / 14, SLACK / 6, SMALLEST_NORMAL, P=p, W=w, K=k, STOCHASTIC=seed is not None,
            EVEN=length == w, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return q, scale


def unpack_int4(q: torch.Tensor, scale: torch.Tensor, length: int, block: int, dtype: torch.dtype) -> torch.Tensor:
    """`integer.unpack_int4`."""
    q = q.contiguous()
    y = torch.empty((*q.shape[:-1], length), dtype=dtype, device=q.device)
    words, k = _codes(q, dtype)
    count, length, p, w, warps = tiles(scale.numel(), length, block, block, one_warp=True)
    with torch.cuda.device_of(q):
        _unpack4[(triton.cdiv(scale.numel(), p),)](
            words, scale, y, scale.numel(), count, length, torch.finfo(dtype).max,
            P=p, W=w, K=k, EVEN=length == w, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return y
