"""Records of compiled graphs: the plans that `last_plans` returns, and for reports how often each graph ran.

      compile --> plans by `torch.compile` wrapper            last_plans(compiled)
              --> Graph, while `recorded()` is entered        how often it ran, how many runs wait for their backward

A dropped function drops its plans.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .identity.memo import Memo
from .passes.plan import Plan
from .torch_private.autograd import at_end_of_backward

_plans: Memo[list[Plan]] = Memo()  # by the wrapper
_lock = threading.Lock()


def plans_of(wrapper: Any) -> list[Plan]:
    """The list of plans of a `torch.compile` wrapper; compiling appends to it."""
    with _lock:
        plans = _plans.get(wrapper)
        return _plans.set(wrapper, []) if plans is None else plans


def forget() -> None:
    """Empty the plans of all wrappers."""
    with _lock:
        for _, plans in _plans.known.values():
            plans.clear()


@dataclass(eq=False)
class Graph:
    """A compiled graph, as `recorded` lists it. `enable` counts runs by it.

    Attributes:
        plans: with live bytes; empty if it has no backward, several if Dynamo's graph became several.
        run_count: how often its forward ran.
        waiting_count: how many of these runs still have saved tensors.
        most_waiting: the peak of `waiting_count`; a report resets it after each step.
    """

    plans: list[Plan] = field(default_factory=list)
    run_count: int = 0
    waiting_count: int = 0
    most_waiting: int = 0

    def counted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, the compiled forward, with each run counted."""

        def run_and_count(*args: Any) -> Any:
            outputs = run(*args)
            self.run_count += 1
            if at_end_of_backward(outputs, self._released):
                self.waiting_count += 1
                self.most_waiting = max(self.most_waiting, self.waiting_count)
            return outputs

        return run_and_count

    def _released(self) -> None:
        self.waiting_count -= 1


_recorded: list[Graph] | None = None


@contextlib.contextmanager
def recorded() -> Iterator[list[Graph]]:
    """Lists each graph that the backend compiles inside, on any thread, with hooks or without.

    `last_plans` returns the same inside as outside.
    """
    global _recorded
    graphs: list[Graph] = []
    before, _recorded = _recorded, graphs
    try:
        yield graphs
    finally:
        _recorded = before


def recording_graphs() -> list[Graph] | None:
    """The list of the innermost `recorded()`; None outside of one."""
    return _recorded
