"""For tests of hooks: data that is hard to store, and what a backward reads of it."""

from __future__ import annotations

import math
from typing import Any

import torch

import aot_hooks

# Where `rows` come from: name -> float64[rows, columns]; all fit float16, but for "largest"
KINDS = ("normal", "heavy", "subnormal", "largest", "zero", "mixed")


def data(kind: str, dtype: torch.dtype, rows: int = 16, columns: int = 256) -> torch.Tensor:
    x = torch.randn(rows, columns, dtype=torch.float64)
    limits = torch.finfo(dtype)
    if kind == "heavy":  # Cauchy, whose largest values are far from the others
        x = torch.tan(math.pi * (torch.rand_like(x) - 0.5)).clamp(-60000, 60000)
    elif kind == "subnormal":
        x = x * limits.tiny * 2.0 ** -torch.randint(0, 8, (rows, 1))
    elif kind == "largest":
        x[:, ::7] = limits.max
        x[:, 3::7] = -limits.max
    elif kind == "zero":
        x[::2] = 0
    elif kind == "mixed":
        x[1, 3], x[2, 5], x[3, 7] = math.inf, -math.inf, math.nan
        x[4], x[5] = math.nan, -math.inf
        x[6, 10:13] = torch.tensor([math.nan, math.inf, -math.inf])
        x[7, ::2] = -math.inf  # a row of an attention mask
        x[8, 0] = math.inf
        x[8, 1:] *= 1e-6
    return x.to(dtype)


def specials_come_back(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Asserts that what isn't finite in `x`, and nothing else, isn't in `y`; returns where both are finite."""
    assert (y.dtype, y.shape, y.device) == (x.dtype, x.shape, x.device)
    torch.testing.assert_close(
        y.nan_to_num(1, 2, 3)[~x.isfinite()], x.nan_to_num(1, 2, 3)[~x.isfinite()], rtol=0, atol=0
    )
    assert torch.equal(y.isnan(), x.isnan()) and torch.equal(y.isinf(), x.isinf())
    return x.isfinite()


def through_graph(x: torch.Tensor, hook: aot_hooks.Hook, compiled: Any) -> torch.Tensor:
    """What a backward reads for the saved tensor `x`; `compiled` is a compiled `product`.

    `x * w` saves x; with a gradient of ones, the gradient of w is x as it came back.
    """
    w = torch.ones_like(x, dtype=torch.float32 if x.dtype is torch.bool else None, requires_grad=True)
    with aot_hooks.saved_tensors_hooks(hook, scope="all"):
        out = compiled(x, w)
    out.backward(torch.ones_like(out))
    decisions = [d for plan in aot_hooks.last_plans(compiled) for d in plan.decisions]
    assert hook in [d.hook for d in decisions], [d.reason for d in decisions]
    return w.grad


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w


def mask(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Saves the bool tensor `x`, and gives it back likewise as the gradient of `w`."""
    return torch.where(x, w, 0.0)


# what no hook with a scale takes
LEFT_ALONE = {
    "int": torch.arange(12).view(3, 4),
    "bool": torch.tensor([[True, False] * 8]),
    "0-d": torch.tensor(3.5),
    "empty": torch.empty(0, 8),
    "complex": torch.randn(4, 4, dtype=torch.complex64),
    "float64": torch.randn(4, 4, dtype=torch.float64),
}
