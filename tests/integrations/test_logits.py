"""`without_logits`, and the callback of transformers that uses it: losses in chunks with models that return logits."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trained import ATEN, TEXT, VOCABULARY, arguments_of, llama, losses_of  # noqa: E402

import aot_hooks  # noqa: E402
from aot_hooks import enable, errors, lossless  # noqa: E402
from aot_hooks.integrations.logits import without_logits  # noqa: E402
from aot_hooks.integrations.transformers import AotHooksCallback  # noqa: E402

CHUNKS = {**ATEN, "chunk": 32}  # of 128 tokens
BATCH = torch.tensor(TEXT[:8])

pytestmark = [
    pytest.mark.usefixtures("stock_is_aten"),
    pytest.mark.filterwarnings("ignore:aot_hooks. options.'chunk'"),  # where logits are kept
    pytest.mark.filterwarnings("ignore:aot_hooks. policy lossless.. packed none"),
]


class OwnLoss(transformers.Trainer):
    """A trainer that may read logits, as one cannot see from outside."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        self.keys_seen = set(outputs)
        return (loss, outputs) if return_outputs else loss


def trained(tmp_path: Path, callback: Any = None, kind: Any = transformers.Trainer, **arguments: Any) -> Any:
    """In eager mode without a callback."""
    settings = {"max_steps": 1, "torch_compile": callback is not None} | arguments
    data = [{"input_ids": row, "labels": row} for row in TEXT[:32]]
    trainer = kind(llama(), arguments_of(tmp_path, **settings), train_dataset=data, eval_dataset=data[:5])
    if callback is not None:
        callback.add_to(trainer)
    trainer.train()
    return trainer


def chunk_counts(trainer: Any) -> list[int]:
    return [row.count for plan in aot_hooks.last_plans(trainer.model_wrapped) for row in plan.chunked]


@pytest.mark.parametrize(
    "arguments",
    [{"max_steps": 2}, {"bf16": True, "gradient_accumulation_steps": 2}],
    ids=["float32", "bf16 accumulated"],
)
def test_a_trainer_computes_its_loss_in_chunks(tmp_path: Path, arguments: dict[str, Any]) -> None:
    stock = trained(tmp_path, **arguments)
    found = trained(tmp_path, AotHooksCallback(lossless(), options=CHUNKS), **arguments)
    assert chunk_counts(found) == [4]
    assert losses_of(found) == pytest.approx(losses_of(stock), rel=1e-2 if "bf16" in arguments else 1e-5)
    assert found.predict(found.eval_dataset).predictions.shape == (5, 16, VOCABULARY)  # logits, after training
    assert "wrapped" not in found.model.forward.__qualname__


@pytest.mark.parametrize("keep", [None, False])
def test_a_loss_of_ones_own_keeps_its_logits_unless_told(tmp_path: Path, keep: bool | None) -> None:
    callback = AotHooksCallback(lossless(), options=CHUNKS, keep_logits=keep)
    trainer = trained(tmp_path, callback, OwnLoss)
    assert ("logits" in trainer.keys_seen) is (keep is not False)
    assert chunk_counts(trainer) == ([4] if keep is False else [0])


def test_label_smoothing_of_the_trainer_reads_logits(tmp_path: Path) -> None:
    stock = trained(tmp_path, label_smoothing_factor=0.1, torch_compile=True)
    found = trained(tmp_path, AotHooksCallback(lossless(), options=CHUNKS), label_smoothing_factor=0.1)
    assert losses_of(found) == pytest.approx(losses_of(stock), rel=1e-5)


def test_evaluations_between_have_logits(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Measured(transformers.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, compute_metrics=lambda p: seen.append(p.predictions.shape) or {})

    callback = AotHooksCallback(lossless(), options=CHUNKS)
    trained(tmp_path, callback, Measured, max_steps=2, eval_strategy="steps", eval_steps=1)
    assert seen == [(5, 16, VOCABULARY)] * 2


def test_a_training_that_raises_gives_the_model_its_logits_back(tmp_path: Path) -> None:
    class Stops(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    model: list[Any] = []

    class Interrupted(transformers.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, callbacks=[Stops()])
            model.append(self.model)

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, AotHooksCallback(lossless(), options=CHUNKS), Interrupted)
    assert "forward" not in vars(model[0])


def test_a_loop_of_ones_own() -> None:
    model = llama().train()
    eager = model(input_ids=BATCH, labels=BATCH)
    (expected,) = torch.autograd.grad(eager.loss, model.lm_head.weight)
    compiled = torch.compile(model)
    with enable(lossless(), options=CHUNKS), without_logits(compiled):
        output = compiled(input_ids=BATCH, labels=BATCH)
        assert set(output) == {"loss"} and output.loss.item() == pytest.approx(eager.loss.item(), rel=1e-6)
        (found,) = torch.autograd.grad(output.loss, model.lm_head.weight)
        torch.testing.assert_close(found, expected)
        assert [row.count for plan in aot_hooks.last_plans(compiled) for row in plan.chunked] == [4]
        with torch.no_grad():
            assert "logits" in model(input_ids=BATCH, labels=BATCH)
        assert "logits" in model(input_ids=BATCH)  # there is no loss
        assert "logits" in model.eval()(input_ids=BATCH, labels=BATCH)
    assert "logits" in model.train()(input_ids=BATCH, labels=BATCH)


def test_copies_and_pickles_have_their_own_weights() -> None:
    model = llama().train()
    with without_logits(model):
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for each, keys in ((copied, {"loss"}), (pickled, {"loss", "logits"})):
            torch.nn.init.zeros_(each.lm_head.weight)
            output = each(input_ids=BATCH, labels=BATCH)
            assert set(output) == keys
            assert output.loss.item() == pytest.approx(torch.tensor(VOCABULARY).log().item(), rel=1e-6)
    assert set(copied(input_ids=BATCH, labels=BATCH)) == {"loss", "logits"}


def test_a_forward_that_was_replaced_meanwhile_stays() -> None:
    model = llama().train()
    dropped = without_logits(model)
    ours = model.forward
    model.forward = later = lambda **batch: ours(**batch)
    dropped.end()
    assert model.forward is later and set(model(input_ids=BATCH, labels=BATCH)) == {"loss", "logits"}


def test_nested_ones_end_in_any_order() -> None:
    model = llama().train()
    first, second = without_logits(model), without_logits(model)
    first.end()
    assert set(model(input_ids=BATCH, labels=BATCH)) == {"loss"}
    second.end()
    assert set(model(input_ids=BATCH, labels=BATCH)) == {"loss", "logits"}


def test_a_forward_that_is_no_method_is_refused() -> None:
    model = llama()
    model.forward = lambda **batch: None
    with pytest.raises(errors.OptionError, match=r"a method of its own, .* got Llama"):
        without_logits(model)
