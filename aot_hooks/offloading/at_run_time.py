"""Two operators that decide when they run which tensors of a graph are copied: those of `offload(across_graphs=True)`.

      forward    ticket = offload_together(xs)      after their last readers
      backward   xs = reload_together(ticket)       before their first reader

One compiled graph serves all layers, and what is sent differs between them: see step_plan.py. One ticket crosses to the
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

from ..errors import UnusedWarning
from ..graphs.speeds import measured_rates
from ..torch_private.autograd import keeps_graph
from ..torch_private.inductor_lowering import ALIGNMENT, lower_to_call
from . import copies, steps
from .copies import Copy
from .step_plan import Event, StepPlan, Terms, plan_step
from .transfers import NO_LIMIT, begin_back, capture_error, define, fake_ticket, host_memory, is_captured

_entries: dict[int, list[steps.Entry]] = {}  # by the address of their ticket
_steps: dict[torch.device, steps.Steps] = {}


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
    device, most = tensors[0].device, None if limit == NO_LIMIT else limit
    kept = _in_own_memory([x.contiguous() for x in tensors])
    memory = (ctypes.c_int64 * 1)()
    ticket = torch.frombuffer(memory, dtype=torch.int64)
    actions: list[tuple[str, steps.Entry]] = []
    captured = is_captured(device)
    if captured:  # a replay belongs to no step
        entries = [steps.Entry(False) for _ in kept]
    else:
        entries, actions = steps_of(device).start([x.nbytes for x in kept], Terms(*terms))
    _entries[ticket.data_ptr()] = entries
    weakref.finalize(memory, _release, ticket.data_ptr(), device).atexit = False  # if something below raises, too
    _carry_out(actions, device)
    sent: list[tuple[steps.Entry, torch.Tensor, torch.Tensor]] = []
    for entry, x in zip(entries, kept, strict=True):
        host = host_memory(x, most) if entry.sends and x.nbytes else None
        if host is None:
            entry.value = x
        else:
            sent.append((entry, x, host))
    if sent:
        begun = copies.begin([(x, host) for _, x, host in sent], device, out=True, timed=entries[0].timed)
        for (entry, x, host), copy in zip(sent, begun, strict=True):
            entry.host, entry.out = host, copy
            if copy.begun is not None:
                steps_of(device).copied(entry, x.nbytes, copy.begun, copy.event)
            if entry.joined:
                _join(entry)
    if not captured:
        steps_of(device).waited()
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
    entries = _entries.get(ticket.data_ptr())
    if entries is None:
        raise RuntimeError(
            "offload: the backward got another tensor than its forward saved; expected that one, by whose address it "
            "finds what the forward left. A saved-tensor hook around the compiled function has copied it: leave that "
            "context before the call"
        )
    captured = is_captured(device)
    if not captured:
        _carry_out(steps_of(device).reload(entries), device)
    if captured and any(entry.step >= 0 for entry in entries):  # the next step's tensors have other addresses
        raise capture_error(device, "what a forward outside of it left here can't be read")
    keeps, current = keeps_graph(), torch.cuda.current_stream(device.index) if device.type == "cuda" else None
    found = [_back(entry, device, keeps, current) for entry in entries]
    for copy in found:
        copies.join(copy)
    if not captured:
        steps_of(device).waited()
    return [copy.target for copy in found]


def _back(entry: steps.Entry, device: torch.device, keeps: bool, current: Any) -> Copy:
    """The copy back of `entry`: under way, started now, or none if the tensor is on the device.

    Args:
        keeps: whether another backward may read the tensor.
        current: the current stream.
    """
    value, out = entry.value, entry.out  # another thread may join it meanwhile
    if out is not None:
        value = out.source
        _join(entry)
    if value is not None:
        entry.value = value if keeps else None
        # this reader may write over it; and a view may begin anywhere
        return Copy(value, value.clone() if keeps or value.data_ptr() % ALIGNMENT else value)
    if entry.host is None:
        raise RuntimeError("offload: a second backward without retain_graph reads a tensor that was freed by the first")
    ahead: Copy | None = entry.back
    entry.back = None
    if ahead is not None and ahead.stream in (None, current):
        return ahead
    copies.join_unclaimed(ahead)  # it was fetched into the memory of another stream
    return begin_back([entry.host], device)[0]


def _join(entry: steps.Entry) -> None:
    """Have the current stream wait for the copy out, and let go of the tensor on the device."""
    entry.joined = True  # first: a thread that begins the copy meanwhile looks here after that
    copy = entry.out
    if copy is not None:
        copies.join(copy)
        entry.out = None


def _carry_out(actions: list[tuple[str, steps.Entry]], device: torch.device) -> None:
    """Wait for copies out ("join") and start copies back ("fetch")."""
    ahead = []
    for what, entry in actions:
        if what == "join":
            _join(entry)
        elif entry.host is not None and entry.out is None:
            ahead.append(entry)
    if ahead:
        for entry, copy in zip(ahead, begin_back([entry.host for entry in ahead], device), strict=True):
            entry.back = copy


def _release(address: int, device: torch.device) -> None:
    """Drop what is kept for a ticket that is gone: its backward is over, or will never come."""
    for entry in _entries.pop(address):
        for copy in (entry.out, entry.back):
            copies.join_unclaimed(copy)
        entry.value = entry.out = entry.back = entry.host = None
        steps_of(device).drop(entry)


# --- steps of a device ------------------------------------------------------------------------------------------------


def steps_of(device: torch.device) -> steps.Steps:
    """The steps of `device`. All threads share them: a backward may run in a thread of its own."""
    if device not in _steps:
        times, plan = functools.partial(_times, device), functools.partial(_plan, device)
        found = steps.Steps(lambda: _mark(device), times, plan, adapts=device.type == "cuda")
        _steps.setdefault(device, found)
    return _steps[device]


def all_steps() -> list[steps.Steps]:
    return [*_steps.values()]


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


def _plan(device: torch.device, trace: tuple[Event, ...], at_ms: Sequence[float], share: float) -> StepPlan:
    """The plan for a step whose events run `at_ms`, on a link with `share` of its speed."""
    rates = measured_rates(device)
    links = (event[2][2:4] for event in trace if event[0] == "start" and event[2].to_host)
    to_host, to_device = next(links, (rates.to_host, rates.to_device))
    plan = plan_step(trace, at_ms, share * to_host, share * to_device)
    if not plan.sent_bytes and share == 1.0:
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
