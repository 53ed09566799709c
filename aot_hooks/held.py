"""What a value held when it was read, to tell cheaply that it still does: the objects, not what these say.

      read      Holder(dict, list, class, ...)      (cell or namespace, name, what is bound)
      later     is_still()                          bound_still()

Tensors and modules are held weakly: what was read of a program must not keep it alive.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

import torch

__all__ = ["NOT_BOUND", "Binding", "Holder", "bound_still", "weakly"]

Binding = tuple[Any, str, Any]  # a cell or namespace, the name there, what it is bound to


class Holder:
    """What a dict, list, class, function or partial holds: the objects, not what these say."""

    __slots__ = ("held", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.held = [weakly(x) for x in _held(value)]

    def is_still(self) -> bool:
        now = _held(self.value)
        if len(now) != len(self.held):
            return False
        for x, held in zip(now, self.held, strict=True):
            if x is not held and not (type(held) is weakref.ref and x is held()):
                return False
        return True


def _held(value: Any) -> tuple[Any, ...]:
    if isinstance(value, type):
        return (*value.__bases__, *vars(value), *vars(value).values())
    if isinstance(value, types.FunctionType):
        return value.__code__, value.__defaults__, value.__kwdefaults__
    if isinstance(value, functools.partial):
        return (*value.keywords, *value.keywords.values())
    return tuple(value) if isinstance(value, list) else (*value, *value.values())


def weakly(x: Any) -> Any:
    return weakref.ref(x) if isinstance(x, torch.Tensor | torch.nn.Module) else x


def bound_still(binding: Binding) -> bool:
    where, name, value = binding
    if isinstance(where, types.CellType):
        try:
            now = where.cell_contents
        except ValueError:
            return False
    else:
        now = where.get(name, NOT_BOUND)
    return (value() if isinstance(value, weakref.ref) else value) is now


NOT_BOUND = object()
