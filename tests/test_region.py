"""Contexts inside a compiled function: they cover what their region saves, and mean the same in eager.

      h1 = x @ w1
      with saved_tensors_hooks(...):
          h2 = h1 @ w2        # saves h1 and w2: the region's
      return h2 @ w3          # saves h2 and w3: not the region's

A region decides by the operator that saves, so one tensor may be packed for one reader and kept for another.
"""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sentinel import (
    Chain,
    assert_same,
    compiled,
    double,
    gradients,
    graph_count,
    hand_gradients,
    integers,
    quadruple,
    scale,
)
from torch import Tensor, nn

import aot_hooks
from aot_hooks import KEEP, Hook, saved_tensors_hooks, saved_tensors_policy


@pytest.fixture(params=["compiled", "eager"])
def wrap(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    yield compiled if request.param == "compiled" else lambda fn: fn


def around_second(model: Chain, *hooks: Any, **scope: str) -> Callable[[Tensor], Tensor]:
    """The chain with a context around its second product."""

    def forward(x: Tensor) -> Tensor:
        w1, w2, w3 = model.weights
        h1 = x @ w1
        with saved_tensors_hooks(*hooks, **scope):
            h2 = h1 @ w2
        return h2 @ w3

    return forward


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
def test_one_tensor_saved_inside_and_outside(wrap: Any) -> None:
    """The region's readers see what was packed, the others the tensor itself."""
    x, w1 = integers(6, 3).requires_grad_(), integers(3, 5)
    inside, outside = integers(5, 2).requires_grad_(), integers(5, 4).requires_grad_()

    def f(x: Tensor) -> Tensor:
        h = x @ w1
        with saved_tensors_hooks(*quadruple):
            a = h @ inside
        return a.sum() + (h @ outside).sum()

    got = torch.autograd.grad(wrap(f)(x), [inside, outside])
    h = x.detach() @ w1
    assert_same(got, [4 * h.T @ torch.ones(6, 2), h.T @ torch.ones(6, 4)])


def test_two_regions_read_one_tensor(wrap: Any) -> None:
    x, w1 = integers(6, 3).requires_grad_(), integers(3, 5)
    first, second = integers(5, 2).requires_grad_(), integers(5, 4).requires_grad_()

    def f(x: Tensor) -> Tensor:
        h = x @ w1
        with saved_tensors_hooks(*scale(2)):
            a = h @ first
        with saved_tensors_hooks(*scale(3)):
            b = h @ second
        return a.sum() + b.sum()

    got = torch.autograd.grad(wrap(f)(x), [first, second])
    h = x.detach() @ w1
    assert_same(got, [2 * h.T @ torch.ones(6, 2), 3 * h.T @ torch.ones(6, 4)])


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


CONTEXTS = {
    "hooks": lambda: saved_tensors_hooks(*quadruple),
    "policy": lambda: saved_tensors_policy(aot_hooks.policies.everything(Hook("quadruple", *quadruple))),
}


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


# --- where the hooks come from ---------------------------------------------------------------------------------------

SCALE = 4.0
CLOSURE = scale(4)


def by_global(x: Tensor) -> Tensor:
    return x * SCALE


def clone(x: Tensor) -> Tensor:
    return x.clone()


def global_function(model: Chain) -> Any:
    return around_second(model, double, double)


def reads_a_global(model: Chain) -> Any:
    return around_second(model, by_global, clone)


def closure_made_outside(model: Chain) -> Any:
    return around_second(model, *CLOSURE)


def hook_object(model: Chain) -> Any:
    return around_second(model, Hook("quadruple", *quadruple))


def graph_modules(model: Chain) -> Any:
    return around_second(model, torch.fx.symbolic_trace(double), torch.fx.symbolic_trace(double))


def lambda_made_inside(model: Chain) -> Any:
    def forward(x: Tensor) -> Tensor:
        k = 2.0
        h1 = x @ model.weights[0]
        with saved_tensors_hooks(lambda x: x * k, lambda x: x * 2):
            h2 = h1 @ model.weights[1]
        return h2 @ model.weights[2]

    return forward


def factory_called_inside(model: Chain) -> Any:
    def forward(x: Tensor) -> Tensor:
        h1 = x @ model.weights[0]
        with saved_tensors_hooks(*scale(4)):
            h2 = h1 @ model.weights[1]
        return h2 @ model.weights[2]

    return forward


SOURCES = [
    global_function,
    reads_a_global,
    closure_made_outside,
    hook_object,
    graph_modules,
    lambda_made_inside,
    factory_called_inside,
]


@pytest.mark.core
@pytest.mark.parametrize("source", SOURCES, ids=lambda f: f.__name__)
def test_hooks_may_come_from_anywhere(model: Chain, x: Tensor, wrap: Any, source: Any) -> None:
    assert_same(gradients(wrap(source(model)), model, x), hand_gradients(model, x, h1=4))


@pytest.mark.core
def test_float8_in_a_region() -> None:
    torch.manual_seed(1)
    x, w1 = torch.randn(16, 32), torch.randn(32, 64)
    w2 = torch.randn(64, 8, requires_grad=True)
    x.requires_grad_()

    def f(x: Tensor) -> Tensor:
        h = x @ w1
        with saved_tensors_hooks(aot_hooks.float8()):
            return h @ w2

    call = compiled(f)
    (got,) = torch.autograd.grad(call(x).sum(), w2)
    exact = (x.detach() @ w1).T @ torch.ones(16, 8)
    bound = 2**-4 * (x.detach() @ w1).abs().sum(0)[:, None] + 0.1
    assert not torch.equal(got, exact)
    assert ((got - exact).abs() <= bound).all()
    (plan,) = aot_hooks.last_plans(call)
    assert [d.hook.name for d in plan.decisions if d.hook is not KEEP] == ["float8(e4m3fn, rowwise)"]


LIBRARY: dict[str, Callable[[], Hook]] = {
    "float8": lambda: aot_hooks.float8(),
    "int8": lambda: aot_hooks.int8(64, stochastic=True),
    "int4": lambda: aot_hooks.int4(),
    "cast": lambda: aot_hooks.cast(torch.bfloat16),
    "bitmask": lambda: aot_hooks.bitmask(),
    "offload": lambda: aot_hooks.offload(then=aot_hooks.float8()),
}


@pytest.mark.core
@pytest.mark.parametrize("make", LIBRARY.values(), ids=LIBRARY)
def test_hooks_of_the_library_are_made_inside_without_a_warning(make: Callable[[], Hook]) -> None:
    def f(x: Tensor) -> Tensor:
        h = x.T @ x
        with saved_tensors_hooks(make()):
            return h @ x.T

    call = compiled(f)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(torch.randn(64, 64, requires_grad=True))
    (plan,) = aot_hooks.last_plans(call)
    (decision,) = (d for d in plan.decisions if not d.saved.is_input)
    assert make().name == decision.hook.name or make().declines(decision.saved) == decision.reason


class Scaled(nn.Module):
    """Packs what its second product saves by methods and closures over itself."""

    def __init__(self, chain: Chain, kind: str) -> None:
        super().__init__()
        self.chain, self.kind, self.k = chain, kind, 4
        self.register_buffer("book", torch.tensor(4.0))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.k

    def pack(self, x: Tensor) -> Tensor:
        return self.scaled(x)

    def pack_by_book(self, x: Tensor) -> Tensor:
        return x * self.book

    def unpack(self, x: Tensor) -> Tensor:
        return x.clone()

    def hooks(self) -> tuple[Any, ...]:
        if self.kind == "methods":
            return self.pack, self.unpack
        if self.kind == "methods that read a buffer":
            return self.pack_by_book, self.unpack
        if self.kind == "closures":
            return lambda x: x * self.k, lambda x: x.clone()
        if self.kind == "a hook of methods":
            return (Hook("methods", self.pack, self.unpack),)
        return lambda x: self.pack(x), lambda x: self.unpack(x)

    def forward(self, x: Tensor) -> Tensor:
        w1, w2, w3 = self.chain.weights
        h1 = x @ w1
        with saved_tensors_hooks(*self.hooks()):
            h2 = h1 @ w2
        return h2 @ w3


KINDS = ["methods", "methods that read a buffer", "closures", "closures over methods", "a hook of methods"]


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_over_self_recompile_when_what_they_read_changes(model: Chain, x: Tensor, wrap: Any, kind: str) -> None:
    scaled = Scaled(model, kind)
    call, before = wrap(scaled), graph_count()
    for k in (4, 4, 3, 4, 3):
        scaled.k = k
        scaled.book.fill_(k)
        with torch.no_grad():  # an optimizer's step
            for w in model.weights:
                w.add_(1)
        assert_same(gradients(call, model, x), hand_gradients(model, x, h1=k))
    assert graph_count() - before == (2 if wrap is compiled else 0)


def test_a_module_dies_with_what_was_compiled_for_it(model: Chain, x: Tensor) -> None:
    scaled = Scaled(model, "methods")
    call, gone = compiled(scaled), weakref.ref(scaled)
    gradients(call, model, x)
    del scaled, call
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


@pytest.mark.core
@pytest.mark.parametrize("made", [lambda p, u: (lambda x: p(x), u), lambda p, u: (Hook("inside", p, u),)])
def test_what_is_made_inside_of_functions_from_outside_is_guarded_by_content(
    model: Chain, x: Tensor, made: Callable[..., Any]
) -> None:
    """Dynamo guards a function by its code: one that closed over another number was taken for the one before."""
    table = {}

    def forward(x: Tensor) -> Tensor:
        h1 = x @ model.weights[0]
        with saved_tensors_hooks(*made(table["pack"], table["unpack"])):
            h2 = h1 @ model.weights[1]
        return h2 @ model.weights[2]

    call, before = compiled(forward), graph_count()
    for k in (3, 2, 3):
        table["pack"], table["unpack"] = scale(k)
        assert_same(gradients(call, model, x), hand_gradients(model, x, h1=k))
    assert graph_count() - before == 2


def triple(x: Tensor) -> Tensor:
    return x * SCALE


@pytest.mark.core
@pytest.mark.parametrize("kind", ["function", "lambda", "default", "partial"])
def test_globals_of_what_is_made_inside_are_guarded(
    model: Chain, x: Tensor, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def forward(x: Tensor) -> Tensor:
        def named(x: Tensor) -> Tensor:
            return x * SCALE

        def by_default(x: Tensor, pack: Any = triple) -> Tensor:
            return pack(x)

        h1 = x @ model.weights[0]
        if kind == "function":
            pack: Any = named
        elif kind == "lambda":
            pack = lambda x: x * SCALE  # noqa: E731
        elif kind == "default":
            pack = by_default
        else:
            pack = functools.partial(triple)
        with saved_tensors_hooks(pack, lambda p: p.clone()):
            h2 = h1 @ model.weights[1]
        return h2 @ model.weights[2]

    call = compiled(forward)
    for k in (3.0, 2.0, 3.0):
        monkeypatch.setitem(globals(), "SCALE", k)
        assert_same(gradients(call, model, x), hand_gradients(model, x, h1=k))


class Factor:
    k = 1.0

    def __init__(self, k: float) -> None:
        self.k = k

    def pack(self, x: Tensor) -> Tensor:
        return x * self.k


class Counting(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        self.k = self.k + 1
        return super().forward(x)


@pytest.mark.core
def test_what_is_not_known_while_compiling_is_named(model: Chain, x: Tensor) -> None:
    table = torch.tensor(3.0)

    def by_tensor(x: Tensor) -> Tensor:
        h1 = x @ model.weights[0]
        with saved_tensors_hooks(lambda h: h * table, lambda h: h.clone()):
            return h1 @ model.weights[1]

    def by_computed(x: Tensor) -> Tensor:
        h1 = x @ model.weights[0]
        largest = h1.amax()
        with saved_tensors_hooks(lambda h: h * largest, lambda h: h.clone()):
            return h1 @ model.weights[1]

    def by_object(x: Tensor) -> Tensor:
        h1 = x @ model.weights[0]
        with saved_tensors_hooks(Factor(3.0).pack, lambda h: h.clone()):
            return h1 @ model.weights[1]

    for fn, what in (
        (by_object, "a Factor that the compiled function makes"),
        (Counting(model, "methods"), "a Counting that the compiled function has changed before"),
        (by_tensor, r"a tensor by itself, and not as an attribute of an object \(`self.table`\)"),
        (by_computed, "a tensor that the compiled function makes"),
    ):
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=f"got {what}; make it outside"):
            compiled(fn)(x)


# --- recompiling -----------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_a_changed_global_recompiles_once(model: Chain, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    call, before = compiled(reads_a_global(model)), graph_count()
    for k in (4.0, 4.0, 3.0, 3.0, 4.0):
        monkeypatch.setitem(globals(), "SCALE", k)
        assert_same(gradients(call, model, x), hand_gradients(model, x, h1=k))
    assert graph_count() - before == 2


@pytest.mark.core
def test_hooks_made_anew_each_step_are_one_graph(model: Chain, x: Tensor) -> None:
    table = {"hooks": scale(3)}

    def forward(x: Tensor) -> Tensor:
        h1 = x @ model.weights[0]
        with saved_tensors_hooks(*table["hooks"]):
            h2 = h1 @ model.weights[1]
        return h2 @ model.weights[2]

    call, before = compiled(forward), graph_count()
    for _ in range(20):
        assert_same(gradients(call, model, x), hand_gradients(model, x, h1=3))
        table["hooks"] = scale(3)
        gc.collect(0)
    assert graph_count() - before == 1
    table["hooks"] = scale(2)
    assert_same(gradients(call, model, x), hand_gradients(model, x, h1=2))
    assert graph_count() - before == 2


@pytest.mark.core
def test_a_number_that_changes_recompiles_once(model: Chain, x: Tensor) -> None:
    """Dynamo makes a number symbolic when it changes, and has no constant for a function that closes over one."""

    def forward(x: Tensor, k: float) -> Tensor:
        pack, unpack = scale(k)
        h1 = x @ model.weights[0]
        with saved_tensors_hooks(lambda h: pack(h), unpack):
            h2 = h1 @ model.weights[1]
        return h2 @ model.weights[2]

    call, before = compiled(forward), graph_count()
    for k in (2.0, 2.0, 3.0, 3.0, 5.0, 2.0):
        assert_same(gradients(lambda x, k=k: call(x, k), model, x), hand_gradients(model, x, h1=k))
    assert graph_count() - before == 3


def test_hooks_given_as_arguments(model: Chain, x: Tensor) -> None:
    def forward(x: Tensor, pack: Any, unpack: Any) -> Tensor:
        h1 = x @ model.weights[0]
        with saved_tensors_hooks(pack, unpack):
            h2 = h1 @ model.weights[1]
        return h2 @ model.weights[2]

    call, before = compiled(forward), graph_count()
    for k in (2, 2, 3, 2):
        hooks = scale(k)
        assert_same(gradients(lambda x, h=hooks: call(x, *h), model, x), hand_gradients(model, x, h1=k))
    assert graph_count() - before == 2


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
