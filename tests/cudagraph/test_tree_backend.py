"""The backend around the tree: which graphs become which pieces, with which facts, for both inner compilers.

Captures are noted and run as they are, on the CPU; what a tree does with its pieces is tested with the simulator.
"""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from places import backend_with
from torch import nn

import cudagraph

INNER = ["aten", pytest.param("inductor", marks=pytest.mark.slow)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x).tanh()


def trained(module, forward, steps=3, size=lambda step: 5):
    """Outputs and gradients of some steps; the module's state moves on with them."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        x = torch.randn(size(step), 8, requires_grad=True)
        out = forward(x)
        out.square().mean().backward()
        seen += [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [b.clone() for b in module.buffers()]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.core
def test_training_equals_eager_and_pieces_know_what_they_are(noted, inner):
    module = Net()
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend=backend_with(noted, {"inner": inner}))
    for a, b in zip(trained(module, compiled), trained(reference, reference), strict=True):
        torch.testing.assert_close(a, b)
    forward, backward = noted.pieces
    assert (forward.is_backward, forward.is_inference) == (False, False)
    assert (backward.is_backward, backward.is_inference) == (True, False)
    assert forward.name.split()[0] == "forward" and backward.name == forward.name.replace("forward", "backward")
    assert forward.device == torch.device("cpu")
    assert noted.call_counts == {forward.name: 3, backward.name: 3}
    # six parameters, three buffers; not the batch
    given = len(forward.placeholders)
    assert given == 10 and len(forward.static_inputs) == 9
    batch = next(i for i in range(given) if i not in forward.static_inputs)
    # the statistics of BatchNorm are written in place, and are static
    assert len(forward.mutated_inputs) == 3 and set(forward.mutated_inputs) <= set(forward.static_inputs)
    # in the backward only saved parameters are static: not the saved batch, activations or tangents
    names = {backward.placeholders[i].name for i in backward.static_inputs}
    assert names and names <= {forward.placeholders[i].name for i in forward.static_inputs}
    assert forward.placeholders[batch].name not in names
    assert backward.mutated_inputs == ()
    assert cudagraph.stats()["skips"] == cudagraph.stats()["partitions"] == 0


@pytest.mark.parametrize("inner", INNER)
def test_inference_and_a_changed_number(noted, inner):
    @torch.compile(backend=backend_with(noted, {"inner": inner}))
    def f(x, n):
        return x.sin() * n + x.t()

    for n in (2, 3, 4):
        x = torch.randn(3, 3)
        torch.testing.assert_close(f(x, n), x.sin() * n + x.t())
    assert all(piece.is_inference and piece.static_inputs == () for piece in noted.pieces)


def blocked(x, w):
    y = (x @ w).cos() + 1
    found = y.nonzero()
    z = (y * 2).exp().sum() + (y @ w).sin()
    return z + found.sum(), y


@pytest.mark.core
def test_what_can_be_captured_is(noted, caplog):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(blocked, backend=backend_with(noted))
        for _ in range(3):
            x, w = torch.randn(4, 4), torch.randn(4, 4)
            for a, b in zip(compiled(x, w), blocked(x, w), strict=True):
                torch.testing.assert_close(a, b)
    (piece,) = noted.pieces
    assert piece.name.endswith(", part 1 of 1") and len(piece.placeholders) == 2
    assert piece.output_traces and all("test_tree_backend.py" in trace for trace in piece.output_traces)
    assert cudagraph.stats()["partitions"] == 1 and cudagraph.stats()["skips"] == 0
    (record,) = [r for r in caplog.records if r.name == "cudagraph"]
    assert "can't be captured whole, 1 part of it captured, because" in record.message
    assert "aten.nonzero.default has a size that depends on the values" in record.message
    assert "test_tree_backend.py" in record.message and "found = y.nonzero()" in record.message


@pytest.mark.core
def test_or_error_leaves_written_inputs_to_the_tree(noted):
    @torch.compile(backend=backend_with(noted, {"or_error": True}))
    def f(x, y):
        x.add_(y.sin().cos())

    f(torch.zeros(3), torch.ones(3))
    (piece,) = noted.pieces
    assert len(piece.mutated_inputs) == 1  # it knows whether it is its own memory
    info = piece.placeholders[piece.mutated_inputs[0]]
    assert "x.add_(y.sin().cos())" in info.mutating_use_stack_trace


@pytest.mark.parametrize("how", ["option", "CUDAGRAPH_OR_ERROR", "TORCHINDUCTOR_CUDAGRAPH_OR_ERROR"])
def test_or_error_raises_with_the_line(noted, how, monkeypatch):
    if how != "option":
        monkeypatch.setenv(how, "1")
    options = {"or_error": True} if how == "option" else {}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(blocked, backend=backend_with(noted, options))
        with pytest.raises(Exception, match=r"aten\.nonzero\.default has a size") as caught:
            compiled(torch.randn(4, 4), torch.randn(4, 4))
    inner = caught.value.inner_exception
    assert isinstance(inner, cudagraph.NotCapturableError) and "found = y.nonzero()" in str(inner)
    assert noted.pieces == []


@pytest.mark.parametrize("inner", INNER)
def test_without_cuda_it_runs_and_says_so_once(inner, caplog):
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    module = Net()
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend=cudagraph.cudagraph_tree, options={"inner": inner})
    for a, b in zip(trained(module, compiled), trained(reference, reference), strict=True):
        torch.testing.assert_close(a, b)
    records = [r for r in caplog.records if r.name == "cudagraph"]
    assert len(records) == 1 and records[0].levelno == logging.WARNING
    assert "nothing to capture, all of it runs on the CPU" in records[0].message
    assert cudagraph.stats()["skips"] == 6

    torch.compiler.reset()
    compiled = torch.compile(Net(), backend=cudagraph.cudagraph_tree, options={"inner": inner, "or_error": True})
    with pytest.raises(Exception, match="nothing to capture") as caught:
        compiled(torch.randn(2, 8))
    assert isinstance(caught.value.inner_exception, cudagraph.NotCapturableError)


@pytest.mark.parametrize("inner", INNER)
def test_graphs_that_launch_nothing_are_no_matter(noted, inner, caplog):
    compiled = torch.compile(lambda x: (x.t(), x[0]), backend=backend_with(noted, {"inner": inner, "or_error": True}))
    x = torch.randn(3, 3)
    assert all(torch.equal(a, b) for a, b in zip(compiled(x), (x.t(), x[0]), strict=True))
    assert noted.pieces == [] and cudagraph.stats()["skips"] == 0
    assert not [r for r in caplog.records if r.name == "cudagraph"]


@pytest.mark.slow
def test_static_inputs_of_frozen_graphs_are_inductors(noted):
    module = Net().eval()
    compiled = torch.compile(module, backend=backend_with(noted, {"inner": "inductor"}))
    x = torch.randn(5, 8)
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        torch.testing.assert_close(compiled(x), module(x))
    (piece,) = noted.pieces
    assert piece.is_inference and all(i < len(piece.placeholders) for i in piece.static_inputs)
    batch = [i for i in range(len(piece.placeholders)) if i not in piece.static_inputs]
    assert len(batch) == 1


def test_options_are_checked():
    compiled = torch.compile(lambda x: x + 1, backend=cudagraph.cudagraph_tree, options={"inner": "c"})
    with pytest.raises(Exception, match="options\\['inner'\\] must be 'aten' or 'inductor'"):
        compiled(torch.ones(2))
    compiled = torch.compile(lambda x: x + 1, backend=cudagraph.cudagraph_tree, options={"warmups": 2})
    with pytest.raises(Exception, match="unknown option 'warmups'; valid options: inner, or_error"):
        compiled(torch.ones(2))


def test_the_backend_is_found_by_name():
    x = torch.randn(3)
    assert torch.equal(torch.compile(lambda x: x + 1, backend="cudagraph_tree")(x), x + 1)
    assert "cudagraph_tree" in torch.compiler.list_backends()
    assert callable(cudagraph.cudagraph_tree.reset)  # torch._dynamo.reset() calls it


def test_constants_are_kept_with_the_piece(noted):
    table = torch.randn(3)

    @torch.compile(backend=backend_with(noted))
    def f(x):
        return x.sin() * torch.tensor([1.0, 2.0, 3.0]) + table

    x = torch.randn(3)
    torch.testing.assert_close(f(x), x.sin() * torch.tensor([1.0, 2.0, 3.0]) + table)
    (piece,) = noted.pieces
    assert any(torch.equal(c, torch.tensor([1.0, 2.0, 3.0])) for c in piece.constants)


@pytest.mark.slow
def test_inductors_own_pieces(noted, monkeypatch, caplog):
    """Its scheduler cuts CUDA code only; told that all devices are GPUs, it cuts on the CPU as well."""
    import torch._inductor.scheduler as scheduler

    for kind in (scheduler.BaseSchedulerNode, scheduler.FusedSchedulerNode):
        monkeypatch.setattr(kind, "is_gpu", lambda self: True)
    options = {"inner": "inductor"}
    uncached = torch._inductor.config.patch(fx_graph_cache=False)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), uncached:
        compiled = torch.compile(blocked, backend=backend_with(noted, options))
        again = torch.compile(lambda x, w: blocked(x, w), backend=backend_with(noted, options))  # the same code
        for _ in range(2):
            x, w = torch.randn(4, 4), torch.randn(4, 4)
            for run in (compiled, again):
                for a, b in zip(run(x, w), blocked(x, w), strict=True):
                    torch.testing.assert_close(a, b)
    first, second, *others = noted.pieces
    assert len(others) == 2  # each of the two functions has its own, though they share the generated module
    assert set(noted.call_counts.values()) == {2}
    assert first.name.endswith("part 1 of 2") and second.name.endswith("part 2 of 2")
    assert {info.name for info in first.placeholders} == {"arg0_1", "arg1_1"}
    assert any(info.name.startswith("input ") for info in second.placeholders)  # a value of the graph's own
    assert cudagraph.stats()["partitions"] == 2
    assert "2 parts of it captured" in caplog.text
