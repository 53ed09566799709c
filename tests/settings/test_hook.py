"""Hooks of the package as values: how they print, and what pickling and copying them gives."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import aot_hooks
from aot_hooks import KEEP, Hook, policies
from aot_hooks.policies import first_match, larger_than

HOOKS = {
    "KEEP": KEEP,
    "bitmask()": aot_hooks.bitmask(),
    "cast(torch.bfloat16)": aot_hooks.cast(torch.bfloat16),
    "float8()": aot_hooks.float8(),
    "float8(torch.float8_e5m2, scaling='blockwise')": aot_hooks.float8(torch.float8_e5m2, "blockwise"),
    "float8(scaling='tensorwise')": aot_hooks.float8(scaling="tensorwise"),
    "int8()": aot_hooks.int8(block_size=64),
    "int8(32, stochastic=True)": aot_hooks.int8(32, True),
    "int8(power_of_two=True)": aot_hooks.int8(power_of_two=True),
    "int4()": aot_hooks.int4(),
    "int4(stochastic=False)": aot_hooks.int4(stochastic=False),
    "offload(max_stall_ms=math.inf)": aot_hooks.offload(max_stall_ms=math.inf),
    "offload(5, then=int8(32))": aot_hooks.offload(then=aot_hooks.int8(32), min_bytes=5),
}


@pytest.mark.core
@pytest.mark.parametrize("text", HOOKS)
def test_hooks_print_as_what_one_types(text: str) -> None:
    hook = HOOKS[text]
    names = {"math": math, "torch": torch, **vars(policies), **vars(aot_hooks)}
    assert repr(hook) == text and eval(text, names) == hook
    assert repr(larger_than(8, hook)) == f"larger_than(8, {text})"
    assert eval(repr(first_match(larger_than(8, hook), aot_hooks.lossless())), names) == first_match(
        larger_than(8, hook), aot_hooks.lossless()
    )
    assert pickle.loads(pickle.dumps(hook)) is hook is copy.deepcopy(hook)
    assert str(hook) == hook.name


@pytest.mark.slow
def test_a_hook_prints_alike_in_another_process() -> None:
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()))"
    policy = larger_than(8, aot_hooks.offload(then=aot_hooks.int8(64)))
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(policy), capture_output=True, check=True)
    assert done.stdout.decode().strip() == repr(policy)


def test_a_hook_that_cannot_be_hashed_prints_its_name() -> None:
    class Pack:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: Tensor) -> Tensor:
            return x

    assert repr(Hook("mine", Pack(), Pack())) == "mine"
