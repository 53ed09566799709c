"""When copies start and when to wait for them: a pure function of bytes and times, which knows no graph and no device.

      forward steps   |0 |1    |2  |3      |4 |          backward steps  |0    |1 |2      |3  |4   |
      item            made^ start       ^wait            item                 ^reload          ^use
      link out            [=== copy ===]                 link back             [=== copy ===]

A copy out starts when its value is made; copies run one at a time, in that order. The wait stands where the copy
should be done, with some slack, or earlier where more than `in_flight_bytes` of its kind would be in flight. A copy
back starts as late as possible: it and those needed after it are there in time even on a link slower than measured.

Items are taken in the order they are made, while the stall that one adds stays within the `max_stall_ms` of its kind.
The others stay on the device, and so do items that are needed again too soon.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

LINK = 0.95  # share of its measured speed that the link has beside the compute: kernels use the same memory
_PLANNED = 0.8  # share of that speed with which copies back are planned
_IN_ROOM = 0.5  # share of that speed with which a budget plans: a copy may take longer where there is room for it
_COMPUTE = 0.94  # share of its estimated time that the compute may take; copies then have to be done sooner
_SLACK_MS = 0.3

TOO_SOON = "back on the device too soon to be worth sending"
NO_TIME = "no compute left to hide its copies"
DECIDED_LATER = "each call decides, by the plan of its step"

CopyEvent = tuple[int, str, int]  # the gap, what happens ("start", "wait", "reload", "use"), the item's number


@dataclass(frozen=True)
class Item:
    nbytes: int  # to copy each way
    made: int  # the forward step that makes it; -1 if it exists before the first
    used: int  # the first backward step that reads it
    kind: int = 0  # the index of its limits


@dataclass(frozen=True)
class Limits:
    """The limits of all items of one kind together."""

    in_flight_bytes: float = math.inf  # started and not waited for, each way; a single item may be larger
    max_stall_ms: float = 0.0  # how much longer they may make the step, as predicted


@dataclass(frozen=True)
class Placement:
    """The positions of one item's copies. Gap i is before step i; the last one is after all steps."""

    offloaded: bool  # False if it stays on the device; only `reason` then means anything
    reason: str = ""  # why it stays
    start: int = 0  # gaps of the forward
    wait: int = 0
    reload: int = 0  # gaps of the backward
    use: int = 0
    start_ms: float = 0.0  # when the copy out starts, is done, and is waited for, from the forward's begin
    sent_ms: float = 0.0
    wait_ms: float = 0.0
    reload_ms: float = 0.0  # likewise for the copy back, from the backward's begin
    back_ms: float = 0.0
    use_ms: float = 0.0
    stall_ms: float = 0.0  # how long the two waits hold up the compute, as predicted

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
    graph: int = 0


@dataclass(frozen=True)
class Schedule:
    """Placements of all items, in their order."""

    placements: tuple[Placement, ...]
    forward: tuple[CopyEvent, ...]  # in order; a wait in a gap before a start makes room for it
    backward: tuple[CopyEvent, ...]
    stall_ms: float  # how much longer the step gets, as predicted
    full_stall_ms: float  # how much longer it would get if only the items stayed that come back too soon
    forward_ms: float  # the compute without copies
    backward_ms: float


def schedule(
    items: Sequence[Item],
    forward_ms: Sequence[float],
    backward_ms: Sequence[float],
    *,
    to_host: float,
    to_device: float,
    limits: Sequence[Limits] = (Limits(),),
    gaps: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None),
    room: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Schedule:
    """Place the copies of `items`.

    Args:
        forward_ms, backward_ms: how long each step takes.
        to_host, to_device: bytes a second over the link; both ways at once are as fast as each alone.
        limits: the limits of each kind of items.
        gaps: those where waits for copies out may stand, besides the end; those where copies back may start, besides
            the first. Ascending. None: all.
        room: in place of the bytes in flight of `limits`: the most bytes that are on their way out from each gap to the
            next, and in the backward the most that are back before their step.
    """
    line = _Timeline(
        items,
        forward=list(accumulate(forward_ms, initial=0.0)),
        backward=list(accumulate(backward_ms, initial=0.0)),
        out=to_host * LINK / 1e3,
        back=to_device * LINK / 1e3,
        in_flight_limits=[limit.in_flight_bytes for limit in limits],
        wait_gaps=range(len(forward_ms) + 1) if gaps[0] is None else [*gaps[0], len(forward_ms)],
        reload_gaps=range(len(backward_ms) + 1) if gaps[1] is None else sorted({0, *gaps[1]}),
        room=room,
    )
    order = sorted(range(len(items)), key=lambda i: items[i].made)
    wanted = [i for i in order if room is not None or not line.too_soon(items[i])]
    full = found = line.place(wanted)
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
    reasons = dict.fromkeys(order, TOO_SOON) | dict.fromkeys(wanted, NO_TIME)
    placements = [found.of.get(i) or Placement(False, reasons[i]) for i in range(len(items))]
    events = tuple(found.forward), tuple(found.backward)
    compute_ms = line.forward[-1], line.backward[-1]
    return Schedule(tuple(placements), *events, found.stall_ms, full.stall_ms, *compute_ms)


@dataclass
class _Found:
    """A trial: placements by item, and the events of both graphs."""

    of: dict[int, Placement] = field(default_factory=dict)
    forward: list[CopyEvent] = field(default_factory=list)
    backward: list[CopyEvent] = field(default_factory=list)

    @property
    def stall_ms(self) -> float:
        return sum(p.stall_ms for p in self.of.values())


@dataclass(frozen=True)
class _Timeline:
    """The times of both graphs, and the speeds of the link both ways, in bytes a millisecond."""

    items: Sequence[Item]
    forward: list[float]  # when each gap is, without stalls
    backward: list[float]
    out: float
    back: float
    in_flight_limits: list[float]
    wait_gaps: Sequence[int]
    reload_gaps: Sequence[int]
    room: tuple[Sequence[float], Sequence[float]] | None = None

    def too_soon(self, item: Item) -> bool:
        """Whether the copies of `item` take at least as long as it could be away, on a link with nothing else to do."""
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
        """Place the copies out of `chosen`: each starts when its item is made, and waits where it should be done."""
        gaps, last = self.forward, len(self.forward) - 1
        in_flight: deque[int] = deque()
        bytes_in_flight = [0] * len(self.in_flight_limits)  # of each kind
        free_at = late_at = 0.0  # when the link is free: at its speed, and at that with which a budget plans
        stalled = 0.0  # how much later than without copies the compute is

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

        def drain(gaps: range) -> None:
            """Wait for the copies that are planned to end in `gaps`; with `room` also for what has none there."""
            for gap in gaps if self.room is not None else gaps[-1:]:  # without `room` only the last gap counts
                while in_flight and found.of[in_flight[0]].wait <= gap:
                    wait()
                while in_flight and self.room is not None and sum(bytes_in_flight) > self.room[0][gap]:
                    wait(gap)

        drained = 0
        for i in chosen:
            item = self.items[i]
            gap = item.made + 1
            drain(range(drained, gap + 1))
            drained = gap
            while self.room is None and not self._has_room(item, bytes_in_flight):
                wait(gap)
            took = item.nbytes / self.out
            begin = gaps[gap] + stalled
            free_at = max(begin, free_at) + took
            slack = _SLACK_MS + (1 / _COMPUTE - 1) * (free_at - begin) + (1 / _PLANNED - 1) * took
            if self.room is not None:
                late_at = max(begin, late_at) + took / _IN_ROOM
                slack = late_at - free_at
            wait_gap = min(max(bisect.bisect_left(gaps, free_at + slack - stalled), gap), last)
            wait_gap = self.wait_gaps[bisect.bisect_left(self.wait_gaps, wait_gap)]
            wait_gap = max(wait_gap, found.of[in_flight[-1]].wait if in_flight else 0)  # in order
            found.of[i] = Placement(True, start=gap, wait=wait_gap, start_ms=begin, sent_ms=free_at)
            found.forward.append((gap, "start", i))
            in_flight.append(i)
            bytes_in_flight[item.kind] += item.nbytes
        if self.room is not None:
            drain(range(drained, last))
        while in_flight:
            wait(max(found.of[in_flight[0]].wait, found.forward[-1][0]))

    def _back(self, found: _Found) -> None:
        """Place the copies back of the items in `found`, and add their stalls."""
        order = sorted(found.of, key=lambda i: self.items[i].used)
        events = [(key, "reload", i) for i, key in self._reload_keys(order).items()]
        events += [((self.items[i].used, 1, n), "use", i) for n, i in enumerate(order)]
        gaps, stalled, free_at = self.backward, 0.0, 0.0
        for (gap, _, _), what, i in sorted(events, key=operator.itemgetter(0)):  # for the keys see `_reload_keys`
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
            next_start = end - item.nbytes / (self.back * (_PLANNED if self.room is None else _IN_ROOM))
            gap = max(0, bisect.bisect_right(self.backward, next_start, hi=item.used + 1) - 1)
            latest[i] = self.reload_gaps[bisect.bisect_right(self.reload_gaps, gap) - 1]
        if self.room is not None:
            return self._keys_in_room(order, latest, self.room[1])
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

    def _keys_in_room(
        self, order: Sequence[int], latest: Mapping[int, int], room: Sequence[float]
    ) -> dict[int, tuple[int, int, float]]:
        """As `_reload_keys`: each copy back starts at its latest gap, or later, so that there is room until its use."""
        back = [0] * len(self.backward)  # bytes that are back early, from each gap to the next
        keys: dict[int, tuple[int, int, float]] = {}
        first = 0
        for i in order:
            item = self.items[i]
            gap = item.used
            while gap > max(first, latest[i]) and back[gap - 1] + item.nbytes <= room[gap - 1]:
                gap -= 1
            for each in range(gap, item.used):
                back[each] += item.nbytes
            first = max(first, gap)
            keys[i] = (first, 0, 0.0)
        return keys
