"""When what a compiled forward saved is given up: its backward has run, or nobody can ask for it any more.

      outputs --grad_fn, through views--> the graph's node of autograd --+-- has run -------+--> over(), once
                                                                        +-- is collected --+

For reports alone: a step that is not reported pays nothing for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .torch_private import dynamo
from .torch_private import values as torch_values

__all__ = ["at_end_of_backward"]


class _Token:
    """Held by a node of autograd alone."""


def at_end_of_backward(outputs: Any, over: Callable[[], None]) -> bool:
    """Call `over` once when what the graph that gave `outputs` saved is given up; False if it saved nothing."""
    tensors = (t for t in torch_values.pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor))
    node = next((n for t in tensors if (n := _node_of(t)) is not None), None)
    if node is None:
        return False
    token = _Token()
    once = weakref.finalize(token, over)
    node.metadata["aot_hooks"] = token

    @dynamo.untraced  # a backward may run where Dynamo compiles each function that is called
    def has_run(*_: Any) -> None:
        once()

    node.register_hook(has_run)
    return True


def _node_of(x: torch.Tensor) -> Any:
    node: Any = x.grad_fn
    while node is not None and "CompiledFunction" not in type(node).__name__:
        node = node.next_functions[0][0] if node.next_functions else None
    return node
