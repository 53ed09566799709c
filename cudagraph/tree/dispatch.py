"""The callable of a captured function, which finds the tree that a call belongs to.

    capture(piece) -> call --> trees of this thread, or of the thread whose backward this one runs
                                 -> tree of the device -> edge of its current node

Each thread has trees of its own, so that two threads can't end each other's steps.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import counters
from ..errors import StaleOutputError
from ..options import Options
from ..torch_private import cuda as torch_cuda
from .driver import CaptureDriver
from .function import Function, Piece, key_value
from .liveness import STALE
from .node import EdgeKey
from .tree import Tree, close_later, close_pending, one_at_a_time


class Trees(dict[int, Tree]):
    """The trees of one thread, by the number of their driver and device."""

    marks = 0  # how often the thread called `mark_step_begin()`


local = threading.local()
# Stands for the trees of a thread that is inside of `as_they_are`, and for those of its backwards. It stays empty.
no_trees = Trees()
# Trees for a backward whose thread never ran one of our forwards. Autograd's worker thread serves several callers.
of_nobody = Trees()
every_thread: list[Trees] = [of_nobody]
every_thread_lock = threading.RLock()
numbers: dict[tuple[CaptureDriver, torch.device], int] = {}
torch_marks: Any = torch_cuda.no_marks  # counts torch's marks, for all threads


def marks_so_far(trees: Trees) -> int:
    global torch_marks
    torch_marks = torch_cuda.torch_marks()
    return trees.marks - int(torch_marks.mark_step_counter)


def capture(piece: Piece, options: Options, driver: CaptureDriver) -> Callable[[list[Any]], Sequence[Any]]:
    """A callable that does the same as `piece.run`, by replaying a graph of it as soon as there is one.

    It takes a list of inputs and clears it, and is marked `_boxed_call`. It warms up, records, replays, and records
    again when a static input has moved. Where no graph would be right it calls `piece.run`. Dropping the callable frees
    its recordings: at once if it is the last one of the thread's tree, else when another one of it is called next.

    The callable's attribute `replay` is the usual case alone: it takes the same list and follows an edge. Where there
    is more to do it returns None and leaves the list whole; call the callable with that list then.

    Calls raise `NotCapturableError` where they would run without a graph and `options.or_error` is set, and
    `StaleOutputError` for an input whose memory was reused since it was an output.
    """
    function = Function(piece, options, driver)
    number = numbers.setdefault((driver, piece.device), len(numbers))
    key_without_values: EdgeKey = (function,)
    call_counter = function.call_counter

    def replay(inputs: list[Any]) -> Sequence[Any] | None:
        key_inputs = function.key_inputs
        if key_inputs is None:
            key_inputs = function.find_key_inputs(inputs)
        try:
            trees: Trees = local.trees
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
            edge = tree.current.edges.get(_key(function, key_inputs, inputs) if key_inputs else key_without_values)
            if edge is None:
                return None
            outputs = edge(inputs)
            if outputs is not None:
                tree.last_generation = call_counter.generation
            return outputs
        except RuntimeError as error:
            raise_if_stale(error)
            raise

    def call(inputs: list[Any]) -> Sequence[Any]:
        outputs = replay(inputs)
        return outputs if outputs is not None else _find_way(function, (driver, number), replay, inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    call.replay = replay  # type: ignore[attr-defined]
    call.piece = piece  # type: ignore[attr-defined]
    return call


def _find_way(
    function: Function, tree_of: tuple[CaptureDriver, int], replay: Callable[..., Any], inputs: list[Any]
) -> Sequence[Any]:
    """Run a call of `function` for which `replay` found no edge. `tree_of`: the driver, and the number of its tree."""
    driver, number = tree_of
    key: EdgeKey = _key(function, function.key_inputs, inputs) if function.key_inputs else (function,)
    piece, trees = function.piece, _trees_of_this_thread()
    if trees is no_trees:
        return list(piece.run(inputs))
    if number not in trees:
        trees[number] = Tree(driver, piece.device, marks_so_far(trees))
    tree = trees[number]
    try:
        if function not in tree.functions:
            with one_at_a_time:
                tree.functions.add(function)
            # `replay` goes with the user's callable; `function` does not, because the tree holds it
            weakref.finalize(replay, _drop, weakref.ref(tree), weakref.ref(function)).atexit = False
        now = marks_so_far(trees)  # the module of torch that counts marks may have been imported meanwhile
        if now != tree.marks:
            tree.mark(now, inputs)
        return tree.call(function, key, inputs)
    except RuntimeError as error:
        raise_if_stale(error)
        raise


def in_parts(
    run: Callable[[list[Any]], Sequence[Any]], device: torch.device, driver: CaptureDriver
) -> Callable[[list[Any]], Sequence[Any]]:
    """`run`, the callable of a cut graph, whose captured parts are for `device` and `driver`.

    A part may begin a step, which takes the memory of outputs that are held. An input of the graph may be one of them,
    and only a later part reads it, or writes to it. So the tree is told of all inputs. If an operator between the parts
    runs compiled functions, they may begin a step while a later part waits for what an earlier one gave out.
    """
    number = numbers.setdefault((driver, device), len(numbers))

    def call(inputs: list[Any]) -> Sequence[Any]:
        trees = _trees_of_this_thread()
        tree = trees.get(number)
        if tree is None:
            return run(inputs)
        before, entered = tree.outer_inputs, tree.entered_at
        try:
            now = marks_so_far(trees)
            if now != tree.marks:
                tree.mark(now, inputs)  # while all inputs are in one list, where a copy can take their place
            tree.entered_at = entered or tree.path_end
            if not tree.path_end.watch_live.none_held():
                tree.outer_inputs = [*before, *(weakref.ref(x) for x in inputs if isinstance(x, torch.Tensor))]
            return run(inputs)
        except RuntimeError as error:
            raise_if_stale(error)
            raise
        finally:
            tree.outer_inputs, tree.entered_at = before, entered

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _key(function: Function, key_inputs: tuple[int, ...], inputs: list[Any]) -> EdgeKey:
    return (function, *[x if type(x) is int else key_value(x) for x in [inputs[i] for i in key_inputs]])


def raise_if_stale(error: RuntimeError) -> None:
    if STALE in str(error) and not isinstance(error, StaleOutputError):
        raise StaleOutputError(str(error)) from None


def _trees_of_this_thread() -> Trees:
    """The trees of this thread, or in a backward those of the thread that called for it."""
    trees: Trees | None = getattr(local, "trees", None)
    if trees is None:
        trees = torch_cuda.stashed_for_this_thread()
    if trees is None and torch_cuda.graph_task_id() != -1:
        return of_nobody
    if trees is None:
        trees = local.trees = Trees()
        with every_thread_lock:
            every_thread.append(trees)
        torch_cuda.stash_for_backward_threads(trees)
        # A thread's outputs may outlive it: closing its trees copies them out or makes reading them an error.
        weakref.finalize(threading.current_thread(), _close, trees).atexit = False
    return trees


def _drop(tree_ref: weakref.ref[Tree], function_ref: weakref.ref[Function]) -> None:
    """Note that nobody can call a function any more."""
    tree, function = tree_ref(), function_ref()
    if tree is not None and function is not None:
        tree.functions.discard(function)
        tree.dropped.append(function)
        if tree.functions:
            tree.marks = None
        else:
            close_later(tree)


def _close(trees: Trees) -> None:
    """Close `trees`, whose thread is gone."""
    for tree in trees.values():
        tree.functions.clear()
        close_later(tree)
    trees.clear()
    with every_thread_lock:
        every_thread[:] = [other for other in every_thread if other is not trees]


@contextlib.contextmanager
def as_they_are() -> Iterator[None]:
    """A context in which this thread and its backwards run captured functions uncaptured, because a graph around them
    is captured or warms up."""
    trees = _trees_of_this_thread()
    local.trees = no_trees
    torch_cuda.stash_for_backward_threads(no_trees)
    try:
        yield
    finally:
        local.trees = trees
        torch_cuda.stash_for_backward_threads(trees)


def run_as_they_are() -> bool:
    """Whether this thread is inside of `as_they_are`."""
    return getattr(local, "trees", None) is no_trees


def mark_step_begin() -> None:
    """Begin a new step of this thread: the next call may overwrite the outputs of the step before.

    `torch.compiler.cudagraph_mark_step_begin()` does the same, for all threads. A program that marks steps marks all of
    them: steps begin by themselves only until the first mark. A step whose forward waits for its backward goes on.
    """
    _trees_of_this_thread().marks += 1
    close_pending()


def reset() -> None:
    """Free all recordings and their memory, and forget marks; compiled functions record again when they are called.

    Outputs that are still held are treated as at the end of a step. Steps begin by themselves until the next mark.
    """
    close_pending()
    for trees in list(every_thread):
        for tree in trees.values():
            tree.close()
            tree.is_marked, tree.last_mark = False, marks_so_far(trees)
    counters.clear()
