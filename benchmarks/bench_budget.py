"""What `aot_hooks.budget` promises, and what then happens: peak and step time for budgets from the least to none.

stock --plan--> its peak; the lowest peak                  predicted
  for each budget in between, each peer: compile, warm up  predicted peak and time, from the plan; measured peak
  each round: every row in random order                    measured time

python benchmarks/bench_budget.py --json budget.json                  # a CUDA machine with 40 GiB
python benchmarks/bench_budget.py --small                             # shows that it runs
python benchmarks/bench_budget.py --count 0 --layers 16 --budgets 8.3GiB --exact 12GiB,10.2GiB
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _measure import GIB, MIB, conditions, format_columns, measure_bytes
from bench_memory import Bench, time_rounds
from bench_memory import Row as TimedRow
from variants import VARIANTS, Variant, patched

import aot_hooks
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

    def forward(self, variant: Variant, function: Any) -> Any:
        with variant.context():
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


def policies(bench: WholeStep, options: argparse.Namespace) -> tuple[int, list[tuple[str, str, Any]]]:
    """The peak without hooks; then kind, name and policy of each row: no budget first, given ones, and those between
    the lowest peak and that without hooks."""
    allow = tuple(options.allow.split(","))

    def plan(policy: Any) -> aot_hooks.Plan:
        return aot_hooks.plan(bench.stack, bench.x, policy=policy, inner=bench.inner)

    def budget(peak: int | str, allow: tuple[str, ...]) -> Any:
        return aot_hooks.budget(peak, allow=allow, max_error=options.max_error)

    most = plan(aot_hooks.KEEP).peak_bytes
    rows = [(NO_HOOKS, NO_HOOKS, aot_hooks.policies.everything(aot_hooks.KEEP))]
    rows += [("budget", peak, budget(peak, allow)) for peak in options.budgets.split(",") if peak]
    rows += [("exact budget", peak, budget(peak, EXACT)) for peak in options.exact.split(",") if peak]
    if options.count > 1:
        lowest = aot_hooks.budget(max_slowdown=float("inf"), allow=allow, max_error=options.max_error)
        least = 1.01 * plan(lowest).peak_bytes
        peaks = [int(least + k / (options.count - 1) * (most - least)) for k in range(options.count)]
        rows += [("budget", f"{peak / MIB:.1f} MiB", budget(peak, allow)) for peak in peaks]
    return most, rows


def measure(bench: WholeStep, options: argparse.Namespace, save: Callable[[list[Row]], None]) -> list[Row]:
    """All rows; `save` gets them whenever one is ready. A row's own times are replaced by those of the rounds."""
    stock_peak, named = policies(bench, options)
    ours = [
        (kind, Variant(name, "aot_hooks", functools.partial(aot_hooks.saved_tensors_policy, policy)), repr(policy))
        for kind, name, policy in named
    ]
    peers = [("peer", VARIANTS[name], "") for name in options.peers.split(",") if name]
    entries, rows, deadline = [], [], time.monotonic() + options.seconds
    for kind, variant, policy in (*ours, *peers):
        if time.monotonic() > deadline:
            rows.append({"name": variant.name, "kind": kind, "error": "not compiled: out of time"})
            continue
        torch._dynamo.reset()
        began = time.perf_counter()
        row: Row = {"name": variant.name, "kind": kind, "policy": policy}
        rows.append(row)
        try:
            with patched(variant):
                function = variant.compile(bench.stack, bench.inner)
                for _ in range(3):
                    bench.step(variant, function)
                bench.synchronize()
                row["first_steps_s"] = time.perf_counter() - began
                _measure_peak(bench, variant, function, row)
        except Exception as e:
            row["error"] = str(e).splitlines()[0][:300]
            continue
        found = [p for p in aot_hooks.last_plans(function) if p.live_after] if kind != "peer" else []
        if found:
            row |= {"predicted_peak_bytes": found[0].peak_bytes, "predicted_ratio": found[0].step_ratio}
            row["means"] = _means(found[0])
        elif kind == NO_HOOKS:
            row |= {"predicted_peak_bytes": stock_peak, "predicted_ratio": 1.0}
        entries.append((variant, function, row))
        save(rows)
    timed = [(variant, function, TimedRow(variant.name)) for variant, function, _ in entries]
    time_rounds(bench, timed, options.rounds, False)
    for (_, _, row), (_, _, times) in zip(entries, timed, strict=True):
        if times.error or not times.step_ms:
            row["error"] = times.error or "not timed"
            continue
        row |= {"min_ms": times.min_ms, "median_ms": times.median_ms}
        stock = rows[0]
        row["ratio"], row["median_ratio"] = (row[key] / stock[key] for key in ("min_ms", "median_ms"))
    save(rows)
    return rows


def _measure_peak(bench: WholeStep, variant: Variant, function: Any, row: Row) -> None:
    bench.clear()
    gc.collect()
    measured, _ = measure_bytes(lambda: bench.forward(variant, function), bench.backward, bench.device)
    row |= {"peak_bytes": measured.peak, "saved_bytes": measured.after_forward}


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

    def number(row: Row, key: str, form: str, scale: float = 1.0) -> str:
        return format(row[key] / scale, form) if key in row else ""

    for r in rows:
        if "error" in r:
            lines.append([r["name"], r["kind"], r["error"][:80], "", "", "", "", "", ""])
            continue
        lines.append(
            [
                r["name"],
                r["kind"],
                number(r, "peak_bytes", ".3f", unit),
                number(r, "predicted_peak_bytes", ".3f", unit),
                number(r, "min_ms", ".2f"),
                number(r, "ratio", ".3f"),
                number(r, "median_ratio", ".3f"),
                number(r, "predicted_ratio", ".3f"),
                number(r, "first_steps_s", ".1f"),
            ]
        )
    return format_columns(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Budgets and peers: predicted and measured peak and time.")
    parser.add_argument("--allow", default=",".join(ALLOWED))
    parser.add_argument("--max-error", type=float, default=0.05)
    parser.add_argument("--count", type=int, default=12, help="budgets between the lowest peak and that without hooks")
    parser.add_argument("--budgets", default="", metavar="PEAKS", help="further budgets: 3.5GiB,5GiB")
    parser.add_argument("--exact", default="", metavar="PEAKS", help="further budgets by exact means only")
    parser.add_argument("--peers", default=",".join(PEERS), metavar="NAMES", help="of variants.py")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no row is compiled after that time")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, inner aten: shows that it runs, no more")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    options.layers = options.layers or (2 if options.small else 4)
    options.tokens = options.tokens or (64 if options.small else 8192)
    options.inner = "aten" if options.small else "inductor"
    options.rounds = 2 if options.small else options.rounds
    bench = WholeStep(options)
    header = conditions(bench.device) | {"layers": options.layers, "tokens": options.tokens, "batch": options.batch}
    header |= {"allow": options.allow, "max_error": options.max_error, "rounds": options.rounds, "inner": bench.inner}

    def save(rows: list[Row]) -> None:
        if options.json is not None:
            result = {"header": header, "rows": rows, "peers_below_the_frontier": below_the_frontier(rows)}
            options.json.write_text(json.dumps(result, indent=1) + "\n")

    rows = measure(bench, options, save)
    print(format_rows(rows))
    print("peers below the frontier:", ", ".join(below_the_frontier(rows)) or "none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
