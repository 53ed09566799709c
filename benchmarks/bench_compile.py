"""Compile time of the block stack with float8, beside stock Inductor: from nothing, or as warm starts.

stock, aot_hooks, aot_hooks, stock, ...     a process and an empty cache folder each, taking turns
    |
    v
seconds from the first call to the end of the first backward, with the fastest of each and their ratio, as JSON

With --warm: cold, then `--repeats` starts that find their graphs in the cache of the cold one. cold / warm says how
much a warm start saves, ours warm / stock warm what the hooks cost there. Every process runs an eager step of the same
sizes before its clock starts: what the device and its libraries load is no work of a compiler. What Python imports at
the first call is on the clock, with its bytecode on disk, as pip leaves it. Images of containers often have none and
forbid to write it: then every process compiles the 600 sources of torch's compiler again, which takes as long as what
is to be measured. So a small start that is not measured writes it to a directory of this benchmark's own.

Gradients are compared with those of the same way's cold start. Attention's backward on CUDA adds up in no fixed order,
so two runs of stock torch differ; ours may differ by twice as much, and where stock's are the same, not at all.

python benchmarks/bench_compile.py                                                        # a CUDA machine
python benchmarks/bench_compile.py --device cpu --layers 4 --tokens 128 --width 128
python benchmarks/bench_compile.py --warm                                                 # a CUDA machine
python benchmarks/bench_compile.py --warm --device cpu --layers 4 --tokens 128 --width 128 [--inner aten]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
import tempfile
from typing import Any

import torch
from measure import conditions, default_device, own_process, parser_of, relative_error, write
from model import eager_step, first_step, stack_and_input

import aot_hooks

WAYS = ("stock", "aot_hooks")
SIZES = ("layers", "width", "tokens", "batch")
CLOCKS = ("wall_s", "cpu_s")


def start(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the end of the first backward, of this process and its children; if warm, also what the cache did."""
    torch.manual_seed(0)
    stack, x = stack_and_input(torch.device(options.device), **{name: getattr(options, name) for name in SIZES})
    ours = way == "aot_hooks"
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if ours:
        context = aot_hooks.saved_tensors_hooks(aot_hooks.float8())
    if options.gradient is None:
        return first_step("aot_hooks" if ours else "inductor", stack, x, context)[1]
    inner: dict[str, Any] = {}
    if options.inner == "aten":
        torch._functorch.config.bundled_autograd_cache = True
        if not ours:  # torch 2.13 and later; what it makes of a backward that is compiled late cannot be stored
            torch._functorch.config.force_autograd_cache = True
            torch._functorch.config.force_non_lazy_backward_lowering = True
        inner = {"options": {"inner": "aten"}} if ours else {}
    backend = "aot_hooks" if ours else {"inductor": "inductor", "aten": "aot_eager"}[options.inner]
    eager_step(stack, x)
    compiled, seconds = first_step(backend, stack, x, context, **inner)
    counters = torch._dynamo.utils.counters["aot_autograd"]
    plans = aot_hooks.last_plans(compiled) if ours else ()
    return {
        **seconds,
        "hits": counters["autograd_cache_hit"],
        "misses": counters["autograd_cache_miss"],
        "packed_bytes": sum(p.packed_bytes for p in plans),
        "gradient_error": gradient_error(x.grad.cpu(), options.gradient),
    }


def gradient_error(gradient: torch.Tensor, path: pathlib.Path) -> float:
    """How far it is from the one at `path`, relative to its length; the first one is put there."""
    if not path.exists():
        torch.save(gradient, path)
    return relative_error(gradient, torch.load(path))


def run(way: str, cache: pathlib.Path, options: argparse.Namespace, *more: str, bytecode: str = "") -> dict[str, Any]:
    """A start in a process of its own, with its caches in the folder `cache`; its report."""
    arguments = ["--child", way, *(f"--{k}={getattr(options, k)}" for k in ("device", "inner", *SIZES)), *more]
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    known = files_of_bytecode(bytecode)
    if bytecode:
        environment |= {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    report: dict[str, Any] = json.loads(own_process(__file__, arguments, environment)[-1])
    if bytecode:
        report["sources_compiled"] = files_of_bytecode(bytecode) - known
    print(way, json.dumps(report), file=sys.stderr, flush=True)  # what is known if it is cut short
    return report


def files_of_bytecode(directory: str) -> int:
    return sum(1 for _ in pathlib.Path(directory).rglob("*.pyc")) if directory else 0


def from_nothing(options: argparse.Namespace) -> dict[str, Any]:
    times: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for repeat in range(options.repeats):
        for way in WAYS if repeat % 2 == 0 else reversed(WAYS):
            with tempfile.TemporaryDirectory() as cache:
                times[way].append(run(way, pathlib.Path(cache), options))
    fastest = {way: {clock: min(t[clock] for t in times[way]) for clock in CLOCKS} for way in WAYS}
    ratio, cpu_ratio = (fastest["aot_hooks"][clock] / fastest["stock"][clock] for clock in CLOCKS)
    return {"times": times, "fastest": fastest, "ratio": ratio, "cpu_ratio": cpu_ratio}


def warm_starts(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)

        def begin(way: str, cache: str, options: argparse.Namespace) -> dict[str, Any]:
            gradient = f"--gradient={folder / cache}.pt"
            return run(way, folder / cache, options, gradient, bytecode=str(folder / "bytecode"))

        small = argparse.Namespace(**vars(options) | {"layers": 1, "tokens": 128, "width": 128})
        begin("aot_hooks", "first", small)
        cold = {way: begin(way, way, options) for way in WAYS}
        warm: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(options.repeats):
            for way in WAYS:
                warm[way].append(begin(way, way, options))
    return summarized(cold, warm) | {"cold": cold, "warm": warm}


def summarized(cold: dict[str, dict[str, Any]], warm: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Ratios of the fastest, by the clock and by the processor's time (for machines that have other work)."""
    found: dict[str, Any] = {}
    for clock in CLOCKS:
        best = {way: min(w[clock] for w in warm[way]) for way in WAYS}
        found[f"cold_over_warm_{clock}"] = {way: cold[way][clock] / best[way] for way in WAYS}
        found[f"warm_over_stock_warm_{clock}"] = best["aot_hooks"] / best["stock"]
    errors = {way: max(w["gradient_error"] for w in warm[way]) for way in WAYS}
    return found | {
        "all_hit": all(w["hits"] == 1 and w["misses"] == 0 for way in WAYS for w in warm[way]),
        "gradient_error": errors,
        "same_gradients": all(w["gradient_error"] <= 2 * errors["stock"] for w in warm["aot_hooks"]),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default=default_device())
    for name, size in zip(SIZES, (4, 4096, 8192, 2), strict=True):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--inner", choices=("inductor", "aten"), default="inductor", help="of warm starts")
    parser.add_argument("--repeats", type=int, default=3, help="starts of each way")
    parser.add_argument("--warm", action="store_true", help="measure warm starts")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)  # one start, in this process
    parser.add_argument("--gradient", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(start(options.child, options)))
        return 0
    device = torch.device(options.device)
    work = {name: getattr(options, name) for name in SIZES}
    if options.warm:
        work |= {"rounds": options.repeats, "inner": options.inner}
        result = conditions(device, **work, **warm_starts(options))
    else:
        work["repeats"] = options.repeats
        result = {"header": conditions(device, dtype="bfloat16", **work), **from_nothing(options)}
    print(json.dumps(result, indent=1))
    write(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
