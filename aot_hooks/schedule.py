"""When to start and when to wait for copies: a pure function of bytes and times, which knows no graph and no device.

      forward steps   |0 |1    |2  |3      |4 |          backward steps  |0    |1 |2      |3  |4   |
      item            made^ start       ^wait            item                 ^reload          ^use
      link out            [=== copy ===]                 link back             [=== copy ===]

A copy out starts when its value is made, in that order, one at a time. It is waited for when it should be done, with
some slack, or earlier where more than `in_flight_bytes` would be under way. A copy back starts as late as it can: so
that it and those that are needed after it are there in time on a link slower than measured, which gives the slack.

`schedule` takes items in the order they are made, as long as the predicted stall stays within `max_stall_ms`; what
would be back on the device before it was worth sending stays, as does what no longer fits beside the compute.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

__all__ = ["Item", "Placement", "Schedule", "Transfer", "schedule"]

_LINK = 0.95  # of its measured speed that the link has beside the compute: kernels use the same memory
_PLANNED = 0.8  # of that, as copies back are placed: estimates of the compute are off by as much
_FORWARD = 0.95  # of the forward in which copies out have to be done, for the same reason
_SLACK_MS = 0.3


@dataclass(frozen=True)
class Item:
    """A value that may be offloaded.

    Attributes:
        nbytes: to be copied each way.
        made: the forward step that makes it; -1 if it is there before the first.
        used: the first backward step that reads it.
    """

    nbytes: int
    made: int
    used: int


@dataclass(frozen=True)
class Placement:
    """Where one item's copies stand. Gap i is before step i; the last one is after all steps.

    Attributes:
        offloaded: False: it stays on the device, and the rest says nothing.
        reason: why it stays.
        start, wait: gaps of the forward.
        reload, use: gaps of the backward.
        start_ms, sent_ms, wait_ms: when the copy out starts, is done, and is waited for, from the forward's begin.
        reload_ms, back_ms, use_ms: likewise for the copy back, from the backward's begin.
        stall_ms: how long the two waits hold up the compute, as predicted.
    """

    offloaded: bool
    reason: str = ""
    start: int = 0
    wait: int = 0
    reload: int = 0
    use: int = 0
    start_ms: float = 0.0
    sent_ms: float = 0.0
    wait_ms: float = 0.0
    reload_ms: float = 0.0
    back_ms: float = 0.0
    use_ms: float = 0.0
    stall_ms: float = 0.0

    @property
    def slack_ms(self) -> float:
        """How much later than predicted the copy that has less time may be done without a stall."""
        return max(0.0, min(self.wait_ms - self.sent_ms, self.use_ms - self.back_ms))


@dataclass(frozen=True)
class Transfer:
    """The copies of one tensor to the host and back, as planned; or why there are none.

    Attributes:
        name: the saved tensor's.
        nbytes: to be copied each way.
        placement: when, in the times of the two graphs of this plan.
        start, wait, reload, use: the nodes after (start) or before which the four operators stand; "" if none.
        forward_ms, backward_ms: estimated compute of the two graphs.
        full_stall_ms: how much longer the step would get if all tensors that `offload` was asked for were sent.
    """

    name: str
    nbytes: int
    placement: Placement
    start: str
    wait: str
    reload: str
    use: str
    forward_ms: float
    backward_ms: float
    full_stall_ms: float


@dataclass(frozen=True)
class Schedule:
    """Placements of all items, in their order.

    Attributes:
        stall_ms: how much longer the step gets, as predicted.
        full_stall_ms: how much longer it would get if nothing stayed on the device but what comes back too soon.
        forward_ms, backward_ms: the compute without copies.
    """

    placements: tuple[Placement, ...]
    stall_ms: float
    full_stall_ms: float
    forward_ms: float
    backward_ms: float


TOO_SOON = "back on the device too soon to be worth sending"
NO_TIME = "no compute left to hide its copies"


def schedule(
    items: Sequence[Item],
    forward_ms: Sequence[float],
    backward_ms: Sequence[float],
    *,
    to_host: float,
    to_device: float,
    in_flight_bytes: float = math.inf,
    max_stall_ms: float = 0.0,
) -> Schedule:
    """Place the copies of `items`.

    Args:
        forward_ms, backward_ms: how long each step takes.
        to_host, to_device: bytes a second over the link; both ways at once are as fast as each alone.
        in_flight_bytes: most bytes started and not waited for, each way. One item alone may be larger.
        max_stall_ms: how much longer the step may get, as predicted.
    """
    line = _Line(items, forward_ms, backward_ms, to_host * _LINK / 1e3, to_device * _LINK / 1e3, in_flight_bytes)
    order = sorted(range(len(items)), key=lambda i: items[i].made)
    soon = [i for i in order if line.too_soon(items[i])]
    wanted = [i for i in order if i not in set(soon)]
    full = line.place(wanted)
    chosen, found = wanted, full
    if _stall(full) > max_stall_ms:
        chosen, found = [], {}
        for i in wanted:
            trial = line.place([*chosen, i])
            if _stall(trial) <= max_stall_ms:
                chosen, found = [*chosen, i], trial
    placements = [found.get(i) or Placement(False, TOO_SOON if i in set(soon) else NO_TIME) for i in range(len(items))]
    return Schedule(tuple(placements), _stall(found), _stall(full), line.forward[-1], line.backward[-1])


def _stall(placements: dict[int, Placement]) -> float:
    return sum(p.stall_ms for p in placements.values())


class _Line:
    """The times of both graphs and the speeds of both ways, in bytes a millisecond."""

    def __init__(
        self,
        items: Sequence[Item],
        forward_ms: Sequence[float],
        backward_ms: Sequence[float],
        out: float,
        back: float,
        in_flight: float,
    ) -> None:
        self.items = items
        self.forward = list(accumulate(forward_ms, initial=0.0))  # when each gap is, without stalls
        self.backward = list(accumulate(backward_ms, initial=0.0))
        self.out, self.back, self.in_flight = out, back, in_flight

    def too_soon(self, item: Item) -> bool:
        """Whether it would be gone for no longer than its copies take, if the link had nothing else to do."""
        gone = self.forward[-1] - self.forward[item.made + 1] + self.backward[item.used]
        return gone <= item.nbytes / self.out + item.nbytes / self.back

    def place(self, chosen: Sequence[int]) -> dict[int, Placement]:
        """The placements of `chosen`, which are in the order they are made."""
        found = self._out(chosen)
        return self._back(found)

    def _out(self, chosen: Sequence[int]) -> dict[int, Placement]:
        gaps, last = self.forward, len(self.forward) - 1
        found: dict[int, Placement] = {}
        under_way: deque[int] = deque()
        free_at = stalled = 0.0  # the link; the compute over its plain times

        def wait(i: int, gap: int) -> None:
            nonlocal stalled
            p = found[i]
            # the last gap counts as somewhat earlier than it is estimated to be
            now = gaps[gap] * (_FORWARD if gap == last else 1.0) + stalled
            stall = max(0.0, p.sent_ms - now)
            stalled += stall
            found[i] = replace(p, wait=gap, wait_ms=gaps[gap] + stalled, stall_ms=stall)

        for i in chosen:
            item = self.items[i]
            gap = item.made + 1
            while under_way and found[under_way[0]].wait <= gap:
                first = under_way.popleft()
                wait(first, found[first].wait)
            while under_way and sum(self.items[j].nbytes for j in under_way) + item.nbytes > self.in_flight:
                wait(under_way.popleft(), gap)
            begin = max(gaps[gap] + stalled, free_at)
            took = item.nbytes / self.out
            free_at = begin + took
            slack = _SLACK_MS + (1 / _PLANNED - 1) * took
            due = min(max(bisect.bisect_left(gaps, free_at + slack - stalled), gap), last)
            found[i] = Placement(True, start=gap, wait=due, start_ms=gaps[gap] + stalled, sent_ms=free_at)
            under_way.append(i)
        for i in under_way:
            wait(i, found[i].wait)
        return found

    def _back(self, found: dict[int, Placement]) -> dict[int, Placement]:
        order = sorted(found, key=lambda i: self.items[i].used)
        reload = self._reload_gaps(order)
        gaps, stalled, free_at = self.backward, 0.0, 0.0
        issued, done = {}, {}
        # a copy that starts in the gap of a wait starts before it
        events = sorted(
            [(reload[i], 0, n, i) for n, i in enumerate(order)]
            + [(self.items[i].used, 1, n, i) for n, i in enumerate(order)]
        )
        for gap, is_use, _, i in events:
            now = gaps[gap] + stalled
            if not is_use:
                issued[i] = now
                free_at = max(now, free_at) + self.items[i].nbytes / self.back
                done[i] = free_at
                continue
            stall = max(0.0, done[i] - now)
            stalled += stall
            p = found[i]
            found[i] = replace(
                p,
                reload=reload[i],
                use=gap,
                reload_ms=issued[i],
                back_ms=done[i],
                use_ms=now + stall,
                stall_ms=p.stall_ms + stall,
            )
        return found

    def _reload_gaps(self, order: Sequence[int]) -> dict[int, int]:
        """As late as each may start, then as late as the bytes under way demand."""
        latest: dict[int, int] = {}
        next_start = math.inf
        for i in reversed(order):
            item = self.items[i]
            end = min(self.backward[item.used] - _SLACK_MS, next_start)
            next_start = end - item.nbytes / (self.back * _PLANNED)
            latest[i] = max(0, bisect.bisect_right(self.backward, next_start, hi=item.used + 1) - 1)
        under_way: deque[int] = deque()
        for i in order:
            item = self.items[i]
            while under_way and self.items[under_way[0]].used <= latest[i]:
                under_way.popleft()
            while under_way and sum(self.items[j].nbytes for j in under_way) + item.nbytes > self.in_flight:
                latest[i] = max(latest[i], self.items[under_way.popleft()].used)
            under_way.append(i)
        return latest
