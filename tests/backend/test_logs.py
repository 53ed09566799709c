"""What the logger "aot_hooks" and torch's structured trace show, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
    import torch, aot_hooks
    f = torch.compile(lambda x: (x @ x).sin(), backend="aot_hooks", options={"inner": "aten"})
    with aot_hooks.saved_tensors_hooks(lambda x: (x.half(), x.dtype), lambda p: p[0].to(p[1])):
        f(torch.randn(4, 4, requires_grad=True)).sum().backward()
"""


def run_program(**env: str) -> str:
    """What the program above writes to stderr, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_log_shows_the_graphs_before_and_after_and_the_hooks() -> None:
    out = run_program(TORCH_LOGS="+aot_hooks")
    titles = ["forward before", "backward before", "pack of", "unpack of", "forward after", "backward after", "plan: "]
    assert [t for t in titles if t not in out] == []
    assert sorted(titles, key=out.index) == titles
    assert out.index("float16") > out.index("pack of")


@pytest.mark.slow
def test_without_the_log_nothing_is_printed() -> None:
    out = run_program()
    assert "forward before" not in out and "aot_hooks" not in out


@pytest.mark.core
def test_structured_trace_has_the_artifacts(tmp_path: Path) -> None:
    run_program(TORCH_TRACE=str(tmp_path))
    text = "".join(p.read_text() for p in tmp_path.glob("*.log"))
    names = set(re.findall(r'"name": "(aot_hooks_[^"]*)"', text))
    assert {"aot_hooks_forward_before", "aot_hooks_backward_before"} <= names
    assert {"aot_hooks_forward_after", "aot_hooks_backward_after"} <= names
    assert any(n.startswith("aot_hooks_pack_of") for n in names) and any(
        n.startswith("aot_hooks_unpack_of") for n in names
    )
