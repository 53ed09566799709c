"""benchmarks/convergence.py at its smallest, and the parts that judge its runs."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import convergence
import convergence as report
from train_gpt import GPT, Setting

SMALLEST = "--device cpu --steps 6 --layers 1 --width 32 --heads 2 --sequence 16 --batch 2 --seeds 2".split()


def runs(*losses: float) -> list[dict[str, object]]:
    return [
        {"seed": i, "losses": [loss + 1, loss], "validation_loss": loss, "diverged": False}
        for i, loss in enumerate(losses)
    ]


@pytest.mark.slow
def test_smallest_run_and_its_report(tmp_path, capsys):
    path = tmp_path / "convergence.json"
    convergence.main([*SMALLEST, "--hooks", "int4", "--json", str(path)])
    result = json.loads(path.read_text())
    assert list(result["ways"]) == ["baseline", "baseline, nudged", "int4"]
    assert result["ways"]["baseline"]["kept"] is None and 0.1 < result["ways"]["int4"]["kept"] < 0.7
    baseline, nudged, int4 = (way["runs"] for way in result["ways"].values())
    assert [run["seed"] for run in baseline] == [0, 1] and len(baseline[0]["losses"]) == 6
    # the first batch and weights are the same, what comes after is not
    for a, b, c in zip(baseline, nudged, int4, strict=True):
        assert a["losses"][0] == c["losses"][0] == pytest.approx(b["losses"][0], rel=1e-4)
        assert a["losses"][-1] != c["losses"][-1]
    assert baseline[0]["losses"][0] != baseline[1]["losses"][0]

    page = tmp_path / "docs" / "convergence.md"
    page.parent.mkdir()
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    convergence.main(["--report", str(path), "--docs", str(page.parent)])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert report.format_table(result) in text and (page.parent / "images/convergence.png").stat().st_size > 10_000
    capsys.readouterr()
    convergence.main(["--report", str(path), "--docs", str(page.parent)])
    assert page.read_text() == text


def test_differences_are_those_of_one_seed():
    result = {
        "ways": {
            "baseline": {"kept": None, "runs": runs(1.0, 3.0)},
            "worse": {"kept": 0.5, "runs": [*runs(1.5, 3.25), {**runs(9.0)[0], "seed": 7, "diverged": True}]},
        }
    }
    worse = report.summarize(result)[1]
    assert worse.differences == (0.5, 0.25) and worse.diverged_count == 1
    alone = {"ways": {name: {"kept": way["kept"], "runs": way["runs"][:1]} for name, way in result["ways"].items()}}
    assert "| worse | 0.50 | 1.5000 | +0.5000 | 0 of 1 |" in report.format_table(alone)
    assert "| worse | 0.50 | 4.5833 ± 3.9238 | +0.3750 (+0.2500 to +0.5000) | 1 of 3 |" in report.format_table(result)


@pytest.mark.slow
def test_seeds_measured_apart_are_one_result(tmp_path):
    parts = []
    for seed in (0, 1):
        parts.append(tmp_path / f"{seed}.json")
        arguments = ["--first-seed", str(seed), "--seeds", "1", "--hooks", "int8", "--json", str(parts[-1])]
        convergence.main([*SMALLEST, *arguments])
    whole = tmp_path / "whole.json"
    convergence.main(["--merge", *map(str, parts), "--json", str(whole)])
    result = json.loads(whole.read_text())
    assert [run["seed"] for run in result["ways"]["int8"]["runs"]] == [0, 1]
    assert result["conditions"]["seed_count"] == 2
    together = tmp_path / "together.json"
    convergence.main([*SMALLEST, "--hooks", "int8", "--json", str(together)])
    expected = json.loads(together.read_text())
    for name, way in expected["ways"].items():
        got = [run["losses"] for run in result["ways"][name]["runs"]]
        assert got == [run["losses"] for run in way["runs"]], name

    with pytest.raises(ValueError, match="other seeds in each"):
        report.merged([result, expected])
    other = {**result, "conditions": {**result["conditions"], "step_count": 7}}
    with pytest.raises(ValueError, match="step_count is 6 in one result and 7"):
        report.merged([result, other])


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ([5.0 - i / 10 for i in range(40)], False),
        ([2.0 + math.sin(i) / 5 for i in range(40)], False),
        ([5.0 - i / 10 for i in range(40)] + [3.0] * 10, True),
        ([1.0, math.nan, 1.0], True),
        ([1.0, 1.0, math.inf], True),
    ],
)
def test_divergence_is_seen(losses, diverged):
    assert convergence.has_diverged(losses) is diverged


def test_stretches_keep_every_step():
    assert convergence.stretches([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    losses = [float(i) for i in range(250)]
    means = convergence.stretches(losses)
    assert len(means) == 125 and means[0] == 0.5
    assert means[-1] == convergence.stretches(losses + [1000.0])[-1] - (1000 - 248.5) / 3


def test_weights_of_a_seed_are_put_in_place():
    setting = Setting(1, 32, 2, 16, 2, 6, 1e-3, autocast=False, corpus_bytes=1000)
    model = GPT(setting)
    addresses = [p.data_ptr() for p in model.parameters()]
    convergence.seed_weights(model, setting, 3, 0.0)
    torch.manual_seed(3)
    fresh = list(GPT(setting).parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh, strict=True))
    convergence.seed_weights(model, setting, 3, 1e-5)
    assert addresses == [p.data_ptr() for p in model.parameters()]
    off = torch.cat([((a - b) / b).flatten() for a, b in zip(model.parameters(), fresh, strict=True) if b.all()])
    assert 0.8e-5 < off.std() < 1.2e-5
