"""A `GraphModule` as text: its generated code, and what that reads of the module.

Equal texts compute the same. None where a graph calls what the text cannot hold: a function or module of the user's.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from .._compat import HigherOrderOperator, is_operator
from .tensors import tensor_digest

__all__ = ["graph_text"]

_LIBRARIES = {"torch", "_operator", "operator", "math", "builtins"}


def graph_text(gm: torch.fx.GraphModule) -> str | None:
    """The content of `gm`: code, constants, the mode it is in, and modules of `torch.nn` that it calls."""
    lines = [f"{type(gm).__bases__[0].__qualname__} {gm.training}", gm.code]
    for node in gm.graph.nodes:
        if node.op == "call_function" and not _is_library(node.target):
            return None
        if node.op in ("get_attr", "call_module"):
            text = _attribute_text(gm, str(node.target))
            if text is None:
                return None
            lines.append(text)
    return "\n".join(lines)


def _is_library(target: Any) -> bool:
    if is_operator(target) or isinstance(target, HigherOrderOperator):
        return True
    if isinstance(target, types.FunctionType | types.BuiltinFunctionType | types.MethodDescriptorType | type):
        return (target.__module__ or "torch").split(".")[0] in _LIBRARIES
    return False


def _attribute_text(root: Any, path: str) -> str | None:
    value = root
    for name in path.split("."):
        value = getattr(value, name)
    if isinstance(value, torch.Tensor):
        return f"{path} = {tensor_digest(value)}"
    if isinstance(value, torch.fx.GraphModule):
        inner = graph_text(value)
        return None if inner is None else f"{path} = {inner}"
    if isinstance(value, torch.nn.Module):
        return _module_text(path, value)
    return f"{path} = {value!r}" if isinstance(value, bool | int | float | str | torch.dtype | type(None)) else None


def _module_text(path: str, module: torch.nn.Module) -> str | None:
    """A module of `torch.nn` with its settings, which are plain values, and its tensors."""
    lines = []
    for name, part in module.named_modules(prefix=path):
        if not type(part).__module__.startswith("torch.nn.") or type(part).__module__.startswith("torch.nn.utils"):
            return None
        plain = {k: v for k, v in vars(part).items() if not k.startswith("_")}
        if part._forward_hooks or part._forward_pre_hooks or not all(map(_is_plain, plain.values())):
            return None
        lines.append(f"{name} = {type(part).__qualname__} {plain}")
    tensors = [*module.named_parameters(path), *module.named_buffers(path)]
    return "\n".join([*lines, *(f"{name} = {tensor_digest(x)}" for name, x in tensors)])


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | torch.dtype | torch.device | type(None))
