"""The content of a hook, as a digest: equal for functions that say the same, also when they are made anew.

      def make(k):                      content(make(3)) == content(make(3))
          return lambda x: x * k        content(make(3)) != content(make(4))

A function is its bytecode, constants, defaults, closure and the globals it names, each by value and in depth. Names of
its own locals and parameters, its file and its lines are left out: renaming changes nothing. Tensors count by their
bytes, modules by code and state, objects by class and attributes (reached.py: by which), containers by items and, if of
a class of their own, by that as well; what has no value to look at counts by identity. How deeply things are nested
makes no difference.

Runs on each entry of a context, so code objects and tensors are digested once.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import hashlib
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .bytecode import chains, code_digest
from .errors import HookContractError
from .hook import Hook
from .reached import Reached, members, reads
from .tensor_digest import tensor_digest

__all__ = ["Walker", "content", "home_of", "is_library"]

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), torch.dtype, torch.device)
_LIBRARIES = ("aot_hooks", "torch", "functools", "contextlib", "math", "operator", "collections")


def content(*values: Any) -> str:
    """A digest of `values` (sha256, 32 hex digits). Raises `HookContractError` if sets are nested hundreds deep."""
    walker = Walker()
    try:
        walker.all_of(*values)
    except RecursionError:  # sets in sets in sets: each is a digest of its own
        raise HookContractError(
            "a hook or policy holds sets in sets nested too deeply to be read; expected a few levels; "
            "lists, tuples and dicts may be nested as deeply as you like"
        ) from None
    return walker.digest()


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

    def digest(self) -> str:
        return hashlib.sha256("\x00".join(self.out).encode()).hexdigest()[:32]

    def all_of(self, *values: Any) -> None:
        """Write `values`, the first to be written."""
        self.inner(*values)
        for value, state in self.later:  # which grows meanwhile
            self.back_to(state)
            self.out.append("later")
            self.walk(value)

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
            inner(value.func, value.args, dict(value.keywords))
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
            inner(kind, value._parameters, value._buffers, value._modules, _public_state(value))
        elif dataclasses.is_dataclass(value):
            out.append("dataclass")
            # a hook's name says nothing about what it computes
            fields = [f.name for f in dataclasses.fields(value)]
            names = [name for name in fields if not (isinstance(value, Hook) and name == "name")]
            inner(kind, {name: getattr(value, name) for name in names}, _beside_fields(value, fields))
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
        elif isinstance(value, int | float | complex | str | bytes):
            base: Any = next(c for c in kind.__mro__ if c in _ATOMS)
            out.append(f"{base.__name__}:{base.__repr__(value)}")
            inner(kind, _slots(value), getattr(value, "__dict__", {}))
        elif slots := _slots(value):
            out.append("object")
            inner(kind, slots, getattr(value, "__dict__", {}))
        elif hasattr(value, "__dict__") and kind.__module__ not in ("builtins", "_thread"):
            out.append("object")
            inner(kind, dict(vars(value)))
        elif (raw := _buffer(value)) is not None:
            out.append(raw)
        else:
            self.identity(value, kind)

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
        names = reads(what.code, what.name)
        held = members(what.value, names) if names is not None else None
        if held is None:
            self.inner(what.value)
            return
        self.out.append("reached")
        self.depth += 1
        for name, member in held:
            self.out.append("." + name)
            self.inner(member)
        self.depth -= 1

    def derived(self, value: Any, kind: type) -> None:
        """What a container has beside its items: methods and properties of its class, attributes of its own."""
        if kind not in _CONTAINERS:
            self.inner(kind, _slots(value), getattr(value, "__dict__", {}), getattr(value, "default_factory", None))

    def identity(self, value: Any, kind: type) -> None:
        """What has no value to look at."""
        self.out.append(f"identity:{kind.__qualname__}:{id(value)}")

    def tensor(self, value: torch.Tensor) -> None:
        self.out.append(tensor_digest(value))

    def unordered(self, value: set[Any] | frozenset[Any]) -> None:
        self.out.append(f"{type(value).__name__}:{sorted(content(v) for v in value)}")

    def module(self, value: types.ModuleType) -> None:
        self.out.append(f"module:{value.__name__}")

    def of_torch(self, value: Any, name: str) -> None:
        self.out.append(name)

    def builtin(self, value: Any) -> None:
        self.out.append(f"builtin:{value.__module__}.{value.__qualname__}")

    def function(self, fn: types.FunctionType) -> None:
        # we call hooks and policies by position; names of parameters count of what they call themselves
        self.out.append("function:" + code_digest(fn.__code__, outermost=self.depth == 0))
        self.depth += 1
        self.inner(fn.__defaults__, fn.__kwdefaults__)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            self.inner(_in_cell(cell, fn.__code__, name))
        if not is_library(home_of(fn)):  # torch's and the standard library's globals are covered by their version
            self.globals_of(fn)
            if vars(fn):
                self.inner({k: v for k, v in vars(fn).items() if k != "__wrapped__"})
        self.depth -= 1

    def globals_of(self, fn: types.FunctionType) -> None:
        """What `fn` reaches by its globals, through modules too: `mymodule.SCALE` is the number."""
        for name, *rest in chains(fn.__code__):
            self.out.append("global:" + name)
            if name not in fn.__globals__:
                self.missing(name, fn)
                continue
            value = fn.__globals__[name]
            while isinstance(value, types.ModuleType) and rest and hasattr(value, rest[0]):
                self.out.append("." + rest[0])
                if not self.through(value, rest[0]):
                    break
                value = getattr(value, rest.pop(0))
            else:
                # an object by the attribute read of it: where it is used otherwise too, that is a chain of its own
                held = members(value, rest[:1]) if rest else None
                self.inner(value if held is None else held[0][1])

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
            elif node.op == "call_module":
                self.inner(gm.get_submodule(str(node.target)))
            elif node.op == "call_method":
                self.out.append(str(node.target))
            elif node.op == "call_function":
                self.called(node)
            self.inner(arg(node.args), arg(node.kwargs))
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


def _in_cell(cell: types.CellType, code: types.CodeType, name: str) -> Any:
    """What `code` has in `cell` by `name`: of an object that it only reads attributes of, those."""
    try:
        return Reached(cell.cell_contents, code, name) if members(cell.cell_contents, ()) is not None else cell
    except ValueError:
        return cell


def _cell(cell: types.CellType, out: list[str], inner: Callable[..., None]) -> None:
    try:
        inner(cell.cell_contents)
    except ValueError:
        out.append("empty cell")


def _made_by_namedtuple(member: Any) -> bool:
    if isinstance(member, types.FunctionType):
        return home_of(member) == "collections" or home_of(member).startswith("namedtuple_")
    return type(member).__name__ == "_tuplegetter"


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
    """What a dataclass's object holds beside its fields (`InitVar`, `__post_init__`), but for cached properties."""
    held = getattr(value, "__dict__", {})
    beside = [name for name in held if name not in fields]
    cached = functools.cached_property
    return {name: held[name] for name in beside if not isinstance(getattr(type(value), name, None), cached)}


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
