"""Writes what values say as text, part by part: functions, objects, containers, modules, each by value and in depth.

      Walker().all_of(hook) --> out         ["function:9f..", "int:3", "global:SCALE", "float:0.5"]
                            --> bindings, holders, tensors, may_change       by which to tell that it still says so

See content.py for what counts. `examine` overrides what must outlive the process, `pending` looks at what is met.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import hashlib
import logging
import threading
import types
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .bytecode import code_digest
from .definitions import write_class, write_graph
from .held import NOT_BOUND, Binding, Holder, weakly
from .hook import Hook
from .kinds import (
    ATOMS,
    CONTAINERS,
    PARTS,
    beside_fields,
    buffer,
    is_bound,
    public_state,
    slots,
    stays,
    torch_name,
)
from .reached import Reached, cached_properties, members, reads
from .reached_globals import Found, found_by_names, home_of, is_library, write_globals
from .tensor_digest import tensor_digest
from .unordered import in_order, labels

__all__ = ["Walker"]

_LONGEST_PATH = 3  # `self.trainer.cfg.dtype`
_OF_CLASSES = (types.FunctionType, property, staticmethod, classmethod)


class Walker:
    """Writes the content of values as text, part by part; `examine` overrides what must outlive the process."""

    most_levels = 40  # each takes up to eight frames, and Dynamo's stand below

    def __init__(self) -> None:
        self.out: list[str] = []
        self.seen: dict[int, int] = {}
        self.methods: dict[tuple[int, int], int] = {}
        self.keep: list[Any] = []  # what is made on the way must not give its id to another
        self.depth = 0  # in how many functions and classes: those inside may be called with keywords
        self.level = 0  # in how many values
        self.later: list[tuple[Any, Any]] = []  # values too deep to go on from there, and the state to read them in
        self.may_change = False
        self.bindings: list[Binding] = []
        self.tensors: list[tuple[weakref.ref[torch.Tensor], str]] = []
        self.holders: list[Holder] = []
        self.codes: dict[types.CodeType, None] = {}  # of all functions in it
        self.held: set[str] = set()  # strings, which may be names
        self.modules: dict[int, tuple[types.ModuleType, Any]] = {}  # Python's, reached as values, and in which state
        self.any_module: Any = None  # in which state it reached for modules by names
        self.caching: dict[int, tuple[Any, Any]] = {}  # objects with cached properties, and in which state

    def digest(self) -> str:
        return hashlib.sha256("\x00".join(self.out).encode()).hexdigest()[:32]

    def all_of(self, *values: Any) -> None:
        """Write `values`, the first to be written."""
        self.inner(*values)
        self.rest()
        known: set[tuple[int, str]] = set()
        while more := [found for found in self.by_names() if (id(found[0]), found[1]) not in known]:
            for holder, name, value, state in more:
                known.add((id(holder), name))
                self.back_to(state)
                self.out.append(f"by name:{name}")
                self.inner(value)
            self.rest()

    def rest(self) -> None:
        while self.later:
            value, state = self.later.pop(0)
            self.back_to(state)
            self.out.append("later")
            self.walk(value)

    def by_names(self) -> list[Found]:
        """What functions in it may read by the names they hold: attributes of modules that they have as values, cached
        properties of objects that count as a whole. Each with its holder, and the state that this was met in."""
        return found_by_names(self)

    def state(self) -> Any:
        return self.depth

    def back_to(self, state: Any) -> None:
        self.depth = state

    def inner(self, *values: Any) -> None:
        for value in values:
            self.walk(value)

    def walk(self, value: Any) -> None:
        kind = type(value)
        if kind in ATOMS:
            self.out.append(f"{kind.__name__}:{value!r}")
            if kind is str:
                self.held.add(value)
        elif id(value) in self.seen:
            self.out.append(f"again:{self.seen[id(value)]}")
        elif self.level == self.most_levels:
            self.out.append("see later")
            self.later.append((value, self.state()))
        else:
            self.seen[id(value)] = len(self.seen)
            self.keep.append(value)
            self.level += 1
            self.new(value, kind)
            self.level -= 1

    def new(self, value: Any, kind: type) -> None:
        """A value that is no atom and was not met before."""
        out, inner = self.out, self.inner
        if kind in (dict, list):
            self.holders.append(Holder(value))
        elif not stays(value):
            self.may_change = True
        if kind is types.FunctionType:
            self.function(value)
        elif kind is types.MethodType:
            self.method(value)
        elif kind is Reached:
            self.reached(value)
        elif kind is types.CodeType:
            out.append(code_digest(value))
        elif kind is types.CellType:
            self.cell(value)
        elif isinstance(value, functools.partial):
            out.append("partial")
            self.holders.append(Holder(value))
            inner(value.func, value.args)
            self.named(value.keywords)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType) and is_bound(value):
            out.append(f"bound {value.__name__}")  # `table.get`, `scale.mul`
            inner(kind, value.__self__)
        elif isinstance(value, torch.Tensor):
            self.tensor(value)
        elif isinstance(value, tuple | list):
            out.append(f"{kind.__module__}.{kind.__qualname__}:{len(value)}")
            inner(*(list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)))
            self.derived(value, kind)
        elif isinstance(value, dict | types.MappingProxyType):
            out.append(f"dict:{len(value)}")
            bases: tuple[Any, ...] = (collections.OrderedDict, dict, types.MappingProxyType)
            # a class's own `items()` is code of the user
            known = next(c for c in bases if isinstance(value, c))
            for k, v in known.items(value):
                inner(k, v)
            self.derived(value, kind)
        elif isinstance(value, set | frozenset):
            self.unordered(value)
            self.derived(value, kind)
        elif isinstance(value, enum.Enum):
            out.append(f"enum:{kind.__module__}.{kind.__qualname__}.{value.name}")
            inner(value.value)
        elif kind in (torch.finfo, torch.iinfo):
            out.append(f"{kind.__name__}:{value.dtype}")
        elif isinstance(value, types.GenericAlias | types.UnionType) or kind.__module__ == "typing":
            out.append(f"annotation:{value!r}")
        elif isinstance(value, slice):
            inner(value.start, value.stop, value.step)
        elif isinstance(value, types.ModuleType):
            self.module(value)
        elif isinstance(value, type):
            self.cls(value)
        elif isinstance(value, torch.fx.GraphModule):
            self.graph_module(value)
        elif isinstance(value, torch.nn.Module):
            out.append("nn.Module")
            inner(kind, value._parameters, value._buffers, value._modules, self.but_cached(value, public_state(value)))
        elif dataclasses.is_dataclass(value):
            out.append("dataclass")
            # a hook's name says nothing about what it computes
            fields = [f.name for f in dataclasses.fields(value)]
            names = [name for name in fields if not (isinstance(value, Hook) and name == "name")]
            inner(kind)
            self.named({name: getattr(value, name) for name in names})
            self.named(self.but_cached(value, beside_fields(value, fields)))
        elif kind.__module__.split(".")[0] in ("torch", "builtins") and (name := torch_name(value)):
            self.of_torch(value, name)
        elif isinstance(value, types.BuiltinFunctionType):
            self.builtin(value)
        elif isinstance(value, collections.deque):
            out.append(f"deque:{value.maxlen}")
            inner(list(value))
            self.derived(value, kind)
        elif kind is weakref.ref:
            out.append("weak")
            inner(value())
        elif isinstance(value, logging.Logger):
            out.append(f"logger:{value.name}")  # what it writes down is no part of a tensor
        elif kind is contextvars.ContextVar:
            out.append(f"variable:{value.name}")
            inner(value.get(None))
        elif isinstance(value, threading.local):
            out.append("of this thread")
            inner(kind, dict(vars(value)))
        elif isinstance(value, int | float | complex | str | bytes):
            base: Any = next(c for c in kind.__mro__ if c in ATOMS)
            out.append(f"{base.__name__}:{base.__repr__(value)}")
            inner(kind, slots(value), getattr(value, "__dict__", {}))
        elif held := slots(value):
            out.append("object")
            inner(kind, held, self.but_cached(value, getattr(value, "__dict__", {})))
        elif hasattr(value, "__dict__") and kind.__module__ not in ("builtins", "_thread"):
            out.append("object")
            inner(kind, self.but_cached(value, vars(value)))
        elif (raw := buffer(value)) is not None:
            out.append(raw)
        else:
            self.identity(value, kind)

    def but_cached(self, value: Any, held: dict[str, Any]) -> dict[str, Any]:
        """`held` by `value`, but for cached properties, which come by their names."""
        kind: Any = type(value)
        names = cached_properties(kind)
        if names:
            self.caching[id(value)] = value, self.state()
        return {name: member for name, member in held.items() if name not in names}

    def cell(self, cell: types.CellType) -> None:
        try:
            self.inner(cell.cell_contents)
        except ValueError:
            self.out.append("empty cell")

    def named(self, values: dict[str, Any]) -> None:
        self.out.append(f"dict:{len(values)}")
        for name, value in values.items():
            self.inner(name, value)

    def method(self, value: types.MethodType) -> None:
        fn, owner = value.__func__, value.__self__
        key = (id(fn), id(owner))
        if key in self.methods:
            self.out.append(f"again method:{self.methods[key]}")
            return
        self.methods[key] = len(self.methods)
        self.keep.append(value)
        self.out.append("method")
        self.inner(fn)
        code = fn.__code__ if isinstance(fn, types.FunctionType) else None
        self.inner(Reached(owner, code, code.co_varnames[0]) if code is not None and code.co_argcount else owner)

    def reached(self, what: Reached) -> None:
        self.codes[what.code] = None
        if not self.attributes(what.value, what, ()):
            self.inner(what.value)

    def attributes(self, value: Any, what: Reached, path: tuple[str, ...]) -> bool:
        """Write those of `value`, at `path` of what is reached, that are read, if nothing else is done with it."""
        names = reads(what.code, what.name, path)
        held = self.held_by(value, names) if names is not None else None
        if held is None:
            return False
        self.out.append("reached")
        self.depth += 1
        for name, member in held:
            self.out.append("." + name)
            further = len(path) < _LONGEST_PATH and members(member, ()) is not None
            if not (further and self.attributes(member, what, (*path, name))):
                self.inner(member)
        self.depth -= 1
        return True

    def held_by(self, value: Any, names: Iterable[str]) -> list[tuple[str, Any]] | None:
        """As `members`, and notes what each is bound by."""
        held = members(value, names)
        for name, member in held or ():
            own, kind = getattr(value, "__dict__", {}), type(value)
            parts = (own, *(own[part] for part in PARTS)) if isinstance(value, torch.nn.Module) else (own,)
            of_class: Mapping[str, Any] = next((vars(c) for c in kind.__mro__ if name in vars(c)), {})
            by = next((part for part in parts if name in part and part[name] is member), None)
            if by is not None:
                self.bind(by, name, member)
            elif of_class.get(name) is member or isinstance(of_class.get(name), _OF_CLASSES):
                self.bind(of_class, name, of_class[name])
                for part in parts:
                    self.bind(part, name, NOT_BOUND)
            else:
                self.may_change = True
        return held

    def bind(self, where: Any, name: str, value: Any) -> None:
        self.bindings.append((where, name, weakly(value)))

    def derived(self, value: Any, kind: type) -> None:
        """What a container has beside its items: methods and properties of its class, attributes of its own."""
        if kind not in CONTAINERS:
            self.inner(kind, slots(value), getattr(value, "__dict__", {}), getattr(value, "default_factory", None))

    def identity(self, value: Any, kind: type) -> None:
        """What has no value to look at."""
        self.out.append(f"identity:{kind.__qualname__}:{id(value)}")

    def tensor(self, value: torch.Tensor) -> None:
        digest = tensor_digest(value)
        self.out.append(digest)
        self.tensors.append((weakref.ref(value), digest))

    def unordered(self, value: set[Any] | frozenset[Any]) -> None:
        self.out.append(f"{type(value).__name__}:{len(value)}")
        self.inner(*in_order(value, self.seen, _sketch))

    def module(self, value: types.ModuleType) -> None:
        self.out.append(f"module:{value.__name__}")
        self.modules[id(value)] = value, self.state()

    def of_torch(self, value: Any, name: str) -> None:
        self.out.append(name)

    def builtin(self, value: Any) -> None:
        self.out.append(f"builtin:{value.__module__}.{value.__qualname__}")

    def function(self, fn: types.FunctionType) -> None:
        # we call hooks and policies by position; names of parameters count of what they call themselves
        self.out.append("function:" + code_digest(fn.__code__, outermost=self.depth == 0))
        self.codes[fn.__code__] = None
        self.depth += 1
        self.inner(fn.__defaults__, fn.__kwdefaults__)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                self.bind(cell, name, cell.cell_contents)
            except ValueError:
                self.out.append("empty cell")
                self.may_change = True
                continue
            value = cell.cell_contents  # of an object that the code only reads attributes of, those
            self.inner(Reached(value, fn.__code__, name) if members(value, ()) is not None else value)
        if not is_library(home_of(fn)):  # torch's and the standard library's globals are covered by their version
            write_globals(self, fn)
            self.holders.append(Holder(fn))  # tools that load code anew, as IPython's, put it into the function
            if vars(fn):
                self.holders.append(Holder(vars(fn)))
                self.inner({k: v for k, v in vars(fn).items() if k != "__wrapped__"})
        self.depth -= 1

    def bound(self, where: dict[str, Any], name: str) -> None:
        """`name` of the namespace `where` is read."""

    def missing(self, name: str, fn: types.FunctionType) -> None:
        """`name` in the code of `fn` is no global of it: of Python itself, imported inside ("import x"), or unknown."""
        self.out.append("not a global")

    def through(self, module: types.ModuleType, attribute: str) -> bool:
        """Whether to go on with the value of `module.attribute`, which is named already."""
        return not is_library(module.__name__)

    def cls(self, cls: type) -> None:
        write_class(self, cls)

    def graph_module(self, gm: torch.fx.GraphModule) -> None:
        write_graph(self, gm)

    def called(self, node: torch.fx.Node) -> None:
        self.inner(node.target)


class _Sketch(Walker):
    """What a member of a set says, to put it in order: sets in it to a depth of `sets` only, and nothing by address."""

    most_levels = 8  # it is made in the middle of another walk

    def __init__(self, sets: int) -> None:
        super().__init__()
        self.sets = sets

    def identity(self, value: Any, kind: type) -> None:
        self.out.append(f"identity:{kind.__qualname__}")

    def unordered(self, value: set[Any] | frozenset[Any]) -> None:
        members = sorted(_sketch(self.sets - 1, v) for v in value) if self.sets else labels(value)
        self.out.append(f"{type(value).__name__}:{members}")


def _sketch(sets: int, value: Any) -> str:
    walker = _Sketch(sets)
    walker.all_of(value)
    return walker.digest()
