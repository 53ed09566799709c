"""`aot_hooks.integrations.accelerate` with the real `Accelerator`, against training without hooks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from trained import ATEN, TEXT, gpt2, llama  # noqa: E402

import aot_hooks  # noqa: E402
from aot_hooks import errors, float8, offload  # noqa: E402
from aot_hooks.__main__ import main  # noqa: E402
from aot_hooks.integrations.accelerate import compile_model, hooks  # noqa: E402

pytestmark = pytest.mark.usefixtures("stock_is_aten")


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def plugin(**settings: Any) -> Any:
    return accelerate.utils.TorchDynamoPlugin(backend="inductor", **settings)


def train(accelerator: Any, model: Any, training: Any = None, steps: int = 5, rows: int = 24) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.tensor(TEXT[:rows]), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    while True:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if training is not None:
                training.log(len(losses))
            if len(losses) == steps:
                return losses


@pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"mixed_precision": "bf16"}, {"mixed_precision": "fp16"}, {"gradient_accumulation_steps": 2}],
    ids=str,
)
def test_losses_follow_those_without_hooks(regional: bool, settings: dict[str, Any]) -> None:
    stock = train(accelerate.Accelerator(cpu=True, **settings), llama())
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    ours = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin(use_regional_compilation=regional), **settings)
    with hooks(ours, float8(), options=ATEN) as training:
        assert train(ours, llama(), training) == pytest.approx(stock, rel=0.02)
        metrics = training.metrics()
    assert metrics["aot_hooks/packed_mib"] < 0.8 * metrics["aot_hooks/saved_mib"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    def model() -> Any:
        made = llama()
        made.gradient_checkpointing_enable({"use_reentrant": reentrant})
        made.enable_input_require_grads()
        return made.train()

    stock = train(accelerate.Accelerator(cpu=True), model(), steps=3)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin())
    with hooks(accelerator, float8(), options=ATEN):
        assert train(accelerator, model(), steps=3) == pytest.approx(stock, rel=0.02)


def test_lora_then_evaluate_and_generate() -> None:
    peft = pytest.importorskip("peft")

    def model() -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(gpt2(), peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))

    stock = train(accelerate.Accelerator(cpu=True), model(), steps=3)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin())
    adapted, rows = model(), torch.tensor(TEXT[:5])
    with hooks(accelerator, float8(), options=ATEN) as training:
        assert train(accelerator, adapted, training, steps=3) == pytest.approx(stock, rel=0.02)
        prepared = accelerator.prepare_model(adapted, evaluation_mode=True).eval()
        with torch.no_grad():
            loss = prepared(input_ids=rows, labels=rows).loss
        assert float(loss) == pytest.approx(float(adapted(input_ids=rows, labels=rows).loss), rel=1e-4)
        assert adapted.generate(rows[:1, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)
    assert all(p.grad is None for name, p in adapted.named_parameters() if "lora" not in name)


@pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])
def test_a_copy_trains_as_the_model_does_and_an_average_follows(regional: bool) -> None:
    accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin(use_regional_compilation=regional))
    model = accelerator.prepare(llama())
    average = torch.optim.swa_utils.AveragedModel(llama())
    batch = torch.tensor(TEXT[:4])

    def gradient(of: Any) -> torch.Tensor:
        of.zero_grad()
        loss = of(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        return torch.cat([p.grad.flatten() for p in of.parameters()])

    with hooks(accelerator, float8(), options=ATEN) as training:
        before = gradient(model)
        assert training.log(1)["aot_hooks/packed_mib"] > 0
        copied = copy.deepcopy(model)
        torch.testing.assert_close(gradient(copied), before)
        assert training.log(2)["aot_hooks/packed_mib"] > 0  # the copy is compiled, too
        average.update_parameters(accelerator.unwrap_model(model, keep_torch_compile=False))
    assert average.n_averaged == 1


def test_regions_count_for_each_block() -> None:
    """Blocks share a graph, and each of its runs saves."""
    found = []
    for layers in (2, 4):
        torch._dynamo.reset()
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        ours = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin(use_regional_compilation=True))
        model = gpt2()
        model.transformer.h.extend(copy.deepcopy(model.transformer.h[0]) for _ in range(layers - 2))
        with hooks(ours, float8(), options=ATEN) as training:
            train(ours, model, training, steps=2)
            metrics = training.metrics()
        found.append(metrics["aot_hooks/saved_mib"])
    assert found[1] > 1.5 * found[0]


@pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])
def test_a_model_compiled_by_the_helper_is_not_compiled_again(regional: bool) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    stock = train(accelerator, llama())
    model = compile_model(llama(), offload(min_bytes=0), regional=regional, options=ATEN)
    counters.clear()
    assert train(accelerator, model) == pytest.approx(stock, rel=1e-5)
    assert counters["stats"]["unique_graphs"] >= 1
    parts = [part for part in model.modules() if hasattr(part, "dynamo_ctx")]
    plans = [plan for part in parts for plan in aot_hooks.last_plans(part)]
    assert sum(plan.packed_bytes for plan in plans) < sum(plan.saved_bytes for plan in plans)
    assert accelerator.unwrap_model(model, keep_torch_compile=False).state_dict().keys() == llama().state_dict().keys()


def test_uneven_last_batches_recompile_once() -> None:
    accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin())
    counters.clear()
    with hooks(accelerator, float8(), options=ATEN) as training:
        train(accelerator, llama(), training, steps=16, rows=27)
    assert counters["stats"]["unique_graphs"] <= 2


def test_trackers_see_the_numbers(tmp_path: Path) -> None:
    logged: list[dict[str, Any]] = []

    class Tracker(accelerate.tracking.GeneralTracker):  # type: ignore[misc, name-defined]
        name, requires_logging_directory, main_process_only = "list", False, True

        def __init__(self) -> None:
            super().__init__()

        @property
        def tracker(self) -> Any:
            return logged

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            logged.append({**values, "step": step})

    accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin(), log_with=Tracker())
    accelerator.init_trackers("test")
    with hooks(accelerator, float8(), options=ATEN) as training:
        train(accelerator, llama(), training, steps=2)
    assert [row["step"] for row in logged] == [1, 2]
    assert all(row["aot_hooks/packed_mib"] > 0 for row in logged)


def test_save_and_load_state(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin())
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    prepared, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        batch = torch.tensor(TEXT[:4])
        accelerator.backward(prepared(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()

    def state() -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in model.state_dict().items()}

    with hooks(accelerator, float8(), options=ATEN):
        step()
        accelerator.save_state(str(tmp_path))
        step()
        after = state()
        accelerator.load_state(str(tmp_path))
        step()
    torch.testing.assert_close(state(), after)


def test_nothing_compiled_is_an_error() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(errors.OptionError, match="no function that"), hooks(accelerator, float8()) as training:
        train(accelerator, llama(), training)


def test_hooks_without_a_with_are_an_error() -> None:
    accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin())
    training = hooks(accelerator, float8(), options=ATEN)
    with pytest.raises(errors.OptionError, match="no effect outside of `with"):
        training.log(1)
    with training:
        train(accelerator, llama(), training, steps=1)
    with pytest.raises(errors.OptionError, match="no effect outside of `with"):  # these would be old numbers
        training.log(2)


def test_a_batch_that_runs_no_graphs_is_warned_of_once() -> None:
    """Dynamo compiles a function for so many lengths, then runs it in Python: nothing is packed there."""
    accelerator = accelerate.Accelerator(cpu=True, dynamo_plugin=plugin(dynamic=False))
    model = accelerator.prepare(llama())
    logged = []
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        hooks(accelerator, float8(), options=ATEN) as training,
        pytest.warns(errors.UnusedWarning, match="a batch was trained.*recompile_limit") as warned,
    ):
        for length in range(8, 13):
            batch = torch.tensor(TEXT[:4])[:, :length]
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            logged.append("aot_hooks/packed_mib" in training.log(length))
    assert logged == [True, True, False, False, False]
    assert len([w for w in warned if w.category is errors.UnusedWarning]) == 1


def test_the_helper_refuses_wrong_arguments_at_once() -> None:
    with pytest.raises(errors.OptionError, match="pass policy="):
        compile_model(llama(), options={"policy": float8()})
    with pytest.raises(errors.OptionError, match="got 3"):
        compile_model(llama(), 3)


def test_a_script_follows_the_configuration_file_of_accelerate_and_the_policy_of_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`accelerate launch` hands the file's compiler to the script in this variable."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    script = tmp_path / "train.py"
    script.write_text(
        "import accelerate, torch\n"
        "accelerator = accelerate.Accelerator(cpu=True)\n"
        "net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))\n"
        "net = accelerator.prepare(net)\n"
        "accelerator.backward(net(torch.randn(8, 16)).square().mean())\n"
    )
    with caplog.at_level("INFO", logger="aot_hooks"):
        assert main(["run", "--hook", "float8", "--inner", "aten", str(script)]) == 0
    assert any("enable(float8()): first step: 1 graph" in record.getMessage() for record in caplog.records)
