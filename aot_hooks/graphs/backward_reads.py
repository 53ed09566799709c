"""How the backward reads each saved tensor, and whether rounding the tensor is safe.

      backward graph                            reads of h
        t = tanh(h)            # recomputed      follow: tanh is smooth
        m = gt(t, 0.5)         # recomputed      decision, answered: m crosses as bits, made from the unrounded h
        g = mul(tangents, t)                     smooth
        r = log(h)             # recomputed      singular: h stays

`BackwardReads(fw, bw, saved).of(h)` follows h through every operator that does not depend on the tangents, to the
operators that do. read_tables.py has for each operator and argument whether the read is smooth; an operator in no table
is "unknown". A value may be rounded only if all its reads are smooth or answered.

A decision is *answered* if the forward can compute its outcome from unrounded values, in at most a quarter of the bytes
of the saved tensor; answers.py then moves it there.

number_tests.py has the special case that needs no new value: readers that compare the saved numbers with constants.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..torch_private import values as torch_values
from .nodes import argument_positions, is_view, op_name, region_body, source_line
from .number_tests import exact_tests, only_at, tests_of
from .read_tables import (
    ADDENDS,
    CONVERSIONS,
    DECIDES,
    KEEPS_NORM,
    MOVES,
    ROOTS,
    SHAPE_ONLY,
    SINGULAR,
    SMOOTH,
    SMOOTH_INSIDE,
    Test,
)

__all__ = ["BackwardReads", "FoundRead", "Read"]

_MAX_ANSWER_BYTES = 1 / 4  # of the saved tensor's; larger answers are not worth their bytes beside the packed ones
_aten = torch.ops.aten
_BROADCAST = 16  # a number that is read for more results than this is a statistic: one error would shift them all


@dataclass(frozen=True)
class Read:
    """A read of a saved tensor that is not smooth.

    Attributes:
        kind: "decision" (the result jumps: a comparison, a rounding, an index), "singular" (a small error may become
            any error: a logarithm, an exponential, a divisor) or "unknown" (an operator that no table lists).
        op: the operator, as the program called it.
        line: the user's line, "" if unknown.
        answered: for a decision, whether its exact outcome can be stored beside the rounded tensor.
    """

    kind: str
    op: str
    line: str = ""
    answered: bool = False

    def __str__(self) -> str:
        return f"{self.op}{f' ({self.line})' if self.line else ''}"

    def why(self) -> str:
        """Why a value with this read is not rounded, in words."""
        if self.kind == "decision":
            return f"the backward decides by it: {self}"
        if self.kind == "singular":
            return f"a small error of it may become any error: {self}"
        return f"not known to be safe to round for {self}"


@dataclass(frozen=True)
class FoundRead:
    """A `Read` in the graph.

    Attributes:
        read: what it is.
        reader: the node through which it reads the saved tensor, a direct user of the backward's input.
        answer: for an answered decision, the backward node that the forward computes instead; None if `tests` are about
            the saved tensor itself.
        users: the users of `answer` that read the forward's result.
        tests: tests of each number of `answer`; the decision depends on their outcomes alone. None if it depends on the
            number itself, which is a bool or an int.
    """

    read: Read
    reader: Node
    answer: Node | None = None
    users: tuple[Node, ...] = ()
    tests: tuple[Test, ...] | None = None


class BackwardReads:
    """The reads of one pair of graphs.

    Args:
        fw, bw: the forward and the backward graph.
        saved: the backward's inputs that come from the forward, with the forward's nodes.
    """

    def __init__(self, fw: GraphModule, bw: GraphModule, saved: Iterable[tuple[Any, Node]]) -> None:
        self.fw, self.bw = fw, bw
        self.saved = {b: f for f, b in saved if isinstance(f, Node)}
        inputs = bw.graph.find_nodes(op="placeholder")
        self.of_tangents = _depending(bw.graph, (n for n in inputs if n not in self.saved))

    def of(self, node: Node) -> list[FoundRead]:
        """The reads of the backward's input `node` that are not smooth."""
        found: dict[FoundRead, None] = {}
        nbytes = _bytes(node)
        for reader in node.users:
            if reader.op == "output":
                continue
            tests = tests_of(node, reader)
            if tests is None:
                found.update(dict.fromkeys(_follow(node, reader, self.of_tangents, self, nbytes)))
            elif tests:
                decides = _deciding(reader)
                read = Read("decision", op_name(decides), source_line(decides), answered=True)
                found[FoundRead(read, reader, tests=tests)] = None
        return list(found)

    @functools.cached_property
    def in_forward(self) -> dict[Node, Node]:
        """Nodes of the backward, each with the node of the forward that computes the same."""
        by_name = {node.name: node for node in self.fw.graph.nodes}
        found = dict(self.saved)
        for node in self.bw.graph.nodes:
            other = by_name.get(node.name)  # the partitioner copies nodes of one graph, and keeps their names
            if node.op != "call_function" or other is None or other.target is not node.target:
                continue
            if all(n in found for n in node.all_input_nodes):
                mapped = torch.fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
                if mapped == (other.args, other.kwargs):
                    found[node] = other
        return found

    @functools.cached_property
    def computable(self) -> set[Node]:
        """The nodes of the backward that the forward has, or can compute by cheap operators without random numbers."""
        found = set(self.in_forward)
        for node in self.bw.graph.nodes:
            if node not in self.of_tangents and _is_cheap(node) and found.issuperset(node.all_input_nodes):
                found.add(node)
        return found


def _depending(graph: torch.fx.Graph, on: Iterable[Node]) -> set[Node]:
    found = set(on)
    for node in graph.nodes:
        if str(node.target) not in SHAPE_ONLY and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
        elif any(n in found and not only_at(node, n, SHAPE_ONLY[str(node.target)]) for n in node.all_input_nodes):
            found.add(node)
    return found


# --- following a value ------------------------------------------------------------------------------------------------


def _follow(
    start: Node, reader: Node | None, of_tangents: set[Node], graphs: BackwardReads | None, nbytes: float
) -> Iterator[FoundRead]:
    """The reads of `start` through `reader` (None: through all its users) that are not smooth.

    `graphs` is None inside of a nested region's graph, where nothing can be answered.
    """
    stack: list[tuple[Node, Node | None, bool]] = [(start, reader, False)]  # a value, its reader, whether it is a norm
    seen: set[tuple[Node, Node, bool]] = set()
    while stack:
        value, only, norm = stack.pop()
        for user in value.users if only is None else (only,):
            if (value, user, norm) in seen or (user.op == "call_function" and not user.users):
                continue
            seen.add((value, user, norm))
            direct = reader or user
            kind, norm_after = _classify(value, user, norm, of_tangents)
            if kind == "none" or (user.op == "output" and graphs is not None):
                continue
            if kind == "nested":
                yield from _follow_nested(value, user, direct, of_tangents)
            elif kind != "smooth":
                yield _found(kind, value, user, direct, of_tangents, graphs, nbytes)
            elif user not in of_tangents:
                stack.append((user, None, norm_after))


def _classify(value: Node, user: Node, norm: bool, of_tangents: set[Node]) -> tuple[str, bool]:
    """The kind of the read of `value` by `user`, and whether the result is a norm.

    Kinds beside those of `Read`: "smooth", "none" (only the shape is read), "nested" (read inside of a region).

    A backward is linear in the tangents. So the readers of a product with a gradient are linear, too, and are not
    followed. This does not hold for a sum with a gradient: the derivative of `logcumsumexp` takes its exponential.
    """
    name = str(user.target)
    if user.op != "call_function":
        return "unknown", False
    positions = argument_positions(user, value)
    result = user.meta.get("val")
    if name in SHAPE_ONLY and positions == [SHAPE_ONLY[name]]:
        return "none", False
    if user.target is torch.ops.higher_order.invoke_subgraph:
        return "nested", False
    if user.target is operator.getitem:
        floating = not isinstance(result, torch.Tensor) or result.dtype.is_floating_point
        return ("smooth", norm or _gives_norm(user)) if floating else ("decision", False)
    if isinstance(result, torch.Tensor) and not (result.dtype.is_floating_point or result.dtype.is_complex):
        return "decision", False
    if _smooth_inside(user):
        return "smooth", False
    if norm and ROOTS.get(name) in positions and len(positions) == 1:
        return "smooth", user.target is _aten.sqrt.default
    if user.target is _aten.pow.Tensor_Scalar and positions == [0] and isinstance(user.args[1], int | float):
        smooth = user.args[1] >= 1
    else:
        smooth = positions != [] and set(positions) <= set(
            SMOOTH.get(name, (0,) if norm and name in KEEPS_NORM else ())
        )
    if smooth and (_is_broadcast(value, user) or _is_difference(user) or _is_divided(user, of_tangents)):
        return "singular", False
    if smooth and user in of_tangents and set(positions) & set(ADDENDS.get(name, ())):
        return "singular", False
    if user.target is _aten.exp.default and _is_minus_square(value):
        return "smooth", False
    if smooth:
        return "smooth", (norm and name in KEEPS_NORM and len(user.all_input_nodes) == 1) or _gives_norm(user)
    plain = name.split(".")[1] if name.count(".") == 2 else name
    if plain in DECIDES:
        return "decision", False
    return ("singular" if plain in SINGULAR else "unknown"), False


def _smooth_inside(node: Node) -> bool:
    """Whether `node` is a piece of an operator that is smooth as a whole: the result, or only read by other pieces."""
    if str(node.meta.get("original_aten")) not in SMOOTH_INSIDE:
        return False
    return len({str(user.meta.get("original_aten")) in SMOOTH_INSIDE for user in node.users}) <= 1


def _gives_norm(user: Node) -> bool:
    """Whether `user` sums up squares or absolute values, or is a variance."""
    if user.target in (_aten.linalg_vector_norm.default, _aten.var.correction):
        return True
    source = user.args[0] if user.args else None
    if not isinstance(source, Node):
        return False
    if user.target is operator.getitem:
        return source.target is _aten.var_mean.correction and user.args[1:] == (0,)
    if user.target not in (_aten.sum.dim_IntList, _aten.sum.default, _aten.mean.dim, _aten.mean.default):
        return False
    return source.target is _aten.abs.default or _is_square(source)


def _is_square(node: Node) -> bool:
    if node.target is _aten.mul.Tensor:
        return node.args[0] is node.args[1]
    return node.target is _aten.pow.Tensor_Scalar and node.args[1:] == (2,)


def _is_difference(user: Node) -> bool:
    """Whether `user` adds or subtracts numbers of one tensor (neighbours, say), which may cancel each other."""
    if user.target not in (_aten.sub.Tensor, _aten.add.Tensor, _aten.rsub.Tensor):
        return False
    sources = []
    for node in user.args[:2]:
        while isinstance(node, Node) and str(node.target) in MOVES and isinstance(node.args[0], Node):
            node = node.args[0]
        sources.append(node)
    return sources[0] is sources[1] and user.args[0] is not user.args[1]


def _is_divided(user: Node, of_tangents: set[Node]) -> bool:
    """Whether `user` divides element by element, or moves a gradient into such a division.

    A small divisor makes the error of a rounded value large. Divisors made from tangents don't count. Example: the
    derivative of `hypot(x, y)` divides x by the result; the quotient is at most 1 only if neither was rounded.
    """

    def divides(node: Node) -> bool:
        divisors: list[Any] = [node.args[1]] if node.target is _aten.div.Tensor else []
        if node.target is _aten.mul.Tensor:
            divisors = [a for a in node.args if isinstance(a, Node) and a.target is _aten.reciprocal.default]
        big = [d for d in divisors if isinstance(d, Node) and _numel(d) >= _numel(node) > 1]
        return any(d not in of_tangents for d in big)

    if divides(user):
        return True
    stack, moved = [user] if user in of_tangents else [], {user}
    while stack:
        for after in stack.pop().users:
            if divides(after):
                return True
            if after not in moved and str(after.target) in _MOVES_BY_INDEX:
                moved.add(after)
                stack.append(after)
    return False


_MOVES_BY_INDEX = MOVES | {"aten.gather.default", "aten.index.Tensor", "aten.index_select.default"}


def _is_minus_square(node: Node) -> bool:
    """Whether `node` is a negative number times a square; exp(-x**2) is smooth."""
    sign = 1.0
    while node.target in (_aten.neg.default, _aten.mul.Tensor, _aten.div.Tensor, _aten.mul.Scalar):
        first, *others = node.args
        if node.target is _aten.mul.Tensor and others == [first]:
            return sign < 0
        factor = -1.0 if not others else others[0]
        if not isinstance(first, Node) or not isinstance(factor, int | float):
            return False
        sign, node = sign * factor, first
    return sign < 0 and _is_square(node)


def _is_broadcast(value: Node, user: Node) -> bool:
    """Whether elementwise `user` reads each number of `value` more than `_BROADCAST` times."""
    if torch.Tag.pointwise not in getattr(user.target, "tags", ()):
        return False
    return _numel(user) > _BROADCAST * _numel(value)


def _follow_nested(value: Node, user: Node, direct: Node, of_tangents: set[Node]) -> Iterator[FoundRead]:
    """The reads of `value` inside of the region that `user` calls; a read of the region's results is unknown."""
    inner, operands = region_body(user), list(user.args[2:])
    placeholders = inner.graph.find_nodes(op="placeholder") if inner is not None else []
    if len(placeholders) != len(operands) or not all(i >= 2 for i in argument_positions(user, value) or [0]):
        yield FoundRead(Read("unknown", op_name(user), source_line(user)), direct)
        return
    tangents = [p for p, o in zip(placeholders, operands, strict=True) if isinstance(o, Node) and o in of_tangents]
    inside = _depending(placeholders[0].graph, tangents)
    for placeholder, operand in zip(placeholders, operands, strict=True):
        if operand is value:
            for found in _follow(placeholder, None, inside, None, 0.0):
                yield FoundRead(found.read, direct)


def _found(
    kind: str,
    value: Node,
    user: Node,
    direct: Node,
    of_tangents: set[Node],
    graphs: BackwardReads | None,
    nbytes: float,
) -> FoundRead:
    """The read of `value` by `user`, with its answer if the forward can give one."""
    answer: Node | None = None
    users: tuple[Node, ...] = ()
    tests: tuple[Test, ...] | None = None
    if kind == "decision" and graphs is not None:
        result = user.meta.get("val")
        if user not in of_tangents and isinstance(result, torch.Tensor) and not result.dtype.is_floating_point:
            answer = _last_of_the_decision(user, graphs)
            users = tuple(answer.users)
            size = _numel(answer) / 8 if answer.meta["val"].dtype is torch.bool else _bytes(answer)
        elif tests := exact_tests(user, value):
            answer, users = value, (user,)
            size = _numel(answer) / 4
        if answer is not None and (size > _MAX_ANSWER_BYTES * nbytes or answer not in graphs.computable):
            answer, users, tests = None, (), None
    made = user.args[0] if user.target is operator.getitem else user
    assert isinstance(made, Node)
    read = Read(kind, op_name(made), source_line(made), answered=answer is not None)
    return FoundRead(read, direct, answer, users, tests)


def _last_of_the_decision(node: Node, graphs: BackwardReads) -> Node:
    """The last bool that is computed from `node` alone: `logical_and(ge(x, a), le(x, b))` is one answer, not two."""
    while node.meta["val"].dtype is torch.bool and len(node.users) == 1:
        (user,) = node.users
        value = user.meta.get("val")
        if user in graphs.of_tangents or not isinstance(value, torch.Tensor) or value.dtype is not torch.bool:
            break
        if user not in graphs.computable or _numel(user) > _numel(node):
            break
        node = user
    return node


_CHEAP = {
    *("aten.argmax.default", "aten.argmin.default", "aten.max.dim", "aten.min.dim", "aten.amax.default"),
    *("aten.amin.default", "aten.max.default", "aten.min.default", "aten.sum.dim_IntList", "aten.sum.default"),
    *("aten.mean.dim", "aten.any.dim", "aten.any.default", "aten.all.dim", "aten.all.default", "aten.sort.default"),
    *("aten.sort.stable", "aten.topk.default", "aten.full.default", "aten.scalar_tensor.default"),
    *("aten.arange.start_step", "aten.arange.default", "aten.arange.start", "prims.iota.default"),
    *("aten.zeros.default", "aten.ones.default", "aten.full_like.default", "aten.zeros_like.default"),
    *("aten.gather.default", "aten.index.Tensor", "aten.searchsorted.Tensor", "aten.bucketize.Tensor"),
    *(MOVES | CONVERSIONS),
}


def _is_cheap(node: Node) -> bool:
    """Whether the forward may compute `node` once more: elementwise, a view, a reduction; nothing random."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags or not torch_values.is_operator(node.target):
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return torch.Tag.pointwise in tags or is_view(node) or str(node.target) in _CHEAP


def _numel(node: Node) -> float:
    value = node.meta.get("val")
    return float(torch_values.hint(value.numel())) if isinstance(value, torch.Tensor) else 0.0


def _bytes(node: Node) -> float:
    value = node.meta.get("val")
    return _numel(node) * value.element_size() if isinstance(value, torch.Tensor) else 0.0


def _deciding(reader: Node) -> Node:
    """The operator that decides: `reader`, or its reader if it only moves data."""
    while str(reader.target) in MOVES | CONVERSIONS and reader.users:
        reader = next(iter(reader.users))
    return reader
