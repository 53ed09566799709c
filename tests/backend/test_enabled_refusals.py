"""`aot_hooks.enable`: what it refuses, and which error stands first."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.eval_frame as eval_frame
from raising import raises
from ranks import group_of_one
from steps import ATEN
from torch import nn
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import aot_hooks
import aot_hooks.enabled as enabled_module
from aot_hooks import enable, errors, float8, int8

pytestmark = pytest.mark.core


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = eval_frame._callback_from_stance
    yield
    assert eval_frame._callback_from_stance is before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"policy": 3}, "a policy or a Hook, got 3"),
        ({"policy": float8}, "float8 is the function that makes one"),
        ({"scope": "most"}, "got 'most'"),
        ({"options": {"inne": "aten"}}, "unknown option 'inne'; did you mean 'inner'"),
        ({"options": {"policy": float8()}}, "'policy', which is an argument beside it: pass policy="),
        ({"options": {"scope": "all"}}, "'scope', which is an argument beside it: pass scope="),
        ({"options": "aten"}, "options must be a dict such as .*, got 'aten'"),
    ],
)
def test_wrong_arguments_change_nothing(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.OptionError, match=says):
        enable(**arguments)


def test_a_mode_of_the_function_without_inductor() -> None:
    compiled = torch.compile(torch.nn.Linear(8, 8), mode="max-autotune-no-cudagraphs")
    with raises(errors.OptionError, "mode and options of a function under enable"), enable(float8(), options=ATEN):
        compiled(torch.randn(4, 8))


def test_a_second_thread_is_refused() -> None:
    raised: list[BaseException] = []

    def other() -> None:
        try:
            enable(int8())
        except errors.OptionError as e:
            raised.append(e)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.UnusedWarning)
        with enable(float8()):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
    assert "'MainThread' has enable(float8()) enabled" in str(raised[0])


def test_what_a_thread_left_enabled_ends_with_the_next() -> None:
    thread = threading.Thread(target=enable, args=(int8(),))
    thread.start()
    thread.join()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.UnusedWarning)
        with enable(float8()) as enabled:
            assert [each.thread for each in enabled_module._open] == [enabled.thread]


@pytest.mark.usefixtures("stock_is_aten")
def test_a_compiled_function_cannot_enable() -> None:
    @torch.compile
    def f(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        with enable(float8()):
            return x.cos()

    with pytest.raises(Exception, match="inside a compiled function"):
        f(torch.randn(3, requires_grad=True))


def test_a_partitioner_of_the_users_is_refused() -> None:
    class Own(CustomPartitionerFn):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

        def uuid(self) -> str:
            return "own"

    compiled = torch.compile(net(), options={"custom_partitioner_fn": Own()})
    with enable(float8()), pytest.raises(Exception, match="custom_partitioner_fn is set") as caught:
        compiled(torch.randn(8, 32))
    assert isinstance(errors.unwrapped(caught.value), errors.OptionError)


def test_stored_functions_of_dynamo_are_refused() -> None:
    with torch._dynamo.config.patch(caching_precompile=True):
        compiled = torch.compile(net())
        with pytest.raises(Exception, match="caching_precompile") as caught, enable(float8()):
            compiled(torch.randn(8, 32))
    assert isinstance(errors.unwrapped(caught.value), errors.OptionError)


def test_one_that_ended_is_not_entered_again() -> None:
    enabled = enable(float8())
    with pytest.warns(errors.UnusedWarning, match=r"enable\(float8\(\)\) ended, and no graph"):
        enabled.disable()
    with pytest.raises(errors.OptionError, match="has ended"):
        enabled.__enter__()


def test_an_error_of_a_hook_stands_first() -> None:
    wrong = aot_hooks.Hook("wrong", lambda x: x, lambda x: x[:1])
    compiled = torch.compile(net())
    with enable(wrong, options=ATEN), pytest.raises(Exception, match="HookContractError") as caught:
        compiled(torch.randn(8, 32))
    assert isinstance(errors.unwrapped(caught.value), errors.HookContractError)
    assert "backend='inductor'" in str(caught.value)


def test_it_is_no_decorator_and_says_so() -> None:
    with pytest.raises(errors.OptionError, match="is no decorator: write `with"):

        @enable(float8(), options=ATEN)
        def train() -> None: ...

    compiled = torch.compile(net())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        aot_hooks.disable()  # nothing is left
    compiled.eval()


class Own(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("owned", [False, True])
def test_a_sequential_under_fully_shard_is_not_compiled(owned: bool, stock_is_aten: None) -> None:
    model, x = Own(net()) if owned else net(), torch.randn(8, 32)
    with group_of_one():
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with warnings.catch_warnings(record=True) as caught, enable(int8(), options=ATEN) as hooks:
            warnings.simplefilter("always")
            torch.compile(model)(x).sum().backward()
            count = hooks.run_count
    said = [text for w in caught if "had no effect" in (text := str(w.message))]
    assert (count > 0) == owned and len(said) == (not owned)
    assert all("under FSDP2's fully_shard: there put the layers into a class of your own" in text for text in said)
