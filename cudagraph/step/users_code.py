"""Which files and classes are the user's, and which globals a function names."""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterable
from typing import Any

import torch

NAMESPACES = ("argparse", "collections", "types")  # of Python's library: their objects hold what a user puts there
TORCH_CLASSES = ("torch.distributions.", "torch.utils.data.", "torch.nn.attention.")
_PATHS = sysconfig.get_paths()
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_AOT_HOOKS = os.path.join(os.path.dirname(_PACKAGE), "aot_hooks")
OUR_OWN = tuple(folder + os.sep for folder in (os.path.dirname(torch.__file__), _PACKAGE, _AOT_HOOKS))
NOT_THE_USERS = (
    *OUR_OWN,
    *(_PATHS[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)


@functools.cache
def is_users(filename: str) -> bool:
    """Whether a source file is the user's: not of torch, this package, Python, or an installed package."""
    return not filename.startswith(NOT_THE_USERS) and "site-packages" not in filename


@functools.cache
def globals_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals that `code` and functions inside of it use."""
    named = {each.argval for each in dis.get_instructions(code) if each.opname.endswith(("_GLOBAL", "_NAME"))}
    inner = (globals_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return tuple(sorted(named.union(*inner)))


def asks_for_types(objects: Iterable[Any]) -> bool:
    """Whether code of the user's names `type`: a function among `objects`, or a method of one's class.

    A traced number is no `float` for `type(number) is float`, and nothing else could notice that.
    """
    codes = [x for x in objects if isinstance(x, types.CodeType)]
    classes = {cls for x in objects for cls in type(x).__mro__ if is_users_class(cls)}
    for value in (value for cls in classes for value in vars(cls).values()):
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(code := getattr(function, "__code__", None), types.CodeType):
            codes.append(code)
    return any(is_users(code.co_filename) and "type" in globals_in(code) for code in codes)


def is_users_class(cls: type) -> bool:
    """Whether attributes of instances of `cls` are compared: of the user's classes, and of installed packages'."""
    module: Any = cls.__module__
    if not isinstance(module, str):  # of some classes written in C
        return False
    root = module.partition(".")[0]
    if root in NAMESPACES or module.startswith(TORCH_CLASSES):
        return True
    return root not in sys.stdlib_module_names and root not in ("torch", "builtins", "numpy", "cudagraph", "aot_hooks")


def is_users_module(module: types.ModuleType) -> bool:
    """Whether a module of Python is the user's: not of torch, this package, Python, or an installed package."""
    file = getattr(module, "__file__", None) or ""
    return is_users(file) and module.__name__.partition(".")[0] not in sys.stdlib_module_names
