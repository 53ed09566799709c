"""`aot_hooks.integrations.torchtitan` with torchtitan's own model, compilation and loggers. Its trainer needs a GPU."""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan", reason="make torchtitan has it")

from torchtitan.config import CompileConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from trained import ATEN

from aot_hooks import errors, float8, offload
from aot_hooks.integrations.torchtitan import HooksMetrics

pytestmark = pytest.mark.usefixtures("stock_is_aten")


class Kept:
    """A logger of torchtitan's that keeps what it is given."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.logged.append({**metrics, "step": step})

    def close(self) -> None:
        self.logged.append({"closed": True})


def dims() -> Any:
    return ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1)


def model(compiled: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    config = llama3_debugmodel()
    for _, _, owner, name in list(config.model_spec.model.traverse(FlexAttention.Config)):
        setattr(owner, name, ScaledDotProductAttention.Config())  # FlexAttention has no backward on a CPU
    config.model_spec.model.update_from_config(config=config)
    made = config.model_spec.model.build()
    made.init_weights()
    if compiled:
        apply_compile(made, compile_config=CompileConfig(enable=True, components=["model"]), parallel_dims=dims())
    return made


class NoDevice:
    """torchtitan's monitor of the device's memory, for a CPU."""

    device_name = "cpu"

    def reset_peak_stats(self) -> None: ...

    def get_peak_stats(self) -> Any:
        names = (
            "max_active_gib",
            "max_active_pct",
            "max_reserved_gib",
            "max_reserved_pct",
            "num_alloc_retries",
            "num_ooms",
        )
        return types.SimpleNamespace(**dict.fromkeys(names, 0))


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("torchtitan.components.metrics.build_device_memory_monitor", NoDevice)
    made: Any = HooksMetrics.Config(policy=float8(), options=ATEN, log_freq=1).build(parallel_dims=dims())
    made.logger, made.num_flops_per_token, made.data_loading_times = Kept(), 1, [0.0]
    yield made
    made.close()
    assert made.logger.logged[-1] == {"closed": True}


def step(made: torch.nn.Module, metrics: Any, number: int, asks_first: bool = True) -> float:
    if metrics is not None and asks_first:
        assert metrics.should_log(number)
    tokens = torch.arange(64).view(2, 32) % 50
    loss = made(tokens).float().logsumexp(-1).mean()
    loss.backward()
    if metrics is not None:
        assert asks_first or metrics.should_log(number)
        metrics.ntokens_since_last_log = 64
        metrics.data_loading_times = [0.0]
        metrics.log(number, float(loss.detach()), float(loss.detach()), 0.0, extra_metrics={"lr": 1.0})
    return float(loss.detach())


@pytest.mark.parametrize("asks_first", [True, False])
def test_the_blocks_pack_and_the_loggers_see_it(metrics: Any, asks_first: bool) -> None:
    reference, ours = model(compiled=False), model()
    losses = [step(ours, metrics, number, asks_first) for number in (1, 2)]
    assert losses == [pytest.approx(step(reference, None, 0), rel=1e-3)] * 2
    first, second = metrics.logger.logged
    assert second["aot_hooks/packed_mib"] < 0.7 * second["aot_hooks/saved_mib"]
    assert first["aot_hooks/saved_mib"] == second["aot_hooks/saved_mib"]
    assert second["lr"] == 1.0
    for (name, a), (_, b) in zip(reference.named_parameters(), ours.named_parameters(), strict=True):
        if a.grad is not None:
            assert (2 * a.grad - b.grad).norm() <= 0.1 * b.grad.norm() + 1e-6, name


def test_a_model_that_is_not_compiled_is_an_error(metrics: Any) -> None:
    with pytest.raises(errors.OptionError, match="no function that"):
        step(model(compiled=False), metrics, 1)


def test_a_configuration_with_it_can_be_copied_and_written() -> None:
    config = llama3_debugmodel()
    config.metrics = HooksMetrics.Config(policy=float8())
    assert copy.deepcopy(config).metrics.policy == float8()
    assert "rowwise" in str(config.to_dict()["metrics"]["policy"])


def test_the_recipe_of_the_page() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "trainers.md"
    (source,) = re.findall(r"^```python torchtitan\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    scope: dict[str, Any] = {}
    exec(source, scope)
    config = scope["llama3_8b_hooks"]()
    assert config.compile.enable and isinstance(config.metrics, HooksMetrics.Config)
    assert config.metrics.policy == offload(then=float8())
