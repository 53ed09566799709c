"""Iterators that a step takes items from: a replay takes none, and an item that was taken can't be put back.

    warm-up       positions before it and after it differ: the step runs without a graph from then on
    capture       the same, but the item that the capture took is lost

`next(batches)` in a step is the usual case. Iterators of Python's own and generators have no attributes to compare, so
their positions are read in other ways. Those of other classes are followed like any object.
"""

from __future__ import annotations

import gc
import itertools
import operator
import types
from collections.abc import Iterator, Mapping
from typing import Any

_MODULES = ("builtins", "itertools", "collections", "_collections")
_DEEP = 4  # iterators of iterators, as `enumerate(zip(xs, ys))`


def is_opaque(value: Any) -> bool:
    """Whether `value` is a generator or an iterator of Python's own."""
    return type(value).__module__ in _MODULES and isinstance(value, Iterator)


class Iterators:
    """Iterators by their paths, and where they are."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._found = found
        self._positions = {path: _position(value, _DEEP) for path, value in found.items()}

    def reason(self) -> str | None:
        """Why a step that ran since then can't be replayed: it has taken an item. None if it took none."""
        for path, value in self._found.items():
            if not _same(_position(value, _DEEP), self._positions[path]):
                return f"takes items from {path}, which a replay would not; call next() outside of the step"
        return None


def _position(iterator: Any, deep: int) -> list[Any]:
    """Numbers and objects that differ after an item was taken, for most iterators.

    Not for `itertools.cycle` after its first round, nor for a generator whose variables stay as they are.
    """
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        if frame is None:  # it has ended
            return [None]
        found, inner = [frame.f_lasti], [*frame.f_locals.values(), iterator.gi_yieldfrom]
    else:
        found = [operator.length_hint(iterator, -1)]
        if isinstance(iterator, itertools.count):
            return [repr(iterator)]
        parts = ([x, *gc.get_referents(x)] if type(x) is tuple else [x] for x in gc.get_referents(iterator))
        inner = [*itertools.chain.from_iterable(parts)]  # `zip` has a tuple of iterators
    nested = (_position(x, deep - 1) for x in inner if deep and is_opaque(x))
    return [*found, *inner, *itertools.chain.from_iterable(nested)]


def _same(now: list[Any], before: list[Any]) -> bool:
    pairs = zip(now, before, strict=False)
    return len(now) == len(before) and all(a is b or (type(a) in (int, str) and a == b) for a, b in pairs)
