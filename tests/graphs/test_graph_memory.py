"""What is read off a graph once is what each caller would read for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from aot_hooks.graphs.lifetimes import SPLIT, GraphMemory, Kernels, alive_along, last_readers, written_storages
from aot_hooks.graphs.nodes import input_storages, output_storages, storage_of
from aot_hooks.graphs.roofline import host_ms, node_ms
from aot_hooks.graphs.speeds import Rates
from aot_hooks.passes.live_bytes import live_bytes

AT = torch.ops.aten
RATES = Rates(55e9, 55e9, 3.9e12, 8.2e14, 5.2e13)


def traced() -> GraphModule:
    """Products with pointwise operators between them, and views."""

    def function(x: torch.Tensor, w: torch.Tensor) -> list[Any]:
        y = torch.relu(x @ w)
        z = y.t() @ x
        y = y.to(torch.int8).to(torch.float32) * y
        return [y * 2 + 1, z.sigmoid(), (z + y[:16, :16].sum()) @ w]

    with FakeTensorMode():
        return make_fx(function, tracing_mode="fake")(torch.empty(64, 16), torch.empty(16, 16))


def test_storages_written_values_and_kernels() -> None:
    gm = traced()
    nodes, memory = list(gm.graph.nodes), GraphMemory(gm)
    assert memory.keys == {node: storage_of(node) for node in nodes}
    assert (memory.inputs, memory.outputs) == (input_storages(gm.graph), output_storages(gm.graph))
    assert memory.written == written_storages(nodes, fuse_loops=True)
    assert memory.kernels == Kernels.of(nodes, memory.written | memory.inputs | memory.outputs)
    assert GraphMemory(gm, False).written == {storage_of(node) for node in nodes}


@pytest.mark.parametrize("fused", [True, False])
def test_bytes_and_times_are_the_same_for_a_graph_and_its_memory(fused: bool) -> None:
    gm = traced()
    memory = GraphMemory(gm, fused)
    for fuse_loops in (True, False):
        one, other = (node_ms(g, lambda _: RATES, fused, fuse_loops=fuse_loops) for g in (gm, memory))
        assert one == other and sum(one.values()) > 0
    outputs: dict[str, Any] = {"num_fwd_outputs": 3, "fused": fused, "roots": {}}
    with FakeTensorMode():
        bw = make_fx(lambda a: [a.relu()], tracing_mode="fake")(torch.empty(8))
    assert live_bytes(gm, bw, **outputs) == live_bytes(memory, GraphMemory(bw, fused), **outputs)
    assert host_ms(memory, fused) == host_ms(gm, fused) == 0.0


def test_a_kernel_that_is_split_is_seen_once_the_order_is_read_again() -> None:
    def function(d: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        first = d @ w
        return [torch.relu(first), first @ w, torch.sigmoid(first)]

    with FakeTensorMode():
        gm = make_fx(function, tracing_mode="fake")(torch.empty(16, 16), torch.empty(16, 16))
    memory = GraphMemory(gm)
    late = next(node for node in gm.graph.nodes if node.target is AT.sigmoid.default)
    early = next(node for node in gm.graph.nodes if node.target is AT.relu.default)
    assert memory.kernels.at[late] == memory.kernels.at[early]
    late.meta[SPLIT] = late.name
    memory.changed_order()
    assert memory.kernels.at[late] == memory.nodes.index(late) > memory.kernels.at[early]


@pytest.mark.parametrize("read_again", [False, True])
def test_ranks_sum_up_in_place_and_nothing_is_written_over_that(read_again: bool) -> None:
    """As Inductor does, unless something else reads the product. See tests/planning/test_code_peak.py."""
    exchange = torch.ops._c10d_functional

    def function(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        part = x @ w
        whole = exchange.wait_tensor.default(exchange.all_reduce.default(part, "sum", "0"))
        return [whole.relu(), (part @ w).sum()] if read_again else [whole.relu()]

    with FakeTensorMode():
        gm = make_fx(function, tracing_mode="fake")(torch.empty(16, 16), torch.empty(16, 16))
    memory = GraphMemory(gm)
    last = last_readers(memory.nodes, memory.counted, memory.kernels)
    counted = memory.counted - memory.inputs
    alive = alive_along(memory.nodes, counted, to_end=memory.outputs, last_reader=last, kernels=memory.kernels)
    found = {node.name: nbytes // 1024 for node, nbytes in zip(memory.nodes, alive, strict=True)}
    first = {name: found[name] for name in ("mm", "all_reduce", "wait_tensor", "relu")}
    assert list(first.values()) == ([1, 2, 2, 3] if read_again else [1, 1, 1, 2])
