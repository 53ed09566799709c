"""docs/quickstart.ipynb: its cells run in order, and it is stored without outputs."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from aot_hooks.graphs import speeds

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "quickstart.ipynb"
# Most of the time is that of the plans of the large blocks. The test takes one of the three away.
LARGE, FEWER = "blocks(3, width=4096", "blocks(2, width=4096"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


@pytest.mark.slow
def test_the_cells_run_and_show_that_it_pays(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    module = types.ModuleType("quickstart")
    monkeypatch.setitem(sys.modules, "quickstart", module)  # Dynamo looks there for what the model's class reads
    monkeypatch.setattr(speeds, "INSTANT", speeds.INSTANT)  # the notebook takes a GPU's; this puts the CPU's back
    scope = vars(module)
    for number, cell in enumerate(CELLS):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace(LARGE, FEWER)
            exec(compile(source, f"quickstart.ipynb[{number}]", "exec"), scope)
    printed = capsys.readouterr().out
    trained, stock, points = scope["trained"], scope["stock"], scope["frontier"].points
    assert trained.packed_bytes < 0.6 * trained.saved_bytes
    assert f"{trained.saved_bytes} -> {trained.packed_bytes} bytes" in printed
    assert scope["packed"].peak_bytes < 0.85 * stock.peak_bytes
    assert len(points) >= 4 and points[0].peak_bytes < 0.65 * stock.peak_bytes
    budgets, hook = scope["axes"].get_lines()
    assert len(budgets.get_xdata()) == len(points) and len(hook.get_xdata()) == 1
    longer = list(budgets.get_ydata())  # the lower the peak, the longer the step
    assert longer == sorted(longer, reverse=True) and longer[0] > 0.2


def test_it_has_no_outputs() -> None:
    assert sum("".join(cell["source"]).count(LARGE) for cell in CELLS) == 1
    assert [cell for cell in CELLS if cell.get("outputs") or cell.get("execution_count")] == []
