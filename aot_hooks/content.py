"""The content of a hook, as a digest: equal for functions that say the same, also when they are made anew.

      def make(k):                      content(make(3)) == content(make(3))
          return lambda x: x * k        content(make(3)) != content(make(4))

A function is its bytecode, constants, defaults, closure and the globals it names, each by value and in depth. Names of
its own locals and parameters, its file and its lines are left out: renaming changes nothing. Tensors count by their
bytes, modules by code and state, objects by class and attributes (reached.py: by which), containers by items and, if of
a class of their own, by that as well; what has no value to look at counts by identity. How deeply things are nested
makes no difference. Of a Python module that is reached as a value (`import cfg as c`, `getattr(cfg, "SCALE")`) those
attributes count whose names stand in the code or are held as strings; all its data, where code makes names up.

Runs on each entry of a context, so code objects and tensors are digested once.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import hashlib
import importlib
import importlib.util
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .bytecode import Import, chains, code_digest, computes_names, imports, words
from .errors import HookContractError
from .hook import Hook
from .reached import Reached, cached, cached_properties, members, reads
from .tensor_digest import tensor_digest

__all__ = ["Content", "Walker", "content", "home_of", "is_library", "read"]

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), torch.dtype, torch.device)
_LIBRARIES = ("aot_hooks", "torch", "functools", "contextlib", "math", "operator", "collections", "logging")


@dataclasses.dataclass(frozen=True)
class Content:
    """What was read of a value.

    Attributes:
        digest: sha256, 32 hex digits.
        bindings: variables, globals and attributes that it reaches by: (cell or namespace, name, what is bound).
        tensors: that it holds, and their digests.
        holders: dicts, lists, classes, functions and partials in it, and what they held.
        may_change: whether anything else in it can be changed, now that it is made.
        writes_unseen: whether its code names what writes to a tensor past autograd's versions (`x.data`).
    """

    digest: str
    bindings: tuple[tuple[Any, str, Any], ...]
    tensors: tuple[tuple[weakref.ref[torch.Tensor], str], ...]
    holders: tuple[_Holder, ...]
    may_change: bool
    writes_unseen: bool

    def is_still(self, *values: Any) -> bool:
        """Whether `values`, of which this was read, say the same now."""
        if not self.may_change and all(map(_bound_still, self.bindings)) and all(map(_Holder.is_still, self.holders)):
            if all((x := ref()) is not None and tensor_digest(x) == digest for ref, digest in self.tensors):
                return True
        return content(*values) == self.digest


def content(*values: Any) -> str:
    """The digest of `values`. Raises `HookContractError` if sets are nested hundreds deep."""
    return read(*values).digest


def read(*values: Any) -> Content:
    """As `content`, and what else is known of it."""
    walker = Walker()
    try:
        walker.all_of(*values)
    except RecursionError:  # sets in sets in sets: each is a digest of its own
        raise HookContractError(
            "a hook or policy holds sets in sets nested too deeply to be read; expected a few levels; "
            "lists, tuples and dicts may be nested as deeply as you like"
        ) from None
    unseen = any(not _WRITES_UNSEEN.isdisjoint(words(code)) for code in walker.codes)
    return Content(
        walker.digest(), tuple(walker.bindings), tuple(walker.tensors), tuple(walker.holders), walker.may_change, unseen
    )


class _Holder:
    """What a dict, list, class, function or partial holds: the objects, not what these say."""

    __slots__ = ("held", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.held = [_weakly(x) for x in _held(value)]

    def is_still(self) -> bool:
        now = _held(self.value)
        if len(now) != len(self.held):
            return False
        for x, held in zip(now, self.held, strict=True):
            if x is not held and not (type(held) is weakref.ref and x is held()):
                return False
        return True


def _held(value: Any) -> tuple[Any, ...]:
    if isinstance(value, type):
        return (*value.__bases__, *vars(value), *vars(value).values())
    if isinstance(value, types.FunctionType):
        return value.__code__, value.__defaults__, value.__kwdefaults__
    if isinstance(value, functools.partial):
        return (*value.keywords, *value.keywords.values())
    return tuple(value) if isinstance(value, list) else (*value, *value.values())


def _weakly(x: Any) -> Any:
    return weakref.ref(x) if isinstance(x, torch.Tensor | torch.nn.Module) else x


def _bound_still(binding: tuple[Any, str, Any]) -> bool:
    where, name, value = binding
    if isinstance(where, types.CellType):
        try:
            now = where.cell_contents
        except ValueError:
            return False
    else:
        now = where.get(name, _NOT_BOUND)
    return (value() if isinstance(value, weakref.ref) else value) is now


_NOT_BOUND = object()


class Walker:
    """Writes the content of values as text, part by part; `examine` overrides what must outlive the process."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.seen: dict[int, int] = {}
        self.methods: dict[tuple[int, int], int] = {}
        self.keep: list[Any] = []  # what is made on the way must not give its id to another
        self.depth = 0  # in how many functions and classes: those inside may be called with keywords
        self.level = 0  # in how many values
        self.later: list[tuple[Any, Any]] = []  # values too deep to go on from there, and the state to read them in
        self.may_change = False
        self.bindings: list[tuple[Any, str, Any]] = []
        self.tensors: list[tuple[weakref.ref[torch.Tensor], str]] = []
        self.holders: list[_Holder] = []
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

    def by_names(self) -> list[tuple[Any, str, Any, Any]]:
        """What functions in it may read by the names they hold: attributes of modules that they have as values, cached
        properties of objects that count as a whole. Each with its holder, and the state that this was met in."""
        if not self.modules and self.any_module is None and not self.caching:
            return []
        names = self.held.union(*map(words, self.codes)) | {"__getattr__"}
        if self.any_module is not None:
            named = (sys.modules.get(name) for name in sorted(names) if not _is_standard(name))
            self.modules.update({id(m): (m, self.any_module) for m in named if isinstance(m, types.ModuleType)})
        by_any_name = any(map(computes_names, self.codes))
        found = []
        for module, state in self.modules.values():
            if not is_library(module.__name__):
                held = vars(module)
                found += [(module, name, held[name], state) for name in _may_read(module, names, by_any_name)]
        for value, state in self.caching.values():
            kind: Any = type(value)
            for name in sorted(cached_properties(kind) & names):
                with contextlib.suppress(LookupError):
                    found.append((value, name, cached(value, name), state))
        return found

    def state(self) -> Any:
        return self.depth

    def back_to(self, state: Any) -> None:
        self.depth = state

    def inner(self, *values: Any) -> None:
        for value in values:
            self.walk(value)

    def walk(self, value: Any) -> None:
        kind = type(value)
        if kind in _ATOMS:
            self.out.append(f"{kind.__name__}:{value!r}")
            if kind is str:
                self.held.add(value)
        elif id(value) in self.seen:
            self.out.append(f"again:{self.seen[id(value)]}")
        elif self.level == _MOST_LEVELS:
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
            self.holders.append(_Holder(value))
        elif (
            kind not in _STAYS
            and not isinstance(value, torch.fx.GraphModule)
            and not (isinstance(value, type) or _is_frozen(value))
        ):
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
            _cell(value, out, inner)
        elif isinstance(value, functools.partial):
            out.append("partial")
            self.holders.append(_Holder(value))
            inner(value.func, value.args)
            self.named(value.keywords)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType) and _bound(value):
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
            inner(kind, value._parameters, value._buffers, value._modules, self.but_cached(value, _public_state(value)))
        elif dataclasses.is_dataclass(value):
            out.append("dataclass")
            # a hook's name says nothing about what it computes
            fields = [f.name for f in dataclasses.fields(value)]
            names = [name for name in fields if not (isinstance(value, Hook) and name == "name")]
            inner(kind)
            self.named({name: getattr(value, name) for name in names})
            self.named(self.but_cached(value, _beside_fields(value, fields)))
        elif kind.__module__.split(".")[0] in ("torch", "builtins") and (name := _torch_name(value)):
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
            base: Any = next(c for c in kind.__mro__ if c in _ATOMS)
            out.append(f"{base.__name__}:{base.__repr__(value)}")
            inner(kind, _slots(value), getattr(value, "__dict__", {}))
        elif slots := _slots(value):
            out.append("object")
            inner(kind, slots, self.but_cached(value, getattr(value, "__dict__", {})))
        elif hasattr(value, "__dict__") and kind.__module__ not in ("builtins", "_thread"):
            out.append("object")
            inner(kind, self.but_cached(value, vars(value)))
        elif (raw := _buffer(value)) is not None:
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
            parts = (own, *(own[part] for part in _PARTS)) if isinstance(value, torch.nn.Module) else (own,)
            of_class: Mapping[str, Any] = next((vars(c) for c in kind.__mro__ if name in vars(c)), {})
            by = next((part for part in parts if name in part and part[name] is member), None)
            if by is not None:
                self.bind(by, name, member)
            elif of_class.get(name) is member or isinstance(of_class.get(name), _OF_CLASSES):
                self.bind(of_class, name, of_class[name])
                for part in parts:
                    self.bind(part, name, _NOT_BOUND)
            else:
                self.may_change = True
        return held

    def bind(self, where: Any, name: str, value: Any) -> None:
        self.bindings.append((where, name, _weakly(value)))

    def derived(self, value: Any, kind: type) -> None:
        """What a container has beside its items: methods and properties of its class, attributes of its own."""
        if kind not in _CONTAINERS:
            self.inner(kind, _slots(value), getattr(value, "__dict__", {}), getattr(value, "default_factory", None))

    def identity(self, value: Any, kind: type) -> None:
        """What has no value to look at."""
        self.out.append(f"identity:{kind.__qualname__}:{id(value)}")

    def tensor(self, value: torch.Tensor) -> None:
        digest = tensor_digest(value)
        self.out.append(digest)
        self.tensors.append((weakref.ref(value), digest))

    def unordered(self, value: set[Any] | frozenset[Any]) -> None:
        self.out.append(f"{type(value).__name__}:{sorted(content(v) for v in value)}")

    def module(self, value: types.ModuleType) -> None:
        self.out.append(f"module:{value.__name__}")
        self.modules[id(value)] = value, self.state()

    def imported(self, what: Import, fn: types.FunctionType) -> None:
        """A module that `fn` imports when it runs. Imported now, it is the same to all who look later."""
        self.may_change = True
        try:
            package = fn.__globals__.get("__package__") or ""
            name = importlib.util.resolve_name("." * what.level + what.name, package)
            if is_library(name):
                return
            module = importlib.import_module(name)
            for attribute in what.attributes:
                if not hasattr(module, attribute):
                    importlib.import_module(f"{name}.{attribute}")
        except ImportError:
            self.out.append("not there")
            return
        if what.attributes:
            for attribute in what.attributes:
                self.out.append("." + attribute)
                value = getattr(module, attribute)
                if not (_is_standard(name) and isinstance(value, _CODE)):
                    self.inner(value)
            return
        parts = name.split(".")
        for end in range(1, len(parts) + 1):  # "import a.b" binds a
            self.inner(sys.modules[".".join(parts[:end])])

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
            self.inner(_in_cell(cell.cell_contents, fn.__code__, name))
        if not is_library(home_of(fn)):  # torch's and the standard library's globals are covered by their version
            self.globals_of(fn)
            self.holders.append(_Holder(fn))  # tools that load code anew, as IPython's, put it into the function
            if vars(fn):
                self.holders.append(_Holder(vars(fn)))
                self.inner({k: v for k, v in vars(fn).items() if k != "__wrapped__"})
        self.depth -= 1

    def globals_of(self, fn: types.FunctionType) -> None:
        """What `fn` reaches by its globals, through modules too: `mymodule.SCALE` is the number."""
        for what in imports(fn.__code__) if not _is_standard(home_of(fn)) else ():
            self.imported(what, fn)
        for name, *rest in chains(fn.__code__):
            self.out.append("global:" + name)
            self.bound(fn.__globals__, name)
            if name in _REACH_MODULES or (name, *rest[:1]) in _REACH_MODULES:
                self.any_module, self.may_change = self.state(), True
                if name != "__import__" and name != "globals":
                    continue
            if name == "globals" and isinstance(own := sys.modules.get(home_of(fn)), types.ModuleType):
                self.module(own)
            if name not in fn.__globals__:
                self.missing(name, fn)
                continue
            value = fn.__globals__[name]
            self.bind(fn.__globals__, name, value)
            while isinstance(value, types.ModuleType) and rest and hasattr(value, rest[0]):
                self.out.append("." + rest[0])
                if not self.through(value, rest[0]):
                    break
                module, attribute = value, rest.pop(0)
                value = getattr(module, attribute)
                if attribute in vars(module):
                    self.bind(vars(module), attribute, value)
                else:  # made when it is asked for
                    self.may_change = True
            else:
                # an object by the attribute read of it: where it is used otherwise too, that is a chain of its own
                held = self.held_by(value, rest[:1]) if rest else None
                self.inner(value if held is None else held[0][1])

    def bound(self, where: dict[str, Any], name: str) -> None:
        """`name` of the namespace `where` is read."""

    def missing(self, name: str, fn: types.FunctionType) -> None:
        """`name` in the code of `fn` is no global of it: of Python itself, imported inside ("import x"), or unknown."""
        self.out.append("not a global")

    def through(self, module: types.ModuleType, attribute: str) -> bool:
        """Whether to go on with the value of `module.attribute`, which is named already."""
        return not is_library(module.__name__)

    def cls(self, cls: type) -> None:
        self.out.append(f"class:{cls.__module__}.{cls.__qualname__}")
        if is_library(cls.__module__) or cls.__module__ == "builtins":
            return
        self.holders.append(_Holder(cls))
        self.depth += 1
        self.inner(*cls.__bases__)
        for name, member in sorted(vars(cls).items()):
            member = member.__func__ if isinstance(member, staticmethod | classmethod) else member
            if isinstance(member, property):
                member = (member.fget, member.fset, member.fdel)
            elif isinstance(member, functools.cached_property):
                member = member.func
            if name == "__repr__" and dataclasses.is_dataclass(cls):
                continue  # made by dataclass, of what is not ours to read
            if issubclass(cls, tuple) and _made_by_namedtuple(member):
                continue  # of its fields' names, which are a member too
            if name not in _CLASS_BOOKKEEPING and not isinstance(member, _DESCRIPTORS):
                self.out.append("member:" + name)
                self.inner(member)
        self.depth -= 1

    def graph_module(self, gm: torch.fx.GraphModule) -> None:
        """Node by node, by position: names of nodes and placeholders are left out."""
        position = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.bind(vars(gm), "_code", vars(gm).get("_code", _NOT_BOUND))  # made anew with the code, by `recompile()`
        self.out.append("graph")

        def arg(a: Any) -> Any:
            if isinstance(a, torch.fx.Node):
                return ("node", position[a])
            if isinstance(a, tuple | list):
                return tuple(arg(x) for x in a)
            if isinstance(a, dict):
                return {k: arg(v) for k, v in a.items()}
            return a

        for node in gm.graph.nodes:
            self.out.append(node.op)
            if node.op == "get_attr":
                self.inner(_attribute(gm, node.target))
                parts = [part for part in (vars(gm), *(vars(gm)[part] for part in _PARTS)) if node.target in part]
                if len(parts) == 1:
                    self.bind(parts[0], str(node.target), parts[0][node.target])
                else:
                    self.may_change = True
            elif node.op == "call_module":
                self.inner(gm.get_submodule(str(node.target)))
            elif node.op == "call_method":
                self.out.append(str(node.target))
            elif node.op == "call_function":
                self.called(node)
            self.inner(arg(node.args))
            self.named(arg(node.kwargs))
            if "user_cache_hash" in node.meta:
                self.out.append(f"hash:{node.meta['user_cache_hash']}")

    def called(self, node: torch.fx.Node) -> None:
        self.inner(node.target)


def home_of(fn: types.FunctionType) -> str:
    """The module that `fn` was written in; `fn.__module__` may be another's, of what it wraps (`functools.wraps`)."""
    return str(fn.__globals__.get("__name__", ""))


def is_library(module: str | None) -> bool:
    """Whether `module` is covered by the version of a library that has no state of its own."""
    return (module or "").split(".")[0] in _LIBRARIES


def _is_standard(module: str) -> bool:
    return module.split(".")[0] in sys.stdlib_module_names


def _in_cell(value: Any, code: types.CodeType, name: str) -> Any:
    """What `code` has of `value`, which it calls `name`: of an object that it only reads attributes of, those."""
    return Reached(value, code, name) if members(value, ()) is not None else value


def _cell(cell: types.CellType, out: list[str], inner: Callable[..., None]) -> None:
    try:
        inner(cell.cell_contents)
    except ValueError:
        out.append("empty cell")


def _made_by_namedtuple(member: Any) -> bool:
    if isinstance(member, types.FunctionType):
        return home_of(member) == "collections" or home_of(member).startswith("namedtuple_")
    return type(member).__name__ == "_tuplegetter"


# what gives a module, or its names, to code that names no module
_REACH_MODULES = {"__import__", "globals", ("sys", "modules"), ("importlib", "import_module")}
_WRITES_UNSEEN = {
    *("data", "numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__", "to_dlpack", "from_dlpack"),
}
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
_PARTS = ("_parameters", "_buffers", "_modules")  # of nn.Module
_OF_CLASSES = (types.FunctionType, property, staticmethod, classmethod)
_STAYS = (
    torch.Tensor,
    torch.nn.Parameter,
    types.FunctionType,
    types.MethodType,
    types.CodeType,
    tuple,
    frozenset,
    functools.partial,
    slice,
)


def _is_frozen(value: Any) -> bool:
    """Whether `value` stays what it is, but for what it holds."""
    if isinstance(
        value,
        types.BuiltinFunctionType | types.MethodWrapperType | enum.Enum | torch.finfo | torch.iinfo | logging.Logger,
    ):
        return True
    if isinstance(value, types.GenericAlias | types.UnionType) or type(value).__name__.startswith("OpOverload"):
        return True
    kind = type(value)
    return dataclasses.is_dataclass(kind) and bool(kind.__dataclass_params__.frozen)  # type: ignore[attr-defined]


_LONGEST_PATH = 3  # `self.trainer.cfg.dtype`
_MOST_LEVELS = 40  # each takes up to eight frames, and Dynamo's stand below
_CONTAINERS = (tuple, list, dict, set, frozenset, types.MappingProxyType)
_CLASS_BOOKKEEPING = {
    *("__module__", "__qualname__", "__doc__", "__firstlineno__", "__static_attributes__", "_abc_impl"),
    "__orig_bases__",
}
_DESCRIPTORS = types.GetSetDescriptorType | types.MemberDescriptorType


def _slots(value: Any) -> dict[str, Any]:
    slots = {n for c in type(value).__mro__ for n, m in vars(c).items() if isinstance(m, types.MemberDescriptorType)}
    return {n: getattr(value, n) for n in sorted(slots) if hasattr(value, n)}


def _public_state(module: torch.nn.Module) -> dict[str, Any]:
    hidden = set(vars(torch.nn.Module()))
    state = {k: v for k, v in vars(module).items() if k not in hidden}
    hooks = {k: [*v.values()] for k, v in vars(module).items() if k in hidden and k.endswith("_hooks") and v}
    return state | hooks | {"training": module.training}


def _beside_fields(value: Any, fields: list[str]) -> dict[str, Any]:
    """What a dataclass's object holds beside its fields (`InitVar`, `__post_init__`)."""
    return {name: held for name, held in getattr(value, "__dict__", {}).items() if name not in fields}


def _is_data(value: Any, levels: int = 3) -> bool:
    """Numbers, strings, tensors, and plain containers of them."""
    if type(value) in _CONTAINERS and levels:
        items = [*value.values()] if isinstance(value, dict | types.MappingProxyType) else [*value]
        return all(_is_data(item, levels - 1) for item in items)
    return isinstance(value, (*_ATOMS, torch.Tensor))


def _may_read(module: types.ModuleType, names: set[str], by_any_name: bool) -> list[str]:
    """The attributes of `module` that code may read which holds `names`, and may make up others."""
    held = vars(module)
    found = names & held.keys()
    if by_any_name:
        found |= {name for name, value in held.items() if _is_data(value)}
    if _is_standard(module.__name__):  # the code is Python's; what it holds, such as os.environ, is not
        found = {name for name in found if not isinstance(held[name], _CODE)}
    return sorted(name for name in found if name == "__getattr__" or not name.startswith("__"))


def _bound(value: Any) -> bool:
    return not isinstance(value.__self__, types.ModuleType | type | types.NoneType)


def _buffer(value: Any) -> str | None:
    """An array or bytes that may change: what it holds."""
    try:
        view = memoryview(value)
        raw = hashlib.sha256(view.tobytes()).hexdigest()
    except (TypeError, ValueError, NotImplementedError):
        return None
    return None if "O" in view.format else f"buffer:{type(value).__qualname__}:{view.format}:{view.shape}:{raw}"


def _attribute(root: Any, path: str) -> Any:
    for name in str(path).split("."):
        root = getattr(root, name)
    return root


def _torch_name(value: Any) -> str | None:
    if isinstance(value, torch.memory_format | torch.layout):
        return f"torch:{value}"
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType) and name:
        return f"torch:{module}.{name}"
    text = str(value)  # OpOverload and OpOverloadPacket print as their qualified name
    return f"torch:{text}" if " at 0x" not in text and type(value).__name__.startswith("OpOverload") else None
