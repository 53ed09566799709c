"""A piece of a program to capture, as the compiler describes it, and what a tree needs to know about it."""

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
from .liveness import Slot, is_strided, on_slots

log = logging.getLogger("cudagraph")


@dataclass(frozen=True, eq=False)
class Piece:
    """One graph, or one captured part of a partitioned graph. Inputs and outputs are named by position.

    `run` takes a list of tensors, ints and None, which it may clear, and returns the same kinds of values. Autograd
    does not record it. Equal ints mean equal shapes and strides of the tensors, as compilers guard.
    """

    name: str  # for logs and errors, such as "forward 0, part 1 of 2"
    run: Callable[[list[Any]], Sequence[Any]]
    device: torch.device
    # Inputs whose address should not change: parameters, buffers. Outputs of other pieces are found at run time.
    static_inputs: tuple[int, ...] = ()
    mutated_inputs: tuple[int, ...] = ()  # those that `run` writes to
    unread_inputs: tuple[int, ...] = ()
    reusable_inputs: tuple[int, ...] = ()  # intermediates of the same graph, whose memory `run` may use for an output
    placeholders: tuple[PlaceholderInfo, ...] = ()  # one for each input, or none
    output_traces: tuple[str | None, ...] = ()  # the user's stack of each output, or none; for errors
    constants: tuple[torch.Tensor, ...] = ()  # tensors other than inputs that `run` reads; kept alive
    is_backward: bool = False  # of an earlier forward
    is_inference: bool = True  # has no backward
    saved_outputs: tuple[int, ...] | None = None  # for the backward; None if unknown, so that all may be
    has_collectives: bool = False  # it talks to other processes
    compiled: int | str | None = None  # number of the compiled function; its forward and backward share it


def key_value(x: Any) -> Any:
    """An input's value in an edge key: 2, 2.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(x, torch.Tensor):
        return torch.Tensor  # the first call had no tensor here
    return type(x), x.hex() if isinstance(x, float) else x


class Function:
    """A piece with its options, shared by the trees of all threads. Compared by identity."""

    def __init__(self, piece: Piece, options: Options, driver: CaptureDriver) -> None:
        self.piece, self.options = piece, options
        self.name = piece.name
        self.static_inputs = frozenset(piece.static_inputs)
        # Functions of one family run with graphs or without them, all together. If only the forward ran without one, it
        # would leave saved tensors in ordinary memory, and the backward's graph would have to copy them.
        self.family = object() if piece.compiled is None else piece.compiled
        # Outputs that are held at the end of a step are copied out. A gradient is accumulated into over several steps.
        self.copies_held = piece.is_backward or options.held_outputs == "copy"
        self.key_inputs: tuple[int, ...] | None = None  # those that are part of an edge key; known from the first call
        self.uncapturable = driver.why_not()  # why no capture is tried any more; None if captures are tried
        self.failed_captures = 0  # in a row, by errors that may not come again
        self.may_read_in_place = True  # until a capture that reads inputs in place breaks a pool
        self.call_counter = torch_cuda.calls_of_dynamo()  # its `generation` changes with each outermost compiled call
        self.last_move = ""  # text: which static input moved last, from where to where
        self.constants = {torch_cuda.identity(constant.untyped_storage()) for constant in piece.constants}
        self._logged: set[str] = set()

    def find_key_inputs(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Find `key_inputs`: all inputs that are no tensors."""
        self.key_inputs = tuple(i for i, x in enumerate(inputs) if not isinstance(x, torch.Tensor))
        return self.key_inputs

    def input_name(self, i: int) -> str:
        """Text such as "input 2 (x, model.py:31: y = x + 1)", as far as known."""
        if i >= len(self.piece.placeholders):
            return f"input {i}"
        info = self.piece.placeholders[i]
        return f"input {i} ({', '.join(filter(None, (info.name, info.source_line)))})"

    def origin(self, k: int) -> str:
        traces = self.piece.output_traces
        trace = traces[k] if k < len(traces) else None
        line = source_line(trace) or (trace or "").strip()
        return f"output {k} of {self.name}{f', from {line}' if line else ''}"

    def reason_against(self, inputs: Sequence[Any], copied: Sequence[int], static: Sequence[int]) -> str | None:
        """Why the inputs rule out a capture; None if they don't.

        `copied`: positions of tensors that would be copied; `static`: of those that would be read in place.
        """
        piece, is_copied = self.piece, set(copied)
        for i in [*static, *copied]:
            x = inputs[i]
            if i in is_copied and i in piece.mutated_inputs:
                info = piece.placeholders[i] if i < len(piece.placeholders) else None
                line = source_line(info.mutating_use_stack_trace) if info is not None else ""
                where = f"at {line}, " if line else ""
                return f"{self.name} mutates {self.input_name(i)}, {where}which is the caller's own memory"
            # What is read in place on the CPU is memory of an offload operator.
            if x.device != piece.device and (i in is_copied or x.device.type != "cpu"):
                return f"{self.input_name(i)} of {self.name} is on {x.device}, not on {piece.device}"
            if i in is_copied and (x.layout is not torch.strided or type(x) not in (torch.Tensor, torch.nn.Parameter)):
                return f"{self.input_name(i)} of {self.name} is a {type(x).__name__} of layout {x.layout}"
        return None

    def reason_against_output(self, k: int, x: torch.Tensor) -> str | None:
        """Why a replay can't give out `x`, output `k` of `run`; None if it can."""
        if x.layout is not torch.strided or type(x) is not torch.Tensor:
            return f"{self.origin(k)} is a {type(x).__name__} of layout {x.layout}"
        if x.device == self.piece.device or x.is_meta or x.untyped_storage().nbytes() == 0:
            return None
        if x.device.type == "cpu" and x.is_pinned():
            return None  # an offloaded tensor: each replay writes to the same host memory
        return f"{self.origin(k)} is on {x.device}: its value would stay what it was when the graph was captured"

    def static_tensors(self, inputs: Sequence[Any], slots: Iterable[Slot]) -> dict[int, torch.Tensor]:
        """The static inputs, without those on `slots`, which the tree finds by itself."""
        tensors = {i: inputs[i] for i in self.static_inputs if is_strided(inputs[i])}
        return {i: tensors[i] for i in tensors.keys() - on_slots(inputs, slots).keys()}

    def note_moves(self, addresses: Sequence[int | None], fixed: Iterable[int], inputs: Sequence[Any]) -> None:
        """Log which inputs have moved since a recording."""
        moves = [
            f"{self.input_name(i)} moved from 0x{addresses[i] or 0:x} to 0x{inputs[i].data_ptr():x}"
            for i in fixed
            if isinstance(inputs[i], torch.Tensor) and inputs[i].data_ptr() != addresses[i]
        ]
        if moves:
            self.last_move = moves[0]
            log.info("%s is recorded again: %s", self.name, "; ".join(moves))

    def skipped(self, reason: str) -> None:
        """Log once that the function runs without a graph. Raises `NotCapturableError` with `options.or_error`."""
        if self.options.or_error:
            raise NotCapturableError(f"{self.name} can't run as a CUDA graph: {reason}")
        if reason in self._logged:
            return
        cause = re.sub(r"\d+", "", reason)  # not once for each size in the text
        if cause not in self._logged:
            log.warning("%s runs without a CUDA graph: %s", self.name, reason)
        self._logged |= {reason, cause}
