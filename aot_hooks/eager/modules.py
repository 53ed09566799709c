"""Paths of modules ("layers.0.mlp"), relative to the outermost module that runs, from the Python stack.

      compiled   Dynamo's path starts at a local: L['self'].mlp.fc1
                 --roots--> the local's path in the outermost running module: "layers.0"
      eager      frames of `nn.Module.__call__` while autograd saves for an operator
                 --note_running_modules--> path by the operator's number --made_in--> path of the operator of a tensor

Autograd numbers its operators in order. The path of an operator that saves a tensor is noted. An operator that saves
nothing (an addition) counts to the innermost module around its neighbours.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import operator
import sys
import threading
import weakref
from types import FrameType

from torch import nn

from ..torch_private import autograd, dynamo
from ..torch_private import values as torch_values

_MAX_NOTES = 1 << 16  # operators of a thread whose modules are noted; then the older half is dropped


class _Local(threading.local):
    def __init__(self) -> None:
        self.notes: list[tuple[int, tuple[str, ...]]] = []  # operators' numbers, ascending, and the modules around each


_local = _Local()


def note_running_modules() -> None:
    """Note the path of the running module under the number of the operator that autograd is saving a tensor for."""
    number, notes = autograd.next_sequence_number() - 1, _local.notes
    if notes and notes[-1][0] == number:
        return
    if len(notes) == _MAX_NOTES:
        del notes[: _MAX_NOTES // 2]
    notes.append((number, _path(_running(sys._getframe(1)))))


def made_in(number: int | None) -> str:
    """The path of the module in which operator `number` ran; for None, the module that runs now."""
    notes = _local.notes
    if not notes:
        return ".".join(_path(_running(sys._getframe(1))))
    if number is None:
        return ".".join(notes[-1][1])
    i = bisect.bisect_left(notes, number, key=operator.itemgetter(0))
    if i < len(notes) and notes[i][0] == number:
        return ".".join(notes[i][1])
    around = [path for _, path in notes[max(i - 1, 0) : i + 1]]
    common = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*around, strict=False))
    return ".".join(names[0] for names in common)


def roots() -> dict[str, str]:
    """Paths of modules by the names that Dynamo has for them: `{"L['self']": "layers.0", "": "layers.0"}`.

    These are the modules among the locals of the frame that Dynamo compiles, and under "" the innermost module that
    runs. Paths are relative to the outermost one. Empty if no module runs: Dynamo's own paths are right then.
    """
    compiled, outside = dynamo.frame_being_compiled()
    modules = _running(outside)
    found = {"": ".".join(_path(modules))} if modules else {}
    for local, value in compiled.items():
        if modules and isinstance(value, nn.Module):
            path = _path(modules) if value is modules[-1] else _path([modules[0], value])
            found[f"L['{local}']"] = ".".join(path)
    return found


def running_modules() -> list[nn.Module]:
    """The modules whose call is on this thread's stack, outermost first."""
    return _running(sys._getframe(1))


def _running(frame: FrameType | None) -> list[nn.Module]:
    """The modules whose call `frame` is part of, outermost first."""
    modules: list[nn.Module] = []
    while frame is not None:
        if frame.f_code is torch_values.MODULE_CALL:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back
    return modules[::-1]


def _path(modules: list[nn.Module]) -> tuple[str, ...]:
    """The names of `modules`, each within the one before it."""
    if not modules:
        return ()
    names: list[str] = []
    outer = modules[0]
    for inner in modules[1:]:
        name = _name_within(outer, inner)
        if name is not None:  # else no submodule of its caller: its operators count as the caller's
            names.append(name)
            outer = inner
    # torch.compile(model) is a module around the model
    return tuple(part for name in names for part in name.split(".") if part not in ("", "_orig_mod"))


_paths: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()


def _name_within(outer: nn.Module, inner: nn.Module) -> str | None:
    """The name of the module `inner` in `outer`, as `named_modules` gives it; None if it is not in it."""
    name = _paths.get(outer, {}).get(id(inner))
    if name is not None:
        with contextlib.suppress(AttributeError):  # the model was changed since
            if outer.get_submodule(name) is inner:
                return name
    paths = _paths[outer] = {id(module): name for name, module in outer.named_modules()}
    return paths.get(id(inner))
