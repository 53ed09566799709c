"""Builds of torch without CUDA, and devices that are neither CPU nor CUDA: no CUDA call, and refusals with a name."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from aot_hooks import errors, offload, saved_tensors
from aot_hooks.graphs import roofline, speeds

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
    import importlib, pkgutil, warnings
    import torch

    def refuse(*_, **__):
        raise AssertionError("CUDA was asked for")

    torch.cuda._lazy_init = torch._C._cuda_init = refuse
    import aot_hooks, cudagraph

    for package in (aot_hooks, cudagraph):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if ".integrations." not in found.name and not found.name.endswith("__main__"):
                importlib.import_module(found.name)
    warnings.simplefilter("ignore")
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    x = torch.randn(4, 8)
    for policy in (aot_hooks.float8(), aot_hooks.offload(min_bytes=0), aot_hooks.budget(max_slowdown=0.5)):
        aot_hooks.plan(net, x, policy=policy, inner="aten")
        with aot_hooks.enable(policy, options={"inner": "aten"}):
            torch.compile(net)(x).sum().backward()
    aot_hooks.plan(net, x, policy=aot_hooks.float8(), inner="inductor")
    aot_hooks.reset()
    cudagraph.stats()
    print("done")
"""


@pytest.mark.slow
def test_nothing_asks_for_cuda_at_import_in_plan_or_in_training_on_a_cpu() -> None:
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(program, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "done", done.stderr


@pytest.mark.parametrize("name", ["xpu", "mps", "hpu"])
def test_budgets_refuse_a_device_whose_speed_they_cannot_measure(name: str) -> None:
    with pytest.raises(errors.OptionError, match=f"got device '{name}'. Choose a hook or policy yourself"):
        speeds.measured_rates(torch.device(name))


def test_a_plan_without_a_budget_has_no_time_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "step_ms", lambda *_: speeds.measured_rates(torch.device("xpu")))
    assert roofline.predicted_ms() == 0.0


def test_offload_leaves_tensors_of_such_a_device_and_says_why() -> None:
    saved = saved_tensors(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.randn(4, 8), inner="aten")
    why = offload(min_bytes=0).why_not(dataclasses.replace(saved[-1], device=torch.device("xpu")))
    assert why == "offload has no copies beside the compute for device xpu"
