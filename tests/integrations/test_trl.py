"""`aot_hooks.integrations.trl` with the real trainers, against training without hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from trained import ATEN, TEXT, llama, losses_of  # noqa: E402

from aot_hooks import errors, float8, offload  # noqa: E402
from aot_hooks.integrations.trl import AotHooksCallback  # noqa: E402

pytestmark = pytest.mark.usefixtures("stock_is_aten")


def settings(tmp_path: Path, policy: Any, **more: Any) -> dict[str, Any]:
    """Of a trainer; without a policy it runs in eager mode."""
    return {
        "per_device_train_batch_size": 4, "max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "use_cpu": True,
        "report_to": [], "save_strategy": "no", "disable_tqdm": True, "torch_compile": policy is not None, "seed": 0,
        "bf16": False, "dataloader_pin_memory": False, "gradient_checkpointing": False, "output_dir": str(tmp_path),
        **more,
    }  # fmt: skip


def tokenizer() -> Any:
    """A byte a token."""
    import tokenizers
    import transformers

    vocabulary = {chr(i) if i > 2 else f"<{i}>": i for i in range(128)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<0>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    model.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<0>", bos_token="<1>", eos_token="<2>", unk_token="<0>"
    )


def sft(tmp_path: Path, policy: Any = None, rows: int = 16, peft_config: Any = None, **arguments: Any) -> Any:
    data = datasets.Dataset.from_list([{"input_ids": row} for row in TEXT[:rows]])
    trainer = trl.SFTTrainer(
        llama(),
        args=trl.SFTConfig(**settings(tmp_path, policy, **arguments)),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    if policy is not None:
        AotHooksCallback(policy, options=ATEN).add_to(trainer)
    return trainer


@pytest.mark.parametrize("policy", [float8(), offload(min_bytes=0)], ids=repr)
def test_sft_follows_training_without_hooks(tmp_path: Path, policy: Any) -> None:
    stock = sft(tmp_path)
    stock.train()
    ours = sft(tmp_path, policy)
    ours.train()
    assert losses_of(ours) == pytest.approx(losses_of(stock), rel=0.02)
    log = ours.state.log_history[1]
    assert log["aot_hooks/packed_mib"] < log["aot_hooks/saved_mib"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_accumulation_steps": 2, "bf16": True},
        {"packing": True, "max_length": 24, "fp16": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    ids=str,
)
def test_what_people_switch_on(tmp_path: Path, arguments: dict[str, Any]) -> None:
    stock = sft(tmp_path, max_steps=2, **arguments)
    stock.train()
    ours = sft(tmp_path, float8(), max_steps=2, **arguments)
    ours.train()
    assert losses_of(ours) == pytest.approx(losses_of(stock), rel=0.02)


def test_lora_uneven_batches_evaluate_save_and_resume(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    arguments: dict[str, Any] = {"rows": 14, "max_steps": 6, "save_strategy": "steps", "save_steps": 4}
    counters.clear()
    whole = sft(tmp_path / "whole", float8(), peft_config=lora, **arguments)
    whole.train()  # 4, 4, 4, 2 rows, and again; the loss of TRL breaks a forward into three graphs
    assert counters["stats"]["unique_graphs"] <= 6
    log = whole.state.log_history[1]
    assert log["aot_hooks/packed_mib"] < log["aot_hooks/saved_mib"]
    assert whole.evaluate()["eval_loss"] < losses_of(whole)[0]
    torch._dynamo.reset()
    again = sft(tmp_path / "again", float8(), peft_config=lora, **arguments)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert losses_of(again)[-2:] == pytest.approx(losses_of(whole)[-2:], rel=1e-3)


def test_offloading_by_both_is_refused(tmp_path: Path) -> None:
    trainer = sft(tmp_path, offload())
    trainer.args.activation_offloading = True  # as an argument, TRL itself needs a GPU for it
    with pytest.raises(errors.OptionError, match="would store the same tensors twice"):
        trainer.train()


def grpo(tmp_path: Path, policy: Any = None) -> Any:
    more = {"max_steps": 2, "num_generations": 4, "max_completion_length": 6, "beta": 0.0}
    trainer = trl.GRPOTrainer(
        llama(),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=trl.GRPOConfig(**settings(tmp_path, policy, **more)),
        train_dataset=datasets.Dataset.from_list([{"prompt": "abcd"}, {"prompt": "efgh"}]),
        processing_class=tokenizer(),
    )
    if policy is not None:
        AotHooksCallback(policy, options=ATEN).add_to(trainer)
    return trainer


def test_grpo_generates_and_trains(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stock = grpo(tmp_path)
    stock.train()
    torch.manual_seed(0)
    ours = grpo(tmp_path, float8())
    ours.train()
    assert losses_of(ours) == pytest.approx(losses_of(stock), rel=0.05, abs=1e-3)
    log = next(log for log in ours.state.log_history if "aot_hooks/saved_mib" in log)
    assert log["aot_hooks/packed_mib"] < log["aot_hooks/saved_mib"]


def preferring(tmp_path: Path, name: str, policy: Any = None) -> Any:
    """A trainer of preferences, on text of one letter each."""
    import transformers

    rows: list[dict[str, Any]] = [{"prompt": "abcd", "chosen": x * 6, "rejected": "zy" * 3} for x in "efghijkl"]
    if name == "KTO":
        rows = [{"prompt": "abcd", "completion": x * 6, "label": x < "i"} for x in "efghijkl"]
    model, more = llama(), {"ref_model": llama()}
    if name == "Reward":
        config = transformers.LlamaConfig(**model.config.to_dict() | {"num_labels": 1})
        model, more = transformers.LlamaForSequenceClassification(config), {}
    made = getattr(trl, f"{name}Trainer")(
        model,
        args=getattr(trl, f"{name}Config")(**settings(tmp_path, policy)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        **more,
    )
    if policy is not None:
        AotHooksCallback(policy, options=ATEN).add_to(made)
    return made


@pytest.mark.parametrize("name", ["DPO", "KTO", "Reward"])
def test_trainers_of_preferences(tmp_path: Path, name: str) -> None:
    stock = preferring(tmp_path, name)
    stock.train()
    ours = preferring(tmp_path, name, float8())
    ours.train()
    assert losses_of(ours) == pytest.approx(losses_of(stock), rel=0.05, abs=1e-3)
    log = next(log for log in ours.state.log_history if "aot_hooks/saved_mib" in log)
    assert log["aot_hooks/packed_mib"] < log["aot_hooks/saved_mib"]
