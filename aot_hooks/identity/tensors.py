"""The digest of a tensor: its dtype, shape, device, `requires_grad`, and a hash of its bytes.

The digest is cached until autograd's version or the memory of the tensor changes. Writes past autograd (`x.data`,
NumPy) count no version: tensors of up to 16 KiB on the CPU are therefore read each time.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch

from ..torch_private.values import is_traced_value, without_modes
from .memo import Memo

_known: Memo[tuple[Any, str]] = Memo()  # by the tensor: its version and memory, its digest
READ_EACH_TIME = 1 << 14  # bytes of a tensor on the CPU, up to which it is read each time


def tensor_digest(x: torch.Tensor) -> str:
    """A text that differs if the content of `x` does. Large tensors are read again only after a write to them."""
    if is_traced_value(x):
        return f"traced tensor:{id(x)}"
    if not is_plain(x):
        return f"tensor {type(x).__qualname__} {x.layout}:{id(x)}:{x._version}"
    if x.is_inference() or (x.device.type == "cpu" and x.nbytes <= READ_EACH_TIME):
        return _read(x)
    layout = (x.storage_offset(), x.dtype, x.shape, x.stride(), x.device, x.requires_grad)
    state = (x._version, x.untyped_storage().data_ptr(), layout)
    known = _known.get(x)
    if known is None or known[0] != state:
        known = _known.set(x, (state, _read(x)))
    return known[1]


def is_plain(x: torch.Tensor) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided


def _read(x: torch.Tensor) -> str:
    raw = x  # read without an operator where possible: a compiled call may check it each time
    if x.device.type != "cpu" or not x.is_contiguous() or x.is_conj() or x.is_neg():
        with without_modes():  # while a hook is traced, too, real bytes are read
            raw = torch.empty(0) if x.is_meta else x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    digest = hashlib.sha256(ctypes.string_at(raw.data_ptr(), raw.nbytes) if raw.nbytes else b"").hexdigest()
    return f"tensor:{x.dtype}:{tuple(x.shape)}:{x.device}:{x.requires_grad}:{digest}"
