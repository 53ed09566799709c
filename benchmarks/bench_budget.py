"""What `aot_hooks.budget` promises, and what then happens: peak and step time for budgets from the least to none.

stock --plan--> its peak; the lowest peak                  predicted
  for each budget in between, each peer: compile, warm up  predicted peak and time, from the plan; measured peak
  each round: every row in random order                    measured time

Each row has a process of its own, so that several compile at a time. While times are taken one of them runs.

python benchmarks/bench_budget.py --json budget.json                  # a CUDA machine with 40 GiB
python benchmarks/bench_budget.py --small                             # shows that it runs
python benchmarks/bench_budget.py --count 0 --layers 16 --budgets 8.3GiB --exact 12GiB,10.2GiB
python benchmarks/bench_budget.py --plot budget.json                  # no run: docs/images/frontier.png from a result
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import math
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
from bench_memory import Bench
from measure import (
    ANYWHERE,
    GIB,
    MIB,
    ROOT,
    Served,
    conditions,
    default_device,
    format_columns,
    measure_bytes,
    number,
    parser_of,
    release,
    write,
)
from ways import WAYS, Way, patched

import aot_hooks
from aot_hooks.graphs.speeds import measured_rates
from aot_hooks.planning.budget import ALLOWED


class SumOf(torch.autograd.Function):
    """The sum, with a gradient that only autograd holds: `backward(ones)` would hold it to the end of the backward."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.dtype = y.shape, y.dtype
        return y.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.ones(ctx.shape, dtype=ctx.dtype, device=grad.device)


class WholeStep(Bench):
    """A step of the stack alone: a loss outside of the compiled function would take memory that no plan knows of."""

    def forward(self, way: Way, function: Any) -> Any:
        with way.context():
            return function(self.x)

    def backward(self, out: Any) -> None:
        SumOf.apply(out).backward()


NO_HOOKS = "no hooks"
EXACT = ("recompute", "lossless", "offload")
PEERS = (
    *(f"budget_{share}" for share in (0.1, 0.3, 0.5, 0.7, 0.9)),
    "checkpoint_blocks",
    "torch_inlined_float8",
    "inductor_float8_pass",
    "inductor_offload",
    "save_on_cpu",
    "ours_float8_rowwise",
    "ours_offload",
    "ours_float8_offload",
    "ours_int8_offload",
)
Row = dict[str, Any]


def named_rows(bench: WholeStep, options: argparse.Namespace) -> list[tuple[str, str, Any]]:
    """Kind, name and policy of each row: no budget first, given ones, and those between the lowest peak and that
    without hooks; then peers."""
    allow = tuple(options.allow.split(","))

    def budget(peak: str, allow: tuple[str, ...]) -> Any:
        return aot_hooks.budget(peak, allow=allow, max_error=options.max_error)

    rows: list[tuple[str, str, Any]] = [(NO_HOOKS, NO_HOOKS, aot_hooks.policies.everything(aot_hooks.KEEP))]
    rows += [("budget", peak, budget(peak, allow)) for peak in options.budgets.split(",") if peak]
    rows += [("exact budget", peak, budget(peak, EXACT)) for peak in options.exact.split(",") if peak]
    if options.count > 1:
        lowest = aot_hooks.budget(max_slowdown=float("inf"), allow=allow, max_error=options.max_error)
        least, most = 1.01 * _planned_peak(bench, lowest), _planned_peak(bench, aot_hooks.KEEP)
        peaks = [int(least + k / (options.count - 1) * (most - least)) for k in range(options.count)]
        rows += [("budget", f"{peak / MIB:.1f} MiB", budget(f"{peak}B", allow)) for peak in peaks]
    return rows + [("peer", name, None) for name in options.peers.split(",") if name]


def _planned_peak(bench: WholeStep, policy: Any) -> int:
    return aot_hooks.plan(bench.stack, bench.x, policy=policy, inner=bench.inner).peak_bytes


def serve(connection: Any, options: argparse.Namespace, kind: str, name: str, policy: Any) -> None:
    """A row in a process of its own: answers "rates" with those of the device that plans are made with, "compile" with
    what is known of it then, "time" with the ms of a step, "profile" with its kernels."""
    bench = WholeStep(options)
    way = WAYS[name] if policy is None else Way("aot_hooks", functools.partial(aot_hooks.saved_tensors_policy, policy))
    connection.send("ready")
    function = None
    with patched(way):
        while (command := connection.recv()) != "stop":
            try:
                if function is None and command != "rates":
                    function = way.compile(bench.stack, bench.inner)
                if command == "rates":
                    answer: Any = {"rates_per_s": dataclasses.asdict(measured_rates(bench.device))}
                elif command == "compile":
                    answer = _first_steps(bench, way, function, kind)
                elif command == "profile":
                    answer = _kernels(bench, way, function)
                else:
                    answer = _step_ms(bench, way, function)
            except Exception as error:
                answer = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
            bench.clear()
            release(bench.device)
            connection.send(answer)


def _first_steps(bench: WholeStep, way: Way, function: Any, kind: str) -> Row:
    began = time.perf_counter()
    for _ in range(3):
        bench.step(way, function)
    bench.synchronize()
    row: Row = {"first_steps_s": time.perf_counter() - began}
    bench.clear()
    gc.collect()
    measured, _ = measure_bytes(lambda: bench.forward(way, function), bench.backward, bench.device)
    row |= {"peak_bytes": measured.peak, "saved_bytes": measured.after_forward}
    if kind == NO_HOOKS:
        row |= {"predicted_peak_bytes": _planned_peak(bench, aot_hooks.KEEP), "predicted_ratio": 1.0}
    elif kind != "peer":
        plan = [p for p in aot_hooks.last_plans(function) if p.live_after][-1]  # compiled twice if it was over
        row |= {"predicted_peak_bytes": plan.peak_bytes, "predicted_ratio": plan.step_ratio, "means": _means(plan)}
    return row


def _step_ms(bench: WholeStep, way: Way, function: Any) -> float:
    """Of two steps, queued without a pause, so that a GPU does not wait for Python. The steps before do not count."""
    bench.step(way, function)
    if bench.device.type != "cuda":
        began = time.perf_counter()
        bench.step(way, function)
        return (time.perf_counter() - began) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    bench.step(way, function)
    start.record()
    for _ in range(2):
        bench.step(way, function)
    end.record()
    bench.synchronize()
    return start.elapsed_time(end) / 2


def _kernels(bench: WholeStep, way: Way, function: Any) -> Row:
    """What the GPU does in a step, by the kernel's name: how often, and the ms of all together."""
    for _ in range(2):
        bench.step(way, function)
    bench.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        bench.step(way, function)
        bench.synchronize()
    found = [one for one in profile.key_averages() if one.self_device_time_total]
    return {one.key: [one.count, one.self_device_time_total / 1e3] for one in found}


def measure(
    rows: list[tuple[str, str, Any]], options: argparse.Namespace, save: Callable[[list[Row]], None]
) -> list[Row]:
    """All rows, each in a process of its own: `options.jobs` of them compile at a time, and one runs when times are
    taken. `save` gets the rows whenever one is ready."""
    deadline = time.monotonic() + options.seconds
    results: list[Row] = [
        {"name": name, "kind": kind, "policy": "" if policy is None else repr(policy)} for kind, name, policy in rows
    ]
    served = [(Served(serve, options, *row), result) for row, result in zip(rows, results, strict=True)]
    for process, _ in served:
        process.answer()
    if options.device == "cuda":  # one after the other, while no other process uses the device or the link to it
        for process, result in served:
            if result["kind"] != "peer":
                _add(result, process.answer("rates"))
    ready = _compile(served, options.jobs, deadline, lambda: save(results))
    _take_times(ready, results[0], options.rounds, lambda: save(results))
    if options.profile:
        for process, result in ready:
            result["kernels"] = process.answer("profile")
        save(results)
    for process, _ in served:
        process.send("stop")
    return results


def _add(result: Row, answer: Any) -> None:
    result |= answer if isinstance(answer, dict) else {"error": answer}


def _compile(
    served: list[tuple[Served, Row]], jobs: int, deadline: float, save: Callable[[], None]
) -> list[tuple[Served, Row]]:
    """Compiles `jobs` rows at a time until `deadline`; returns those that run."""
    waiting, compiling, ready = list(served), [], []
    while waiting or compiling:
        while waiting and len(compiling) < jobs:
            compiling.append(waiting.pop(0))
            compiling[-1][0].send("compile")
        left = max(0.0, deadline - time.monotonic())
        done = wait([process.connection for process, _ in compiling], None if math.isinf(left) else left)
        if not done:
            for _, result in (*compiling, *waiting):
                result["error"] = "not compiled: out of time"
            break
        for process, result in [one for one in compiling if one[0].connection in done]:
            _add(result, process.answer())
            compiling.remove((process, result))
            ready += [] if "error" in result else [(process, result)]
            save()
    return ready


def _take_times(ready: list[tuple[Served, Row]], stock: Row, rounds: int, save: Callable[[], None]) -> None:
    """Each row once a round, in an order drawn anew."""
    order = random.Random(0)
    times: list[list[float]] = [[] for _ in ready]
    for _ in range(rounds):
        for i in order.sample(range(len(ready)), len(ready)):
            process, result = ready[i]
            answer = "" if "error" in result else process.answer("time")
            if isinstance(answer, str):
                result["error"] = result.get("error", answer)
            else:
                times[i].append(answer)
        for (_, result), own in zip(ready, times, strict=True):
            if "error" not in result:
                result |= {"min_ms": min(own), "median_ms": statistics.median(own), "rounds": len(own)}
        for result in (result for _, result in ready if "min_ms" in result and "min_ms" in stock):
            result["ratio"], result["median_ratio"] = (result[key] / stock[key] for key in ("min_ms", "median_ms"))
        save()


def below_the_frontier(rows: list[Row], noise: float = 0.01) -> list[str]:
    """Peers that no budget reaches: none has at most their peak and is at most `noise` of a stock step slower."""
    found = [row for row in rows if "ratio" in row]
    ours = [row for row in found if row["kind"] != "peer"]
    return [
        peer["name"]
        for peer in found
        if peer["kind"] == "peer"
        and not any(o["peak_bytes"] <= peer["peak_bytes"] and o["ratio"] <= peer["ratio"] + noise for o in ours)
    ]


def _means(plan: aot_hooks.Plan) -> dict[str, int]:
    shares: dict[str, int] = {}
    for decision in plan.decisions:
        shares[decision.hook.name] = shares.get(decision.hook.name, 0) + decision.saved_bytes
    return shares


def format_rows(rows: list[Row]) -> str:
    unit, title = (GIB, "GiB") if any((r.get("peak_bytes") or 0) > GIB for r in rows) else (MIB, "MiB")
    lines = [["row", "kind", f"peak {title}", "predicted", "step ms", "/ stock", "median", "predicted", "compile s"]]
    for r in rows:
        if "error" in r:
            lines.append([r["name"], r["kind"], r["error"][:80], "", "", "", "", "", ""])
            continue
        peaks = [number(r.get(key), ".3f", unit) for key in ("peak_bytes", "predicted_peak_bytes")]
        times = [number(r.get(key), ".3f") for key in ("min_ms", "ratio", "median_ratio", "predicted_ratio")]
        lines.append([r["name"], r["kind"], *peaks, *times, number(r.get("first_steps_s"), ".1f")])
    return format_columns(lines)


# ----------------------------------------------------------------------------------------------------------- a picture

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
    parser = parser_of(__doc__, small=ANYWHERE)
    parser.add_argument("--allow", default=",".join(ALLOWED))
    parser.add_argument("--max-error", type=float, default=0.05)
    parser.add_argument("--count", type=int, default=12, help="budgets between the lowest peak and that without hooks")
    parser.add_argument("--budgets", default="", metavar="PEAKS", help="further budgets: 3.5GiB,5GiB")
    parser.add_argument("--exact", default="", metavar="PEAKS", help="further budgets by exact means only")
    parser.add_argument("--peers", default=",".join(PEERS), metavar="NAMES", help="of ways.py")
    parser.add_argument("--seconds", type=float, default=math.inf, help="rows that are not compiled then are left out")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=8, help="rows that compile at the same time")
    parser.add_argument("--profile", action="store_true", help="also record the kernels of a step (CUDA)")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--plot", type=pathlib.Path, help="only draw docs/images/frontier.png from this result")
    options = parser.parse_args(arguments)
    if options.plot:
        where = "Four Llama-3-8B-shaped layers, 2 x 8192 tokens, H200, one run"
        draw(json.loads(options.plot.read_text())["rows"], where, IMAGE)
        return 0
    options.layers = options.layers or (2 if options.small else 4)
    options.tokens = options.tokens or (64 if options.small else 8192)
    options.inner = "aten" if options.small else "inductor"
    options.rounds = 2 if options.small else options.rounds
    bench = WholeStep(options)
    rows = named_rows(bench, options)
    header = conditions(bench.device) | {"layers": options.layers, "tokens": options.tokens, "batch": options.batch}
    header |= {"allow": options.allow, "max_error": options.max_error, "rounds": options.rounds, "inner": bench.inner}

    def save(rows: list[Row]) -> None:
        below = below_the_frontier(rows)
        write(options.json, {"header": header, "rows": rows, "peers_below_the_frontier": below})

    results = measure(rows, options, save)
    print(format_rows(results))
    print("peers below the frontier:", ", ".join(below_the_frontier(results)) or "none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
