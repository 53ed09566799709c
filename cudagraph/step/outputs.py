"""Tensors that a step stores on modules and objects: `self.last_loss = loss`, `losses["router"] = [...]`.

    first capture    finds the entries of dicts, and the lists, in which the step leaves new tensors
    second capture   a tensor that no operator can use stands in for what the step before left there
    replay           each entry gets copies of what the graph computes

A step that reads what the step before left there is not captured: a replay would read old memory.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ..torch_private import cuda as torch_cuda
from ..tree.capture import CannotCapture
from .host import PLAIN, Entry
from .numbers import Traced


class ChangesValue(CannotCapture):
    """The step itself changes the host value at `path` each time, or reads what it left there."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


def is_storable(value: Any) -> bool:
    """Whether a replay can store such a value: a tensor, or a container of tensors and plain values."""
    leaves, _ = torch_cuda.flatten(value)
    tensors = [x for x in leaves if type(x) is torch.Tensor and x.layout is torch.strided]
    return bool(tensors) and all(isinstance(x, PLAIN) or type(x) is torch.Tensor for x in leaves)


def reason_against_storing(path: str, stored: Mapping[str, Any]) -> str | None:
    """Why a replay can't store what is at `path`: it is in one of the values `stored`, beside something else than
    tensors and plain values. None if that is not why."""
    for name, value in stored.items():
        is_inside = path.startswith(tuple(f"{name}{end}" for end in "[.,"))
        if is_inside and torch_cuda.tensors_among(value):
            leaves, _ = torch_cuda.flatten(value)
            others = [type(x).__name__ for x in leaves if not isinstance(x, PLAIN) and type(x) is not torch.Tensor]
            if others:
                kind = type(value).__name__
                return (
                    f"stores a {kind} in {name} that holds more than tensors, numbers and texts ({others[0]}), which a "
                    "replay would not; return it instead"
                )
    return None


class Outputs:
    """What a step leaves in `entries`, by path. `cover` before a capture, `collect` and `uncover` after it."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)
        self._old = {path: container[key] for path, (container, key) in entries.items()}  # of lists it is a copy
        self._covers: dict[str, Any] = {}
        # By path: tensors of the graph, tensors of before that are left there as they are, other leaves; and the spec.
        self._made: dict[str, tuple[list[Any], Any]] = {}
        self._copied: set[int] = set()

    def cover(self) -> None:
        for path, (container, key) in self._entries.items():
            flat, spec = torch_cuda.flatten(self._old[path])
            error = functools.partial(_read, path)
            wires = [torch_cuda.tripwire(x, error) if isinstance(x, torch.Tensor) else x for x in flat]
            container[key] = self._covers[path] = torch_cuda.unflatten(wires, spec)

    def collect(self, known: set[int | None]) -> None:
        """Take what the captured step has left. Tensors over storages in `known` stay those very tensors."""
        for path, (container, key) in self._entries.items():
            value = container[key] if isinstance(container, list) else container.get(key)
            flat, spec = torch_cuda.flatten(value)
            if [*map(id, flat)] == [*map(id, torch_cuda.flatten(self._covers[path])[0])]:
                continue
            if any(hasattr(x, "trip") for x in flat):
                raise ChangesValue(path, f"keeps in {path} what it has stored in the step before; return it instead")
            if not is_storable(value):
                raise ChangesValue(path, f"stores a {type(value).__name__} in {path}, which a replay would not")
            flat = [x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x for x in flat]
            self._copied |= {
                id(x) for x in flat if isinstance(x, torch.Tensor) and torch_cuda.storage_key(x) not in known
            }
            self._made[path] = flat, spec

    def uncover(self) -> None:
        for path, (container, key) in self._entries.items():
            container[key] = self._old[path]
        self._old, self._covers = {}, {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the graph that replays copy."""
        return [x for flat, _ in self._made.values() for x in flat if id(x) in self._copied]

    def follow(self, entries: Mapping[str, Entry]) -> None:
        """From now on the entries are these: of a dict in the place of another one, say."""
        self._entries = {path: entries[path] for path in self._entries}

    def assign(self) -> list[Entry]:
        """After a replay: store copies. Returns the entries."""
        for path, (flat, spec) in self._made.items():
            container, key = self._entries[path]
            new = [x.clone() if id(x) in self._copied else x.value() if isinstance(x, Traced) else x for x in flat]
            container[key] = torch_cuda.unflatten(new, spec)
        return [self._entries[path] for path in self._made]


def _read(path: str, how: str) -> ChangesValue:
    return ChangesValue(
        path,
        f"reads {path}, which it has stored in the step before ({how}), and a replay would read old memory; keep it in "
        "a buffer, and copy into that with copy_()",
    )
