"""`aot_hooks.integrations.lightning` with the real `Trainer`, against training without hooks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

lightning = pytest.importorskip("lightning")

from trained import ATEN, TEXT, gpt2, llama  # noqa: E402

from aot_hooks import errors, float8, offload  # noqa: E402
from aot_hooks.integrations.lightning import AotHooksCallback  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("stock_is_aten"),
    pytest.mark.filterwarnings("ignore:.*(num_workers|logging interval|LeafSpec|litlogger).*"),
]


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """`how`: "module" is compiled by the caller, "configure" and "blocks" in `configure_model`, "eager" not at all."""

    def __init__(self, how: str, net: Any = None) -> None:
        super().__init__()
        self.how, self.net, self.losses = how, llama() if net is None else net, []

    def configure_model(self) -> None:
        if self.how == "configure":
            self.net.compile()
        elif self.how == "blocks":
            for block in self.net.model.layers:
                block.compile()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.net(input_ids=batch, labels=batch).loss
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.net(input_ids=batch, labels=batch).loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(
    tmp_path: Path,
    how: str,
    policy: Any = None,
    rows: int = 32,
    callbacks: Any = None,
    net: Any = None,
    **settings: Any,
) -> Any:
    module = Module(how, net)
    if policy is not None:
        callbacks = [AotHooksCallback(policy, options=ATEN), *(callbacks or [])]
    arguments: dict[str, Any] = {
        "max_steps": 6, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1,
        "default_root_dir": tmp_path, "callbacks": callbacks, "limit_val_batches": 0,
    }  # fmt: skip
    trainer = lightning.Trainer(**arguments | settings)
    data = torch.utils.data.DataLoader(torch.tensor(TEXT[:rows]), batch_size=8)
    checkpoint = settings.pop("ckpt_path", None)
    trainer.fit(torch.compile(module) if how == "module" else module, data, data, ckpt_path=checkpoint)
    return trainer, module


@pytest.mark.parametrize("how", ["module", "configure", "blocks"])
def test_losses_follow_those_without_hooks(tmp_path: Path, how: str) -> None:
    _, stock = trained(tmp_path, "eager", limit_val_batches=1)
    for policy, tolerance in [(offload(min_bytes=0), 1e-6), (float8(), 0.02)]:
        torch._dynamo.reset()
        trainer, module = trained(tmp_path, how, policy, limit_val_batches=1)
        assert module.losses == pytest.approx(stock.losses, rel=tolerance)
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        assert 0 <= found["aot_hooks/packed_mib"] < found["aot_hooks/saved_mib"]


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 2, "max_steps": 3},
        {"precision": "bf16-mixed"},
        {"plugins": "16-mixed"},
        {"gradient_clip_val": 0.1},
    ],
    ids=str,
)
def test_what_people_switch_on(tmp_path: Path, settings: dict[str, Any]) -> None:
    def switched_on() -> dict[str, Any]:
        if "plugins" not in settings:
            return settings
        # what precision="16-mixed" is on a GPU; on a CPU that means bfloat16
        precision = lightning.pytorch.plugins.precision.MixedPrecision
        return {"plugins": precision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))}

    _, stock = trained(tmp_path, "eager", **switched_on())
    _, module = trained(tmp_path, "configure", float8(), **switched_on())
    assert module.losses == pytest.approx(stock.losses, rel=0.02)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(tmp_path: Path, reentrant: bool) -> None:
    def net() -> Any:
        made = llama()
        made.gradient_checkpointing_enable({"use_reentrant": reentrant})
        made.enable_input_require_grads()
        return made

    _, stock = trained(tmp_path, "eager", net=net(), max_steps=3)
    _, module = trained(tmp_path, "configure", float8(), net=net(), max_steps=3)
    assert module.losses == pytest.approx(stock.losses, rel=0.02)


def test_lora_then_generate_and_copy(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def net() -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(gpt2(), peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))

    _, stock = trained(tmp_path, "eager", net=net(), max_steps=3)
    trainer, module = trained(tmp_path, "configure", float8(), net=net(), max_steps=3)
    assert module.losses == pytest.approx(stock.losses, rel=0.02)
    assert 0 < trainer.callback_metrics["aot_hooks/packed_mib"] < trainer.callback_metrics["aot_hooks/saved_mib"]
    rows = torch.tensor(TEXT[:5])
    trainer.limit_val_batches = 1
    (validated,) = trainer.validate(module, torch.utils.data.DataLoader(rows, batch_size=5), verbose=False)
    assert validated["val_loss"] == pytest.approx(float(module.net(input_ids=rows, labels=rows).loss), rel=1e-4)
    assert module.net.generate(rows[:1, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)
    copied = copy.deepcopy(module.net)
    assert float(copied(input_ids=rows, labels=rows).loss) == pytest.approx(validated["val_loss"], rel=1e-4)


def test_uneven_last_batches_recompile_once(tmp_path: Path) -> None:
    counters.clear()
    trained(tmp_path, "configure", float8(), rows=27, max_steps=16)
    assert counters["stats"]["unique_graphs"] <= 2


def test_loggers_see_the_numbers(tmp_path: Path) -> None:
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    trained(tmp_path, "configure", float8(), max_steps=2, logger=logger)
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
    assert "aot_hooks/saved_mib" in header


def test_save_and_resume(tmp_path: Path) -> None:
    _, whole = trained(tmp_path, "configure", float8(), max_steps=6)
    saving = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=4)
    trained(tmp_path, "configure", float8(), max_steps=4, enable_checkpointing=True, callbacks=[saving])
    torch._dynamo.reset()
    trainer = lightning.Trainer(
        max_steps=6, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        limit_val_batches=0,
        callbacks=[AotHooksCallback(float8(), options=ATEN)], default_root_dir=tmp_path,
    )  # fmt: skip
    module = Module("configure")
    data = torch.utils.data.DataLoader(torch.tensor(TEXT[:32]), batch_size=8)
    trainer.fit(module, data, data, ckpt_path=saving.best_model_path, weights_only=False)
    assert module.losses == pytest.approx(whole.losses[-2:], rel=1e-4)


def test_averaged_weights(tmp_path: Path) -> None:
    found = []
    for how, policy in (("eager", None), ("configure", offload(min_bytes=0))):
        averaging = lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.5)
        _, module = trained(tmp_path, how, policy, callbacks=[averaging], max_steps=4)
        assert module.losses[-1] < module.losses[0]
        found.append(module.net.state_dict())
    torch.testing.assert_close(found[1], found[0])


def test_nothing_compiled_is_an_error_and_ends_it(tmp_path: Path) -> None:
    with pytest.raises(errors.OptionError, match="no function that"):
        trained(tmp_path, "eager", float8())


def test_a_first_batch_that_is_skipped(tmp_path: Path) -> None:
    class Skipping(Module):
        def training_step(self, batch: Any, index: int) -> Any:
            return super().training_step(batch, index) if index else None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            """Reads no loss: there may be none."""

    callback = AotHooksCallback(float8(), options=ATEN)
    module = Skipping("configure")
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1, default_root_dir=tmp_path, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.tensor(TEXT[:16]), batch_size=8))
    assert callback.training.metrics()["aot_hooks/packed_mib"] > 0


def test_a_first_batch_without_a_step_in_manual_optimization(tmp_path: Path) -> None:
    class Warm(Module):
        """Fills a buffer first, as reinforcement learning does."""

        def __init__(self, how: str) -> None:
            super().__init__(how)
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            if index == 0:
                return
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            """Reads no loss: there is none."""

    callback = AotHooksCallback(float8(), options=ATEN)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1, default_root_dir=tmp_path, callbacks=[callback],
    )  # fmt: skip
    data = torch.utils.data.DataLoader(torch.tensor(TEXT[:16]), batch_size=8)
    trainer.fit(Warm("configure"), data)
    assert callback.training.metrics()["aot_hooks/packed_mib"] > 0
    with pytest.raises(errors.OptionError, match="no function that"):
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, callbacks=[AotHooksCallback(float8())],
        )  # fmt: skip
        trainer.fit(Warm("eager"), data)


def test_a_compiled_validation_alone_is_an_error(tmp_path: Path) -> None:
    class Validated(Module):
        def validation_step(self, batch: Any, index: int) -> None:
            torch.compile(self.net)(input_ids=batch, labels=batch)

    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[AotHooksCallback(float8(), options=ATEN)],
    )  # fmt: skip
    data = torch.utils.data.DataLoader(torch.tensor(TEXT[:16]), batch_size=8)
    with pytest.raises(errors.OptionError, match="ran under it with gradients"):
        trainer.fit(Validated("eager"), data, data)


def test_an_exception_ends_it(tmp_path: Path) -> None:
    import torch._dynamo.eval_frame as eval_frame

    before = eval_frame._callback_from_stance

    class Failing(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, *_: Any) -> None:
            assert eval_frame._callback_from_stance is not before
            raise RuntimeError("once")

    with pytest.raises(RuntimeError, match="once"):
        trained(tmp_path, "configure", float8(), callbacks=[Failing()])
    assert eval_frame._callback_from_stance is before
