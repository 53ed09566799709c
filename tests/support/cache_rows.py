"""What is in the cache for whom: processes that share torch's cache directory, and change one thing each.

base (compiles) -> the same again, renamed, moved, as new objects        must hit: nothing that counts has changed
                -> a constant, closure, scope, policy, region, option    must miss: the stored graph is another one
                -> what cannot be read, caches switched off              must bypass

Each row is a process of its own; after each the gradients are compared with those of a second compilation without
torch's AOTAutograd cache, which traces model and hooks anew, so a wrong hit shows in numbers too. Hooks multiply what
they unpack by 1.5: the gradients of any two settings differ by far more than rounding. Renamed rows are run by stock
torch as well (`backend="inductor"`, the hooks as GraphModules, which torch inlines).

python tests/support/cache_rows.py                       # all rows, about 15 minutes on two cores
python tests/support/cache_rows.py --only base renamed   # rows whose names begin so, and those they need
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from cache_programs import DEFAULTS, GRAPH_HOOKS, PROGRAM, ROWS, Row

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run_row(row: Row, directory: str | pathlib.Path, *, stock: bool = False, **environment: str) -> dict[str, Any]:
    """Run `row` in a process of its own with torch's caches in `directory`; what it reports, see `child`.

    Raises `RuntimeError`, its errors in the message, if the process fails.
    """
    env = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(directory),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **row.environment,
        **environment,
    }
    if stock:
        row = dataclasses.replace(row, text={**row.text, **GRAPH_HOOKS})
    command = [
        sys.executable,
        __file__,
        "--child",
        json.dumps(dataclasses.asdict(row)),
        *(["--stock"] if stock else []),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"row '{row.name}' failed:\n{done.stderr[-4000:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report | {"stderr": done.stderr}


def child(row: Row, stock: bool) -> dict[str, Any]:
    """This process: {"seen", "reasons", "gradient_error", "seconds", "packed_bytes", "saved_bytes",
    "captured", "rows"}."""
    import torch

    import aot_hooks

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "program.py"
        path.write_text(PROGRAM.substitute(DEFAULTS | row.text))
        spec = importlib.util.spec_from_file_location("program", path)
        assert spec is not None and spec.loader is not None
        program = importlib.util.module_from_spec(spec)
        sys.modules["program"] = program
        spec.loader.exec_module(program)
        for name, value in row.config.items():
            module, _, key = name.rpartition(".")
            setattr(importlib.import_module(module), key, value)

        said = _capturing() if row.captured else {}
        found, compiled, seconds = _steps(program, row, stock)
        counters = torch._dynamo.utils.counters["aot_autograd"]
        stats = aot_hooks.cache_stats()
        if stock:
            seen = next((s for s in ("hit", "miss", "bypass") if counters[f"autograd_cache_{s}"]), "none")
            return {"seen": seen, "seconds": seconds}
        plans = tuple(aot_hooks.last_plans(compiled))
        cudagraphs = said["found"]() if said else None
        torch._dynamo.reset()
        with torch._functorch.config.patch(enable_autograd_cache=False):
            expected, _, _ = _steps(program, row, stock)
    seen = {"hits": "hit", "misses": "miss", "bypasses": "bypass"}
    return {
        "seen": ", ".join(seen[k] for k in seen if stats[k]),
        "reasons": stats["reasons"],
        "gradient_error": max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)),
        "seconds": seconds,
        "packed_bytes": sum(p.packed_bytes for p in plans),
        "saved_bytes": sum(p.saved_bytes for p in plans),
        "captured": cudagraphs,
        "rows": [[d.saved.name, str(d.hook), d.saved.module_path] for p in plans for d in p.decisions],
    }


def _steps(program: Any, row: Row, stock: bool) -> tuple[list[Any], Any, float]:
    """Gradients of the last step of the row's program, what was compiled, and the seconds of all steps."""
    import contextlib
    import time

    import torch

    import aot_hooks

    torch.manual_seed(7)
    model = program.Model()
    hooks: Callable[[], Any]
    x = torch.randn(row.batch, 16, requires_grad=True)
    torch.manual_seed(row.seed)
    if stock:
        compiled = torch.compile(model, dynamic=row.dynamic)
        hooks = functools.partial(torch.autograd.graph.saved_tensors_hooks, *program.HOOKS)
    else:
        options = {"policy": program.POLICY, **row.options}
        compiled = torch.compile(model, backend="aot_hooks", dynamic=row.dynamic, options=options)
        hooks = contextlib.nullcontext
        if program.HOOKS is not None:
            hooks = functools.partial(aot_hooks.saved_tensors_hooks, *program.HOOKS, scope=row.scope)
    started = time.perf_counter()
    for _ in range(3 if row.captured else 1):  # as it is, recorded, replayed
        x.grad = None
        model.zero_grad()
        with hooks():
            y = compiled(x)
        y.square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())], compiled, time.perf_counter() - started


def _capturing() -> dict[str, Any]:
    """Have graphs captured on the CPU; "found" tells what was captured, counted and logged so far."""
    import io
    import logging

    from capture_simulator import Simulator

    import cudagraph
    from aot_hooks import cudagraphs
    from cudagraph.compile.compilation import Compilation
    from cudagraph.tree import dispatch

    driver, capture, log, pieces = Simulator(), dispatch.capture, io.StringIO(), []
    logging.getLogger("cudagraph").addHandler(logging.StreamHandler(log))

    def noted(piece: Any, *given: Any) -> Any:
        pieces.append([piece.name, piece.static_inputs, piece.mutated_inputs, len(piece.placeholders)])
        return capture(piece, *given)

    dispatch.capture = noted
    cudagraphs.compilation = lambda options: Compilation(options, driver)
    return {"found": lambda: {"pieces": list(pieces), "stats": cudagraph.stats(), "log": log.getvalue()}}


def same_captures(report: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rows captured, counted and logged the same, but for the numbers of lines."""
    both = [json.loads(re.sub(r"\.py:\d+", ".py", json.dumps(r["captured"]))) for r in (report, other)]
    return bool(both[0] == both[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows whose names begin so, with those they need")
    parser.add_argument("--json", type=pathlib.Path, help="write the result there as well")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--stock", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(Row(**json.loads(options.child)), options.stock)))
        return 0
    wanted = {r.name for r in ROWS if not options.only or r.name.startswith(tuple(options.only))}
    wanted |= {r.needs for r in ROWS if r.name in wanted} | {"base"}
    results, wrong = [], 0
    reports: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as stocks:
        stock_base = False
        for row in (r for r in ROWS if r.name in wanted):
            report = run_row(row, ours)
            good = report["seen"] == row.expected and report["gradient_error"] == 0.0
            reports[row.name] = report
            if row.captured and row.expected == "hit":
                good = good and same_captures(report, reports[row.needs])
            wrong += not good
            line = {"row": row.name, "expected": row.expected, **report, "good": good}
            line.pop("stderr")
            if row.renamed:
                if not stock_base:
                    run_row(ROWS[0], stocks, stock=True)
                    stock_base = True
                line["stock_torch"] = run_row(row, stocks, stock=True)["seen"]
            results.append(line)
            stock = f"  stock torch: {line['stock_torch']}" if row.renamed else ""
            print(
                f"{'ok ' if good else 'BAD'} {row.name:40} expected {row.expected:7} seen {line['seen']:7} "
                f"error {line['gradient_error']:.1e} {line['seconds']:5.1f} s{stock}",
                flush=True,
            )
    print(f"{len(results)} rows, {wrong} not as expected")
    if options.json:
        import torch

        sys.path.append(str(ROOT / "benchmarks"))
        from measure import conditions

        data = conditions(torch.device("cpu"), rows=results)
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
