"""What planning remembers from attempt to attempt, and what must not be taken from there."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from aot_hooks import Hook
from aot_hooks.graphs import roofline, speeds
from aot_hooks.graphs.nodes import source_line
from aot_hooks.graphs.saved import place_of
from aot_hooks.passes.units import tracer
from aot_hooks.planning.options import Graphs
from aot_hooks.torch_private import aot

SAVED: Any = SimpleNamespace(row=SimpleNamespace(name="x", describe=lambda: "'x'"))


def half() -> tuple[Hook, list[tuple[Any, ...]]]:
    """A hook, and the layouts that its pack was traced on."""
    seen: list[tuple[Any, ...]] = []

    def pack(x: torch.Tensor) -> tuple[Any, ...]:
        seen.append((tuple(x.shape), x.stride(), x.dtype))
        return x.half(), x.dtype

    return Hook("half", pack, lambda packed: packed[0].to(packed[1])), seen


def test_a_hook_is_traced_once_for_values_of_one_layout_and_dtype():
    hook, seen = half()
    trace = tracer(for_inductor=False)
    with FakeTensorMode():
        one, same = torch.empty(4, 8), torch.empty(64)[16:48].view(4, 8)
        others = [torch.empty(8, 4).t(), torch.empty(8, 4), torch.empty(4, 8).double(), torch.empty(1, 8).expand(4, 8)]
    first = trace(hook, one, SAVED)
    count = len(seen)
    assert trace(hook, same, SAVED) is first and len(seen) == count
    assert tracer(for_inductor=False)(hook, one, SAVED) is not first
    other_hook = Hook("half", lambda x: hook.pack(x), hook.unpack)
    found = [*(trace(hook, x, SAVED) for x in others), trace(other_hook, one, SAVED)]
    assert len({id(traced) for traced in (first, *found)}) == 6


def test_a_hook_is_traced_anew_in_another_fake_mode_and_on_symbolic_sizes():
    hook, _ = half()
    trace = tracer(for_inductor=False)
    values = []
    for _ in range(2):
        with FakeTensorMode():
            values.append(torch.empty(4, 8))
    assert trace(hook, values[0], SAVED) is not trace(hook, values[1], SAVED)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    symbolic = mode.from_tensor(torch.empty(4, 8), symbolic_context=sizes)
    assert trace(hook, symbolic, SAVED) is not trace(hook, symbolic, SAVED)


def test_a_formula_is_asked_again_for_other_sizes_dtypes_and_numbers():
    calls: list[Any] = []

    def formula(x: Any, flag: Any, out_val: Any = None) -> int:
        calls.append(flag)
        return 2 * x.numel() if flag is True else x.numel()

    def count(shape: tuple[int, ...], dtype: torch.dtype, flag: Any, of: Any = formula) -> int:
        return roofline._count(of, *speeds.leaves_of(((torch.empty(shape, dtype=dtype), flag), {}, None)))

    asked: list[tuple[Any, ...]] = [((4, 8), torch.float32, True), ((4, 8), torch.float32, 1)]
    asked += [((4, 8), torch.float16, 1), ((8, 8), torch.float32, 1), ((4, 8), torch.float32, 1.0)]
    assert [count(*each) for each in asked * 2] == [64, 32, 32, 64, 32] * 2
    assert len(calls) == len(asked)
    assert count((4, 8), torch.float32, True, lambda x, flag, out_val=None: 7) == 7  # registered anew
    assert roofline._count(formula, *speeds.leaves_of(((torch.eye(2).to_sparse(), 1), {}, None))) == 4  # no strides


def test_lines_and_modules_are_those_of_each_node():
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in "abc"]
    for i, node in enumerate(nodes[:2]):
        node.meta["stack_trace"] = f'File "/home/me/model.py", line {i + 1}, in f\n    y = g(x)\n'
        path = f"L['self']._modules['layers']._modules['{i}']"
        node.meta["nn_module_stack"] = {"m": ("L['self']", object), path: (path, object)}
    assert [source_line(n) for n in nodes * 2] == ["model.py:1: y = g(x)", "model.py:2: y = g(x)", ""] * 2
    assert [place_of(n)[0] for n in nodes * 2] == ["layers.0", "layers.1", ""] * 2
    assert place_of(nodes[1], {"L['self']": "inner"})[0] == "inner.layers.1"


@pytest.mark.parametrize("lazily", [True, False])
def test_a_copied_graph_runs_what_it_has_when_it_runs(lazily):
    gm = make_fx(lambda x: (x + 1) * 2)(torch.zeros(3))
    gm.meta["kept"] = 1
    made = aot.copied(gm, lazily=lazily)
    (product,) = made.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    product.args = (product.args[0], 5)
    made.recompile()
    assert made.meta == gm.meta and made.meta is not gm.meta
    assert made(torch.ones(3)).tolist() == [10.0] * 3 and gm(torch.ones(3)).tolist() == [4.0] * 3
    product.args = (product.args[0], 6)
    made.recompile()
    assert made(torch.ones(3)).tolist() == [12.0] * 3
    assert type(aot.copied(made, lazily=False)).__mro__[1] is fx.GraphModule  # no layer between a call and the code


def test_other_graphs_have_a_boundary_of_their_own():
    def graphs(fw: Any, bw: Any) -> Graphs:
        return Graphs(fw, bw, 1, (), {}, False, tracer(for_inductor=False))

    mode = FakeTensorMode()
    with mode:
        x = torch.empty(3)
    fw, bw = fx.Graph(), fx.Graph()
    a = fw.placeholder("a")
    b = fw.call_function(torch.ops.aten.exp.default, (a,))
    fw.output((b, b))
    slot, tangent = bw.placeholder("b"), bw.placeholder("tangents_1")
    g = bw.call_function(torch.ops.aten.mul.Tensor, (tangent, slot))
    bw.output((g,))
    for node in (a, b, slot, tangent, g):
        node.meta["val"] = x
    one = graphs(fx.GraphModule({}, fw), fx.GraphModule({}, bw))
    found = one.boundary
    assert one.boundary is found
    other = dataclasses.replace(one, fw=aot.copied(one.fw))
    assert other.boundary.tensors[0].fw_node.graph is other.fw.graph
