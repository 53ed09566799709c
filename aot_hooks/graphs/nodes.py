"""Questions about one node of a graph: its storage, its views, its operator, the user's line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..errors import PACKAGE
from ..torch_private import values as torch_values

__all__ = ["is_view", "op_name", "producer", "region_output", "source_line", "storage_of", "view_source"]


def storage_of(node: Node) -> Any:
    """Identity of the storage of a node's value, by its fake value; None if it is no tensor.

    What a higher-order operator gives is its own: torch caches fake values of nested regions, so two calls seem one.
    A nested region's outputs that share memory with each other, or with what the region is given, share it here too.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    root = node
    while is_view(root) and isinstance(root.args[0], Node):
        root = root.args[0]
    if root.op == "call_function" and "getitem" in str(root.target) and isinstance(root.args[0], Node):
        if isinstance(root.args[0].target, torch_values.HigherOrderOperator):
            return _storage_in_region(root)
    # a tensor without a storage (sparse) shares it with nobody
    return torch_values.storage_key(value) if value.layout is torch.strided else id(value)


def region_output(node: Node) -> Node | None:
    """The node in the body of a nested compiled region (`invoke_subgraph`) whose value `node` is; None if unknown."""
    if node.op != "call_function" or "getitem" not in str(node.target):
        return None
    call, index = node.args
    if not isinstance(call, Node) or not isinstance(index, int) or "invoke_subgraph" not in str(call.target):
        return None
    body = call.args[0]
    owner = node.graph.owning_module
    inner = getattr(owner, str(body.target), None) if isinstance(body, Node) and body.op == "get_attr" else None
    if not isinstance(inner, GraphModule):
        return None
    outputs = inner.graph.output_node().args[0]
    out = outputs[index] if isinstance(outputs, tuple | list) else None
    return out if isinstance(out, Node) else None


def _storage_in_region(node: Node) -> Any:
    """Identity of the storage of `node`, an output of a higher-order operator: a parameter that a region saves is the
    parameter that it was given."""
    out = region_output(node)
    if out is None:
        return node
    call: Any = node.args[0]
    key = storage_of(out)
    inputs = out.graph.find_nodes(op="placeholder")
    operands = call.args[len(call.args) - len(inputs) :]
    for inside, outside in zip(inputs, operands, strict=True):
        if isinstance(outside, Node) and storage_of(inside) == key:
            return storage_of(outside)
    return call, key


def is_view(node: Node) -> bool:
    """Whether `node` only looks at its first argument's storage."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and (
        node.target is torch.ops.aten.detach.default
        or (schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns))
    )


def view_source(node: Node) -> Node | None:
    """What `node` is a view of, also one of several (`split`) and where the schema tells nothing; else None."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, Node):
        return None
    if "getitem" in str(node.target):
        return view_source(source)
    return source if is_view(node) or str(node.target) == "aten._unsafe_view.default" else None


def producer(node: Node) -> Node:
    """The node whose operator made the value, looking through views and tuples."""
    while (source := view_source(node)) is not None:
        node = source
    if "getitem" in str(node.target) and isinstance(node.args[0], Node):
        return node.args[0]
    return node


def op_name(node: Node) -> str:
    """The operator as the program called it, whatever Inductor decomposed it to."""
    if node.op != "call_function":
        return "input" if node.op == "placeholder" else node.op
    return str(node.meta.get("original_aten") or node.target)


_TORCH = str(Path(torch.__file__).parent) + os.sep
_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+), in .*\n\s*(?P<code>.*)')


def source_line(node: Node) -> str:
    frames = [f for f in _FRAME.finditer(node.meta.get("stack_trace") or "") if not f["file"].startswith(PACKAGE)]
    if not frames:
        return ""
    last = next((f for f in reversed(frames) if not f["file"].startswith(_TORCH)), frames[-1])  # not F.rms_norm's own
    return f"{last['file'].rsplit('/', 1)[-1]}:{last['line']}: {last['code'].strip()}"
