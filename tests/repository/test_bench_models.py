"""`benchmarks/bench_models.py` at its smallest: right gradients pass, and a wrong one or a missing row fails it."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aot_hooks import Hook, SavedTensor

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_models

    return bench_models


def run(bench: ModuleType, path: Path, models: str) -> tuple[int, dict[str, Any]]:
    code = bench.main(["--models", models, "--inner", "aten", "--steps", "1", "--json", str(path)])
    return code, json.loads(path.read_text())


@pytest.mark.slow
def test_a_row_for_each_model_and_policy(bench: ModuleType, tmp_path: Path) -> None:
    code, result = run(bench, tmp_path / "models.json", "resnet,llama")
    assert code == 0 and result["failures"] == []
    rows = {(row["model"], row["policy"]): row for row in result["rows"]}
    assert list(rows) == [(model, policy) for model in ("resnet", "llama") for policy in bench.POLICIES]
    assert {"device", "torch", "commit", "date"} <= result["header"].keys()
    for model in ("resnet", "llama"):
        none, lossless, int8 = (rows[model, policy] for policy in bench.POLICIES)
        assert lossless["bitwise"] and lossless["saved_bytes"] == int8["saved_bytes"]
        assert 0 < int8["packed_bytes"] < lossless["packed_bytes"] <= lossless["saved_bytes"]
        # what the allocator saw alive agrees with the plan: each storage once, and the loss beside it
        assert none["after_forward_bytes"] == pytest.approx(lossless["saved_bytes"], rel=0.02)
        assert int8["after_forward_bytes"] == pytest.approx(int8["packed_bytes"], rel=0.02)
        assert 1e-4 < int8["gradient_error"] < 0.1


def off_by_a_thousandth(saved: SavedTensor) -> Hook:
    return Hook("off", lambda x: x * 1.001 if x.is_floating_point() else x, lambda x: x)


def negated(saved: SavedTensor) -> Hook:
    return Hook("negated", lambda x: -x if x.is_floating_point() else x, lambda x: x)


@pytest.mark.slow
def test_a_wrong_gradient_fails(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bench.POLICIES, "lossless", lambda: off_by_a_thousandth)
    monkeypatch.setitem(bench.POLICIES, "int8", lambda: negated)
    code, result = run(bench, tmp_path / "models.json", "vit")
    assert code == 1
    found = [failure.partition(" gradient ")[0] for failure in result["failures"]]
    assert found == ["vit, lossless:", "vit, int8:"]
    err = capsys.readouterr().err
    assert all(failure in err for failure in result["failures"])


def test_a_missing_row_fails(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(name: str, *rest: Any) -> list[Any]:
        if name == "gpt":
            raise RuntimeError("no such work")
        return [bench.Row(name, policy, 8, 4, 8, 8, 0.0, True, 1.0, 1.0, "") for policy in ("none", "int8")]

    monkeypatch.setattr(bench, "measure", measure)
    code, result = run(bench, tmp_path / "models.json", "gpt,ssm")
    assert code == 1
    assert "gpt: no rows, see above" in result["failures"] and "ssm, lossless: no row" in result["failures"]
    assert len(result["rows"]) == 2


def test_an_unknown_model_is_refused(bench: ModuleType) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--models", "resnet,perceptron"])
