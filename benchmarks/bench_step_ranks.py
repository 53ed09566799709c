"""A training step on several GPUs as one CUDA graph, beside steps with fewer graphs: its time, its memory, its numbers.

    torchrun --nproc-per-node 2 benchmarks/bench_step_ranks.py --json out.json       two GPUs, NCCL
    torchrun --nproc-per-node 2 benchmarks/bench_step_ranks.py --rows fsdp.whole,ddp.check
    torchrun --nproc-per-node 2 benchmarks/bench_step_ranks.py --small               a CPU, Gloo, the tests' simulator

The work: benchmarks/model.py with 24 blocks of width 1024, 2 x 512 tokens a rank, bfloat16, clipped gradients, fused
AdamW. `fsdp` shards each block, `ddp` replicates the model. Ways to run a step, each a row of both:

    eager            no graphs
    graph            forward and backward as one graph, captured by hand; clipping and optimizer uncaptured
    whole            `cudagraph.whole_step`
    *_compiled       the same three, blocks compiled by Inductor
    trees            blocks of torch's mode="reduce-overhead"
    cudagraphs       blocks of backend="aot_hooks" with options={"cudagraphs": True}

ms: of a step, in a loop that waits for the device at its end; the slowest rank, the median of all loops. Bytes: what
the allocator of rank 0 has reserved at most in steps after the first, over what it had before the row.

`check.*` compare `whole_step` with eager mode, loss by loss and parameter by parameter, bit for bit: two blocks of
width 64, deterministic kernels, a schedule of each number of the optimizer, two backwards a step of which the first is
not exchanged, a smaller batch each 16th step, and state that is saved and loaded halfway.

A row that fails on a rank fails on all; its error is the row. Rows end with the process if one hangs for --limit-s.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import json
import math
import os
import pathlib
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic kernels; read once

import torch
import torch.distributed as dist
from measure import conditions, free, parser_of, synchronize, write
from model import Stack
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import cudagraph

PARALLELS = ("fsdp", "ddp")
WAYS = ("eager", "graph", "whole", "eager_compiled", "graph_compiled", "whole_compiled", "cudagraphs", "trees")
OPTIMIZERS = ("adamw", "sgd", "fused")
CHECKS = tuple(f"check.{parallel}.{name}" for parallel in PARALLELS for name in OPTIMIZERS)
# What a release must show stands first, in case that the run is cut.
ROWS = (
    *(f"{parallel}.{way}" for parallel in PARALLELS for way in WAYS[:3]),
    *CHECKS,
    *(f"{parallel}.{way}" for parallel in PARALLELS for way in WAYS[3:]),
)
CLIP = 1.0
WARM_UP = 16  # steps; torch times the first ten iterations of a replicated model, some compile, and one records
LOOPS = 5
LEAVE_S = 20.0  # seconds that the end of the groups of processes may take: it waits for ever for a graph that is left
SHORT, EPOCH = 1, 16  # sequences of a smaller batch, and the steps between two of them
MOST_CHARACTERS, MOST_LINES = 600, 12  # of an error


# ------------------------------------------------------------------------------------------------------------ the step


def stack_of(layers: int, width: int, tokens: int) -> Stack:
    heads = max(width // 64, 2)
    torch.manual_seed(0)
    sizes = {"head_count": heads, "kv_head_count": heads, "hidden": 4 * width, "token_count": tokens}
    return Stack(layers, width, **sizes)


def distributed(model: Stack, parallel: str, mesh: DeviceMesh, how: dict[str, Any] | None = None) -> nn.Module:
    """`model` spread over the ranks; `how` its blocks are compiled, None for eager blocks."""
    for block in model.blocks:
        if how is not None:
            block.compile(**how)
    if parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    # `fully_shard` converts parameters itself; the loss is in float32.
    with torch.autocast(x.device.type, torch.bfloat16, enabled=not isinstance(model, FSDPModule)):
        out = model(x)
    return F.mse_loss(out.float(), y)


def on_side_stream(device: torch.device) -> Any:
    """A context whose work is on another stream than the default one, which no graph can include."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


class GraphOfForwardBackward:
    """Forward and backward as one graph, as people capture it by hand: the gradients stay where they are."""

    def __init__(self, forward_backward: Callable[[Tensor, Tensor], Tensor], update: Callable[[], None]) -> None:
        self.run, self.update = forward_backward, update
        self.calls, self.graph = 0, torch.cuda.CUDAGraph()
        self.stream = torch.cuda.Stream()

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        if self.calls < WARM_UP - 1:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                loss = self.run(x, y)
                self.update()
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss
        if self.calls == WARM_UP - 1:
            self.inputs = x.clone(), y.clone()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.loss = self.run(*self.inputs)
        for ours, given in zip(self.inputs, (x, y), strict=True):
            ours.copy_(given)
        self.graph.replay()
        self.update(keep=True)
        return self.loss.clone()

    def close(self) -> None:
        """Free the graph: NCCL ends a communicator only when no graph uses it any more."""
        torch.cuda.synchronize()
        self.graph.reset()


def step_of(way: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    parameters = [*model.parameters()]
    name = way.removesuffix("_compiled")

    def forward_backward(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        return loss.detach()

    def update(keep: bool = False) -> None:
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        if not keep:
            optimizer.zero_grad()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = forward_backward(x, y)
        update()
        return loss

    if name == "graph":
        return GraphOfForwardBackward(forward_backward, update)
    return cudagraph.whole_step(step) if name == "whole" else step


def compiled_how(way: str) -> dict[str, Any] | None:
    if way == "trees":
        return {"mode": "reduce-overhead"}
    if way == "cudagraphs":
        return {"backend": "aot_hooks", "options": {"cudagraphs": True}}
    return {} if way.endswith("_compiled") else None


def slowest_ms(times: list[float], device: torch.device) -> float:
    """The median, over loops, of what the slowest rank took."""
    slowest = torch.tensor(times, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def measured(row: str, said: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """A row of times and bytes."""
    parallel, way = row.split(".")
    on_gpu = device.type == "cuda"
    reserved = torch.cuda.memory_reserved() if on_gpu else 0
    began = time.perf_counter()
    with on_side_stream(device) if way.startswith("graph") else contextlib.nullcontext():
        model = distributed(
            stack_of(said.layers, said.width, said.tokens).to(device), parallel, mesh, compiled_how(way)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = step_of(way, model, optimizer)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    shape = (said.batch, said.tokens, said.width)
    batches = [[torch.randn(shape, generator=generator, device=device) for _ in range(2)] for _ in range(4)]
    for i in range(WARM_UP):
        loss = step(*batches[i % 4])
    synchronize(device)
    ready_s = time.perf_counter() - began
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times, issued = [], []
    for _ in range(LOOPS):
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        for i in range(said.calls):
            loss = step(*batches[i % 4])
        issued.append(1e3 * (time.perf_counter() - began) / said.calls)
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - began) / said.calls)
    if isinstance(step, GraphOfForwardBackward):
        step.close()
    stats = cudagraph.stats()
    return {
        "ms": round(slowest_ms(times, device), 3),
        "host_ms": round(slowest_ms(issued, device), 3),  # until the last step of a loop is issued
        "reserved_bytes": torch.cuda.max_memory_reserved() - reserved if on_gpu else None,
        "allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "loss": float(loss),
        "ready_s": round(ready_s, 1),
        **{name: stats[name] for name in ("recordings", "replays", "given_up", "skips") if name in stats},
        **({"refused": step.refused, "update_refused": step.update_refused} if "whole" in way else {}),
    }


# -------------------------------------------------------------------------------------------------------- bit for bit


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    # `capturable` divides in another order, so eager mode has it, too.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=name == "fused", capturable=True)


def schedule(optimizer: torch.optim.Optimizer, numbers: Sequence[str], step: int, steps: int) -> None:
    """Change the `numbers` of the optimizer, those that it has."""
    wave = 0.5 + 0.5 * math.cos(math.pi * step / steps)
    is_sgd = isinstance(optimizer, torch.optim.SGD)
    values = {
        "lr": (0.05 if is_sgd else 1e-3) * wave,
        "weight_decay": 0.01 * (1.1 - wave),
        "momentum": 0.85 + 0.1 * wave,
        "betas": (0.85 + 0.05 * wave, 0.999),
    }
    for group in optimizer.param_groups:
        group |= {name: values[name] for name in numbers if name in group}


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    """A step of two backwards, of which the second one exchanges gradients."""
    parameters = [*model.parameters()]

    def step(x: Tensor, y: Tensor) -> Tensor:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(False)
            first = loss_of(model, x, y)
            first.backward()
            model.set_requires_gradient_sync(True)
        else:
            with model.no_sync():  # type: ignore[operator]
                first = loss_of(model, x, y)
                first.backward()
        second = loss_of(model, y, x)
        second.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return first.detach() + second.detach()

    return step


def reload(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save the state, as `torch.distributed.checkpoint` takes it, and load a copy of it."""
    states = get_state_dict(model, optimizer)
    models, optimizers = copy.deepcopy(states)
    set_state_dict(model, optimizer, model_state_dict=models, optim_state_dict=optimizers)


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def checked(row: str, said: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """A row of `whole_step` beside eager mode."""
    _, parallel, name = row.split(".")
    width, tokens = (8, 4) if said.small else (64, 32)
    models = [distributed(stack_of(2, width, tokens).to(device), parallel, mesh) for _ in range(2)]
    optimizers = [make_optimizer(name, model) for model in models]
    whole, eager = (accumulating(*each) for each in zip(models, optimizers, strict=True))
    whole = cudagraph.whole_step(whole)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    different: dict[str, Any] = {}  # what was different first, and in which step
    largest = 0.0
    for i in range(said.steps):
        batch = SHORT if i % EPOCH == EPOCH - 1 else said.batch
        x, y = (torch.randn(batch, tokens, width, generator=generator, device=device) for _ in range(2))
        for optimizer in optimizers:
            schedule(optimizer, said.schedules.split(","), i, said.steps)
        losses = whole(x, y), eager(x, y)
        if not torch.equal(*losses):
            different.setdefault("loss", i)
        largest = max(largest, float((losses[0] - losses[1]).abs() / losses[1].abs()))
        pairs = zip(*(model.parameters() for model in models), strict=True)
        if "parameters" not in different and not all(torch.equal(local(a), local(b)) for a, b in pairs):
            different["parameters"] = i
        if i == said.steps // 2:
            for each in zip(models, optimizers, strict=True):
                reload(*each)
    stats = cudagraph.stats()
    return {
        "bit_for_bit": not different,
        "first_different_step": different,
        "largest_relative_error_of_loss": largest,
        "steps": said.steps,
        **{key: stats[key] for key in ("recordings", "replays", "warmups", "skips")},
        "refused": whole.refused,
        "update_refused": whole.update_refused,
    }


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# ------------------------------------------------------------------------------------------------------------ the rows


def text_of(error: BaseException) -> dict[str, Any]:
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return {"error": f"{type(error).__name__}: {error}"[:MOST_CHARACTERS], "traceback": lines[-MOST_LINES:]}


def result_of(row: str, said: argparse.Namespace, mesh: DeviceMesh, device: torch.device, group: Any) -> dict[str, Any]:
    """A row of all ranks: what rank 0 found, and the errors of each that failed."""
    faulthandler.dump_traceback_later(said.limit_s, exit=True)
    try:
        if row.startswith("check."):
            with deterministic():
                found = checked(row, said, mesh, device)
        else:
            found = measured(row, said, mesh, device)
    except Exception as error:  # of torch's, of a compiler, of ours: the other rows go on
        found = text_of(error)
        traceback.clear_frames(error.__traceback__)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found, group=group)
    faulthandler.cancel_dump_traceback_later()
    errors = {f"rank {rank}": each for rank, each in enumerate(everyone) if "error" in each}
    if errors:
        return {"row": row, "error": next(iter(errors.values()))["error"], "ranks": errors}
    same = all(each.get("bit_for_bit", True) for each in everyone)
    worst = everyone[0] if same else next(each for each in everyone if not each["bit_for_bit"])
    return {"row": row, **worst}


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What a release must show: goals 0.80 and 0.6 of the time, 1.05 of the memory."""
    by_name = {row["row"]: row for row in rows if "ms" in row}
    found = {}
    for parallel in PARALLELS:
        for end in ("", "_compiled"):
            whole = by_name.get(f"{parallel}.whole{end}")
            for other in ("graph", "eager"):
                under = by_name.get(f"{parallel}.{other}{end}")
                if whole and under:
                    found[f"{parallel}: whole{end} over {other}{end}"] = round(whole["ms"] / under["ms"], 3)
                    if other == "eager" and under["reserved_bytes"]:
                        ratio = whole["reserved_bytes"] / under["reserved_bytes"]
                        found[f"{parallel}: whole{end} over eager{end}, reserved"] = round(ratio, 3)
    return found


def simulate() -> None:
    """Have the tests' simulator stand in for CUDA."""
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "support"))
    import pytest
    from whole_steps import on_simulator

    on_simulator(pytest.MonkeyPatch(), 1 << 27)


def main() -> None:
    parser = parser_of(
        __doc__, small="tiny sizes on a CPU, to see that it runs", layers=24, width=1024, tokens=512, batch=2
    )
    parser.add_argument("--rows", default=",".join(ROWS), help="some of these, or their beginnings, such as ddp.")
    parser.add_argument("--calls", type=int, default=20, help="steps of a loop that is timed")
    parser.add_argument("--steps", type=int, default=200, help="steps of a check")
    parser.add_argument("--schedules", default="lr,weight_decay,momentum,betas", help="of a check: what changes")
    parser.add_argument("--limit-s", type=float, default=75.0, help="that a row may take")
    said = parser.parse_args()
    chosen = [row for row in ROWS if row.startswith(tuple(said.rows.split(",")))]
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if said.small else torch.device("cuda", rank)
    if said.small:
        torch.set_num_threads(1)
        said.layers, said.width, said.tokens, said.calls, said.steps = 2, 16, 4, 1, min(said.steps, 24)
        simulate()
        chosen = [row for row in chosen if row.startswith("check.") or row.split(".")[1] in ("eager", "whole")]
    else:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if said.small else "nccl", device_id=None if said.small else device)
    group = dist.new_group(backend="gloo")  # a graph that failed leaves NCCL in no state to say so
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    work = {name: getattr(said, name) for name in ("layers", "width", "tokens", "batch", "calls", "steps")}
    result: dict[str, Any] = {**conditions(device, ranks=dist.get_world_size(), **work), "rows": []}
    began = time.perf_counter()
    for row in chosen:
        found = result_of(row, said, mesh, device, group)
        free(device)
        if rank == 0:
            result["rows"].append(found)
            result |= {"ratios": ratios(result["rows"]), "seconds": round(time.perf_counter() - began, 1)}
            print(json.dumps(found), flush=True)
            write(said.json, result)
    if rank == 0:
        print(json.dumps(result["ratios"], indent=1), flush=True)
    faulthandler.dump_traceback_later(LEAVE_S, exit=True)
    dist.barrier(group)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
