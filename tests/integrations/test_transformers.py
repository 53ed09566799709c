"""`aot_hooks.integrations.transformers` with the real `Trainer`: what its users do, against training without hooks."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import eval_frame
from torch._dynamo.utils import counters

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.state import GradientState  # noqa: E402
from raising import raises  # noqa: E402
from trained import ATEN, TEXT, arguments_of, gpt2, llama, losses_of  # noqa: E402

import aot_hooks  # noqa: E402
from aot_hooks import budget, errors, float8, lossless, offload  # noqa: E402
from aot_hooks.integrations.transformers import AotHooksCallback  # noqa: E402

pytestmark = pytest.mark.usefixtures("stock_is_aten")


def trainer_of(
    tmp_path: Path,
    model: Any = None,
    policy: Any = None,
    *,
    rows: int = 32,
    callback: Any = None,
    callbacks: list[Any] | None = None,
    kind: Any = transformers.Trainer,
    **arguments: Any,
) -> Any:
    data = [{"input_ids": row, "labels": row} for row in TEXT[:rows]]
    trainer = kind(
        llama() if model is None else model,
        arguments_of(tmp_path, **{"max_steps": 6, "torch_compile": True} | arguments),
        train_dataset=data,
        eval_dataset=data[:5],
        callbacks=callbacks,
    )
    if policy is not None or callback is not None:
        (callback or AotHooksCallback(policy, options=ATEN)).add_to(trainer)
    return trainer


def trained(tmp_path: Path, policy: Any = None, **arguments: Any) -> tuple[list[float], Any]:
    """Without a policy in eager mode."""
    trainer = trainer_of(tmp_path, policy=policy, **{"torch_compile": policy is not None} | arguments)
    trainer.train()
    return losses_of(trainer), trainer


@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [(lossless(), 1e-6), (offload(min_bytes=0), 1e-6), (float8(), 0.02), (budget(max_slowdown=1.0), 0.02)],
    ids=repr,
)
def test_losses_follow_those_without_hooks(tmp_path: Path, policy: Any, tolerance: float) -> None:
    stock, _ = trained(tmp_path)
    found, trainer = trained(tmp_path, policy)
    assert found == pytest.approx(stock, rel=tolerance)
    assert found[-1] < 0.9 * found[0]
    log = trainer.state.log_history[3]
    assert log["aot_hooks/saved_mib"] > 0
    assert all(re.fullmatch(r"[\w/]+", name) for name in log)  # MLflow refuses others
    if policy != lossless():  # which has nothing to do in a Llama
        assert log["aot_hooks/packed_mib"] < log["aot_hooks/saved_mib"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"gradient_accumulation_steps": 2},
        {"bf16": True},
        {"fp16": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"max_grad_norm": 0.1, "optim": "sgd"},
    ],
    ids=["accumulation", "bf16", "fp16", "checkpointing", "reentrant checkpointing", "clipping"],
)
def test_what_people_switch_on(tmp_path: Path, arguments: dict[str, Any]) -> None:
    stock, _ = trained(tmp_path, max_steps=4, **arguments)
    found, trainer = trained(tmp_path, float8(), max_steps=4, **arguments)
    assert found == pytest.approx(stock, rel=0.02)
    if "gradient_checkpointing" not in arguments:
        log = trainer.state.log_history[2]
        assert log["aot_hooks/packed_mib"] < 0.7 * log["aot_hooks/saved_mib"]


def test_accumulated_batches_count_alone(tmp_path: Path) -> None:
    """What is saved at once is what one batch saves."""
    _, one = trained(tmp_path, float8(), max_steps=2)
    _, two = trained(tmp_path, float8(), max_steps=2, gradient_accumulation_steps=2)
    for name in ("saved_mib", "packed_mib"):
        assert one.state.log_history[0][f"aot_hooks/{name}"] == two.state.log_history[0][f"aot_hooks/{name}"]


def test_uneven_last_batches_recompile_once(tmp_path: Path) -> None:
    counters.clear()
    trained(tmp_path, float8(), rows=27, max_steps=-1, num_train_epochs=4)  # 8, 8, 8, 3
    assert counters["stats"]["unique_graphs"] <= 2


def test_evaluate_and_generate_during_and_after(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, policy=float8(), eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=5)
    trainer.train()
    during = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert len(during) == 3
    assert trainer.evaluate()["eval_loss"] == pytest.approx(during[-1], rel=1e-5)
    for log in trainer.state.log_history:
        assert ("aot_hooks/saved_mib" in log) == ("loss" in log)  # not with those of an evaluation
    generated = trainer.model.generate(torch.tensor([TEXT[0][:4]]), max_new_tokens=3, do_sample=False)
    assert generated.shape == (1, 7)


def test_save_load_and_resume_go_on_where_it_stopped(tmp_path: Path) -> None:
    whole, _ = trained(tmp_path / "whole", float8(), max_steps=6)
    torch._dynamo.reset()
    first = trainer_of(tmp_path / "first", policy=float8(), max_steps=6, save_strategy="steps", save_steps=3)
    first.train()
    torch._dynamo.reset()
    again = trainer_of(tmp_path / "again", policy=float8(), max_steps=6)
    again.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-3"))
    assert losses_of(again)[-3:] == pytest.approx(whole[-3:], rel=1e-4)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first" / "checkpoint-6")
    state = first.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


def test_lora(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(gpt2(), peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))

    stock, _ = trained(tmp_path, model=adapted(), max_steps=4)
    found, trainer = trained(tmp_path, float8(), model=adapted(), max_steps=4)
    assert found == pytest.approx(stock, rel=0.02)
    assert all(p.grad is None for n, p in trainer.model.named_parameters() if "lora" not in n)
    log = trainer.state.log_history[2]
    assert log["aot_hooks/packed_mib"] < log["aot_hooks/saved_mib"]


def test_a_model_compiled_by_hand_and_its_copies(tmp_path: Path) -> None:
    model = llama()
    for block in model.model.layers:
        block.compile()
    average = copy.deepcopy(llama())
    found, trainer = trained(tmp_path, float8(), model=model, torch_compile=False)
    stock, _ = trained(tmp_path)
    assert found == pytest.approx(stock, rel=0.02)
    ema = torch.optim.swa_utils.AveragedModel(average)
    for _ in range(2):
        ema.update_parameters(trainer.model)
    assert copy.deepcopy(trainer.model).state_dict().keys() == average.state_dict().keys()


def test_trackers_see_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    trained(tmp_path, budget(1 << 30, max_slowdown=1.0), max_steps=3, report_to=["tensorboard"])
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    wanted = {"saved_mib", "packed_mib", "host_mib", "budget_mib", "predicted_peak_mib"}
    of_cuda = {"peak_mib"} if torch.cuda.is_initialized() else set()
    prefix = "train/aot_hooks/"
    assert {tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix)} == wanted | of_cuda
    assert [event.value for event in events.Scalars("train/aot_hooks/budget_mib")][-1] == 1024


def test_added_behind_the_trackers_it_logs_to_the_history(tmp_path: Path) -> None:
    callback = AotHooksCallback(float8(), options=ATEN)
    trainer = trainer_of(tmp_path, max_steps=2)
    trainer.add_callback(callback)
    trainer.train()
    assert trainer.state.log_history[1]["aot_hooks/packed_mib"] > 0


def test_nothing_compiled_is_an_error(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, policy=float8(), torch_compile=False)
    with pytest.raises(errors.OptionError, match="no function that"):
        trainer.train()


def test_a_training_that_raises_leaves_nothing_enabled(tmp_path: Path) -> None:
    class Failing(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    before = eval_frame._callback_from_stance
    trainer = trainer_of(tmp_path, policy=float8())
    trainer.add_callback(Failing())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert eval_frame._callback_from_stance is before
    trainer.remove_callback(Failing)
    trainer.train()
    assert trainer.state.log_history[0]["aot_hooks/packed_mib"] > 0


def test_an_evaluation_with_gradients_is_not_of_the_batch(tmp_path: Path) -> None:
    class Evaluating(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, *_: Any, model: Any, **__: Any) -> None:
            row = torch.tensor(TEXT[:8])
            model(input_ids=row, labels=row)

    trainer = trainer_of(tmp_path, policy=float8())
    trainer.callback_handler.callbacks.insert(0, Evaluating())
    trainer.train()
    saved = [log["aot_hooks/saved_mib"] for log in trainer.state.log_history if "aot_hooks/saved_mib" in log]
    assert len(set(saved)) == 1
    _, alone = trained(tmp_path, float8())
    assert saved[0] == alone.state.log_history[0]["aot_hooks/saved_mib"]


def test_a_second_trainer_of_a_model_compiled_in_place(tmp_path: Path) -> None:
    model = llama()
    trainer_of(tmp_path, model, float8(), max_steps=1).train()
    with pytest.raises(errors.OptionError, match=r"first Trainer or Accelerator only: call model\.compile\(\)"):
        trainer_of(tmp_path, model, float8(), max_steps=1).train()
    model.compile()
    trainer = trainer_of(tmp_path, model, float8(), max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["aot_hooks/packed_mib"] > 0


def test_of_two_callbacks_the_error_names_the_one_that_counts(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, policy=float8())
    trainer.add_callback(AotHooksCallback(lossless(), options=ATEN))  # which no callback can refuse
    with pytest.raises(errors.OptionError, match=r"enable\(float8.*innermost counts, and enable\(lossless"):
        trainer.train()


@pytest.mark.filterwarnings("error::aot_hooks.errors.BudgetWarning")
def test_a_total_counts_the_state_of_the_optimizer_of_accelerate(tmp_path: Path) -> None:
    with raises(errors.BudgetError, "state of AdamW"):
        trainer_of(tmp_path, policy=budget(total="100KiB")).train()


def test_a_training_that_raises_leaves_nothing_once_it_trains_again_or_is_dropped(tmp_path: Path) -> None:
    import torch._dynamo.eval_frame as eval_frame

    before = eval_frame._callback_from_stance

    class Fails(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise RuntimeError("once")

    trainer = trainer_of(tmp_path, policy=float8())
    fails = Fails()
    trainer.add_callback(fails)
    with pytest.raises(RuntimeError, match="once"):
        trainer.train()
    trainer.remove_callback(fails)
    trainer.train()
    assert eval_frame._callback_from_stance is before


def test_wrong_arguments_are_refused_at_once() -> None:
    with pytest.raises(errors.OptionError, match="got 3"):
        AotHooksCallback(3)
    with pytest.raises(errors.OptionError, match=r"got '24GiB'; write aot_hooks.budget\('24GiB'\)"):
        AotHooksCallback("24GiB")
    with pytest.raises(errors.OptionError, match="unknown option"):
        AotHooksCallback(float8(), options={"iner": "aten"})
    with pytest.raises(errors.OptionError, match="pass policy="):
        AotHooksCallback(options={"policy": float8()})
    with pytest.raises(errors.OptionError, match="options must be a dict"):
        AotHooksCallback(float8(), options="aten")  # type: ignore[arg-type]
    with pytest.raises(errors.OptionError, match="must be a policy or a Hook, got Linear"):
        AotHooksCallback(torch.nn.Linear(1, 1))
    with pytest.raises(errors.OptionError, match="expected a Trainer"):
        AotHooksCallback(float8()).add_to(torch.nn.Linear(1, 1))


class Fails(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise RuntimeError("once")


def test_among_the_callbacks_of_a_trainer_it_ends_when_that_raises(tmp_path: Path) -> None:
    before = eval_frame._callback_from_stance
    callback = AotHooksCallback(float8(), options=ATEN)
    trainer = trainer_of(tmp_path, callbacks=[callback, Fails()])
    assert trainer.callback_handler.callbacks[0] is callback, "before the trackers"
    with pytest.raises(RuntimeError, match="once"):
        trainer.train()
    assert eval_frame._callback_from_stance is before
    assert trainer.state.log_history[0]["aot_hooks/packed_mib"] > 0


def test_a_second_callback_in_one_trainer_is_refused(tmp_path: Path) -> None:
    first, second = AotHooksCallback(float8(), options=ATEN), AotHooksCallback(lossless(), options=ATEN)
    with pytest.raises(errors.OptionError, match="has an AotHooksCallback already"):
        trainer_of(tmp_path, callbacks=[first, second])
    trainer = trainer_of(tmp_path, callback=first)
    with pytest.raises(errors.OptionError, match=re.escape("for float8()")):
        second.add_to(trainer)
    assert first.add_to(trainer) is first and trainer.callback_handler.callbacks[0] is first


def test_a_copied_trainer_trains_its_own_model(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, policy=float8(), max_steps=2)
    other = copy.deepcopy(trainer)
    weights = [[p.detach().clone() for p in each.model.parameters()] for each in (trainer, other)]
    other.train()
    assert all(map(torch.equal, weights[0], trainer.model.parameters()))
    assert not all(map(torch.equal, weights[1], other.model.parameters()))
    assert other.state.log_history[0]["aot_hooks/packed_mib"] > 0 and not trainer.state.log_history


def test_a_pickled_trainer_trains_and_ends_its_hooks(tmp_path: Path) -> None:
    GradientState._reset_state()  # holds the data of earlier trainings, weakly
    before = eval_frame._callback_from_stance
    other = pickle.loads(pickle.dumps(trainer_of(tmp_path, policy=float8(), callbacks=[Fails()])))
    with pytest.raises(RuntimeError, match="once"):
        other.train()
    assert eval_frame._callback_from_stance is before
    assert other.state.log_history[0]["aot_hooks/packed_mib"] > 0


def test_a_callback_that_is_removed_while_it_trains_ends_with_it(tmp_path: Path) -> None:
    class Removes(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.remove_callback(AotHooksCallback)

    before = eval_frame._callback_from_stance
    callback = AotHooksCallback(float8(), options=ATEN)
    trainer = trainer_of(tmp_path, callback=callback, callbacks=[Removes()], max_steps=3)
    trainer.train()
    assert callback not in trainer.callback_handler.callbacks
    assert eval_frame._callback_from_stance is before


@pytest.mark.filterwarnings("error::aot_hooks.errors.UnusedWarning")
def test_the_same_callback_twice_is_one(tmp_path: Path) -> None:
    callback = AotHooksCallback(float8(), options=ATEN)
    trainer = trainer_of(tmp_path, callbacks=[callback])
    callback.add_to(trainer)
    callback.add_to(trainer)
    trainer.train()
    assert trainer.state.log_history[0]["aot_hooks/packed_mib"] > 0


def test_without_a_policy_contexts_may_begin_late(tmp_path: Path) -> None:
    class Late(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            late = self.state.global_step >= 2
            with aot_hooks.saved_tensors_hooks(float8()) if late else contextlib.nullcontext():
                return super().compute_loss(*args, **kwargs)

    trainer = trainer_of(tmp_path, kind=Late, callbacks=[AotHooksCallback(options=ATEN)], max_steps=4)
    with pytest.warns(errors.UnusedWarning, match=r"enable\(\) has no policy, .* no context covers"):
        trainer.train()
    packed = [log.get("aot_hooks/packed_mib", 0) for log in trainer.state.log_history[:4]]
    assert packed[:2] == [0, 0] and min(packed[2:]) > 0, packed
