"""What a capture may have touched of the caller's, so that one that fails can put it back.

    Snapshot(tensors, generators) -> capture -> rebound(): which tensors were given other memory or another shape
                                             -> restore(): all as it was

Kernels do not run in a capture, so the contents of memory stay. What happens on the host does happen: a tensor object
is given other memory (`set_`, `.data =`) or another shape (`t_`), a generator moves on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..torch_private import cuda as torch_cuda
from .liveness import Layout, layout_of

__all__ = ["Snapshot"]

Memory = tuple[int, int, Layout]  # of a tensor: its storage, the bytes of that, how it lies there


class Snapshot:
    """The memory and shapes of `tensors` and the states of `generators`, as they are now.

    It holds the memory of the tensors: drop it when the capture is over.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], generators: Sequence[torch.Generator]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.tensors = [(x, x.detach(), memory_of(x)) for x in tensors if x.layout is torch.strided]
        self.states = [(generator, generator.get_state()) for generator in generators]

    def rebound(self) -> list[torch.Tensor]:
        """The tensors that lie elsewhere or in another way by now."""
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
