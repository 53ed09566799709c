"""Long runs of two processes with FSDP2, and runs in which one process ends before the other: on CPUs, and on GPUs."""

from __future__ import annotations

import gc
import os
import pathlib
import resource
import signal

import pytest
import torch
import torch.distributed as dist
from ranks import batch, device_type, run_ranks, sharded

import aot_hooks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]

on_cpus_and_gpus = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
            ],
        ),
    ],
)

STEPS, LATE = 200, 100  # steps of a long run; from `LATE` on memory must not grow
EXACT = aot_hooks.offload(0, max_stall_ms=float("inf"))
ACROSS_GRAPHS = aot_hooks.offload(0, max_stall_ms=float("inf"), across_graphs=True)


def losses(rank: int, hook: aot_hooks.Hook | None, count: int) -> list[torch.Tensor]:
    """The losses of `count` steps.

    The memory of the host, all of it and that of offload, is the same in the last; so is what a GPU has allocated.
    """
    model = sharded(2, backend="aot_hooks", options={"inner": "aten", "policy": hook})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found, host_bytes, resident_bytes, allocated = [], [], [], []
    for i in range(count):
        loss = model(batch(i, rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().cpu())
        host_bytes.append(aot_hooks.offload_stats()["host_bytes"])
        if i >= LATE and i % 25 == 24:
            gc.collect()
            allocated.append(torch.cuda.memory_allocated() if device_type() == "cuda" else 0)
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
            resident_bytes.append(pages * resource.getpagesize())
    assert len(set(host_bytes[LATE:])) <= 1, host_bytes
    assert len(set(allocated)) <= 1, allocated
    assert count < STEPS or resident_bytes[-1] - resident_bytes[0] < 2 << 20, resident_bytes
    return found


def trains_long(rank: int) -> None:
    expected = losses(rank, None, STEPS)
    assert expected[-1] < expected[0] / 2, "it learns"
    for hook in (EXACT, ACROSS_GRAPHS) if device_type() == "cuda" else (EXACT,):
        torch._dynamo.reset()
        before = aot_hooks.offload_stats()["sent_count"]
        got = losses(rank, hook, STEPS)
        assert aot_hooks.offload_stats()["sent_count"] - before >= 2 * STEPS, aot_hooks.offload_stats()
        assert torch.equal(torch.stack(got), torch.stack(expected)), hook


def is_killed(rank: int) -> None:
    losses(rank, EXACT, 3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    losses(rank, EXACT, 3)


def ends_early(rank: int) -> None:
    losses(rank, EXACT, 3 if rank == 1 else 6)


@on_cpus_and_gpus
def test_200_steps_have_the_losses_of_200_without_hooks(device: str, tmp_path: pathlib.Path) -> None:
    ended = run_ranks(trains_long, tmp_path, limit_s=200, device=device)
    assert [each.exit_code for each in ended] == [0, 0], ended


@on_cpus_and_gpus
def test_a_rank_that_is_killed_ends_the_other_with_an_error(device: str, tmp_path: pathlib.Path) -> None:
    other, killed = run_ranks(is_killed, tmp_path, limit_s=60 if device == "cpu" else 120, device=device)
    assert killed.exit_code == -signal.SIGKILL
    assert other.failed and ("RuntimeError" in other.error or device == "cuda"), other


@on_cpus_and_gpus
def test_fewer_steps_of_one_rank_end_the_other_with_an_error(device: str, tmp_path: pathlib.Path) -> None:
    other, first = run_ranks(ends_early, tmp_path, limit_s=60 if device == "cpu" else 120, device=device)
    assert other.failed and ("RuntimeError" in other.error or device == "cuda"), other
    assert first.exit_code == 0 or device == "cuda", first
