"""CUDA graphs under FSDP2, which gathers each block's parameters into new memory: two processes, captures simulated."""

from __future__ import annotations

import contextlib
import pathlib

import pytest
import torch
import torch.distributed as dist
from capture_simulator import Simulator
from ranks import batch, device_type, run_ranks, sharded

import aot_hooks
import cudagraph
from aot_hooks import cudagraphs
from cudagraph.compile.compilation import Compilation
from cudagraph.torch_private import cuda as torch_cuda
from cudagraph.tree.driver import cuda_driver

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
        churn = [
            torch.empty(size, device=device_type()) for size in sizes
        ]  # so that no gather gets the memory of the last step
        loss = model(batch(i, rank).requires_grad_()).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    del churn
    return [*found, *(p.detach().to_local().clone() for p in model.parameters())]


def work(rank: int) -> None:
    simulator = Simulator(1 << 22)
    if device_type() == "cpu":
        cudagraphs.compilation = lambda options: Compilation(options, simulator)
    expected = trained(rank, graphs=False)
    for gathers in (True, False):  # into memory of the tree
        if not gathers:
            without_a_pool(simulator)
        torch._dynamo.reset()
        cudagraph.reset()
        got = trained(rank, graphs=True)
        counts = cudagraph.stats()
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), gathers
        assert 0 < counts["recordings"] <= 2 * GRAPHS, counts
        if gathers and (device_type() == "cuda" or torch_cuda.can_swap()):
            assert (counts["given_up"], counts["skips"]) == (0, 0), counts
            assert counts["replays"] >= (STEPS - 3) * GRAPHS, counts
        else:
            assert (counts["given_up"], counts["replays"]) == (1, 0), counts


def without_a_pool(simulator: Simulator) -> None:
    for driver in (simulator, cuda_driver()):
        driver.open_gathering_pool = lambda device: contextlib.nullcontext  # type: ignore[method-assign]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_parameters_are_gathered_at_the_same_addresses_or_graphs_given_up(tmp_path: pathlib.Path, device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ended = run_ranks(work, tmp_path, device=device, limit_s=110)
    assert [each.exit_code for each in ended] == [0, 0], ended
