"""Everything that a CUDA machine has to show, in one go: tests, fuzzing, every benchmark, each in a process of its own.

    PARTS, or those named  --> run in order, within --minutes  --> DIR/measured.json   exit codes, seconds, last lines
                                                              `-> DIR/<part>.json     what each benchmark wrote

measured.json is written after every part, so a run that is cut off leaves what it did. A part that would not end within
the minutes that are left is not begun. benchmarks/README.md says how a file becomes a current result.

    python benchmarks/measure.py --list
    python benchmarks/measure.py --minutes 25 --out out/measured
    python benchmarks/measure.py tests host stack                       # only these
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from _measure import ROOT, conditions

LAST_LINES = 40


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    seconds: int  # about what it takes on an H200; it is stopped after twice as long
    command: str  # {json} is the file it writes, {out} the folder

    def arguments(self, out: pathlib.Path) -> list[str]:
        json_path = out / f"{self.name}.json"
        return [sys.executable, *(a.format(json=json_path, out=out) for a in shlex.split(self.command))]


# What tells most for its time stands first.
PARTS = (
    Part("tests", 240, "-m pytest -m gpu -v -n 8 --dist loadfile -p no:cacheprovider tests"),
    Part("host", 120, "benchmarks/bench_cudagraph_host.py --json {json}"),
    Part(
        "stack", 150,
        "benchmarks/bench_cudagraph_models.py --only stack --steps 8 --warmup 4 --variants "
        '"stock,float8,float8 reduce-overhead,float8 cudagraphs" --json {json}',
    ),
    Part("models", 90, "benchmarks/bench_cudagraph_models.py --only hf --layers 1 --steps 15 --warmup 5 --json {json}"),
    Part("fuzz", 360, "tests/support/fuzz_cudagraph.py --device cuda --count 10000 --reset-every 100"),
    Part("memory", 240, "benchmarks/bench_memory.py --json {json}"),
    Part("compile", 90, "benchmarks/bench_compile.py --repeats 3 --json {json}"),
    Part("offload", 120, "benchmarks/bench_offload.py --json {json}"),
    Part("warm_start", 180, "benchmarks/bench_warm_start.py --rounds 5 --json {json}"),
    Part("kernels", 60, "benchmarks/bench_kernels.py --json {json}"),
    Part(
        "long_context", 120,
        "examples/offload_long_context.py --inner aten --limit-gib 4 --layers 4 --width 2048 --start 8192",
    ),
    Part("convergence", 360, "benchmarks/convergence.py --device cuda --json {json}"),
    Part("train_gpt", 120, "examples/train_gpt.py --setting full --steps 200 --out {out}/train_gpt"),
)  # fmt: skip


def run_part(part: Part, out: pathlib.Path, limit_s: float) -> dict[str, Any]:
    """Run it, its output to the terminal and to `out`/<part>.txt; what became of it, see `measured.json`."""
    log = out / f"{part.name}.txt"
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    began = time.monotonic()
    with log.open("w") as lines:
        try:
            code: int | None = subprocess.run(
                part.arguments(out), cwd=ROOT, env=env, stdout=lines, stderr=subprocess.STDOUT, timeout=limit_s
            ).returncode
        except subprocess.TimeoutExpired:
            code = None  # stopped: what it wrote until then counts
    wrote = out / f"{part.name}.json"
    return {
        "command": part.command,
        "seconds": round(time.monotonic() - began, 1),
        "exit_code": code,
        "result": json.loads(wrote.read_text()) if wrote.exists() else None,
        "last_lines": log.read_text(errors="replace").splitlines()[-LAST_LINES:],
    }


def run_parts(parts: Sequence[Part], out: pathlib.Path, minutes: float) -> dict[str, Any]:
    """All `parts` that fit into `minutes`, by their expected seconds; `out`/measured.json holds what is returned."""
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measured: dict[str, Any] = {"conditions": conditions(device), "parts": {}}
    ends = time.monotonic() + 60 * minutes
    for part in parts:
        left = ends - time.monotonic()
        if left < part.seconds:
            print(f"{part.name:14} not begun: takes about {part.seconds} s, {left:.0f} s are left", flush=True)
            continue
        did = measured["parts"][part.name] = run_part(part, out, min(left, 2 * part.seconds))
        said = "stopped" if did["exit_code"] is None else f"exit code {did['exit_code']}"
        print(f"{part.name:14} {did['seconds']:7.1f} s  {said}  {(did['last_lines'] or [''])[-1]}", flush=True)
        (out / "measured.json").write_text(json.dumps(measured, indent=1) + "\n")
    return measured


def main(arguments: list[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    known = {part.name: part for part in parts}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(known)}; default: all, in this order")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/measured"))
    parser.add_argument("--list", action="store_true", help="only say what there is and how long it takes")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.parts if name not in known]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in options.parts] or list(parts)
    if options.list:
        for part in chosen:
            print(f"{part.name:14} {part.seconds:5} s  {part.command}")
        return 0
    measured = run_parts(chosen, options.out.resolve(), options.minutes)
    failed = [name for name, did in measured["parts"].items() if did["exit_code"] != 0]
    print(f"{len(measured['parts'])} of {len(chosen)} parts run; failed or stopped: {', '.join(failed) or 'none'}")
    return 1 if failed or len(measured["parts"]) < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
