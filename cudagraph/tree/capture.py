"""What code may ask while it is captured: whose host memory each replay writes to, and for another warm-up.

    record --Capture--> capturing() in this thread, until the capture ends

    .owner     lives as long as recordings of this tree: memory that was lent may go to others after that,
               when what they launched last is done
    .held      host memory that the path holds here, and that must not be written to
    .lend(a)   host memory at `a` that each replay writes to. An output on it is given out like other outputs: not
               to be read when a later step has begun

Recordings of one tree take turns, so what one was lent may be lent to another unless the path holds it: they share host
memory as they share the pool.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from ..errors import CudaGraphError

__all__ = ["CannotCapture", "Capture", "NotWarmError", "Owner", "capturing", "under_way"]


class CannotCapture(CudaGraphError):
    """Why a function can't be captured at this place; it runs as it is there from then on."""


class NotWarmError(CannotCapture):
    """A capture lacks what a run as it is would leave behind: that comes first, once, and then another capture."""


class Owner:
    """Stands for all recordings of one tree."""

    __slots__ = ("__weakref__",)


class Capture:
    """One capture; see the module."""

    def __init__(self, owner: Owner, held: Iterable[int]) -> None:
        self.owner = owner
        self.held = frozenset(held)
        self.lent: set[int] = set()

    def lend(self, address: int) -> None:
        self.lent.add(address)

    def not_warm(self, reason: str) -> NotWarmError:
        """To be raised by what is captured."""
        return NotWarmError(reason)


_local = threading.local()


def capturing() -> Capture | None:
    """The capture by this package that runs in this thread."""
    return getattr(_local, "capture", None)


@contextlib.contextmanager
def under_way(capture: Capture) -> Iterator[None]:
    outer, _local.capture = capturing(), capture
    try:
        yield
    finally:
        _local.capture = outer
