"""Random training programs: `whole_step` against eager mode, with something changed on the host between random calls.

WHOLE_STEP_SEEDS=1000:2000 python -m pytest tests/cudagraph/test_whole_step_fuzz.py runs other programs.
"""

from __future__ import annotations

import copy
import os
import random

import pytest
import torch
from test_whole_step import batches, device, eager_step, on_simulator, pair  # noqa: F401  # `device` is a fixture
from torch import nn
from torch.nn import functional as F

import cudagraph
from cudagraph.step.gradients import Gradients
from cudagraph.step.host import HostState
from cudagraph.step.inputs import Inputs
from cudagraph.torch_private import cuda as torch_cuda


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.dropout = nn.Linear(4, 8), nn.Linear(8, 2), nn.Dropout(0.25)
        self.register_buffer("shift", torch.zeros(8))
        self.options = {"scale": 1.0, "tanh": False, "order": [0, 1]}
        self.layers = [F.relu, torch.tanh]

    def forward(self, x):
        x = self.first(x) + self.shift
        for i in self.options["order"]:
            x = self.layers[i](x)
        x = self.last(self.dropout(x)) * self.options["scale"]
        return torch.tanh(x) if self.options["tanh"] else x


OPTIMIZERS = [
    lambda m: torch.optim.SGD(m.parameters(), lr=0.25, momentum=0.5),
    lambda m: torch.optim.SGD(m.parameters(), lr=0.25, fused=True),
    lambda m: torch.optim.AdamW(m.parameters(), lr=0.0625, fused=True, weight_decay=0.25),
    lambda m: torch.optim.Adam(m.parameters(), lr=0.0625, capturable=True, foreach=True),
    lambda m: torch.optim.Adafactor(m.parameters(), lr=0.0625),
]


def replace_parameter(model, optimizer, value):
    old = model.last.bias
    model.last.bias = nn.Parameter(old.detach().clone())
    optimizer.state.pop(old, None)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def load(model, optimizer, value):
    model.load_state_dict({k: v * 0.5 for k, v in copy.deepcopy(model.state_dict()).items()})
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def set_gradient(model, optimizer, value):
    model.last.bias.grad = torch.full_like(model.last.bias, value)


# `value` is a power of two: learning rates on the device, in float32, are bitwise those on the host.
CHANGES = [
    lambda m, o, value: o.param_groups[0].update(lr=value),
    lambda m, o, value: o.param_groups[0].update(weight_decay=value),
    lambda m, o, value: m.train(value > 0.1),
    lambda m, o, value: m.first.requires_grad_(value > 0.1),
    lambda m, o, value: m.options.update(scale=value),
    lambda m, o, value: m.options.update(tanh=value > 0.1),
    lambda m, o, value: m.options["order"].reverse(),
    lambda m, o, value: m.layers.__setitem__(0, F.gelu if value > 0.1 else F.silu),
    lambda m, o, value: setattr(m, "shift", m.shift + value),
    lambda m, o, value: m.shift.add_(value),
    lambda m, o, value: setattr(m.first.weight, "data", m.first.weight.data.clone()),
    lambda m, o, value: m.last.weight.register_hook(lambda g: g * value),
    lambda m, o, value: m.first.register_forward_hook(lambda module, args, out: out * value),
    lambda m, o, value: m.zero_grad(),
    replace_parameter,
    set_gradient,
    load,
]


SEEDS = range(*map(int, os.environ.get("WHOLE_STEP_SEEDS", "0:40").split(":")))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program(device, seed):  # noqa: F811
    run_program(device, seed)


DELETIONS = {
    "host values are compared": lambda m: m.setattr(HostState, "unchanged", lambda self: True),
    "tensors that moved are noticed": lambda m: m.setattr(torch_cuda, "pointers_equal", lambda *_: True),
    "gradients are looked at": lambda m: m.setattr(Gradients, "fit", lambda self: True),
    "inputs are copied": lambda m: m.setattr(Inputs, "copy", lambda self, flat: None),
}


@pytest.mark.parametrize("name", DELETIONS)
def test_its_deletion_is_noticed(monkeypatch, name):
    simulator = on_simulator(monkeypatch)
    DELETIONS[name](monkeypatch)
    for seed in range(40):
        try:
            run_program(simulator, seed)
        except (AssertionError, RuntimeError):
            return
    pytest.fail("no program noticed it")


def run_program(device, seed):  # noqa: F811
    choose = random.Random(seed)
    make = choose.choice(OPTIMIZERS)
    ours, optimizer, eager, eager_optimizer = pair(device, make, model=Net)
    how = {"clip_grad_norm": choose.choice([None, 0.5]), "accumulate": choose.choice([1, 1, 3])}
    step = cudagraph.whole_step(ours, F.mse_loss, optimizer, **how)
    expected = eager_step(eager, F.mse_loss, eager_optimizer, **how)
    often, sizes = choose.choice([0.1, 0.3, 0.9]), [6, choose.choice([6, 5])]
    done = []
    for i in range(40):
        if choose.random() < often:
            number, value = choose.randrange(len(CHANGES)), choose.choice([0.5, 0.25, 0.0625, 0.03125])
            for model, each in ((ours, optimizer), (eager, eager_optimizer)):
                CHANGES[number](model, each, value)
            done.append((i, number, value))
        (batch,) = batches(device, 1, choose.choice(sizes))
        torch.manual_seed(i)
        loss = step(*batch)
        torch.manual_seed(i)
        assert torch.equal(loss, expected(*batch)), (i, done)
        for (name, a), b in zip(ours.state_dict().items(), eager.state_dict().values(), strict=True):
            assert torch.equal(a, b), (i, name, done)
    assert often > 0.2 or cudagraph.stats()["replays"] > 15 or step.refused
