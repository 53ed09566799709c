"""Mutations of the code (tests/support/mutations.py) fit the code, and the script says so when one goes unnoticed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import mutations
import pytest
from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
SUM = Mutation("a sum", "added.py", "a + b", "a - b", ("test_sum.py::test_sum",))


def test_the_text_of_each_mutation_is_in_the_code_once() -> None:
    assert mutations.not_applicable(MUTATIONS, ROOT) == []


def test_a_mutated_file_still_parses() -> None:
    """Else every test would fail, whatever it looks at."""
    for mutation in MUTATIONS:
        source = (ROOT / mutation.file).read_text(encoding="utf-8")
        ast.parse(source.replace(mutation.old, mutation.new), mutation.name)


def test_named_tests_are_not_slow() -> None:
    for path, _, name in {test.partition("::") for mutation in MUTATIONS for test in mutation.tests}:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        tests = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not name or name in tests, f"{path} has no {name}"
        marks = [ast.unparse(mark) for mark in (tests[name].decorator_list if name else [])]
        assert "pytest.mark.slow" not in marks and "pytestmark = pytest.mark.slow" not in ast.unparse(tree)


def test_each_comparison_of_a_host_state_is_among_them() -> None:
    source = (ROOT / mutations.HOST).read_text(encoding="utf-8")
    (returned,) = re.findall(r"def unchanged.*?return \((.*?)\n        \)", source, re.DOTALL)
    comparisons = {line.strip().removeprefix("and ") for line in returned.strip().splitlines()}
    deleted = {line.strip().removeprefix("and ") for m in MUTATIONS if m.file == mutations.HOST for line in [m.old]}
    assert {each.partition("\n")[0] for each in deleted} == comparisons


def test_contributing_lists_them() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition("\n## Mutations\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)` \|$", section, re.MULTILINE)
    assert rows == [(mutation.name, mutation.file) for mutation in MUTATIONS]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "added.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_sum.py").write_text("import added\n\ndef test_sum(): assert added.add(0, 3) == 3\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    gpu\n")
    return tmp_path


def test_what_goes_unnoticed_or_does_not_run_is_no_success(tree: Path) -> None:
    assert mutations.outcome(tree, SUM) == ""
    assert mutations.outcome(tree, SUM._replace(new="b + a")) == "SURVIVED: no test failed"
    assert mutations.outcome(tree, SUM._replace(new="a +")).startswith("NO ANSWER")
    assert mutations.outcome(tree, SUM._replace(tests=("test_sum.py::test_gone",))).startswith("NO ANSWER")
    assert "a + b" in (tree / "added.py").read_text()


def test_a_text_that_is_gone_is_said_before_any_test_runs(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = SUM._replace(old="a * b", tests=("test_gone.py",))
    monkeypatch.setattr(mutations, "MUTATIONS", (SUM, gone))
    monkeypatch.setattr(mutations, "ROOT", tree)
    assert mutations.main([]) == 2
    printed = capsys.readouterr().out
    assert "a sum: added.py has this text 0 times, expected once: 'a * b'" in printed
    assert "there is no test_gone.py" in printed
    assert mutations.main(["nothing"]) == 2
