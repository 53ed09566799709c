"""What `aot_hooks.budget` promises, and what then happens: peak and step time for budgets from the least to none.

stock --plan--> its peak; the lowest peak        predicted
  for each budget in between: compile, warm up   predicted peak and time, from the plan
  each round: every budget in random order       measured time; then one step with the allocator's counters

python benchmarks/bench_budget.py --json budget.json                  # a CUDA machine with 40 GiB
python benchmarks/bench_budget.py --small                             # shows that it runs
python benchmarks/bench_budget.py --allow recompute,lossless,offload  # exact means only
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import pathlib
import statistics
import sys
import time
from typing import Any

import torch
from _measure import GIB, MIB, conditions, format_columns, measure_bytes
from bench_memory import Bench, time_rounds
from bench_memory import Row as TimedRow
from variants import Variant

import aot_hooks
from aot_hooks.planning.budget import ALLOWED


class WholeStep(Bench):
    """A step of the stack alone: a loss outside of the compiled function would take memory that no plan knows of."""

    def forward(self, variant: Variant, function: Any) -> Any:
        with variant.context():
            return function(self.x)

    def backward(self, out: Any) -> None:
        out.backward(torch.ones_like(out))


def policies(bench: WholeStep, options: argparse.Namespace) -> tuple[int, list[tuple[str, Any]]]:
    """The peak without hooks, and budgets between the lowest peak and that, by name; no budget first."""
    allow = tuple(options.allow.split(","))

    def plan(policy: Any) -> aot_hooks.Plan:
        return aot_hooks.plan(bench.stack, bench.x, policy=policy, inner=bench.inner)

    most = plan(aot_hooks.KEEP).peak_bytes
    least = plan(aot_hooks.budget(max_slowdown=float("inf"), allow=allow, max_error=options.max_error)).peak_bytes
    shares = [k / (options.count - 1) for k in range(options.count - 1)]
    peaks = [int(1.01 * least + share * (most - 1.01 * least)) for share in shares]
    made = [aot_hooks.budget(peak, allow=allow, max_error=options.max_error) for peak in peaks]
    named = [(f"{peak / MIB:.1f} MiB", made) for peak, made in zip(peaks, made, strict=True)]
    return most, [("no hooks", aot_hooks.policies.everything(aot_hooks.KEEP)), *named]


def measure(bench: WholeStep, options: argparse.Namespace) -> list[dict[str, Any]]:
    entries, rows = [], []
    stock_peak, named = policies(bench, options)
    for name, policy in named:
        torch._dynamo.reset()
        variant = Variant(name, "aot_hooks", functools.partial(aot_hooks.saved_tensors_policy, policy))
        began = time.perf_counter()
        function = variant.compile(bench.stack, bench.inner)
        try:
            for _ in range(3):
                bench.step(variant, function)
        except Exception as e:
            rows.append({"name": name, "error": str(e).splitlines()[0][:300]})
            continue
        bench.synchronize()
        found = [p for p in aot_hooks.last_plans(function) if p.decisions]
        predicted = found[0] if found else None
        row: dict[str, Any] = {"name": name, "policy": repr(policy), "first_steps_s": time.perf_counter() - began}
        if predicted is not None and predicted.live_after:
            row |= {"predicted_peak_bytes": predicted.peak_bytes, "predicted_ratio": predicted.step_ratio}
            row["means"] = _means(predicted)
        else:
            row["predicted_peak_bytes"] = stock_peak
        entries.append((variant, function, row))
        rows.append(row)
    timed = [(variant, function, TimedRow(variant.name)) for variant, function, _ in entries]
    time_rounds(bench, timed, options.rounds, False)
    stock_ms: float | None = None
    for (variant, function, row), (_, _, times) in zip(entries, timed, strict=True):
        bench.clear()
        gc.collect()
        measured, _ = measure_bytes(lambda v=variant, f=function: bench.forward(v, f), bench.backward, bench.device)
        row |= {"min_ms": times.min_ms, "median_ms": statistics.median(times.step_ms), "peak_bytes": measured.peak}
        stock_ms = stock_ms or times.min_ms
        row["ratio"] = times.min_ms / stock_ms if times.min_ms and stock_ms else None
    return rows


def _means(plan: aot_hooks.Plan) -> dict[str, int]:
    shares: dict[str, int] = {}
    for decision in plan.decisions:
        shares[decision.hook.name] = shares.get(decision.hook.name, 0) + decision.saved_bytes
    return shares


def format_rows(rows: list[dict[str, Any]]) -> str:
    unit, title = (GIB, "GiB") if any((r.get("peak_bytes") or 0) > GIB for r in rows) else (MIB, "MiB")
    lines = [["budget", f"peak {title}", "predicted", "step ms", "/ stock", "predicted", "compile s"]]
    for r in rows:
        if "error" in r:
            lines.append([r["name"], r["error"][:80], "", "", "", "", ""])
            continue
        predicted = r.get("predicted_peak_bytes", 0) / unit, r.get("predicted_ratio", 1.0)
        lines.append(
            [
                r["name"],
                f"{r['peak_bytes'] / unit:.3f}",
                f"{predicted[0]:.3f}",
                f"{r['min_ms']:.2f}",
                f"{r['ratio']:.3f}",
                f"{predicted[1]:.3f}",
                f"{r['first_steps_s']:.1f}",
            ]
        )
    return format_columns(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Budgets: predicted and measured peak and time.")
    parser.add_argument("--allow", default=",".join(ALLOWED))
    parser.add_argument("--max-error", type=float, default=0.05)
    parser.add_argument("--count", type=int, default=7, help="rows, with that without hooks")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, inner aten: shows that it runs, no more")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    options.layers = options.layers or (2 if options.small else 4)
    options.tokens = options.tokens or (64 if options.small else 8192)
    options.inner = "aten" if options.small else "inductor"
    options.rounds = 2 if options.small else options.rounds
    bench = WholeStep(options)
    rows = measure(bench, options)
    print(format_rows(rows))
    header = conditions(bench.device) | {"layers": options.layers, "tokens": options.tokens, "batch": options.batch}
    header |= {"allow": options.allow, "max_error": options.max_error, "rounds": options.rounds, "inner": bench.inner}
    if options.json is not None:
        options.json.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
