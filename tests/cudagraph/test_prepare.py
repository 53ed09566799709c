"""What stands on the CPU for no reason is taken from there, and nothing else; graphs are of fake CUDA tensors."""

from __future__ import annotations

import pytest
import torch
from pieces import CUDA, blockers, fake_devices, traced
from torch.fx import GraphModule

from cudagraph.graph.cpu_values import prepare

pytestmark = pytest.mark.core
aten = torch.ops.aten


def to_device(x: torch.Tensor) -> torch.Tensor:
    return aten._to_copy.default(x, device=CUDA)


def cuda(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="cuda")


def prepared(fn, make_inputs, numbers: bool = True) -> GraphModule:
    gm = traced(fn, make_inputs)
    prepare(gm, CUDA, numbers=numbers)
    gm.graph.lint()
    return gm


def targets(gm: GraphModule) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda: torch.arange(4), False),
        (lambda: torch.full((4,), 3.5), False),
        (lambda: torch.zeros(4), False),
        (lambda: torch.arange(4, dtype=torch.float32), True),  # added up in another precision on a device
        (lambda: torch.rand(4), True),  # other numbers
    ],
)
def test_made_where_it_is_wanted(make, kept):
    gm = prepared(lambda x: x.sin() + to_device(make()), lambda: (cuda(4),))
    assert bool(blockers(gm, CUDA)) == kept
    if not kept:
        (made,) = (n for n in gm.graph.nodes if n.kwargs.get("device") is not None)
        assert made.kwargs["device"] == CUDA and made.meta["val"].device == CUDA
        assert "aten._to_copy.default" not in targets(gm)


def test_not_if_somebody_reads_it_on_the_cpu():
    def fn(x):
        numbers = torch.arange(4)
        return x.sin() + to_device(numbers), numbers + 1

    gm = prepared(fn, lambda: (cuda(4),))
    assert "aten._to_copy.default" in targets(gm)


def test_not_if_the_type_changes_on_the_way():
    gm = prepared(
        lambda x: x.sin() + aten._to_copy.default(torch.arange(4), device=CUDA, dtype=torch.float32), lambda: (cuda(4),)
    )
    assert len(blockers(gm, CUDA)) == 2


@pytest.mark.parametrize(
    ("dtype", "moved"), [(torch.float32, True), (torch.int32, True), (torch.bfloat16, False), (torch.float16, False)]
)
def test_numbers_on_the_cpu_are_copied_ahead_where_that_gives_the_same_bits(dtype, moved):
    def fn(x, number):
        y = x * number
        return y + number, y.sum()

    gm = prepared(fn, lambda: (cuda(4, dtype=dtype), torch.empty((), dtype=dtype)))
    reasons = [b.reason for b in blockers(gm, CUDA)]
    if moved:
        assert reasons == ["copies from the CPU to cuda:0"]  # one copy for both readers
        copy = next(n for n in gm.graph.nodes if n.target is aten._to_copy.default)
        assert copy.kwargs["non_blocking"] and copy.meta["val"].device == CUDA and len(copy.users) == 2
        assert [n.op for n in gm.graph.nodes][:3] == ["placeholder", "placeholder", "call_function"]
    else:
        assert reasons == ["reads a number from the CPU"] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(
    "place",
    [
        lambda x, n: aten.fill.Tensor(x, n),
        lambda x, n: aten.copy.default(x, n),
        lambda x, n: torch.where(x > 1, x, n),
        lambda x, n: aten.masked_fill.Tensor(x, x > 1, n),
    ],
)
def test_a_known_number_that_is_put_somewhere_is_made_there(dtype, place):
    def fn(x):
        return place(x, torch.full((), 3, dtype=dtype)) + 1

    for numbers in (True, False):
        gm = prepared(fn, lambda: (cuda(4, dtype=dtype),), numbers=numbers)
        assert blockers(gm, CUDA) == ()
        (made,) = (n for n in gm.graph.nodes if n.target is aten.full.default)
        assert made.args == ([], 3) and made.kwargs["dtype"] == dtype and made.meta["val"].device == CUDA


def test_a_known_number_is_computed_with_where_that_gives_the_same_bits():
    for dtype, known in ((torch.float32, True), (torch.bfloat16, False)):
        gm = prepared(lambda x: x * torch.full((), 0.1), lambda dtype=dtype: (cuda(4, dtype=dtype),))
        assert (blockers(gm, CUDA) == ()) == known


def test_a_constant_number_is_known():
    graph = torch.fx.Graph()
    gm = GraphModule({}, graph)
    gm.graph = graph
    gm.register_buffer("start", torch.tensor(7))
    x = gm.graph.placeholder("x")
    start = gm.graph.get_attr("start")
    fresh = gm.graph.call_function(aten.lift_fresh_copy.default, (start,))
    filled = gm.graph.call_function(aten.fill.Tensor, (x, fresh))
    gm.graph.output((filled,))
    with fake_devices():
        number, made = torch.empty((), dtype=torch.int64), cuda(4)
    for node, value in ((x, made), (start, number), (fresh, number), (filled, made)):
        node.meta["val"] = value
    prepare(gm, CUDA, numbers=False)
    assert targets(gm) == ["aten.full.default", "aten.fill.Tensor"] and blockers(gm, CUDA) == ()
    assert next(n for n in gm.graph.nodes if n.target is aten.full.default).args == ([], 7)


def test_a_known_number_keeps_readers_on_the_cpu():
    def fn(x):
        number = torch.full((), 2.0)
        return x * number, number + 1

    gm = prepared(fn, lambda: (cuda(4),))
    assert [b.reason for b in blockers(gm, CUDA)] == ["runs on the CPU", "runs on the CPU"]


def test_numbers_are_left_to_inductor():
    gm = prepared(lambda x, n: x * n, lambda: (cuda(4), torch.empty(())), numbers=False)
    assert targets(gm) == ["aten.mul.Tensor"]


def test_operators_that_want_a_number_on_the_cpu_keep_it():
    def fn(x, number):
        return x.sin() * number, number + 1, torch.stack([number, number])

    gm = prepared(fn, lambda: (cuda(4), torch.empty(())))
    copy = next(n for n in gm.graph.nodes if n.target is aten._to_copy.default)
    assert [str(user.target) for user in copy.users] == ["aten.mul.Tensor"]


def test_a_device_that_is_the_cpu_changes_nothing():
    gm = traced(lambda x: x + torch.arange(4), lambda: (torch.empty(4),))
    before = gm.code
    prepare(gm, torch.device("cpu"), numbers=True)
    assert gm.code == before


def test_constants_are_moved_when_the_graph_is_compiled_and_copied_in_each_call():
    """No CUDA here: the constant is moved to the meta device, which stands for it."""
    graph = torch.fx.Graph()
    gm = GraphModule({}, graph)
    gm.graph = graph
    gm.register_buffer("table", torch.tensor([1.0, 2.0]))
    x = gm.graph.placeholder("x")
    table = gm.graph.get_attr("table")
    fresh = gm.graph.call_function(aten.lift_fresh_copy.default, (table,))
    moved = gm.graph.call_function(aten._to_copy.default, (fresh,), {"device": torch.device("meta")})
    out = gm.graph.call_function(aten.add.Tensor, (x, moved))
    gm.graph.output((out, moved))
    with fake_devices():
        for node, device in ((x, "meta"), (fresh, "cpu"), (moved, "meta"), (out, "meta")):
            node.meta["val"] = torch.empty(2, device=device)
    table.meta["val"] = fresh.meta["val"]
    prepare(gm, torch.device("meta"), numbers=True)
    assert targets(gm) == ["aten.lift_fresh_copy.default", "aten.add.Tensor"]
    (constant,) = gm.graph.find_nodes(op="get_attr")
    held = getattr(gm, constant.target)
    assert type(held) is torch.Tensor and held.device.type == "meta" and held.shape == (2,)
    # what is returned is the caller's: the next call must not see what was written to it
    given = torch.empty(2, device="meta")
    assert gm(given)[1] is not gm(given)[1] and gm(given)[1] is not held
