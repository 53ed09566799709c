"""Two operators that decide when they run which tensors of a graph are copied: those of `offload(across_graphs=True)`.

      forward    ticket = offload_together(xs)      after their last readers
      backward   xs = reload_together(ticket)       before their first reader

One compiled graph serves all layers, and what is sent differs between them: see steps/. One ticket crosses to the
backward for all of `xs`. While it lives, each tensor stays on the device or waits on the host. A ticket is int64[1] on
the CPU, known by its address. A tensor with symbolic sizes also crosses as an empty tensor of its shape.

Two operators rather than two for each tensor, because a host that is slower than its device waits for each one.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cudagraph import settling

from ..errors import UnusedWarning
from ..graphs.speeds import measured_rates
from ..steps.follow import Follower
from ..steps.plan import Do, StepPlan, Terms, plan_step
from ..steps.recorder import Trace
from ..steps.saved import ItemAction, SavedItem
from ..torch_private.autograd import keeps_graph
from ..torch_private.inductor_lowering import ALIGNMENT, lower_to_call
from . import copies
from .copies import Copy
from .transfers import NO_LIMIT, begin_back, capture_error, define, fake_ticket, host_memory, is_captured

_items: dict[int, list[SavedItem]] = {}  # by the address of their ticket
_followers: dict[torch.device, Follower] = {}


def layouts_of(tensors: Sequence[torch.Tensor]) -> str:
    """The dtypes and shapes of `tensors` as a text for `reload_together`: "float32 4 4,bfloat16 ?" for unknown sizes.

    Without quotes, which Inductor's C++ code does not escape.
    """
    shapes = [x.shape if all(isinstance(n, int) for n in x.shape) else "?" for x in tensors]
    dtypes = [str(x.dtype).removeprefix("torch.") for x in tensors]
    return ",".join(" ".join(map(str, (dtype, *shape))) for dtype, shape in zip(dtypes, shapes, strict=True))


def _offload_together(
    tensors: Sequence[torch.Tensor], limit: int, terms: Sequence[float], carried: Sequence[int]
) -> list[torch.Tensor]:
    """Send or keep `tensors` as the step's plan says. Returns a ticket, and tensors of the sizes of those `carried`."""
    device, most = tensors[0].device, None if limit == NO_LIMIT else limit
    kept = _in_own_memory([x.contiguous() for x in tensors])
    memory = (ctypes.c_int64 * 1)()
    ticket = torch.frombuffer(memory, dtype=torch.int64)
    captured = is_captured(device)
    start = follower_of(device).start_captured if captured else follower_of(device).start
    conditions = Terms.of(terms)
    items, actions = start([x.nbytes for x in kept], conditions)
    _items[ticket.data_ptr()] = items
    weakref.finalize(memory, _release, ticket.data_ptr(), device).atexit = False  # if something below raises, too
    _carry_out(actions, device)
    sent: list[tuple[SavedItem, torch.Tensor, torch.Tensor]] = []
    for item, x in zip(items, kept, strict=True):
        host = host_memory(x, most) if item.sends and x.nbytes >= max(1, conditions.min_bytes) else None
        if host is None:
            item.value = x
        else:
            sent.append((item, x, host))
    if sent:
        begun = copies.begin([(x, host) for _, x, host in sent], device, out=True, timed=items[0].timed)
        for (item, x, host), copy in zip(sent, begun, strict=True):
            item.host, item.out = host, copy
            if copy.begun is not None:
                follower_of(device).copied(item, x.nbytes, copy.begun, copy.event)
            if item.joined:
                _join(item)
    if not captured:
        follower_of(device).waited()
    return [ticket, *(torch.empty(()).expand(tensors[i].shape) for i in carried)]


def _in_own_memory(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`tensors`, with a copy of each tensor that is a part of its storage, or shares it with an earlier one.

    A compiler may put several tensors into one storage. The backward assumes that each tensor it gets back has a
    storage of its own, and may write over it.
    """
    taken: set[int] = set()
    found = []
    for x in tensors:
        if x.untyped_storage().nbytes() != x.nbytes or x.data_ptr() in taken:
            x = x.clone()
        if x.nbytes:
            taken.add(x.data_ptr())
        found.append(x)
    return found


def _reload_together(
    ticket: torch.Tensor, carriers: Sequence[torch.Tensor], device: torch.device, layouts: str
) -> list[torch.Tensor]:
    """The tensors of `ticket`, on the device. `carriers`, `layouts` are for compilers: they tell the sizes."""
    items = _items.get(ticket.data_ptr())
    if items is None:
        raise RuntimeError(
            "offload: the backward got another tensor than its forward saved; expected that one, by whose address it "
            "finds what the forward left. A saved-tensor hook around the compiled function has copied it: leave that "
            "context before the call"
        )
    captured = is_captured(device)
    if not captured or all(item.call is None for item in items):
        _carry_out(follower_of(device).reload(items), device)
    else:  # the next step's tensors have other addresses
        raise capture_error(device, "what a forward outside of it left here can't be read")
    keeps, current = keeps_graph(), torch.cuda.current_stream(device.index) if device.type == "cuda" else None
    found = [_back(item, device, keeps, current) for item in items]
    for copy in found:
        copies.join(copy)
    if not captured:
        follower_of(device).waited()
    return [copy.target for copy in found]


def _back(item: SavedItem, device: torch.device, keeps: bool, current: Any) -> Copy:
    """The copy back of `item`: under way, started now, or none if the tensor is on the device.

    Args:
        keeps: whether another backward may read the tensor.
        current: the current stream.
    """
    value, out = item.value, item.out  # another thread may join it meanwhile
    if out is not None:
        value = out.source
        _join(item)
    if value is not None:
        item.value = value if keeps else None
        # this reader may write over it; and a view may begin anywhere
        return Copy(value, value.clone() if keeps or value.data_ptr() % ALIGNMENT else value)
    if item.host is None:
        raise RuntimeError("offload: a second backward without retain_graph reads a tensor that was freed by the first")
    ahead: Copy | None = item.back
    item.back = None
    if ahead is not None and ahead.stream in (None, current):
        return ahead
    copies.join_unclaimed(ahead)  # it was fetched into the memory of another stream
    return begin_back([item.host], device)[0]


def holds(memory: StorageWeakRef) -> bool:
    """Whether a tensor that is to be sent has this memory still: it stays on the device, or its copy is in flight."""
    found = [(item.out, item.value) for items in [*_items.values()] for item in items]
    held = (value if out is None else out.source for out, value in found)
    return any(x is not None and StorageWeakRef(x.untyped_storage()) == memory for x in held)


def _join(item: SavedItem) -> None:
    """Have the current stream wait for the copy out, and let go of the tensor on the device."""
    item.joined = True  # first: a thread that begins the copy meanwhile looks here after that
    copy = item.out
    if copy is not None:
        copies.join(copy)
        item.out = None


def _carry_out(actions: list[ItemAction], device: torch.device) -> None:
    """Wait for copies out, and start copies back."""
    ahead = []
    for what, item in actions:
        if what is Do.JOIN:
            _join(item)
        elif item.host is not None and item.out is None:
            ahead.append(item)
    if ahead:
        for item, copy in zip(ahead, begin_back([item.host for item in ahead], device), strict=True):
            item.back = copy


def _release(address: int, device: torch.device) -> None:
    """Drop what is kept for a ticket that is gone: its backward is over, or will never come."""
    items = _items.pop(address)
    for item in items:
        for copy in (item.out, item.back):
            copies.join_unclaimed(copy)
        item.value = item.out = item.back = item.host = None
    follower_of(device).drop(items)


# --- steps of a device ------------------------------------------------------------------------------------------------


def follower_of(device: torch.device) -> Follower:
    """The steps of `device`. All threads share them: a backward may run in a thread of its own."""
    if device not in _followers:
        times, plan = functools.partial(_times, device), functools.partial(_plan, device)
        _followers.setdefault(device, Follower(lambda: _mark(device), times, plan, adapts=device.type == "cuda"))
    return _followers[device]


def all_followers() -> list[Follower]:
    return [*_followers.values()]


settling.unsettled_counts.append(lambda: sum(follower.unsettled_count for follower in all_followers()))


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


def _plan(device: torch.device, trace: Trace, at_ms: Sequence[float], share: float, spare_bytes: int) -> StepPlan:
    """The plan for a step whose events run `at_ms`, on a link with `share` of its speed."""
    rates = measured_rates(device)
    links = (call.terms[2:4] for call in trace.calls if call.terms.to_host)
    to_host, to_device = next(links, (rates.to_host, rates.to_device))
    plan = plan_step(trace, at_ms, share * to_host, share * to_device, spare_bytes)
    if not plan.sent_bytes and share == 1.0 and plan.excess_bytes is None:
        warnings.warn(
            f"aot_hooks.offload: a step of {plan.graph_count} calls of compiled graphs sends none of its {plan.nbytes} "
            f"bytes: its forward of {plan.forward_ms:.1f} ms and backward of {plan.backward_ms:.1f} ms hide no copies. "
            "max_stall_ms allows a longer step",
            UnusedWarning,
            stacklevel=2,
        )
    return plan


# --- operators --------------------------------------------------------------------------------------------------------


def _fake_offload(
    tensors: Sequence[torch.Tensor], limit: int, terms: Sequence[float], carried: Sequence[int]
) -> list[torch.Tensor]:
    return [fake_ticket(), *(torch.empty((), device="cpu").expand(tensors[i].shape) for i in carried)]


def _fake_reload(
    ticket: torch.Tensor, carriers: Sequence[torch.Tensor], device: torch.device, layouts: str
) -> list[torch.Tensor]:
    carried = iter(carriers)
    return [
        torch.empty(
            next(carried).shape if shape == ["?"] else [*map(int, shape)], dtype=getattr(torch, dtype), device=device
        )
        for dtype, *shape in map(str.split, layouts.split(","))
    ]


offload_together = define(
    "offload_together(Tensor[] tensors, int limit, float[] terms, int[] carried) -> Tensor[]",
    _offload_together,
    _fake_offload,
)
reload_together = define(
    "reload_together(Tensor ticket, Tensor[] carriers, Device device, str layouts) -> Tensor[]",
    _reload_together,
    _fake_reload,
)
lower_to_call(offload_together, keeps_tensors=True)
lower_to_call(reload_together, returns_aligned=True)
