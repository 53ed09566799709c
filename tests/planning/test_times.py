"""What products spare that read a rounded value, and the bytes that a plan leaves for what it does not see."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import aot_hooks
from aot_hooks.graphs import roofline
from aot_hooks.planning import options, within

MODEL = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def read(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    by_view = torch.ops.aten.mm.default(torch.ops.aten.view.default(x, [4, 8]), w)
    by_loop = torch.ops.aten.mm.default(torch.ops.aten.relu.default(torch.ops.aten.view.default(x, [4, 8])), w)
    return torch.ops.aten.add.Tensor(by_view, by_loop)


def test_only_products_that_read_the_value_itself_are_faster() -> None:
    gm = symbolic_trace(read)
    FakeTensorProp(gm).propagate(torch.randn(8, 4), torch.randn(8, 8))
    (value, *_) = gm.graph.nodes
    products = [n for n in gm.graph.nodes if n.target is torch.ops.aten.mm.default]
    assert options._products([types.SimpleNamespace(bw_node=value)]) == {products[0]}  # type: ignore[list-item]


def test_steps_run_at_the_rates_that_a_device_keeps_up() -> None:
    gm = symbolic_trace(read)
    FakeTensorProp(gm).propagate(torch.randn(8, 4), torch.randn(8, 8))
    rates = roofline.Rates(1e9, 1e9, 1e10, 1e9, 1e9)
    burst, kept = (roofline.node_ms(gm, lambda _: rates, True, fuse_loops=step) for step in (False, True))
    operations = 2 * 4 * 8 * 8
    for node in (n for n in gm.graph.nodes if n.target is torch.ops.aten.mm.default):
        assert burst[node] == pytest.approx(1e3 * operations / 1e9)
        assert kept[node] == pytest.approx(1e3 * operations / 1e9 / 0.86)
    assert sum(kept.values()) > 1.15 * sum(burst.values())


def test_on_a_gpu_a_plan_leaves_a_thousandth(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    search = within._search

    def noted(step: Any, limits: Any, *rest: Any) -> Any:
        asked.append(limits.peak)
        return search(step, dataclasses.replace(limits, peak=10**9), *rest)

    x = torch.randn(16, 32)
    monkeypatch.setattr(within, "_search", noted)
    aot_hooks.plan(MODEL, x, policy=aot_hooks.budget(1_000_000), inner="aten")
    monkeypatch.setattr(within, "on_cuda", lambda _: True)
    aot_hooks.plan(MODEL, x, policy=aot_hooks.budget(1_000_000), inner="aten")
    assert asked == [1_000_000, 999_000]


def test_no_plan_is_said_to_be_faster_than_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = within.solve

    def sparing(*args: Any, **kwargs: Any) -> Any:
        if (found := solve(*args, **kwargs)) is None:
            return None
        return dataclasses.replace(found, options=tuple(dataclasses.replace(o, spared_ms=1e6) for o in found.options))

    monkeypatch.setattr(within, "solve", sparing)
    policy = aot_hooks.budget(max_slowdown=float("inf"))
    plan = aot_hooks.plan(MODEL, torch.randn(256, 32), policy=policy, inner="aten")
    assert plan.packed_bytes < plan.saved_bytes and plan.step_ratio == 1
