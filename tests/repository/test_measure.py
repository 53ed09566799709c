"""The script that measures everything, on parts that take no time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
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
