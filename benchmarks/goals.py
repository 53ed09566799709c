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


def of_batch(model: str, size: int, key: str) -> Callable[[Any], float]:
    """`key` of the row of a model at a batch size."""
    return lambda result: float({(r["model"], r.get("batch")): r for r in result["rows"]}[model, size][key])


def of_rows(value: Callable[[dict[str, dict[str, Any]]], float], by: str = "row") -> Callable[[Any], float]:
    """`value` of the rows of a result, by name."""
    return lambda result: float(value(named(result["rows"], by)))


def mlp_over_trees(depth: int) -> Callable[[Any], float]:
    def value(result: Any) -> float:
        rows = [row for row in result["rows"] if row["model"] == f"mlp {depth}"]
        return max(float(row["ratio_to_torch_trees"]["whole"]) for row in rows)

    return value


def packed_share(rows: dict[str, dict[str, Any]]) -> float:
    metrics = rows["float8_training_packed"]["metrics"]
    return float(metrics["aot_hooks/packed_mib"] / metrics["aot_hooks/saved_mib"])


def goals(kind: str, *table: tuple[str, Callable[[Any], float], float], at_least: bool = False) -> list[Goal]:
    """The goals of one kind of result: text, value, and what it must be at most, or at least."""
    return [Goal(text, kind, value, limit, at_least) for text, value, limit in table]


F8, BLOCKS, STEP = "ours_float8_rowwise", "the stack's step over stock's", "step over stock's"
EIGHT_BITS = {
    "float8 rowwise": F8,
    "int8(64)": "ours_int8",
    "int8(128)": "ours_int8_128",
    "int8(128, power of two)": "ours_int8_128_power",
    "int8(32, power of two)": "ours_int8_32_power",
    "int8(16, power of two)": "ours_int8_16_power",
}
ERRORS = {
    "int8(64)": 0.015,
    "int8(128, power of two)": 0.015,
    "int8(32, power of two)": 0.015,
    "int8(16, power of two)": 0.015,
    "float8(e4m3fn, rowwise)": 0.015,
    "int4(32, stochastic)": 0.2,
}
CAPTURED = {  # by kind of result: the loss, and the row's model
    "cudagraph_stack.h200": ("an eager loss", "Llama-shaped stack"),
    "cudagraph_stack_adamw.h200": ("an eager loss and AdamW", "Llama-shaped stack, AdamW"),
    "cudagraph_stack_compiled.h200": ("its loss", "Llama-shaped stack, loss compiled"),
}
BUDGETS = (  # what, kind of result, row, GiB, step over stock's
    ("budget, 4 layers", "budget_4_layers.h200", "3.5GiB", 3.5, 1.03),
    ("exact budget, 4 layers", "budget.h200", "5.2GiB", 5.2, 1.04),
    ("budget, 16 layers", "budget_16_layers.h200", "8.3GiB", 8.3, 1.02),
    ("exact budget, 16 layers", "budget_16_layers.h200", "12GiB", 12, 1.06),
    ("exact budget, 16 layers", "budget_16_layers.h200", "10.2GiB", 10.2, 1.12),
)
PARALLEL = {"FSDP2": "distributed_fsdp", "tensor parallel": "distributed_tp", "DDP": "distributed_ddp"}
OFFLOADED = "offload(then=float8)"
MODELS = "budgets of a Llama, a ViT, a T5"


def _one_gpu() -> list[Goal]:
    found = []
    for hook, name in EIGHT_BITS.items():
        step, peak = row(name, "ratio_to_stock"), gib(name, "peak_bytes")
        found += goals(
            "memory.h200", (f"{hook}: {BLOCKS}", step, 1.02), (f"{hook}: GiB at the peak of a step", peak, 6.6)
        )
    found += goals("memory.h200", (f"the fastest of these: {BLOCKS}", best_of_8_bits, 1.01))
    found += goals("compile.h200", ("float8 rowwise: compile time over stock's", lambda r: float(r["ratio"]), 1.10))
    for hook, limit in ERRORS.items():
        for data in ("normal", "outliers"):
            found += goals("errors.cpu", (f"{hook}: error of gradients, {data}", error(hook, data), limit))
    for columns in (4096, 14336):
        for random in (False, True):
            text = f"slowest {'random' if random else 'other'} kernel over a copy, rows of {columns}"
            found += goals("kernels.h200", (text, slowest(columns, random=random), 0.8), at_least=True)
    # seconds of the clock, except on the CPU, where results come from machines with other work
    for on, clock in (("CPU", "cpu_s"), ("H200", "wall_s")):
        kind, cold, warm = f"warm_start.{on.lower()}", f"cold_over_warm_{clock}", f"warm_over_stock_warm_{clock}"
        ours = (f"cold over warm start, {on}", lambda r, cold=cold: float(r[cold]["aot_hooks"]), 5)
        found += goals(kind, ours, at_least=True)
        found += goals(kind, (f"warm start over stock's, {on}", lambda r, warm=warm: float(r[warm]), 1.1))
    return found


def over_trees(part: str, i: int) -> Callable[[Any], float]:
    """The ratio to torch's trees of a row of bench_cudagraph_host.py: of its "calls", or of its "training"."""
    return lambda result: float(result[part][i]["ratio_to_torch_trees"])


def _cuda_graphs() -> list[Goal]:
    found, host = [], "cudagraph_host.h200"
    for i, (size, limit) in enumerate(((2, 0.5), (16, 0.5), (200, 0.55))):
        text = f"a call's host time over torch's trees, {size} parameters"
        found += goals(host, (text, over_trees("calls", i), limit))
    for i, size in enumerate((2, 16, 200)):
        found += goals(host, (f"the tree's own part over that of torch's, {size} parameters", own_part(i), 0.2))
    for i, depth in enumerate((4, 24)):
        found += goals(host, (f"a training step of {depth} layers over torch's trees", over_trees("training", i), 0.7))
    for kind, (loss, model) in CAPTURED.items():
        text = f"float8 and {loss} with CUDA graphs"
        found += goals(kind, (f"{text}: step over that without", of_graphs("step_ms", model), 1.0))
        found += goals(kind, (f"{text}: reserved memory likewise", of_graphs("reserved_bytes", model), 1.05))
    expandable = of_graphs("reserved_bytes", "Llama-shaped stack, loss compiled")
    text = "the same with expandable segments: reserved memory"
    found += goals("cudagraph_stack_expandable.h200", (text, expandable, 1.05))
    for depth, limit in ((4, 0.25), (24, 0.55)):
        text = f"a whole step of an MLP of {depth} layers as one graph, over torch's trees"
        found += goals("whole_step.h200", (text, mlp_over_trees(depth), limit))
    for model in ("GPT2", "ViT"):
        for size in (1, 8):
            text = f"a whole step of {model} at batch {size}, over torch's trees"
            found += goals("whole_step.h200", (text, of_batch(model, size, "ratio_to_torch_trees"), 0.9))
    text = "a whole step of GPT2, its loss eager, with AdamW: reserved memory over that without graphs"
    found += goals("whole_step.h200", (text, of_batch("GPT2, memory", 8, "ratio"), 1.02))
    for kind, programs, different, count in (
        ("fuzz.h200", "fuzzed programs with CUDA graphs", "of these, with other results than eager mode", 10_000),
        (
            "fuzz_whole_step.cpu",
            "fuzzed programs on the simulator, with whole steps",
            "of these, with other results",
            20_000,
        ),
        (
            "fuzz_whole_step.h200",
            "fuzzed training programs as whole steps on CUDA",
            "of these training programs, with other results",
            5_000,
        ),
    ):
        found += goals(kind, (programs, lambda r: float(r["programs"]), count), at_least=True)
        found += goals(kind, (different, lambda r: float(r["different"]), 0))
    return found


def _budgets() -> list[Goal]:
    found = []
    for what, kind, name, most_gib, ratio in BUDGETS:
        found += goals(kind, (f"{what}, {name}: GiB at the peak of a step", gib(name, "peak_bytes"), most_gib))
        found += goals(kind, (f"{what}, {name}: {STEP}", row(name, "ratio"), ratio))
    return [
        *found,
        *goals(
            "budget.h200",
            (
                "budgets: measured peak against predicted, share",
                budgets(lambda r: float(abs(r["peak_bytes"] / r["predicted_peak_bytes"] - 1))),
                0.03,
            ),
            (
                "budgets: measured step against predicted, of stock's",
                budgets(lambda r: float(abs(r["ratio"] - r["predicted_ratio"]))),
                0.02,
            ),
            ("budgets: peers below the frontier", lambda r: float(len(r["peers_below_the_frontier"])), 0),
        ),
        *goals(
            "budget_models.h200",
            (f"{MODELS}: measured peak over the budget", of_models("peak_bytes", "budget_bytes"), 1.0),
            (
                f"{MODELS}: measured peak against predicted, share",
                of_models("peak_bytes", "predicted_peak_bytes", off=True),
                0.03,
            ),
            (f"{MODELS}: error of gradients", lambda r: most(float(row["error"]) for row in r["rows"]), 0.05),
            (f"{MODELS}: step over predicted", of_models("ratio", "predicted_ratio"), 1.02),
        ),
    ]


def _offload() -> list[Goal]:
    found = goals("offload.h200", ("offload: GiB sent", offloaded("planned_bytes", GIB), 2.2), at_least=True)
    found += goals("offload.h200", (f"offload: {BLOCKS}", row("ours_offload", "ratio_to_stock"), 1.03))
    hidden = ("offload: share of copy time hidden", offloaded("hidden_share"), 0.9)
    found += goals("offload.h200", hidden, at_least=True)
    for name in ("float8", "int8"):
        way = f"ours_{name}_offload"
        text = f"{name}, then offload"
        found += goals(
            "offload.h200",
            (f"{text}: saved GiB on the device", gib(way, "after_forward_bytes"), 3.0),
            (f"{text}: {BLOCKS}", row(way, "ratio_to_stock"), 1.04),
        )
    return found


def _processes() -> list[Goal]:
    found: list[Goal] = []
    for how, kind in PARALLEL.items():
        found += goals(
            f"{kind}.h200",
            (f"{how}, two GPUs, float8: {STEP}", of_row("float8", "ms", "stock"), 1.02),
            (f"{how}, two GPUs, float8, then offload: {STEP}", of_row(OFFLOADED, "ms", "stock"), 1.03),
        )
    for how in ("FSDP2", "tensor parallel"):
        found += goals(
            f"{PARALLEL[how]}_pointwise.h200",
            (f"{how}, recompute_pointwise, float8: {STEP}", of_row("float8 again", "ms", "stock"), 1.02),
            (
                f"{how}, recompute_pointwise, float8: saved over stock's",
                of_row("float8 again", "saved_gib", "stock"),
                0.5,
            ),
            (
                f"{how}, recompute_pointwise, float8, then offload: {STEP}",
                of_row(f"{OFFLOADED} again", "ms", "stock"),
                1.03,
            ),
        )
    sent, fsdp = of_rows(lambda rows: rows[OFFLOADED]["sent_gib"]), "distributed_fsdp.h200"
    found += goals(fsdp, ("FSDP2, two GPUs, float8, then offload: GiB sent", sent, 3.9), at_least=True)
    # one graph of a rank's layers sent 2.98 GiB on two H100s (2026-11-27-a091e02)
    sent = of_rows(lambda rows: rows[f"{OFFLOADED} again"]["sent_gib"])
    text = "tensor parallel, recompute_pointwise, float8, then offload: GiB sent"
    found += goals("distributed_tp_pointwise.h200", (text, sent, 2.09), at_least=True)
    over = "FSDP2, two GPUs: measured peak over the"
    found += goals(
        fsdp,
        (f"{over} budget", of_row("budget", "peak_gib", "budget", "budget_gib"), 1.0),
        (f"{over} predicted", of_row("budget", "peak_gib", "budget", "predicted_gib"), 1.03),
    )
    captured = ("FSDP2, two GPUs, CUDA graphs, which give up: " + STEP, of_row("cudagraphs", "ms", "stock"), 1.0)
    torchao = "torchao's float8 training, packed"
    packed = of_row("float8_training_packed", "median_ms", "float8_training")
    return [
        *found,
        *goals("distributed_budget.h100", captured),
        *goals(
            "trainers_torchao.h200",
            (f"{torchao}: step over torchao's", packed, 1.02),
            (f"{torchao}: bytes over those saved", of_rows(packed_share, by="name"), 0.55),
        ),
    ]


def _whole_steps() -> list[Goal]:
    """Budgets of a step with a real vocabulary; a step of several GPUs as one graph."""

    def of_way(way: str, key: str, unit: float = 1.0) -> Callable[[Any], float]:
        return lambda result: float(named(result["rows"], by="way")[way][key]) / unit

    def over_budget(result: Any) -> float:
        return most(
            r["peak_bytes"] / r["budget_bytes"] for r in result["rows"] if "peak_bytes" in r and "budget_bytes" in r
        )

    model = "a Llama with 128,256 words, 8192 tokens"
    found = goals(
        "real_step.h200",
        (f"{model}: budget of checkpointing's peak: {STEP}", of_way("budget as checkpointing", "ratio"), 1.015),
        (f"{model}: budget of 12.3 GiB: {STEP}", of_way("budget 12.3GiB", "ratio"), 1.005),
        (f"{model}: measured peak over the budget", over_budget, 1.0),
    )
    lora = "LoRA on 8 blocks of 8B's shape, offload with float8, chunks and tiles"

    def of_tokens(way: str, tokens: int) -> Callable[[Any], dict[str, Any]]:
        return lambda result: next(r for r in result["rows"] if (r["way"], r["tokens"]) == (way, tokens))

    def slope(result: Any) -> float:
        """MB a token."""
        short, long = (of_tokens("chunk_tile_offload", tokens)(result)["peak_bytes"] for tokens in (32768, 65536))
        return float(long - short) / 32768 / 1e6

    def of_checkpointing(result: Any) -> float:
        ways = "chunk_tile_offload", "chunk_checkpointing"
        return most(
            of_tokens(ways[0], tokens)(result)["ms"] / of_tokens(ways[1], tokens)(result)["ms"]
            for tokens in (32768, 65536)
        )

    def without_tiles(result: Any) -> float:
        return float(
            of_tokens("chunk_offload", 32768)(result)["ms"] / of_tokens("chunk_checkpointing", 32768)(result)["ms"]
        )

    found += goals(
        "stack_float8.h200",
        ("float8 rowwise: GiB after the forward", gib("ours_float8_rowwise", "after_forward_bytes"), 4.6),
        (f"float8 rowwise: {STEP}", row("ours_float8_rowwise", "ratio_to_stock"), 1.005),
    )
    found += goals(
        "real_step_lora.h200",
        (f"{lora}: MB a token from 32,768 to 65,536", slope, 0.13),
        (f"{lora}: step over checkpointing's", of_checkpointing, 1.0),
        ("the same without tiles, 32,768 tokens: step over checkpointing's", without_tiles, 0.85),
    )
    fsdp = "FSDP2, two GPUs, budget of"
    over = of_row("budget as checkpointing", "peak_gib", "checkpointing")
    found += goals(
        "distributed_budgets.h200",
        (f"{fsdp} checkpointing's peak: {STEP}", of_row("budget as checkpointing", "ms", "stock"), 1.03),
        (f"{fsdp} checkpointing's peak: peak over it", over, 1.0),
        (f"{fsdp} half of stock's peak: {STEP}", of_row("budget", "ms", "stock"), 1.01),
        (f"{fsdp} a quarter of stock's peak: {STEP}", of_row("tight budget", "ms", "stock"), 1.02),
    )
    experts = "eight blocks of experts, budget of checkpointing's peak"
    found += goals(
        "moe_step.h200",
        (f"{experts}: {STEP}", of_row("budget as checkpointing", "ms", "stock"), 1.05),
        (f"{experts}: peak over it", of_row("budget as checkpointing", "peak_gib", "checkpointing"), 1.0),
    )
    loss = "a last layer with its loss, in chunks"
    in_time = of_rows(lambda rows: rows["chunk True"]["ms"] / rows["compiled"]["ms"], by="way")
    found += goals(
        "loss.h200",
        (f"{loss}: GiB over inputs and results", of_way("chunk True", "peak_over_results_bytes", 2**30), 1.0),
        (f"{loss}: time over that of whole logits", in_time, 1.05),
    )
    world = "a world model's step in one graph"

    def of_kernels(way: str) -> Any:
        """The time of a step over that of the kernels in its graph, by the profiler."""
        return lambda r: r["rows"][0]["us"][way] / r["rows"][0]["in_graph"][way]["us"]

    found += goals(
        "world.h200",
        (f"{world}: over its kernels' time", of_kernels("whole"), 1.2),
        (f"{world}, compiled: over its kernels' time", of_kernels("whole_compiled"), 1.2),
        (f"{world}: over the kernels of eager mode", lambda r: r["rows"][0]["ratio_to_kernels"]["whole"], 1.2),
    )
    found += goals("first_number.h200", ("seconds from a clone to the first own number", lambda r: r["all_s"], 120))
    whole = "a whole step of FSDP2 in one graph, two GPUs"
    found += goals(
        "step_ranks.h200",
        (f"{whole}: over no graphs", of_row("fsdp.whole", "ms", "fsdp.eager"), 0.6),
        (f"{whole}: over graphs of forward and backward", of_row("fsdp.whole", "ms", "fsdp.graph"), 0.8),
        (f"{whole}: GiB reserved over no graphs", of_row("fsdp.whole", "reserved_bytes", "fsdp.eager"), 1.05),
    )
    same = of_rows(lambda rows: float(rows["check.fsdp.adamw"]["bit_for_bit"]))
    return found + goals("step_ranks.h200", (f"{whole}: bit for bit as in eager mode", same, 1.0), at_least=True)


GOALS = (*_one_gpu(), *_cuda_graphs(), *_budgets(), *_offload(), *_processes(), *_whole_steps())


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
