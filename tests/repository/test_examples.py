"""The examples at their small settings, the demo as a program of its own; hf_finetune.py has tests of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    env = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def loaded(name: str) -> ModuleType:
    """An example in this process: a start of Python and torch takes longer than what is asked of it."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where Dynamo looks for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    done = run(tmp_path, "train_gpt.py", "--check", "--steps", "6")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out" / "train_gpt.json").read_text())["rows"]
    saved, error = rows["saved_for_backward_bytes"], rows["gradient_relative_error"]
    assert saved["hooks"] < 0.45 * saved["baseline"] and 0 < error["hooks"] < 0.05
    assert rows["peak_bytes"]["hooks"] < 0.75 * rows["peak_bytes"]["baseline"]
    assert "gradient error" in done.stdout and "wrote out/train_gpt.json" in done.stdout
    assert "A step with hooks is slower here: " in done.stdout


@pytest.mark.slow
def test_lossless(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lossless_relu.py"])
    loaded("lossless_relu").main()
    assert "30 of 30 gradients are equal to the last bit" in capsys.readouterr().out


@pytest.mark.slow
def test_offload(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With one way of the example's four beside none."""
    offload = loaded("offload_long_context")
    every = offload.ways
    monkeypatch.setattr(offload, "ways", lambda n: {name: every(n)[name] for name in ("nothing", "offload")})
    assert offload.main(["--small"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("offload "))
    saved, on_device, on_host, _, error = map(float, line.split()[1:])
    assert (on_device, on_host, error) == (0.0, saved, 0.0)


@pytest.mark.slow
def test_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With one layer of its four and two steps of its twelve: most of its time is that of plans."""
    fit = loaded("fit")
    monkeypatch.setattr(fit, "LAYERS", 1)
    monkeypatch.setattr(fit, "STEPS", 2)
    assert fit.main(["--exact"]) == 0
    printed = capsys.readouterr().out
    assert "gradient error       0.0000 (at most 0.0)" in printed and "recompute" in printed


def test_the_demo_explains_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        loaded("train_gpt").main(["--help"])
    assert re.search(r"--check +fail if the losses end over \d+% apart", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "argument --steps: expected at least 1, got 0"),
        (["--hook", "lossless"], "argument --hook: invalid choice: 'lossless'"),
    ],
)
def test_arguments_that_cannot_work(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        loaded("train_gpt").main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err
