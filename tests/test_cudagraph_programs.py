"""Whole programs through the backend and the tree, on the simulator of captures: replays give what eager gives.

The simulator runs each replay on raw memory and scribbles over what is freed, so a value that a cut forgot to hand
over, or that was freed too early, comes out as NaN.
"""

from __future__ import annotations

import copy

import pytest
import torch
from capture_simulator import Simulator
from torch import nn

import aot_hooks
import cudagraph
from aot_hooks import captured
from aot_hooks.backend import aot_hooks as hooks_backend
from cudagraph.backend import Compilation, backend_with


@pytest.fixture(autouse=True)
def fresh_cudagraph():
    cudagraph.reset()
    yield
    cudagraph.reset()


@torch.library.custom_op("cudagraph_tests::host_scale", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def host_scale(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


host_scale.register_fake(lambda x, by: torch.empty_like(x))
host_scale.register_autograd(
    lambda ctx, grad: (host_scale(grad, ctx.by), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
)


class Net(nn.Module):
    """With `cut`, an operator that can't be captured stands in the middle of its forward and its backward."""

    def __init__(self, cut: bool):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU())
        self.second = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.register_buffer("seen", torch.zeros(()))
        self.cut = cut

    def forward(self, x):
        h = self.first(x)
        if self.cut:
            h = host_scale(h, 0.5) + h
        self.seen += 1
        return self.second(h), h.mean()


def trained(module, forward, steps=6, policy=None):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        x = torch.randn(5, 8)
        with aot_hooks.saved_tensors_policy(policy or aot_hooks.KEEP):
            out, mean = forward(x)
        (out.square().mean() + mean).backward()
        seen += [out.detach().clone(), *(p.grad.clone() for p in module.parameters())]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 == 0)
    return [*seen, module.seen.clone()]


@pytest.mark.core
@pytest.mark.parametrize("cut", [False, True])
def test_training(cut):
    module = Net(cut)
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend=backend_with(Simulator()))
    for a, b in zip(trained(module, compiled), trained(reference, reference), strict=True):
        torch.testing.assert_close(a, b)
    stats = cudagraph.stats()
    assert stats["replays"] >= (4 if cut else 2) * 3, stats  # the first steps warm up and record
    assert stats["skips"] == 0 and stats["rerecordings"] == 0, stats
    assert stats["partitions"] == (2 if cut else 0), stats


@pytest.mark.parametrize("cut", [False, True])
def test_two_forwards_in_flight(cut):
    module = Net(cut)
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend=backend_with(Simulator()))
    for step in range(6):
        torch.manual_seed(step)
        xs = [torch.randn(5, 8) for _ in range(2)]
        for run in (compiled, reference):
            outs = [run(x)[0] for x in xs]
            for out in outs if step % 2 else reversed(outs):
                out.square().mean().backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
            p.grad = q.grad = None


@pytest.mark.parametrize("name", ["int8", "lossless"])
@pytest.mark.parametrize("cut", [False, True])
def test_training_with_hooks(monkeypatch, name, cut):
    simulator = Simulator()
    monkeypatch.setattr(captured, "compilation", lambda options: Compilation(options, simulator))
    policy = aot_hooks.lossless() if name == "lossless" else aot_hooks.policies.everything(aot_hooks.int8())
    module = Net(cut)
    reference = copy.deepcopy(module)
    options = {"inner": "aten"}
    compiled = torch.compile(module, backend=hooks_backend, options=options | {"cudagraphs": True})
    plain = torch.compile(reference, backend=hooks_backend, options=options)
    results = [trained(m, f, policy=policy) for m, f in ((module, compiled), (reference, plain))]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert cudagraph.stats()["replays"] > 4 and cudagraph.stats()["skips"] == 0


def test_a_written_input_of_the_callers(caplog):
    @torch.compile(backend=backend_with(Simulator()))
    def f(x, y):
        x.add_(y.sin().cos())
        return (x * 2).exp(), y + 1

    for _ in range(5):
        x, y = torch.randn(3), torch.randn(3)
        x2 = x + y.sin().cos()
        out = f(x, y)
        torch.testing.assert_close(x, x2)
        torch.testing.assert_close(out, ((x2 * 2).exp(), y + 1))
    assert cudagraph.stats()["replays"] >= 3 and cudagraph.stats()["skips"] == 0


def test_sizes_that_depend_on_values_go_around():
    def f(x):
        y = (x.sin() * 2).relu()
        found = y.nonzero()
        return y.exp().sum() + x.cos().sum(), found * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(f, backend=backend_with(Simulator()), fullgraph=True)
        for _ in range(6):
            x = torch.randn(7)
            for a, b in zip(compiled(x), f(x), strict=True):
                torch.testing.assert_close(a, b)
    assert cudagraph.stats()["replays"] >= 4 and cudagraph.stats()["recordings"] == 1


def test_graph_breaks_and_dynamic_shapes():
    module = Net(cut=True)
    reference = copy.deepcopy(module)

    def program(net, x):
        out, mean = net(x)
        torch._dynamo.graph_break()
        return out * mean, mean

    compiled = torch.compile(program, backend=backend_with(Simulator()), dynamic=True)
    for size in (4, 6, 4, 6, 4, 6, 3):
        x = torch.randn(size, 8)
        for run, net in ((compiled, module), (program, reference)):
            net.zero_grad()
            run(net, x)[0].square().sum().backward()
        for p, q in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert cudagraph.stats()["replays"] > 0
