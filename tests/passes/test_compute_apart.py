"""What a backward computes again for a product is not fused with gradients, and is gone before these are there."""

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
def test_it_is_not_alive_beside_the_gradients() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT.parents[1]), str(SUPPORT)])}
    command = [sys.executable, str(SUPPORT / "code_apart.py")]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    apart, fused = json.loads(run.stdout.splitlines()[-1])
    assert fused - apart > 0.9, "one of the widest tensors less"
