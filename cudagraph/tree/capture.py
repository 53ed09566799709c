"""What code can find out and do while it is captured: lend host memory to the graph, or ask for another warm-up.

    record --Capture--> capturing() in this thread, until the capture ends

Host memory lent to one recording of a tree may be lent to another one too, unless outputs of the path lie there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from ..errors import CudaGraphError


class CannotCapture(CudaGraphError):
    """Why a function can't be captured here; it runs uncaptured from then on."""


class NotWarmError(CannotCapture):
    """The capture needs something that an uncaptured run leaves behind: one more warm-up, then another capture."""


class Owner:
    """An object that lives as long as the recordings of one tree."""


class Capture:
    """One capture. Lent memory is free again when `owner` is gone and the last launch is done."""

    def __init__(self, owner: Owner, held: Iterable[int]) -> None:
        self.owner = owner
        self.held = frozenset(held)  # addresses of host memory with outputs of the path: it must not be written to
        self.lent: set[int] = set()

    def lend(self, address: int) -> None:
        """Lend the host memory at `address`, which each replay writes to.

        An output there is like other outputs: it must not be read after a later step has begun.
        """
        self.lent.add(address)

    def not_warm(self, reason: str) -> NotWarmError:
        """An error for the captured code to raise."""
        return NotWarmError(reason)


_local = threading.local()


def capturing() -> Capture | None:
    """This package's capture that is under way in this thread; None if there is none."""
    return getattr(_local, "capture", None)


@contextlib.contextmanager
def under_way(capture: Capture) -> Iterator[None]:
    outer, _local.capture = capturing(), capture
    try:
        yield
    finally:
        _local.capture = outer
