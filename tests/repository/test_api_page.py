"""docs/api.md lists every public name, so that the API reference has it."""

from __future__ import annotations

import re
from pathlib import Path

import aot_hooks
from aot_hooks import policies

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_public_name_is_listed() -> None:
    listed = set(re.findall(r"^::: aot_hooks\.(\S+)$", PAGE, re.MULTILINE))
    described = {"KEEP", "AotHooksError", "policies"}  # a value; in errors; name by name
    assert set(aot_hooks.__all__) - described <= listed
    assert {f"policies.{name}" for name in policies.__all__} <= listed
