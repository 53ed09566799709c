"""What kind of value something is, and what a value of that kind holds; without running code of its class."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import logging
import types
from typing import Any

import torch

__all__ = [
    "ATOMS",
    "CONTAINERS",
    "PARTS",
    "at_path",
    "beside_fields",
    "buffer",
    "is_bound",
    "is_data",
    "public_state",
    "slots",
    "stays",
    "torch_name",
]

ATOMS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), torch.dtype, torch.device)
PARTS = ("_parameters", "_buffers", "_modules")  # of nn.Module
CONTAINERS = (tuple, list, dict, set, frozenset, types.MappingProxyType)
_STAYS = (
    torch.Tensor,
    torch.nn.Parameter,
    types.FunctionType,
    types.MethodType,
    types.CodeType,
    tuple,
    frozenset,
    functools.partial,
    slice,
)


def stays(value: Any) -> bool:
    """Whether `value` stays what it is, but for what it holds."""
    if type(value) in _STAYS or isinstance(value, torch.fx.GraphModule | type):
        return True
    if isinstance(
        value,
        types.BuiltinFunctionType | types.MethodWrapperType | enum.Enum | torch.finfo | torch.iinfo | logging.Logger,
    ):
        return True
    if isinstance(value, types.GenericAlias | types.UnionType) or type(value).__name__.startswith("OpOverload"):
        return True
    kind = type(value)
    return dataclasses.is_dataclass(kind) and bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def slots(value: Any) -> dict[str, Any]:
    found = {n for c in type(value).__mro__ for n, m in vars(c).items() if isinstance(m, types.MemberDescriptorType)}
    return {n: getattr(value, n) for n in sorted(found) if hasattr(value, n)}


def public_state(module: torch.nn.Module) -> dict[str, Any]:
    hidden = set(vars(torch.nn.Module()))
    state = {k: v for k, v in vars(module).items() if k not in hidden}
    hooks = {k: [*v.values()] for k, v in vars(module).items() if k in hidden and k.endswith("_hooks") and v}
    return state | hooks | {"training": module.training}


def beside_fields(value: Any, fields: list[str]) -> dict[str, Any]:
    """What a dataclass's object holds beside its fields (`InitVar`, `__post_init__`)."""
    return {name: held for name, held in getattr(value, "__dict__", {}).items() if name not in fields}


def is_data(value: Any, levels: int = 3) -> bool:
    """Numbers, strings, tensors, and plain containers of them."""
    if type(value) in CONTAINERS and levels:
        items = [*value.values()] if isinstance(value, dict | types.MappingProxyType) else [*value]
        return all(is_data(item, levels - 1) for item in items)
    return isinstance(value, (*ATOMS, torch.Tensor))


def is_bound(value: Any) -> bool:
    return not isinstance(value.__self__, types.ModuleType | type | types.NoneType)


def buffer(value: Any) -> str | None:
    """An array or bytes that may change: what it holds."""
    try:
        view = memoryview(value)
        raw = hashlib.sha256(view.tobytes()).hexdigest()
    except (TypeError, ValueError, NotImplementedError):
        return None
    return None if "O" in view.format else f"buffer:{type(value).__qualname__}:{view.format}:{view.shape}:{raw}"


def at_path(root: Any, path: str) -> Any:
    for name in str(path).split("."):
        root = getattr(root, name)
    return root


def torch_name(value: Any) -> str | None:
    if isinstance(value, torch.memory_format | torch.layout):
        return f"torch:{value}"
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType) and name:
        return f"torch:{module}.{name}"
    text = str(value)  # OpOverload and OpOverloadPacket print as their qualified name
    return f"torch:{text}" if " at 0x" not in text and type(value).__name__.startswith("OpOverload") else None
