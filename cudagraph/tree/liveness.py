"""Liveness of outputs: whether somebody still holds one, and what happens to its tensors when its memory is reused.

    Slot: the memory of one output             storage -- templates (of recordings) -- tensors given out, their views
      held()     the storage is used by more than its templates
      renew()    whoever holds it keeps the old storage; the slot goes on with a new one at the same address
    Watch: many slots at once                  one comparison of two lists of use counts

A storage's use count includes every tensor object over it, in Python and in C++: views, detached aliases, tensors that
autograd saved, a stolen `.grad`. So nothing is scanned and nothing has to be registered. The storage's Python object is
one use, however many hold it, so its references are counted as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from ..torch_private import cuda as torch_cuda

use_count = torch_cuda.storage_use_count
getrefcount = sys.getrefcount

STALE = "output of a CUDA graph whose memory has been reused"


class Layout(NamedTuple):
    """A tensor's geometry on its storage."""

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


def alias_sharing_versions(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A tensor on the storage of `x` with another layout. It has no history, and shares the version counter of `x`.

    So a backward that needs one of the two raises if the program has written to the other.
    """
    if layout == layout_of(x):
        return x.detach()
    with torch.no_grad():
        x = x.conj() if x.is_conj() else x
        x = torch_cuda.negated(x) if x.is_neg() else x
        if x.dtype != layout.dtype:
            # Whole elements of either dtype: the storage, without a rest that is shorter than the wider one.
            widest = max(x.dtype.itemsize, layout.dtype.itemsize)
            nbytes = x.untyped_storage().nbytes() // widest * widest
            x = x.as_strided((nbytes // x.dtype.itemsize,), (1,), 0).view(layout.dtype)
        x = x.as_strided(layout.size, layout.stride, layout.offset)
        x = x.conj() if layout.conjugate else x
        return (torch_cuda.negated(x) if layout.negative else x).detach()


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of `storage`, as bytes."""
    return tensor_on(storage, Layout((storage.nbytes(),), (1,), 0, torch.uint8))


class Slot:
    """The memory of a recording's output, and the storage of the tensors that are given out over it.

    `copies`: an output that is held when its memory is reused is copied out; if False, reading it raises.
    `origin`: "output 2 of forward 0, from model.py:31", for that error. `host`: it is pinned host memory.
    """

    def __init__(self, storage: torch.UntypedStorage, origin: str, *, copies: bool, host: bool = False) -> None:
        self.address, self.nbytes = storage.data_ptr(), storage.nbytes()  # these never change
        self.owner = storage if host else None
        # Does not own the memory, which is the pool's or the owner's.
        self.storage = torch_cuda.storage_at(self.address, storage.device, self.nbytes) if host else storage
        self.cdata = torch_cuda.identity(self.storage)
        self.origin, self.copies, self.host = origin, copies, host
        self.given_as_copies = False  # replays give out copies: this torch can't copy out tensors over it later
        # Templates over it: the list of a recording, the position there, the layout. Watches: the position in each.
        self.templates: list[tuple[list[torch.Tensor], int, Layout]] = []
        self.watches: list[tuple[Watch, int]] = []

    def own_counts(self) -> tuple[int, int]:
        """The counts when nobody else holds the memory: uses of the storage, and references to its Python object.

        The Python object is one use; each template is another. The slot and each watch refer to that object.
        """
        return 1 + len(self.templates), 1 + len(self.watches) + EXTRA_HANDLES

    def held(self) -> bool:
        own_uses, own_handles = self.own_counts()
        (handles,) = map(getrefcount, [self.storage])  # one more than `own_handles`, for the list
        return use_count(self.cdata) > own_uses or handles > own_handles + 1

    def add_template(self, templates: list[torch.Tensor], layout: Layout) -> None:
        """Append a tensor over the slot to `templates`: replays give out its aliases. Renewing the slot replaces it."""
        templates.append(tensor_on(self.storage, layout))
        self.templates.append((templates, len(templates) - 1, layout))
        self.update_watches()

    def renew(self, storage: torch.UntypedStorage) -> None:
        """Go on with `storage`, at the same address. Tensors that replays gave out keep the old storage."""
        self.storage = storage
        self.cdata = torch_cuda.identity(storage)
        for templates, position, layout in self.templates:
            templates[position] = tensor_on(storage, layout)
        self.update_watches()

    def forget_templates(self, templates: list[torch.Tensor]) -> None:
        """Drop what `add_template` put into `templates`. After the last template, release host memory."""
        self.templates = [entry for entry in self.templates if entry[0] is not templates]
        if not self.templates:
            self.owner = None
        self.update_watches()

    def update_watches(self) -> None:
        for watch, position in self.watches:
            watch.cdatas[position] = self.cdata
            watch.handles[position] = self.storage
            watch.own_counts[position], watch.own_counts[len(watch.slots) + position] = self.own_counts()


class Watch:
    """Several slots whose liveness is checked at once. Slots keep the counts here up to date."""

    __slots__ = ("cdatas", "handles", "own_counts", "slots")

    def __init__(self, slots: Iterable[Slot]) -> None:
        self.slots = tuple(slots)
        self.cdatas = [0] * len(self.slots)
        self.handles: list[Any] = [None] * len(self.slots)
        # The use count of each storage when nobody else holds it, then the reference count of each handle.
        self.own_counts = [0] * (2 * len(self.slots))
        for position, slot in enumerate(self.slots):
            slot.watches.append((self, position))
            slot.update_watches()

    def none_held(self) -> bool:
        """Whether nobody but the tree holds any of the slots. Each replay calls it, so it is one comparison."""
        return [*map(use_count, self.cdatas), *map(getrefcount, self.handles)] == self.own_counts

    def close(self) -> None:
        slots, self.slots = self.slots, ()
        self.cdatas, self.handles, self.own_counts = [], [], []
        for slot in slots:
            slot.watches = [entry for entry in slot.watches if entry[0] is not self]
            slot.update_watches()


def _extra_handles() -> int:
    """How many references `map(getrefcount, storages)` counts for each storage beyond that of the list."""
    memory = torch.zeros(8, dtype=torch.uint8)
    storages = [torch_cuda.storage_at(memory.data_ptr(), memory.device, memory.nbytes)]
    template = tensor_on(storages[0], layout_of(memory))
    (count,) = map(getrefcount, storages)
    del template
    return count - 1


EXTRA_HANDLES = _extra_handles()


def slots_in_use(slots: Iterable[Slot]) -> list[Slot]:
    """Those of `slots` whose memory the program still refers to."""
    return [slot for slot in slots if slot.held()]


def stale_message(slot: Slot) -> str:
    return (
        f"This tensor is {slot.origin}, an {STALE} by a later step. To keep it, clone it before the next step begins "
        "(a step begins with mark_step_begin(), or when the first function of the step is called again), or give "
        "options={'held_outputs': 'copy'}."
    )


def on_slots(inputs: Sequence[Any], slots: Iterable[Slot]) -> dict[int, Slot]:
    """The slots whose storage an input is on, by the input's position."""
    by_cdata = {slot.cdata: slot for slot in slots}
    if not by_cdata:
        return {}
    cdatas = {i: torch_cuda.identity(x.untyped_storage()) for i, x in enumerate(inputs) if is_strided(x)}
    return {i: by_cdata[cdata] for i, cdata in cdatas.items() if cdata in by_cdata}


def is_strided(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout is torch.strided


def overlap_span(x: torch.Tensor) -> int | None:
    """If two elements of `x` may share memory, as in an expanded tensor: the distance from the first to the last
    element, both included, in elements. Else None."""
    reach, overlaps = 0, False
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        overlaps = overlaps or stride <= reach
        reach += stride * (size - 1)
    return reach + 1 if overlaps and x.numel() else None


def copy_preserving_layout(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` with the same strides, even where its elements share memory."""
    with torch.inference_mode(False), torch.no_grad():
        span = overlap_span(x)
        if span is None:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
        flat = x.as_strided((span,), (1,))
        copy = torch.empty(flat.shape, dtype=x.dtype, device=x.device).copy_(flat)
        return copy.as_strided(x.shape, x.stride(), 0)


def destinations_of(copies: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """The destinations of a foreach copy to `copies`, which start at the beginning of their storages, and the position
    and span of each one whose elements overlap: that is copied as flat memory, see `overlap_span`."""
    spans = [(n, span) for n, x in enumerate(copies) if (span := overlap_span(x)) is not None]
    destinations = list(copies)
    for n, span in spans:
        destinations[n] = tensor_on(copies[n].untyped_storage(), Layout((span,), (1,), 0, copies[n].dtype))
    return destinations, spans
