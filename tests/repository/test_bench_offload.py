"""What bench_offload.py reads off a trace, and how the example finds the longest length, on made-up numbers."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from results import CURRENT, reads_results

ROOT = Path(__file__).resolve().parents[2]


def load(folder: str, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / folder))
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def event(kind: str, name: str, start_us: float, us: float, nbytes: int = 0) -> dict[str, Any]:
    return {"cat": kind, "name": name, "ts": start_us, "dur": us, "args": {"bytes": nbytes} if nbytes else {}}


def test_the_share_of_copies_beside_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("benchmarks", "bench_offload", monkeypatch)
    events = [
        event("kernel", "mm", 0, 1000),
        event("kernel", "mm", 500, 1500),  # overlaps: until 2000
        event("kernel", "mm", 3000, 1000),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1000, 1000, 50_000_000),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1500, 2000, 100_000_000),  # 500 + 500 of it beside one
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 4000, 1),
        {"name": "something else", "ts": 0},
    ]
    row = bench.OffloadRow("x")
    bench.read_trace(events, row)
    assert (row.to_host.count, row.to_host.total_ms, row.to_host.hidden_ms) == (1, 1.0, 1.0)
    assert (row.to_device.count, row.to_device.total_ms, row.to_device.hidden_ms) == (1, 2.0, 1.0)
    assert row.hidden_share == pytest.approx(2 / 3)
    assert row.step_kernels_ms == 3.0
    assert "50.0" in bench.format_offload([row])  # GB/s
    timeline = bench.format_timeline(events)
    assert "pause   1.00" in timeline and "DtoH" in timeline and timeline.endswith("4.00  end")


@reads_results
def test_the_documented_table_is_what_the_committed_result_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it is not: python benchmarks/bench_offload.py --table benchmarks/results/current/offload.h200.json"""
    bench = load("benchmarks", "bench_offload", monkeypatch)
    result = json.loads((CURRENT / "offload.h200.json").read_text())
    said = (ROOT / "docs" / "offload.md").read_text()
    assert bench.format_markdown(result) in said
    stock = next(row for row in result["rows"] if row["name"] == "stock")
    stock["min_ms"] += 1.0
    assert bench.format_markdown(result) not in said, "another result is another table"


@pytest.mark.parametrize("fits", [0, 499, 999, 1000, 4700, 70_000])
def test_the_longest_length_that_fits(monkeypatch: pytest.MonkeyPatch, fits: int) -> None:
    example = load("examples", "offload_long_context", monkeypatch)
    tried: list[int] = []

    class Trainer:
        def fits(self, hook: object, length: int) -> dict[str, int] | None:
            tried.append(length)
            return {"length": length} if length <= fits else None

    found = example.longest(Trainer(), None, start=1000, finest=500)["length"]
    assert found <= fits < (found + 500) * 17 / 16
    assert len(tried) == len(set(tried)) < 13


def test_the_table_tells_the_longest_length_of_each_way_and_all_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("examples", "offload_long_context", monkeypatch)
    here = {"s": 0.5, "peak_gib": 3.0}
    there = {"s": 0.625, "peak_gib": 2.5}
    rows = {
        "nothing": {"length": 4096, **here, "host_gib": 0.0, "at_common": here},
        "offload": {"length": 8192, "s": 1.25, "peak_gib": 3.5, "host_gib": 2.0, "at_common": there},
        "too much": {"length": 0, "at_common": {}},
    }
    title, *lines = example.table(rows, 4096).splitlines()
    assert [line.split() for line in lines] == [
        ["nothing", "4096", "0.500", "3.000", "0.000", "0.500", "3.000"],
        ["offload", "8192", "1.250", "3.500", "2.000", "0.625", "2.500"],
        ["too", "much", "0", "nan", "nan", "nan", "nan", "nan"],
    ]
    assert "at 4096:" in title
    assert {len(line) for line in lines} == {len(title)}


def test_peers_that_no_budget_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("benchmarks", "bench_budget", monkeypatch)
    rows: list[dict[str, Any]] = [
        {"name": "stock", "kind": "stock", "peak_bytes": 100, "ratio": 1.0},
        {"name": "50", "kind": "budget", "peak_bytes": 50, "ratio": 1.05},
        {"name": "broken", "kind": "budget", "error": "out of memory"},
        {"name": "slower", "kind": "peer", "peak_bytes": 50, "ratio": 1.10},
        {"name": "as fast, with noise", "kind": "peer", "peak_bytes": 50, "ratio": 1.045},
        {"name": "faster", "kind": "peer", "peak_bytes": 50, "ratio": 1.03},
        {"name": "smaller", "kind": "peer", "peak_bytes": 49, "ratio": 1.10},
        {"name": "larger and slower than stock", "kind": "peer", "peak_bytes": 110, "ratio": 1.2},
    ]
    assert bench.below_the_frontier(rows) == ["faster", "smaller"]
