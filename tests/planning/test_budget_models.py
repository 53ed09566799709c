"""Hugging Face models with random weights, under a budget half way between the least and stock; those of
benchmarks/bench_budget_models.py, which measures larger ones."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from profiled import measured
from small_budgets import budget
from steps import ATEN

import aot_hooks

pytest.importorskip("transformers", reason="needs transformers: pip install 'aot-hooks[hf]'")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import bench_budget_models

    return bench_budget_models


@pytest.mark.slow
@pytest.mark.parametrize(("name", "max_error"), [("llama", 0.05), ("gpt2", 0.0), ("t5", 0.0), ("vit", 0.05)])
def test_half_way_to_the_least(bench: ModuleType, name: str, max_error: float, tmp_path: Path):
    model, x = bench.model_and_batch(name, bench.SMALL, torch.device("cpu"), torch.float32)

    def peak(policy: Any) -> int:
        return aot_hooks.plan(model, x, policy=policy, inner="aten").peak_bytes

    def gradient(policy: Any) -> torch.Tensor:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": policy})
        return bench.gradient(model, compiled, x)

    stock, least = peak(aot_hooks.KEEP), peak(budget(max_slowdown=math.inf, max_error=max_error))
    assert least < stock
    limit = (stock + least) // 2
    policy = budget(limit, max_error=max_error)
    assert peak(policy) <= limit
    expected, found = gradient(aot_hooks.policies.everything(aot_hooks.KEEP)), gradient(policy)
    if max_error:
        assert (found - expected).norm() <= max_error * expected.norm()
    else:
        assert torch.equal(found, expected)
    assert max(measured(model, x, policy, tmp_path)) <= 1.03 * limit


@pytest.mark.slow
def test_the_benchmark_at_its_smallest(bench: ModuleType, tmp_path: Path):
    assert bench.main(["--small", "--models", "llama", "--json", str(tmp_path / "models.json")]) == 0
    row = {"model": "llama", "means": "exact", "budget_bytes": 10, "peak_bytes": 11, "bitwise": False, "error": 0.06}
    said = bench.wrong([row, {"model": "llama", "means": "no hooks", "noise": 0.0}], same_bits=True)
    assert [line.split(":")[1].split()[0] for line in said] == ["11", "other", "gradients"]
