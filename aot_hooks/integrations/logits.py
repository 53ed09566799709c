"""Models of transformers whose training returns no logits, so that the loss may be computed in chunks.

    forward(**batch) -> {loss, logits}  --without_logits-->  {loss}     in training, with labels
                        {loss, logits}                       as it was  in evaluation, generation, without labels

A compiled graph has to compute what it returns, and such a model returns its logits beside the loss.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch

from ..errors import OptionError


class WithoutLogits:
    """What `without_logits` returns: a context manager, and a switch that `end` turns off."""

    def __init__(self, model: torch.nn.Module) -> None:
        model = _innermost(model)
        before = _own_forward(model)
        if before is None:
            raise OptionError(
                "without_logits: expected a module whose forward is a method of its own, as the models of transformers "
                f"are, got {type(model).__name__} with {getattr(model, 'forward', None)!r}"
            )
        self._model = model
        self._before = before if "forward" in vars(model) else None
        self._now = MethodType(self._wrapped(before.__func__), model)
        self._is_on = True
        model.forward = self._now

    def _wrapped(self, function: Any) -> Any:
        # In the forward, not in a hook of the module: Dynamo compiles nothing of a module's call but its forward.
        # The wrapped function has the name "forward", by which a copy or a pickle of the model finds the class's own.
        def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = function(module, *args, **kwargs)
            if not self._is_on or not module.training or not torch.is_grad_enabled():
                return output
            if not isinstance(output, dict) or output.get("loss") is None or "logits" not in output:
                return output
            return type(output)(**{name: value for name, value in output.items() if name != "logits"})

        forward.__code__ = forward.__code__.replace()  # Dynamo limits the graphs of one code object
        return functools.wraps(function)(forward)

    def end(self) -> None:
        """Let the model return its logits again. A second call does nothing."""
        self._is_on = False  # for whoever has wrapped the forward meanwhile
        if vars(self._model).get("forward") is self._now:
            if self._before is None:
                del self._model.forward
            else:
                self._model.forward = self._before

    def __enter__(self) -> WithoutLogits:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _innermost(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside of torch.compile(...) and DistributedDataParallel(...)."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _own_forward(model: torch.nn.Module) -> MethodType | None:
    forward = getattr(model, "forward", None)
    return forward if isinstance(forward, MethodType) and forward.__self__ is model else None


def may_drop_logits(model: torch.nn.Module) -> bool:
    """Whether `without_logits` takes `model`."""
    return _own_forward(_innermost(model)) is not None


def without_logits(model: torch.nn.Module) -> WithoutLogits:
    """Have `model`, one of transformers, return no logits where it returns a loss and is trained.

    It takes effect at once, until the end of a `with` of what it returns, or until `end()` of that. `model` may be
    compiled, before or after, or in DistributedDataParallel. Evaluation, generation and calls without labels return
    what they did. With `options={"chunk": True}`, or under a budget, the loss is then computed in chunks of tokens.

    Raises:
        OptionError: the model's `forward` is no method of its own.
    """
    return WithoutLogits(model)
