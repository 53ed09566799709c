"""How much of a step its graphs have, and how one call of it runs: the states, and what leads from one to the next.

    State   of the step    ALL --> ... --> NOTHING               less and less, until `reset`
    Way     of one call    replay, record, warm up, or run it as it is

Nothing here runs anything: whole.py finds a way and follows it, ranks.py has all ranks take the same one.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple


class State(enum.Enum):
    """How much of a step its graphs have.

    ALL: all of it. Numbers that change between calls are read on the device.
    ALL_BY_NUMBER: all of it. Each value of such a number has a recording, because a capture that read it there failed.
    NO_UPDATE: forward and backward. The update of the parameters runs uncaptured after each replay. Its numbers are
        none of the graph's any more, so those that are left are read on the device.
    NO_UPDATE_BY_NUMBER: the same, with a recording for each value of a number.
    NOTHING: none of it. The step runs as it is.

    There is no other. A step can be cut in one place only, where its gradients are complete; the update alone would
    save little. And no state follows from one with less in it: what has failed once would fail in each such capture.
    """

    ALL = enum.auto()
    ALL_BY_NUMBER = enum.auto()
    NO_UPDATE = enum.auto()
    NO_UPDATE_BY_NUMBER = enum.auto()
    NOTHING = enum.auto()

    @property
    def by_number(self) -> bool:
        return self in (State.ALL_BY_NUMBER, State.NO_UPDATE_BY_NUMBER)

    @property
    def has_update(self) -> bool:
        return self not in (State.NO_UPDATE, State.NO_UPDATE_BY_NUMBER)


class Came(enum.Enum):
    """What has become of a capture, or of calls that were to be captured.

    MORE_FOUND: the capture has found what the step stores, or reads, and the next one allows for.
    NUMBERS_FAILED: the capture read numbers on the device, and failed.
    FAILED: the capture read none, and failed. Or an option of an optimizer is another one in each call.
    VALUE_CHANGES: a host value changes each time, by the step itself or in between, and is no option of an optimizer.
    """

    MORE_FOUND = enum.auto()
    NUMBERS_FAILED = enum.auto()
    FAILED = enum.auto()
    VALUE_CHANGES = enum.auto()


def state_after(state: State, came: Came, *, has_update: bool) -> State:
    """The state of a step after `came`. `has_update`: whether its update is a function of its own.

    ===================  ==========  ===================  ===========  =============
    state                MORE_FOUND  NUMBERS_FAILED       FAILED       VALUE_CHANGES
    ===================  ==========  ===================  ===========  =============
    ALL                  ALL         ALL_BY_NUMBER        NO_UPDATE *  NOTHING
    ALL_BY_NUMBER        the same    -                    NO_UPDATE *  NOTHING
    NO_UPDATE            the same    NO_UPDATE_BY_NUMBER  NOTHING      NOTHING
    NO_UPDATE_BY_NUMBER  the same    -                    NOTHING      NOTHING
    ===================  ==========  ===================  ===========  =============

    \\* NOTHING if the update is no function of its own.
    """
    if came is Came.MORE_FOUND:
        return state
    if came is Came.NUMBERS_FAILED:
        return State.ALL_BY_NUMBER if state.has_update else State.NO_UPDATE_BY_NUMBER
    return State.NO_UPDATE if came is Came.FAILED and state.has_update and has_update else State.NOTHING


class How(enum.Enum):
    """How one call of a step runs.

    REPLAY: launch the way's recording.
    RECORD: capture the step with the host values of the way's snapshot, then replay it.
    WARM_UP: run it uncaptured, so that it can be recorded later.
    AS_IT_IS: run it uncaptured.
    REFUSE: run it uncaptured, now and ever after.

    There is no other: a call is a replay, or leads to one, or has a reason against one, now or for good.
    """

    REPLAY = enum.auto()
    RECORD = enum.auto()
    WARM_UP = enum.auto()
    AS_IT_IS = enum.auto()
    REFUSE = enum.auto()


class Way(NamedTuple):
    """How one call runs, with what that needs."""

    how: How
    reason: str = ""  # why there is no graph, for the log; "" for none
    recording: Any = None  # to replay
    host: Any = None  # the snapshot before it, to record with
    warm_ups: int = 0  # how many calls have warmed up for such inputs and host values, with this one
    on_all_ranks: bool = False  # whether all ranks know that the step is refused

    @property
    def is_graph(self) -> bool:
        return self.how in (How.REPLAY, How.RECORD)


class FailedCapture(NamedTuple):
    """A capture that left no trace. Plain data, which ranks send each other.

    Attributes:
        may_succeed: whether another one may succeed after a warm-up.
    """

    came: Came
    reason: str
    may_succeed: bool = False
