"""What offload costs and gives: time, memory, and how much of the copies hides behind the compute.

    the work of bench_memory.py, its rounds and its counters        -> ms, saved GiB, peak GiB, errors
    the plan of each variant that offloads                          -> asked, planned and host GiB, predicted stall
    a profile of one step, its chrome trace read as text            -> copies each way, ms, GB/s, share beside kernels

A copy's hidden share is the part of its time in which a kernel runs. JSON goes to --json.

    python benchmarks/bench_offload.py --json offload.json         # a CUDA machine with 80 GiB
    python benchmarks/bench_offload.py --small                     # a look at whether all of it runs
    python benchmarks/bench_offload.py --timeline ours_offload     # also where the compute pauses, and each copy
    python benchmarks/bench_offload.py --table offload.json        # no run: a result as the table of docs/offload.md
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import sys
from typing import Any

import torch
from bench_memory import Bench, Row, parse_arguments, run
from measure import GIB, format_columns, trace_events, write
from ways import Forward, Way, patched

import aot_hooks
from aot_hooks.graphs.speeds import measured_rates

TITLES = {
    "stock": "`torch.compile`",
    "ours_offload": "`offload()`",
    "ours_float8_rowwise": "`float8()`",
    "ours_float8_offload": "`offload(then=float8())`",
    "ours_int8_offload": "`offload(then=int8())`",
    "ours_offload_all": "`offload(max_stall_ms=math.inf)`",
    "inductor_offload": "Inductor's activation offloading",
    "save_on_cpu": "`save_on_cpu(pin_memory=True)`",
}


@dataclasses.dataclass
class Copies:
    """Of one direction in one step, from a trace."""

    count: int = 0
    total_ms: float = 0.0
    hidden_ms: float = 0.0
    nbytes: int = 0


@dataclasses.dataclass
class OffloadRow:
    """What a variant planned, and what a profile of one step saw."""

    name: str
    asked_bytes: int = 0
    planned_bytes: int = 0
    planned_stall_ms: float = 0.0
    full_stall_ms: float = 0.0
    forward_ms: float = 0.0  # estimated
    backward_ms: float = 0.0
    step_kernels_ms: float | None = None
    to_host: Copies = dataclasses.field(default_factory=Copies)
    to_device: Copies = dataclasses.field(default_factory=Copies)

    @property
    def hidden_share(self) -> float | None:
        total = self.to_host.total_ms + self.to_device.total_ms
        return (self.to_host.hidden_ms + self.to_device.hidden_ms) / total if total else None


DEFAULT = (
    "stock,ours_offload,ours_offload_all,ours_float8_rowwise,ours_float8_offload,ours_int8_offload,save_on_cpu,"
    "inductor_offload"
)


def planned(row: OffloadRow, function: Any) -> None:
    for plan in aot_hooks.last_plans(function):
        for t in plan.transfers:
            row.asked_bytes += t.nbytes
            row.planned_bytes += t.nbytes if t.placement.offloaded else 0
            row.planned_stall_ms += t.placement.stall_ms
            row.full_stall_ms, row.forward_ms, row.backward_ms = t.full_stall_ms, t.forward_ms, t.backward_ms


def format_timeline(events: list[dict[str, Any]], least_ms: float = 0.2) -> str:
    """What the compute stream waits for: its pauses, with the kernels around them, and the copies, by start."""
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: e["ts"])
    begin = kernels[0]["ts"]
    lines = []
    for before, after in itertools.pairwise(kernels):
        pause = (after["ts"] - before["ts"] - before["dur"]) / 1e3
        if pause >= least_ms:
            at = (after["ts"] - begin) / 1e3 - pause
            lines.append((at, f"{at:9.2f}  pause {pause:6.2f}  {before['name'][:40]} | {after['name'][:40]}"))
    for e in events:
        if e.get("cat") == "gpu_memcpy" and ("DtoH" in e["name"] or "HtoD" in e["name"]):
            at = (e["ts"] - begin) / 1e3
            size = int(e.get("args", {}).get("bytes", 0)) / 2**20
            lines.append((at, f"{at:9.2f}  {e['name'][7:11]} {e['dur'] / 1e3:7.2f}  {size:.1f} MiB"))
    last = kernels[-1]
    return "\n".join([text for _, text in sorted(lines)] + [f"{(last['ts'] + last['dur'] - begin) / 1e3:9.2f}  end"])


def profiled(bench: Bench, way: Way, function: Forward, row: OffloadRow, timeline: bool) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with patched(way):
        bench.step(way, function)
        bench.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            bench.step(way, function)
            bench.synchronize()
    events = trace_events(profile)
    read_trace(events, row)
    if timeline:
        print(f"\n{row.name}, milliseconds from the first kernel:\n{format_timeline(events)}")


def read_trace(events: list[dict[str, Any]], row: OffloadRow) -> None:
    """Sum up the copies between host and device of a chrome trace, and how long kernels ran meanwhile."""
    kernels = merged([(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"])
    row.step_kernels_ms = sum(end - start for start, end in kernels) / 1e3
    for event in events:
        name = event.get("name", "")
        if event.get("cat") != "gpu_memcpy" or not ("DtoH" in name or "HtoD" in name):
            continue
        copies = row.to_host if "DtoH" in name else row.to_device
        start, end = event["ts"], event["ts"] + event["dur"]
        copies.count += 1
        copies.total_ms += event["dur"] / 1e3
        copies.hidden_ms += sum(max(0.0, min(end, b) - max(start, a)) for a, b in kernels) / 1e3
        copies.nbytes += int(event.get("args", {}).get("bytes", 0))


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans without overlaps, ascending."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def format_offload(rows: list[OffloadRow]) -> str:
    lines = [["variant", "asked", "planned GiB", "stall ms", "of all", "est. fw", "bw ms", "kernels ms"]]
    lines[0] += ["out ms", "hidden", "GB/s", "back ms", "hidden", "GB/s", "hidden share"]
    for r in rows:
        line = [r.name, f"{r.asked_bytes / GIB:.2f}", f"{r.planned_bytes / GIB:.2f}", f"{r.planned_stall_ms:.1f}"]
        line += [f"{r.full_stall_ms:.1f}", f"{r.forward_ms:.1f}", f"{r.backward_ms:.1f}"]
        line.append("" if r.step_kernels_ms is None else f"{r.step_kernels_ms:.1f}")
        for c in (r.to_host, r.to_device):
            speed = f"{c.nbytes / c.total_ms / 1e6:.1f}" if c.total_ms else ""
            line += [f"{c.total_ms:.1f}", f"{c.hidden_ms:.1f}", speed]
        line.append("" if r.hidden_share is None else f"{r.hidden_share:.3f}")
        lines.append(line)
    return format_columns(lines)


def format_markdown(result: dict[str, Any]) -> str:
    """The table of docs/offload.md, from what --json wrote: in the order of `TITLES`, what was run; and on what."""
    on, each_way = result["header"], result["header"]["rates"]["to_host"] / 1e9
    text = f"{on['device']} ({each_way:.0f} GB/s each way), torch {on['torch'].split('+')[0]}, {on['inner'].title()}; "
    text += f"{on['rounds']} rounds, the fastest step of each; commit {on['commit'].split('+')[0][:7]}:"
    header = ["", "ms", "/ stock", "medians / stock", "sent GiB", "saved on the device, GiB", "peak GiB", "hidden"]
    lines = [header, ["---"] * len(header)]
    rows = {row["name"]: row for row in result["rows"] if row["error"] is None}
    copies = {row["name"]: row for row in result["offload"]}
    for name, title in TITLES.items():
        if name not in rows:
            continue
        row, sent, share = rows[name], copies[name]["to_host"]["nbytes"] / GIB, copies[name]["hidden_share"]
        line = [title, f"{row['min_ms']:.1f}", f"{row['ratio_to_stock']:.3f}"]
        line.append(f"{row['median_ms'] / rows['stock']['median_ms']:.3f}")
        line.append(f"{sent:.2f}" if sent else "")
        line += [f"{row[key] / GIB:.2f}" for key in ("after_forward_bytes", "peak_bytes")]
        lines.append([*line, f"{share:.1%}" if share is not None else ""])
    return "\n".join(
        [text, "", *("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines)]
    )


def main(arguments: list[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "--table" in arguments:
        print(format_markdown(json.loads(pathlib.Path(arguments[arguments.index("--table") + 1]).read_text())))
        return 0
    options = parse_arguments(arguments, DEFAULT)
    bench = Bench(options)
    offload_rows: list[OffloadRow] = []

    def looked_at(way: Way, function: Forward, row: Row) -> None:
        offload_row = OffloadRow(row.name)
        if way.backend == "aot_hooks":
            planned(offload_row, function)
        if bench.device.type == "cuda":
            profiled(bench, way, function, offload_row, row.name in options.timeline.split(","))
        offload_rows.append(offload_row)

    result = run(bench, options, looked_at, rates=dataclasses.asdict(measured_rates(bench.device)))
    result["offload"] = [dataclasses.asdict(row) | {"hidden_share": row.hidden_share} for row in offload_rows]
    result["host_memory"] = aot_hooks.offload_stats()
    write(options.json, result)
    print("\n" + format_offload(offload_rows))
    print("\n" + json.dumps(result["host_memory"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
