"""How much has to be reserved for a trace of allocations: by CUDA's caching allocator, and with every lifetime known.

    [(bytes, number), (None, number), ...]      a block is allocated, and freed
        -> CachingAllocator                     best fit in segments, split and merged as in CUDACachingAllocator.cpp
        -> placed                               each block at the lowest place that stays free for its life

Sizes of the allocator (small up to 1 MiB, segments of 2 and 20 MiB and multiples of 2 MiB) are divided by `scale`, for
programs that were made smaller by it. Stream, device and rounding of sizes by settings are left out.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

__all__ = ["CachingAllocator", "Trace", "live_peak", "placed"]

Trace = Sequence[tuple[int | None, int]]
MIB = 1 << 20
APART = 1 << 50  # between the addresses of segments


@dataclasses.dataclass
class Block:
    nbytes: int
    segment: int
    small: bool
    free: bool = False


class CachingAllocator:
    """The blocks of one pool on one stream.

    Attributes:
        reserved: bytes of all segments.
        blocks: by address.
    """

    def __init__(self, *, expandable: bool = False, scale: int = 1) -> None:
        self.expandable = expandable
        self.smallest = max(512 // scale, 1)
        self.small_limit, self.small_segment, self.round_segment = (n * MIB // scale for n in (1, 2, 2))
        self.large_segment, self.own_segment_limit = 20 * MIB // scale, 10 * MIB // scale
        self.blocks: dict[int, Block] = {}
        self.by_end: dict[int, int] = {}  # addresses of blocks
        self.free: dict[bool, list[tuple[int, int]]] = {
            True: [],
            False: [],
        }  # (bytes, address), of small ones and large
        self.segments: dict[int, int] = {}  # bytes by address
        self.growing: dict[bool, int] = {}  # the segment that grows, if segments do
        self.reserved = 0

    def run(self, trace: Trace) -> CachingAllocator:
        at: dict[int, int] = {}
        for nbytes, number in trace:
            if nbytes is None:
                self.release(at.pop(number))
            else:
                at[number] = self.allocate(nbytes)
        return self

    def allocate(self, nbytes: int) -> int:
        """The address of a block for it."""
        nbytes = -(-nbytes // self.smallest) * self.smallest
        small = nbytes <= self.small_limit
        address = self._best_fit(nbytes, small)
        if address is None:
            address = self._grow(nbytes, small) if self.expandable else self._open(nbytes, small)
        self._take(address)
        block = self.blocks[address]
        rest = block.nbytes - nbytes
        if rest >= self.smallest if small or self.expandable else rest > self.small_limit:
            block.nbytes = nbytes
            self._put(address + nbytes, rest, block.segment, small)
            self.by_end[address + nbytes] = address
        return address

    def release(self, address: int) -> None:
        block = self.blocks.pop(address)
        nbytes = block.nbytes
        following = self.blocks.get(address + nbytes)
        if following is not None and following.free:
            self._take(address + nbytes)
            nbytes += self.blocks.pop(address + nbytes).nbytes
        before = self.by_end.get(address)
        if before is not None and self.blocks[before].free:
            self._take(before)
            nbytes += self.blocks.pop(before).nbytes
            del self.by_end[address]
            address = before
        self._put(address, nbytes, block.segment, block.small)

    def _best_fit(self, nbytes: int, small: bool) -> int | None:
        free = self.free[small]
        i = bisect.bisect_left(free, (nbytes, 0))
        if self.expandable and i + 1 < len(free) and self._is_last(*free[i]):
            i += 1  # what can grow counts as large as it could become
        return free[i][1] if i < len(free) else None

    def _is_last(self, nbytes: int, address: int) -> bool:
        segment = self.blocks[address].segment
        return address + nbytes == segment + self.segments[segment]

    def _open(self, nbytes: int, small: bool) -> int:
        if small:
            size = self.small_segment
        elif nbytes < self.own_segment_limit:
            size = self.large_segment
        else:
            size = -(-nbytes // self.round_segment) * self.round_segment
        address = (len(self.segments) + 1) * APART
        self.segments[address] = size
        self.reserved += size
        self._put(address, size, address, small)
        return address

    def _grow(self, nbytes: int, small: bool) -> int:
        unit = self.small_segment if small else self.large_segment
        if small not in self.growing:
            self.growing[small] = (len(self.segments) + 1) * APART
            self.segments[self.growing[small]] = 0
        segment = self.growing[small]
        end = segment + self.segments[segment]
        address, there = end, 0
        last = self.by_end.get(end)
        if last is not None and self.blocks[last].free:
            self._take(last)
            address, there = last, self.blocks.pop(last).nbytes
            del self.by_end[end]
        size = -(-(nbytes - there) // unit) * unit
        self.segments[segment] += size
        self.reserved += size
        self._put(address, there + size, segment, small)
        return address

    def _put(self, address: int, nbytes: int, segment: int, small: bool) -> None:
        self.blocks[address] = Block(nbytes, segment, small, free=True)
        self.by_end[address + nbytes] = address
        bisect.insort(self.free[small], (nbytes, address))

    def _take(self, address: int) -> None:
        block = self.blocks[address]
        block.free = False
        free = self.free[block.small]
        del free[bisect.bisect_left(free, (block.nbytes, address))]


def lives(trace: Trace) -> dict[int, tuple[int, int, int]]:
    """(bytes, from, until) of each block."""
    found: dict[int, tuple[int, int, int]] = {}
    for now, (nbytes, number) in enumerate(trace):
        if nbytes is None:
            found[number] = (*found[number][:2], now)
        else:
            found[number] = (nbytes, now, len(trace))
    return found


def live_peak(trace: Trace) -> int:
    """The most bytes that are allocated at a time."""
    sizes = {number: nbytes for number, (nbytes, _, _) in lives(trace).items()}
    now = peak = 0
    for nbytes, number in trace:
        now += nbytes if nbytes is not None else -sizes[number]
        peak = max(peak, now)
    return peak


def placed(trace: Trace) -> int:
    """How far blocks reach that are placed the largest first."""
    done: list[tuple[int, int, int, int]] = []  # from where to where, from when until when
    for nbytes, start, end in sorted(lives(trace).values(), key=lambda life: (-life[0], life[1])):
        place = 0
        for first, last in sorted((a, b) for a, b, s, e in done if s < end and start < e):
            if first - place >= nbytes:
                break
            place = max(place, last)
        done.append((place, place + nbytes, start, end))
    return max((last for _, last, _, _ in done), default=0)
