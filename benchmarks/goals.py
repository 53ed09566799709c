"""The project's goals beside what was measured, one line each, and the README of the results.

    GOALS  <-- value(result) --  the file that benchmarks/results/manifest.json names for the goal's kind
    manifest.json, GOALS     --> benchmarks/results/README.md

    python benchmarks/goals.py                    # the goals as text
    python benchmarks/goals.py --try memory.h200=out/measured/memory.json    # as if that were the current file
    python benchmarks/goals.py --write            # benchmarks/results/README.md

Only the manifest decides which file is current: a new file counts when a person has named it there. A goal whose file
has no such number says so. Exit code 0 only if all goals are met, or after --write.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterable
from typing import Any

from measure import GIB, ROOT, format_columns

RESULTS = ROOT / "benchmarks" / "results"
NOT_KEPT = "the script was not kept"
HEAD = """# Results

`python benchmarks/goals.py --write` makes this page from `manifest.json`; a test compares. Each file's header has its
device, torch, triton, commit, date and shapes. [Findings](../../docs/findings.md) has what follows from them.
The script of an older file may be gone: git keeps it at the commit of the file.
"""
GOALS_HEAD = """
## Goals

A step is *met* by the fastest step of a run. Machines differ by about 1% from run to run.
"""


@dataclasses.dataclass(frozen=True)
class Goal:
    text: str
    kind: str  # of result: its name in manifest.json
    value: Callable[[Any], float]
    limit: float
    at_least: bool = False

    def met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


def named(rows: list[dict[str, Any]], by: str = "name") -> dict[str, dict[str, Any]]:
    return {row[by]: row for row in rows}


def row(variant: str, key: str) -> Callable[[Any], float]:
    return lambda result: float(named(result["rows"])[variant][key])


def gib(variant: str, key: str) -> Callable[[Any], float]:
    return lambda result: row(variant, key)(result) / GIB


def of_graphs(key: str, model: str) -> Callable[[Any], float]:
    """The float8 stack with CUDA graphs over the one without."""

    def ratio(result: Any) -> float:
        found = named([r for r in result["rows"] if r["model"] == model], by="variant")
        return float(found["float8 cudagraphs"][key] / found["float8"][key])

    return ratio


def offloaded(key: str, unit: float = 1) -> Callable[[Any], float]:
    return lambda result: float(named(result["offload"])["ours_offload"][key]) / unit


def of_row(variant: str, key: str, base: str, base_key: str | None = None) -> Callable[[Any], float]:
    """`key` of a row over `base_key` of the row `base`; the rows of a run of several GPUs are called by `row`."""

    def ratio(result: Any) -> float:
        found = named(result["rows"], by="row" if "row" in result["rows"][0] else "name")
        return float(found[variant][key] / found[base][base_key or key])

    return ratio


def best_of_8_bits(result: Any) -> float:
    names = (F8, "ours_float8_tensorwise", "ours_float8_blockwise", "ours_int8_128_power")
    return min(row(name, "ratio_to_stock")(result) for name in names)  # raises where one is missing


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


def most(values: Iterable[float]) -> float:
    """The largest; NaN if one is, which meets no goal."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def budgets(off: Callable[[dict[str, Any]], float]) -> Callable[[Any], float]:
    """The most of `off` over the budgets of a run."""

    def value(result: Any) -> float:
        return most(off(r) for r in result["rows"] if "budget" in r["kind"] and "ratio" in r)

    return value


def of_models(key: str, base: str, *, off: bool = False) -> Callable[[Any], float]:
    """The most of `key` over `base` of the budgets of models; with `off`, by how much that differs from 1."""

    def value(result: Any) -> float:
        ratios = [float(r[key] / r[base]) for r in result["rows"] if "budget_bytes" in r]
        return most(abs(ratio - 1) for ratio in ratios) if off else most(ratios)

    return value


def of_batch(result: Any, model: str, size: int) -> dict[str, Any]:
    """The row of a model at a batch size."""
    return {(row["model"], row.get("batch")): row for row in result["rows"]}[model, size]


F8, BLOCKS = "ours_float8_rowwise", "the stack's step over stock's"
GOALS = (
    Goal(f"float8 rowwise: {BLOCKS}", "memory.h200", row(F8, "ratio_to_stock"), 1.02),
    Goal("float8 rowwise: GiB at the peak of a step", "memory.h200", gib(F8, "peak_bytes"), 6.6),
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
            Goal(f"{hook}: {BLOCKS}", "memory.h200", row(name, "ratio_to_stock"), 1.02),
            Goal(f"{hook}: GiB at the peak of a step", "memory.h200", gib(name, "peak_bytes"), 6.6),
        )
    ),
    Goal(f"the fastest of these: {BLOCKS}", "memory.h200", best_of_8_bits, 1.01),
    Goal("float8 rowwise: compile time over stock's", "compile.h200", lambda r: float(r["ratio"]), 1.10),
    *(
        Goal(f"{hook}: error of gradients, {data}", "errors.cpu", error(hook, data), limit)
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
            f"slowest {'random' if random else 'other'} kernel over a copy, rows of {columns}", "kernels.h200",
            slowest(columns, random=random), 0.8, at_least=True,
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
                f"cold over warm start, {on}", f"warm_start.{on.lower()}",
                lambda r, clock=clock: float(r[f"cold_over_warm_{clock}"]["aot_hooks"]), 5, at_least=True,
            ),
            Goal(
                f"warm start over stock's, {on}", f"warm_start.{on.lower()}",
                lambda r, clock=clock: float(r[f"warm_over_stock_warm_{clock}"]), 1.1,
            ),
        )
    ),
    *(
        Goal(
            f"a call's host time over torch's trees, {size} parameters", "cudagraph_host.h200",
            lambda r, i=i: float(r["calls"][i]["ratio_to_torch_trees"]), limit,
        )
        for i, (size, limit) in enumerate(((2, 0.5), (16, 0.5), (200, 0.55)))
    ),
    *(
        Goal(f"the tree's own part over that of torch's, {size} parameters", "cudagraph_host.h200", own_part(i), 0.2)
        for i, size in enumerate((2, 16, 200))
    ),
    *(
        Goal(
            f"a training step of {depth} layers over torch's trees", "cudagraph_host.h200",
            lambda r, i=i: float(r["training"][i]["ratio_to_torch_trees"]), 0.7,
        )
        for i, depth in enumerate((4, 24))
    ),
    *(
        goal
        for kind, model, loss in (
            ("cudagraph_stack.h200", "Llama-shaped stack", "an eager loss"),
            ("cudagraph_stack_adamw.h200", "Llama-shaped stack, AdamW", "an eager loss and AdamW"),
            ("cudagraph_stack_compiled.h200", "Llama-shaped stack, loss compiled", "its loss"),
        )
        for goal in (
            Goal(
                f"float8 and {loss} with CUDA graphs: step over that without", kind,
                of_graphs("step_ms", model), 1.0,
            ),
            Goal(
                f"float8 and {loss} with CUDA graphs: reserved memory likewise", kind,
                of_graphs("reserved_bytes", model), 1.05,
            ),
        )
    ),
    Goal(
        "the same with expandable segments: reserved memory", "cudagraph_stack_expandable.h200",
        of_graphs("reserved_bytes", "Llama-shaped stack, loss compiled"), 1.05,
    ),
    *(
        Goal(
            f"a whole step of an MLP of {depth} layers as one graph, over torch's trees", "whole_step.h200",
            lambda r, name=f"mlp {depth}": max(
                row["ratio_to_torch_trees"]["whole"] for row in r["rows"] if row["model"] == name
            ), limit,
        )
        for depth, limit in ((4, 0.25), (24, 0.55))
    ),
    *(
        Goal(
            f"a whole step of {model} at batch {size}, over torch's trees", "whole_step.h200",
            lambda r, model=model, size=size: float(of_batch(r, model, size)["ratio_to_torch_trees"]), 0.9,
        )
        for model in ("GPT2", "ViT")
        for size in (1, 8)
    ),
    Goal(
        "a whole step of GPT2, its loss eager, with AdamW: reserved memory over that without graphs", "whole_step.h200",
        lambda r: float(of_batch(r, "GPT2, memory", 8)["ratio"]), 1.02,
    ),
    Goal("fuzzed programs with CUDA graphs", "fuzz.h200", lambda r: float(r["programs"]), 10_000, at_least=True),
    Goal("of these, with other results than eager mode", "fuzz.h200", lambda r: float(r["different"]), 0),
    Goal(
        "fuzzed programs on the simulator, with whole steps", "fuzz_whole_step.cpu", lambda r: float(r["programs"]),
        20_000, at_least=True,
    ),
    Goal("of these, with other results", "fuzz_whole_step.cpu", lambda r: float(r["different"]), 0),
    Goal(
        "fuzzed training programs as whole steps on CUDA", "fuzz_whole_step.h200", lambda r: float(r["programs"]),
        5_000, at_least=True,
    ),
    Goal("of these training programs, with other results", "fuzz_whole_step.h200", lambda r: float(r["different"]), 0),
    *(
        goal
        for what, kind, name, limit, ratio in (
            ("budget, 4 layers", "budget_4_layers.h200", "3.5GiB", 3.5, 1.03),
            ("exact budget, 4 layers", "budget.h200", "5.2GiB", 5.2, 1.04),
            ("budget, 16 layers", "budget_16_layers.h200", "8.3GiB", 8.3, 1.02),
            ("exact budget, 16 layers", "budget_16_layers.h200", "12GiB", 12, 1.06),
            ("exact budget, 16 layers", "budget_16_layers.h200", "10.2GiB", 10.2, 1.12),
        )
        for goal in (
            Goal(f"{what}, {name}: GiB at the peak of a step", kind, gib(name, "peak_bytes"), limit),
            Goal(f"{what}, {name}: step over stock's", kind, row(name, "ratio"), ratio),
        )
    ),
    Goal(
        "budgets: measured peak against predicted, share", "budget.h200",
        budgets(lambda r: float(abs(r["peak_bytes"] / r["predicted_peak_bytes"] - 1))), 0.03,
    ),
    Goal(
        "budgets: measured step against predicted, of stock's", "budget.h200",
        budgets(lambda r: float(abs(r["ratio"] - r["predicted_ratio"]))), 0.02,
    ),
    Goal(
        "budgets: peers below the frontier", "budget.h200", lambda r: float(len(r["peers_below_the_frontier"])), 0,
    ),
    Goal(
        "budgets of a Llama, a ViT, a T5: measured peak over the budget", "budget_models.h200",
        of_models("peak_bytes", "budget_bytes"), 1.0,
    ),
    Goal(
        "budgets of a Llama, a ViT, a T5: measured peak against predicted, share", "budget_models.h200",
        of_models("peak_bytes", "predicted_peak_bytes", off=True), 0.03,
    ),
    Goal(
        "budgets of a Llama, a ViT, a T5: error of gradients", "budget_models.h200",
        lambda result: most(float(r["error"]) for r in result["rows"]), 0.05,
    ),
    Goal(
        "budgets of a Llama, a ViT, a T5: step over predicted", "budget_models.h200",
        of_models("ratio", "predicted_ratio"), 1.02,
    ),
    Goal("offload: GiB sent", "offload.h200", offloaded("planned_bytes", GIB), 2.2, at_least=True),
    Goal(f"offload: {BLOCKS}", "offload.h200", row("ours_offload", "ratio_to_stock"), 1.03),
    Goal("offload: share of copy time hidden", "offload.h200", offloaded("hidden_share"), 0.9, at_least=True),
    *(
        goal
        for name in ("float8", "int8")
        for goal in (
            Goal(
                f"{name}, then offload: saved GiB on the device", "offload.h200",
                gib(f"ours_{name}_offload", "after_forward_bytes"), 3.0,
            ),
            Goal(
                f"{name}, then offload: {BLOCKS}", "offload.h200",
                row(f"ours_{name}_offload", "ratio_to_stock"), 1.04,
            ),
        )
    ),
    *(
        goal
        for how, kind in (
            ("FSDP2", "distributed_fsdp.h200"), ("tensor parallel", "distributed_tp.h200"),
            ("DDP", "distributed_ddp.h200"),
        )
        for goal in (
            Goal(f"{how}, two GPUs, float8: step over stock's", kind, of_row("float8", "ms", "stock"), 1.02),
            Goal(
                f"{how}, two GPUs, float8, then offload: step over stock's", kind,
                of_row("offload(then=float8)", "ms", "stock"), 1.03,
            ),
        )
    ),
    *(
        goal
        for how, kind in (
            ("FSDP2", "distributed_fsdp_pointwise.h200"), ("tensor parallel", "distributed_tp_pointwise.h200"),
        )
        for goal in (
            Goal(
                f"{how}, recompute_pointwise, float8: step over stock's", kind,
                of_row("float8 again", "ms", "stock"), 1.02,
            ),
            Goal(
                f"{how}, recompute_pointwise, float8: saved over stock's", kind,
                of_row("float8 again", "saved_gib", "stock"), 0.5,
            ),
            Goal(
                f"{how}, recompute_pointwise, float8, then offload: step over stock's", kind,
                of_row("offload(then=float8) again", "ms", "stock"), 1.03,
            ),
        )
    ),
    Goal(
        "FSDP2, two GPUs, float8, then offload: GiB sent", "distributed_fsdp.h200",
        lambda result: named(result["rows"], by="row")["offload(then=float8)"]["sent_gib"], 3.9, at_least=True,
    ),
    Goal(  # one graph of a rank's layers sent 2.98 GiB on two H100s (2026-11-27-a091e02)
        "tensor parallel, recompute_pointwise, float8, then offload: GiB sent", "distributed_tp_pointwise.h200",
        lambda result: named(result["rows"], by="row")["offload(then=float8) again"]["sent_gib"], 2.09, at_least=True,
    ),
    Goal(
        "FSDP2, two GPUs: measured peak over the budget", "distributed_fsdp.h200",
        of_row("budget", "peak_gib", "budget", "budget_gib"), 1.0,
    ),
    Goal(
        "FSDP2, two GPUs: measured peak over the predicted", "distributed_fsdp.h200",
        of_row("budget", "peak_gib", "budget", "predicted_gib"), 1.03,
    ),
    Goal(
        "FSDP2, two GPUs, CUDA graphs, which give up: step over stock's", "distributed_budget.h100",
        of_row("cudagraphs", "ms", "stock"), 1.0,
    ),
    Goal(
        "torchao's float8 training, packed: step over torchao's", "trainers_torchao.h200",
        of_row("float8_training_packed", "median_ms", "float8_training"), 1.02,
    ),
    Goal(
        "torchao's float8 training, packed: bytes over those saved", "trainers_torchao.h200",
        lambda result: (
            (packed := named(result["rows"])["float8_training_packed"]["metrics"])["aot_hooks/packed_mib"]
            / packed["aot_hooks/saved_mib"]
        ), 0.55,
    ),
)  # fmt: skip


def header(result: dict[str, Any]) -> dict[str, Any]:
    """Device, versions, commit and date of a result."""
    return dict(result.get("header", result.get("conditions", result)))


def current(results: pathlib.Path) -> dict[str, pathlib.Path]:
    """The file of each kind that `results`/manifest.json names; a kind that has none is not there."""
    named = json.loads((results / "manifest.json").read_text())["current"]
    return {kind: results / entry["file"] for kind, entry in named.items()}


def rows(files: dict[str, pathlib.Path]) -> list[list[str]]:
    """For each goal its text, limit, measured value, whether it is met, and where; `files` is what current() gives."""
    found = {kind: json.loads(path.read_text()) for kind, path in files.items()}
    table = []
    for goal in GOALS:
        limit = f"{'≥' if goal.at_least else '≤'} {goal.limit:g}"
        measured, met, where = "", "NO", "not measured"
        if goal.kind in found:
            try:
                value = goal.value(found[goal.kind])
                measured, met = f"{value:.4g}", "yes" if goal.met(value) else "NO"
                where = made_on(found[goal.kind])
            except (KeyError, IndexError, TypeError):  # a run of fewer variants, or of one that raised
                where = f"not in {files[goal.kind].name}"
        table.append([goal.text, limit, measured, met, where])
    return table


def made_on(result: dict[str, Any], *more: str) -> str:
    """Device, torch and commit of a result, then those of `more` that its header has."""
    top = header(result)
    torch, commit = top["torch"].split("+")[0], (top.get("commit") or "").removeprefix("just before ")[:7]
    parts = [top["device"], f"torch {torch}", commit, *(str(top[key])[:10] for key in more if key in top)]
    return ", ".join(part for part in parts if part)


def format_markdown(head: list[str], table: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *table]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def format_readme(results: pathlib.Path) -> str:
    """README.md of `results`: the current files, the goals, the history with the newest first."""
    manifest = json.loads((results / "manifest.json").read_text())

    def index(entries: dict[str, dict[str, str | None]]) -> str:
        table = []
        for name, entry in entries.items():
            command = f"`{entry['command']}`" if entry["command"] else NOT_KEPT
            where = made_on(json.loads((results / name).read_text()), "date")
            table.append([f"[{pathlib.Path(name).stem}]({name})", str(entry["shows"]), where, command])
        return format_markdown(["file", "what it shows", "measured on", "command"], table)

    now = {entry["file"]: entry for entry in manifest["current"].values()}
    goals = format_markdown(["goal", "limit", "measured", "met", "on"], rows(current(results)))
    dates = {name: str(header(json.loads((results / name).read_text()))["date"]) for name in manifest["history"]}
    past = {name: manifest["history"][name] for name in sorted(dates, key=dates.__getitem__, reverse=True)}
    return "\n".join(
        [HEAD, "## Current files", "", index(now), GOALS_HEAD, goals, "", "## History", "", index(past), ""]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--try", dest="tried", action="append", default=[], metavar="KIND=FILE", help="instead of the manifest's"
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/README.md")
    options = parser.parse_args(arguments)
    if options.write:
        (RESULTS / "README.md").write_text(format_readme(RESULTS))
        return 0
    files = current(RESULTS)
    for kind, _, path in (text.partition("=") for text in options.tried):
        if kind not in {goal.kind for goal in GOALS}:
            parser.error(f"no goal reads {kind!r}; goals read {', '.join(sorted({goal.kind for goal in GOALS}))}")
        files[kind] = pathlib.Path(path)
    table = rows(files)
    print(format_columns([["", "limit", "measured", "met", ""], *table]))
    return 0 if all(cells[3] == "yes" for cells in table) else 1


if __name__ == "__main__":
    sys.exit(main())
