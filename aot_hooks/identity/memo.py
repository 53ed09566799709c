"""Values attached to objects while these live, without touching the objects, which may be pickled."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Memo(Generic[_T]):
    """Values by identity of their object. A value must not hold its object. No value for objects without weakrefs."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[weakref.ref[Any], _T]] = {}

    def get(self, of: Any) -> _T | None:
        known = self.known.get(id(of))
        return known[1] if known is not None and known[0]() is of else None

    def set(self, of: Any, value: _T) -> _T:
        at = id(of)
        with contextlib.suppress(TypeError):
            self.known[at] = (weakref.ref(of, lambda _: self.known.pop(at, None)), value)
        return value
