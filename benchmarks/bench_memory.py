"""Memory and time of one forward and backward: aot_hooks beside torch's own ways to save memory, all in one process.

    for each way:     compile it in a cache of its own, from nothing, and warm it up               -> compile s
    for each round:   every way in random order, two steps, the second counts                     -> min ms, median ms
    for each way:     one step with the allocator's counters read                                 -> saved, peak GiB
                      its gradients of two weights against eager's                                -> error

The ways share weights and input, so what they are measured on is the same; taking turns within each round, they also
share whatever the machine does meanwhile. A GPU at its power limit is faster for a while after a step that let it cool
(one that waits for copies), by 2 to 3%: so no way always follows the same one, and the first step of a turn is not
counted. A way that raises has the error as its row.

    python benchmarks/bench_memory.py --json memory.json                          # a CUDA machine with 40 GiB
    python benchmarks/bench_memory.py --small                                     # a look at whether all of it runs
    python benchmarks/bench_memory.py --variants stock,ours_float8_rowwise --profile ours_float8_rowwise
    python benchmarks/bench_memory.py --dump-code ours_float8_rowwise code/       # what Inductor made of it
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import json
import pathlib
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measure import (
    ANYWHERE,
    GIB,
    MIB,
    conditions,
    default_device,
    first_line,
    format_columns,
    measure_bytes,
    number,
    parser_of,
    relative_error,
    synchronize,
    write,
)
from model import Stack
from torch import Tensor
from torch._inductor.utils import fresh_cache
from ways import WAYS, Forward, Way, patched

import aot_hooks

ORDER = "in every round each variant takes its turn, in random order: two steps, the second timed"
WARMUP_STEPS = 3  # the first compiles
PROFILED_KERNELS = 25


@dataclasses.dataclass
class Row:
    """One line of the result; what could not be measured is None, and `error` says why."""

    name: str
    compile_s: float | None = None
    step_ms: list[float] = dataclasses.field(default_factory=list)
    min_ms: float | None = None
    median_ms: float | None = None
    ratio_to_stock: float | None = None  # of the fastest steps
    median_ratio_to_stock: float | None = None
    after_forward_bytes: int | None = None
    peak_bytes: int | None = None
    w1_error: float | None = None
    q_error: float | None = None
    planned_saved_bytes: int | None = None  # what the plan says: without hooks, and with them
    planned_packed_bytes: int | None = None
    error: str | None = None


Compiled = tuple[Way, Forward, Row]


class Bench:
    """The work, and how to do one step of it in some way."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.inner: str = options.inner
        sizes = {"width": 64, "head_count": 4, "kv_head_count": 2, "hidden": 128} if options.small else {}
        torch.manual_seed(0)
        with self.device:
            stack = Stack(options.layers, token_count=options.tokens, **sizes)
            width = stack.blocks[0].w1.in_features
            self.stack = stack.to(torch.bfloat16)
            self.x = torch.randn(options.batch, options.tokens, width, dtype=torch.bfloat16, requires_grad=True)

    def forward(self, way: Way, function: Forward) -> tuple[Tensor, Tensor]:
        """The loss, and the output beside it, as a training loop that looks at both would hold them."""
        with way.context():
            y = function(self.x)
        return y.float().pow(2).mean(), y  # outside of the context: hooks are for what is compiled

    def backward(self, out: tuple[Tensor, Tensor]) -> None:
        out[0].backward()

    def clear(self) -> None:
        self.stack.zero_grad(set_to_none=True)
        self.x.grad = None

    def step(self, way: Way, function: Forward) -> None:
        self.clear()
        self.backward(self.forward(way, function))

    def gradients(self) -> tuple[Tensor, Tensor]:
        block = self.stack.blocks[0]
        return block.w1.weight.grad, block.attention.q.weight.grad

    def synchronize(self) -> None:
        synchronize(self.device)


@contextlib.contextmanager
def failing_alone(row: Row, verbose: bool) -> Iterator[None]:
    """Whatever a way raises ends up in its row: these are other people's compilers, and the rest has to go on."""
    try:
        yield
    except Exception as error:
        if verbose:
            traceback.print_exc()
        row.error = first_line(error)


def compile_and_warm_up(bench: Bench, way: Way, row: Row, dump: pathlib.Path | None) -> Forward:
    """The way's function, forward and backward compiled; a backward may be compiled only when it first runs."""
    trace: dict[str, Any] = {"trace.enabled": True, "trace.debug_dir": str(dump)} if dump else {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, patched(way, **trace):
        with fresh_cache(dir=folder, delete=False):
            bench.synchronize()
            started = time.perf_counter()
            function = way.compile(bench.stack, bench.inner)
            bench.step(way, function)
            bench.synchronize()
            if way.backend is not None:
                row.compile_s = time.perf_counter() - started
            for _ in range(WARMUP_STEPS - 1):
                bench.step(way, function)
            bench.synchronize()
    if way.backend == "aot_hooks":
        plans = aot_hooks.last_plans(function)
        row.planned_saved_bytes = sum(plan.saved_bytes for plan in plans)
        row.planned_packed_bytes = sum(plan.packed_bytes for plan in plans)
    return function


def timed_round(bench: Bench, functions: list[Compiled], verbose: bool) -> None:
    """Two steps of each, queued without a pause between them, so that a GPU never waits for Python."""
    events = []
    for way, function, row in functions:
        bench.clear()
        with failing_alone(row, verbose), patched(way):
            if bench.device.type == "cuda":
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                bench.step(way, function)
                start.record()
                bench.step(way, function)
                end.record()
                events.append((row, start, end))
            else:
                started = time.perf_counter()
                bench.step(way, function)
                row.step_ms.append((time.perf_counter() - started) * 1e3)
    bench.synchronize()
    for row, start, end in events:
        row.step_ms.append(start.elapsed_time(end))


def time_rounds(bench: Bench, compiled: list[Compiled], rounds: int, verbose: bool) -> None:
    """Each way once a round, in an order drawn anew; what fails on the way is left out from then on."""
    order = random.Random(0)
    timed_round(bench, compiled, verbose)  # not counted: the allocator settles
    for _, _, row in compiled:
        row.step_ms.clear()
    for _ in range(rounds):
        working = [entry for entry in compiled if not entry[2].error]
        timed_round(bench, order.sample(working, len(working)), verbose)
    stock = next((row for _, _, row in compiled if row.name == "stock"), None)
    for _, _, row in compiled:
        if row.step_ms:
            row.min_ms, row.median_ms = min(row.step_ms), statistics.median(row.step_ms)
    for _, _, row in compiled:
        if stock and stock.min_ms and stock.median_ms and row.min_ms and row.median_ms:
            row.ratio_to_stock = row.min_ms / stock.min_ms
            row.median_ratio_to_stock = row.median_ms / stock.median_ms


def measure_memory_and_error(bench: Bench, way: Way, function: Forward, row: Row, reference: Any) -> None:
    bench.clear()
    gc.collect()
    with patched(way):
        measured, _ = measure_bytes(lambda: bench.forward(way, function), bench.backward, bench.device)
    row.after_forward_bytes, row.peak_bytes = measured.after_forward, measured.peak
    w1, q = bench.gradients()
    row.w1_error, row.q_error = relative_error(w1, reference[0]), relative_error(q, reference[1])


def print_profile(bench: Bench, way: Way, function: Forward) -> None:
    """The kernels of one step that take longest in all."""
    on_cuda = bench.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * on_cuda]
    bench.synchronize()
    with patched(way), torch.profiler.profile(activities=activities, acc_events=True) as profile:
        bench.step(way, function)
        bench.synchronize()
    total_us: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    for event in profile.events():
        if (event.device_type == torch.autograd.DeviceType.CUDA) == on_cuda and not event.is_user_annotation:
            total_us[event.name] += event.self_device_time_total if on_cuda else event.self_cpu_time_total
            count[event.name] += 1
    print(f"\n{way.name}: {sum(total_us.values()) / 1e3:.2f} ms in {sum(count.values())} kernels")
    for name, us in total_us.most_common(PROFILED_KERNELS):
        print(f"{us / 1e3:9.3f} ms {count[name]:5} x  {name[:120]}")


def format_rows(rows: list[Row]) -> str:
    unit, unit_name = (GIB, "GiB") if any((row.peak_bytes or 0) > GIB for row in rows) else (MIB, "MiB")
    title = ["variant", "min ms", "/ stock", "median ms", "/ stock", f"saved {unit_name}", f"peak {unit_name}"]
    lines = [[*title, "err w1", "err q", "compile s"]]
    for row in rows:
        times = [number(row.min_ms, ".2f"), number(row.ratio_to_stock, ".3f")]
        times += [number(row.median_ms, ".2f"), number(row.median_ratio_to_stock, ".3f")]
        nbytes = [number(row.after_forward_bytes, ".3f", unit), number(row.peak_bytes, ".3f", unit)]
        errors = [number(row.w1_error, ".4f"), number(row.q_error, ".4f")]
        lines.append([row.name, *times, *nbytes, *errors, number(row.compile_s, ".1f")])
    return "\n".join([format_columns(lines), *(f"{row.name}: {row.error}" for row in rows if row.error)])


def parse_arguments(arguments: list[str] | None, names: str = ",".join(WAYS)) -> argparse.Namespace:
    """The options of bench_memory.py and bench_offload.py; `names` are the rows unless others are asked for."""
    parser = parser_of(__doc__, small=ANYWHERE)
    parser.add_argument("--variants", default=names, help=f"of: {', '.join(WAYS)}")
    parser.add_argument("--layers", type=int, help="default 4, small 1")
    parser.add_argument("--tokens", type=int, help="default 8192, small 64")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="default 12, small 2")
    parser.add_argument("--inner", choices=("inductor", "aten"), help="what compiles the graphs; small: aten")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--profile", metavar="VARIANT", help=f"print the {PROFILED_KERNELS} longest kernels of a step")
    parser.add_argument("--dump-code", nargs=2, metavar=("VARIANT", "DIR"), help="write what Inductor generates for it")
    parser.add_argument("--timeline", default="", metavar="VARIANTS", help="bench_offload.py: list copies and pauses")
    parser.add_argument("--verbose", action="store_true", help="print the traceback of a variant that raises")
    options = parser.parse_args(arguments)
    defaults = (1, 64, 2, "aten") if options.small else (4, 8192, 12, "inductor")
    for name, value in zip(("layers", "tokens", "rounds", "inner"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.names = [name for name in options.variants.split(",") if name]
    for extra in (options.profile, options.dump_code and options.dump_code[0]):
        if extra and extra not in options.names:
            options.names.append(extra)
    unknown = [name for name in options.names if name not in WAYS]
    if unknown:
        parser.error(f"no variant {unknown[0]!r}; there are: {', '.join(WAYS)}")
    return options


def run(
    bench: Bench, options: argparse.Namespace, looked_at: Callable[[Way, Forward, Row], None], **work: Any
) -> dict[str, Any]:
    """Header and rows of the ways that `options` names. Each is handed to `looked_at` after it has been measured."""
    header = conditions(
        bench.device,
        layers=options.layers,
        shape=list(bench.x.shape),
        dtype="bfloat16",
        inner=options.inner,
        rounds=options.rounds,
        order=ORDER,
        **work,
    )
    print(json.dumps(header), flush=True)
    eager = WAYS["eager"]
    bench.step(eager, eager.compile(bench.stack, options.inner))
    reference = tuple(gradient.clone() for gradient in bench.gradients())
    if options.inner == "inductor":  # starts the compiler's worker processes, which is no way's time
        x = torch.ones(64, 64, device=bench.device, requires_grad=True)
        torch.compile(lambda x: x.sin().sum())(x).backward()

    rows = [Row(name) for name in options.names]
    compiled: list[Compiled] = []
    for row in rows:
        dump = pathlib.Path(options.dump_code[1]).resolve() if (options.dump_code or [""])[0] == row.name else None
        with failing_alone(row, options.verbose):
            compiled.append((WAYS[row.name], compile_and_warm_up(bench, WAYS[row.name], row, dump), row))
        bench.clear()
        gc.collect()
        outcome = row.error or f"ready, compiled in {row.compile_s or 0:.1f} s"
        print(f"{row.name}: {outcome}", file=sys.stderr, flush=True)

    time_rounds(bench, compiled, options.rounds, options.verbose)
    for way, function, row in compiled:
        with failing_alone(row, options.verbose):
            measure_memory_and_error(bench, way, function, row, reference)
            looked_at(way, function, row)
    print("\n" + format_rows(rows))
    return {"header": header, "rows": [dataclasses.asdict(row) for row in rows]}


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    bench = Bench(options)

    def looked_at(way: Way, function: Forward, row: Row) -> None:
        if options.profile == row.name:
            print_profile(bench, way, function)

    parameter_count = sum(p.numel() for p in bench.stack.parameters())
    write(options.json, run(bench, options, looked_at, parameter_count=parameter_count))
    return 0


if __name__ == "__main__":
    sys.exit(main())
