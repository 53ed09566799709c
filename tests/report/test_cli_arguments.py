"""`python -m aot_hooks`: arguments that cannot work are refused before the script runs, which may take hours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from aot_hooks.__main__ import main


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('it ran')\n")
    return str(path)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--json", "nowhere/out.json", "no such folder: nowhere"),
        ("--plot", "nowhere/out.png", "no such folder: nowhere"),
        ("--plot", "out.txt", "cannot plot to out.txt: matplotlib has no format 'txt'; it has "),
        ("--plot", "", "--plot: expected the path of a file, got ''"),
        ("--json", ".", "--json .: is a folder"),
    ],
)
def test_a_path_that_cannot_be_written(option: str, value: str, said: str, script: str, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    assert main(["report", option, value, script]) == 1
    out, err = capsys.readouterr()
    assert said in err and "it ran" not in out


def test_without_matplotlib_a_plot_is_refused(script: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["report", "--plot", "out.png", script]) == 1
    out, err = capsys.readouterr()
    assert 'pip install "aot-hooks[plot]"' in err and "it ran" not in out


@pytest.mark.parametrize("steps", ["0", "-1", "x"])
def test_steps_are_counted_from_one(steps: str, script: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["report", "--steps", steps, script])
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and "it ran" not in out
    assert f"--steps: expected a whole number of at least 1, got '{steps}'" in err


def test_a_script_is_all_that_is_required(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["report"])
    assert "the following arguments are required: script\n" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--max-error", "0.1"], ["--allow", "int8"]])
def test_what_is_for_a_budget_is_refused_without_one(arguments: list[str], script: str, capsys: Any) -> None:
    assert main(["report", *arguments, script]) == 1
    out, err = capsys.readouterr()
    assert "it ran" not in out
    assert f"{arguments[0]} is for --budget" in err
