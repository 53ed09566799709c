"""Hooks in the `Trainer` of transformers, and in trainers made of it.

    trainer = Trainer(model, TrainingArguments(..., torch_compile=True), ...)
    AotHooksCallback(aot_hooks.float8()).add_to(trainer)

`Trainer(callbacks=[AotHooksCallback(...)])` packs the same, but trackers (TensorBoard, W&B) are called before callbacks
that are passed so: the numbers are then in `trainer.state.log_history` alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainerCallback

from ..errors import OptionError
from .training import COMPILED_ONCE, Training


class AotHooksCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]  # no types where it is not installed
    """Enables hooks while `trainer.train()` runs, and adds `Training.metrics()` to each of its logs.

    The model must be compiled by backend "inductor": `TrainingArguments(torch_compile=True)`, or `model.compile()`.

    Takes the arguments of `aot_hooks.enable`. Raises `OptionError` for a wrong one, when training begins with TRL's
    `activation_offloading=True`, and at the end of the first batch if no compiled graph ran in it with gradients.
    """

    def __init__(
        self, policy: Any = None, *, scope: str | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        self.training = Training(policy, scope=scope, options=options)

    def add_to(self, trainer: Trainer) -> AotHooksCallback:
        """Add this callback to `trainer`, before its trackers, so that they log its numbers. Returns it.

        The hooks end with `trainer.train()`, also if it raises: no callback of a Trainer hears of that.
        """
        trainer.add_callback(self)
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop())
        train = trainer.train

        @functools.wraps(train)
        def ends_hooks(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            finally:
                self.training.stop()

        trainer.train = ends_hooks
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if getattr(args, "activation_offloading", False):
            raise OptionError(
                f"{type(args).__name__}(activation_offloading=True) and hooks of aot_hooks would store the same "
                "tensors twice; leave activation_offloading out and pass offload() here"
            )
        self.training.start()

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
