"""Nodes that the backward computes again stand before their readers, and gradients stay the same bits."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aot_hooks
from aot_hooks.graphs.repeats import draws
from aot_hooks.graphs.saved import crossing_pairs
from aot_hooks.passes.recompute import recompute_nodes
from aot_hooks.planning import recomputation
from aot_hooks.torch_private import aot


class Part(nn.Module):
    """Products, a norm with a buffer, views, and an attention, some of whose values are read by each other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.register_buffer("turn", torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.up(self.norm(x)).chunk(3, -1))
        q, k = q @ self.turn, k[:, :1].expand(-1, 2, -1, -1) @ self.turn
        y = torch.softmax(q @ k.mT, -1) @ v
        return x + self.down(nn.functional.gelu(y.transpose(1, 2).flatten(2)))


def trained(again: Any = None, dynamic: bool = False) -> tuple[list[Tensor], list[Any]]:
    """The gradients of a step, and both graphs, with the nodes computed again that `again` names."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(Part(), Part()).double(), torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    graphs: list[Any] = []

    def partition(joint: Any, inputs: Any, **kwargs: Any) -> Any:
        fw, bw = aot.min_cut_partition(joint, inputs, draws, **kwargs)
        if again is not None:
            recompute_nodes(fw, bw, kwargs["num_fwd_outputs"], again(fw, kwargs["num_fwd_outputs"]))
            fw.recompile(), bw.recompile()
        fw.graph.lint(), bw.graph.lint()
        graphs.extend((fw, bw, kwargs["num_fwd_outputs"]))
        return fw, bw

    def backend(gm: Any, sample: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        def code(gm: Any, sample: Any) -> Any:
            return make_boxed_func(gm)

        return aot_autograd(fw_compiler=code, bw_compiler=code, partition_fn=partition)(gm, sample)

    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    compiled(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())], graphs


def every(fw: Any, num_fwd_outputs: int) -> set[str]:
    """All that can be repeated, from the inputs on."""
    return {n.name for n in fw.graph.nodes if n.op == "call_function" and recomputation._repeatable(n)}


def every_other(fw: Any, num_fwd_outputs: int) -> set[str]:
    found = sorted(every(fw, num_fwd_outputs))[::2]
    calls = {n.args[0].name for n in fw.graph.nodes if n.name in found and n.target is operator.getitem}
    return {*found, *calls}


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("again", (every, every_other))
def test_gradients_are_the_same_bits_with_what_is_computed_again(again, dynamic):
    expected, (fw, bw, count) = trained(dynamic=dynamic)
    found, (again_fw, again_bw, _) = trained(again, dynamic)
    assert all(f.abs().max() > 0 and torch.equal(f, e) for f, e in zip(found, expected, strict=True))
    names = again(fw, count)
    saved = {getattr(n, "name", "") for n, _ in crossing_pairs(again_fw, again_bw, count)}
    assert names.isdisjoint(saved) and len(again_bw.graph.nodes) > len(bw.graph.nodes)


def test_a_node_stands_just_before_what_needs_it():
    _, (_, bw, _) = trained(every)
    order = list(bw.graph.nodes)
    tangent = min(order.index(u) for n in order if n.name.startswith("tangents") for u in n.users)
    first = [n for n in order[:tangent] if n.op == "call_function"]
    assert len(first) < 10 < len(order[tangent:])


def test_a_budget_computes_again_from_a_buffer_as_it_was():
    """The program changes it between forward and backward, so the backward reads a copy."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
            self.register_buffer("shift", torch.randn(64))

        def forward(self, x: Tensor) -> Tensor:
            return self.down(nn.functional.gelu(self.up(x) + self.shift)).square().sum()

    def gradients(policy: Any = None) -> tuple[list[Tensor], list[Any]]:
        torch.manual_seed(0)
        net, x = Net(), torch.randn(512, 16, requires_grad=True)
        compiled = torch.compile(net, backend="aot_hooks", options={"inner": "aten", "policy": policy})
        loss = net(x) if policy is None else compiled(x)
        net.shift.mul_(2.0)
        loss.backward()
        plans = [] if policy is None else aot_hooks.last_plans(compiled)
        return [x.grad, *(p.grad for p in net.parameters())], [d.hook.name for plan in plans for d in plan.decisions]

    policy = aot_hooks.budget(max_slowdown=float("inf"), allow=("recompute",), max_error=0)
    (eager, _), (found, hooks) = gradients(), gradients(policy)
    assert "recompute" in hooks and all(e.abs().max() > 0 for e in eager)
    torch.testing.assert_close(found, eager)
