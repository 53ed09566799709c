"""What a function reaches of an object that it holds: `self.pack` is no other hook when `self.weight` changes.

      def pack(self, x): return x * self.scale       reads(code, "self")   ("scale",)
      def pack(self, x): return helper(self, x)      reads(code, "self")   None: the whole object counts

A bound method, a closure over `self` and a global object count by the attributes that their code reads off it, and what
methods among them read in turn. Where that is not plain to see, the whole object counts.

Source: `dis`, and how Python looks attributes up, in the standard library's documentation.
"""

from __future__ import annotations

import dis
import enum
import functools
import logging
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ._compat import without_modes

__all__ = ["Reached", "cached", "cached_properties", "members", "reads"]

# what may look at a local without naming it
_LOOKS_ABOUT = {"super", "locals", "vars", "dir", "eval", "exec"}
_OF_A_LOCAL = ("LOAD_FAST", "STORE_FAST", "DELETE_FAST", "LOAD_DEREF", "STORE_DEREF", "DELETE_DEREF", "LOAD_CLASSDEREF")


@dataclass(frozen=True, eq=False)
class Reached:
    """`value`, of which `code` has what it calls `name`, as a value that has a content."""

    value: Any
    code: types.CodeType
    name: str


@functools.lru_cache(maxsize=4096)
def reads(code: types.CodeType, name: str, path: tuple[str, ...] = ()) -> tuple[str, ...] | None:
    """The attributes that `code` and the functions in it read off their variable `name`, or off its attribute `path`
    (`self.cfg`); None if they do more with it than read attributes."""
    if "__class__" in code.co_freevars or _LOOKS_ABOUT & set(code.co_names):
        return None
    found: dict[str, None] = {}
    at = -1  # how far along `path` the value is that was just read; -1: it is none of these
    for instruction in dis.get_instructions(code):
        op, said = instruction.opname, instruction.argval
        if op in ("EXTENDED_ARG", "CACHE"):
            continue
        if at >= 0:
            if op not in ("LOAD_ATTR", "LOAD_METHOD"):
                return None
            if at == len(path):
                found[str(said)] = None
                at = -1
            else:
                at = at + 1 if said == path[at] else -1
        elif op.startswith(_OF_A_LOCAL) or op == "LOAD_FROM_DICT_OR_DEREF":
            names = said if isinstance(said, tuple) else (said,)  # Python 3.13 has two in one
            if name not in names:
                continue
            if op == "LOAD_FAST" and name in code.co_cellvars:
                continue  # the cell, for a function inside; Python 3.13
            if names[:-1].count(name) or not op.endswith(("LOAD_FAST", "LOAD_DEREF", "_BORROW", "LOAD_FAST_CHECK")):
                return None
            at = 0
    if at >= 0:
        return None
    for const in code.co_consts:
        if isinstance(const, types.CodeType) and name in const.co_freevars:
            inside = reads(const, name, path)
            if inside is None:
                return None
            found.update(dict.fromkeys(inside))
    return tuple(found)


def members(value: Any, names: Iterable[str]) -> list[tuple[str, Any]] | None:
    """The attributes of `value` called `names`, methods and properties as bound methods; None if that can't be done
    without running code of its class. That of cached properties is run: see `cached`."""
    if not _is_plain(value):
        return None
    found = []
    for name in names:
        try:
            found.append((name, _member(value, name)))
        except LookupError:
            return None
    return found


_NOT_PLAIN = (
    *(torch.Tensor, torch.fx.GraphModule, type, types.ModuleType, types.FunctionType, types.MethodType, enum.Enum),
    *(functools.partial, tuple, list, dict, set, frozenset, int, float, complex, str, bytes),
    logging.Logger,
)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    looks_up: Any = kind.__getattribute__
    if kind is types.SimpleNamespace:
        return "cache_hash" not in vars(value)
    if isinstance(value, _NOT_PLAIN) or looks_up is not object.__getattribute__:
        return False
    if kind.__module__.split(".")[0] in ("torch", "aot_hooks", "builtins") and not isinstance(value, torch.nn.Module):
        return False
    finds = torch.nn.Module.__getattr__ if isinstance(value, torch.nn.Module) else None
    if getattr(kind, "__getattr__", None) is not finds:
        return False
    return "cache_hash" not in getattr(value, "__dict__", {}) and not hasattr(kind, "cache_hash")


def _member(value: Any, name: str) -> Any:
    """Raises `LookupError` where code of the class would have to run."""
    if name.startswith("__"):
        raise LookupError(name)
    kind = type(value)
    of_class = next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), _NONE)
    if isinstance(of_class, types.MemberDescriptorType):
        return _checked(getattr(value, name, _NONE), name)
    if isinstance(of_class, property):
        return types.MethodType(_checked(of_class.fget, name), value)
    if isinstance(of_class, functools.cached_property):
        return cached(value, name)
    if hasattr(type(of_class), "__set__"):
        raise LookupError(name)
    held = getattr(value, "__dict__", {})
    if name in held:
        return held[name]
    if isinstance(of_class, types.FunctionType):
        return types.MethodType(of_class, value)
    if isinstance(of_class, staticmethod):
        return of_class.__func__
    if isinstance(of_class, classmethod):
        return types.MethodType(of_class.__func__, kind)
    if of_class is not _NONE and not hasattr(type(of_class), "__get__"):
        return of_class
    if of_class is _NONE and isinstance(value, torch.nn.Module):
        for part in (held["_parameters"], held["_buffers"], held["_modules"]):
            if name in part:
                return part[name]
    raise LookupError(name)


_NONE = object()


@functools.lru_cache(maxsize=1024)
def cached_properties(kind: Any) -> frozenset[str]:
    """The names of the `functools.cached_property` of a class."""
    return frozenset(n for c in kind.__mro__ for n, m in vars(c).items() if isinstance(m, functools.cached_property))


def cached(value: Any, name: str) -> Any:
    """What a cached property is. From its first use on it is an attribute like others, which may be written to; so it
    is used now. It would be when the hook is traced, and by then on tensors without numbers. Raises `LookupError`."""
    with without_modes():
        try:
            return getattr(value, name)
        except Exception as e:  # code of the user; the hook says so itself, if it reads it
            raise LookupError(name) from e


def _checked(found: Any, name: str) -> Any:
    if found is _NONE or found is None:
        raise LookupError(name)
    return found
