"""Tiles, maxima and random bits, which the Triton kernels of kernels8.py and kernels4.py share."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["hashes", "largest_of", "noise_of", "one_warp_tile", "row_groups"]


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
def random_bits(h, K: tl.constexpr):
    """16 bits for each value, uint32 [P, W / K, 2, K / 2]: the halves of K / 2 multiples of its hash.

    Call it right before their use. Computed before the values are loaded, these bits fill the registers.
    """
    odd = tl.arange(0, K // 2).to(tl.uint32) * 0x9E3779B8 + 1
    words = (h * odd[None, None, None, :]) ^ (h >> 16)
    half = (16 * tl.arange(0, 2)).to(tl.uint32)
    return (words >> half[None, None, :, None]) & 0xFFFF


@triton.jit
def noise_of(h, P: tl.constexpr, W: tl.constexpr, K: tl.constexpr):
    """Uniform in [-1/2, 1/2), 16 bits, float32 [P, W]."""
    bits = random_bits(h, K) | 0x4B000000  # the float32 2**23 + bits
    return tl.reshape(tl.fma(bits.to(tl.float32, bitcast=True), 1.0 / 65536, -128.5), [P, W])


def row_groups(length: int, size: int) -> tuple[int, int]:
    """Returns a row's length and its number of groups.

    Rows of whole groups count as rows of one group each, which spares the kernel a division.
    """
    return (size, 1) if length % size == 0 else (length, triton.cdiv(length, size))


def one_warp_tile(groups: int, size: int) -> tuple[int, int, int]:
    """Groups a program, lanes a group, warps. One warp finds without a barrier whether the tile holds an infinity."""
    lanes = triton.next_power_of_2(size)
    return max(1, min(1024 // lanes, triton.next_power_of_2(groups))), lanes, 1
