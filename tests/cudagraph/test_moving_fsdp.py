"""CUDA graphs under FSDP2, which gathers each block's parameters into new memory: two processes, captures simulated."""

from __future__ import annotations

import pathlib

import pytest
import torch
import torch.distributed as dist
from capture_simulator import Simulator
from ranks import batch, run_ranks, sharded

import aot_hooks
import cudagraph
from aot_hooks import cudagraphs
from cudagraph.compile.compilation import Compilation
from cudagraph.tree import tree

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]

STEPS, LAYERS = 8, 4
GRAPHS = 2 * LAYERS  # of a step: a forward and a backward for each block
CHURN = torch.Generator()


def trained(rank: int, graphs: bool) -> list[torch.Tensor]:
    """Losses, gradients and at last parameters, with an exact hook."""
    options = {"inner": "aten", "policy": aot_hooks.lossless(), "cudagraphs": graphs}
    model = sharded(LAYERS, backend="aot_hooks", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, churn = [], []
    for i in range(STEPS):
        sizes = torch.randint(1, 2000, (200,), generator=CHURN).tolist()
        churn = [torch.empty(size) for size in sizes]  # so that no gather gets the memory of the last step
        loss = model(batch(i, rank).requires_grad_()).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    del churn
    return [*found, *(p.detach().to_local().clone() for p in model.parameters())]


def work(rank: int) -> None:
    cudagraphs.compilation = lambda options: Compilation(options, Simulator(1 << 22))
    expected = trained(rank, graphs=False)
    for copied_bytes in (0, tree.COPIED_BYTES):
        tree.COPIED_BYTES = copied_bytes
        torch._dynamo.reset()
        cudagraph.reset()
        got = trained(rank, graphs=True)
        counts = cudagraph.stats()
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), copied_bytes
        if copied_bytes == 0:
            assert (counts["given_up"], counts["replays"]) == (1, 0), counts
            assert 0 < counts["recordings"] <= 2 * GRAPHS, counts
        else:
            assert (counts["given_up"], counts["skips"]) == (0, 0), counts
            assert counts["recordings"] <= 3 * GRAPHS and counts["replays"] >= (STEPS - 4) * GRAPHS, counts


def test_no_step_is_recorded_for_ever(tmp_path: pathlib.Path) -> None:
    ended = run_ranks(work, tmp_path)
    assert [each.exit_code for each in ended] == [0, 0], ended
