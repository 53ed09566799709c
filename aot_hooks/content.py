"""The content of a hook, as a digest: equal for functions that say the same, also when they are made anew.

      def make(k):                      content(make(3)) == content(make(3))
          return lambda x: x * k        content(make(3)) != content(make(4))

A function is its bytecode, constants, defaults, closure and the globals it names, each by value and in depth. Names of
its own locals and parameters, its file and its lines are left out: renaming changes nothing. Tensors count by their
bytes, modules by code and state, objects by class and attributes (reached.py: by which), containers by items and, if of
a class of their own, by that as well; what has no value to look at counts by identity. How deeply things are nested
makes no difference. Of a Python module that is reached as a value (`import cfg as c`, `getattr(cfg, "SCALE")`) those
attributes count whose names stand in the code or are held as strings; all its data, where code makes names up.

Runs on each entry of a context, so code objects and tensors are digested once.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch

from .bytecode import words
from .held import Binding, Holder, bound_still
from .tensor_digest import tensor_digest
from .walker import Walker

__all__ = ["Content", "content", "read"]

_WRITES_UNSEEN = {
    *("data", "numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__", "to_dlpack", "from_dlpack"),
}


@dataclasses.dataclass(frozen=True)
class Content:
    """What was read of a value.

    Attributes:
        digest: sha256, 32 hex digits.
        bindings: variables, globals and attributes that it reaches by: (cell or namespace, name, what is bound).
        tensors: that it holds, and their digests.
        holders: dicts, lists, classes, functions and partials in it, and what they held.
        may_change: whether anything else in it can be changed, now that it is made.
        writes_unseen: whether its code names what writes to a tensor past autograd's versions (`x.data`).
    """

    digest: str
    bindings: tuple[Binding, ...]
    tensors: tuple[tuple[weakref.ref[torch.Tensor], str], ...]
    holders: tuple[Holder, ...]
    may_change: bool
    writes_unseen: bool

    def is_still(self, *values: Any) -> bool:
        """Whether `values`, of which this was read, say the same now."""
        if not self.may_change and all(map(bound_still, self.bindings)) and all(map(Holder.is_still, self.holders)):
            if all((x := ref()) is not None and tensor_digest(x) == digest for ref, digest in self.tensors):
                return True
        return content(*values) == self.digest


def content(*values: Any) -> str:
    """The digest of `values`."""
    return read(*values).digest


def read(*values: Any) -> Content:
    """As `content`, and what else is known of it."""
    walker = Walker()
    walker.all_of(*values)
    unseen = any(not _WRITES_UNSEEN.isdisjoint(words(code)) for code in walker.codes)
    return Content(
        walker.digest(), tuple(walker.bindings), tuple(walker.tensors), tuple(walker.holders), walker.may_change, unseen
    )
