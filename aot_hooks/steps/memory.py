"""The bytes of one call of a graph, and what is alive beside it in a step of many calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Moment:
    """What is alive beside a graph at a moment of a step of many compiled calls, at the worst.

    Attributes:
        phase: what of the graph runs, "forward" or "backward"; "": another graph runs.
        calls: how many other calls of the graph hold saved tensors at that time.
        nbytes: what other graphs hold or work with, gradients of backwards that have run, gathered parameters, and a
            loss outside of graphs.
    """

    phase: str
    calls: int = 0
    nbytes: int = 0

    def times(self, growth: float) -> Moment:
        """The moment with its bytes scaled by `growth`, for other symbolic sizes."""
        return Moment(self.phase, self.calls, int(growth * self.nbytes))


ALONE = (Moment("forward"), Moment("backward"))  # of a step that is one call


class Bytes(NamedTuple):
    """The bytes of one call of a graph.

    Attributes:
        forward: most alive in its forward.
        held: alive between its forward and its backward: what it saved, and its outputs.
        backward: most alive in its backward.
    """

    forward: int
    held: int
    backward: int

    @staticmethod
    def of(forward: Sequence[int], backward: Sequence[int]) -> Bytes:
        """The bytes of a call whose graphs have these bytes alive at their positions."""
        return Bytes(max(forward, default=0), forward[-1] if forward else 0, max(backward, default=0))

    @staticmethod
    def total(parts: Iterable[Bytes]) -> Bytes:
        return Bytes(*map(sum, zip(*parts, strict=True)))

    def times(self, growth: float) -> Bytes:
        """The bytes of a call with larger sizes."""
        return Bytes(*(math.ceil(growth * nbytes) for nbytes in self))

    def beside(self, moments: Sequence[Moment], phase: str) -> int:
        """The most that is alive beside the call in `phase`, if all calls of the graph are like it."""
        return max((m.calls * self.held + m.nbytes for m in moments if m.phase == phase), default=0)

    def peak(self, moments: Sequence[Moment]) -> int:
        """The most that is alive in the step."""
        return max(
            self.forward + self.beside(moments, "forward"),
            self.backward + self.beside(moments, "backward"),
            self.beside(moments, ""),
        )
