"""Every bad input gives an error of ours that names the hook, the saved tensor, the user's line and the way out."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import pytest
import torch
from raising import fails, raises, returns_none
from sentinel import Chain, compiled, quadruple
from torch import Tensor, nn

import aot_hooks
from aot_hooks import KEEP, Hook, saved_tensors_hooks, saved_tensors_policy
from aot_hooks.errors import OptionError, PolicyError

pytestmark = pytest.mark.usefixtures("the_next_hook_is_unaffected")


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_an_error_keeps_what_the_user_was_handling() -> None:
    with pytest.raises(OptionError) as info:
        try:
            raise KeyError("mine")
        except KeyError:
            aot_hooks.budget("nonsense")
    assert str(KeyError("mine")) in "".join(traceback.format_exception(info.value))
    frames = traceback.extract_tb(info.value.__traceback__)
    assert [frame.name for frame in frames[1:]] == ["call"], "frames of ours say less than the message"


@pytest.mark.core
def test_options_that_are_no_dict(model: Chain, x: Tensor) -> None:
    with raises(OptionError, "options must be a dict", "got ['aten']"):
        torch.compile(model, backend="aot_hooks", options=["aten"])(x)  # type: ignore[arg-type]


@pytest.mark.core
def test_our_message_stands_first_in_what_dynamo_raises(model: Chain, x: Tensor) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as info:
        compiled(model, polcy=KEEP)(x)
    first = str(info.value).splitlines()[0]
    assert first.startswith("OptionError: unknown option 'polcy'; did you mean 'policy'? valid options: inner,")
    assert "backend='aot_hooks'" in str(info.value) and type(info.value.inner_exception) is OptionError
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as info:
        compiled(model, policy=Hook("culprit", fails, lambda x: x))(x)
    assert str(info.value).startswith("HookTraceError: hook 'culprit' on saved ")
    frames = traceback.extract_tb(info.value.__traceback__)
    assert frames[-1].name == "compile_wrapper", "frames of ours would push the message off the screen"
    frames = traceback.extract_tb(info.value.inner_exception.__traceback__)
    assert frames[-1].name == "_call", "this one goes down to where the hook was called"
    assert "remove_dynamo_frames" not in vars(info.value)
    if torch.__version__ >= "2.13":  # those of 2.11 can't be pickled, whatever the backend
        assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)


@pytest.mark.core
@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: aot_hooks.int8(block=128), ["int8: ", "'block'", "did you mean 'block_size'?", "stochastic=False"]),
        (lambda: aot_hooks.int8(block=[1]), ["int8: ", "'block'", "did you mean 'block_size'?"]),
        (lambda: aot_hooks.int4(32, True, False, 1), ["int4: too many positional arguments", "int4(block_size=32, "]),
        (lambda: aot_hooks.float8(rows=1), ["float8: no argument 'rows'", "Expected float8("]),
        (lambda: aot_hooks.plan(nn.Linear(2, 2), torch.ones(2), hook=KEEP), ["plan: no argument 'hook'", "'policy'?"]),
        (lambda: aot_hooks.plan(lambda x: x, torch.ones(2), scop="all"), ["plan: no argument 'scop'", "'scope'?"]),
        (lambda: aot_hooks.saved_tensors(nn.GELU(), torch.ones(2), y=1), ["no argument 'y'", "GELU(input)"]),
    ],
)
def test_an_unknown_argument(call: Any, parts: list[str]) -> None:
    with raises(OptionError, *parts):
        call()


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
        ({"lossy": 1}, ["Hook('h')", "lossy must be True or False, got 1"]),
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


@pytest.mark.parametrize("policy", [aot_hooks.lossless(), aot_hooks.budget("1GiB")], ids=repr)
def test_a_policy_where_hooks_are_expected(policy: Any) -> None:
    with raises(OptionError, repr(policy), "saved_tensors_policy"), saved_tensors_hooks(policy):
        pytest.fail("entered")


@pytest.mark.parametrize(
    ("name", "instead"),
    [("float8", "write aot_hooks.float8()"), ("24GiB", "write aot_hooks.budget('24GiB')"), (24, "budget('24GiB')")],
)
def test_a_policy_by_name(name: Any, instead: str) -> None:
    with raises(OptionError, repr(name), instead):
        aot_hooks.enable(name)


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
def test_policies(model: Chain, x: Tensor, policy: Any, parts: list[str], wrap: Any) -> None:
    if policy is returns_none:

        def policy(saved: Any) -> None: ...

        parts = [part.replace("returns_none", "policy") for part in parts]
    with raises(PolicyError, *parts), saved_tensors_policy(policy):
        wrap(model)(x)


def test_a_policys_message_has_the_users_line(model: Chain, x: Tensor) -> None:
    with raises(PolicyError, "(sentinel.py:", "x = x @ w"), saved_tensors_policy(fails):
        compiled(model)(x)


@pytest.mark.parametrize("wrap", [compiled, lambda model: model], ids=["compiled", "eager"])
def test_a_policy_that_makes_a_hook_wrongly(model: Chain, x: Tensor, wrap: Any) -> None:
    """An error of ours that a policy raises is one of the policy, which names the tensor and the policy's line."""

    def wrong(saved: Any) -> Hook:
        return aot_hooks.int8(block_size=3)

    line = f"(test_errors.py:{wrong.__code__.co_firstlineno + 1})"
    with (
        raises(PolicyError, "policy 'wrong' raised OptionError", "block_size", line, "float32[", "(sentinel.py:"),
        saved_tensors_policy(aot_hooks.policies.larger_than(0, wrong)),
    ):
        wrap(model)(x)


@pytest.mark.parametrize("makes", [aot_hooks.float8, aot_hooks.lossless, aot_hooks.policies.everything])
def test_the_function_that_makes_a_hook_in_its_place(model: Chain, x: Tensor, makes: Any) -> None:
    said = f"call it, {makes.__name__}(...)"
    with raises(OptionError, said):
        aot_hooks.policies.everything(makes)
    with raises(OptionError, said):
        compiled(model, policy=makes)(x)
    with raises(OptionError, said), saved_tensors_policy(makes):
        pass
    with raises(OptionError, said), saved_tensors_hooks(makes):
        pass


def test_functions_that_no_module_has_are_policies(model: Chain, x: Tensor) -> None:
    for names in ({}, vars(aot_hooks)):
        policy = eval("lambda saved: KEEP", {"KEEP": aot_hooks.KEEP} | names)
        with saved_tensors_policy(policy):
            model(x)


def test_a_row_has_no_such_attribute(model: Chain, x: Tensor) -> None:
    for call in (compiled(model), model):
        with raises(PolicyError, "'SavedTensor' object has no attribute 'bytes'"):
            with saved_tensors_policy(lambda saved: saved.bytes):
                call(x)


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
