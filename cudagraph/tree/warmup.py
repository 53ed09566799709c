"""Where warm-ups of training allocate: apart from what lives on after them.

    forward, backward as they are --> memory of the warm-up --> given back when the step is over
    gradients                     --> moved to memory of their own --> given back when they are let go of
    loss, optimizer               --> ordinary memory

An optimizer makes its state after the first backward and keeps it. In memory that the caching allocator has kept of
that backward it would lie between activations: what is left around it is free, but no graph's pool can have it.
Likewise gradients: in ordinary memory they would take what is free there, and the state new segments beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_private import cuda as torch_cuda
from .function import log

if TYPE_CHECKING:
    from .driver import CaptureDriver
    from .function import Function

__all__ = ["Warming", "storages_of"]


class Warming:
    """Runs what is not captured yet.

    Attributes:
        busy: it runs something whose allocations are routed, so that nothing can be captured meanwhile.
    """

    def __init__(self, driver: CaptureDriver, device: torch.device) -> None:
        self.driver = driver
        self.device = device
        self.busy = False
        self.allocating: Callable[[], contextlib.AbstractContextManager[None]] | None = None

    def over(self) -> None:
        """The step is: its activations are dead, or are never used by another warm-up."""
        self.allocating = None

    def run(self, function: Function, inputs: list[Any], given: Sequence[StorageWeakRef]) -> list[Any]:
        """What `function` returns. Gradients do not lie with activations: they may be accumulated into for good.

        `given`: storages of `inputs`. Weak, but the address of none is taken by another storage meanwhile."""
        piece = function.piece
        if piece.is_inference or self.busy or self.driver.is_capturing():
            return list(piece.run(inputs))
        allocating = self.allocating = self.allocating or self.driver.open_warm_pool(self.device)
        self.busy = True
        try:
            with allocating():
                outputs = list(piece.run(inputs))
        except BaseException:
            del allocating
            self.over()  # who tries again, with less, finds all memory
            raise
        finally:
            self.busy = False
        if piece.is_backward:
            known = {storage.cdata for storage in given}
            del allocating
            self.over()  # what is free of it is given back before the copies are made
            storages = {torch_cuda.identity(x.untyped_storage()): x.untyped_storage() for x in outputs if is_strided(x)}
            self._move(
                [
                    storage
                    for cdata, storage in storages.items()
                    if cdata not in known and not function.is_constant(cdata) and self._can_move(storage)
                ]
            )
        return outputs

    def _move(self, storages: list[torch.UntypedStorage]) -> None:
        """To memory apart from all other; if there is too little for both, they stay."""
        if not storages:
            return
        try:
            with self.driver.open_warm_pool(self.device)():
                self.driver.copy_out(storages)
        except torch.OutOfMemoryError as error:
            log.debug("gradients of a warm-up stay in its memory: %s", error)

    def _can_move(self, storage: torch.UntypedStorage) -> bool:
        return storage.device == self.device and storage.nbytes() > 0 and self.driver.can_copy_out(storage)


def storages_of(values: Sequence[Any]) -> list[StorageWeakRef]:
    return [StorageWeakRef(x.untyped_storage()) for x in values if is_strided(x)]


def is_strided(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout is torch.strided
