"""For tests of integrations: small models of transformers, text, and "inductor" without its code generation."""

from __future__ import annotations

import inspect
from typing import Any

import torch

ATEN = {"inner": "aten"}
VOCABULARY, WIDTH, LENGTH = 128, 32, 16
_source = inspect.getsource(inspect).encode("ascii", "replace")
TEXT = [[byte % VOCABULARY for byte in _source[at : at + LENGTH]] for at in range(0, 64 * LENGTH, LENGTH)]


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH * 4, use_cache=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=LENGTH * 4, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def arguments_of(folder: Any, **others: Any) -> Any:
    """`TrainingArguments` of transformers for some steps on a CPU, in the same order each time."""
    import transformers

    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
        "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(**settings | others)


def losses_of(trainer: Any) -> list[float]:
    """The losses that a `Trainer` of transformers has logged while it trained."""
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]
