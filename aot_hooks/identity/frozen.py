"""A hook or policy as text, as far as it is frozen, and the functions in it that are not.

      larger_than(1024, float8())       "_LargerThan(nbytes=1024, hook=Hook(pack=_Pack(...), ...))"     nothing else
      larger_than(1024, Hook("h", f, g))    "... own[3, 4] ..."     and the hook, whose functions a probe tells apart

Frozen are the dataclasses and functions of this package, plain values, and graphs (graphs.py). A graph may be changed
in place, so a text with one in it is read again each time.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch

from ..torch_private.values import is_operator
from .graph_text import graph_text
from .memo import Memo

__all__ = ["Description", "code_of", "described", "number_of"]

_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, *_TORCH)
_PACKAGE = __name__.split(".")[0]


@dataclass(frozen=True)
class Description:
    """What a rule is.

    Attributes:
        text: equal for equal frozen parts; functions stand in it by their code.
        hooks, graphs: the hooks in it whose functions are the user's, unless somebody answers for them; or graphs.
        functions: other functions of the user's: policies, and what declines.
    """

    text: str
    hooks: tuple[Any, ...] = ()
    graphs: tuple[Any, ...] = ()
    functions: tuple[Any, ...] = ()

    @property
    def frozen(self) -> bool:
        """Whether the text is all, and stays as it is."""
        return not (self.hooks or self.graphs or self.functions)

    @property
    def own(self) -> bool:
        """Whether functions or graphs of the user's are in it, also where a hash answers for them."""
        return _OWN in self.text

    @property
    def portable(self) -> str:
        """The text without what is told apart in this process only."""
        return re.sub(f"{_OWN}\\w+", "own", self.text)


def described(rule: Any) -> Description:
    """The description of a hook or policy; of a hook of the library it is found once."""
    known = _known.get(rule)
    if known is not None:
        return known
    found = _Describer()
    text = found.text(rule)
    description = Description(text, tuple(found.hooks), tuple(found.graphs), tuple(found.functions))
    if description.frozen and type(rule).__module__.split(".")[0] == _PACKAGE:
        _known.set(rule, description)
    return description


_known: Memo[Description] = Memo()


class _Describer:
    def __init__(self) -> None:
        self.hooks: list[Any] = []
        self.graphs: list[Any] = []
        self.functions: list[Any] = []
        self.has_graph = False

    def function(self, fn: Any) -> str:
        """A function of a hook, which may be a graph."""
        graph = graph_text(fn) if isinstance(fn, torch.fx.GraphModule) else None
        self.has_graph |= graph is not None
        return self.text(fn) if graph is None else f"{_OWN}{hashlib.sha256(graph.encode()).hexdigest()}"

    def text(self, value: Any) -> str:
        if isinstance(value, _PLAIN) or is_operator(value):
            return f"{type(value).__name__}:{value!r}"
        if isinstance(value, tuple | list | frozenset):
            return f"{type(value).__name__}({', '.join(map(self.text, value))})"
        if isinstance(value, types.FunctionType) and _ours(value):
            return f"{value.__module__}.{value.__qualname__}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type) and _ours(type(value)):
            if hasattr(value, "cache_hash"):
                return self.hook(value)
            named = (f"{f.name}={self.text(getattr(value, f.name))}" for f in dataclasses.fields(value))
            return f"{type(value).__qualname__}({', '.join(named)})"
        self.functions.append(value)
        return _own(value)

    def hook(self, hook: Any) -> str:
        """A hook is its graphs or its functions; one that its author answers for is the code of its functions."""
        inside = _Describer()
        if hook.eager or hook.cache_hash is not None:
            text = f"{_own(hook.pack)} {_own(hook.unpack)} {hook.cache_hash!r}"
        else:
            text = f"{inside.function(hook.pack)} {inside.function(hook.unpack)}"
        own = [hook] if inside.functions else []  # functions of this hook, not of one inside of it
        self.hooks += (each for each in (*own, *inside.hooks) if all(each is not other for other in self.hooks))
        self.graphs += [hook] if inside.has_graph else inside.graphs
        rest = [f.name for f in dataclasses.fields(hook) if f.name not in ("name", "pack", "unpack", "cache_hash")]
        return f"Hook({text}, {', '.join(f'{n}={self.text(getattr(hook, n))}' for n in rest)})"


_OWN = "\0own"  # which no text of plain values holds


def _own(fn: Any) -> str:
    return f"{_OWN}{number_of(code_of(fn))}"


def _ours(value: Any) -> bool:
    """Whether a class or function is this package's own and found there by its name, so that its source says it all."""
    module = sys.modules.get(value.__module__ or "")
    if module is None or module.__name__.split(".")[0] != _PACKAGE:
        return False
    found: Any = module
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def code_of(fn: Any) -> Any:
    """What stays the same of a function that is made anew: its code; of an object its class."""
    if isinstance(fn, functools.partial):
        return code_of(fn.func)
    if isinstance(fn, types.BuiltinFunctionType):
        return fn
    return getattr(getattr(fn, "__func__", fn), "__code__", type(fn))


@functools.lru_cache(maxsize=1024)
def number_of(code: Any) -> int:
    """A number for a code object or class, the same as long as it is remembered; of equal code it is the same."""
    return next(_numbers)


_numbers = itertools.count(1)
