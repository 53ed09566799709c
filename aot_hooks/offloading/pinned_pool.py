"""A pool of the host memory that offloaded tensors wait in: blocks are allocated once and leased again and again.

      lease(n) --> block of a fitting size: one that was returned, or a new one while `limit` allows
         |
         v
      uint8[n] --view--> the host tensor that crosses        the block returns when the last view of it dies,
                         to the backward                     wherever that is: autograd, a graph's frame, the user

A block for a CUDA device is pinned (page-locked). Where pinning fails the lease is refused; pageable memory never
replaces it. The storage of a lease owns a small object, and the block is free when that object dies.

Each replay of a CUDA graph writes to the blocks that its capture leased. In a capture by `cudagraph`, a block belongs
to that tree of recordings until they are gone. It is leased again in captures of the same tree whose path does not hold
it. Other captures do not report their end, so their blocks stay theirs until `reset`.
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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from cudagraph import Capture

_PAGE = mmap.PAGESIZE
_WASTE = 1.125  # a block may be larger than the requested bytes by this factor
_SPARE = 1.5  # without a limit, the pool may hold this many times the most bytes that were in use at once
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


@dataclass(eq=False)
class Block:
    """A piece of host memory, page-locked for CUDA if `pinned`."""

    memory: mmap.mmap
    address: int
    capacity: int  # bytes, whole pages
    pinned: bool
    event: Any = None  # the last copy from or to it, outside of captures
    requested: int = 0  # bytes of its last lease
    leases: int = 0  # how many are alive; those of one tree's recordings may overlap
    owner: Callable[[], object | None] | None = None  # lives as long as CUDA graphs that write to it in each replay
    replayed: bool = False  # a replay may still write to it, which `event` does not cover
    free_on_return: bool = False  # `reset` wants it freed as soon as nobody uses it


class _Blocks(dict[int, Block]):
    """Blocks by address, as they came, with totals. A step leases hundreds, so nothing here counts them each."""

    def __init__(self) -> None:
        super().__init__()
        self._of_size: dict[tuple[int, bool], dict[int, Block]] = {}  # likewise, by capacity and whether it is pinned
        self.bytes = 0  # of whole blocks
        self.requested_bytes = 0  # of their leases, in pages

    def add(self, block: Block) -> None:
        self[block.address] = block
        self._of_size.setdefault((block.capacity, block.pinned), {})[block.address] = block
        self.bytes += block.capacity
        self.requested_bytes += _in_pages(block.requested)

    def remove(self, block: Block) -> None:
        del self[block.address]
        del self._of_size[block.capacity, block.pinned][block.address]
        self.bytes -= block.capacity
        self.requested_bytes -= _in_pages(block.requested)

    def pop_first(self) -> Block:
        block = next(iter(self.values()))
        self.remove(block)
        return block

    def of_size(self, capacity: int, pinned: bool) -> Block | None:
        """The first block of exactly `capacity` bytes."""
        return next(iter(self._of_size.get((capacity, pinned), {}).values()), None)


class HostPool:
    """See the module. Thread-safe; blocks may return from any thread, even from within the garbage collector."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._free = _Blocks()
        self._used = _Blocks()  # leased, or of CUDA graphs
        self._owned: dict[int, Block] = {}  # those of CUDA graphs, by address
        # Returned blocks, appended without the lock: a garbage collection may run in a thread that holds it.
        self._returned: collections.deque[Block] = collections.deque()
        self._to_free: list[Block] = []  # returned blocks that wait to be freed
        self.made_count = self.peak_bytes = self._most_in_use = 0

    @property
    def total_bytes(self) -> int:
        return sum(block.capacity for block in self._blocks())

    @property
    def leased_bytes(self) -> int:
        return sum(block.capacity for block in self._blocks() if block.leases)

    @property
    def block_count(self) -> int:
        return len(self._blocks())

    def _blocks(self) -> list[Block]:
        with self._lock:
            self._collect()
            return [*self._used.values(), *self._free.values()]

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
            limit: most bytes that the pool may hold in all, this lease included; None for no limit.
            captured: a CUDA graph is being captured: no memory is allocated or freed now.
            capture: that capture, if it is one of `cudagraph`. Any other graph owns the block until `reset`.
        """
        with self._lock:
            self._collect(captured)
            room = math.inf if limit is None else limit - self._used.bytes
            close = max(nbytes * _WASTE, _PAGE)
            if captured:
                own = self._blocks_of(capture, pinned)
                block = _smallest(own, nbytes, close) or self._take_free(nbytes, pinned, min(room, close), captured)
                block = block or _smallest(own, nbytes) or self._take_free(nbytes, pinned, room, captured)
            else:
                block = self._take_free(nbytes, pinned, min(room, close))
                if block is None and self._total() + _in_pages(nbytes) > self._most_bytes(nbytes, limit):
                    # others would be freed for a new block: waste space, pinning another block costs more
                    block = self._take_free(nbytes, pinned, room if limit is None else min(room, 2 * nbytes))
                block = block or self._make(nbytes, pinned, limit, room) or self._take_free(nbytes, pinned, room)
            if block is None:
                return None
            if capture is not None:
                capture.lend(block.address)
            if captured:
                # other captures do not report their end: an owner that is never None
                block.owner = object if capture is None else weakref.ref(capture.owner)
                self._owned[block.address] = block
            if block.address in self._used:
                self._used.remove(block)  # comes again with other bytes
            block.leases += 1
            block.requested = nbytes
            self._used.add(block)
            self.peak_bytes = max(self.peak_bytes, self._total())
        raw = (ctypes.c_ubyte * nbytes).from_address(block.address)
        weakref.finalize(raw, self._returned.append, block).atexit = False
        return torch.frombuffer(raw, dtype=torch.uint8)

    def block_of(self, host: torch.Tensor) -> Block | None:
        """The block that `host` begins; None if it is other memory."""
        return self._used.get(host.data_ptr())

    def reset(self) -> None:
        """Free all unused blocks now, and leased ones when they return.

        This includes the blocks of CUDA graphs, which must not be replayed any more.
        """
        with self._lock:
            self._collect()
            for block in [*self._used.values()]:
                block.free_on_return = True
                if block.owner is not None:
                    self._disown(block)
            self._to_free += self._free.values()
            self._free = _Blocks()
            self._collect()
            self.made_count = self._most_in_use = 0
            self.peak_bytes = self._total()

    def _total(self) -> int:
        return self._used.bytes + self._free.bytes

    def _collect(self, captured: bool = False) -> None:
        """Process the returned blocks, and those whose CUDA graphs are gone."""
        while self._returned:
            block = self._returned.popleft()
            block.leases -= 1
            self._release(block)
        for block in [*self._owned.values()]:
            if block.owner is not None and block.owner() is None:
                self._disown(block)
        while self._to_free and not captured:
            self._free_memory(self._to_free.pop())

    def _disown(self, block: Block) -> None:
        block.owner, block.replayed = None, True
        del self._owned[block.address]
        self._release(block)

    def _release(self, block: Block) -> None:
        """Make `block` free if nobody uses it any more."""
        if not block.leases and block.owner is None:
            self._used.remove(block)
            if block.free_on_return:
                self._to_free.append(block)
            else:
                self._free.add(block)

    def _free_memory(self, block: Block) -> None:
        self._await_replays(block)
        if block.event is not None:
            block.event.synchronize()  # a copy may still be in flight
        if block.pinned:
            error = int(torch.cuda.cudart().cudaHostUnregister(block.address))
            if error:
                raise RuntimeError(f"cudaHostUnregister of {block.capacity} bytes failed with CUDA error {error}")
        block.memory.close()

    def _await_replays(self, block: Block) -> None:
        """Wait for replays on the host: one may still run when its graph is gone, and it records no event."""
        if not block.replayed:
            return
        if block.pinned:
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)
        for other in (block, *self._to_free, *self._free.values(), *self._used.values()):
            if other.owner is None:
                other.replayed = False

    def _blocks_of(self, capture: Capture | None, pinned: bool) -> list[Block]:
        """The blocks of the tree of `capture` that its path does not hold at this point."""
        if capture is None:
            return []
        busy = capture.held | capture.lent
        own = [b for b in self._owned.values() if b.owner is not None and b.owner() is capture.owner]
        return [b for b in own if b.pinned == pinned and b.address not in busy]

    def _take_free(self, nbytes: int, pinned: bool, most: float, captured: bool = False) -> Block | None:
        """Takes the smallest free block of `nbytes` to `most`; in a capture only one that needs no waiting."""
        block = self._free.of_size(_in_pages(nbytes), pinned) if _in_pages(nbytes) <= most else None
        if block is None or (captured and block.replayed):
            fitting = (b for b in self._free.values() if b.pinned == pinned and not (captured and b.replayed))
            block = _smallest(fitting, nbytes, most)
        if block is not None:
            self._free.remove(block)
            self._await_replays(block)
        return block

    def _most_bytes(self, nbytes: int, limit: int | None) -> float:
        """Bytes that the pool may hold when `nbytes` more are leased. Notes the most bytes that were ever in use."""
        if limit is not None:
            return limit
        self._most_in_use = max(self._most_in_use, self._used.requested_bytes + _in_pages(nbytes))
        return self._most_in_use * _SPARE  # without a bound, sizes that vary would leave a block for each size

    def _make(self, nbytes: int, pinned: bool, limit: int | None, room: float) -> Block | None:
        """A new block of at most `room` bytes, or None. Frees unused ones to stay in the limit, or if memory is out."""
        capacity = _in_pages(nbytes)
        if capacity > room:
            return None
        most = self._most_bytes(nbytes, limit)
        while self._free and self._total() + capacity > most:
            self._free_memory(self._free.pop_first())  # the one that has been free for longest
        block = _allocate(capacity, pinned)
        while block is None and self._free:
            self._free_memory(self._free.pop_first())
            block = _allocate(capacity, pinned)
        self.made_count += block is not None
        return block


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _smallest(blocks: Iterable[Block], nbytes: int, most: float = math.inf) -> Block | None:
    """The smallest of `blocks` with a capacity from `nbytes` to `most`."""
    return min((b for b in blocks if nbytes <= b.capacity <= most), key=lambda b: b.capacity, default=None)


def _allocate(capacity: int, pinned: bool) -> Block | None:
    """A block of new host memory, pinned or not; None if there is none."""
    try:
        # shared, because copy-on-write after a fork would move the pages that the device writes
        memory = mmap.mmap(-1, capacity)
    except OSError:
        return None
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if pinned and not _pin(address, capacity):
        memory.close()
        return None
    return Block(memory, address, capacity, pinned)


def _pin(address: int, nbytes: int) -> bool:
    """Pin host memory, for copies from any device. False if CUDA refuses."""
    if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE)) == 0:
        return True
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # the next launch reports the error again: let it be this one
    return False
