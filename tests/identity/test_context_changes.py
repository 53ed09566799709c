"""Hooks and policies that change while their context is open, or what `enable` returns is enabled.

Compiled calls notice it, eager ones follow.
"""

from __future__ import annotations

import contextlib
import threading
import types
from typing import Any

import pytest
import torch
from raising import raises
from sentinel import Chain, assert_same, compiled, gradients, graph_count, hand_gradients
from steps import ATEN
from torch import Tensor

import aot_hooks
from aot_hooks import Hook, enable, saved_tensors_hooks
from aot_hooks.errors import HookContractError


def hooks(held: Any) -> Any:
    return lambda x: x * held.k, lambda x: x.clone()


def test_a_change_in_an_open_context_is_refused_by_compiled_calls_and_followed_by_eager_ones(
    model: Chain, x: Tensor
) -> None:
    held = types.SimpleNamespace(k=2.0)
    pair, call = hooks(held), compiled(model)
    with saved_tensors_hooks(*pair):
        assert_same(gradients(call, model, x), hand_gradients(model, x, h=2))
        held.k = 3.0
        assert_same(gradients(model, model, x), hand_gradients(model, x, h=3))
        with pytest.raises(HookContractError, match=r"has changed since .* was entered.*Enter a context anew"):
            call(x)
        with torch.no_grad():  # saves nothing
            assert torch.equal(call(x), model(x))
        held.k = 2.0
        assert_same(gradients(call, model, x), hand_gradients(model, x, h=2))
    held.k = 3.0
    with saved_tensors_hooks(*pair):
        assert_same(gradients(call, model, x), hand_gradients(model, x, h=3))


@pytest.mark.core
def test_a_graph_is_made_of_what_hooks_are_then_and_found_by_that(model: Chain, x: Tensor) -> None:
    held, call, before = types.SimpleNamespace(k=2.0), compiled(model), graph_count()
    pair = hooks(held)
    with saved_tensors_hooks(*pair):
        held.k = 3.0
        assert_same(gradients(call, model, x), hand_gradients(model, x, h=3))
    for k in (2.0, 3.0):
        held.k = k
        with saved_tensors_hooks(*pair):
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=k))
    assert graph_count() - before == 2


@pytest.mark.core
@pytest.mark.parametrize("made", ["once", "anew"])
def test_a_hook_that_has_changed_before_it_is_enabled_again_recompiles_once(model: Chain, x: Tensor, made: str) -> None:
    held, call, before = types.SimpleNamespace(k=2.0), torch.compile(model), graph_count()
    hook = Hook("h", *hooks(held))
    for k in (2.0, 2.0, 3.0, 3.0, 2.0, 3.0):
        held.k = k
        with enable(hook if made == "once" else Hook("h", *hooks(types.SimpleNamespace(k=k))), options=ATEN):
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=k))
    assert graph_count() - before == 2


@pytest.mark.core
def test_a_policy_that_has_changed_before_it_is_enabled_again_recompiles_once(model: Chain, x: Tensor) -> None:
    held, call, before = types.SimpleNamespace(k=2.0), torch.compile(model), graph_count()
    kinds = {k: Hook("h", *hooks(types.SimpleNamespace(k=k))) for k in (2.0, 3.0)}
    policy = lambda saved: kinds[held.k]  # noqa: E731
    for k in (2.0, 2.0, 3.0, 2.0):
        held.k = k
        with enable(policy, options=ATEN):
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=k))
    assert graph_count() - before == 2


@pytest.mark.core
def test_a_change_of_an_enabled_hook_is_refused(model: Chain, x: Tensor) -> None:
    held, other = types.SimpleNamespace(k=2.0), types.SimpleNamespace(k=2.0)
    call, hook = torch.compile(model), Hook("h", *hooks(held))
    says = r"'h' has changed since aot_hooks\.enable was called.*Call aot_hooks.enable anew after each change"
    with enable(hook, options=ATEN):
        assert_same(gradients(call, model, x), hand_gradients(model, x, h=2))
        with enable(Hook("h", *hooks(other)), options=ATEN):  # has the same graph
            held.k = 3.0
            assert_same(gradients(call, model, x), hand_gradients(model, x, h=2))
            other.k = 3.0
            with pytest.raises(HookContractError, match=says):
                call(x)
        with pytest.raises(HookContractError, match=says):
            call(x)
        with raises(HookContractError, "'h' has changed since aot_hooks.enable was called"):
            torch.compile(lambda x: model(x))(x)
        held.k = 2.0
        assert_same(gradients(call, model, x), hand_gradients(model, x, h=2))
    held.k = 3.0
    with enable(hook, options=ATEN):
        assert_same(gradients(call, model, x), hand_gradients(model, x, h=3))


@pytest.mark.core
def test_a_policy_in_options_that_changes_is_refused(model: Chain, x: Tensor) -> None:
    held = types.SimpleNamespace(k=2.0)
    call = compiled(model, policy=Hook("scaled", lambda x: x * held.k, lambda x: x.clone()))
    assert_same(gradients(call, model, x), hand_gradients(model, x, h=2))
    held.k = 3.0
    with pytest.raises(HookContractError, match=r"hook 'scaled' has changed since torch\.compile made graphs with it"):
        call(x)


def test_eager_parts_call_the_functions_of_the_context_they_are_in(model: Chain, x: Tensor) -> None:
    """Equal ones were entered and left inside of it, and say something else by now."""
    mine, other = types.SimpleNamespace(k=2.0), types.SimpleNamespace(k=2.0)

    with saved_tensors_hooks(*hooks(mine)):
        with saved_tensors_hooks(*hooks(other)):
            pass
        other.k = 5.0
        assert_same(gradients(model, model, x), hand_gradients(model, x, h=2))


@pytest.mark.core
def test_each_thread_is_asked_for_the_objects_that_it_entered_with(model: Chain, x: Tensor) -> None:
    """Equal settings are one pair. Its functions are those that were entered last."""
    call, mine, other = compiled(model), types.SimpleNamespace(k=2.0), types.SimpleNamespace(k=2.0)

    def enter_and_leave() -> None:
        with saved_tensors_hooks(*hooks(other)):
            pass

    with saved_tensors_hooks(*hooks(mine)):
        gradients(call, model, x)
        thread = threading.Thread(target=enter_and_leave)
        thread.start()
        thread.join()
        other.k = 5.0  # nobody's business any more
        assert_same(gradients(call, model, x), hand_gradients(model, x, h=2))
        mine.k = 3.0
        with pytest.raises(HookContractError, match="has changed"):
            call(x)


@pytest.mark.core
@pytest.mark.parametrize("way", ["open", "anew", "options", "nested", "object", "eager"])
def test_a_policy_may_note_what_it_is_asked(way):
    seen: list[str] = []

    def policy(saved):
        seen.append(saved.op)
        return aot_hooks.int8()

    def model(x, w):
        x = torch.tanh(torch.tanh(x @ w) @ w)
        if way == "options":
            torch._dynamo.graph_break()  # a second graph is made while the first one is there
        return torch.tanh(torch.tanh(x @ w) @ w)

    class Asked:
        def __call__(self, saved):
            self.last = saved.op
            return policy(saved)

    rule = {"nested": aot_hooks.policies.first_match(policy), "object": Asked()}.get(way, policy)
    options = {"inner": "aten", **({"policy": policy} if way == "options" else {})}
    compiled = model if way == "eager" else torch.compile(model, backend="aot_hooks", options=options)
    x, w = torch.randn(8, 32), torch.randn(32, 32, requires_grad=True)
    around = contextlib.nullcontext if way in ("options", "anew") else lambda: aot_hooks.saved_tensors_policy(rule)
    with around():
        for _ in range(3):
            with aot_hooks.saved_tensors_policy(rule) if way == "anew" else contextlib.nullcontext():
                compiled(x, w).sum().backward()
    assert len(seen) >= 2
    if way == "options":
        assert len(aot_hooks.last_plans(compiled)) == 2
