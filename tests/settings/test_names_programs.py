"""`checkpoint_name` in whole programs: full graphs, graph breaks, activation checkpointing, recompiling, memory."""

from __future__ import annotations

import functools
import gc
import pickle
from typing import Any

import pytest
import torch
from sentinel import DOUBLE, Chain, assert_same, compiled, gradients, graph_count, hand_gradients, integers, seen
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aot_hooks import KEEP, checkpoint_name, saved_tensors_hooks, saved_tensors_policy
from aot_hooks.policies import only_these_names

# --- where -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inner", [pytest.param("aten", marks=pytest.mark.core), pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_in_full_graphs_static_and_dynamic(inner: str, dynamic: bool) -> None:
    lin = nn.Linear(8, 8)
    f = lambda x: checkpoint_name(lin(x).view(-1, 2, 4).transpose(0, 1), "h").sin()  # noqa: E731
    call = compiled(f, inner=inner, dynamic=dynamic)
    assert [r.checkpoint_names for r in seen(call, torch.randn(6, 8, requires_grad=True))] == [("h",)]
    before = graph_count()
    for n in (6, 9):
        with saved_tensors_hooks(KEEP):
            call(torch.randn(n, 8, requires_grad=True))
    assert graph_count() - before == (1 if dynamic else 2)


@pytest.mark.core
def test_under_activation_checkpointing(wrap: Any) -> None:
    """Recomputed tensors aren't saved, tensors named outside are chosen, gradients are those without names."""
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


# --- recompiling, memory ---------------------------------------------------------------------------------------------


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
    from aot_hooks.settings import names

    gc.collect()
    before = len(names._names.known)
    x = torch.randn(4, requires_grad=True)
    for _ in range(3):
        y = checkpoint_name(checkpoint_name(x * 2, "a").view(2, 2), "b").sum()
    assert len(names._names.known) <= before + 1
    del y
    gc.collect()
    assert len(names._names.known) == before


def test_a_named_tensor_is_saved_to_disk_as_it_would_be() -> None:
    x = checkpoint_name(torch.ones(3), "a")
    assert len(pickle.dumps(x)) == len(pickle.dumps(torch.ones(3)))
