"""Gradients of numbers that scale the rows of a product: eager mode's, without the product's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import aot_hooks
from aot_hooks import budget, float8, lossless
from aot_hooks.hook import Hook

ROWS, HIDDEN, WIDTH = 24, 6, 10
SAME = Hook("same", lambda x: x, lambda x: x, lossy=True)  # it may round, and does not
RESULT = ROWS * WIDTH * 8  # bytes

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def rows(h: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return h.sin() @ w * s.sigmoid()


def linear(h: Tensor, w: Tensor, s: Tensor) -> Tensor:
    y = F.linear(h.sin().unflatten(0, (2, -1)), w.t())
    return (y * s.sigmoid().unflatten(0, (2, -1))).flatten(0, 1)


def batched(h: Tensor, w: Tensor, s: Tensor) -> Tensor:
    y = torch.bmm(h.sin().unflatten(0, (2, -1)), torch.stack((w, w.cos())))
    return (s.sigmoid().unflatten(0, (2, -1)) * y).flatten(0, 1)


def converted(h: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return (h.sin() @ w).float() * s.sigmoid().float()


def gathered(h: Tensor, w: Tensor, s: Tensor) -> Tensor:
    order = s.detach()[:, 0].argsort()
    return rows(h[order], w, s[order])[order.argsort()]


def with_bias(h: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return (h.sin() @ w + w[0]) * s.sigmoid()


def read_elsewhere(h: Tensor, w: Tensor, s: Tensor) -> Tensor:
    y = h.sin() @ w
    return y * s.sigmoid() + y.cos()


def by_columns(h: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return h.sin() @ w * s.sigmoid()[:WIDTH].t()


def arguments(hidden: int = HIDDEN) -> list[Tensor]:
    generator = torch.Generator().manual_seed(hidden)
    sizes = ((ROWS, hidden), (hidden, WIDTH), (ROWS, 1))
    return [torch.randn(n, generator=generator, dtype=torch.float64).requires_grad_() for n in sizes]


def compiled(layer: Any, policy: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(layer, backend="aot_hooks", options={"inner": "aten", "policy": policy, **options})


def gradients(fn: Any, args: list[Tensor]) -> tuple[Tensor, ...]:
    needed = [x for x in args if x.requires_grad]
    return torch.autograd.grad(fn(*args).cos().sum(), needed)


def results_saved(fn: Any) -> int:
    """How many saved tensors are as large as the product's result."""
    return sum(d.saved.nbytes == RESULT and not d.saved.is_input for d in aot_hooks.last_plans(fn)[0].decisions)


@pytest.mark.parametrize("layer", [rows, linear, batched, converted, gathered])
def test_the_result_of_a_product_with_scaled_rows_is_not_saved(layer: Layer) -> None:
    args = arguments()
    fn, exact = compiled(layer, SAME), compiled(layer, lossless())
    found, expected = gradients(fn, args), gradients(layer, args)
    assert all(map(torch.equal, gradients(exact, args), expected)), "exact hooks keep torch's products and sums"
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-5 if layer is converted else 1e-12, atol=1e-6 if layer is converted else 1e-12
        )
    fewer = results_saved(exact) - results_saved(fn)
    assert fewer == (layer is not converted), "float32 results are not as large"
    assert aot_hooks.last_plans(fn)[0].saved_bytes < aot_hooks.last_plans(exact)[0].saved_bytes


@pytest.mark.parametrize(
    ("layer", "hidden"),
    [(with_bias, HIDDEN), (read_elsewhere, HIDDEN), (by_columns, HIDDEN), (rows, WIDTH), (rows, 2 * WIDTH)],
)
def test_other_products_stay_as_they_are(layer: Layer, hidden: int) -> None:
    args = arguments(hidden)
    fn, exact = compiled(layer, SAME), compiled(layer, lossless())
    assert all(map(torch.equal, gradients(fn, args), gradients(exact, args)))
    assert results_saved(fn) == results_saved(exact)


@pytest.mark.parametrize("frozen", [0, 1, 2])
@pytest.mark.parametrize("hidden", [HIDDEN, 2 * WIDTH])
def test_operands_without_gradients(frozen: int, hidden: int) -> None:
    args = arguments(hidden)
    args[frozen] = args[frozen].detach()
    for a, b in zip(gradients(compiled(rows, SAME), args), gradients(rows, args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def in_a_row(h: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return (h @ w * s) @ (w.t() @ w).repeat(1, 2) * s


def test_two_products_in_a_row() -> None:
    args = arguments()
    fn = compiled(in_a_row, SAME)
    for a, b in zip(gradients(fn, args), gradients(in_a_row, args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_in_float16_numbers_are_scaled_before_the_product() -> None:
    """A loss scale of 2**14, and scores below 0.05: without the scores gradients of the rows would be infinite."""
    h, w, s = (x.detach().half() for x in arguments())
    args = [h.requires_grad_(), w.mul_(10).requires_grad_(), s.sigmoid().mul(0.05).requires_grad_()]

    def loss(h: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return (h @ w * s).float().square().sum() * 2.0**14

    found, expected = (torch.autograd.grad(f(*args), args) for f in (compiled(loss, SAME), loss))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1.0)


@pytest.mark.parametrize(
    "reduce", [Tensor.sum, lambda z: torch.cat([z, z[:, :3]], 1).square().sum()], ids=["sum", "cut"]
)
def test_gradients_of_any_strides_reach_a_grouped_product(reduce: Callable[[Tensor], Tensor]) -> None:
    generator = torch.Generator().manual_seed(3)
    h, w, s = (
        torch.randn(n, generator=generator).bfloat16().requires_grad_() for n in ((64, 16), (4, 16, 32), (64, 1))
    )
    ends = torch.tensor([10, 20, 40, 64], dtype=torch.int32)

    def loss(h: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return reduce(F.grouped_mm(h, w, offs=ends) * s).float()

    found, expected = (torch.autograd.grad(f(h, w, s), (h, w, s)) for f in (compiled(loss, SAME), loss))
    for a, b in zip(found, expected, strict=True):
        assert float((a.double() - b.double()).norm()) <= 0.01 * float(b.double().norm())


def test_a_check_compares_with_a_graph_that_saves_the_same() -> None:
    """A hook that is wrong is named as the cause."""

    def layer(h: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return h.tanh() @ w * s.sigmoid()

    wrong = Hook("wrong", lambda x: x.clone(), lambda x: x * 0.3, lossy=True)
    args = arguments()
    with pytest.warns(aot_hooks.errors.GradientWarning, match="tanh") as caught:
        compiled(layer, wrong, check=True)(*args).square().sum().backward()
    assert not any("explains only 0" in str(w.message) for w in caught)


def test_sizes_that_change() -> None:
    torch._dynamo.reset()
    fn = torch.compile(rows, backend="aot_hooks", dynamic=True, options={"inner": "aten", "policy": SAME})
    h, w, s = arguments()
    for n in (ROWS // 2, ROWS):
        args = [x.detach().requires_grad_() for x in (h[:n], w, s[:n])]
        for a, b in zip(gradients(fn, args), gradients(rows, args), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert not results_saved(fn) and len(aot_hooks.last_plans(fn)) == 1


class Experts(torch.nn.Module):
    """A router, and experts by `grouped_mm`; the last `dropped` rows are in no group."""

    def __init__(self, dropped: int) -> None:
        super().__init__()
        self.dropped = dropped
        self.router = torch.nn.Parameter(torch.randn(32, 4) / 4)
        self.gate, self.up = (torch.nn.Parameter(torch.randn(4, 32, 16) / 6) for _ in range(2))
        self.down = torch.nn.Parameter(torch.randn(4, 16, 32) / 4)

    def forward(self, x: Tensor) -> Tensor:
        score, expert = (x @ self.router).float().softmax(-1).topk(2)
        flat = expert.reshape(-1)
        order = flat.argsort(stable=True)
        ends = F.one_hot(flat, 4).sum(0).cumsum(0).to(torch.int32)
        ends = torch.cat((ends[:3], ends[3:] - self.dropped))
        own = score.reshape(-1)[order][:, None].to(x.dtype)
        y = self.product(self.hidden(x[order // 2], ends), self.down, ends) * own
        kept = (torch.arange(len(y)) < ends[-1])[:, None]
        return torch.where(kept, y, 0)[order.argsort()].unflatten(0, (-1, 2)).sum(1)

    def hidden(self, x: Tensor, ends: Tensor) -> Tensor:
        return F.silu(self.product(x, self.gate, ends)) * self.product(x, self.up, ends)

    def product(self, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16:
            return F.grouped_mm(x, w, offs=ends)
        group = (torch.arange(len(x))[:, None] >= ends).sum(-1)
        return torch.einsum("rk,rkn->rn", x, torch.cat((w, torch.zeros_like(w[:1])))[group])


def errors(policy: Any, dropped: int, **options: Any) -> tuple[dict[str, float], Any]:
    """Each gradient's relative error with `policy`, measured in float64 from the same numbers; and the function."""
    torch.manual_seed(dropped)
    model, x = Experts(dropped).bfloat16(), torch.randn(64, 32, dtype=torch.bfloat16)
    fn = compiled(model, policy, **options)
    fn(x).float().square().sum().backward()
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    model.double().zero_grad()
    model(x.double()).square().sum().backward()
    exact = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: float((found[name] - g).norm() / g.norm()) for name, g in exact.items()}, fn


@pytest.mark.parametrize("dropped", [0, 5])
def test_experts_have_the_gradients_of_float64(dropped: int) -> None:
    """Rows in no group are as memory was. In eager mode they may reach the router, as NaN times zero; here never."""
    own, _ = errors(SAME, dropped)
    stock, _ = errors(lossless(), dropped)
    assert own.keys() == stock.keys() and len(own) == 4 and max(own.values()) < 0.02
    assert dropped or all(own[name] < 1.5 * stock[name] + 1e-3 for name in own), (own, stock)


def test_float8_of_experts_saves_no_result_and_rounds_the_hidden_rows_once() -> None:
    own, fn = errors(float8(), 0)
    plan = aot_hooks.last_plans(fn)[0]
    wide = [d for d in plan.decisions if d.saved.shape == (128, 32) and not d.saved.is_input and d.packed_bytes]
    assert not wide, "the rows are gathered again, and results are not saved"
    assert max(own.values()) < 0.05
    again, other = errors(float8(), 0, recompute_pointwise=True)
    assert aot_hooks.last_plans(other)[0].packed_bytes < plan.packed_bytes, "hidden rows are computed again"
    assert max(again.values()) < 0.07


def test_a_budget_saves_no_result_either() -> None:
    _, fn = errors(lossless(), 0)
    whole = aot_hooks.last_plans(fn)[0].saved_bytes
    own, fn = errors(budget("1GiB"), 0)
    assert aot_hooks.last_plans(fn)[0].saved_bytes <= whole - 128 * 32 * 2
    assert max(own.values()) < 0.02
