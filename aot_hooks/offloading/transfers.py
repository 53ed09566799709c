"""Copies to host memory and back that run beside the compute, as operators.

      forward    t = offload_start(x)        the copy begins after the work that the current stream has queued so far
                 host = offload_wait(t, x)   the current stream waits for the copy; until then x must live
      backward   t = reload_start(host)      allocates on the device, and the copy begins
                 x = reload_wait(t, host)    the current stream waits; then x may be read and host be freed

`torch.ops.aot_hooks.*`, all functional: each side effect has a result that is used. So no compiler can drop, double or
reorder them against their data. A ticket is int64[1] on the CPU.

The waits determine lifetimes, `record_stream` is never called: memory is freed on the stream that allocated it, after
that stream waited. When a ticket dies unclaimed (an exception between start and wait), its stream waits too. On the CPU
the operators copy at once. Nothing here synchronizes with the host, so CUDA graphs can capture it.

With `terms` the operators decide when they run, see steps.py: a tensor may stay on the device, and a stand-in crosses
to the backward instead. The copies of one graph may be waited for, or be started, by the operators of another. What a
graph's own plan leaves on the device passes through two operators in all, as the host's time for each one counts:

      forward    hosts = offload_together(xs)      at its end
      backward   xs = reload_together(hosts)       before the first reader
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnusedWarning
from ..graphs.roofline import measured_rates
from ..torch_private.autograd import keeps_graph
from ..torch_private.inductor_lowering import ALIGNMENT, returns_aligned
from . import copies, stand_ins, steps
from .copies import Copy, captures, capturing, pool, streams_of

if TYPE_CHECKING:
    from cudagraph import Capture

NO_LIMIT = -1  # not None: inner compilers differ in how they pass an optional number to an operator
_numbers = itertools.count(1)
_in_flight: dict[int, Copy] = {}
_kept: dict[int, torch.Tensor] = {}  # tensors without room on the host, by the address of their stand-in there
_entries: dict[int, steps.Entry] = {}  # tensors that were started with terms, by the address of what crosses
_steps: dict[torch.device, steps.Steps] = {}
_counts: Counter[str] = Counter()  # since the last `reset`
_lock = threading.Lock()


def _count(what: str, nbytes: int) -> int:
    """Count a tensor; returns how many there are now."""
    with _lock:
        _counts[f"{what}_bytes"] += nbytes
        _counts[f"{what}_count"] += 1
        return _counts[f"{what}_count"]


def _no_capture() -> None:
    return None


capture_under_way: Callable[[], Capture | None] = _no_capture  # `cudagraph.capturing`, once CUDA graphs are in use


def _ticket(copy: Copy) -> torch.Tensor:
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
    copies.join(copy)
    return copy.target


def _abandon(number: int) -> None:
    copy = _in_flight.pop(number, None)
    copies.join_unclaimed(copy)
    if copy is not None and copy.entry is not None:
        _steps_of(copy.source.device).drop(copy.entry)


def send(x: torch.Tensor, limit: int | None) -> torch.Tensor:
    """Start to copy `x`, contiguous, to host memory; returns the ticket for `claim`.

    Where the host has no room, `x` stays on the device, and a stand-in crosses to the backward.
    """
    copy = _begin_out(x, limit)
    if copy is None:
        (host,) = stand_ins.stand_ins([x], lambda: _kept.pop(address, None))
        address = host.data_ptr()
        _kept[address] = x.detach().clone()  # the program may write to `x`
        copy = Copy(x, host)
    return _ticket(copy)


def _begin_out(x: torch.Tensor, limit: int | None) -> Copy | None:
    """Start to copy `x` to host memory; None, with a warning at first, if the host has no room for it."""
    if not x.nbytes:  # takes no room
        return Copy(x, torch.empty_like(x, device="cpu"))
    host = _host_memory(x, limit)
    return None if host is None else copies.begin([(x, host)], x.device, out=True)[0]


def _host_memory(x: torch.Tensor, limit: int | None) -> torch.Tensor | None:
    """Memory of the pool for a copy of `x`; None, with a warning at first, if the host has no room for it."""
    nbytes, capture, captured = x.nbytes, capture_under_way(), _is_captured(x.device)
    lease = pool.lease(nbytes, pinned=x.is_cuda, limit=limit, captured=captured, capture=capture)
    if lease is None and captured:
        raise _capture_error(x.device, capture, f"no pinned block of {nbytes} bytes is free, and none can be made")
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
    return stand_ins.shaped(lease.view(x.dtype), x.shape)


def fetch(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start to copy `host` to new memory on `device`; returns the ticket for `claim`."""
    kept = _kept.get(host.data_ptr())
    if kept is not None:
        capture = capture_under_way()
        if _is_captured(device):  # the next step's tensor has another address
            raise _capture_error(device, capture, "what found no room on the host can't be read")
        # a copy, because the reader may write over it before another backward reads it
        return _ticket(Copy(host, kept.clone()))
    return _ticket(*_fetch([host], device))


def _fetch(hosts: Sequence[torch.Tensor], device: torch.device) -> list[Copy]:
    for host in hosts:
        _count("fetched", host.nbytes)
    pairs = [(host, torch.empty(host.shape, dtype=host.dtype, device=device)) for host in hosts]
    return copies.begin(pairs, device, out=False)


def fetched_here(ticket: torch.Tensor) -> bool:
    """Whether the current stream owns the memory that `fetch` fills."""
    copy = _in_flight.get(_number(ticket))
    return copy is None or copy.stream is None or copy.stream == torch.cuda.current_stream(copy.stream.device_index)


def finished(ticket: torch.Tensor) -> bool:
    """Whether the copy is known to be done; False during a CUDA graph capture, where events can't be queried."""
    copy = _in_flight.get(_number(ticket))
    if copy is None or copy.event is None:
        return True
    return not capturing(copy.stream.device) and copy.event.query()


def _capture_error(device: torch.device, capture: Capture | None, text: str) -> Exception:
    """The error to raise in a capture, of a class that `cudagraph` knows.

    Also joins the streams of copies that were started in the capture, without which it could not end.
    """
    if device.type == "cuda":
        for side in streams_of(device)[:2]:
            if captures(side):
                torch.cuda.current_stream(device).wait_stream(side)
    text = f"offload: {text} during CUDA graph capture; run a step with the same shapes before, or raise max_host_bytes"
    return RuntimeError(text) if capture is None else capture.not_warm(text)


# --- decided when the operators run -----------------------------------------------------------------------------------


def _steps_of(device: torch.device) -> steps.Steps:
    """The steps of `device`. All threads share them: a backward may run in a thread of its own."""
    if device not in _steps:
        times, plan = functools.partial(_times, device), functools.partial(_plan, device)
        found = steps.Steps(lambda: _mark(device), times, plan, adapts=device.type == "cuda")
        _steps.setdefault(device, found)
    return _steps[device]


def _mark(device: torch.device) -> Any:
    """The time when the current stream gets to this point."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device.index))
    return event


def _times(device: torch.device, runs: list[list[Any]]) -> list[list[float]] | None:
    """The marks of each run in ms from its first; None while the device has not reached all of them."""
    if device.type != "cuda":
        return [[1e3 * (mark - marks[0]) for mark in marks] for marks in runs]
    if not all(mark.query() for marks in runs for mark in marks):
        return None
    # a backward may begin on another stream before the forward is done
    return [list(itertools.accumulate((run[0].elapsed_time(mark) for mark in run), max)) for run in runs]


def _plan(device: torch.device, trace: tuple[steps.Event, ...], at_ms: Sequence[float], share: float) -> steps.StepPlan:
    """The plan for a step whose events run `at_ms`, on a link with `share` of its speed."""
    rates = measured_rates(device)
    links = (event[2].link for event in trace if event[0] == "start" and event[2].link is not None)
    to_host, to_device = next(links, (rates.to_host, rates.to_device))
    plan = steps.plan_step(trace, at_ms, share * to_host, share * to_device)
    if not plan.sent_bytes and share == 1.0:
        warnings.warn(
            f"aot_hooks.offload: a step of {plan.graph_count} calls of compiled graphs sends none of its {plan.nbytes} "
            f"bytes: its forward of {plan.forward_ms:.1f} ms and backward of {plan.backward_ms:.1f} ms hide no copies. "
            "max_stall_ms allows a longer step",
            UnusedWarning,
            stacklevel=2,
        )
    return plan


def several_graphs() -> bool:
    """Whether the step that runs, or ran last, has several calls of graphs: its plan says later what it sends."""
    return any(each.graph_count > 1 for each in _steps.values())


def _begin_decided(tensors: Sequence[torch.Tensor], limit: int, terms: str, *, wait: bool) -> list[Copy]:
    """Start to send those of `tensors` that the step's plan sends; the others stay. If `wait`, they wait at once."""
    device, terms_of_all = tensors[0].device, steps.Terms.parse(terms)
    if _is_captured(device):
        entries = [steps.Entry(terms_of_all.planned) for _ in tensors]
    else:
        entries, actions = _steps_of(device).start([x.nbytes for x in tensors], terms_of_all, wait=wait)
        _carry_out(actions)
    most = None if limit == NO_LIMIT else limit
    hosts = [_host_memory(x, most) if entry.sends else None for x, entry in zip(tensors, entries, strict=True)]
    pairs = [(x, host) for x, host in zip(tensors, hosts, strict=True) if host is not None]
    begun = iter(copies.begin(pairs, device, out=True, timed=entries[0].timed) if pairs else ())
    found = []
    for x, entry, host in zip(tensors, entries, hosts, strict=True):
        entry.sends = host is not None
        copy = next(begun) if entry.sends else Copy(x, x)
        copy.entry = entry
        if copy.begun is not None:
            _steps_of(device).copied(entry, x.nbytes, copy.begun, copy.event)
        found.append(copy)
    return found


def _cross(begun: Sequence[Copy]) -> list[torch.Tensor]:
    """What crosses to the backward: the host tensor of each copy, or a stand-in for a tensor that stays on the device.

    The current stream waits for the copies here, unless the step's plan has it wait elsewhere.
    """
    device, staying = begun[0].source.device, []
    hosts: list[torch.Tensor] = []
    for copy in begun:
        entry, host = copy.entry, copy.target
        assert entry is not None
        block = pool.block_of(host) if entry.sends else None
        if block is None:
            entry.value = copy.source
            staying.append(entry)
        else:
            memory = block.leased()
            entry.host = functools.partial(_host_tensor, weakref.ref(memory), host.dtype, host.shape, device)
            weakref.finalize(memory, _release, [entry], [host.data_ptr()], device).atexit = False
            if entry.follows and not entry.joined:
                entry.out, copy.target = copy, copy.source  # it ends with the host tensor, and must not keep it alive
            else:
                copies.join(copy)
        hosts.append(host)
    if staying:
        addresses: list[int] = []
        release = functools.partial(_release, staying, addresses, device)
        stand_in = iter(stand_ins.stand_ins([entry.value for entry in staying], release))
        hosts = [next(stand_in) if copy.entry in staying else host for copy, host in zip(begun, hosts, strict=True)]
        addresses += [host.data_ptr() for copy, host in zip(begun, hosts, strict=True) if copy.entry in staying]
    _entries.update({host.data_ptr(): copy.entry for copy, host in zip(begun, hosts, strict=True) if copy.entry})
    return hosts


def _wait(ticket: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What crosses to the backward for one tensor."""
    copy = _in_flight.get(_number(ticket))
    if copy is None or copy.entry is None:
        return claim(ticket)
    _note("wait", [copy.entry], x.device)
    del _in_flight[_number(ticket)]
    return _cross([copy])[0]


def _host_tensor(
    memory: weakref.ref[Any], dtype: torch.dtype, shape: torch.Size, device: torch.device
) -> tuple[torch.Tensor, torch.device] | None:
    """The host tensor in `memory`, and where it goes back to; None if its memory is gone."""
    raw = memory()
    return None if raw is None else (stand_ins.shaped(torch.frombuffer(raw, dtype=dtype), shape), device)


def _release(entries: Sequence[steps.Entry], addresses: Sequence[int], device: torch.device) -> None:
    """Drop all that is kept for `entries`. Their host memory is gone: the backward is over, or will never come."""
    for address in addresses:
        _entries.pop(address, None)
    for entry in entries:
        for copy in (entry.out, entry.back):
            copies.join_unclaimed(copy)
        entry.value = entry.out = entry.back = None
        _steps_of(device).drop(entry)


def _is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured. Its replays don't run these operators, so they belong to no step."""
    return capture_under_way() is not None or capturing(device)


def _note(what: str, entries: Sequence[steps.Entry], device: torch.device) -> None:
    """Note a "wait" or "reload" of `entries` in the trace, and do what the step's plan has before it."""
    if not _is_captured(device):
        _carry_out(_steps_of(device).event(what, entries))


def _carry_out(actions: list[tuple[str, steps.Entry]]) -> None:
    """Wait for copies out ("join") and start copies back ("fetch")."""
    ahead: list[tuple[steps.Entry, torch.Tensor]] = []
    for what, entry in actions:
        if what == "join":
            entry.joined = True
            copy, entry.out = entry.out, None
            if copy is not None and entry.host is not None and (found := entry.host()) is not None:
                copy.target, _ = found
                copies.join(copy)
        elif entry.sends and entry.out is None and entry.host is not None and (found := entry.host()) is not None:
            host, device = found
            ahead.append((entry, host))
    if ahead:
        for (entry, _), copy in zip(ahead, _fetch([host for _, host in ahead], device), strict=True):
            entry.back = copy
            copy.source = copy.target  # as above


def _entry_of(host: torch.Tensor, decided: bool) -> steps.Entry | None:
    entry = _entries.get(host.data_ptr())
    if entry is None and decided:
        raise RuntimeError(
            "offload: the backward got another tensor than its forward saved; expected that one, by whose address it "
            "finds what stayed on the device. A saved-tensor hook around the compiled function has copied it: leave "
            "that context before the call"
        )
    return entry


def _reload(host: torch.Tensor, device: torch.device, decided: bool) -> torch.Tensor:
    """Start the copy back; returns the ticket for `claim`. A tensor that was `decided` may be on the device already."""
    entry = _entry_of(host, decided)
    if entry is None:
        return fetch(host, device)
    _note("reload", [entry], device)
    return _ticket(_back(host, device, entry))


def _back(host: torch.Tensor, device: torch.device, entry: steps.Entry) -> Copy:
    """The copy back of `entry`: under way, started now, or none if the tensor is on the device."""
    value, copy = entry.value, entry.out
    if copy is not None:
        _carry_out([("join", entry)])
        value = copy.source
    if value is not None:
        if entry.step >= 0 and _is_captured(device):  # the next step's tensor has another address
            raise _capture_error(device, capture_under_way(), "what a forward outside of it left here can't be read")
        entry.value = value if keeps_graph() else None
        # another backward reads it, so its reader must not write over it; or it is a view that begins elsewhere
        if entry.value is not None or value.data_ptr() % ALIGNMENT:
            value = value.clone()
        return Copy(host, value)
    if not entry.sends:
        raise RuntimeError("offload: a second backward without retain_graph reads a tensor that was freed by the first")
    ahead: Copy | None = entry.back
    entry.back = None
    current = torch.cuda.current_stream(device.index) if device.type == "cuda" else None
    if ahead is not None and ahead.stream in (None, current):
        ahead.source = host
        return ahead
    copies.join_unclaimed(ahead)  # it was fetched into the memory of another stream
    return _fetch([host], device)[0]


def offload_stats() -> dict[str, int]:
    """Counts since the last `aot_hooks.reset()`, and the host memory in use.

    Tensors and bytes sent to the host, fetched back, and kept on the device because the host had no room. The pool's
    bytes now, at most, and leased now; its blocks now, and those allocated. Of the last step of several graphs, if it
    had a plan: the calls of graphs, the bytes that they could send and those that they sent.
    """
    last = [each.last for each in _steps.values() if each.last is not None]
    step = ("graph_count", "nbytes", "sent_bytes")
    tensors = [f"{what}_{unit}" for what in ("sent", "fetched", "kept_on_device") for unit in ("count", "bytes")]
    return {name: _counts[name] for name in tensors} | {
        "host_bytes": pool.total_bytes,
        "host_peak_bytes": pool.peak_bytes,
        "host_leased_bytes": pool.leased_bytes,
        "host_blocks": pool.block_count,
        "host_blocks_made": pool.made_count,
        **{f"step_{name.replace('nbytes', 'bytes')}": sum(getattr(plan, name) for plan in last) for name in step},
    }


def reset() -> None:
    """Free unused host memory and reset the counts. Memory that tensors wait in is freed when they are."""
    pool.reset()
    stand_ins.reset()
    _counts.clear()
    for each in _steps.values():
        each.forget()


# --- operators --------------------------------------------------------------------------------------------------------

_library = torch.library.Library("aot_hooks", "FRAGMENT")


def _operator(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Defines the operator `torch.ops.aot_hooks.*` with this schema."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"aot_hooks::{name}", fake, lib=_library)
    return getattr(torch.ops.aot_hooks, name).default


def _offload_start(x: torch.Tensor, limit: int, terms: str = "") -> torch.Tensor:
    x = x.contiguous()
    if not terms or not x.nbytes:
        return send(x, None if limit == NO_LIMIT else limit)
    return _ticket(*_begin_decided([x], limit, terms, wait=False))


def _offload_together(tensors: Sequence[torch.Tensor], limit: int, terms: str) -> list[torch.Tensor]:
    tensors = [x.contiguous() for x in tensors]
    some = [x for x in tensors if x.nbytes]
    hosts = iter(_cross(_begin_decided(some, limit, terms, wait=True)) if some else ())
    return [next(hosts) if x.nbytes else torch.empty_like(x, device="cpu") for x in tensors]


def _reload_together(hosts: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    entries = [_entry_of(host, decided=True) if host.nbytes else None for host in hosts]
    _note("reload", [entry for entry in entries if entry is not None], device)
    found = [
        Copy(host, torch.empty_like(host, device=device)) if entry is None else _back(host, device, entry)
        for host, entry in zip(hosts, entries, strict=True)
    ]
    for copy in found:
        copies.join(copy)
    return [copy.target for copy in found]


def _fake_ticket(*_: Any) -> torch.Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


offload_start = _operator("offload_start(Tensor x, int limit, str terms='') -> Tensor", _offload_start, _fake_ticket)
offload_wait = _operator(
    "offload_wait(Tensor ticket, Tensor x) -> Tensor",
    _wait,
    lambda ticket, x: torch.empty(x.shape, dtype=x.dtype, device="cpu"),
)
reload_start = _operator(
    "reload_start(Tensor host, Device device, bool decided=False) -> Tensor",
    lambda host, device, decided=False: _reload(host, device, decided and host.nbytes > 0),
    _fake_ticket,
)
reload_wait = _operator(
    "reload_wait(Tensor ticket, Tensor host, Device device) -> Tensor",
    lambda ticket, host, device: claim(ticket),
    lambda ticket, host, device: torch.empty(host.shape, dtype=host.dtype, device=device),
)
offload_together = _operator(
    "offload_together(Tensor[] tensors, int limit, str terms) -> Tensor[]",
    _offload_together,
    lambda tensors, limit, terms: [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in tensors],
)
reload_together = _operator(
    "reload_together(Tensor[] hosts, Device device) -> Tensor[]",
    _reload_together,
    lambda hosts, device: [torch.empty(host.shape, dtype=host.dtype, device=device) for host in hosts],
)
for _op in (reload_wait, reload_together):
    returns_aligned(_op)
COPIES = (offload_start, offload_wait, reload_start, reload_wait, offload_together, reload_together)
