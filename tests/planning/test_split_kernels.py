"""Which kernels of a planned backward are split, joined again, and fused: graphs that differ by one thing each."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from aot_hooks.graphs.lifetimes import (
    SPLIT,
    GraphMemory,
    Kernels,
    alive_along,
    last_readers,
    late_products,
    lifetimes,
    written_storages,
)
from aot_hooks.graphs.nodes import output_storages, storage_bytes, storage_of
from aot_hooks.graphs.workspaces import workspace_bytes
from aot_hooks.passes.live_bytes import LivePoint
from aot_hooks.planning import kernels
from aot_hooks.planning.kernels import (
    fusion_zones,
    hold_kernels,
    join_kernels,
    multiplied_early,
    split_and_hold,
    split_kernels,
    unpack_early,
    write_when_made,
)
from aot_hooks.torch_private.inductor import decompositions
from aot_hooks.torch_private.inductor_fusion import ALONE, ALONE_IF_WRITTEN, FROM_HOOK

ROWS, WIDTH = 64, 32
BYTES = ROWS * WIDTH * 4


def wide(x):
    return torch.ops.prims.convert_element_type(x, torch.float32)


def gradients(grad, weight, gate, up):
    d = grad @ weight
    d_up = d * torch.sigmoid(wide(gate))
    first = d_up.t() @ grad
    d_gate = d * wide(up) * wide(gate)
    return first, d_gate.t() @ grad


def traced(function, *dtypes):
    inputs = [torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)]
    inputs += [torch.randn(ROWS, WIDTH).mul(9).to(dtype) for dtype in dtypes]
    return make_fx(function, tracing_mode="fake")(*inputs), inputs


def ran(gm, inputs):
    """What `gm` computes, as passes have left it."""
    gm.graph.lint()
    gm.recompile()
    return gm(*inputs)


def live_points(graph):
    memory = GraphMemory.of(graph)
    alive = alive_along(
        memory.nodes,
        memory.counted,
        to_end=memory.outputs,
        last_reader=last_readers(memory.nodes, memory.counted, memory.kernels),
        nbytes=lambda n: storage_bytes(n.meta["val"]),
        kernels=memory.kernels,
    )
    return [LivePoint("backward", n.name, a, "", "") for n, a in zip(memory.nodes, alive, strict=True)]


def peak(gm):
    return max(p.live_bytes for p in live_points(gm))


def test_a_kernel_of_two_results_is_split_and_the_second_takes_the_memory_of_an_input():
    gm, inputs = traced(gradients, torch.int8, torch.int8)
    expected, before = gm(*inputs), peak(gm)
    split_kernels(gm)
    assert before - peak(gm) == BYTES
    (node,) = (n for n in gm.graph.nodes if n.meta.get(SPLIT) == n.name)
    products = [i for i, n in enumerate(gm.graph.nodes) if n.target is torch.ops.aten.mm.default]
    assert products[0] < list(gm.graph.nodes).index(node) < products[1]  # it was behind the second
    assert all(map(torch.equal, ran(gm, inputs), expected))


def test_a_kernel_that_takes_the_memory_of_a_saved_tensor_anyway_stays_whole():
    gm, _ = traced(gradients, torch.int8, torch.float32)  # d_gate takes that of `up`
    before = peak(gm)
    split_kernels(gm)
    assert not any(SPLIT in n.meta for n in gm.graph.nodes)
    assert peak(gm) == before


def test_a_view_that_needs_a_later_size_stays_behind_it():
    def function(grad, weight, gate, up):
        d = grad @ weight
        first = (d * torch.sigmoid(wide(gate))).t() @ grad
        d_gate = d * wide(up) * wide(gate)
        rows, columns = d_gate.shape
        return first, d_gate.view(rows // 2, 2 * columns).t() @ grad[: rows // 2]

    inputs = [torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)]
    inputs += [torch.randn(ROWS, WIDTH).mul(9).to(torch.int8) for _ in range(2)]
    gm = make_fx(function, tracing_mode="symbolic")(*inputs)
    expected = gm(*inputs)
    split_kernels(gm)
    assert any(SPLIT in n.meta for n in gm.graph.nodes)
    assert all(map(torch.equal, ran(gm, inputs), expected))


def test_a_part_that_needs_a_later_product_stays_where_it_is():
    def function(grad, weight, gate, up):
        d = grad @ weight
        d_up = d * wide(gate)
        first = d_up.t() @ grad
        return first, (d * wide(up) * (wide(gate) @ first)).t() @ grad

    gm, inputs = traced(function, torch.int8, torch.int8)
    expected, order = gm(*inputs), [n.name for n in gm.graph.nodes]
    split_kernels(gm)
    assert [n.name for n in gm.graph.nodes] == order
    assert all(map(torch.equal, ran(gm, inputs), expected))


@pytest.mark.parametrize(("room", "parts"), [(0, 0), (-1, 1)])
def test_parts_are_joined_again_where_there_is_room(room, parts):
    gm, inputs = traced(gradients, torch.int8, torch.int8)
    whole, expected = peak(gm), gm(*inputs)
    split_kernels(gm)
    join_kernels(gm, live_points(gm), whole + room)
    assert sum(n.meta.get(SPLIT) == n.name for n in gm.graph.nodes) == parts
    assert peak(gm) == whole - parts * BYTES
    assert all(map(torch.equal, ran(gm, inputs), expected))


def computed_again(grad, weight, normed, saved):
    """Two values for products, the second behind the first product. One kernel could make both from `normed`."""
    first = normed.sin().t() @ grad
    second = normed.cos().t() @ (saved @ first)
    return first, second


@pytest.mark.parametrize(("read_later", "parts"), [(True, 1), (False, 0)])
def test_a_value_is_computed_behind_a_product_if_what_it_reads_lives_until_then(read_later, parts):
    def function(grad, weight, normed, saved):
        first, second = computed_again(grad, weight, normed, saved)
        return (first, second, second @ normed.t()) if read_later else (first, second)

    gm, inputs = traced(function, torch.float32, torch.float32)
    (late,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
    expected, before = gm(*inputs), {point.node: point.live_bytes for point in live_points(gm)}
    split_kernels(gm)
    assert [n for n in gm.graph.nodes if SPLIT in n.meta] == [late][:parts]
    after = {point.node: point.live_bytes for point in live_points(gm)}
    assert before["sin"] - after["sin"] == parts * BYTES
    assert all(map(torch.equal, ran(gm, inputs), expected))
    names = [*after]
    most = max(after[name] for name in names[names.index("sin") : names.index("cos") + 1])
    assert not join_kernels(gm, live_points(gm), most + BYTES - 1)
    assert join_kernels(gm, live_points(gm), most + BYTES) == bool(parts), "there is room from the first kernel on"
    assert not any(SPLIT in n.meta for n in gm.graph.nodes)


def test_what_reads_a_forward_input_is_computed_behind_a_product_too():
    def function(grad, weight, primals, saved):
        return computed_again(grad, weight, primals, saved)

    gm, _ = traced(function, torch.float32, torch.float32)
    split_kernels(gm)
    assert [n.target for n in gm.graph.nodes if SPLIT in n.meta] == [torch.ops.aten.cos.default]


def test_two_values_without_a_product_between_stay_in_one_kernel():
    def function(grad, weight, normed, saved):
        first, second = normed.sin(), normed.cos()
        return first.t() @ grad, second.t() @ grad, normed.t() @ saved

    gm, _ = traced(function, torch.float32, torch.float32)
    split_kernels(gm)
    assert not any(SPLIT in n.meta for n in gm.graph.nodes)


def test_parts_that_are_joined_together_fit_together():
    def function(grad, weight, normed, saved):
        d = weight
        for compute in (torch.sin, torch.cos, torch.sigmoid, torch.tanh):
            d = compute(normed).t() @ (grad @ d)
        return d, d @ normed.t()

    gm, inputs = traced(function, torch.float32, torch.float32)
    expected = gm(*inputs)
    split_kernels(gm)
    assert sum(SPLIT in n.meta for n in gm.graph.nodes) == 3
    most = peak(gm) + BYTES
    assert join_kernels(gm, live_points(gm), most)
    assert peak(gm) <= most
    assert any(SPLIT in n.meta for n in gm.graph.nodes)
    assert all(map(torch.equal, ran(gm, inputs), expected))


def marks(gm):
    return {n.name: n.meta.get(ALONE) or n.meta.get(ALONE_IF_WRITTEN) for n in gm.graph.nodes}


def test_kernels_between_different_products_have_different_marks_unless_all_of_it_fits():
    gm, _ = traced(gradients, torch.int8, torch.int8)
    split_kernels(gm)
    (node,) = (n.name for n in gm.graph.nodes if n.meta.get(SPLIT) == n.name)
    points = live_points(gm)
    hold_kernels(gm, points, max(p.live_bytes for p in points))
    found = marks(gm)
    products = [n.name for n in gm.graph.nodes if n.target is torch.ops.aten.mm.default]
    assert len({found[name] for name in products}) > 1
    assert found[node] == f"split {node}"
    roomy, _ = traced(gradients, torch.int8, torch.int8)
    hold_kernels(roomy, live_points(roomy), 1 << 40)
    assert set(filter(None, marks(roomy).values())) == {"zone 0"}


@pytest.mark.parametrize("share", [2, 0.5])
def test_kernels_of_a_forward_are_held_where_it_has_the_peak(monkeypatch, share):
    def points(fw, bw, **_outputs):
        of_forward = (
            dataclasses.replace(p, phase="forward", live_bytes=int(share * p.live_bytes)) for p in live_points(fw)
        )
        return [*of_forward, *live_points(bw)]

    monkeypatch.setattr(kernels, "on_cuda", lambda _nodes: True)
    monkeypatch.setattr(kernels, "live_bytes", points)
    fw, bw = (traced(gradients, torch.int8, torch.int8)[0] for _ in range(2))
    split_and_hold(fw, bw)
    assert len(set(filter(None, marks(bw).values()))) > 1
    assert any(marks(fw).values()) == (share > 1)


def test_stretches_are_one_zone_while_all_that_they_write_fits():
    assert fusion_zones([10, 10, 10, 10], [5, 5, 5, 5], 25) == [0, 0, 0, 1]
    assert fusion_zones([10, 24, 10], [5, 5, 5], 20) == [0, 1, 2]
    assert fusion_zones([10, 10], [100, 1], 20) == [0, 1]


def with_unpacking(grad, weight, codes, late):
    d = grad @ weight
    d_up = d * torch.sigmoid(d)
    first = d_up.t() @ grad
    source = codes + first.sum() if late else codes
    up = wide(source) @ weight  # an unpack that is no loop
    d_gate = d * up
    return first, d_gate.t() @ grad


@pytest.mark.parametrize("late", [False, True])
def test_what_unpacks_for_a_fused_kernel_stands_in_front_of_it(late):
    inputs = [torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(ROWS, WIDTH).mul(9).to(torch.int8)]
    gm = make_fx(lambda *xs: with_unpacking(*xs, late=late), tracing_mode="fake")(*inputs)
    nodes = list(gm.graph.nodes)
    unpack = [n for n in nodes if n.target is torch.ops.aten.mm.default][2]
    for node in (unpack, unpack.args[0]):
        node.meta[FROM_HOOK] = True
    expected, before = gm(*inputs), peak(gm)
    unpack_early(gm)
    order = [n.name for n in gm.graph.nodes]
    (kernel,) = (n for n in nodes if n.target is torch.ops.aten.mul.Tensor and n.args[1].name.startswith("sigmoid"))
    assert (order.index(unpack.name) < order.index(kernel.name)) == (not late)  # else it reads what comes later
    assert (peak(gm) < before) == (not late)
    assert all(map(torch.equal, ran(gm, inputs), expected))


def test_a_kernel_runs_where_the_scales_of_the_rows_that_it_reads_are_found():
    def function(x, w):
        y = x @ w
        scales = torch.ops.aot_hooks.amax_bits(y)
        other = x.t() @ x
        return scales, other, torch.sigmoid(y), torch.sin(y[:2])

    gm = make_fx(function, tracing_mode="fake")(torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH))
    nodes = {n.name: n for n in gm.graph.nodes}
    at = Kernels.of(list(nodes.values()), written_storages(list(nodes.values())) | output_storages(gm.graph)).at
    assert at[nodes["sigmoid"]] == at[nodes["amax_bits"]] < at[nodes["mm_1"]]
    assert at[nodes["sin"]] > at[nodes["mm_1"]]  # of other rows


def test_a_reduction_alone_has_nothing_written():
    def function(x, w):
        return torch.sigmoid(x).sum(1), torch.cos(x) @ w

    gm = make_fx(function, tracing_mode="fake")(torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH))
    nodes = {n.name: n for n in gm.graph.nodes}
    written = written_storages(list(nodes.values()))
    assert storage_of(nodes["cos"]) in written and storage_of(nodes["sum_1"]) in written
    assert storage_of(nodes["sigmoid"]) not in written


def test_what_is_looked_up_and_a_constant_that_is_added_to_are_not_written():
    def function(x, index, rows):
        picked = torch.log_softmax(torch.sigmoid(x), 1).gather(1, index)
        summed = torch.index_put(torch.zeros(ROWS, WIDTH), [index[:, 0]], rows, accumulate=True)
        return picked, torch.index_put(torch.sin(x), [index[:, 0]], rows), summed

    index, x = torch.randint(WIDTH, (ROWS, 1)), torch.randn(ROWS, WIDTH)
    gm = make_fx(function, tracing_mode="fake", decomposition_table=decompositions())(x, index, torch.randn_like(x))
    nodes = {n.name: n for n in gm.graph.nodes}
    written = written_storages(list(nodes.values()))
    (zeros,) = (n for n in nodes.values() if str(n.target) == "aten.full.default")
    (picked,) = (n for n in nodes.values() if str(n.target) == "aten.gather.default")
    assert storage_of(picked) in written and storage_of(nodes["sin"]) in written
    assert storage_of(zeros) not in written and storage_of(picked.args[0]) not in written


def test_nothing_is_written_over_the_gradient_of_an_output():
    def function(own, tangents_1, weight):
        return own @ weight, torch.sin(own), torch.cos(tangents_1)

    gm = make_fx(function, tracing_mode="fake")(*(torch.randn(WIDTH, WIDTH) for _ in range(3)))
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), ("own", "tangents_1", "weight"), strict=True):
        node.target = name
    nodes = {n.name: n for n in gm.graph.nodes}
    counted = {storage_of(n) for n in nodes.values()} - {None}
    kernels = Kernels.of(list(nodes.values()), counted)
    last = last_readers(list(nodes.values()), counted, kernels)
    times = lifetimes(
        list(nodes.values()), counted, to_end=(), last_reader=last, nbytes=lambda _: BYTES, kernels=kernels
    )
    taken = set(kernels.reuses(*times).items())
    own, tangent, _ = map(storage_of, gm.graph.find_nodes(op="placeholder"))
    assert (storage_of(nodes["sin"]), own) in taken and tangent not in dict(taken).values()


@pytest.mark.parametrize(("addends", "written"), [(2, []), (3, []), (4, [3]), (6, [5])])
def test_a_sum_of_many_that_several_read_is_written(addends, written):
    assert torch._inductor.config.realize_reads_threshold == 4

    def function(x, _, *others):
        for other in others:
            x = x + torch.sin(other)
        return x.amax(0), x.cos().sum()

    gm, _ = traced(function, *[torch.float32] * addends)
    nodes = list(gm.graph.nodes)
    found = written_storages(nodes, fuse_loops=True)
    sums = [n for n in nodes if n.target is torch.ops.aten.add.Tensor]
    assert [i for i, n in enumerate(sums) if storage_of(n) in found] == written


@pytest.mark.slow
def test_what_a_later_kernel_reads_is_written_where_it_stands():
    def function(a, b, c):
        total = a + b
        product = total * ((total * 2) @ c)
        return product, torch.sort(total)[0]  # Inductor writes `total` for it, and before it computes it for others

    inputs = [torch.randn(16, 16) for _ in range(3)]
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    write_when_made(gm)
    with torch._inductor.config.patch(force_disable_caches=True):
        found, (code,) = run_and_get_code(lambda: compile_fx_inner(gm, inputs)(list(inputs)))
    assert all(map(torch.allclose, found, function(*inputs)))
    assert code.index("del a_1") < code.index("extern_kernels.mm(")


def test_all_results_of_an_operator_are_there_from_where_it_runs():
    def function(x, weight):
        values, indices = torch.sort(x @ weight)
        return (values + indices).sum()

    gm, _ = traced(function)
    points = {p.node: p.live_bytes for p in live_points(gm)}
    (sort,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.sort.default)
    assert points[sort.name] == BYTES + BYTES + 2 * BYTES  # what it sorts, the values, and int64 indices


def test_what_the_backward_of_attention_works_with_is_counted():
    def function(q, k, v):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return torch.autograd.grad(out.sum(), (q, k, v))

    batch, heads, length, width = 2, 3, 64, 16
    inputs = [torch.randn(batch, heads, length, width, requires_grad=True) for _ in range(3)]
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    (backward,) = (n for n in gm.graph.nodes if "attention" in str(n.target) and "backward" in str(n.target))
    assert workspace_bytes(backward) == 0  # on a CPU
    with FakeTensorMode(), torch.device("cuda"):
        backward.args[1].meta["val"] = torch.empty(batch, heads, length, width, dtype=torch.bfloat16)
    # measured on an H200: 12.1875 MiB for 4 x 12 heads of 1024 x 64, 258 MiB for 2 x 32 heads of 8192 x 128
    assert workspace_bytes(backward) == 4 * batch * heads * length * (width + 1)


def tied(count, *, swapped=False, scaled=False):
    """A gradient that is a product, and a sum after `count` more products."""

    def function(grad, weight):
        product = grad.t() @ grad
        x = grad
        for _ in range(count):
            x = x @ weight
        rest = (x.sum(0) + x[:1]).expand(WIDTH, WIDTH)
        total = torch.add(product, rest, alpha=2) if scaled else rest + product if swapped else product + rest
        return total, x

    return traced(function)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_product_far_before_its_sum_is_computed_where_it_stands(swapped):
    gm, inputs = tied(9, swapped=swapped)
    late = late_products(list(gm.graph.nodes))
    assert [(p.target, n.target) for p, n in late.items()] == [(torch.ops.aten.mm.default, torch.ops.aten.add.Tensor)]
    (product,) = late
    nodes = list(gm.graph.nodes)
    assert storage_of(product) not in written_storages(nodes)
    assert last_readers(nodes, written_storages(nodes))[product.all_input_nodes[0]] > nodes.index(product)
    before = gm(*inputs)
    own = multiplied_early(gm)
    nodes = list(own.graph.nodes)
    assert not late_products(nodes) and product.name in {n.name for n in nodes}
    assert storage_of(product) in written_storages(nodes)
    assert all(map(torch.equal, ran(own, inputs), before))
    assert late_products(list(gm.graph.nodes)) == late  # which others read as well


@pytest.mark.parametrize("gm", [tied(8)[0], tied(9, scaled=True)[0]], ids=["near", "scaled"])
def test_a_product_near_its_sum_and_a_scaled_one_stay_as_they_are(gm):
    before = str(gm.graph)
    assert multiplied_early(gm) is gm and str(gm.graph) == before


def test_of_two_products_inductor_moves_the_second():
    def function(grad, weight):
        x = grad
        for _ in range(9):
            x = x @ weight
        return (grad.t() @ grad + x.t() @ grad), x

    gm, _ = traced(function)
    assert not late_products(list(gm.graph.nodes))


def test_symbolic_sizes_get_no_guard_and_stay_as_they_are():
    def function(grad, weight, bias):
        x = grad
        for _ in range(9):
            x = x @ weight
        return grad @ weight + bias, x

    inputs = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH), torch.ones(WIDTH)
    gm = make_fx(function, tracing_mode="symbolic")(*inputs)
    tensors = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    guards = tensors[0].fake_mode.shape_env.guards
    before = len(guards)
    assert not late_products(list(gm.graph.nodes)) and len(guards) == before
