"""When the saved tensors of a compiled forward are released: its backward has run, or nobody can ask for it any more.

      outputs --grad_fn, through views--> the graph's autograd node --+-- has run -------+--> on_release(), once
                                                                      +-- is collected --+

Only a report pays for this, and a graph whose hooks may be unused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .torch_private import dynamo
from .torch_private import values as torch_values


class _Token:
    """An object that only an autograd node holds."""


def at_end_of_backward(outputs: Any, on_release: Callable[[], None]) -> bool:
    """Call `on_release` once when the saved tensors of the graph that returned `outputs` are released.

    False if it saved nothing.
    """
    tensors = (t for t in torch_values.pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor))
    node = next((n for t in tensors if (n := _node_of(t)) is not None), None)
    if node is None:
        return False
    token = _Token()
    once = weakref.finalize(token, on_release)
    node.metadata["aot_hooks"] = token

    @dynamo.untraced  # a backward may run where Dynamo compiles each function that is called
    def has_run(*_: Any) -> None:
        once()

    node.register_hook(has_run)
    return True


def _node_of(x: torch.Tensor) -> Any:
    """The autograd node of the compiled graph behind `x`, or behind what `x` is a view of; None without one."""
    node: Any = x.grad_fn
    while node is not None and "CompiledFunction" not in type(node).__name__:
        node = node.next_functions[0][0] if node.next_functions else None
    return node
