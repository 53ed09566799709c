"""`whole_step`: what the user gives, checked, becomes a `WholeStep`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..errors import OptionError
from .model_step import ModelStep
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
    return _step_of_halves(ModelStep(model, loss_fn, optimizers, scaler, clip_grad_norm, accumulate), state, options)


def _step_of_halves(halves: ModelStep, state: Any, options: Mapping[str, Any] | None) -> WholeStep:
    _check(halves.model, halves.optimizers, halves.clip_grad_norm, halves.accumulate)
    roots = {"model": halves.model, "loss_fn": halves.loss_fn, "scaler": halves.scaler}
    is_one = len(halves.optimizers) == 1
    update_roots = {"optimizer" if is_one else f"optimizer {i}": each for i, each in enumerate(halves.optimizers)}
    step = WholeStep(halves.forward_backward, halves.update, roots, update_roots, state, options)
    step.name = getattr(halves.model, "__name__", type(halves.model).__name__)
    return step


def _check(model: Any, optimizers: list[Any], clip_grad_norm: Any, accumulate: Any) -> None:
    """Raises `OptionError` for an argument that `whole_step` does not take."""
    if model is None or not callable(model):
        raise OptionError(f"model must be a module or function, got {model!r}")
    if type(accumulate) is not int or accumulate < 1:
        raise OptionError(f"accumulate must be an integer of at least 1, got {accumulate!r}")
    if not optimizers or any(not isinstance(each, torch.optim.Optimizer) for each in optimizers):
        raise OptionError(f"optimizer must be a torch.optim.Optimizer or several, got {optimizers}")
    for each in optimizers:
        if (closure := inspect.signature(each.step).parameters.get("closure")) and closure.default is closure.empty:
            raise OptionError(f"{type(each).__name__} calls a closure several times; write a step of your own for it")
    is_number = isinstance(clip_grad_norm, (int, float)) and not isinstance(clip_grad_norm, bool)
    if clip_grad_norm is not None and not (is_number and clip_grad_norm > 0):
        raise OptionError(f"clip_grad_norm must be a positive number or None, got {clip_grad_norm!r}")
