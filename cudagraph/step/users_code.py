"""What a user's code names, and which files, modules and classes are the user's: not of torch, Python or packages."""

from __future__ import annotations

import dis
import functools
import importlib.util
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
TORCH_CLASSES = ("torch.distributions.", "torch.utils.data.dataset", "torch.nn.attention.")  # modules of such, too
MISSING = object()
CODE = (types.FunctionType, staticmethod, classmethod, property)
_OF_PYTHON = frozenset(
    "__module__ __doc__ __qualname__ __firstlineno__ __static_attributes__ __hash__ __slots__ __match_args__".split()
)
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
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes that `code` and functions inside of it use, also as strings."""
    inner = (names_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    strings = _strings_in(code) if BY_NAME.intersection(code.co_names) else ()
    return frozenset(code.co_names).union(strings, *inner)


@functools.cache
def globals_in(code: types.CodeType) -> frozenset[str]:
    """The names of globals that `code` and functions inside of it use; as strings, if it asks for all of them."""
    inner = (globals_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    named = (
        each.argval for each in dis.get_instructions(code) if each.opname.endswith(("_GLOBAL", "_NAME", "GLOBALS"))
    )
    strings = _strings_in(code) if ALL_NAMES.intersection(code.co_names) else ()
    return frozenset(named).union(strings, *inner)


def _strings_in(code: types.CodeType) -> list[str]:
    return [const for const in code.co_consts if isinstance(const, str) and const.isidentifier()]


ALL_NAMES = frozenset(("globals", "vars", "__dict__", "eval", "exec", "modules"))
BY_NAME = ALL_NAMES | {"getattr", "attrgetter", "hasattr"}


@functools.cache
def imports_of(code: types.CodeType, package: str) -> tuple[str, ...]:
    """The modules that `code` and functions inside of it import, and what they import from these, as full names."""
    found: list[str] = []
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    for level, names, each in zip(instructions, instructions[1:], instructions[2:], strict=False):
        if each.opname == "IMPORT_NAME" and level.argval <= len(package.split(".")):
            module = importlib.util.resolve_name("." * level.argval + each.argval, package)
            found += [module, *(f"{module}.{name}" for name in names.argval or ())]
    for const in code.co_consts:
        found += imports_of(const, package) if isinstance(const, types.CodeType) else ()
    return tuple(found)


def is_users_own(name: str, value: Any) -> bool:
    """Whether an attribute of a class is the user's, not one that Python adds."""
    return name[:2] != "__" or isinstance(value, CODE) or (isinstance(value, PLAIN) and name not in _OF_PYTHON)


def class_access(cls: type) -> tuple[Callable[[], list[Any]], Callable[[list[Any]], None]]:
    """Functions that return the names and values of a class, and that put them back."""
    space = vars(cls)

    def write(saved: list[Any]) -> None:
        before = dict(zip(saved[: len(saved) // 2], saved[len(saved) // 2 :], strict=True))
        for name in [name for name, x in space.items() if name not in before and is_users_own(name, x)]:
            delattr(cls, name)
        for name, value in before.items():
            if space.get(name, MISSING) is not value and is_users_own(name, value):
                setattr(cls, name, value)

    return lambda: [*space, *space.values()], write


def slots_of(cls: type) -> list[str]:
    """The attributes that a class stores in slots, private ones as Python stores them."""
    slots = vars(cls).get("__slots__", ())
    private = f"_{cls.__name__.lstrip('_')}"
    names = [slots] if isinstance(slots, str) else [*slots]
    return [private + name if name[:2] == "__" != name[-2:] else name for name in names]


def users_modules(values: Iterable[Any], names: Iterable[str]) -> list[types.ModuleType]:
    """The user's modules among `values`, and those that `names` lead to from there."""
    found: dict[int, types.ModuleType] = {}
    waiting = [*values]
    while waiting:
        value = waiting.pop()
        if id(value) not in found and is_users_module(value):
            found[id(value)] = value
            waiting += map(vars(value).get, names)
    return [*found.values()]


def is_users_module(value: Any) -> bool:
    file = vars(value).get("__file__") if isinstance(value, types.ModuleType) else None  # no lazy module is loaded
    return isinstance(file, str) and is_users(file)


def is_users_class(cls: type) -> bool:
    """Whether instances of `cls` are followed: a class of the user's, or of an installed package other than torch."""
    module: Any = cls.__module__
    if not isinstance(module, str):  # of some classes written in C
        return False
    root = module.partition(".")[0]
    if root in ("argparse", "collections", "types"):  # namespaces, and containers that are written in Python
        return True
    if module.startswith(TORCH_CLASSES):
        return True
    return root not in sys.stdlib_module_names and root not in ("torch", "builtins", "numpy", "cudagraph", "aot_hooks")
