"""Our operators, and how Inductor compiles them: as one loop with inline PTX, or as calls.

new_operator(schema, run, fake)
lower_to_loop(op, ...), lower_to_call(op, ...), lower_in_place(op, ...)   when the library is imported, without Inductor
register_operators()                                                      before Inductor first compiles them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .symbols import need

ALIGNMENT = 16  # bytes that a kernel loads at once
_lowerings: list[tuple[Any, Callable[[], Callable[..., Any]]]] = []  # of operators, not registered yet


_library = torch.library.Library("aot_hooks", "FRAGMENT")


def new_operator(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any] | None = None, tags: tuple[torch.Tag, ...] = ()
) -> Any:
    """The operator `torch.ops.aot_hooks.<name>.default` with this schema, for all devices. `fake`: for fake tensors."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"aot_hooks::{name}", fake or run, lib=_library)
    return getattr(torch.ops.aot_hooks, name).default


def emits_ptx(device: torch.device) -> bool:
    """Whether Inductor compiles loops on `device` to Triton for NVIDIA GPUs."""
    return device.type == "cuda" and torch.version.hip is None


def lower_to_loop(
    op: Any, body: Callable[..., Any], dtype_of: Callable[..., torch.dtype], *, reduce_last: str | None = None
) -> None:
    """Have Inductor compile `op` as one loop over its first argument, once `register_operators` has run.

    Only where PTX can be emitted; elsewhere Inductor calls the operator.

    Args:
        body: `(ops, element of each tensor argument, other arguments) -> element`, in Inductor's `ops`. Tensors
            broadcast against the first, along dimensions of size 1 only.
        dtype_of: dtype of the result, from the operator's arguments.
        reduce_last: the ATen operator that reduces the result over the last dimension, which stays with size 1.

    Goes when a tensor operator can be lowered as one node publicly.
    """
    _lowerings.append((op, lambda: _loop(op, body, dtype_of, reduce_last)))


def lower_to_call(op: Any, *, returns_aligned: bool = False, keeps_tensors: bool = False) -> None:
    """Have Inductor call `op`, once `register_operators` has run, and rely on facts that torch has no public API for.

    Args:
        returns_aligned: all results start at multiples of ALIGNMENT. Kernels that read them load 16 bytes at once.
            Inductor assumes that they do not, because `op` reads a tensor on a CPU, whose address it knows nothing of.
        keeps_tensors: the first argument of `op` is a list of tensors that are read after it has returned. Inductor
            must not have a later kernel write its result over one of them.

    Goes when torch has a public API for both.
    """
    _lowerings.append((op, lambda: _call(op, returns_aligned, keeps_tensors)))


def lower_in_place(op: Any, in_place: Any, takes_over: Callable[[Node], bool]) -> None:
    """Have Inductor call `in_place` for `op`, once `register_operators` has run, where `takes_over(node)` is true.

    `in_place` writes to its first argument and returns nothing. Goes when Inductor's own pass that does so, which knows
    index_put and few others, takes operators publicly.
    """
    _lowerings.append((op, lambda: _in_place(op, in_place, takes_over)))


def register_operators() -> None:
    """Register with Inductor what `lower_to_loop`, `lower_to_call` and `lower_in_place` were called for."""
    register = need("torch._inductor.lowering.register_lowering")
    while _lowerings:
        op, lowering = _lowerings.pop()
        register(op, type_promotion_kind=None)(lowering())


def _call(op: Any, returns_aligned: bool, keeps_tensors: bool) -> Callable[..., Any]:
    """The lowering that `lower_to_call` registers: Inductor's own for an unknown operator, and marks on its buffers."""
    call, graph = need("torch._inductor.lowering.fallback_handler")(op), need("torch._inductor.virtualized.V")

    def lower(*args: Any) -> Any:
        results = call(*args)
        for result in (results if isinstance(results, list | tuple) else [results]) if returns_aligned else ():
            graph.graph.unaligned_buffers.discard(result.get_name())
        for tensor in args[0] if keeps_tensors else ():
            graph.graph.never_reuse_buffers.add(tensor.get_name())
        return results

    return lower


def _in_place(op: Any, in_place: Any, takes_over: Callable[[Node], bool]) -> Callable[..., Any]:
    """The lowering that `lower_in_place` registers. Its result is then the buffer of the first argument."""
    fallback = need("torch._inductor.lowering.fallback_handler")
    call, write_over = fallback(op), fallback(in_place, add_to_fallback_set=False)
    graph = need("torch._inductor.virtualized.V")

    def lower(first: Any, *args: Any) -> Any:
        if not takes_over(graph.graph.current_node):
            return call(first, *args)
        first.realize()
        write_over(first, *args)
        return first

    return lower


def _loop(
    op: Any, body: Callable[..., Any], dtype_of: Callable[..., torch.dtype], reduce_last: str | None
) -> Callable[..., Any]:
    lowerings, call = need("torch._inductor.lowering.lowerings"), need("torch._inductor.lowering.fallback_handler")(op)
    pointwise, box = need("torch._inductor.ir.Pointwise"), need("torch._inductor.ir.TensorBox")
    graph, ops = need("torch._inductor.virtualized.V"), need("torch._inductor.virtualized.ops")

    def lower(*args: Any) -> Any:
        tensors = [a for a in args if isinstance(a, box)]
        device, sizes = tensors[0].get_device(), tensors[0].get_size()
        if not emits_ptx(device):
            return call(*args)
        known = graph.graph.sizevars.statically_known_equals
        loaders = []
        for t in tensors:
            spread = [known(own, 1) and not known(size, 1) for own, size in zip(t.get_size(), sizes, strict=True)]
            loaders.append((t.make_loader(), spread))

        def inner(index: Any) -> Any:
            # Load scales first. Where two layouts of a block in threads meet, Triton takes that of the last load, and
            # in a scale's layout a thread has one element at a time. A norm's backward that unpacks then takes 662
            # instructions for sm_90 instead of 745, and moves no codes through shared memory a byte at a time.
            elements = [
                load([0 if s else i for i, s in zip(index, spread, strict=True)]) for load, spread in reversed(loaders)
            ]
            return body(ops, *reversed(elements), *args[len(tensors) :])

        out = pointwise.create(device=device, dtype=dtype_of(*args), inner_fn=inner, ranges=list(sizes))
        if reduce_last is None:
            return out
        return lowerings[getattr(torch.ops.aten, reduce_last).default](out, [-1], True)

    return lower
