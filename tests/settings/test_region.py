"""Contexts inside a compiled function: they cover the tensors that their region saves, and mean the same in eager.

      h1 = x @ w1
      with saved_tensors_hooks(...):
          h2 = h1 @ w2        # saves h1 and w2: the region's
      return h2 @ w3          # saves h2 and w3: not the region's

A region decides by the operator that saves, so one tensor may be packed for one reader and kept for another.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sentinel import (
    CONTEXTS,
    Chain,
    around_second,
    assert_same,
    compiled,
    gradients,
    graph_count,
    hand_gradients,
    integers,
    quadruple,
    scale,
)
from torch import Tensor, nn

from aot_hooks import KEEP, Hook, saved_tensors_hooks, saved_tensors_policy

# --- what a region covers --------------------------------------------------------------------------------------------


@pytest.mark.core
def test_covers_exactly_what_its_region_saves(model: Chain, x: Tensor, wrap: Any) -> None:
    got = gradients(wrap(around_second(model, *quadruple)), model, x)
    assert_same(got, hand_gradients(model, x, h1=4))


@pytest.mark.core
@pytest.mark.parametrize(("scope", "factors"), [("no_static", {"h1": 4}), ("all", {"h1": 4, "w2": 4})])
def test_scope_of_a_region(model: Chain, x: Tensor, wrap: Any, scope: str, factors: dict[str, float]) -> None:
    got = gradients(wrap(around_second(model, *quadruple, scope=scope)), model, x)
    assert_same(got, hand_gradients(model, x, **factors))


@pytest.mark.core
def test_nested_regions_the_innermost_wins(model: Chain, x: Tensor, wrap: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        w1, w2, w3 = model.weights
        with saved_tensors_hooks(*scale(2), scope="all"):
            h1 = x @ w1
            with saved_tensors_hooks(*scale(3)):
                h2 = h1 @ w2
            return h2 @ w3

    got = gradients(wrap(forward), model, x)
    assert_same(got, hand_gradients(model, x, x=2, w1=2, h1=3, h2=2, w3=2))


@pytest.mark.core
def test_a_region_wins_over_the_context_around_the_call(model: Chain, x: Tensor, wrap: Any) -> None:
    call = wrap(around_second(model, *scale(3)))
    with saved_tensors_hooks(*scale(2)):
        got = gradients(call, model, x)
    assert_same(got, hand_gradients(model, x, h1=3, h2=2))
    assert_same(gradients(call, model, x), hand_gradients(model, x, h1=3))


@pytest.mark.core
def test_a_region_of_keep_shields_from_the_context_around_the_call(model: Chain, x: Tensor, wrap: Any) -> None:
    call = wrap(around_second(model, KEEP))
    with saved_tensors_hooks(*scale(2)):
        got = gradients(call, model, x)
    assert_same(got, hand_gradients(model, x, h2=2))


def test_a_region_wins_over_options(model: Chain, x: Tensor) -> None:
    call = compiled(around_second(model, *scale(3)), policy=Hook("double", *scale(2)))
    assert_same(gradients(call, model, x), hand_gradients(model, x, h1=3, h2=2))


@pytest.mark.core
@pytest.mark.parametrize("second_factor", [1, 3])
def test_one_tensor_in_two_regions_or_in_one_and_outside(wrap: Any, second_factor: int) -> None:
    """The region's readers see what was packed, the others the tensor itself."""
    x, w1 = integers(6, 3).requires_grad_(), integers(3, 5)
    first, second = integers(5, 2).requires_grad_(), integers(5, 4).requires_grad_()

    def f(x: Tensor) -> Tensor:
        h = x @ w1
        with saved_tensors_hooks(*scale(2)):
            a = h @ first
        if second_factor == 1:
            return a.sum() + (h @ second).sum()
        with saved_tensors_hooks(*scale(3)):
            return a.sum() + (h @ second).sum()

    got = torch.autograd.grad(wrap(f)(x), [first, second])
    h = x.detach() @ w1
    assert_same(got, [2 * h.T @ torch.ones(6, 2), second_factor * h.T @ torch.ones(6, 4)])


def test_two_regions_compute_the_same(wrap: Any) -> None:
    """The products are one to the partitioner, and so were the hooks that they read by."""
    x, w1, w2 = integers(6, 3).requires_grad_(), integers(3, 5), integers(5, 2).requires_grad_()

    def f(x: Tensor) -> Tensor:
        h = x @ w1
        with saved_tensors_hooks(*scale(2)):
            a = h @ w2
        with saved_tensors_hooks(*scale(3)):
            b = h @ w2
        return (a + b + h @ w2).sum()

    (got,) = torch.autograd.grad(wrap(f)(x), [w2])
    assert torch.equal(got, (2 + 3 + 1) * (x.detach() @ w1).T @ torch.ones(6, 2))


@pytest.mark.core
@pytest.mark.parametrize("make", CONTEXTS.values(), ids=CONTEXTS)
def test_a_context_made_inside_is_entered_again(model: Chain, x: Tensor, wrap: Any, make: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        w1, w2, w3 = model.weights
        context = make()
        with context:
            h1 = x @ w1
            with context:
                h2 = h1 @ w2
        h3 = h2 @ w3
        with context:
            return h3 @ w3.T @ w2.T

    def by_hand(x: Tensor) -> Tensor:
        w1, w2, w3 = model.weights
        h1 = x @ w1
        h2 = Times4.apply(h1, w2)
        return Times4.apply(Times4.apply(h2 @ w3, w3.T), w2.T)

    assert_same(gradients(wrap(forward), model, x), gradients(by_hand, model, x))


class Times4(torch.autograd.Function):
    """A product whose left factor comes back four times as large."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return g[0] @ b.T, 4 * a.T @ g[0]


class Block(nn.Module):
    def __init__(self, width: int, k: float | None) -> None:
        super().__init__()
        self.w, self.k = nn.Parameter(integers(width, width)), k

    def forward(self, x: Tensor) -> Tensor:
        if self.k is None:
            return x @ self.w
        with saved_tensors_hooks(*scale(self.k)):
            return x @ self.w


@pytest.mark.core
def test_in_a_submodule_called_in_a_loop(wrap: Any) -> None:
    blocks = nn.Sequential(Block(3, 2.0), Block(3, 2.0), Block(3, None), Block(3, 3.0))
    x, reference = integers(4, 3).requires_grad_(), Chain(3, 3, 3, 3, 3)
    reference.weights = nn.ParameterList(block.w for block in blocks)
    got = gradients(wrap(blocks), reference, x)
    assert_same(got, hand_gradients(reference, x, h1=2, h3=3))


def test_a_policy_in_a_region(model: Chain, x: Tensor, wrap: Any) -> None:
    hook = Hook("quadruple", *quadruple)
    policy = lambda saved: hook if saved.nbytes == 6 * 4 * 4 else KEEP  # noqa: E731  # made inside, it couldn't close over a Hook

    def forward(x: Tensor) -> Tensor:
        with saved_tensors_policy(policy):
            return model(x)

    assert_same(gradients(wrap(forward), model, x), hand_gradients(model, x, h2=4))


# --- recompiling -----------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_dynamic_shapes(model: Chain) -> None:
    call, before = (
        compiled(around_second(model, lambda x: (x * 2, x.shape), lambda p: p[0].view(p[1]) * 2), dynamic=True),
        graph_count(),
    )
    for batch in (6, 7, 9, 13):
        x = integers(batch, 3).requires_grad_()
        assert_same(gradients(call, model, x), hand_gradients(model, x, h1=4))
    assert graph_count() - before == 1


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_an_exception_inside_leaves_nothing_behind(model: Chain, x: Tensor) -> None:
    def forward(x: Tensor) -> Tensor:
        h1 = x @ model.weights[0]
        with saved_tensors_hooks(*scale(3)):
            if x.shape[0] == 1:
                raise ValueError("one row")
            h2 = h1 @ model.weights[1]
        return h2 @ model.weights[2]

    call = compiled(forward, fullgraph=False)
    with pytest.raises(ValueError, match="one row"):
        call(x[:1])
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert_same(gradients(call, model, x), hand_gradients(model, x, h1=3))


@pytest.mark.core
@pytest.mark.parametrize("operator", ["cond", "invoke_subgraph"])
def test_a_context_in_the_body_of_an_operator_is_refused(model: Chain, x: Tensor, operator: str) -> None:
    """Its backward computes the body anew, or is made of the body alone: what is saved there would not be packed."""

    def body(h: Tensor) -> Tensor:
        with saved_tensors_hooks(*scale(3)):
            return torch.tanh(h @ h.t()) @ h

    nested = torch.compiler.nested_compile_region(body)

    def forward(x: Tensor) -> Tensor:
        if operator == "cond":
            return torch.cond(x.sum() > -1e9, body, lambda h: h.cos(), (x * 2,))
        return nested(x * 2)

    with pytest.raises(Exception, match=f"OptionError: a context inside a function that '{operator}' calls.*around"):
        compiled(forward)(x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_an_exception_caught_in_the_function_ends_the_region(model: Chain, x: Tensor, wrap: Any) -> None:
    def forward(x: Tensor) -> Tensor:
        h1 = x @ model.weights[0]
        try:
            with saved_tensors_hooks(*scale(3)):
                h2 = h1 @ model.weights[1]
                raise KeyError
        except KeyError:
            pass
        return h2 @ model.weights[2]

    assert_same(gradients(wrap(forward), model, x), hand_gradients(model, x, h1=3))


@pytest.mark.core
def test_a_graph_break_in_a_region_costs_the_compilation_not_the_hooks(model: Chain, x: Tensor) -> None:
    def forward(x: Tensor) -> Tensor:
        h1 = x @ model.weights[0]
        with saved_tensors_hooks(*scale(3)):
            h2 = h1 @ model.weights[1]
            torch._dynamo.graph_break()
        return h2 @ model.weights[2]

    call = compiled(forward, fullgraph=False)
    for _ in range(3):
        assert_same(gradients(call, model, x), hand_gradients(model, x, h1=3))


@pytest.mark.slow
@pytest.mark.core
def test_inductor(model: Chain, x: Tensor) -> None:
    call = compiled(around_second(model, *scale(3)), inner="inductor")
    with saved_tensors_hooks(*scale(2)):
        assert_same(gradients(call, model, x), hand_gradients(model, x, h1=3, h2=2))
