"""The inputs of a step: as a key of its recordings, and as tensors that a graph reads.

flat tensors --one fused copy--> tensors of the graph
on the CPU: --stream of their own--> staged --the same copy-->      while the graph of the step before still runs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .. import counters
from ..torch_private import cuda as torch_cuda
from ..tree.function import key_value
from ..tree.liveness import copy_preserving_layout, destinations_of
from .host import DECLARED, Scheduler

MOST_BY_CHANCE = 4  # calls that may differ in a shape and in a number
OBJECTS = (*DECLARED, Scheduler)  # their state is compared, like that of variables of the step's functions


class StepCall(NamedTuple):
    """One call of a step."""

    flat: Sequence[Any]  # its arguments in one sequence
    spec: Any  # what puts them together again
    # One recording serves calls of one key: layouts, dtypes and devices of tensors; other values.
    key: tuple[Any, ...]

    def arguments(self, flat: Sequence[Any]) -> Any:
        """The positional and the named arguments, with `flat` in place of the call's own."""
        return (flat, {}) if self.spec is None else torch_cuda.unflatten(flat, self.spec)


def step_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StepCall:
    is_plain = not kwargs and all(type(x) is torch.Tensor for x in args)
    flat, spec = (args, None) if is_plain else torch_cuda.flatten((args, kwargs))
    key = (
        spec,
        *[
            (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
            if type(x) is torch.Tensor
            else (type(x), id(x))  # the snapshot keeps it alive
            if isinstance(x, OBJECTS)
            else key_value(x)
            for x in flat
        ],
    )
    return StepCall(flat, spec, key)


def changing_value(key: tuple[Any, ...], others: Sequence[tuple[Any, ...]]) -> str | None:
    """Text such as "input 1 is another int in each call", if an argument that is no tensor keeps calls apart.

    That is one that alone differs, or that was never the same in several calls. None if shapes differ, say.
    """
    keys = [key, *others]
    if len({*map(len, keys)}) != 1:
        return None
    columns = [*zip(*keys, strict=True)]
    differing = [i for i, values in enumerate(columns) if any(x != values[0] for x in values)]
    for i in differing:
        kind = key[i][0] if i else None  # see `key_value`; for a tensor it is a shape
        alone = differing == [i] or (len(keys) > MOST_BY_CHANCE and len({*columns[i]}) == len(keys))
        if isinstance(kind, type) and alone:
            way_out = "number; give it as a tensor" if kind in (int, float) else "value; leave it out"
            return f"input {i - 1} is another {kind.__name__} in each call, and a recording is for one {way_out}"
    return None


def objects_in(flat: Sequence[Any]) -> dict[str, Any]:
    """The modules, optimizers and the like among the arguments, by the name that messages give them."""
    return {f"input {i}": x for i, x in enumerate(flat) if isinstance(x, OBJECTS)}


def reason_against_inputs(flat: Sequence[Any]) -> str | None:
    """Why a call with these arguments runs without a graph; None if nothing speaks against one."""
    for i, x in enumerate(flat):
        if isinstance(x, torch.Tensor):
            if x.requires_grad:
                return f"input {i} requires a gradient"
            if type(x) is not torch.Tensor or x.layout is not torch.strided:
                return f"input {i} is a {type(x).__name__} of layout {x.layout}"
        elif not isinstance(x, (bool, int, float, str, bytes, type(None), *OBJECTS)):
            way_out = "give it an item" if issubclass(type(x), Iterator) else "let the step close over it"
            return f"input {i} is a {type(x).__name__}, no tensor, number, string or module; {way_out}"
    return None


class Inputs:
    """The graph's own copies of the tensors that a step is called with, allocated in `pool`."""

    def __init__(self, pool: Any, flat: Sequence[Any], device: torch.device) -> None:
        self.device = device
        # Positions of the tensors among the arguments, and the copies that the graph reads.
        self.positions = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        with pool.staging():
            self.staged = [copy_preserving_layout(flat[i].to(device)) for i in self.positions]
        self._versions = [x._version for x in self.staged]
        self._destinations, self._spans = destinations_of(self.staged)
        self._on_cpu = [n for n, i in enumerate(self.positions) if flat[i].device != device]
        if self._on_cpu:
            self._stream, self._copied = torch.cuda.Stream(device), torch.cuda.Event()
            self._uploaded = [torch.empty_like(self.staged[n]) for n in self._on_cpu]

    def arguments(self, flat: Sequence[Any]) -> list[Any]:
        """`flat` with the graph's tensors in place of the caller's."""
        arguments = list(flat)
        for i, x in zip(self.positions, self.staged, strict=True):
            arguments[i] = x
        return arguments

    def by_storage(self) -> dict[int, int]:
        """Positions of the tensors among the arguments, by the identity of the storage that the graph reads."""
        return {torch_cuda.identity(x.untyped_storage()): i for i, x in zip(self.positions, self.staged, strict=True)}

    def written(self) -> int | None:
        """The position of an input that was written to since it was made."""
        changed = (i for i, x, v in zip(self.positions, self.staged, self._versions, strict=True) if x._version != v)
        return next(changed, None)

    def copy(self, flat: Sequence[Any]) -> None:
        """Copy a call's tensors to the graph's, on the current stream. Pinned ones may be read after this returns."""
        if not self.positions:
            return
        sources = [flat[i] for i in self.positions]
        if self._on_cpu:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._copied)
                for n, x in zip(self._on_cpu, self._uploaded, strict=True):
                    sources[n] = x.copy_(sources[n], non_blocking=True)
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        for n, span in self._spans:
            sources[n] = sources[n].as_strided((span,), (1,))
        with torch_cuda.below_autograd():
            torch_cuda.foreach_copy(self._destinations, sources)
        if self._on_cpu:
            self._copied.record(torch.cuda.current_stream(self.device))
        counters.counts["copies"] += len(sources)
