"""Offload of values that share memory, lie in odd ways, have symbolic sizes, or find no room on the host."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from offloading import ALL, SLOW, copies, sent, stack  # noqa: F401
from steps import assert_same, compiled, packed_count, step
from torch import nn

import aot_hooks
from aot_hooks import Rates
from aot_hooks.hook import compiling_for


def test_a_storage_crosses_the_link_once() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ w)
        return (h @ w) * h.t().sigmoid() + torch.sin(h.view(-1)).view(64, 64)

    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    expected = step(compiled(f), x, w)
    torch._dynamo.reset()
    fn = compiled(f)
    assert_same(step(fn, x, w, hook=ALL), expected)
    names = [t.name for plan in aot_hooks.last_plans(fn) for t in plan.transfers]
    assert len(names) == len(set(names))
    (plan,) = aot_hooks.last_plans(fn)
    assert plan.host_bytes <= plan.saved_bytes


def test_sizes_that_depend_on_values() -> None:
    def f(w: torch.Tensor) -> torch.Tensor:
        rows = (w > 0.1).nonzero()[:, 0]
        h = torch.tanh(w[rows] @ w).sin()
        return (h @ h.t()).sum()

    w = torch.linspace(-1, 1, 4096).reshape(64, 64).requires_grad_()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        expected = step(compiled(f), w)
        torch._dynamo.reset()
        fn = compiled(f)
        assert_same(step(fn, w, hook=ALL), expected)
    assert packed_count(fn) > 0


@pytest.mark.core
def test_a_square_matrix_and_its_transpose_are_not_mixed_up() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ w)
        return (h @ w).sigmoid() @ h.t() @ (h.t() @ h).tanh()

    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    expected = step(compiled(f), x, w)
    torch._dynamo.reset()
    fn = compiled(f)
    assert_same(step(fn, x, w, hook=ALL), expected)
    assert packed_count(fn) > 0
    assert_same(step(f, x, w, hook=ALL), step(f, x, w))  # eager


@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded", "channels_last", "stepped"])
def test_layouts(kind: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x)
        if kind == "transposed":
            h = h.transpose(0, 2)
        elif kind == "sliced":
            h = h[:, 1:3]
        elif kind == "expanded":
            h = h[:, :1].expand(-1, 4, -1, -1)
        elif kind == "channels_last":
            h = h.contiguous(memory_format=torch.channels_last)
        else:
            h = h[..., ::2]
        return torch.sin(h) * h.cos()

    x = torch.randn(2, 4, 6, 8, requires_grad=True)
    expected = step(compiled(f), x)
    torch._dynamo.reset()
    assert_same(step(compiled(f), x, hook=ALL), expected)
    assert_same(step(f, x, hook=ALL), step(f, x))


@pytest.mark.core
@pytest.mark.parametrize("shape", [(2, 4, 1, 8, 16), (1, 8, 16), (1, 1, 16), (3, 1, 1, 4)])
def test_sizes_of_one_come_back_with_strides_that_any_view_takes(shape: tuple[int, ...]) -> None:
    """A packed tensor may be viewed as another dtype, and torch then checks the strides of such dimensions too."""

    def pack(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.uint8)

    then = aot_hooks.Hook("bytes", pack, lambda q: q.view(torch.float32))
    hook = aot_hooks.offload(0, then, max_stall_ms=math.inf)
    x = torch.randn(shape)
    with compiling_for("aten"):
        packed = hook.pack(x)
        y = hook.unpack(packed)
    assert torch.equal(x, y) and y.stride() == x.stride()
    turned = x.transpose(0, -2).contiguous().transpose(0, -2)
    with compiling_for("aten"):
        y = hook.unpack(hook.pack(turned))
    assert torch.equal(turned, y)


class Heads(nn.Module):
    """The products of an attention with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def parts(self, x: torch.Tensor) -> Any:
        """Query, key and value, which are views of one tensor."""
        return (t.transpose(1, 2) for t in self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2))


@pytest.mark.parametrize("rates", [None, SLOW], ids=["instant", "slow"])
def test_attention_gives_several_values_through_views(rates: Rates | None) -> None:
    class Attention(Heads):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.parts(x)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(mixed.transpose(1, 2).flatten(2))

    model, x = nn.Sequential(Attention(), Attention()), torch.randn(1, 12, 16, requires_grad=True)
    expected = step(compiled(model), x)
    torch._dynamo.reset()
    fn = compiled(model)
    assert_same(step(fn, x, hook=aot_hooks.offload(0, rates=rates, max_stall_ms=math.inf)), expected)
    assert sum(t.placement.offloaded for t in aot_hooks.last_plans(fn)[0].transfers) > 6


def test_dynamic_shapes_compile_once() -> None:
    model = stack(3)
    fn = compiled(model, dynamic=True)
    for rows in (8, 11, 3):
        x = torch.randn(rows, 16, requires_grad=True)
        assert_same(step(fn, x, hook=aot_hooks.offload(0, rates=SLOW)), step(model, x), exactly=False)
    assert len(aot_hooks.last_plans(fn)) == 1
    assert sent() > 0


def test_dynamic_shapes_through_views() -> None:
    class Symbolic(Heads):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.parts(x)
            mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
            return x + self.out(mixed.transpose(1, 2).flatten(2)).sigmoid() * x.shape[1]

    model = nn.Sequential(Symbolic(), Symbolic())
    fn = compiled(model, dynamic=True)
    for tokens in (8, 11, 5):
        x = torch.randn(2, tokens, 16, requires_grad=True)
        for rates in (None, SLOW):
            hook = aot_hooks.offload(0, rates=rates, max_stall_ms=math.inf)
            assert_same(step(fn, x, hook=hook), step(model, x), exactly=False)
    assert len(aot_hooks.last_plans(fn)) == 2
    assert sent() > 0


def test_max_host_bytes_keeps_the_rest_on_the_device_and_counts_it() -> None:
    model, x = stack(), torch.randn(64, 16, requires_grad=True)
    expected = step(compiled(model), x)
    torch._dynamo.reset()
    fn = compiled(model)
    hook = aot_hooks.offload(0, max_stall_ms=math.inf, max_host_bytes=40960)
    with pytest.warns(UserWarning, match="the host has no room"):
        got = step(fn, x, hook=hook)
    assert_same(got, expected)
    stats = aot_hooks.offload_stats()
    assert stats["host_peak_bytes"] <= 40960 and stats["kept_on_device_bytes"] > 0
    assert_same(step(fn, x, hook=hook), expected)


@pytest.mark.parametrize("compile_it", [compiled, lambda fn: fn], ids=["compiled", "eager"])
def test_an_empty_tensor_needs_no_room(compile_it: Any) -> None:
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(0, 4)
    with (
        warnings.catch_warnings(),
        aot_hooks.saved_tensors_hooks(aot_hooks.offload(0, max_stall_ms=math.inf, max_host_bytes=0)),
    ):
        warnings.simplefilter("error")
        out = compile_it(lambda x, w: ((x @ w).sin() @ w).sum())(x, w)
    out.backward()
    assert torch.equal(w.grad, torch.zeros(4, 4))


def test_what_stays_on_the_device_is_not_written_over_in_place() -> None:
    """Inductor's kernels write over tensors after their last use, also over those without room on the host."""

    def forward(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        h = x @ a
        for _ in range(6):
            x = x @ b
        return (x * torch.sin(h)) @ c

    values = [(torch.randn(64, 64) / 8).requires_grad_() for _ in range(4)]

    def gradients(fn: Any) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(fn(*values).square().sum(), values)

    expected = gradients(forward)
    fn = torch.compile(forward, backend="aot_hooks")
    slow = aot_hooks.Rates(1e9, 1e9, 1e9, 1e10, 1e9)
    hook = aot_hooks.offload(0, max_stall_ms=math.inf, max_host_bytes=0, rates=slow)
    with warnings.catch_warnings(), aot_hooks.saved_tensors_hooks(hook):
        warnings.simplefilter("ignore")
        got = gradients(fn)
    assert aot_hooks.offload_stats()["kept_on_device_count"] > 0
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def test_an_input_that_stays_after_all_costs_nothing() -> None:
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    hook = aot_hooks.offload(0, rates=Rates(1e6, 1e6, 1e9, 1e10, 1e9))
    plan = aot_hooks.plan(lambda x, w: torch.tanh(x @ w) @ w, x, w, inner="aten", policy=hook, scope="all")
    stays = [d for d in plan.decisions if d.saved.is_input]
    assert stays and all(d.hook is aot_hooks.KEEP for d in stays)
    assert {d.packed_bytes for d in stays} == {0} and plan.packed_bytes == plan.saved_bytes
