"""The script that measures everything, on parts that take no time, and the table of goals that is committed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import goals
import measure
from measure import ROOT, Part

WRITES = Part("writes", 5, "-c \"import sys; print('wrote'); open(sys.argv[1], 'w').write('[1]')\" {json}")
FAILS = Part("fails", 5, "-c \"print('why'); raise SystemExit(3)\"")
SLOW = Part("slow", 0, "-c \"import time; print('began', flush=True); time.sleep(60)\"")


def test_what_became_of_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure.main(["--out", str(tmp_path)], (WRITES, FAILS)) == 1
    kept = json.loads((tmp_path / "measured.json").read_text())
    writes, fails = kept["parts"]["writes"], kept["parts"]["fails"]
    assert (writes["exit_code"], writes["result"], writes["last_lines"]) == (0, [1], ["wrote"])
    assert (fails["exit_code"], fails["result"], fails["last_lines"]) == (3, None, ["why"])
    assert measure.main(["--out", str(tmp_path), "writes"], (WRITES, FAILS)) == 0


def test_a_part_is_stopped_or_not_begun_when_time_is_up(tmp_path: Path) -> None:
    slow = measure.run_part(SLOW, tmp_path, limit_s=2)
    assert (slow["exit_code"], slow["last_lines"]) == (None, ["began"])
    assert measure.run_parts([WRITES], tmp_path, minutes=0.01)["parts"] == {}


def test_every_part_names_a_script_that_is_there(tmp_path: Path) -> None:
    for part in measure.PARTS:
        script = part.arguments(tmp_path)[1]
        assert script == "-m" or (ROOT / script).is_file(), part.command
    with pytest.raises(SystemExit):
        measure.main(["nothing"])


def test_goals_are_read_off_the_newest_result(tmp_path: Path) -> None:
    def write(name: str, date: str, ratio: float, device: str = "NVIDIA H200") -> None:
        header = {"device": device, "torch": "2.11.0+cu130", "commit": "0123456789", "date": date}
        (tmp_path / name).write_text(json.dumps({"header": header, "ratio": ratio}))

    goal = next(goal for goal in goals.GOALS if goal.kind == "compile")
    assert goals.newest(goal, tmp_path) is None
    write("compile_new.json", "2026-02-01", 1.05)
    write("compile_old.json", "2026-01-01", 1.5)
    write("compile_cpu.json", "2026-03-01", 9.0, "CPU x86_64")
    found = goals.newest(goal, tmp_path)
    assert found is not None
    value = found[1]
    assert value == 1.05 and goal.met(value) and not goal.met(1.5)
    table = goals.rows(tmp_path)
    assert [goal.text, "≤ 1.1", "1.05", "yes", "NVIDIA H200, torch 2.11.0, 0123456"] in table
    assert sum(cells[4] == "not measured" for cells in table) == len(goals.GOALS) - 1


def test_the_committed_table_is_what_the_committed_results_say() -> None:
    said = (goals.RESULTS / "README.md").read_text()
    assert goals.format_markdown(goals.rows(goals.RESULTS)) in said
