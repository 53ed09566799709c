"""`whole_step` on two processes of their own: compiled blocks, a rank that raises, and a rank that is killed."""

from __future__ import annotations

import copy
import os
import signal
import types

import pytest
import torch
import torch.distributed as dist
from ranks import WIDTH, blocks, device_type, run_ranks
from steps_on_ranks import STEPS, assert_ended, batch, models, trained, work
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from whole_steps import adamw, on_simulator, sgd

import aot_hooks
import cudagraph

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


def compiled_models(policy):
    """Two equal models whose blocks are compiled, with what they save stored by `policy`."""
    ours = nn.Sequential(nn.Linear(4, WIDTH), *blocks(2), nn.Linear(WIDTH, 2)).to(device_type())
    pair = ours, copy.deepcopy(ours)
    for each in pair:
        for block in each[1:3]:
            block.compile(backend="aot_hooks", options={"inner": "aten", "policy": policy})
    return pair


def compare_compiled(pair, rank, steps):
    step = trained(pair, rank, adamw, steps=steps, clip_grad_norm=0.5)
    assert (step.refused, step.update_refused) == ("", "") and cudagraph.stats()["replays"] >= 5


def fsdp_compiled(rank):
    """Blocks are compiled and sharded; what they save is in float8, under a budget, or in host memory."""
    offload = aot_hooks.policies.everything(aot_hooks.offload(min_bytes=1, max_stall_ms=float("inf")))
    policies = [aot_hooks.float8(), aot_hooks.budget(max_slowdown=float("inf"))]
    for policy in (*policies, offload) if device_type() == "cuda" else policies:  # a CPU's replay can't repeat copies
        cudagraph.reset()
        torch._dynamo.reset()
        pair, mesh = compiled_models(policy), init_device_mesh(device_type(), (2,))
        for each in pair:
            for block in each[1:3]:
                fully_shard(block, mesh=mesh)
            fully_shard(each, mesh=mesh)
        compare_compiled(pair, rank, steps=8)
        plans = aot_hooks.last_plans(pair[0])
        assert plans and all(plan.packed_bytes < plan.saved_bytes for plan in plans)


def ddp_compiled(rank):
    """Compiled blocks in a replicated model; what they save is in int8."""
    models = compiled_models(aot_hooks.int8())
    pair = [nn.parallel.DistributedDataParallel(each) for each in models]  # Dynamo refuses the smallest buckets
    compare_compiled(pair, rank, steps=STEPS)


COMPILED = (fsdp_compiled, ddp_compiled)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.__name__)
def test_compiled_blocks_on_two_ranks(tmp_path_factory, case, device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp(device)
    run_ranks(work, folder, str(folder), [case], device=device, limit_s=200)
    assert_ended(folder, case)


def raises_in_a_capture(rank):
    """And again in the call as it is, which follows. The other rank waits for it in the backward."""
    if device_type() == "cpu":
        on_simulator(pytest.MonkeyPatch())
    ours, _ = models()
    state = types.SimpleNamespace(call=0)

    def loss_fn(out, y):
        if rank == 1 and state.call == 15:
            raise ValueError("planted")
        return F.mse_loss(out, y)

    step = cudagraph.whole_step(ours, loss_fn, sgd(ours), state=state)
    for i in range(STEPS):
        state.call = i // 15 * 15
        float(step(*batch(i, rank)))
    raise AssertionError("nobody has missed the rank that raised")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_rank_that_raises_ends_the_other_in_bounded_time(tmp_path, device):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    waits, raised = run_ranks(raises_in_a_capture, tmp_path, device=device, limit_s=90)
    assert "planted" in raised.error and waits.failed and waits.exit_code is not None, (waits, raised)


def dies_in_a_replay(rank):
    if device_type() == "cpu":
        on_simulator(pytest.MonkeyPatch())
    ours, _ = models()
    step = cudagraph.whole_step(ours, F.mse_loss, sgd(ours))
    for i in range(STEPS):
        if rank == 1 and step.latest is not None:
            step.latest.launch = lambda: os.kill(os.getpid(), signal.SIGKILL)
        float(step(*batch(i, rank)))
    raise AssertionError("nobody has missed the rank that was killed")


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_rank_that_is_killed_in_a_replay_ends_the_others_in_bounded_time(tmp_path, device, count):
    if device == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    first, killed, *others = run_ranks(dies_in_a_replay, tmp_path, device=device, limit_s=90, count=count)
    assert killed.exit_code == -signal.SIGKILL
    # Gloo sees it by itself; NCCL waits on the device, until the watchdog of the step ends that.
    expected = "RanksError" if device == "cuda" else "RuntimeError"
    for lives in (first, *others):
        assert lives.failed and expected in lives.error, lives
