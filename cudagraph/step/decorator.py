"""`whole_step`: what the user gives, checked, becomes a `WholeStep`. Of a model it runs two functions:

forward_backward   for each microbatch: loss_fn(model(x), y), scaled, then its backward; returns the mean loss
update             clips the gradients, steps the optimizers, drops the gradients
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import OptionError
from ..torch_private import cuda as torch_cuda
from .whole import WholeStep, step_of


def whole_step(
    model: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    state: Any = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """A training step that runs as one CUDA graph: forward, backward, clipping, optimizer, scaler, `zero_grad`.

        step = cudagraph.whole_step(model, loss_fn, optimizer)
        for batch in loader:
            loss = step(*batch)        # loss_fn(model(batch[0]), *batch[1:])

    or for a step of your own, which closes over its model and optimizer:

        @cudagraph.whole_step
        def step(x, y): ...

    Every call is a real step: after n calls all is as after n steps without graphs. The first calls with inputs of
    some shape warm up.

    Args:
        model: takes the first input; with `loss_fn=None` it takes all inputs and returns the loss. Without `optimizer`
            it is the function to run.
        loss_fn: takes the model's output and the other inputs, and returns a tensor of one element.
        optimizer: one, or several. Those with an option `capturable` get it set.
        scaler: scales the loss. An optimizer that is not fused leaves the update outside of the graph then.
        clip_grad_norm: the largest norm of all gradients together; see `torch.nn.utils.clip_grad_norm_`.
        accumulate: into how many microbatches the inputs are cut along dimension 0. The loss is the mean of theirs,
            weighted by their sizes.
        state: what else the step reads and the host may change: an object, or a list or dict of objects. Their
            attributes and entries are compared at any depth.
        options: `or_error`, `size_limit`, `rerecord_limit`, `warmup_steps`; see `Options`.

    A step depends on its arguments, on what is given here, and on the variables of its functions: what they close over,
    the globals that they name, their defaults. Attributes of modules, optimizers, schedulers, scalers and samplers
    among these are compared, those of other objects two objects deep; docs/footguns.md lists what is not. A number that
    changes is read from the device, if it only enters arithmetic.

    The step takes tensors on any device, and moves them to the model's; numbers; strings; modules, optimizers and the
    like. It returns the loss (or what the function returned) without history, in memory of its own. Tensors that it
    stores on modules and objects are copies, too. Gradients are None between steps.

    Raises:
        OptionError: an unknown option, or arguments that don't go together.
        NotCapturableError: in calls, with `options["or_error"]`, where a step would run without a graph of all of it.
    """
    if isinstance(loss_fn, torch.optim.Optimizer):
        raise OptionError("the optimizer is the third argument: whole_step(model, loss_fn, optimizer), loss_fn or None")
    if optimizer is None:
        if loss_fn is not None or scaler is not None or clip_grad_norm is not None or accumulate != 1:
            raise OptionError("loss_fn, scaler, clip_grad_norm and accumulate need an optimizer; give whole_step one")
        again = functools.partial(whole_step, state=state, options=options)
        return again if model is None else step_of(model, state, options)
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    return ModelStep(model, loss_fn, optimizers, scaler, clip_grad_norm, accumulate).as_whole(state, options)


@dataclass(frozen=True, eq=False)
class ModelStep:
    """The two halves of a step; the arguments are those of `whole_step`."""

    model: Any
    loss_fn: Callable[..., Any] | None
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler | None
    clip_grad_norm: float | None
    accumulate: int

    def __post_init__(self) -> None:
        """Raises `OptionError` for an argument that `whole_step` does not take."""
        if not callable(self.model):
            raise OptionError(f"model must be a module or function, got {self.model!r}")
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise OptionError(f"accumulate must be an integer of at least 1, got {self.accumulate!r}")
        if not self.optimizers or any(not isinstance(each, torch.optim.Optimizer) for each in self.optimizers):
            raise OptionError(f"optimizer must be a torch.optim.Optimizer or several, got {self.optimizers}")
        for each in self.optimizers:
            closure = inspect.signature(each.step).parameters.get("closure")
            if closure is not None and closure.default is closure.empty:
                name = type(each).__name__
                raise OptionError(f"{name} calls a closure several times; write a step of your own for it")
        norm = self.clip_grad_norm
        is_number = isinstance(norm, (int, float)) and not isinstance(norm, bool)
        if norm is not None and not (is_number and norm > 0):
            raise OptionError(f"clip_grad_norm must be a positive number or None, got {norm!r}")

    def as_whole(self, state: Any, options: Mapping[str, Any] | None) -> WholeStep:
        roots = {"model": self.model, "loss_fn": self.loss_fn, "scaler": self.scaler}
        is_one = len(self.optimizers) == 1
        update_roots = {"optimizer" if is_one else f"optimizer {i}": each for i, each in enumerate(self.optimizers)}
        step = WholeStep(self.forward_backward, self.update, roots, update_roots, state, options)
        step.name = getattr(self.model, "__name__", type(self.model).__name__)
        return step

    def parameters(self) -> list[torch.Tensor]:
        """All parameters, each once."""
        own = self.model.parameters() if isinstance(self.model, torch.nn.Module) else ()
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return [*dict.fromkeys([*own, *(x for group in groups for x in group["params"])])]

    def forward_backward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        """The forward and backward of all microbatches. Returns the loss."""
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
        """Clip the gradients, step the optimizers and the scaler, and drop the gradients."""
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
