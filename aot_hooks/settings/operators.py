"""Operators by name, one vocabulary for compiled and eager parts.

      torch.ops.aten.gelu.default, torch.ops.aten.gelu, "gelu"  --operator_key-->     "aten.gelu.default", "aten.gelu"
      GeluBackward0 (the grad_fn of an eager tensor)            --operator_behind-->  "aten.gelu.default"
      "aten.gelu.default" of a compiled graph                                          unchanged
      same_operator(key, op)

A grad_fn tells less than a graph. So names are compared without underscores and case (`_softmax` is Softmax, `relu_` is
relu), and overloads only if both sides have one: MulBackward0 is "aten.mul", which stands for `mul.Tensor` and
`mul.Scalar`. Some operators differ in eager code, because torch chooses others: dropout on the CPU is `mul` in eager
code and `native_dropout` in graphs.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from typing import Any

import torch

from ..errors import OptionError
from ..graphs.nodes import returns_view
from ..torch_private import dynamo
from ..torch_private import values as torch_values


@dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def operator_key(op: Any) -> str:
    """The name of `op` for `same_operator`.

    Args:
        op: an operator (`torch.ops.aten.gelu.default`), all overloads of one (`torch.ops.aten.gelu`), a higher-order
            one, or a name: "aten.gelu.default", "aten.gelu", "gelu", "input" (graph inputs).

    Raises:
        OptionError: no such operator, or a composite one, which autograd never sees.
    """
    if isinstance(op, torch_values.HigherOrderOperator) or op == "input":
        return str(op)
    if isinstance(op, str) or torch_values.is_operator(op):
        name = str(op).replace("::", ".")
        name = name if "." in name else f"aten.{name}"
    else:
        raise OptionError(f"expected an operator such as torch.ops.aten.gelu.default or its name, got {op!r}")
    space, packet, overload = (*name.split("."), "", "")[:3]
    found = getattr(getattr(torch.ops, space), packet, None)
    known = [] if found is None or name.count(".") > 2 else list(found.overloads())
    if not known or (overload and overload not in known):
        raise OptionError(f"torch has no operator {name}; expected one such as torch.ops.aten.gelu.default or its name")
    overloads = [overload] if overload else [o for o in known if "out" not in o.split("_")]
    suffixes = ("" if each == "default" else f".{each}" for each in overloads)
    if not all(torch_values.is_composite(f"{space}::{packet}{suffix}") for suffix in suffixes):
        return ".".join(filter(None, (space, packet.rstrip("_") if not packet.endswith("__") else packet, overload)))
    entries = _by_plain_name().get(_plain(packet)) if space == "aten" else None
    if entries:
        return f"aten.{_best(entries)[0]}"
    raise OptionError(
        f"{name} is made of other operators, and only those save tensors; expected one of them (aten.linear: "
        "aten.addmm or aten.mm). What made each saved tensor is in the decisions of aot_hooks.last_plans(compiled)"
    )


@functools.lru_cache(maxsize=4096)
def same_operator(key: str, op: str) -> bool:
    """Whether `key` stands for `op`, the operator of a saved tensor."""
    if "." not in key or "." not in op:
        return key == op
    a, b = (*key.split("."), ""), (*op.split("."), "")
    if a[0] != b[0] or _plain(a[1]) != _plain(b[1]):
        return False
    return a[2] == b[2] or not a[2] or not b[2]


@functools.lru_cache(maxsize=4096)
def operator_behind(grad_fn: str) -> str:
    """The operator with a `grad_fn` of this class name; without an overload if several have it.

    The class name of a user's `torch.autograd.Function` stays as it is.
    """
    generated = re.fullmatch(r"GeneratedBackwardFor_(.+)Backward\d*", grad_fn)
    if generated is not None:  # a torch.library.custom_op
        for dotted in map(_dotted, torch_values.operator_names()):
            if dotted.replace(".", "_") == generated[1]:
                return dotted
    found = re.fullmatch(r"(.+)Backward\d+", grad_fn)
    entries = _by_plain_name().get(_plain(found[1])) if found is not None else None
    if not entries:
        return grad_fn
    packet, overloads = _best(entries)
    return f"aten.{packet}.{overloads[0]}" if len(overloads) == 1 else f"aten.{packet}"


@functools.lru_cache(maxsize=4096)
def is_view_name(op: str) -> bool:
    """Whether an operator of this name returns a view of its first argument."""
    space, packet, *_ = (*op.split("."), "")
    if space != "aten" or not packet:
        return False
    found = getattr(torch.ops.aten, packet)
    return packet == "_unsafe_view" or returns_view(getattr(found, found.overloads()[0]))


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _dotted(qualified: str) -> str:
    name = qualified.replace("::", ".")
    return name if name.count(".") == 2 else f"{name}.default"


@functools.cache
def _by_plain_name() -> dict[str, list[tuple[str, str]]]:
    """Operators of torch that can have a `grad_fn`, as (name, overload) by their plain names."""
    table: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name in torch_values.operator_names():
        space, packet, overload = _dotted(name).split(".")
        in_place = packet.endswith("_") and not packet.endswith("__")
        # out variants are not differentiable, nor are overloads that only choose the dtype of the result
        not_differentiable = "out" in overload.split("_") or packet.endswith("_out") or overload.startswith("dtype")
        if space == "aten" and not in_place and not not_differentiable and not torch_values.is_composite(name):
            table[_plain(packet)].append((packet, overload))
    return dict(table)


def _best(entries: list[tuple[str, str]]) -> tuple[str, list[str]]:
    """The shortest of names that differ in underscores (`convolution`, `_convolution`), and its overloads."""
    packet = min((p for p, _ in entries), key=len)
    return packet, [o for p, o in entries if p == packet]
