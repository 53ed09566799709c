"""transformers' Llama with random weights, as users train it: its vocabulary, its loss, bfloat16.

make_llama(...)           the model itself, or with adapters of peft
LlamaByBlocks(...)        the same layers, each compiled and sharded on its own, the last layer with the loss as one

           ids --> embed --> layer --> layer ... --> [norm, last layer, loss] --> loss
compiled             no      each      each          one graph, so that the loss can be computed in chunks
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import aot_hooks

__all__ = ["LlamaByBlocks", "make_llama"]


def make_llama(
    layers: int, width: int, *, tokens: int, vocabulary: int, device: torch.device, lora: int = 0, causal: bool = False
) -> Any:
    """In training mode. `lora` is the rank of adapters of all linear layers but the last; 0 trains the whole model.

    `causal`: attention without transformers' mask of tokens x tokens.
    """
    import transformers

    torch.manual_seed(0)
    heads = max(width // 128, 4)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=7 * width // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        max_position_embeddings=tokens,
        use_cache=False,
        attn_implementation=_causal_attention() if causal else "sdpa",
        tie_word_embeddings=False,
    )
    with device:
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        if lora:
            import peft

            adapters = peft.LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, adapters).to(torch.bfloat16)
    return model.train()


def _causal_attention() -> str:
    """The name of transformers' own `scaled_dot_product_attention`, with `is_causal` in place of a mask."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal", sdpa_attention_forward)
    AttentionMaskInterface.register("causal", lambda *_, **__: None)
    return "causal"


class LastLayer(nn.Module):
    """The norm, the last linear layer, and transformers' loss over shifted labels."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.out, self.loss = model.model.norm, model.lm_head, model.loss_function
        self.vocabulary = model.config.vocab_size

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.loss(logits=self.out(self.norm(x)), labels=labels, vocab_size=self.vocabulary)
        return loss


class LlamaByBlocks(nn.Module):
    """`forward(ids [batch, tokens])` returns the loss. `model` may have adapters of peft.

    `checkpointed=True`: each layer is computed again in the backward. With `inputs`, a hook, that packs what is left,
    the layers' inputs. `labels`: other than `ids`. `count`: of the layers, the first.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        model = getattr(model, "base_model", model).model if hasattr(model, "peft_config") else model
        self.embed, self.rotary = model.model.embed_tokens, model.model.rotary_emb
        self.blocks = model.model.layers
        self.last = LastLayer(model)

    def forward(
        self,
        ids: Tensor,
        checkpointed: bool = False,
        inputs: aot_hooks.Hook | None = None,
        labels: Tensor | None = None,
        count: int | None = None,
    ) -> Tensor:
        x = self.embed(ids)
        if not x.requires_grad and torch.is_grad_enabled():  # adapters alone are trained: one graph serves all layers
            x.requires_grad_()
        angles = self.rotary(x, torch.arange(ids.shape[1], device=ids.device)[None])
        with contextlib.nullcontext() if inputs is None else aot_hooks.saved_tensors_hooks(inputs):
            for block in self.blocks[:count]:
                if checkpointed:  # the hooks of one that is not reentrant hide its input from others
                    x = checkpoint(_call, block, x, angles, use_reentrant=inputs is not None)
                else:
                    x = block(x, position_embeddings=angles)
        loss: Tensor = self.last(x, ids if labels is None else labels)
        return loss


def _call(block: nn.Module, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    y: Tensor = block(x, position_embeddings=angles)
    return y
