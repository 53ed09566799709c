"""What policies choose in a model: the same operators and modules, compiled, eager and across graph breaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sentinel import compiled, eager
from steps import HALF
from torch import Tensor, nn

from aot_hooks import KEEP, Hook, SavedTensor, saved_tensors_policy
from aot_hooks.policies import only_these_modules, only_these_ops
from aot_hooks.settings.operators import operator_behind, same_operator

aten = torch.ops.aten


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.norm, self.mlp, self.proj, self.broken = nn.LayerNorm(16), Mlp(), nn.Linear(16, 16, bias=False), broken

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(torch.softmax(x, -1))
        if self.broken:
            torch._dynamo.graph_break()
        return self.mlp(self.norm(x)).tanh()


class Net(nn.Module):
    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(broken) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def chosen(call: Any, policy: Any) -> set[tuple[str, str]]:
    """Operators and modules of the intermediates that `policy` gives a hook, without overloads."""
    found = set()

    def spy(saved: SavedTensor) -> Hook:
        hook = policy(saved)
        if hook is not KEEP:
            found.add((".".join(saved.op.split(".")[:2]), saved.module_path))
        return hook

    x = torch.randn(8, 3, 16, requires_grad=True)
    with saved_tensors_policy(spy):
        call(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    return found


def test_modules_that_are_compiled_inside_have_their_own_names() -> None:
    gelu = {("aten.gelu", f"layers.{i}.mlp") for i in range(2)}
    for wrap in (eager, compiled):
        model = Net()
        model.layers[1] = torch.compile(model.layers[1], backend="aot_hooks", options={"inner": "aten"})
        assert chosen(wrap(model), only_these_modules({"layers.*.mlp": only_these_ops({aten.gelu: HALF})})) == gelu


def test_modules_called_with_other_parameters_have_their_own_names() -> None:
    model = Net()
    parameters = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}

    def call(x: Tensor) -> Any:
        return torch.func.functional_call(model, parameters, (x,))

    gelu = {("aten.gelu", f"layers.{i}.mlp") for i in range(2)}
    for wrap in (eager, compiled):
        assert chosen(wrap(call), only_these_modules({"layers.*.mlp": only_these_ops({aten.gelu: HALF})})) == gelu


LAYERS = ("layers.0", "layers.1")

CHOSEN = {
    "softmax": (only_these_ops({aten._softmax: HALF}), {("aten._softmax", layer) for layer in LAYERS}),
    "gelu": (only_these_ops({aten.gelu.default: HALF}), {("aten.gelu", f"{layer}.mlp") for layer in LAYERS}),
    "tanh": (only_these_ops({"tanh": HALF}), {("aten.tanh", layer) for layer in LAYERS}),
    # `linear` of 3-d inputs returns a view of the product, with and without a bias
    "addmm": (only_these_ops({aten.addmm: HALF}), {("aten.addmm", f"{layer}.mlp.fc1") for layer in LAYERS}),
    "mm": (only_these_ops({aten.mm: HALF}), {("aten.mm", f"{layer}.proj") for layer in LAYERS}),
    "all mlps": (
        only_these_modules({"layers.*.mlp": HALF}),
        {("aten.addmm", f"{layer}.mlp.fc1") for layer in LAYERS} | {("aten.gelu", f"{layer}.mlp") for layer in LAYERS},
    ),
    "one mlp": (
        only_these_modules({"layers.1.mlp": HALF}),
        {("aten.addmm", "layers.1.mlp.fc1"), ("aten.gelu", "layers.1.mlp")},
    ),
    "deep": (only_these_modules({"**.fc1": HALF}), {("aten.addmm", f"{layer}.mlp.fc1") for layer in LAYERS}),
}


@pytest.mark.core
@pytest.mark.parametrize("which", CHOSEN)
def test_operators_and_modules_are_the_same_compiled_and_eager(which: str, wrap: Any) -> None:
    policy, expected = CHOSEN[which]
    assert chosen(wrap(Net()), policy) == expected


@pytest.mark.core
@pytest.mark.parametrize("which", ["softmax", "gelu", "addmm", "all mlps", "deep"])
def test_operators_and_modules_are_the_same_across_a_graph_break(which: str) -> None:
    """What a frame gives back is an output of its graph; and torch runs the first layer's graphs for the second too."""
    policy, expected = CHOSEN[which]
    first = {(op, path) for op, path in expected if path.startswith("layers.0")}
    assert first <= chosen(compiled(Net(broken=True), fullgraph=False), policy) <= expected


@pytest.mark.core
def test_modules_in_eager_parts_of_a_compiled_model() -> None:
    model = Net()
    torch.compiler.disable(model.layers[1])  # a module is disabled in place
    model.layers[1].forward = torch.compiler.disable(model.layers[1].forward)
    got = chosen(compiled(model, fullgraph=False), only_these_modules({"layers.*.mlp": HALF}))
    assert got == CHOSEN["all mlps"][1]


@pytest.mark.slow
def test_operators_and_modules_under_inductor() -> None:
    policy, expected = CHOSEN["all mlps"]
    got = chosen(compiled(Net(), inner="inductor"), policy)
    assert expected <= got  # and tensors that the min-cut saves to recompute `tanh`
    assert got - expected <= {("aten.addmm", f"{layer}.mlp.fc2") for layer in LAYERS}


def roots_of(model: nn.Module) -> list[Any]:
    class Trainer:
        def __init__(self) -> None:
            self.model = model

        def step(self, x: Tensor) -> Tensor:
            return self.model(x)

    return [model, lambda x: model(x), Trainer().step, lambda x: dict(m=model)["m"](x)]


@pytest.mark.parametrize("form", range(4), ids=["model", "closure", "attribute", "dict"])
def test_paths_begin_at_the_outermost_module(form: int, wrap: Any) -> None:
    policy, expected = CHOSEN["all mlps"]
    assert chosen(wrap(roots_of(Net())[form]), policy) == expected


def test_an_operator_that_saves_nothing_counts_to_what_is_around_its_neighbours() -> None:
    """Footgun: in eager parts an addition leaves no trace; its module is found from the operators before and after."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) + x)

    model = nn.Sequential(Residual(), nn.Linear(16, 16))
    policy = only_these_ops({aten.add: HALF})
    assert chosen(model, policy) == chosen(compiled(model), policy) == {("aten.add", "0")}


def test_names_of_grad_fns() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    outs = [x.sigmoid(), torch.log_softmax(x, 0), F.layer_norm(x, (4,)), x @ x, x * 2, x.relu(), F.silu(x), x.cumsum(0)]
    ops = ["sigmoid", "_log_softmax", "native_layer_norm", "mm", "mul", "relu", "silu", "cumsum"]
    for out, op in zip(outs, ops, strict=True):
        assert same_operator(f"aten.{op}", operator_behind(type(out.grad_fn).__name__)), out.grad_fn
    assert operator_behind("MyFunctionBackward") == "MyFunctionBackward"


@torch.library.custom_op("aot_hooks_tests::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    return x * 3


thrice.register_fake(lambda x: torch.empty_like(x))

thrice.register_autograd(lambda ctx, g: g * 3)


def test_an_operator_of_the_users(wrap: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    policy = only_these_ops({torch.ops.aot_hooks_tests.thrice.default: HALF})
    got = chosen(wrap(lambda x: (thrice(model(x)) * model(x)).sum()), policy)
    assert {op for op, _ in got} == {"aot_hooks_tests.thrice"}
