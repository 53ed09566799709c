"""What CUDA graphs are worth in training: the Llama-shaped stack, with float8 hooks without and with captures.

    its loss eager, or compiled along; with AdamW if asked for        ms a step, GiB reserved at the peak, gradients

Each row has a process of its own: gaps that one leaves in the allocator's segments would be memory of the next. Times
are of whole steps (forward, loss, backward), synchronized. Random numbers are eager's (`fallback_random`), so that
gradients can be compared: with stock Inductor's, at the same seed. Memory is what the allocator has reserved, because a
graph's pool is reserved as long as the graph lives: a loss that runs eagerly can't use it and needs its own.

    python benchmarks/bench_cudagraph_stack.py --json PATH                  # CUDA, 20 GiB, some minutes of compiling
    python benchmarks/bench_cudagraph_stack.py --small --device cpu --inner aten                     # captures nothing
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor_config
from measure import (
    GIB,
    conditions,
    error_of,
    first_line,
    format_columns,
    number,
    own_process,
    parser_of,
    step_ms,
    synchronize,
    write,
)
from model import Stack
from torch import Tensor, nn
from torch._dynamo.utils import counters
from ways import own_code

import aot_hooks
import cudagraph

VARIANTS = ("stock", "reduce-overhead", "float8", "float8 reduce-overhead", "float8 cudagraphs")
STACK = "Llama-shaped stack"
WRONG_GRADIENT = 2e-2  # relative, of float32 in another order through a few layers; 0 is expected of the same kernels


@dataclasses.dataclass
class Row:
    """One model in one variant.

    Attributes:
        step_ms, min_ms: median and fastest step.
        recordings, replays_a_step, skips, partitions: of our trees; replays and skips in the timed steps.
        torch_skips, torch_partitions: what Inductor counted of its own trees.
        reserved_bytes: most that the allocator had reserved, over what was allocated before.
        allocated_bytes: most that was allocated, likewise; what a replay uses is not counted.
        pool_bytes: of what is reserved after the steps, what belongs to pools of CUDA graphs.
        gradient_error: |g - g_stock| / |g_stock|.
        first_s: the steps until the first timed one, compiling and recording included.
        error: what it raised, "" if nothing.
    """

    model: str
    variant: str
    step_ms: float | None = None
    min_ms: float | None = None
    recordings: int = 0
    replays_a_step: float = 0.0
    skips: int = 0
    partitions: int = 0
    torch_skips: int = 0
    torch_partitions: int = 0
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    pool_bytes: int = 0
    gradient_error: float | None = None
    first_s: float | None = None
    error: str = ""


Step = Callable[[], None]


def measured(row: Row, module: nn.Module, step: Step, options: argparse.Namespace) -> dict[str, Tensor]:
    """Fills in `row`; the gradients of one step at a known seed."""
    device = torch.device(options.device)
    counters.clear()
    cudagraph.reset()
    gc.collect()
    before = 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)  # not what is reserved: gaps that are left there can be used again
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    for _ in range(options.warmup):
        step()
    synchronize(device)
    row.first_s = time.perf_counter() - started
    recorded = cudagraph.stats()
    times = [step_ms(step, device) for _ in range(options.steps)]
    row.step_ms, row.min_ms = statistics.median(times), min(times)
    stats = cudagraph.stats()
    row.recordings, row.partitions = stats["recordings"], stats["partitions"]
    row.replays_a_step = (stats["replays"] - recorded["replays"]) / options.steps
    row.skips = stats["skips"] - recorded["skips"]
    row.torch_skips = counters["inductor"]["cudagraph_skips"]
    row.torch_partitions = counters["inductor"]["cudagraph_partitions"]
    if device.type == "cuda":
        row.reserved_bytes = torch.cuda.max_memory_reserved(device) - before
        row.allocated_bytes = torch.cuda.max_memory_allocated(device) - before
        segments = torch.cuda.memory_snapshot()
        row.pool_bytes = sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))
    torch.manual_seed(7)
    step()
    return {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}


def compile_for(variant: str, function: Any, inner: str) -> Any:
    own = own_code(function, f"step_{variant}")
    stock = {"inductor": {}, "aten": {"backend": "aot_eager"}}[inner]
    if variant == "stock":
        return torch.compile(own, **stock)
    if variant == "reduce-overhead":
        return torch.compile(own, mode=variant)
    if variant == "float8 reduce-overhead":
        return torch.compile(own, backend="aot_hooks", mode="reduce-overhead")
    options = {"inner": inner, "cudagraphs": variant.endswith("cudagraphs")}
    return torch.compile(own, backend="aot_hooks", options=options)


def stack_rows(options: argparse.Namespace, *, loss_compiled: bool) -> list[Row]:
    """A row a variant, from processes that are given `--stack-row`."""
    rows, reference = [], None
    asked = [*sys.argv[1:]] if options.arguments is None else [*options.arguments]
    variants = options.variants.split(",") if options.variants else VARIANTS
    if options.inner == "aten":
        variants = [variant for variant in variants if "reduce-overhead" not in variant]
    for variant in variants:
        with tempfile.TemporaryDirectory() as folder:
            kept = pathlib.Path(folder) / "gradients"
            one = ["--stack-row", variant, "--gradients", str(kept), *["--loss-compiled"] * loss_compiled]
            try:
                rows.append(Row(**json.loads(own_process(__file__, [*asked, *one])[-1])))
            except RuntimeError as e:
                print(e, file=sys.stderr)
                rows.append(Row(stack_name(options, loss_compiled), variant, error=first_line(e)))
                continue
            if rows[-1].error:
                continue
            gradients = torch.load(kept, map_location=options.device)
        reference = reference or gradients
        if options.optimizer == "none":  # an optimizer's steps carry the last bits on
            rows[-1].gradient_error = error_of(gradients, reference)
    return rows


def stack_name(options: argparse.Namespace, loss_compiled: bool) -> str:
    return STACK + ", loss compiled" * loss_compiled + ", AdamW" * (options.optimizer == "adamw")


def stack_row(variant: str, options: argparse.Namespace) -> Row:
    """One variant in this process. Keeps the gradients in the file `options.gradients`."""
    device, loss_compiled = torch.device(options.device), options.loss_compiled
    small = {"width": 64, "head_count": 4, "kv_head_count": 2, "hidden": 128} if options.small else {}
    tokens = 128 if options.small else 8192
    torch.manual_seed(0)
    with device:
        stack = Stack(4, token_count=tokens, **small).to(torch.bfloat16)
        x = torch.randn(2, tokens, stack.blocks[0].w1.in_features, dtype=torch.bfloat16, requires_grad=True)
    optimizer = (
        torch.optim.AdamW(stack.parameters(), fused=device.type == "cuda") if options.optimizer == "adamw" else None
    )

    def loss_of(y: Tensor) -> Tensor:
        return y.float().pow(2).mean()

    def forward(x: Tensor) -> Tensor:
        y: Tensor = stack(x)
        return loss_of(y) if loss_compiled else y

    row = Row(stack_name(options, loss_compiled), variant)
    compiled = compile_for(variant, forward, options.inner)
    policy = aot_hooks.policies.everything(aot_hooks.float8()) if "float8" in variant else None

    def step() -> None:
        stack.zero_grad(set_to_none=True)
        x.grad = None
        if variant.endswith("reduce-overhead"):
            torch.compiler.cudagraph_mark_step_begin()
        if policy is None:
            y = compiled(x)
        else:
            with aot_hooks.saved_tensors_policy(policy):
                y = compiled(x)
        (y if loss_compiled else loss_of(y)).backward()
        if optimizer is not None:
            optimizer.step()

    try:
        gradients = measured(row, stack, step, options)
    except Exception as e:
        row.error = first_line(e)
    else:
        torch.save({name: g.cpu() for name, g in gradients.items()}, options.gradients)
    return row


def format_rows(rows: list[Row]) -> str:
    title = ["model", "variant", "ms", "min ms", "recorded", "replays", "skips", "cut", "torch skips", "torch pieces"]
    lines = [[*title, "GiB", "alloc", "pools", "g error", "first s"]]
    for row in rows:
        cells = [row.model, row.variant, number(row.step_ms, ".3f"), number(row.min_ms, ".3f")]
        counts = (row.recordings, row.replays_a_step, row.skips, row.partitions, row.torch_skips, row.torch_partitions)
        cells += [f"{count:g}" for count in counts]
        cells += [number(n, ".3f", GIB) for n in (row.reserved_bytes, row.allocated_bytes, row.pool_bytes)]
        lines.append([*cells, number(row.gradient_error, ".1e"), number(row.first_s, ".1f")])
    errors = [f"{row.model}, {row.variant}: {row.error}" for row in rows if row.error]
    return "\n".join([format_columns(lines), *errors])


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__, small="sizes for a CPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aten"])
    parser.add_argument("--variants", help=f"of {','.join(VARIANTS)}; gradients are compared with the first's")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--losses", default="eager,compiled")
    parser.add_argument("--optimizer", choices=["none", "adamw"], default="none")
    parser.add_argument("--stack-row", metavar="VARIANT", help=argparse.SUPPRESS)  # what a process of its own is for
    parser.add_argument("--loss-compiled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gradients", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.arguments = arguments
    if options.stack_row:
        with inductor_config.patch(fallback_random=True):
            print(json.dumps(dataclasses.asdict(stack_row(options.stack_row, options))))
        return 0
    work = {name: getattr(options, name) for name in ("steps", "inner", "small", "optimizer")}
    header, rows = conditions(torch.device(options.device), **work), []
    for loss in options.losses.split(","):
        found = stack_rows(options, loss_compiled=loss == "compiled")
        print(format_rows(found), flush=True)
        rows += found
        write(options.json, {**header, "rows": [dataclasses.asdict(row) for row in rows]})
    wrong = [r for r in rows if "float8" not in r.variant and (r.gradient_error or 0) > WRONG_GRADIENT]
    for row in wrong:
        print(f"WRONG: {row.model}, {row.variant}: gradient {row.gradient_error} off stock's")
    return 1 if wrong or any(row.error for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
