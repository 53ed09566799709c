"""Host tensors that stand for tensors which stay on the device: they cross to the backward in their place.

xs on the device --stand_ins(xs)--> host tensors of their shapes, whose addresses say which tensors are meant
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

_spare: defaultdict[int, deque[mmap.mmap]] = defaultdict(deque)  # pages of stand-ins that are gone, by their size


def stand_ins(tensors: Sequence[torch.Tensor], release: Callable[[], Any]) -> list[torch.Tensor]:
    """Host memory of the shape of each tensor that is never read or written: its address says which tensor is meant.

    `release()` is called when all of them are gone. Pages that are never written take no memory. They are used again,
    because to map them takes as long as the rest of the operators that a tensor passes through.
    """
    offsets = [0, *itertools.accumulate(_aligned(x.nbytes) for x in tensors)]
    size = 1 << max(12, (offsets[-1] - 1).bit_length())
    spare = _spare[size]
    pages = spare.pop() if spare else mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = (ctypes.c_ubyte * size).from_buffer(pages)
    weakref.finalize(memory, _end, size, pages, release).atexit = False
    return [
        shaped(torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=offset), x.shape)
        for x, offset in zip(tensors, offsets, strict=False)
    ]


def shaped(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """`x.view(shape)`, which takes three times as long."""
    return x.view(*shape) if shape else x.view(())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _end(size: int, pages: mmap.mmap, release: Callable[[], Any]) -> None:
    release()
    _spare[size].append(pages)  # after that: another tensor may get the address at once


def reset() -> None:
    """Give the pages back that no stand-in uses."""
    _spare.clear()
