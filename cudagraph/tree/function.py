"""A piece of a program to capture, and the questions that a tree asks about it.

Piece (from the compiler) -> Function: names, positions and reasons for the tree
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import NotCapturableError
from ..options import Options
from ..placeholder import PlaceholderInfo, source_line
from ..torch_private import cuda as torch_cuda
from .driver import CaptureDriver

__all__ = ["Function", "FunctionState", "Piece"]

log = logging.getLogger("cudagraph")


@dataclass(frozen=True, eq=False)
class Piece:
    """One graph, or one captured part of a partitioned graph. Inputs and outputs are named by position.

    Attributes:
        name: for logs and errors, such as "forward 0, part 1 of 2".
        run: takes a list of tensors, ints and None, which it may clear, and returns the same kinds of values. Autograd
            does not record it. Equal ints mean equal shapes and strides of the tensors, as compilers guard.
        static_inputs: inputs whose address should not change: parameters, buffers. Outputs of other pieces need not be
            named; they are found at run time.
        mutated_inputs: inputs that `run` writes to.
        written_later: inputs that another part of the same graph writes to after this one.
        unread_inputs: inputs that `run` does not use.
        reusable_inputs: inputs that another part of the same graph made; `run` may reuse their memory for an output.
        placeholders: a `PlaceholderInfo` for each input, or ().
        output_traces: the user's stack of each output, or (); for errors about stale outputs.
        constants: tensors other than inputs that `run` reads; kept alive.
        is_backward: runs the backward of an earlier forward.
        is_inference: has no backward.
        saved_outputs: outputs that are saved for the backward; None if unknown, so that all may be.
    """

    name: str
    run: Callable[[list[Any]], Sequence[Any]]
    device: torch.device
    static_inputs: tuple[int, ...] = ()
    mutated_inputs: tuple[int, ...] = ()
    written_later: tuple[int, ...] = ()
    unread_inputs: tuple[int, ...] = ()
    reusable_inputs: tuple[int, ...] = ()
    placeholders: tuple[PlaceholderInfo, ...] = ()
    output_traces: tuple[str | None, ...] = ()
    constants: tuple[torch.Tensor, ...] = ()
    is_backward: bool = False
    is_inference: bool = True
    saved_outputs: tuple[int, ...] | None = None


def key_value(x: Any) -> Any:
    """An input's value in an edge key: 2, 2.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(x, torch.Tensor):
        return torch.Tensor  # the first call had no tensor here
    return type(x), x.hex() if isinstance(x, float) else x


class Function:
    """A piece with its options, shared by the trees of all threads. Compared by identity.

    Attributes:
        copies_held: outputs that are still held at the end of a step are copied out.
        key_inputs: positions of the inputs that are part of an edge key; None before the first call.
        uncapturable: why no capture is tried any more; None if captures are tried.
        failed_captures: captures in a row that raised an error that may not come again.
        may_read_in_place: no capture that read inputs in place has broken a pool.
        call_counter: its `generation` changes with each outermost call of a function that Dynamo compiled.
        last_move: which static input moved last, and from where; "" if none has.
    """

    def __init__(self, piece: Piece, options: Options, driver: CaptureDriver) -> None:
        self.piece = piece
        self.options = options
        self.driver = driver
        self.name = piece.name
        self.static_inputs = frozenset(piece.static_inputs)
        # A gradient is accumulated into over several steps, so it must outlive the memory it came in.
        self.copies_held = piece.is_backward or options.held_outputs == "copy"
        self.key_inputs: tuple[int, ...] | None = None
        self.uncapturable = driver.why_not()
        self.failed_captures = 0
        self.may_read_in_place = True
        self.call_counter = torch_cuda.calls_of_dynamo()
        self.last_move = ""
        self._constants = {torch_cuda.identity(constant.untyped_storage()) for constant in piece.constants}
        self._logged_reasons: set[str] = set()
        self._logged_causes: set[str] = set()

    def find_key_inputs(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Find `key_inputs`: all inputs that are no tensors."""
        self.key_inputs = tuple(i for i, x in enumerate(inputs) if not isinstance(x, torch.Tensor))
        return self.key_inputs

    def is_constant(self, cdata: int) -> bool:
        return cdata in self._constants

    def input_name(self, i: int) -> str:
        """Text such as "input 2 (x, model.py:31: y = x + 1)", as far as known."""
        if i >= len(self.piece.placeholders):
            return f"input {i}"
        info = self.piece.placeholders[i]
        return f"input {i} ({info.name}{f', {info.source_line}' if info.source_line else ''})"

    def origin(self, k: int) -> str:
        traces = self.piece.output_traces
        trace = traces[k] if k < len(traces) else None
        line = source_line(trace) or (trace or "").strip()
        return f"output {k} of {self.name}{f', from {line}' if line else ''}"

    def reason_against(self, inputs: Sequence[Any], copied: Iterable[int], static: Iterable[int]) -> str | None:
        """Why the inputs rule out a capture; None if they don't.

        `copied`: positions of tensors that would be copied; `static`: of those that would be read in place.
        """
        for i in static:
            x = inputs[i]
            if x.device != self.piece.device and x.device.type != "cpu":  # on the CPU: memory of an offload operator
                return f"{self.input_name(i)} of {self.name} is on {x.device}, not on {self.piece.device}"
        mutated = set(self.piece.mutated_inputs)
        for i in copied:
            x = inputs[i]
            if i in mutated:
                line = self._mutating_line(i)
                return f"{self.name} mutates {self.input_name(i)}, {line}which is the caller's own memory"
            if x.device != self.piece.device:
                return f"{self.input_name(i)} of {self.name} is on {x.device}, not on {self.piece.device}"
            if x.layout is not torch.strided or type(x) not in (torch.Tensor, torch.nn.Parameter):
                return f"{self.input_name(i)} of {self.name} is a {type(x).__name__} of layout {x.layout}"
        return None

    def _mutating_line(self, i: int) -> str:
        if i >= len(self.piece.placeholders):
            return ""
        line = source_line(self.piece.placeholders[i].mutating_use_stack_trace)
        return f"at {line}, " if line else ""

    def reason_against_output(self, k: int, x: torch.Tensor) -> str | None:
        """Why a replay can't give out `x`, output `k` of `run`; None if it can."""
        if x.layout is not torch.strided or type(x) is not torch.Tensor:
            return f"{self.origin(k)} is a {type(x).__name__} of layout {x.layout}"
        if x.device == self.piece.device or x.untyped_storage().nbytes() == 0:
            return None
        if x.device.type == "cpu" and x.is_pinned():
            return None  # an offloaded tensor: each replay writes to the same host memory
        return f"{self.origin(k)} is on {x.device}: its value would stay what it was when the graph was captured"

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
        if reason in self._logged_reasons:
            return
        self._logged_reasons.add(reason)
        cause = re.sub(r"\d+", "", reason)  # not once for each size in the text
        if cause not in self._logged_causes:
            self._logged_causes.add(cause)
            log.warning("%s runs without a CUDA graph: %s", self.name, reason)


@dataclass(eq=False)
class FunctionState:
    """What one tree knows of a function.

    Attributes:
        warmup_count: how often it was warmed up.
        keys: edge keys that it was recorded or refused for; each is a size.
        awaiting_second_warmup: edge keys whose capture asked for another warm-up.
    """

    warmup_count: int = 0
    keys: set[Any] = field(default_factory=set)
    awaiting_second_warmup: set[Any] = field(default_factory=set)

    def admits(self, key: Any, size_limit: int) -> bool:
        """Whether `key` may be recorded or refused. Refusals take memory, too."""
        return key in self.keys or len(self.keys) < size_limit
