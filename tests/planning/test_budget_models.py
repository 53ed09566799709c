"""Hugging Face models with random weights, under a budget half way between the least and stock."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from profiled import measured
from steps import ATEN
from torch import nn

import aot_hooks
from aot_hooks import budget

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'aot-hooks[hf]'")
WIDTH, LAYERS, HEADS, WORDS, LENGTH = 64, 2, 4, 128, 64


def llama() -> Any:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2}
    config = transformers.LlamaConfig(vocab_size=WORDS, use_cache=False, **sizes, **heads)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH}
    tokens = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **tokens, **sizes))
    model.loss_type = "ForCausalLM"  # else it logs a warning, which breaks the graph: each graph has a plan of its own
    return model


def t5() -> Any:
    sizes = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 4 * WIDTH, "num_layers": LAYERS, "num_heads": HEADS}
    config = transformers.T5Config(vocab_size=WORDS, decoder_start_token_id=0, use_cache=False, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> Any:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    config = transformers.ViTConfig(num_attention_heads=HEADS, image_size=32, patch_size=4, num_labels=10, **sizes)
    return transformers.ViTForImageClassification(config)


class Loss(nn.Module):
    """The loss of a batch: tokens, their own labels, or images."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            return self.model(pixel_values=x, labels=torch.arange(len(x), device=x.device) % 10).loss
        return self.model(input_ids=x, labels=x).loss


def gradients(model: nn.Module, x: torch.Tensor, policy: Any) -> list[torch.Tensor]:
    torch._dynamo.reset()
    model.zero_grad(set_to_none=True)
    compiled = torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": policy})
    torch.manual_seed(3)  # dropout
    compiled(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "max_error"), [(llama, 0.05), (gpt2, 0.0), (t5, 0.0), (vit, 0.05)])
def test_half_way_to_the_least(make: Callable[[], Any], max_error: float, tmp_path):
    torch.manual_seed(0)
    model = Loss(make()).train()
    x = torch.randn(8, 3, 32, 32) if make is vit else torch.randint(1, WORDS, (8, LENGTH))

    def peak(policy: Any) -> int:
        return aot_hooks.plan(model, x, policy=policy, inner="aten").peak_bytes

    stock, least = peak(aot_hooks.KEEP), peak(budget(max_slowdown=math.inf, max_error=max_error))
    assert least < stock
    limit = (stock + least) // 2
    policy = budget(limit, max_error=max_error)
    assert peak(policy) <= limit
    expected = gradients(model, x, aot_hooks.policies.everything(aot_hooks.KEEP))
    found = gradients(model, x, policy)
    if max_error:
        apart = sum((f - e).square().sum() for f, e in zip(found, expected, strict=True))
        assert math.sqrt(apart / sum(e.square().sum() for e in expected)) <= max_error
    else:
        assert all(map(torch.equal, found, expected))
    assert max(measured(model, x, policy, tmp_path)) <= 1.03 * limit
