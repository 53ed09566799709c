"""Every bad input gives an error of ours that names the hook, the saved tensor, the user's line and the way out."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sentinel import Chain, assert_same, compiled, gradients, hand_gradients, integers, quadruple
from torch import Tensor

import aot_hooks
from aot_hooks import AotHooksError, Hook, saved_tensors_hooks, saved_tensors_policy
from aot_hooks.errors import HookContractError, HookTraceError, OptionError, PolicyError


@contextlib.contextmanager
def raises(kind: type[AotHooksError], *parts: str) -> Iterator[None]:
    """An error of ours is raised, alone or wrapped by Dynamo, and its message has all `parts`."""
    with pytest.raises(Exception) as info:
        yield
    error: BaseException | None = info.value
    while error is not None and not isinstance(error, AotHooksError):
        error = getattr(error, "inner_exception", None) or error.__cause__
    assert type(error) is kind, f"expected a {kind.__name__}, got {info.value!r}"
    missing = [part for part in parts if part not in str(error)]
    assert not missing, f"{missing} missing in: {error}"


@pytest.fixture
def model() -> Chain:
    return Chain(3, 5, 2)


@pytest.fixture
def x() -> Tensor:
    return integers(6, 3).requires_grad_()


@pytest.fixture(autouse=True)
def the_next_hook_is_unaffected(model: Chain, x: Tensor) -> Iterator[None]:
    yield
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    torch._dynamo.reset()
    with saved_tensors_hooks(*quadruple):
        assert_same(gradients(compiled(model), model, x), hand_gradients(model, x, h=4))
        assert_same(gradients(model, model, x), hand_gradients(model, x, h=4))


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"innr": "aten"}, ["unknown option 'innr'", "inner", "cudagraphs", "policy", "scope", "inductor"]),
        ({"inner": "eager"}, ["options['inner']", "'inductor'", "'aten'", "'eager'"]),
        ({"scope": "some"}, ["options['scope']", "'donated'", "'no_static'", "'all'", "'some'"]),
        ({"cudagraphs": "yes"}, ["options['cudagraphs']", "True or False", "'yes'"]),
        ({"policy": 3}, ["options['policy']", "3"]),
        ({"inductor": {"max_autotun": True}, "inner": "inductor"}, ["options['inductor']", "'max_autotun'"]),
        ({"inductor": "max_autotune", "inner": "inductor"}, ["options['inductor']", "dict"]),
        ({"inductor": {"max_autotune": True}, "inner": "aten"}, ["options['inductor']", "options['inner']"]),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_options(model: Chain, x: Tensor, options: dict[str, Any], parts: list[str]) -> None:
    with raises(OptionError, *parts):
        compiled(model, **options)(x)


def test_unknown_mode(model: Chain, x: Tensor) -> None:
    with raises(OptionError, "mode='fastest'"):
        torch.compile(model, backend="aot_hooks", mode="fastest")(x)


@pytest.mark.core
@pytest.mark.parametrize("enter", [saved_tensors_hooks, saved_tensors_policy])
def test_unknown_scope(enter: Any) -> None:
    given = [Hook("h", *quadruple)]
    with raises(OptionError, "'some'", "'donated'", "'no_static'", "'all'"), enter(*given, scope="some"):
        pytest.fail("entered")


@pytest.mark.core
@pytest.mark.parametrize(
    "given", [(3, quadruple[1]), (quadruple[0], "unpack"), (quadruple[0],), (None, None), (torch.ones(2), 1)]
)
def test_what_is_not_callable(given: tuple[Any, ...]) -> None:
    with raises(OptionError, "saved_tensors_hooks", "got"), saved_tensors_hooks(*given):
        pytest.fail("entered")


@pytest.mark.core
@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        ({"name": 3}, ["Hook(3)", "name must be a str"]),
        ({"pack": 3}, ["Hook('h')", "pack must be a function `tensor -> pytree`, got 3"]),
        ({"unpack": None}, ["Hook('h')", "unpack must be a function `pytree -> tensor`, got None"]),
        ({"eager": "no"}, ["Hook('h')", "eager must be True or False, got 'no'"]),
        ({"declines": True}, ["Hook('h')", "declines must be a function or None, got True"]),
        ({"rounds_to_zero": 1}, ["Hook('h')", "rounds_to_zero must be True or False, got 1"]),
        ({"cache_hash": 1}, ["Hook('h')", "cache_hash must be a str or None, got 1"]),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_what_is_no_hook(wrong: dict[str, Any], parts: list[str]) -> None:
    with raises(OptionError, *parts):
        Hook(**{"name": "h", "pack": quadruple[0], "unpack": quadruple[1], **wrong})


def test_a_policy_that_is_not_callable() -> None:
    with raises(OptionError, "policy", "3"), saved_tensors_policy(3):  # type: ignore[arg-type]
        pytest.fail("entered")


def test_last_plans_of_something_else() -> None:
    with raises(OptionError, "last_plans", "torch.compile"):
        aot_hooks.last_plans(len)


# --- hooks that break the contract -----------------------------------------------------------------------------------

SEEN: list[Any] = []
COUNT = 0


def returns_none(x: Tensor) -> Any:
    x * 2


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


def fails(x: Any) -> Any:
    raise KeyError("no such thing")


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
    "raises": (fails, HookTraceError, ["raised KeyError: 'no such thing'", "test_errors.py:", "eager=True"]),
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
    "an error": (fails, HookTraceError, ["unpack raised KeyError: 'no such thing'", "test_errors.py:", "eager=True"]),
    "a value's sign": (lambda x: x if x.sum() > 0 else -x, HookContractError, ["unpack reads a value", "eager=True"]),
}


@pytest.mark.core
@pytest.mark.parametrize("case", WRONG_UNPACK)
def test_unpack_that_gives(model: Chain, x: Tensor, case: str) -> None:
    unpack, kind, parts = WRONG_UNPACK[case]
    where = ["hook 'culprit'", "unpack", "float32[", "(sentinel.py:", "x = x @ w"]
    with raises(kind, *where, *parts), saved_tensors_hooks(Hook("culprit", lambda x: x * 2, unpack)):
        compiled(model)(x)


def test_a_tensor_hidden_in_an_object(model: Chain, x: Tensor) -> None:
    hook = Hook("culprit", lambda x: Box(x * 2), lambda box: box.x)
    with raises(HookContractError, "hook 'culprit'", "float32[", "pytree", "register"), saved_tensors_hooks(hook):
        compiled(model)(x)


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


def test_a_bad_hook_in_a_region(model: Chain, x: Tensor) -> None:
    def f(x: Tensor) -> Any:
        with saved_tensors_hooks(returns_none, same):
            return model(x)

    with raises(HookContractError, "hook 'returns_none'", "(sentinel.py:"):
        compiled(f)(x)


@pytest.mark.core
def test_an_unknown_scope_in_a_region(model: Chain, x: Tensor) -> None:
    def f(x: Tensor) -> Any:
        with saved_tensors_hooks(*quadruple, scope="some"):
            return model(x)

    with raises(OptionError, "'some'", "'donated'", "'no_static'", "'all'"):
        compiled(f)(x)


def test_what_is_not_callable_in_a_region(model: Chain, x: Tensor) -> None:
    def f(x: Tensor) -> Any:
        with saved_tensors_hooks(3, 4):
            return model(x)

    with raises(OptionError, "saved_tensors_hooks", "got 3"):
        compiled(f)(x)


def test_a_function_made_in_the_region_over_a_tensor(model: Chain, x: Tensor) -> None:
    def f(x: Tensor) -> Any:
        k = x.detach().amax()
        with saved_tensors_hooks(lambda x: x * k, same):
            return model(x)

    with raises(OptionError, "pack", "known while compiling", "outside the function"):
        compiled(f)(x)


# --- policies --------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("policy", "parts"),
    [
        (fails, ["policy 'fails' raised KeyError: 'no such thing'", "float32["]),
        (returns_none, ["policy 'returns_none'", "None", "expected a Hook", "KEEP"]),
        (lambda saved: "keep", ["'keep'", "expected a Hook", "KEEP"]),
        (lambda saved: quadruple, ["expected a Hook"]),
    ],
)
@pytest.mark.parametrize("wrap", [compiled, lambda model: model], ids=["compiled", "eager"])
def test_policies(model: Chain, x: Tensor, policy: Any, parts: list[str], wrap: Any) -> None:
    if policy is returns_none:

        def policy(saved: Any) -> None: ...

        parts = [part.replace("returns_none", "policy") for part in parts]
    with raises(PolicyError, *parts), saved_tensors_policy(policy):
        wrap(model)(x)


def test_a_policys_message_has_the_users_line(model: Chain, x: Tensor) -> None:
    with raises(PolicyError, "(sentinel.py:", "x = x @ w"), saved_tensors_policy(fails):
        compiled(model)(x)


def test_a_policy_that_answers_with_an_eager_hook(model: Chain, x: Tensor) -> None:
    hook = Hook("culprit", *quadruple, eager=True)
    with (
        raises(OptionError, "hook 'culprit'", "around the compiled call", "(sentinel.py:"),
        saved_tensors_policy(lambda s: hook),
    ):
        compiled(model)(x)


def test_an_eager_hook_in_options(model: Chain, x: Tensor) -> None:
    with raises(OptionError, "culprit", "context"):
        compiled(model, policy=Hook("culprit", *quadruple, eager=True))(x)


# --- eager -----------------------------------------------------------------------------------------------------------

EAGER = {
    "pack returns none": (returns_none, same, HookContractError, ["pack returned None"]),
    "pack mutates": (mutates, same, HookContractError, ["pack mutates", "clone"]),
    "pack raises": (fails, same, HookTraceError, ["pack raised KeyError: 'no such thing'"]),
    "unpack raises": (lambda x: x * 2, fails, HookTraceError, ["unpack raised KeyError: 'no such thing'"]),
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
