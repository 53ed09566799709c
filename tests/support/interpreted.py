"""The kernels of int4 against its tensor code: run by test_alone.py in Triton's interpreter, and on a device."""

from __future__ import annotations

import itertools
import sys

import torch
from roundtrip import KINDS, data

from aot_hooks.library import int4_triton, integer


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def to_the_nearest(device: str, dtypes: tuple[torch.dtype, ...], columns: tuple[int, ...] = (256, 200, 33)) -> int:
    """Bit for bit."""
    count = 0
    for dtype, kind, n in itertools.product(dtypes, KINDS, columns):
        x = data(kind, dtype, columns=max(n, 256))[:, :n].contiguous().to(device)
        if kind == "largest":
            x[3, ::9], x[4, 5], x[5, 5] = torch.nan, torch.inf, -torch.inf
        q, scale = expected = integer.pack_int4(x, 32, None)
        same(int4_triton.pack_int4(x, 32, None), expected)
        same(int4_triton.unpack_int4(q, scale, n, 32, dtype), integer.unpack_int4(q, scale, n, 32, dtype))
        odd = [a.unsqueeze(1).as_strided((len(a), 1, a.shape[1]), (a.stride(0), 1, 1)) for a in (x, q, scale)]
        assert all(a.is_contiguous() for a in odd)  # though a dimension of size 1 has a stride of 1
        same([a.squeeze(1) for a in int4_triton.pack_int4(odd[0], 32, None)], list(expected))
        y = int4_triton.unpack_int4(odd[1], odd[2], n, 32, dtype)
        same(y.squeeze(1), integer.unpack_int4(q, scale, n, 32, dtype))
        count += 1
    return count


def at_random(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """The expected value is what was packed: each value here is in many rows, rounded by itself in each."""
    rows = 1000 if device == "cuda" else 300  # the interpreter is slow
    row = torch.randn(128, device=device)
    blocks = row.unflatten(0, (-1, 32))
    step = ((blocks.amax(1) - blocks.amin(1)) / 14 * (1 + 2**-4)).repeat_interleave(32) * (1 + 2**-18)
    x = row.expand(rows, 128).contiguous()
    seeds = [torch.tensor([s], device=device) for s in (1, 1, 2, 1 + (1 << 40))]
    q, scale = int4_triton.pack_int4(x, 32, seeds[0])
    again, other, far = (int4_triton.pack_int4(x[:8], 32, seed)[0] for seed in seeds[1:])
    assert torch.equal(q[:8], again) and not torch.equal(q[:8], other) and not torch.equal(q[:8], far)
    error = (int4_triton.unpack_int4(q, scale, 128, 32, x.dtype) - x) / step
    assert (error.abs() <= 1).all()
    assert error.mean(0).abs().max() < (torch.tensor(2 / 1e-9).log() / (2 * rows)).sqrt()  # Hoeffding
    assert error.mean().abs() < 5 * 0.5 / x.numel() ** 0.5
    # rows are not rounded alike, nor is a value as its neighbour
    assert (error[1:] * error[:-1]).mean().abs() < 0.01 and (error[:, 1:] * error[:, :-1]).mean().abs() < 0.01
    # as small as scales get and nothing at all, in rows of whole words, and rows that are not, of each dtype
    x = torch.cat([row[:32] * 2.0**-127, torch.zeros(32, device=device)]).expand(4, -1)
    for given, bound in ((x, 2.0**-126), *((row[:33].to(dtype).expand(40, -1), step[:33]) for dtype in dtypes)):
        q, scale = int4_triton.pack_int4(given.contiguous(), 32, seeds[0])
        y = int4_triton.unpack_int4(q, scale, given.shape[1], 32, torch.float32)
        assert ((y - given).abs() <= bound * (1 + 2**-7)).all() and y[:, :32].any()
        assert not y[(given == 0).expand_as(y)].any() and (y.sign() * given.sign() >= 0).all()


def main() -> None:
    torch.manual_seed(0)
    # The interpreter's bfloat16 cuts off and has no subnormals: bfloat16 is for a device.
    at_random("cpu", (torch.float32, torch.float16))
    print(to_the_nearest("cpu", (torch.float32,)) + to_the_nearest("cpu", (torch.float16,), (200,)))


if __name__ == "__main__":
    sys.exit(main())
