"""Ends a wait for a process that is gone: torch's own watchdog does not look at collectives in graphs.

    each call    an event behind what it launched
    a thread     no call for as long as a collective may take, and the event is not reached --> `give_up()`, once

While calls follow each other, nothing is asked of the device: the query could break a capture of another thread.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

log = logging.getLogger("cudagraph")
LOOKS = 8  # at the clock, within the time limit


class Watchdog:
    """Watches what a step launches.

    Args:
        event: has `record(stream)`, for the work that a stream was given so far, and `query()`, whether that is done.
        limit_s: seconds that it may take.
        give_up: is called in another thread with the thread of the last call, and must end the wait.
    """

    def __init__(self, event: Any, limit_s: float, give_up: Callable[[int], None]) -> None:
        self._event, self._limit_s, self._give_up = event, limit_s, give_up
        self._last: tuple[float, int] | None = None  # when the last call ended, and its thread
        self._lock = threading.Lock()  # so that the event and `_last` are of one call
        closed = threading.Event()
        threading.Thread(target=_look, args=(weakref.ref(self), closed, limit_s / LOOKS), daemon=True).start()
        weakref.finalize(self, closed.set)

    def launched(self, stream: Any) -> None:
        """Note that a call has launched its work on `stream`."""
        with self._lock:
            self._event.record(stream)
            self._last = time.monotonic(), threading.get_ident()

    def look(self) -> None:
        """Give up if the last call is too long ago and not done."""
        with self._lock:
            if self._last is None or time.monotonic() - self._last[0] < self._limit_s:
                return
            (_, thread), self._last = self._last, None
            try:
                is_done = self._event.query()
            except RuntimeError as error:  # of the device, which the next call meets as well
                log.warning("nobody watches the last call for ranks that are gone: %s", error)
                return
        if not is_done:
            self._give_up(thread)


def _look(watchdog: weakref.ref[Watchdog], closed: threading.Event, interval_s: float) -> None:
    while not closed.wait(interval_s):
        if (alive := watchdog()) is None:
            return
        alive.look()
        del alive


def raise_in(thread: int, error: Exception) -> None:
    """Raise `error` in another thread, as soon as it runs Python code."""

    class Raised(type(error)):  # type: ignore[misc]
        def __init__(self) -> None:  # the interpreter takes a class
            super().__init__(*error.args)

    Raised.__name__ = Raised.__qualname__ = type(error).__name__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Raised))
