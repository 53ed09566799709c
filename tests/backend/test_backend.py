"""The backend as torch.compile sees it: options, the path without hooks, plans, memory."""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.utils import run_and_get_code

import aot_hooks
from aot_hooks import Hook, errors, last_plans, saved_tensors_hooks
from aot_hooks.backend import aot_hooks as aot_hooks_backend

ATEN = {"inner": "aten"}


def pack_half(x: torch.Tensor) -> Any:
    return x.half(), x.dtype


def unpack_half(p: Any) -> torch.Tensor:
    return p[0].to(p[1])


HALF = Hook("half", pack_half, unpack_half)


def mlp(width: int = 8) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width))


class Wrapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


def step(fn: Any, x: torch.Tensor) -> torch.Tensor:
    loss = fn(x).square().sum()
    loss.backward()
    return loss.detach()


def caused(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether `error`, or what it wraps, is a `kind`."""
    inner = getattr(error, "inner_exception", None) or error.__cause__
    return isinstance(error, kind) or isinstance(inner, kind)


# --- without hooks ---------------------------------------------------------------------------------------------------


def generated(backend: str, hook: Hook | None = None, **kwargs: Any) -> tuple[list[str], torch.Tensor]:
    """What Inductor generates for one step, comments left out."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = mlp()
    x = torch.randn(4, 8)

    def run() -> torch.Tensor:
        compiled = torch.compile(model, backend=backend, **kwargs)
        if hook is None:
            return step(compiled, x)
        with saved_tensors_hooks(hook):
            return step(compiled, x)

    with torch._inductor.config.patch(force_disable_caches=True):
        loss, codes = run_and_get_code(run)
    return [re.sub(r"#.*|inductor_cpu_fused\w+|kernel_cpp_\w+|/\S*", "", code) for code in codes], loss


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.parametrize("dynamic", [False, True])
def test_without_hooks_the_code_is_inductors_own(dynamic: bool) -> None:
    ours, loss = generated("aot_hooks", dynamic=dynamic)
    stock, expected = generated("inductor", dynamic=dynamic)
    assert len(ours) == len(stock) == 2
    assert ours == stock
    assert loss == expected


@pytest.mark.slow
def test_with_hooks_the_code_differs() -> None:
    """That the comparison above can fail."""
    ours, _ = generated("aot_hooks", HALF)
    stock, _ = generated("inductor")
    assert len(ours) == len(stock) == 2 and ours != stock


@pytest.mark.slow
@pytest.mark.core
def test_packing_makes_no_kernel_of_its_own_where_it_can_fuse() -> None:
    def kernels(hook: Hook | None) -> int:
        torch._dynamo.reset()
        torch._inductor.metrics.reset()
        x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
        with torch._inductor.config.patch(force_disable_caches=True), saved_tensors_hooks(hook or aot_hooks.KEEP):
            compiled = torch.compile(lambda x: ((x @ w).sin() @ w).sin(), backend="aot_hooks")
            compiled(x).sum().backward()
        return int(torch._inductor.metrics.generated_kernel_count)

    assert kernels(HALF) == kernels(None) + 2 or kernels(HALF) == kernels(None)


@pytest.mark.core
def test_without_hooks_there_are_no_plans() -> None:
    model = torch.compile(mlp(), backend="aot_hooks", options=ATEN)
    step(model, torch.randn(4, 8))
    assert last_plans(model) == ()


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"innner": "aten"},
            "unknown option 'innner'; did you mean 'inner'? valid options: inner, cudagraphs, policy, scope, inductor, "
            "recompute_pointwise",
        ),
        ({"inner": "eager"}, "'inductor' or 'aten', got 'eager'"),
        ({"scope": "everything"}, "'donated', 'no_static', 'all', got 'everything'"),
        ({"cudagraphs": 1}, "must be True or False, or a dict of cudagraph's options, got 1"),
        ({"policy": 3}, "a policy or a Hook, got 3; write aot_hooks.budget('3GiB')"),
        ({"policy": True}, "a policy or a Hook, got True; write aot_hooks.float8() or the like"),
        ({"inductor": 3}, "a dict of Inductor settings, got 3"),
        ({"inductor": {"no_such": 1}}, "no setting 'no_such'"),
        ({"inner": "aten", "inductor": {"max_autotune": True}}, "needs options['inner'] = 'inductor'"),
    ],
)
def test_wrong_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(Exception) as caught:
        torch.compile(mlp(), backend="aot_hooks", options=options)(torch.randn(2, 8))
    assert caused(caught.value, errors.OptionError)
    assert says in str(caught.value)


@pytest.mark.core
def test_unknown_mode() -> None:
    with pytest.raises(BackendCompilerFailed, match="no-such-mode") as caught:
        torch.compile(mlp(), backend="aot_hooks", mode="no-such-mode")(torch.randn(2, 8))
    assert caused(caught.value, errors.OptionError)


@pytest.fixture
def patches_seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The config patches that Inductor is called with; it compiles nothing."""
    seen: list[dict[str, Any]] = []

    def compile_fx(gm: Any, inputs: Any, config_patches: Any = None, **kwargs: Any) -> Any:
        seen.append(dict(config_patches or {}))
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    return seen


def without_partitioner(seen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The patches but for ours, which changes only what writes to a saved input (see test_snapshots.py)."""
    return [{k: v for k, v in patches.items() if k != "custom_partitioner_fn"} for patches in seen]


@pytest.mark.core
@pytest.mark.parametrize("mode", [None, "default", "max-autotune-no-cudagraphs", "reduce-overhead"])
def test_mode_reaches_inductor(mode: str | None, patches_seen: list[dict[str, Any]]) -> None:
    torch.compile(mlp(), backend="aot_hooks", mode=mode)(torch.randn(2, 8))
    expected = {} if mode in (None, "default") else torch._inductor.list_mode_options(mode)
    assert without_partitioner(patches_seen) == [expected]


@pytest.mark.core
def test_inductor_settings_reach_inductor(patches_seen: list[dict[str, Any]]) -> None:
    options = {"inductor": {"max_autotune": False, "max_fusion_size": 7}}
    with saved_tensors_hooks(HALF):
        torch.compile(mlp(), backend="aot_hooks", options=options)(torch.randn(2, 8))
    (patches,) = patches_seen
    assert patches["max_autotune"] is False and patches["max_fusion_size"] == 7
    assert patches["custom_partitioner_fn"].uuid().startswith("aot_hooks ")


@pytest.mark.core
def test_inductor_settings_win_over_the_mode(patches_seen: list[dict[str, Any]]) -> None:
    """torch.compile takes a mode or options; a backend called by hand may get both."""
    gm = torch.fx.symbolic_trace(lambda x: x.sin())
    aot_hooks_backend(
        gm, [torch.randn(2)], mode="max-autotune-no-cudagraphs", options={"inductor": {"max_autotune": False}}
    )
    assert without_partitioner(patches_seen) == [{"max_autotune": False, "coordinate_descent_tuning": True}]


@pytest.mark.slow
@pytest.mark.core
def test_a_mode_of_inductor_computes_the_same() -> None:
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(4, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    with saved_tensors_hooks(HALF):
        out = torch.compile(model, backend="aot_hooks", mode="max-autotune-no-cudagraphs")(x)
    (got,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.core
def test_policy_and_scope_of_the_options_are_used_where_no_context_is() -> None:
    model, x = mlp(), torch.randn(4, 8)
    compiled = torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": HALF, "scope": "no_static"})
    step(compiled, x)
    (plan,) = last_plans(compiled)
    assert {d.saved.is_input for d in plan.decisions if d.hook is HALF} == {True, False}
    with saved_tensors_hooks(aot_hooks.KEEP):
        step(compiled, x)
    assert all(d.hook is aot_hooks.KEEP for d in last_plans(compiled)[-1].decisions)


AROUND = {
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "Python functions": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x),
    "an eager hook": lambda: saved_tensors_hooks(Hook("eager", lambda x: x * 2, lambda x: x, eager=True)),
}


@pytest.mark.core
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("around", list(AROUND))
def test_eager_hooks_around_a_call_keep_the_policy_from_it_alone(around: str, enabled: bool) -> None:
    """To Dynamo such hooks are as none. Calls with and without them have graphs of their own, whichever comes first."""
    model, x = Wrapped(), torch.randn(4, 8)
    options = {**ATEN, "policy": Hook("times 3", lambda x: x * 3, lambda x: x)}
    compiled = torch.compile(model) if enabled else torch.compile(model, backend="aot_hooks", options=options)

    def gradient(compiled: Any = compiled) -> torch.Tensor:
        model.zero_grad()
        compiled(x).sum().backward()
        return model.mlp[2].weight.grad  # of what its input was saved as

    with aot_hooks.enable(options.pop("policy"), options=options) if enabled else contextlib.nullcontext():
        exact, found = gradient(model), []
        for hooked in (True, False, True, False):
            with AROUND[around]() if hooked else contextlib.nullcontext():
                found.append(gradient())
    assert torch.allclose(found[1], 3 * exact)
    assert torch.equal(found[1], found[3])
    assert torch.equal(found[0], found[2])
    assert torch.allclose(found[0], exact if around == "save_on_cpu" else 2 * exact)
    assert len(last_plans(compiled)) == 1


# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("how", ["module", "function", "method"])
def test_plans_of_a_module_a_function_and_a_compiled_method(how: str) -> None:
    x, model = torch.randn(4, 8), Wrapped()
    compiled: Any = model
    if how == "method":
        model.compile(backend="aot_hooks", options=ATEN)
    else:
        compiled = torch.compile(model if how == "module" else lambda x: model(x), backend="aot_hooks", options=ATEN)
    assert last_plans(compiled) == ()
    with saved_tensors_hooks(HALF):
        step(compiled, x)
    (plan,) = last_plans(compiled)
    packed = [d for d in plan.decisions if d.hook is HALF]
    assert packed and 0 < plan.packed_bytes < plan.saved_bytes
    with saved_tensors_hooks(HALF):
        step(compiled, x)
    assert len(last_plans(compiled)) == 1, "a call that compiles nothing adds nothing"


@pytest.mark.core
def test_plans_of_a_decorated_function() -> None:
    @torch.compile(backend="aot_hooks", options=ATEN)
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()

    with saved_tensors_hooks(HALF):
        f(torch.randn(4, requires_grad=True)).sum().backward()
    assert len(last_plans(f)) == 1


@pytest.mark.core
def test_one_plan_a_graph_oldest_first() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).sin()
        torch._dynamo.graph_break()
        return (y @ w).cos()

    compiled = torch.compile(f, backend="aot_hooks", options=ATEN)
    with saved_tensors_hooks(HALF):
        compiled(torch.randn(4, 8, requires_grad=True), torch.randn(8, 8)).sum().backward()
    plans = last_plans(compiled)
    assert [["mm" in d.saved.op for d in p.decisions if d.hook is HALF] for p in plans] == [[True], [True]]


@pytest.mark.core
def test_plans_are_those_of_one_compiled_function() -> None:
    first, second = (torch.compile(mlp(), backend="aot_hooks", options=ATEN) for _ in range(2))
    with saved_tensors_hooks(HALF):
        step(first, torch.randn(4, 8))
    assert len(last_plans(first)) == 1 and last_plans(second) == ()


@pytest.mark.core
@pytest.mark.parametrize("what", [mlp(), lambda x: x, 3, torch.compile])
def test_plans_of_what_is_not_compiled(what: Any) -> None:
    with pytest.raises(errors.OptionError, match=r"takes what torch\.compile returned"):
        last_plans(what)


@pytest.mark.core
def test_dynamo_reset_calls_ours() -> None:
    compiled = torch.compile(mlp(), backend="aot_hooks", options=ATEN)
    with saved_tensors_hooks(HALF):
        step(compiled, torch.randn(4, 8))
    assert last_plans(compiled)
    torch._dynamo.reset()
    assert last_plans(compiled) == ()
    with saved_tensors_hooks(HALF):
        step(compiled, torch.randn(4, 8))
    assert len(last_plans(compiled)) == 1


@pytest.mark.core
def test_a_dropped_function_drops_its_plans() -> None:
    from aot_hooks.records import _plans

    compiled: Any = torch.compile(lambda x: x.sin().exp(), backend="aot_hooks", options=ATEN)
    with saved_tensors_hooks(HALF):
        compiled(torch.randn(4, requires_grad=True)).sum().backward()
    before = len(_plans.known)
    torch._dynamo.reset()
    del compiled
    gc.collect()
    assert len(_plans.known) < before


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_packed_tensors_die_as_the_backward_goes() -> None:
    """The arguments of a backward come in a list that is emptied: what is unpacked is not needed any more."""
    w = torch.randn(8, 8)

    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = (x @ w).sin()
        return x

    compiled = torch.compile(f, backend="aot_hooks", options=ATEN)
    x = torch.randn(8, 8, requires_grad=True)
    with saved_tensors_hooks(HALF):
        compiled(x)  # compile
        loss = compiled(x).sum()
    packed: list[weakref.ref[Any]] = []
    for saved in saved_of(loss.grad_fn):
        if saved.dtype is torch.float16:
            packed.append(weakref.ref(saved))
    assert len(packed) == 4
    del saved
    alive: list[int] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                alive.append(sum(ref() is not None for ref in packed))
            return func(*args, **(kwargs or {}))

    with Count():
        loss.backward()
    assert alive == [3, 2, 1, 0]


def saved_of(node: Any) -> list[torch.Tensor]:
    while "CompiledFunction" not in type(node).__name__:
        node = node.next_functions[0][0]
    return list(node.saved_tensors)


@pytest.mark.core
@pytest.mark.parametrize("inner", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_code_does_not_hold_the_inputs_of_its_first_call(inner: str) -> None:
    """They may be activations, with all that autograd holds behind them."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    compiled = torch.compile(model, backend="aot_hooks", options={"inner": inner, "policy": HALF})
    activation = torch.randn(4, 8, requires_grad=True) * 2
    compiled(activation).sum().backward()
    reference = weakref.ref(activation)
    del activation
    assert reference() is None
    assert torch.isfinite(model[0].weight.grad).all()


# --- beside what is compiled -----------------------------------------------------------------------------------------


@pytest.mark.core
def test_dynamo_does_not_compile_the_hooks_of_eager_parts() -> None:
    """Where Dynamo leaves a frame, its operators run with Dynamo still listening."""
    w, mask = torch.randn(8, 8), torch.rand(4, 8) > 0.5

    def f(x: torch.Tensor) -> torch.Tensor:
        y = (x @ w).sin()
        return torch.masked_select(y.exp(), mask).cos()  # a size that depends on values: no graph holds it

    def frames(hook: Hook | None) -> int:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounter()
        with saved_tensors_hooks(hook) if hook is not None else contextlib.nullcontext():
            torch.compile(f, backend=counter)(torch.randn(4, 8, requires_grad=True)).sum().backward()
        return int(counter.frame_count)

    assert frames(None) == frames(HALF) == 2
