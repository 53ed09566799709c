"""For tests of `whole_step`: equal models with their optimizers, and steps of both that must give equal numbers."""

from __future__ import annotations

import copy

import torch
from fuzz_whole_step import eager_step
from torch import nn
from torch.nn import functional as F

import cudagraph


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
