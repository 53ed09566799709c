"""What is said of compiled versions: hooks that change, sizes that do, and policies that Dynamo's limit drops."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import aot_hooks
from aot_hooks import Hook, saved_tensors_hooks, saved_tensors_policy
from aot_hooks.errors import RecompileWarning
from aot_hooks.settings import recompiles

pytestmark = pytest.mark.core

W = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
DOUBLED = Hook("doubled", lambda x: x * 2.0, lambda packed: packed)


def fn(a: Tensor) -> Tensor:
    return torch.tanh(a @ W) @ W


def gradient(call: Any, rows: int) -> Tensor:
    torch.manual_seed(rows)
    return torch.autograd.grad(call(torch.rand(rows, 4)).sum(), W)[0]


def expected(rows: int, factor: float = 2.0) -> Tensor:
    """The gradient of `fn` where the saved tanh, an intermediate, comes back `factor` times as large."""
    torch.manual_seed(rows)
    a = torch.rand(rows, 4)
    h = (a @ W).tanh().detach()
    ones = torch.ones(rows, 4)
    return (h * factor).t() @ ones + a.t() @ ((ones @ W.detach().t()) * (1 - (h * factor) ** 2))


def warned(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if each.category is RecompileWarning]


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompiles, "_said", set())


def compiled(**options: Any) -> Any:
    return torch.compile(fn, backend="aot_hooks", dynamic=False, options={"inner": "aten", **options})


@pytest.mark.parametrize("how", ["hook", "policy", "context"])
def test_other_sizes_of_an_unchanged_hook_are_no_change(how: str) -> None:
    policies = {"hook": DOUBLED, "policy": lambda _: DOUBLED}
    call = compiled(policy=policies.get(how))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in range(1, 6):
            if how == "context":
                with saved_tensors_hooks(lambda x: x * 2.0, lambda packed: packed):
                    found = gradient(call, rows)
            else:
                found = gradient(call, rows)
            torch.testing.assert_close(found, expected(rows))
    assert warned(caught) == []


def test_a_hook_that_changes_is_warned_of_at_other_sizes_too() -> None:
    call = compiled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in range(1, 6):
            with saved_tensors_hooks(lambda x, by=float(rows): x * by, lambda packed: packed):
                torch.testing.assert_close(gradient(call, rows), expected(rows, rows))
    (message,) = warned(caught)
    assert "compiled 4 times" in message


def test_a_policy_of_the_options_that_dynamos_limit_drops_is_said_once() -> None:
    call = compiled(policy=DOUBLED)
    with torch._dynamo.config.patch(recompile_limit=3), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (1, 2):
            torch.testing.assert_close(gradient(call, rows), expected(rows))
        assert warned(caught) == []
        for rows in (3, 4, 5):
            torch.testing.assert_close(gradient(call, rows), expected(rows, 2.0 if rows == 3 else 1.0))
        (message,) = warned(caught)
        assert "'fn' (test_recompiles.py:" in message and "recompile_limit allows (3)" in message
        with saved_tensors_policy(DOUBLED):  # the way out
            torch.testing.assert_close(gradient(call, 6), expected(6))
    assert len(warned(caught)) == 1


def test_a_reset_in_an_open_context_forgets_nothing_of_the_hook() -> None:
    factor = [2.0]
    with saved_tensors_hooks(lambda x: x * factor[0], lambda packed: packed):
        for by in (2.0, 2.0, 3.0):  # what the hook reads may change then: no graph of before is left
            factor[0] = by
            torch.testing.assert_close(gradient(compiled(), 2), expected(2, by))
            torch._dynamo.reset()
        call = compiled()
        torch.testing.assert_close(gradient(call, 2), expected(2, 3.0))
        aot_hooks.reset()  # Dynamo keeps its graphs
        factor[0] = 4.0
        with pytest.raises(aot_hooks.errors.HookContractError, match="has changed since"):
            gradient(call, 2)
