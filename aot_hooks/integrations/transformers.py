"""Hooks in the `Trainer` of transformers, and in trainers made of it.

    trainer = Trainer(model, TrainingArguments(..., torch_compile=True), ...)
    AotHooksCallback(aot_hooks.float8()).add_to(trainer)

`Trainer(callbacks=[AotHooksCallback(...)])` does the same. After `trainer.add_callback(...)` trackers (TensorBoard,
W&B) are called before it, so the numbers are in `trainer.state.log_history` alone. And a training that raises leaves
the hooks enabled.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from transformers import Trainer, TrainerCallback

from ..errors import AotHooksError, OptionError, error_behind, in_a_line
from .logits import may_drop_logits, without_logits
from .training import COMPILED_ONCE, Training


@dataclass(eq=False)
class _Train:
    """`trainer.train()`, and the end of the hooks of its callbacks. A trainer is copied and pickled with its own."""

    trainer: Any
    own: Any  # the trainer's own method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        callbacks = [*self.trainer.callback_handler.callbacks]  # one may be removed meanwhile
        for callback in callbacks:
            if isinstance(callback, AotHooksCallback):
                callback.reads_loss_alone = _reads_loss_alone(self.trainer)
        try:
            return self.own(*args, **kwargs)
        except Exception as e:
            if error_behind(e, AotHooksError) is None:
                raise
            # The trainer's frames, some 60 lines, would push our message off the screen.
            raise e.with_traceback(None) from e.__cause__
        finally:
            for callback in (*callbacks, *self.trainer.callback_handler.callbacks):
                if isinstance(callback, AotHooksCallback):
                    callback.training.stop()


def _reads_loss_alone(trainer: Any) -> bool:
    """Whether `trainer` reads nothing but the loss of what its model returns in training."""
    return (
        type(trainer).compute_loss is Trainer.compute_loss
        and "compute_loss" not in vars(trainer)
        and trainer.label_smoother is None
        and trainer.compute_loss_func is None
        and getattr(trainer.args, "past_index", -1) < 0  # of transformers 4: which output is the next batch's input
    )


class AotHooksCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]  # no types where it is not installed
    """Enables hooks while `trainer.train()` runs, and adds `Training.metrics()` to each of its logs.

    The model must be compiled by backend "inductor": `TrainingArguments(torch_compile=True)`, or `model.compile()`.

    Takes the arguments of `aot_hooks.enable`, and `keep_logits`. Raises `OptionError` for a wrong one, when training
    begins with TRL's `activation_offloading=True`, and at the end of the first batch if no compiled graph ran in it
    with gradients.

    Args:
        keep_logits: whether the model returns its logits in training, beside the loss. With them the loss is not
            computed in chunks. None: not if the trainer computes its loss as transformers' `Trainer` does, which reads
            the loss alone. False: not in a trainer with a `compute_loss` of its own either.
    """

    reads_loss_alone = False  # the trainer that trains now, as far as is known; written when it begins

    def __init__(self, policy: Any = None, *, keep_logits: bool | None = None, **arguments: Any) -> None:
        self.training = Training(policy, **arguments)
        self.keep_logits = keep_logits

    def add_to(self, trainer: Trainer) -> AotHooksCallback:
        """Add this callback to `trainer`, before its trackers, so that they log its numbers. Returns it.

        Raises `OptionError` for what is no Trainer, and for a Trainer that has another callback of this kind.

        The hooks end with `trainer.train()`, also if it raises: no callback of a Trainer hears of that.
        """
        if not isinstance(trainer, Trainer):
            raise OptionError(f"AotHooksCallback.add_to: expected a Trainer of transformers, got {in_a_line(trainer)}")
        handler = trainer.callback_handler
        others = [each for each in handler.callbacks if isinstance(each, AotHooksCallback) and each is not self]
        if others:
            raise OptionError(
                f"this {type(trainer).__name__} has an AotHooksCallback already, for {others[0].training.policy!r}: a "
                "model has one policy at a time. Add one callback, or trainer.remove_callback(...) the other first"
            )
        handler.callbacks = [self, *(each for each in handler.callbacks if each is not self)]
        if not isinstance(trainer.train, _Train):
            trainer.train = _Train(trainer, trainer.train)
        return self

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add this callback to the Trainer that got it as one of `callbacks=[...]`. Its `__init__` calls this."""
        frame = sys._getframe(1)
        while frame.f_back is not None and not isinstance(frame.f_locals.get("self"), Trainer):
            frame = frame.f_back
        if isinstance(trainer := frame.f_locals.get("self"), Trainer):
            self.add_to(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if getattr(args, "activation_offloading", False):
            raise OptionError(
                f"{type(args).__name__}(activation_offloading=True) and hooks of aot_hooks would store the same "
                "tensors twice; leave activation_offloading out and pass offload() here"
            )
        drops = self.keep_logits is False or (
            self.keep_logits is None and self.reads_loss_alone and may_drop_logits(model)
        )
        self.training.start(without_logits(model) if drops else None)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training.next_batch()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training.batch_done(COMPILED_ONCE)

    on_substep_end = on_step_end

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs:
            return  # of an evaluation, or the whole training
        for target in (logs, *state.log_history[-1:]):
            target.update(self.training.metrics())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.training.stop()
