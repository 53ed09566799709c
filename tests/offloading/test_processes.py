"""Two processes on gloo: FSDP2, DDP, tensor parallel, pipelines have the gradients of the same run without hooks."""

from __future__ import annotations

import functools
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import ROWS, batch, blocks, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import aot_hooks
from aot_hooks.offloading import at_run_time
from aot_hooks.planning import many

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]

STEPS = 6
# the plan of one graph finds no time to hide a copy, that of a step does: the clock has 1 ms from event to event
RATES = aot_hooks.Rates(to_host=1e7, to_device=1e7, memory=1e15, operations=1e18, operations32=1e18)
HOOKS = {
    "offload": aot_hooks.offload(0, rates=RATES, across_graphs=True),
    "lossless": aot_hooks.lossless(),
    "budget": aot_hooks.budget("130KiB", allow=["recompute"], max_error=0),  # the blocks of a rank take up to 200
}


class Model(nn.Module):
    """Has a frame of its own, as torch's `Sequential` has not for Dynamo."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def options(hook: aot_hooks.Hook | None) -> dict[str, Any]:
    return {"backend": "aot_hooks", "options": {"inner": "aten", "policy": hook}}


def trained(run: Callable[[int], Any], parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """What `run` gives in each step and the gradients after it; the parameters learn."""
    found = []
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = run(i)
        grads = [getattr(p.grad, "_local_tensor", p.grad) for p in parameters]
        found += [torch.as_tensor(loss).detach().clone(), *(g.detach().clone() for g in grads)]
        optimizer.step()
    return found


def backward(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    return loss


def fsdp(rank: int, hook: aot_hooks.Hook | None, fails: bool = False) -> list[torch.Tensor]:
    model = sharded(**options(hook))

    def run(i: int) -> torch.Tensor:
        if fails and rank == 1 and i == 3:
            raise ValueError("rank 1 has no data")
        return backward(model, batch(i, rank))

    return trained(run, list(model.parameters()))


def fsdp_whole(rank: int, hook: aot_hooks.Hook | None) -> list[torch.Tensor]:
    model, mesh = Model(), init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    compiled = torch.compile(fully_shard(model, mesh=mesh), **options(hook))
    found = trained(lambda i: backward(compiled, batch(i, rank)), list(model.parameters()))
    assert hook is None or len(aot_hooks.last_plans(compiled)) > 1, "Dynamo cuts the graph at the hooks of FSDP"
    return found


def fsdp_that_fails(rank: int, hook: aot_hooks.Hook | None) -> list[torch.Tensor]:
    return fsdp(rank, hook, fails=True)


def ddp(rank: int, hook: aot_hooks.Hook | None, scope: str = "donated") -> list[torch.Tensor]:
    # small buckets: Dynamo cuts the one graph of `Model` at each
    dist._DEFAULT_FIRST_BUCKET_BYTES = 4096
    parallel = nn.parallel.DistributedDataParallel(Model(), bucket_cap_mb=0.01)
    how = options(hook)
    how["options"]["scope"] = scope
    compiled = torch.compile(parallel, **how)
    found = trained(lambda i: backward(compiled, batch(i, rank)), list(parallel.parameters()))
    if hook is not None:
        plans = aot_hooks.last_plans(compiled)
        kept = {d.reason for plan in plans for d in plan.decisions if d.saved.is_input}
        assert len(plans) > 2 and ("an input of the graph" in kept) == (scope == "donated"), kept
    return found


def tensor_parallel(rank: int, hook: aot_hooks.Hook | None) -> list[torch.Tensor]:
    model, mesh = blocks(), init_device_mesh("cpu", (2,))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        block.compile(**options(hook))
    return trained(lambda i: backward(model, batch(i, 0)), list(model.parameters()))


saving: list[bool] = []  # whether gradients were on, by call of the stage


def pipeline(schedule: type) -> Callable[[int, aot_hooks.Hook | None], list[torch.Tensor]]:
    def run_pipeline(rank: int, hook: aot_hooks.Hook | None) -> list[torch.Tensor]:
        model = blocks()[3 * rank : 3 * rank + 3]
        for block in model:
            block.compile(**options(hook))
        saving.clear()
        model.register_forward_hook(lambda *_: saving.append(torch.is_grad_enabled()))
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        runs = schedule(stage, n_microbatches=4, loss_fn=lambda y, target: (y - target).square().mean())

        def run(i: int) -> torch.Tensor:
            x, losses = batch(i, 0, 4 * ROWS), []
            if rank == 0:
                runs.step(x)
            else:
                runs.step(target=x, losses=losses)
            return torch.stack(losses) if losses else torch.zeros(())

        return trained(run, list(model.parameters()))

    return run_pipeline


WAYS: dict[str, Callable[[int, aot_hooks.Hook | None], list[torch.Tensor]]] = {
    "fsdp": fsdp,
    "fsdp whole": fsdp_whole,
    "fsdp that fails": fsdp_that_fails,
    "ddp": ddp,
    "ddp, no_static": functools.partial(ddp, scope="no_static"),
    "tensor parallel": tensor_parallel,
    "gpipe": pipeline(ScheduleGPipe),
    "1f1b": pipeline(Schedule1F1B),
}


# Ways of one pair of processes, whose start takes longer than most ways do, and the hooks of each.
TOGETHER: dict[str, dict[str, tuple[str, ...]]] = {
    "fsdp": {"fsdp": ("offload", "budget", "lossless"), "fsdp whole": ("offload",)},
    "ddp": {"ddp": ("offload", "budget"), "ddp, no_static": ("offload", "lossless")},
    "tensor parallel and pipelines": {way: ("offload", "budget") for way in ("tensor parallel", "gpipe", "1f1b")},
}


def work(rank: int, folder: str, ways: dict[str, tuple[str, ...]]) -> None:
    now = 0.0

    def mark(_: torch.device) -> float:
        nonlocal now
        now += 1e-3
        return now

    at_run_time._mark = mark
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        for way, hooks in ways.items():
            torch._dynamo.reset()
            expected = WAYS[way](rank, None)
            for hook in hooks:
                torch._dynamo.reset()  # forgets what earlier hooks planned and counted
                check(rank, way, hook, expected)
    finally:
        dist.destroy_process_group()


def check(rank: int, way: str, hook: str, expected: list[torch.Tensor]) -> None:
    got, where = WAYS[way](rank, HOOKS[hook]), f"{way}, {hook}, rank {rank}"
    assert len(got) == len(expected) > STEPS, where
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), f"{where}: others than without"
    stats = aot_hooks.offload_stats()
    assert stats["host_leased_bytes"] == 0, where
    if hook == "offload":
        assert stats["step_graph_count"] > 1 and stats["step_sent_bytes"] > 0, (where, stats)
        dropped = stats["sent_count"] - stats["fetched_count"]
        # The first stage of a pipeline runs once more than its backward, to learn its shapes. Older releases of
        # torch do that without gradients, which saves nothing.
        without_backward = saving.count(True) - 4 * STEPS if rank == 0 and way in ("gpipe", "1f1b") else 0
        assert without_backward in (0, 1) and dropped == 15 * without_backward, (where, stats)
        assert stats["fetched_count"] > 0, (where, stats)
    if hook == "budget":
        (group,) = many._groups.values()
        assert any(graph.was_planned for graph in group.graphs.values()), where
        left = max(event.gradient_bytes for trace in group.traces for event in trace)
        assert left == 0 if way == "fsdp" else left > 0 or way != "ddp", where  # FSDP takes the gradients away


def spawn(folder: pathlib.Path, ways: dict[str, tuple[str, ...]]) -> None:
    sys.path.insert(0, os.path.dirname(__file__))
    mp.spawn(work, (str(folder), ways), nprocs=2)


@pytest.mark.parametrize("together", TOGETHER)
def test_two_processes_have_the_gradients_of_two_without_hooks(tmp_path: pathlib.Path, together: str) -> None:
    spawn(tmp_path, TOGETHER[together])


def test_a_rank_that_raises_ends_all_with_its_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(mp.ProcessRaisedException, match="rank 1 has no data"):
        spawn(tmp_path, {"fsdp that fails": ("offload",)})
