"""What a function reaches by names: its globals, through modules too, what it imports, attributes of modules it holds.

      x * GAIN + mymodule.shift(x)      write_globals: the number, the function
      import cfg; cfg.SCALE             write_imported: the module, of which what is read counts
      c = cfg; c.SCALE                  _may_read: those attributes whose names the code holds

They write into a `Walker` (walker.py), which says how.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

from .bytecode import Import, chains, computes_names, imports, words
from .kinds import is_data
from .reached import cached, cached_properties

if TYPE_CHECKING:
    from .walker import Walker

Found = tuple[Any, str, Any, Any]  # a holder, a name, what it has of that name, and the state it was met in

__all__ = ["Found", "found_by_names", "home_of", "is_library", "is_standard", "write_globals"]

_LIBRARIES = ("aot_hooks", "torch", "functools", "contextlib", "math", "operator", "collections", "logging")
# what gives a module, or its names, to code that names no module
_REACH_MODULES = {"__import__", "globals", ("sys", "modules"), ("importlib", "import_module")}
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


def home_of(fn: types.FunctionType) -> str:
    """The module that `fn` was written in; `fn.__module__` may be another's, of what it wraps (`functools.wraps`)."""
    return str(fn.__globals__.get("__name__", ""))


def is_library(module: str | None) -> bool:
    """Whether `module` is covered by the version of a library that has no state of its own."""
    return (module or "").split(".")[0] in _LIBRARIES


def is_standard(module: str) -> bool:
    return module.split(".")[0] in sys.stdlib_module_names


def write_globals(walker: Walker, fn: types.FunctionType) -> None:
    """What `fn` reaches by its globals, through modules too: `mymodule.SCALE` is the number."""
    for what in imports(fn.__code__) if not is_standard(home_of(fn)) else ():
        _write_imported(walker, what, fn)
    for name, *rest in chains(fn.__code__):
        walker.out.append("global:" + name)
        walker.bound(fn.__globals__, name)
        if name in _REACH_MODULES or (name, *rest[:1]) in _REACH_MODULES:
            walker.any_module, walker.may_change = walker.state(), True
            if name != "__import__" and name != "globals":
                continue
        if name == "globals" and isinstance(own := sys.modules.get(home_of(fn)), types.ModuleType):
            walker.module(own)
        if name not in fn.__globals__:
            walker.missing(name, fn)
            continue
        value = fn.__globals__[name]
        walker.bind(fn.__globals__, name, value)
        while isinstance(value, types.ModuleType) and rest and hasattr(value, rest[0]):
            walker.out.append("." + rest[0])
            if not walker.through(value, rest[0]):
                break
            module, attribute = value, rest.pop(0)
            value = getattr(module, attribute)
            if attribute in vars(module):
                walker.bind(vars(module), attribute, value)
            else:  # made when it is asked for
                walker.may_change = True
        else:
            # an object by the attribute read of it: where it is used otherwise too, that is a chain of its own
            held = walker.held_by(value, rest[:1]) if rest else None
            walker.inner(value if held is None else held[0][1])


def _write_imported(walker: Walker, what: Import, fn: types.FunctionType) -> None:
    """A module that `fn` imports when it runs. Imported now, it is the same to all who look later."""
    walker.may_change = True
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
        walker.out.append("not there")
        return
    if what.attributes:
        for attribute in what.attributes:
            walker.out.append("." + attribute)
            value = getattr(module, attribute)
            if not (is_standard(name) and isinstance(value, _CODE)):
                walker.inner(value)
        return
    parts = name.split(".")
    for end in range(1, len(parts) + 1):  # "import a.b" binds a
        walker.inner(sys.modules[".".join(parts[:end])])


def _may_read(module: types.ModuleType, names: set[str], by_any_name: bool) -> list[str]:
    """The attributes of `module` that code may read which holds `names`, and may make up others."""
    held = vars(module)
    found = names & held.keys()
    if by_any_name:
        found |= {name for name, value in held.items() if is_data(value)}
    if is_standard(module.__name__):  # the code is Python's; what it holds, such as os.environ, is not
        found = {name for name in found if not isinstance(held[name], _CODE)}
    return sorted(name for name in found if name == "__getattr__" or not name.startswith("__"))


def found_by_names(walker: Walker) -> list[Found]:
    """See `Walker.by_names`."""
    if not walker.modules and walker.any_module is None and not walker.caching:
        return []
    names = walker.held.union(*map(words, walker.codes)) | {"__getattr__"}
    if walker.any_module is not None:
        named = (sys.modules.get(name) for name in sorted(names) if not is_standard(name))
        walker.modules.update({id(m): (m, walker.any_module) for m in named if isinstance(m, types.ModuleType)})
    by_any_name = any(map(computes_names, walker.codes))
    found = []
    for module, state in walker.modules.values():
        if not is_library(module.__name__):
            held = vars(module)
            found += [(module, name, held[name], state) for name in _may_read(module, names, by_any_name)]
    for value, state in walker.caching.values():
        kind: Any = type(value)
        for name in sorted(cached_properties(kind) & names):
            with contextlib.suppress(LookupError):
                found.append((value, name, cached(value, name), state))
    return found
