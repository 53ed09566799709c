"""Records of compiled graphs: the plans that `last_plans` returns, and for reports how often each graph ran.

      compile --> plans by `torch.compile` wrapper            last_plans(compiled)
              --> CompiledGraph, in `recorded()`              how often it ran, how many runs wait for their backward
      run     --> Summary of an `enable`                      one line of log after the first step: it works

A dropped function drops its plans.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .identity.memo import Memo
from .passes.plan import Plan, joined
from .settings.byte_sizes import size_text
from .torch_private.autograd import at_end_of_backward

log = logging.getLogger("aot_hooks")
_plans: Memo[list[Plan]] = Memo()  # by the wrapper
_lock = threading.Lock()
NOTHING_SAVED = (
    "nothing is saved for backward, because no graph was compiled that has one. What may be the case:\n"
    "- the compiled function has not been called yet, or without gradients (no_grad, nothing requires grad);\n"
    "- no hook or policy is in force: no context around the call, and no options['policy'];\n"
    "- torch made no graph: of a module of its own that is compiled in place (nn.Sequential(...).compile()),\n"
    "  use torch.compile(module); or of a function that Dynamo left to Python (TORCH_LOGS=graph_breaks);\n"
    "- another function with the same code and options, such as a layer compiled by itself, has the graph:\n"
    "  see last_plans of that one"
)


class Plans(tuple[Plan, ...]):
    """What `last_plans` returns. An index past its end has an error with the reasons why there is no plan."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except IndexError as e:
            e.args = (f"last_plans has {len(self)} plans" + ("" if self else f": {NOTHING_SAVED}"),)
            raise


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
class CompiledGraph:
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


_recorded: list[CompiledGraph] | None = None


@contextlib.contextmanager
def recorded() -> Iterator[list[CompiledGraph]]:
    """Lists each graph that the backend compiles inside, on any thread, with hooks or without.

    `last_plans` returns the same inside as outside.
    """
    global _recorded
    graphs: list[CompiledGraph] = []
    before, _recorded = _recorded, graphs
    try:
        yield graphs
    finally:
        _recorded = before


def recording_graphs() -> list[CompiledGraph] | None:
    """The list of the innermost `recorded()`; None outside of one."""
    return _recorded


class Summary:
    """The graphs that ran under `title`, an `enable`, and what they save. It is logged at level INFO.

    Two lines are logged: after the backward of the first step, and one that `log_all` logs at the end.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._first_step: Counter[CompiledGraph] | None = Counter()  # None after the first step
        self._is_waiting = False  # for the end of the first backward
        self._all: dict[CompiledGraph, None] = {}

    def ran(self, graph: CompiledGraph, outputs: Any) -> None:
        """The forward of `graph` returned `outputs`."""
        if not graph.plans:
            return
        self._all[graph] = None
        if self._first_step is None:
            return
        self._first_step[graph] += 1
        # The graph that runs first in a forward is the last whose backward ends.
        self._is_waiting = self._is_waiting or at_end_of_backward(outputs, self._end_of_first_step)

    def _end_of_first_step(self) -> None:
        if self._first_step is not None:
            counts, self._first_step = self._first_step, None
            log.info("aot_hooks: %s: first step: %s", self.title, _in_words(counts))

    def log_all(self) -> None:
        """Log the graphs that ran since the first step began, each once."""
        if self._all:
            log.info("aot_hooks: %s ended: %s", self.title, _in_words(Counter(self._all.keys())))


def _in_words(counts: Counter[CompiledGraph]) -> str:
    """How many graphs ran, what their forwards save, and the peak of the process where there is a CUDA device.

    The predicted peaks are those of a step: of its only call, or of the calls that a budget planned together.
    """
    runs = [(plan, count) for graph, count in counts.items() for plan in graph.plans]
    saved = sum(plan.saved_bytes * count for plan, count in runs)
    packed = sum(plan.packed_bytes * count for plan, count in runs)
    on_host = sum(plan.host_bytes * count for plan, count in runs)
    times = f" in {counts.total()} calls" if counts.total() > len(counts) else ""
    text = (
        f"{len(counts)} graph{'s' if len(counts) > 1 else ''}{times}, {size_text(saved)} -> {size_text(packed)} saved"
    )
    text += f" and {size_text(on_host)} in host memory" if on_host else ""
    step = joined([plan for plan, _ in runs if plan.in_step is not None or counts.total() == 1])
    if step.peak_bytes and step.stock_peak_bytes:
        text += f", predicted peak over the step's start {size_text(step.peak_bytes)}"
        text += f" (stock about {size_text(step.stock_peak_bytes)})"
    if torch.cuda.is_initialized():
        before, after = (sum(getattr(plan, ms) * count for plan, count in runs) for ms in ("before_ms", "after_ms"))
        text += f", peak of the process {size_text(torch.cuda.max_memory_allocated())}"
        text += f", predicted step {after / before:.3f}" if all(plan.before_ms for plan, _ in runs) else ""
    elif runs and not torch.cuda.is_available():
        text += ", on a CPU, whose memory is seldom what limits training"
    return text
