"""`checkpoint_name`: an identity that policies see, the same compiled, eager, and under activation checkpointing."""

from __future__ import annotations

import functools
import gc
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sentinel import Chain, assert_same, compiled, gradients, graph_count, hand_gradients, integers, scale
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks import KEEP, Hook, SavedTensor, checkpoint_name, saved_tensors_policy
from aot_hooks.errors import OptionError
from aot_hooks.policies import first_match, only_these_names

DOUBLE, TRIPLE = Hook("double", *scale(2)), Hook("triple", *scale(3))


def eager(fn: Any, **_: Any) -> Any:
    return fn


WRAPS = pytest.mark.parametrize("wrap", [compiled, eager], ids=["compiled", "eager"])


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


def seen(call: Any, *args: Tensor) -> list[SavedTensor]:
    """Rows of the intermediates with names; each once."""
    rows: dict[Any, SavedTensor] = {}

    def spy(saved: SavedTensor) -> Hook:
        if saved.checkpoint_names:
            rows[saved.checkpoint_names, saved.op, saved.shape] = saved
        return KEEP

    with saved_tensors_policy(spy):
        call(*args).sum().backward()
    return list(rows.values())


# --- an identity -----------------------------------------------------------------------------------------------------


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
@WRAPS
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
@WRAPS
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
@WRAPS
def test_covers_views_of_the_named(wrap: Any) -> None:
    """`chunk` of a named tensor is named; of a whole view that is named, so is what it is a view of."""
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
@WRAPS
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


@WRAPS
def test_not_on_what_is_computed_from_it_nor_on_what_it_was_before(wrap: Any) -> None:
    def f(x: Tensor) -> Tensor:
        y = checkpoint_name(x.sin(), "y")
        return (y * 2).exp().sin() + y.add(1).clone().sin()

    rows = seen(wrap(f), torch.randn(3, 4, requires_grad=True))
    assert {r.op for r in rows} <= {"aten.sin.default"}


@WRAPS
def test_not_on_a_tensor_that_was_changed_in_place_since(wrap: Any) -> None:
    def f(x: Tensor) -> Tensor:
        y = checkpoint_name(x @ x, "y")
        y.add_(1)
        return y @ y

    assert seen(wrap(f), torch.randn(4, 4, requires_grad=True)) == []


@pytest.mark.core
@WRAPS
@pytest.mark.parametrize("scope", ["donated", "no_static"])
@pytest.mark.parametrize("in_module", [True, False])
def test_an_operator_that_saves_its_own_result_before_it_is_named(wrap: Any, in_module: bool, scope: str) -> None:
    """The name comes after the save: what was saved is the same value all the same."""

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


@WRAPS
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


@WRAPS
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


# --- where ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inner", [pytest.param("aten", marks=pytest.mark.core), pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_in_full_graphs_static_and_dynamic(inner: str, dynamic: bool) -> None:
    lin = nn.Linear(8, 8)
    f = lambda x: checkpoint_name(lin(x).view(-1, 2, 4).transpose(0, 1), "h").sin()  # noqa: E731
    call, before = compiled(f, inner=inner, dynamic=dynamic), graph_count()
    assert [r.checkpoint_names for r in seen(call, torch.randn(6, 8, requires_grad=True))] == [("h",)]
    seen(call, torch.randn(9, 8, requires_grad=True))
    assert graph_count() - before == (1 if dynamic else 2)


@pytest.mark.core
@WRAPS
def test_under_activation_checkpointing(wrap: Any) -> None:
    """What is recomputed isn't saved; what is named outside is chosen; gradients are those without names."""
    lin = nn.Linear(8, 8)

    def block(x: Tensor) -> Tensor:
        return checkpoint_name(lin(x).sin(), "inside").exp()

    def f(x: Tensor) -> Tensor:
        h = checkpoint_name(lin(x), "outside")
        return checkpoint(block, h.sin(), use_reentrant=False)

    x = torch.randn(4, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(compiled(lambda x: lin(lin(x).sin()).sin().exp())(x).sum(), x)
    rows = seen(wrap(f), x)
    assert {r.checkpoint_names for r in rows} == {("outside",)}
    torch.testing.assert_close(x.grad, expected)


def test_a_name_on_what_a_checkpoint_keeps() -> None:
    """Selective checkpointing saves the product inside; its name is there."""
    w = integers(4, 4).requires_grad_()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        must = torch.utils.checkpoint.CheckpointPolicy
        return must.MUST_SAVE if op is torch.ops.aten.mm.default else must.PREFER_RECOMPUTE

    make = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, policy)
    f = lambda x: checkpoint_name(x @ w, "product").sin() @ w  # noqa: E731
    g = lambda x: checkpoint(f, x, use_reentrant=False, context_fn=make)  # noqa: E731
    rows = seen(compiled(g), torch.randn(4, 4, requires_grad=True))
    assert [(r.checkpoint_names, r.op) for r in rows] == [(("product",), "aten.mm.default")]


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint_name(self.lin(x), "one").sin()
        torch._dynamo.graph_break()
        return checkpoint_name(self.lin(h), "two").sin()


@pytest.mark.core
def test_on_both_sides_of_a_graph_break() -> None:
    rows = seen(compiled(Broken(), fullgraph=False), torch.randn(3, 8, requires_grad=True))
    assert {r.checkpoint_names for r in rows} == {("one",), ("two",)}


@pytest.mark.core
def test_in_a_frame_that_runs_in_python_inside_a_compiled_model() -> None:
    """A context that is broken runs its frame in Python; Dynamo must not compile `checkpoint_name` alone there."""
    lin = nn.Linear(8, 8)

    def f(x: Tensor) -> Tensor:
        with saved_tensors_policy(only_these_names({"h": DOUBLE})):
            h = checkpoint_name(x @ lin.weight, "h")
            torch._dynamo.graph_break()
            return (h @ lin.weight).sin()

    before = graph_count()
    x = integers(4, 8).requires_grad_()
    out = compiled(f, fullgraph=False)(x)
    (got,) = torch.autograd.grad(out.sum(), lin.weight)
    w, a = lin.weight.detach(), x.detach()
    h = a @ w
    g = torch.cos(h @ w)
    torch.testing.assert_close(got, 2 * h.T @ g + a.T @ (g @ w.T))
    assert graph_count() - before == 0


def test_without_hooks_and_without_our_backend() -> None:
    f = lambda x: checkpoint_name(x.sin(), "a").exp()  # noqa: E731
    x = torch.randn(4, requires_grad=True)
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(f, backend=backend, fullgraph=True)(x), f(x))


# --- recompiling, memory ----------------------------------------------------------------------------------------------


@pytest.mark.core
def test_a_changed_name_recompiles_once(model: Chain, x: Tensor) -> None:
    class Named(nn.Module):
        name = "a"

        def forward(self, x: Tensor) -> Tensor:
            w1, w2, w3 = model.weights
            return checkpoint_name(x @ w1, self.name) @ w2 @ w3

    module = Named()
    call, before = compiled(module), graph_count()
    for name in ("a", "a", "b", "b", "a"):
        module.name = name
        with saved_tensors_policy(only_these_names({"a": DOUBLE})):
            got = gradients(call, model, x)
        assert_same(got, hand_gradients(model, x, **({"h1": 2} if name == "a" else {})))
    assert graph_count() - before == 2


def test_an_eager_name_keeps_nothing_alive() -> None:
    from aot_hooks import names

    gc.collect()
    before = len(names._given)
    x = torch.randn(4, requires_grad=True)
    for _ in range(3):
        y = checkpoint_name(checkpoint_name(x * 2, "a").view(2, 2), "b").sum()
    assert len(names._given) <= before + 1
    del y
    gc.collect()
    assert len(names._given) == before


def test_a_named_tensor_is_saved_to_disk_as_it_would_be() -> None:
    x = checkpoint_name(torch.ones(3), "a")
    assert len(pickle.dumps(x)) == len(pickle.dumps(torch.ones(3)))
