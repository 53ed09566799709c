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


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is not None, reason="a CUDA build asks the driver, tests with a GPU measure it"
    ),
]


def printed(script, *arguments):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT.parents[1]), str(SUPPORT)])}
    command = [sys.executable, str(SUPPORT / script), *map(str, arguments)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("model", "shares", "counted_least"),
    [
        ("blocks", [0.9, 0.75, 0.65, 0.6], 1.0),
        ("tied", [1.0, 0.8], 1.0),
        ("odd", [1.0, 0.8], 0.8),  # one copy a layer, of a part of a projection, is not counted
        ("masks", [1.0, 0.7, 0.5], 1.0),
        ("loss", [1.0, 0.85], 0.9),
        ("rotary", [1.0, 0.8, 0.6], 0.9),
    ],
)
def test_the_code_holds_and_launches_what_was_planned(model, shares, counted_least):
    rows = printed("code_peak.py", model, *shares)
    assert [phase for _, phase, *_ in rows] == ["forward", "backward"] * len(shares)
    for share, phase, of_code, planned, launched, counted in rows:
        assert 0.99 * planned <= of_code <= 1.001 * planned, (share, phase)
        assert counted_least * launched <= counted <= 1.25 * launched, (share, phase)


def test_what_is_computed_again_is_not_alive_beside_all_gradients():
    held, as_inductor_likes = printed("code_split.py")
    assert held < as_inductor_likes - 1.5, "of the widest tensors"
