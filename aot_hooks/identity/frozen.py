"""A hook or policy as text of its frozen parts, and the functions in it that are not frozen.

      larger_than(1024, float8())         "_LargerThan(nbytes=1024, hook=Hook(pack=_Pack(...), ...))"
      larger_than(1024, Hook("h", f, g))  "... own[3, 4] ..."   and the hook: a probe compares its functions

Frozen are dataclasses and functions of this package, plain values, and graphs. A graph may be changed in place, so a
text with a graph in it is made anew each time.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import operator
import re
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch

from ..torch_private import values as torch_values
from ..torch_private.values import HigherOrderOperator, is_operator
from .canonical import canonical
from .memo import Memo

_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
PLAIN = (type(None), bool, int, float, complex, str, bytes, *_TORCH)
_PACKAGE = __name__.split(".")[0]
_OWN = "\0own"  # in no text of plain values
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Description:
    """A hook or policy by its parts."""

    text: str  # equal for equal frozen parts; a function of the user's is in it as the number of its code
    hooks: tuple[Any, ...]  # those that probes must compare: traced, without `cache_hash`, with functions of the user's
    graphs: tuple[Any, ...]  # traced hooks without `cache_hash` whose functions are graphs
    functions: tuple[Any, ...]  # functions of the user's that belong to no hook's pack and unpack: policies, `declines`

    @property
    def frozen(self) -> bool:
        """Whether the text describes all of it, for good."""
        return not (self.hooks or self.graphs or self.functions)

    @property
    def own(self) -> bool:
        """Whether functions or graphs of the user's are in it, also eager ones and those with a `cache_hash`."""
        return _OWN in self.text

    @property
    def portable(self) -> str:
        """The text without the numbers of this process."""
        return re.sub(f"{_OWN}\\w+", "own", self.text)


_known: Memo[Description] = Memo()


def described(rule: Any) -> Description:
    """The description of a hook or policy; cached for those of the library."""
    known = _known.get(rule)
    if known is not None:
        return known
    parts = _Describer()
    text = parts.text(rule)
    description = Description(text, tuple(parts.hooks), tuple(parts.graphs), tuple(parts.functions))
    if description.frozen and type(rule).__module__.split(".")[0] == _PACKAGE:
        _known.set(rule, description)
    return description


class _Describer:
    def __init__(self) -> None:
        self.hooks: list[Any] = []
        self.graphs: list[Any] = []
        self.functions: list[Any] = []
        self.has_graph = False

    def function(self, fn: Any) -> str:
        """The text of a hook's function, which may be a graph."""
        graph = _graph_text(fn) if isinstance(fn, torch.fx.GraphModule) else None
        self.has_graph |= graph is not None
        return self.text(fn) if graph is None else f"{_OWN}{hashlib.sha256(graph.encode()).hexdigest()}"

    def text(self, value: Any) -> str:
        if isinstance(value, PLAIN) or is_operator(value):
            return f"{type(value).__name__}:{value!r}"
        if isinstance(value, tuple | list | frozenset):
            return f"{type(value).__name__}({', '.join(map(self.text, value))})"
        if isinstance(value, types.FunctionType) and is_package_object(value):
            return f"{value.__module__}.{value.__qualname__}"
        if dataclasses.is_dataclass(value) and is_package_object(type(value)):
            if hasattr(value, "cache_hash"):
                return self.hook(value)
            fields = (f for f in dataclasses.fields(value) if f.compare)
            named = (f"{f.name}={self.text(getattr(value, f.name))}" for f in fields)
            return f"{type(value).__qualname__}({', '.join(named)})"
        self.functions.append(value)
        return _own(value)

    def hook(self, hook: Any) -> str:
        """The text of a hook: of its functions or graphs, or of their code alone where no probe compares them."""
        inside = _Describer()
        if hook.eager or hook.cache_hash is not None:
            text = f"{_own(hook.pack)} {_own(hook.unpack)} {hook.cache_hash!r}"
        else:
            text = f"{inside.function(hook.pack)} {inside.function(hook.unpack)}"
        own = [hook] if inside.functions else []  # functions of this hook, not of a hook inside of it
        self.hooks += (each for each in (*own, *inside.hooks) if all(each is not other for other in self.hooks))
        self.graphs += [hook] if inside.has_graph else inside.graphs
        rest = [f.name for f in dataclasses.fields(hook) if f.name not in ("name", "pack", "unpack", "cache_hash")]
        return f"Hook({text}, {', '.join(f'{n}={self.text(getattr(hook, n))}' for n in rest)})"


def _own(fn: Any) -> str:
    return f"{_OWN}{number_of(code_of(fn))}"


def is_package_object(value: Any) -> bool:
    """Whether this package has the class or function `value` under its name, and so defines it in its source."""
    module = value.__module__ or ""
    found: Any = sys.modules.get(module) if module.startswith(f"{_PACKAGE}.") else None
    for name in value.__qualname__.split(".") if found is not None else ():
        found = getattr(found, name, None)
    return found is value


def code_of(fn: Any) -> Any:
    """The code of a function, which stays the same when a `def` or lambda runs again; the class of another object."""
    if isinstance(fn, functools.partial):
        return code_of(fn.func)
    if isinstance(fn, types.BuiltinFunctionType):
        return fn
    return getattr(getattr(fn, "__func__", fn), "__code__", type(fn))


@functools.lru_cache(maxsize=1024)
def number_of(code: Any) -> int:
    """A number for a code object or class, the same for equal code, while the cache has it."""
    return next(_numbers)


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)
_ATTRIBUTES = (torch.Tensor, torch.fx.GraphModule, bool, int, float, str, torch.dtype, type(None))
_LIBRARIES = {"torch", "_operator", "operator", "math", "builtins"}


def _graph_text(gm: torch.fx.GraphModule) -> str | None:
    """The nodes, constants and training mode of `gm`, without names: equal texts compute the same.

    None if the graph calls a function or module of the user's: Dynamo traces it like any other function.
    """
    for graph in (module for module in gm.modules() if isinstance(module, torch.fx.GraphModule)):
        for node in graph.graph.nodes:
            if node.op == "call_module" or (node.op == "call_function" and not _is_library(node.target)):
                return None
            if node.op == "get_attr" and not isinstance(operator.attrgetter(str(node.target))(graph), _ATTRIBUTES):
                return None
    kind = type(gm).__bases__[0].__qualname__
    return "\n".join([f"{kind} {gm.training} {torch_values.pytree_specs(gm)}", *canonical(gm, one_trace=False)])


def _is_library(target: Any) -> bool:
    if is_operator(target) or isinstance(target, HigherOrderOperator):
        return True
    return isinstance(target, _FUNCTIONS) and (target.__module__ or "torch").split(".")[0] in _LIBRARIES
