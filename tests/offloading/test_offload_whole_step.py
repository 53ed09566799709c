"""Offload in a step that is one CUDA graph: what the plan of the step sends is sent by each replay."""

from __future__ import annotations

import copy
import math

import capture_simulator
import pytest
import torch
from offloading import copies, sent, stack  # noqa: F401
from torch.nn import functional as F
from whole_steps import adamw, eager_step, on_simulator, tensors_of

import aot_hooks
import cudagraph
from aot_hooks.offloading import at_run_time, transfers

OPERATORS = {
    transfers.offload_start: transfers._offload_start,
    transfers.offload_wait: lambda ticket, x: transfers.claim(ticket),
    transfers.reload_start: transfers.fetch,
    transfers.reload_wait: lambda ticket, host, device: transfers.claim(ticket),
    at_run_time.offload_together: at_run_time._offload_together,
    at_run_time.reload_together: at_run_time._reload_together,
}


@pytest.fixture
def simulator(monkeypatch):
    for operator, on_host in OPERATORS.items():
        monkeypatch.setitem(capture_simulator.host_operators, operator, on_host)
    monkeypatch.setattr(transfers, "capture_under_way", cudagraph.capturing)
    yield on_simulator(monkeypatch)
    cudagraph.reset()


@pytest.mark.parametrize("across_graphs", [False, True])
def test_a_captured_step_sends_what_its_plan_sends(simulator, across_graphs):
    hook = aot_hooks.offload(0, max_stall_ms=math.inf, across_graphs=across_graphs)
    torch.manual_seed(0)
    ours = stack(2)
    eager = copy.deepcopy(ours)
    for block in (*ours, *eager):
        block.compile(backend="aot_hooks", options={"inner": "aten", "policy": hook})
    step, expected = cudagraph.whole_step(ours, F.mse_loss, adamw(ours)), eager_step(eager, F.mse_loss, adamw(eager))
    in_calls = []
    for i in range(7):
        generator = torch.Generator().manual_seed(i)
        x, y = (torch.randn(8, 16, generator=generator) for _ in range(2))
        before, recordings = sent(), cudagraph.stats()["recordings"]
        loss = step(x, y)
        in_calls.append((sent() - before, cudagraph.stats()["recordings"] - recordings))
        assert torch.equal(loss, expected(x, y).detach()), f"loss of step {i}"
        for a, b in zip(tensors_of(ours.state_dict()), tensors_of(eager.state_dict()), strict=True):
            assert torch.equal(a, b), f"state after step {i}"
    assert step.refused == "" and cudagraph.stats()["replays"] >= 3
    uncaptured, captured = ({count for count, recorded in in_calls if recorded == n and count} for n in (0, 1))
    assert uncaptured == captured and len(captured) == 1, f"sent in each call, and whether it was recorded: {in_calls}"
