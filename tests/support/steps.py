"""For tests: one training step of a function, eager or compiled, with hooks or without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from aot_hooks import Hook, last_plans, saved_tensors_hooks

ATEN = {"inner": "aten"}
INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack_bits(x: torch.Tensor) -> Any:
    """The complement of the bits of `x`: exact, and never the tensor itself."""
    if x.is_complex():
        return ~torch.view_as_real(x.resolve_conj().resolve_neg()).contiguous().view(torch.int32), x.dtype
    if x.dtype is torch.bool:
        return ~x, x.dtype
    return ~x.view(INTS[x.element_size()]), x.dtype


def unpack_bits(p: Any) -> torch.Tensor:
    bits, dtype = p
    if dtype.is_complex:
        return torch.view_as_complex((~bits).view(torch.float32))
    return ~bits if dtype is torch.bool else (~bits).view(dtype)


BITS = Hook("bits", pack_bits, unpack_bits)
HALF = Hook("half", lambda x: (x.half(), x.dtype), lambda p: p[0].to(p[1]))


def clone(value: Any) -> Any:
    """Tensors anew, leaves as they were."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), value)


def step(fn: Callable[..., Any], *args: Any, hook: Any = None, scope: str = "donated") -> tuple[Any, list[Any]]:
    """Outputs of `fn`, and gradients of a weighted sum of them; the hook covers the forward."""
    args = clone(args)
    with saved_tensors_hooks(hook, scope=scope) if hook is not None else contextlib.nullcontext():
        out = fn(*args)
    loss = torch.zeros((), dtype=torch.float64)
    for o in pytree.tree_leaves(out):
        if isinstance(o, torch.Tensor) and o.requires_grad:
            o = torch.view_as_real(o) if o.is_complex() else o
            loss = loss + (o.double() * torch.linspace(0.5, 1.5, o.numel(), dtype=torch.float64).view(o.shape)).sum()
    loss.backward()
    leaves = [a for a in pytree.tree_leaves(args) if isinstance(a, torch.Tensor) and a.requires_grad]
    if isinstance(fn, torch.nn.Module):
        leaves += list(fn.parameters())
    grads = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, out), grads


def compiled(fn: Any, inner: str = "aten", **kwargs: Any) -> Any:
    return torch.compile(fn, backend="aot_hooks", options={"inner": inner}, **kwargs)


def packed_count(fn: Any) -> int:
    """How many saved tensors of all graphs of a compiled function are packed."""
    return sum(d.hook.name != "keep" for plan in last_plans(fn) for d in plan.decisions)


def assert_same(got: Any, expected: Any, exactly: bool = True) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(got, expected, equal_nan=True, **tolerance)


def with_backward(backward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of autograd that copies its input, and whose backward is `backward`."""

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return backward(grad)

    return Copy.apply  # type: ignore[no-any-return, no-untyped-call]
