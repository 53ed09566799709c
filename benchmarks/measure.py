"""The harness: what all benchmarks share, and `python benchmarks/measure.py`, which runs all of them on a CUDA machine.

    conditions(device, ...)         device, torch, triton, commit, date              -> the header of every result
    parser_of(doc), step_ms(step, device), free(device)       arguments, time, and what a row leaves behind
    measure_bytes(fw, bw, device)   bytes alive after the forward, the peaks
                                    from the allocator's counters, on a CPU from torch.profiler
    own_process(script, ...)        a part of a benchmark in a process of its own    -> the lines that it printed
    Served(target, ...)             a process that waits for commands, so that several compile and one is timed

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
import contextlib
import dataclasses
import datetime
import gc
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import aot_hooks
import cudagraph

MIB, GIB = 1 << 20, 1 << 30
ROOT = pathlib.Path(__file__).resolve().parents[1]
LAST_LINES = 40  # of a part's output, in measured.json


# ------------------------------------------------------------------------------------------------------------- results


def conditions(device: torch.device, **work: Any) -> dict[str, Any]:
    """What a result needs beside it to be made again: the machine, the versions, the commit, and the `work` done."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **work,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this checkout, with "+changes" if tracked files differ from it; outside of a checkout what the
    environment variable AOT_HOOKS_COMMIT says."""
    if named := os.environ.get("AOT_HOOKS_COMMIT"):
        return named

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def write(path: pathlib.Path | None, result: Any) -> None:
    """`result` as JSON into the file of `--json`, if one was named."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def first_line(error: BaseException) -> str:
    """For the row of a way that raised: these are other people's compilers, and the other rows go on."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def format_columns(rows: list[list[str]]) -> str:
    """Text aligned in columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    )


def print_rows(rows: Sequence[Any], failures: Sequence[str], format_rows: Callable[[Any], str]) -> int:
    """Print a table of `rows`, and each failure on the standard error. Returns the exit status."""
    if rows:
        print(format_rows(rows))
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures or not rows else 0


def number(value: float | None, spec: str, unit: float = 1) -> str:
    """A cell of such a table; empty where nothing was measured."""
    return "" if value is None else f"{value / unit:{spec}}"


def parser_of(doc: str | None, *, small: str = "", where: bool = False, **counts: int) -> argparse.ArgumentParser:
    """A parser of a benchmark with this docstring.

    It has --json, an argument for each of `counts` with its default, --device and --inner with `where`, and --small
    with the help `small` if there is one.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write conditions and rows there")
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    if where:
        parser.add_argument("--device", default=default_device())
        parser.add_argument("--inner", default="inductor", choices=("inductor", "aten"))
    if small:
        parser.add_argument("--small", action="store_true", help=small)
    return parser


ANYWHERE = "sizes for a CPU, inner aten: shows that it runs, no more"


# --------------------------------------------------------------------------------------------------- bytes, and errors


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes of one step, over what was allocated before it."""

    after_forward: int
    peak: int
    backward_peak: int


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_ms(step: Callable[[], Any], device: torch.device) -> float:
    """The time of one step, from an idle device to an idle device."""
    synchronize(device)
    began = time.perf_counter()
    step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - began)


def free(device: torch.device) -> None:
    """Drops what was compiled and captured, and gives the device's memory back: the next row begins like the first."""
    torch._dynamo.reset()
    aot_hooks.reset()
    cudagraph.reset()
    release(device)


def release(device: torch.device) -> None:
    """Gives memory that nobody uses back to the device, for other processes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def host_seconds(call: Callable[[], Any], repeats: int = 10) -> float:
    """The time of one call until it returns, while the device has nothing else to do."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    return took / repeats


def measure_bytes(
    forward: Callable[[], Any], backward: Callable[[Any], None], device: torch.device
) -> tuple[StepBytes, Any]:
    """Runs `backward(forward())` once; returns its bytes and what the forward gave."""
    return (_bytes_on_cuda if device.type == "cuda" else _bytes_on_cpu)(forward, backward, device)


def _bytes_on_cuda(forward: Callable[[], Any], backward: Any, device: torch.device) -> tuple[StepBytes, Any]:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = forward()
    after_forward = torch.cuda.memory_allocated(device) - before
    forward_peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    backward(out)
    torch.cuda.synchronize(device)
    backward_peak = torch.cuda.max_memory_allocated(device) - before
    return StepBytes(after_forward, max(forward_peak, backward_peak), backward_peak), out


def _bytes_on_cpu(forward: Callable[[], Any], backward: Any, device: torch.device) -> tuple[StepBytes, Any]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        out = forward()
        with torch.profiler.record_function("the backward"):
            backward(out)
    events = trace_events(profile)
    begins = next(event["ts"] for event in events if event.get("name") == "the backward")
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    return sum_changes(changes, begins), out


def trace_events(profile: torch.profiler.profile) -> list[dict[str, Any]]:
    """The events of its chrome trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def sum_changes(changes: list[tuple[float, int]], backward_begins: float) -> StepBytes:
    """From (time, bytes allocated or, below zero, released): what is alive when, and at most."""
    alive = after_forward = forward_peak = backward_peak = 0
    for when, byte_count in sorted(changes, key=lambda change: change[0]):
        alive += byte_count
        if when < backward_begins:
            after_forward = alive
            forward_peak = max(forward_peak, alive)
        else:
            backward_peak = max(backward_peak, alive)
    backward_peak = max(backward_peak, after_forward)
    return StepBytes(after_forward, max(forward_peak, backward_peak), backward_peak)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference|, over all elements, in float32."""
    reference = reference.float()
    return float((value.float() - reference).norm() / reference.norm())


def error_of(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """|found - exact| / |exact| over all parameters, in float64.

    Not one by one: some exact gradients are 0 (of a bias before BatchNorm, or of attention's keys).
    """
    assert found.keys() == exact.keys()
    off = sum(float((found[name].double() - g.double()).square().sum()) for name, g in exact.items())
    return float((off / sum(float(g.double().square().sum()) for g in exact.values())) ** 0.5)


# ----------------------------------------------------------------------------------------------------------- processes


def own_process(script: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
    """The lines that `script` prints in a process of its own. Its last line is the result, as JSON, by agreement.

    Raises:
        RuntimeError: it failed; with the end of its errors.
    """
    command, env = [sys.executable, script, *arguments], {**os.environ, **(environment or {})}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout.splitlines()


class Served:
    """A process that runs `target(connection, *arguments)`: it sends an answer to each command that it receives."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        context.Process(target=target, args=(theirs, *arguments), daemon=True).start()
        theirs.close()

    def send(self, command: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(command)

    def answer(self, command: str = "") -> Any:
        """What it sends, to `command` if there is one; a text is an error."""
        try:
            if command:
                self.connection.send(command)
            return self.connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return "its process ended"


# ---------------------------------------------------------------------------------------------------------- everything


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    seconds: int  # about what it takes on an H200; it is stopped after twice as long
    command: str  # {json} is the file it writes, {out} the folder

    def arguments(self, out: pathlib.Path) -> list[str]:
        json_path = out / f"{self.name}.json"
        return [sys.executable, *(a.format(json=json_path, out=out) for a in shlex.split(self.command))]


_STACK = '--steps 8 --warmup 4 --variants "stock,float8,float8 reduce-overhead,float8 cudagraphs"'
_LONG = "--inner aten --limit-gib 4 --layers 4 --width 2048 --start 8192"
# What tells most for its time stands first.
PARTS = (
    Part("tests", 240, "-m pytest -m gpu -v -n 8 --dist loadfile -p no:cacheprovider tests"),
    Part("host", 120, "benchmarks/bench_cudagraph_host.py --json {json}"),
    Part("stack", 150, f"benchmarks/bench_cudagraph_stack.py {_STACK} --json {{json}}"),
    Part("fuzz", 360, "tests/support/fuzz_cudagraph.py --device cuda --count 10000 --reset-every 100"),
    Part("memory", 240, "benchmarks/bench_memory.py --json {json}"),
    Part("compile", 90, "benchmarks/bench_compile.py --repeats 3 --json {json}"),
    Part("offload", 120, "benchmarks/bench_offload.py --json {json}"),
    Part("warm_start", 180, "benchmarks/bench_compile.py --warm --repeats 5 --json {json}"),
    Part("kernels", 60, "benchmarks/bench_kernels.py --json {json}"),
    Part("long_context", 120, f"examples/offload_long_context.py {_LONG}"),
    Part("convergence", 360, "benchmarks/convergence.py --device cuda --json {json}"),
    Part("train_gpt", 120, "examples/train_gpt.py --setting full --steps 200 --out {out}/train_gpt"),
)


def run_part(part: Part, out: pathlib.Path, limit_s: float) -> dict[str, Any]:
    """Runs it, its output to `out`/<part>.txt; returns what became of it, as `measured.json` has it."""
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
    measured: dict[str, Any] = {"conditions": conditions(torch.device(default_device())), "parts": {}}
    ends = time.monotonic() + 60 * minutes
    for part in parts:
        left = ends - time.monotonic()
        if left < part.seconds:
            print(f"{part.name:14} not begun: takes about {part.seconds} s, {left:.0f} s are left", flush=True)
            continue
        did = measured["parts"][part.name] = run_part(part, out, min(left, 2 * part.seconds))
        ended = "stopped" if did["exit_code"] is None else f"exit code {did['exit_code']}"
        print(f"{part.name:14} {did['seconds']:7.1f} s  {ended}  {(did['last_lines'] or [''])[-1]}", flush=True)
        write(out / "measured.json", measured)
    return measured


def main(arguments: list[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    known = {part.name: part for part in parts}
    parser = argparse.ArgumentParser(description="Everything that a CUDA machine has to show, in one go.")
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
