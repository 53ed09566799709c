"""Hooks in loops of one's own that use Accelerate.

accelerator = Accelerator(dynamo_backend="inductor")          or TorchDynamoPlugin(use_regional_compilation=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with hooks(accelerator, aot_hooks.float8()) as training:
    for step, batch in enumerate(loader):
        ...
        training.log(step)
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import compile_regions

from ..errors import OptionError
from ..options import with_arguments
from .training import COMPILED_ONCE, Training


class hooks(Training):  # a context manager, named as one
    """Enables hooks in a `with`, and logs what they did to the trackers of `accelerator`.

    Takes the arguments of `aot_hooks.enable`. Raises `OptionError` for a wrong one; `log` raises it outside of
    the `with`, and if no graph that backend "inductor" compiles has run with gradients.
    """

    def __init__(self, accelerator: Accelerator, policy: Any = None, **arguments: Any) -> None:
        super().__init__(policy, **arguments)
        self.accelerator = accelerator

    def __enter__(self) -> hooks:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def log(self, step: int) -> dict[str, float]:
        """Log `metrics()` of the batch that has just run its backward to all trackers; returns them."""
        if self._enabled is None:
            raise OptionError("hooks(accelerator, ...) has no effect outside of `with hooks(...) as training:`")
        self.batch_done(COMPILED_ONCE)
        metrics = self.metrics()
        self.accelerator.log(metrics, step=step)
        return metrics


def compile_model(
    model: torch.nn.Module,
    policy: Any = None,
    *,
    scope: str = "donated",
    regional: bool = False,
    check: bool | float = False,
    **settings: Any,
) -> torch.nn.Module:
    """`model` compiled by backend="aot_hooks", for `accelerator.prepare`, which does not compile it again.

    Args:
        policy, scope: of saved tensors that no context covers.
        check: compare the gradients of the first step with those without hooks, as in `aot_hooks.enable`.
        regional: compile one block of each repeated class, as Accelerate does it: repeated blocks share their graphs.
        settings: of `torch.compile`; `options` are those of the backend.

    Raises `OptionError` for a wrong argument.
    """
    options = with_arguments(policy, scope, settings.pop("options", None), check)
    compile_it: Any = compile_regions if regional else torch.compile
    compiled: torch.nn.Module = compile_it(model, backend="aot_hooks", options=options, **settings)
    return compiled
