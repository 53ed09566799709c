"""Hooks in the trainers of TRL (SFT, DPO, KTO, reward, GRPO), in place of their `activation_offloading`.

    trainer = SFTTrainer(model, args=SFTConfig(..., torch_compile=True), ...)
    AotHooksCallback(aot_hooks.offload(then=aot_hooks.float8())).add_to(trainer)

TRL's own offloading copies each tensor that autograd saves by itself, around a compiled graph too.
"""

from __future__ import annotations

from typing import Any

from ..errors import OptionError
from . import transformers

__all__ = ["AotHooksCallback"]


class AotHooksCallback(transformers.AotHooksCallback):
    """The callback for transformers, which also refuses TRL's own offloading at the same time.

    Raises:
        OptionError: when training begins with `activation_offloading=True`; else as the callback for transformers.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if getattr(args, "activation_offloading", False):
            raise OptionError(
                f"{type(args).__name__}(activation_offloading=True) and hooks of aot_hooks would store the same "
                "tensors twice; leave activation_offloading out and pass offload() here"
            )
        super().on_train_begin(args, state, control, **kwargs)
