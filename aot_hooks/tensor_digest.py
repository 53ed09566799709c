"""The digest of a tensor: its dtype, shape, device, whether it wants a gradient, and its bytes."""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from typing import Any

import torch

__all__ = ["by_value", "tensor_digest"]

_known: dict[int, tuple[weakref.ref[torch.Tensor], Any, str]] = {}
_copies: weakref.WeakValueDictionary[tuple[str, tuple[int, ...]], torch.Tensor] = weakref.WeakValueDictionary()


def by_value(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` for a graph to keep: one for all that are equal, and plain.

    A graph stands for a content, so it must not see what becomes of the tensor that it was read from.
    """
    from ._compat import is_traced_value, without_modes

    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout is not torch.strided or is_traced_value(x):
        return x
    with without_modes():
        key = (tensor_digest(x), x.stride())
        copy = _copies.get(key)
        if copy is None:
            copy = _copies[key] = x.detach().clone()
    return copy


def _state(x: torch.Tensor) -> Any:
    """What changes with `x`; None: read it each time. `x.data` and NumPy write without counting it as a version."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout is not torch.strided:
        return x._version
    if x.device.type == "cpu" and x.nbytes <= _READ_EACH_TIME:
        return None
    return x._version, x.data_ptr(), x.dtype, x.shape, x.stride(), x.device, x.requires_grad


_READ_EACH_TIME = 1 << 14


def tensor_digest(x: torch.Tensor) -> str:
    from ._compat import is_traced_value, without_modes  # late: a digest of plain numbers needs no torch internals

    if is_traced_value(x):
        return f"traced tensor:{id(x)}"
    version = None if x.is_inference() else _state(x)  # what inference mode made keeps none: read it each time
    known = _known.get(id(x))
    if known is not None and known[0]() is x and known[1] == version is not None:
        return known[2]
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout is not torch.strided:
        return f"tensor {type(x).__qualname__} {x.layout}:{id(x)}:{version}"
    with without_modes():  # a hook is digested while it is traced too: its bytes are read all the same
        raw = x.detach().cpu().resolve_conj().resolve_neg().contiguous() if x.device.type != "meta" else torch.empty(0)
    text = hashlib.sha256(ctypes.string_at(raw.data_ptr(), raw.nbytes) if raw.nbytes else b"").hexdigest()
    digest = f"tensor:{x.dtype}:{tuple(x.shape)}:{x.device}:{x.requires_grad}:{text}"
    if len(_known) > 1024:
        _known.clear()
    _known[id(x)] = (weakref.ref(x), version, digest)
    return digest
