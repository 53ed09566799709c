"""The kernels against plain code: run by test_kernels.py with TRITON_INTERPRET=1, on a CPU, and from it on a device."""

from __future__ import annotations

import importlib
import itertools
import sys

import torch
from roundtrip import KINDS, data

from aot_hooks.library import integer, scales
from aot_hooks.library.triton import kernels4, kernels8

float8 = importlib.import_module("aot_hooks.library.float8")
bitmask = importlib.import_module("aot_hooks.library.bitmask")


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def integers(device: str, dtypes: tuple[torch.dtype, ...], columns: tuple[int, ...] = (256, 200, 33)) -> int:
    """Bit for bit."""
    count = 0
    for dtype, kind, n in itertools.product(dtypes, KINDS, columns):
        x = data(kind, dtype, columns=max(n, 256))[:, :n].contiguous().to(device)
        if kind == "largest":
            x[3, ::9], x[4, 5], x[5, 5] = torch.nan, torch.inf, -torch.inf
        for block, power in ((64, False), (32, True)):
            q, scale = expected = integer.pack_int8(x, block, False, power)
            same(kernels8.pack_int8(x, block, power, None), expected)
            same(kernels8.unpack8(q, scale, block, dtype), integer.unpack_int8(q, scale, block, dtype))
        q, scale = expected = integer.pack_int4(x, 32, False)
        same(kernels4.pack_int4(x, 32, None), expected)
        same(kernels4.unpack_int4(q, scale, n, 32, dtype), integer.unpack_int4(q, scale, n, 32, dtype))
        odd = [a.unsqueeze(1).as_strided((len(a), 1, a.shape[1]), (a.stride(0), 1, 1)) for a in (x, q, scale)]
        assert all(a.is_contiguous() for a in odd)  # though a dimension of size 1 has a stride of 1
        same([a.squeeze(1) for a in kernels4.pack_int4(odd[0], 32, None)], list(expected))
        y = kernels4.unpack_int4(odd[1], odd[2], n, 32, dtype)
        same(y.squeeze(1), integer.unpack_int4(q, scale, n, 32, dtype))
        count += 1
    return count


def rounding_at_random(device: str, dtypes: tuple[torch.dtype, ...]) -> int:
    """The expected value is what was packed: each value here is in many rows, rounded by itself in each."""
    rows = 1000 if device == "cuda" else 300  # the interpreter is slow
    for bits, block, power in ((8, 128, False), (8, 64, True), (4, 32, False)):
        row = torch.randn(128, device=device)
        blocks = row.unflatten(0, (-1, block))
        step = blocks.abs().amax(1) / (63 if power else 125)
        if bits == 4:
            step = (blocks.amax(1) - blocks.amin(1)) / 14 * (1 + 2**-4)
        step = step.repeat_interleave(block) * (1 + 2**-18)
        x = row.expand(rows, 128).contiguous()

        def pack(
            x: torch.Tensor, block: int, seed: torch.Tensor, bits: int = bits, power: bool = power
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return kernels8.pack_int8(x, block, power, seed) if bits == 8 else kernels4.pack_int4(x, block, seed)

        seeds = [torch.tensor([s], device=device) for s in (1, 1, 2, 1 + (1 << 40))]
        q, scale = pack(x, block, seeds[0])
        again, other, far = (pack(x[:8], block, seed)[0] for seed in seeds[1:])
        assert torch.equal(q[:8], again) and not torch.equal(q[:8], other) and not torch.equal(q[:8], far)
        if bits == 8:
            y = kernels8.unpack8(q, scale, block, x.dtype)
        else:
            y = kernels4.unpack_int4(q, scale, 128, block, x.dtype)
        error = (y - x) / step
        assert (error.abs() <= 1).all()
        assert error.mean(0).abs().max() < (torch.tensor(2 / 1e-9).log() / (2 * rows)).sqrt()  # Hoeffding
        assert error.mean().abs() < 5 * 0.5 / x.numel() ** 0.5
        # rows are not rounded alike, nor is a value as its neighbour
        assert (error[1:] * error[:-1]).mean().abs() < 0.01 and (error[:, 1:] * error[:, :-1]).mean().abs() < 0.01
        # as small as scales get and nothing at all, in rows of whole words, and rows that are not, of each dtype
        x = torch.cat([row[:block] * 2.0**-127, torch.zeros(block, device=device)]).expand(4, -1)
        for given, bound in (
            (x, 2.0**-126),
            *((row[:33].to(dtype).expand(40, -1), step[:33]) for dtype in dtypes),
        ):
            q, scale = pack(given.contiguous(), block, seeds[0])
            if bits == 8:
                y = kernels8.unpack8(q, scale, block, torch.float32)
            else:
                y = kernels4.unpack_int4(q, scale, given.shape[1], block, torch.float32)
            assert ((y - given).abs() <= bound * (1 + 2**-7)).all() and y[:, :block].any()
            assert not y[(given == 0).expand_as(y)].any() and (y.sign() * given.sign() >= 0).all()
    return 3


def bits(device: str) -> int:
    for n in (1, 7, 8, 1000, 4096, 5001):
        x = torch.rand(n, device=device) < 0.5
        packed = kernels8.pack_bits(x)
        same(packed, bitmask.pack_bits(x))
        same(kernels8.unpack_bits(packed, (n,)), x)
    return 6


def on_the_grid(kind: str, fmt: torch.dtype, columns: int) -> torch.Tensor:
    """float32 rows that `fmt` holds exactly, as normal numbers, with scales that are powers of two."""
    top, _ = scales.FLOAT8_RANGE[fmt]
    codes = torch.randint(0, 256, (16, columns), dtype=torch.uint8).view(fmt).float()
    codes = torch.where((codes.abs() <= top) & (codes.abs() >= torch.finfo(fmt).smallest_normal), codes, 0)
    codes[:, 1::64] = top  # in each block, where no infinity comes
    x = codes * 2.0 ** torch.randint(-20, 20, (16, 1))
    other = data(kind, torch.float32, columns=columns)
    return torch.where(other.isinf(), other, x)


def float8s(device: str, dtypes: tuple[torch.dtype, ...], exact: bool) -> int:
    """The semantics of float8.py, bit for bit. The interpreter cannot round to 8 bits (31 becomes 16: the carry is
    lost) and has neither subnormals nor NaN there: it gets, without `exact`, numbers that need no rounding."""
    count = 0
    formats = (torch.float8_e4m3fn, torch.float8_e5m2)
    shapes = ((0, 256), (0, 200), (128, 256), (0, 20000))
    for fmt, dtype, kind, (block, columns) in itertools.product(formats, dtypes, KINDS, shapes):
        if columns == 20000 and kind != "mixed":
            continue
        x = (data(kind, dtype, columns=columns) if exact else on_the_grid(kind, fmt, columns)).to(device)
        top, inf = scales.FLOAT8_RANGE[fmt]
        rows = x.unflatten(-1, (-1, block)) if block else x.unsqueeze(-2)
        size = rows.float().abs()
        amax = torch.where(size < torch.inf, size, 0.0).amax(-1).double()
        fraction, exponent = torch.frexp(amax / top)  # not log2: on CUDA that of 2**k is not always k
        scale = torch.ldexp((amax > 0).double(), exponent - (fraction == 0.5).int()).clamp(min=2.0**-126).float()
        codes = (rows.float() * (1.0 / scale).unsqueeze(-1)).clamp(-inf, inf).to(fmt)
        scale = scale.clamp(max=torch.finfo(dtype).max / {416.0: 2.0**8, 49152.0: 2.0**15}[top])
        y = codes.float()
        y = torch.where(y.abs() == inf, y * torch.inf, y * scale.unsqueeze(-1)).to(dtype).flatten(-2)
        got, got_scale = kernels8.pack_float8(x, block, fmt)
        same(got_scale, scale)
        same(got.float(), codes.flatten(-2).float())
        same(kernels8.unpack8(got, got_scale, block, dtype), y)
        count += 1
    return count


def main() -> None:
    torch.manual_seed(0)
    # The interpreter's bfloat16 cuts off too and has no subnormals: bfloat16 is for a device.
    some = (torch.float32, torch.float16)
    exact = integers("cpu", (torch.float32,)) + integers("cpu", (torch.float16,), (200,))
    print("integers", exact, "random", rounding_at_random("cpu", some), "bits", bits("cpu"), end=" ")
    print("float8", float8s("cpu", (torch.float32,), exact=False))


if __name__ == "__main__":
    sys.exit(main())
