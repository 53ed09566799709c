"""Parameters that are in memory only from a gather to the next free, as FSDP2's: each gather puts them elsewhere."""

from __future__ import annotations

import torch


class Gathered:
    """Tensors whose memory is freed and made anew, elsewhere, by `gather`. The objects and their values stay."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self.occupied: list[torch.Tensor] = []  # keeps memory from before from being handed out again

    def gather(self) -> None:
        for x in self.tensors:
            storage, value, before = x.untyped_storage(), x.detach().clone(), x.data_ptr()
            nbytes = storage.nbytes()
            while x.data_ptr() == before:
                storage.resize_(0)
                self.occupied.append(torch.empty(nbytes, dtype=torch.uint8, device=x.device))
                storage.resize_(nbytes)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(x):
                x.copy_(value)
