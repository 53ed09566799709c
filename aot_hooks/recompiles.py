"""Hooks that say something else in each step, and so compile in each step: a warning that names what changes.

      step 1   pack over self.scale = 0.5   --> graph 1
      step 2   pack over self.scale = 0.4   --> graph 2      what a hook holds is built into the graph
      ...                                       Dynamo gives up at 8 and runs the function eagerly

Graphs are counted by compiled function and by the code of the hook or policy.
"""

from __future__ import annotations

import functools
import types
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .bytecode import chains
from .content import content
from .errors import RecompileWarning
from .hook import Hook
from .policy import Setting
from .reached import members, reads

__all__ = ["note"]

_WARNS_AT = 4
_Known = dict[Any, dict[str, dict[str, str]]]  # code of a rule -> key of a setting -> what it holds, by name
_known: dict[int, _Known] = {}  # by the id of what torch.compile made, which has no hash


def note(compiled: Any, settings: Iterable[Setting]) -> None:
    """`compiled`, made by `torch.compile`, has compiled a graph under `settings`; warns of rules that keep changing."""
    if id(compiled) not in _known:
        _known[id(compiled)] = {}
        weakref.finalize(compiled, _known.pop, id(compiled), None)
    known = _known[id(compiled)]
    for setting in settings:
        functions = _functions(setting.rule)
        seen = known.setdefault(tuple(_code(fn) for _, fn in functions), {})
        if setting.key in seen:
            continue
        held = {name: content(value) for label, fn in functions for name, value in _held(label, fn)}
        before = list(seen.values())
        seen[setting.key] = held
        if len(seen) != _WARNS_AT:
            continue
        changed = [name for name, digest in held.items() if any(other.get(name) != digest for other in before)]
        warnings.warn(
            f"{_called(setting.rule)} has been compiled {len(seen)} times for one function, because what it holds "
            f"changed: {', '.join(changed) or 'its code'}. What a hook or policy holds is built into the graph, and "
            "each change compiles again. Compute it from the saved tensor inside of pack and return it with what is "
            "packed, hold a value that stays, or run the hook as it is with Hook(..., eager=True)",
            RecompileWarning,
            stacklevel=2,
        )


def _functions(rule: Any) -> list[tuple[str, Any]]:
    return [("pack", rule.pack), ("unpack", rule.unpack)] if isinstance(rule, Hook) else [("policy", rule)]


def _code(fn: Any) -> Any:
    """What stays the same of a function that is made anew."""
    if isinstance(fn, functools.partial):
        return _code(fn.func)
    if isinstance(fn, torch.fx.GraphModule):
        return tuple((node.op, str(node.target)) for node in fn.graph.nodes)
    return getattr(getattr(fn, "__func__", fn), "__code__", type(fn))


def _called(rule: Any) -> str:
    if isinstance(rule, Hook):
        return f"hook '{rule.name}'{_line(rule.pack)}"
    return f"policy {getattr(rule, '__name__', None) or repr(rule)}{_line(rule)}"


def _line(fn: Any) -> str:
    code = _code(fn)
    if not isinstance(code, types.CodeType):
        return ""
    return f" ({code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno})"


def _held(label: str, fn: Any) -> Iterator[tuple[str, Any]]:
    """What `fn` holds, each with a name that its author knows it by."""
    if isinstance(fn, types.MethodType):
        code = fn.__func__.__code__ if isinstance(fn.__func__, types.FunctionType) else None
        if code is None:
            yield label, fn
        elif code.co_argcount:
            yield from _of_object(code.co_varnames[0], fn.__self__, reads(code, code.co_varnames[0]))
    elif isinstance(fn, types.FunctionType):
        arguments = fn.__code__.co_varnames[: fn.__code__.co_argcount]
        yield from zip(reversed(arguments), reversed(fn.__defaults__ or ()), strict=False)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                yield from _of_object(name, cell.cell_contents, reads(fn.__code__, name))
            except ValueError:
                continue
        for name in dict.fromkeys(chain[0] for chain in chains(fn.__code__)):  # not all names: some are attributes
            if name in fn.__globals__ and not isinstance(fn.__globals__[name], types.ModuleType):
                yield from _of_object(name, fn.__globals__[name], None)
    elif isinstance(fn, functools.partial):
        yield f"arguments of the partial given as {label}", (fn.args, fn.keywords)
    else:
        yield from _of_object(label, fn, None)


def _of_object(name: str, value: Any, read: tuple[str, ...] | None) -> Iterator[tuple[str, Any]]:
    held = members(value, read) if read is not None else None
    if held is not None:
        for attribute, member in held:
            yield from _of_object(f"{name}.{attribute}", member, None)
    elif isinstance(value, torch.nn.Module):
        for path, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield f"{name}.{path}", tensor
    elif isinstance(value, types.MethodType):
        yield from _held(name, value)
    else:
        yield name, value
