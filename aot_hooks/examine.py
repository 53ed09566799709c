"""What a hook or policy says, for keys that outlive the process: its content as text, and what of it cannot be read.

      examined(hook) --> parts     ("function:9f..", "int:3", "global:SCALE", "float:0.5")    equal in every process
                         opaque    ("operator mylib.pack",)       only a name or an address tells them: never a guess
                         foreign   True                           code of others than torch and this package takes part

Beside `content` it follows what functions reach through modules (`torch.ops.mine.pack`, `mymodule.scale`), and takes
nothing by its address. What carries a `cache_hash` (a hook, a policy, a function, an object; of a `torch.fx.wrap` leaf
stock `user_cache_hash`) has nothing opaque in it: its author answers for that, and all that can be read counts as well.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import _compat
from .reached_globals import home_of, is_library, is_standard
from .walker import Walker

__all__ = ["Examined", "examined", "foreign_operator"]

# stateless, and covered by the version of Python
_PURE = {
    *("builtins", "math", "_operator", "operator", "functools", "itertools", "collections", "typing", "dataclasses"),
    *("enum", "copy", "types", "abc", "numbers", "contextlib", "string", "re", "fractions", "decimal", "cmath"),
}
_UNREADABLE = {"eval", "exec", "globals", "locals", "open", "input", "__import__"}
# what torch registers itself; its version covers them
_TORCH_OPERATORS = {
    *("aten", "prims", "prim", "rngprims", "inductor", "inductor_prims", "quantized", "quantized_decomposed"),
    *("higher_order", "ao", "mkldnn", "mkldnn_prepacked", "onednn", "mkl", "c10d", "_c10d_functional"),
    *("_c10d_functional_autograd", "sparse", "_quantized", "debugprims", "profiler", "streams", "image", "aot_hooks"),
}  # fmt: skip


@dataclass(frozen=True)
class Examined:
    """See the module.

    Attributes:
        parts: the content, as text.
        opaque: what of it cannot be read, in words; () if all can.
        foreign: whether it holds code that is neither torch's nor this package's.
    """

    parts: tuple[str, ...]
    opaque: tuple[str, ...]
    foreign: bool

    @property
    def digest(self) -> str:
        return hashlib.sha256("\x00".join(self.parts).encode()).hexdigest()[:32]


def examined(*values: Any) -> Examined:
    """The content of `values`, see the module."""
    walker = _Examiner()
    walker.all_of(*values)
    return Examined(tuple(walker.out), tuple(dict.fromkeys(walker.opaque)), walker.foreign)


class _Examiner(Walker):
    def __init__(self) -> None:
        super().__init__()
        self.opaque: list[str] = []
        self.foreign = False
        self.answered = 0  # how many of the values around have a cache_hash

    def state(self) -> Any:
        return super().state(), self.answered

    def back_to(self, state: Any) -> None:
        super().back_to(state[0])
        self.answered = state[1]

    @contextlib.contextmanager
    def answered_for(self, said: Any) -> Iterator[None]:
        """Nothing inside is opaque, because its author answers for it by the hash `said`; None: as before."""
        if said is None:
            yield
            return
        self.out.append("cache_hash")
        self.walk(said)
        self.answered += 1
        try:
            yield
        finally:
            self.answered -= 1

    def cannot_read(self, what: str) -> None:
        self.out.append(f"opaque:{what}")
        if not self.answered:
            self.opaque.append(what)

    def new(self, value: Any, kind: type) -> None:
        if kind in (tuple, list, dict) or isinstance(value, types.ModuleType | type | torch.Tensor | torch.nn.Module):
            said = None
            if isinstance(value, torch.nn.Module):
                said = vars(value).get("cache_hash")
        else:
            said = getattr(value, "cache_hash", None)
        with self.answered_for(said):
            hidden = _hidden_base(kind)
            if hidden is not None and not isinstance(value, type):
                self.cannot_read(f"object of {kind.__module__}.{kind.__qualname__}, which is a {hidden} inside")
            super().new(value, kind)

    def identity(self, value: Any, kind: type) -> None:
        self.cannot_read(f"object of {kind.__module__}.{kind.__qualname__}")

    def tensor(self, value: torch.Tensor) -> None:
        if _compat.is_traced_value(value) or type(value) not in (torch.Tensor, torch.nn.Parameter):
            self.cannot_read(f"tensor of class {type(value).__qualname__}")
        elif value.layout is not torch.strided:
            self.cannot_read(f"tensor of layout {value.layout}")
        else:
            super().tensor(value)

    def module(self, value: types.ModuleType) -> None:
        """A module as a value: of one without state its name says all."""
        name = value.__name__
        if _is_operators(value) or not _is_pure(name):
            super().module(value)
            self.cannot_read(f"module {name}, used as a value")
        else:
            self.out.append(f"module:{name}")

    def of_torch(self, value: Any, name: str) -> None:
        if isinstance(value, types.BuiltinFunctionType):
            return self.builtin(value)
        super().of_torch(value, name)
        owner = getattr(value, "__objclass__", None)
        if owner is not None and not _is_pure(owner.__module__):
            self.cannot_read(f"method {owner.__module__}.{value.__qualname__} in C")
        if _compat.is_operator(value) and (space := str(value).split(".")[0]) not in _TORCH_OPERATORS:
            self.foreign = True
            self.cannot_read(f"operator {value}, which '{space}' registered")

    def builtin(self, value: Any) -> None:
        module, owner = value.__module__, getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType | type):
            self.out.append(f"method:{value.__name__}")
            self.walk(owner)
        elif _is_pure(module):
            super().builtin(value)
        else:
            self.foreign = True
            self.cannot_read(f"C function {module}.{value.__qualname__}")

    def function(self, fn: types.FunctionType) -> None:
        home = home_of(fn)
        if not is_library(home) and home.split(".")[0] not in _PURE:
            self.foreign = True
        super().function(fn)

    def cls(self, cls: type) -> None:
        if is_library(cls.__module__) or cls.__module__.split(".")[0] in _PURE:
            self.out.append(f"class:{cls.__module__}.{cls.__qualname__}")
            return
        self.foreign = True
        super().cls(cls)

    def missing(self, name: str, fn: types.FunctionType) -> None:
        if name.startswith("import "):
            if not _is_pure(name.removeprefix("import ")):
                self.cannot_read(f"'{name}' inside of {fn.__qualname__}")
        elif name in _UNREADABLE:
            self.cannot_read(f"{name}() in {fn.__qualname__}")

    def through(self, module: types.ModuleType, attribute: str) -> bool:
        if not _is_pure(module.__name__):
            self.foreign = True
            if is_standard(module.__name__):  # os.environ, random.random, time.time
                self.cannot_read(f"{module.__name__}.{attribute}")
                return False
        return True

    def graph_module(self, gm: torch.fx.GraphModule) -> None:
        self.foreign = True
        super().graph_module(gm)

    def called(self, node: torch.fx.Node) -> None:
        said = node.meta.get("user_cache_hash")
        if node.meta.get("is_wrapped") and said is None:
            self.cannot_read(f"torch.fx.wrap leaf '{getattr(node.target, '__name__', node.target)}'")
        with self.answered_for(said):
            super().called(node)


def foreign_operator(gm: torch.fx.GraphModule) -> str | None:
    """An operator in `gm` that torch did not register itself, nor this package; None if there is none."""
    for node in gm.graph.nodes:
        if _compat.is_operator(node.target) and str(node.target).split(".")[0] not in _TORCH_OPERATORS:
            return str(node.target)
    return None


def _is_pure(module: str | None) -> bool:
    return is_library(module) or (module or "").split(".")[0] in _PURE


def _is_operators(module: types.ModuleType) -> bool:
    """Whether `module` is `torch.ops` or `torch.ops.<space of others>`, whose attributes are made when asked for."""
    if module is torch.ops:
        return True
    return type(module) is type(torch.ops.aten) and module.__name__.split(".")[-1] not in _TORCH_OPERATORS


@functools.lru_cache(maxsize=1024)
def _hidden_base(kind: type) -> str | None:
    """The class in C that an object of `kind`, a class in Python, keeps state in that cannot be read; None if none."""
    if kind.__module__.split(".")[0] in ("torch", "builtins", "aot_hooks"):
        return None
    readable = (object, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, type)
    for base in kind.__mro__[1:]:
        if base not in readable and base.__module__.split(".")[0] not in (*_PURE, "torch", "_collections_abc"):
            in_python = any(isinstance(m, types.FunctionType) for m in vars(base).values()) or "__dict__" in vars(base)
            if not in_python:
                return f"{base.__module__}.{base.__qualname__}"
    return None
