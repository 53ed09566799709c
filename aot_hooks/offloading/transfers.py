"""Copies to host memory and back that run beside the compute, as four operators.

      forward    t = offload_start(x)        the copy begins when what the current stream has queued so far is done
                 ...                         x must live until
                 host = offload_wait(t, x)   the current stream waits for the copy; then the memory of x may go
      backward   t = reload_start(host)      memory on the device, and the copy begins
                 ...
                 x = reload_wait(t, host)    the current stream waits; then x may be read and host may go

`torch.ops.aot_hooks.*`, all functional: nothing aliases, nothing is mutated, and what must happen has a result that is
used, so no compiler can drop, double or reorder them against their data. A ticket is int64[1] on the CPU.

Lifetime is by the waits, never by `record_stream`: memory is freed on the stream that made it after that stream waited.
A ticket that dies unclaimed (an exception between start and wait) makes its stream wait too. On the CPU they copy at
once. Each device has one stream a direction, made once. Nothing here synchronizes with the host, so that CUDA graphs
can capture it.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .pinned_pool import HostPool

if TYPE_CHECKING:
    from cudagraph import Capture

__all__ = [
    "NO_LIMIT",
    "claim_device",
    "claim_host",
    "copies",
    "fetch",
    "fetched_here",
    "finished",
    "offload_start",
    "offload_stats",
    "offload_wait",
    "pool",
    "reload_start",
    "reload_wait",
    "reset",
    "send",
]

NO_LIMIT = -1  # operators have no optional numbers that all inner compilers pass on alike
pool = HostPool()
_numbers = itertools.count(1)
_under_way: dict[int, _Copy] = {}
_kept: dict[int, torch.Tensor] = {}  # by the address of the stand-in on the host
_lock = threading.Lock()


@dataclass(eq=False)
class _Copy:
    """A copy that was started and not waited for.

    Attributes:
        source, target: kept alive by it.
        event: done when the copy is; None where it was made at once or has not been made.
        stream: the one that `source` or `target` on the device belongs to.
        late: makes the copy, if it is to be made at the wait.
        captured: nothing is copied now, but in each replay.
    """

    source: torch.Tensor
    target: torch.Tensor
    event: Any = None
    stream: Any = None
    late: bool = False
    captured: bool = False


class _Copies:
    """Counts since the last `reset`, and how copies on the CPU behave.

    Attributes:
        at_wait: on the CPU, copy at the wait and not at the start: the two extremes of what a device may do.
        log: if it is a list, each step is noted in it: ("start", bytes), ("wait", bytes), ...
    """

    def __init__(self) -> None:
        self.at_wait = False
        self.log: list[tuple[str, int]] | None = None
        self.clear()

    def clear(self) -> None:
        self.sent_count = self.sent_bytes = 0
        self.fetched_count = self.fetched_bytes = 0
        self.kept_count = self.kept_bytes = 0

    def note(self, what: str, nbytes: int) -> None:
        if self.log is not None:
            self.log.append((what, nbytes))


copies = _Copies()


class _Lines:
    """The two streams of a CUDA device, and the event by which they wait for the current one."""

    def __init__(self, device: torch.device) -> None:
        self.out = torch.cuda.Stream(device)
        self.back = torch.cuda.Stream(device)
        self.ready = torch.cuda.Event()

    def both(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        return self.out, self.back


_lines: dict[int, _Lines] = {}


def _lines_of(device: torch.device) -> _Lines:
    index = device.index or 0  # a tensor's device has one
    lines = _lines.get(index)
    if lines is None:
        with _lock:
            lines = _lines.setdefault(index, _Lines(torch.device("cuda", index)))
    return lines


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _no_capture() -> None:
    return None


capture_under_way: Callable[[], Capture | None] = _no_capture  # `cudagraph.capturing`, once its graphs are asked for


def _begin(source: torch.Tensor, target: torch.Tensor, device: torch.device, out: bool) -> _Copy:
    """Start a copy between the host and `device`."""
    copy = _Copy(source, target)
    if device.type != "cuda":
        copy.late = copies.at_wait
        if not copy.late:
            target.copy_(source)
        return copy
    lines = _lines_of(device)
    # read before any stream is entered: inside of one it would be that one
    copy.stream = torch.cuda.current_stream(device)
    side = lines.out if out else lines.back
    copy.captured = capturing = torch.cuda.is_current_stream_capturing()
    block = pool.block_of(target if out else source)
    with _lock:  # a wait holds on to what was recorded last, so the event may be recorded anew right after
        lines.ready.record(copy.stream)
        side.wait_event(lines.ready)
    if block is not None and block.event is not None and not capturing:
        side.wait_event(block.event)  # the last reader or writer of the block, perhaps for another stream
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    if block is None or capturing:
        copy.event = torch.cuda.Event()  # what is recorded in a capture means nothing outside of it
    else:
        copy.event = block.events.setdefault((device, out), torch.cuda.Event())
    copy.event.record(side)
    if block is not None and not capturing:
        block.event = copy.event
    return copy


def _join(copy: _Copy) -> None:
    """Have the stream that waits, and the one the memory belongs to, go on after the copy."""
    if copy.late:
        copy.target.copy_(copy.source)
    elif copy.event is not None:
        current = torch.cuda.current_stream(copy.stream.device)
        current.wait_event(copy.event)
        if current != copy.stream:
            copy.stream.wait_event(copy.event)


def _ticket(copy: _Copy) -> torch.Tensor:
    """int64[1] that stands for `copy`; if it dies unclaimed, what was under way is waited for and let go."""
    number = next(_numbers)
    _under_way[number] = copy
    raw = (ctypes.c_int64 * 1)(number)
    weakref.finalize(raw, _abandon, number).atexit = False
    return torch.frombuffer(raw, dtype=torch.int64)


def _number(ticket: torch.Tensor) -> int:
    return ctypes.c_int64.from_address(ticket.data_ptr()).value


def _claim(ticket: torch.Tensor) -> _Copy:
    copy = _under_way.pop(_number(ticket), None)
    if copy is None:
        raise RuntimeError(
            "a wait for an offloaded tensor got a ticket that was waited for before; each start has one wait, in order"
        )
    return copy


def _abandon(number: int) -> None:
    copy = _under_way.pop(number, None)
    if copy is not None and copy.event is not None and (not copy.captured or _captures(copy.stream)):
        copy.stream.wait_event(copy.event)  # of a capture that is over there is nothing to wait for


def send(x: torch.Tensor, limit: int | None) -> torch.Tensor:
    """Start to copy `x`, contiguous, to host memory; gives the ticket for `claim_host`."""
    nbytes = x.nbytes
    capture = capture_under_way()
    captured = capture is not None or _capturing(x.device)
    lease = pool.lease(max(nbytes, 1), pinned=x.is_cuda, limit=limit, captured=captured, capture=capture)
    if lease is None and captured:
        raise _not_in_a_capture(x.device, capture, f"no pinned block of {nbytes} bytes is free, and none can be made")
    if lease is None:
        return _ticket(_stay(x, limit))
    host = lease[:nbytes].view(x.dtype).view(x.shape)
    with _lock:
        copies.sent_count += 1
        copies.sent_bytes += nbytes
    copies.note("start", nbytes)
    return _ticket(_begin(x, host, x.device, out=True))


def claim_host(ticket: torch.Tensor) -> torch.Tensor:
    """The host tensor of `send`, when the current stream has waited for its copy."""
    copy = _claim(ticket)
    _join(copy)
    copies.note("wait", copy.target.nbytes)
    return copy.target


def fetch(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start to copy `host` to new memory on `device`; gives the ticket for `claim_device`."""
    kept = _kept.get(host.data_ptr())
    if kept is not None:
        capture = capture_under_way()
        if capture is not None or _capturing(device):  # another step's is elsewhere
            raise _not_in_a_capture(device, capture, "what found no room on the host can't be read")
        # a copy, because the reader may write over what it gets and another backward may ask again
        return _ticket(_Copy(host, kept.clone()))
    target = torch.empty(host.shape, dtype=host.dtype, device=device)
    with _lock:
        copies.fetched_count += 1
        copies.fetched_bytes += host.nbytes
    copies.note("reload", host.nbytes)
    return _ticket(_begin(host, target, device, out=False))


def claim_device(ticket: torch.Tensor) -> torch.Tensor:
    """The tensor of `fetch`, when the current stream has waited for its copy."""
    copy = _claim(ticket)
    _join(copy)
    copies.note("use", copy.target.nbytes)
    return copy.target


def fetched_here(ticket: torch.Tensor) -> bool:
    """Whether the memory that `fetch` fills belongs to the stream that is current now."""
    copy = _under_way.get(_number(ticket))
    return copy is None or copy.stream is None or copy.stream == torch.cuda.current_stream(copy.stream.device)


def finished(ticket: torch.Tensor) -> bool:
    """Whether the copy is done already, as far as the host may ask: not while a CUDA graph is captured."""
    copy = _under_way.get(_number(ticket))
    if copy is None or copy.event is None:
        return True
    return not _capturing(copy.stream.device) and copy.event.query()


def _not_in_a_capture(device: torch.device, capture: Capture | None, text: str) -> Exception:
    """What to raise in a capture, in words that `cudagraph` knows. Copies that were started in it are joined, or it
    could not be ended."""
    for side in _lines_of(device).both() if device.type == "cuda" else ():
        if _captures(side):
            torch.cuda.current_stream(device).wait_stream(side)
    text = f"offload: {text} during CUDA graph capture; run a step with the same shapes before, or raise max_host_bytes"
    return RuntimeError(text) if capture is None else capture.not_warm(text)


def _stay(x: torch.Tensor, limit: int | None) -> _Copy:
    """No room on the host: `x` stays on the device, behind host memory of its shape that nobody touches."""
    room = "as much as could be pinned" if limit is None else f"max_host_bytes={limit}"
    with _lock:
        first = copies.kept_count == 0
        copies.kept_count += 1
        copies.kept_bytes += x.nbytes
    if first:
        warnings.warn(
            f"aot_hooks.offload: the host has no room for {x.nbytes} more bytes ({room}; {pool.total_bytes} are in "
            "use), so they stay on the device; aot_hooks.offload_stats() counts what does",
            stacklevel=2,
        )
    memory = mmap.mmap(-1, max(x.nbytes, 1))  # pages that are never written take no memory
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    raw = (ctypes.c_ubyte * x.nbytes).from_address(address)
    _kept[address] = x.detach().clone()  # the graph counts on its memory, and Inductor's kernels write over it in place
    weakref.finalize(raw, _let_go, address, memory).atexit = False
    return _Copy(x, torch.frombuffer(raw, dtype=torch.uint8).view(x.dtype).view(x.shape))


def _let_go(address: int, memory: mmap.mmap) -> None:
    _kept.pop(address, None)
    memory.close()


def offload_stats() -> dict[str, int]:
    """Counts since the last `aot_hooks.reset()`: tensors and bytes sent to the host, fetched back, and kept on the
    device because the host had no room; the pool's bytes now, at most, and leased now; its blocks, and those made."""
    return {
        "sent_count": copies.sent_count,
        "sent_bytes": copies.sent_bytes,
        "fetched_count": copies.fetched_count,
        "fetched_bytes": copies.fetched_bytes,
        "kept_on_device_count": copies.kept_count,
        "kept_on_device_bytes": copies.kept_bytes,
        "host_bytes": pool.total_bytes,
        "host_peak_bytes": pool.peak_bytes,
        "host_leased_bytes": pool.leased_bytes,
        "host_blocks": pool.block_count,
        "host_blocks_made": pool.made_count,
    }


def reset() -> None:
    """Give host memory back and start counting anew. What waits there now stays until it is let go."""
    pool.reset()
    copies.clear()


# --- operators --------------------------------------------------------------------------------------------------------

_library = torch.library.Library("aot_hooks", "FRAGMENT")
_library.define("offload_start(Tensor x, int limit) -> Tensor")
_library.define("offload_wait(Tensor ticket, Tensor x) -> Tensor")
_library.define("reload_start(Tensor host, Device device) -> Tensor")
_library.define("reload_wait(Tensor ticket, Tensor host, Device device) -> Tensor")


def _offload_start(x: torch.Tensor, limit: int) -> torch.Tensor:
    return send(x if x.is_contiguous() else x.contiguous(), None if limit == NO_LIMIT else limit)


def _offload_wait(ticket: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return claim_host(ticket)


def _reload_start(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return fetch(host, device)


def _reload_wait(ticket: torch.Tensor, host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return claim_device(ticket)


def _fake_ticket(*_: Any) -> torch.Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


def _fake_host(ticket: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


def _fake_device(ticket: torch.Tensor, host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(host.shape, dtype=host.dtype, device=device)


for _name, _kernel, _fake in (
    ("offload_start", _offload_start, _fake_ticket),
    ("offload_wait", _offload_wait, _fake_host),
    ("reload_start", _reload_start, _fake_ticket),
    ("reload_wait", _reload_wait, _fake_device),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"aot_hooks::{_name}", _fake, lib=_library)

offload_start = torch.ops.aot_hooks.offload_start.default
offload_wait = torch.ops.aot_hooks.offload_wait.default
reload_start = torch.ops.aot_hooks.reload_start.default
reload_wait = torch.ops.aot_hooks.reload_wait.default
