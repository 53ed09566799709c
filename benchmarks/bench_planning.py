"""How long budgets of the stack take to be planned on a CPU, and what the plans promise on an H200 that is not there.

stack on fake tensors --plan--> without a budget: its seconds are those of Dynamo and AOTAutograd
                      --plan--> with one: its peak and its time over stock's, and the seconds that it takes beyond

Seconds are those of the process, so other processes hardly count. The rates are those of an H200, its memory is made
up as in tests/support/code_peak.py. Nothing runs.

python benchmarks/bench_planning.py --json planning.json
python benchmarks/bench_planning.py --layers 80 --budgets 40GiB
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from typing import Any

import torch
from measure import GIB, ROOT, conditions, first_line, format_columns, number, write
from model import Stack
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.append(str(ROOT / "tests" / "support"))
from planned_programs import as_on_an_h200

import aot_hooks

Row = dict[str, Any]
ROWS = {4: "3.5GiB,3.4GiB,5.2GiB exact", 16: "8.3GiB,12GiB exact,10.2GiB exact"}  # those of README.md


def stack_of(layers: int) -> tuple[Stack, torch.Tensor]:
    """The stack of bench_budget.py and its input, as fake tensors."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            stack = Stack(layers)
            stack.cos, stack.sin = stack.cos.bfloat16(), stack.sin.bfloat16()
            return stack, torch.randn(2, 8192, 4096, requires_grad=True)
    finally:
        torch.set_default_dtype(torch.float32)


def planned(stack: Stack, x: torch.Tensor, policy: Any) -> tuple[Any, float]:
    """The plan, and the seconds that it took with the trace."""
    torch._dynamo.reset()
    aot_hooks.reset()
    began = time.process_time()
    compiled = torch.compile(stack, backend="aot_hooks", options={"policy": policy})
    return aot_hooks.plan(compiled, x), time.process_time() - began


def rows_of(layers: int, budgets: str) -> list[Row]:
    stack, x = stack_of(layers)
    stock, traced_s = planned(stack, x, aot_hooks.KEEP)
    rows: list[Row] = []
    for budget in budgets.split(","):
        peak, _, exact = budget.partition(" ")
        row: Row = {"name": f"{layers} layers, {budget}", "layers": layers, "stock_peak_bytes": stock.peak_bytes}
        try:
            plan, seconds = planned(stack, x, aot_hooks.budget(peak, max_error=0.0 if exact else 0.05))
            found = {"predicted_peak_bytes": plan.peak_bytes, "predicted_ratio": plan.after_ms / stock.before_ms}
            row |= found | {"planning_s": seconds - traced_s, "trace_s": traced_s}
        except Exception as error:
            row["error"] = first_line(error)
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, help="one stack in place of those of 4 and 16 layers")
    parser.add_argument("--budgets", default="8.3GiB", help='for it: "8.3GiB,10.2GiB exact"')
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    as_on_an_h200()
    wanted = {options.layers: options.budgets} if options.layers else ROWS
    rows = [row for layers, budgets in wanted.items() for row in rows_of(layers, budgets)]
    write(options.json, {"header": conditions(torch.device("cpu"), rates="H200"), "rows": rows})
    lines = [["row", "GiB", "/ stock", "planning s", "trace s"]]
    for row in rows:
        numbers = (number(row.get(key), ".3f") for key in ("predicted_ratio", "planning_s", "trace_s"))
        lines.append([row["name"], number(row.get("predicted_peak_bytes"), ".3f", GIB), *numbers])
    print(format_columns(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
