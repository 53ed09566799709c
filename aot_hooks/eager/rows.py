"""The `SavedTensor` row of a tensor that eager code saves, with the same attributes as in a compiled graph.

      grad_fn                         --> op            GeluBackward0 -> "aten.gelu.default", looking through views
      frames of `nn.Module.__call__`  --> module_path   see modules.py
      innermost frame of user code    --> source_line   the line that saves it; the line that made it is not known
      names.py                        --> checkpoint_names

Costly attributes are looked up at their first read: a plain hook reads none.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..errors import user_frame
from ..graphs.backward_reads import Read
from ..graphs.saved import SavedTensor
from ..settings.names import NamesOf, names_of
from ..settings.operators import is_view_name, operator_behind
from ..torch_private import autograd
from ..torch_private import values as torch_values
from .modules import made_in


class EagerRow(SavedTensor):
    """A row that looks up the origin of its tensor at the first read, while autograd saves it.

    After `close` an attribute that was never read is unknown: "", as in a graph's row.
    """

    names: NamesOf | None  # the source of the names, if `checkpoint_names` was read

    def __init__(self, x: torch.Tensor) -> None:
        vars(self).update(
            shape=tuple(x.shape),
            dtype=x.dtype,
            device=x.device,
            nbytes=x.untyped_storage().nbytes(),
            storage=torch_values.storage_key(x),
            backward_ops=(),
            is_input=x.grad_fn is None,
            is_output=False,
            is_static=isinstance(x, nn.Parameter),
            names=None,
            _tensor=x,
        )

    def __getattr__(self, attribute: str) -> Any:
        lookup = _LOOKUPS.get(attribute)
        if lookup is None:
            raise AttributeError(f"'{SavedTensor.__name__}' object has no attribute '{attribute}'")
        x = vars(self)["_tensor"]
        value = lookup(self, x) if x is not None else () if attribute == "checkpoint_names" else ""
        vars(self)[attribute] = value
        return value

    def close(self) -> None:
        """Release the tensor. If the names were read, everything is looked up: a policy will read the row again."""
        if self.names is not None:
            for attribute in _LOOKUPS:
                getattr(self, attribute)
        vars(self)["_tensor"] = None

    def update_names(self) -> None:
        """Update `checkpoint_names` with the names given since the tensor was saved."""
        assert self.names is not None
        vars(self)["checkpoint_names"] = self.names.now()

    def note_reads(self, reads: tuple[Read, ...]) -> None:
        """Note the reads that are not smooth, once its operators are known."""
        vars(self)["backward_reads"] = reads


def _maker(x: torch.Tensor) -> Any:
    """The `grad_fn` of the operator that made `x`, looking through views; None for a leaf."""
    fn: Any = (x if x._base is None else x._base).grad_fn
    while fn is not None and is_view_name(operator_behind(type(fn).__name__)):
        fn = fn.next_functions[0][0]
    return None if type(fn).__name__ == "AccumulateGrad" else fn


def _op(_: EagerRow, x: torch.Tensor) -> str:
    fn = _maker(x)
    return "input" if fn is None else operator_behind(type(fn).__name__)


def _checkpoint_names(row: EagerRow, x: torch.Tensor) -> tuple[str, ...]:
    names = vars(row)["names"] = names_of(x)
    return names.now()


def _module_path(_: EagerRow, x: torch.Tensor) -> str:
    fn = _maker(x)
    return made_in(autograd.sequence_number(fn) if fn is not None else None)


def _source_line(_: EagerRow, __: torch.Tensor) -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "pack_eager":
        frame = frame.f_back  # the policy's own frames
    frame, _skipped = user_frame(frame)
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{os.path.basename(file)}:{line}: {linecache.getline(file, line).strip()}"


_LOOKUPS: dict[str, Callable[[EagerRow, torch.Tensor], Any]] = {
    "op": _op,
    "name": lambda row, _: row.op.split(".")[1] if "." in row.op else row.op,
    "module_path": _module_path,
    "source_line": _source_line,
    "checkpoint_names": _checkpoint_names,
}
