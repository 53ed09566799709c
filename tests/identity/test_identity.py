"""What a hook of the user's may hold: a change of it is followed or the hook is refused, and nothing else ever happens.

Each case of identity_cases.py is `x * k` with k held in another way. A refusal says why, and the ways out; code that
runs eagerly calls the same hook as it is.
"""

from __future__ import annotations

import builtins
import copy
import dataclasses
import decimal
import gc
import pickle
import random
import sys
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import identity_cases
import pytest
import torch
from identity_cases import FOLLOWED, NOT_NOTICED, REFUSED, Case, settings
from sentinel import Chain, assert_same, clone, compiled, gradients, graph_count, hand_gradients, scale
from torch import Tensor

from aot_hooks import KEEP, Hook, float8, saved_tensors_hooks, saved_tensors_policy
from aot_hooks.errors import AotHooksError, HookContractError


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_cases, "FACTOR", 2.0)
    monkeypatch.setenv("TEST_IDENTITY", "2")
    monkeypatch.setitem(sys.modules, settings.__name__, settings)


def holds(call: Any, model: Chain, x: Tensor, pack: Any, **factors: Any) -> None:
    with saved_tensors_hooks(pack, clone):
        assert_same(gradients(call, model, x), hand_gradients(model, x, **factors))


@pytest.mark.core
@pytest.mark.parametrize("case", FOLLOWED)
def test_a_change_is_followed(model: Chain, x: Tensor, case: Callable[[], Case]) -> None:
    pack, change = case()
    call, before = compiled(model), graph_count()
    for _ in range(3):
        holds(call, model, x, pack, h=2)
    assert graph_count() - before == 1
    change()
    for _ in range(2):
        with saved_tensors_hooks(pack, clone):
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=3))
            assert_same(gradients(model, model, x), hand_gradients(model, x, h=3))
    assert graph_count() - before == 2


@pytest.mark.core
@pytest.mark.parametrize("case", FOLLOWED)
def test_a_change_in_an_open_context_is_refused(model: Chain, x: Tensor, case: Callable[[], Case]) -> None:
    pack, change = case()
    call = compiled(model)
    with saved_tensors_hooks(pack, clone):
        expected = hand_gradients(model, x, h=2)
        assert_same(gradients(call, model, x), expected)
        assert_same(gradients(call, model, x), expected)
        change()
        with pytest.raises(HookContractError, match="has changed since its context was entered"):
            call(x)


@pytest.mark.core
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_followed_is_refused_by_compiled_code(model: Chain, x: Tensor, case: Callable[[], Case]) -> None:
    """A later Dynamo may trace more: then a change is followed."""
    pack, change = case()
    call = compiled(model)
    with saved_tensors_hooks(pack, clone):
        assert_same(gradients(model, model, x), hand_gradients(model, x, h=2))
        try:
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=2))
        except torch._dynamo.exc.BackendCompilerFailed as e:
            error = e.inner_exception
            assert isinstance(error, AotHooksError), error
            assert "Hook(..., eager=True)" in str(error) and "float32[" in str(error)
            return
    assert torch.__version__ >= "2.15", "traced by Dynamo: a case of FOLLOWED"
    change()
    holds(call, model, x, pack, h=3)


@pytest.mark.parametrize("case", NOT_NOTICED, ids=lambda case: case.__name__)
def test_what_docs_footguns_lists_is_not_noticed(model: Chain, x: Tensor, case: Callable[[], Case]) -> None:
    """It fails as soon as Dynamo notices: then it belongs to the cases above, and out of that page."""
    pack, change = case()
    call = compiled(model)
    holds(call, model, x, pack, h=2)
    change()
    holds(call, model, x, pack, h=2)
    torch._dynamo.reset()
    holds(call, model, x, pack, h=3)


@pytest.mark.core
def test_nothing_is_imported_that_the_hook_does_not_import_when_it_is_called(
    model: Chain, x: Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "lazy_gui_of_test_identity.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    debug = False

    def pack(x: Tensor) -> Tensor:
        if debug:
            import lazy_gui_of_test_identity  # type: ignore[import-not-found]

            return lazy_gui_of_test_identity.show(x)
        return x * 2

    imported: list[str] = []
    original = builtins.__import__

    def noted(name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in sys.modules:  # Python 3.12 imports ntpath in functions, which is there already
            imported.append(name)
        return original(name, *args, **kwargs)

    call, before = compiled(model), set(sys.modules)
    holds(call, model, x, pack, h=2)
    monkeypatch.setattr(builtins, "__import__", noted)
    with saved_tensors_hooks(pack, clone):
        pass
    monkeypatch.undo()
    assert imported == []
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] not in ("torch", "aot_hooks", "sympy")}


@pytest.mark.core
def test_a_hook_that_cannot_be_traced_is_entered_at_once(model: Chain, x: Tensor) -> None:
    held = types.SimpleNamespace(k=2.0)
    start = time.perf_counter()
    for _ in range(20):
        with saved_tensors_hooks(lambda x: x * copy.copy(held).k, clone):
            assert_same(gradients(model, model, x), hand_gradients(model, x, h=2))
    assert time.perf_counter() - start < 2


class Impure:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.count = 0


IMPURE = {
    "a list": lambda held: lambda x: (held.calls.append(x.shape), x * 2)[1],
    "an attribute": lambda held: lambda x: (setattr(held, "count", held.count + 1), x * 2)[1],
    "random numbers": lambda held: lambda x: x * (2 + 0 * random.random()),
}


@pytest.mark.core
@pytest.mark.parametrize("kind", IMPURE)
def test_a_probe_has_no_side_effects_and_says_that_the_hook_has(model: Chain, x: Tensor, kind: str) -> None:
    held = Impure()
    pack, state = IMPURE[kind](held), random.getstate()
    with saved_tensors_hooks(pack, clone), pytest.raises(Exception, match=r"side effect|hidden state|can't be traced"):
        compiled(model)(x)
    calls, random_state = len(held.calls), random.getstate()
    with saved_tensors_hooks(pack, clone):
        pass
    assert (len(held.calls), random.getstate()) == (calls, random_state)
    if kind == "random numbers":
        random.setstate(state)


@pytest.mark.core
def test_probes_leave_torchs_state_alone(model: Chain, x: Tensor) -> None:
    def state() -> Any:
        config = torch._dynamo.config
        counts = torch._dynamo.utils.counters
        limits = config.recompile_limit, config.automatic_dynamic_shapes, config.assume_static_by_default
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return limits, modes, dict(counts["stats"]), dict(counts["frames"]), torch.get_rng_state().tolist()

    def step(k: float) -> None:
        with saved_tensors_hooks(lambda x: x * k + 0 * torch.rand_like(x), clone):
            pass

    call = compiled(model)
    with saved_tensors_hooks(lambda x: x * 2.0 + 0 * torch.rand_like(x), clone):
        call(x)
    step(2.0)
    before = state()
    for k in (2.0, 3.0, 4.0):  # other values than the graph's: traced anew
        step(k)
    assert state() == before
    with torch.autocast("cpu", dtype=torch.float16), torch.no_grad():
        inside = state()
        step(5.0)
        assert state() == inside


@pytest.mark.core
def test_a_value_is_the_same_in_whatever_mode_a_context_is_entered(model: Chain, x: Tensor) -> None:
    call, before = compiled(model), graph_count()
    modes: list[Any] = [
        torch.enable_grad,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu"),
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        lambda: saved_tensors_hooks(*scale(7)),
    ]
    for mode in modes:
        with mode():
            context = saved_tensors_hooks(*scale(3))
            context.__enter__()
            with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
                got = gradients(call, model, x)
            context.__exit__(None, None, None)
        assert_same(got, hand_gradients(model, x, h=3))
    assert graph_count() - before == 1


@pytest.mark.core
def test_what_is_read_for_some_shapes_alone_is_noticed(model: Chain, x: Tensor) -> None:
    """6 x 5 and 6 x 4 are saved."""
    held = {4: 2.0, 5: 2.0}

    def pack(x: Tensor) -> Tensor:
        return x * (held[4] if x.shape[1] == 4 else held[5])

    call = compiled(model)
    for four, five in ((2, 2), (3, 2), (3, 5), (2, 2)):
        held[4], held[5] = float(four), float(five)
        holds(call, model, x, pack, h1=five, h2=four)


@pytest.mark.core
def test_what_one_of_several_graphs_reads_is_noticed(x: Tensor) -> None:
    """The second graph saves other shapes, and the hook reads another number for them."""
    torch.manual_seed(1)
    small, large, held = Chain(3, 5, 4, 2), Chain(3, 7, 9, 2), {"small": 2.0, "large": 2.0}

    def pack(x: Tensor) -> Tensor:
        return x * held["small" if x.shape[1] < 6 else "large"]

    first, second = compiled(small), compiled(large)
    for a, b in ((2, 2), (3, 2), (3, 4), (2, 4), (2, 2)):
        held["small"], held["large"] = float(a), float(b)
        with saved_tensors_hooks(pack, clone):
            assert_same(gradients(first, small, x), hand_gradients(small, x, h=a))
            assert_same(gradients(second, large, x), hand_gradients(large, x, h=b))


@pytest.mark.core
def test_graphs_of_other_shapes_do_not_split_a_value(x: Tensor) -> None:
    torch.manual_seed(1)
    small, large = Chain(3, 5, 4, 2), Chain(3, 7, 9, 2)
    first, second, before = compiled(small), compiled(large), graph_count()
    for k in (2, 2, 3, 2, 3):
        with saved_tensors_hooks(*scale(k)):
            assert_same(gradients(first, small, x), hand_gradients(small, x, h=k))
            assert_same(gradients(second, large, x), hand_gradients(large, x, h=k))
    assert graph_count() - before == 4


@pytest.mark.core
def test_a_policy_is_what_it_answers(model: Chain, x: Tensor) -> None:
    """Whatever it is made of: Dynamo traces no policy."""
    limit, seen = [decimal.Decimal(6 * 5 * 4)], []

    def policy(saved: Any) -> Hook:
        seen.append(saved.name)
        return Hook("triple", *scale(3)) if copy.copy(limit)[0] <= saved.nbytes else KEEP

    call, before = compiled(model), graph_count()
    for nbytes, count, factors in ((6 * 5 * 4, 1, {"h1": 3}), (6 * 5 * 4 - 1, 1, {"h1": 3}), (6 * 4 * 4, 2, {"h": 3})):
        limit[0] = decimal.Decimal(nbytes)
        for _ in range(3):
            with saved_tensors_policy(policy):
                assert_same(gradients(call, model, x), hand_gradients(model, x, **factors))
        assert graph_count() - before == count
    assert seen


@pytest.mark.core
def test_a_number_in_a_hook_that_a_policy_makes_is_noticed(model: Chain, x: Tensor) -> None:
    call, before = compiled(model), graph_count()
    for k in (2, 3, 2, 3):
        with saved_tensors_policy(lambda saved, k=k: Hook("scale", *scale(k))):
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=k))
    assert graph_count() - before == 2


@pytest.mark.core
@pytest.mark.parametrize("wrapped", ["larger_than", "first_match", "declines"])
def test_functions_inside_of_what_the_library_makes_are_noticed(model: Chain, x: Tensor, wrapped: str) -> None:
    from aot_hooks import policies

    def rule(k: float) -> Any:
        hook = Hook("scale", *scale(k))
        if wrapped == "declines":
            return Hook("some", *scale(3), declines=lambda row: None if row.nbytes > 35 * k else "small")
        return policies.larger_than(1, hook) if wrapped == "larger_than" else policies.first_match(lambda row: hook)

    call, before = compiled(model), graph_count()
    for k in (2, 3, 2, 3):
        with saved_tensors_policy(rule(k)):
            got = gradients(call, model, x)
        factors = {"h1": 3, **({"h2": 3} if k == 2 else {})} if wrapped == "declines" else {"h": k}
        assert_same(got, hand_gradients(model, x, **factors))
    assert graph_count() - before == 2


def test_hooks_of_the_library_are_no_functions_to_trace(
    model: Chain, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    import aot_hooks.identity.probes

    monkeypatch.setattr(aot_hooks.identity.probes, "Probe", None)
    monkeypatch.setattr(aot_hooks.identity.records, "Probe", None)
    call, before = compiled(model), graph_count()
    for _ in range(3):
        with saved_tensors_hooks(float8()):
            gradients(call, model, x)
        with saved_tensors_hooks(dataclasses.replace(float8(), name="renamed")):
            gradients(call, model, x)
    assert graph_count() - before == 1


def test_an_entered_hook_can_be_pickled_and_dies(model: Chain, x: Tensor) -> None:
    """Nothing is stored in it."""
    from aot_hooks import policies

    renamed, policy = dataclasses.replace(float8(), name="renamed"), policies.larger_than(1, float8())
    for rule in (renamed, policy):
        with saved_tensors_policy(rule):
            gradients(compiled(model), model, x)
        assert pickle.loads(pickle.dumps(rule)) == rule
    gone = weakref.ref(policy)
    del policy, rule
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


@pytest.mark.core
def test_who_answers_for_a_hook_says_when_it_changes(model: Chain, x: Tensor) -> None:
    held = types.SimpleNamespace(k=2.0)

    def hook(said: str) -> Hook:
        return Hook("copied", lambda x: x * copy.copy(held).k, clone, cache_hash=said)

    call, before = compiled(model), graph_count()
    for k, said in ((2.0, "1"), (2.0, "1"), (3.0, "2"), (3.0, "2")):
        held.k = k
        with saved_tensors_hooks(hook(said)):
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=k))
    assert graph_count() - before == 2


@pytest.mark.core
def test_a_graph_pair_is_its_content(model: Chain, x: Tensor) -> None:
    def pair(k: float) -> Any:
        pack = torch.fx.symbolic_trace(lambda x: x * k)
        pack.table = torch.tensor(k)  # type: ignore[assignment]
        node = pack.graph.output_node()
        with pack.graph.inserting_before(node):
            half = pack.graph.call_function(torch.div, (node.args[0], pack.graph.get_attr("table")))
        node.args = (half,)
        pack.recompile()
        return pack, torch.fx.symbolic_trace(lambda x: x * 3)

    call, before = compiled(model), graph_count()
    for _ in range(4):
        with saved_tensors_hooks(*pair(2.0)):
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=3))
    assert graph_count() - before == 1
    graphs = pair(2.0)
    for k in (2.0, 4.0):  # a constant of it written to
        graphs[0].table.fill_(k)
        with saved_tensors_hooks(*graphs):
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=3 * 2 / k))
    assert graph_count() - before == 2


@pytest.mark.core
def test_more_values_than_dynamo_keeps_are_told_apart(model: Chain, x: Tensor) -> None:
    limit = torch._dynamo.config.recompile_limit
    call = compiled(model, fullgraph=False)
    for k in [*range(2, 2 * limit), 2, 3, 2 * limit - 1]:
        with saved_tensors_hooks(*scale(k)):
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=k))


def test_a_probe_outlives_a_reset_of_dynamo(model: Chain, x: Tensor) -> None:
    for k in (2, 3, 3, 2):
        torch._dynamo.reset()
        call, before = compiled(model), graph_count()
        for _ in range(2):
            with saved_tensors_hooks(*scale(k)):
                assert_same(gradients(call, model, x), hand_gradients(model, x, h=k))
        assert graph_count() - before == 1
