"""Warm starts: a process that finds its graphs in torch's cache, beside the one that compiled them.

stock cold, ours cold, stock warm, ours warm, stock warm, ours warm, ...     a process each; a cache directory each way
    |
    v
seconds from the first call to the end of the first backward: cold / warm (how much a warm start saves), and ours warm /
stock warm (what the hooks cost there), as JSON

Every process runs an eager step of the same sizes before its clock starts: the device's context, the libraries that it
loads and the allocator's memory are no work of a compiler, and no cache saves them. What Python imports at the first
call is on the clock, with its bytecode on disk, as an installation leaves it: pip writes it; images of containers often
have it left out and forbid it to be written, and then every process compiles the 600 sources of torch's compiler again,
which takes as long as what is to be measured. So a small start that is not measured writes it to a directory of this
benchmark's own.

Gradients are compared with those of the same way's cold start. Attention's backward on CUDA adds up in no fixed order,
so two runs of stock torch differ; ours may differ by twice as much, and where stock's are the same, not at all.

python benchmarks/bench_warm_start.py                                                  # a CUDA machine
python benchmarks/bench_warm_start.py --device cpu --layers 4 --tokens 128 --width 128
python benchmarks/bench_warm_start.py --device cpu --layers 4 --tokens 128 --width 128 --inner aten  # and "aot_eager"
python benchmarks/bench_warm_start.py --key                                            # the key of 2,000 parameters

`--key` times what this package does for a key of a graph with that many parameters, beside AOTAutograd's tracing of it.
`--profile PATH` writes there where the time of one more warm start of each way goes.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import json
import os
import pathlib
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from _measure import conditions
from model import eager_step, first_step, stack_and_input
from torch import nn

import aot_hooks

WAYS = ("stock", "aot_hooks")


def start(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the end of the first backward in this process, and what the cache did."""
    torch.manual_seed(0)
    sizes = {name: getattr(options, name) for name in ("layers", "width", "tokens", "batch")}
    stack, x = stack_and_input(torch.device(options.device), **sizes)
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if way == "aot_hooks":
        context = aot_hooks.saved_tensors_hooks(aot_hooks.float8())
    inner: dict[str, Any] = {}
    if options.inner == "aten":
        torch._functorch.config.bundled_autograd_cache = True
        if way == "stock":  # torch 2.13 and later; what it makes of a backward that is compiled late cannot be stored
            torch._functorch.config.force_autograd_cache = True
            torch._functorch.config.force_non_lazy_backward_lowering = True
        inner = {"options": {"inner": "aten"}} if way == "aot_hooks" else {}
    backend = {"inductor": "inductor", "aten": "aot_eager"}[options.inner] if way == "stock" else "aot_hooks"
    eager_step(stack, x)
    with profiled() if options.profile else contextlib.nullcontext():
        compiled, seconds = first_step(backend, stack, x, context, **inner)
    counters = torch._dynamo.utils.counters["aot_autograd"]
    hits, misses = counters["autograd_cache_hit"], counters["autograd_cache_miss"]
    plans = aot_hooks.last_plans(compiled) if way == "aot_hooks" else ()
    packed_bytes = sum(p.packed_bytes for p in plans)
    error = gradient_error(x.grad.cpu(), options.gradient)
    return {**seconds, "hits": hits, "misses": misses, "packed_bytes": packed_bytes, "gradient_error": error}


def gradient_error(gradient: torch.Tensor, path: pathlib.Path) -> float:
    """How far it is from the one at `path`, relative to its length; the first one is put there."""
    if not path.exists():
        torch.save(gradient, path)
    first = torch.load(path).float()
    return float((gradient.float() - first).norm() / first.norm())


@contextlib.contextmanager
def profiled() -> Iterator[None]:
    """Print where the time goes: as Dynamo counts it, imports, garbage collections, and function by function."""
    before, profile = len(sys.modules), cProfile.Profile()
    collections: list[float] = []
    started = 0.0

    def collecting(phase: str, info: dict[str, int]) -> None:
        nonlocal started
        if phase == "start":
            started = time.perf_counter()
        else:
            collections.append(time.perf_counter() - started)

    gc.callbacks.append(collecting)
    profile.enable()
    yield
    profile.disable()
    gc.callbacks.remove(collecting)
    found = pstats.Stats(profile)
    print(f"{len(sys.modules) - before} modules imported")  # their time: Python 3.12 says 0, they are nested
    print(f"garbage collected {len(collections)} times in {sum(collections):.2f} s, at most {max(collections):.2f} s")
    print(torch._dynamo.utils.compile_times(repr="str", aggregate=True))
    for order in ("cumulative", "tottime"):
        found.sort_stats(order).print_stats(60)


def time_key(options: argparse.Namespace) -> dict[str, Any]:
    """What the key costs for a model of `options.parameters` parameters, beside compiling it with inner "aten" (tracing
    and partitioning alone, so the share is of the least that a compilation takes)."""
    from aot_hooks.cache import key as cache_key
    from aot_hooks.eager import modules
    from aot_hooks.settings.setting import Setting

    count = options.parameters // 2
    model = nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(4, 4), nn.Tanh())))
    x = torch.randn(2, 4)
    setting, found = Setting(aot_hooks.float8()), {}

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        started = time.perf_counter()
        key = cache_key.key_of(gm, inputs, setting, {}, roots=modules.roots())
        _ = key.digest
        found["key_s"] = time.perf_counter() - started
        started = time.perf_counter()
        cache_key.without_names(gm)
        found["normalize_s"] = time.perf_counter() - started
        found["placeholders"] = len(inputs)
        started = time.perf_counter()
        compiled = aot_hooks.backend.with_options({"inner": "aten", "policy": aot_hooks.float8()})(gm, inputs)
        found["aot_s"] = time.perf_counter() - started
        return compiled

    torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    return found | {"share_of_aot": (found["key_s"] + found["normalize_s"]) / found["aot_s"]}


def run(
    way: str, folder: str, options: argparse.Namespace, *more: str, cache: str | None = None
) -> tuple[dict[str, Any], str]:
    """A start in a process of its own: its report, and what else it printed. `cache` is `way` if it is not said."""
    directory, bytecode = f"{folder}/{cache or way}", f"{folder}/bytecode"
    arguments = [f"--{k}={getattr(options, k)}" for k in ("device", "layers", "tokens", "width", "batch", "inner")]
    command = [sys.executable, __file__, "--child", way, *arguments, f"--gradient={directory}.pt", *more]
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": directory, "TRITON_CACHE_DIR": f"{directory}/triton"}
    env |= {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    known = files_of_bytecode(bytecode)
    started = time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-4000:])
    *printed, text = done.stdout.splitlines()
    report: dict[str, Any] = json.loads(text) | {"sources_compiled": files_of_bytecode(bytecode) - known}
    # what is known if it is cut short
    print(
        way, " ".join(more), json.dumps(report), f"{time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True
    )
    return report, "\n".join(printed)


def files_of_bytecode(directory: str) -> int:
    return sum(1 for _ in pathlib.Path(directory).rglob("*.pyc"))


def summarized(cold: dict[str, dict[str, Any]], warm: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Ratios of the fastest, by the clock and by the processor's time (for machines that have other work)."""
    found: dict[str, Any] = {}
    for clock in ("wall_s", "cpu_s"):
        best = {way: min(w[clock] for w in warm[way]) for way in WAYS}
        found[f"cold_over_warm_{clock}"] = {way: cold[way][clock] / best[way] for way in WAYS}
        found[f"warm_over_stock_warm_{clock}"] = best["aot_hooks"] / best["stock"]
    errors = {way: max(w["gradient_error"] for w in warm[way]) for way in WAYS}
    return found | {
        "all_hit": all(w["hits"] == 1 and w["misses"] == 0 for way in WAYS for w in warm[way]),
        "gradient_error": errors,
        "same_gradients": all(w["gradient_error"] <= 2 * errors["stock"] for w in warm["aot_hooks"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--inner", choices=("inductor", "aten"), default="inductor")
    parser.add_argument("--rounds", type=int, default=3, help="warm starts of each way")
    parser.add_argument("--key", action="store_true", help="time the key instead")
    parser.add_argument("--parameters", type=int, default=2000)
    parser.add_argument("--json", type=pathlib.Path, help="write the result there as well")
    parser.add_argument("--profile", help="write there where the time of a warm start goes")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--gradient", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(start(options.child, options)))
        return
    device = torch.device("cpu" if options.key else options.device)
    if options.key:
        tell(conditions(device, parameters=options.parameters, **time_key(options)), options.json)
    else:
        work = {k: getattr(options, k) for k in ("layers", "tokens", "width", "batch", "rounds", "inner")}
        with tempfile.TemporaryDirectory() as folder:
            small = argparse.Namespace(**vars(options) | {"layers": 1, "tokens": 128, "width": 128})
            run("aot_hooks", folder, small, cache="first")
            cold = {way: run(way, folder, options)[0] for way in WAYS}
            warm: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
            for _ in range(options.rounds):
                for way in WAYS:
                    warm[way].append(run(way, folder, options)[0])
            tell(conditions(device, **work, **summarized(cold, warm), cold=cold, warm=warm), options.json)
            if options.profile:
                profiles = [f"{way}\n{run(way, folder, options, '--profile=1')[1]}\n" for way in WAYS]
                pathlib.Path(options.profile).write_text("\n".join(profiles))


def tell(result: dict[str, Any], path: pathlib.Path | None) -> None:
    text = json.dumps(result, indent=1)
    print(text, flush=True)
    if path is not None:
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()
