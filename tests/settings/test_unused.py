"""Hooks, policies and contexts without effect: each is warned of once, with the way out; others are not."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks import KEEP, Hook, last_plans, policies, saved_tensors_hooks, saved_tensors_policy, unused
from aot_hooks.errors import UnusedWarning

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """As in a new process."""

    def clear() -> None:
        unused.forget()
        unused._examined.clear()
        unused._warned.clear()

    clear()
    yield
    clear()


HALF = Hook("half", lambda x: (x.half(), x.dtype), lambda p: p[0].to(p[1]))
ATEN = {"inner": "aten"}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def warned(run: Any) -> list[str]:
    """The messages of `run`, as `UnusedWarning`."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    ours = [w for w in found if issubclass(w.category, UnusedWarning)]
    assert all(w.filename == __file__ for w in ours), "the warning names the user's line"
    return [str(w.message) for w in ours]


def steps(context: Any = contextlib.nullcontext, count: int = 3, **options: Any) -> Any:
    """A function that trains for some steps."""
    call = torch.compile(model(), backend="aot_hooks", options={**ATEN, **options})

    def run() -> None:
        for _ in range(count):
            with context():
                loss = call(torch.ones(4, 8)).sum()
            loss.backward()

    return run


@dataclass
class Everything:
    """Compared by value, so it has no hash."""

    hook: Hook

    def __call__(self, saved: Any) -> Hook:
        return self.hook


MUTE = {
    "a policy without a hash": lambda: saved_tensors_policy(policies.only_these_modules({"1": Everything(HALF)})),
    "a hook": lambda: saved_tensors_hooks(HALF),
    "keep": lambda: saved_tensors_hooks(KEEP),
    "keys that fit": lambda: saved_tensors_policy(policies.only_these_modules({"1": HALF, "**": KEEP})),
    "one of two policies": lambda: saved_tensors_policy(
        policies.first_match(policies.larger_than(1 << 30, HALF), policies.only_these_ops({"gelu": HALF}))
    ),
}


@pytest.mark.parametrize("case", MUTE)
def test_no_warning_of_a_setting_with_an_effect(case: str) -> None:
    assert warned(steps(MUTE[case])) == []


UNUSED = {
    "packs nothing": (policies.larger_than(1 << 30, HALF), ["packed none of the 4 tensors", "2 not larger than"]),
    "a pattern": (policies.only_these_modules({"1": HALF, "layrs.*": HALF}), ["fits 'layrs.*'", "they have '0', '1'"]),
    "a name": (policies.only_these_names({"logits": HALF}), ["fits 'logits'", "no such thing"]),
    "an operator": (policies.first_match(policies.only_these_ops({"sin": HALF}), HALF), ["'aten.sin'", "'aten.gelu."]),
    "a dtype": (policies.larger_than(1, policies.only_these_dtypes({torch.float16: HALF})), ["'float16'", "'float32'"]),
    "a function of the user's": (lambda saved: KEEP, ["policy '<lambda>' packed none", "print_report"]),
}


@pytest.mark.parametrize("by", ["context", "options", "region"])
@pytest.mark.parametrize("case", UNUSED)
def test_a_policy_that_does_nothing(case: str, by: str) -> None:
    policy, parts = UNUSED[case]
    if by == "context":
        run = steps(lambda: saved_tensors_policy(policy))
    elif by == "options":
        run = steps(policy=policy)
    else:
        inner = model()

        def f(x: torch.Tensor) -> torch.Tensor:
            with saved_tensors_policy(policy):
                return inner(x)

        call = torch.compile(f, backend="aot_hooks", options=ATEN)

        def run() -> None:
            for _ in range(2):
                call(torch.ones(4, 8)).sum().backward()

    if by == "region" and case == "a pattern":
        parts = parts[:1]  # modules have other paths there
    messages = warned(run)
    assert len(messages) == 1, messages
    assert all(part in messages[0] for part in parts), messages
    assert warned(run) == []


def test_a_key_is_judged_by_all_graphs_of_a_forward() -> None:
    """Each layer has a graph of its own; the pattern of one fits in its own alone."""
    torch.manual_seed(0)
    layers = nn.ModuleList([model(), nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))])
    calls = [torch.compile(layer, backend="aot_hooks", options=ATEN) for layer in layers]
    policy = policies.only_these_ops({"gelu": HALF, "tanh": HALF})

    def run() -> None:
        with saved_tensors_policy(policy):
            x = torch.ones(4, 8)
            for call in calls:
                x = call(x)
        x.sum().backward()

    assert warned(run) == []


def test_a_context_around_another_backend() -> None:
    call = torch.compile(model(), backend="aot_eager")

    def run() -> None:
        with saved_tensors_hooks(HALF):
            loss = call(torch.ones(4, 8)).sum()
        loss.backward()

    (message,) = warned(run)
    assert "hook 'half' is around a function that another backend compiles" in message
    assert "backend='aot_hooks'" in message
    assert warned(run) == []


@pytest.mark.slow
def test_a_context_around_another_backends_graph_that_saves_nothing() -> None:
    """The second time torch's cache has the graph; what eager operators save is packed both times."""

    @torch.compile
    def mask(x: torch.Tensor) -> torch.Tensor:
        return (x > 0.5).float()

    def run() -> None:
        torch._dynamo.reset()
        unused._examined.clear()
        x = torch.rand(4, 8)
        with saved_tensors_hooks(HALF):
            with torch.no_grad():
                kept = mask(x)
            loss = model()(x * kept).sum()
        loss.backward()

    hits = torch._dynamo.utils.counters["aot_autograd"]
    hits.clear()
    assert warned(run) == warned(run) == []
    assert hits["autograd_cache_hit"]


def checkpointed(where: str, policy: Any, **checkpointing: Any) -> Any:
    """A function that trains for some steps with `torch.utils.checkpoint` around or inside a compiled function."""
    inner = model()
    options = {**ATEN, "policy": None if where == "around, context" else policy}
    if where == "inside":
        call = torch.compile(lambda x: checkpoint(inner, x, **checkpointing), backend="aot_hooks", options=options)
    else:
        compiled = torch.compile(inner, backend="aot_hooks", options=options)
        call = functools.partial(checkpoint, compiled, **checkpointing)
    context = saved_tensors_policy(policy) if where == "around, context" else contextlib.nullcontext()

    def run() -> None:
        for _ in range(2):
            with context:
                loss = call(torch.ones(4, 8, requires_grad=True)).sum()
            loss.backward()

    return run


@pytest.mark.parametrize("where", ["around", "around, context", "inside"])
def test_checkpointing_that_leaves_nothing_to_pack(where: str) -> None:
    run = checkpointed(where, HALF, use_reentrant=False)
    (message,) = warned(run)
    assert "hook 'half'" in message and "torch.utils.checkpoint" in message and "Take the checkpoint out" in message
    assert warned(run) == []


@pytest.mark.parametrize(
    ("around", "names"),
    [
        (torch.autograd.graph.save_on_cpu, "save_on_cpu"),
        (lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x), "<lambda>"),
    ],
)
@pytest.mark.parametrize("enabled", [False, True])
def test_torchs_own_hooks_around_a_call(enabled: bool, around: Any, names: str) -> None:
    inner = model()
    compiled = (
        torch.compile(inner) if enabled else torch.compile(inner, backend="aot_hooks", options=ATEN | {"policy": HALF})
    )

    def run() -> None:
        with aot_hooks.enable(HALF, options=ATEN) if enabled else contextlib.nullcontext():
            for _ in range(2):
                with around():
                    loss = compiled(torch.ones(4, 8, requires_grad=True)).sum()
                loss.backward()

    (message,) = warned(run)
    assert "hook 'half' does nothing" in message and "the innermost one counts alone" in message and names in message
    assert warned(run) == []


@pytest.mark.parametrize("gradients", [False, True])
def test_torchs_own_hooks_around_a_call_that_saves_nothing(gradients: bool) -> None:
    """And the call after it, which does save, is warned of."""
    inner = model()
    compiled = torch.compile(inner, backend="aot_hooks", options=ATEN | {"policy": HALF})
    inner.requires_grad_(not gradients)

    def run(x: torch.Tensor, enabled: bool) -> None:
        with torch.set_grad_enabled(enabled), torch.autograd.graph.save_on_cpu():
            compiled(x)

    assert warned(lambda: run(torch.ones(4, 8), gradients)) == []
    assert len(warned(lambda: run(torch.ones(4, 8, requires_grad=True), True))) == 1


def test_an_eager_hook_around_a_call_is_not_warned_of() -> None:
    eager = Hook("eager", lambda x: x * 2, lambda x: x / 2, eager=True)
    assert warned(steps(lambda: saved_tensors_hooks(eager), policy=HALF)) == []


def test_checkpointing_that_leaves_something_to_pack() -> None:
    assert warned(checkpointed("around", HALF, use_reentrant=True)) == []


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("checkpointed_count", "says"), [(0, False), (1, False), (3, False), (6, True)])
def test_checkpoints_of_some_blocks(checkpointed_count: int, says: bool, dynamic: bool) -> None:
    blocks = nn.ModuleList(model() for _ in range(6))

    def f(x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(blocks):
            x = x + (checkpoint(block, x, use_reentrant=False) if i < checkpointed_count else block(x))
        return x

    call = torch.compile(f, backend="aot_hooks", options={**ATEN, "policy": HALF}, dynamic=dynamic)
    messages = warned(lambda: call(torch.ones(4, 8, requires_grad=True)).sum().backward())
    assert ["finds little to pack" in message for message in messages] == [True] * says
    (plan,) = last_plans(call)
    assert 0 < plan.packed_bytes < plan.saved_bytes


def test_a_context_around_backward_alone() -> None:
    def run() -> None:
        loss = model()(torch.ones(4, 8)).sum()
        with saved_tensors_hooks(HALF):
            loss.backward()

    (message,) = warned(run)
    assert "saw no saved tensor" in message and "around the forward" in message
    assert warned(run) == []


def test_a_budget_around_what_nobody_compiled() -> None:
    policy = aot_hooks.budget("1MiB")

    def run() -> None:
        with saved_tensors_policy(policy):
            loss = model()(torch.ones(4, 8)).sum()
        loss.backward()

    (message,) = warned(run)
    assert "budget('1MiB') had no effect" in message and "torch.compile(" in message
    assert warned(run) == []


def test_a_budget_around_a_graph_and_eager_parts() -> None:
    call = torch.compile(model(), backend="aot_hooks", options=ATEN)

    def run() -> None:
        with saved_tensors_policy(aot_hooks.budget("2MiB")):
            loss = model()(call(torch.ones(4, 8))).sum()
        loss.backward()

    assert warned(run) == []


def test_a_context_in_which_something_is_saved_eagerly_or_nothing_is_to_be() -> None:
    def run() -> None:
        with saved_tensors_hooks(HALF):
            model()(torch.ones(4, 8))
        with torch.no_grad(), saved_tensors_hooks(aot_hooks.int8()):
            model()(torch.ones(4, 8))
        with saved_tensors_hooks(aot_hooks.int4()):
            loss = model()(torch.ones(4, 8)).sum()
            with saved_tensors_hooks(aot_hooks.float8()):
                model()(torch.ones(4, 8))
        loss.backward()
        with contextlib.suppress(KeyError), saved_tensors_hooks(aot_hooks.bitmask()):
            raise KeyError

    assert warned(run) == []


@pytest.mark.parametrize("how", ["in place", "subclass in place", "compiled", "own"])
def test_torchs_modules_that_are_compiled_in_place(how: str) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    class Named(nn.Sequential): ...

    module = {"own": Own(), "subclass in place": Named(*model())}.get(how, model())
    options = {**ATEN, "policy": HALF}
    if how == "compiled":
        module = torch.compile(module, backend="aot_hooks", options=options)
    else:
        module.compile(backend="aot_hooks", options=options)
    module(torch.ones(4, 8)).sum().backward()
    messages = warned(lambda: last_plans(module))
    assert (last_plans(module) == ()) == bool(messages)  # torch 2.15 makes a graph of those in place, too
    assert "in place" in how or not messages
    assert messages or "in place" not in how or torch.__version__ >= "2.15"
    if messages:
        assert "compiled in place" in messages[0] and "torch.compile(module" in messages[0]
        report = aot_hooks.format_report(last_plans(module))
        assert "in place" in report and "not been called yet" in report


def test_a_graph_that_packs_has_nothing_of_this_on_its_way() -> None:
    compiled = object()
    call: Any = compiled
    assert unused.warning_if_unused(call, []) is call
