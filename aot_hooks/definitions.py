"""What classes and graphs say: member by member, node by node.

They write into a `Walker` (walker.py), which says how.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import TYPE_CHECKING, Any

import torch

from .held import NOT_BOUND, Holder
from .kinds import PARTS, at_path
from .reached_globals import home_of, is_library

if TYPE_CHECKING:
    from .walker import Walker

__all__ = ["write_class", "write_graph"]

_CLASS_BOOKKEEPING = {
    *("__module__", "__qualname__", "__doc__", "__firstlineno__", "__static_attributes__", "_abc_impl"),
    "__orig_bases__",
}
_DESCRIPTORS = types.GetSetDescriptorType | types.MemberDescriptorType


def write_class(walker: Walker, cls: type) -> None:
    walker.out.append(f"class:{cls.__module__}.{cls.__qualname__}")
    if is_library(cls.__module__) or cls.__module__ == "builtins":
        return
    walker.holders.append(Holder(cls))
    walker.depth += 1
    walker.inner(*cls.__bases__)
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
            walker.out.append("member:" + name)
            walker.inner(member)
    walker.depth -= 1


def _made_by_namedtuple(member: Any) -> bool:
    if isinstance(member, types.FunctionType):
        return home_of(member) == "collections" or home_of(member).startswith("namedtuple_")
    return type(member).__name__ == "_tuplegetter"


def write_graph(walker: Walker, gm: torch.fx.GraphModule) -> None:
    """Node by node, by position: names of nodes and placeholders are left out."""
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    walker.bind(vars(gm), "_code", vars(gm).get("_code", NOT_BOUND))  # made anew with the code, by `recompile()`
    walker.out.append("graph")

    def arg(a: Any) -> Any:
        if isinstance(a, torch.fx.Node):
            return ("node", position[a])
        if isinstance(a, tuple | list):
            return tuple(arg(x) for x in a)
        if isinstance(a, dict):
            return {k: arg(v) for k, v in a.items()}
        return a

    for node in gm.graph.nodes:
        walker.out.append(node.op)
        if node.op == "get_attr":
            walker.inner(at_path(gm, node.target))
            parts = [part for part in (vars(gm), *(vars(gm)[part] for part in PARTS)) if node.target in part]
            if len(parts) == 1:
                walker.bind(parts[0], str(node.target), parts[0][node.target])
            else:
                walker.may_change = True
        elif node.op == "call_module":
            walker.inner(gm.get_submodule(str(node.target)))
        elif node.op == "call_method":
            walker.out.append(str(node.target))
        elif node.op == "call_function":
            walker.called(node)
        walker.inner(arg(node.args))
        walker.named(arg(node.kwargs))
        if "user_cache_hash" in node.meta:
            walker.out.append(f"hash:{node.meta['user_cache_hash']}")
