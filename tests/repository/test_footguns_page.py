"""The tables of docs/footguns.md: each line of code does what its headline says."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

import pytest
from test_readme import ROOT, python_blocks

from aot_hooks import errors, unused

PAGE = (ROOT / "docs" / "footguns.md").read_text()
SETUP = next(block.source for block in python_blocks(PAGE) if block.runs)


def cells(headline: str) -> list[list[str]]:
    """The rows of the table under a headline, without the two lines of its head."""
    text = PAGE.partition(f"\n## {headline}\n")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def code(cell: str) -> str:
    (found,) = re.findall(r"^`(.*)`$", cell)
    return str(found)


def run(line: str) -> Any:
    """The value of the last statement of `line`, after the page's block, in names of its own."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SETUP, "footguns.md", "exec"), names)
    *first, last = ast.parse(line).body
    assert isinstance(last, ast.Expr)
    exec(compile(ast.Module(first, []), "line", "exec"), names)
    return eval(compile(ast.Expression(last.value), "line", "eval"), names)


@pytest.mark.filterwarnings("ignore::aot_hooks.errors.UnusedWarning")
@pytest.mark.parametrize("row", cells("Silently different"), ids=lambda row: row[0][:40])
def test_the_line_is_true_and_nothing_raises(row: list[str]) -> None:
    assert run(code(row[1])) is True


@pytest.mark.parametrize("row", cells("A warning"), ids=lambda row: row[0][:40])
def test_the_line_warns(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # once a process: other tests may have used the same hooks
    for name, empty in (("_uses", {}), ("_ended", set()), ("_warned", set())):
        monkeypatch.setattr(unused, name, empty)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(code(row[1]))
    assert any(issubclass(each.category, errors.UnusedWarning) for each in caught)


@pytest.mark.parametrize("row", cells("An error"), ids=lambda row: row[0][:40])
def test_the_line_raises(row: list[str]) -> None:
    name = code(row[1])
    expected = getattr(errors, name, None) or {"RuntimeError": RuntimeError}[name]
    with pytest.raises(Exception) as caught:
        run(code(row[0]))
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), expected)
