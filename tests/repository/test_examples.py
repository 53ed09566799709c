"""The examples at their small settings, as programs of their own; hf_finetune.py has tests of its own."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    env = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


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
def test_lossless(tmp_path: Path) -> None:
    done = run(tmp_path, "lossless_relu.py")
    assert done.returncode == 0, done.stderr
    assert "30 of 30 gradients are equal to the last bit" in done.stdout


@pytest.mark.slow
def test_offload(tmp_path: Path) -> None:
    done = run(tmp_path, "offload_long_context.py", "--small")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("offload "))
    saved, on_device, on_host, _, error = map(float, line.split()[1:])
    assert (on_device, on_host, error) == (0.0, saved, 0.0)


@pytest.mark.slow
def test_fit(tmp_path: Path) -> None:
    done = run(tmp_path, "fit.py", "--exact")
    assert done.returncode == 0, done.stderr
    assert "gradient error       0.0000 (at most 0.0)" in done.stdout and "recompute" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "argument --steps: expected at least 1, got 0"),
        (["--hook", "lossless"], "argument --hook: invalid choice: 'lossless'"),
    ],
)
def test_arguments_that_cannot_work(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(ROOT / "examples" / "train_gpt.py"))["main"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err
