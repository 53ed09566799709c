"""Compile time of the block stack: stock Inductor beside aot_hooks with float8, each from nothing.

stock, aot_hooks, stock, aot_hooks, ...     a process and an empty cache folder each, taking turns
    |
    v
seconds from the first call to the end of the first backward, with the fastest of each and their ratio, as JSON

python benchmarks/bench_compile.py                  # a CUDA machine
python benchmarks/bench_compile.py --device cpu --layers 4 --tokens 128 --width 128
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import torch
from _measure import conditions
from model import first_step, stack_and_input

import aot_hooks

WAYS = ("stock", "aot_hooks")


def time_compile(way: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds to the end of the first backward, in this process and its children."""
    torch.manual_seed(0)
    sizes = {name: getattr(options, name) for name in ("layers", "width", "tokens", "batch")}
    stack, x = stack_and_input(torch.device(options.device), **sizes)
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if way == "aot_hooks":
        context = aot_hooks.saved_tensors_hooks(aot_hooks.float8())
    return first_step("inductor" if way == "stock" else "aot_hooks", stack, x, context)[1]


def time_in_new_process(way: str, arguments: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": str(pathlib.Path(cache) / "triton"),
        }
        command = [sys.executable, __file__, *arguments, "--time", way]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{way} failed with exit code {done.returncode}: its error is above")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description="Compile time from nothing: stock Inductor, aot_hooks with float8.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, help="write the result there as well")
    parser.add_argument("--time", choices=WAYS, help="time it once, in this process")
    options = parser.parse_args(arguments)
    if options.time:
        print(json.dumps(time_compile(options.time, options)))
        return 0

    work = {name: getattr(options, name) for name in ("layers", "width", "tokens", "batch", "repeats")}
    header = conditions(torch.device(options.device), dtype="bfloat16", **work)
    times: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for repeat in range(options.repeats):
        for way in WAYS if repeat % 2 == 0 else reversed(WAYS):
            times[way].append(time_in_new_process(way, arguments))
            print(f"{way}: {times[way][-1]}", file=sys.stderr, flush=True)
    fastest = {way: {clock: min(t[clock] for t in times[way]) for clock in ("wall_s", "cpu_s")} for way in WAYS}
    result = {
        "header": header,
        "times": times,
        "fastest": fastest,
        "ratio": fastest["aot_hooks"]["wall_s"] / fastest["stock"]["wall_s"],
        "cpu_ratio": fastest["aot_hooks"]["cpu_s"] / fastest["stock"]["cpu_s"],
    }
    text = json.dumps(result, indent=1)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
