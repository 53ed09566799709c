"""The errors and warnings of the package: `AotHooksError` and its children.

A message has four parts: expected, got, where (the hook, the saved tensor, the user's line) and the way out. Dynamo
wraps an error of a backend in `BackendCompilerFailed`: ours is its `inner_exception` and `__cause__`, and its message
begins with ours.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch

# the files of this package, and of torch, start with these
PACKAGE = os.path.dirname(__file__) + os.sep
TORCH = os.path.dirname(torch.__file__) + os.sep


class AotHooksError(Exception):
    """Base of all errors of this package."""


class OptionError(AotHooksError, ValueError):
    """An unknown or ill-typed option, scope, mode or argument."""


class HookContractError(AotHooksError, RuntimeError):
    """A hook broke its contract: pack mutated its input, returned None, read a value, had a side effect or hidden
    state; unpack returned another shape, dtype or device than the saved tensor's."""


class HookTraceError(AotHooksError, RuntimeError):
    """A hook raised, or did something that cannot be traced, while it was traced on a saved tensor."""


class PolicyError(AotHooksError, RuntimeError):
    """A policy raised, or returned something that is not a `Hook`."""


class UnsupportedGraphError(AotHooksError, RuntimeError):
    """The forward and backward graphs have a form that this package does not know how to rewrite."""


class UnsupportedTorchError(AotHooksError, RuntimeError):
    """This torch lacks a private symbol that the package needs."""


class BudgetError(AotHooksError, RuntimeError):
    """No plan keeps a step within its budget; the message names the least that can be reached, and what holds it.

    `least_bytes` is that peak; None if no plan was tried.
    """

    least_bytes: int | None = None


class PlanFileError(AotHooksError, RuntimeError):
    """Plans can't be saved to a file, or a file of plans is damaged, or for another torch or device."""


class BudgetWarning(UserWarning):
    """A measured step used more memory than its budget. A tighter plan did not help, or none was found."""


_Error = TypeVar("_Error", bound=AotHooksError)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class CacheWarning(UserWarning):
    """A compiled graph cannot be cached, or a stored one cannot be used; results are not affected."""


class GradientWarning(UserWarning):
    """Gradients with hooks are further from those without than the limit of `check`, or could not be compared."""


class RecompileWarning(UserWarning):
    """A hook or policy holds a value that changes from step to step, so each step compiles."""


class UnusedWarning(UserWarning):
    """A hook, a policy, a key of one, or a context does nothing."""


_SYNONYMS = {"hook": "policy", "hooks": "policy"}


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """ "; did you mean 'policy'?" if one of `valid` is like `name`, else ""."""
    names = list(valid)
    near = [_SYNONYMS[name]] if _SYNONYMS.get(name) in names else difflib.get_close_matches(name, names, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def in_a_line(value: Any) -> str:
    """`repr(value)`, or the name of its class where that takes several lines, as for a module: one for each layer."""
    text = repr(value)
    return f"an object of class {type(value).__name__!r}" if "\n" in text else text


def bind(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """The arguments of `function` by name. Raises `OptionError` with its name and all of them if they don't fit."""
    signature = inspect.signature(function)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as e:
        name = getattr(function, "__qualname__", repr(function)).removesuffix(".__init__")
        wrong = next((k for k in kwargs if k not in signature.parameters), None)
        hint = "." if wrong is None else did_you_mean(wrong, signature.parameters) or "."
        problem = f"{e}{hint}" if wrong is None else f"no argument {wrong!r}{hint}"
        required = inspect.Parameter.empty
        parameters = [p for p in signature.parameters.values() if p.name != "self"]
        shown = ", ".join(p.name if p.default is required else f"{p.name}={p.default!r}" for p in parameters)
        raise OptionError(f"{name}: {problem} Expected {name}({shown})") from None


def names_arguments(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`function` with the error of `bind`, in place of Python's, for arguments that it does not take.

    An `OptionError` comes without the frames of this package, which say less than its message.
    """

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except TypeError:
            bind(function, args, kwargs)
            raise
        except OptionError as e:
            # without `from`: what the user was handling stays its context
            raise e.with_traceback(None)  # noqa: B904

    return call


# weakref runs finalizers of this package; the others are code that torch or Python generates. A user's code may have a
# name in brackets, too: a cell of a notebook, `python -c`
_LIBRARY_FILES = (PACKAGE, TORCH, weakref.__file__, "<eval_with_key>", "<frozen ", "<torch_package")


def is_library_file(file: str) -> bool:
    return file.startswith(_LIBRARY_FILES)


def user_frame(frame: FrameType | None) -> tuple[FrameType | None, int]:
    """The innermost frame of the user's code, from `frame` outwards, and how many frames are skipped before it."""
    skipped = 0
    while frame is not None:
        file = frame.f_code.co_filename
        # AOTAutograd 2.15 gives the code that it generates the file name that `python -c` gives the user's
        generated = file == "<string>" and frame.f_globals.get("__name__") != "__main__"
        if not (generated or is_library_file(file)):
            break
        frame, skipped = frame.f_back, skipped + 1
    return frame, skipped


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line of the user's code."""
    _, skipped = user_frame(sys._getframe())
    warnings.warn(message, category, stacklevel=skipped + 1)


def error_behind(e: BaseException | None, kind: type[_Error]) -> _Error | None:
    """`e`, or the nearest error of class `kind` that it wraps or was raised from; None without one."""
    while e is not None and not isinstance(e, kind):
        e = getattr(e, "inner_exception", None) or e.__cause__ or e.__context__
    return e


def unwrapped(e: Exception) -> AotHooksError | None:
    """The error of this package that Dynamo has wrapped in `e`, if there is one."""
    wrapped = getattr(e, "inner_exception", None) or e.__cause__
    return wrapped if isinstance(wrapped, AotHooksError) else None
