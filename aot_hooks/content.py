"""The content of a hook, as a digest: equal for functions that say the same, also when they are made anew.

      def make(k):                      content(make(3)) == content(make(3))
          return lambda x: x * k        content(make(3)) != content(make(4))

A function is its bytecode, constants, defaults, closure and the globals it names, each by value and in depth. Names of
its own locals and parameters, its file and its lines are left out: renaming changes nothing. Tensors count by their
bytes, modules by code and state, objects by class and attributes; what has no value to look at counts by identity.

Runs on each entry of a context, so code objects and tensors are digested once.
"""

from __future__ import annotations

import ctypes
import dataclasses
import dis
import enum
import functools
import hashlib
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .hook import Hook

__all__ = ["Walker", "content", "home_of", "is_library"]

_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), torch.dtype, torch.device)
_LIBRARIES = ("aot_hooks", "torch", "functools", "contextlib", "math", "operator", "collections")
_tensor_digests: dict[int, tuple[weakref.ref[torch.Tensor], int | None, str]] = {}


def content(*values: Any) -> str:
    """A digest of `values` (sha256, 32 hex digits)."""
    walker = Walker()
    for value in values:
        walker.walk(value)
    return walker.digest()


class Walker:
    """Writes the content of values as text, part by part; `examine` overrides what must outlive the process."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.seen: dict[int, int] = {}
        self.keep: list[Any] = []  # what is made on the way must not give its id to another
        self.depth = 0  # in how many functions and classes: those inside may be called with keywords

    def digest(self) -> str:
        return hashlib.sha256("\x00".join(self.out).encode()).hexdigest()[:32]

    def inner(self, *values: Any) -> None:
        for value in values:
            self.walk(value)

    def walk(self, value: Any) -> None:
        kind = type(value)
        if kind in _ATOMS:
            self.out.append(f"{kind.__name__}:{value!r}")
        elif id(value) in self.seen:
            self.out.append(f"again:{self.seen[id(value)]}")
        else:
            self.seen[id(value)] = len(self.seen)
            self.keep.append(value)
            self.new(value, kind)

    def new(self, value: Any, kind: type) -> None:
        """A value that is no atom and was not met before."""
        out, inner = self.out, self.inner
        if kind is types.FunctionType:
            self.function(value)
        elif kind is types.MethodType:
            out.append("method")
            inner(value.__func__, value.__self__)
        elif kind is types.CodeType:
            out.append(_code_digest(value))
        elif kind is types.CellType:
            _cell(value, out, inner)
        elif isinstance(value, functools.partial):
            out.append("partial")
            inner(value.func, value.args, dict(value.keywords))
        elif isinstance(value, torch.Tensor):
            self.tensor(value)
        elif isinstance(value, tuple | list):
            out.append(f"{kind.__module__}.{kind.__qualname__}:{len(value)}")
            inner(*value)
        elif isinstance(value, dict | types.MappingProxyType):
            out.append(f"dict:{len(value)}")
            for k, v in value.items():
                inner(k, v)
        elif kind in (set, frozenset):
            self.unordered(value)
        elif isinstance(value, enum.Enum):
            out.append(f"enum:{kind.__module__}.{kind.__qualname__}.{value.name}")
            inner(value.value)
        elif kind in (torch.finfo, torch.iinfo):
            out.append(f"{kind.__name__}:{value.dtype}")
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
        else:
            self.identity(value, kind)

    def identity(self, value: Any, kind: type) -> None:
        """What has no value to look at."""
        self.out.append(f"identity:{kind.__qualname__}:{id(value)}")

    def tensor(self, value: torch.Tensor) -> None:
        self.out.append(_tensor_digest(value))

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
        self.out.append("function:" + _code_digest(fn.__code__, outermost=self.depth == 0))
        self.depth += 1
        self.inner(fn.__defaults__, fn.__kwdefaults__, *(fn.__closure__ or ()))
        if not is_library(home_of(fn)):  # torch's and the standard library's globals are covered by their version
            self.globals_of(fn)
            if vars(fn):
                self.inner({k: v for k, v in vars(fn).items() if k != "__wrapped__"})
        self.depth -= 1

    def globals_of(self, fn: types.FunctionType) -> None:
        """What `fn` reaches by its globals, through modules too: `mymodule.SCALE` is the number."""
        for name, *rest in _chains(fn.__code__):
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
                self.inner(value)

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


def _cell(cell: types.CellType, out: list[str], inner: Callable[..., None]) -> None:
    try:
        inner(cell.cell_contents)
    except ValueError:
        out.append("empty cell")


_CLASS_BOOKKEEPING = {"__module__", "__qualname__", "__doc__", "__firstlineno__", "__static_attributes__", "_abc_impl"}
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


@functools.lru_cache(maxsize=4096)
def _chains(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Globals that `code` and the functions in it name, each with the attributes read off it; and "import x"."""
    found: dict[tuple[str, ...], None] = {}
    current: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and current:
            current.append(str(instruction.argval))
            continue
        if instruction.opname in ("EXTENDED_ARG", "CACHE"):
            continue
        if current:
            found[tuple(current)] = None
            current = []
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
            current = [str(instruction.argval)]
        elif instruction.opname == "IMPORT_NAME":
            found[(f"import {instruction.argval}",)] = None
    if current:
        found[tuple(current)] = None
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found.update(dict.fromkeys(_chains(const)))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _code_digest(code: types.CodeType, outermost: bool = True) -> str:
    return hashlib.sha256(_code_text(code, outermost).encode()).hexdigest()


def _code_text(code: types.CodeType, outermost: bool) -> str:
    consts = []
    doc = code.co_consts[0] if code.co_consts and isinstance(code.co_consts[0], str) else None
    for i, const in enumerate(code.co_consts):
        if isinstance(const, types.CodeType):
            consts.append(_code_text(const, outermost=False))
        elif i == 0 and doc is not None:
            consts.append("docstring or first string:" + doc)
        elif i > 0 and _names_function(const, code.co_consts[i - 1]):
            consts.append("name of a function")
        else:
            consts.append(
                f"{type(const).__name__}:{sorted(map(repr, const)) if isinstance(const, frozenset) else repr(const)}"
            )
    # an inner function may be called with keywords, so there its parameters' names count
    parameters = () if outermost else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    head = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_names, parameters)
    return repr((head, code.co_code.hex(), consts))


def _names_function(const: Any, before: Any) -> bool:
    """Whether `const` is there for the name of the function whose code is `before`, as Python 3.10 stores it."""
    if sys.version_info >= (3, 11) or not isinstance(before, types.CodeType):
        return False
    return isinstance(const, str) and const.endswith("<locals>." + before.co_name)


def _tensor_digest(x: torch.Tensor) -> str:
    from ._compat import is_traced_value, without_modes  # late: a digest of plain numbers needs no torch internals

    if is_traced_value(x):
        return f"traced tensor:{id(x)}"
    version = None if x.is_inference() else x._version  # what inference mode made keeps none: read it each time
    known = _tensor_digests.get(id(x))
    if known is not None and known[0]() is x and known[1] == version is not None:
        return known[2]
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout is not torch.strided:
        return f"tensor {type(x).__qualname__} {x.layout}:{id(x)}:{version}"
    with without_modes():  # a hook is digested while it is traced too: its bytes are read all the same
        raw = x.detach().cpu().contiguous() if x.device.type != "meta" else torch.empty(0)
    text = hashlib.sha256(ctypes.string_at(raw.data_ptr(), raw.nbytes) if raw.nbytes else b"").hexdigest()
    digest = f"tensor:{x.dtype}:{tuple(x.shape)}:{x.device}:{x.requires_grad}:{text}"
    if len(_tensor_digests) > 1024:
        _tensor_digests.clear()
    _tensor_digests[id(x)] = (weakref.ref(x), version, digest)
    return digest
