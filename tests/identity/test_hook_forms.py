"""What stands for a hook around a call: functions, modules, graphs, hooks of the library, torch's own context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sentinel import Chain, assert_same, compiled, double, gradients, hand_gradients, quadruple, scale
from torch import Tensor, nn

import aot_hooks
from aot_hooks import KEEP, Hook, saved_tensors_hooks
from aot_hooks.context.pairs import ambient


class Scale(nn.Module):
    def __init__(self, k: float) -> None:
        super().__init__()
        self.register_buffer("k", torch.tensor(k))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.k


class Callable2:
    def __call__(self, x: Tensor) -> Tensor:
        return x * 2

    def method(self, x: Tensor) -> Tensor:
        return x * 2


@dataclass
class Factor:
    """Compared by value, so it has no hash."""

    k: float

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.k


FORMS = {
    "functions": quadruple,
    "hook": (Hook("quadruple", *quadruple),),
    "two hooks": (Hook("a", double, KEEP.unpack), Hook("b", KEEP.pack, double)),
    "modules with buffers": (Scale(2.0), Scale(2.0)),
    "graph modules": (torch.fx.symbolic_trace(double), torch.fx.symbolic_trace(double)),
    "callable objects": (Callable2(), Callable2()),
    "objects without a hash": (Factor(2.0), Factor(2.0)),
    "methods": (Callable2().method, Callable2().method),
    "lambdas": (lambda x: (x * 2, 2), lambda packed: packed[0] * packed[1]),
    "a dict between": (lambda x: {"value": x * 4, "none": None, "dtype": x.dtype}, lambda p: p["value"].to(p["dtype"])),
}


@pytest.mark.core
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_hook(model: Chain, x: Tensor, form: str, wrap: Any) -> None:
    with saved_tensors_hooks(*FORMS[form]):
        got = gradients(wrap(model), model, x)
    assert_same(got, hand_gradients(model, x, h=4))


@pytest.mark.parametrize(
    "hook",
    [
        aot_hooks.float8(),
        aot_hooks.float8(torch.float8_e5m2, scaling="blockwise"),
        aot_hooks.int8(),
        aot_hooks.int4(64, stochastic=True),
        aot_hooks.cast(torch.bfloat16),
        aot_hooks.bitmask(),
    ],
    ids=repr,
)
def test_the_functions_of_a_hook_bring_its_name(hook: Hook) -> None:
    with saved_tensors_hooks(hook.pack, hook.unpack):
        setting, _ = ambient()
    assert setting is not None and repr(setting.rule) == repr(hook)


@pytest.mark.core
def test_stock_context_with_graph_modules_means_the_same(model: Chain, x: Tensor) -> None:
    pack, unpack = torch.fx.symbolic_trace(double), torch.fx.symbolic_trace(double)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        got = gradients(compiled(model), model, x)
    assert_same(got, hand_gradients(model, x, h=4))


def test_stock_context_overrides_ours_and_the_other_way(model: Chain, x: Tensor) -> None:
    triple = [torch.fx.symbolic_trace(fn) for fn in scale(3)]
    call = compiled(model)
    with saved_tensors_hooks(*scale(2)), torch.autograd.graph.saved_tensors_hooks(*triple):
        assert_same(gradients(call, model, x), hand_gradients(model, x, h=3))
    with torch.autograd.graph.saved_tensors_hooks(*triple), saved_tensors_hooks(*scale(2)):
        assert_same(gradients(call, model, x), hand_gradients(model, x, h=2))


def test_two_hooks_as_a_pair_keep_what_the_packing_one_declines():
    def declines(saved: aot_hooks.SavedTensor) -> str | None:
        return "it is a sine" if "sin" in saved.op else None

    functions = (lambda x: x.to(torch.bfloat16), lambda x: x.to(torch.float32))
    packs = aot_hooks.Hook("packs", *functions, declines=declines)
    unpacks = aot_hooks.Hook("unpacks", *functions)
    w = torch.randn(4, 4, requires_grad=True)
    f = torch.compile(lambda x, w: (x @ w).sin() @ w, backend="aot_hooks", options={"inner": "aten"})
    with aot_hooks.saved_tensors_hooks(packs, unpacks):
        f(torch.randn(3, 4), w).sum().backward()
    (plan,) = aot_hooks.last_plans(f)
    found = {d.saved.op: (d.hook.name, d.reason) for d in plan.decisions if not d.saved.is_input}
    assert found["aten.sin.default"] == ("keep", "it is a sine")
    assert found["aten.mm.default"][0] == "packs/unpacks"
