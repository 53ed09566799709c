"""Describes the inputs of a graph for messages: their names, and the user's lines that make, use and write to them.

    fx placeholders --placeholder_info--> PlaceholderInfo     plain data, no nodes: can be pickled

`source_line` turns a stack trace that Dynamo stored into "model.py:31: y.add_(1)".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .torch_private import cuda as torch_cuda

__all__ = ["PlaceholderInfo", "output_traces", "placeholder_info", "source_line"]

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]+\n\s*(?P<code>[^\n]*)')
_TORCH = os.path.dirname(torch.__file__) + os.sep


@dataclass(frozen=True)
class PlaceholderInfo:
    """An input of a graph.

    Attributes:
        name: the placeholder's name in the graph.
        stack_trace: where the user made the input; None for most inputs, which are made outside of the graph.
        users: the operators that read it, each as a `PlaceholderInfo` without users.
        mutating_use_stack_trace: where the user wrote to it; None if the graph doesn't.
    """

    name: str
    stack_trace: str | None = None
    users: tuple[PlaceholderInfo, ...] = ()
    mutating_use_stack_trace: str | None = None

    @property
    def source_line(self) -> str:
        """The user's line that made it, or else the first that uses it, as "model.py:31: code"; "" if unknown."""
        traces = [self.stack_trace, *(user.stack_trace for user in self.users)]
        return next(filter(None, map(source_line, traces)), "")


def placeholder_info(graph: Graph) -> tuple[PlaceholderInfo, ...]:
    """A `PlaceholderInfo` for each input of `graph`, in order."""
    return tuple(info_of(node) for node in graph.find_nodes(op="placeholder"))


def info_of(node: Node) -> PlaceholderInfo:
    """The `PlaceholderInfo` of `node`: a placeholder, or any node whose value is an input of a part."""
    users = tuple(PlaceholderInfo(user.name, user.meta.get("stack_trace")) for user in node.users)
    writer = next(_writers(node), None)
    written = None if writer is None else writer.meta.get("stack_trace")
    return PlaceholderInfo(node.name, node.meta.get("stack_trace"), users, written)


def _writers(node: Node) -> Iterator[Node]:
    """The operators that write to `node` itself or through a view of it, in the graph's order of use."""
    seen, queue = {node}, [node]
    while queue:
        value = queue.pop(0)
        for user in value.users:
            if user.op != "call_function" or not torch_cuda.is_operator(user.target):
                continue
            if value in written_nodes(user):
                yield user
            elif torch_cuda.returns_views(user.target) and user not in seen:
                seen.add(user)
                queue.append(user)


def written_nodes(node: Node) -> list[Node]:
    """The argument nodes that the operator of `node` writes to."""
    if node.op != "call_function" or not torch_cuda.is_operator(node.target):
        return []
    found: list[Node] = []
    for position, name in torch_cuda.written_arguments(node.target):
        value: Any = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        found += [v for v in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(v, Node)]
    return found


def output_traces(graph: Graph) -> tuple[str | None, ...]:
    """The user's stack of each output of `graph`; None if it is unknown or the output is no tensor."""
    (values,) = graph.output_node().args
    assert isinstance(values, (list, tuple))
    return tuple(v.meta.get("stack_trace") if isinstance(v, Node) else None for v in values)


def source_line(stack_trace: str | None) -> str:
    """The innermost line of `stack_trace` outside of torch, as "model.py:31: code"; "" if there is no line."""
    frames = [frame for frame in _FRAME.finditer(stack_trace or "")]
    own = [frame for frame in frames if not frame["file"].startswith(_TORCH)] or frames
    if not own:
        return ""
    last = own[-1]
    return f"{os.path.basename(last['file'])}:{last['line']}: {last['code'].strip()}"
