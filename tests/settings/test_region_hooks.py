"""Where the hooks of a context inside a compiled function come from, and when a change of them compiles again."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from sentinel import (
    Chain,
    around_second,
    around_second_by,
    assert_same,
    clone,
    compiled,
    double,
    gradients,
    graph_count,
    hand_gradients,
    quadruple,
    scale,
)
from torch import Tensor, nn

import aot_hooks
from aot_hooks import KEEP, Hook, saved_tensors_hooks

# --- where the hooks come from ---------------------------------------------------------------------------------------

SCALE = 4.0

CLOSURE = scale(4)


def by_global(x: Tensor) -> Tensor:
    return x * SCALE


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
    return around_second_by(model, lambda: scale(4))


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
    forward = around_second_by(model, lambda: made(table["pack"], table["unpack"]))
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

    held = [3.0]
    from_outside = functools.partial(lambda held, h: h * held[0], held)

    def by_changed_list(x: Tensor) -> Tensor:
        held[0] = held[0] + 1
        h1 = x @ model.weights[0]
        with saved_tensors_hooks(from_outside, lambda h: h.clone()):
            return h1 @ model.weights[1]

    for fn, what in (
        (by_changed_list, "a partial that the compiled function has changed before"),
        (by_object, "a Factor that the compiled function makes"),
        (Counting(model, "methods"), "'self.k' that the compiled function has changed before"),
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


class Factors(NamedTuple):
    first: float
    second: float


HELD_NUMBERS: dict[str, Callable[[float], Any]] = {
    "keyword of a partial": lambda k: functools.partial(times, k=k),
    "integer": lambda k: functools.partial(times, k=int(k)),
    "argument of a partial": lambda k: functools.partial(lambda k, x: x * k, k),
    "list": lambda k: functools.partial(lambda held, x: x * held[0], [k]),
    "tuple in a dict": lambda k: functools.partial(times_first, held={"k": (k, "other")}),
    "named tuple": lambda k: functools.partial(lambda held, x: x * held.first, Factors(k, 5.0)),
    "partial in a partial": lambda k: functools.partial(functools.partial(times, k=k)),
    "pack of a partial": lambda k: functools.partial(lambda pack, x: pack(x), functools.partial(times, k=k)),
}


def times(x: Tensor, k: float) -> Tensor:
    return x * k


def times_first(x: Tensor, held: Any) -> Tensor:
    return x * held["k"][0]


@pytest.mark.core
@pytest.mark.parametrize("kind", HELD_NUMBERS)
def test_a_changed_number_in_a_partial_recompiles_once(model: Chain, x: Tensor, kind: str) -> None:
    table: dict[str, Any] = {}
    call, before = compiled(around_second_by(model, lambda: (table["pack"], clone))), graph_count()
    for k in (2.0, 2.0, 3.0, 3.0, 5.0, 2.0):
        table["pack"] = HELD_NUMBERS[kind](k)
        assert_same(gradients(call, model, x), hand_gradients(model, x, h1=k))
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
