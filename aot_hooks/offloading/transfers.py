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

at_run_time.py has two more, which decide when they run whether to copy.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..torch_private.inductor_lowering import lower_to_call
from . import copies
from .copies import Copy, captures, capturing, pool, streams_of

if TYPE_CHECKING:
    from cudagraph import Capture

NO_LIMIT = -1  # not None: inner compilers differ in how they pass an optional number to an operator
_numbers = itertools.count(1)
_in_flight: dict[int, Copy] = {}
_kept: dict[int, torch.Tensor] = {}  # tensors that found no room on the host, by the address of their stand-in
counts: Counter[str] = Counter()  # since the last `reset`
_lock = threading.Lock()


def _count(what: str, nbytes: int) -> int:
    """Count a tensor; returns how many there are now."""
    with _lock:
        counts[f"{what}_bytes"] += nbytes
        counts[f"{what}_count"] += 1
        return counts[f"{what}_count"]


capture_under_way: Callable[[], Capture | None] = lambda: None  # noqa: E731  `cudagraph.capturing` with CUDA graphs


def _ticket(copy: Copy) -> torch.Tensor:
    """int64[1] with the number of `copy`; if it dies unclaimed, the copy is waited for and released."""
    number = next(_numbers)
    _in_flight[number] = copy
    raw = (ctypes.c_int64 * 1)(number)
    weakref.finalize(raw, lambda: copies.join_unclaimed(_in_flight.pop(number, None))).atexit = False
    return torch.frombuffer(raw, dtype=torch.int64)


def _number(ticket: torch.Tensor) -> int:
    return ctypes.c_int64.from_address(ticket.data_ptr()).value


def claim(ticket: torch.Tensor) -> torch.Tensor:
    """The tensor that `send` or `fetch` has copied to. Has the current stream wait for the copy."""
    copy = _in_flight.pop(_number(ticket), None)
    if copy is None:
        raise RuntimeError(
            "a wait for an offloaded tensor got a ticket that was waited for before; each start has one wait, in order"
        )
    copies.join(copy)
    return copy.target


def send(x: torch.Tensor, limit: int | None) -> torch.Tensor:
    """Start to copy `x`, contiguous, to host memory; returns the ticket for `claim`.

    Where the host has no room, `x` stays on the device, and a stand-in crosses to the backward.
    """
    if not x.nbytes:  # takes no room
        return _ticket(Copy(x, torch.empty_like(x, device="cpu")))
    host = host_memory(x, limit)
    if host is not None:
        return _ticket(*copies.begin([(x, host)], x.device, out=True))
    host = _stand_in(x)
    _kept[host.data_ptr()] = x.detach().clone()  # the program may write to `x`
    return _ticket(Copy(x, host))


def _stand_in(x: torch.Tensor) -> torch.Tensor:
    """Host memory of the shape of `x` that is never read or written, and so takes none: its address says what it is."""
    pages = mmap.mmap(-1, x.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = (ctypes.c_ubyte * x.nbytes).from_buffer(pages)
    weakref.finalize(memory, _kept.pop, ctypes.addressof(memory), None).atexit = False
    return torch.frombuffer(memory, dtype=x.dtype).view(x.shape)


def host_memory(x: torch.Tensor, limit: int | None) -> torch.Tensor | None:
    """Memory of the pool for a copy of `x`; None, with a warning at first, if the host has no room for it."""
    nbytes, capture, captured = x.nbytes, capture_under_way(), is_captured(x.device)
    lease = pool.lease(nbytes, pinned=x.is_cuda, limit=limit, captured=captured, capture=capture)
    if lease is None and captured:
        raise capture_error(x.device, f"no pinned block of {nbytes} bytes is free, and none can be made")
    if lease is None:
        room = "as much as could be pinned" if limit is None else f"max_host_bytes={limit}"
        if _count("kept_on_device", nbytes) == 1:
            warnings.warn(
                f"aot_hooks.offload: the host has no room for {nbytes} more bytes ({room}; {pool.total_bytes} are in "
                "use), so they stay on the device; aot_hooks.offload_stats() counts what does",
                stacklevel=2,
            )
        return None
    _count("sent", nbytes)
    flat = lease.view(x.dtype)
    return flat.view(*x.shape) if x.ndim else flat.view(())  # `view(x.shape)` takes three times as long


def fetch(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start to copy `host` to new memory on `device`; returns the ticket for `claim`."""
    kept = _kept.get(host.data_ptr())
    if kept is not None:
        if is_captured(device):  # the next step's tensor has another address
            raise capture_error(device, "what found no room on the host can't be read")
        # a copy, because the reader may write over it before another backward reads it
        return _ticket(Copy(host, kept.clone()))
    return _ticket(*begin_back([host], device))


def begin_back(hosts: Sequence[torch.Tensor], device: torch.device) -> list[Copy]:
    """Start to copy each of `hosts` to new memory on `device`."""
    for host in hosts:
        _count("fetched", host.nbytes)
    pairs = [(host, torch.empty(host.shape, dtype=host.dtype, device=device)) for host in hosts]
    return copies.begin(pairs, device, out=False)


def fetched_here(ticket: torch.Tensor) -> bool:
    """Whether the current stream owns the memory that `fetch` fills."""
    copy = _in_flight.get(_number(ticket))
    return copy is None or copy.stream is None or copy.stream == torch.cuda.current_stream(copy.stream.device_index)


def is_finished(ticket: torch.Tensor) -> bool:
    """Whether the copy is known to be done; False during a CUDA graph capture, where events can't be queried."""
    copy = _in_flight.get(_number(ticket))
    if copy is None or copy.event is None:
        return True
    return not capturing(copy.stream.device) and copy.event.query()


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured. Its replays run no operators of Python."""
    return capture_under_way() is not None or capturing(device)


def capture_error(device: torch.device, text: str) -> Exception:
    """The error to raise in a capture, of a class that `cudagraph` knows.

    Also joins the streams of copies that were started in the capture, without which it could not end.
    """
    if device.type == "cuda":
        for side in streams_of(device)[:2]:
            if captures(side):
                torch.cuda.current_stream(device).wait_stream(side)
    text = f"offload: {text} during CUDA graph capture; run a step with the same shapes before, or raise max_host_bytes"
    capture = capture_under_way()
    return RuntimeError(text) if capture is None else capture.not_warm(text)


# --- operators --------------------------------------------------------------------------------------------------------

_library = torch.library.Library("aot_hooks", "FRAGMENT")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Defines the operator `torch.ops.aot_hooks.*` with this schema."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"aot_hooks::{name}", fake, lib=_library)
    return getattr(torch.ops.aot_hooks, name).default


def _offload_start(x: torch.Tensor, limit: int) -> torch.Tensor:
    return send(x.contiguous(), None if limit == NO_LIMIT else limit)


def fake_ticket(*_: Any) -> torch.Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


offload_start = define("offload_start(Tensor x, int limit) -> Tensor", _offload_start, fake_ticket)
offload_wait = define(
    "offload_wait(Tensor ticket, Tensor x) -> Tensor",
    lambda ticket, x: claim(ticket),
    lambda ticket, x: torch.empty(x.shape, dtype=x.dtype, device="cpu"),
)
reload_start = define("reload_start(Tensor host, Device device) -> Tensor", fetch, fake_ticket)
reload_wait = define(
    "reload_wait(Tensor ticket, Tensor host, Device device) -> Tensor",
    lambda ticket, host, device: claim(ticket),
    lambda ticket, host, device: torch.empty(host.shape, dtype=host.dtype, device=device),
)
lower_to_call(reload_wait, returns_aligned=True)
COPIES = (offload_start, offload_wait, reload_start, reload_wait)
