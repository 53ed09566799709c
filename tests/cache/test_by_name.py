"""What a graph calls enters keys by its content. What has only a name there, such as a function that Dynamo does not
trace, keeps the graph out of torch's cache; in the bodies of a graph as well as in the graph itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cache_key import graph_of
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.utils.checkpoint import checkpoint

import aot_hooks
from cudagraph.torch_private.cache_contents import keyed_by_name

pytestmark = pytest.mark.core

FACTOR = {"by": 2.0}  # of what no graph shows

DOUBLED = aot_hooks.Hook("doubled", lambda x: x * 2, lambda packed: packed / 2)


@torch._dynamo.allow_in_graph
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR["by"]


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return opaque(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@torch._dynamo.allow_in_graph
class Untraced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * FACTOR["by"]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * FACTOR["by"]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@torch.library.custom_op("test_by_name::formula", mutates_args=())
def formula(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR["by"]


@torch.library.custom_op("test_by_name::plain", mutates_args=())
def plain(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR["by"]


formula.register_fake(torch.empty_like)
formula.register_autograd(lambda _, grad: grad * FACTOR["by"])
plain.register_fake(torch.empty_like)


def checkpointed(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: checkpoint(fn, x, use_reentrant=False)


def summed(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: scan(lambda total, row: (total + fn(row), total * row), torch.zeros(4), x)[0]


def either(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: torch.cond(x.sum() > 0, fn, torch.cos, (x,))


BODIES = {
    **{"checkpoint": checkpointed, "scan": summed, "cond": either},
    "vmap": torch.func.vmap,
    "gradient": lambda fn: torch.func.grad(lambda x: fn(x).sum()),
    "graph": lambda fn: fn,
}


def clean(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x).to(torch.float64)[..., :4].float().exp()


@pytest.mark.parametrize("body", BODIES)
def test_a_function_that_is_not_traced_is_found_in_every_body(body: str) -> None:
    x = torch.randn(4, 4, requires_grad=body == "graph")
    assert keyed_by_name(*graph_of(lambda x: BODIES[body](opaque)(x), x)).endswith("test_by_name.opaque")
    assert keyed_by_name(*graph_of(lambda x: BODIES[body](clean)(x), x)) == ""


@pytest.mark.parametrize(
    ("what", "name"),
    [
        (Times.apply, "test_by_name.opaque"),
        (Untraced.apply, "trampoline_autograd_apply"),
        (formula, "operator test_by_name.formula.default"),
        (Doubled.apply, ""),
        (plain, ""),
        (lambda x: torch.einsum("ij,jk->ik", x, x), ""),
        (nn.Linear(4, 4), ""),
    ],
)
def test_what_has_a_name_only(what: Any, name: str) -> None:
    found = keyed_by_name(*graph_of(lambda x: what(x), torch.randn(4, 4, requires_grad=True)))
    assert found.endswith(name) and bool(found) == bool(name)


def test_functions_of_numpy_in_a_graph_compile() -> None:
    """Dynamo wraps them in objects without a name of their own."""
    call = torch.compile(lambda x: torch.as_tensor((x.numpy() * 2).mean(0)), backend="aot_hooks")
    x = torch.randn(4, 3)
    assert torch.allclose(call(x), (x * 2).mean(0))


def test_methods_of_tensors_are_torchs_own() -> None:
    """Dynamo calls them unbound where a parameter gets other data. Such a method has no module."""
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output(graph.call_function(torch._C.TensorBase.set_, (x, y)))
    assert not keyed_by_name(torch.fx.GraphModule({}, graph))


def test_attributes_arguments_and_modules_of_a_graph_have_contents_or_are_named() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * FACTOR["by"]

    def graph(node: Callable[[torch.fx.Graph, Any], Any], **attributes: Any) -> torch.fx.GraphModule:
        made = torch.fx.Graph()
        made.output(node(made, made.placeholder("x")))
        module = torch.fx.GraphModule(nn.Module(), torch.fx.Graph())
        for name, value in attributes.items():
            setattr(module, name, value)
        module.graph = made
        return module

    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda *_: None)
    calls = {"linear": nn.Linear(2, 2), "nested": nn.Sequential(nn.ReLU()), "own": Own(), "hooked": hooked}
    found = {name: keyed_by_name(graph(lambda g, x: g.call_module("m", (x,)), m=m)) for name, m in calls.items()}
    assert [name for name, what in found.items() if what] == ["own", "hooked"]
    values = {
        "tensor": torch.ones(2),
        "number": 2.0,
        "dtype": torch.float16,
        "function": torch.sin,
        "lambda": lambda: 1,
    }
    found = {name: keyed_by_name(graph(lambda g, _: g.get_attr("m"), m=m)) for name, m in values.items()}
    assert [name for name, what in found.items() if what] == ["lambda"]


def steps(fn: Any, directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[str]:
    """Runs `fn` with two factors in a cache directory of its own, as two processes would; what the cache was for it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))
    seen = []
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    for factor in (2.0, 3.0):
        monkeypatch.setitem(FACTOR, "by", factor)
        torch._dynamo.reset()
        aot_hooks.reset()  # the counts of other tests
        torch._dynamo.utils.counters.clear()
        y = torch.compile(lambda x, w: fn(x @ w) @ w, backend="aot_hooks", options=options)(x, w)
        expected = fn(x @ w) @ w
        torch.testing.assert_close(y, expected)
        (found,), (right,) = (torch.autograd.grad(out.square().sum(), w) for out in (y, expected))
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)  # factors differ by a half
        counted = torch._dynamo.utils.counters["aot_autograd"]
        stock = [kind for kind in ("hit", "miss", "bypass") if counted[f"autograd_cache_{kind}"]]
        seen.append(" ".join(why.split(":")[0] for why in aot_hooks.cache_stats()["reasons"]) or " ".join(stock))
    return seen


@pytest.mark.parametrize("what", [opaque, formula], ids=["function", "formula"])
def test_what_changes_behind_a_name_is_compiled_again(
    what: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch._functorch.config.patch(bundled_autograd_cache=True):
        seen = steps(checkpointed(what), tmp_path, monkeypatch, inner="aten", policy=DOUBLED)
    assert seen == ["bypass", "bypass"]


def test_bodies_of_operators_and_what_a_plain_operator_does_now_are_hits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(clean, x, use_reentrant=False) + plain(x.detach())

    with torch._functorch.config.patch(bundled_autograd_cache=True):
        seen = steps(fn, tmp_path, monkeypatch, inner="aten", policy=DOUBLED)
    assert seen == ["miss", "hit"]


def test_graphs_without_hooks_are_kept_out_of_torchs_cache_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch._inductor.config.patch(fallback_by_default=True):  # no C++ compiler
        assert steps(checkpointed(opaque), tmp_path / "name", monkeypatch) == ["", ""]  # torch was not asked
        assert steps(checkpointed(clean), tmp_path / "content", monkeypatch) == ["miss", "hit"]
