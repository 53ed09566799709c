"""Hooks in a step of many graphs on several GPUs: step time, bytes saved, sent and at the peak, for each rank.

    torchrun --nproc-per-node 2 benchmarks/bench_distributed.py --json out.json
    torchrun --nproc-per-node 2 benchmarks/bench_distributed.py --parallel ddp --rows stock,offload
    torchrun --nproc-per-node 1 benchmarks/bench_distributed.py --varied --rows stock,float8     lengths that differ
    torchrun --nproc-per-node 4 benchmarks/bench_distributed.py --parallel pipeline --rows stock,offload
    torchrun --nproc-per-node 2 benchmarks/bench_distributed.py --vocabulary 128256 --rows stock,checkpointing
    bash benchmarks/bench_distributed.sh 2          each parallel, the rows that a release needs

The work is benchmarks/model.py with one sequence a rank. With `--vocabulary` it is a whole fine-tuning step of
transformers' Llama under FSDP2 (benchmarks/llama.py): its loss, AdamW, gradients freed after each step. All ways but
`stock` then compute the loss in chunks. All but `ddp` compile block by block; `ddp` compiles the whole
model, which Dynamo cuts at the buckets. `fsdp_tp` splits each block over two ranks, and shards it over the others.
`pipeline` gives each rank as many blocks, and runs 8 sequences as microbatches (1F1B). Times are those of the slowest
rank, in a loop that waits for the device after each step. Bytes are of rank 0, over what is allocated before the step:
parameters and gradients. Each row is printed, and written, as soon as it is measured. A row may be named twice: what
differs between its two runs is the machine. `clock_mhz` is the GPU's clock after each timed step.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import itertools
import json
import logging
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from llama import LlamaByBlocks, make_llama
from measure import GIB, conditions, first_line, free, measure_bytes, parser_of, step_ms, synchronize, write
from model import Stack, stack_and_input
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import aot_hooks
import cudagraph
from aot_hooks.planning import apart

GAIN = apart.GAIN
HOOKS = {
    "no hooks": None,
    "float8": aot_hooks.float8(),
    "offload": aot_hooks.offload(across_graphs=True),
    "offload(then=float8)": aot_hooks.offload(then=aot_hooks.float8(), across_graphs=True),
    **{
        f"offload(then=float8) {name}": aot_hooks.offload(then=aot_hooks.float8(), max_stall_ms=ms, across_graphs=True)
        for name, ms in (("4 ms", 4.0), ("8 ms", 8.0), ("all", math.inf))
    },
    "offload(then=float8) 12 ms": aot_hooks.offload(
        then=aot_hooks.float8(), max_stall_ms=12.0, in_flight_bytes=768 << 20, across_graphs=True
    ),
    "offload(then=float8) one graph": aot_hooks.offload(then=aot_hooks.float8()),
}
CAPTURED = {"cudagraphs": "no hooks", "float8 cudagraphs": "float8"}  # the same rows, with `options["cudagraphs"]`
AGAIN = " again"  # end of the names of rows with options["recompute_pointwise"]
HOOKS |= {
    name + AGAIN: HOOKS[name]
    for name in (
        "no hooks",
        "float8",
        *(f"offload(then=float8){stall}" for stall in ("", " 4 ms", " 8 ms", " 12 ms", " all")),
    )
}
BUDGETS = {  # a share of a row's peak
    "budget": ("stock", 0.5),
    "tight budget": ("stock", 0.25),
    "tight budget alike": ("stock", 0.25),  # no call of a graph holds less than another
    "budget as checkpointing": ("checkpointing", 1.0),
    "budget of twice checkpointing": ("checkpointing", 2.0),
}
ROWS = ("stock", "checkpointing", *HOOKS, *CAPTURED, *BUDGETS, "save_on_cpu")
LENGTHS = (11, 8, 14, 16, 9, 13, 10, 15, 12)  # of `--varied`, step by step, in sixteenths of `tokens`
MICROBATCHES = 8
WARM_UP = 41  # steps: plans of hooks are made after the third, judged after five more, and replaced up to six times.
# Rows without hooks take as many, because a GPU lowers its clock as it gets warm.
AGREE_S = 60  # seconds within which all ranks end a row; what they run after the last step takes a few
MOST_WARM_UP = 16  # steps of a pipeline, each of 8 microbatches


def prepared(
    row: str, said: argparse.Namespace, stack: Stack | LlamaByBlocks, mesh: DeviceMesh, budget_gib: float
) -> Any:
    """`stack` compiled and distributed, as a function of x."""
    one_graph, parallel, inner = "one graph" in row, said.parallel, said.inner
    how: dict[str, Any] = {}
    if row in HOOKS or row in CAPTURED or row in BUDGETS:
        nbytes = int(budget_gib * GIB) + ("alike" in row)  # a byte more, so that no stored plan is taken
        policy = aot_hooks.budget(f"{nbytes}B") if row in BUDGETS else HOOKS[CAPTURED.get(row, row)]
        options = {"inner": inner, "policy": policy, "cudagraphs": row in CAPTURED}
        options["recompute_pointwise"] = row.endswith(AGAIN)
        if parallel == "ddp":  # what crosses from bucket to bucket is an input and an output, and nobody else's
            options["scope"] = "no_static"
        how = {"backend": "aot_hooks", "options": options}
    elif inner == "aten":
        how = {"backend": "aot_eager"}
    how["dynamic"] = True if said.varied else None
    if parallel == "ddp" and not one_graph:
        if row == "checkpointing":  # a graph that is cut at the buckets can hold no checkpoint
            for block in stack.blocks:
                block.compile(**how)
            return functools.partial(nn.parallel.DistributedDataParallel(stack), checkpointed=True)
        return torch.compile(nn.parallel.DistributedDataParallel(stack), **how)
    if "tp" in parallel:
        columns, rows = ("attention.q", "attention.k", "attention.v", "w1", "w3"), ("attention.out", "w2")
        plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        for block in stack.blocks:
            parallelize_module(block, mesh["tp"], plan)
    if isinstance(stack, LlamaByBlocks):
        last = dict(how)
        if row != "stock" and row not in BUDGETS:
            options = how.get("options", {"inner": inner}) | {"chunk": True}
            last |= {"backend": "aot_hooks", "options": options}
        stack.last.compile(**last)
        fully_shard(stack.last, mesh=mesh["fsdp"])
    if one_graph:  # the layers of a rank: what a single plan sends
        if parallel != "pipeline":
            return torch.compile(stack, **how)
        stack.compile(**how)
        return pipeline(stack, mesh, checkpointed=False)
    for block in stack.blocks:
        block.compile(**how)
        if "fsdp" in parallel:
            fully_shard(block, mesh=mesh["fsdp"])
    if "fsdp" in parallel:
        fully_shard(stack, mesh=mesh["fsdp"])
    if parallel == "pipeline":
        return pipeline(stack, mesh, checkpointed=row == "checkpointing")
    return functools.partial(stack, checkpointed=row == "checkpointing")


def mean_square(y: Tensor, target: Tensor | None = None) -> Tensor:
    return y.float().pow(2).mean()


def pipeline(stack: Stack, mesh: DeviceMesh, checkpointed: bool) -> Any:
    """`stack` as the stage of this rank: a function of all microbatches that runs forward and backward of each."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    if checkpointed:
        stack.forward = functools.partial(stack.forward, checkpointed=True)
    stage = PipelineStage(stack, rank, ranks, next(stack.parameters()).device)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mean_square)

    def run(x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        last = {"target": x, "losses": losses} if rank == ranks - 1 else {}
        schedule.step(*[x] if rank == 0 else [], **last)
        return torch.stack(losses).mean() if losses else x.new_zeros(())

    return run


def work_of(said: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> tuple[Stack | LlamaByBlocks, Tensor]:
    """The model of this rank, and its input."""
    torch.manual_seed(0)
    is_pipeline = said.parallel == "pipeline"
    layers, batch = (said.layers // mesh.size(), MICROBATCHES) if is_pipeline else (said.layers, 1)
    if said.vocabulary:
        model = make_llama(layers, said.width, tokens=said.tokens, vocabulary=said.vocabulary, device=device)
        return LlamaByBlocks(model), torch.randint(said.vocabulary, (1, said.tokens), device=device)
    return stack_and_input(device, layers=layers, width=said.width, tokens=said.tokens, batch=batch)


def counted(before: dict[str, Any], replays: int, steps: int) -> dict[str, Any]:
    """What was sent and replayed in `steps` steps, since the counts `before` and so many `replays`."""
    after, captures = aot_hooks.offload_stats(), cudagraph.stats()
    return {
        "sent_gib": (after["sent_bytes"] - before["sent_bytes"]) / steps / GIB,
        "could_send_gib": after["step_bytes"] / GIB,
        "graphs_in_step": after["step_graph_count"],
        "recordings": captures["recordings"],
        "replays_in_step": (captures["replays"] - replays) / steps,
        "given_up": captures["given_up"],
    }


def planned(plans: Sequence[aot_hooks.Plan]) -> dict[str, Any]:
    """What the plans of a budget predict."""
    return {
        "predicted_gib": max((plan.peak_bytes for plan in plans), default=0) / GIB or None,
        "predicted_ratio": max((plan.step_ratio for plan in plans), default=None),
        "tight_calls": max((plan.in_step.tight_calls for plan in plans if plan.in_step), default=0),
    }


def measured(
    row: str, said: argparse.Namespace, mesh: DeviceMesh, device: torch.device, peaks: dict[str, float]
) -> dict[str, Any]:
    """A row of the result. `peaks`: GiB at the peak of a step, by row, of those before."""
    budget_gib = 0.0
    if row in BUDGETS:
        of, share = BUDGETS[row]
        if of not in peaks:
            raise ValueError(f"the row {row!r} needs the row {of!r} before it")
        budget_gib = share * peaks[of]
    apart.GAIN = math.inf if "alike" in row else GAIN
    is_pipeline = said.parallel == "pipeline"
    stack, x = work_of(said, mesh, device)
    if is_pipeline:  # nothing frees gradients, so a plan should count them in no step
        for p in stack.parameters():
            p.grad = torch.zeros_like(p)
    run = prepared(row, said, stack, mesh, budget_gib)
    optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-5, fused=device.type == "cuda") if said.vocabulary else None
    lengths = itertools.cycle(said.tokens * n // 16 for n in LENGTHS) if said.varied else itertools.repeat(said.tokens)

    def varied() -> Tensor:
        """A forward of the next length."""
        return forward(x[:, : next(lengths)])

    def forward(x: Tensor = x) -> Tensor:
        on_cpu = torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")
        with on_cpu if row == "save_on_cpu" else contextlib.nullcontext():
            return run(x) if is_pipeline or said.vocabulary else mean_square(run(x))

    def backward(loss: Tensor) -> None:
        if not is_pipeline:
            loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        x.grad = None

    began = time.perf_counter()
    backward(varied())
    synchronize(device)
    compiled_s, early_gib = time.perf_counter() - began, 0.0
    if device.type == "cuda":  # the second step: nothing is compiled, and no plan is made
        # where a budget measures the loss, the counter has the most from there on
        torch.cuda.reset_peak_memory_stats()
        early_gib = -torch.cuda.memory_allocated() / GIB
        backward(varied())
        early_gib += torch.cuda.max_memory_allocated() / GIB
    for _ in range(MOST_WARM_UP if is_pipeline else WARM_UP):
        backward(varied())
        synchronize(device)
    before, replays = aot_hooks.offload_stats(), cudagraph.stats()["replays"]
    times, clocks = [], []
    for _ in range(said.steps if row != "save_on_cpu" else 3):
        dist.barrier()
        times.append(step_ms(lambda: backward(varied()), device))
        clocks.append(torch.cuda.clock_rate() if device.type == "cuda" else 0)
    counts = counted(before, replays, len(times))
    slowest = torch.tensor(times, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    nbytes, loss = measure_bytes(forward, backward, device)
    plans = aot_hooks.last_plans(run if said.parallel == "ddp" else stack) if row in BUDGETS else []
    return {
        "row": row,
        "ms": min(slowest.tolist()) if not said.varied else statistics.mean(slowest.tolist()),
        "median_ms": statistics.median(slowest.tolist()),
        "clock_mhz": statistics.median(clocks),
        "saved_gib": nbytes.after_forward / GIB,
        "peak_gib": nbytes.peak / GIB,
        "second_step_peak_gib": early_gib,
        "budget_gib": budget_gib or None,
        **counts,
        **planned(plans),
        "loss": float(loss),
        "first_step_s": compiled_s,
    }


def result_of(
    row: str, said: argparse.Namespace, mesh: DeviceMesh, device: torch.device, peaks: dict[str, float], group: Any
) -> dict[str, Any]:
    """A row as this rank has measured it, or the errors of the ranks that failed.

    In a stage's exchange the other ranks wait for ever for one that has failed. So the failed rank ends the program
    after `AGREE_S`.
    """
    rank = dist.get_rank()
    try:
        found = measured(row, said, mesh, device, peaks)
    except (RuntimeError, ValueError) as error:  # out of memory, or a way that can't be: the other rows go on
        if said.verbose:
            traceback.print_exc()
        found = {"row": row, "error": first_line(error.__cause__ or error)}  # a schedule of stages wraps it
        print(f"rank {rank}: {json.dumps(found)}", file=sys.stderr, flush=True)
        traceback.clear_frames(error.__traceback__)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found, group=group)
    errors = {f"rank {i}": each["error"] for i, each in enumerate(everyone) if "error" in each}
    return {"row": row, "error": next(iter(errors.values())), "ranks": errors} if errors else found


def main() -> None:
    parser = parser_of(__doc__, layers=16, width=4096, tokens=8192, steps=10)
    parser.add_argument("--parallel", choices=("fsdp", "ddp", "tp", "fsdp_tp", "pipeline"), default="fsdp")
    parser.add_argument("--rows", default=",".join(ROWS), help=", ".join(ROWS))
    parser.add_argument("--vocabulary", type=int, default=0, help="words of a whole Llama of transformers; needs fsdp")
    parser.add_argument("--varied", action="store_true", help="each step has another length; ms is the mean")
    parser.add_argument("--inner", choices=("inductor", "aten"), default="inductor")
    parser.add_argument("--verbose", action="store_true", help="log which plans of a step are tried")
    said = parser.parse_args()
    rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    if said.verbose and rank == 0:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("aot_hooks").setLevel(logging.INFO)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if unknown := set(said.rows.split(",")) - set(ROWS):
        parser.error(f"unknown rows {sorted(unknown)}; there are {', '.join(ROWS)}")
    if said.vocabulary and said.parallel != "fsdp":
        parser.error("--vocabulary is for --parallel fsdp")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    # a graph that failed leaves NCCL in no state to say so
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=AGREE_S))
    ranks = dist.get_world_size()
    shape = {"fsdp": ranks // 2, "tp": 2} if said.parallel == "fsdp_tp" else {said.parallel: ranks}
    mesh = init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    work = {
        name: getattr(said, name)
        for name in ("parallel", "layers", "width", "tokens", "vocabulary", "steps", "varied", "inner")
    }
    result = {"conditions": conditions(device, ranks=dist.get_world_size(), **work), "rows": []}
    peaks: dict[str, float] = {}
    for row in said.rows.split(","):
        found = result_of(row, said, mesh, device, peaks, group)
        peaks |= {row: found["peak_gib"]} if "error" not in found else {}
        if rank == 0:
            result["rows"].append(found)
            print(json.dumps(found), flush=True)
            write(said.json, result)
        free(device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
