"""Host memory that offloaded tensors wait in: blocks that are made once and leased again and again.

      lease(n) --> block of a fitting size: one that came back, or a new one while `limit` allows
         |
         v
      uint8[n] --view--> what crosses to the backward        the block comes back when the last view of it dies,
                                                             wherever that is: autograd, a graph's frame, the user

A block for a CUDA device is pinned (page-locked), or there is none: where pinning fails the lease is refused, never
made of pageable memory. A lease made while a CUDA graph is being captured is for good, as each replay writes to it. The
storage of a lease holds a small object whose end is the sign that the block is free; no use counts are read.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import mmap
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

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
        captured: a CUDA graph writes to it in each replay.
    """

    memory: mmap.mmap
    address: int
    capacity: int
    pinned: bool
    event: Any = None
    events: dict[Any, Any] = field(default_factory=dict)
    captured: bool = False


class HostPool:
    """See the module. Thread-safe; returns may come from any thread, also from the garbage collector."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._free: list[Block] = []
        self._leased: dict[int, Block] = {}  # by address
        self._returned: collections.deque[Block] = collections.deque()  # without the lock: a collector may hold it
        self._condemned: set[int] = set()  # addresses of leased blocks that are to go when they come back
        self._graphs: list[Block] = []  # came back from a capture: a CUDA graph writes there in each replay
        self.made_count = 0
        self.peak_bytes = 0
        self._most_in_use = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks, leased or free."""
        with self._lock:
            self._collect()
            return self._total()

    @property
    def leased_bytes(self) -> int:
        with self._lock:
            self._collect()
            return sum(block.capacity for block in self._leased.values())

    @property
    def block_count(self) -> int:
        with self._lock:
            self._collect()
            return len(self._free) + len(self._leased) + len(self._graphs)

    def lease(
        self, nbytes: int, *, pinned: bool, limit: int | None = None, captured: bool = False
    ) -> torch.Tensor | None:
        """uint8[nbytes] of a block, or None if there is no room for it.

        Args:
            nbytes: at least 1.
            pinned: for copies from and to a CUDA device.
            limit: most bytes that the pool may have for it, those of all others included; None for no limit.
            captured: a CUDA graph is being captured: nothing is made or given back now, and the block is its for good.
        """
        with self._lock:
            self._collect()
            in_use = sum(block.capacity for block in (*self._leased.values(), *self._graphs))
            room = float("inf") if limit is None else limit - in_use
            block = self._fitting(nbytes, pinned, min(room, max(nbytes * _WASTE, _PAGE)))
            if block is None and not captured:
                block = self._make(nbytes, pinned, limit, room)
            block = block or self._fitting(nbytes, pinned, room)
            if block is None:
                return None
            block.captured = captured
            self._leased[block.address] = block
            self.peak_bytes = max(self.peak_bytes, self._total())
        raw = (ctypes.c_ubyte * nbytes).from_address(block.address)
        weakref.finalize(raw, self._returned.append, block).atexit = False
        return torch.frombuffer(raw, dtype=torch.uint8)

    def block_of(self, host: torch.Tensor) -> Block | None:
        """The block that `host` begins; None if it is other memory."""
        return self._leased.get(host.data_ptr())

    def reset(self) -> None:
        """Give all free blocks back to the system now, and the leased ones when they come back; also those of CUDA
        graphs, which must not be replayed any more."""
        with self._lock:
            self._collect()
            self._condemned.update(self._leased)
            if any(block.pinned for block in self._graphs):  # a replay may run still, and no event tells of it
                for index in range(torch.cuda.device_count()):
                    torch.cuda.synchronize(index)
            for blocks in (self._free, self._graphs):
                while blocks:
                    _give_back(blocks.pop())
            self.made_count = self._most_in_use = 0
            self.peak_bytes = self._total()

    def _total(self) -> int:
        return sum(block.capacity for block in (*self._free, *self._leased.values(), *self._graphs))

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            del self._leased[block.address]
            if block.address in self._condemned:
                self._condemned.discard(block.address)
                _give_back(block)
            else:
                (self._graphs if block.captured else self._free).append(block)

    def _fitting(self, nbytes: int, pinned: bool, most: float) -> Block | None:
        fits = [b for b in self._free if b.pinned == pinned and nbytes <= b.capacity <= most]
        if not fits:
            return None
        block = min(fits, key=lambda b: b.capacity)
        self._free.remove(block)
        return block

    def _make(self, nbytes: int, pinned: bool, limit: int | None, room: float) -> Block | None:
        capacity = -(-nbytes // _PAGE) * _PAGE
        if capacity > room:
            return None
        in_use = self._total() - sum(block.capacity for block in self._free)
        self._most_in_use = max(self._most_in_use, in_use + capacity)
        # sizes that vary from step to step must not leave a block for each
        most = self._most_in_use * _SPARE if limit is None else limit
        while self._free and self._total() + capacity > most:
            _give_back(self._free.pop(0))  # the one that has been free for longest
        block = _made(capacity, pinned)
        while block is None and self._free:
            _give_back(self._free.pop(0))
            block = _made(capacity, pinned)
        self.made_count += block is not None
        return block


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
