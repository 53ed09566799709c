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
of the saved tensor; answers.py then moves it there. Readers that only compare the saved numbers with constants need no
new value: lossless.py stores the outcomes of these tests in place of the numbers.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from cudagraph.placeholder import nearest_first

from ..torch_private import values as torch_values
from . import read_tables as tables
from .cancellation import may_cancel, too_high_power
from .nodes import (
    argument_called,
    argument_positions,
    has_tag,
    is_view,
    numel,
    op_name,
    region_body,
    source_line,
    target_name,
    tensor_bytes,
)
from .probabilities import chooses
from .read_tables import Bound, Test
from .small_numbers import Elementwise, solves

_MAX_ANSWER_BYTES = 1 / 4  # of the saved tensor's; larger answers are not worth their bytes beside the packed ones
_BROADCAST = 16  # a number that is read for more results than this is a statistic: one error would shift them all
_aten = torch.ops.aten
_WHY = {
    "decision": "the backward decides by it: ",
    "singular": "a small error of it may become any error: ",
    "small": "the backward reads its small numbers alone, where a hook rounds to a share of the largest: ",
    "unknown": "not known to be safe to round for ",
}


@dataclass(frozen=True)
class Read:
    """A read of a saved tensor that is not smooth.

    Attributes:
        kind: "decision" (the result jumps: a comparison, a rounding, an index), "singular" (a small error may become
            any error: a logarithm, an exponential, a divisor), "small" (safe if each number is rounded by a share of
            itself, not if by a share of the largest of its block) or "unknown" (an operator that no table lists).
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
        return f"{_WHY[self.kind]}{self}"


@dataclass(frozen=True)
class FoundRead:
    """A `Read` in the graph."""

    read: Read
    reader: Node  # the node through which it reads the saved tensor, a direct user of the backward's input
    # for an answered decision, the backward node that the forward computes instead; None if `tests` are about the saved
    # tensor itself
    answer: Node | None = None
    users: tuple[Node, ...] = ()  # the users of `answer` that read the forward's result
    # tests of each number of `answer`: the decision depends on their outcomes alone; None if it depends on the number
    # itself, which is a bool or an int
    tests: tuple[Test, ...] | None = None


class BackwardReads:
    """The reads of one pair of graphs; `fw` is None for the body of a nested region, where nothing can be answered.

    `saved` has the nodes of the forward that cross, each with the backward's input.
    """

    def __init__(self, fw: GraphModule | None, bw: GraphModule, saved: Iterable[tuple[Any, Node]]) -> None:
        self.fw, self.bw = fw, bw
        self.saved = {b: f for f, b in saved if isinstance(f, Node)}
        self.of_tangents = {n for n in bw.graph.find_nodes(op="placeholder") if n not in self.saved}
        for node in bw.graph.nodes:
            inputs = self.of_tangents.intersection(node.all_input_nodes)
            if any(argument_positions(node, n) != [shape_only_at(node)] for n in inputs):
                self.of_tangents.add(node)

    def of(self, node: Node) -> list[FoundRead]:
        """The reads of the backward's input `node` that are not smooth."""
        found: dict[FoundRead, None] = {}
        for reader in node.users:
            if reader.op == "output":
                continue
            tests = tests_of(node, reader)
            if tests is None:
                found.update(dict.fromkeys(self._follow(node, reader)))
            elif tests:
                decides = reader  # or its reader, if it only moves data
                while target_name(decides) in tables.MOVES | tables.CONVERSIONS and decides.users:
                    decides = next(iter(decides.users))
                read = Read("decision", op_name(decides), source_line(decides), answered=True)
                found[FoundRead(read, reader, tests=tests)] = None
        return list(found)

    @functools.cached_property
    def forward_node_of(self) -> dict[Node, Node]:
        """Nodes of the backward, each with the node of the forward that computes the same."""
        if self.fw is None:
            return {}
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
    def _computable(self) -> set[Node]:
        """The nodes of the backward that the forward has, or can compute by cheap operators without random numbers."""
        found = set(self.forward_node_of)
        for node in self.bw.graph.nodes:
            if node not in self.of_tangents and _is_cheap(node) and found.issuperset(node.all_input_nodes):
                found.add(node)
        return found

    def _follow(self, start: Node, reader: Node | None) -> Iterator[FoundRead]:
        """The reads of `start` through `reader` (None: through all its users) that are not smooth."""
        stack: list[tuple[Node, Node | None]] = [(start, reader)]  # a value, and its reader
        seen: set[tuple[Node, Node]] = set()
        while stack:
            value, only = stack.pop()
            for user in value.users if only is None else (only,):
                if (value, user) in seen or (user.op == "call_function" and not user.users):
                    continue
                seen.add((value, user))
                direct = reader or user
                kind = self._classify(value, user)
                if kind == "none" or (user.op == "output" and self.fw is not None):
                    continue
                if kind == "nested":
                    yield from self._follow_nested(value, user, direct)
                elif kind != "smooth":
                    yield self._found(kind, start, value, user, direct)
                if kind in ("smooth", "small") and user not in self.of_tangents:
                    stack.append((user, None))

    def _classify(self, value: Node, user: Node) -> str:
        """The kind of the read of `value` by `user`.

        Kinds beside those of `Read`: "smooth", "none" (only the shape is read), "nested" (read inside of a region).
        The results of smooth and small reads are followed on.

        A backward is linear in the tangents. So the readers of a product with a gradient are linear, too, and are not
        followed. This does not hold for a sum with a gradient: the derivative of `logcumsumexp` takes its exponential.
        """
        name = target_name(user)
        if user.op != "call_function":
            return "unknown"
        positions = argument_positions(user, value)
        result = user.meta.get("val")
        if positions and positions == [shape_only_at(user)]:
            return "none"
        if user.target is torch.ops.higher_order.invoke_subgraph:
            return "nested"
        if user.target is operator.getitem:
            floating = not isinstance(result, torch.Tensor) or not _is_decided(result.dtype)
            return "smooth" if floating else "decision"
        if isinstance(result, torch.Tensor) and _is_decided(result.dtype):
            return "decision"
        # a piece of an operator that is smooth as a whole: the result, or only read by other pieces
        inside, *after = [str(n.meta.get("original_aten")) in tables.SMOOTH_INSIDE for n in (user, *user.users)]
        if (inside and len(set(after)) <= 1) or self._is_of_an_activation(value, user):
            return "smooth"
        if too_high_power(user):
            return "singular"
        if user.target is _aten.pow.Tensor_Scalar and positions == [0]:
            smooth = cast("float", user.args[1]) >= 1
        else:
            smooth = positions != [] and set(positions) <= smooth_row(user).keys()
        if smooth:
            return self._kind_of_smooth(value, user, positions)
        plain = name.split(".")[1] if name.count(".") == 2 else name
        return "decision" if plain in tables.DECIDES else "singular" if plain in tables.SINGULAR else "unknown"

    def _kind_of_smooth(self, value: Node, user: Node, positions: Sequence[int]) -> str:
        """The kind of a read that is smooth by the tables: "singular" where what is around it makes the error large."""
        is_recomputed = user not in self.of_tangents
        made = self.forward_node_of.get(value)
        if (
            self._is_broadcast(value, user)
            or self._is_divided(user)
            or (is_recomputed and may_cancel(user))
            or (not is_recomputed and not set(positions).isdisjoint(tables.ADDENDS.get(target_name(user), ())))
            or (made is not None and (solves(made) or chooses(made)))
        ):
            return "singular"
        saturates = is_recomputed and self._elementwise.saturates(user, value) and self._reads_numbers_of(user)
        return "small" if saturates or self._meets_its_slope(value, user) else "smooth"

    def _is_of_an_activation(self, value: Node, user: Node) -> bool:
        """Whether `user` reads `value` for an activation by hand: GELU by `erf`, or a sigmoid times its input."""
        if _is_slope_of_erf(user, value):
            return True
        gate = user if user.target is _aten.sigmoid.default else value
        while gate is not user and target_name(gate) in tables.MOVES | tables.CONVERSIONS:
            gate = cast("Node", gate.args[0])
        slope = _aten.sigmoid_backward.default in (user.target, user.meta.get("original_aten"))
        if gate is not user and not slope:
            return False
        return _is_gate_of_itself(self.forward_node_of.get(gate, gate))

    def _reads_numbers_of(self, node: Node) -> bool:
        """Whether a gradient is made with the numbers of `node`, which is computed again, not with decisions alone."""
        for value in (onward := [node]):  # grows
            for user in value.users:
                if user.op != "call_function" or self._classify(value, user) not in ("smooth", "small", "nested"):
                    continue
                if user in self.of_tangents:
                    return True
                if user not in onward:
                    onward.append(user)
        return False

    def _is_broadcast(self, value: Node, user: Node) -> bool:
        """Whether `user`, or what moves the gradient that it makes, has many results for each number of `value`."""
        most = _BROADCAST * numel(value)
        return has_tag(user, torch.Tag.pointwise) and any(numel(node) > most for node in self._moved(user))

    def _is_divided(self, user: Node) -> bool:
        """Whether `user` divides element by element, or moves a gradient into such a division.

        A small divisor makes the error of a rounded value large. Divisors made from tangents don't count. Example: the
        derivative of `hypot(x, y)` divides x by the result; the quotient is at most 1 only if neither was rounded.
        """

        for node in self._moved(user):
            divisors: list[Any] = [node.args[1]] if node.target is _aten.div.Tensor else []
            if node.target is _aten.mul.Tensor:
                divisors = [a for a in node.args if isinstance(a, Node) and a.target is _aten.reciprocal.default]
            big = [d for d in divisors if isinstance(d, Node) and numel(d) >= numel(node) > 1]
            if not self.of_tangents.issuperset(big):
                return True
        return False

    def _moved(self, user: Node) -> Iterator[Node]:
        """`user`, and what reads the gradient that it makes, as it is or moved to other places."""

        def next_of(node: Node) -> Iterable[Node]:
            if node is user:
                return node.users if user in self.of_tangents else ()
            by_number = target_name(node) in tables.OF_NUMBERS and not isinstance(node.args[1], Node)
            return node.users if by_number or target_name(node) in tables.LOCAL else ()

        return iter(nearest_first([user], next_of))

    @functools.cached_property
    def _elementwise(self) -> Elementwise:
        return Elementwise(self.forward_node_of)

    def _meets_its_slope(self, value: Node, user: Node) -> bool:
        """Whether `user` multiplies `value` with a gradient, and a slope near zero of the same numbers follows.

        Example: the derivative of `binary_cross_entropy_with_logits(x, sigmoid(x))` has x times the sigmoid's slope.
        """
        if user.target is not _aten.mul.Tensor or user not in self.of_tangents:
            return False
        slopes = [n for n in self._moved(user) if n is not user and op_name(n) in tables.SLOPES_NEAR_ZERO]
        gates = [n for slope in slopes for n in slope.all_input_nodes if n not in self.of_tangents]
        return any(self._elementwise.is_of_the_same(value, gate) for gate in gates)

    def _follow_nested(self, value: Node, user: Node, direct: Node) -> Iterator[FoundRead]:
        """The reads of `value` inside of the region that `user` calls; a read of the region's results is unknown."""
        inner, operands = region_body(user), list(user.args[2:])
        placeholders = inner.graph.find_nodes(op="placeholder") if inner is not None else []
        positions = argument_positions(user, value)
        if inner is None or len(placeholders) != len(operands) or not positions or min(positions) < 2:
            yield FoundRead(Read("unknown", op_name(user), source_line(user)), direct)
            return
        pairs = [*zip(operands, placeholders, strict=True)]
        tangents = {p for o, p in pairs if isinstance(o, Node) and o in self.of_tangents}
        inside = BackwardReads(None, inner, [(p, p) for p in placeholders if p not in tangents])
        for operand, placeholder in pairs:
            if operand is value:
                yield from (FoundRead(found.read, direct) for found in inside._follow(placeholder, None))

    def _found(self, kind: str, start: Node, value: Node, user: Node, direct: Node) -> FoundRead:
        """The read of `value`, which comes from `start`, by `user`, with its answer if the forward can give one."""
        answer: Node | None = None
        users: tuple[Node, ...] = ()
        tests: tuple[Test, ...] | None = None
        if kind == "decision" and self.fw is not None:
            result = user.meta.get("val")
            if user not in self.of_tangents and isinstance(result, torch.Tensor) and _is_decided(result.dtype):
                answer = self._last_of_the_decision(user)
                users = tuple(answer.users)
                outcome = answer.meta["val"]
                size = numel(answer) / 8 if outcome.dtype is torch.bool else tensor_bytes(outcome)
            elif tests := exact_tests(user, value):
                answer, users = value, (user,)
                size = numel(answer) / 4
            most = _MAX_ANSWER_BYTES * tensor_bytes(start.meta["val"])
            if answer is not None and (size > most or answer not in self._computable):
                answer, users, tests = None, (), None
        made: Any = user.args[0] if user.target is operator.getitem else user
        read = Read(kind, op_name(made), source_line(made), answered=answer is not None)
        return FoundRead(read, direct, answer, users, tests)

    def _last_of_the_decision(self, node: Node) -> Node:
        """The last bool that is computed from `node` alone: `and(ge(x, a), le(x, b))` is one answer, not two."""
        while node.meta["val"].dtype is torch.bool and len(node.users) == 1:
            (user,) = node.users
            value = user.meta.get("val")
            if user in self.of_tangents or not isinstance(value, torch.Tensor) or value.dtype is not torch.bool:
                break
            if user not in self._computable or numel(user) > numel(node):
                break
            node = user
        return node


def smooth_row(node: Node) -> Mapping[int, Bound]:
    """The positions at which the operator of `node` reads numbers that may be rounded, each with its bound."""
    name = target_name(node)
    if name in tables.ONE_SIDED:
        low, high = argument_called("min", node), argument_called("max", node)
        name = tables.ONE_SIDED[name][low is None] if (low is None) != (high is None) else name
    return tables.SMOOTH.get(name, {})


def shape_only_at(node: Node) -> int | None:
    """The position of tensors of which `node` reads sizes, strides, dtype and device only; None if there are none."""
    name = target_name(node)
    if name == "aot_hooks.wait_for.default":  # a tile waits for the gradients of the one before, and reads no number
        return 1
    if name in tables.GRID_SAMPLERS_BACKWARD:  # without the grid's gradient, which differences of the numbers make
        return None if argument_called("output_mask", node)[1] else 1
    return tables.SHAPE_ONLY.get(name)


def _is_gate_of_itself(node: Node) -> bool:
    """Whether `node` is a sigmoid of multiples of the numbers that it is multiplied with: SiLU or GELU by hand."""

    def base(n: Any) -> Any:
        while isinstance(n, Node) and n.op == "call_function":
            name, others = target_name(n), n.args[1:]
            by_number = name in tables.OF_NUMBERS and not any(isinstance(a, Node) for a in others)
            if not by_number and name not in tables.MOVES | tables.CONVERSIONS:
                break
            n = n.args[0]
        return n

    if node.target is not _aten.sigmoid.default:
        return False
    copies = tables.MOVES | tables.CONVERSIONS
    users = list(nearest_first([node], lambda n: [u for u in n.users if n is node or target_name(n) in copies]))[1:]
    factors = [
        a for u in users if u.target is _aten.mul.Tensor for a in u.args if base(a) is base(node.args[0]) is not None
    ]
    return bool(factors)


def _is_slope_of_erf(node: Node, value: Node) -> bool:
    """Whether `node` is the exponential in the derivative of `erf`: 2 / sqrt(pi) * exp(-x**2)."""
    slope = 2 / math.sqrt(math.pi)
    numbers = [a for u in node.users if target_name(u) in tables.OF_NUMBERS for a in u.args if isinstance(a, float)]
    of_erf = any(math.isclose(a, slope, rel_tol=1e-6) for a in numbers)
    return node.target is _aten.exp.default and of_erf and _is_minus_square(value)


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
    return sign < 0 and node.target is _aten.pow.Tensor_Scalar and node.args[1:] == (2,)


def _is_cheap(node: Node) -> bool:
    """Whether the forward may compute `node` once more: elementwise, a view, a reduction; nothing random."""
    if node.target is operator.getitem:
        return True
    schema = torch_values.schema_of(node.target)
    if not torch_values.is_operator(node.target) or schema is None or schema.is_mutable:
        return False
    if has_tag(node, torch.Tag.nondeterministic_seeded):
        return False
    return has_tag(node, torch.Tag.pointwise) or is_view(node) or target_name(node) in tables.CHEAP


# --- readers that only compare the saved numbers with constants -------------------------------------------------------


def tests_of(node: Node, reader: Node | None = None) -> tuple[Test, ...] | None:
    """The tests that decide the results of all readers of `node`, or of one `reader`: `Test("le", (0,))` for ReLU's.

    () if they read the shape only, None if they read the numbers. An operator that only moves data, or converts it to
    a wider format, stands for its own readers.
    """
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):  # several results
        return None
    if value.dtype not in tables.FLOATS or value.is_neg() or value.device.type not in ("cpu", "cuda"):
        return None
    tests: set[Test] = set()
    stack = [node]
    seen = {node}
    while stack:
        current = stack.pop()
        for user in current.users if reader is None or current is not node else (reader,):
            if _moves_numbers(user, current):
                if user not in seen:
                    seen.add(user)
                    stack.append(user)
                continue
            found = exact_tests(user, current, value.dtype)
            if found is None:
                return None
            tests.update(found)
    return tuple(sorted(tests))


def only_at(user: Node, node: Node, position: int) -> bool:
    """Whether `user` reads `node` as its argument at `position` and nowhere else."""
    return argument_positions(user, node) == [position] and user.args[position] is node


def _is_decided(dtype: torch.dtype) -> bool:
    """Whether a small change of a number may change its value in `dtype` by much more, as for whole numbers."""
    return dtype in tables.COARSE or not (dtype.is_floating_point or dtype.is_complex)


def _moves_numbers(user: Node, node: Node) -> bool:
    """Whether `user` gives the numbers of `node` on as they are: moved, or in a wider format."""
    name = target_name(user)
    if user.op != "call_function" or not only_at(user, node, 0):
        return False
    if name in tables.CONVERSIONS:
        # a wider format has all numbers of the narrower one, in the same order
        before, after = node.meta["val"].dtype, user.meta["val"].dtype
        return after in tables.FLOATS and torch.promote_types(before, after) is after
    return name in tables.MOVES


def exact_tests(user: Node, node: Node, dtype: torch.dtype | None = None) -> tuple[Test, ...] | None:
    """The tests that decide the result of `user`, () for the shape only, None if it reads the numbers of `node`.

    None as well if kernels may differ in the outcomes for numbers of `dtype`, by default that of `node`.
    """
    name = target_name(user)
    dtype = dtype or node.meta["val"].dtype
    if user.op != "call_function" or dtype not in tables.FLOATS:
        return None
    if (shaped := shape_only_at(user)) is not None:
        return () if only_at(user, node, shaped) else None
    if name not in tables.ONLY_TESTS or user.kwargs or not only_at(user, node, tables.ONLY_TESTS[name][0]):
        return None
    position, tests_for = tables.ONLY_TESTS[name]
    if not all(isinstance(c, int | float) and float(c) == c for c in user.args[position + 1 :]):
        return None
    tests = tests_for(*user.args)
    if not all(_exact(c, dtype) for test in tests for c in test.constants):
        return None
    return tuple(Test(test.kind, tuple(0.0 if c == 0 else float(c) for c in test.constants)) for test in tests)


def _exact(constant: float, dtype: torch.dtype) -> bool:
    """Whether every kernel compares with `constant` alike: it is a number of the format, and not subnormal.

    Kernels differ in whether they round a constant to the tensor's dtype or the number to theirs, and may take
    subnormal numbers for zero.
    """
    with torch_values.without_modes():
        rounded = torch.tensor(constant, dtype=torch.float64).to(dtype).item()
    return rounded == constant and (constant == 0 or abs(constant) >= 4 * torch.finfo(dtype).tiny)
