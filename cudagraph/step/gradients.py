"""The gradients of parameters before and after a step that is a graph.

    before: a tensor or None, as it was when the step was recorded; or anything, if the step drops it unread
    after:  the same tensor; None; or new tensors over the graph's memory, which the next replay writes to again

A later recording may have such memory where an earlier one has temporary values. So a replay also needs that nobody
holds gradients of recordings which were made after it.

Whether a gradient is read shows in the capture: a tensor stands in for it that lets no operator use it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter, is_

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_private import cuda as torch_cuda
from ..tree.capture import CannotCapture
from ..tree.liveness import Slot, Watch, layout_of

gradient = attrgetter("grad")


class ReadsGradients(CannotCapture):
    """The step reads a gradient that was there before."""


# The last gradient that a recording gave, by the identity of its parameter: the recording's templates, and the place
# there. It can be made again, so it may be dropped to see whether anybody else holds it.
Given = dict[int, tuple[weakref.ref[torch.Tensor], "list[torch.Tensor]", int]]


class Gradients:
    """The gradients of `parameters`, made before a capture. `finish` ends it, in any case."""

    def __init__(self, parameters: Sequence[torch.Tensor], given: Given, *, reads: bool) -> None:
        """
        Args:
            given: of all recordings of the step.
            reads: the step may read gradients. If False and it does, `ReadsGradients` is raised in the capture.
        """
        self._parameters = parameters
        self._before = [x.grad for x in parameters]
        self._wires = [x if x is None or reads else torch_cuda.tripwire(x, ReadsGradients) for x in self._before]
        for x, wire in zip(parameters, self._wires, strict=True):
            x.grad = wire
        self._expected: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # parameters, and what they have before
        self._dropped: list[torch.Tensor] = []  # parameters whose gradient may be anything before
        self._cleared: list[torch.Tensor] = []  # those that have none afterwards
        self._made: list[tuple[torch.Tensor, int]] = []  # those with a new one, and its place in `_templates`
        self._templates: list[torch.Tensor] = []
        self._given = given
        self.slots: dict[int, Slot] = {}  # the memory of new ones, by the identity of storages
        self._watch = Watch(())
        self._left: Sequence[StorageWeakRef] = ()  # memory of recordings that are gone, which this one writes to

    @property
    def static(self) -> list[torch.Tensor]:
        """The gradients that the graph reads and writes where they are."""
        return [old for _, old in self._expected if old is not None]

    def learn(self, device: torch.device) -> None:
        """Find out what the captured step did. Raises `CannotCapture` for gradients that a replay can't make."""
        for x, old, wire in zip(self._parameters, self._before, self._wires, strict=True):
            new = old if x.grad is wire else x.grad
            if new is old or old is wire:
                self._expected.append((x, old))
            else:
                self._dropped.append(x)
            if new is old:
                continue
            if new is None:
                self._cleared.append(x)
                continue
            if new.layout is not torch.strided or type(new) is not torch.Tensor or new.device != device:
                raise CannotCapture(f"makes a gradient that is a {type(new).__name__} of layout {new.layout}")
            if new.requires_grad:
                raise CannotCapture("makes gradients that require gradients (create_graph=True)")
            storage = new.untyped_storage()
            identity = torch_cuda.identity(storage)
            if identity not in self.slots:
                self.slots[identity] = Slot(storage, "a gradient", copies=False)
            self.slots[identity].add_template(self._templates, layout_of(new))
            self._made.append((x, len(self._templates) - 1))

    def finish(self) -> None:
        """Put back what was there before the capture."""
        for x, old in zip(self._parameters, self._before, strict=True):
            x.grad = old
        self._parameters, self._before, self._wires = [], [], []
        self.refs = [StorageWeakRef(slot.storage) for slot in self.slots.values()]
        self.look_at((), ())
        self._owners, self._needed = [x for x, _ in self._expected], [old for _, old in self._expected]

    def look_at(self, slots: Sequence[Slot], left: Sequence[StorageWeakRef]) -> None:
        """From now on, a replay also needs that nobody holds `slots` of others, and that all of `left` are gone."""
        self._watch.close()
        self._watch, self._left = Watch([*self.slots.values(), *slots]), left

    def fit(self) -> bool:
        """Whether a replay may begin. If so, nobody holds what it writes to, and what it drops is dropped."""
        if not all(map(is_, map(gradient, self._owners), self._needed)):
            return False
        if not self._watch.slots and not self._left:
            return True
        ours: list[tuple[torch.Tensor, list[torch.Tensor], int]] = []  # a reference to one would count as a holder
        others: list[tuple[torch.Tensor, torch.Tensor]] = []
        for x in self._dropped:
            old = x.grad
            reference, templates, position = self._given.get(id(x), (None, [], 0))
            if reference is not None and reference() is old:
                ours.append((x, templates, position))
            elif old is not None:
                others.append((x, old))
            x.grad = old = None
        if self._watch.none_held() and all(reference.expired() for reference in self._left):
            return True
        for x, templates, position in ours:
            self._give(x, templates, position)
        for x, old in others:
            x.grad = old
        return False

    def _give(self, x: torch.Tensor, templates: list[torch.Tensor], position: int) -> None:
        x.grad = new = templates[position].data
        self._given[id(x)] = weakref.ref(new), templates, position

    def give(self) -> None:
        """After a replay: parameters have the gradients that it made."""
        for x in self._cleared:
            x.grad = None
        for x, position in self._made:
            self._give(x, self._templates, position)

    def close(self) -> None:
        self._watch.close()
        for key in [key for key, (_, templates, _) in self._given.items() if templates is self._templates]:
            del self._given[key]  # it would keep the memory
