"""Host tensors that stand for tensors which stay on the device: they cross to the backward in their place.

x on the device --stand_in(x)--> host tensor of its shape, whose address says which tensor is meant
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

_spare: defaultdict[int, deque[mmap.mmap]] = defaultdict(deque)  # pages of stand-ins that are gone, by their size


def stand_in(x: torch.Tensor, release: Callable[[int], Any]) -> torch.Tensor:
    """Host memory of the shape of `x` that is never read or written: its address says which tensor is meant.

    `release(address)` is called when it dies. Pages that are never written take no memory. They are used again, because
    to map them takes as long as the rest of the operators that a tensor passes through.
    """
    size = 1 << max(12, (x.nbytes - 1).bit_length())
    spare = _spare[size]
    pages = spare.pop() if spare else mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = (ctypes.c_ubyte * x.nbytes).from_buffer(pages)
    weakref.finalize(memory, _end, ctypes.addressof(memory), size, pages, release).atexit = False
    return torch.frombuffer(memory, dtype=x.dtype).view(x.shape)


def _end(address: int, size: int, pages: mmap.mmap, release: Callable[[int], Any]) -> None:
    release(address)
    _spare[size].append(pages)  # after that: another tensor may get the address at once


def reset() -> None:
    """Give the pages back that no stand-in uses."""
    _spare.clear()
