"""Who still holds an output: memory of recordings, and what becomes of tensors on it when it is reused.

    Slot: the memory of one output             storage -- templates (kept by nodes) -- tensors given out, their views
      held?      the storage is used by more than its templates
      renew      whoever holds it keeps the old storage; the slot goes on with a new one at the same address
    Watch: many slots at once                  one comparison of two lists of use counts

A storage's use count knows every tensor object over it, in Python and in C++: views, detached aliases, what autograd
saved, a stolen `.grad`. So nothing is scanned and nothing has to be registered. Only the Python object of the storage
itself is shared by all who ask for it: of that the references are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..torch_private import cuda as torch_cuda

__all__ = [
    "STALE",
    "Layout",
    "Slot",
    "Watch",
    "bytes_of",
    "copy_as_it_lies",
    "held",
    "layout_of",
    "on_slots",
    "overlapping",
    "span_of",
    "stale_message",
    "tensor_on",
]

use_count = torch_cuda.storage_use_count
getrefcount = sys.getrefcount

STALE = "output of a CUDA graph whose memory has been reused"


class Layout(NamedTuple):
    """How a tensor lies on its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool = False
    negative: bool = False


def layout_of(x: torch.Tensor) -> Layout:
    return Layout(tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype, x.is_conj(), x.is_neg())


def tensor_on(storage: torch.UntypedStorage, layout: Layout) -> torch.Tensor:
    """A tensor on `storage` that has no history, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.no_grad():
        x = torch.empty(0, dtype=layout.dtype, device=storage.device)
        x = x.set_(storage, layout.offset, layout.size, layout.stride)
        if layout.conjugate:
            x = x.conj()
        return torch_cuda.negated(x) if layout.negative else x


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of `storage`, as bytes."""
    return tensor_on(storage, Layout((storage.nbytes(),), (1,), 0, torch.uint8))


class Slot:
    """Memory that an output of a recording lives in, and the storage that tensors over it are given out on.

    Attributes:
        storage: does not own the memory, which is the pool's; pinned memory of the host is kept by `owner`.
        address: of the first byte; it never changes.
        copies: whoever holds it when the memory is reused gets a copy; otherwise an error on access.
        origin: "output 2 of forward 0, from model.py:31", for that error.
        given_as_copies: tensors over it are given out as copies, because this torch could not copy them out later.
    """

    __slots__ = (
        "address",
        "cdata",
        "copies",
        "given_as_copies",
        "host",
        "nbytes",
        "origin",
        "owner",
        "places",
        "storage",
        "watches",
    )

    def __init__(self, storage: torch.UntypedStorage, origin: str, *, copies: bool, host: bool = False) -> None:
        self.address = storage.data_ptr()
        self.nbytes = storage.nbytes()
        self.owner = storage if host else None
        self.storage = torch_cuda.storage_at(self.address, storage.device, self.nbytes) if host else storage
        self.cdata = torch_cuda.identity(self.storage)
        self.origin = origin
        self.copies = copies
        self.host = host
        self.given_as_copies = False
        self.places: list[tuple[list[torch.Tensor], int, Layout]] = []
        self.watches: list[tuple[Watch, int]] = []

    @property
    def own_uses(self) -> int:
        """The use count of the storage when nobody else holds it: our handle and a tensor a template."""
        return 1 + len(self.places)

    @property
    def own_handles(self) -> int:
        """The reference count of the handle, which is the same Python object for everybody: ours and the watches'."""
        return 1 + len(self.watches) + EXTRA_HANDLES

    def held(self) -> bool:
        (handles,) = map(getrefcount, [self.storage])  # one more than `own_handles`, for the list
        return use_count(self.cdata) > self.own_uses or handles > self.own_handles + 1

    def add_template(self, templates: list[torch.Tensor], layout: Layout) -> None:
        """Append to `templates` a tensor that is given out as aliases of it; it follows when the slot is renewed."""
        templates.append(tensor_on(self.storage, layout))
        self.places.append((templates, len(templates) - 1, layout))
        self.tell()

    def renew(self, storage: torch.UntypedStorage) -> None:
        """Go on with `storage` at the same address; what was given out keeps the old one."""
        self.storage = storage
        self.cdata = torch_cuda.identity(storage)
        for templates, position, layout in self.places:
            templates[position] = tensor_on(storage, layout)
        self.tell()

    def forget(self, templates: list[torch.Tensor]) -> None:
        """`templates` are gone, and with the last of them memory of the host."""
        self.places = [place for place in self.places if place[0] is not templates]
        if not self.places:
            self.owner = None
        self.tell()

    def tell(self) -> None:
        """Let watches know the storage and what is ours of it."""
        for watch, position in self.watches:
            watch.cdatas[position] = self.cdata
            watch.handles[position] = self.storage
            watch.own[position] = self.own_uses
            watch.own[len(watch.slots) + position] = self.own_handles


class Watch:
    """Several slots that are looked at together.

    Attributes:
        own: the use count of each storage when nobody else holds it, then the reference count of each handle.
    """

    __slots__ = ("cdatas", "handles", "own", "slots")

    def __init__(self, slots: Iterable[Slot]) -> None:
        self.slots = tuple(slots)
        self.cdatas = [0] * len(self.slots)
        self.handles: list[Any] = [None] * len(self.slots)
        self.own = [0] * (2 * len(self.slots))
        for position, slot in enumerate(self.slots):
            slot.watches.append((self, position))
            slot.tell()

    def none_held(self) -> bool:
        """Whether nobody but the tree holds any of them. The cost of a call in which nobody holds anything."""
        return [*map(use_count, self.cdatas), *map(getrefcount, self.handles)] == self.own

    def close(self) -> None:
        self.handles = []
        for slot in self.slots:
            slot.watches = [entry for entry in slot.watches if entry[0] is not self]
            slot.tell()


def _extra_handles() -> int:
    """References that counting by `map` sees beyond those of names and lists."""
    memory = torch.zeros(8, dtype=torch.uint8)
    storages = [torch_cuda.storage_at(memory.data_ptr(), memory.device, memory.nbytes)]
    template = tensor_on(storages[0], layout_of(memory))
    (count,) = map(getrefcount, storages)
    del template
    return count - 1


EXTRA_HANDLES = _extra_handles()


def held(slots: Iterable[Slot]) -> list[Slot]:
    return [slot for slot in slots if slot.held()]


def stale_message(slot: Slot) -> str:
    return (
        f"This tensor is {slot.origin}, an {STALE} by a later step. To keep it, clone it before the next step begins "
        "(a step begins with mark_step_begin(), or when the first function of the step is called again), or give "
        "options={'held_outputs': 'copy'}."
    )


def on_slots(inputs: Sequence[Any], slots: Iterable[Slot]) -> dict[int, Slot]:
    """Inputs that lie on the storage of one of `slots`, by position."""
    by_cdata = {slot.cdata: slot for slot in slots}
    if not by_cdata:
        return {}
    found = {}
    for i, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            slot = by_cdata.get(torch_cuda.identity(value.untyped_storage()))
            if slot is not None:
                found[i] = slot
    return found


def overlapping(x: torch.Tensor) -> bool:
    """Whether two elements of `x` may share memory, as in an expanded tensor."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def span_of(x: torch.Tensor) -> int:
    """From the first to the last element of `x`, in elements."""
    if x.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def copy_as_it_lies(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` that lies as `x` does: also where its elements share memory."""
    with torch.inference_mode(False), torch.no_grad():
        if overlapping(x):
            span = span_of(x)
            flat = torch.empty(span, dtype=x.dtype, device=x.device)
            flat.copy_(x.as_strided((span,), (1,)))
            return flat.as_strided(x.shape, x.stride(), 0)
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return y.copy_(x)
