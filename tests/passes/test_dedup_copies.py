"""Saved copies of smaller tensors: packed, sent or kept before they were copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import default_partition
from torch import Tensor, nn

import aot_hooks
from aot_hooks import partitioner
from aot_hooks.torch_private import aot

SEND_ALL = {"max_stall_ms": float("inf")}


@pytest.fixture(autouse=True)
def save_all_that_the_backward_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the partitioner does in large models. In small ones it saves the smaller tensor by itself."""

    def partition(joint: Any, inputs: Any, *_: Any, num_fwd_outputs: int, **__: Any) -> Any:
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs)

    monkeypatch.setattr(aot, "min_cut_partition", partition)


class GroupedAttention(nn.Module):
    """Four heads of queries for two of keys and values, which are repeated as transformers does it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(64, 64), nn.Linear(64, 64)
        self.k, self.v = nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 16)).transpose(1, 2).sin() for part in (self.q, self.k, self.v))
        k, v = (y[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for y in (k, v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@pytest.fixture(autouse=True)
def attention_of_equal_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a kernel that knows no shared heads: keys and values that it reads are repeated."""
    monkeypatch.setattr(partitioner, "share_heads", lambda joint, **_: None)


def step(hook: aot_hooks.Hook, inner: str) -> tuple[list[Tensor], aot_hooks.Plan]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers, x = nn.Sequential(GroupedAttention(), GroupedAttention()), torch.randn(2, 128, 64, requires_grad=True)
    compiled = torch.compile(layers, backend="aot_hooks", options={"inner": inner, "policy": hook})
    compiled(x).square().mean().backward()
    assert x.grad is not None
    (plan,) = aot_hooks.last_plans(compiled)
    return [x.grad, *(p.grad for p in layers.parameters() if p.grad is not None)], plan


@pytest.mark.parametrize("inner", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_keys_that_may_not_be_rounded_are_kept_before_they_are_repeated(inner: str) -> None:
    """The hook rounds nothing that it takes, so gradients are equal only if the keys are."""
    exact = aot_hooks.Hook("exact", lambda x: x + 0, lambda x: x + 0, lossy=True)
    (expected, _), (found, plan) = step(aot_hooks.KEEP, inner), step(exact, inner)
    assert all(map(torch.equal, found, expected))
    rows = [d for d in plan.decisions if "before it was copied" in d.reason and d.hook.name != "exact"]
    assert [(d.hook.name, d.saved_bytes, d.packed_bytes) for d in rows] == [("keep", 65536, 32768)] * 2
    assert all("a small error of it may become any error" in d.reason for d in rows)
    assert "128.00       64.00        2  clone" in aot_hooks.format_report(plan)


def repeated(y: Tensor, count: int) -> Tensor:
    return y[:, :, None].expand(-1, -1, count, -1, -1).flatten(1, 2)


def grads(run: Callable[..., Tensor], hook: aot_hooks.Hook, inner: str) -> tuple[list[Tensor], aot_hooks.Plan]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    shapes = (1, 2, 128, 16), (16, 16), (16, 16), (1, 4, 128, 16)
    leaves = [torch.rand(shape, requires_grad=True) for shape in shapes]
    compiled = torch.compile(run, backend="aot_hooks", options={"inner": inner, "policy": hook})
    found = torch.autograd.grad(compiled(*leaves).square().sum(), leaves, allow_unused=True)
    (plan,) = aot_hooks.last_plans(compiled)
    return [g for g in found if g is not None], plan


INNER = ["aten", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("same_node", [False, True])
def test_two_copies_of_one_tensor_do_not_share_its_memory_in_the_backward(inner: str, same_node: bool) -> None:
    """Inductor writes over a saved tensor after its last reader, also if another one has the same memory."""

    def run(x: Tensor, w: Tensor, w2: Tensor, a: Tensor) -> Tensor:
        k = (x @ w) * 2 + 1
        h = (a / repeated(k, 2))[:, :2] @ w2
        return repeated(h, 4) / repeated(k if same_node else k.detach(), 4)

    exact = aot_hooks.Hook("exact", lambda x: x + 0, lambda x: x + 0, lossy=True)
    (expected, _), (found, plan) = grads(run, aot_hooks.KEEP, inner), grads(run, exact, inner)
    assert all(map(torch.equal, found, expected))
    rows = [d for d in plan.decisions if "before it was copied from 'add'" in d.reason]
    assert sorted(d.packed_bytes for d in rows if "saved" in d.reason) == [0, 16384], "one of them crosses"


@pytest.mark.parametrize("inner", INNER)
def test_packs_that_are_views_of_one_tensor(inner: str) -> None:
    def run(x: Tensor, w: Tensor, w2: Tensor, a: Tensor) -> Tensor:
        k = (x @ w) * 2 + 1
        h = (a * repeated(k, 2))[:, :2] @ w2
        return repeated(h, 4) * repeated(k.detach(), 4)

    view = aot_hooks.Hook("view", lambda x: x.transpose(0, 1), lambda x: x.transpose(0, 1))
    (expected, _), (found, _) = grads(run, aot_hooks.KEEP, inner), grads(run, view, inner)
    assert all(map(torch.equal, found, expected))


def test_a_copy_that_the_backward_returns_stays() -> None:
    class Returned(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(b)
            return a + 0

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            (b,) = ctx.saved_tensors
            return b, g / b

    def run(x: Tensor, w: Tensor, _: Tensor, a: Tensor) -> Tensor:
        out: Tensor = Returned.apply(a, repeated((x @ w).sin() + 3, 2))
        return out

    (expected, _), (found, _) = grads(run, aot_hooks.KEEP, "aten"), grads(run, aot_hooks.float8(), "aten")
    assert torch.equal(found[2], expected[2])


def test_a_value_that_stays_for_one_reader_is_sent_for_none() -> None:
    def run(x: Tensor, w: Tensor, w2: Tensor, a: Tensor) -> Tensor:
        k = repeated((x @ w) * 2 + 1, 2)
        with aot_hooks.saved_tensors_hooks(aot_hooks.offload(0, aot_hooks.float8(), **SEND_ALL)):  # type: ignore[arg-type]
            y = a / k
        with aot_hooks.saved_tensors_hooks(aot_hooks.float8()):
            return y.sin() + k.log()

    _, plan = grads(run, aot_hooks.KEEP, "aten")
    (row,) = [d for d in plan.decisions if "before it was copied" in d.reason]
    assert (row.hook, row.packed_bytes) == (aot_hooks.KEEP, 16384)


def test_what_a_lossy_hook_declines_is_sent_as_it_is() -> None:
    hook = aot_hooks.offload(0, then=aot_hooks.int8(), **SEND_ALL)  # type: ignore[arg-type]
    found, plan = step(hook, "aten")
    expected, _ = step(aot_hooks.int8(), "aten")
    assert all(map(torch.equal, found, expected)), "queries and keys are not rounded either way"
    declined = [d for d in plan.decisions if "sent as it is" in d.reason]
    attention = [d for d in declined if "scaled_dot_product" in d.reason and d.saved.nbytes == 65536]
    assert len(attention) == 4 and {d.hook for d in declined} == {aot_hooks.offload(0, **SEND_ALL)}  # type: ignore[arg-type]
    assert plan.host_bytes >= 2 * (65536 + 32768) and all(d.packed_bytes == 0 for d in declined)


def test_what_an_exact_hook_declines_stays_on_the_device() -> None:
    _, plan = step(aot_hooks.offload(0, then=aot_hooks.bitmask(), **SEND_ALL), "aten")  # type: ignore[arg-type]
    assert plan.host_bytes == 0


def test_views_of_which_one_may_not_be_rounded_are_sent_once() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return y.log().sum() + (y.flatten() * w.sum()).sin().sum()

    x, w = torch.rand(64, 64) + 1, torch.rand(64, 64, requires_grad=True)
    hook = aot_hooks.offload(0, then=aot_hooks.float8(), **SEND_ALL)  # type: ignore[arg-type]
    plan = aot_hooks.plan(run, x, w, policy=hook)
    assert sum(t.nbytes for t in plan.transfers) <= plan.saved_bytes


@pytest.mark.core
def test_eager_code_sends_what_is_not_rounded() -> None:
    x, index = torch.rand(64, 64, requires_grad=True), torch.randint(64, (64, 64))
    before = aot_hooks.offload_stats()["sent_bytes"]
    with aot_hooks.saved_tensors_hooks(aot_hooks.offload(0, then=aot_hooks.int8()), scope="all"):
        y = x.gather(0, index)
        z = y.sin()  # by what it saves, which is an angle and stays, the gather before it is found
    assert aot_hooks.offload_stats()["sent_bytes"] - before == index.nbytes + 4096 + 2 * 64  # and x in int8
    z.sum().backward()
    assert torch.equal(x.grad, torch.zeros(64, 64).scatter_add(0, index, y.detach().cos()))  # type: ignore[arg-type]
