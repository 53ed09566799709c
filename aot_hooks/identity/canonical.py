"""A graph as lines without names: equal lines for graphs that compute the same in the same order.

def forward(self, x):                     %0 = placeholder  () {}
    half = x * self.factor          -->   %1 = get_attr tensor:torch.float32:... () {}
    return half                           %2 = call_function _operator.mul ('%0', '%1') {}
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..torch_private import values as torch_values
from .tensors import tensor_digest

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def canonical(gm: GraphModule, *, one_trace: bool = True) -> list[str]:
    """The nodes of `gm` as lines without names. The lines of a nested graph are indented below the node that reads it.

    Args:
        one_trace: symbols of sizes mean the same in all graphs that are compared. A symbolic size then counts as its
            expression: the operators that torch reads it off by differ from trace to trace.
    """
    position: dict[Node, str] = {}
    lines: list[str] = []
    for node in gm.graph.nodes:
        value = node.meta.get("val") if one_trace else None
        position[node] = torch_values.expression(value) if isinstance(value, _SYMBOLIC) else f"%{len(lines)}"
        if isinstance(value, _SYMBOLIC) and node.op == "call_function":
            continue
        constant = operator.attrgetter(str(node.target))(gm) if node.op == "get_attr" else None
        inside = canonical(constant, one_trace=one_trace) if isinstance(constant, GraphModule) else []
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), position.__getitem__)
        lines.append(f"{position[node]} = {node.op} {_target_text(node, constant)} {args} {kwargs}")
        lines += [f"  {line}" for line in inside]
    return lines


def _target_text(node: Node, constant: Any) -> str:
    """What `node` calls or reads, without names of this program; `constant`: the attribute that it reads."""
    target = str(node.target)
    if node.op == "placeholder":
        return target[: len(target) - len(target.lstrip("*"))]  # "*" takes all other arguments
    if node.op == "output":
        return ""
    if node.op == "get_attr":
        if isinstance(constant, torch.Tensor):
            return tensor_digest(constant)
        return type(constant).__name__ + ("" if isinstance(constant, GraphModule) else f":{constant!r}")
    if node.op == "call_function" and not torch_values.is_operator(node.target):
        name = getattr(node.target, "__qualname__", None) or getattr(node.target, "__name__", target)
        return f"{getattr(node.target, '__module__', None) or type(node.target).__module__}.{name}"
    return target
