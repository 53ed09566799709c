"""Which tree a call belongs to, and the callable that users of the package get.

    capture(piece) -> call --> trees of this thread, or of the thread whose backward this one runs
                                 -> tree of the device -> edge of its current node

Each thread has trees of its own, so that two threads can't end each other's steps. Autograd's threads use those of the
thread that called `backward()`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import counters
from ..errors import StaleOutputError
from ..options import Options
from ..torch_private import cuda as torch_cuda
from . import reclaim
from .driver import CaptureDriver, cuda_driver
from .function import Function, Piece, in_key_as
from .liveness import STALE
from .tree import Tree

__all__ = ["Piece", "capture", "mark_step_begin", "reset", "stats"]


class Life:
    """Held by a callable alone, which would hold itself if it were what is watched."""


class Trees(dict[int, Tree]):
    """The trees of one thread, by the number of their driver and device.

    Attributes:
        marks: how often the thread called `mark_step_begin()`.
    """

    marks = 0


local = threading.local()
# Of backwards that a thread runs for one that never ran a forward of ours: not its own, it works for others, too.
of_nobody = Trees()
every_thread: list[Trees] = [of_nobody]
every_thread_lock = threading.RLock()
numbers: dict[tuple[CaptureDriver, torch.device], int] = {}
torch_marks = torch_cuda.NoMarks  # counts torch's marks, of all threads


def marks_so_far(trees: Trees) -> int:
    global torch_marks
    torch_marks = torch_cuda.torch_marks()
    return trees.marks - torch_marks.mark_step_counter


def capture(
    piece: Piece, options: Options, driver: CaptureDriver | None = None
) -> Callable[[list[Any]], Sequence[Any]]:
    """A callable that does what `piece.run` does, by replaying a graph of it as soon as it can.

    It takes a list of inputs and clears it, and is marked `_boxed_call`. It warms up, records, replays, records again
    when a static input has moved, and runs `piece.run` as it is where that is all that is right. `driver` is what
    captures: CUDA's by default, a simulator in tests. When the callable is dropped, what was recorded of it goes: at
    once if it is the last one of the thread's tree, else when another one of the tree is called next.

    `replay` of the callable is the usual case alone: it takes the same list and gives None, the list whole, where there
    is more to do than to follow an edge; call it with that list then.

    Calls raise `NotCapturableError` where they would run without a graph and `options.or_error` is set, and
    `StaleOutputError` when they are given an output whose memory was reused since.
    """
    function = Function(piece, options, driver if driver is not None else cuda_driver())
    number = numbers.setdefault((function.driver, piece.device), len(numbers))
    life = Life()
    calls = function.calls

    def replay(inputs: list[Any]) -> Sequence[Any] | None:
        in_key = function.in_key
        if in_key is None:
            in_key = function.find_key(inputs)
        trees: Trees
        try:
            trees = local.trees
            tree = trees[number]
        except (AttributeError, KeyError):
            trees = _trees_of_this_thread()
            if number not in trees:
                return None
            tree = trees[number]
        try:
            now = trees.marks - torch_marks.mark_step_counter
            if now != tree.marks:
                tree.mark(now, inputs)
            edge = tree.current.edges.get(_key(function, in_key, inputs) if in_key else function)
            if edge is None:
                return None
            outputs = edge(inputs)
            if outputs is not None:
                tree.calling = calls.generation
            return outputs
        except RuntimeError as error:
            if _is_stale(error):
                raise StaleOutputError(str(error)) from None
            raise

    def call(inputs: list[Any]) -> Sequence[Any]:
        outputs = replay(inputs)
        if outputs is not None:
            return outputs
        in_key = function.in_key
        key = _key(function, in_key, inputs) if in_key else function
        trees = _trees_of_this_thread()
        tree = trees.get(number) or _new_tree(trees, number, function)
        try:
            if function not in tree.functions:
                _watch_function(tree, function, life)
            now = marks_so_far(trees)  # torch's part that counts may have been imported meanwhile
            if now != tree.marks:
                tree.mark(now, inputs)
            return tree.call(function, key, inputs)
        except RuntimeError as error:
            if _is_stale(error):
                raise StaleOutputError(str(error)) from None
            raise

    call._boxed_call = True  # type: ignore[attr-defined]
    call.replay = replay  # type: ignore[attr-defined]
    call.piece = piece  # type: ignore[attr-defined]
    return call


def _key(function: Function, in_key: tuple[int, ...], inputs: list[Any]) -> Any:
    return (function, *[x if type(x) is int else in_key_as(x) for x in [inputs[i] for i in in_key]])


def _is_stale(error: RuntimeError) -> bool:
    return STALE in str(error) and not isinstance(error, StaleOutputError)


def _trees_of_this_thread() -> Trees:
    """The trees of this thread, or in a backward those of the thread that called for it."""
    trees: Trees | None = getattr(local, "trees", None)
    if trees is None:
        trees = torch_cuda.kept_for_this_thread()
    if trees is None and torch_cuda.graph_task_id() != -1:
        return of_nobody
    if trees is None:
        trees = local.trees = Trees()
        with every_thread_lock:
            every_thread.append(trees)
        torch_cuda.keep_for_backward_threads(trees)
        # A thread's outputs may outlive it; their memory is parted with in order, not pulled away.
        weakref.finalize(threading.current_thread(), _close, trees).atexit = False
    return trees


def _new_tree(trees: Trees, number: int, function: Function) -> Tree:
    tree = trees[number] = Tree(function.driver, function.piece.device, marks_so_far(trees))
    return tree


def _watch_function(tree: Tree, function: Function, life: Life) -> None:
    """Have `tree` give back what it has of `function` when `life` ends."""
    reclaim.adopt(tree, function)
    weakref.finalize(life, _forget_function, weakref.ref(tree), weakref.ref(function)).atexit = False


def _forget_function(tree_ref: weakref.ref[Tree], function_ref: weakref.ref[Function]) -> None:
    tree, function = tree_ref(), function_ref()
    if tree is not None and function is not None:
        reclaim.drop(tree, function)


def _close(trees: Trees) -> None:
    """The thread of `trees` is gone."""
    for tree in trees.values():
        reclaim.drop_all(tree)
    trees.clear()
    with every_thread_lock:
        every_thread[:] = [other for other in every_thread if other is not trees]


def mark_step_begin() -> None:
    """A new step of this thread begins: what graphs gave out in the step before may be overwritten by the next call.

    `torch.compiler.cudagraph_mark_step_begin()` does the same, for all threads. Whoever marks steps marks all of them:
    they begin by themselves only as long as there was no mark. A step whose forward waits for its backward goes on.
    """
    _trees_of_this_thread().marks += 1
    if reclaim.due:
        reclaim.settle()


def reset() -> None:
    """Give all memory back and forget all recordings and marks; compiled functions record again when they are called.

    Outputs that are still held are parted with as at the end of a step. Steps begin by themselves until the next mark.
    """
    reclaim.settle()
    for trees in list(every_thread):
        for tree in trees.values():
            tree.close()
            tree.forget_marks(marks_so_far(trees))
    counters.clear()


def stats() -> dict[str, int]:
    """How often things happened since `reset()`; see `cudagraph.counters`."""
    return counters.stats()
