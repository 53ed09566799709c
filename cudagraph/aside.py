"""A step that runs as it is from some place of its path on: why, and when it is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import _compat

if TYPE_CHECKING:
    from .function import Function
    from .node import Node

__all__ = ["Aside", "below_autograd"]

T = TypeVar("T")

# Calls of one function while a step warms up, after which it is taken for a new step whatever is held.
WARM_REPEATS = 64


def below_autograd(run: Callable[..., T], *arguments: Any) -> T:
    """What an edge runs that is no replay: who follows edges may pass by what turns these off around a call."""
    with torch.no_grad(), _compat.without_autocast():
        return run(*arguments)


class Aside:
    """Why the rest of a step runs as it is, and what ran so far.

    Attributes:
        place: where the path was left.
        warming: functions that are not warm are the reason; else, a step that could not end.
        after_mark: there was a mark, but a forward waited for its backward.
        calls: how often each function ran.
        waiting: storages of what forwards gave out that no backward came for yet.
    """

    def __init__(self, place: Node, *, warming: bool, after_mark: bool) -> None:
        self.place = place
        self.warming = warming
        self.after_mark = after_mark
        self.calls: dict[Function, int] = {}
        self.waiting: list[StorageWeakRef] = []

    def ran(self, function: Function, outputs: Sequence[Any]) -> None:
        self.calls[function] = self.calls.get(function, 0) + 1
        if function.piece.is_backward:
            self.waiting.clear()
        elif not function.piece.is_inference:
            self.waiting += [StorageWeakRef(x.untyped_storage()) for x in outputs if isinstance(x, torch.Tensor)]

    def may_end(self, function: Function, *, marked: bool) -> bool:
        """Whether a call of `function` begins a new step. A warm-up holds no memory of the pool: it is never wrong."""
        calls = self.calls.get(function, 0)
        if calls >= WARM_REPEATS:
            return True
        waits = any(not storage.expired() for storage in self.waiting)
        return calls > 0 and not marked and not waits and _compat.graph_task_id() == -1
