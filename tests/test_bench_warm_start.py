"""How bench_warm_start.py tells a wrong gradient from one that was added up in another order, on made-up numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_bench_offload import load


def row(error: float, hits: int = 1, seconds: float = 1.0) -> dict[str, Any]:
    return {"wall_s": seconds, "cpu_s": seconds, "hits": hits, "misses": 1 - hits, "gradient_error": error}


@pytest.mark.parametrize(
    ("stock", "ours", "same"),
    [(0.0, 0.0, True), (0.0, 1e-9, False), (1e-3, 1.5e-3, True), (1e-3, 4e-2, False), (1e-3, float("nan"), False)],
)
def test_gradients_may_differ_as_those_of_stock_do(monkeypatch, stock, ours, same) -> None:
    bench = load("benchmarks", "bench_warm_start", monkeypatch)
    cold = {"stock": row(0.0, 0, 10.0), "aot_hooks": row(0.0, 0, 12.0)}
    warm = {"stock": [row(0.0), row(stock)], "aot_hooks": [row(0.0, seconds=2.0), row(ours, seconds=1.5)]}
    found = bench.summarized(cold, warm)
    assert (found["same_gradients"], found["all_hit"]) == (same, True)
    assert found["cold_over_warm_wall_s"] == {"stock": 10.0, "aot_hooks": 8.0}
    assert found["warm_over_stock_warm_cpu_s"] == 1.5


def test_the_first_gradient_is_what_later_ones_are_compared_with(monkeypatch, tmp_path) -> None:
    bench = load("benchmarks", "bench_warm_start", monkeypatch)
    path = tmp_path / "gradient.pt"
    first = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    assert bench.gradient_error(first, path) == bench.gradient_error(first, path) == 0.0
    assert bench.gradient_error(first + torch.tensor([0.0, 1.0]), path) == pytest.approx(0.2)
    assert bench.gradient_error(first * float("nan"), path) != 0.0
