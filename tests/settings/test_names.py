"""`checkpoint_name`: an identity that policies see, the same compiled, eager, and under activation checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sentinel import (
    DOUBLE,
    TRIPLE,
    Chain,
    assert_same,
    compiled,
    eager,
    gradients,
    hand_gradients,
    integers,
    seen,
)
from torch import Tensor, nn

import aot_hooks
from aot_hooks import KEEP, checkpoint_name, saved_tensors_policy
from aot_hooks.errors import OptionError
from aot_hooks.policies import first_match, only_these_names


def named(model: Chain, **names: str) -> Any:
    """The chain with names on its intermediates ("h1", "h2")."""

    class Named(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for i, w in enumerate(model.weights, 1):
                x = x @ w
                if f"h{i}" in names:
                    x = checkpoint_name(x, names[f"h{i}"])
            return x

    return Named()


# --- an identity -----------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_inference_tensors_pass() -> None:
    """They have no version, and autograd never saves them."""
    with torch.inference_mode():
        x = torch.ones(2)
        assert checkpoint_name(x, "a") is x
        assert checkpoint_name(x.view(1, 2), "b").is_inference()


@pytest.mark.core
@pytest.mark.parametrize(
    "inner", [pytest.param("aten", marks=pytest.mark.core), pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_is_the_identity_bitwise_with_the_identity_gradient(inner: str) -> None:
    f = lambda x: checkpoint_name(x.sin(), "a").exp()  # noqa: E731
    g = lambda x: x.sin().exp()  # noqa: E731
    wrap = eager if inner == "eager" else lambda fn: compiled(fn, inner=inner)
    x = torch.randn(5, 7, requires_grad=True)
    out, expected = wrap(f)(x), wrap(g)(x)
    weight = torch.randn(5, 7)
    assert torch.equal(out, expected)
    assert_same(torch.autograd.grad(out, x, weight), torch.autograd.grad(expected, x, weight))


def test_is_the_tensor_itself_in_eager_mode() -> None:
    x = torch.randn(3)
    assert checkpoint_name(x, "a") is x and not vars(x)
    assert checkpoint_name(x.requires_grad_(), "a") is x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_every_dtype_and_layout(dtype: torch.dtype, wrap: Any) -> None:
    x = torch.randn(4, 6).gt(0).to(dtype).t()[1:, ::2]
    y = wrap(lambda x: checkpoint_name(x, "x"))(x)
    assert y.dtype == dtype and y.stride() == x.stride() and torch.equal(y, x)


@pytest.mark.core
def test_costs_no_operator_that_computes_and_no_byte() -> None:
    """An alias in the graph as it is; nothing at all in the one that Inductor's passes leave."""
    graphs: list[list[str]] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(n.target) for n in gm.graph.nodes if n.op.startswith("call")])
        return gm

    lin = nn.Linear(4, 4)
    torch.compile(lambda x: checkpoint_name(lin(x), "a").sin(), backend=backend, fullgraph=True)(torch.randn(2, 4))
    assert [t for t in graphs[0] if "aten" in t] == ["aten.alias.default"] and len(graphs[0]) == 3
    plans = []
    for fn in (lambda x: checkpoint_name(lin(x), "a").sin(), lambda x: lin(x).sin()):
        call = compiled(fn, policy=DOUBLE)
        call(torch.randn(2, 4)).sum().backward()
        (plan,) = aot_hooks.last_plans(call)
        plans.append((plan.saved_bytes, plan.packed_bytes))
    assert plans[0] == plans[1]


@pytest.mark.slow
@pytest.mark.core
def test_inductor_computes_the_same_operators_with_names_and_without() -> None:
    graphs: list[list[str]] = []

    def keep(graph: torch.fx.Graph) -> None:
        graphs.append([str(n.target) for n in graph.nodes if n.op == "call_function"])

    lin = nn.Linear(8, 8)
    for fn in (lambda x: checkpoint_name(lin(x), "a").sin() * 2, lambda x: lin(x).sin() * 2):
        call = compiled(fn, inner="inductor", inductor={"post_grad_custom_post_pass": keep})
        call(torch.randn(2, 8)).sum().backward()
    half = len(graphs) // 2
    assert graphs[:half] == graphs[half:] and half == 2 and not any("alias" in t for g in graphs for t in g)


@pytest.mark.parametrize("args", [(3, "a"), (torch.ones(2), 3), (torch.ones(2), "")], ids=["tensor", "type", "empty"])
def test_bad_arguments(args: Any) -> None:
    with pytest.raises(OptionError, match="checkpoint_name"):
        checkpoint_name(*args)


# --- what a name covers ----------------------------------------------------------------------------------------------


@pytest.mark.core
def test_chooses_exactly_what_is_named(model: Chain, x: Tensor, wrap: Any) -> None:
    call = wrap(named(model, h1="first", h2="second"))
    for policy, factors in (
        (only_these_names({"first": DOUBLE}), {"h1": 2}),
        (only_these_names({"second": DOUBLE}), {"h2": 2}),
        (first_match(only_these_names({"first": DOUBLE}), TRIPLE), {"h1": 2, "h2": 3}),
        (first_match(only_these_names({"first": KEEP}), TRIPLE), {"h2": 3}),
        (only_these_names({"third": DOUBLE}), {}),
    ):
        with saved_tensors_policy(policy):
            assert_same(gradients(call, model, x), hand_gradients(model, x, **factors))


@pytest.mark.slow
@pytest.mark.core
def test_chooses_exactly_what_is_named_under_inductor(model: Chain, x: Tensor) -> None:
    """Where torch's passes over the joint graph remove the alias before the graph is cut."""
    seen_by_user: list[int] = []

    class Mine(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen_by_user.append(len(graph.nodes))

        def uuid(self) -> str:
            return "mine"

    call = compiled(named(model, h1="first"), inner="inductor", inductor={"joint_custom_pre_pass": Mine()})
    for policy, factors in ((only_these_names({"first": DOUBLE}), {"h1": 2}), (only_these_names({"b": DOUBLE}), {})):
        with saved_tensors_policy(policy):
            assert_same(gradients(call, model, x), hand_gradients(model, x, **factors))
    assert len(seen_by_user) == 2, "the user's own pass at that place runs as well"


@pytest.mark.core
def test_covers_views_of_the_named(wrap: Any) -> None:
    """A `chunk` of a named tensor has the name; so has the base of a named view that shows all of it."""
    lin = nn.Linear(8, 24)

    def chunks(x: Tensor) -> Tensor:
        q, k, v = checkpoint_name(lin(x), "qkv").chunk(3, -1)
        return q.sin() * k.cos() + v.exp()

    def permuted(x: Tensor) -> Tensor:
        q, k, v = checkpoint_name(lin(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4), "qkv").unbind(0)
        return F.scaled_dot_product_attention(q, k, v)

    for fn in (chunks, permuted):
        rows = seen(wrap(fn), torch.randn(2, 5, 8, requires_grad=True))
        assert rows and {(r.checkpoint_names, r.op) for r in rows} == {(("qkv",), "aten.addmm.default")}


@pytest.mark.core
def test_a_name_on_a_part_is_not_on_its_neighbours(wrap: Any) -> None:
    lin = nn.Linear(8, 24)

    def f(x: Tensor) -> Tensor:
        q, k, v = lin(x).chunk(3, -1)
        q = checkpoint_name(q, "q")
        return torch.softmax(q.unflatten(-1, (2, 4)), -1).flatten(-2) @ k.mT @ v

    model, x = f, torch.randn(2, 5, 8, requires_grad=True)
    assert seen(wrap(model), x) == []  # softmax saves its result only
    g = lambda x: (lambda q, k, v: checkpoint_name(q, "q").unflatten(-1, (2, 4)).sin().flatten(-2) * k.sin() * v)(  # noqa: E731
        *lin(x).chunk(3, -1)
    )
    rows = []
    with saved_tensors_policy(lambda saved: rows.append((saved.op, saved.checkpoint_names)) or KEEP):
        wrap(g)(x).sum().backward()
    parts = {names for op, names in rows if op == "aten.addmm.default"}
    # Footgun: a graph may save the whole that q, k and v are parts of, and then the name of a part is not on it
    assert parts == ({("q",), ()} if wrap is eager else {()})


def test_not_on_what_is_computed_from_it_nor_on_what_it_was_before(wrap: Any) -> None:
    def f(x: Tensor) -> Tensor:
        y = checkpoint_name(x.sin(), "y")
        return (y * 2).exp().sin() + y.add(1).clone().sin()

    rows = seen(wrap(f), torch.randn(3, 4, requires_grad=True))
    assert {r.op for r in rows} <= {"aten.sin.default"}


def test_not_on_a_tensor_that_was_changed_in_place_since(wrap: Any) -> None:
    def f(x: Tensor) -> Tensor:
        y = checkpoint_name(x @ x, "y")
        y.add_(1)
        return y @ y

    assert seen(wrap(f), torch.randn(4, 4, requires_grad=True)) == []


@pytest.mark.core
@pytest.mark.parametrize("scope", ["donated", "no_static"])
@pytest.mark.parametrize("in_module", [True, False])
def test_an_operator_that_saves_its_own_result_before_it_is_named(wrap: Any, in_module: bool, scope: str) -> None:
    """The name is set after autograd has saved the tensor: it counts, because the value is the same."""

    def gate(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint_name(torch.relu(x @ w), "gate") @ w

    class Gate(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return gate(x, w)

    x, w = integers(4, 4).requires_grad_(), integers(4, 4).requires_grad_()
    for name, factor in (("gate", 2), ("other", 1)):
        with saved_tensors_policy(only_these_names({name: DOUBLE}), scope=scope):
            out = wrap(Gate() if in_module else gate)(x, w)
        (got,) = torch.autograd.grad(out.sum(), w)
        a, wd = x.detach(), w.detach()
        h = torch.relu(a @ wd)
        g = torch.ones(4, 4) @ wd.T * (h > 0)
        assert torch.equal(got, factor * h.T @ torch.ones(4, 4) + a.T @ g)


def test_several_names(wrap: Any) -> None:
    f = lambda x: checkpoint_name(checkpoint_name(x @ x, "a"), "b") @ x  # noqa: E731
    (row,) = seen(wrap(f), torch.randn(4, 4, requires_grad=True))
    assert set(row.checkpoint_names) == {"a", "b"}


def test_a_named_input_is_seen_in_scope_all(model: Chain, x: Tensor) -> None:
    f = lambda x: model(checkpoint_name(x, "x"))  # noqa: E731
    for wrap in (compiled, eager):
        with saved_tensors_policy(only_these_names({"x": DOUBLE}), scope="all"):
            assert_same(gradients(wrap(f), model, x), hand_gradients(model, x, x=2))
        with saved_tensors_policy(only_these_names({"x": DOUBLE})):
            assert_same(gradients(wrap(f), model, x), hand_gradients(model, x))


def test_a_named_output_stays_and_aliases_nothing_it_should_not(model: Chain, x: Tensor, wrap: Any) -> None:
    class F(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = checkpoint_name(x @ model.weights[0], "h")
            return h @ model.weights[1] @ model.weights[2], h

    with saved_tensors_policy(only_these_names({"h": DOUBLE})):
        out, h = wrap(F())(x)
    assert torch.equal(h, x @ model.weights[0])
    got = torch.autograd.grad(out.sum(), [x, *model.parameters()])
    assert_same(got, hand_gradients(model, x))
