"""Watches the operators of a step while it is captured, and stops at the first one that a replay would not repeat.

    operator --OperatorWatch--> reads a number on the host, computes on the CPU, ... --> CannotCapture
                                else it runs; what it writes to is noted

A tensor that the walk of the step's variables has not found is refused: nobody would notice that it moved. What the
step itself makes on the CPU, such as `torch.tensor(2.0)`, is the same in each replay. A step with a part that
Dynamo compiles is not watched: under a dispatch mode Dynamo runs it as it is, then and ever after. CUDA's own errors
stop its capture.
"""

from __future__ import annotations

import linecache
import os
import traceback
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import torch

from ..graph.blockers import COPIES, CPU, HOST_READS, is_host_operator, name_of, tensors_in
from ..torch_private import cuda as torch_cuda
from ..tree.capture import CannotCapture
from .numbers import settled
from .users_code import OUR_OWN, is_users

COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")
# Without dropout, attention returns its unused seed and offset on the CPU.
ATTENTION = (
    "aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention", "aten::_cudnn_attention",
)  # fmt: skip
FRESH = "aten::lift_fresh"  # the first operator that is seen of what `torch.tensor` makes
UNKNOWN = (
    "reads a tensor that was not found in the step's arguments, variables and attributes, where objects of Python's "
    "library and most of torch's are not searched; give it as an input"
)
SIZE = "has a size that depends on the values of a tensor"


class OperatorWatch:
    """Looks at each operator of a step that is captured on `device`.

    Args:
        inputs: positions of the arguments, by the identity of storages.
        known: tensors from before the capture whose addresses are compared before each replay.
    """

    def __init__(self, device: torch.device, inputs: Mapping[int, int], known: Iterable[torch.Tensor]) -> None:
        self.device, self.inputs = device, inputs
        # Identities of storages, None for tensors that have none. Those of results are added.
        self.known: set[int | None] = {None, *inputs, *map(torch_cuda.storage_key, known)}
        self.written: set[int | None] = set()  # identities of storages
        self.made: dict[int, torch.UntypedStorage] = {}  # those that the step made on the CPU

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `func`, or raise `CannotCapture` with the user's line."""
        args, kwargs = settled(args, kwargs)
        tensors = tensors_in((args, [*kwargs.values()]))
        for x in tensors:
            if hasattr(x, "trip"):
                x.trip()
        reason = None if is_host_operator(func) else self._reason_against(func, args, kwargs, tensors)
        if reason is None:
            result = func(*args, **kwargs)
            self.known.update(map(torch_cuda.storage_key, tensors_in(result)))
            if self.device == CPU or is_host_operator(func):
                return result
            for x in tensors_in(result):
                if x.device == CPU and x.layout is torch.strided:
                    if any(each.device == self.device for each in tensors) and not _is_attention(func):
                        reason = f"copies from {self.device} to the CPU"
                    self.made[torch_cuda.identity(x.untyped_storage())] = x.untyped_storage()
        if reason is not None:
            line = users_line()
            raise CannotCapture(f"{func} {reason}{f' ({line})' if line else ''}")
        return result

    def _reason_against(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> str | None:
        name = name_of(func)
        if func.namespace in COLLECTIVES:
            return "talks to other processes"
        others = [x for x in tensors if x.device != self.device and not x.is_meta]
        for x in others:
            if x.device != CPU:
                return f"runs on {x.device}"
            if torch_cuda.storage_key(x) not in self.made and not _is_attention(func):
                return "reads a tensor on the CPU"
        if others and len(others) < len(tensors) and name in COPIES:
            return f"copies between the CPU and {self.device}"
        if name.startswith("aten::_cudnn_rnn"):  # cuDNN's random state, which torch keeps as long as the process runs
            self.known.update(
                map(torch_cuda.storage_key, tensors_in(torch_cuda.argument(func, "dropout_state", args, kwargs)))
            )
        on_device = {torch_cuda.storage_key(x) for x in tensors if x.device == self.device}
        if name != FRESH and not on_device <= self.known:
            return UNKNOWN
        on_host = self.device != CPU and len(others) == len(tensors)
        if on_host and others and torch.Tag.nondeterministic_seeded in func.tags:
            return "draws random numbers on the CPU"
        if not on_host and (name in HOST_READS or torch.Tag.data_dependent_output in func.tags):
            return "waits for the device and reads its result on the host"
        if name in INDEXED:
            if any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1])):
                return SIZE
        elif not on_host and torch.Tag.dynamic_output_shape in func.tags:
            return SIZE
        for x in tensors_in(torch_cuda.written_arguments(func, args, kwargs)):
            self.written.add(torch_cuda.storage_key(x))
            if (number := self.inputs.get(torch_cuda.storage_key(x) or 0)) is not None:
                return f"writes to input {number}, which is the caller's own memory"
        return None


def _is_attention(func: Any) -> bool:
    return name_of(func).startswith(ATTENTION)


def users_line(trace: TracebackType | None = None) -> str:
    """The innermost line of the user's own in a traceback, or on the stack: "model.py:31: y = x.item()"; or "".

    If an installed package was called there, its innermost line stands first.
    """
    frames = traceback.walk_tb(trace) if trace is not None else reversed([*traceback.walk_stack(None)])
    lines: list[str] = []
    for frame, number in frames:
        file = frame.f_code.co_filename
        if is_users(file) or ("site-packages" in file and not file.startswith(OUR_OWN)):
            line = f"{os.path.basename(file)}:{number}: {linecache.getline(file, number).strip()}"
            lines = [line] if is_users(file) else [*lines[:1], line]
    return ", called from ".join((lines[-1], *lines[:-1])[:2]) if lines else ""
