"""tests/support/op_db.py: shards, workers that die or hang, and what is counted."""

from __future__ import annotations

import json
from pathlib import Path

import op_db
import op_programs
import pytest


@pytest.mark.slow
def test_smallest_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    arguments = ["--ops", "^(mul|sparse_mm_reduce)$", "--dtypes", "float32", "--forms", "activated", "--print"]
    assert op_db.main([*arguments, "--out", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["conditions"]["torch"] and found["rule"]["factor"] == 1.5
    counts = found["summary"]
    assert counts["operators"] == counts["operators_with_something_packed"] == counts["programs"] == 1
    assert counts["exceptions"] == {"sparse_mm_reduce": op_programs.EXCEPTIONS["sparse_mm_reduce"]}
    assert counts["verdicts"] == {"ok": 4} and counts["failing_operators"] == found["failures"] == []
    row = found["operators"]["mul"]
    assert row["kind"] == "ok" and 0 < row["error"] and row["share"] < 1
    printed = capsys.readouterr().out
    assert "mul float32 activated [8, 64], [8, 64]\n  float8: ok" in printed


def test_shards_are_all_operators_once() -> None:
    whole = op_db.cases("", ["float32"], ["direct"])
    shards = [op_db.cases("", ["float32"], ["direct"], i, 3) for i in range(3)]
    assert sorted(case for shard in shards for case in shard) == sorted(whole)
    assert len(whole) == len(set(whole)) >= 450


@pytest.mark.slow
def test_a_worker_that_dies_is_a_result_and_the_next_operator_is_run() -> None:
    """No operator of this name: the process ends with an error."""
    dead, next_one = op_db.run([("no_such", "float32", "direct"), ("neg", "float32", "direct")], 1, op_db.How(1))
    assert "the process ended with 1" in dead["reason"] and "KeyError: 'no_such'" in dead["reason"]
    assert (next_one["name"], next_one["reason"], next_one["ok"]) == ("neg", "", True)


def test_an_operator_that_hangs_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object) -> list[op_programs.Result]:
        while True:
            pass

    monkeypatch.setattr(op_programs, "check", hang)
    monkeypatch.setattr(op_db, "TIMEOUT", 1)
    (result,) = op_db.check(("mul", "float32", "direct"), op_db.How(1))
    assert result["reason"] == "took more than 1 s"


def test_a_failure_is_counted_by_its_kind_and_is_the_worst_of_its_operator() -> None:
    verdict = {
        "hook": "int8",
        "error": 0.2,
        "eager_error": 0.1,
        "bound": 0.16,
        "packed_count": 1,
        "reason": "",
        "kind": "worse",
    }
    fine = verdict | {"hook": "float8", "error": 0.1, "bound": 0.2, "kind": "ok"}
    lost = verdict | {"error": "inf", "kind": "not finite"}
    common = {"name": "op", "dtype": "float32", "shapes": "", "reason": "", "fullgraph": True, "without_hooks": 0.0}
    results = [
        common | {"form": "direct", "ok": False, "verdicts": [fine, verdict]},
        common | {"form": "activated", "ok": False, "verdicts": [lost, fine], "without_hooks": 0.5},
        common | {"form": "direct", "dtype": "bfloat16", "ok": True, "verdicts": [], "reason": "crashes"},
        common | {"name": "other", "form": "direct", "ok": True, "verdicts": [fine]},
    ]
    counts = op_db.summary(results)
    assert counts["failing_operators"] == ["op"] and counts["operators"] == 2 and counts["programs"] == 3
    assert counts["verdicts"] == {"ok": 3, "worse": 1, "not finite": 1}
    assert counts["exceptions_of_a_dtype"] == {"op bfloat16 direct": "crashes"} and counts["exceptions"] == {}
    assert counts["other_than_eager_without_hooks"] == {"op float32 activated": 0.5}
    rows = op_db.by_operator(results)
    assert rows["op"]["worst"] == "float32 activated int8" and rows["op"]["share"] == "inf"
    assert rows["other"]["share"] == 0.5
