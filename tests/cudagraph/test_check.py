"""What can't be captured, found in the graph, with the reason; graphs are of fake CUDA tensors."""

from __future__ import annotations

import pytest
import torch
from pieces import CUDA, blockers, traced
from torch.fx.experimental.proxy_tensor import make_fx

from cudagraph.graph.blockers import capture_device, is_free, reason_against, rebinds, register_host_operator

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def devices_that_nobody_has(monkeypatch):
    """torch makes a real tensor on the device of a fake one, where it sees a GPU at all; the second may be missing."""
    monkeypatch.setattr(torch._subclasses.fake_tensor, "init_gpu_context", lambda device: None)


def cuda(*size, dtype=torch.float32, index=0):
    return torch.empty(*size, dtype=dtype, device=f"cuda:{index}")


@torch.library.custom_op("cudagraph_tests::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def unsafe(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@torch.library.custom_op("cudagraph_tests::to_host", mutates_args=())
def to_host(x: torch.Tensor) -> torch.Tensor:
    return x.cpu()


@torch.library.custom_op("cudagraph_tests::note", mutates_args=())
def note(number: int) -> None:
    pass


unsafe.register_fake(torch.empty_like)
to_host.register_fake(lambda x: torch.empty_like(x, device="cpu"))
note.register_fake(lambda number: None)

CASES = {
    "to the CPU": (
        lambda x: torch.ops.aten._to_copy.default(x.sin(), device=torch.device("cpu")),
        lambda: (cuda(3),),
        ["copies from cuda:0 to the CPU"],
    ),
    "from the CPU": (
        lambda x: torch.ops.aten._to_copy.default(x, device=CUDA) + 1,
        lambda: (torch.empty(3),),
        ["copies from the CPU to cuda:0"],
    ),
    "on the CPU": (
        lambda x, y: (x + 1, y.sin().t()),
        lambda: (cuda(3), torch.empty(2, 2)),
        ["runs on the CPU"],
    ),
    "a number": (lambda x, s: x * s, lambda: (cuda(3), torch.empty(())), ["reads a number from the CPU"]),
    "another device": (
        lambda x, y: (x.sin().cos(), y.exp()),
        lambda: (cuda(3), cuda(3, index=1)),
        ["runs on cuda:1"],
    ),
    "between devices": (
        lambda x: torch.ops.aten._to_copy.default(x.sin().cos(), device=torch.device("cuda:1")),
        lambda: (cuda(3),),
        ["copies from cuda:0 to cuda:1"],
    ),
    "written on the host": (
        lambda x, y: y.copy_(x.sin()),
        lambda: (cuda(3), torch.empty(3)),
        ["copies from cuda:0 to the CPU"],
    ),
    "bool index put": (
        lambda x, i: torch.ops.aten.index_put.default(x, [i], x.new_zeros(())),
        lambda: (cuda(3), cuda(3, dtype=torch.bool)),
        ["is an operator that torch does not capture"],
    ),
    "tagged": (lambda x: unsafe(x), lambda: (cuda(3),), ["is tagged cudagraph_unsafe"]),
    "undeclared": (
        lambda x: to_host(x.sin().cos()).view(-1),
        lambda: (cuda(3),),
        ["works on tensors of the CPU and cuda:0"],
    ),
    "host only": (lambda x: (x.sin(), note(3)), lambda: (cuda(3),), ["acts on the host only"]),
}


@pytest.mark.parametrize("name", CASES)
def test_reasons(name):
    fn, inputs, expected = CASES[name]
    gm = traced(fn, inputs)
    assert capture_device(gm, "cuda") == CUDA
    found = blockers(gm, CUDA)
    assert [b.reason[: len(e)] for b, e in zip(found, expected, strict=True)] == expected
    assert all(b.op == str(next(n for n in gm.graph.nodes if n.name == b.node).target) for b in found)


VALUES = {  # looked at on the CPU as the device, because fakes of a CUDA build alone know data-dependent sizes
    "size of values": (
        lambda x: x.sin().nonzero().sum(),
        ["has a size that depends on the values of a tensor (u0)"] * 2,
    ),
    "bool index": (lambda x: x[x > 0], ["has a size that depends"]),
    "item": (lambda x: x.sum().item(), ["waits for the device"]),
    "number of values": (lambda x: x.sum().item() + x, ["waits for the device", "has a size that depends"]),
    "eigenvalues": (lambda x: torch.linalg.eigh(x @ x.t())[0], ["waits for the device"]),
}


@pytest.mark.parametrize("name", VALUES)
def test_reasons_of_values(name):
    fn, expected = VALUES[name]
    gm = traced(fn, lambda: (torch.empty(3, 3),))
    found = blockers(gm, torch.device("cpu"))
    assert [b.reason[: len(e)] for b, e in zip(found, expected, strict=True)] == expected


def test_what_is_no_reason():
    def fn(x, i, meta):
        y = torch.rand_like(x) + torch.nn.functional.dropout(x, 0.5)
        y = torch.ops.aten.index_put.default(y, [i], y[0]) + y.sum()
        return y, (meta + 1).t(), x.t()[:2].view(torch.int32), y.argmax(), torch.full((3,), 2.0, device=x.device), x[i]

    def inputs():
        return torch.empty(3, 3), torch.empty(2, dtype=torch.long), torch.empty(3, 3, device="meta")

    assert blockers(traced(fn, inputs), torch.device("cpu")) == ()
    gm = traced(lambda x, meta: (x.sin().t() + x, meta + 1), lambda: (cuda(3, 3), torch.empty(3, device="meta")))
    assert blockers(gm, CUDA) == ()


def test_views_of_any_device_are_free():
    gm = traced(lambda x, y: (x.sin(), y.t(), y.split(1)[0]), lambda: (cuda(3), torch.empty(3, 3)))
    free = [str(n.target) for n in gm.graph.nodes if n.op == "call_function" and is_free(n)]
    assert free[:2] == ["aten.t.default", "aten.split.Tensor"] and set(free[2:]) == {"<built-in function getitem>"}
    assert blockers(gm, CUDA) == ()


def test_operators_on_meta_tensors_alone_are_free():
    def fn(x, meta):
        made = torch.empty(2, device="meta").fill_(1)
        return x.sin(), (meta * 3).t_(), made, x + meta.shape[0], torch.empty_strided((2,), (1,), device="meta")

    gm = traced(fn, lambda: (cuda(3), torch.empty(3, 2, device="meta")))
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    # Inductor puts operators without a fake value where meta tensors are returned
    assert nodes[-1].target is torch.ops.aten.empty_strided.default and nodes[-1].meta.pop("val").is_meta
    assert [str(n.target) for n in nodes if not is_free(n)] == ["aten.sin.default", "aten.add.Tensor"]
    assert blockers(gm, CUDA) == () and not any(map(rebinds, nodes))
    nodes[-1].kwargs = {"device": torch.device("cpu")}
    assert [b.node for b in blockers(gm, CUDA)] == [nodes[-1].name]
    gm = traced(lambda x, meta: meta.t_(), lambda: (cuda(3), torch.empty(3, 2, device="meta")))
    assert any(map(rebinds, gm.graph.nodes))


def test_a_declared_operator_may_touch_host_memory():
    register_host_operator(torch.ops.aten.lift.default)  # any other one, which does not matter
    gm = traced(lambda x: to_host(x.sin()).t(), lambda: (cuda(3),))
    assert len(blockers(gm, CUDA)) == 1
    register_host_operator(torch.ops.cudagraph_tests.to_host.default)
    try:
        assert blockers(gm, CUDA) == ()
    finally:
        from cudagraph.graph.blockers import _host_operators

        _host_operators.clear()


def test_nothing_to_capture():
    gm = make_fx(lambda x: x.sin())(torch.randn(3))
    assert capture_device(gm, "cuda") is None
    assert capture_device(gm, "cpu") == torch.device("cpu")
    gm = traced(lambda x: x.t(), lambda: (cuda(3, 3),))  # a view alone launches nothing
    assert capture_device(gm, "cuda") is None


def test_most_of_a_graph_decides_its_device():
    gm = traced(lambda x, y: (x.sin(), y.exp().cos()), lambda: (cuda(3), cuda(3, index=1)))
    assert capture_device(gm, "cuda") == torch.device("cuda:1")


def test_control_flow_and_what_subgraphs_hold():
    from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

    def branch(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    with torch._subclasses.FakeTensorMode():
        gm = make_fx(branch)(torch.empty(3))
    assert [b.reason for b in blockers(gm, torch.device("cpu"))] == ["chooses on the host what runs"]

    outer = make_fx(lambda x: x.sin())(torch.randn(3))
    outer.inner = traced(lambda x: (unsafe(x),), lambda: (torch.empty(3),))
    x = next(iter(outer.graph.nodes))
    with outer.graph.inserting_after(x):
        held = outer.graph.get_attr("inner")
    with outer.graph.inserting_after(held):
        call = outer.graph.call_function(invoke_subgraph, (held, "inner", x))
    call.meta["val"] = (x.meta["val"],)
    reason = reason_against(call, torch.device("cpu"))
    assert reason == "holds cudagraph_tests.unsafe.default, which is tagged cudagraph_unsafe"


def test_says_where():
    gm = traced(lambda x: x.sum().item(), lambda: (torch.empty(3),))
    for node in gm.graph.nodes:
        node.meta["stack_trace"] = '  File "/home/me/train.py", line 12, in step\n    n = x.sum().item()\n'
    (blocker,) = blockers(gm, torch.device("cpu"))
    assert str(blocker) == (
        "aten._local_scalar_dense.default waits for the device and reads its result on the host "
        "(train.py:12: n = x.sum().item())"
    )
