"""The gradients of parameters before and after a step that is a graph.

    before: a tensor or None, as it was when the step was recorded; or anything, if the step drops it unread
    after:  the same tensor; None; or new tensors over the graph's memory, which the next replay writes to again

Whether a gradient is read shows in the capture: a tensor stands in for it that lets no operator use it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter, is_

import torch

from ..torch_private import cuda as torch_cuda
from ..tree.capture import CannotCapture
from ..tree.liveness import Slot, Watch, layout_of

gradient = attrgetter("grad")


class ReadsGradients(CannotCapture):
    """The step reads a gradient that was there before."""


class Gradients:
    """The gradients of `parameters`, made before a capture. `finish` ends it, in any case."""

    def __init__(self, parameters: Sequence[torch.Tensor], *, reads: bool) -> None:
        """`reads`: the step may read gradients. If False and it does, `ReadsGradients` is raised in the capture."""
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
        self._given: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # by parameter: the last new one
        self.slots: dict[int, Slot] = {}  # the memory of new ones, by the identity of storages
        self._watch = Watch(())

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
        self._watch = Watch(self.slots.values())
        self._owners, self._needed = [x for x, _ in self._expected], [old for _, old in self._expected]

    def fit(self) -> bool:
        """Whether a replay may begin. If so, nobody holds what it writes to, and what it drops is dropped."""
        if not all(map(is_, map(gradient, self._owners), self._needed)):
            return False
        if not self.slots:
            return True
        ours: list[tuple[torch.Tensor, int]] = []  # made again if need be: a reference to one would count as a holder
        others: list[tuple[torch.Tensor, torch.Tensor]] = []
        for x in self._dropped:
            old = x.grad
            reference, position = self._given.get(id(x), (None, 0))
            if reference is not None and reference() is old:
                ours.append((x, position))
            elif old is not None:
                others.append((x, old))
            x.grad = old = None
        if self._watch.none_held():
            return True
        for x, position in ours:
            x.grad = self._templates[position].data
        for x, old in others:
            x.grad = old
        return False

    def give(self) -> None:
        """After a replay: parameters have the gradients that it made."""
        for x in self._cleared:
            x.grad = None
        for x, position in self._made:
            x.grad = new = self._templates[position].data
            self._given[id(x)] = weakref.ref(new), position

    def close(self) -> None:
        self._watch.close()
