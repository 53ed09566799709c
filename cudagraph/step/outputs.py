"""Tensors that a step stores on modules and objects: `self.last_loss = loss`, `losses["router"] = [...]`.

    first capture    finds the entries of dicts, and the lists, in which the step leaves new tensors
    second capture   a tensor that no operator can use stands in for what the step before left there
    replay           each entry gets copies of what the graph computes

A step that reads what the step before left there is not captured: a replay would read old memory.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..torch_private import cuda as torch_cuda
from ..torch_private.distributed import clone_of, local_part, with_local_part
from ..tree.capture import CannotCapture
from .host import PLAIN, Entry
from .numbers import Traced


class ChangesValue(CannotCapture):
    """The step itself changes the host value at `path` each time, or reads what it left there."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


class Unforeseen(CannotCapture):
    """The step stores tensors at `outputs`, or changes numbers at `numbers`: another capture can allow for that."""

    def __init__(self, outputs: Collection[str], numbers: Collection[str]) -> None:
        super().__init__(f"stores {', '.join([*outputs, *numbers])}")
        self.outputs, self.numbers = outputs, numbers


def is_storable(value: Any) -> bool:
    """Whether a replay can store such a value: a tensor, or a container of tensors and plain values."""
    tensors = [x for x in torch_cuda.flatten(value)[0] if _is_plain(x) and x.layout is torch.strided]
    return bool(tensors) and not _others_in(value)


def _is_plain(x: Any) -> bool:
    """Whether `x` is a tensor of no other class, or a `DTensor` of such ones."""
    return type(local_part(x)) is torch.Tensor


def _others_in(value: Any) -> list[Any]:
    """The leaves of `value` that a replay can't store: no tensors, and no plain values."""
    return [x for x in torch_cuda.flatten(value)[0] if not isinstance(x, PLAIN) and not _is_plain(x)]


def refuse_to_store(path: str, value: Any) -> None:
    """Raise if `value`, which the step has stored at `path`, has tensors beside something else that is not plain."""
    if torch_cuda.tensors_among(value) and (others := _others_in(value)):
        what = f"that holds more than tensors, numbers and texts ({type(others[0]).__name__})"
        kind = type(value).__name__
        raise ChangesValue(path, f"stores a {kind} in {path} {what}, which a replay would not; return it instead")


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
        """Put stand-ins that no operator can use in the place of what the step before has left."""
        for path, (container, key) in self._entries.items():
            flat, spec = torch_cuda.flatten(self._old[path])
            error = functools.partial(_read, path)
            wires = [
                with_local_part(x, torch_cuda.tripwire(local_part(x), error)) if isinstance(x, torch.Tensor) else x
                for x in flat
            ]
            container[key] = self._covers[path] = torch_cuda.unflatten(wires, spec)

    def collect(self, known: set[int | None]) -> None:
        """Take what the captured step has left. Tensors over storages in `known` stay those very tensors."""
        for path, (container, key) in self._entries.items():
            value = container[key] if isinstance(container, list) else container.get(key)
            flat, spec = torch_cuda.flatten(value)
            if [*map(id, flat)] == [*map(id, torch_cuda.flatten(self._covers[path])[0])]:
                continue
            if any(hasattr(local_part(x), "trip") for x in flat):
                raise ChangesValue(path, f"keeps in {path} what it has stored in the step before; return it instead")
            if not is_storable(value):
                raise ChangesValue(path, f"stores a {type(value).__name__} in {path}, which a replay would not")
            flat = [x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x for x in flat]
            self._copied |= {
                id(x)
                for x in flat
                if isinstance(x, torch.Tensor) and torch_cuda.storage_key(local_part(x)) not in known
            }
            self._made[path] = flat, spec

    def uncover(self) -> None:
        """Put back what the step before has left."""
        for path, (container, key) in self._entries.items():
            container[key] = self._old[path]
        self._old, self._covers = {}, {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the graph that replays copy; of a `DTensor` this process's part."""
        return [local_part(x) for flat, _ in self._made.values() for x in flat if id(x) in self._copied]

    def assign(self, entries: Mapping[str, Entry]) -> list[Entry]:
        """After a replay: store copies in the entries of now. Returns those that the step has."""
        for path, (flat, spec) in self._made.items():
            container, key = entries[path]
            new = [clone_of(x) if id(x) in self._copied else x.value() if isinstance(x, Traced) else x for x in flat]
            container[key] = torch_cuda.unflatten(new, spec)
        return [entries[path] for path in self._made]


def _read(path: str, how: str) -> ChangesValue:
    """The error where the step reads what it has stored at `path` in the step before."""
    return ChangesValue(
        path,
        f"reads {path}, which it has stored in the step before ({how}), and a replay would read old memory; keep it in "
        "a buffer, and copy into that with copy_()",
    )
