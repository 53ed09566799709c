"""What an operator of offload saves, as items; and the items of a step that a CUDA graph captures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .plan import Do, Sends, StepPlan
from .recorder import Call, Event, Phase, Trace


@dataclass(eq=False, slots=True)
class SavedItem:
    """A tensor from its start to the end of its backward. at_run_time.py sets the attributes from `joined` on.

    Attributes:
        sends: whether it is sent to the host.
        call: the run of the operator that saved it; None in a CUDA graph, whose replays belong to no step.
        number: in its step.
        timed: whether to time its copy out, see `Follower.copied`.
        joined: the wait for its copy out has been reached, even if that copy has not started.
        value: the tensor, if it stays on the device.
        out, host, back: the copy out while it holds the tensor, the tensor on the host, the copy back if it has begun.
        captured: the step that a CUDA graph captures, if it is in one.
    """

    sends: bool
    call: Call | None = None
    number: int = -1
    timed: bool = False
    joined: bool = False
    value: Any = None
    out: Any = None
    host: Any = None
    back: Any = None
    captured: CapturedStep | None = None


ItemAction = tuple[Do, SavedItem]


@dataclass(eq=False)
class CapturedStep:
    """A step while a CUDA graph captures it. Replays repeat what it decides, so the recorder knows nothing of it.

    Attributes:
        planned: an earlier step with the plan that this one follows. None once an event differs from that step's.
        items: by number.
        calls: the number of the call of each item.
        begun, open: how many calls have saved tensors, and how many of them hold some.
        at: the number of the next event.
    """

    planned: tuple[Trace, StepPlan] | None
    items: list[SavedItem] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    begun: int = 0
    open: int = 0
    at: int = 0

    def start(self, sends: Sends) -> tuple[list[SavedItem], list[ItemAction]]:
        call, first = self.begun, len(self.items)
        items = [SavedItem(False, number=first + i, captured=self) for i in range(len(sends.nbytes))]
        self.items += items
        self.calls += [call] * len(items)
        self.begun, self.open = call + 1, self.open + 1
        if self.planned is not None and self.planned[0].calls[call : call + 1] != (sends,):
            self.planned = None
        actions = self._before(Phase.FORWARD, call)
        for item in items:
            item.sends = self.planned is not None and self.planned[1].sends[item.number]
        return items, actions

    def reload(self, items: Sequence[SavedItem]) -> list[ItemAction]:
        """The actions before the backward of a call, which saved `items`."""
        return self._before(Phase.BACKWARD, self.calls[items[0].number])

    def _before(self, phase: Phase, call: int) -> list[ItemAction]:
        at, self.at = self.at, self.at + 1
        if self.planned is None or self.planned[0].events[at : at + 1] != (Event(phase, call),):
            self.planned = None
            return [(Do.JOIN, item) for item in self.items]
        return [(what, self.items[number]) for what, number in self.planned[1].actions.get(at, ())]
