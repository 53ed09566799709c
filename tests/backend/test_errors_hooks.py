"""Hooks that break the contract: the error names the hook, the tensor, the line; in compiled and eager parts."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import fails, raises, returns_none
from sentinel import Chain, compiled, quadruple
from torch import Tensor

from aot_hooks import Hook, saved_tensors_hooks
from aot_hooks.errors import HookContractError, HookTraceError, OptionError

pytestmark = pytest.mark.usefixtures("the_next_hook_is_unaffected")


@pytest.fixture
def model() -> Chain:
    """With one intermediate, so that it is known which tensor a message is about."""
    return Chain(3, 5, 2)


# --- hooks that break the contract -----------------------------------------------------------------------------------

SEEN: list[Any] = []

COUNT = 0


def mutates(x: Tensor) -> Any:
    return x.mul_(2)


def mutates_a_view(x: Tensor) -> Any:
    x[0].zero_()
    return x * 1


def mutates_its_data(x: Tensor) -> Any:
    x.data[0].zero_()  # counts no version
    return x * 1


def reads_an_item(x: Tensor) -> Any:
    return x / x.abs().max().item()


def branches(x: Tensor) -> Any:
    if x.sum() > 0:
        return x
    return -x


def keeps_nonzero(x: Tensor) -> Any:
    return x.nonzero(), x


def masks(x: Tensor) -> Any:
    return x[x > 0], x


def appends(x: Tensor) -> Any:
    SEEN.append(1)
    return x * 2


def counts_globally(x: Tensor) -> Any:
    global COUNT
    COUNT += 1
    return x * 2


def draws(x: Tensor) -> Any:
    return x * random.random()


def asks_the_time(x: Tensor) -> Any:
    return x * time.perf_counter()


def nonlocal_counter() -> Callable[[Tensor], Any]:
    count = 0

    def counts(x: Tensor) -> Any:
        nonlocal count
        count += 1
        return x * 2

    return counts


def iterator() -> Callable[[Tensor], Any]:
    numbers = itertools.count(1)
    return lambda x: x * next(numbers)


def closed_over_list() -> Callable[[Tensor], Any]:
    seen: list[int] = []

    def appends(x: Tensor) -> Any:
        seen.append(len(seen))
        return x * 2

    return appends


class Box:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def same(packed: Any) -> Any:
    return packed[-1] if isinstance(packed, tuple) else packed


WRONG_PACK = {
    "returns none": (returns_none, HookContractError, ["None", "return"]),
    "mutates its input": (mutates, HookContractError, ["mutates its input", "clone"]),
    "mutates a view of its input": (mutates_a_view, HookContractError, ["mutates its input", "clone"]),
    "mutates its data": (mutates_its_data, HookContractError, ["mutates its input", "clone"]),
    "reads an item": (reads_an_item, HookContractError, ["reads a value", ".item()", "eager=True"]),
    "branches on a value": (branches, HookContractError, ["reads a value", "torch.where", "eager=True"]),
    "nonzero": (keeps_nonzero, HookContractError, ["size depends on the values", "eager=True"]),
    "a mask": (masks, HookContractError, ["size depends on the values", "eager=True"]),
    "appends to a global list": (appends, HookContractError, ["side effect", "eager=True"]),
    "appends to a closed-over list": (closed_over_list(), HookContractError, ["side effect", "eager=True"]),
    "counts in a nonlocal": (nonlocal_counter(), HookContractError, ["side effect", "eager=True"]),
    "counts in a global": (counts_globally, HookContractError, ["side effect", "eager=True"]),
    "draws a number": (draws, HookContractError, ["hidden state", "eager=True"]),
    "asks the time": (asks_the_time, HookContractError, ["hidden state", "eager=True"]),
    "an iterator": (iterator(), HookContractError, ["hidden state", "eager=True"]),
    "raises": (fails, HookTraceError, ["raised KeyError: 'no such thing'", "raising.py:", "eager=True"]),
}


@pytest.mark.core
@pytest.mark.parametrize("case", WRONG_PACK)
def test_pack_that(model: Chain, x: Tensor, case: str) -> None:
    pack, kind, parts = WRONG_PACK[case]
    where = ["hook 'culprit'", "float32[", "(sentinel.py:", "x = x @ w", "pack" if kind is HookTraceError else ""]
    with raises(kind, *where, *parts), saved_tensors_hooks(Hook("culprit", pack, same)):
        compiled(model)(x)


WRONG_UNPACK = {
    "another shape": (lambda x: x.flatten(), HookContractError, ["shape [30]", "view(shape)"]),
    "one size": (lambda x: x[:1], HookContractError, ["shape ["]),
    "another dtype": (lambda x: x.double(), HookContractError, ["dtype torch.float64", ".to(dtype)"]),
    "another device": (lambda x: x.to("meta"), HookContractError, ["device meta", ".to(device)"]),
    "two values": (lambda x: (x, x), HookContractError, ["2 values in a tuple", "one torch.float32 tensor"]),
    "a list of one": (lambda x: [x], HookContractError, ["1 values in a list"]),
    "a number": (lambda x: 3.0, HookContractError, ["float"]),
    "nothing": (lambda x: None, HookContractError, ["NoneType"]),
    "an error": (fails, HookTraceError, ["raised KeyError: 'no such thing'", "raising.py:", "eager=True"]),
    "a value's sign": (lambda x: x if x.sum() > 0 else -x, HookContractError, ["reads a value", "eager=True"]),
}


@pytest.mark.core
@pytest.mark.parametrize("case", WRONG_UNPACK)
def test_unpack_that_gives(model: Chain, x: Tensor, case: str) -> None:
    unpack, kind, parts = WRONG_UNPACK[case]
    line = unpack.__code__.co_firstlineno
    name = f"unpack '{unpack.__name__}' ({Path(unpack.__code__.co_filename).name}:{line})"
    where = ["hook 'culprit'", name, "float32[", "(sentinel.py:", "x = x @ w"]
    with raises(kind, *where, *parts), saved_tensors_hooks(Hook("culprit", lambda x: x * 2, unpack)):
        compiled(model)(x)


def test_a_tensor_hidden_in_an_object(model: Chain, x: Tensor) -> None:
    hook = Hook("culprit", lambda x: Box(x * 2), lambda box: box.x)
    way_out = "torch.utils._pytree.register_pytree_node"
    assert callable(torch.utils._pytree.register_pytree_node)
    with raises(HookContractError, "hook 'culprit'", "float32[", way_out), saved_tensors_hooks(hook):
        compiled(model)(x)


@pytest.mark.core
def test_functions_given_one_by_one_are_named_each_by_itself(model: Chain, x: Tensor) -> None:
    """The hook has the name of pack alone."""

    def narrow(x: Tensor) -> Tensor:
        return x.half()

    def widen(x: Tensor) -> Tensor:
        return x

    class Widens:
        def __call__(self, x: Tensor) -> Tensor:
            return x

    for unpack, name in ((widen, "widen"), (functools.partial(widen), "widen"), (Widens(), "Widens")):
        for call in (compiled(model), lambda x: model(x).sum().backward()):
            with raises(HookContractError, f"unpack '{name}' (test_errors_hooks.py:", "returned", "float16"):
                with saved_tensors_hooks(narrow, unpack):
                    call(x)


def test_a_tensor_handed_over_behind_pytrees_back(model: Chain, x: Tensor) -> None:
    held: dict[str, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        held["x"] = x * 2
        return x

    with raises(HookContractError, "hook 'culprit'", "float32["):
        with saved_tensors_hooks(Hook("culprit", pack, lambda x: held["x"])):
            compiled(model)(x)


def test_the_name_of_a_function_is_its_hooks_name(model: Chain, x: Tensor) -> None:
    with raises(HookContractError, "hook 'returns_none'"), saved_tensors_hooks(returns_none, same):
        compiled(model)(x)


def test_a_bad_hook_in_options(model: Chain, x: Tensor) -> None:
    with raises(HookContractError, "hook 'culprit'", "(sentinel.py:"):
        compiled(model, policy=Hook("culprit", returns_none, same))(x)


@pytest.mark.core
@pytest.mark.parametrize(
    ("hooks", "scope", "kind", "parts"),
    [
        ((returns_none, same), "donated", HookContractError, ["hook 'returns_none'", "(sentinel.py:"]),
        (quadruple, "some", OptionError, ["'some'", "'donated'", "'no_static'", "'all'"]),
        ((3, 4), "donated", OptionError, ["saved_tensors_hooks", "got 3"]),
    ],
)
def test_what_is_wrong_in_a_region(
    model: Chain, x: Tensor, hooks: tuple[Any, Any], scope: str, kind: type[Exception], parts: list[str]
) -> None:
    def f(x: Tensor) -> Any:
        with saved_tensors_hooks(*hooks, scope=scope):
            return model(x)

    with raises(kind, *parts):
        compiled(f)(x)


# --- eager -----------------------------------------------------------------------------------------------------------

EAGER = {
    "pack returns none": (returns_none, same, HookContractError, ["pack 'returns_none' (raising.py:", "returned None"]),
    "pack mutates": (mutates, same, HookContractError, ["pack 'mutates' (test_errors", "mutates its input", "clone"]),
    "pack raises": (fails, same, HookTraceError, ["pack 'fails' (raising.py:", "raised KeyError: 'no such thing'"]),
    "unpack raises": (lambda x: x * 2, fails, HookTraceError, ["unpack 'fails' (raising.py:", "raised KeyError:"]),
    "another shape": (lambda x: x * 2, lambda x: x.flatten(), HookContractError, ["[30]", "expected", "[6, 5]"]),
    "another dtype": (lambda x: x * 2, lambda x: x.double(), HookContractError, ["float64", "expected", "float32"]),
    "another device": (lambda x: x * 2, lambda x: x.to("meta"), HookContractError, ["meta", "expected", "cpu"]),
    "two values": (lambda x: x * 2, lambda x: (x, x), HookContractError, ["tuple"]),
}


@pytest.mark.core
@pytest.mark.parametrize("case", EAGER)
def test_in_eager(model: Chain, x: Tensor, case: str) -> None:
    """The error comes out of the forward, the end of the context or the backward; it is never lost."""
    pack, unpack, kind, parts = EAGER[case]
    with raises(kind, "hook 'culprit'", "float32[6, 5]", *parts):
        with saved_tensors_hooks(Hook("culprit", pack, unpack)):
            out = model(x)
        out.sum().backward()
