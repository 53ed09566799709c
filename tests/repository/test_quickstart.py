"""docs/quickstart.ipynb: its cells run in order, show that it pays, and print what is stored in it."""

from __future__ import annotations

import io
import json
import sys
import types
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from aot_hooks.graphs import speeds
from aot_hooks.options import Options

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "quickstart.ipynb"
CELLS: list[dict[str, Any]] = [
    cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"
]
AGAIN = "jupyter nbconvert --to notebook --execute --inplace docs/quickstart.ipynb"


def stored(word: str) -> str:
    """What the notebook has as the text of the cell with `word`."""
    (cell,) = (cell for cell in CELLS if word in "".join(cell["source"]))
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def peaks_and_steps(table: str) -> list[tuple[float, float]]:
    return [tuple(map(float, line.split()[:2])) for line in table.splitlines()[1:]]  # type: ignore[misc]


@pytest.fixture(scope="module")
def scope() -> Any:
    """The names after the last cell, and what each cell printed. The trained model runs without generated code."""
    pytest.importorskip("matplotlib").use("Agg")
    module = types.ModuleType("quickstart")
    printed: dict[str, str] = {}
    parse: Callable[[Any], Options] = Options.parse
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "quickstart", module)  # Dynamo looks there for what the model's class reads
        patch.setattr(speeds, "INSTANT", speeds.INSTANT)  # the notebook takes a GPU's; this puts the CPU's back
        for number, cell in enumerate(CELLS):
            source = "".join(cell["source"])
            if "manual_seed" in source:
                patch.setattr(Options, "parse", lambda given: parse({**(given or {}), "inner": "aten"}))
            with redirect_stdout(io.StringIO()) as out:
                exec(compile(source, f"quickstart.ipynb[{number}]", "exec"), vars(module))
            printed[source] = out.getvalue()
    return vars(module) | {"printed": printed}


@pytest.mark.slow
def test_the_cells_run_and_show_that_it_pays(scope: dict[str, Any]) -> None:
    trained, stock, points = scope["trained"], scope["stock"], scope["frontier"].points
    assert trained.packed_bytes < 0.6 * trained.saved_bytes
    assert scope["packed"].peak_bytes < 0.85 * stock.peak_bytes
    assert len(points) >= 4 and points[0].peak_bytes < 0.65 * stock.peak_bytes
    budgets, hook, without = scope["axes"].get_lines()
    assert len(budgets.get_xdata()) == len(points) and len(hook.get_xdata()) == len(without.get_xdata()) == 1
    longer = list(budgets.get_ydata())  # the lower the peak, the longer the step
    assert longer == sorted(longer, reverse=True) and longer[0] > 0.2


@pytest.mark.slow
def test_its_outputs_are_those_of_this_code(scope: dict[str, Any]) -> None:
    """Peaks within 5%, steps within 0.01: what the frontier finds may differ a little with each mended plan."""
    assert all(cell["execution_count"] and all("text" in o or "data" in o for o in cell["outputs"]) for cell in CELLS)
    assert any("image/png" in output.get("data", {}) for cell in CELLS for output in cell["outputs"])
    if torch.cuda.is_available():
        pytest.skip("the stored outputs are those of a CPU")
    plans, frontier, training = (
        next(text for source, text in scope["printed"].items() if word in source)
        for word in ("stock = ", "frontier = ", "manual_seed")
    )
    assert plans == stored("stock = "), AGAIN
    now, then = peaks_and_steps(frontier), peaks_and_steps(stored("frontier = "))
    for (peak, step), (peak_then, step_then) in zip((now[0], now[-1]), (then[0], then[-1]), strict=True):
        assert peak == pytest.approx(peak_then, rel=0.05) and step == pytest.approx(step_then, abs=0.01), AGAIN
    losses, before = ([float(line.split()[1]) for line in text.splitlines()[:4]] for text in (training, stored("seed")))
    assert losses == pytest.approx(before, rel=0.02), AGAIN
