"""For tests of `whole_step`: the step that it stands for, by hand, and equal models with their optimizers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_simulator import ON_SIDE_STREAM, OUTSIDE, Simulator, host_operators
from torch import nn
from torch.nn import functional as F

import cudagraph
from cudagraph.step import recording, whole
from cudagraph.step.accumulators import is_alive, node_of
from cudagraph.torch_private import cuda as torch_cuda
from cudagraph.torch_private import distributed as torch_distributed


class Planted(Exception):
    """What a step raises when it is told to."""


def on_simulator(monkeypatch: pytest.MonkeyPatch, arena_bytes: int = 1 << 22) -> Simulator:
    """Whole steps are captured by a simulator from now on; optimizers may be capturable on the CPU."""
    simulator = Simulator(arena_bytes)
    monkeypatch.setattr(whole, "cuda_driver", lambda: simulator)
    monkeypatch.setattr(torch_cuda, "capturable_devices", lambda: ["cpu"])
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim.") and hasattr(module, "_get_capturable_supported_devices"):
            monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **kw: ["cpu"])
    read, write = torch.get_rng_state, torch.set_rng_state

    def note(step: Callable[[], Any]) -> None:  # a replay does it as well, as on CUDA
        for pool in simulator.pools:
            pool.note(step)

    def get_rng_state() -> torch.Tensor:
        state = read()
        note(lambda: state.copy_(read()))
        return state

    def set_rng_state(state: torch.Tensor) -> None:
        write(state)
        note(lambda: write(state))

    note_accumulators(monkeypatch, simulator)
    gather_in_arenas(monkeypatch, simulator)
    monkeypatch.setattr(torch, "get_rng_state", get_rng_state)
    monkeypatch.setattr(torch, "set_rng_state", set_rng_state)
    return simulator


def note_accumulators(monkeypatch: pytest.MonkeyPatch, simulator: Simulator) -> None:
    """Tell the simulator of the leaves of a step, and which of their accumulators are made on the side stream."""
    leaves_of, make_anew = recording.leaves_of, torch_distributed.make_reducer_anew

    def noted(host: Any) -> dict[str, torch.Tensor]:
        leaves = leaves_of(host)
        simulator.leaves = [*leaves.values()]
        return leaves

    def made_anew(ddp: Any) -> None:
        leaves = torch_distributed.reduced_parameters(ddp)
        old = [x for x in leaves if is_alive(x)]
        for x in old:
            node_of(x).metadata[OUTSIDE] = True
        make_anew(ddp)
        for x in leaves:
            if OUTSIDE not in node_of(x).metadata:
                node_of(x).metadata[ON_SIDE_STREAM] = True

    monkeypatch.setattr(recording, "leaves_of", noted)
    monkeypatch.setattr(torch_distributed, "make_reducer_anew", made_anew)


def gather_in_arenas(monkeypatch: pytest.MonkeyPatch, simulator: Simulator) -> None:
    """Have FSDP2 gather parameters into the arena in a capture, where the storages' `resize_` is seen by nobody."""
    params = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    if params is None or not torch_cuda.can_swap():
        return
    collectives = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_collectives"]
    group = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_param_group"]
    lent: dict[int, Any] = {}  # storages whose memory is the arena's, by that of the parameters
    alloc, free = params.alloc_storage, params.free_storage

    def alloc_storage(x: torch.Tensor) -> None:
        storage, size = x.untyped_storage(), x.numel() * x.itemsize
        arenas = [pool for pool in simulator.pools if pool.tape is not None]
        if not arenas or storage.size() == size:
            return alloc(x)
        lent[storage._cdata] = arenas[0].allocate(size)
        torch_cuda.swap_memory(storage, lent[storage._cdata])
        return None

    def free_storage(x: torch.Tensor) -> None:
        owner = lent.pop(x.untyped_storage()._cdata, None)
        if owner is None:
            return free(x)
        torch_cuda.swap_memory(x.untyped_storage(), owner)
        return None

    for module in (params, group):
        monkeypatch.setattr(module, "alloc_storage", alloc_storage)
    monkeypatch.setattr(params, "free_storage", free_storage)
    copy_in = torch.ops.fsdp.all_gather_copy_in.default
    monkeypatch.setitem(host_operators, copy_in, collectives.all_gather_copy_in_cuda)


def eager_step(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizers: Any,
    scaler: Any = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
) -> Callable[..., Any]:
    """The loop that `whole_step` stands for, by hand."""
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        clean = [p for p in model.parameters() if p.grad is None]
        total: Any = 0
        try:
            for a, b in zip(x.tensor_split(accumulate), y.tensor_split(accumulate), strict=True):
                loss = loss_fn(model(a), b)
                if accumulate > 1:
                    loss = loss * (len(a) / len(x))
                (loss if scaler is None else scaler.scale(loss)).backward()
                total = total + loss.detach()
        except Planted:
            for p in clean:
                p.grad = None
            raise
        if clip_grad_norm is not None:
            for optimizer in optimizers if scaler is not None else []:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        for optimizer in optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        model.zero_grad()
        return total

    return step


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.dropout = nn.Dropout(dropout)
        self.scale = 1.0

    def forward(self, x):
        return self.last(self.dropout(F.gelu(self.norm(self.first(x))))) * self.scale


def pair(device, make_optimizer, model=Net, **kw):
    """Two equal models with their optimizers: for the step, and for eager mode."""
    torch.manual_seed(1)
    ours = model(**kw).to(device)
    eager = copy.deepcopy(ours)
    return ours, make_optimizer(ours), eager, make_optimizer(eager)


def steps(device, make_optimizer=None, loss_fn=F.mse_loss, *, options=None, **kw):
    """A `whole_step`, a step in eager mode, their two equal models, and the two optimizers."""
    ours, optimizer, eager, eager_optimizer = pair(device, make_optimizer or adamw, **kw)
    step, expected = (
        cudagraph.whole_step(ours, loss_fn, optimizer, options=options),
        eager_step(eager, loss_fn, eager_optimizer),
    )
    return step, expected, (ours, eager), (optimizer, eager_optimizer)


def batches(device, count, size=6):
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        x, y = torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)
        yield x.to(device), y.to(device)


def copied(value):
    """A copy of nested tensors, also of those that have a history."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), value)


def tensors_of(state):
    return [x for x in torch.utils._pytree.tree_leaves(state) if isinstance(x, torch.Tensor)]


def assert_equal(ours, eager):
    """Modules or optimizers have equal state, bit for bit."""
    a, b = tensors_of(ours.state_dict()), tensors_of(eager.state_dict())
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x.cpu(), y.cpu())


def run(step, expected, models, data, between=lambda i: None):
    for i, (x, y) in enumerate(data):
        between(i)
        seed = torch.random.get_rng_state()
        cuda_seed = torch.cuda.get_rng_state() if x.is_cuda else None
        loss = step(x, y)
        torch.random.set_rng_state(seed)
        if cuda_seed is not None:
            torch.cuda.set_rng_state(cuda_seed)
        assert torch.equal(loss, expected(x, y)), i
        assert not loss.requires_grad
        assert_equal(*models)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True, foreach=True)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def muon_and_adamw(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01, fused=True, capturable=True)]


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "sgd with momentum": sgd,
    "sgd, foreach": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "sgd, fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, fused=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, capturable=True, foreach=False),
    "adam, foreach": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, capturable=True, foreach=True, amsgrad=True),
    "adam, fused": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, fused=True),
    "adamw, foreach": adamw,
    "adamw, fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "adamw, learning rate on the device": lambda m: torch.optim.AdamW(
        m.parameters(), lr=torch.tensor(0.01, device=m.last.weight.device), capturable=True, foreach=True
    ),
    "muon and adamw": muon_and_adamw,
}
