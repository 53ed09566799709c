"""Predicted times of kernels, and the bytes that a plan leaves for what it does not see."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import aot_hooks
from aot_hooks.errors import BudgetError
from aot_hooks.graphs import lifetimes, roofline, speeds
from aot_hooks.planning import options, within

AT = torch.ops.aten
MODEL = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def read(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    by_view = torch.ops.aten.mm.default(torch.ops.aten.view.default(x, [4, 8]), w)
    by_loop = torch.ops.aten.mm.default(torch.ops.aten.relu.default(torch.ops.aten.view.default(x, [4, 8])), w)
    return torch.ops.aten.add.Tensor(by_view, by_loop)


def test_only_readers_of_the_value_itself_are_faster() -> None:
    gm = symbolic_trace(read)
    FakeTensorProp(gm).propagate(torch.randn(8, 4), torch.randn(8, 8))
    (value, *_) = gm.graph.nodes
    product, relu = (next(n for n in gm.graph.nodes if n.target is t) for t in (AT.mm.default, AT.relu.default))
    assert options._readers_of(value) == [product, relu]


def halves(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return AT.cat.default([AT.neg.default(x), AT.mul.Tensor(y, y)], 1)


def as_they_are(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return AT.cat.default([x, AT.mul.Tensor(y, y)], 1)


def of_sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return AT.cat.default([AT.neg.default(x), AT.mul.Tensor(y, AT.sum.dim_IntList(y, [1], True))], 1)


def read_twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    half = AT.neg.default(x)
    return AT.cat.default([AT.add.Tensor(half, y), half], 1)


@pytest.mark.parametrize("function", [halves, as_they_are, of_sums, read_twice])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_concatenation_is_fused_on_cuda_if_its_parts_are_computed_for_it(function: Any, device: str) -> None:
    gm = symbolic_trace(function)
    with FakeTensorMode() as mode:
        parts = [torch.empty(8, 4, device=device) for _ in range(2)]
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*parts)
    (cat,) = (n for n in gm.graph.nodes if n.target is AT.cat.default)
    assert lifetimes.fuses(cat) == (function is halves and device == "cuda")


def test_what_is_read_by_many_paths_is_looked_at_once() -> None:
    def halves_of_a_chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(40):  # 2 ** 40 paths
            x = x.sin() + x.cos()
        return torch.cat([-x, x * 2], -1)

    with FakeTensorMode():
        graph = make_fx(halves_of_a_chain)(torch.empty(4, 64, device="cuda")).graph
    (cat,) = graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert lifetimes.fuses(cat)


def packed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    scale = AT.amax.default(AT.abs.default(AT.view.default(x, [4096, 32, 128])), [-1])
    product = AT.mm.default(x, w)
    return AT.add.Tensor(product, AT.sum.default(scale))


def normed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = AT.mul.Tensor(x, AT.rsqrt.default(AT.mean.dim(AT.mul.Tensor(x, x), [-1], True)))
    return packed(y, w)


def test_rows_of_another_length_are_read_again() -> None:
    """A norm reduces rows of 4096 elements, the scales of packed blocks 128: two kernels, and the second reads again
    what the first wrote."""
    rates, nbytes = speeds.Rates(1e9, 1e9, 1e9, 1e18, 1e18), 4 * 4096 * 4096
    ms = {}
    for function in (packed, normed):
        gm = symbolic_trace(function)
        FakeTensorProp(gm).propagate(torch.empty(4096, 4096), torch.empty(4096, 8))
        times = roofline.node_ms(gm, lambda _: rates, True, fuse_loops=True)
        ms[function] = sum(t for n, t in times.items() if n.target is not AT.mm.default)
    read_once = roofline.memory_ms(nbytes, rates)
    assert ms[packed] == pytest.approx(read_once, rel=0.02)
    assert ms[normed] == pytest.approx(3 * read_once, rel=0.02)


def test_steps_run_at_the_rates_that_a_device_keeps_up() -> None:
    gm = symbolic_trace(read)
    FakeTensorProp(gm).propagate(torch.randn(8, 4), torch.randn(8, 8))
    rates = speeds.Rates(1e9, 1e9, 1e10, 1e9, 1e9)
    burst, kept = (roofline.node_ms(gm, lambda _: rates, True, fuse_loops=step) for step in (False, True))
    operations = 2 * 4 * 8 * 8
    for node in (n for n in gm.graph.nodes if n.target is torch.ops.aten.mm.default):
        assert burst[node] == pytest.approx(1e3 * operations / 1e9)
        assert kept[node] == pytest.approx(1e3 * operations / 1e9 / 0.86)
    (loop,) = (n for n in gm.graph.nodes if n.target is AT.add.Tensor)
    assert kept[loop] == pytest.approx(burst[loop] / (1.1 / 0.7))


def test_the_host_launches_each_kernel_of_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product, a kernel of two sums that are fused, a copy to the host and back, and an operator of Python."""
    ours = torch.ops.aot_hooks

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        product = torch.relu(x @ x).t()
        host = ours.offload_wait(ours.offload_start(product, -1), product)
        fetched = ours.reload_wait(ours.reload_start(host, x.device), host, x.device)
        return [product, fetched, ours.pack_int4(product.sum(1), 32, None)[0]]

    with FakeTensorMode():
        gm = make_fx(function, tracing_mode="fake")(torch.empty(64, 64))
    assert roofline.host_ms(gm, fused=True) == 0.0
    monkeypatch.setattr(roofline, "on_cuda", lambda _: True)
    copies = 2 * roofline.COPY_MS + roofline.CALL_MS
    assert roofline.host_ms(gm, fused=True) == pytest.approx(3 * roofline.LAUNCH_MS + copies)
    assert roofline.step_ms(gm, gm, True) > roofline.step_ms(gm, gm, True, launched=False)


def test_on_a_gpu_a_plan_leaves_three_thousandths(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    search = within.search

    def noted(step: Any, limits: Any, *rest: Any) -> Any:
        asked.append(limits.peak)
        return search(step, dataclasses.replace(limits, peak=10**9), *rest)

    x = torch.randn(16, 32)
    monkeypatch.setattr(within, "search", noted)
    aot_hooks.plan(MODEL, x, policy=aot_hooks.budget(1_000_000), inner="aten")
    monkeypatch.setattr(within, "on_cuda", lambda _: True)
    aot_hooks.plan(MODEL, x, policy=aot_hooks.budget(1_000_000), inner="aten")
    assert asked == [1_000_000, 997_000]


def test_graphs_that_are_slower_than_planned_are_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    read_off = within.step_of

    def slower(*args: Any) -> Any:
        step, groups = read_off(*args)
        again = len(args) > 4  # a graph that computes something again
        return dataclasses.replace(step, node_ms=tuple((1 + again) * ms for ms in step.node_ms)), groups

    monkeypatch.setattr(within, "step_of", slower)
    x = torch.randn(16, 32)
    peak = aot_hooks.plan(MODEL, x, policy=aot_hooks.KEEP, inner="aten").peak_bytes
    with pytest.raises(BudgetError, match=r"within 1\.1 times the time"):
        aot_hooks.plan(MODEL, x, policy=aot_hooks.budget(peak // 2, max_slowdown=0.1), inner="aten")
    enough = aot_hooks.plan(MODEL, x, policy=aot_hooks.budget(2 * peak, max_slowdown=0.1), inner="aten")
    assert enough.peak_bytes == peak


def test_what_a_reduction_shares_a_kernel_with() -> None:
    """A norm with its sum, and what follows in the same rows, is one kernel; a sum over columns is two."""

    def function(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        y = x @ w
        variance, mean = AT.var_mean.correction(y, [1], correction=0, keepdim=True)
        normed = (y - mean) * variance.rsqrt()
        return [mean, variance, normed, normed @ w, (normed * 2).sum(0)]

    with FakeTensorMode():
        gm = make_fx(function, tracing_mode="fake")(torch.empty(64, 16), torch.empty(16, 16))
    assert roofline._fused_kernel_count(gm, list(gm.graph.nodes)) == 3


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return AT._scaled_dot_product_flash_attention.default(q, k, v, 0.0, True)[0]


def node_of_attention() -> torch.fx.Node:
    """An attention of four heads, a batch of 64, and keys that all heads share."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
        q, k = torch.empty(64, 4, 1024, 128, dtype=torch.bfloat16), torch.empty(64, 1, 1024, 128, dtype=torch.bfloat16)
        gm = make_fx(attention, tracing_mode="fake")(q, k.expand(-1, 4, -1, -1), k.expand(-1, 4, -1, -1))
    (node,) = (n for n in gm.graph.nodes if roofline.is_attention(n))
    return node


def test_attention_is_measured_with_a_part_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 MiB of queries are 32 of 64: half the batch is run, and the time is doubled."""
    ran: list[Any] = []

    def run(work: Callable[[], Any]) -> float:
        work()
        return 2.04e-3

    node = node_of_attention()
    spec_and_leaves = torch.utils._pytree.tree_flatten((node.args, dict(node.kwargs)))
    leaves = tuple((type(x), x) for x in map(speeds._like, spec_and_leaves[0]))
    monkeypatch.setattr(speeds, "_seconds", run)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.random, "fork_rng", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(speeds, "_cuda", lambda _: torch.device("cpu"))
    assert speeds._alone_ms(lambda *args, **_: ran.extend(args), spec_and_leaves[1], leaves, 7) == 4.1
    q, k = ran[0], ran[1]
    assert q.shape == k.shape == (32, 4, 1024, 128) and k.stride(1) == 0 and q.dtype == torch.bfloat16
    assert q.float().std() > 0.9

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    assert speeds._alone_ms(fails, spec_and_leaves[1], leaves, 7) is None


def test_estimates_take_what_was_measured_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    node = node_of_attention()
    rates = speeds.Rates(1e9, 1e9, 1e12, 1e15, 1e15)

    def ms() -> float:
        return roofline.node_ms(node.graph.owning_module, lambda _: rates, True, fuse_loops=True)[node]

    by_formula = ms()
    monkeypatch.setattr(roofline, "measured_ms", lambda _: 12.0)
    assert ms() == 12.0 != by_formula
    monkeypatch.setattr(roofline, "measured_ms", lambda _: None)
    assert ms() == by_formula


@pytest.mark.gpu
def test_attention_is_measured_on_a_gpu_and_leaves_random_numbers_alone() -> None:
    shape, device = (4, 8, 1024, 64), torch.device("cuda")
    with FakeTensorMode():
        q = torch.empty(shape, dtype=torch.bfloat16, device=device)
        gm = make_fx(attention, tracing_mode="fake")(q, q, q)
    (node,) = (n for n in gm.graph.nodes if roofline.is_attention(n))
    torch.manual_seed(1)
    expected = torch.randn(8, device=device)
    torch.manual_seed(1)
    speeds._alone_ms.cache_clear()
    ms = speeds.measured_ms(node)
    assert ms is not None and 0.005 < ms < 50
    assert torch.equal(torch.randn(8, device=device), expected)
    assert speeds.measured_ms(node) == ms
