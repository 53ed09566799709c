"""Iterators and files that a step takes items from: a replay takes none, and what was taken can't be put back.

    warm-up       positions before it and after it differ: the step runs without a graph from then on
    capture       the same, but the item that the capture took is lost

`next(batches)` in a step is the usual case. Iterators of Python's own and generators have no attributes to compare, so
their positions are read in other ways. Those of other classes are followed like any object, or read here where one of
Python's own takes from them, as `enumerate(loader)`. No item is taken to read a position. One that can't be read counts
as another one each time.
"""

from __future__ import annotations

import gc
import io
import itertools
import operator
import threading
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

_MODULES = ("builtins", "itertools", "collections", "_collections", "_io")
_HOLDERS = (tuple, types.CellType, types.MethodType, types.MethodWrapperType)  # `zip` has a tuple of iterators


def is_opaque(value: Any) -> bool:
    """Whether `value` is a generator, a file, or an iterator of Python's own."""
    return getattr(type(value), "__module__", None) in _MODULES and issubclass(type(value), Iterator)


class Iterators:
    """Iterators and files by their paths, and where they are."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._found = {path: value for path, value in found.items() if not _runs(value)}
        self._positions = {path: _position(value) for path, value in self._found.items()}

    def reason(self) -> str | None:
        """Why a step that ran since then can't be replayed: it has taken an item. None if it took none."""
        for path, value in self._found.items():
            if not _same(_position(value), self._positions[path]):
                others = ", or another thread does meanwhile" if threading.active_count() > 1 else ""
                call = "read and write it" if isinstance(value, io.IOBase) else "call next()"
                return f"takes items from {path}, which a replay would not{others}; {call} outside of the step"
        return None


def _position(iterator: Any) -> list[Any]:
    """Numbers and objects that differ after an item was taken, for most iterators: of it, and of those that it reads.

    Not for pipes, nor for a generator whose variables stay as they are.
    """
    found: list[Any] = []
    reached = [iterator]
    for each in reached:  # which grows meanwhile
        parts = [] if isinstance(each, io.IOBase) else [*_parts(each)]
        found += [_index(each), *parts]
        reached += [
            x for x in parts if issubclass(type(x), Iterator) and not (_runs(x) or any(x is y for y in reached))
        ]
    return found


def _runs(iterator: Any) -> bool:
    """Whether `iterator` is a generator that runs: it calls the step, so the step can take nothing from it."""
    return type(iterator) is types.GeneratorType and iterator.gi_running


def _index(iterator: Any) -> Any:
    """How far an iterator is, as a number or as text; what does not change where there is no such thing."""
    cls = type(iterator)
    if cls is types.GeneratorType:
        return None if iterator.gi_frame is None else iterator.gi_frame.f_lasti
    if cls is itertools.count:
        return repr(iterator)
    if cls is itertools.cycle:
        return _index_of_cycle(iterator)
    if isinstance(iterator, io.IOBase):
        return _offset(iterator)
    if not is_opaque(iterator):
        return None
    if cls is enumerate or (cls.__module__ == "builtins" and hasattr(cls, "__setstate__")):  # of a list, range, text
        _, arguments, *state = iterator.__reduce__()
        return repr([x for x in (*arguments, *state) if type(x) is int])
    return operator.length_hint(iterator, -1)  # of a dict, a set, a deque


def _index_of_cycle(cycle: Any) -> Any:
    """How many items are left of a round. Python 3.14 doesn't tell."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            _, (round_, *_), *_ = cycle.__reduce__()
    except TypeError:
        return object()
    return operator.length_hint(round_, -1)


def _offset(file: io.IOBase) -> Any:
    """Where a file is read; None for a log that is only written, for a pipe, and for a closed file."""
    if file.closed or not (file.readable() and file.seekable()):
        return None
    try:
        return str(file.tell())
    except OSError:  # of a text file whose lines are taken by next()
        return object()


def _parts(iterator: Any) -> Iterator[Any]:
    """What an iterator refers to: what it reads, the last item, the variables and loops of a generator.

    Not by `f_locals`: a frame holds the values that it gives out for as long as the generator is there.
    """
    own = iterator.gi_frame if type(iterator) is types.GeneratorType else getattr(iterator, "__dict__", None)
    for x in gc.get_referents(iterator, own):
        yield x
        if type(x) in _HOLDERS or getattr(type(x), "__module__", None) == "itertools":  # as what `tee` shares
            yield from gc.get_referents(x)


def _same(now: list[Any], before: list[Any]) -> bool:
    pairs = zip(now, before, strict=False)
    return len(now) == len(before) and all(a is b or (type(a) is type(b) in (int, str) and a == b) for a, b in pairs)
