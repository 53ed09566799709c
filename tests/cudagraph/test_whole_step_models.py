"""`whole_step` and models that others run: on several processes, or compiled."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from ranks import group_of_one
from test_whole_step_loops import adamw_fused, train
from torch import nn
from torch.distributed.fsdp import fully_shard  # before a simulator is made
from torch.nn import functional as F
from whole_steps import batches, eager_step, pair

import aot_hooks
import cudagraph
from cudagraph.step.watch import OperatorWatch
from cudagraph.torch_private import cuda as torch_cuda


@pytest.fixture
def process_group(device):
    with group_of_one(device.type) as group:
        yield group


def wrapped(model, how, device):
    """`model` for a mesh of this process alone, or as it is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    if how == "DistributedDataParallel":
        return nn.parallel.DistributedDataParallel(model)
    if how == "FSDPModule":
        return fully_shard(model, mesh=init_device_mesh(device.type, (1,)))
    if how == "DTensor":
        return parallelize_module(model, init_device_mesh(device.type, (1,)), {"last": ColwiseParallel()})
    return model


@pytest.mark.parametrize("how", ["all_reduce", "functional", "DistributedDataParallel", "FSDPModule", "DTensor"])
def test_a_process_that_is_its_own_group(device, process_group, how):
    from torch.distributed import _functional_collectives as functional

    if how == "FSDPModule" and device.type == "cpu" and not torch_cuda.can_swap():
        pytest.skip("the simulator needs storages that can exchange their memory")
    ours, _, eager, eager_optimizer = pair(device, plain_sgd)
    model = wrapped(ours, how, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)  # DTensors are not mixed

    @cudagraph.whole_step
    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for p in model.parameters():
            if how == "all_reduce":
                torch.distributed.all_reduce(p.grad)
            elif how == "functional":
                p.grad.copy_(functional.all_reduce(p.grad, "sum", process_group))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for x, y in batches(device, 14):
        torch.testing.assert_close(step(x, y), train(F.mse_loss(eager(x), y), eager_optimizer).detach())
    assert step.refused == "" and cudagraph.stats()["replays"] >= 2


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def hidden(model):
    """`model` compiled, in a place that a walk of host values does not look at."""
    holder = threading.local()
    holder.compiled = torch.compile(model, backend="eager")
    return lambda x: holder.compiled(x)


@pytest.mark.parametrize("is_hidden", [True, False])
def test_a_step_that_calls_compiled_code_is_not_watched(device, is_hidden, monkeypatch):
    """Under a dispatch mode Dynamo would run it as it is, then and in all later calls."""
    watched = []
    monkeypatch.setattr(OperatorWatch, "__call__", lambda self: watched.append(self) or contextlib.nullcontext())
    ours, optimizer, _, _ = pair(device, adamw_fused)
    compiled = hidden(ours) if is_hidden else torch.compile(ours, backend="eager")
    step = cudagraph.whole_step(compiled, F.mse_loss, optimizer)
    stance = torch._dynamo.eval_frame._callback_from_stance
    for x, y in batches(device, 4):
        step(x, y)
    assert step.refused == "" and watched == []
    assert torch._dynamo.eval_frame._callback_from_stance is stance


@pytest.mark.gpu  # the simulator is a dispatch mode, under which Dynamo uses no compiled code
@pytest.mark.parametrize("is_hidden", [True, False])
def test_compiled_parts_are_captured_where_the_step_is_not(is_hidden):
    device = torch.device("cuda", torch.cuda.current_device())
    ours, optimizer, eager, eager_optimizer = pair(device, adamw_fused)
    inner = torch.compile(ours, backend=cudagraph.cudagraph_tree)
    holder = threading.local()
    holder.model = inner

    def loss_fn(out, y):
        loss = F.mse_loss(out, y)
        return loss * (1 + 0 * loss.item())

    step = cudagraph.whole_step((lambda x: holder.model(x)) if is_hidden else inner, loss_fn, optimizer)
    expected = eager_step(eager, loss_fn, eager_optimizer)
    for x, y in batches(device, 8):
        torch.testing.assert_close(step(x, y), expected(x, y))
    assert "capturing it raised" in step.refused
    assert cudagraph.stats()["recordings"] >= 2  # of the forward and the backward


@pytest.mark.gpu  # the simulator is a dispatch mode, under which Dynamo uses no compiled code
@pytest.mark.parametrize(
    "policy",
    [
        None,
        aot_hooks.float8(),
        aot_hooks.policies.everything(aot_hooks.offload(min_bytes=1, max_stall_ms=float("inf"))),
        aot_hooks.budget(max_slowdown=float("inf")),
    ],
    ids=repr,
)
def test_models_that_inductor_compiles_with_hooks_enabled(policy):
    device = torch.device("cuda", torch.cuda.current_device())
    ours, optimizer, eager, eager_optimizer = pair(device, adamw_fused)
    with aot_hooks.enable(policy):
        step = cudagraph.whole_step(torch.compile(ours), F.mse_loss, optimizer)
        expected = eager_step(torch.compile(eager), F.mse_loss, eager_optimizer)
        for x, y in batches(device, 12):
            torch.testing.assert_close(step(x, y), expected(x, y), rtol=1e-3, atol=1e-4)
    assert step.refused == step.update_refused == "" and cudagraph.stats()["replays"] >= 8
