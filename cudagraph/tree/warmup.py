"""Warm-ups of training, whose activations get a memory pool of their own.

    forward, backward, uncaptured --> pool of the warm-up --> given back when the step is over
    gradients                     --> moved to a pool of their own --> given back when they are released
    loss, optimizer               --> ordinary memory

An optimizer makes its state after the first backward and keeps it. In memory that the caching allocator has cached
from that backward, the state would lie between activations: the rest of such a segment is free, but no graph's pool
can have it. Gradients in ordinary memory would take the free memory there, and the state would need new segments.
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

__all__ = ["Warmup", "storages_of"]


class Warmup:
    """Runs functions that are not captured yet.

    Attributes:
        busy: a function runs whose allocations go to the warm-up's pool, so that nothing can be captured.
    """

    def __init__(self, driver: CaptureDriver, device: torch.device) -> None:
        self.driver = driver
        self.device = device
        self.busy = False
        self._allocating: Callable[[], contextlib.AbstractContextManager[None]] | None = None

    def end(self) -> None:
        """Give the pool back: the step's activations are dead, or no other warm-up uses them."""
        self._allocating = None

    def run(self, function: Function, inputs: list[Any], input_storages: Sequence[StorageWeakRef]) -> list[Any]:
        """Run `function` and return its outputs. Gradients move out of the pool: the program may keep them for good.

        `input_storages`: weak, but no other storage takes the address of one meanwhile.
        """
        piece = function.piece
        if piece.is_inference or self.busy or self.driver.is_capturing():
            return list(piece.run(inputs))
        allocating = self._allocating = self._allocating or self.driver.open_warm_pool(self.device)
        self.busy = True
        try:
            with allocating():
                outputs = list(piece.run(inputs))
        except BaseException:
            del allocating
            self.end()  # a program that tries again with less finds all memory
            raise
        finally:
            self.busy = False
        if piece.is_backward:
            known = {storage.cdata for storage in input_storages}
            del allocating
            self.end()  # free memory of the pool is given back before the copies are made
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
        """Move `storages` to a pool of their own. If memory is too short for both, they stay."""
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
