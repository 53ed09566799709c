"""A training step of a model, a loss function and optimizers, as two functions that `whole_step` runs or captures.

forward_backward   for each microbatch: loss_fn(model(x), y), scaled, then its backward; returns the mean loss
update             clips the gradients, steps the optimizers, drops the gradients
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..torch_private import cuda as torch_cuda


@dataclass(frozen=True, eq=False)
class ModelStep:
    """The two halves of a step; the arguments are those of `whole_step`."""

    model: Callable[..., Any]
    loss_fn: Callable[..., Any] | None
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler | None
    clip_grad_norm: float | None
    accumulate: int

    def parameters(self) -> list[torch.Tensor]:
        """All parameters, each once."""
        own = self.model.parameters() if isinstance(self.model, torch.nn.Module) else ()
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return [*dict.fromkeys([*own, *(x for group in groups for x in group["params"])])]

    def forward_backward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        clean = [x for x in self.parameters() if x.grad is None]
        total: torch.Tensor | None = None
        try:
            for (args, kwargs), share in microbatches((inputs, named), self.accumulate):
                if self.loss_fn is None:
                    loss = self.model(*args, **kwargs)
                else:
                    loss = self.loss_fn(self.model(*args[:1], **kwargs), *args[1:])
                loss = loss if self.accumulate == 1 else loss * share
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                total = loss.detach() if total is None else total + loss.detach()
        except BaseException:
            for x in clean:  # the next step is not to add to half of this one
                x.grad = None
            raise
        assert total is not None
        return total

    def update(self) -> None:
        try:
            if self.clip_grad_norm is not None:
                if self.scaler is not None:
                    for optimizer in self.optimizers:
                        self.scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(self.parameters(), self.clip_grad_norm)
            for optimizer in self.optimizers:
                optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
            if self.scaler is not None:
                torch_cuda.update_scaler(self.scaler)
        finally:
            for x in self.parameters():
                x.grad = None


def microbatches(arguments: Any, count: int) -> Iterable[tuple[Any, float]]:
    """`arguments` cut into `count` parts along dimension 0, each with its share of the whole."""
    if count == 1:
        return [(arguments, 1.0)]
    flat, spec = torch_cuda.flatten(arguments)
    sizes = {x.shape[0] if x.dim() else 0 for x in flat if isinstance(x, torch.Tensor)}
    if len(sizes) != 1 or min(sizes) < count:
        shapes = [tuple(x.shape) for x in flat if isinstance(x, torch.Tensor)]
        raise ValueError(
            f"accumulate={count} cuts inputs along dimension 0, so they need one size of at least {count} there; got "
            f"shapes {shapes}"
        )
    (size,) = sizes
    cut = [x.tensor_split(count) if isinstance(x, torch.Tensor) else [x] * count for x in flat]
    first = next(x for x in cut if isinstance(x[0], torch.Tensor))
    return [(torch_cuda.unflatten([x[n] for x in cut], spec), len(first[n]) / size) for n in range(count)]
