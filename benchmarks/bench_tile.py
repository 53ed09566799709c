"""Layers in tiles of tokens beside layers that are whole: step time, bytes, and how far gradients are from stock's.

    python benchmarks/bench_tile.py --json FILE          needs CUDA; 4 blocks of benchmarks/model.py, 32,768 tokens
    python benchmarks/bench_tile.py --small              a CPU, tiny sizes

ms is the fastest of six steps. Bytes are over what is allocated before the step: parameters and gradients.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from measure import ANYWHERE, GIB, conditions, first_line, free, measure_bytes, parser_of, step_ms, write
from model import stack_and_input
from torch import Tensor

import aot_hooks

SENT: dict[str, Any] = {"policy": aot_hooks.offload(then=aot_hooks.float8()), "recompute_pointwise": True}
WAYS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "float8": {"policy": aot_hooks.float8()},
    "float8 tile": {"policy": aot_hooks.float8(), "tile": True},
    "offload": SENT,
    "offload tile": {**SENT, "tile": True},
    "tile": {"tile": True},
}
WARM_UP, STEPS = 6, 6


def measured(way: str, sizes: dict[str, int], inner: str, device: torch.device, exact: list[Tensor]) -> dict[str, Any]:
    """A row. `exact` holds the gradients of stock, which the first row puts there."""
    torch.manual_seed(0)
    stack, x = stack_and_input(device, **sizes)
    options = WAYS[way]
    if options is None:
        run = torch.compile(stack, backend="inductor" if inner == "inductor" else "aot_eager")
    else:
        run = torch.compile(stack, backend="aot_hooks", options={"inner": inner, **options})

    def loss() -> Tensor:
        return run(x).float().pow(2).mean()

    times = [step_ms(lambda: loss().backward(), device) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    leaves = [*stack.parameters(), x]
    for leaf in leaves:
        leaf.grad = None
    loss().backward()
    gradients = [leaf.grad.float().cpu() for leaf in leaves if leaf.grad is not None]
    exact += [] if exact else gradients
    off = sum(float((a - b).square().sum()) for a, b in zip(gradients, exact, strict=True))
    error = (off / sum(float(b.square().sum()) for b in exact)) ** 0.5
    nbytes, _ = measure_bytes(loss, Tensor.backward, device)
    found = {"way": way, "ms": min(times), "median_ms": statistics.median(times), "error": error}
    found |= {"peak_gib": nbytes.peak / GIB, "saved_gib": nbytes.after_forward / GIB}
    if options is not None:
        found["tiled"] = [str(row) for plan in aot_hooks.last_plans(run) for row in plan.tiled]
    return found


def main() -> None:
    parser = parser_of(__doc__, small=ANYWHERE, layers=4, tokens=32768)
    parser.add_argument("--ways", default=",".join(WAYS), help=", ".join(WAYS))
    said = parser.parse_args()
    sizes = {"layers": said.layers, "width": 4096, "tokens": said.tokens, "batch": 1}
    if said.small:
        sizes = {"layers": 2, "width": 128, "tokens": 1024, "batch": 1}
    device, inner = torch.device("cpu" if said.small else "cuda"), "aten" if said.small else "inductor"
    result: dict[str, Any] = {"conditions": conditions(device, **sizes, inner=inner), "rows": []}
    exact: list[Tensor] = []
    for way in said.ways.split(","):
        try:
            found = measured(way, sizes, inner, device, exact)
        except RuntimeError as error:  # out of memory, or of a compiler: the other rows go on
            found = {"way": way, "error": first_line(error)}
        print(found, flush=True)
        result["rows"].append(found)
        write(said.json, result)
        free(device)


if __name__ == "__main__":
    main()
