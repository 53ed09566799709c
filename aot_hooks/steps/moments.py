"""What is alive beside each graph of a step of many calls, and the share of the budget that each graph gets.

      A.  B.  B.  B'  B'  A'      for B, at worst: its forward and its backward beside another call of B and one of A;
                                  its last backward beside one of A, and gradients of the first one
                                  for A: its backward beside all gradients; B, running beside what A holds

Pure functions of instants: what runs, and which calls hold saved tensors meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .memory import Bytes, Moment
from .recorder import Phase, Trace


@dataclass(frozen=True)
class Instant:
    """An event of a step, with what is alive meanwhile.

    Attributes:
        phase: "forward" or "backward"; "" between the two, where the program's own code runs, such as its loss.
        runs: the graph; None: none of them.
        holding: how many other calls hold their saved tensors meanwhile, by graph.
        gradient_bytes: gradients of parameters that earlier backwards left.
        gathered_bytes: parameters that are gathered for a while, as with FSDP2.
        freed_bytes: what the call returned, if nothing holds it any more: the bytes of its backward contain it. Less
            what the program still holds of calls that have run backward: no other bytes contain it.
        call: the number of the call in its step.
        loss_bytes: what the program's own code takes between the forwards and the backwards.
    """

    phase: str
    runs: Any
    holding: Mapping[Any, int]
    gradient_bytes: int = 0
    gathered_bytes: int = 0
    freed_bytes: int = 0
    call: int = 0
    loss_bytes: int = 0

    def nbytes(self, of: Callable[[Any], Bytes]) -> int:
        """The most that is alive, with the bytes that `of` returns for a call of a graph."""
        held = sum(count * of(graph).held for graph, count in self.holding.items())
        others = held + self.gradient_bytes + self.gathered_bytes - self.freed_bytes
        return (int(getattr(of(self.runs), self.phase)) if self.phase else self.loss_bytes) + others


def instants_of(
    trace: Trace,
    key: Callable[[Any], Any],
    gradient_bytes: Sequence[int] = (),
    gathered_bytes: int = 0,
    freed_bytes: Sequence[int] = (),
    loss_bytes: int = 0,
) -> list[Instant]:
    """The instants of a trace, with a `key` for what runs in a call.

    Args:
        gradient_bytes: those that earlier backwards left, at each event; (): none.
        gathered_bytes: of the parameters that are gathered.
        freed_bytes: of each call, those of its `Instant` in the backward; (): 0.
        loss_bytes: of an instant between each forward and a backward that comes next; 0: there is none.
    """
    keys = [key(what) for what in trace.calls]
    instants: list[Instant] = []
    holding: Counter[Any] = Counter()
    dropped = sorted(trace.dropped, key=lambda drop: drop[1], reverse=True)  # the next one is the last
    held: set[int] = set()

    def release(call: int) -> None:
        if call in held:
            held.remove(call)
            holding[keys[call]] -= 1

    for i, event in enumerate(trace.events):
        while dropped and dropped[-1][1] <= i:
            release(dropped.pop()[0])
        gradients = gradient_bytes[i] if gradient_bytes else 0
        if loss_bytes and i and (trace.events[i - 1].phase, event.phase) == (Phase.FORWARD, Phase.BACKWARD):
            instants.append(Instant("", None, +holding, gradients, gathered_bytes, loss_bytes=loss_bytes))
        release(event.call)
        freed = freed_bytes[event.call] if freed_bytes and event.phase is Phase.BACKWARD else 0
        beside = +holding, gradients, gathered_bytes, freed
        instants.append(Instant(event.phase.value, keys[event.call], *beside, event.call))
        if event.phase is Phase.FORWARD:
            held.add(event.call)
            holding[keys[event.call]] += 1
    return instants


def moments_of(
    graph: Any, traces: Iterable[Sequence[Instant]], of: Callable[[Any], Bytes], tight: tuple[int, int] = (0, 0)
) -> tuple[Moment, ...]:
    """What is alive beside a call of `graph`, at worst, if calls of other graphs have the bytes that `of` returns.

    `tight`: (count, bytes): the first `count` calls of `graph` that hold saved tensors hold `bytes` by another plan.
    """
    found = set()
    count, nbytes = tight
    for instant in (instant for trace in traces for instant in trace):
        calls, ours = instant.holding.get(graph, 0), instant.runs == graph
        if calls >= count if ours else calls:
            beside = instant.nbytes(lambda g: Bytes(0, 0, 0) if g == graph else of(g)) + min(calls, count) * nbytes
            found.add(Moment(instant.phase if ours else "", max(0, calls - count), beside))
    return tuple(m for phase in ("forward", "backward", "") for m in _worst([f for f in found if f.phase == phase]))


def latest(traces: Sequence[Sequence[Instant]], count: int) -> list[Sequence[Instant]]:
    """The last `count` of `traces`. For each graph that runs in none of these, also the last trace that it runs in."""
    kept: list[Sequence[Instant]] = []
    seen: set[Any] = set()
    for trace in reversed(traces):
        runs = {instant.runs for instant in trace if instant.phase}
        if len(kept) < count or not runs <= seen:
            kept.append(trace)
            seen |= runs
    return kept[::-1]


def tight_peak(graph: Any, trace: Sequence[Instant], of: Callable[[Any], Bytes], count: int, nbytes: Bytes) -> int:
    """The most that is alive while one of the first `count` calls of `graph` runs, which have `nbytes` each."""
    found = [e for e in trace if e.runs == graph and e.holding.get(graph, 0) < count]
    return max((e.nbytes(lambda g: nbytes if g == graph else of(g)) for e in found), default=0)


def _worst(moments: Collection[Moment]) -> list[Moment]:
    """The moments that are the highest for some bytes of a call: the upper hull of lines `calls * bytes + nbytes`."""
    hull: list[Moment] = []
    for m in sorted(moments, key=lambda m: (m.calls, m.nbytes)):
        while hull and (hull[-1].nbytes <= m.nbytes or (len(hull) > 1 and not _above(hull[-2], hull[-1], m))):
            hull.pop()
        hull.append(m)
    return hull


def _above(a: Moment, b: Moment, c: Moment) -> bool:
    """Whether the line of `b` is above those of `a` and `c` for some bytes of a call. Sorted by calls: a, b, c."""
    return (a.nbytes - b.nbytes) * (c.calls - a.calls) < (a.nbytes - c.nbytes) * (b.calls - a.calls)


def shares(trace: Sequence[Instant], least: Mapping[Any, Bytes], most: Mapping[Any, Bytes], peak: int) -> float:
    """The largest s up to 1 for which all graphs fit with `least + s * (most - least)`; below 0 if there is none."""
    share = 1.0
    for instant in trace:
        low, high = instant.nbytes(least.__getitem__), instant.nbytes(most.__getitem__)
        if max(low, high) > peak:
            share = min(share, (peak - low) / (high - low) if high > low else -1.0)
    return share


def between(least: Bytes, most: Bytes, share: float) -> Bytes:
    """The bytes of a call that goes a share of the way from `least` to `most`."""
    return Bytes(*(int(low + share * (high - low)) for low, high in zip(least, most, strict=True)))
