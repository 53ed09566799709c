"""What a hook reaches of what the compiled function has changed before the context, which Dynamo has yet to carry out.

def f(x):                                  Dynamo traces `f`: objects keep their old values until `f` runs, and a
    self.cfg.k += 1    pending             hook that is read now would be taken in its old state
    with saved_tensors_hooks(self.pack):   reads self.cfg.k: named, so that it can be refused
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .. import _compat
from ..reached import Reached
from ..walker import Walker

__all__ = ["Pending", "changed_before"]


@dataclass(frozen=True)
class Pending:
    """What Dynamo has yet to carry out.

    Attributes:
        objects: by id, the names of the attributes that change, None for any; cells as well.
        names: of globals that change in `scope`, the globals of the compiled function.
        storages: of tensors that are written to.
    """

    objects: dict[int, frozenset[str] | None]
    names: frozenset[str]
    scope: dict[str, Any]
    storages: frozenset[int]


def changed_before(value: Any, pending: Pending) -> str | None:
    """What `value` reaches of what is pending, in words; None if it reaches nothing of it."""
    if not (pending.objects or pending.names or pending.storages):
        return None
    finder = _Finder(pending)
    finder.all_of(value)
    return finder.found


class _Finder(Walker):
    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self.pending = pending
        self.found: str | None = None

    def look(self, value: Any, what: str, read: set[str] | None = None) -> None:
        names = self.pending.objects.get(id(value), frozenset())
        if (names is None or (names if read is None else names & read)) and self.found is None:
            self.found = what

    def new(self, value: Any, kind: type) -> None:
        if kind is not Reached and kind is not types.ModuleType:  # of which a part counts
            self.look(value, f"a {kind.__name__}")
        super().new(value, kind)

    def held_by(self, value: Any, names: Iterable[str]) -> list[tuple[str, Any]] | None:
        read = set(names)
        self.look(value, f"a {type(value).__name__}", read)
        if isinstance(value, torch.nn.Module):
            for part in (value._parameters, value._buffers, value._modules):
                if not read.isdisjoint(part):
                    self.look(part, f"a {type(value).__name__}")
        return super().held_by(value, names)

    def function(self, fn: types.FunctionType) -> None:
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            self.look(cell, f"a variable '{name}'")
        super().function(fn)

    def bound(self, where: dict[str, Any], name: str) -> None:
        if where is self.pending.scope and name in self.pending.names:
            self.found = self.found or f"a global '{name}'"

    def through(self, module: types.ModuleType, attribute: str) -> bool:
        self.look(module, f"a module '{module.__name__}'", {attribute})
        return super().through(module, attribute)

    def by_names(self) -> list[tuple[Any, str, Any, Any]]:
        found = super().by_names()
        for holder, name, _, _ in found:
            if isinstance(holder, types.ModuleType):
                self.look(holder, f"a module '{holder.__name__}'", {name})
                self.bound(vars(holder), name)
        return found

    def tensor(self, value: torch.Tensor) -> None:
        if not _compat.is_traced_value(value) and value.layout is torch.strided:
            if _compat.storage_key(value) in self.pending.storages:
                self.found = self.found or "a tensor"
