"""Host memory that offloaded tensors wait in: blocks that are made once and leased again and again.

      lease(n) --> block of a fitting size: one that came back, or a new one while `limit` allows
         |
         v
      uint8[n] --view--> what crosses to the backward        the block comes back when the last view of it dies,
                                                             wherever that is: autograd, a graph's frame, the user

A block for a CUDA device is pinned (page-locked), or there is none: where pinning fails the lease is refused, never
made of pageable memory. The storage of a lease holds a small object whose end is the sign that the block is free; no
use counts are read.

Each replay of a CUDA graph writes to what its capture leased. A block that was leased in a capture by `cudagraph`
belongs to that tree of recordings until they are gone, and is leased again in a capture where the tree's path does not
hold it. Of other captures nobody tells when they are gone: what they leased is theirs until `reset`.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from cudagraph import Capture

__all__ = ["Block", "HostPool"]

_PAGE = mmap.PAGESIZE
_WASTE = 1.125  # a block may be that many times larger than what is asked for
_SPARE = 1.5  # of the most bytes in use at once that the pool may hold without a limit
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


@dataclass(eq=False)
class Block:
    """A piece of host memory.

    Attributes:
        capacity: its bytes, whole pages.
        pinned: page-locked for CUDA.
        event: the last copy from or to it, outside of captures; None if there was none.
        events: by device and direction, to record again.
        asked: bytes of its last lease.
        leases: how many of it are alive; those of one tree's recordings may overlap.
        owner: lives as long as the CUDA graphs that write to it in each replay; None if there are none.
        replayed: a replay may still write to it, and `event` does not tell.
    """

    memory: mmap.mmap
    address: int
    capacity: int
    pinned: bool
    event: Any = None
    events: dict[Any, Any] = field(default_factory=dict)
    asked: int = 0
    leases: int = 0
    owner: Callable[[], object | None] | None = None
    replayed: bool = False


def _for_good() -> object:
    """The owner of blocks of captures that nobody tells the end of."""
    return HostPool


class HostPool:
    """See the module. Thread-safe; returns may come from any thread, also from the garbage collector."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._free: list[Block] = []
        self._used: dict[int, Block] = {}  # by address: leased, or of CUDA graphs
        self._returned: collections.deque[Block] = collections.deque()  # without the lock: a collector may hold it
        self._owned: set[int] = set()  # addresses of blocks of CUDA graphs
        self._condemned: set[int] = set()  # addresses of leased blocks that are to go when they come back
        self._doomed: list[Block] = []  # came back and are to go
        self.made_count = 0
        self.peak_bytes = 0
        self._most_in_use = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks, in use or free."""
        with self._lock:
            self._collect()
            return self._total()

    @property
    def leased_bytes(self) -> int:
        with self._lock:
            self._collect()
            return sum(block.capacity for block in self._used.values() if block.leases)

    @property
    def block_count(self) -> int:
        with self._lock:
            self._collect()
            return len(self._free) + len(self._used)

    def lease(
        self,
        nbytes: int,
        *,
        pinned: bool,
        limit: int | None = None,
        captured: bool = False,
        capture: Capture | None = None,
    ) -> torch.Tensor | None:
        """uint8[nbytes] of a block, or None if there is no room for it.

        Args:
            nbytes: at least 1.
            pinned: for copies from and to a CUDA device.
            limit: most bytes that the pool may have for it, those of all others included; None for no limit.
            captured: a CUDA graph is being captured: nothing is made or given back now.
            capture: that capture, if it is one of `cudagraph`; else the block is the graph's for good.
        """
        with self._lock:
            self._collect(captured)
            room = float("inf") if limit is None else limit - self._in_use()
            close = max(nbytes * _WASTE, _PAGE)
            if captured:
                own = self._of(capture, pinned)
                block = _smallest(own, nbytes, close) or self._fitting(nbytes, pinned, min(room, close), captured)
                block = block or _smallest(own, nbytes) or self._fitting(nbytes, pinned, room, captured)
            else:
                block = self._fitting(nbytes, pinned, min(room, close))
                if block is None and not self._fits_beside(nbytes, limit):  # pinning takes longer than space is worth
                    block = self._fitting(nbytes, pinned, room if limit is None else min(room, 2 * nbytes))
                block = block or self._make(nbytes, pinned, limit, room) or self._fitting(nbytes, pinned, room)
            if block is None:
                return None
            if capture is not None:
                capture.lend(block.address)
            if captured:
                block.owner = _for_good if capture is None else weakref.ref(capture.owner)
                self._owned.add(block.address)
            block.leases += 1
            block.asked = nbytes
            self._used[block.address] = block
            self.peak_bytes = max(self.peak_bytes, self._total())
        raw = (ctypes.c_ubyte * nbytes).from_address(block.address)
        weakref.finalize(raw, self._returned.append, block).atexit = False
        return torch.frombuffer(raw, dtype=torch.uint8)

    def block_of(self, host: torch.Tensor) -> Block | None:
        """The block that `host` begins; None if it is other memory."""
        return self._used.get(host.data_ptr())

    def reset(self) -> None:
        """Give all free blocks back to the system now, and the leased ones when they come back; also those of CUDA
        graphs, which must not be replayed any more."""
        with self._lock:
            self._collect()
            self._condemned.update(self._used)
            self._disown([self._used[address] for address in self._owned])
            self._doomed += self._free
            self._free.clear()
            self._discard_doomed()
            self.made_count = self._most_in_use = 0
            self.peak_bytes = self._total()

    def _in_use(self) -> int:
        return sum(block.capacity for block in self._used.values())

    def _total(self) -> int:
        return self._in_use() + sum(block.capacity for block in self._free)

    def _collect(self, captured: bool = False) -> None:
        """See what came back. In a capture nothing is given back."""
        while self._returned:
            block = self._returned.popleft()
            block.leases -= 1
            self._release(block)
        owned = [self._used[address] for address in self._owned]
        self._disown([block for block in owned if block.owner is not None and block.owner() is None])
        if not captured:
            self._discard_doomed()

    def _disown(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.owner, block.replayed = None, True
            self._owned.discard(block.address)
            self._release(block)

    def _release(self, block: Block) -> None:
        """Make `block` free if nobody uses it any more."""
        if block.leases or block.owner is not None:
            return
        del self._used[block.address]
        (self._doomed if block.address in self._condemned else self._free).append(block)
        self._condemned.discard(block.address)

    def _discard_doomed(self) -> None:
        while self._doomed:
            self._discard(self._doomed.pop())

    def _discard(self, block: Block) -> None:
        self._await_replays(block)
        _give_back(block)

    def _await_replays(self, block: Block) -> None:
        """A replay may run still when its graph is gone, and no event tells of it."""
        if not block.replayed:
            return
        if block.pinned:
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)
        for other in (block, *self._doomed, *self._free, *self._used.values()):
            if other.owner is None:
                other.replayed = False

    def _of(self, capture: Capture | None, pinned: bool) -> list[Block]:
        """Blocks of the tree of `capture` that its path does not hold here."""
        if capture is None:
            return []
        busy = capture.held | capture.lent
        return [
            block
            for block in map(self._used.__getitem__, self._owned)
            if block.owner is not None
            and block.owner() is capture.owner
            and block.pinned == pinned
            and block.address not in busy
        ]

    def _fitting(self, nbytes: int, pinned: bool, most: float, captured: bool = False) -> Block | None:
        """A free block, to be used; in a capture none that would have to be waited for."""
        blocks = [b for b in self._free if b.pinned == pinned and not (captured and b.replayed)]
        block = _smallest(blocks, nbytes, most)
        if block is not None:
            self._free.remove(block)
            self._await_replays(block)
        return block

    def _most(self, nbytes: int, limit: int | None) -> float:
        """Bytes that the pool may have when `nbytes` more are leased."""
        if limit is not None:
            return limit
        asked = sum(_in_pages(block.asked) for block in self._used.values())
        self._most_in_use = max(self._most_in_use, asked + _in_pages(nbytes))
        return self._most_in_use * _SPARE  # sizes that vary from step to step must not leave a block for each

    def _fits_beside(self, nbytes: int, limit: int | None) -> bool:
        """Whether a block can be made without giving others back."""
        return self._total() + _in_pages(nbytes) <= self._most(nbytes, limit)

    def _make(self, nbytes: int, pinned: bool, limit: int | None, room: float) -> Block | None:
        capacity = _in_pages(nbytes)
        if capacity > room:
            return None
        most = self._most(nbytes, limit)
        while self._free and self._total() + capacity > most:
            self._discard(self._free.pop(0))  # the one that has been free for longest
        block = _made(capacity, pinned)
        while block is None and self._free:
            self._discard(self._free.pop(0))
            block = _made(capacity, pinned)
        self.made_count += block is not None
        return block


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _smallest(blocks: Iterable[Block], nbytes: int, most: float = math.inf) -> Block | None:
    """The smallest of `blocks` that takes `nbytes` and is no larger than `most`."""
    return min((b for b in blocks if nbytes <= b.capacity <= most), key=lambda b: b.capacity, default=None)


def _made(capacity: int, pinned: bool) -> Block | None:
    try:
        memory = mmap.mmap(-1, capacity)  # shared, so that a fork leaves the pages where the device writes
    except OSError:
        return None
    address = _address(memory)
    if pinned and not _pin(address, capacity):
        memory.close()
        return None
    return Block(memory, address, capacity, pinned)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _pin(address: int, nbytes: int) -> bool:
    if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE)) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # CUDA tells of the error once more at the next launch: let it be this one
    return False


def _give_back(block: Block) -> None:
    if block.event is not None:
        block.event.synchronize()  # a copy may be on its way still
    if block.pinned:
        error = int(torch.cuda.cudart().cudaHostUnregister(block.address))
        if error:
            raise RuntimeError(f"cudaHostUnregister of {block.capacity} bytes failed with CUDA error {error}")
    block.memory.close()
