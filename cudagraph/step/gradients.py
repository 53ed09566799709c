"""The gradients of parameters before and after a step that is a graph, and those that FSDP2 has not reduced yet.

    before a replay: one at the same address (or None) as when the step was recorded; any, if the step does not read it
    after it:        still that one; or None; or a new one over the graph's memory, where the next replay writes

A recording holds no gradient that it uses: a replay of another recording, which a loop that accumulates has made it,
writes there in each round. What counts is that the parameter has a gradient at that address.

Where somebody holds such a new one, a view of it say, it moves to memory of its own before a replay writes to its old
memory: `move_out`. Gradients of a recording may lie where an earlier recording has temporary values, so a replay looks
at those of recordings that were made later, too.

To find out whether the step reads a gradient, a tensor that no operator can use stands in for it during the capture. If
it does, the next capture has the gradients themselves, except for those that the step had dropped by then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch

from ..torch_private import cuda as torch_cuda
from ..torch_private.distributed import local_part, spread_of, with_local_part
from ..tree.capture import CannotCapture
from ..tree.driver import CaptureDriver
from ..tree.liveness import Slot, Watch, layout_of, slots_in_use, tensor_on

Attribute = tuple[Any, str]  # an object that has a gradient, and where: `grad` of a parameter, say


class ReadsGradients(CannotCapture):
    """The step reads a gradient from before the step."""

    places: frozenset[tuple[int, str]] = frozenset()  # of those not dropped by then: ids of objects, and names


class Gradients:
    """The gradients at `places`. Made before a capture; call `finish` after it, also if it failed."""

    def __init__(
        self,
        places: Sequence[Attribute],
        *,
        reads: Collection[tuple[int, str]],
        in_buckets: Collection[torch.Tensor] = (),
    ) -> None:
        """If the step reads a gradient whose place is not in `reads`, the capture raises `ReadsGradients`. Gradients of
        parameters `in_buckets` are views of memory that others own, and overwrite in each step."""
        self._places, self._in_buckets = places, {*map(id, in_buckets)}
        self._before = _at(places)
        self._wires = [
            x if x is None or (id(owner), name) in reads else _wire_for(x)
            for x, (owner, name) in zip(self._before, places, strict=True)
        ]
        _put(places, self._wires)
        # Places, by what the step does with the gradient there:
        self._absent: list[Attribute] = []  # finds none
        self._used: list[Attribute] = []  # uses it, so a replay needs one at the same address
        self._untouched: list[Attribute] = []  # leaves it unread
        self._dropped: list[Attribute] = []  # drops it unread
        self._cleared: list[Attribute] = []  # leaves None
        self._made: list[tuple[Attribute, int, Slot | None]] = []  # leaves a new one: its template, its memory
        self._templates: list[torch.Tensor] = []  # over the memory of new gradients: replays give out their aliases
        self._spread: dict[int, torch.Tensor] = {}  # by position: a `DTensor` like the gradient, whose part it is
        self.slots: dict[int, Slot] = {}  # the memory of new gradients, by the identity of storages
        self._watch = Watch(())

    @property
    def before(self) -> list[torch.Tensor]:
        """The gradients from before the capture, and what stands in for them."""
        return [x for x in (*self._before, *self._wires) if x is not None]

    def not_dropped(self) -> frozenset[tuple[int, str]]:
        """The places, as for `reads`, at which the gradient of before still is, or what stands in for it."""
        known = zip(self._places, _at(self._places), self._wires, strict=True)
        return frozenset((id(owner), name) for (owner, name), now, wire in known if wire is not None and now is wire)

    def classify(self, device: torch.device, driver: CaptureDriver, seen: Collection[int | None] | None) -> None:
        """Sort the places by what the captured step did with the gradients. Raises `CannotCapture` for gradients that a
        replay can't make. `seen`: identities of storages that operators had; None if nobody watched."""
        for place, now, old, wire in zip(self._places, _at(self._places), self._before, self._wires, strict=True):
            new = old if now is wire else now
            # A kernel that is no operator is seen by nobody, so only what was replaced by another may count as unread.
            is_replaced = new is not None and new is not old
            if old is None:
                self._absent.append(place)
            elif old is wire and (seen is None or not is_replaced or torch_cuda.storage_key(local_part(old)) in seen):
                self._used.append(place)
            elif new is old:
                self._untouched.append(place)
            else:
                self._dropped.append(place)
            if new is old:
                continue
            if new is None:
                self._cleared.append(place)
                continue
            local = local_part(new)
            if local.layout is not torch.strided or type(local) is not torch.Tensor or local.device != device:
                raise CannotCapture(f"makes a gradient that is a {type(local).__name__} of layout {local.layout}")
            if new.requires_grad:
                raise CannotCapture("makes gradients that require gradients (create_graph=True)")
            if local is not new:
                self._spread[len(self._templates)] = with_local_part(new, torch.empty_like(local, device="meta"))
            storage, position, slot = local.untyped_storage(), len(self._templates), None
            if id(place[0]) in self._in_buckets:
                self._templates.append(tensor_on(storage, layout_of(local)))
            else:
                slot = self.slots.setdefault(torch_cuda.identity(storage), Slot(storage, "a gradient", copies=False))
                slot.given_as_copies = not driver.can_copy_out(slot.storage)
                slot.add_template(self._templates, layout_of(local))
            self._made.append((place, position, slot))

    def finish(self) -> None:
        """Put back the gradients from before the capture, and watch the memory of new ones."""
        _put(self._places, self._before)
        self._places, self._before, self._wires = [], [], []
        self.watch_also(())
        used = _at(self._used)
        parts = [*map(local_part, used)]
        self._spreads, self._guard = [*map(spread_of, used)], torch_cuda.tensor_guard(parts)
        self._addresses, self._indices = [x.data_ptr() for x in parts], [*range(len(parts))]
        # Of the memory that the graph writes to because a gradient is there.
        self.storage_addresses = {x.untyped_storage().data_ptr() for x in parts} - {0}

    def watch_also(self, slots: Sequence[Slot]) -> None:
        """From now on, replays look at the gradients on these `slots` of other recordings, too."""
        self._watch.close()
        self._watch = Watch([*self.slots.values(), *slots])

    def may_replay(self) -> bool:
        """Whether the gradients that the graph uses are there, and no others."""
        if not all(map(is_, _at(self._absent), repeat(None))) or any(map(is_, _at(self._untouched), repeat(None))):
            return False
        if not self._used:
            return True
        used = _at(self._used)
        if any(map(is_, used, repeat(None))):
            return False
        if any(self._spreads):
            if [*map(spread_of, used)] != self._spreads:
                return False
            used = [*map(local_part, used)]
        return self._guard(*used) and torch_cuda.pointers_equal(used, self._addresses, self._indices)

    def drop(self, driver: CaptureDriver) -> None:
        """Before a replay: drop the gradients that it drops. Others that it would write over move out."""
        _put(self._dropped, repeat(None))
        if not self._watch.none_held():
            self.move_out(driver)

    def move_out(self, driver: CaptureDriver) -> None:
        """Move gradients that somebody holds to memory of their own. All tensors over them follow."""
        moving = slots_in_use(self._watch.slots)
        owners = driver.copy_out([slot.storage for slot in moving])
        for i, slot in enumerate(moving):
            owner = owners[i] if owners else torch_cuda.storage_at(slot.address, slot.storage.device, slot.nbytes)
            slot.renew(owner)
            # Before torch 2.13 a tensor moves only out of memory that the allocator gave to it, which is once.
            slot.given_as_copies = not driver.can_copy_out(owner)

    def assign(self) -> None:
        """After a replay: assign parameters the gradients that it made."""
        _put(self._cleared, repeat(None))
        for (owner, name), position, slot in self._made:
            template = self._templates[position]
            new = template.clone() if slot is not None and slot.given_as_copies else template.data
            spread = self._spread.get(position)
            setattr(owner, name, new if spread is None else with_local_part(spread, new))

    def close(self) -> None:
        self._watch.close()


def _at(places: Sequence[Attribute]) -> list[Any]:
    """The gradients at `places`."""
    return [getattr(owner, name) for owner, name in places]


def _put(places: Sequence[Attribute], gradients: Iterable[Any]) -> None:
    for (owner, name), x in zip(places, gradients, strict=False):
        setattr(owner, name, x)


def _wire_for(x: torch.Tensor) -> torch.Tensor:
    """A stand-in for the gradient `x`: an operator that uses it raises `ReadsGradients`."""
    return with_local_part(x, torch_cuda.tripwire(local_part(x), ReadsGradients))
