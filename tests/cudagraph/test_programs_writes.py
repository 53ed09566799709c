"""Programs that write to parameters, inputs and outputs of other graphs, on the simulator of captures and on CUDA."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from capture_simulator import Simulator
from places import backend_with
from torch import nn

import cudagraph
from cudagraph.explain import explain_with
from cudagraph.tree.driver import cuda_driver
from cudagraph.tree.liveness import alias_sharing_versions, layout_of, tensor_on


class Masked(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("mask", torch.rand(4, 4))
        self.how = how

    def forward(self, x):
        with torch.no_grad():
            if self.how == "data *=":
                self.weight.data *= self.mask
            elif self.how == "data =":
                self.weight.data = self.weight.data * self.mask
            elif self.how == "t_":
                self.weight.t_()
        return (x @ self.weight).tanh() * self.mask.sum()


@pytest.mark.core
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("how", ["data *=", "data =", "t_"])
def test_a_parameter_that_is_given_other_memory_or_another_shape(place, how, grad, caplog):
    """Other memory would be the pool's: found before anything runs, and logged with the line. A shape is fine."""
    if how == "t_" and torch.__version__ < "2.13":
        pytest.skip("this Dynamo has no guard on the strides of parameters: Inductor raises, docs/compatibility.md")
    module = Masked(how).to(place.device)
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend=place.backend())
    with torch.set_grad_enabled(grad), caplog.at_level(logging.WARNING, logger="cudagraph"):
        for _ in range(6):
            x = torch.randn(2, 4, device=place.device)
            out, expected = compiled(x), reference(x)
            torch.testing.assert_close(out, expected)
            assert torch.equal(module.weight, reference.weight)
            assert module.weight.stride() == reference.weight.stride()
            if grad:
                out.sum().backward()
                expected.sum().backward()
                torch.testing.assert_close(module.weight.grad, reference.weight.grad)
                module.weight.grad = reference.weight.grad = None
    stats = cudagraph.stats()
    if how == "t_":
        assert stats["skips"] == 0 and stats["replays"] > 0
        return
    assert stats["skips"] == 6 and stats["recordings"] == stats["warmups"] == int(grad), stats  # the backward
    (told,) = [r.getMessage() for r in caplog.records]
    assert "gives an input other memory or another shape" in told and f"self.weight.{how}" in told


@pytest.mark.core
@pytest.mark.parametrize("how", ["data *=", "data ="])
def test_explain_knows_of_it_too(place, how):
    found = explain_with(
        place.driver or cuda_driver(), Masked(how).to(place.device), (torch.randn(2, 4, device=place.device),), {}
    )
    assert [part.captured for part in found.parts if part.graph == "forward 0"] == [False]
    (blocker,) = found.blockers
    assert "gives an input other memory" in blocker.reason and f"self.weight.{how}" in blocker.source_line


def test_a_written_input_of_the_callers(place):
    @torch.compile(backend=place.backend())
    def f(x, y):
        x.add_(y.sin().cos())
        return (x * 2).exp(), y + 1

    for _ in range(5):
        x, y = torch.randn(3, device=place.device), torch.randn(3, device=place.device)
        x2 = x + y.sin().cos()
        out = f(x, y)
        torch.testing.assert_close(x, x2)
        torch.testing.assert_close(out, ((x2 * 2).exp(), y + 1))
    if place.inner == "aten":  # Inductor writes in the middle of its code: the tree runs it as it is
        assert cudagraph.stats()["replays"] >= 3 and cudagraph.stats()["skips"] == 0


def adding(state, x):
    state.add_(x.cos().exp())
    return state * 2


def replacing(state, x):
    y = x.cos().exp()
    state.copy_(y)
    return y * 2


def writing_to_a_view(state, x):
    state.view(-1)[:3].mul_(x.cos().exp().sum())
    return state.sin() + x


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("write", [adding, replacing, writing_to_a_view])
def test_a_graphs_output_is_written_to_by_a_later_one(place, write, marked):
    """The write stays out of the captured part, whose call ends the step of the output."""
    if place.driver is not None and not place.driver.can_move:
        pytest.skip("the simulator can't move memory that is held on this torch")
    produce = torch.compile(lambda x: (x.sin(), x.cos()), backend=place.backend())
    f = torch.compile(write, backend=place.backend())
    with torch.no_grad():
        for step in range(8):
            x = torch.randn(2, 3, device=place.device)
            if marked:
                cudagraph.mark_step_begin()
            if step == 0:
                f(x.clone(), x)  # so that this is the first function of its steps
            (state, _), expected = produce(x), x.sin()
            for _ in range(2):
                if marked:
                    cudagraph.mark_step_begin()
                x = torch.randn(2, 3, device=place.device)
                # of a sine of what grows; Inductor adds in another order
                torch.testing.assert_close(f(state, x).clone(), write(expected, x), rtol=1e-4, atol=1e-4)
                values = state.clone() if place.driver is None else place.driver.read(state)
                torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
    stats = cudagraph.stats()
    assert stats["replays"] >= (12 if place.inner == "aten" else 6)  # Inductor writes in the middle of its code
    assert stats["held_outputs"] >= (place.inner == "aten")


def test_written_to_while_something_else_is_held():
    """Steps begin by themselves: an input that is written to later is copied out, and nothing is recorded again."""
    driver = Simulator()
    if not driver.can_move:
        pytest.skip("the simulator can't move memory that is held on this torch")
    produce = torch.compile(lambda x: x.sin(), backend=backend_with(driver))
    f = torch.compile(adding, backend=backend_with(driver))
    with torch.no_grad():
        f(torch.randn(6), torch.randn(6))
        for _ in range(20):
            x = torch.randn(6)
            state, expected = produce(x), x.sin()
            for _ in range(2):
                out = f(state, x)  # held while the next ones run
                torch.testing.assert_close(driver.read(out), adding(expected, x))
                torch.testing.assert_close(driver.read(state), expected)
    stats = cudagraph.stats()
    assert stats["recordings"] <= 4 and stats["replays"] >= 50 and stats["skips"] == 0, stats


def _tanh(x, w):
    return (x @ w).tanh()


def _tanh_and_product(x, w):
    h = (x @ w).tanh()
    return h, h * w


@pytest.mark.core
@pytest.mark.parametrize("program", [_tanh, _tanh_and_product])
@pytest.mark.parametrize("under_no_grad", [False, True])
def test_a_write_to_an_output_that_a_backward_needs_raises_in_replays_too(place, program, under_no_grad):
    compiled = torch.compile(program, backend=place.backend())
    w = torch.randn(4, 4, device=place.device, requires_grad=True)

    def gradient(run, x, write):
        outputs = run(x, w)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum(y.sum() for y in outputs)
        if write:
            with torch.set_grad_enabled(not under_no_grad):
                outputs[0].mul_(2)
        return torch.autograd.grad(loss, w)[0]

    for _ in range(4):
        x = torch.randn(4, 4, device=place.device)
        torch.testing.assert_close(gradient(compiled, x, False), gradient(program, x, False))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient(compiled, x, True)
    assert cudagraph.stats()["replays"] > 0


@pytest.mark.core
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[1:].t(),
        lambda x: x.view(torch.int32)[1:],
        lambda x: x.view(torch.int64),
        lambda x: x[1].view(torch.uint8)[3:5],
        lambda x: torch.view_as_complex(x.view(3, 2, 2)).conj(),
        lambda x: torch.view_as_complex(x.view(3, 2, 2)).conj().imag,
    ],
)
def test_tensors_in_the_same_memory_count_writes_together(view):
    x = torch.randn(3, 4)
    alias = view(x)
    for base, other in ((x, alias), (alias, x)):
        made = alias_sharing_versions(base, layout_of(other))
        assert torch.equal(made, tensor_on(x.untyped_storage(), layout_of(other))) and torch.equal(made, other)
        base.add_(1)
        assert made._version == base._version and torch.equal(made, other)
        assert not made._is_view() and layout_of(made) == layout_of(other)
