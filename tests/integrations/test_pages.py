"""The ```python integrations blocks of README.md and docs/ run as printed, with graphs that generate no code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from aot_hooks.options import Options

for name in ("transformers", "accelerate", "trl", "datasets", "lightning", "torchao"):
    pytest.importorskip(name)

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python integrations\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(page, text.count("\n", 0, match.start(1)), match[1], id=f"{page.stem}-{match[1].count('')}")
    for page in PAGES
    for text in [page.read_text(encoding="utf-8")]
    for match in BLOCK.finditer(text)
]


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 5


@pytest.mark.usefixtures("stock_is_aten")
@pytest.mark.filterwarnings("error::aot_hooks.errors.UnusedWarning")  # a recipe whose hooks do nothing
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("page", "line", "source"), BLOCKS)
def test_block_runs(page: Path, line: int, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = Options.parse
    monkeypatch.setattr(Options, "parse", lambda given: parse({"inner": "aten", **(given or {})}))
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("\n" * line + source, str(page), "exec"), scope)
