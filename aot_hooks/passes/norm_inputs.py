"""Norms read their rounded input with the mean and the variance that it had, so that their derivative bears rounding.

      x' = unpack(...)                  off by 6% of x
      n = (x' - mean) * rstd            off by 6% of mean * rstd: 20 where a group's numbers are all 1, for 0
      x" = (x' - m') * t + mean             with m' the mean of x', and t so that x" has the variance of x
      n = (x" - mean) * rstd            at most sqrt(count of a group), and 0 for a group of equal numbers

Mean and rstd are saved as they are, and rstd is up to 316. What norms divide by it is small only if both belong to the
same numbers. In a group that is nearly constant the rounding is larger than the spread: then the normalized numbers
are noise, but no larger than they were. This is for norms that subtract a mean. One that doesn't divides the number
itself, so its error is a share of the result. Statistics of a running mean are not of the numbers, so they stay.

The input may also be computed again from rounded numbers. What makes it then has its bound, and the norm still is this.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from ..graphs import read_tables as tables
from ..graphs.nodes import argument_called, op_name, target_name
from ..graphs.norms import Statistics, is_as_saved, rescaled, saved_by_norm
from ..graphs.saved import Boundary
from ..torch_private.values import expression, same_size
from .edits import call, computed, with_inputs
from .units import Unit

_aten = torch.ops.aten
_COPIES = tables.MOVES | tables.CONVERSIONS
# Operators that subtract a mean: their names, and the arguments of their backwards that are input, mean and rstd.
_NORMS = tables.NORMALIZE - {"aten._fused_rms_norm.default"}
_BACKWARDS = {
    "aten.native_layer_norm_backward.default": ("input", "mean", "rstd"),
    "aten.native_group_norm_backward.default": ("input", "mean", "rstd"),
    "aten.native_batch_norm_backward.default": ("input", "save_mean", "save_invstd"),
    "aten.batch_norm_backward.default": ("input", "save_mean", "save_var"),
    "aten.cudnn_batch_norm_backward.default": ("input", "save_mean", "save_var"),
    "aten.miopen_batch_norm_backward.default": ("input", "save_mean", "save_var"),
}
_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class _Place:
    """An argument of a node: what stands there is another node once hooks are in the graph."""

    user: Node
    position: int

    @property
    def node(self) -> Node:
        return cast("Node", self.user.args[self.position])


@dataclass(frozen=True)
class Norm:
    """A norm of the backward, with an input that is rounded.

    Attributes:
        inputs: where the input is read.
        mean, rstd: where the statistics are read.
        eps: what is added to the variance.
        shape: the input in groups.
        dims: the dimensions of `shape` that a group has.
    """

    inputs: tuple[_Place, ...]
    mean: _Place
    rstd: _Place
    eps: float
    shape: tuple[Any, ...]
    dims: tuple[int, ...]


def all_norms(bw: GraphModule, boundary: Boundary) -> tuple[Norm, ...]:
    """The norms of `bw` that subtract a mean, and save it with `rstd`."""
    return (*_whole_norms(bw, boundary), *_decomposed_norms(bw, boundary))


def norms_of_rounded(bw: GraphModule, boundary: Boundary, units: Iterable[Unit]) -> tuple[Norm, ...]:
    """The norms of `bw` whose input lossy hooks of `units` will round, or numbers that it is computed from."""
    rounded = _rounded(bw, units)
    kept = []
    for norm in all_norms(bw, boundary) if rounded else ():
        inputs = tuple(p for p in norm.inputs if p.node in rounded or (p.node, p.user) in rounded)
        if inputs and norm.rstd.node not in rounded:  # a rounded mean is taken for the exact one
            kept.append(replace(norm, inputs=inputs))
    return tuple(kept)


def _rounded(bw: GraphModule, units: Iterable[Unit]) -> set[Any]:
    """The values of `bw` that bear a rounding.

    A slot that a lossy hook unpacks is there as a pair with each reader, since other readers may get it exactly. A
    value that is computed from such a slot is there as a node.
    """
    found: set[Any] = set()
    for unit in units:
        slots = (unit.saved.bw_node, *(view.bw_node for view in unit.views))
        readers = [r for packing in unit.packings if packing.hook.lossy for r in packing.readers]
        found.update((slot, reader) for slot in slots for reader in readers)
    for node in bw.graph.nodes if found else ():
        if any(n in found or (n, node) in found for n in node.all_input_nodes):
            found.add(node)
    return found


# --- norms that are one operator --------------------------------------------------------------------------------------


def _whole_norms(bw: GraphModule, boundary: Boundary) -> Iterator[Norm]:
    """The norms whose backward is one operator. Batch norm in training is one; by running statistics it is none."""
    for node in bw.graph.nodes:
        names = _BACKWARDS.get(target_name(node))
        if names is None or argument_called("train", node) is False or argument_called("update", node) is False:
            continue
        x, mean, rstd = (_place_called(name, node) for name in names)
        eps = next((e for name in ("eps", "epsilon") if (e := argument_called(name, node)) is not None), None)
        if x is None or mean is None or rstd is None:
            continue
        if eps is None:  # it is an argument of the forward only
            source = _sources(boundary.reads.forward_node_of.get(mean.node, mean.node))[-1]
            maker = source.args[0] if source.target is operator.getitem else source
            eps = argument_called("eps", maker) if isinstance(maker, Node) else None
        shape: Any = tuple(x.node.meta["val"].shape)
        dims: Any = [i for i in range(len(shape)) if i != 1]  # of batch norm: all but the channels
        if node.target is _aten.native_layer_norm_backward.default:
            dims = range(len(shape) - len(argument_called("normalized_shape", node)), len(shape))
        elif node.target is _aten.native_group_norm_backward.default:
            groups = argument_called("group", node)
            shape = (shape[0], groups, shape[1] // groups, *shape[2:])
            dims = range(2, len(shape))
        if isinstance(eps, float):
            yield Norm((x,), mean, rstd, eps, shape, tuple(dims))


def _place_called(name: str, node: Node) -> _Place | None:
    """The argument of `node` with this name; None if it is not given by position, or is no node."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    position = names.index(name)
    found = position < len(node.args) and isinstance(node.args[position], Node)
    return _Place(node, position) if found else None


# --- norms in pieces, for Inductor ------------------------------------------------------------------------------------


def _decomposed_norms(bw: GraphModule, boundary: Boundary) -> Iterator[Norm]:
    """The norms that are in pieces in both graphs: they are found by `var_mean` of the forward."""
    in_backward: dict[Node, list[Node]] = defaultdict(list)  # by the node of the forward that computes the same
    moved: dict[Node, list[Node]] = defaultdict(list)  # by the node of the forward that is copied or moved
    for node in bw.graph.nodes:
        if (made := boundary.reads.forward_node_of.get(node)) is not None:
            in_backward[made].append(node)
            moved[_sources(made)[-1]].append(node)
    calls: list[Any] = [n.args[0] for n in moved if n.target is operator.getitem]
    for variance in dict.fromkeys(calls):
        if target_name(variance) != "aten.var_mean.correction" or op_name(variance) not in _NORMS:
            continue
        results: dict[Any, Node] = {user.args[1]: user for user in variance.users}  # 0: the variance, 1: the mean
        of_variance: Any = results[0].users if len(results) == 2 else ()
        sums = [u for u in of_variance if u.target is _aten.add.Tensor and isinstance(u.args[1], float)]  # with eps
        rstds = [user for each in sums for user in each.users if user.target is _aten.rsqrt.default]
        if not rstds:
            continue
        x: Any = variance.args[0]
        shape = tuple(x.meta["val"].shape)
        dims = tuple(sorted(d % len(shape) for d in variance.args[1]))
        mean, rstd = (_statistic(moved[n], shape, dims) for n in (results[1], rstds[0]))
        copies = [n for source in _sources(x, inside=True) for n in in_backward[source]]
        first = [n for n in copies if not n.args or n.args[0] not in copies]  # the others are copies of these
        inputs = tuple(place for n in first for place in _read_by_norms(n))
        if mean is not None and rstd is not None and inputs:
            yield Norm(inputs, mean, rstd, sums[0].args[1], shape, dims)


def _sources(node: Node, *, inside: bool = False) -> list[Node]:
    """`node`, and what it is a copy or another shape of; with `inside` only up to what the norm itself was given."""
    found = [node]
    while target_name(node) in _COPIES and (not inside or op_name(node) in _NORMS):
        node = node.all_input_nodes[0]
        found.append(node)
    return found


def _statistic(nodes: Iterable[Node], shape: Sequence[Any], dims: Sequence[int]) -> _Place | None:
    """Where the first of `nodes` is read that has one number for each group."""
    for node in nodes:
        value = node.meta["val"]
        if node.users and value.dim() in (len(shape), len(shape) - len(dims)):
            kept = [i for i in range(len(shape)) if i not in dims]
            sizes = value.shape if value.dim() < len(shape) else [value.shape[i] for i in kept]
            if all(map(same_size, sizes, [shape[i] for i in kept])) and same_size(value.numel(), math.prod(sizes)):
                user = next(iter(node.users))
                return _Place(user, user.args.index(node)) if node in user.args else None
    return None


def _read_by_norms(node: Node) -> Iterator[_Place]:
    for user in node.users:
        if op_name(user) in _NORMS or op_name(user) in _BACKWARDS:
            yield from (_Place(user, i) for i, a in enumerate(user.args) if a is node)


# --- the rewrite ------------------------------------------------------------------------------------------------------


def restore_norm_inputs(
    bw: GraphModule,
    norms: Iterable[Norm],
    *,
    decompositions: Mapping[Any, Any] | None = None,
    keeps_exact: bool = False,
) -> None:
    """Have `norms` read their rounded inputs with the mean and the variance that were saved. In place.

    `keeps_exact`: numbers that were not rounded keep their bits.
    """
    for norm in norms:
        for x in dict.fromkeys(place.node for place in norm.inputs):
            readers = [place for place in norm.inputs if place.node is x]
            first = min(place.user for place in readers)
            for node in sorted(with_inputs([norm.mean.node, norm.rstd.node])):
                if node.op != "placeholder" and node > first:
                    first.prepend(node)
            with bw.graph.inserting_before(first):
                if (made := _restored(bw.graph, x, norm, decompositions, keeps_exact=keeps_exact)) is None:
                    continue
                narrow = _converted(bw.graph, made, x.meta["val"].dtype)
            for place in readers:
                is_cast = target_name(place.user) in tables.CONVERSIONS
                place.user.update_arg(place.position, made if is_cast else narrow)
            if not narrow.users:
                bw.graph.erase_node(narrow)


def _restored(
    graph: Graph, x: Node, norm: Norm, decompositions: Mapping[Any, Any] | None, *, keeps_exact: bool
) -> Node | None:
    """`x` with the mean and variance of `norm`, at least in single precision; None if its sizes are not known."""
    value: torch.Tensor = x.meta["val"]
    sizes, own_sizes = _sizes(graph, norm.shape, x), _sizes(graph, value.shape, x)
    if sizes is None or own_sizes is None:
        return None
    same = len(sizes) == value.dim() and all(map(same_size, norm.shape, value.shape))
    dtype = value.dtype if value.dtype in _WIDE else torch.float32
    precision = torch.finfo(norm.rstd.node.meta["val"].dtype).eps

    def restored(y: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
        found = Statistics(*torch.var_mean(y, norm.dims, correction=0, keepdim=True))
        wanted = saved_by_norm(mean, rstd, norm.eps, found.variance, precision)
        made = rescaled(y, found, wanted)
        return torch.where(is_as_saved(found, wanted, precision), y, made) if keeps_exact else made

    y = _converted(graph, x, dtype)
    y = y if same else call(graph, _aten.reshape.default, y, sizes)
    mean, rstd = (_for_groups(graph, place.node, norm, dtype) for place in (norm.mean, norm.rstd))
    made = computed(graph, restored, y, mean, rstd, decompositions=decompositions)
    return made if same else call(graph, _aten.reshape.default, made, own_sizes)


def _for_groups(graph: Graph, statistic: Node, norm: Norm, dtype: torch.dtype) -> Node:
    """`statistic` with a dimension of size 1 for each that a group has."""
    node = _converted(graph, statistic, dtype)
    for dim in norm.dims if node.meta["val"].dim() < len(norm.shape) else ():
        node = call(graph, _aten.unsqueeze.default, node, dim)
    return node


def _converted(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    if node.meta["val"].dtype is dtype:
        return node
    return call(graph, torch.ops.prims.convert_element_type.default, node, dtype)


def _sizes(graph: Graph, shape: Iterable[Any], like: Node) -> list[Any] | None:
    """`shape` for a view of `like`: symbolic sizes are read off it, and one may be what is left."""
    known = {expression(n): i for i, n in enumerate(like.meta["val"].shape)}
    found: list[Any] = []
    for size in shape:
        if isinstance(size, int):
            found.append(size)
        elif expression(size) in known:
            found.append(call(graph, _aten.sym_size.int, like, known[expression(size)]))
        else:
            found.append(-1)
    return found if found.count(-1) < 2 else None
