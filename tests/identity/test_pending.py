"""What a compiled function changes before a context is not carried out yet when its hooks are read: it is refused."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sentinel import Chain, assert_same, clone, compiled, gradients, hand_gradients, integers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks import KEEP, Hook, saved_tensors_hooks, saved_tensors_policy

SCALE = 2.0
settings = types.ModuleType("settings_of_test_pending")


@pytest.fixture
def model() -> Chain:
    torch.manual_seed(0)
    return Chain(3, 5, 4, 2)


@pytest.fixture
def x() -> Tensor:
    return integers(6, 3).requires_grad_()


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    monkeypatch.setattr(settings, "scale", 2.0, raising=False)
    monkeypatch.setitem(sys.modules, settings.__name__, settings)


def around_second(model: Chain, before: Callable[[], None], make: Callable[[], Any]) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        h1 = x @ model.weights[0]
        before()
        with make():
            h2 = h1 @ model.weights[1]
        return h2 @ model.weights[2]

    return forward


class Holder:
    k = 2.0

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


OBJECT = Holder(k=2.0)


def by_global(h: Tensor) -> Tensor:
    return h * SCALE


def add_to_global() -> None:
    global SCALE
    SCALE = SCALE + 1


def add_to(held: Any, name: str) -> Callable[[], None]:
    def before() -> None:
        setattr(held, name, getattr(held, name) + 1)

    return before


def add_to_item(held: Any, at: Any) -> Callable[[], None]:
    def before() -> None:
        held[at] = held[at] + 1

    return before


def case_of_a_variable() -> Any:
    k = 2.0

    def before() -> None:
        nonlocal k
        k = k + 1

    return before, lambda h: h * k


class ByMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Holder(k=2.0)
        self.register_buffer("table", torch.tensor(2.0))

    def by_inner(self, h: Tensor) -> Tensor:
        return h * self.inner.k

    def by_buffer(self, h: Tensor) -> Tensor:
        return h * self.table


def of_a_view() -> Holder:
    base = torch.full((2,), 2.0)
    return Holder(base=base, table=base[0])


# what is held, the change before the context and the pack, and how the message names what has changed
# fmt: off
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "a_nested_object": (lambda: Holder(inner=Holder(k=2.0)),
                        lambda outer: (add_to(outer.inner, "k"), lambda h: h * outer.inner.k), "outer.inner.k"),
    "a_global_object": (lambda: None, lambda _: (add_to(OBJECT, "k"), lambda h: h * OBJECT.k), "OBJECT.k"),
    "a_method": (ByMethod, lambda module: (add_to(module.inner, "k"), module.by_inner), "self.inner.k"),
    "a_list": (lambda: [2.0], lambda held: (add_to_item(held, 0), lambda h: h * held[0]), "held"),
    "a_list_in_a_list": (lambda: [[2.0]], lambda held: (add_to_item(held[0], 0), lambda h: h * held[0][0]), "held[0]"),
    "a_dict_in_an_object": (lambda: Holder(table={"k": 2.0}),
                            lambda outer: (add_to_item(outer.table, "k"), lambda h: h * outer.table["k"]),
                            "outer.table"),
    "a_global": (lambda: None, lambda _: (add_to_global, by_global), "SCALE"),
    "a_module": (lambda: None, lambda _: (add_to(settings, "scale"), lambda h: h * settings.scale), "settings.scale"),
    "a_module_as_a_value": (lambda: None,
                            lambda _: (add_to(settings, "scale"), lambda h: h * getattr(settings, "scale")),  # noqa: B009
                            "settings.scale"),
    "a_variable": (lambda: None, lambda _: case_of_a_variable(), "k"),
    "a_tensor_written_to": (lambda: Holder(table=torch.tensor(2.0)),
                            lambda outer: (lambda: outer.table.add_(1), lambda h: h * outer.table), "outer.table"),
    "a_view_of_a_tensor_written_to": (of_a_view, lambda outer: (lambda: outer.base.add_(1), lambda h: h * outer.table),
                                      "outer.table"),
    "a_buffer_replaced": (ByMethod, lambda module: (add_to(module, "table"), module.by_buffer), "self._buffers"),
}
# fmt: on


@pytest.mark.core
@pytest.mark.parametrize("case", CASES)
def test_what_is_changed_before_a_context_is_refused(model: Chain, x: Tensor, case: str) -> None:
    make, of, named = CASES[case]
    before, pack = of(make())
    forward = around_second(model, before, lambda: saved_tensors_hooks(pack, clone))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="has changed before; make it outside") as raised:
        compiled(forward)(x)
    assert f"got '{named}' that the compiled function has changed before" in str(raised.value)
    assert isinstance(raised.value.inner_exception, aot_hooks.errors.OptionError)


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_in_a_checkpointed_part(model: Chain, x: Tensor, where: str) -> None:
    """Dynamo traces it by itself."""
    outer = Holder(table=torch.tensor(2.0))

    def part(h: Tensor) -> Tensor:
        if where == "inside":
            outer.table.add_(1)
        with saved_tensors_hooks(lambda h: h * outer.table, clone):
            return h @ model.weights[1]

    def forward(x: Tensor, written: bool) -> Tensor:
        h1 = x @ model.weights[0]
        if written and where == "outside":
            outer.table.add_(1)
        return checkpoint(part, h1, use_reentrant=False) @ model.weights[2]

    if where == "outside":
        compiled(forward)(x, False).sum().backward()
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match=r"got 'outer\.table' that the compiled function has changed"
    ):
        compiled(forward)(x, True)


@pytest.mark.core
def test_of_a_policy_nobody_knows_what_it_reads(model: Chain, x: Tensor) -> None:
    outer = Holder(inner=Holder(k=2.0))

    def policy(saved: Any) -> Hook:
        return Hook("triple", lambda h: h * 3, clone) if outer.inner.k > 2.5 else KEEP

    def before() -> None:
        outer.inner.k = outer.inner.k + 1

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="got a policy, which may read what the compiled"):
        compiled(around_second(model, before, lambda: saved_tensors_policy(policy)))(x)


@pytest.mark.core
def test_what_the_hooks_do_not_read_may_change_and_so_may_what_they_read_later_on(model: Chain, x: Tensor) -> None:
    read, other = Holder(inner=Holder(k=2.0), step=0), Holder(step=0)

    def before() -> None:
        other.step = other.step + 1
        read.step = read.step + 1  # an attribute that the hook does not read

    around = around_second(model, before, lambda: saved_tensors_hooks(lambda h: h * read.inner.k, clone))

    def forward(x: Tensor) -> Tensor:
        out = around(x)
        read.inner.k = read.inner.k + 1
        return out

    call = compiled(forward)
    for k in (2, 3, 4):
        assert_same(gradients(call, model, x), hand_gradients(model, x, h1=k))
    assert (read.step, other.step) == (3, 3)
