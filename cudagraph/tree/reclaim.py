"""What was recorded for functions and threads that are gone is given back.

    a callable's last reference goes --finalizer--> its last tree function? --yes--> the tree is due to be closed
                                                             +--no--> its branches go at the tree's next call
    a thread is gone -----------------finalizer--> its trees are due to be closed

    due: closed at once, or when what is captured at the moment has been captured; at the latest with a mark

Finalizers run wherever the garbage collector does: inside of a capture, which would record the copies that closing
makes instead of making them; inside of a compiler that traces with fake tensors; in a thread that the tree does not
belong to. So they only note what is to be done.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..torch_private import cuda as torch_cuda

if TYPE_CHECKING:
    from .function import Function
    from .node import Node
    from .tree import Tree

__all__ = ["adopt", "drop", "drop_all", "one_capture", "prune", "settle"]

# Captures are taken one after the other, whichever thread asks: one empties caches that another may be filling.
# Re-entrant, because a capture may call what is captured.
one_at_a_time = threading.RLock()
captures_under_way = 0
due: deque[Tree] = deque()


@contextlib.contextmanager
def one_capture() -> Iterator[None]:
    """Around a capture: it is the only one, and nothing is closed until it is over."""
    global captures_under_way
    try:
        with one_at_a_time:
            captures_under_way += 1
            try:
                yield
            finally:
                captures_under_way -= 1
    finally:
        settle()


def adopt(tree: Tree, function: Function) -> None:
    """`tree` is not to be closed as long as `function` is there."""
    with one_at_a_time:
        tree.functions.add(function)


def drop(tree: Tree, function: Function) -> None:
    """Nobody can call `function` any more. For finalizers."""
    tree.functions.discard(function)
    tree.dropped.append(function)
    if tree.functions:
        tree.look_up()
    else:
        due.append(tree)
        settle()


def drop_all(tree: Tree) -> None:
    """Nobody will call anything of `tree` any more. For finalizers."""
    tree.functions.clear()
    due.append(tree)
    settle()


def settle() -> None:
    """Close the trees that are due, if nothing is captured."""
    while due and one_at_a_time.acquire(blocking=False):
        try:
            if captures_under_way or due[0].driver.is_capturing():
                return
            tree = due.popleft()
            if not tree.functions:
                with torch_cuda.without_modes():
                    tree.close()
        except IndexError:  # another thread was faster
            return
        finally:
            one_at_a_time.release()


def prune(tree: Tree) -> None:
    """Close the recordings of dropped functions and all that follow them, which no path leads to any more.

    The path that the program is on stays until it has ended.
    """
    gone = set()
    while tree.dropped:  # others may be added meanwhile
        gone.add(tree.dropped.pop())
    path = tree.place.path()
    closed: set[Node] = set()
    for node in list(tree.root.subtree()):
        if node in closed:
            continue
        for key in [key for key in node.children if function_of(key) in gone]:
            children = node.children.pop(key)
            if any(child in path for child in children):
                node.children[key] = [child for child in children if child in path]
            for child in children:
                if child not in path:
                    closed.update(child.subtree())
                    child.close()
        for key in [key for key in node.edges if function_of(key) in gone]:
            del node.edges[key]
    tree.refusals = {
        (node, key): reason
        for (node, key), reason in tree.refusals.items()
        if node not in closed and function_of(key) not in gone
    }
    tree.put_off = {(function, key) for function, key in tree.put_off if function not in gone}
    tables: list[dict[Function, Any]] = [tree.warmed, tree.sizes]
    if tree.aside is not None:
        tables.append(tree.aside.calls)
    for table in tables:
        for function in gone.intersection(table):
            del table[function]
    tree.dropped += [function for function in gone if any(node.function is function for node in path)]
    if not tree.root.children:
        tree.release_pool()


def function_of(key: Any) -> Any:
    """The function of the key of an edge, which is the function, or the function and numbers."""
    return key[0] if isinstance(key, tuple) else key
