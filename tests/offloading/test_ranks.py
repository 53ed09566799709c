"""Long runs of two processes with FSDP2, and runs in which one process ends before the other."""

from __future__ import annotations

import gc
import os
import pathlib
import resource
import signal

import pytest
import torch
import torch.distributed as dist
from ranks import batch, run_ranks, sharded

import aot_hooks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]

STEPS, LATE = 200, 100  # steps of a long run; from `LATE` on memory must not grow
EXACT = aot_hooks.offload(0, max_stall_ms=float("inf"))


def losses(rank: int, hook: aot_hooks.Hook | None, count: int) -> list[torch.Tensor]:
    """The losses of `count` steps. The memory of the host, all of it and that of offload, is the same in the last."""
    model = sharded(2, backend="aot_hooks", options={"inner": "aten", "policy": hook})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found, host_bytes, resident_bytes = [], [], []
    for i in range(count):
        loss = model(batch(i, rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
        host_bytes.append(aot_hooks.offload_stats()["host_bytes"])
        if i >= LATE and i % 25 == 24:
            gc.collect()
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
            resident_bytes.append(pages * resource.getpagesize())
    assert len(set(host_bytes[LATE:])) <= 1, host_bytes
    assert count < STEPS or resident_bytes[-1] - resident_bytes[0] < 2 << 20, resident_bytes
    return found


def trains_long(rank: int) -> None:
    expected = losses(rank, None, STEPS)
    torch._dynamo.reset()
    got = losses(rank, EXACT, STEPS)
    assert aot_hooks.offload_stats()["sent_count"] >= 2 * STEPS, aot_hooks.offload_stats()
    assert expected[-1] < expected[0] / 2, "it learns"
    assert torch.equal(torch.stack(got), torch.stack(expected))


def is_killed(rank: int) -> None:
    losses(rank, EXACT, 3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    losses(rank, EXACT, 3)


def ends_early(rank: int) -> None:
    losses(rank, EXACT, 3 if rank == 1 else 6)


def test_200_steps_have_the_losses_of_200_without_hooks(tmp_path: pathlib.Path) -> None:
    ended = run_ranks(trains_long, tmp_path)
    assert [each.exit_code for each in ended] == [0, 0], ended


def test_a_rank_that_is_killed_ends_the_other_with_an_error(tmp_path: pathlib.Path) -> None:
    other, killed = run_ranks(is_killed, tmp_path)
    assert killed.exit_code == -signal.SIGKILL
    assert other.exit_code == 1 and "RuntimeError" in other.error, other


def test_fewer_steps_of_one_rank_end_the_other_with_an_error(tmp_path: pathlib.Path) -> None:
    other, first = run_ranks(ends_early, tmp_path)
    assert first.exit_code == 0, first
    assert other.exit_code == 1 and "RuntimeError" in other.error, other
