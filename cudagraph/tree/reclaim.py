"""Frees the recordings of functions and threads that are gone.

    a callable's last reference goes --finalizer--> its tree's last function? --yes--> the tree is pending
                                                             +--no--> `Tree.drop_recordings` at the tree's next call
    a thread is gone -----------------finalizer--> its trees are pending

    pending: closed at once, or after the capture under way; at the latest with a mark

Finalizers run wherever the garbage collector does. That may be inside a capture, which would record the copies that
closing makes instead of making them. It may be inside a compiler that traces with fake tensors, or in a thread that the
tree does not belong to. So finalizers only note what is to be closed.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Collection, Iterator
from typing import Protocol

from ..torch_private import cuda as torch_cuda
from .driver import CaptureDriver
from .function import Function
from .node import Node

__all__ = ["Closable", "close_branches", "close_later", "close_pending", "one_at_a_time", "one_capture"]


class Closable(Protocol):
    """A tree: `functions` are those that somebody can still call."""

    driver: CaptureDriver
    functions: set[Function]

    def close(self) -> None: ...


# Threads capture one after the other: a capture empties caches that another may be filling.
# Re-entrant, because captured code may call a captured function.
one_at_a_time = threading.RLock()
captures_under_way = 0
pending: deque[Closable] = deque()


@contextlib.contextmanager
def one_capture() -> Iterator[None]:
    """Around a capture: no other capture runs, and nothing is closed until it is over."""
    global captures_under_way
    try:
        with one_at_a_time:
            captures_under_way += 1
            try:
                yield
            finally:
                captures_under_way -= 1
    finally:
        close_pending()


def close_later(tree: Closable) -> None:
    """Close `tree` as soon as nothing is captured. For finalizers."""
    pending.append(tree)
    close_pending()


def close_pending() -> None:
    """Close the pending trees, unless a capture is under way. A tree that got a new function stays."""
    while pending and one_at_a_time.acquire(blocking=False):
        try:
            if captures_under_way or pending[0].driver.is_capturing():
                return
            tree = pending.popleft()
            if not tree.functions:
                with torch_cuda.without_modes():
                    tree.close()
        except IndexError:  # another thread was faster
            return
        finally:
            one_at_a_time.release()


def close_branches(root: Node, gone: set[Function], path: Collection[Node]) -> None:
    """Close the recordings of functions that are `gone`, and all recordings after them.

    Recordings on `path`, where the program is, stay.
    """
    closed: set[Node] = set()
    for node in list(root.subtree()):
        if node in closed:
            continue
        for key in [key for key in node.children if key[0] in gone]:
            children = node.children.pop(key)
            if any(child in path for child in children):
                node.children[key] = [child for child in children if child in path]
            for child in children:
                if child not in path:
                    closed.update(child.subtree())
                    child.close()
        forget_edges(node, gone)


def forget_edges(node: Node, gone: set[Function]) -> None:
    for table in (node.edges, node.refusals):
        for key in [key for key in table if key[0] in gone]:
            del table[key]
