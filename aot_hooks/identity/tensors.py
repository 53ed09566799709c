"""The digest of a tensor: its dtype, shape, device, whether it wants a gradient, and its bytes.

It is remembered until the tensor changes: by autograd's version, or by other memory. What writes past autograd
(`x.data`, NumPy, a kernel of one's own) counts no version. Tensors of up to 16 KiB on the CPU are therefore read each
time, of larger ones there a thousand numbers; elsewhere such a writer has to say so, by
`torch.autograd.graph.increment_version(x)`.
"""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .._compat import is_traced_value, without_modes

__all__ = ["by_value", "tensor_digest"]

_known: dict[int, tuple[weakref.ref[torch.Tensor], Any, str]] = {}
_copies: weakref.WeakValueDictionary[tuple[str, tuple[int, ...]], torch.Tensor] = weakref.WeakValueDictionary()


def by_value(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` for a graph to keep: one for all that are equal, and plain.

    A graph stands for a content, so it must not see what becomes of the tensor that it was read from.
    """
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout is not torch.strided or is_traced_value(x):
        return x
    with without_modes():
        key = (tensor_digest(x), x.stride())
        copy = _copies.get(key)
        if copy is None:
            copy = _copies[key] = x.detach().clone()
    return copy


class _State:
    """What changes with a tensor. The reference to its storage keeps another from having the same address."""

    def __init__(self, x: torch.Tensor) -> None:
        self.storage = StorageWeakRef(x.untyped_storage())
        layout = (x.data_ptr(), x.dtype, x.shape, x.stride(), x.device, x.requires_grad)
        self.said = (x._version, self.storage.cdata, layout, _sample(x))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _State) and self.said == other.said

    __hash__ = None  # type: ignore[assignment]


def _state(x: torch.Tensor) -> Any:
    """What changes with `x`; None: read it each time."""
    if x.is_inference():  # it keeps no version
        return None
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout is not torch.strided:
        return x._version
    if x.device.type == "cpu" and x.nbytes <= _READ_EACH_TIME:
        if x.nbytes > _KEPT or not _as_it_lies(x):
            return None
        return x.dtype, x.shape, x.requires_grad, ctypes.string_at(x.data_ptr(), x.nbytes) if x.nbytes else b""
    return _State(x)


def _sample(x: torch.Tensor) -> bytes:
    """Numbers all over the memory of `x`, with its first and last."""
    if x.device.type != "cpu":
        return b""
    with without_modes():
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        step = max(1, last // _SAMPLED)
        flat = x.detach().as_strided((last // step + 1,), (step,)).contiguous()
        ends = (
            flat
            if last % step == 0
            else torch.cat((flat, x.detach().as_strided((1,), (1,), x.storage_offset() + last)))
        )
        return hashlib.sha256(ctypes.string_at(ends.data_ptr(), ends.nbytes)).digest()


_SAMPLED = 1024
_READ_EACH_TIME = 1 << 14
_KEPT = 1 << 8  # bytes of it are kept: to compare them takes less than to hash them


def _as_it_lies(x: torch.Tensor) -> bool:
    """Whether the memory of `x`, on the CPU, holds its numbers one after the other."""
    return x.is_contiguous() and not (x.is_conj() or x.is_neg())


def tensor_digest(x: torch.Tensor) -> str:
    if is_traced_value(x):
        return f"traced tensor:{id(x)}"
    version = _state(x)
    known = _known.get(id(x))
    if known is not None and known[0]() is x and known[1] == version is not None:
        return known[2]
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout is not torch.strided:
        return f"tensor {type(x).__qualname__} {x.layout}:{id(x)}:{version}"
    kind = x.device.type
    if kind == "cpu" and _as_it_lies(x):
        raw = x  # as it lies: what a compiled call checks each time takes no operator
    else:
        with without_modes():  # a hook is digested while it is traced too: its bytes are read all the same
            raw = x.detach().cpu().resolve_conj().resolve_neg().contiguous() if kind != "meta" else torch.empty(0)
    text = hashlib.sha256(ctypes.string_at(raw.data_ptr(), raw.nbytes) if raw.nbytes else b"").hexdigest()
    digest = f"tensor:{x.dtype}:{tuple(x.shape)}:{x.device}:{x.requires_grad}:{text}"
    if len(_known) > 1024:
        _known.clear()
    _known[id(x)] = (weakref.ref(x), version, digest)
    return digest
