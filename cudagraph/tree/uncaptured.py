"""A step that runs as it is from some place of its path on: why, and when it is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_private import cuda as torch_cuda
from .steps import REPEATS
from .warmup import storages_of

if TYPE_CHECKING:
    from .function import Function
    from .node import Node

__all__ = ["Aside", "below_autograd"]

T = TypeVar("T")

# Calls of one function while a step warms up, after which it is taken for a new step whatever is held.
WARM_REPEATS = 64


def below_autograd(run: Callable[..., T], *arguments: Any) -> T:
    """What an edge runs that is no replay: who follows edges may pass by what turns these off around a call."""
    with torch.no_grad(), torch_cuda.without_autocast():
        return run(*arguments)


class Aside:
    """Why the rest of a step runs as it is, and what ran so far.

    Attributes:
        place: where the path was left.
        warming: functions that are not warm are the reason; else, a step that could not end.
        after_mark: there was a mark, but a forward waited for its backward.
        belongs: the function that is the reason reads what the path gave out, or runs in one call with it: what the
            path began with begins the next step, too.
        calls: how often each function ran.
        backward: which one ran a function last, as torch numbers them; -1 if it was called outside of any.
        waiting: storages that forwards made and gave out, and that no backward came for yet.
        made: storages that functions made and gave out, with the function.
        first, last: the first function of the step, and the one that ran last as it is.
    """

    def __init__(self, place: Node, *, warming: bool, after_mark: bool, belongs: bool) -> None:
        self.place = place
        self.warming = warming
        self.after_mark = after_mark
        self.belongs = belongs
        self.calls: dict[Function, int] = {}
        self.backward = -1
        self.waiting: list[StorageWeakRef] = []
        self.first = place.first
        self.last: Function | None = None
        self.made: list[tuple[Function, StorageWeakRef]] = []

    def ran(self, function: Function, outputs: Sequence[Any], given: Sequence[StorageWeakRef]) -> None:
        """`function` has, on inputs with the storages `given`. A parameter that it saves for its backward says nothing
        of whether that is still to come."""
        self.first = self.first or function
        self.last = function
        self.calls[function] = self.calls.get(function, 0) + 1
        self.backward = torch_cuda.graph_task_id()
        known = {storage.cdata for storage in given}
        made = [storage for storage in storages_of(outputs) if storage.cdata not in known]
        self.made += [(function, storage) for storage in made]
        if function.piece.is_backward:
            self.waiting.clear()
        elif not function.piece.is_inference:
            self.waiting += made

    def may_end(self, function: Function, inputs: Sequence[Any], *, marked: bool, in_one_call: bool) -> bool:
        """Whether a call of `function` begins a new step, by the rules of steps.py. A warm-up holds no memory of the
        pool, so it is never wrong; but where steps begin later is decided by where this one does."""
        calls = self.calls.get(function, 0)
        if calls >= WARM_REPEATS:
            return True
        if calls == 0 and not (self.belongs and function is self.first):
            return False
        if marked or (in_one_call and calls < REPEATS) or self._in_the_middle():
            return False
        if any(not storage.expired() for storage in self.waiting):
            return False
        read = {storage.cdata for storage in storages_of(inputs)}
        others = [
            storage.cdata
            for giver, storage in self.made
            if giver is not function and not giver.copies_held and not storage.expired()
        ]
        if calls <= 1 and not read.isdisjoint(others):
            return False
        # One function again and again, beside what another one gave out before, goes on, as in steps.py. Where others
        # ran in between, it is a loop of several.
        again = function is self.last and function is not self.first and calls < REPEATS
        return not again or read.issuperset(others)

    def _in_the_middle(self) -> bool:
        """Whether a backward that the step has a part in goes on. In a thread that only runs backwards, one is followed
        by another."""
        now = torch_cuda.graph_task_id()
        only_backwards = all(function.piece.is_backward for function in self.calls)
        return now != -1 and (now == self.backward or not only_backwards)
