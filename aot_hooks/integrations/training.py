"""What every integration does: enable hooks while a trainer trains, and give its tracker numbers.

start() --> next_batch(), forward and backward, batch_done() --> metrics() --> the trainer's tracker --> stop()
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..enabled import Enabled, enable
from ..errors import OptionError, UnusedWarning, bind, warn_user
from ..options import with_arguments
from ..passes.plan import Plan
from ..planning.budget import Budget
from .logits import WithoutLogits

_MIB = 1 << 20  # bytes

COMPILED_ONCE = (
    ". Accelerate compiles a model for the first Trainer or Accelerator only: call model.compile() before a second "
    "one, or before train() with auto_find_batch_size"
)


def _end(enabled: Enabled, model: WithoutLogits | None) -> None:
    if model is not None:
        model.end()
    enabled.disable()


class Training:
    """Hooks that are enabled from `start` to `stop`. Takes the arguments of `enable`, and raises `OptionError` for a
    wrong one."""

    def __init__(self, policy: Any = None, **arguments: Any) -> None:
        self._arguments: dict[str, Any] = {"policy": policy, "scope": None, "options": None} | arguments
        bind(enable, (), self._arguments)
        with_arguments(**self._arguments)  # raises now, not when the training begins
        self._enabled: Enabled | None = None
        self._end: Any = None
        self._has_run = False  # a graph with gradients has run
        self._has_warned = False  # of a batch without such a graph
        self._latest: list[tuple[Plan, int]] = []  # plans of graphs with gradients, and how often each ran
        self._before: list[tuple[Plan, int]] = []  # the same, of what ran before the last call of `next_batch`
        self._ran_before = False  # whether any graph ran before that call

    @property
    def policy(self) -> Any:
        return self._arguments["policy"]

    def start(self, model: WithoutLogits | None = None) -> None:
        """Enable, until `stop`, which also has `model` return its logits again.

        What an earlier training left enabled, because it raised, ends first.
        """
        self.stop()
        self._enabled = enable(**self._arguments)
        # a trainer that raised and is dropped leaves nothing enabled
        self._end = weakref.finalize(self, _end, self._enabled, model)
        self._end.atexit = False
        self._has_run = self._has_warned = False
        self._latest, self._before, self._ran_before = [], [], False

    def stop(self) -> None:
        if self._end is not None:
            self._end()
        self._enabled = self._end = None

    def next_batch(self) -> None:
        """A batch begins: what ran since the last one, such as an evaluation, is not of it."""
        if self._enabled is not None:
            self._ran_before, self._before = self._enabled.run_count > 0, self._enabled.runs()

    def batch_done(self, hint: str = "", *, skipped: bool = False, or_before: bool = False) -> None:
        """Note which graphs ran with gradients since `next_batch`; with `or_before`, if none did, which ran before it.

        Raises `OptionError` if none has run since `start`, with `hint` if no compiled function was called at all. Warns
        once of a later batch without such a graph, and of one whose graphs no policy and no context covers. A batch
        that was `skipped` may run none.
        """
        if self._enabled is None:
            return
        ran = self._enabled.run_count > 0 or (or_before and self._ran_before)
        self._latest = self._enabled.runs() or (self._before if or_before else [])
        if self._latest or skipped:
            self._has_run = self._has_run or bool(self._latest)
            return
        uncovered = ran and self._arguments["policy"] is None
        nothing = (
            f"{self._enabled!r} has no policy, and a batch was trained whose compiled graphs no context covers, so it "
            "had no effect. Give it a policy, or enter a context around the calls"
            if uncovered
            else f"{self._enabled!r}: a batch was trained, and no function that torch.compile gave to backend "
            f"'inductor' ran under it with gradients, so it had no effect. {self._enabled.why_unused}"
            f"{hint if self._enabled.is_nothing_called else ''}"
        )
        if not self._has_run and not uncovered:
            try:
                raise OptionError(nothing)
            finally:
                self.stop()
        if not self._has_warned:
            self._has_warned = True
            earlier = ". Earlier batches ran such graphs" if self._has_run else ""
            warn_user(f"aot_hooks: {nothing}{earlier}", UnusedWarning)

    def metrics(self) -> dict[str, float]:
        """Numbers of the last batch; none if no graph with gradients ran in it.

        Bytes of a graph with symbolic sizes are those of the sizes that it was compiled with.

        - `saved_mib`, `packed_mib`, `host_mib`: saved for backward without hooks, with them on the device, on the host;
        - `budget_mib`, `predicted_peak_mib`: of a budget, where it is given in bytes, and of the largest graph's plan;
        - `peak_mib`: `torch.cuda.max_memory_allocated()`, where there is a CUDA device.

        All begin with "aot_hooks/". A graph that ran several times counts as often.
        """
        if not self._latest:
            return {}
        found: dict[str, float] = {
            "saved_mib": sum(plan.saved_bytes * n for plan, n in self._latest) / _MIB,
            "packed_mib": sum(plan.packed_bytes * n for plan, n in self._latest) / _MIB,
            "host_mib": sum(plan.host_bytes * n for plan, n in self._latest) / _MIB,
        }
        policy = self._arguments["policy"]
        if isinstance(policy, Budget):
            found["predicted_peak_mib"] = max(plan.peak_bytes for plan, _ in self._latest) / _MIB
            if isinstance(policy.peak, int):
                found["budget_mib"] = policy.peak / _MIB
        if torch.cuda.is_initialized():
            found["peak_mib"] = torch.cuda.max_memory_allocated() / _MIB
        return {f"aot_hooks/{name}": value for name, value in found.items()}
