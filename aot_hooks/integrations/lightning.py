"""Hooks in the `Trainer` of Lightning.

trainer = lightning.Trainer(..., callbacks=[AotHooksCallback(aot_hooks.float8())])
trainer.fit(torch.compile(module), ...)         or module.net.compile() in `configure_model`
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from .training import Training


class AotHooksCallback(Callback):  # type: ignore[misc, unused-ignore]  # no types where it is not installed
    """Enables hooks while `trainer.fit()` runs. Logs `Training.metrics()` as often as `log_every_n_steps` says.

    The module, or what it calls, must be compiled by backend "inductor", at the latest in `configure_model`.

    Takes the arguments of `aot_hooks.enable`. Raises `OptionError` for a wrong one, and at the end of the first batch
    that is not skipped, if no compiled graph ran in it with gradients.
    """

    def __init__(self, policy: Any = None, **arguments: Any) -> None:
        self.training = Training(policy, **arguments)
        self._step = 0  # of the trainer, when the batch began

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.training.start()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.training.next_batch()
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # `training_step` may skip a batch
        skipped = not outputs if pl_module.automatic_optimization else trainer.global_step == self._step
        self.training.batch_done(skipped=skipped)
        pl_module.log_dict(self.training.metrics())

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.training.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.training.stop()
