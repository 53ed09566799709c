"""One line on a terminal while a budget plans and compiles, which can take minutes: what it waits for.

      aot_hooks: budget('24GiB'): 5 plans tried, at best 21.4 GiB: 38 s

The line is written over, and gone at the end. Without a terminal one record of level INFO says that planning begins.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

log = logging.getLogger("aot_hooks")
_WIDTH = 110  # Characters of the line at most: a line that wraps could not be written over.


class _Line(threading.local):
    title = ""  # of the graph that is being planned; "" if none is
    begun_s = 0.0
    plans = 0
    least: int | None = None


_line = _Line()


@contextlib.contextmanager
def shown(title: str) -> Iterator[None]:
    """Shows the progress of what is planned and compiled inside, for `title`."""
    before = dict(vars(_line))
    vars(_line).clear()
    _line.title, _line.begun_s = title, time.perf_counter()
    if not sys.stderr.isatty():
        log.info("aot_hooks: %s: planning and compiling a graph", title)
    try:
        say("planning")
        yield
    finally:
        _write("")
        vars(_line).clear()
        vars(_line).update(before)


def say(doing: str) -> None:
    """Shows what is being done now. Does nothing outside of `shown`."""
    if _line.title:
        seconds = time.perf_counter() - _line.begun_s
        _write(f"aot_hooks: {_line.title}: {doing}: {seconds:.0f} s"[:_WIDTH])


def tried(peak_bytes: int) -> None:
    """Shows that one more plan was put into graphs, with the lowest of their peaks so far."""
    _line.plans += 1
    _line.least = peak_bytes if _line.least is None else min(_line.least, peak_bytes)
    say(f"{_line.plans} plans tried, the least takes {_line.least / 2**30:.2f} GiB")


def _write(text: str) -> None:
    if _line.title and sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
