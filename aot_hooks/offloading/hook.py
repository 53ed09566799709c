"""`offload`: saved tensors wait in pinned host memory.

      x --[then.pack]--> leaves --large ones--> offload_start .. offload_wait --> host     small ones stay
                                                                                    |
      x <-[then.unpack]- leaves <------------- reload_start .. reload_wait  <-------+

In a graph this is what `pack` and `unpack` trace to; where the four operators stand is `place.py`'s business. In eager
mode, where nothing is planned, `pack` starts a copy and goes on; see `Tape`.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import OptionError
from ..graphs.roofline import Rates
from ..hook import Hook, compiled_by, interned
from ..torch_private.values import hint, pytree, same_size
from . import transfers

__all__ = ["OffloadSettings", "offload", "settings_of"]


@dataclass(frozen=True)
class OffloadSettings:
    """What `offload` was given; the schedule reads it off the hook. `exact`: there is no `then`."""

    exact: bool
    min_bytes: int
    max_host_bytes: int | None
    in_flight_bytes: int
    max_stall_ms: float
    rates: Rates | None


def settings_of(hook: Hook) -> OffloadSettings | None:
    """The settings of a hook that `offload` made; None for any other."""
    return hook.pack.settings if isinstance(hook.pack, _Pack) else None


@dataclass(frozen=True)
class _Sent:
    """A leaf that was sent from a graph: marks it for unpack."""

    device: torch.device
    order: tuple[int, ...] | None


@dataclass(frozen=True)
class _Pack:
    settings: OffloadSettings
    then: Hook | None
    declines: Callable[[Any], str | None]
    lossy: bool

    @property
    def __name__(self) -> str:  # as a function has one: a hook made of this pack alone is shown by it
        return "offload" if self.then is None else f"offload({self.then.name})"

    def __call__(self, x: torch.Tensor) -> Any:
        packed = x if self.then is None else self.then.pack(x)
        leaves, spec = pytree.tree_flatten(packed)
        if not any(self._large(a) for a in leaves):
            return (x, None, ()) if self.then is None else (packed, None, ())
        marks: list[Any] = []
        for i, a in enumerate(leaves):
            if not self._large(a):
                marks.append(None)
            elif compiled_by() == "eager":
                leaves[i] = tape().send(a, self.settings)
                marks.append(None)
            else:
                y, order = _in_memory(a)
                limit = self.settings.max_host_bytes
                ticket = transfers.offload_start(y, transfers.NO_LIMIT if limit is None else limit)
                leaves[i] = transfers.offload_wait(ticket, y)
                marks.append(_Sent(a.device, order))
        return leaves, spec, tuple(marks)

    def _large(self, a: Any) -> bool:
        return isinstance(a, torch.Tensor) and hint(a.numel()) * a.element_size() >= self.settings.min_bytes


@dataclass(frozen=True)
class _Unpack:
    then: Hook | None

    def __call__(self, packed: Any) -> torch.Tensor:
        leaves, spec, marks = packed
        if spec is not None:
            back = [self._leaf(a, mark) for a, mark in zip(leaves, marks, strict=True)]
            leaves = pytree.tree_unflatten(back, spec)
        return leaves if self.then is None else self.then.unpack(leaves)

    def _leaf(self, a: Any, mark: _Sent | None) -> Any:
        if isinstance(a, EagerCopy):
            return a.back()
        if mark is None:
            return a
        ticket = transfers.reload_start(a, mark.device)
        return _from_memory(transfers.reload_wait(ticket, a, mark.device), mark.order)


def _in_memory(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """`x` with its dimensions in the order of memory, contiguous, and that order; None for the order it has."""
    order = tuple(range(x.dim()))
    if not _contiguous(x, order):
        # dimensions of size 1 stand in front: their strides come back as multiples of all others
        order = tuple(sorted(order, key=lambda d: (not same_size(x.shape[d], 1), -hint(x.stride(d)))))
        if _contiguous(x, order):
            return x.permute(order), order
    return x.contiguous(), None


def _contiguous(x: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether `x.permute(order)` is contiguous for certain."""
    expected: Any = 1
    for d in reversed(order):
        if not same_size(x.shape[d], 1):
            if not same_size(x.stride(d), expected):
                return False
            expected = expected * x.shape[d]
    return True


def _from_memory(y: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    return y if order is None else y.permute(sorted(range(len(order)), key=lambda i: order[i]))


# --- eager mode -------------------------------------------------------------------------------------------------------


class EagerCopy:
    """A tensor that eager code sent: on the device until its copy is done and noticed, then on the host."""

    __slots__ = (
        "__weakref__",
        "changed",
        "device",
        "host",
        "index",
        "nbytes",
        "order",
        "raw",
        "settings",
        "tape",
        "ticket",
        "version",
    )

    def __init__(self, x: torch.Tensor, settings: OffloadSettings, tape: Tape) -> None:
        y, self.order = _in_memory(x)
        self.raw: torch.Tensor | None = y
        self.version, self.changed = y._version, False
        self.host: torch.Tensor | None = None
        self.ticket: torch.Tensor | None = transfers.send(y, settings.max_host_bytes)
        self.device, self.nbytes = y.device, y.nbytes
        self.settings, self.tape = settings, tape
        self.index = -1

    def look(self) -> None:
        """Notice a change in place while the copy may still read."""
        self.changed = self.changed or (self.raw is not None and self.raw._version != self.version)

    def settle(self) -> None:
        """Wait for the copy to the host and let go of the device's memory."""
        if self.raw is not None:
            assert self.ticket is not None
            self.look()
            self.host, self.ticket, self.raw = transfers.claim_host(self.ticket), None, None

    def fetch(self) -> None:
        """Start the copy back, if none is under way."""
        if self.host is not None and self.ticket is None:
            self.ticket = transfers.fetch(self.host, self.device)

    def back(self) -> torch.Tensor:
        """The tensor on the device; those that were sent before it, and so are needed next, are on their way then.

        Raises a `RuntimeError` if it was changed in place before its copy was seen to be done.
        """
        with self.tape.lock:  # autograd has a thread a device
            self.look()
            if self.changed:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation "
                    f"while it was copied to the host: [{list(self.raw.shape) if self.raw is not None else ''}]"
                )
            y = self.raw  # its copy may go on: whoever lets go of this object waits for it
            if y is None:
                if self.ticket is not None and not transfers.fetched_here(self.ticket):
                    self.ticket = None  # fetched ahead for another stream, to which its memory would belong
                self.fetch()
                assert self.ticket is not None
                y, self.ticket = transfers.claim_device(self.ticket), None
            self.tape.fetch_before(self)
        return _from_memory(y, self.order)


class Tape:
    """What one thread's forward sent in eager mode, in order, so that its backward fetches in reverse and ahead.

    A tensor stays on the device until its copy is seen to be done, or until more than `in_flight_bytes` are under way;
    so no stream waits as long as the link keeps up. In the backward up to half of `in_flight_bytes` are fetched ahead.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.sent: dict[int, weakref.ref[EagerCopy]] = {}  # by number, ascending; what dies goes
        self.under_way: deque[weakref.ref[EagerCopy]] = deque()
        self.numbers = itertools.count()

    def send(self, x: torch.Tensor, settings: OffloadSettings) -> EagerCopy:
        with self.lock:
            copy = EagerCopy(x, settings, self)
            copy.index = index = next(self.numbers)
            sent = self.sent
            sent[index] = weakref.ref(copy, lambda _: sent.pop(index, None))
            self.under_way.append(weakref.ref(copy))
            self.settle(settings.in_flight_bytes)
        return copy

    def settle(self, in_flight_bytes: int) -> None:
        """Let go of what has been copied, and of the oldest until no more than `in_flight_bytes` are under way."""
        alive = [c for ref in self.under_way if (c := ref()) is not None and c.raw is not None]
        total = sum(c.nbytes for c in alive)
        for i, c in enumerate(alive):
            assert c.ticket is not None
            if total <= in_flight_bytes and not transfers.finished(c.ticket):
                alive = alive[i:]
                break
            c.settle()
            total -= c.nbytes
        else:
            alive = []
        self.under_way = deque(weakref.ref(c) for c in alive)

    def fetch_before(self, copy: EagerCopy) -> None:
        """Have what was sent before `copy` fetched, as far as it may be ahead."""
        self.settle(copy.settings.in_flight_bytes)
        ahead = copy.settings.in_flight_bytes // 2
        for index in reversed(list(self.sent)):
            ref = self.sent.get(index) if index < copy.index else None
            other = ref() if ref is not None else None
            if other is None or other.raw is not None:
                continue
            ahead -= other.nbytes
            if ahead < 0:
                break
            other.fetch()


_local = threading.local()


def tape() -> Tape:
    """The tape of this thread."""
    if not hasattr(_local, "tape"):
        _local.tape = Tape()
    return _local.tape  # type: ignore[no-any-return]


# --- the hook ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Declines:
    min_bytes: int
    then: Hook | None

    def __call__(self, saved: Any) -> str | None:
        if saved.device.type not in ("cuda", "cpu"):
            return f"offload has no copies beside the compute for device {saved.device}"
        if saved.nbytes < self.min_bytes:
            return f"smaller than min_bytes={self.min_bytes}"
        return self.then.why_not(saved) if self.then is not None else None


@interned
def offload(
    min_bytes: int = 1 << 20,
    then: Hook | None = None,
    *,
    max_host_bytes: int | None = None,
    in_flight_bytes: int = 1 << 30,
    max_stall_ms: float = 0.0,
    rates: Rates | None = None,
) -> Hook:
    """Keep saved tensors in pinned host memory; the copies run beside the compute. Exact, unless `then` is not.

    Args:
        min_bytes: smaller tensors stay on the device, and smaller parts of what `then` makes.
        then: a hook for the form in which they wait: with `int8()` half as many bytes go over the link. It runs on the
            device, before the copy out and after the copy back. What it declines stays on the device.
        max_host_bytes: most host memory for this process' pool; what does not fit stays on the device and is counted
            by `offload_stats`. None: as much as can be pinned.
        in_flight_bytes: most bytes of this hook that were started and not waited for, each way, in each compiled graph:
            they take memory on the device, and the more there are, the more of an uneven step the copies can use.
        max_stall_ms: how much longer this hook may make a step, as predicted, for each compiled graph and device. 0
            offloads only what the compute hides; with `math.inf` all is offloaded that the rules above allow.
        rates: speeds of link and device to plan with, see `Rates`; None measures them once per device. They are the
            device's, so of several hooks in a graph the first that gives them gives them for all.

    On CUDA the copies have streams of their own. On a CPU they are plain copies, so that a program can be tried out.

    Raises:
        OptionError: for sizes that are none, or a `then` that runs eagerly or offloads itself.
    """
    counts: dict[str, Any] = {"min_bytes": min_bytes, "in_flight_bytes": in_flight_bytes}
    if max_host_bytes is not None:
        counts["max_host_bytes"] = max_host_bytes
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
    settings = OffloadSettings(then is None, min_bytes, max_host_bytes, in_flight_bytes, max_stall_ms, rates)
    declines = _Declines(min_bytes, then)
    pack = _Pack(settings, then, declines, then is not None and then.lossy)
    return Hook(pack.__name__, pack, _Unpack(then), declines=declines, lossy=pack.lossy)
