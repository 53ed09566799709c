"""A snapshot of the caller's tensors and generators, so that a failed capture can put them back.

    Snapshot(tensors, generators) -> capture -> rebound(): which tensors got other memory or another shape
                                             -> restore(): everything as before

Kernels do not run in a capture, so the contents of memory stay. Host code does run: it may give a tensor object other
memory (`set_`, `.data =`) or another shape (`t_`), or advance a generator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..torch_private import cuda as torch_cuda
from .liveness import Layout, layout_of

__all__ = ["Snapshot"]

Memory = tuple[int, int, Layout]  # a tensor's storage, its size in bytes, the tensor's layout on it


class Snapshot:
    """The memory and shapes of `tensors` and the states of `generators`, as they are now.

    It holds the memory of the tensors, so drop it when the capture is over.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], generators: Sequence[torch.Generator]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.tensors = [(x, x.detach(), memory_of(x)) for x in tensors if x.layout is torch.strided]
        self.states = [(generator, generator.get_state()) for generator in generators]

    def rebound(self) -> list[torch.Tensor]:
        """The tensors whose memory or layout has changed since."""
        return [x for x, _, memory in self.tensors if memory_of(x) != memory]

    def restore(self) -> None:
        """Put tensors and generators back."""
        for x, alias, memory in self.tensors:
            if memory_of(x) != memory:
                with torch.inference_mode(x.is_inference()):
                    x.data = alias
        for generator, state in self.states:
            generator.set_state(state)


def memory_of(x: torch.Tensor) -> Memory:
    if x.layout is not torch.strided:
        return 0, 0, Layout((), (), 0, x.dtype)
    storage = x.untyped_storage()
    return torch_cuda.identity(storage), storage.nbytes(), layout_of(x)
