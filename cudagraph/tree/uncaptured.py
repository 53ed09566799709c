"""A step whose rest runs uncaptured: the cause, and the functions that ran so far."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_private import cuda as torch_cuda
from .function import Function
from .node import Node
from .warmup import storages_of

__all__ = ["BROKEN_POOL", "Cause", "UncapturedStep", "below_autograd"]

T = TypeVar("T")

BROKEN_POOL = "a capture failed in this step"


class Cause(enum.Enum):
    """Why the rest of a step runs uncaptured. The texts are for messages."""

    WARMUP = "a function warms up"
    IGNORED_MARKS = "forwards of earlier steps wait for a backward; use torch.no_grad() or drop what they returned"
    NEVER_ENDS = "the step never ends: something of it is held all the time; mark steps, or let go of it"


def below_autograd(run: Callable[..., T], *arguments: Any) -> T:
    """Call `run` without autograd and autocast. For edges that are no replays: the caller of an edge may not have
    turned them off."""
    with torch.no_grad(), torch_cuda.without_autocast():
        return run(*arguments)


class UncapturedStep:
    """A step whose rest runs uncaptured.

    Attributes:
        node: where the path was left.
        continues_path: the function that warms up reads an output of the path, or runs in one call with it. The first
            function of the path begins the next step, too.
        call_counts: how often each function ran.
        backward: the number of the backward that ran a function last; -1 if none did.
        awaiting_backward: storages that forwards made and gave out, and that no backward came for yet.
        made: the storages that functions made and gave out.
        first, last: the first function of the step, and the one that ran last uncaptured.
    """

    def __init__(self, node: Node, cause: Cause, *, continues_path: bool) -> None:
        self.node = node
        self.cause = cause
        self.continues_path = continues_path
        self.call_counts: dict[Function, int] = {}
        self.backward = -1
        self.awaiting_backward: list[StorageWeakRef] = []
        self.made: list[tuple[Function, StorageWeakRef]] = []
        self.first = node.first
        self.last: Function | None = None

    def ran(self, function: Function, outputs: Sequence[Any], input_storages: Sequence[StorageWeakRef]) -> None:
        """Note a run of `function`. A storage that it only passes on, such as a saved parameter's, is not one it made:
        that it lives on does not show that a backward is still to come."""
        self.first = self.first or function
        self.last = function
        self.call_counts[function] = self.call_counts.get(function, 0) + 1
        self.backward = torch_cuda.graph_task_id()
        known = {storage.cdata for storage in input_storages}
        made = [storage for storage in storages_of(outputs) if storage.cdata not in known]
        self.made += [(function, storage) for storage in made]
        if function.piece.is_backward:
            self.awaiting_backward.clear()
        elif not function.piece.is_inference:
            self.awaiting_backward += made

    def waits_for_backward(self) -> bool:
        return any(not storage.expired() for storage in self.awaiting_backward)

    def in_a_backward(self) -> bool:
        """Whether a backward goes on that ran a function of this step. In a thread that only runs backwards, one
        backward is followed by another."""
        now = torch_cuda.graph_task_id()
        only_backwards = all(function.piece.is_backward for function in self.call_counts)
        return now != -1 and (now == self.backward or not only_backwards)
