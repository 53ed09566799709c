"""Values that no hook may round, saved as what the backward computes from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from steps import ATEN
from torch import Tensor

import aot_hooks
from aot_hooks import KEEP, float8
from aot_hooks.errors import GradientWarning
from aot_hooks.passes.plan import Plan
from aot_hooks.passes.results import RESULT
from aot_hooks.policies import larger_than

pytestmark = pytest.mark.core
WIDTH = 64
NOTHING = larger_than(1 << 14, float8())  # rounds, but no saved tensor is so large

Program = Callable[[Tensor, Tensor, Tensor], Tensor]


def rms_norm(h: Tensor) -> Tensor:
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)


def two_results(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    p, q = x @ v, x @ w
    return (rms_norm(p + q) * rms_norm(p - q)) @ w


SAVED: dict[str, tuple[Program, set[str]]] = {  # each with the operators of what is saved instead
    "a residual": (lambda x, v, w: rms_norm(x + x @ v) @ w, {"aten.add.Tensor"}),
    "a difference": (lambda x, v, w: F.gelu(x @ v - x) @ w, {"aten.sub.Tensor"}),
    "a sum of a sum": (lambda x, v, w: rms_norm((x + x @ v) + x.sin()) @ w, {"aten.add.Tensor"}),
    "two results of two values": (two_results, {"aten.add.Tensor", "aten.sub.Tensor"}),
}
NOT_SAVED: dict[str, Program] = {
    "the value is read exactly as well": lambda x, v, w: (lambda h: F.gelu(x + h) @ w + (h * h).log().sum())(x @ v),
    "the result is larger": lambda x, v, w: F.gelu((x @ v)[None] + torch.ones(4, 1, 1)).sum(0) @ w,
    "nothing reads it exactly": lambda x, v, w: F.gelu(x @ v) @ w,
}


def arguments() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(32, WIDTH), *(torch.randn(WIDTH, WIDTH) / 8 for _ in range(2))]


def gradients(f: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    inputs = [t.to(dtype).requires_grad_() for t in arguments()]
    out = f(*inputs)
    return list(torch.autograd.grad((out * torch.cos(torch.arange(out.numel()).view_as(out))).sum(), inputs))


def plan_of(f: Program, policy: Any) -> Plan:
    x, *weights = arguments()
    parameters = [w.requires_grad_() for w in weights]
    return aot_hooks.plan(lambda x: f(x, *parameters), x.requires_grad_(), policy=policy, inner="aten")


@pytest.mark.parametrize("name", SAVED)
def test_what_may_be_rounded_is_saved_instead(name: str) -> None:
    program, operators = SAVED[name]
    kept, plan = plan_of(program, KEEP), plan_of(program, float8())
    packed = {d.saved.op for d in plan.decisions if d.saved_bytes == 0 and d.hook.lossy}
    assert packed == operators and any(d.hook is RESULT and d.saved_bytes for d in plan.decisions)
    assert plan.saved_bytes == kept.saved_bytes
    biggest = max(d.packed_bytes for d in plan.decisions)
    assert biggest < 32 * WIDTH * 4 / 3  # nothing is left in full


@pytest.mark.parametrize("name", NOT_SAVED)
def test_values_stay_where_results_save_nothing(name: str) -> None:
    plan = plan_of(NOT_SAVED[name], float8())
    assert not any(d.hook is RESULT for d in plan.decisions) and len(plan.decisions) > 0


@pytest.mark.parametrize("name", SAVED)
def test_gradients_are_exact_if_nothing_is_rounded_and_close_if_it_is(name: str) -> None:
    program, _ = SAVED[name]
    expected, exact = (
        gradients(torch.compile(program, backend="aot_hooks", options=ATEN)),
        gradients(program, torch.float64),
    )
    for policy, limit in ((NOTHING, 0.0), (float8(), 0.06)):
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="aot_hooks", options=ATEN | {"policy": policy})
        found = gradients(compiled)
        (plan,) = aot_hooks.last_plans(compiled)
        assert any(d.hook is RESULT for d in plan.decisions)
        if policy is NOTHING:
            assert all(map(torch.equal, found, expected))
        for g, e in zip(found, exact, strict=True):
            assert (g - e).norm() <= max(limit, 1e-5) * e.norm()


def test_results_in_a_region_with_symbolic_sizes() -> None:
    _, v, w = arguments()

    def program(x: Tensor) -> Tensor:
        with aot_hooks.saved_tensors_hooks(float8()):
            return two_results(x, v, w).tanh()

    compiled = torch.compile(program, backend="aot_hooks", options=ATEN, dynamic=True)
    for rows in (8, 24):
        x = torch.randn(rows, WIDTH, requires_grad=True)
        found, expected = (torch.autograd.grad(f(x).sum(), x)[0] for f in (compiled, program))
        assert (found - expected).norm() < 0.06 * expected.norm()
    (plan,) = aot_hooks.last_plans(compiled)
    assert [d.hook is RESULT for d in plan.decisions].count(True) == 2


def test_check_finds_a_result_that_makes_gradients_wrong() -> None:
    program, _ = SAVED["a residual"]
    options = ATEN | {"policy": float8(), "check": 1e-4}
    with pytest.warns(GradientWarning, match=r"add.*aten\.add\.Tensor"):
        gradients(torch.compile(program, backend="aot_hooks", options=options))
