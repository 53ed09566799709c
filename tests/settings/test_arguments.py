"""Arguments that a public function does not take get an error that names them, and the ones that it takes."""

from __future__ import annotations

import pytest
import torch

import aot_hooks
from aot_hooks import policies
from aot_hooks.errors import OptionError

WRONG_ARGUMENTS = {
    "Hook('a', abs)": "Hook: missing a required argument: 'unpack'",
    "Hook('a', abs, abs, lossi=True)": "Hook: no argument 'lossi'; did you mean 'lossy'",
    "budget(peek=3)": "no argument 'peek'; did you mean 'peak'",
    "budget(1, 2)": "too many positional arguments",
    "bitmask([1])": "bitmask: too many positional arguments",
    "cast([1])": "cast: dtype must be one of torch.bfloat16, torch.float16, torch.float32, got [1]",
    "enable(float8(), opts={})": "no argument 'opts'; did you mean 'options'",
    "float8([1])": "float8: dtype must be one of torch.float8_e4m3fn, torch.float8_e5m2, got [1]",
    "float8({})": "got {}",
    "float8(scaling=[1])": "float8: scaling must be one of 'tensorwise', 'rowwise', 'blockwise', got [1]",
    "int4(32, [1])": "got [1]",
    "int8([1])": "got [1]",
    "lossless([1])": "lossless: too many positional arguments",
    "offload(then=[1])": "offload: then must be a Hook that is traced, got [1]",
    "policies.larger_than(1, [1])": "got [1]",
    "policies.only_these_dtypes([1])": "got [1]",
    "saved_tensors_hooks(float8(), scop='all')": "saved_tensors_hooks: no argument 'scop'; did you mean 'scope'",
    "saved_tensors_policy(float8(), scop='all')": "saved_tensors_policy: no argument 'scop'; did you mean 'scope'",
    "policies.larger_than(hook=float8())": "missing a required argument: 'nbytes'",
    "policies.only_these_ops()": "missing a required argument: 'hooks'",
    "frontier(model, x, max_slowdwn=1)": "frontier: no argument 'max_slowdwn'; its own are allow, max_error",
    "frontier(3)": "frontier: expected a module or function, got 3",
    "format_report(3)": "expected a Plan, or a list of them",
    "print_report(None)": "expected a Plan, or a list of them",
}


@pytest.mark.parametrize("call", WRONG_ARGUMENTS)
def test_wrong_arguments_are_named(call):
    names = vars(aot_hooks) | {"policies": policies, "model": torch.nn.Linear(4, 4), "x": torch.randn(2, 4)}
    with pytest.raises(OptionError) as error:
        eval(call, names)
    assert WRONG_ARGUMENTS[call] in str(error.value)
