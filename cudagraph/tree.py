"""Graphs of one device as a tree of recordings, walked along the path that the program takes.

capture(piece) -> callable:   warm up -> record -> replay, a recording a path, size and set of static addresses
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import counters
from .driver import CaptureDriver
from .options import Options

__all__ = ["Piece", "capture", "mark_step_begin", "reset", "stats"]


@dataclass(frozen=True, eq=False)
class Piece:
    """One graph, or one captured part of a partitioned graph.

    Attributes:
        name: for logs and errors, such as "forward 0, part 1 of 2".
        run: takes a list of tensors, ints and None, which it may clear, and returns the same kinds of things.
        device: the device all of it runs on.
        static_inputs: inputs whose address is expected not to move: parameters, buffers. Outputs of other pieces are
            found at run time and need not be named.
        mutated_inputs: inputs that `run` writes to.
        placeholders: a `PlaceholderInfo` an input, or ().
        output_traces: the user's source line of each output, or (); for errors about outputs held too long.
        constants: tensors that `run` reads and that are no inputs; kept alive.
        is_backward: runs the backward of a forward that ran before.
        is_inference: nothing of it waits for a backward.
    """

    name: str
    run: Callable[[list[Any]], Sequence[Any]]
    device: torch.device
    static_inputs: tuple[int, ...] = ()
    mutated_inputs: tuple[int, ...] = ()
    placeholders: tuple[Any, ...] = ()
    output_traces: tuple[str | None, ...] = ()
    constants: tuple[torch.Tensor, ...] = ()
    is_backward: bool = False
    is_inference: bool = True


def capture(
    piece: Piece, options: Options, driver: CaptureDriver | None = None
) -> Callable[[list[Any]], Sequence[Any]]:
    """A callable that does what `piece.run` does, by replaying a graph of it as soon as it can.

    It takes a list of inputs and clears it, and is marked `_boxed_call`. It warms up, records, replays, records again
    when a static input has moved, and runs `piece.run` as it is where that is all that is right. `driver` is what
    captures: CUDA's by default, a simulator in tests.

    Raises `NotCapturableError` where it would run without a graph and `options.or_error` is set.
    """

    def call(inputs: list[Any]) -> Sequence[Any]:
        return piece.run(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def mark_step_begin() -> None:
    """A new step begins: what graphs gave out in the step before may be overwritten."""


def reset() -> None:
    """Give all memory back and forget all recordings; compiled functions record again when they are called."""
    counters.clear()


def stats() -> dict[str, int]:
    """How often things happened since `reset()`; see `cudagraph.counters`."""
    return counters.stats()
