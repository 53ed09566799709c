"""A step whose rest runs uncaptured, and warm-ups of training, whose activations get a memory pool of their own.

    forward, backward, uncaptured --> pool of the warm-up --> given back when the step is over
    gradients                     --> moved to a pool of their own --> given back when they are released
    loss, optimizer               --> ordinary memory

An optimizer makes its state after the first backward and keeps it. In memory cached from that backward, the state would
lie between activations: the rest of such a segment is free, but no graph's pool can have it. Gradients in ordinary
memory would take the free memory there, and the state would need new segments.
"""

from __future__ import annotations

import contextlib
import enum
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_private import cuda as torch_cuda
from .driver import CaptureDriver
from .function import Function, log
from .liveness import is_strided
from .node import Node


class Cause(enum.Enum):
    """Why the rest of a step runs uncaptured. The texts are for messages."""

    WARMUP = "a function warms up"
    IGNORED_MARKS = "forwards of earlier steps wait for a backward; use torch.no_grad() or drop what they returned"
    NEVER_ENDS = "the step never ends: something of it is held all the time; mark steps, or let go of it"


def below_autograd(run: Callable[..., Any], *arguments: Any) -> Any:
    """Call `run` without autograd and autocast, which the caller of an edge may have left on. For edges that run more
    than a replay."""
    with torch.no_grad(), torch_cuda.without_autocast():
        return run(*arguments)


def weak_storages_of(values: Sequence[Any]) -> list[StorageWeakRef]:
    return [StorageWeakRef(x.untyped_storage()) for x in values if is_strided(x)]


class UncapturedStep:
    """A step whose rest runs uncaptured: what it has run and made since."""

    def __init__(self, node: Node, cause: Cause, *, continues_path: bool) -> None:
        self.node = node  # where the path was left
        self.cause = cause
        # Whether the step is that of the path: the function that warms up reads an output of the path, or one compiled
        # call ran both. Then a call of the path's first function may end it.
        self.continues_path = continues_path
        self.call_counts: Counter[Function] = Counter()
        self.backward = -1  # number of the backward in which a function ran last; -1: it ran outside of one
        self.made: list[tuple[Function, StorageWeakRef]] = []  # new storages that a function returned
        self.awaiting_backward: list[StorageWeakRef] = []  # those made by forwards since the last backward
        self.first = node.first  # the function that began the step
        self.last: Function | None = None  # the function that ran last

    def ran(self, function: Function, outputs: Sequence[Any], input_storages: Sequence[StorageWeakRef]) -> None:
        """Note a run of `function`. Storages of inputs that it returns don't count as made: a parameter lives on, and
        that does not mean that a backward is still to come."""
        self.first = self.first or function
        self.last = function
        self.call_counts[function] += 1
        self.backward = torch_cuda.graph_task_id()
        known = {storage.cdata for storage in input_storages}
        made = [storage for storage in weak_storages_of(outputs) if storage.cdata not in known]
        self.made += [(function, storage) for storage in made]
        if function.piece.is_backward:
            self.awaiting_backward.clear()
        elif not function.piece.is_inference or torch_cuda.in_autograd_function():  # as under a checkpoint
            self.awaiting_backward += made

    def waits_for_backward(self) -> bool:
        return any(not storage.expired() for storage in self.awaiting_backward)

    def in_a_backward(self) -> bool:
        """Whether a backward of this step is under way. If the step ran backwards only, as in a worker thread of
        autograd, a backward with another number belongs to another step."""
        now = torch_cuda.graph_task_id()
        return now != -1 and (now == self.backward or not all(f.piece.is_backward for f in self.call_counts))


class Warmup:
    """Runs functions that are not captured yet."""

    def __init__(self, driver: CaptureDriver, device: torch.device) -> None:
        self.driver, self.device = driver, device
        self.busy = False  # while a function allocates from the warm-up's pool; nothing can be captured meanwhile
        self._allocating: Callable[[], contextlib.AbstractContextManager[None]] | None = None

    def end(self) -> None:
        """Give the pool back: the step's activations are dead, or no other warm-up uses them."""
        self._allocating = None

    def run(self, function: Function, inputs: list[Any], input_storages: Sequence[StorageWeakRef]) -> list[Any]:
        """Run `function` and return its outputs. Gradients move to a pool of their own: the program may keep them.

        `input_storages` are weak references. They keep their addresses from being reused meanwhile.
        """
        piece = function.piece
        if piece.is_inference or self.busy or self.driver.is_capturing():
            return list(piece.run(inputs))
        self._allocating = self._allocating or self.driver.open_warm_pool(self.device)
        self.busy = True
        try:
            with self._allocating():
                outputs = list(piece.run(inputs))
        except BaseException:
            self.end()  # a program that tries again with less finds all memory
            raise
        finally:
            self.busy = False
        if piece.is_backward:
            self.end()  # free memory of the pool is given back before the copies are made
            known = {storage.cdata for storage in input_storages}
            storages = {torch_cuda.identity(x.untyped_storage()): x.untyped_storage() for x in outputs if is_strided(x)}
            made = [s for cdata, s in storages.items() if cdata not in known and cdata not in function.constants]
            moving = [s for s in made if s.device == self.device and s.nbytes() > 0 and self.driver.can_copy_out(s)]
            if moving:
                try:
                    with self.driver.open_warm_pool(self.device)():
                        self.driver.copy_out(moving)
                except torch.OutOfMemoryError as error:  # memory is too short for both
                    log.debug("gradients of a warm-up stay in its memory: %s", error)
        return outputs
