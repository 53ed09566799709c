"""`benchmarks/bench_trainers.py` at its smallest: a row for each trainer, and a missing package is said."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

for name in ("transformers", "accelerate", "trl", "torchao"):
    pytest.importorskip(name)

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_trainers

    return bench_trainers


def test_rows_of_each_trainer(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["stock", "float8", "sft_offload_float8", "float8_training_packed"]
    path = tmp_path / "trainers.json"
    assert bench.main(["--small", "--rows", ",".join(names), "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert [row["name"] for row in result["rows"]] == names and result["failures"] == []
    stock, float8, _, packed = result["rows"]
    assert float8["losses"] == pytest.approx(stock["losses"], rel=0.02)
    for row in (float8, packed):
        assert row["metrics"]["aot_hooks/packed_mib"] < 0.6 * row["metrics"]["aot_hooks/saved_mib"]
    assert "tokens/s" in capsys.readouterr().out


def test_peers_are_switched_on(bench: ModuleType, tmp_path: Path) -> None:
    """They run on CUDA alone."""
    data = bench.Text(bench.SMALL, 1)
    checkpoints = bench.make_trainer("checkpointing_offloaded", bench.SMALL, data, str(tmp_path)).args
    assert checkpoints.gradient_checkpointing and checkpoints.gradient_checkpointing_kwargs["offload"] is True
    if importlib.util.find_spec("liger_kernel") is not None:
        assert bench.make_trainer("liger", bench.SMALL, data, str(tmp_path)).args.use_liger_kernel


def test_a_row_that_cannot_be_measured_fails(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "missing", lambda name: "trl" if name == "sft" else "")
    assert bench.main(["--small", "--rows", "sft,budget"]) == 1
    err = capsys.readouterr().err
    assert "FAILED: sft: trl is not installed" in err and "FAILED: budget: needs --budget-gib" in err
