"""Parameters and buffers whose memory moves: whether to record again, or to do without a graph.

A recording reads a static input at one address. A parameter may move once, as by `load_state_dict(assign=True)`: then
the function is recorded again. It may move in each step: then no recording is ever replayed, and a capture in each step
is slower than no graph at all. What FSDP2 gathers in each step comes from a pool of the tree, where it does not move.

    recorded --moves--> recorded again --moves--> no graph from now on

Only moves of one tensor count. So layers that share a graph are told apart, and each has its own recording.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .node import Recording

MAX_WASTED = 2  # moves in a row after recordings that were hardly replayed; with the last of them graphs end
EARNED = 16  # replays that pay for a capture; an estimate: it takes some milliseconds, a replay saves some tenths


@dataclass(eq=False)
class Seen:
    """A static input as the last recording read it."""

    address: int
    recording: Recording
    wasted: int  # moves in a row, up to this one, each from a recording that was replayed less than `EARNED` times


class Moves(WeakIdKeyDictionary):
    """What one tree knows of the memory of one function's static inputs: tensor to `Seen`."""

    def wasted(self, static: Mapping[int, torch.Tensor]) -> dict[int, int]:
        """The wasted moves in a row of each of the inputs `static`, by position, if the function is recorded now."""
        wasted: dict[int, int] = {}
        for i, x in static.items():
            if (seen := self.get(x)) is not None:  # type: ignore[no-untyped-call]
                moved = x.data_ptr() != seen.address
                wasted[i] = 0 if seen.recording.replay_count >= EARNED else seen.wasted + moved
        return wasted

    def in_each_step(self, static: Mapping[int, torch.Tensor]) -> list[int]:
        """The inputs that move in each step; none as long as another recording may serve."""
        wasted = self.wasted(static)
        is_over = max(wasted.values(), default=0) >= MAX_WASTED
        return sorted(i for i, count in wasted.items() if count) if is_over else []

    def recorded(self, recording: Recording, static: Mapping[int, torch.Tensor]) -> None:
        """Note that `recording` reads the inputs `static` where they are."""
        wasted = self.wasted(static)
        for i, x in static.items():
            self[x] = Seen(x.data_ptr(), recording, wasted.get(i, 0))
