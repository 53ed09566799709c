"""Multiples of saved tensors: the backward multiplies again, and the error of a gradient stays what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import relative_error
from torch import Tensor, nn

import aot_hooks
from aot_hooks import KEEP, Hook, cast, float8, int8, last_plans, offload, policies
from aot_hooks.passes.multiples import MULTIPLE
from aot_hooks.passes.plan import Plan

FLOAT8 = float8()


class Block(nn.Module):
    """A gated block behind an RMS norm, whose gains are far from one."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.norm.weight.data = torch.rand(width) * 2 + 0.01
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


def stack(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), Block(), Block()).to(dtype)
    x = torch.randn(128, 64)
    x[:, 3] *= 100  # a channel of outliers
    return model, x.to(dtype)


def gradients(call: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    out = call(x).float()
    loss = (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def compiled(model: Any, policy: Any, inner: str = "aten", **arguments: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_hooks", options={"inner": inner, "policy": policy}, **arguments)


def multiples(plan: Plan) -> list[tuple[int, ...]]:
    return [d.saved.shape for d in plan.decisions if d.hook is MULTIPLE]


@pytest.mark.parametrize(
    "inner", [pytest.param("aten", marks=pytest.mark.core), pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_results_are_multiplied_again_without_more_error(inner: str, dtype: torch.dtype) -> None:
    model, x = stack(dtype)
    wide, wide_x = stack()
    wide.load_state_dict(model.state_dict())
    exact = gradients(wide, wide, wide_x.to(dtype).float())
    call, by_policy = compiled(model, FLOAT8, inner), None
    found = gradients(call, model, x)
    (plan,) = last_plans(call)
    # a policy chooses tensor by tensor, so each is saved
    by_policy = compiled(model, policies.everything(FLOAT8) if inner == "aten" else lambda saved: FLOAT8, inner)
    before = gradients(by_policy, model, x)
    (other,) = last_plans(by_policy)
    assert len(multiples(plan)) == 2 and multiples(other) == []
    assert plan.packed_bytes < other.packed_bytes - 2 * 128 * 64 and plan.saved_bytes == other.saved_bytes
    pairs = [(relative_error([f], [e]), relative_error([b], [e])) for f, b, e in zip(found, before, exact, strict=True)]
    assert all(f < 1.3 * b + 1e-3 for f, b in pairs) and max(b for _, b in pairs) > 0.01


def test_a_multiple_of_an_input_is_exact() -> None:
    block, (_, x) = Block(), stack()
    model = nn.Sequential(block.norm, block.up)
    call = compiled(model, FLOAT8, dynamic=True)
    for rows in (128, 96):
        part = x[:rows].clone().requires_grad_()  # else the backward does not read the gains
        assert all(map(torch.equal, gradients(call, model, part), gradients(model, model, part)))
    assert all(multiples(plan) and plan.packed_bytes < 1024 for plan in last_plans(call))


class Scaled(nn.Module):
    """Numbers times a vector, twice; each result is read by a product."""

    def __init__(self, vector: Tensor) -> None:
        super().__init__()
        self.first, self.vector, self.last = nn.Linear(64, 64), vector, nn.Linear(64, 64)
        if not isinstance(vector, nn.Parameter):
            del self.vector
            self.register_buffer("vector", vector)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = h * self.vector
        return h.square() + self.last(y) * y.square() + self.last(y * self.vector)


@pytest.mark.parametrize(
    ("vector", "count"),
    [(nn.Parameter(torch.rand(64)), 2), (torch.rand(64), 0)],
    ids=["a parameter", "a buffer, which the program may write to"],
)
def test_multiples_of_multiples_and_of_buffers(vector: Tensor, count: int) -> None:
    torch.manual_seed(0)
    model, (_, x) = Scaled(vector), stack()
    call = compiled(model, FLOAT8)
    found, expected = gradients(call, model, x), gradients(model, model, x)
    assert len(multiples(last_plans(call)[0])) == count
    assert relative_error(found, expected) < 0.2  # squares of outliers


@pytest.mark.parametrize(
    ("policy", "count"),
    [
        (cast(torch.float16), 0),
        (int8(), 0),  # off by a share of a block's largest number, which a gain may make small
        (KEEP, 0),
        (aot_hooks.lossless(), 0),
        (offload(min_bytes=0), 0),
        (Hook("own", lambda t: t * 2, lambda t: t / 2), 0),
    ],
    ids=str,
)
def test_only_hooks_with_a_relative_error(policy: Any, count: int) -> None:
    model, x = stack()
    call = compiled(model, policy)
    gradients(call, model, x)
    assert len(multiples(last_plans(call)[0])) == count


def test_a_wider_scope_packs_the_factors_so_each_multiple_is_saved() -> None:
    model, x = stack()
    call = compiled(model, None)
    with aot_hooks.saved_tensors_hooks(FLOAT8, scope="all"):
        gradients(call, model, x)
    assert multiples(last_plans(call)[0]) == []


def test_a_write_to_a_gain_before_the_backward_raises() -> None:
    model, x = stack()
    out = compiled(model, FLOAT8)(x)
    model[1].norm.weight.data.add_(0)  # past autograd's versions, as in eager mode
    with torch.no_grad():
        model[1].norm.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("swaps", [False, True])
def test_a_write_past_versions_changes_no_gradient_but_those_that_eager_mode_changes(swaps: bool) -> None:
    """As moving averages and synchronised weights do. The product behind the gains had a gradient that was 0.99 off."""
    model, x = stack()
    gain = model[1].norm.weight

    def written(call: Any) -> list[Tensor]:
        before = gain.detach().clone()
        out = call(x)
        if swaps:
            gain.data = gain.data * 2
        else:
            gain.data.mul_(2)
        found = gradients(lambda _: out, model, x)
        gain.data = before
        return found

    expected, call = written(model), compiled(model, FLOAT8)
    found = written(call)
    assert multiples(last_plans(call)[0]), "the norms' results are multiples"
    assert all(relative_error([f], [e]) < 0.12 for f, e in zip(found, expected, strict=True))


def test_numbers_that_float16_rounds_by_more_than_a_share_stay_saved() -> None:
    model, x = stack()
    assert not multiples(aot_hooks.plan(model, x, policy=cast(torch.float16), inner="aten"))


def test_no_hook_packs_a_factor() -> None:
    """A hook of the user's may decline nothing. If it rounded the number a row, the error would be that of both."""

    def pack(t: Tensor) -> Tensor:
        return t.to(torch.bfloat16)

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.gate, self.last = nn.Linear(64, 64), nn.Linear(64, 1), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.last(y * self.gate(x))

    model, (_, x) = Gated(), stack()
    hook = Hook("own", pack, lambda t: t.float(), lossy=True, error=0.002, digits=8, relative=True)
    call = compiled(model, hook)
    gradients(call, model, x)
    (plan,) = last_plans(call)
    assert multiples(plan)
    rows = [d for d in plan.decisions if d.saved.shape[-1:] == (1,)]
    assert [(d.hook, d.reason) for d in rows] == [(KEEP, "the backward multiplies another saved tensor by it")]


def test_reports_name_it() -> None:
    model, x = stack()
    text = aot_hooks.format_report(aot_hooks.plan(model, x, policy=FLOAT8, inner="aten"))
    assert "multiplied again: a multiple of another saved tensor" in text
