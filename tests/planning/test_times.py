"""Predicted times of kernels, and the bytes that a plan leaves for what it does not see."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.flop_counter
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import aot_hooks
from aot_hooks.errors import BudgetError
from aot_hooks.graphs import lifetimes, nodes, roofline, speeds
from aot_hooks.planning import options, trials

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


def swapped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, second = AT.split.Tensor(x, 2, 1)
    return AT.mul.Tensor(AT.permute.default(AT.cat.default([AT.neg.default(second), first], 1), [0, 1]), y)


def swapped_for_a_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, second = AT.split.Tensor(x, 2, 1)
    turned = AT.cat.default([AT.neg.default(second), first], 1)
    return AT.add.Tensor(AT.mul.Tensor(turned, y), AT.mm.default(turned, AT.permute.default(turned, [1, 0])).sum())


def slices_for_a_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return AT.add.Tensor(AT.cat.default([AT.slice.Tensor(x, 0, 4), y], 0), 1)


@pytest.mark.parametrize(
    "function",
    [halves, as_they_are, of_sums, read_twice, swapped, swapped_for_a_product, slices_for_a_sum],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_concatenation_is_fused_on_cuda_if_its_parts_are_computed_for_it(function: Any, device: str) -> None:
    gm = symbolic_trace(function)
    with FakeTensorMode() as mode:
        parts = [torch.empty(8, 4, device=device) for _ in range(2)]
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*parts)
    (cat,) = (n for n in gm.graph.nodes if n.target is AT.cat.default)
    assert lifetimes.fuses(cat) == (function in (halves, swapped) and device == "cuda")


def test_each_part_of_a_split_is_a_view_of_what_is_split_now() -> None:
    graph = torch.fx.Graph()
    old, new = (graph.placeholder(name) for name in ("old", "new"))
    part = graph.call_function(operator.getitem, (graph.call_function(AT.split.Tensor, (old, 2)), 1))
    sizes = graph.call_function(operator.getitem, (graph.call_function(AT.sort.default, (old,)), 1))
    with FakeTensorMode():
        old.meta["val"], new.meta["val"] = torch.empty(4), torch.empty(4)
        part.meta["val"] = old.meta["val"].split(2)[1]
    part.args[0].args = (new, 2)
    assert nodes.is_view(part) and not nodes.is_view(sizes)
    assert nodes.storage_of(part) == nodes.storage_of(new) != nodes.storage_of(old)


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
    monkeypatch.setattr(lifetimes, "on_cuda", lambda _: True)
    copies = 2 * roofline.COPY_MS + roofline.CALL_MS
    assert roofline.host_ms(gm, fused=True) == pytest.approx(3 * roofline.LAUNCH_MS + copies)
    assert roofline.step_ms(gm, gm, True) > roofline.step_ms(gm, gm, True, launched=False)


def test_on_a_gpu_a_plan_leaves_three_thousandths(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    search = trials.search

    def noted(step: Any, limits: Any, *rest: Any) -> Any:
        asked.append(limits.peak)
        return search(step, dataclasses.replace(limits, peak=10**9), *rest)

    x = torch.randn(16, 32)
    monkeypatch.setattr(trials, "search", noted)
    aot_hooks.plan(MODEL, x, policy=aot_hooks.budget("1MB"), inner="aten")
    monkeypatch.setattr(trials, "on_cuda", lambda _: True)
    aot_hooks.plan(MODEL, x, policy=aot_hooks.budget("1MB"), inner="aten")
    assert asked == [1_000_000, 997_000]


def test_graphs_that_are_slower_than_planned_are_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    read_off = trials.step_of

    def slower(*args: Any) -> Any:
        step, groups = read_off(*args)
        again = len(args) > 4  # a graph that computes something again
        return dataclasses.replace(step, node_ms=tuple((1 + again) * ms for ms in step.node_ms)), groups

    monkeypatch.setattr(trials, "step_of", slower)
    x = torch.randn(16, 32)
    peak = aot_hooks.plan(MODEL, x, policy=aot_hooks.KEEP, inner="aten").peak_bytes
    with pytest.raises(BudgetError, match=r"within 1\.1 times the time"):
        aot_hooks.plan(MODEL, x, policy=aot_hooks.budget(f"{peak // 2}B", max_slowdown=0.1), inner="aten")
    enough = aot_hooks.plan(MODEL, x, policy=aot_hooks.budget(f"{2 * peak}B", max_slowdown=0.1), inner="aten")
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
    assert roofline._fused_kernel_count(lifetimes.GraphMemory(gm)) == 3


def test_gradients_of_slices_are_computed_in_their_readers_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the backward of a rotary embedding: both halves are put into zeros and added up, in one kernel."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        zeros = torch.full((64, 16), 0.0)
        first, second = (AT.slice_scatter.default(zeros, -y[:, a:b], 1, a, b) for a, b in ((0, 8), (8, 16)))
        return (first + second) @ w

    with FakeTensorMode():
        gm = make_fx(function, tracing_mode="fake")(torch.empty(64, 16), torch.empty(16, 16))
    monkeypatch.setattr(lifetimes, "on_cuda", lambda _: True)
    assert roofline.host_ms(gm, fused=True) == pytest.approx(3 * roofline.LAUNCH_MS)


def test_a_lookup_that_a_product_reads_is_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(words: torch.Tensor, i: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        x = AT.embedding.default(words, i)
        return [x.sin(), x @ w]

    with FakeTensorMode():
        words, i = torch.empty(8, 16), torch.empty(64, dtype=torch.int64)
        gm = make_fx(function, tracing_mode="fake")(words, i, torch.empty(16, 16))
    monkeypatch.setattr(lifetimes, "on_cuda", lambda _: True)
    assert roofline.host_ms(gm, fused=True) == pytest.approx(3 * roofline.LAUNCH_MS)


def node_of(operator: Any, *args: Any) -> torch.fx.Node:
    """A call of `operator` in a graph, with these tensors and other arguments."""
    graph = torch.fx.Graph()
    leaves, spec = torch.utils._pytree.tree_flatten(args)
    nodes = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            node = graph.placeholder("x")
            node.meta["val"] = leaf
        nodes.append(node if isinstance(leaf, torch.Tensor) else leaf)
    node = graph.call_function(operator, torch.utils._pytree.tree_unflatten(nodes, spec))
    node.meta["val"] = leaves[0]
    return node


def heads(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of what is timed, each taken to last 2.04 ms; tensors are made on the CPU."""
    found: list[Any] = []

    def seconds(work: Callable[[], Any]) -> float:
        found.append(work())
        return 2.04e-3

    monkeypatch.setattr(speeds, "_seconds", seconds)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.random, "fork_rng", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(speeds, "_cuda", lambda _: torch.device("cpu"))
    return found


def alone_ms(operator: Any, *args: Any) -> float | None:
    return speeds._alone_ms(operator, *speeds.leaves_of((args, {})), 7)


def test_attention_is_measured_with_a_part_of_its_batch(ran: list[Any]) -> None:
    """32 MiB of queries are 32 of 64 samples: half the batch is run, and the time is doubled."""
    q, k = heads(64, 4, 1024, 128), heads(64, 1, 1024, 128).expand(-1, 4, -1, -1)
    assert alone_ms(lambda *args: args, q, k, k, 0.5, True) == 4.1
    ((q, k, _, scale, _),) = ran
    assert q.shape == k.shape == (32, 4, 1024, 128) and k.stride(1) == 0 and q.dtype == torch.bfloat16
    assert q.float().std() > 0.9 and scale == 0.5


def test_attention_is_measured_with_a_part_of_the_heads_of_a_long_sample(ran: list[Any]) -> None:
    q, rows = heads(1, 16, 65536, 64), torch.empty(1, 16, 65536, device="meta")
    assert alone_ms(lambda *args: args, q, q, q, rows) == 8.2  # 4 of 16 heads
    assert [x.shape[:2] for x in ran[0]] == [(1, 4)] * 4
    k = heads(1, 4, 65536, 64)  # four heads share keys: all are run
    assert alone_ms(lambda *args: args, q, k, k) == 2.0
    assert [x.shape[:2] for x in ran[1]] == [(1, 16), (1, 4), (1, 4)]


def test_what_can_not_be_measured_is_estimated(ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    q = heads(2, 4, 64, 128)

    def fails(kind: type[Exception]) -> Callable[..., Any]:
        def operator(*_: Any) -> Any:
            raise kind("not now")

        return operator

    assert alone_ms(fails(TypeError), q, q, q) is None
    with pytest.raises(torch.OutOfMemoryError):  # which is not kept
        alone_ms(fails(torch.OutOfMemoryError), q, q, q)
    monkeypatch.setattr(speeds, "_seconds", lambda work: 4e-5)
    assert alone_ms(lambda *args: args, q, q, heads(2, 4, 64, 128)) is None  # the host's time


@pytest.mark.parametrize(
    ("measured", "operator", "args"),
    [
        (True, AT._scaled_dot_product_cudnn_attention.default, (None, True, 0.1)),
        (True, AT._scaled_dot_product_flash_attention.default, (0.1, True)),
        (False, AT._scaled_dot_product_efficient_attention_backward.default, (None, None, None, None, None, 0.1)),
        (True, AT._scaled_dot_product_efficient_attention_backward.default, (None, None, None, None, None, 0.0)),
        (False, AT._flash_attention_forward.default, (None, None, 64, 64, 0.0, False, False)),
        (False, torch.ops.higher_order.flex_attention, (None, (), 1.0, {})),
    ],
)
def test_which_attention_is_measured(
    measured: bool, operator: Any, args: tuple[Any, ...], ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None that reads lengths, functions, or where random numbers came from: with made-up ones a process may end."""
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(speeds, "_alone_ms", lambda *named: asked.append(named) or 3.0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    q = heads(2, 4, 64, 128)
    tensors = 4 if "backward" in str(operator) else 3
    assert speeds.measured_ms(node_of(operator, *[q] * tensors, *args)) == (3.0 if measured else None)
    assert bool(asked) == measured


def test_products_of_16_bits_are_as_fast_with_sums_in_float32() -> None:
    rates = speeds.Rates(1e9, 1e9, 1e18, 1e15, 1e13)

    def ms(dtype: torch.dtype) -> float:
        def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return AT.mm.dtype(a, b, torch.float32) if dtype is not torch.float32 else AT.mm.default(a, b)

        with FakeTensorMode():
            gm = make_fx(product, tracing_mode="fake")(*(torch.empty(512, 512, dtype=dtype, device="meta"),) * 2)
        return sum(roofline.node_ms(gm, lambda _: rates, True).values())

    assert ms(torch.float32) == pytest.approx(100 * ms(torch.bfloat16), rel=1e-3)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return AT._scaled_dot_product_flash_attention.default(q, k, v, 0.0, True)[0]


def test_estimates_take_what_was_measured_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps, not of the schedule of copies, which has shares of its own."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = heads(4, 4, 1024, 128)
        gm = make_fx(attention, tracing_mode="fake")(q, q, q)
    (node,) = (n for n in gm.graph.nodes if roofline.is_attention(n))
    rates = speeds.Rates(1e9, 1e9, 1e12, 1e15, 1e15)

    def ms(**named: bool) -> float:
        return roofline.node_ms(gm, lambda _: rates, True, **named)[node]

    by_formula, scheduled = ms(fuse_loops=True), ms()
    monkeypatch.setattr(roofline, "measured_ms", lambda _: 12.0)
    assert ms(fuse_loops=True) == 12.0 != by_formula and ms() == scheduled
    monkeypatch.setattr(roofline, "measured_ms", lambda _: None)
    assert ms(fuse_loops=True) == by_formula


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn", "cpu"])
def test_attention_counts_each_head_of_queries(kind: str) -> None:
    """Keys and values have a fourth of the heads. There are two products forward, five backward."""
    q, k, v = (torch.empty(2, n, 64, 16, device="meta") for n in (8, 2, 2))
    one = 2 * 2 * 8 * 64 * 64 * 16  # operations of a product over all heads of queries
    suffix = "flash_attention_for_cpu" if kind == "cpu" else f"{kind}_attention"
    name = f"_scaled_dot_product_{suffix}"
    forward, backward = (roofline._FORMULAS[n] for n in (name, f"{name}_backward"))
    assert forward(q, k, v, 0.0, True, out_val=(q,)) == 2 * one
    assert backward(q, q, k, v, q, out_val=(q, k, v)) == 5 * one
    if kind != "cpu":
        equal_heads = torch.utils.flop_counter.flop_registry[getattr(AT, name)]
        assert equal_heads(q, q, q, out_val=(q,)) == forward(q, q, q)


@pytest.mark.gpu
def test_attention_is_measured_on_a_gpu_and_leaves_random_numbers_alone() -> None:
    shape, device = (8, 16, 4096, 64), torch.device("cuda")
    with FakeTensorMode():
        q = torch.empty(shape, dtype=torch.bfloat16, device=device)
        gm = make_fx(attention, tracing_mode="fake")(q, q, q)
    (node,) = (n for n in gm.graph.nodes if roofline.is_attention(n))
    torch.manual_seed(1)
    expected = torch.randn(8, device=device)
    torch.manual_seed(1)
    speeds._alone_ms.cache_clear()
    ms = speeds.measured_ms(node)
    assert ms is not None and speeds._LEAST_MS < ms < 50
    assert torch.equal(torch.randn(8, device=device), expected)
    assert speeds.measured_ms(node) == ms
