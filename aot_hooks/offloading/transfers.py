"""Copies to host memory and back that run beside the compute, as four operators.

      forward    t = offload_start(x)        the copy begins after the work that the current stream has queued so far
                 host = offload_wait(t, x)   the current stream waits for the copy; until then x must live
      backward   t = reload_start(host)      allocates on the device, and the copy begins
                 x = reload_wait(t, host)    the current stream waits; then x may be read and host be freed

`torch.ops.aot_hooks.*`, all functional: each side effect has a result that is used. So no compiler can drop, double or
reorder them against their data. A ticket is int64[1] on the CPU.

The waits determine lifetimes, `record_stream` is never called: memory is freed on the stream that allocated it, after
that stream waited. When a ticket dies unclaimed (an exception between start and wait), its stream waits too. On the CPU
the operators copy at once. Nothing here synchronizes with the host, so CUDA graphs can capture it.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .pinned_pool import HostPool

if TYPE_CHECKING:
    from cudagraph import Capture

NO_LIMIT = -1  # not None: inner compilers differ in how they pass an optional number to an operator
pool = HostPool()
_numbers = itertools.count(1)
_in_flight: dict[int, _Copy] = {}
_kept: dict[int, torch.Tensor] = {}  # tensors without room on the host, by the address of their stand-in there
_counts: Counter[str] = Counter()  # since the last `reset`
_lock = threading.Lock()


@dataclass(eq=False)
class _Copy:
    """A copy in flight: started and not waited for. `source` and `target` live as long as it."""

    source: torch.Tensor
    target: torch.Tensor
    event: Any = None  # recorded after the copy; None where there is nothing to wait for
    stream: Any = None  # the stream that owns the device memory of `source` or `target`
    captured: bool = False  # the copy is part of a CUDA graph and runs in each replay, not now


def _count(what: str, nbytes: int) -> int:
    """Count a tensor; returns how many there are now."""
    with _lock:
        _counts[f"{what}_bytes"] += nbytes
        _counts[f"{what}_count"] += 1
        return _counts[f"{what}_count"]


_streams: dict[int, tuple[torch.cuda.Stream, torch.cuda.Stream, torch.cuda.Event]] = {}


def _streams_of(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream, torch.cuda.Event]:
    """The streams of copies out and back, made once, and the event by which they wait for the current stream."""
    index = device.index or 0  # the device of a tensor has an index
    with _lock:
        if index not in _streams:
            out, back = (torch.cuda.Stream(torch.device("cuda", index)) for _ in range(2))
            _streams[index] = out, back, torch.cuda.Event()
        return _streams[index]


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _no_capture() -> None:
    return None


capture_under_way: Callable[[], Capture | None] = _no_capture  # `cudagraph.capturing`, once CUDA graphs are in use


def _begin(source: torch.Tensor, target: torch.Tensor, device: torch.device, out: bool) -> _Copy:
    """Start a copy between the host and `device`: to the host if `out`."""
    copy = _Copy(source, target)
    if device.type != "cuda":
        target.copy_(source)
        return copy
    stream_out, stream_back, ready = _streams_of(device)
    side = stream_out if out else stream_back
    # read here: within `torch.cuda.stream` below it would be the side stream
    copy.stream = torch.cuda.current_stream(device)
    copy.captured = torch.cuda.is_current_stream_capturing()
    block = None if copy.captured else pool.block_of(target if out else source)
    with _lock:  # a wait is for the event's last record, so another thread may record it right after
        ready.record(copy.stream)
        side.wait_event(ready)
    if block is not None and block.event is not None:
        side.wait_event(block.event)  # the last reader or writer of the block, perhaps for another stream
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    if block is None:
        copy.event = torch.cuda.Event()  # a record in a capture means nothing outside of it
    else:
        copy.event = block.event = block.events.setdefault((device, out), torch.cuda.Event())
    copy.event.record(side)
    return copy


def _join(copy: _Copy) -> None:
    """Have the current stream, and the stream that owns the memory, wait for the copy."""
    if copy.event is not None:
        current = torch.cuda.current_stream(copy.stream.device)
        current.wait_event(copy.event)
        if current != copy.stream:
            copy.stream.wait_event(copy.event)


def _ticket(copy: _Copy) -> torch.Tensor:
    """int64[1] with the number of `copy`; if it dies unclaimed, the copy is waited for and released."""
    number = next(_numbers)
    _in_flight[number] = copy
    raw = (ctypes.c_int64 * 1)(number)
    weakref.finalize(raw, _abandon, number).atexit = False
    return torch.frombuffer(raw, dtype=torch.int64)


def _number(ticket: torch.Tensor) -> int:
    return ctypes.c_int64.from_address(ticket.data_ptr()).value


def claim(ticket: torch.Tensor) -> torch.Tensor:
    """What `send` or `fetch` has copied, after the current stream waits for it."""
    copy = _in_flight.pop(_number(ticket), None)
    if copy is None:
        raise RuntimeError(
            "a wait for an offloaded tensor got a ticket that was waited for before; each start has one wait, in order"
        )
    _join(copy)
    return copy.target


def _abandon(number: int) -> None:
    copy = _in_flight.pop(number, None)
    if copy is not None and copy.event is not None and (not copy.captured or _captures(copy.stream)):
        copy.stream.wait_event(copy.event)  # after its capture has ended, a captured copy needs no wait


def send(x: torch.Tensor, limit: int | None) -> torch.Tensor:
    """Start to copy `x`, contiguous, to host memory; returns the ticket for `claim`."""
    nbytes = x.nbytes
    capture = capture_under_way()
    captured = capture is not None or _capturing(x.device)
    lease = pool.lease(max(nbytes, 1), pinned=x.is_cuda, limit=limit, captured=captured, capture=capture)
    if lease is None and captured:
        raise _capture_error(x.device, capture, f"no pinned block of {nbytes} bytes is free, and none can be made")
    if lease is None:
        return _ticket(_keep_on_device(x, limit))
    host = lease[:nbytes].view(x.dtype).view(x.shape)
    _count("sent", nbytes)
    return _ticket(_begin(x, host, x.device, out=True))


def fetch(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start to copy `host` to new memory on `device`; returns the ticket for `claim`."""
    kept = _kept.get(host.data_ptr())
    if kept is not None:
        capture = capture_under_way()
        if capture is not None or _capturing(device):  # the next step's tensor has another address
            raise _capture_error(device, capture, "what found no room on the host can't be read")
        # a copy, because the reader may write over it before another backward reads it
        return _ticket(_Copy(host, kept.clone()))
    target = torch.empty(host.shape, dtype=host.dtype, device=device)
    _count("fetched", host.nbytes)
    return _ticket(_begin(host, target, device, out=False))


def fetched_here(ticket: torch.Tensor) -> bool:
    """Whether the current stream owns the memory that `fetch` fills."""
    copy = _in_flight.get(_number(ticket))
    return copy is None or copy.stream is None or copy.stream == torch.cuda.current_stream(copy.stream.device)


def finished(ticket: torch.Tensor) -> bool:
    """Whether the copy is known to be done; False during a CUDA graph capture, where events can't be queried."""
    copy = _in_flight.get(_number(ticket))
    if copy is None or copy.event is None:
        return True
    return not _capturing(copy.stream.device) and copy.event.query()


def _capture_error(device: torch.device, capture: Capture | None, text: str) -> Exception:
    """The error to raise in a capture, of a class that `cudagraph` knows.

    Also joins the streams of copies that were started in the capture, without which it could not end.
    """
    if device.type == "cuda":
        for side in _streams_of(device)[:2]:
            if _captures(side):
                torch.cuda.current_stream(device).wait_stream(side)
    text = f"offload: {text} during CUDA graph capture; run a step with the same shapes before, or raise max_host_bytes"
    return RuntimeError(text) if capture is None else capture.not_warm(text)


def _keep_on_device(x: torch.Tensor, limit: int | None) -> _Copy:
    """A copy for a tensor without room on the host: it stays on the device.

    Its stand-in is host memory of the same shape that is never read or written, by whose address `fetch` finds it.
    """
    room = "as much as could be pinned" if limit is None else f"max_host_bytes={limit}"
    if _count("kept_on_device", x.nbytes) == 1:
        warnings.warn(
            f"aot_hooks.offload: the host has no room for {x.nbytes} more bytes ({room}; {pool.total_bytes} are in "
            "use), so they stay on the device; aot_hooks.offload_stats() counts what does",
            stacklevel=2,
        )
    memory = mmap.mmap(-1, max(x.nbytes, 1))  # pages that are never written take no memory
    raw = (ctypes.c_ubyte * x.nbytes).from_buffer(memory)
    address = ctypes.addressof(raw)
    _kept[address] = x.detach().clone()  # the graph reuses the memory of `x`: Inductor's kernels write over it in place
    weakref.finalize(raw, _kept.pop, address, None).atexit = False
    return _Copy(x, torch.frombuffer(raw, dtype=torch.uint8).view(x.dtype).view(x.shape))


def offload_stats() -> dict[str, int]:
    """Counts since the last `aot_hooks.reset()`, and the host memory in use.

    Tensors and bytes sent to the host, fetched back, and kept on the device because the host had no room. The pool's
    bytes now, at most, and leased now; its blocks now, and those allocated.
    """
    tensors = [f"{what}_{unit}" for what in ("sent", "fetched", "kept_on_device") for unit in ("count", "bytes")]
    return {name: _counts[name] for name in tensors} | {
        "host_bytes": pool.total_bytes,
        "host_peak_bytes": pool.peak_bytes,
        "host_leased_bytes": pool.leased_bytes,
        "host_blocks": pool.block_count,
        "host_blocks_made": pool.made_count,
    }


def reset() -> None:
    """Free unused host memory and reset the counts. Memory that tensors wait in is freed when they are."""
    pool.reset()
    _counts.clear()


# --- operators --------------------------------------------------------------------------------------------------------

_library = torch.library.Library("aot_hooks", "FRAGMENT")


def _operator(schema: str, kernel: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]) -> Any:
    """Defines the operator `torch.ops.aot_hooks.*` with this schema."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"aot_hooks::{name}", fake, lib=_library)
    return getattr(torch.ops.aot_hooks, name).default


def _offload_start(x: torch.Tensor, limit: int) -> torch.Tensor:
    return send(x if x.is_contiguous() else x.contiguous(), None if limit == NO_LIMIT else limit)


def _fake_ticket(*_: Any) -> torch.Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


offload_start = _operator("offload_start(Tensor x, int limit) -> Tensor", _offload_start, _fake_ticket)
offload_wait = _operator(
    "offload_wait(Tensor ticket, Tensor x) -> Tensor",
    lambda ticket, x: claim(ticket),
    lambda ticket, x: torch.empty(x.shape, dtype=x.dtype, device="cpu"),
)
reload_start = _operator("reload_start(Tensor host, Device device) -> Tensor", fetch, _fake_ticket)
reload_wait = _operator(
    "reload_wait(Tensor ticket, Tensor host, Device device) -> Tensor",
    lambda ticket, host, device: claim(ticket),
    lambda ticket, host, device: torch.empty(host.shape, dtype=host.dtype, device=device),
)
COPIES = (offload_start, offload_wait, reload_start, reload_wait)
