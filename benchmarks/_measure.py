"""What the benchmarks share: where a number comes from, and what was measured on what.

conditions(device, ...)     device, torch, triton, commit, date      -> the header of every result
StepBytes                   bytes alive after forward, the peaks     <- torch.cuda's counters, or on a CPU every
measure_bytes(fw, bw, ...)                                              allocation that torch.profiler saw
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["GIB", "MIB", "StepBytes", "conditions", "format_columns", "measure_bytes", "relative_error"]

MIB = 1 << 20
GIB = 1 << 30
ROOT = pathlib.Path(__file__).resolve().parents[1]


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
    if said := os.environ.get("AOT_HOOKS_COMMIT"):
        return said

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes of one step, over what was allocated before it."""

    after_forward: int
    peak: int
    backward_peak: int


def measure_bytes(
    forward: Callable[[], Any], backward: Callable[[Any], None], device: torch.device
) -> tuple[StepBytes, Any]:
    """Runs `backward(forward())` once; returns its bytes and what the forward gave."""
    return (_measure_cuda if device.type == "cuda" else _measure_cpu)(forward, backward, device)


def _measure_cuda(
    forward: Callable[[], Any], backward: Callable[[Any], None], device: torch.device
) -> tuple[StepBytes, Any]:
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


def _measure_cpu(
    forward: Callable[[], Any], backward: Callable[[Any], None], device: torch.device
) -> tuple[StepBytes, Any]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        out = forward()
        with torch.profiler.record_function("the backward"):
            backward(out)
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    begins = next(event["ts"] for event in events if event.get("name") == "the backward")
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    return sum_changes(changes, begins), out


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


def format_columns(rows: list[list[str]]) -> str:
    """Text aligned in columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    )
