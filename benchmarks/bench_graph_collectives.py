"""Whether a training step with collectives of NCCL can be captured as one CUDA graph, on two GPUs of one host.

    python benchmarks/bench_graph_collectives.py --json out.json      needs two GPUs; a minute
    python benchmarks/bench_graph_collectives.py --small              gloo on a CPU, nothing captured: that it runs

all_reduce    a matmul, then an all-reduce, captured by torch.cuda.graph
ddp           forward, backward and SGD of a DistributedDataParallel model, warmed up by 11 steps
fsdp2         the same with fully_shard

Each is compared with the same steps without a graph, over 20 replays. A row says `captured` and `equal`, or the error.
Each kind runs in processes of its own, because a failed capture can leave a communicator unusable.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import pathlib
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from _measure import conditions
from torch import nn

KINDS = ("all_reduce", "ddp", "fsdp2")
WARMUPS, REPLAYS = 11, 20  # DDP rebuilds its buckets in the first steps


def all_reduce(device: torch.device, rank: int) -> tuple[Any, Any]:
    weight = torch.full((64, 64), 0.01 * (rank + 1), device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        dist.all_reduce(y)
        return y

    return step, step


def training(kind: str, device: torch.device, rank: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(device)

    def step_of(model: nn.Module) -> Any:
        if kind == "ddp":
            ids = [device.index] if device.type == "cuda" else None
            model = nn.parallel.DistributedDataParallel(model, device_ids=ids, static_graph=True)
        else:
            from torch.distributed.fsdp import fully_shard

            fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    other = copy.deepcopy(plain)
    return step_of(plain), step_of(other)


def process(rank: int, kind: str, small: bool, out: str) -> None:
    device = torch.device("cpu") if small else torch.device("cuda", rank)
    if not small:
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{out}/store", 2)
    backend = "gloo" if small else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    torch.manual_seed(rank)
    data = [torch.randn(32, 64, device=device) for _ in range(WARMUPS + REPLAYS)]
    static = data[0].clone()
    row: dict[str, Any] = {"kind": kind, "captured": False, "equal": None}
    try:
        step, expected = all_reduce(device, rank) if kind == "all_reduce" else training(kind, device, rank)
        if small:

            def replay() -> Any:
                return step(static)
        else:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for x in data[:WARMUPS]:
                    static.copy_(x)
                    step(static)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                result = step(static)

            def replay() -> torch.Tensor:
                graph.replay()
                return result

            row["captured"] = True
        equal = True
        for i, x in enumerate(data):
            if small or i >= WARMUPS:
                static.copy_(x)
                got = replay().clone()
                equal = equal and torch.allclose(got, expected(x), rtol=1e-4, atol=1e-6)
            else:
                expected(x)
        row["equal"] = equal
    except Exception as error:  # what it raises is the result
        row["error"] = f"{type(error).__name__}: {error}"[:500]
    pathlib.Path(out, f"{rank}.json").write_text(json.dumps(row))
    # A communicator that a broken capture used may hang in destroy_process_group.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--seconds", type=float, default=40, help="for each kind; then its processes are ended")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    device = torch.device("cpu" if options.small else "cuda")
    result: dict[str, Any] = {**conditions(device), "rows": []}
    spawn = torch.multiprocessing.get_context("spawn")
    for kind in options.only:
        with tempfile.TemporaryDirectory() as out:
            both = [spawn.Process(target=process, args=(rank, kind, options.small, out)) for rank in range(2)]
            for each in both:
                each.start()
            for each in both:
                each.join(options.seconds)
                if each.is_alive():
                    each.kill()
            rows = [pathlib.Path(out, f"{rank}.json") for rank in range(2)]
            found = [json.loads(row.read_text()) if row.exists() else {"error": "did not end"} for row in rows]
        result["rows"].append({"kind": kind, "ranks": found})
        print(json.dumps(result["rows"][-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
