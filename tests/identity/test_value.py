"""A hook pair is a value: made anew it is the same one, changed it costs one recompile, dropped it is gone."""

from __future__ import annotations

import gc
import itertools
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sentinel import Chain, assert_same, compiled, gradients, graph_count, hand_gradients, scale
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import aot_hooks
from aot_hooks import Hook, saved_tensors_hooks, saved_tensors_policy
from aot_hooks.context.pairs import Pair
from aot_hooks.errors import RecompileWarning
from aot_hooks.identity.frozen import described


def live_pairs() -> int:
    gc.collect()
    return sum(type(o) is Pair for o in gc.get_objects())


@pytest.mark.core
def test_hooks_made_anew_each_step_are_one_pair(model: Chain, x: Tensor) -> None:
    call, before = compiled(model), graph_count()
    for _ in range(50):
        with saved_tensors_hooks(*scale(3)):
            got = gradients(call, model, x)
        gc.collect(0)
    assert_same(got, hand_gradients(model, x, h=3))
    assert graph_count() - before == 1


def test_a_policy_made_anew_each_step_is_one_value(model: Chain, x: Tensor) -> None:
    def policy(nbytes: int) -> Any:
        hook = Hook("triple", *scale(3))
        return lambda saved: hook if saved.nbytes >= nbytes else aot_hooks.KEEP

    call, before = compiled(model), graph_count()
    for _ in range(20):
        with saved_tensors_policy(policy(6 * 5 * 4)):
            got = gradients(call, model, x)
    assert_same(got, hand_gradients(model, x, h1=3))
    assert graph_count() - before == 1


@pytest.mark.core
def test_a_changed_closure_recompiles_once_and_the_old_one_is_still_there(model: Chain, x: Tensor) -> None:
    call, counts = compiled(model), [graph_count()]
    for k in (2, 3, 2, 3, 3, 2):
        with saved_tensors_hooks(*scale(k)):
            got = gradients(call, model, x)
        assert_same(got, hand_gradients(model, x, h=k))
        counts.append(graph_count())
    assert [b - a for a, b in itertools.pairwise(counts)] == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("other", [2.0, True])
def test_numbers_of_another_type_are_another_hook(model: Chain, x: Tensor, other: float) -> None:
    call, before = compiled(model), graph_count()
    for k in (2, other):
        with saved_tensors_hooks(*scale(k)):
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=k))
    assert graph_count() - before == 2


def test_scope_is_part_of_the_value(model: Chain, x: Tensor) -> None:
    call, before = compiled(model), graph_count()
    for scope, factors in (("donated", {"h": 3}), ("all", {"h": 3, "x": 3, "w": 3}), ("donated", {"h": 3})):
        with saved_tensors_hooks(*scale(3), scope=scope):
            assert_same(gradients(call, model, x), hand_gradients(model, x, **factors))
    assert graph_count() - before == 2


def test_names_of_hooks_are_not_part_of_the_value(model: Chain, x: Tensor) -> None:
    call, before = compiled(model), graph_count()
    for name in ("one", "another"):
        with saved_tensors_hooks(Hook(name, *scale(3))):
            gradients(call, model, x)
    assert graph_count() - before == 1


def renamed_graph(factor: float, *, names: tuple[str, str], constant: bool = False) -> torch.fx.GraphModule:
    """A graph that multiplies by `factor`, a number or a tensor of its own."""
    graph, holder = torch.fx.Graph(), torch.nn.Module()
    argument = graph.placeholder(names[0])
    by: Any = factor
    if constant:
        setattr(holder, names[1], torch.tensor(factor))
        by = graph.get_attr(names[1])
    graph.output(graph.create_node("call_function", torch.mul, (argument, by), {}, name=f"{names[1]}_times"))
    return torch.fx.GraphModule(holder, graph)


@pytest.mark.core
@pytest.mark.parametrize("constant", [False, True], ids=["number", "tensor"])
def test_graphs_that_differ_in_names_only_are_one_hook(model: Chain, x: Tensor, constant: bool) -> None:
    call, before = compiled(model), graph_count()
    for factor, names in ((2.0, ("x", "twice")), (2.0, ("saved", "other")), (3.0, ("x", "twice"))):
        graphs = [renamed_graph(factor, names=names, constant=constant) for _ in range(2)]
        with saved_tensors_hooks(*graphs):
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=factor**2))
    assert graph_count() - before == 2


def test_graphs_of_another_meaning_are_other_hooks() -> None:
    def text(build: Any) -> str:
        graph = torch.fx.Graph()
        build(graph)
        return described(Hook("graph", torch.fx.GraphModule(torch.nn.Module(), graph), lambda x: x)).text

    def rows(graph: torch.fx.Graph, at: int) -> None:
        """Its symbolic size has the same symbol, whichever of the two sizes it is, as two traces would name it."""
        x = graph.placeholder("x")
        size = graph.call_function(torch.ops.aten.sym_size.int, (x, at))
        size.meta["val"] = ShapeEnv().create_unbacked_symint()
        graph.output(graph.call_function(torch.mul, (x, size)))

    assert text(lambda graph: rows(graph, 0)) != text(lambda graph: rows(graph, 1))
    assert text(lambda graph: graph.output(graph.placeholder("x"))) != text(
        lambda graph: graph.output(graph.placeholder("*x"))
    )


def test_an_error_names_the_hook_that_was_entered_not_an_equal_one(model: Chain, x: Tensor, wrap: Any) -> None:
    for name in ("one", "another"):
        hook = Hook(name, lambda x: None, lambda x: x)
        with pytest.raises(Exception, match=f"hook '{name}' on saved"), saved_tensors_hooks(hook):
            wrap(model)(x)
        torch._dynamo.reset()


def test_a_plan_names_the_hook_that_was_entered(model: Chain, x: Tensor) -> None:
    for name in ("one", "another"):
        torch._dynamo.reset()
        call = compiled(model)
        with saved_tensors_hooks(Hook(name, *scale(3))):
            gradients(call, model, x)
        (plan,) = aot_hooks.last_plans(call)
        assert {d.hook.name for d in plan.decisions} == {"keep", name}


def test_an_eager_part_calls_the_hook_that_was_entered_not_an_equal_one(model: Chain, x: Tensor) -> None:
    """Both lists are empty on entry, so the hooks are equal; each call still goes to its own."""
    for _ in range(2):
        seen: list[Any] = []

        def pack(x: Tensor, seen: Any = seen) -> Tensor:
            seen.append(x.shape)
            return x

        with saved_tensors_hooks(pack, lambda x: x):
            gradients(model, model, x)
        assert len(seen) == 2


class ByBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.k


SCALE = 2.0


@pytest.mark.core
@pytest.mark.parametrize("write", ["a buffer", "data", "new data", "numpy", "a global"])
def test_what_a_hook_reads_recompiles_once_when_it_is_written(
    model: Chain, x: Tensor, write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes to data and by NumPy don't count as a version of the tensor."""
    numpy = pytest.importorskip("numpy")  # torch does without, and then so do its users
    array, module = numpy.full((), 2.0, dtype=numpy.float32), ByBuffer()
    holder = types.SimpleNamespace(k=torch.from_numpy(array) if write == "numpy" else torch.tensor(2.0))
    writes: dict[str, Callable[[float], Any]] = {
        "a buffer": lambda k: module.k.fill_(k),
        "data": lambda k: holder.k.data.fill_(k),
        "new data": lambda k: setattr(holder.k, "data", torch.tensor(k)),
        "numpy": lambda k: array.fill(k),
        "a global": lambda k: monkeypatch.setitem(globals(), "SCALE", k),
    }
    packs: dict[str, Any] = {"a buffer": module, "a global": lambda x: x * SCALE}
    pack, call, before = packs.get(write, lambda x: x * holder.k), compiled(model), graph_count()
    for k in (2.0, 2.0, 3.0, 3.0, 2.0) if write == "a global" else (2.0, 2.0, 3.0, 3.0):
        writes[write](k)
        with saved_tensors_hooks(pack, lambda x: x.clone()):
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=k))
    assert graph_count() - before == 2


class Quantizer(nn.Module):
    """A part of a model, in training, whose methods are the hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.tensor(2.0)), nn.Linear(2, 2)

    def pack(self, x: Tensor) -> Tensor:
        return x * self.scale

    def unpack(self, x: Tensor) -> Tensor:
        return x.clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.pack(x)


HOLDS: dict[str, tuple[Callable[[Quantizer], Any], str]] = {
    "methods": (lambda q: (q.pack, q.unpack), "changed: self.scale."),
    "closures": (lambda q: (lambda x: x * q.scale, lambda x: x.clone()), "changed: q.scale."),
    "numbers": (lambda q: scale(q.scale.item()), "changed: k."),
    "a default": (lambda q: (lambda x, k=q.scale.item(): x * k, lambda x: x.clone()), "changed: k."),  # noqa: B008
    "a module": (lambda q: (q, lambda x: x.clone()), "changed: pack.scale."),
}


@pytest.mark.core
@pytest.mark.parametrize("kind", HOLDS)
def test_a_hook_that_changes_each_step_is_warned_of_by_name(model: Chain, x: Tensor, kind: str) -> None:
    q, (hooks, named), call = Quantizer(), HOLDS[kind], compiled(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            with torch.no_grad():
                q.scale.add_(1)
                q.linear.weight.add_(1)
            with saved_tensors_hooks(*hooks(q)):
                got = gradients(call, model, x)
            assert_same(got, hand_gradients(model, x, h=q.scale.item()))
    (warned,) = (w for w in caught if w.category is RecompileWarning)
    assert "compiled 4 times" in str(warned.message) and named in str(warned.message)


@pytest.mark.core
def test_a_module_in_training_whose_hooks_read_nothing_that_changes_is_one_graph(model: Chain, x: Tensor) -> None:
    q, call, before = Quantizer(), compiled(model), graph_count()
    for _ in range(6):
        with torch.no_grad():
            q.linear.weight.add_(1)
        with saved_tensors_hooks(q.pack, q.unpack):
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=2))
    assert graph_count() - before == 1


TABLES: dict[str, Callable[[float], Tensor]] = {
    "0-d": lambda k: torch.tensor(k),
    "a parameter": lambda k: nn.Parameter(torch.tensor([k])),
    "a vector": lambda k: torch.full((4,), k),
}


@pytest.mark.core
@pytest.mark.parametrize("inner", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("table", TABLES)
def test_a_graph_keeps_the_value_of_a_constant(model: Chain, x: Tensor, table: str, inner: str) -> None:
    """A tensor that changes in place makes another hook; its graph still serves hooks with the old value."""
    call, before = compiled(model, inner=inner), graph_count()

    def by_table(k: Tensor) -> Any:
        return lambda x: x * k.view(-1)[0], lambda x: x * k.view(-1)[:1]

    first, second = TABLES[table](2.0), TABLES[table](2.0)
    for k in (first, second):
        with saved_tensors_hooks(*by_table(k)):
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=4))
        with torch.no_grad():
            first.fill_(3.0)
    assert graph_count() - before == 1
    with saved_tensors_hooks(*by_table(first)):
        assert_same(gradients(call, model, x), hand_gradients(model, x, h=9))


@pytest.mark.core
def test_pairs_die_with_what_was_compiled_for_them(model: Chain, x: Tensor) -> None:
    call = compiled(model)
    with saved_tensors_hooks(*scale(3)):
        pair = [weakref.ref(m) for m in torch._C._autograd._top_saved_tensors_default_hooks(True)]
        gradients(call, model, x)
    gc.collect()
    assert all(ref() is not None for ref in pair)  # the compiled graph is guarded by their identity
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in pair] == [None, None]


def test_what_a_hook_closes_over_dies_with_it(model: Chain, x: Tensor) -> None:
    codebook = torch.arange(4.0)
    table = weakref.ref(codebook)
    with saved_tensors_hooks(lambda x, c=codebook: x * c[2], lambda x: x.clone()):
        gradients(compiled(model), model, x)
    del codebook
    torch._dynamo.reset()
    gc.collect()
    assert table() is None


def test_many_different_pairs_in_eager_do_not_pile_up(model: Chain, x: Tensor) -> None:
    before = live_pairs()
    for k in range(200):
        with saved_tensors_hooks(*scale(k)):
            got = gradients(model, model, x)
        assert_same(got, hand_gradients(model, x, h=k))
    assert live_pairs() - before <= 16


@pytest.mark.core
def test_no_stale_graph_answers_for_other_hooks(model: Chain, x: Tensor) -> None:
    """Dynamo guards a pair by `id`: were it freed while a graph looks for it, its id could come back as another's."""
    call = compiled(model, fullgraph=False)
    for i in range(60):
        k = 2 + (i * 7) % 5
        with saved_tensors_hooks(*scale(k)):
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=k))
        if i % 3 == 0:
            gc.collect()
        if i % 7 == 0:
            aot_hooks.reset()
        if i % 20 == 19:
            torch._dynamo.reset()
