"""Processes that talk to each other in a step: they agree how each call runs, before anything of it runs.

    each rank     can it be a replay, and of which recordings? could it record? is the step refused?
      |           one all-reduce of a few numbers, on the CPU, in a group of its own
      v
    all ranks     a recording that applies everywhere --> all replay it
                  all could record                     --> all record; then once more: did all captures succeed?
                  a rank has refused the step          --> all refuse it, with that rank's reason
                  else                                 --> all run the step uncaptured

Why in each call? NCCL requires that an operation is captured on all ranks or on none, and that all launch graphs of
the same capture: a rank that replays while another runs the step uncaptured may hang. Whether a recording applies
depends on shapes, numbers and memory of one rank alone, as in a ragged last batch. So no rank can know by itself. And a
rank that replays takes part in nothing but its graph, so an exchange only before recordings could not reach it.

The host does this while the device still works on the step before, so it takes no time of the device, unless the loop
waits for the device in each step. Captures send nothing, so a rank may try one, and fail, for itself.

A step is found to talk by its first call, which is never a recording: the groups count their collectives. That call is
the same one on all ranks, so the next one makes the group. Recordings are numbered alike, because one is kept only if
all ranks have made it. A rank that is gone, or takes fewer steps, ends the others with an error that names it; also if
they wait for it on the device, in a replay that it has agreed to: torch's own watchdog does not look at collectives in
graphs. Ours has an event behind what each call launched. If no call comes for as long as a collective may take, and the
event is not reached, it ends that wait. While calls follow each other, nothing is asked of the device: the query could
break a capture of another thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

from ..errors import RanksError
from ..torch_private import distributed as torch_distributed
from ..tree.node import Cursor
from .host import CannotCompare, HostState
from .states import Came, FailedCapture, How, Way

log = logging.getLogger("cudagraph")

WORDS, BITS = 4, 62  # numbers that the ranks exchange beside the flags, and recordings in each
MOST_RECORDINGS = WORDS * BITS
CAN_RECORD, NOT_REFUSED, RENEWS = 1, 2, 4  # flags
# Seconds that a rank waits for signs of life of others after an exchange failed: a store answers in milliseconds.
SIGNS_OF_LIFE_S = 3.0
LOOKS = 8  # of the watchdog at the clock, within the time limit


class Ranks:
    """The processes that run one step together.

    Args:
        groups: the groups in which the step's collectives run.
        name: of the step, for messages.
    """

    def __init__(self, groups: Collection[Any], name: str) -> None:
        self._members = torch_distributed.ranks_of(groups)
        self._groups, self._name, self._calls = groups, name, 0
        self._limit = torch_distributed.timeout_of_default_group()
        self._watchdog: Watchdog | None = None
        self._recordings = 0  # how many the ranks have made together
        try:
            self._group = dist.new_group(
                self._members,
                backend="gloo",
                timeout=self._limit,
                use_local_synchronization=True,
            )
        except RuntimeError as error:
            raise self._error(error) from error

    def common_way(
        self,
        way: Way,
        applying: Callable[..., dict[int, Any]],
        take_snapshot: Callable[[], HostState],
        *,
        refused: str,
        renews: bool,
    ) -> tuple[Way, bool]:
        """The way that all ranks go, and whether all of them have reducers to make anew before it.

        Args:
            way: how this rank would run the call.
            applying: the recordings that it could replay, by number; called again with a snapshot of the host values.
            take_snapshot: makes that one.
            refused: why it has refused the step; "" if it has not.
            renews: whether it has reducers to make anew.
        """
        self._calls += 1
        by_number = applying()
        can_record = way.is_graph and self._recordings < MOST_RECORDINGS
        flags = CAN_RECORD * can_record | NOT_REFUSED * (not refused) | RENEWS * renews
        flags, numbers = self._shared(by_number, flags)
        if not flags & NOT_REFUSED:
            rank, reason = self._first(refused or None)
            return Way(How.REFUSE, refused or f"on rank {rank}, {reason}", on_all_ranks=True), False
        host = way.host
        if flags & CAN_RECORD and not numbers:  # look once more, at what takes a snapshot of the host values
            with contextlib.suppress(CannotCompare):  # the others wait in the exchange; the next call says why
                host = host or take_snapshot()
            by_number = {} if host is None else applying(host)
            further, numbers = self._shared(by_number, CAN_RECORD * (host is not None))
            flags &= further | ~CAN_RECORD
        if numbers:
            way = Way(How.REPLAY, recording=by_number[numbers[0]])
        elif host is not None and flags & CAN_RECORD:
            way = Way(How.RECORD, host=host)
        elif way.is_graph:
            way = Way(How.AS_IT_IS)
        return way, bool(flags & RENEWS)

    def common_outcome(self, made: Any) -> Any:
        """What has become of a capture on all ranks: the recording `made`, if all have one; or the failure of the first
        rank that can't allow for what its capture has found."""
        mine = made if isinstance(made, FailedCapture) else None
        failures = [(rank, each) for rank, each in self._gathered(mine) if each is not None]
        if not failures:
            made.number, self._recordings = self._recordings, self._recordings + 1
            return made
        if mine is None:
            made.close()
        rank, first = next((pair for pair in failures if pair[1].came is not Came.MORE_FOUND), failures[0])
        has_failed = mine is not None and mine.came is not Came.MORE_FOUND
        return first if has_failed else first._replace(reason=f"on rank {rank}, {first.reason}")

    def _shared(self, applying: Collection[int], flags: int) -> tuple[int, list[int]]:
        """Tell the other ranks what this one could do. Returns what all of them could: flags, numbers of recordings.

        Args:
            applying: the numbers of the recordings that apply here.
            flags: one bit for each other thing that this rank could do.
        """
        words = [flags, *[0] * WORDS]
        for number in applying:
            words[1 + number // BITS] |= 1 << number % BITS
        shared = torch.tensor(words, device="cpu")
        try:
            dist.all_reduce(shared, dist.ReduceOp.BAND, group=self._group)
        except RuntimeError as error:
            raise self._error(error) from error
        flags, *words = shared.tolist()
        return flags, [i * BITS + bit for i, word in enumerate(words) for bit in range(BITS) if word >> bit & 1]

    def launched(self, cursor: Cursor) -> None:
        """Note that this call has launched its work on the current stream."""
        if self._watchdog is None:
            self._watchdog = Watchdog(cursor.driver.event(), self._limit.total_seconds(), self._give_up)
        self._watchdog.launched(cursor.driver.order_streams(cursor.device, None))

    def _give_up(self, thread: int) -> None:
        """End the wait for a replay that takes too long: the collectives of this process, with an error in `thread`."""
        error = self._error(RuntimeError("its collectives take longer than the timeout of the default group"))
        log.critical("%s", error)
        raise_in(thread, error)  # which runs no Python code as long as it waits for the device
        torch_distributed.abort(self._groups)

    def _gathered(self, value: Any) -> list[tuple[int, Any]]:
        """The `value` of each rank."""
        values: list[Any] = [None] * len(self._members)
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise self._error(error) from error
        return [*zip(self._members, values, strict=True)]

    def _first(self, value: Any) -> tuple[int, Any]:
        """The first rank whose `value` is not None, and that value."""
        return next((rank, each) for rank, each in self._gathered(value) if each is not None)

    def _error(self, error: Exception) -> RanksError:
        """What to raise if an exchange failed. Ranks that live all come here, and leave a sign in the store."""
        me = dist.get_rank()
        try:
            store, signs = torch_distributed.default_store(), f"cudagraph/{self._name}/{self._calls}"
            store.set(f"{signs}/{me}", "")
            missing = []
            for rank in self._members:
                try:
                    store.wait([f"{signs}/{rank}"], datetime.timedelta(seconds=SIGNS_OF_LIFE_S))
                except RuntimeError:
                    missing.append(rank)
            who = f"rank {', '.join(map(str, missing))} did not come to it" if missing else "all ranks are there"
        except RuntimeError:
            who = "the store of the default group, which its first rank keeps, is gone"
        return RanksError(
            f"{self._name}: the ranks can't run call {self._calls} after the first together: on rank {me} "
            f"{str(error).splitlines()[0][:200]}; {who}. All ranks must call a step equally often; look for the error "
            "of the rank that ended"
        )


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
