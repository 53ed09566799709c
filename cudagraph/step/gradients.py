"""The gradients of parameters before and after a step that is a graph.

    before a replay: the same tensor (or None) as when the step was recorded; any, if the step drops it unread
    after it:        still that tensor; or None; or a new one over the graph's memory, where the next replay writes

Gradients of a recording may lie where an earlier recording has temporary values. So a replay also needs that nobody
holds gradients of recordings that were made later.

To find out whether the step reads a gradient, a tensor that no operator can use stands in for it during the capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from operator import attrgetter, is_

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_private import cuda as torch_cuda
from ..torch_private.distributed import local_part, with_local_part
from ..tree.capture import CannotCapture
from ..tree.liveness import Slot, Watch, layout_of, tensor_on

gradient = attrgetter("grad")


class ReadsGradients(CannotCapture):
    """The step reads a gradient from before the step."""


# By a parameter's id, the gradient that a replay gave it last: a weak reference to the gradient, the templates of the
# recording, and the position there. `may_replay` drops the gradient to see whether somebody else holds it, and makes it
# again from its template.
LastGradients = dict[int, tuple[weakref.ref[torch.Tensor], "Templates", int]]


class Templates(list[torch.Tensor]):
    """Tensors over the memory of gradients: replays give out their aliases."""

    def __init__(self) -> None:
        super().__init__()
        self.spread: dict[int, torch.Tensor] = {}  # by position: a `DTensor` like the gradient, whose part this is


class Gradients:
    """The gradients of `parameters`. Made before a capture; call `finish` after it, also if it failed."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        last: LastGradients,
        *,
        reads: bool,
        in_buckets: Collection[torch.Tensor] = (),
    ) -> None:
        """`last` is one dict for all recordings of the step. If `reads` is False and the step reads a gradient, the
        capture raises `ReadsGradients`. Gradients of parameters `in_buckets` are views of memory that others own, and
        overwrite in each step."""
        self._parameters, self._in_buckets = parameters, {*map(id, in_buckets)}
        self._before = [x.grad for x in parameters]
        self._wires = [x if x is None or reads else _wire_for(x) for x in self._before]
        for x, wire in zip(parameters, self._wires, strict=True):
            x.grad = wire
        # Parameters, by what the step does with their gradient:
        self._expected: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # uses it, so a replay needs this very one
        self._dropped: list[torch.Tensor] = []  # drops it unread
        self._cleared: list[torch.Tensor] = []  # leaves None
        self._made: list[tuple[torch.Tensor, int]] = []  # leaves a new one; its position in `_templates`
        self._templates = Templates()
        self._last = last
        self.slots: dict[int, Slot] = {}  # the memory of new gradients, by the identity of storages
        self._watch = Watch(())
        self._orphans: Sequence[StorageWeakRef] = ()  # see `require_free`

    @property
    def before(self) -> list[torch.Tensor]:
        """The gradients from before the capture, and what stands in for them."""
        return [x for x in (*self._before, *self._wires) if x is not None]

    @property
    def static(self) -> list[torch.Tensor]:
        """The gradients that the graph reads and writes where they are."""
        return [local_part(old) for _, old in self._expected if old is not None]

    def classify(self, device: torch.device) -> None:
        """Sort the parameters by what the captured step did with their gradients. Raises `CannotCapture` for gradients
        that a replay can't make."""
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
            local = local_part(new)
            if local.layout is not torch.strided or type(local) is not torch.Tensor or local.device != device:
                raise CannotCapture(f"makes a gradient that is a {type(local).__name__} of layout {local.layout}")
            if new.requires_grad:
                raise CannotCapture("makes gradients that require gradients (create_graph=True)")
            if local is not new:
                self._templates.spread[len(self._templates)] = with_local_part(
                    new, torch.empty_like(local, device="meta")
                )
            storage = local.untyped_storage()
            self._made.append((x, len(self._templates)))
            if id(x) in self._in_buckets:
                self._templates.append(tensor_on(storage, layout_of(local)))
                continue
            identity = torch_cuda.identity(storage)
            if identity not in self.slots:
                self.slots[identity] = Slot(storage, "a gradient", copies=False)
            self.slots[identity].add_template(self._templates, layout_of(local))

    def finish(self) -> None:
        """Put back the gradients from before the capture, and watch the memory of new ones."""
        for x, old in zip(self._parameters, self._before, strict=True):
            x.grad = old
        self._parameters, self._before, self._wires = [], [], []
        self.memory = [(StorageWeakRef(slot.storage), slot) for slot in self.slots.values()]
        self.require_free((), ())
        self._owners, self._needed = [x for x, _ in self._expected], [old for _, old in self._expected]

    def require_free(self, slots: Sequence[Slot], orphans: Sequence[StorageWeakRef]) -> None:
        """From now on, a replay also needs that nobody holds gradients of other recordings. `slots` are those of open
        recordings, `orphans` the storages of closed ones."""
        self._watch.close()
        self._watch, self._orphans = Watch([*self.slots.values(), *slots]), orphans

    def may_replay(self) -> bool:
        """Whether a replay may begin: nobody holds what it writes to. If so, gradients that it drops are None now."""
        if not all(map(is_, map(gradient, self._owners), self._needed)):
            return False
        if not self._watch.slots and not self._orphans:
            return True
        ours: list[tuple[torch.Tensor, Templates, int]] = []  # a reference to one would count as a holder
        others: list[tuple[torch.Tensor, torch.Tensor]] = []
        for x in self._dropped:
            old = x.grad
            reference, templates, position = self._last.get(id(x), (None, Templates(), 0))
            if reference is not None and reference() is old:
                ours.append((x, templates, position))
            elif old is not None:
                others.append((x, old))
            x.grad = old = None
        if self._watch.none_held() and all(orphan.expired() for orphan in self._orphans):
            return True
        for x, templates, position in ours:
            self._assign(x, templates, position)
        for x, old in others:
            x.grad = old
        return False

    def _assign(self, x: torch.Tensor, templates: Templates, position: int) -> None:
        new = templates[position].data
        if position in templates.spread:
            new = with_local_part(templates.spread[position], new)
        x.grad = new
        self._last[id(x)] = weakref.ref(new), templates, position

    def assign(self) -> None:
        """After a replay: assign parameters the gradients that it made."""
        for x in self._cleared:
            x.grad = None
        for x, position in self._made:
            self._assign(x, self._templates, position)

    def close(self) -> None:
        self._watch.close()
        for key in [key for key, (_, templates, _) in self._last.items() if templates is self._templates]:
            del self._last[key]  # the templates would keep the memory


def _wire_for(x: torch.Tensor) -> torch.Tensor:
    return with_local_part(x, torch_cuda.tripwire(local_part(x), ReadsGradients))
