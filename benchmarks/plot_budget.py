"""The frontier as a picture: peak memory against step time, of budgets and of other ways, as shares of stock's.

python benchmarks/plot_budget.py                          # docs/images/frontier.png from the kept result
python benchmarks/plot_budget.py --result budget.json     # from another run of bench_budget.py
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

from _measure import ROOT

RESULT = ROOT / "benchmarks" / "results" / "current" / "budget.h200.json"
IMAGE = ROOT / "docs" / "images" / "frontier.png"
SHOWN = {
    "budget_0.9": "torch's memory budget 0.9",
    "budget_0.7": "torch's memory budget 0.7",
    "budget_0.5": "torch's memory budget 0.5",
    "budget_0.3": "torch's memory budget 0.3",
    "budget_0.1": "torch's memory budget 0.1",
    "checkpoint_blocks": "activation checkpointing",
    "torch_inlined_float8": "torch: float8 hooks inlined",
    "inductor_float8_pass": "Inductor: float8 pass",
    "ours_float8_rowwise": "float8()",
    "ours_float8_offload": "offload(then=float8())",
}
ABOVE = {"inductor_offload": "Inductor's offloading", "save_on_cpu": "save_on_cpu"}  # too slow for the picture
OURS = {"budget": ("C1", 'budget("...")'), "exact budget": ("C2", 'budget("...", max_error=0)')}


def draw(rows: list[dict[str, Any]], where: str, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stock, *others = (row for row in rows if "min_ms" in row)
    shares = [
        (row, 100 * row["peak_bytes"] / stock["peak_bytes"], 100 * row["min_ms"] / stock["min_ms"]) for row in others
    ]
    figure, axes = pyplot.subplots(figsize=(9, 4.6), layout="constrained")
    axes.plot(100, 100, "k*", markersize=12)
    axes.annotate("torch.compile", (100, 100), xytext=(-6, 10), textcoords="offset points", ha="right", fontsize=9)
    for kind, (color, label) in OURS.items():
        own = sorted((peak, ms) for row, peak, ms in shares if row["kind"] == kind)
        if own:
            axes.plot(*zip(*own, strict=True), "D-", color=color, markersize=6, linewidth=1, label=label)
    placed: list[tuple[float, float]] = []
    for row, peak, ms in sorted(shares, key=lambda share: share[2]):
        if (text := SHOWN.get(row["name"])) is None or row["kind"] != "peer":
            continue
        by_hand = "(" in text
        axes.plot(peak, ms, "o" if by_hand else "s", color="C0" if by_hand else "C7", markersize=6)
        line = ms + 0.2  # of the text, in %: about 10 points each
        while any(abs(peak - p) < 20 and abs(line - t) < 0.9 for p, t in placed):
            line += 0.3
        beside = 10 * (line - ms)
        if by_hand and ms < 101:
            beside = -11  # below the line of budgets, as it lies on it
        else:
            placed.append((peak, line))
        axes.annotate(text, (peak, ms), xytext=(7, beside), textcoords="offset points", fontsize=8)
    above = [f"{ABOVE[row['name']]}: {ms:.0f}% at {peak:.0f}%" for row, peak, ms in shares if row["name"] in ABOVE]
    axes.text(26, 118, "\n".join(["not shown:", *above]) if above else "", fontsize=8)
    axes.set(xlabel="peak memory, % of torch.compile's", ylabel="step time, % of torch.compile's", title=where)
    axes.set_xlim(25, 105)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The frontier as a picture.")
    parser.add_argument("--result", type=pathlib.Path, default=RESULT)
    parser.add_argument("--image", type=pathlib.Path, default=IMAGE)
    options = parser.parse_args(arguments)
    result = json.loads(options.result.read_text())
    draw(result["rows"], "Four Llama-3-8B-shaped layers, 2 x 8192 tokens, H200, one run", options.image)
    return 0


if __name__ == "__main__":
    sys.exit(main())
