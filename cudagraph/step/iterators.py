"""Iterators that a step takes items from: a replay takes none, and an item that was taken can't be put back.

    warm-up       positions before it and after it differ: the step runs without a graph from then on
    capture       the same, but the item that the capture took is lost

`next(batches)` in a step is the usual case. Iterators of Python's own and generators have no attributes to compare, so
their positions are read in other ways. Those of other classes are followed like any object, or read here where one of
Python's own takes from them, as `enumerate(loader)`. No item is taken to read a position.
"""

from __future__ import annotations

import gc
import itertools
import operator
import types
from collections.abc import Iterator, Mapping
from typing import Any

_MODULES = ("builtins", "itertools", "collections", "_collections")
_HOLDERS = (tuple, types.CellType, types.MethodType, types.MethodWrapperType)  # `zip` has a tuple of iterators


def is_opaque(value: Any) -> bool:
    """Whether `value` is a generator or an iterator of Python's own."""
    return getattr(type(value), "__module__", None) in _MODULES and issubclass(type(value), Iterator)


class Iterators:
    """Iterators by their paths, and where they are."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._found = {path: value for path, value in found.items() if not _runs(value)}
        self._positions = {path: _position(value) for path, value in self._found.items()}

    def reason(self) -> str | None:
        """Why a step that ran since then can't be replayed: it has taken an item. None if it took none."""
        for path, value in self._found.items():
            if not _same(_position(value), self._positions[path]):
                return f"takes items from {path}, which a replay would not; call next() outside of the step"
        return None


def _position(iterator: Any) -> list[Any]:
    """Numbers and objects that differ after an item was taken, for most iterators: of it, and of those that it reads.

    Not for files, `itertools.cycle` after its first round, nor for a generator whose variables stay as they are.
    """
    found: list[Any] = []
    reached = [iterator]
    for each in reached:  # which grows meanwhile
        parts = [*_parts(each)]
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
    if not is_opaque(iterator):
        return None
    if cls is enumerate or (cls.__module__ == "builtins" and hasattr(cls, "__setstate__")):  # of a list, range, text
        _, arguments, *state = iterator.__reduce__()
        return repr([x for x in (*arguments, *state) if type(x) is int])
    return operator.length_hint(iterator, -1)  # of a dict, a set, a deque


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
