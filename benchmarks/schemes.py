"""The hooks that `bench_error.py` compares, and other ways to spend 4 and 8 bits that the library does not have.

    hooks() -> {name: Hook}          of aot_hooks, by bytes an element
    candidates() -> {name: Hook}     written here as plain tensor code, for the comparison only

      nf4        codes at equal parts of a normal distribution, between 0 and the block's largest magnitude
      minmax     16 codes from the block's smallest value to its largest: two 16-bit numbers a block
      symmetric  15 codes, -7 to 7, as many on each side of 0: int4 as it was before
      oriented   16 codes, -8 to 7 or -7 to 8: the longer side is where the larger value is, as in llama.cpp's Q4_0
      fitted     symmetric, with the one of eight scales that gives the least squared error; the ends are cut off

Sources: Dettmers et al., "QLoRA" (arXiv:2305.14314) for nf4; fitted scales as in weight quantization, e.g. Frantar et
al., "GPTQ" (arXiv:2210.17323). All take finite numbers in rows of whole blocks only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from aot_hooks import Hook, SavedTensor, cast, float8, int4, int8

__all__ = ["candidates", "hooks"]

_SMALLEST = 2.0**-126
_FITS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)  # of the scale that keeps the block's largest value


def hooks() -> dict[str, Hook]:
    """Every setting of the lossy hooks that the comparison is about."""
    all_hooks = [cast(torch.bfloat16)]
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        all_hooks += [float8(dtype, scaling) for scaling in ("tensorwise", "rowwise", "blockwise")]
    for stochastic in (False, True):
        all_hooks += [int8(block, stochastic) for block in (256, 128, 64, 32)]
        all_hooks += [int8(block, stochastic, power_of_two=True) for block in (128, 64, 32, 16)]
    for stochastic in (False, True):
        all_hooks += [int4(block, stochastic) for block in (64, 32, 16)]
    return {hook.name: hook for hook in all_hooks}


def candidates() -> dict[str, Hook]:
    """4-bit schemes outside the library; bytes of those in blocks of 32 and of minmax(64) are those of int4(32)."""
    schemes: list[tuple[str, _Scheme]] = []
    for stochastic in (False, True):
        suffix = ", stochastic" if stochastic else ""
        schemes.append((f"nf4(32{suffix})", _NF4(32, stochastic)))
        schemes.append((f"minmax(64{suffix})", _MinMax(64, stochastic)))
        schemes.append((f"symmetric(32{suffix})", _Fitted(32, stochastic, (1.0,))))
        schemes.append((f"oriented(32{suffix})", _Oriented(32, stochastic)))
    schemes.append(("fitted(32)", _Fitted(32, False, _FITS)))
    return {name: Hook(name, scheme.pack, scheme.unpack, declines=_declines) for name, scheme in schemes}


def _declines(saved: SavedTensor) -> str | None:
    """As int4, and what it would take of short rows too."""
    return "a row shorter than a block" if saved.shape[-1] < 32 else int4().why_not(saved)


@dataclasses.dataclass(frozen=True)
class _Scheme:
    block: int
    stochastic: bool

    def pack(self, x: Tensor) -> Any:
        """`x` [..., m] to (uint8[..., m / 2], 16-bit numbers a block)."""
        if x.shape[-1] % self.block:
            raise ValueError(f"expected rows of whole blocks of {self.block}, got {tuple(x.shape)}")
        codes, *scales = self.encode(x.float().unflatten(-1, (-1, self.block)))
        pairs = codes.flatten(-2).to(torch.uint8).unflatten(-1, (-1, 2))
        return pairs[..., 0] + 16 * pairs[..., 1], *(s.to(torch.bfloat16) for s in scales)

    def unpack(self, packed: Any) -> Tensor:
        pairs, *scales = packed
        codes = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).long().unflatten(-1, (-1, self.block))
        return self.decode(codes, *(s.float() for s in scales)).flatten(-2)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """float32[..., block] to codes from 0 to 15 and scales [..., 1]."""
        raise NotImplementedError

    def decode(self, codes: Tensor, *scales: Tensor) -> Tensor:
        raise NotImplementedError

    def round(self, x: Tensor) -> Tensor:
        return (x + torch.rand_like(x) - 0.5 if self.stochastic else x).round()


def _up(scale: Tensor) -> Tensor:
    """The next bfloat16 that is no smaller, in float32."""
    return ((scale.clamp(min=_SMALLEST).view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


class _MinMax(_Scheme):
    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        low = x.amin(-1, keepdim=True)
        low = -_up(-low.clamp(max=0.0)) + low.clamp(min=0.0).bfloat16().float() * (1 - 2.0**-7)
        step = _up((x.amax(-1, keepdim=True) - low) / 15)
        return self.round((x - low) / step).clamp(0, 15), low, step

    def decode(self, codes: Tensor, *scales: Tensor) -> Tensor:
        low, step = scales
        return codes * step + low


class _Oriented(_Scheme):
    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        above, below = x.amax(-1, keepdim=True).clamp(min=0), -x.amin(-1, keepdim=True).clamp(max=0)
        larger, smaller = torch.maximum(above, below), torch.minimum(above, below)
        step = _up(torch.maximum(larger / 8, smaller / 7) * (1 + 2.0**-20))
        step = torch.where(above > below, -step, step)
        return self.round(x / step) + 8, step

    def decode(self, codes: Tensor, *scales: Tensor) -> Tensor:
        return (codes - 8) * scales[0]


@dataclasses.dataclass(frozen=True)
class _Fitted(_Scheme):
    fits: tuple[float, ...]

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        whole = x.abs().amax(-1, keepdim=True) / 7
        best = codes = error = None
        for fit in self.fits:
            scale = _up(whole * fit)
            q = self.round(x / scale).clamp(-7, 7)
            e = (q * scale - x).square().sum(-1, keepdim=True)
            if best is None:
                best, codes, error = scale, q, e
            else:
                better = e < error
                best, codes, error = (torch.where(better, a, b) for a, b in ((scale, best), (q, codes), (e, error)))
        return codes + 8, best

    def decode(self, codes: Tensor, *scales: Tensor) -> Tensor:
        return (codes - 8) * scales[0]


def _normal_codes() -> Tensor:
    """16 numbers from -1 to 1, 0 among them: middles of equal parts of a normal distribution, 8 below 0 and 7 above."""
    end = (1 - 1 / 32 + 1 - 1 / 30) / 2
    above = torch.special.ndtri(torch.linspace(end, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(end, 0.5, 8, dtype=torch.float64)[:-1])
    codes = torch.cat([below, torch.zeros(1, dtype=torch.float64), above]).sort().values
    return (codes / codes.max()).float()


class _NF4(_Scheme):
    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        values = _normal_codes().to(x.device)
        scale = _up(x.abs().amax(-1, keepdim=True))
        y = x / scale
        upper = torch.searchsorted(values, y.contiguous()).clamp(1, 15)
        low, high = values[upper - 1], values[upper]
        cut = torch.rand_like(y) if self.stochastic else 0.5
        return torch.where((y - low) / (high - low) > cut, upper, upper - 1), scale

    def decode(self, codes: Tensor, *scales: Tensor) -> Tensor:
        return _normal_codes().to(codes.device)[codes] * scales[0]
