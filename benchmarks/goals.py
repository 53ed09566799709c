"""What this project holds itself to, beside what was measured: one line a goal, met or not.

    GOALS  <-- value(result) --  benchmarks/results/*.json, of each kind the newest

    python benchmarks/goals.py                    # as text
    python benchmarks/goals.py --markdown         # the table in benchmarks/results/README.md
    python benchmarks/goals.py --results out/measured   # what measure.py wrote

A goal that nothing was measured for says so. Exit code 0 only if all are met.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

from _measure import GIB, ROOT, format_columns

RESULTS = ROOT / "benchmarks" / "results"


@dataclasses.dataclass(frozen=True)
class Goal:
    text: str
    kind: str  # of result: how its file's name begins
    value: Callable[[Any], float]
    limit: float
    at_least: bool = False
    on: str = ""  # a part of the device's name, if it has to be that kind of machine

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


def row(variant: str, key: str) -> Callable[[Any], float]:
    return lambda result: next(float(r[key]) for r in result["rows"] if r["name"] == variant)


def gib(variant: str, key: str) -> Callable[[Any], float]:
    return lambda result: row(variant, key)(result) / GIB


def of_graphs(key: str, model: str) -> Callable[[Any], float]:
    """The float8 stack with CUDA graphs over the one without."""

    def ratio(result: Any) -> float:
        found = {r["variant"]: r for r in result["rows"] if r["model"] == model}
        return float(found["float8 cudagraphs"][key] / found["float8"][key])

    return ratio


def offloaded(key: str, unit: float = 1) -> Callable[[Any], float]:
    return lambda result: next(float(r[key]) for r in result["offload"] if r["name"] == "ours_offload") / unit


def best_of_8_bits(result: Any) -> float:
    names = (F8, "ours_float8_tensorwise", "ours_float8_blockwise", "ours_int8_128_power")
    return min(float(r["ratio_to_stock"]) for r in result["rows"] if r["name"] in names)


def error(hook: str, data: str) -> Callable[[Any], float]:
    """The mean over the seeds."""
    return lambda result: statistics.fmean(result["results"][hook]["errors"][data])


def slowest(columns: int, *, random: bool) -> Callable[[Any], float]:
    """Of the kernels that round at random, or of all others, the lowest bandwidth over that of a copy."""

    def value(result: Any) -> float:
        kernels = [k for k in result["results"] if k["shape"][1] == columns]
        return min(float(k["of_copy"]) for k in kernels if ("stochastic" in k["kernel"]) == random)

    return value


def own_part(size: int) -> Callable[[Any], float]:
    """The tree's own time, called by hand, over torch's: what is above the floor of either."""
    return lambda r: float(r["calls"][size]["own_part_us"]["tree"] / r["calls"][size]["own_part_us"]["torch_trees"])


F8, BLOCKS = "ours_float8_rowwise", "the stack's step over stock's"
GOALS = (
    Goal(f"float8 rowwise: {BLOCKS}", "memory", row(F8, "ratio_to_stock"), 1.02, on="H200"),
    Goal("float8 rowwise: GiB at the peak of a step", "memory", gib(F8, "peak_bytes"), 6.6, on="H200"),
    *(
        goal
        for hook, name in (
            ("int8(64)", "ours_int8"),
            ("int8(128)", "ours_int8_128"),
            ("int8(128, power of two)", "ours_int8_128_power"),
            ("int8(32, power of two)", "ours_int8_32_power"),
            ("int8(16, power of two)", "ours_int8_16_power"),
        )
        for goal in (
            Goal(f"{hook}: {BLOCKS}", "memory", row(name, "ratio_to_stock"), 1.02, on="H200"),
            Goal(f"{hook}: GiB at the peak of a step", "memory", gib(name, "peak_bytes"), 6.6, on="H200"),
        )
    ),
    Goal(f"the fastest of these: {BLOCKS}", "memory", best_of_8_bits, 1.01, on="H200"),
    Goal("float8 rowwise: compile time over stock's", "compile", lambda r: float(r["ratio"]), 1.10, on="H200"),
    Goal('live bytes in the backward, inner "aten"', "live_bytes", lambda r: float(r["ratio"]), 0.65),
    *(
        Goal(f"{hook}: error of gradients, {data}", "errors", error(hook, data), limit)
        for hook, limit in (
            ("int8(64)", 0.015),
            ("int8(128, power of two)", 0.015),
            ("int8(32, power of two)", 0.015),
            ("int8(16, power of two)", 0.015),
            ("float8(e4m3fn, rowwise)", 0.015),
            ("int4(32, stochastic)", 0.2),
        )
        for data in ("normal", "outliers")
    ),
    *(
        Goal(
            f"slowest {'random' if random else 'other'} kernel over a copy, rows of {columns}", "kernels",
            slowest(columns, random=random), 0.8, at_least=True, on="H200",
        )
        for columns in (4096, 14336)
        for random in (False, True)
    ),
    *(
        goal
        # seconds of the clock, except on the CPU, where results come from machines with other work
        for on, clock in (("CPU", "cpu_s"), ("H200", "wall_s"))
        for goal in (
            Goal(
                f"cold over warm start, {on}", "warm_start",
                lambda r, clock=clock: float(r[f"cold_over_warm_{clock}"]["aot_hooks"]), 5, at_least=True, on=on,
            ),
            Goal(
                f"warm start over stock's, {on}", "warm_start",
                lambda r, clock=clock: float(r[f"warm_over_stock_warm_{clock}"]), 1.1, on=on,
            ),
        )
    ),
    *(
        Goal(
            f"a call's host time over torch's trees, {size} parameters", "cudagraph_host",
            lambda r, i=i: float(r["calls"][i]["ratio_to_torch_trees"]), limit,
        )
        for i, (size, limit) in enumerate(((2, 0.5), (16, 0.5), (200, 0.55)))
    ),
    *(
        Goal(f"the tree's own part over that of torch's, {size} parameters", "cudagraph_host", own_part(i), 0.2)
        for i, size in enumerate((2, 16, 200))
    ),
    *(
        Goal(
            f"a training step of {depth} layers over torch's trees", "cudagraph_host",
            lambda r, i=i: float(r["training"][i]["ratio_to_torch_trees"]), 0.7,
        )
        for i, depth in enumerate((4, 24))
    ),
    *(
        goal
        for model, loss in (
            ("Llama-shaped stack", "an eager loss"),
            ("Llama-shaped stack, AdamW", "an eager loss and AdamW"),
            ("Llama-shaped stack, loss compiled", "its loss"),
        )
        for goal in (
            Goal(
                f"float8 and {loss} with CUDA graphs: step over that without", "cudagraph_stack",
                of_graphs("step_ms", model), 1.0,
            ),
            Goal(
                f"float8 and {loss} with CUDA graphs: reserved memory likewise", "cudagraph_stack",
                of_graphs("reserved_bytes", model), 1.05,
            ),
        )
    ),
    Goal(
        "the same with expandable segments: reserved memory", "cudagraph_expandable",
        of_graphs("reserved_bytes", "Llama-shaped stack, loss compiled"), 1.05,
    ),
    Goal("fuzzed programs with CUDA graphs", "fuzz", lambda r: float(r["programs"]), 10_000, at_least=True, on="H200"),
    Goal("of these, with other results than eager mode", "fuzz", lambda r: float(r["different"]), 0, on="H200"),
    Goal("offload: GiB sent", "offload", offloaded("planned_bytes", GIB), 2.2, at_least=True),
    Goal(f"offload: {BLOCKS}", "offload", row("ours_offload", "ratio_to_stock"), 1.03),
    Goal("offload: share of copy time hidden", "offload", offloaded("hidden_share"), 0.9, at_least=True),
    *(
        goal
        for name in ("float8", "int8")
        for goal in (
            Goal(
                f"{name}, then offload: saved GiB on the device", "offload",
                gib(f"ours_{name}_offload", "after_forward_bytes"), 3.0,
            ),
            Goal(f"{name}, then offload: {BLOCKS}", "offload", row(f"ours_{name}_offload", "ratio_to_stock"), 1.04),
        )
    ),
)  # fmt: skip


def newest(goal: Goal, results: pathlib.Path) -> tuple[dict[str, Any], float] | None:
    """The header of the newest result that has this goal's value, and the value; None if there is none."""
    found = []
    for path in sorted(results.glob(f"{goal.kind}*.json")):
        result = json.loads(path.read_text())
        header = result.get("header", result.get("conditions", result))
        try:
            if goal.on in header["device"]:
                found.append((header, goal.value(result)))
        except (KeyError, IndexError, StopIteration, TypeError):
            continue  # a result of fewer variants, or of one that raised
    return max(found, key=lambda one: str(one[0]["date"]), default=None)


def rows(results: pathlib.Path) -> list[list[str]]:
    table = []
    for goal in GOALS:
        limit = f"{'≥' if goal.at_least else '≤'} {goal.limit:g}"
        measured, met, where = "", "NO", "not measured"
        if (found := newest(goal, results)) is not None:
            header, value = found
            measured, met = f"{value:.4g}", "yes" if goal.met(value) else "NO"
            where = f"{header['device']}, torch {header['torch'].split('+')[0]}, {header['commit'][:7]}"
        table.append([goal.text, limit, measured, met, where])
    return table


def format_markdown(table: list[list[str]]) -> str:
    lines = ["| goal | limit | measured | met | on |", "|---|---|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(cells)} |" for cells in table])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="a folder of JSON files")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    table = rows(options.results)
    print(
        format_markdown(table) if options.markdown else format_columns([["", "limit", "measured", "met", ""], *table])
    )
    return 0 if all(cells[3] == "yes" for cells in table) else 1


if __name__ == "__main__":
    sys.exit(main())
