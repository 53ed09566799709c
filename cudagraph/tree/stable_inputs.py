"""Inputs whose address repeats call after call, although nobody called them static.

    recorded, its inputs copied --PROBED_CALLS calls--> did the addresses repeat in the last half of them?
        yes    recorded once more, reading the inputs where they are
        no     copied, for good
    an input moves later    the recording that copies still exists, and is used from then on

A loop whose allocations repeat, or that fills the same buffers each time, makes no copies after that. Each replay
compares these addresses, like those of parameters.

Only for inference functions, and only at the end of a path. A forward's copy of an input shows that its backward is
still to come. No guard of a backward compares whether a tangent is conjugated. Recordings that follow would have to be
recorded again as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..torch_private import cuda as torch_cuda
from .node import Recording

__all__ = ["PROBED_CALLS", "StableInputProbe"]

PROBED_CALLS = 8


class StableInputProbe:
    """The edge to a recording that copies inputs, for its first `PROBED_CALLS` calls.

    `record_in_place(recording, inputs)` records once more and returns the outputs; None if that is not possible.
    """

    __slots__ = ("addresses", "call_count", "record_in_place", "recording", "repeat_count")

    def __init__(
        self, recording: Recording, record_in_place: Callable[[Recording, list[Any]], list[Any] | None]
    ) -> None:
        self.recording = recording
        self.record_in_place = record_in_place
        self.addresses: list[int] = []
        self.call_count = 0
        self.repeat_count = 0  # the last calls in a row with the addresses of the call before

    def __call__(self, inputs: list[Any]) -> list[Any] | None:
        recording = self.recording
        layout = recording.inputs
        if not torch_cuda.pointers_equal(inputs, layout.addresses, layout.fixed):
            return None
        addresses = [inputs[i].data_ptr() for i in layout.copied]
        self.call_count += 1
        self.repeat_count = self.repeat_count + 1 if addresses == self.addresses else 0
        self.addresses = addresses
        if self.call_count >= PROBED_CALLS:
            recording.edge = recording.parent.edges[recording.key] = recording.replay
            if self.repeat_count >= PROBED_CALLS // 2:
                outputs = self.record_in_place(recording, inputs)
                if outputs is not None:
                    return outputs
        return recording.replay(inputs)
