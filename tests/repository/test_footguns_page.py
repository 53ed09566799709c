"""The tables of docs/footguns.md: each line of code does what its headline says."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from places import backend_with
from test_readme import ROOT
from whole_steps import on_simulator

import cudagraph
from aot_hooks import errors, unused

PAGE = (ROOT / "docs" / "footguns.md").read_text()
SETUP, SETUP_OF_GRAPHS = ((ROOT / "docs" / f"footguns_{name}.py").read_text() for name in ("hooks", "cuda_graphs"))


def cells(headline: str) -> list[list[str]]:
    """The rows of the table under a headline, without the two lines of its head."""
    text = re.split(rf"\n##+ {headline}\n", PAGE)[1].partition("\n##")[0]
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def code(cell: str) -> str:
    (found,) = re.findall(r"^`(.*)`$", cell)
    return str(found)


def run(line: str, setup: str = SETUP, **replaced: Any) -> Any:
    """The value of the last statement of `line`, after a block of the page, in names of its own."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(setup, "footguns.md", "exec"), names)
    names |= replaced
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
    for name, empty in (("_uses", {}), ("_examined", set()), ("_warned", set())):
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


@pytest.fixture(params=["simulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def run_graphed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """`run` for lines about CUDA graphs. The simulator's read raises where this build of torch can't."""
    replaced: dict[str, Any] = {}
    if request.param == "simulator":
        driver = on_simulator(monkeypatch)
        replaced = {"device": "cpu", "read": driver.read}
        replaced["ones"], replaced["w"] = torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)
        replaced["graphed"] = lambda fn, **options: torch.compile(fn, backend=backend_with(driver, options))
    monkeypatch.setenv("SCALE", "1")  # which a line changes
    cudagraph.reset()
    yield lambda line: run(line, SETUP_OF_GRAPHS, **replaced)
    cudagraph.reset()


@pytest.mark.parametrize("row", [*cells("Silent"), *cells("Without a graph")], ids=lambda row: row[0][:40])
def test_the_line_about_cuda_graphs_is_true(row: list[str], run_graphed: Callable[[str], Any]) -> None:
    assert run_graphed(code(row[1])) is True


@pytest.mark.parametrize("row", cells("Errors"), ids=lambda row: row[0][:40])
def test_the_line_about_cuda_graphs_raises(row: list[str], run_graphed: Callable[[str], Any]) -> None:
    expected = {"RuntimeError": RuntimeError}.get(code(row[1])) or getattr(cudagraph, code(row[1]))
    with pytest.raises(Exception) as caught:
        run_graphed(code(row[0]))
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), expected)
