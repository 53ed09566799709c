"""Hooks in the trainers of TRL (SFT, DPO, KTO, reward, GRPO), in place of their `activation_offloading`.

    trainer = SFTTrainer(model, args=SFTConfig(..., torch_compile=True), ...)
    AotHooksCallback(aot_hooks.offload(then=aot_hooks.float8())).add_to(trainer)

TRL's own offloading copies each tensor that autograd saves by itself, around a compiled graph too.
"""

from .transformers import AotHooksCallback as AotHooksCallback
