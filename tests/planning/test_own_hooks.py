"""Hooks of users as means of a budget: chosen by their bytes, times and error."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from small_budgets import budget
from steps import ATEN, BITS
from torch import nn

import aot_hooks
from aot_hooks import Hook
from aot_hooks.errors import OptionError


def pack(x: torch.Tensor) -> Any:
    return x.to(torch.float16) if x.dtype is torch.float32 else x


def unpack(packed: torch.Tensor) -> torch.Tensor:
    return packed.float()


HALF = Hook("half", pack, unpack, lossy=True, error=3e-4, digits=11)


def pack_mask(x: torch.Tensor) -> Any:
    """Eight truth values in a byte."""
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=x.device)
    return (x.reshape(-1, 8) * weights).sum(-1, dtype=torch.uint8), *x.shape


def unpack_mask(packed: Any) -> torch.Tensor:
    q, *shape = packed
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=q.device)
    return (q.unsqueeze(-1) & weights).bool().view(shape)


def no_mask(saved: aot_hooks.SavedTensor) -> str | None:
    return None if saved.dtype is torch.bool and saved.nbytes % 8 == 0 else "no mask"


MASKS = Hook("masks", pack_mask, unpack_mask, declines=no_mask, error=0)


def model_of(*layers: nn.Module) -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 256), *layers, nn.Linear(256, 32)), torch.randn(256, 32)


def gradients(run: Any, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(run(x).square().sum(), [*model.parameters()]))


def planned(model: nn.Module, x: torch.Tensor, **arguments: Any) -> aot_hooks.Plan:
    policy = budget(max_slowdown=math.inf, **arguments)
    return aot_hooks.plan(model, x, policy=policy, inner="aten")


def chosen(plan: aot_hooks.Plan) -> set[str]:
    return {d.hook.name for d in plan.decisions} - {"keep"}


@pytest.mark.core
def test_a_hook_of_the_users_is_a_means_within_max_error():
    model, x = model_of(nn.GELU(), nn.Linear(256, 256), nn.GELU())
    plan = planned(model, x, allow=("lossless", HALF))
    assert chosen(plan) == {"half"}
    for row in (d for d in plan.decisions if d.hook is HALF):
        assert row.packed_bytes * 2 == row.saved_bytes and "half frees" in row.reason
    stock = aot_hooks.plan(model, x, policy=aot_hooks.KEEP, inner="aten")
    assert plan.peak_bytes < stock.peak_bytes

    assert chosen(planned(model, x, allow=("lossless", HALF), max_error=1e-5)) == set()
    assert chosen(planned(model, x, allow=("lossless", HALF), max_error=0)) == set()
    coarse = dataclasses.replace(HALF, error=0.3)  # above four times the limit
    assert chosen(planned(model, x, allow=("lossless", coarse))) == set()


@pytest.mark.core
def test_steps_with_a_hook_of_the_users_are_off_by_its_error():
    model, x = model_of(*[nn.Sequential(nn.GELU(), nn.Linear(256, 256)) for _ in range(3)], nn.GELU())
    expected = gradients(model, model, x)
    policy = budget(planned(model, x, allow=("recompute", HALF)).peak_bytes, allow=("recompute", HALF))
    compiled = torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": policy})
    found = gradients(compiled, model, x)
    apart = torch.stack([(f - e).norm() for f, e in zip(found, expected, strict=True)]).norm()
    assert 0 < apart / torch.stack([e.norm() for e in expected]).norm() < 3e-4
    (plan,) = aot_hooks.last_plans(compiled)
    assert "half" in chosen(plan) and plan.peak_bytes <= policy.peak
    assert repr(policy.allow) == "('recompute', half)"


@pytest.mark.core
def test_an_exact_hook_of_the_users_is_an_exact_means():
    model, x = model_of(nn.Dropout(0.5), nn.Linear(256, 256), nn.Dropout(0.5))

    def step(policy: Any) -> tuple[list[torch.Tensor], aot_hooks.Plan]:
        compiled = torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": policy})
        torch.manual_seed(1)
        return gradients(compiled, model, x), aot_hooks.last_plans(compiled)[0]

    expected, stock = step(aot_hooks.KEEP)
    policy = budget(max_slowdown=math.inf, allow=(MASKS,), max_error=0)
    found, plan = step(policy)
    assert all(map(torch.equal, found, expected))
    assert chosen(plan) == {"masks"} and plan.packed_bytes < stock.packed_bytes
    assert policy.exact == (MASKS,)


def test_a_plan_with_a_hook_of_the_users_is_saved_and_loaded(tmp_path, monkeypatch):
    model, x = model_of(nn.GELU(), nn.Linear(256, 256), nn.GELU())
    policy = budget(planned(model, x, allow=("lossless", HALF)).peak_bytes, allow=("lossless", HALF))
    expected = gradients(torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": policy}), model, x)
    aot_hooks.save_plans(tmp_path / "plans.json")
    torch._dynamo.reset()
    aot_hooks.load_plans(tmp_path / "plans.json")
    monkeypatch.setattr("aot_hooks.planning.trials.search", None)
    compiled = torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": policy})
    assert all(map(torch.equal, gradients(compiled, model, x), expected))
    assert chosen(aot_hooks.last_plans(compiled)[0]) == {"half"}


@pytest.mark.core
@pytest.mark.parametrize(
    ("allow", "why"),
    [
        ((BITS,), "hook 'bits', which does not state its error.*Hook\\(..., error=0.01\\).*error=0"),
        ((aot_hooks.KEEP,), "hook 'KEEP', which does not state its error"),
        ((Hook("h", pack, unpack, error=0.1),), "hook 'h' of error 0.1, and lossy=False.*lossy=True"),
        ((Hook("h", pack, unpack, error=0, eager=True),), "hook 'h' with eager=True"),
        (("float8", aot_hooks.float8()), r"hook 'float8\(\)', a name that another means has"),
        ((HALF, dataclasses.replace(HALF, error=0.1)), "hook 'half', a name that another means has"),
        ((Hook("recompute", pack, unpack, error=0),), "hook 'recompute', a name"),
        ((pack,), "allow must be some of .* or a Hook that states its error"),
    ],
)
def test_a_hook_that_cannot_be_a_means_is_refused(allow, why):
    with pytest.raises(OptionError, match=f"budget: allow .*{why}" if "must" not in why else why):
        budget("1GiB", allow=allow)


@pytest.mark.core
@pytest.mark.parametrize("error", [-0.1, math.inf, math.nan, "1%", True])
def test_an_error_is_a_number_of_at_least_0(error):
    with pytest.raises(OptionError, match=r"Hook\('h'\): error must be None or a number of at least 0, such as 0.01"):
        Hook("h", pack, unpack, error=error)


@pytest.mark.core
@pytest.mark.parametrize("digits", [0, 1.5, True])
def test_digits_are_a_whole_number(digits):
    with pytest.raises(OptionError, match=r"Hook\('h'\): digits must be None or a whole number of at least 1"):
        Hook("h", pack, unpack, digits=digits)


ROUNDING = [
    aot_hooks.float8(),
    aot_hooks.float8(torch.float8_e5m2, "tensorwise"),
    aot_hooks.cast(torch.bfloat16),
    aot_hooks.cast(torch.float16),
    *(aot_hooks.int8(n, power_of_two=True) for n in (8, 128, 1024)),
    *(aot_hooks.int8(n, stochastic=True, power_of_two=True) for n in (64, 1024)),
    *(aot_hooks.int4(n) for n in (8, 32, 128, 1024)),
]


@pytest.mark.core
@pytest.mark.parametrize("hook", ROUNDING, ids=repr)
def test_the_stated_error_is_that_of_normal_data(hook):
    x = torch.randn(128, 1024, generator=torch.Generator().manual_seed(0))
    back = hook.unpack(hook.pack(x))
    error = ((back - x).norm() / x.norm()).item()
    assert 0.5 * hook.error < error <= hook.error
    sent = aot_hooks.offload(then=hook)
    assert (sent.error, sent.digits) == (hook.error, hook.digits)


@pytest.mark.core
def test_exact_hooks_state_it():
    assert aot_hooks.offload().error == aot_hooks.bitmask().error == aot_hooks.lossless().error == 0


def test_a_means_that_computes_something_else_is_noticed() -> None:
    """Its functions close over a number that changes: one new plan each time, none for a number that was there."""
    model, x = model_of(*[nn.Sequential(nn.GELU(), nn.Linear(256, 256)) for _ in range(3)])
    stock = aot_hooks.plan(model, x, policy=aot_hooks.KEEP, inner="aten")
    exact = gradients(model, model, x)

    def within(factor: float) -> aot_hooks.Policy:
        half = Hook("half", lambda x: pack(x * factor), unpack, lossy=True, error=3e-4, digits=11)
        return budget(int(0.9 * stock.peak_bytes), allow=(half,))

    run = torch.compile(model, backend="aot_hooks", options=ATEN)
    counts, errors = [], []
    for factor in (1.0, 1.0, 2.0, 1.0):
        with aot_hooks.saved_tensors_policy(within(factor)):
            found = gradients(run, model, x)
        counts.append(len(aot_hooks.last_plans(run)))
        errors.append(max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)))
    assert counts == [1, 1, 2, 2]
    assert max(errors[0], errors[1], errors[3]) < 1e-3 and errors[2] > 0.3
