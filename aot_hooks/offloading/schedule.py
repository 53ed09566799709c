"""When copies start and when to wait for them: a pure function of bytes and times, which knows no graph and no device.

      forward steps   |0 |1    |2  |3      |4 |          backward steps  |0    |1 |2      |3  |4   |
      item            made^ start       ^wait            item                 ^reload          ^use
      link out            [=== copy ===]                 link back             [=== copy ===]

A copy out starts when its value is made; copies run one at a time, in that order. The wait stands where the copy
should be done, with some slack, or earlier where more than `in_flight_bytes` of its kind would be in flight. A copy
back starts as late as possible: it and those needed after it are there in time even on a link slower than measured,
which gives the slack.

`schedule` takes items in the order they are made, while the stall that an item adds stays within the `max_stall_ms` of
its kind. Items that are needed again too soon stay on the device, and so do those that the compute can't hide.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

__all__ = ["Event", "Item", "Limits", "Placement", "Schedule", "Transfer", "schedule"]

_LINK = 0.95  # share of its measured speed that the link has beside the compute: kernels use the same memory
_PLANNED = 0.8  # share of that speed with which copies back are planned
_COMPUTE = 0.94  # share of its estimated time that the compute may take; copies then have to be done sooner
_SLACK_MS = 0.3


Event = tuple[int, str, int]  # the gap, what happens ("start", "wait", "reload", "use"), the item's number


@dataclass(frozen=True)
class Item:
    """A value that may be offloaded.

    Attributes:
        nbytes: bytes to copy each way.
        made: the forward step that makes it; -1 if it exists before the first.
        used: the first backward step that reads it.
        kind: the index of its limits.
    """

    nbytes: int
    made: int
    used: int
    kind: int = 0


@dataclass(frozen=True)
class Limits:
    """The limits of all items of one kind together.

    Attributes:
        in_flight_bytes: most bytes started and not waited for, each way. A single item may be larger.
        max_stall_ms: how much longer they may make the step, as predicted.
    """

    in_flight_bytes: float = math.inf
    max_stall_ms: float = 0.0


@dataclass(frozen=True)
class Placement:
    """The positions of one item's copies. Gap i is before step i; the last one is after all steps.

    Attributes:
        offloaded: False if it stays on the device; only `reason` then means anything.
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
        """How much later than predicted each copy may be done without a stall."""
        return max(0.0, min(self.wait_ms - self.sent_ms, self.use_ms - self.back_ms))


@dataclass(frozen=True)
class Transfer:
    """The copies of one tensor to the host and back, as planned; or why there are none.

    Attributes:
        name: the saved tensor's.
        nbytes: bytes to copy each way.
        placement: the positions and times in the two graphs.
        start, wait, reload, use: the nodes after (start) or before which the four operators stand; "" if none.
        forward_ms, backward_ms: estimated compute of the two graphs.
        full_stall_ms: how much longer the step would get if every candidate on this device were sent.
        device: the device that it is sent from.
        max_stall_ms: the limit of the hook that sends it.
        graph: the number of its graph among several.
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
    device: str
    max_stall_ms: float
    graph: int = 0


@dataclass(frozen=True)
class Schedule:
    """Placements of all items, in their order.

    Attributes:
        forward, backward: the events of each graph, in order. A wait in a gap before a start makes room for it.
        stall_ms: how much longer the step gets, as predicted.
        full_stall_ms: how much longer it would get if only the items stayed that come back too soon.
        forward_ms, backward_ms: the compute without copies.
    """

    placements: tuple[Placement, ...]
    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
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
    limits: Sequence[Limits] = (Limits(),),
    wait_gaps: Sequence[int] | None = None,
    reload_gaps: Sequence[int] | None = None,
) -> Schedule:
    """Place the copies of `items`.

    Args:
        forward_ms, backward_ms: how long each step takes.
        to_host, to_device: bytes a second over the link; both ways at once are as fast as each alone.
        limits: the limits of each kind of items.
        wait_gaps: the gaps where waits for copies out may stand, besides the end; ascending. None: all.
        reload_gaps: the gaps where copies back may start, besides the first; ascending. None: all.
    """
    line = _Timeline(items, forward_ms, backward_ms, to_host * _LINK / 1e3, to_device * _LINK / 1e3, limits)
    if wait_gaps is not None:
        line.wait_gaps = [*wait_gaps, len(forward_ms)]
    if reload_gaps is not None:
        line.reload_gaps = sorted({0, *reload_gaps})
    order = sorted(range(len(items)), key=lambda i: items[i].made)
    soon = {i for i in order if line.too_soon(items[i])}
    wanted = [i for i in order if i not in soon]
    full = line.place(wanted)
    found = full
    left = [limit.max_stall_ms for limit in limits]  # that each kind may still add
    if full.stall_ms > min((left[items[i].kind] for i in wanted), default=0.0):
        chosen: list[int] = []
        found = line.place(chosen)
        at, count = 0, len(wanted)
        while at < len(wanted):  # a batch that fits doubles the next one
            batch = wanted[at : at + count]
            strictest = min((items[i].kind for i in batch), key=left.__getitem__)
            trial = line.place([*chosen, *batch], found.stall_ms + left[strictest])
            added = trial.stall_ms - found.stall_ms
            if added <= left[strictest]:
                chosen += batch
                found = trial
                left[strictest] -= added
            elif count > 1:
                count = (count + 1) // 2
                continue
            at += count
            count *= 2
    placements = [found.of.get(i) or Placement(False, TOO_SOON if i in soon else NO_TIME) for i in range(len(items))]
    return Schedule(
        tuple(placements),
        tuple(found.forward),
        tuple(found.backward),
        found.stall_ms,
        full.stall_ms,
        line.forward[-1],
        line.backward[-1],
    )


@dataclass
class _Found:
    """A trial: placements by item, and the events of both graphs."""

    of: dict[int, Placement] = field(default_factory=dict)
    forward: list[Event] = field(default_factory=list)
    backward: list[Event] = field(default_factory=list)

    @property
    def stall_ms(self) -> float:
        return sum(p.stall_ms for p in self.of.values())


class _Timeline:
    """The times of both graphs, and the speeds of the link both ways, in bytes a millisecond."""

    def __init__(
        self,
        items: Sequence[Item],
        forward_ms: Sequence[float],
        backward_ms: Sequence[float],
        out: float,
        back: float,
        limits: Sequence[Limits],
    ) -> None:
        self.items = items
        self.forward = list(accumulate(forward_ms, initial=0.0))  # when each gap is, without stalls
        self.backward = list(accumulate(backward_ms, initial=0.0))
        self.out, self.back = out, back
        self.in_flight_limits = [limit.in_flight_bytes for limit in limits]
        self.wait_gaps: Sequence[int] = range(len(self.forward))
        self.reload_gaps: Sequence[int] = range(len(self.backward))

    def too_soon(self, item: Item) -> bool:
        """Whether its copies take at least as long as it would be gone, on a link with nothing else to do."""
        gone = self.forward[-1] - self.forward[item.made + 1] + self.backward[item.used]
        return gone <= item.nbytes / self.out + item.nbytes / self.back

    def place(self, chosen: Sequence[int], max_stall_ms: float = math.inf) -> _Found:
        """Place `chosen`, in the order they are made. Stops after the forward if that stalls for too long already."""
        found = _Found()
        self._out(chosen, found)
        if found.stall_ms <= max_stall_ms:
            self._back(found)
        return found

    def _has_room(self, item: Item, bytes_in_flight: Sequence[int]) -> bool:
        before = bytes_in_flight[item.kind]
        return before == 0 or before + item.nbytes <= self.in_flight_limits[item.kind]

    def _out(self, chosen: Sequence[int], found: _Found) -> None:
        gaps, last = self.forward, len(self.forward) - 1
        in_flight: deque[int] = deque()
        bytes_in_flight = [0] * len(self.in_flight_limits)  # of each kind
        free_at = stalled = 0.0  # the link; the compute over its plain times

        def wait(gap: int | None = None) -> None:
            """Wait for the oldest copy: at its planned gap or, to make room, in `gap`."""
            nonlocal stalled
            i = in_flight.popleft()
            p = found.of[i]
            gap = p.wait if gap is None else gap
            now = p.start_ms + (gaps[gap] + stalled - p.start_ms) * _COMPUTE
            stall = max(0.0, p.sent_ms - now)
            stalled += stall
            bytes_in_flight[self.items[i].kind] -= self.items[i].nbytes
            found.of[i] = replace(p, wait=gap, wait_ms=gaps[gap] + stalled, stall_ms=stall)
            found.forward.append((gap, "wait", i))

        for i in chosen:
            item = self.items[i]
            gap = item.made + 1
            while in_flight and found.of[in_flight[0]].wait <= gap:
                wait()
            while not self._has_room(item, bytes_in_flight):
                wait(gap)
            took = item.nbytes / self.out
            begin = gaps[gap] + stalled
            free_at = max(begin, free_at) + took
            slack = _SLACK_MS + (1 / _COMPUTE - 1) * (free_at - begin) + (1 / _PLANNED - 1) * took
            wait_gap = min(max(bisect.bisect_left(gaps, free_at + slack - stalled), gap), last)
            wait_gap = self.wait_gaps[bisect.bisect_left(self.wait_gaps, wait_gap)]
            wait_gap = max(wait_gap, found.of[in_flight[-1]].wait if in_flight else 0)  # in order
            found.of[i] = Placement(True, start=gap, wait=wait_gap, start_ms=begin, sent_ms=free_at)
            found.forward.append((gap, "start", i))
            in_flight.append(i)
            bytes_in_flight[item.kind] += item.nbytes
        while in_flight:
            wait(max(found.of[in_flight[0]].wait, found.forward[-1][0]))

    def _back(self, found: _Found) -> None:
        order = sorted(found.of, key=lambda i: self.items[i].used)
        events = [(key, "reload", i) for i, key in self._reload_keys(order).items()]
        events += [((self.items[i].used, 1, n), "use", i) for n, i in enumerate(order)]
        gaps, stalled, free_at = self.backward, 0.0, 0.0
        for (gap, _, _), what, i in sorted(events):
            found.backward.append((gap, what, i))
            now = gaps[gap] + stalled
            p = found.of[i]
            if what == "reload":
                free_at = max(now, free_at) + self.items[i].nbytes / self.back
                found.of[i] = replace(p, reload=gap, reload_ms=now, back_ms=free_at)
            else:
                stall = max(0.0, p.back_ms - now)
                stalled += stall
                found.of[i] = replace(p, use=gap, use_ms=now + stall, stall_ms=p.stall_ms + stall)

    def _reload_keys(self, order: Sequence[int]) -> dict[int, tuple[int, int, float]]:
        """The position of each copy back, as a key to sort by among those of the uses: (gap, 1, position in `order`).

        A copy back starts as late as possible, before the uses of its gap; or after the use that makes room for it.
        """
        latest: dict[int, int] = {}
        next_start = math.inf
        for i in reversed(order):
            item = self.items[i]
            end = min(self.backward[item.used] - _SLACK_MS, next_start)
            next_start = end - item.nbytes / (self.back * _PLANNED)
            gap = max(0, bisect.bisect_right(self.backward, next_start, hi=item.used + 1) - 1)
            latest[i] = self.reload_gaps[bisect.bisect_right(self.reload_gaps, gap) - 1]
        keys: dict[int, tuple[int, int, float]] = {}
        key: tuple[int, int, float] = (0, 0, 0.0)
        in_flight: deque[tuple[int, int]] = deque()  # position and item
        bytes_in_flight = [0] * len(self.in_flight_limits)
        for n, i in enumerate(order):
            item = self.items[i]
            key = max(key, (latest[i], 0, 0.0))
            while in_flight:
                position, first = in_flight[0]
                used = (self.items[first].used, 1, float(position))
                if used > key and self._has_room(item, bytes_in_flight):
                    break
                key = max(key, (*used[:2], position + 0.5))
                in_flight.popleft()
                bytes_in_flight[self.items[first].kind] -= self.items[first].nbytes
            keys[i] = key
            in_flight.append((n, i))
            bytes_in_flight[item.kind] += item.nbytes
        return keys
