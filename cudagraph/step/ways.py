"""The ways that one call of a step can run, and what becomes of a capture: data only."""

from __future__ import annotations

from typing import NamedTuple

from .host import HostState
from .recording import StepRecording


class Replay(NamedTuple):
    """A way to run a call: replay this recording."""

    recording: StepRecording


class Record(NamedTuple):
    """Record the step, with the host values of this snapshot."""

    host: HostState


class WarmUp(NamedTuple):
    """Run it uncaptured, so that it can be recorded later: `done` such calls have warmed up then."""

    done: int


class AsItIs(NamedTuple):
    """Run it uncaptured, for a reason that is logged, or without one."""

    reason: str = ""


class Refuse(NamedTuple):
    """Run it uncaptured, now and ever after."""

    reason: str
    on_all_ranks: bool = False


class FailedCapture(NamedTuple):
    """A capture that left no trace.

    Attributes:
        again: whether another one is to follow at once, which allows for what this one has found.
        may_succeed: whether another one may succeed after a warm-up.
        changed_by_step: the path of a host value that the step itself changes, if that is why.
        read_numbers: whether it had numbers that are read on the device.
    """

    reason: str
    again: bool = False
    may_succeed: bool = False
    changed_by_step: tuple[str, ...] = ()
    read_numbers: bool = False


Way = Replay | Record | WarmUp | AsItIs | Refuse
