"""What `convergence.py` measured, as a table and a plot, and docs/convergence.md made of both.

{"conditions": ..., "ways": {name: {"kept": ..., "runs": [...]}}} -->
    |--> summarize      numbers                       |--> plot        docs/images/convergence.png
    |--> format_table   markdown                      `--> write_report  docs/convergence.md, between its markers
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from typing import Any

__all__ = ["Summary", "format_table", "merged", "plot", "summarize", "write_report"]

BASELINE, NUDGED = "baseline", "baseline, nudged"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


@dataclasses.dataclass(frozen=True)
class Summary:
    """One row: final losses over the seeds, in nats a byte, and their differences from the baseline's."""

    name: str
    kept: float | None
    losses: tuple[float, ...]
    differences: tuple[float, ...]
    diverged_count: int


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of different seeds as one, under the first one's date.

    Raises:
        ValueError: they were not measured under the same conditions, or two have a seed in common.
    """
    apart = ("date", "seed_count")
    first, *others = results
    seeds = [{run["seed"] for run in result["ways"][BASELINE]["runs"]} for result in results]
    for other in others:
        for name, value in first["conditions"].items():
            if name not in apart and other["conditions"].get(name) != value:
                raise ValueError(f"{name} is {value!r} in one result and {other['conditions'].get(name)!r} in another")
    if sum(map(len, seeds)) != len(set().union(*seeds)):
        raise ValueError(f"expected other seeds in each result, got {', '.join(str(sorted(s)) for s in seeds)}")
    ways: dict[str, Any] = {}
    for result in results:
        for name, way in result["ways"].items():
            ways.setdefault(name, {"kept": way["kept"], "runs": []})["runs"] += way["runs"]
    return {"conditions": {**first["conditions"], "seed_count": sum(map(len, seeds))}, "ways": ways}


def summarize(result: dict[str, Any]) -> list[Summary]:
    """Rows in the order of the result. A seed whose baseline is missing has no difference."""
    ways = result["ways"]
    baseline = {run["seed"]: run["validation_loss"] for run in ways[BASELINE]["runs"]}
    return [
        Summary(
            name,
            way["kept"],
            tuple(run["validation_loss"] for run in way["runs"]),
            tuple(run["validation_loss"] - baseline[run["seed"]] for run in way["runs"] if run["seed"] in baseline),
            sum(run["diverged"] for run in way["runs"]),
        )
        for name, way in ways.items()
    ]


def format_table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| activations stored as | bytes kept | final loss | less the baseline's, same seed | diverged |",
        "|---|---|---|---|---|",
    ]
    for row in summarize(result):
        kept = f"{row.kept:.2f}" if row.kept else "1"
        loss, difference = f"{statistics.fmean(row.losses):.4f}", ""
        if len(row.losses) > 1:
            loss += f" ± {statistics.stdev(row.losses):.4f}"
        if row.name != BASELINE and row.differences:
            difference = f"{statistics.fmean(row.differences):+.4f}"
        if difference and len(row.differences) > 1:
            difference += f" ({min(row.differences):+.4f} to {max(row.differences):+.4f})"
        lines.append(f"| {row.name} | {kept} | {loss} | {difference} | {row.diverged_count} of {len(row.losses)} |")
    return "\n".join(lines)


def describe(result: dict[str, Any]) -> str:
    """The conditions, as a sentence."""
    c = result["conditions"]
    dtype = "bfloat16 autocast" if c["autocast"] else "float32"
    counts = {len(way["runs"]) for way in result["ways"].values()}
    few, many = min(counts), max(counts)
    seeds = f"{few} to {many} seeds" if few != many else f"{many} seed{'s' if many > 1 else ''}"
    return (
        f"{c['device']}, torch {c['torch']}, inner {c['inner']!r}, {dtype}: "
        f"{c['parameter_count'] / 1e6:.1f}M parameters ({c['layer_count']} layers of width {c['width']}), "
        f"{c['step_count']} steps of {c['batch']} × {c['sequence']} "
        f"bytes, {seeds}; commit {(c['commit'] or 'unknown')[:7]}."
    )


def plot(result: dict[str, Any], path: pathlib.Path) -> None:
    """Left the loss curves, right what they differ from the baseline's; means over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ways = result["ways"]
    step_count = result["conditions"]["step_count"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    baseline = {run["seed"]: run["losses"] for run in ways[BASELINE]["runs"]}
    for i, (name, way) in enumerate(ways.items()):
        runs = [run for run in way["runs"] if run["seed"] in baseline]
        curve = [statistics.fmean(points) for points in zip(*(run["losses"] for run in runs), strict=True)]
        # [seed][point]
        off = [[a - b for a, b in zip(run["losses"], baseline[run["seed"]], strict=True)] for run in runs]
        steps = [(point + 1) * step_count / len(curve) for point in range(len(curve))]
        style = {"label": name, "linewidth": 1.2, "color": f"C{i}"}
        if name in (BASELINE, NUDGED):
            style |= {"color": "black" if name == BASELINE else "grey", "linewidth": 2.5, "alpha": 0.5}
        left.plot(steps, curve, **style)
        if name != BASELINE:
            right.plot(steps, [statistics.fmean(points) for points in zip(*off, strict=True)], **style)
    left.set(xlabel="step", ylabel="training loss, nats a byte", title="Loss")
    right.set(xlabel="step", title="Loss less the baseline's, same seed and batches")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write_report(result: dict[str, Any], docs: pathlib.Path) -> list[str]:
    """Puts the table between the markers of `docs`/convergence.md, and draws the plot; returns lines that say so.

    Raises:
        ValueError: the page has no markers.
    """
    page, image = docs / "convergence.md", docs / "images" / "convergence.png"
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page}: expected one {BEGIN!r} and one {END!r}")
    before, rest = text.split(BEGIN)
    measured = "\n\n".join(
        ["", describe(result), format_table(result), "![loss curves](images/convergence.png)", ""]
    ).lstrip("\n")
    plot(result, image)
    page.write_text(f"{before}{BEGIN}\n{measured}{END}{rest.split(END)[1]}")
    return [f"wrote {page}", f"wrote {image}"]
