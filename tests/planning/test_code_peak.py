"""Generated CUDA code of a budget beside its plan, seen without a GPU: bytes, and kernels. See support/code_peak.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build asks the driver, tests with a GPU measure it")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shares", "counted_least"),
    [
        ("blocks", [0.9, 0.75, 0.65, 0.6], 1.0),
        ("tied", [1.0, 0.8], 1.0),
        ("odd", [1.0, 0.8], 0.8),  # one copy a layer, of a part of a projection, is not counted
        ("masks", [1.0, 0.7, 0.5], 1.0),
        ("rotary", [1.0, 0.8, 0.6], 0.9),
    ],
)
def test_the_code_holds_and_launches_what_was_planned(model, shares, counted_least):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT.parents[1]), str(SUPPORT)])}
    run = subprocess.run(
        [sys.executable, str(SUPPORT / "code_peak.py"), model, *map(str, shares)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows = json.loads(run.stdout.splitlines()[-1])
    assert [phase for _, phase, *_ in rows] == ["forward", "backward"] * len(shares)
    for share, phase, of_code, planned, launched, counted in rows:
        assert 0.99 * planned <= of_code <= 1.001 * planned, (share, phase)
        assert counted_least * launched <= counted <= 1.2 * launched, (share, phase)
