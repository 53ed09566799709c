"""What the package raises: `AotHooksError` and its children.

A message has four parts: what was expected, what came, where (the hook, the saved tensor, the user's line) and the
way out. Dynamo wraps what a backend raises in `BackendCompilerFailed`; ours is its `inner_exception` and `__cause__`,
and its message begins with ours.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = [
    "AotHooksError",
    "CacheWarning",
    "HookContractError",
    "HookTraceError",
    "OptionError",
    "PolicyError",
    "RecompileWarning",
    "UnsupportedGraphError",
    "UnsupportedTorchError",
    "UnusedWarning",
    "bind",
    "did_you_mean",
    "function_named",
]

PACKAGE = os.path.dirname(__file__) + os.sep  # files of frames that are none of the user's start so


class AotHooksError(Exception):
    """Base of all errors of this package."""


class OptionError(AotHooksError, ValueError):
    """An unknown or ill-typed option, scope, mode or argument."""


class HookContractError(AotHooksError, RuntimeError):
    """A hook broke its contract: pack mutated its input, packed into nothing, read a value, had a side effect or hidden
    state; unpack did not give back the saved tensor's shape, dtype and device."""


class HookTraceError(AotHooksError, RuntimeError):
    """A hook raised, or did something that cannot be traced, while it was traced on a saved tensor."""


class PolicyError(AotHooksError, RuntimeError):
    """A policy raised, or answered with something that is not a `Hook`."""


class UnsupportedGraphError(AotHooksError, RuntimeError):
    """The forward and backward graphs have a form that this package does not know how to rewrite."""


class UnsupportedTorchError(AotHooksError, RuntimeError):
    """This torch lacks a symbol the package stands on."""


class CacheWarning(UserWarning):
    """A compiled graph cannot be cached, or a stored one cannot be used; what it computes is not affected."""


class RecompileWarning(UserWarning):
    """A hook or policy holds what changes from step to step, so that each step compiles."""


class UnusedWarning(UserWarning):
    """A hook, a policy, a key of one, or a context does nothing."""


# --- words for messages -----------------------------------------------------------------------------------------------

_MEANT = {"hook": "policy", "hooks": "policy"}


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """ "; did you mean 'policy'?" if one of `valid` is like `name`, else ""."""
    names = list(valid)
    near = [_MEANT[name]] if _MEANT.get(name) in names else difflib.get_close_matches(name, names, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """The arguments of `function` by name. Raises `OptionError` with its name and all of them if they don't fit."""
    signature = inspect.signature(function)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as e:
        name = getattr(function, "__name__", repr(function))
        wrong = next((k for k in kwargs if k not in signature.parameters), None)
        said = f"{e}." if wrong is None else f"no argument {wrong!r}{did_you_mean(wrong, signature.parameters) or '.'}"
        shown = ", ".join(p.name + _default(p) for p in signature.parameters.values())
        raise OptionError(f"{name}: {said} Expected {name}({shown})") from None


def _default(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"


def function_named(part: str, function: Any) -> str:
    """`part` with the name and place of `function`, if it is the user's: "unpack 'widen' (model.py:12)"."""
    function = getattr(function, "func", function)  # of a partial
    code = next((c for f in (function, type(function).__call__) if (c := getattr(f, "__code__", None))), None)
    if code is None or code.co_filename.startswith((PACKAGE, "<")):
        return part
    name = getattr(function, "__name__", type(function).__name__)
    return f"{part} '{name}' ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
