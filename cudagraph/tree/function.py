"""What is captured: a piece of a program, and what can be said about it before it runs.

Piece (from whoever compiled it) -> Function: names, positions and reasons that the tree asks for
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import NotCapturableError
from ..options import Options
from ..placeholder import PlaceholderInfo, source_line
from ..torch_private import cuda as torch_cuda
from .driver import CaptureDriver

__all__ = ["Function", "Piece"]

log = logging.getLogger("cudagraph")


@dataclass(frozen=True, eq=False)
class Piece:
    """One graph, or one captured part of a partitioned graph.

    Attributes:
        name: for logs and errors, such as "forward 0, part 1 of 2".
        run: takes a list of tensors, ints and None, which it may clear, and returns the same kinds of things. It is no
            part of an autograd graph: nothing it returns has a history. Where the ints are the same, tensors have the
            same shapes and strides, as compilers guard.
        device: the device all of it runs on.
        static_inputs: inputs whose address is expected not to move: parameters, buffers. Outputs of other pieces are
            found at run time and need not be named.
        mutated_inputs: inputs that `run` writes to.
        written_later: inputs that the caller will write to when `run` is done, in the belief that they are its own.
        unread_inputs: inputs that `run` takes and does nothing with.
        placeholders: a `PlaceholderInfo` an input, or ().
        output_traces: the user's source line of each output, or (); for errors about outputs held too long.
        constants: tensors that `run` reads and that are no inputs; kept alive.
        is_backward: runs the backward of a forward that ran before.
        is_inference: nothing of it waits for a backward.
        saved_outputs: outputs that are kept for the backward; None if that is not known: all of them may be.
    """

    name: str
    run: Callable[[list[Any]], Sequence[Any]]
    device: torch.device
    static_inputs: tuple[int, ...] = ()
    mutated_inputs: tuple[int, ...] = ()
    written_later: tuple[int, ...] = ()
    unread_inputs: tuple[int, ...] = ()
    placeholders: tuple[PlaceholderInfo, ...] = ()
    output_traces: tuple[str | None, ...] = ()
    constants: tuple[torch.Tensor, ...] = ()
    is_backward: bool = False
    is_inference: bool = True
    saved_outputs: tuple[int, ...] | None = None


def in_key_as(x: Any) -> Any:
    """What stands for an input in the key of a recording: 2, 2.0 and True are not the same, nor are 0.0 and -0.0."""
    if isinstance(x, torch.Tensor):
        return torch.Tensor  # where there was none before
    return type(x), x.hex() if isinstance(x, float) else x


class Function:
    """A piece with its options, as the trees of all threads know it. Compared by identity."""

    def __init__(self, piece: Piece, options: Options, driver: CaptureDriver) -> None:
        self.piece = piece
        self.options = options
        self.driver = driver
        self.name = piece.name
        self.static_inputs = frozenset(piece.static_inputs)
        # A gradient is accumulated into over several steps, so it must outlive the memory it came in.
        self.copies_held = piece.is_backward or options.held_outputs == "copy"
        self.constants = {torch_cuda.identity(constant.untyped_storage()) for constant in piece.constants}
        self.in_key: tuple[int, ...] | None = None
        self.told: set[str] = set()
        self.causes: set[str] = set()
        self.uncapturable = driver.why_not()  # or what a capture of it said
        self.failures = 0  # captures that raised what may not be raised another time
        self.settles = True  # no capture that read inputs in place has broken a pool
        # Its `generation` is another one in each outermost call of what Dynamo compiled.
        self.calls = torch_cuda.calls_of_dynamo()
        self.moved = ""  # which static input moved last, and from where

    def find_key(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Positions of what is part of the key: everything that is not a tensor."""
        self.in_key = tuple(i for i, x in enumerate(inputs) if not isinstance(x, torch.Tensor))
        return self.in_key

    def is_constant(self, cdata: int) -> bool:
        return cdata in self.constants

    def input_name(self, i: int) -> str:
        """ "input 2 (x, model.py:31: y = x + 1)", as far as it is known."""
        if i >= len(self.piece.placeholders):
            return f"input {i}"
        info = self.piece.placeholders[i]
        traces = [info.stack_trace, *(user.stack_trace for user in info.users)]
        line = next((found for found in map(source_line, traces) if found), None)
        return f"input {i} ({info.name}{f', {line}' if line else ''})"

    def origin(self, k: int) -> str:
        traces = self.piece.output_traces
        trace = traces[k] if k < len(traces) else None
        line = source_line(trace) or (trace or "").strip()
        return f"output {k} of {self.name}{f', from {line}' if line else ''}"

    def reason_against(self, inputs: Sequence[Any], copied: Iterable[int], static: Iterable[int]) -> str | None:
        """Why it can't be captured; None if nothing speaks against it.

        `copied`: tensors that are to be copied; `static`: those that are read in place.
        """
        for i in static:
            x = inputs[i]
            if x.device != self.piece.device and x.device.type != "cpu":  # there it is memory of an offload operator
                return f"{self.input_name(i)} of {self.name} is on {x.device}, not on {self.piece.device}"
        mutated = set(self.piece.mutated_inputs)
        for i in copied:
            x = inputs[i]
            if i in mutated:
                return (
                    f"{self.name} mutates {self.input_name(i)}, {self.mutating_line(i)}which is the caller's own memory"
                )
            if x.device != self.piece.device:
                return f"{self.input_name(i)} of {self.name} is on {x.device}, not on {self.piece.device}"
            if x.layout is not torch.strided or type(x) not in (torch.Tensor, torch.nn.Parameter):
                return f"{self.input_name(i)} of {self.name} is a {type(x).__name__} of layout {x.layout}"
        return None

    def mutating_line(self, i: int) -> str:
        if i >= len(self.piece.placeholders):
            return ""
        line = source_line(self.piece.placeholders[i].mutating_use_stack_trace)
        return f"at {line}, " if line else ""

    def reason_against_output(self, k: int, x: torch.Tensor) -> str | None:
        """Why what `run` returned at `k` can't be given out by a replay."""
        if x.layout is not torch.strided or type(x) is not torch.Tensor:
            return f"{self.origin(k)} is a {type(x).__name__} of layout {x.layout}"
        if x.device == self.piece.device or x.untyped_storage().nbytes() == 0:
            return None
        if x.device.type == "cpu" and x.is_pinned():
            return None  # an offloaded tensor: each replay writes to the same host memory
        return f"{self.origin(k)} is on {x.device}: its value would stay what it was when the graph was captured"

    def note_moves(self, addresses: Sequence[int | None], fixed: Iterable[int], inputs: Sequence[Any]) -> None:
        """Log which inputs are no longer where a recording has them."""
        moves = [
            f"{self.input_name(i)} moved from 0x{addresses[i] or 0:x} to 0x{inputs[i].data_ptr():x}"
            for i in fixed
            if isinstance(inputs[i], torch.Tensor) and inputs[i].data_ptr() != addresses[i]
        ]
        if moves:
            self.moved = moves[0]
            log.info("%s is recorded again: %s", self.name, "; ".join(moves))

    def skipped(self, reason: str) -> None:
        """Say once that it runs without a graph; raises `NotCapturableError` if that is an error."""
        if self.options.or_error:
            raise NotCapturableError(f"{self.name} can't run as a CUDA graph: {reason}")
        if reason in self.told:
            return
        self.told.add(reason)
        cause = re.sub(r"\d+", "", reason)  # not once for each size that it names
        if cause not in self.causes:
            self.causes.add(cause)
            log.warning("%s runs without a CUDA graph: %s", self.name, reason)
