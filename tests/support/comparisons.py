"""Each operator that only compares what it reads: calls of it, numbers that it may tell apart, and whether it does."""

from __future__ import annotations

import math

import torch

from aot_hooks.graphs.read_tables import ONLY_TESTS, Test

aten = torch.ops.aten

# operator -> how it is called on x with a gradient g, with constants that a test can be wrong about
CALLS = {
    **{f"aten.{kind}.Scalar": [(-0.5,), (0,), (6.0,), (math.inf,)] for kind in ("le", "lt", "ge", "gt", "eq", "ne")},
    "aten.threshold_backward.default": [(0,), (-2.0,), (0.5,)],
    "aten.hardtanh_backward.default": [(0.0, 6.0), (-1.0, 1.0), (1.0, 1.0)],
    "aten.hardsigmoid_backward.default": [()],
    "aten.hardshrink_backward.default": [(0.5,), (0.0,)],
    "aten.softshrink_backward.default": [(0.5,), (0.0,)],
    "aten.leaky_relu_backward.default": [(0.01, False), (0.5, True)],
    **{f"aten.{name}.default": [()] for name in ("sign", "sgn", "signbit", "isnan", "isinf", "logical_not")},
}


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """All that kernels may treat apart, in vectors and in their tails: 64 of each, then random ones."""
    info = torch.finfo(dtype)
    special = [math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, info.tiny / 2, -info.tiny / 2, info.tiny, info.max]
    special += [-info.max, -info.tiny, 1.0, -1.0, 3.0, -3.0, 6.0, 0.5, -0.5, -2.0, 0.75, 6.5, -7.0]
    x = torch.tensor(special, dtype=torch.float64).to(dtype)
    bits = x[x.isfinite() & (x != 0)].view(INTS[dtype.itemsize])
    x = torch.cat([x, (bits + 1).view(dtype), (bits - 1).view(dtype)])
    return torch.cat(
        [x.repeat_interleave(64), (torch.randn(1001, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)]
    )


INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype.is_floating_point:
        a, b = a.view(INTS[a.dtype.itemsize]), b.view(INTS[b.dtype.itemsize])
    return torch.equal(a, b)


def results(name: str, x: torch.Tensor, constants: tuple[float, ...]) -> torch.Tensor:
    _, packet, overload = name.split(".")
    op = getattr(getattr(aten, packet), overload)
    if ONLY_TESTS[name][0] == 0:
        return op(x, *constants)
    return op(numbers(x.dtype).flip(0).to(x.device), x, *constants)  # a gradient with NaN and infinities in it


def what_is_asked(name: str, constants: tuple[float, ...]) -> tuple[Test, ...]:
    position, read = ONLY_TESTS[name]
    return read(*[None] * (position + 1), *constants)


def decided(x, got, answers, name, constants) -> bool:
    """Whether putting any number of a class for all others of it changes no bit of the result."""
    code = sum(a.long() << i for i, a in enumerate(answers))
    for c in code.unique():
        members = (code == c).nonzero().flatten()
        for stand_in in members[:: max(1, len(members) // 8)]:
            y = torch.where(code == c, x[stand_in], x)
            if not same_bits(results(name, y, constants), got):
                return False
    return True
