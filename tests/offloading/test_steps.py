"""Many graphs in a step: what each call sends is decided when it runs, and its copies may end in another graph."""

from __future__ import annotations

import torch
from offloading import Block, copies  # noqa: F401
from torch import nn

import aot_hooks


def blocks(layers: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(layers)))


def by_blocks(model: nn.Sequential, hook, **options) -> nn.Sequential:
    for block in model:
        block.compile(backend="aot_hooks", options={"inner": "aten", "policy": hook})
    return model


def step(model, x):
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_x():
    torch._dynamo.reset()
    x = torch.randn(64, 16)
    plain = by_blocks(blocks(), None)
    hooked = by_blocks(blocks(), aot_hooks.offload(0, rates=aot_hooks.Rates(to_host=1e8, to_device=1e8, memory=1e15, operations=1e18, operations32=1e18)))
    for i in range(6):
        x = torch.randn(64, 16)
        before = aot_hooks.offload_stats()
        a, b = step(plain, x), step(hooked, x)
        assert all(torch.equal(p, q) for p, q in zip(a, b))
        stats = aot_hooks.offload_stats()
        print(i, stats["sent_count"] - before["sent_count"], stats["fetched_count"] - before["fetched_count"], stats["step_bytes"], stats["step_sent_bytes"],stats["step_graph_count"])
