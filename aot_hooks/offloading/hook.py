"""`offload`: saved tensors wait in pinned host memory.

      x --[then.pack]--> leaves --large ones--> offload_start .. offload_wait --> host     small ones stay
                                                                                    |
      x <-[then.unpack]- leaves <------------- reload_start .. reload_wait  <-------+

In a graph, `pack` and `unpack` trace to these four operators, and `placement.py` moves them. In eager mode nothing is
planned: `pack` starts a copy and returns, see `Tape`.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import OptionError
from ..graphs.layout import from_memory_order, in_memory_order
from ..graphs.nodes import tensor_bytes
from ..graphs.saved import Dim
from ..graphs.speeds import Rates
from ..hook import STATED, Hook, Pack, compiled_by, hook_of, interned
from ..torch_private.values import hint, pytree
from . import transfers

_Sent = tuple[torch.device, tuple[int, ...] | None]  # where a leaf was, and the order of its dimensions


@dataclass(frozen=True)
class OffloadSettings:
    """The arguments of `offload`, which the schedule reads from the hook. `exact` means that there is no `then`."""

    exact: bool
    min_bytes: int
    max_host_bytes: int | None
    in_flight_bytes: int
    max_stall_ms: float
    rates: Rates | None
    across_graphs: bool = False
    room: tuple[float, ...] = ()  # of a budget, see `Terms`


def settings_of(hook: Hook) -> OffloadSettings | None:
    """The settings of a hook that `offload` made; None for any other."""
    return hook.pack.settings if isinstance(hook.pack, _Pack) else None


def unrounded(hook: Hook) -> Hook | None:
    """For an `offload` with a lossy `then`: the hook that sends as they are the tensors that `then` declines."""
    settings = settings_of(hook)
    if settings is None or not hook.lossy:
        return None
    limits = {name: value for name, value in vars(settings).items() if name not in ("exact", "room")}
    return offload_in_room(offload(**limits), settings.room)


def offload_in_room(hook: Hook, room: tuple[float, ...]) -> Hook:
    """`hook`, an `offload`, for a budget that has `room` for what it does not send, see `Terms.room`."""
    pack: Any = hook.pack
    return hook_of(replace(pack, settings=replace(pack.settings, room=room)), hook.unpack) if room else hook


@dataclass(frozen=True)
class _Pack(Pack):
    settings: OffloadSettings
    then: Hook | None

    def __call__(self, x: torch.Tensor) -> Any:
        packed = x if self.then is None else self.then.pack(x)
        leaves, spec = pytree.tree_flatten(packed)
        tensors = [(i, a) for i, a in enumerate(leaves) if isinstance(a, torch.Tensor)]
        decides_later, least = self.settings.across_graphs, self.settings.min_bytes
        large = [(i, a) for i, a in tensors if tensor_bytes(a) >= least or (decides_later and _follows_data(a.shape))]
        if not large:
            return packed, None, ()
        marks: list[_Sent | None] = [None] * len(leaves)  # tells unpack which leaves a graph sent
        limit = transfers.NO_LIMIT if self.settings.max_host_bytes is None else self.settings.max_host_bytes
        for i, a in large:
            if compiled_by() == "eager":
                leaves[i] = tape().send(a, self.settings)
                continue
            y, permutation = _contiguous_in_memory(a)
            leaves[i] = transfers.offload_wait(transfers.offload_start(y, limit), y)
            marks[i] = a.device, permutation
        return leaves, spec, tuple(marks)


@dataclass(frozen=True)
class _Unpack:
    then: Hook | None

    def __call__(self, packed: Any) -> torch.Tensor:
        leaves, spec, marks = packed
        if spec is not None:
            back = [self._restored(a, mark) for a, mark in zip(leaves, marks, strict=True)]
            leaves = pytree.tree_unflatten(back, spec)
        return leaves if self.then is None else self.then.unpack(leaves)

    @staticmethod
    def _restored(a: Any, mark: _Sent | None) -> Any:
        """Leaf `a` of the packed data, fetched if it is an eager copy or `mark` says that it was sent."""
        if isinstance(a, EagerCopy):
            return a.restore()
        if mark is None:
            return a
        device, permutation = mark
        ticket = transfers.reload_start(a, device)
        return from_memory_order(transfers.reload_wait(ticket, a, device), permutation)


def _follows_data(shape: Sequence[Any]) -> bool:
    """Whether `shape` has sizes that only the data give, as those of `nonzero`. Their hints are 0."""
    return any(isinstance(n, torch.SymInt | Dim) and not hint(n) for n in shape)


def _contiguous_in_memory(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """`in_memory_order` of all dimensions, or a contiguous copy where there is no such order."""
    y, permutation = in_memory_order(x, keep_rows=False)
    return (x.contiguous() if permutation is None else y), permutation


class EagerCopy:
    """A tensor that eager code sent: on the device until its copy is done and noticed, then on the host."""

    def __init__(self, x: torch.Tensor, settings: OffloadSettings, tape: Tape, index: int) -> None:
        y, self.permutation = _contiguous_in_memory(x)
        self.original: torch.Tensor | None = y
        self.version, self.changed = y._version, False
        self.host: torch.Tensor | None = None
        self.ticket: Any = transfers.send(y, settings.max_host_bytes)  # None while no copy is under way
        self.device, self.nbytes, self.shape = y.device, y.nbytes, list(x.shape)
        self.settings, self.tape, self.index = settings, tape, index

    def note_changes(self) -> None:
        """Notice a change in place while the copy may still read."""
        self.changed = self.changed or (self.original is not None and self.original._version != self.version)

    def release_original(self) -> None:
        """Wait for the copy to the host and free the device's memory."""
        if self.original is not None:
            self.note_changes()
            self.host, self.ticket, self.original = transfers.claim(self.ticket), None, None

    def fetch(self) -> None:
        """Start the copy back, unless it has started."""
        if self.host is not None and self.ticket is None:
            self.ticket = transfers.fetch(self.host, self.device)

    def restore(self) -> torch.Tensor:
        """The tensor on the device. Also starts to fetch the tensors that were sent before it and are needed next.

        Raises:
            RuntimeError: if the tensor was changed in place before its copy was seen to be done.
        """
        with self.tape.lock:  # autograd has a thread a device
            self.note_changes()
            if self.changed:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation "
                    f"while it was copied to the host: {self.shape}; write to a copy of it instead"
                )
            y = self.original  # its copy may go on: the ticket's end waits for it
            if y is None:
                if self.ticket is not None and not transfers.fetched_here(self.ticket):
                    self.ticket = None  # fetched ahead into another stream's memory
                self.fetch()
                y, self.ticket = transfers.claim(self.ticket), None
            self.tape.fetch_before(self)
        return from_memory_order(y, self.permutation)


class Tape:
    """The copies that one thread's forward started in eager mode, in order. Its backward fetches in reverse and ahead.

    A tensor stays on the device until its copy is seen to be done, or until more than `in_flight_bytes` are in flight.
    So no stream waits while the link keeps up. The backward fetches up to half of `in_flight_bytes` ahead.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.sent: weakref.WeakValueDictionary[int, EagerCopy] = weakref.WeakValueDictionary()  # by number, ascending
        self.in_flight: list[weakref.ref[EagerCopy]] = []
        self.numbers = itertools.count()

    def send(self, x: torch.Tensor, settings: OffloadSettings) -> EagerCopy:
        with self.lock:
            copy = EagerCopy(x, settings, self, next(self.numbers))
            self.sent[copy.index] = copy
            self.in_flight.append(weakref.ref(copy))
            self.release_copied(settings.in_flight_bytes)
        return copy

    def release_copied(self, in_flight_bytes: int) -> None:
        """Release originals that are copied, and the oldest others until at most `in_flight_bytes` are in flight."""
        alive = deque(c for ref in self.in_flight if (c := ref()) is not None and c.original is not None)
        total = sum(c.nbytes for c in alive)
        while alive and (total > in_flight_bytes or transfers.is_finished(alive[0].ticket)):
            oldest = alive.popleft()
            oldest.release_original()
            total -= oldest.nbytes
        self.in_flight = [weakref.ref(c) for c in alive]

    def fetch_before(self, copy: EagerCopy) -> None:
        """Fetch the tensors that were sent before `copy`, as many as may be ahead."""
        self.release_copied(copy.settings.in_flight_bytes)
        ahead = copy.settings.in_flight_bytes // 2
        for ref in reversed(self.sent.valuerefs()):
            other = ref()
            if other is None or other.index >= copy.index or other.original is not None:
                continue
            ahead -= other.nbytes
            if ahead < 0:
                break
            other.fetch()


_local = threading.local()


def tape() -> Tape:
    if not hasattr(_local, "tape"):
        _local.tape = Tape()
    return _local.tape  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Declines:
    min_bytes: int
    then: Hook | None
    decides_later: bool

    def __call__(self, saved: Any) -> str | None:
        if saved.device.type not in ("cuda", "cpu"):
            return f"offload has no copies beside the compute for device {saved.device}"
        follows_data = _follows_data(saved.shape)
        if saved.nbytes < self.min_bytes and follows_data and not self.decides_later:
            return "its size is known when it runs; offload(across_graphs=True) decides then"
        if saved.nbytes < self.min_bytes and not follows_data:
            return f"smaller than min_bytes={self.min_bytes}"
        return None if self.then is None else self.then.why_not(saved)


@interned
def offload(
    min_bytes: int = 1 << 20,
    then: Hook | None = None,
    *,
    max_host_bytes: int | None = None,
    in_flight_bytes: int = 1 << 30,
    max_stall_ms: float = 0.0,
    rates: Rates | None = None,
    across_graphs: bool = False,
) -> Hook:
    """Store saved tensors in pinned host memory; the copies run beside the compute. Exact, unless `then` is not.

    Args:
        min_bytes: smaller tensors stay on the device, and so do smaller tensors of the packed form of `then`.
        then: a hook for the form in which tensors wait: with `int8()` half as many bytes go over the link. It runs on
            the device, before the copy out and after the copy back. Tensors that a lossy one declines, such as queries
            and keys of attention, are sent as they are. Those that an exact one declines stay on the device.
        max_host_bytes: most host memory for this process' pool. Tensors that do not fit stay on the device, and
            `offload_stats` counts them. None: as much as can be pinned.
        in_flight_bytes: most bytes of this hook in flight, each way, in each compiled graph: copies that were started
            and not waited for. They take memory on the device. The more there are, the more of an uneven step the
            copies can use.
        max_stall_ms: how much longer this hook may make a step, as predicted, for each compiled graph and device. 0
            offloads only as much as the compute hides; `math.inf` offloads all that the rules above allow.
        rates: speeds of link and device to plan with, see `Rates`; None measures them once per device. The first hook
            of a graph that has rates sets them for all others on its device.
        across_graphs: one plan for all graphs of a step, as compiled blocks or graph breaks make them. Which call
            sends is decided when the graphs run, by two operators of Python in each graph. The first steps are timed.
            They send all, and wait for it. Tensors whose size only the data give are sent if they have `min_bytes`.

    On CUDA the copies have streams of their own. On a CPU they are plain copies, so that a program can be tried out.

    Raises:
        OptionError: for sizes that are not numbers of bytes, or a `then` that runs eagerly or offloads itself.
    """
    counts: dict[str, Any] = {"min_bytes": min_bytes, "in_flight_bytes": in_flight_bytes}
    counts |= {} if max_host_bytes is None else {"max_host_bytes": max_host_bytes}
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise OptionError(f"offload: {name} must be a number of bytes, an int of at least 0, got {count!r}")
    stall: Any = max_stall_ms
    if not isinstance(stall, int | float) or isinstance(stall, bool) or not stall >= 0:
        raise OptionError(f"offload: max_stall_ms must be a number of at least 0, math.inf for all, got {stall!r}")
    if rates is not None and not isinstance(rates, Rates):
        raise OptionError(f"offload: rates must be None or aot_hooks.Rates, got {rates!r}")
    if then is not None and getattr(then, "eager", True):
        raise OptionError(f"offload: then must be a Hook that is traced, got {then!r}")
    if then is not None and isinstance(then.pack, _Pack):
        raise OptionError(f"offload: then must say in which form tensors wait, got {then!r}, which sends them itself")
    if not isinstance(across_graphs, bool):
        raise OptionError(f"offload: across_graphs must be True or False, got {across_graphs!r}")
    limits = min_bytes, max_host_bytes, in_flight_bytes, max_stall_ms
    settings = OffloadSettings(then is None, *limits, rates, across_graphs)
    name = "offload" if then is None else f"offload({then.name})"
    stated: dict[str, Any] = {"error": 0.0} if then is None else {field: getattr(then, field) for field in STATED}
    lossy = then is not None and then.lossy
    pack = _Pack(name, _Declines(min_bytes, then, across_graphs), settings, then, lossy=lossy, **stated)
    return hook_of(pack, _Unpack(then))
