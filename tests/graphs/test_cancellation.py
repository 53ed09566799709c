"""Sums that a backward computes again: no worse than in eager mode, which rounds the sums and not their terms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import TWO_KINDS, compare
from torch import Tensor

import aot_hooks
from aot_hooks.graphs.cancellation import may_cancel

ROWS, WIDTH = 16, 32
SIGNS = torch.tensor([1.0, -1.0]).repeat(16)


def centred(a: Tensor, b: Tensor) -> Tensor:
    d = a - a.mean(1, keepdim=True)
    return F.gelu(d * torch.rsqrt(d.square().mean(1, keepdim=True) + 1e-6))


def over_the_batch(a: Tensor, b: Tensor) -> Tensor:
    d = a - a.mean(0, keepdim=True)
    return d * torch.rsqrt(d.square().mean(0, keepdim=True) + 1e-6)


PROGRAMS = {
    "rows, centred by hand": (centred, 20.0, 1.0),
    "columns, centred by hand": (over_the_batch, 20.0, 1.0),
    "less a constant": (lambda a, b: F.gelu(a - 20), 20.0, 1.0),
    "less an input": (lambda a, b: F.gelu(a - torch.full((ROWS, WIDTH), 20.0)), 20.0, 1.0),
    "a constant less": (lambda a, b: F.gelu(20 - a), 20.0, 1.0),
    "of two that are close": (lambda a, b: (a - b).square() + 1e-4 * (a**3 + b**3), 0.0, 0.01),
    "of multiples": (lambda a, b: F.gelu(a * 2 + b * -2) + 1e-4 * (a**3 + b**3), 0.0, 0.01),
    "addcmul": (lambda a, b: torch.addcmul(a, b, torch.ones(ROWS, WIDTH), value=-1).square() + 1e-4 * a**3, 0.0, 0.01),
    "of neighbours": (lambda a, b: (a - a.roll(1, 1)).square() + 1e-4 * a**3, 20.0, 1.0),
    "sums of pairs": (lambda a, b: F.gelu((a * SIGNS).view(ROWS, -1, 2).sum(-1)) + 1e-4 * a[:, :16] ** 3, 20.0, 1.0),
    "variance of few": (lambda a, b: torch.rsqrt(a.view(ROWS, -1, 2).var(-1) + 1e-3), 0.0, 1.0),
    "pairwise distances": (lambda a, b: (a[:, None] - b[None]).square().sum(-1), 20.0, 1.0),
    "power of a power": (lambda a, b: a.square().square().square(), 0.0, 1.0),
}  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_may_cancel_is_not_made_of_rounded_terms(name):
    body, bias, near = PROGRAMS[name]
    torch.manual_seed(0)
    x, w = torch.randn(ROWS, WIDTH), 0.2 * torch.randn(WIDTH, WIDTH)
    v = w + near * 0.2 * torch.randn(WIDTH, WIDTH)
    offset = bias * (1 + 0.1 * torch.randn(WIDTH))
    wrt = [t.requires_grad_() for t in (w, v, offset)]

    def f(x: Tensor, w: Tensor, v: Tensor, offset: Tensor) -> Tensor:
        out = body(x @ w + offset, x @ v + offset)
        return (out * torch.cos(torch.arange(out.numel()).view_as(out))).sum()

    verdicts, _ = compare(f, (x, *wrt), wrt, TWO_KINDS)
    assert all(v.ok for v in verdicts), [str(v) for v in verdicts]


@pytest.mark.core
@pytest.mark.parametrize(
    "f",
    [
        lambda h: 0.5 * h * (1 + torch.tanh(0.7978845608 * (h + 0.044715 * torch.pow(h, 3.0)))),
        lambda h: h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6),
        lambda h: F.layer_norm(h, (WIDTH,)),
        lambda h: F.batch_norm(h, None, None, training=True),
    ],
    ids=["GELU by hand", "RMSNorm by hand", "layer_norm", "batch_norm"],
)
def test_sums_that_do_not_cancel_are_smooth(f):
    w = torch.randn(WIDTH, WIDTH)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    plan = aot_hooks.plan(lambda x: f(x @ w).tanh(), x, policy=aot_hooks.float8(), inner="aten")
    assert any(d.hook is not aot_hooks.KEEP and "mm" in d.saved.op for d in plan.decisions), plan


@pytest.mark.core
@pytest.mark.parametrize(
    ("operator", "made_by", "others", "whole", "expected"),
    [
        ("add.Tensor", "tanh.default", (1,), None, False),
        ("rsub.Scalar", "sigmoid.default", (1,), None, False),
        ("add.Scalar", "tanh.default", (1, -1), None, True),  # alpha
        ("rsub.Scalar", "sigmoid.default", (1, 2), None, True),
        ("sub.Tensor", "tanh.default", (0.5,), None, True),
        ("add.Tensor", "cos.default", (1,), None, True),
        ("add.Tensor", "relu.default", (1,), None, True),
        ("add.Scalar", "sum.default", (1e-6,), None, True),
        ("add.Scalar", "sum.default", (-1.0,), None, True),
        ("sub.Tensor", "sum.default", ("y",), None, True),
        ("add.Tensor", "sum.default", ("y",), None, True),
        ("sub.Tensor", "relu.default", ("y",), "native_layer_norm.default", False),
        ("sub.Tensor", "relu.default", ("y",), "an operator that no table lists", True),
    ],
)
def test_which_sums_may_cancel(operator, made_by, others, whole, expected):
    def aten(name: str) -> object:
        packet, overload = name.split(".")
        return getattr(getattr(torch.ops.aten, packet), overload)

    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    value = graph.call_function(aten(made_by), (x,))
    user = graph.call_function(aten(operator), (value, *(y if other == "y" else other for other in others)))
    if whole is not None:
        user.meta["original_aten"] = aten(whole) if "." in whole else whole
    assert may_cancel(user) is expected
