"""Reads of the small numbers of a row alone. They bear an error that is a share of each number, not one of the largest.

      x                0.5    -0.3    900      int8 in one block: a step is 7, and 0.5 comes back as 0
      tanh(x)          0.46   -0.29   1        a backward that saved x computes it again from 0, 0, 900
      g * x * slope    ...    ...     0        the slope of a sigmoid of x is zero but where x is small

float8 and `cast` round each number by a share of itself. Eager mode rounds tanh's result, whose block has no 900.

An activation by hand is no such read: x * tanh(x), and GELU by tanh, are as large as x. There the small numbers matter
as little as in what eager mode rounds. Neither are numbers that a norm made, which have about the same size.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import cast

import torch
from torch.fx import Node

from cudagraph.placeholder import nearest_first

from . import read_tables as tables
from .nodes import argument_called, has_tag, numel, op_name, view_source

_aten = torch.ops.aten
_BY_NUMBER = tables.OF_NUMBERS | tables.SUMS  # multiples and sums, if the other argument is a number


def solves(node: Node | None) -> bool:
    """Whether `node` is the solution of a linear system, or a view of it."""
    while node is not None and (source := view_source(node)) is not None:
        node = source
    if node is not None and node.target is operator.getitem:
        node = cast("Node", node.args[0])
    return node is not None and str(node.target) in tables.SOLUTIONS


class Elementwise:
    """Which values are functions of which others, number by number.

    `forward_node_of` maps nodes of the backward to those of the forward that compute the same.
    """

    def __init__(self, forward_node_of: Mapping[Node, Node]) -> None:
        self._forward_node_of = forward_node_of
        self._known: dict[Node, dict[Node, None]] = {}

    def saturates(self, user: Node, value: Node) -> bool:
        """Whether the result of `user` is no larger where numbers of `value` are, and nothing makes up for that."""
        name = str(user.target)
        if name in tables.ONE_SIDED:
            name = tables.ONE_SIDED[name][argument_called("min", user) is None]
        if name not in tables.SATURATING or (name == "aten.clamp_min.default" and argument_called("min", user) == 0):
            return False
        return not self._is_gate_of_itself(user) and not self._is_normalized(value)

    def is_of_the_same(self, value: Node, gate: Node) -> bool:
        """Whether both are made of the same numbers, and the program does not multiply them with each other."""
        own, chain = self._made_of(value), list(self._made_of(gate))
        common = next((i for i, n in enumerate(chain) if n in own), None)
        return common is not None and not any(map(self._is_gate_of_itself, chain[:common]))

    def _made_of(self, node: Node) -> dict[Node, None]:
        """`node` and its sources, the nearest first: `node` is an elementwise function of each source alone.

        Of tanh(x + x ** 3): the tanh, the sum, x ** 3 and x.
        """
        node = self._forward_node_of.get(node, node)
        if node not in self._known:
            found: dict[Node, None] = {}
            last: Node | None = node
            while last is not None:
                found.update(self._chain_of(last))
                last = self._common_source(next(reversed(found)), found)
            self._known[node] = found
        return self._known[node]

    def _chain_of(self, node: Node) -> dict[Node, None]:
        """The nodes that lead to `node`, nearest first: each is computed from the next one and no other tensor."""
        node = self._forward_node_of.get(node, node)
        found: dict[Node, None] = {node: None}
        while len(sources := _sources(node)) == 1:
            node = self._forward_node_of.get(sources[0], sources[0])
            found[node] = None
        return found

    def _common_source(self, node: Node, found: dict[Node, None]) -> Node | None:
        """What both tensors are made of that `node` reads: x, of x + x ** 3. Adds to `found` what lies between."""
        if len(sources := _sources(node)) != 2:
            return None
        a, b = map(self._chain_of, sources)
        common = next((n for n in a if n in b), None)
        if common is not None:
            for chain in (a, b):
                found.update(dict.fromkeys(list(chain)[: list(chain).index(common)]))
        return common

    def _is_gate_of_itself(self, node: Node) -> bool:
        """Whether `node`, plus or times numbers, is multiplied with one of its own sources, as in x * sigmoid(x)."""
        node = self._forward_node_of.get(node, node)
        own = self._made_of(node)

        def next_of(n: Node) -> list[Node]:
            return [u for u in n.users if _changes_by_numbers(u)]

        gates = list(nearest_first([node], next_of))
        factors = [
            a
            for gate in gates
            for u in gate.users
            if u.target is _aten.mul.Tensor
            for a in u.args
            if isinstance(a, Node) and a not in gates
        ]
        return any(n in own for a in factors for n in self._made_of(a))

    def _is_normalized(self, value: Node) -> bool:
        """Whether `value` is the result of a norm, times a weight and plus another or not."""
        made = (n.args[0] if n.target is operator.getitem else n for n in self._made_of(value))
        return any(isinstance(n, Node) and op_name(n) in tables.NORMALIZE for n in made)


def _sources(node: Node) -> list[Node]:
    """The tensors of which `node` is an elementwise function; broadcast ones, such as weights, don't count."""
    if node.op != "call_function":
        return []
    moves = tables.MOVES | tables.CONVERSIONS
    if str(node.target) not in moves and not has_tag(node, torch.Tag.pointwise):
        return []
    return [n for n in node.all_input_nodes if numel(n) >= numel(node)]


def _changes_by_numbers(node: Node) -> bool:
    """Whether `node` only moves, converts, or adds to or multiplies by constants what it reads."""
    name = str(node.target)
    by_number = name in _BY_NUMBER and not any(isinstance(a, Node) for a in node.args[1:])
    return by_number or name in tables.MOVES | tables.CONVERSIONS
