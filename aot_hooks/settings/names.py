"""Names that the user sets on tensors, for policies to choose by.

      qkv = checkpoint_name(linear(x), "qkv")
         compiled:  alias(linear), a node annotated with the name --carry_names--> the nodes of the value and of the
                    bases that it views as a whole get the name, before torch removes the alias
         eager:     the tensor itself; the name is stored with the tensor that owns the memory

Either way the name belongs to the value: to its views, and to the base of a view that shows all of it
(`linear(x).view(b, t, h, d).transpose(1, 2)`); not to copies, casts and other results.

Source: `jax.ad_checkpoint.checkpoint_name` names values in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from ..errors import OptionError
from ..graphs.nodes import NAMES, view_source
from ..identity.memo import Memo
from ..torch_private import dynamo
from ..torch_private import values as torch_values

_MARK = "aot_hooks_name"  # the key in meta["custom"] of an alias made by `checkpoint_name`


@dynamo.outermost_runs_in_python
def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """`x`, named for `aot_hooks.policies.only_these_names`: the same values, the same gradient, no memory, no copy.

    Args:
        x: a tensor, best one that an operator has just made. A name on an input of a compiled function or module has an
            effect in scope "all" (or "no_static") only, as for all inputs. A tensor may have several names.
        name: any string; a string that changes between calls of a compiled function recompiles it.

    Works in eager mode, in compiled functions (also with `fullgraph=True`) and under activation checkpointing. A name
    does not pass a graph break: it is valid in the graph, or the eager part, where it is set.

    Raises:
        OptionError: `x` is not a tensor, or `name` is not a string or is empty.
    """
    if not isinstance(x, torch.Tensor):
        raise OptionError(f"checkpoint_name takes a tensor and a name, got {type(x).__name__} as the tensor")
    if not isinstance(name, str) or name == "":  # type: ignore[redundant-expr]
        raise OptionError(f"checkpoint_name: the name must be a string that is not empty, got {name!r}")
    if torch.compiler.is_dynamo_compiling():
        with torch.fx.traceback.annotate({_MARK: name}):
            named: torch.Tensor = torch.ops.aten.alias.default(x)
            return named
    _store(x, name)
    return x


def name_given(node: Node) -> str | None:
    """The name that `checkpoint_name` set on the value of `node`, a node of Dynamo's graph."""
    return (node.meta.get("custom") or {}).get(_MARK)


def carry_names(graph: Graph) -> None:
    """Copy names from the aliases in a joint graph to the nodes of the values; changes `meta` only.

    Call it before torch's passes over the joint graph, which remove aliases.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default):
        name = name_given(node)
        value: Node | None = node
        while name is not None and value is not None:
            custom = value.meta.get("custom") or {}
            # a new dict: nodes that were traced together share one
            value.meta["custom"] = custom | {NAMES: tuple(dict.fromkeys((*custom.get(NAMES, ()), name)))}
            source = view_source(value)
            sizes = [x.numel() for n in (value, source) if n and isinstance(x := n.meta.get("val"), torch.Tensor)]
            # the name goes on to a base that the value shows as a whole
            value = source if len(sizes) == 2 and torch_values.same_size(*sizes) else None


class _Named(NamedTuple):
    """A name, with the version and the part of the memory that it was set on."""

    name: str
    version: int
    part: MemoryPart | None  # None: all of the memory


@dataclass(frozen=True)
class MemoryPart:
    """The positions of a tensor's elements in its memory."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, x: torch.Tensor) -> MemoryPart:
        return cls(x.dtype, int(x.storage_offset()), tuple(x.shape), x.stride())

    def __contains__(self, other: MemoryPart) -> bool:
        """Whether `other`, in the same memory, lies in this part: its first, last, and outermost elements."""
        if self.dtype != other.dtype or 0 in other.shape:
            return self == other
        start = other.offset - self.offset
        steps = [(size - 1) * stride for size, stride in zip(other.shape, other.stride, strict=True)]
        return all(map(self._has, [start, start + sum(steps), *(start + step for step in steps)]))

    def _has(self, offset: int) -> bool:
        """Whether an element lies `offset` elements after the first."""
        if offset < 0:
            return False
        for stride, size in sorted(zip(self.stride, self.shape, strict=True), reverse=True):
            if stride > 0 and size > 1:
                offset -= min(offset // stride, size - 1) * stride
        return offset == 0


class NamesOf(NamedTuple):
    """The names of one tensor, including names set later.

    Autograd may save a tensor before its name is set: `checkpoint_name(torch.sigmoid(x), "gate")`.
    """

    names: list[_Named]  # of all tensors in the memory
    version: int
    part: MemoryPart

    def now(self) -> tuple[str, ...]:
        found = [n.name for n in self.names if n.version == self.version and (n.part is None or self.part in n.part)]
        return tuple(dict.fromkeys(found))


_names: Memo[list[_Named]] = Memo()  # all names in the memory, by the tensor that owns it


def names_of(x: torch.Tensor) -> NamesOf:
    """The names of an eager tensor, including those of its base."""
    return NamesOf(_names_in_memory(x), x._version, MemoryPart.of(x))


@dynamo.outermost_runs_in_python
def _names_in_memory(x: torch.Tensor) -> list[_Named]:
    root = x if x._base is None else x._base
    known = _names.get(root)
    return _names.set(root, []) if known is None else known


@dynamo.outermost_runs_in_python
def _store(x: torch.Tensor, name: str) -> None:
    if x.layout is torch.strided and not x.is_inference():  # others are never packed
        is_whole = x._base is None or x.numel() == x._base.numel()
        named = _Named(name, x._version, None if is_whole else MemoryPart.of(x))
        if named not in (names := _names_in_memory(x)):
            names.append(named)
