"""Two ranks with DistributedDataParallel, each offloading: the gradients of one rank that sees both halves, without."""

from __future__ import annotations

import math
import os
import pathlib
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import leave_group
from torch import nn

import aot_hooks


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))))


def data(step: int) -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step))


def work(rank: int, folder: str, inner: str, device_type: str) -> None:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        # a small bucket, so that DDP splits the program into several graphs and reduces beside the backward
        parallel: Any = nn.parallel.DistributedDataParallel(model().to(device), bucket_cap_mb=0.02)
        compiled: Any = torch.compile(parallel, backend="aot_hooks", options={"inner": inner})
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            with aot_hooks.saved_tensors_hooks(aot_hooks.offload(0, max_stall_ms=math.inf)):
                loss = compiled(data(step)[8 * rank : 8 * rank + 8].to(device)).square().mean()
            loss.backward()
            optimizer.step()
        stats = aot_hooks.offload_stats()
        # The loss is eager. Its saved tensor is not fetched if the backward comes before its copy is seen to be done.
        assert stats["sent_count"] >= stats["fetched_count"] > 0, stats
        assert stats["host_leased_bytes"] == 0
        grads = [p.grad.cpu() for p in parallel.parameters()]
        torch.save(grads, pathlib.Path(folder) / f"grads{rank}.pt")
    finally:
        leave_group()


def compare(folder: pathlib.Path, inner: str, device_type: str) -> None:
    sys.path.insert(0, os.path.dirname(__file__))
    mp.spawn(work, (str(folder), inner, device_type), nprocs=2)
    one, x_device = model(), torch.device(device_type)
    one.to(x_device)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        one(data(step).to(x_device)).square().mean().backward()
        optimizer.step()
    for rank in range(2):
        got = torch.load(folder / f"grads{rank}.pt")
        for a, p in zip(got, one.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad.cpu(), rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.slow
def test_two_ranks_on_the_cpu(tmp_path: pathlib.Path) -> None:
    compare(tmp_path, "aten", "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("inner", ["aten", "inductor"])
def test_two_ranks_on_two_devices(tmp_path: pathlib.Path, inner: str) -> None:
    compare(tmp_path, inner, "cuda")
