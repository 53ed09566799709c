"""The goals, the generated page of the results, and every place that names a result file."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from results import NO_RESULTS
from results import RESULTS as COMMITTED

if not COMMITTED.is_dir():
    pytest.skip(NO_RESULTS, allow_module_level=True)

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import goals
from measure import ROOT

RESULTS = goals.RESULTS
MANIFEST: dict[str, dict[str, dict[str, Any]]] = json.loads((RESULTS / "manifest.json").read_text())
CURRENT = {entry["file"]: kind for kind, entry in MANIFEST["current"].items()}
# "current/memory.h200.json" with or without a path before it, and names of the kind that files had once
CITATION = re.compile(r"(?:results/|\b(?:current|history)/)[\w./-]*\.json\b|\b\w+_torch\d[\w.]*\.json\b")
CITING = sorted(
    path
    for pattern in (
        "README.md",
        "CHANGELOG.md",
        "docs/**/*.md",
        "benchmarks/*.md",
        "benchmarks/results/*.md",
        "benchmarks/*.py",
        "tests/**/*.py",
    )
    for path in ROOT.glob(pattern)
)


def citations(text: str) -> list[str]:
    """Each result file that `text` names, relative to benchmarks/results."""
    return [found.removeprefix("results/") for found in CITATION.findall(text)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results with one file, of compile.h200, and a partial run that the manifest doesn't name."""
    header = {"device": "NVIDIA H200", "torch": "2.11.0+cu130", "commit": "0123456789", "date": "2026-01-01"}
    entry = {"file": "current/compile.h200.json", "command": "python x.py", "shows": "Something."}
    (tmp_path / "current").mkdir()
    (tmp_path / entry["file"]).write_text(json.dumps({"header": header, "ratio": 1.05}))
    newer = {"header": {**header, "date": "2026-02-01"}, "ratio": 0.5}
    (tmp_path / "current" / "compile_again.h200.json").write_text(json.dumps(newer))
    (tmp_path / "manifest.json").write_text(json.dumps({"current": {"compile.h200": entry}, "history": {}}))
    return tmp_path


def test_a_goal_reads_only_the_file_that_the_manifest_names(folder: Path) -> None:
    goal = next(goal for goal in goals.GOALS if goal.kind == "compile.h200")
    table = goals.rows(goals.current(folder))
    assert [goal.text, "≤ 1.1", "1.05", "yes", "NVIDIA H200, torch 2.11.0, 0123456"] in table
    assert sum(cells[4] == "not measured" for cells in table) == len(goals.GOALS) - 1
    assert goal.met(1.05) and not goal.met(1.5)


def test_a_goal_whose_number_the_file_lacks_says_so(folder: Path) -> None:
    path = folder / "current" / "compile.h200.json"
    path.write_text(json.dumps({"header": json.loads(path.read_text())["header"]}))
    (cells,) = (cells for cells in goals.rows(goals.current(folder)) if cells[4] != "not measured")
    assert cells[2:] == ["", "NO", "not in compile.h200.json"]


def test_a_run_of_some_8_bit_hooks_has_no_fastest_one() -> None:
    result = json.loads((RESULTS / "current/memory.h200.json").read_text())
    assert goals.best_of_8_bits(result) < 1.1
    result["rows"] = [row for row in result["rows"] if row["name"] != "ours_float8_blockwise"]
    with pytest.raises(KeyError, match="ours_float8_blockwise"):
        goals.best_of_8_bits(result)


def test_another_file_can_be_tried_without_naming_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    goals.main(["--try", f"compile.h200={folder / 'current' / 'compile_again.h200.json'}"])
    assert re.search(r"compile time over stock's +≤ 1.1 +0.5 +yes", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        goals.main(["--try", "compile=x.json"])
    assert re.search(r"no goal reads 'compile'; goals read .*\bcompile.h200, ", capsys.readouterr().err)


def test_the_page_of_the_results_is_what_the_manifest_makes(folder: Path) -> None:
    """If it is not: python benchmarks/goals.py --write"""
    assert (RESULTS / "README.md").read_text() == goals.format_readme(RESULTS)
    assert "| Something. | NVIDIA H200, torch 2.11.0, 0123456, 2026-01-01 | `python x.py` |" in goals.format_readme(
        folder
    )


def test_every_goal_has_a_current_file_of_its_kind() -> None:
    assert {goal.kind for goal in goals.GOALS} <= MANIFEST["current"].keys()


def test_the_manifest_names_every_result_file() -> None:
    there = {str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.json")} - {"manifest.json"}
    assert there == CURRENT.keys() | MANIFEST["history"].keys()


@pytest.mark.parametrize("name", CURRENT)
def test_a_current_file_is_named_after_its_kind_and_device(name: str) -> None:
    assert name == f"current/{CURRENT[name]}.json"
    device = goals.header(json.loads((RESULTS / name).read_text()))["device"]
    assert CURRENT[name].rpartition(".")[2] in device.lower()


@pytest.mark.parametrize("name", MANIFEST["history"])
def test_a_file_of_the_history_is_named_after_its_date_and_commit(name: str) -> None:
    top = goals.header(json.loads((RESULTS / name).read_text()))
    commit = re.findall(r"\b[0-9a-f]{7,40}\b", top["commit"])[0][:7]
    assert re.fullmatch(rf"history/{top['date'][:10]}-(before_)?{commit}-\w+\.json", name)


def test_every_current_file_has_a_command_whose_script_is_there() -> None:
    """A file of the history may be of a script that ended: the one at its commit."""
    for kind, entry in [*MANIFEST["current"].items(), *MANIFEST["history"].items()]:
        assert entry["shows"].endswith(".") and "|" not in entry["shows"]
        scripts = re.findall(r"\S+\.(?:py|sh)\b", entry["command"] or "")
        assert not entry["command"] or "pytest" in entry["command"] or len(scripts) == 1, kind
        if kind in MANIFEST["current"]:
            assert entry["command"] and all((ROOT / script).is_file() for script in scripts), kind


def test_every_script_is_in_the_readme_and_nothing_else() -> None:
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    named = set(re.findall(r"(?<![/\w])(?:benchmarks/)?(\w+\.(?:py|sh))\b", readme))
    there = {path.name for path in (ROOT / "benchmarks").iterdir() if path.suffix in (".py", ".sh")}
    assert named - {"cache_rows.py", "output_code.py"} == there


@pytest.mark.parametrize("path", CITING, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_cited_result_file_is_there(path: Path) -> None:
    if path != Path(__file__).resolve():
        for name in citations(path.read_text()):
            assert name == "manifest.json" or name in CURRENT.keys() | MANIFEST["history"].keys(), name


def test_citations_are_found_however_they_are_written() -> None:
    text = "[a](../benchmarks/results/current/memory.h200.json), `history/x-y.json`, a_cpu_torch2.13.0.json, out/a.json"
    assert citations(text) == ["current/memory.h200.json", "history/x-y.json", "a_cpu_torch2.13.0.json"]
    cited = {name for path in CITING for name in citations(path.read_text())}
    assert {"current/memory.h200.json", "current/op_db.cpu.json"} <= cited


def links(text: str) -> list[str]:
    """The relative targets of Markdown links into files of this repository, anchors included."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "benchmarks" in target]


def anchors(text: str) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [path for path in CITING if path.suffix == ".md"], ids=lambda path: path.name)
def test_links_to_results_lead_somewhere(path: Path) -> None:
    for link in links(path.read_text()):
        file, _, anchor = link.partition("#")
        target = path.parent / file
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link
