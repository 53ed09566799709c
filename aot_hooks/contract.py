"""The contract of a hook's two functions, and the errors for a function that breaks it; for graphs and eager parts.

      pack(x)          leaves `x` unchanged and returns a value
      unpack(packed)   returns one tensor of the shape, dtype and device of `x`

`at` names the place in a message: the hook, the saved tensor and the function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .errors import HookContractError, is_library_file
from .torch_private import values as torch_values


def function_named(part: str, function: Any) -> str:
    """`part` with the name and line of `function`, if it is the user's: "unpack 'widen' (model.py:12)"."""
    function = getattr(function, "func", function)  # of a partial
    code = next((c for f in (function, type(function).__call__) if (c := getattr(f, "__code__", None))), None)
    if code is None or is_library_file(code.co_filename):
        return part
    name = getattr(function, "__name__", type(function).__name__)
    return f"{part} '{name}' ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def input_mutated(at: str) -> HookContractError:
    return HookContractError(
        f"{at} mutates its input in place; expected a pure function, because the forward goes on using the tensor. "
        "Work on x.clone(), or use the out-of-place form of the op"
    )


def check_packed(packed: Any, at: Callable[[], str]) -> None:
    if packed is None:
        raise HookContractError(f"{at()} returned None; expected the packed value. Is a `return` missing?")


def check_unpacked(
    out: Any,
    shape: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
    at: Callable[[], str],
    *,
    plain: bool = False,
) -> None:
    """Raises `HookContractError` if `out` differs from the saved tensor, or, with `plain`, is a tensor subclass."""
    way_out = ""
    if not isinstance(out, torch.Tensor):
        several = f"{len(out)} values in a " if isinstance(out, tuple | list) else ""
        got = f"{several}{type(out).__name__}"
    elif plain and torch_values.is_traceable_subclass(out):
        got, way_out = f"a {type(out).__name__}", ". Convert it to a plain tensor"
    elif out.dtype != dtype:
        got, way_out = f"dtype {out.dtype}", ". Pack the dtype too and end unpack with .to(dtype)"
    elif out.device != device:
        got, way_out = f"device {out.device}", ". Pack the device too and end unpack with .to(device)"
    elif len(out.shape) != len(shape) or not all(
        torch_values.same_size(a, b, guard=True) for a, b in zip(out.shape, shape, strict=True)
    ):
        got, way_out = f"shape {list(out.shape)}", ". Pack the shape too and end unpack with .view(shape)"
    else:
        return
    raise HookContractError(
        f"{at()} returned {got}; expected one {dtype} tensor of shape {list(shape)} on {device}, like the saved "
        f"one{way_out}"
    )
