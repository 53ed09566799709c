"""Sizes that change, sizes that torch does not know, and functions of several graphs."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from steps import BITS, assert_same, compiled, packed_count, step
from test_torch_autograd import INNER, block, gradients, leaves
from torch import Tensor

import aot_hooks
from aot_hooks import Hook, last_plans, saved_tensors_hooks


@functools.cache
def graphs(hook: Hook | None, dynamic: bool | None, mark: bool) -> int:
    """How many graphs batches of many sizes take."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    call = compiled(block, dynamic=dynamic)
    _, w = leaves()
    for n in (4, 5, 7, 7, 12, 3):
        x = torch.randn(n, 8, requires_grad=True)
        if mark:
            torch._dynamo.mark_dynamic(x, 0)
        with saved_tensors_hooks(hook) if hook is not None else contextlib.nullcontext():
            out = call(x, w)
        torch.testing.assert_close(gradients(out, x, w), gradients(block(x, w), x, w), rtol=0.5, atol=5.0)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


FLAT = Hook(
    "flat",
    lambda x: (~x.reshape(-1).view(torch.int32), x.shape),
    lambda p: (~p[0]).view(torch.float32).view(p[1]),
)


@pytest.mark.core
@pytest.mark.parametrize(
    ("hook", "dynamic", "mark"),
    [
        (BITS, None, False),
        (BITS, True, False),
        *((hook, None, True) for hook in (FLAT, aot_hooks.float8(), aot_hooks.float8(scaling="blockwise"))),
    ],
    ids=str,
)
def test_hooks_add_no_recompiles(hook: Hook, dynamic: bool | None, mark: bool) -> None:
    assert graphs(hook, dynamic, mark) == graphs(None, dynamic, mark)


@pytest.mark.core
@pytest.mark.parametrize(("dims", "other"), [((0,), (7, 6)), ((1,), (4, 9)), ((0, 1), (7, 9))])
def test_views_of_one_storage_are_packed_once_with_symbolic_sizes_too(
    dims: tuple[int, ...], other: tuple[int, int]
) -> None:
    """Attention saves its result, and a linear layer the same memory as a matrix. With Inductor one of them crosses."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    first, last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def attend(x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = first(x).view(b, s, 2, 8).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(q, q.sin(), q.cos(), is_causal=True)
        return last(y.transpose(1, 2).reshape(b, s, 16)).sin()

    call = torch.compile(attend, backend="aot_hooks", options={"inner": "aten", "policy": BITS})
    for sizes in ((4, 6), other):
        x = torch.randn(*sizes, 16, requires_grad=True)
        for dim in dims:
            torch._dynamo.mark_dynamic(x, dim)
        parts = (x, *first.parameters(), *last.parameters())
        torch.testing.assert_close(gradients(call(x), *parts), gradients(attend(x), *parts))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    (plan,) = last_plans(call)
    views = [d for d in plan.decisions if d.reason.startswith("a view of '")]
    assert len(views) == 1 and views[0].packed_bytes == 0
    assert plan.packed_bytes == plan.saved_bytes


@pytest.mark.core
def test_unbacked_sizes() -> None:
    def f(x: Tensor, w: Tensor, n: Tensor) -> Tensor:
        size = n.item()
        torch._check(size >= 0)
        torch._check(size <= x.shape[0])
        y = torch.narrow(x, 0, 0, size)
        return (y @ w).sin() @ w

    x, w = leaves()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        call = compiled(f, fullgraph=True)
        for n in (3, 2, 4):
            with saved_tensors_hooks(BITS):
                out = call(x, w, torch.tensor(n))
            assert_same(gradients(out, x, w), gradients(block(x[:n], w), x, w), exactly=False)
    assert packed_count(call) > 0


# --- graph breaks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", INNER)
def test_several_graphs(inner: str) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).sin() @ w
        torch._dynamo.graph_break()
        z = (y @ w).cos() @ w
        torch._dynamo.graph_break()
        return (z @ w).sin() @ w

    args = leaves()
    call = compiled(f, inner)
    torch.testing.assert_close(step(call, *args, hook=BITS), step(f, *args), rtol=1e-3, atol=1e-2)
    assert len(last_plans(call)) == 3
    assert all(any(d.hook is BITS for d in plan.decisions) for plan in last_plans(call))


def test_a_size_that_torch_reads_by_several_ways_is_no_hidden_state() -> None:
    """The length of a flattened tensor is that of the view in one trace and that of the tensor in the next."""

    def pack(x: Tensor) -> Any:
        if not x.is_floating_point():
            return x
        bits = (x > 0).reshape(-1).to(torch.uint8)
        length = bits.shape[0]
        return torch.nn.functional.pad(bits, (0, (length + 7) // 8 * 8 - length)), x.shape

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        bits, shape = packed
        return bits[: math.prod(shape)].view(shape).float()

    def f(x: Tensor) -> Tensor:
        return torch.nn.functional.max_pool2d(x.sin().relu(), 2)

    fn = compiled(f, dynamic=True)
    hook = Hook("positive", pack, unpack)
    for size in ((4, 3, 6, 6), (2, 5, 8, 8)):
        x = torch.randn(size, requires_grad=True)
        assert_same(step(fn, x, hook=hook), step(f, x))
    assert packed_count(fn) == 1


@pytest.mark.core
def test_a_hook_may_ask_whether_a_dynamic_size_is_a_number():
    """The trace that finds it equal makes the size a constant, so the next trace has a number in its place."""
    w = torch.linspace(-1, 1, 9).reshape(3, 3).requires_grad_()

    def pack(x):
        return (x.half() if x.numel() == 15 else x.half().reshape(-1)), tuple(x.shape)

    def unpack(p):
        return p[0].float().reshape(p[1])

    compiled = torch.compile(lambda x: (x @ w) @ w, backend="aot_hooks", options={"inner": "aten"})
    for rows in (4, 6, 5, 7):
        x = torch.randn(rows, 3)
        with aot_hooks.saved_tensors_hooks(pack, unpack):
            loss = compiled(x).sum()
        (found,) = torch.autograd.grad(loss, w)
        (expected,) = torch.autograd.grad(((x @ w) @ w).sum(), w)
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
