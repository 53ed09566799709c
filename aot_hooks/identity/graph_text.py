"""A `GraphModule` as text: its generated code, and what that reads of the module.

Equal texts compute the same. None where a graph calls what the text cannot hold, a function or module of the user's:
then Dynamo traces it as any other function.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from ..torch_private.values import HigherOrderOperator, is_operator
from .tensors import tensor_digest

__all__ = ["graph_text"]

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)
_LIBRARIES = {"torch", "_operator", "operator", "math", "builtins"}
_PLAIN = (bool, int, float, str, torch.dtype, type(None))


def graph_text(gm: torch.fx.GraphModule) -> str | None:
    """The content of `gm`: code, constants, and the mode it is in."""
    lines = [f"{type(gm).__bases__[0].__qualname__} {gm.training}", gm.code]
    for node in gm.graph.nodes:
        if node.op == "call_module" or (node.op == "call_function" and not _is_library(node.target)):
            return None
        if node.op == "get_attr":
            text = _attribute_text(gm, str(node.target))
            if text is None:
                return None
            lines.append(f"{node.target} = {text}")
    return "\n".join(lines)


def _is_library(target: Any) -> bool:
    if is_operator(target) or isinstance(target, HigherOrderOperator):
        return True
    return isinstance(target, _FUNCTIONS) and (target.__module__ or "torch").split(".")[0] in _LIBRARIES


def _attribute_text(root: Any, path: str) -> str | None:
    value = root
    for name in path.split("."):
        value = getattr(value, name)
    if isinstance(value, torch.Tensor):
        return tensor_digest(value)
    if isinstance(value, torch.fx.GraphModule):
        return graph_text(value)
    return repr(value) if isinstance(value, _PLAIN) else None
