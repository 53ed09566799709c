"""What the code of a function says: a digest of it, and what it reaches by its globals.

      x * GAIN + mymodule.shift(x)  --code_digest--> bytecode, constants, names of what it calls; no locals, no lines
                                    --chains-------> ("GAIN",), ("mymodule", "shift")
      import cfg; cfg.SCALE         --imports------> Import(0, "cfg", ())
                                    --words--------> {"SCALE"}, what it may read off a module that it has as a value

Source: `dis` and the attributes of code objects, in the standard library's documentation.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import sys
import types
from dataclasses import dataclass
from typing import Any

__all__ = ["Import", "chains", "code_digest", "computes_names", "imports", "words"]


@dataclass(frozen=True)
class Import:
    """`import name`, or `from name import attributes`; `level` counts the dots before the name."""

    level: int
    name: str
    attributes: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def imports(code: types.CodeType) -> tuple[Import, ...]:
    """What `code` and the functions in it import."""
    found: dict[Import, None] = {}
    before: list[Any] = [0, None]
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            level, attributes = before[-2:]
            found[Import(int(level or 0), str(instruction.argval), tuple(attributes or ()))] = None
        elif instruction.opname not in ("EXTENDED_ARG", "CACHE"):
            before.append(instruction.argval)
    for inside in _inside(code):
        found.update(dict.fromkeys(imports(inside)))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def words(code: types.CodeType) -> frozenset[str]:
    """Names and strings in `code` and the functions in it: `c.SCALE`, `getattr(c, "SCALE")`."""
    own = {*code.co_names, *(const for const in code.co_consts if isinstance(const, str))}
    return frozenset(own.union(*map(words, _inside(code))))


@functools.lru_cache(maxsize=4096)
def computes_names(code: types.CodeType) -> bool:
    """Whether `code`, or a function in it, may read attributes whose names do not stand in it."""
    if _READ_ALL & set(code.co_names):
        return True
    reading, before = False, ["", ""]  # between `getattr` and the call that follows it
    for instruction in dis.get_instructions(code):
        op = instruction.opname
        if op in ("EXTENDED_ARG", "CACHE", "PRECALL"):
            continue
        if op.startswith("CALL") and reading:
            at = {2: -1, 3: -2}.get(instruction.arg or 0)
            if at is None or before[at] != "a name":
                return True
            reading = False
        elif instruction.argval == "getattr" and op.startswith("LOAD_") and op != "LOAD_CONST":
            if reading:
                return True
            reading = True
        before = [before[-1], "a name" if op == "LOAD_CONST" and isinstance(instruction.argval, str) else ""]
    return reading or any(map(computes_names, _inside(code)))


_READ_ALL = {"vars", "dir", "globals", "eval", "exec", "__dict__", "__getattribute__"}


def _inside(code: types.CodeType) -> list[types.CodeType]:
    return [const for const in code.co_consts if isinstance(const, types.CodeType)]


@functools.lru_cache(maxsize=4096)
def chains(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
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
    for inside in _inside(code):
        found.update(dict.fromkeys(chains(inside)))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def code_digest(code: types.CodeType, outermost: bool = True) -> str:
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
