"""What a hook that rounds packs in eager code: only what all operators that have saved it can bear, as in a graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import HOOKS, gradients, relative_error
from torch import Tensor, nn

import aot_hooks
from aot_hooks import Hook, saved_tensors_hooks
from aot_hooks.eager import packing, readers


class Residual(nn.Module):
    """Convolutions with batch norms, ReLU and a max pool, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 8), (8, 8), (8, 8))
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b in sizes)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = (lambda x, i=i: self.norms[i](self.convolutions[i](x)) for i in range(3))
        h = F.max_pool2d(F.relu(first(x)), 2)
        return self.head(F.relu(h + third(F.relu(second(h)))).mean((2, 3)))


class Graph(nn.Module):
    """Sums over neighbours and ReLU, as in a graph isomorphism network."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.neighbours = (torch.rand(32, 32) < 0.2).float()
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x + self.neighbours @ x))
            if self.breaks:
                torch._dynamo.graph_break()
        return x


class BreakingGraph(Graph):
    """The same with a graph break in each layer: Dynamo leaves the loop to Python, and compiles the layers."""

    def __init__(self) -> None:
        super().__init__(breaks=True)


PROGRAMS: dict[type[nn.Module], tuple[int, ...]] = {
    Residual: (4, 3, 12, 12),
    Graph: (32, 16),
    BreakingGraph: (32, 16),
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_eager_and_compiled_code_round_the_same(program: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = program(), torch.randn(PROGRAMS[program])
    weights = torch.randn(model(x).shape)
    parameters = list(model.parameters())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_hooks", options={"inner": "aten"})

    def loss(model: Callable[[Tensor], Tensor]) -> Tensor:
        return (model(x) * weights).sum()

    exact = gradients(loss, (model,), parameters)
    eager, inlined = (gradients(loss, (call,), parameters, HOOKS["int8"]) for call in (model, compiled))
    assert 0 < relative_error(eager, exact) < 0.02
    # each may round a tensor that the other does not: a recomputed one
    assert relative_error(eager, inlined) < 0.01


class Recorder:
    """A hook that rounds, and notes the shapes that it packs."""

    def __init__(self) -> None:
        self.packed: list[tuple[int, ...]] = []

    def pack(self, x: Tensor) -> Tensor:
        self.packed.append(tuple(x.shape))
        return x.to(torch.bfloat16)

    def hook(self, **arguments: Any) -> Hook:
        return Hook("recorder", self.pack, lambda y: y.float(), lossy=True, eager=True, **arguments)


def run(program: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Recorder, Tensor, Tensor]:
    """The recorder after `program(x * 2)`, the gradient of x, and that without hooks."""

    def loss() -> Tensor:
        return (program(x * 2) / 8).sin().sum()  # the sine keeps its angles

    (expected,) = torch.autograd.grad(loss(), x)
    recorder = Recorder()
    with saved_tensors_hooks(recorder.hook()):
        hooked = loss()
    packed = list(recorder.packed)
    (found,) = torch.autograd.grad(hooked, x)
    assert recorder.packed == packed, "the backward packed what could have been packed before it"
    return recorder, found, expected


# What the operator that is named reads: nothing is packed for the others, which keep what they save.
@pytest.mark.core
@pytest.mark.parametrize(
    ("program", "packed"),
    [
        (lambda x: x * x, 1),  # the table has it
        (torch.tanh, 1),  # a result
        (lambda x: F.gelu(x), 1),
        (lambda x: F.conv1d(x.t()[None], x[:, :, None]), 2),
        (lambda x: F.layer_norm(x, (8,)), 1),
        (lambda x: F.group_norm(x, 2), 1),
        (torch.sin, 0),  # an angle
        (F.softplus, 0),
        (torch.sigmoid, 0),
        (torch.sqrt, 0),
        (lambda x: x.amax(0), 0),  # compares two saved tensors
        (lambda x: x**2, 1),
        (lambda x: x**0.5, 0),
        (lambda x: x * x + x.sin(), 0),  # one reader needs it
        (lambda x: F.mse_loss(x, x * 1.01, reduction="none"), 0),
    ],
)
def test_a_tensor_is_packed_only_if_every_operator_that_saves_it_bears_that(program: Any, packed: int) -> None:
    x = torch.rand(4, 8) + 1
    recorder, found, expected = run(program, x.requires_grad_())
    assert len(recorder.packed) == packed
    assert (relative_error([found], [expected]) > 1e-6) == bool(packed)


@pytest.mark.core
@pytest.mark.parametrize("program", [F.relu, lambda x: x.clamp(-1, 1), F.leaky_relu, lambda x: F.relu(x.clone(), True)])
def test_operators_that_only_compare_get_answers_in_bits(program: Callable[[Tensor], Tensor]) -> None:
    """Numbers near a threshold would fall on its other side."""
    x = (torch.randn(64, 64) * 1e-4).requires_grad_()
    w = torch.randn(64, 64)

    def loss(x: Tensor) -> Tensor:
        h = program(x * 2)
        return ((h @ w) * h).sum()

    (expected,) = torch.autograd.grad(loss(x), x)
    with saved_tensors_hooks(aot_hooks.int4(stochastic=False)):
        (found,) = torch.autograd.grad(loss(x), x)
    assert torch.equal(found == 0, expected == 0)


def test_the_tensor_is_released_as_soon_as_its_operators_are_known() -> None:
    states: list[packing.State] = []

    def watched(x: Tensor) -> Tensor:
        states[:] = [v.state for ref in packing._local.pending if (v := ref()) is not None]
        return x.relu().tanh().square()

    x = torch.randn(8, 8, requires_grad=True)
    with saved_tensors_hooks(aot_hooks.float8()):
        h = x * 2
        for _ in range(20):
            h = watched(h)
    assert len(states) <= 3
    del h
    packing.pack_pending()
    assert not packing.has_pending()


@pytest.mark.core
def test_functions_of_the_user_are_unknown_reads() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            return 3 * ctx.saved_tensors[0] ** 2 * g

    recorder, found, expected = run(Cube.apply, torch.randn(4, 8).requires_grad_())
    assert recorder.packed == [] and torch.allclose(found, expected)


def test_what_no_operator_is_found_for_stays() -> None:
    """A write into a view hides the node that saved."""

    def program(x: Tensor) -> Tensor:
        h = torch.zeros(4, 8)
        h[1:].mul_(x[1:]).add_(1)
        return h * x.sum()

    x = torch.randn(4, 8).requires_grad_()
    _, found, expected = run(program, x)
    assert relative_error([found], [expected]) < 0.01


@pytest.mark.core
def test_two_backwards_read_the_same_numbers() -> None:
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in range(2))

    @saved_tensors_hooks(aot_hooks.int4(stochastic=False))
    def loss() -> Tensor:
        return ((x * 2).relu() @ w).tanh() @ (x * 3)  # the last operator is found in the backward only

    y = loss()
    weights = torch.randn(8, 8)
    first, second = (torch.autograd.grad(y, (x, w), weights, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_backward_on_another_thread() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with saved_tensors_hooks(aot_hooks.int8()):
        y = F.gelu(x * 2)
        loss = (y * y.detach()).sum()
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(loss, x)))
    thread.start()
    thread.join(60)
    (expected,) = torch.autograd.grad((F.gelu(x * 2) * F.gelu(x * 2).detach()).sum(), x)
    assert found and torch.allclose(found[0], expected, atol=0.2)


def test_a_kind_of_operator_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []
    trace = readers._trace
    monkeypatch.setattr(readers, "_known", {})
    monkeypatch.setattr(readers, "_trace", lambda node, held: (traced.append(node.name()), trace(node, held))[1])

    def step(rows: int, hook: Hook) -> None:
        x = torch.randn(rows, 16, requires_grad=True)
        with saved_tensors_hooks(hook):
            for _ in range(3):
                loss = F.gelu(x * 2).square().tanh().sum()
        loss.backward()

    step(32, aot_hooks.offload())
    assert traced == []  # it doesn't round
    step(32, aot_hooks.float8())
    first = sorted(traced)
    assert first == ["GeluBackward0", "PowBackward0"]  # the last one is found when its backward runs
    step(32, aot_hooks.float8())
    step(48, aot_hooks.int8())
    assert sorted(traced) == first


def test_an_operator_that_cannot_be_traced_is_an_unknown_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no fake kernel")

    monkeypatch.setattr(readers, "_known", {})
    monkeypatch.setattr(readers, "_trace", broken)
    recorder, found, expected = run(torch.tanh, torch.randn(4, 8).requires_grad_())
    assert recorder.packed == [] and torch.allclose(found, expected)
