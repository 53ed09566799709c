"""A training step as data: bytes alive along it, and the ways to store each tensor that it saves for backward.

      position   0 1 2 3 ... forward ...        | ... backward ...                  n-1
      live       bytes alive with all tensors kept as they are
      value          made   gone                      first         last
                            |- kept otherwise --------|  until here its bytes can be something else

Positions count the nodes of all graphs of the step in the order that they run. Nothing here knows a graph, so one step
may be made of many.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..steps.memory import ALONE as ALONE
from ..steps.memory import Bytes as Bytes
from ..steps.memory import Moment as Moment

RECOMPUTE = "recompute"  # the name of such an option
COMPUTED = 4  # squared: what is computed from a rounded value may be twice as wrong


@dataclass(frozen=True)
class Option:
    """One way to store a value.

    Attributes:
        name: "keep", "recompute", or the hook as a user types it.
        hook: None for "keep" and "recompute".
        packed_bytes: what is alive on the device while the value is stored.
        ms: how much longer the device takes for the step.
        host_ms: how much longer the host takes for it.
        error: relative error of the value that comes back; 0 if exact.
        link_bytes: bytes sent to the host, and back.
        work_bytes: most bytes alive while it is packed or unpacked, beside the value itself when it is packed.
        in_registers: each reader unpacks it for itself, so it stays packed to its last reader.
        sources: numbers of the values that recomputing it reads.
        exact: those of `sources` that must come back exactly.
        again, reads: names of the nodes that are computed again, and of those that they read.
    """

    name: str
    hook: Any = None
    packed_bytes: int = 0
    ms: float = 0.0
    error: float = 0.0
    link_bytes: int = 0
    work_bytes: int = 0
    in_registers: bool = False
    sources: tuple[int, ...] = ()
    exact: tuple[int, ...] = ()
    again: tuple[str, ...] = field(default=(), repr=False)
    reads: tuple[str, ...] = field(default=(), repr=False)
    host_ms: float = 0.0


KEPT = Option("keep")


class Apart(NamedTuple):
    """A way to plan the calls of a graph apart: the first ones hold the least, so that the others may hold more."""

    moments: tuple[Moment, ...]  # what is alive beside one of the others
    tight_calls: int  # how many hold the least
    calls: int
    tight_ratio: float  # time of a call that holds the least, over its time without hooks
    ratio: float  # the same of all calls, as the program predicts it

    def ratio_with(self, loose_ratio: float) -> float:
        """Time of all calls over their time without hooks, if each call of the loose version has `loose_ratio`."""
        return (self.tight_calls * self.tight_ratio + (self.calls - self.tight_calls) * loose_ratio) / self.calls


@dataclass(frozen=True)
class Value:
    """A storage that the step saves for backward, or could save to compute another one again from it.

    Attributes:
        names: of the saved tensors that share it.
        nbytes: its bytes.
        gone: the first position of the forward at which only the backward needs it.
        first: the position of its first reader in the backward.
        last: that of its last reader.
        segment: number of the part of the backward that reads it.
        begin: the earliest position that reads it: `first`, or a recomputation of another value of its segment.
        options: besides keeping it.
        where: module path or line, for messages.
        saved: False: without a budget it is not saved. `Step.live` does not count it, and only an option stores it.
        reached_bytes: bytes of all values that are wrong if this one is, itself included; 0 stands for `nbytes`.
    """

    names: tuple[str, ...]
    nbytes: int
    gone: int
    first: int
    segment: int = 0
    begin: int = 0
    options: tuple[Option, ...] = ()
    where: str = ""
    saved: bool = True
    reached_bytes: int = 0
    last: int = 0


@dataclass(frozen=True)
class Step:
    """What a budget is solved for.

    Attributes:
        live: bytes alive at each position if every value is kept, over what is alive before the step.
        values: the saved storages.
        node_ms: predicted time of each position if every value is kept.
        forward_count: positions of the forward.
        to_host, to_device: bytes a second over the link, beside the compute.
        nodes: what runs at each position: "forward mm_3".
        places: the modules of these, for messages.
        copies_ms: time of each position as the schedule of copies counts it; (): `node_ms`.
        moments: what is alive beside it, if the step has more calls of compiled graphs.
        weighed_bytes: bytes that the backward reads of the forward, saved or recomputed. The error of a value is
            weighted by its share of them. 0: `saved_bytes`.
        host_ms: predicted time of the host if every value is kept; it counts if the device waits for the host.
    """

    live: tuple[int, ...]
    values: tuple[Value, ...]
    node_ms: tuple[float, ...]
    forward_count: int = 0
    to_host: float = float("inf")
    to_device: float = float("inf")
    nodes: tuple[str, ...] = field(default=(), repr=False)
    places: tuple[str, ...] = field(default=(), repr=False)
    copies_ms: tuple[float, ...] = field(default=(), repr=False)
    moments: tuple[Moment, ...] = ALONE
    weighed_bytes: int = 0
    host_ms: float = float("-inf")

    @functools.cached_property
    def saved_bytes(self) -> int:
        return sum(value.nbytes for value in self.values if value.saved)

    @property
    def peak_bytes(self) -> int:
        return self.bytes_of(self.live).peak(self.moments)

    def bytes_of(self, live: Sequence[int]) -> Bytes:
        """The bytes of a call with `live` bytes alive at each position."""
        return Bytes.of(live[: self.forward_count], live[self.forward_count :])

    def moments_at(self, position: int) -> list[Moment]:
        phase = "forward" if position < self.forward_count else "backward"
        return [moment for moment in self.moments if moment.phase == phase]

    @functools.cached_property
    def device_ms(self) -> float:
        return sum(self.node_ms)

    @property
    def ms(self) -> float:
        """Predicted time of the step if every value is kept."""
        return self.ms_with(())

    def ms_with(self, options: Iterable[Option]) -> float:
        """Predicted time of the step with `options`: the device's, or the host's if that takes longer."""
        options = list(options)
        return max(self.device_ms + sum(o.ms for o in options), self.host_ms + sum(o.host_ms for o in options))
