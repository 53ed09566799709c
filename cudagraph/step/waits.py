"""How long the device waits for the host in one call of a step, and in which lines of the user's.

    thread of the call   runs the step as ever
    another thread       twice a millisecond: is all done that the device was given?
                           yes --> the time since the last look counts for the line that the first thread is in
                           no  --> the device is busy, or waits for what it was given: no time of the host's

Nothing is put around operators, which would take time of its own. So the figures are those of the program, but samples:
a line that takes less than a look is found only if many calls of it take long together.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ..tree import tree
from .watch import users_line
from .whole import WholeStep

LOOK_S = 0.0005  # seconds between two looks; a look takes some 0.02 ms of the interpreter
MOST_LINES = 10  # in the text
ELSEWHERE = "no line of yours"


@dataclass(frozen=True)
class Wait:
    """Seconds for which the device waited while the host was in one line, such as "model.py:31: y = x.tolist()"."""

    line: str
    seconds: float


@dataclass(frozen=True)
class StepExplanation:
    """The result of `explain` for a whole step; `str()` gives text for people.

    Attributes:
        refused: why the step runs without a graph, "" if nothing speaks against one.
        update_refused: why its update of the parameters runs outside of the graph, "" if it is inside.
        replayed: whether this call was a replay.
        seconds: that this call took, from its start until the device was done.
        waited: seconds of these in which the device had nothing to do.
        waits: the same by line, the longest first.
    """

    refused: str
    update_refused: str
    replayed: bool
    seconds: float
    waited: float
    waits: tuple[Wait, ...]

    def __str__(self) -> str:
        """Text: what runs as a graph, the times of this call, and the lines that took longest."""
        if self.refused:
            how = f"it runs without a CUDA graph: {self.refused}"
        elif self.update_refused:
            how = f"its update of the parameters runs outside of the CUDA graph: {self.update_refused}"
        else:
            how = "it is one CUDA graph" if self.replayed else "it has no CUDA graph yet: this call was no replay"
        times = f"{self.seconds * 1e3:.1f} ms, in {self.waited * 1e3:.1f} of which the device waited for the host"
        lines = [f"  {wait.seconds * 1e3:8.1f} ms  {wait.line}" for wait in self.waits[:MOST_LINES]]
        return "\n".join((how, times, *lines))


class Sampler:
    """Looks at the device and at the thread that made this, until `close`."""

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        self._is_idle, self._of = is_idle, threading.get_ident()
        self.waited: defaultdict[str, float] = defaultdict(float)  # seconds by line
        self._closed = threading.Event()
        self._last = time.perf_counter()
        self._thread = threading.Thread(target=self._look_until_closed, daemon=True)
        self._thread.start()

    def _look_until_closed(self) -> None:
        while not self._closed.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        # A query while a graph is captured might end the capture.
        is_idle = not tree.captures_under_way and self._is_idle()
        frame: FrameType | None = sys._current_frames().get(self._of)
        line = users_line(frame=frame) if is_idle and frame is not None else ""
        before, self._last = self._last, time.perf_counter()
        if is_idle:
            self.waited[line or ELSEWHERE] += self._last - before

    def close(self) -> None:
        self._closed.set()
        self._thread.join()


def explain_step(step: WholeStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepExplanation:
    """Call `step` once, and say how long the device waited for which lines."""
    device = None if step.cursor is None else step.cursor.device
    is_idle, finish = step.driver.idle_and_finish(device)
    replays = sum(one.replays for one in step.every_recording())
    finish()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(LOOK_S)  # or Python code that calls nothing would not let the other thread look
    begin = time.perf_counter()
    sampler = Sampler(is_idle)
    try:
        step(*args, **kwargs)
    finally:
        sampler.close()
        sys.setswitchinterval(interval)
    finish()
    seconds = time.perf_counter() - begin
    waits = tuple(sorted(itertools.starmap(Wait, sampler.waited.items()), key=lambda wait: -wait.seconds))
    replayed = sum(one.replays for one in step.every_recording()) > replays
    waited = sum(wait.seconds for wait in waits)
    return StepExplanation(step.refused, step.update_refused, replayed, seconds, waited, waits)
