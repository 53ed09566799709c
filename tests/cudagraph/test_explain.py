"""`cudagraph.explain`: pieces and blockers of a function's graphs, without captures."""

from __future__ import annotations

import dataclasses

import fuzz_explain
import pytest
import torch
from capture_simulator import Simulator
from pieces import Noted
from torch import nn

import cudagraph
from cudagraph.explain import explain_with
from cudagraph.tree.function import Function

pytestmark = pytest.mark.core


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def test_a_training_graph_that_is_captured_whole():
    found = explain_with(Noted(), net(), (torch.randn(3, 4),), {})
    assert [(p.graph, p.captured) for p in found.parts] == [("forward 0", True), ("backward 0", True)]
    assert found.blockers == () and found.captured_whole
    assert "forward 0: captured whole" in str(found) and "backward 0: captured whole" in str(found)
    assert all(part.op_count > 1 and part.input_count and part.output_count for part in found.parts)


def blocked(x):
    y = (x.sin() + 1).exp()
    found = y.nonzero()
    return y * 2 + 1, found


def test_blockers_and_their_lines():
    x = torch.randn(3)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = explain_with(Noted(), blocked, (x,), {})
    assert [part.captured for part in found.parts] == [True, False]
    assert not found.captured_whole
    (blocker,) = found.blockers
    assert blocker.graph == "inference 0" and blocker.op == "aten.nonzero.default"
    assert "found = y.nonzero()" in blocker.source_line
    text = str(found)
    assert "inference 0: 1 of 2 parts captured" in text and f"blocked: {blocker}" in text
    assert [dataclasses.asdict(part)["graph"] for part in found.parts] == ["inference 0"] * 2


def test_graph_breaks_give_graphs_of_their_own():
    def f(x):
        y = x.sin().cos()
        torch._dynamo.graph_break()
        return y.exp().sqrt()

    found = explain_with(Noted(), f, (torch.randn(3),), {})
    assert [part.graph for part in found.parts] == ["inference 0", "inference 1"]


def test_a_compiled_function_and_keywords():
    def f(x, *, scale):
        return x.sin() * scale

    x = torch.randn(3)
    compiled = torch.compile(f, backend="eager")
    for given in (compiled, f, torch.compile(net(), backend="eager")):
        args, kwargs = ((x,), {"scale": 2}) if given in (compiled, f) else ((torch.randn(3, 4),), {})
        assert explain_with(Noted(), given, args, kwargs).captured_whole


def test_explaining_often_costs_no_recompile_of_anything_else():
    def f(x):
        return x.sin() + 1

    for _ in range(12):  # past Dynamo's limit of recompiles
        assert explain_with(Noted(), f, (torch.randn(3),), {}).captured_whole


def test_without_a_device_nothing_is_captured():
    found = cudagraph.explain(net(), torch.randn(3, 4))
    if not torch.cuda.is_available():
        assert not any(part.captured for part in found.parts) and not found.captured_whole
        (blocker,) = [b for b in found.blockers if b.graph == "forward 0"]
        assert blocker.reason == "runs on the CPU" and "return" in blocker.source_line
    assert str(cudagraph.explain(lambda: 3)) == "no graph was compiled: nothing to capture"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_explain_says_is_what_happens(device):
    """Random functions; fuzz_explain.py runs as many as one likes."""
    driver = Simulator() if device == "cpu" else None
    assert fuzz_explain.run_seeds(range(16), driver, torch.device(device)) == []


def test_the_fuzzer_notices_a_run_that_does_otherwise(monkeypatch):
    monkeypatch.setattr(Function, "reason_against_output", lambda self, k, x: "of the test")
    wrong = fuzz_explain.run_seeds(range(4), Simulator(), torch.device("cpu"))
    assert wrong and "recordings" in wrong[0][1]
