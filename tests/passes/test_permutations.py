"""Gradients of rows that a permutation has gathered: gathered as well, with the numbers of `index_put`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from aot_hooks import KEEP, budget, float8, lossless, offload, partitioner
from aot_hooks.hook import Hook
from aot_hooks.policies import first_match, larger_than

N, TIMES, WIDTH = 24, 3, 16
aten = torch.ops.aten
PUTS = (aten.index_put.default, aten._unsafe_index_put.default, aten.index_add.default)

Layer = Callable[[Tensor, Tensor], Tensor]


def experts(x: Tensor) -> Tensor:
    """The numbers of the experts that each row goes to, one after the other."""
    return (x.detach()[:, :TIMES].abs() * 3).long().reshape(-1) % 5


def by_quotients(x: Tensor, w: Tensor) -> Tensor:
    order = experts(x).argsort()
    y = x.sin()[order // TIMES] @ w
    return y[order.argsort()].unflatten(0, (-1, TIMES)).sum(1)


def by_selection(x: Tensor, w: Tensor) -> Tensor:
    order = experts(x).sort(stable=True).indices
    y = x.sin().index_select(0, order // TIMES) @ w
    return y.index_select(0, order.argsort()).unflatten(0, (-1, TIMES)).sum(1)


def by_tokens(x: Tensor, w: Tensor) -> Tensor:
    """As in transformers: rows are repeated first, then sorted."""
    token = torch.arange(len(x)).unsqueeze(1).expand(-1, TIMES).reshape(-1)
    order = experts(x).argsort()
    y = x.sin()[token][order] @ w
    return y[order.argsort()].view(len(x), TIMES, -1).sum(1)


def without_inverse(x: Tensor, w: Tensor) -> Tensor:
    """Nothing takes the rows back, so their sum needs the inverse, which nobody has computed."""
    return x.sin()[experts(x).argsort() // TIMES] @ w


def by_two_products(x: Tensor, w: Tensor) -> Tensor:
    """As of experts with a gate: the gradient of the rows is a sum."""
    order = experts(x).argsort()
    rows = x.sin()[order // TIMES]
    y = (rows @ w).sin() * (rows @ w.t())
    return y[order.argsort()].unflatten(0, (-1, TIMES)).sum(1)


def of_the_output(x: Tensor, w: Tensor) -> Tensor:
    """The rows' gradient is that of the output, an input of the backward."""
    return (x @ w).sin()[torch.arange(len(x)).repeat_interleave(TIMES)]


def any_rows(x: Tensor, w: Tensor) -> Tensor:
    return x.sin()[experts(x)] @ w


def part_of_the_rows(x: Tensor, w: Tensor) -> Tensor:
    return x.sin()[experts(x).argsort()[:N] // TIMES] @ w


def arguments(n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    x, w = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((n, WIDTH), (WIDTH, WIDTH)))
    return x.requires_grad_(), w.requires_grad_()


def gradients(fn: Layer, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(fn(*args).cos().sum(), args)


def compiled(layer: Layer, policy: Any) -> Layer:
    torch._dynamo.reset()
    return torch.compile(layer, backend="aot_hooks", options={"inner": "aten", "policy": policy})


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many operators of each joint graph add to rows, before and after."""
    found: list[tuple[int, int]] = []
    gather = partitioner.gather_gradients

    def counted(joint: GraphModule, **named: Any) -> None:
        def count() -> int:
            return sum(node.target in PUTS for node in joint.graph.nodes)

        before = count()
        gather(joint, **named)
        found.append((before, count()))

    monkeypatch.setattr(partitioner, "gather_gradients", counted)
    return found


EXACTLY = Hook("as it is", lambda x: x.clone(), lambda x: x, lossy=True)  # so that only sums differ


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("layer", "added"),
    [
        (by_quotients, (2, 0)),
        (by_selection, (2, 0)),
        (by_tokens, (3, 0)),
        (without_inverse, (1, 0)),
        (by_two_products, (2, 0)),
    ],
)
def test_rows_of_a_permutation_are_gathered(puts: Any, layer: Layer, added: tuple[int, int], dynamic: bool) -> None:
    fn = compiled(layer, EXACTLY)
    for n in (N, 2 * N) if dynamic else (N,):
        args = arguments(n)
        if dynamic:
            torch._dynamo.mark_dynamic(args[0], 0)
        for found, exact in zip(gradients(fn, args), gradients(layer, args), strict=True):
            torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-13)
    assert puts == [added]


def test_rows_of_two_products_are_not_in_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    gather = partitioner.gather_gradients

    def noted(joint: GraphModule, **named: Any) -> None:
        gather(joint, **named)
        names.extend(n.name for n in joint.graph.nodes if n.target in (aten.mm.default, aten.sum.dim_IntList))

    monkeypatch.setattr(partitioner, "gather_gradients", noted)
    args = arguments()
    found_by_two = gradients(compiled(by_two_products, EXACTLY), args)
    for found, exact in zip(found_by_two, gradients(by_two_products, args), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-13)
    assert [name.partition("_")[0] for name in names] == "mm mm sum mm mm sum mm mm sum".split()


@pytest.mark.parametrize("layer", [any_rows, part_of_the_rows])
def test_other_rows_are_added(puts: Any, layer: Layer) -> None:
    found = gradients(compiled(layer, EXACTLY), arguments())
    assert puts == [(1, 1)]
    assert all(map(torch.equal, found, gradients(layer, arguments())))


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        (lossless(), 1),
        (offload(min_bytes=0), 1),
        (budget("1GiB", max_error=0), 1),
        (budget("1GiB", allow=("recompute",)), 1),
        (larger_than(1 << 20, lossless()), 1),
        (float8(), 0),
        (offload(then=float8()), 0),
        (budget("1GiB"), 0),
        (first_match(larger_than(1 << 20, KEEP), float8()), 0),
    ],
)
def test_exact_means_keep_the_order_of_sums(puts: Any, policy: Any, left: int) -> None:
    found = gradients(compiled(by_quotients, policy), arguments())
    assert puts == [(2, left)]
    if left:
        assert all(map(torch.equal, found, gradients(by_quotients, arguments())))


def test_only_gradients_are_gathered(puts: Any) -> None:
    """Outputs are those of the program without hooks, bit for bit."""

    def forward(x: Tensor, w: Tensor) -> Tensor:
        order = experts(x).argsort()
        return torch.zeros_like(x).index_add(0, order // TIMES, x.sin()[order // TIMES] @ w)

    fn = compiled(forward, EXACTLY)
    assert torch.equal(fn(*arguments()), forward(*arguments()))
    assert puts == [(2, 1)]


def test_a_sum_of_low_precision_is_rounded_once() -> None:
    low = tuple(t.detach().bfloat16().requires_grad_() for t in arguments())
    exact = gradients(by_quotients, tuple(t.detach().double().requires_grad_() for t in low))

    def error(grads: tuple[Tensor, ...]) -> float:
        return float((grads[0].double() - exact[0]).norm() / exact[0].norm())

    assert error(gradients(compiled(by_quotients, EXACTLY), low)) <= 1.05 * error(gradients(by_quotients, low))
