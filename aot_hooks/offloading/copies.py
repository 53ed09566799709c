"""Copies between a device and the host on streams of their own: start one, and wait for it.

      current stream   ... x is made | ready --> later work            | waits for `event`
      stream out                      waits for ready | copy | event

The streams of copies out and back are made once for each device. A copy between pinned memory and a device waits for
the last one that used the same block. On the CPU copies are made at once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .pinned_pool import HostPool

pool = HostPool()
_lock = threading.Lock()
_streams: dict[int, tuple[torch.cuda.Stream, torch.cuda.Stream, torch.cuda.Event]] = {}


@dataclass(eq=False)
class Copy:
    """A copy in flight: started and not waited for. `source` and `target` live as long as it."""

    source: torch.Tensor
    target: torch.Tensor
    event: Any = None  # recorded after the copy; None where there is nothing to wait for
    begun: Any = None  # recorded before it, if it is timed
    stream: Any = None  # the stream that owns the device memory of `source` or `target`
    captured: bool = False  # the copy is part of a CUDA graph and runs in each replay, not now


def streams_of(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream, torch.cuda.Event]:
    """The streams of copies out and back, made once, and the event by which they wait for the current stream."""
    index = device.index or 0  # the device of a tensor has an index
    with _lock:
        if index not in _streams:
            _streams[index] = torch.cuda.Stream(index), torch.cuda.Stream(index), torch.cuda.Event()
        return _streams[index]


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def captures(stream: torch.cuda.Stream) -> bool:
    """Whether a CUDA graph is captured on `stream`."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def begin(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device, *, out: bool, timed: bool = False
) -> list[Copy]:
    """Start copies between the host and `device`: to the host if `out`. If `timed`, their events have times.

    Args:
        pairs: the source and the target of each. They are copied in this order.
    """
    begun = [Copy(source, target) for source, target in pairs]
    if device.type != "cuda":
        for copy in begun:
            copy.target.copy_(copy.source)
        return begun
    stream_out, stream_back, ready = streams_of(device)
    side = stream_out if out else stream_back
    current = torch.cuda.current_stream(device.index)  # faster for an index than for a device
    captured = torch.cuda.is_current_stream_capturing()
    with _lock:  # a wait is for the event's last record, so another thread may record it right after
        ready.record(current)
        side.wait_event(ready)
    device_before = torch.cuda.current_device()
    torch.cuda.set_stream(side)  # `torch.cuda.stream` takes as long as all of the rest
    try:
        for copy in begun:
            copy.stream, copy.captured = current, captured
            block = None if captured else pool.block_of(copy.target if out else copy.source)
            if block is not None and block.event is not None:
                side.wait_event(block.event)  # the last reader or writer of the block, perhaps for another stream
            if timed:
                copy.begun = torch.cuda.Event(enable_timing=True)
                copy.begun.record(side)
            copy.target.copy_(copy.source, non_blocking=True)
            copy.event = torch.cuda.Event(enable_timing=timed)
            copy.event.record(side)
            if block is not None:  # outside of captures: a record in one means nothing outside of it
                block.event = copy.event
    finally:
        torch.cuda.set_stream(current)
        if device_before != side.device_index:  # which `set_stream` has made the current one
            torch.cuda.set_device(device_before)
    return begun


def join(copy: Copy) -> None:
    """Have the current stream, and the stream that owns the memory, wait for the copy."""
    if copy.event is not None:
        current = torch.cuda.current_stream(copy.stream.device_index)
        current.wait_event(copy.event)
        if current != copy.stream:
            copy.stream.wait_event(copy.event)


def join_unclaimed(copy: Copy | None) -> None:
    """Have the stream that owns the memory wait for a copy that nobody will claim."""
    if copy is not None and copy.event is not None and (not copy.captured or captures(copy.stream)):
        copy.stream.wait_event(copy.event)  # after its capture has ended, a captured copy needs no wait
