"""docs/quickstart.ipynb: its cells run in order, and it is stored without outputs."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "quickstart.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


@pytest.mark.slow
def test_the_cells_run_and_print(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("quickstart")
    monkeypatch.setitem(sys.modules, "quickstart", module)  # Dynamo looks there for what the model's class reads
    scope = vars(module)
    for number, cell in enumerate(CELLS):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"quickstart.ipynb[{number}]", "exec"), scope)
    printed = capsys.readouterr().out
    assert scope["plan"].packed_bytes < 0.6 * scope["plan"].saved_bytes
    assert f"{scope['plan'].saved_bytes} -> {scope['plan'].packed_bytes} bytes" in printed


def test_it_has_no_outputs() -> None:
    assert [cell for cell in CELLS if cell.get("outputs") or cell.get("execution_count")] == []
