"""What a message can say about an input of a graph."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from cudagraph import PlaceholderInfo, placeholder_info
from cudagraph.placeholder import results_of, source_line, trace_of, written_nodes

pytestmark = pytest.mark.core

TRACE = """  File "/home/me/train.py", line 12, in step
    y = net(x)
  File "/home/me/net.py", line 7, in forward
    return h.add_(1)
"""


def graph_of(fn, *inputs):
    return make_fx(fn)(*inputs).graph


def test_names_users_and_traces():
    graph = graph_of(lambda x, y: (x.sin(), x + y), torch.randn(3), torch.randn(3))
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["stack_trace"] = TRACE
    x, y = placeholder_info(graph)
    assert x.name == "x_1" and [user.name for user in x.users] == ["sin", "add"]
    assert [user.name for user in y.users] == ["add"]
    assert x.stack_trace is None and x.users[0].stack_trace == TRACE
    assert x.users[0].users == ()
    assert x.mutating_use_stack_trace is None
    assert x.source_line == "net.py:7: return h.add_(1)"
    assert list(map(trace_of, results_of(graph))) == [TRACE, TRACE]


def test_is_plain_data():
    infos = placeholder_info(graph_of(lambda x: x.sin(), torch.randn(3)))
    assert pickle.loads(pickle.dumps(infos)) == infos
    assert hash(infos[0]) == hash(pickle.loads(pickle.dumps(infos[0])))
    assert PlaceholderInfo("x").source_line == ""


@pytest.mark.parametrize(
    "write",
    [
        lambda x: torch.ops.aten.copy_.default(x, x + 1),
        lambda x: torch.ops.aten.add_.Tensor(x, 1),
        lambda x: torch.ops.aten.copy_.default(torch.ops.aten.select.int(x, 0, 1), x.sum()),  # through a view
        lambda x: torch.ops.aten.mul_.Tensor(torch.ops.aten.view.default(torch.ops.aten.t.default(x.t()), [9]), 2),
    ],
)
def test_finds_what_writes_to_it(write):
    graph = graph_of(lambda x, y: (write(x), x.sin(), y.cos()), torch.randn(3, 3), torch.randn(3))
    for node in graph.nodes:
        node.meta["stack_trace"] = f'File "a.py", line 1, in f\n    {node.name}\n'
    writers = [node for node in graph.nodes if written_nodes(node)]
    assert len(writers) == 1
    x, y = placeholder_info(graph)
    assert x.mutating_use_stack_trace == writers[0].meta["stack_trace"]
    assert y.mutating_use_stack_trace is None


def test_source_line_is_the_users_not_torchs():
    inside = f'  File "{torch.__file__}", line 3, in forward\n    return F.linear(x)\n'
    assert source_line(TRACE + inside) == "net.py:7: return h.add_(1)"
    assert source_line(inside).endswith(":3: return F.linear(x)")  # better than nothing
    assert source_line(None) == source_line("") == ""
