"""The Triton kernels of int4: two codes a byte, a bfloat16 scale for each group.

      x [..., m] --_pack4--> words of K codes, low bits first, scale bf16[..., ceil(m / W)] --_unpack4--> [..., m]

Tiles and rounding are those of kernels.py. Here arithmetic, not bytes, is what limits, so no code is moved by itself:
packing sums float32 bits whole, codes and what stands above them, and takes the constant that this gives off the word;
unpacking reads the bits of a word where they stand as a number that is a power of two too large.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import SMALLEST_NORMAL
from .tiles import SLACK, hashes, largest_of, noise_of, one_warp_tile, random_bits, row_groups

__all__ = ["pack_int4", "unpack_int4"]


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
    h = hashes(seed_ptr, P, W, K) if STOCHASTIC else 0
    largest = largest_of(tl.abs(x), 1)
    plain = largest < float("inf")
    if largest_of(largest, 0) < float("inf"):
        scale = _up_to_16_bits(tl.maximum(largest * per_7, smallest))
        inverse = tl.div_rn(1.0, scale)
        if STOCHASTIC:
            # code + 8 and a fraction of 16 bits, to which as many at random are added; then without it, two a word
            # (not x * (inverse * 65536): that factor may be infinite, where x is zero)
            fixed = tl.fma(x * inverse[:, None], 65536.0, 12582912.0 + 8 * 65536.0).to(tl.int32, bitcast=True)
            bits = tl.reshape(fixed, [P, W // K, 2, K // 2]) + random_bits(h, K).to(tl.int32)
            half = tl.arange(0, 2)[None, None, :, None]
            pair = tl.sum(tl.where(half == 0, (bits >> 16) & 0xFFFF, bits & -65536), 2)
            shift = 4 * tl.arange(0, K // 2)
            word = tl.sum(pair << shift[None, None, :], 2) - (0x44443F40 if K == 8 else -0x00BB00C0 if K == 4 else 0)
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
            y += noise_of(h, P, W, K)
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


def _codes(q: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """4-bit codes as they are read and written: those of 16 bytes of values in a word, which a thread has, or 2 a byte
    where rows are no whole words."""
    word, k = (torch.int32, 8) if dtype.itemsize == 2 else (torch.int16, 4)
    if q.shape[-1] % word.itemsize == 0 and q.storage_offset() % word.itemsize == 0:
        return q.view(word), k
    return q, 2


def pack_int4(x: torch.Tensor, block: int, seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`integer.pack_int4`; stochastic with a `seed`, int64[1]."""
    x = x.contiguous()
    q = torch.empty((*x.shape[:-1], (x.shape[-1] + 1) // 2), dtype=torch.uint8, device=x.device)
    scale = torch.empty((*x.shape[:-1], triton.cdiv(x.shape[-1], block)), dtype=torch.bfloat16, device=x.device)
    words, k = _codes(q, x.dtype)
    length, count = row_groups(x.shape[-1], block)
    p, w, warps = one_warp_tile(scale.numel(), block)
    with torch.cuda.device_of(x):
        _pack4[(triton.cdiv(scale.numel(), p),)](
            x, words, scale, scale if seed is None else seed, scale.numel(), count, length, SLACK / 7, SLACK / 6,
            SMALLEST_NORMAL, P=p, W=w, K=k, STOCHASTIC=seed is not None, EVEN=length == w,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return q, scale


def unpack_int4(q: torch.Tensor, scale: torch.Tensor, length: int, block: int, dtype: torch.dtype) -> torch.Tensor:
    """`integer.unpack_int4`."""
    y = torch.empty((*q.shape[:-1], length), dtype=dtype, device=q.device)
    words, k = _codes(q, dtype)
    length, count = row_groups(length, block)
    p, w, warps = one_warp_tile(scale.numel(), block)
    with torch.cuda.device_of(q):
        _unpack4[(triton.cdiv(scale.numel(), p),)](
            words, scale, y, scale.numel(), count, length, torch.finfo(dtype).max,
            P=p, W=w, K=k, EVEN=length == w, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return y
