"""Describes the inputs of a graph for messages: their names, and the user's lines that make, use and write to them.

    fx placeholders --placeholder_info--> PlaceholderInfo     plain data, no nodes: can be pickled

`source_line` turns a stack trace that Dynamo stored into "model.py:31: y.add_(1)".
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .torch_private import cuda as torch_cuda

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
    return tuple(map(info_of, graph.find_nodes(op="placeholder")))


def info_of(node: Node) -> PlaceholderInfo:
    """The `PlaceholderInfo` of `node`: a placeholder, or any node whose value is an input of a part."""
    users = tuple(PlaceholderInfo(user.name, trace_of(user)) for user in node.users)
    # the first operator that writes to `node` itself or through a view of it
    values = nearest_first([node], lambda value: (u for u in value.users if torch_cuda.returns_views(u.target)))
    writer = next((user for value in values for user in value.users if value in written_nodes(user)), None)
    return PlaceholderInfo(node.name, trace_of(node), users, trace_of(writer))


def after_inputs(node: Node) -> Node:
    """`node`, or the last of the graph's inputs if it is an input: nodes are inserted after the inputs."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node


def trace_of(value: Any) -> str | None:
    """The user's stack where a node was made; None if it is unknown, or `value` is no node."""
    return value.meta.get("stack_trace") if isinstance(value, Node) else None


def nearest_first(nodes: Iterable[Node], onward: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """`nodes`, then those that `onward` gives for each of them, then those that it gives for these; each once."""
    queue = deque(dict.fromkeys(nodes))
    seen = set(queue)
    while queue:
        yield (node := queue.popleft())
        new = [n for n in onward(node) if n not in seen]
        seen.update(new)
        queue.extend(new)


def written_nodes(node: Node) -> list[Node]:
    """The argument nodes that the operator of `node` writes to."""
    values = torch_cuda.written_arguments(node.target, node.args, node.kwargs)
    nodes = (x for value in values for x in (value if isinstance(value, (list, tuple)) else (value,)))
    return [x for x in nodes if isinstance(x, Node)]


def results_of(graph: Graph) -> Sequence[Any]:
    """The outputs of `graph`: nodes, numbers and None."""
    (results,) = graph.output_node().args
    assert isinstance(results, (list, tuple))
    return results


def source_line(stack_trace: str | None) -> str:
    """The innermost line of `stack_trace` outside of torch, as "model.py:31: code"; "" if there is no line."""
    frames = list(_FRAME.finditer(stack_trace or ""))
    own = [frame for frame in frames if not frame["file"].startswith(_TORCH)] or frames
    if not own:
        return ""
    return f"{os.path.basename(own[-1]['file'])}:{own[-1]['line']}: {own[-1]['code'].strip()}"
