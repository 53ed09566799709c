"""Hooks in torchtitan: its metrics processor, which lives as long as the trainer, enables them.

config.compile.enable = True
config.metrics = HooksMetrics.Config(policy=aot_hooks.offload(then=aot_hooks.float8()))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from torchtitan.components.metrics import MetricsProcessor

from .training import Training


class HooksMetrics(MetricsProcessor):  # type: ignore[misc, unused-ignore]  # no types where it is not installed
    """torchtitan's metrics processor, which also enables hooks until it is closed, and logs `Training.metrics()`.

    The numbers are of the whole step that is logged: of all its batches, if gradients accumulate.

    Raises `OptionError` for a wrong policy; `log` raises it if the model was not compiled by backend "inductor".
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc, unused-ignore]
        policy: Annotated[Any, tyro.conf.Suppress] = None
        """A hook, policy or `budget(...)`; not set from the command line"""

        scope: Annotated[Any, tyro.conf.Suppress] = None
        """Its scope, see `aot_hooks.enable`"""

        options: Annotated[Any, tyro.conf.Suppress] = None
        """Options of the backend, see `aot_hooks.enable`"""

        check: Annotated[Any, tyro.conf.Suppress] = False
        """Compare the gradients of the first step with those without hooks, see `aot_hooks.enable`"""

    def __init__(self, config: Config, **arguments: Any) -> None:
        self.training = Training(config.policy, scope=config.scope, options=config.options, check=config.check)
        super().__init__(config, **arguments)
        self.training.start()

    def should_log(self, step: int) -> bool:
        self.training.next_batch()  # torchtitan asks when a step begins, its trainer of Flux after the backward
        return bool(super().should_log(step))

    def log(self, step: int, *losses: Any, extra_metrics: dict[str, Any] | None = None, **rest: Any) -> None:
        self.training.batch_done(or_before=True)
        super().log(step, *losses, extra_metrics={**(extra_metrics or {}), **self.training.metrics()}, **rest)

    def close(self) -> None:
        self.training.stop()
        super().close()
