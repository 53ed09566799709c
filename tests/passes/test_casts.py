"""Casts of parameters that would be saved: the backward casts again, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import aot_hooks
from aot_hooks import KEEP, float8, last_plans, lossless, saved_tensors_hooks
from aot_hooks.passes.casts import RECAST
from aot_hooks.passes.plan import Plan

Tensor = torch.Tensor


class Net(nn.Module):
    """Layers whose weights are cast as they are, transposed, twice, frozen, in a convolution, and to another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 16, 3, padding=1)
        self.first = nn.Linear(64, 64)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.square = nn.Parameter(torch.randn(64, 64) / 8)
        self.flat = nn.Parameter(torch.randn(64 * 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x.view(-1, 4, 2, 8)).relu().flatten(1)
        h = self.frozen(self.first(h[:, :64] + h[:, 64:128]).tanh()).tanh()
        h = self.first(h @ self.square.t()).tanh()  # read twice
        return (h @ self.flat.view(64, 64).t().contiguous()).tanh() @ self.square


def steps(net: nn.Module, call: Any, sizes: tuple[int, ...]) -> Iterator[Any]:
    """Outputs and gradients of a few steps under autocast, with batches of these sizes."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    generator = torch.Generator().manual_seed(1)
    for n in sizes:
        x = torch.randn(n, 64, generator=generator, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = call(x)
        out.float().square().mean().backward()
        yield [out.detach(), x.grad, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def cast_bytes(plan: Plan) -> int:
    return sum(d.saved_bytes for d in plan.decisions if d.hook is RECAST)


@pytest.mark.parametrize(
    "inner", [pytest.param("aten", marks=pytest.mark.core), pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_gradients_have_the_same_bits(inner: str) -> None:
    stock, ours = net(), net()
    dynamic = inner == "aten"
    plain = torch.compile(stock, backend="aot_hooks", options={"inner": inner, "policy": KEEP}, dynamic=dynamic)
    packed = torch.compile(ours, backend="aot_hooks", options={"inner": inner, "policy": lossless()}, dynamic=dynamic)
    sizes = (8, 12, 8) if dynamic else (8, 8)
    for expected, got in zip(steps(stock, plain, sizes), steps(ours, packed, sizes), strict=True):
        assert all(map(torch.equal, got, expected)) and any(g.abs().max() > 0.01 for g in got)
    (before,), (after,) = last_plans(plain), last_plans(packed)
    copies = {d.saved.shape for d in after.decisions if d.hook is RECAST}
    assert copies >= {(64, 64), (16, 4, 3, 3)}
    assert after.saved_bytes == before.saved_bytes and after.packed_bytes <= before.packed_bytes - cast_bytes(after)
    left = [d.saved for d in after.decisions if d.saved.dtype is torch.bfloat16 and d.packed_bytes]
    assert not any("_to_copy" in s.op and s.shape in copies for s in left)


def test_a_plan_counts_the_copies_before_and_not_after() -> None:
    """Rows add up to what torch saves, and so does the peak without hooks."""
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(8, 64)
        kept, packed, planned = (
            aot_hooks.plan(net(), x, inner="aten", policy=p)
            for p in (KEEP, float8(), aot_hooks.budget(max_slowdown=0.9, max_error=0))
        )
    for plan in (packed, planned):
        assert plan.saved_bytes == kept.saved_bytes
        assert [p.live_bytes for p in plan.live_before] == [p.live_bytes for p in kept.live_before]
        assert cast_bytes(plan) >= 5 * 2 * 64 * 64 // 2
        assert plan.peak_bytes < kept.peak_bytes
        storages = [d.saved.storage for d in plan.decisions if d.saved_bytes]
        assert len(storages) == len(set(storages))
    assert not any(d.hook is RECAST for d in kept.decisions) and kept.packed_bytes == kept.saved_bytes
    assert "cast again: a cast of an input that is alive anyway" in aot_hooks.report.text.format_report(packed)


def test_a_budget_may_compute_products_of_casts_again() -> None:
    """Products whose weights are cast are means of a budget, like those of weights that are not."""
    torch.manual_seed(0)
    model = nn.Sequential(*(b for _ in range(4) for b in (nn.Linear(64, 64), nn.GELU())))
    with torch.autocast("cpu", torch.bfloat16):
        policy = aot_hooks.budget(max_slowdown=0.9, allow=("recompute",))
        plan = aot_hooks.plan(model, torch.randn(512, 64), inner="aten", policy=policy)
    again = [d.saved.op for d in plan.decisions if d.hook.name == "recompute"]
    assert "aten.addmm.default" in again


class Queue(nn.Module):
    """The program copies a buffer so that it may write to it before the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)
        self.register_buffer("queue", torch.randn(16, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).tanh() @ self.queue.clone().detach()


class Decays(nn.Module):
    """A parameter that the forward itself writes to, after it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)
        self.w = nn.Parameter(torch.randn(16, 32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.proj(x).tanh() @ self.w
        with torch.no_grad():
            self.w.mul_(0.5)
        return out


@pytest.mark.parametrize("module", [Queue, Decays])
def test_what_may_be_written_is_left_alone(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    found = []
    for policy in (None, lossless()):
        torch.manual_seed(0)
        m = module()
        call: Any = (
            m if policy is None else torch.compile(m, backend="aot_hooks", options={"inner": "aten", "policy": policy})
        )
        with torch.autocast("cpu", torch.bfloat16):
            out = call(x)
        if isinstance(m, Queue):
            m.queue.mul_(-1)
        out.float().sum().backward()
        found.append(m.proj.weight.grad)
        if policy is not None:
            (plan,) = last_plans(call)
            written = {16, 32}
            assert not any(d.hook is RECAST and set(d.saved.shape) == written for d in plan.decisions)
            assert any(set(d.saved.shape) == written and d.packed_bytes for d in plan.decisions)
    assert torch.equal(*found) and found[0].abs().max() > 0.01


def test_a_parameter_that_is_written_before_the_backward_raises() -> None:
    """Autograd checks the version of the parameter, as it does without autocast."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    call = torch.compile(model, backend="aot_hooks", options={"inner": "aten", "policy": float8()})
    with torch.autocast("cpu", torch.bfloat16):
        loss = call(torch.randn(8, 16, requires_grad=True)).float().sum()
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_where_nothing_is_asked_for_copies_stay() -> None:
    """Outside of a region, under `KEEP`, and where scope "all" asks for each saved tensor."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def part(x: Tensor) -> Tensor:
        with saved_tensors_hooks(float8()):
            return model[1](model[0](x))

    def inside(x: Tensor) -> Tensor:
        return model[2](part(x).tanh())

    x = torch.randn(8, 64, requires_grad=True)
    found = []
    options: Any = ({"policy": KEEP}, {"policy": float8(), "scope": "all"}, {})
    for own in options:
        call = torch.compile(model if own else inside, backend="aot_hooks", options={"inner": "aten", **own})
        with torch.autocast("cpu", torch.bfloat16):
            call(x).float().sum().backward()
        (plan,) = last_plans(call)
        found.append(sum(d.hook is RECAST for d in plan.decisions))
    assert found == [0, 0, 1]  # the weight of the layer in the region


def test_a_second_backward_casts_once_more() -> None:
    model, x = net(), torch.randn(8, 64, requires_grad=True)
    call = torch.compile(model, backend="aot_hooks", options={"inner": "aten", "policy": lossless()})
    with torch.autocast("cpu", torch.bfloat16):
        loss = call(x).float().square().mean()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and first.abs().max() > 0


def test_an_input_that_crosses_anyway_is_cast_again() -> None:
    """No parameter, but saved as it is: so its cast is not saved beside it."""
    w = torch.randn(64, 64, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return (x.bfloat16() @ w.bfloat16()).float() * x.sin() * x

    x = torch.randn(64, 64, requires_grad=True)
    call = torch.compile(f, backend="aot_hooks", options={"inner": "aten", "policy": lossless()})
    got, expected = (torch.autograd.grad(fn(x).square().mean(), [x, w]) for fn in (call, f))
    (plan,) = last_plans(call)
    assert all(map(torch.equal, got, expected))
    assert any(d.hook is RECAST for d in plan.decisions)
