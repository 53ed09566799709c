"""The frontier as a picture: peak memory against step time, of budgets and of other ways, as shares of stock's.

    python benchmarks/plot_budget.py                                    # docs/images/frontier.png from the kept results
    python benchmarks/plot_budget.py --budgets budget.json --peers budget.json    # both from one run of bench_budget.py

Runs on different machines are comparable by their own stock step only, so both axes are shares of that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
from typing import Any

from _measure import GIB, ROOT

RESULTS = ROOT / "benchmarks" / "results"
BUDGETS = RESULTS / "history" / "2026-11-23-dae2dbf-budget.json"
PEERS = RESULTS / "current" / "memory.h200.json"
IMAGE = ROOT / "docs" / "images" / "frontier.png"
SHOWN = {
    "budget_0.9": "torch's memory budget 0.9",
    "budget_0.7": "torch's memory budget 0.7",
    "budget_0.5": "torch's memory budget 0.5",
    "budget_0.3": "torch's memory budget 0.3",
    "checkpoint_blocks": "activation checkpointing",
    "torch_inlined_float8": "torch: float8 hooks inlined",
    "inductor_float8_pass": "Inductor: float8 pass",
    "ours_float8_rowwise": "float8()",
    "ours_float8_offload": "offload(then=float8())",
}
Point = tuple[str, float, float]  # label, share of stock's peak, share of stock's step


def points(rows: list[dict[str, Any]], ours: bool) -> list[Point]:
    """The budgets of a run, or the peers in `SHOWN`, as shares of the row "no hooks" or "stock"."""
    ready = [row for row in rows if "min_ms" in row]
    stock = next(row for row in ready if row["name"] in ("no hooks", "stock"))
    found = []
    for row in ready:
        label = row["name"].split(",")[0] if ours else SHOWN.get(row["name"])
        if label is None or row is stock or (ours and row.get("kind") == "peer") or "as Inductor" in row["name"]:
            continue
        found.append((label, _gib(row) / _gib(stock), row["min_ms"] / stock["min_ms"]))
    return found


def _gib(row: dict[str, Any]) -> float:
    return float(row["peak_gib"] if "peak_gib" in row else row["peak_bytes"] / GIB)


def draw(ours: list[Point], peers: list[Point], where: str, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.6), layout="constrained")
    axes.plot(100, 100, "k*", markersize=12)
    axes.annotate("torch.compile", (100, 100), xytext=(-6, 10), textcoords="offset points", ha="right", fontsize=9)
    placed: list[tuple[float, float]] = []
    for label, peak, time in sorted({(label, round(p, 3), round(t, 3)) for label, p, t in peers}, key=lambda p: p[2]):
        own = "(" in label
        axes.plot(100 * peak, 100 * time, "o" if own else "s", color="C0" if own else "C7", markersize=6)
        above = sum(abs(peak - p) < 0.15 and abs(time - t) < 0.02 for p, t in placed)
        placed.append((peak, time))
        at = (7, 2 + 9 * above)
        axes.annotate(label, (100 * peak, 100 * time), xytext=at, textcoords="offset points", fontsize=8)
    for color, label in zip(itertools.cycle(("C1", "C2", "C4", "C3")), dict.fromkeys(label for label, *_ in ours)):
        same = [(100 * p, 100 * t) for other, p, t in ours if other == label]
        axes.plot(*zip(*same, strict=True), "D", color=color, markersize=7, label=f'budget("{label}")')
    axes.set(xlabel="peak memory, % of torch.compile's", ylabel="step time, % of torch.compile's", title=where)
    axes.set_xlim(25, 105)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The frontier as a picture.")
    parser.add_argument("--budgets", type=pathlib.Path, default=BUDGETS)
    parser.add_argument("--peers", type=pathlib.Path, default=PEERS)
    parser.add_argument("--image", type=pathlib.Path, default=IMAGE)
    options = parser.parse_args(arguments)
    budgets, peers = (json.loads(path.read_text()) for path in (options.budgets, options.peers))
    runs = budgets.get("runs", [budgets])
    timed = [run for run in runs if run.get("layers", 4) == 4 and "min_ms" in run["rows"][0]]
    ours = [point for run in timed for point in points(run["rows"], ours=True)]
    draw(ours, points(peers["rows"], ours=False), "Four Llama-3-8B-shaped layers, 2 x 8192 tokens, H200", options.image)
    return 0


if __name__ == "__main__":
    sys.exit(main())
