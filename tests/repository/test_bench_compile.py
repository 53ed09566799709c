"""How bench_compile.py tells a wrong gradient from one that was added up in another order, on made-up numbers; and
that its processes find Python's bytecode of each other where the environment forbids to write any."""

from __future__ import annotations

import argparse
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
    bench = load("benchmarks", "bench_compile", monkeypatch)
    cold = {"stock": row(0.0, 0, 10.0), "aot_hooks": row(0.0, 0, 12.0)}
    warm = {"stock": [row(0.0), row(stock)], "aot_hooks": [row(0.0, seconds=2.0), row(ours, seconds=1.5)]}
    found = bench.summarized(cold, warm)
    assert (found["same_gradients"], found["all_hit"]) == (same, True)
    assert found["cold_over_warm_wall_s"] == {"stock": 10.0, "aot_hooks": 8.0}
    assert found["warm_over_stock_warm_cpu_s"] == 1.5


def test_the_first_gradient_is_what_later_ones_are_compared_with(monkeypatch, tmp_path) -> None:
    bench = load("benchmarks", "bench_compile", monkeypatch)
    path = tmp_path / "gradient.pt"
    first = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    assert bench.gradient_error(first, path) == bench.gradient_error(first, path) == 0.0
    assert bench.gradient_error(first + torch.tensor([0.0, 1.0]), path) == pytest.approx(0.2)
    assert bench.gradient_error(first * float("nan"), path) != 0.0


def test_a_start_finds_the_bytecode_that_one_before_it_wrote(monkeypatch, tmp_path) -> None:
    bench = load("benchmarks", "bench_compile", monkeypatch)
    (tmp_path / "imported_once.py").write_text("")
    script = tmp_path / "start.py"
    script.write_text("import imported_once\nprint('said before')\nprint('{}')\n")
    monkeypatch.setattr(bench, "__file__", str(script))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    options = argparse.Namespace(device="cpu", layers=1, tokens=1, width=1, batch=1, inner="inductor")
    bytecode = str(tmp_path / "bytecode")
    first = bench.run("stock", tmp_path / "first", options, bytecode=bytecode)
    second = bench.run("stock", tmp_path / "stock", options, bytecode=bytecode)
    assert first["sources_compiled"] >= 1  # and what the interpreter itself imports, where it is not in its archive
    assert second == {"sources_compiled": 0}
    assert not (tmp_path / "__pycache__").exists()
