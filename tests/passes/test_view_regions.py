"""A region inside a compiled function covers what its operators save, also through views made elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import aot_hooks
from aot_hooks import KEEP, saved_tensors_hooks


def triple(x: Tensor) -> Tensor:
    return x * 3


def double(x: Tensor) -> Tensor:
    return x * 2


def same(p: Tensor) -> Tensor:
    return p


def view_inside(w: Tensor) -> Tensor:
    h = w @ w
    with saved_tensors_hooks(triple, same):
        v = h.t()
    return (h @ w) @ (v @ w)


def readers_inside(w: Tensor) -> Tensor:
    h = w @ w
    v = h.t()
    with saved_tensors_hooks(triple, same):
        return (h @ w) @ (v @ w)


def another_inside(w: Tensor) -> Tensor:
    h = w @ w
    with saved_tensors_hooks(triple, same):
        v = h.t()
    with saved_tensors_hooks(double, same):
        return (h @ w) @ (v @ w)


def shielded(w: Tensor) -> Tensor:
    h = w @ w
    with saved_tensors_hooks(triple, same):
        v = h.t()
    with saved_tensors_hooks(KEEP):
        return (h @ w) @ (v @ w)


def one_view_in_two(w: Tensor) -> Tensor:
    h = w @ w
    v = h.t()
    with saved_tensors_hooks(triple, same):
        a = v @ w
    with saved_tensors_hooks(double, same):
        b = v @ (w + 1)
    return (h @ w) @ a @ b


class Eager(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, w: Tensor) -> Tensor:
        return self.f(w)


@pytest.mark.core
@pytest.mark.parametrize("f", [view_inside, readers_inside, another_inside, shielded, one_view_in_two])
def test_the_region_of_the_operator_that_saves_decides(f):
    w = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(f, backend="aot_hooks", fullgraph=True, options={"inner": "aten"})
    (found,) = torch.autograd.grad(compiled(w).sum(), w)
    (expected,) = torch.autograd.grad(Eager(f)(w).sum(), w)
    assert torch.equal(found, expected)
    if f is not shielded and f is not view_inside:
        assert any(d.hook is not KEEP for d in aot_hooks.last_plans(compiled)[-1].decisions)
