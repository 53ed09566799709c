"""The measured peak of the first steps of a planned graph, beside its budget. CUDA only: a CPU has no counters.

forward starts: a bytes allocated        backward has run: at most n since the counters began
                                         the step took n - a, or less if an earlier peak was higher

1st step   within the budget: done. Else the counters begin anew, and the next step is measured alone
2nd step   over the budget: the excess over the prediction is taken off, and the function is compiled once more
the tighter plan's steps are measured likewise; if one is over the budget too, a warning says by how much, and where

Copies that are decided at run time need no compilation: what a step left free, the next ones send less.

`checked` does this for a graph that is the whole step, `StepCheck` for the steps of many.py.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import BudgetWarning, warn_user
from ..graphs.speeds import link_share
from ..identity.memo import Memo
from ..offloading.at_run_time import follower_of
from ..passes.plan import Plan
from ..steps.recorder import Step
from ..steps.schedule import DECIDED_LATER
from ..torch_private import dynamo
from ..torch_private.autograd import at_end_of_backward
from ..torch_private.ranks import agreed
from .assignment import UNSEEN, Assignment
from .step import ALONE

log = logging.getLogger("aot_hooks")
_MIB = 1 << 20
_IN_FORWARD = "in the compiled forward"
_AFTER = "after the compiled forward: in the loss, or in the backward"
_TRIES = 3  # calls that are measured alone
_UNPLANNED = 8  # Steps until copies that are decided at run time follow a plan. Up to then all is sent.
# The most that a step may take over its predicted time. Under FSDP2 on two H200s, steps of one program were measured at
# 1.25, 1.5 and 1.75, of another at 1 to 1.5. What is above 1.25 may be a pause, in which no copy hides.
_MOST_SLOWNESS = 1.25
_FREE = 0.01  # A step that leaves less than this share of its budget free sends what it has to.
_ROOM = 1.25  # times the bytes that a plan did not foresee: the next plan may miss more
_tighter: Memo[dict[Any, Assignment]] = Memo()  # by `torch.compile` wrapper: by code and budget, the one to plan with


def tightened(rule: Any, wrapper: Any) -> Any:
    """`rule`, or a tighter budget if a measured step of the function that Dynamo is compiling was over `rule`."""
    if not isinstance(rule, Assignment):
        return rule
    return (_tighter.get(wrapper) or {}).get((dynamo.code_being_compiled(), replace(rule, free=None)), rule)


def forget() -> None:
    """Forget which steps were over their budgets."""
    _tighter.known.clear()


@dataclass(frozen=True)
class Counters:
    """The allocator's counters of a CUDA device, in bytes."""

    device: torch.device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def most(self) -> int:
        """The most allocated at once since `restart`."""
        return torch.cuda.max_memory_allocated(self.device)

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


@dataclass(frozen=True)
class Clock:
    """The time at which the current stream of a CUDA device gets somewhere."""

    device: torch.device

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def ms_since(self, began: Any) -> float:
        """The milliseconds from `began`, which `now` returned. Waits for the device."""
        ended = self.now()
        ended.synchronize()
        return float(began.elapsed_time(ended))

    def link_share(self) -> float:
        """See `speeds.link_share`. All ranks of a host should ask at the same time."""
        return link_share(self.device)


def clock_of(plans: Sequence[Plan]) -> Clock | None:
    """The clock of the device that all tensors are saved on; None if that is no CUDA device."""
    device = _cuda_device(plans)
    return None if device is None or device.type != "cuda" else Clock(device)


def counters_of(plans: Sequence[Plan]) -> Counters | None:
    """The counters of the device that all tensors are saved on; None if nothing counts its bytes."""
    device = _cuda_device(plans)
    return None if device is None else Counters(device)


def slowness(ms: float, predicted_ms: float) -> float:
    """How many times its predicted time a step takes, from 1 to `_MOST_SLOWNESS`. In quarters, rounded down.

    Cache keys contain it, and two measured times differ by a few percent.
    """
    return min(max(1.0, math.floor(4 * ms / predicted_ms) / 4), _MOST_SLOWNESS) if predicted_ms else 1.0


@dataclass
class StepTime:
    """How long a step takes over what is predicted for its graphs, measured once, in a step that compiles nothing.

    Copies hide in the time that a step takes. With exchanges of ranks, or on a slow host, that is more than predicted.

    Attributes:
        slowness: that ratio, see `Whole`; 1 if it was not measured.
        link_share: the share of its speed that the link has while the other ranks of the host copy; 1 likewise.
        is_known: they were measured, or will not be.
    """

    slowness: float = 1.0
    link_share: float = 1.0
    is_known: bool = False
    _clock: Clock | None = None  # None on a CPU, or before anything was compiled
    _compiled: int = 0  # how many versions of graphs were
    _compiled_before: int = 0  # up to the end of the last step
    _has_waited: bool = False

    def compiled(self, plans: Sequence[Plan]) -> None:
        self._compiled += 1
        self._clock = self._clock or clock_of(plans)

    def begins(self) -> Any:
        """A mark for a step that begins; None if none is needed."""
        return None if self._clock is None or self.is_known else (self._clock.now(), self._compiled_before)

    def ends(self) -> None:
        """A step has ended. What is compiled from now on counts for the next one."""
        self._compiled_before = self._compiled

    def waits(self, began: Any, predicted_ms: float, of: str = "") -> bool:
        """Whether a plan has to wait for the next step: the one that `began` compiled something. At most once.

        `of`: the step's program, by which ranks take over what one of them has measured.
        """
        if self.is_known or self._clock is None:
            return False
        mark, compiled_before = began or (None, -1)
        if compiled_before != self._compiled:
            self.is_known, self._has_waited = self._has_waited, True
            return not self.is_known
        self.is_known = True
        own = slowness(self._clock.ms_since(mark), predicted_ms)
        self.slowness = float(agreed(f"slowness of {of}", repr(own)))
        self.link_share = self._clock.link_share()
        text = "a step takes %.2f times as long as predicted, in quarters; copies have %.1f of the link's speed"
        log.info(text, self.slowness, self.link_share)
        return False


def checked(
    run: Callable[..., Any],
    budget: Assignment,
    plans: Sequence[Plan],
    wrapper: Any,
    current_step: Callable[[], Step | None] = lambda: None,
) -> Callable[..., Any]:
    """`run`, a compiled forward with `plans`, with the peaks of its first steps compared with `budget`.

    Args:
        wrapper: what `torch.compile` returned for the function that Dynamo is compiling, None if there is none.
        current_step: returns the step of the calling thread. If several of its calls hold saved tensors at the same
            time, its peak says nothing of this plan. None: nobody records steps.
    """
    code = dynamo.code_being_compiled()
    check = step_check(budget, plans, tighter=budget.over > 0)
    if check is None or budget.least or budget.moments != ALONE:
        return run
    predicted = max(plan.peak_bytes for plan in plans)
    measured = 0  # the number of the last call: one that another interrupts, or whose backward has run, is over

    def run_and_measure(*args: Any) -> Any:
        nonlocal measured
        if check.restarts == _TRIES and not check.done:
            check.done = True
            warn_user(
                f"aot_hooks: {budget!r}: the first step was over the budget, and none of the next {_TRIES} could be "
                "measured: other calls of the compiled function came between forward and backward, or there was no "
                "backward. Look at torch.cuda.max_memory_allocated(), and lower the peak by what is over",
                BudgetWarning,
            )
        if (before := check.begins()) is None:
            return run(*args)
        measured += 1
        number, step = measured, current_step()
        outputs = run(*args)
        in_forward = check.counter.most()
        at_end_of_backward(outputs, lambda: None, lambda: ended(number, before, in_forward, step))
        return outputs

    def ended(number: int, before: int, in_forward: int, step: Step | None) -> None:
        nonlocal measured
        if number != measured:
            return
        measured += 1  # a second backward of the same call is not measured
        if step is not None and step.most > 1:
            check.done = True  # the step has a check of its own
            return
        most = check.counter.most()
        where = "the compiled graph alone; the most was alive " + (_IN_FORWARD if most == in_forward else _AFTER)
        if (over := check.ended(before, predicted, where)) == 0:
            return
        if wrapper is None or code is None or not dynamo.compile_anew(code):
            _warn(budget, check.peak, most - before, predicted, where, tighter=False)
        else:
            known = _tighter.get(wrapper) or _tighter.set(wrapper, {})
            asked = replace(budget, recipe=None)  # a loaded plan was over, too: the next one is searched for
            known[code, replace(asked, free=None)] = replace(asked, over=over)

    return run_and_measure


@dataclass
class StepCheck:
    """The measured peaks of the first steps, beside their budget of `peak` bytes.

    Attributes:
        tighter: the steps run a plan that was made tighter because an earlier step was over the budget.
        alone: a step was over the budget, so the counters are restarted for each of the next ones.
        waits: steps that pass before the first is measured.
        leave_free: plans copies again for a step that left so many bytes free; returns whether that changed anything.
            None: no copies are decided at run time.
        given: what `leave_free` was called with last, if that plan was not measured yet.
    """

    budget: Assignment
    peak: int
    counter: Counters
    tighter: bool
    done: bool = False
    alone: bool = False
    restarts: int = 0
    waits: int = 0
    leave_free: Callable[[int], bool] | None = None
    given: int = 0

    def begins(self) -> int | None:
        """A step begins; returns the bytes that are allocated, None if it is not measured."""
        if self.done or self.restarts == _TRIES:  # such steps had no backward, or other calls
            return None
        if self.waits:
            self.waits -= 1
            return None
        if self.alone:
            self.restarts += 1
            gc.collect()  # tensors that compiling left in cycles: freed during the step, they would hide what it takes
            self.counter.restart()
        return self.counter.allocated()

    def ended(self, before: int | None, predicted: int, where: str = "the compiled graphs of the step") -> int:
        """A step that began with `before` bytes has ended. Returns how many bytes the next plan must leave free.

        `predicted`: the predicted peak. `where`: what was predicted, for messages.
        """
        if self.done or before is None:
            return 0
        taken = self.counter.most() - before
        log.info("%r: a step took %d bytes or less, predicted %d", self.budget, taken, predicted)
        if taken > self.peak and not self.alone:
            self.alone = True  # the first step allocates more, and so may have what ran before
            return 0
        if self.leave_free is not None and self._plans_again(taken, self.leave_free):
            return 0
        self.done = True
        if taken <= self.peak:
            return 0
        if not self.tighter:  # the next plan leaves free what this one did not foresee
            return math.ceil(_ROOM * (taken - min(predicted, self.peak)))
        _warn(self.budget, self.peak, taken, predicted, where, tighter=True)
        return 0

    def _plans_again(self, taken: int, leave_free: Callable[[int], bool]) -> bool:
        """Have a step that took `taken` bytes send less, or more if it was over. False if it stays as it is."""
        free = int((1 - UNSEEN) * self.peak) - taken
        if taken > self.peak and self.given > 0:  # back to the plan that was measured before
            self.done, free = True, -self.given
        elif self.restarts == _TRIES or (taken <= self.peak and free < _FREE * self.peak):
            return False
        self.given = free
        return leave_free(free)


def step_check(budget: Assignment, plans: Sequence[Plan], *, tighter: bool) -> StepCheck | None:
    """The check of a step with `plans`; None where nothing counts bytes."""
    device, peak = _cuda_device(plans), budget.peak_bytes
    if device is None or peak is None:
        return None
    if any(t.placement.reason == DECIDED_LATER for plan in plans for t in plan.transfers):
        leave_free = follower_of(device).leave_free
        return StepCheck(budget, peak, Counters(device), tighter, alone=True, waits=_UNPLANNED, leave_free=leave_free)
    return StepCheck(budget, peak, Counters(device), tighter)


def _warn(budget: Assignment, peak: int, taken: int, predicted: int, where: str, *, tighter: bool) -> None:
    tried = ", with a plan that is tighter by what the first did not foresee" if tighter else ""
    warn_user(
        f"aot_hooks: {budget!r}: a step took {taken / _MIB:.1f} MiB over what was allocated before it, "
        f"{(taken - peak) / _MIB:.1f} MiB more than the budget{tried}. Predicted were {predicted / _MIB:.1f} MiB for "
        f"{where}. What code outside of the graph allocates counts too: "
        "compile the loss with the model, or lower the peak by that much",
        BudgetWarning,
    )


def _cuda_device(plans: Sequence[Plan]) -> torch.device | None:
    """The CUDA device of all tensors that are saved there; None if there are several, or none."""
    devices = {d.saved.device for plan in plans for d in plan.decisions if d.saved.device.type == "cuda"}
    return devices.pop() if len(devices) == 1 else None
