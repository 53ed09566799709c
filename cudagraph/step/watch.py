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
import sys
import traceback
from collections.abc import Iterable, Mapping
from types import FrameType, TracebackType
from typing import Any

import torch

from ..graph.blockers import COLLECTIVES, COPIES, CPU, HOST_READS, is_host_operator, name_of, tensors_in
from ..torch_private import cuda as torch_cuda
from ..tree.capture import CannotCapture
from .numbers import without_traced
from .users_code import OUR_OWN, is_users

ON_THE_HOST = ("::barrier", "::monitored_barrier_", "::send", "::recv_", "::recv_any_source_")
INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")
# Without dropout, attention returns its unused seed and offset on the CPU.
ATTENTION = tuple(
    f"aten::_{name}" for name in ("scaled_dot_product", "flash_attention", "efficient_attention", "cudnn_attention")
)
_TORCH = os.path.dirname(torch.__file__) + os.sep
# Files between an operator and a dispatch mode that is called for it.
DISPATCHING = (__file__, torch_cuda.__file__, f"{_TORCH}_compile.py", f"{_TORCH}_dynamo{os.sep}")
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
        has_reducers: whether models of `DistributedDataParallel` are in the step, which copy gradients to buckets.
    """

    def __init__(
        self, device: torch.device, inputs: Mapping[int, int], known: Iterable[torch.Tensor], *, has_reducers: bool
    ) -> None:
        self.device, self.inputs, self.has_reducers = device, inputs, has_reducers
        # Identities of storages, None for tensors that have none. Those of results are added.
        self.known: set[int | None] = {None, *inputs, *map(torch_cuda.storage_key, known)}
        self.seen: set[int | None] = set()  # identities of storages on the device that operators had
        self.written: set[int | None] = set()  # those that they wrote to
        self.buckets: dict[int, torch.UntypedStorage] = {}  # those of reducers on the device
        self.has_collectives = False  # whether an operator was a collective
        self.made: dict[int, torch.UntypedStorage] = {}  # those that the step made on the CPU

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run `func`, or raise `CannotCapture` with the user's line."""
        args, kwargs = without_traced(args, kwargs)
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
        """Why an operator can't be captured; None if it can. The first reason counts."""
        if self.has_reducers:
            self._know_reducers(tensors)
        others = [x for x in tensors if x.device != self.device and not x.is_meta]
        on_host = self.device != CPU and len(others) == len(tensors)
        return (
            self._by_devices(func, others, is_mixed=0 < len(others) < len(tensors))
            or self._by_addresses(func, args, kwargs, tensors)
            or self._by_host_work(func, args, on_host=on_host, draws_on_host=on_host and bool(others))
            or self._by_writes(func, args, kwargs)
        )

    def _by_devices(self, func: Any, others: list[torch.Tensor], *, is_mixed: bool) -> str | None:
        """`others`: the arguments that are not on the step's device. `is_mixed`: some are, some are not."""
        for x in others:
            if x.device != CPU:
                return f"runs on {x.device}"
            if torch_cuda.storage_key(x) not in self.made and not _is_attention(func):
                return "reads a tensor on the CPU"
        return f"copies between the CPU and {self.device}" if is_mixed and name_of(func) in COPIES else None

    def _by_addresses(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> str | None:
        """Notes which memory on the device the operator has, and refuses what is not known."""
        if name_of(func).startswith("aten::_cudnn_rnn"):  # torch keeps cuDNN's random state as long as the process runs
            state = torch_cuda.argument(func, "dropout_state", args, kwargs)
            self.known.update(map(torch_cuda.storage_key, tensors_in(state)))
        on_device = {torch_cuda.storage_key(x) for x in tensors if x.device == self.device}
        self.seen |= on_device
        return UNKNOWN if name_of(func) != FRESH and not on_device <= self.known else None

    def _by_host_work(self, func: Any, args: Any, *, on_host: bool, draws_on_host: bool) -> str | None:
        """`on_host`: the operator has no tensor on the step's device."""
        name, tags = name_of(func), func.tags
        if draws_on_host and torch.Tag.nondeterministic_seeded in tags:
            return "draws random numbers on the CPU"
        if not on_host and (name in HOST_READS or torch.Tag.data_dependent_output in tags):
            return "waits for the device and reads its result on the host"
        if name in INDEXED:
            by_mask = any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1]))  # the indices
        else:
            by_mask = not on_host and torch.Tag.dynamic_output_shape in tags
        if by_mask:
            return SIZE
        self.has_collectives |= func.namespace in COLLECTIVES
        if func.namespace in COLLECTIVES and name.endswith(ON_THE_HOST):
            return "waits for other processes on the host, or talks to one of them alone"
        return None

    def _by_writes(self, func: Any, args: Any, kwargs: Any) -> str | None:
        """Notes the memory that the operator writes to."""
        for x in tensors_in(written_by_collective(func, args) or torch_cuda.written_arguments(func, args, kwargs)):
            self.written.add(torch_cuda.storage_key(x))
            if (number := self.inputs.get(torch_cuda.storage_key(x) or 0)) is not None:
                return f"writes to input {number}, which is the caller's own memory"
        return None

    def _know_reducers(self, tensors: list[torch.Tensor]) -> None:
        """Know the buckets of reducers, and their notes on the CPU: what hooks in C++ use that is not known yet."""
        unknown = [x for x in tensors if torch_cuda.storage_key(x) not in self.known | self.made.keys()]
        if unknown and called_by_autograd():
            for x in unknown:
                storage = x.untyped_storage()
                (self.buckets if x.device == self.device else self.made)[torch_cuda.identity(storage)] = storage
            self.known |= self.buckets.keys()


def called_by_autograd() -> bool:
    """Whether the operator that is dispatched was called by autograd or its hooks, and by no Python code."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(DISPATCHING):
        frame = frame.f_back
    return frame is None or frame.f_code.co_filename == torch.autograd.graph.__file__


def written_by_collective(func: Any, args: Any) -> list[Any]:
    """The tensors that an operator of c10d writes to, which its schema does not say. Its outputs come first."""
    if func.namespace != "c10d":
        return []
    names = [each.name for each in func._schema.arguments]
    return [x for name, x in zip(names, args, strict=False) if not name.startswith("input")]


def _is_attention(func: Any) -> bool:
    return name_of(func).startswith(ATTENTION)


def users_line(trace: TracebackType | None = None, frame: FrameType | None = None) -> str:
    """The innermost line of the user's own in a traceback, or on the stack: "model.py:31: y = x.item()"; or "".

    If an installed package was called there, its innermost line stands first. `frame`: where the stack ends, if it is
    that of another thread.
    """
    lines: list[str] = []
    frames = reversed([*traceback.walk_stack(frame)]) if trace is None else traceback.walk_tb(trace)
    for each, number in frames:
        file = each.f_code.co_filename
        if is_users(file) or ("site-packages" in file and not file.startswith(OUR_OWN)):
            line = f"{os.path.basename(file)}:{number}: {linecache.getline(file, number).strip()}"
            lines = [line] if is_users(file) else [*lines[:1], line]
    return ", called from ".join((lines[-1], *lines[:-1])[:2]) if lines else ""
