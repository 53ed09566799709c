"""What a step's own code allocates: before its first compiled call, and between the last one and its backward.

    optimizer.step()   zero_grad()   embedding gathered   first compiled call
          a                                                      b                bytes allocated

Before the step there are a bytes, less those of the gradients that went. The rest of b is what the step's own code has
allocated. Usually that is the embedding of a language model, which is gathered until the end of the backward: 1 GiB for
128,256 words of width 4096. A peak that is counted from the first compiled call leaves it out.

    compiled forwards      loss, and its backward      compiled backwards
                     c     m at most                                     bytes allocated

A loss that is not compiled takes m - c beside what the calls hold. Under tensor parallelism that may be the peak: each
rank has all of the loss, and a part of each block. The mean of [8192, 4096] squares in float32 takes 576 MiB so, the
last backward of a Llama block over four H200s 400.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..steps.parameters import local_bytes
from .measured import Counters

_MOST_NOTED = 64  # steps of optimizers; plans are made, and measured, in the first 20 steps


class BeforeStep:
    """The bytes that are allocated when an optimizer has stepped, less those of gradients that go afterwards.

    It listens to all optimizers until it is closed, or gone, or has heard of `_MOST_NOTED` steps.
    """

    def __init__(self, counter: Counters) -> None:
        self._counter = counter
        self._noted = 0
        self._allocated: int | None = None  # after the last step of an optimizer, if no step has begun since
        self._gradients: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # then: parameters, bytes of gradients
        this = weakref.ref(self)

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (listener := this()) is not None:
                listener._note(optimizer)

        handle = register_optimizer_step_post_hook(stepped)
        self.close = weakref.finalize(self, handle.remove)
        self._at_end: int | None = None  # bytes allocated when the last forward ended

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        self._gradients = {key: known for key, known in self._gradients.items() if not _is_gone(known[0])}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                self._gradients[id(parameter)] = (weakref.ref(parameter), local_bytes(parameter.grad))
        self._allocated = self._counter.allocated()
        self._noted += 1
        if self._noted == _MOST_NOTED:
            self.close()

    def eager_bytes(self) -> int | None:
        """At a step's first compiled call: the bytes that its code has allocated so far. None: no optimizer has stepped
        since the step before."""
        if self._allocated is None:
            return None
        freed = sum(nbytes for parameter, nbytes in self._gradients.values() if _is_gone(parameter))
        found = self._counter.allocated() - (self._allocated - freed)
        self._allocated = None
        self._gradients.clear()
        return max(found, 0)

    def forward_ended(self) -> None:
        """A compiled forward has ended, and the loss may come next: count the most allocated bytes from here on."""
        self._counter.restart()
        self._at_end = self._counter.allocated()

    def loss_bytes(self) -> int | None:
        """At the begin of a backward: the most bytes that code took since the last forward ended. None: no forward has
        ended since this was asked last.

        Rounded up to 7 binary digits: cache keys contain it, and blocks of the allocator differ from run to run.
        """
        if self._at_end is None:
            return None
        nbytes = max(0, self._counter.most() - self._at_end)
        self._at_end = None
        unit = 1 << max(0, nbytes.bit_length() - 7)
        return -(-nbytes // unit) * unit


def _is_gone(parameter: weakref.ref[torch.Tensor]) -> bool:
    """Whether the gradient of `parameter` was freed."""
    return (alive := parameter()) is None or alive.grad is None
