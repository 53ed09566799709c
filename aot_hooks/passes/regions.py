"""A region of a joint graph that treats each token alike, so that it can run on some of the tokens.

      mm(h, w) --large--> casts, softmax, silu, ... --large--> mm(., u)             forward
      mm(grad, t(u)) --large--> ... --> mm(., t(w)), and sums over tokens           backward

A region begins with a product that makes tokens wider than its input. From there all large values are followed, forward
and backward, by data flow (`graphs/rows.py`). Products that make tokens narrow again, and sums over tokens, end it.
A loss in chunks (chunk.py) and a part of a layer in tiles (tile.py) are such regions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from torch.fx import GraphModule, Node

from cudagraph.placeholder import nearest_first

from ..graphs.nodes import is_tensor, name_and_line, target_name, type_text
from ..graphs.rows import Rows, TokenSlice, TokenStep, shape_of, token_step
from ..torch_private import aot
from ..torch_private.values import hint, symbols_of

PRODUCTS = ("aten.mm.default", "aten.addmm.default")
_Row = TypeVar("_Row", bound="RegionRow")
_IN_PARTS = "aot_hooks_in_parts"  # in the `meta` of products of a chunk or tile


class LeftWhole(Exception):
    """Why a region is computed for all tokens at once; "" if there is none."""


@dataclass(frozen=True, kw_only=True)
class RegionRow:
    """What was done with one region.

    Attributes:
        how: in which way it is computed for some tokens at a time; or why it is not.
        done: whether it is.
        count, tokens: the number of chunks or tiles, and the most tokens of one; 0 if it is left whole.
        node: the name of the first product in the joint graph.
        place: its line, "model.py:31". Not stored in caches: another program may take the entry.
    """

    # what its parts are called, and its fields for the first large value and for the bytes of one part
    NAMES: ClassVar[tuple[str, str, str]]

    how: str = ""
    done: bool = False
    count: int = 0
    tokens: int = 0
    node: str = field(default="", compare=False, repr=False)
    place: str = field(default="", compare=False)

    @property
    def region(self) -> str:
        """Its first large value, and where it is made: "bfloat16[8192, 14336] of mlp.py:31"."""
        large = str(getattr(self, self.NAMES[1]))
        return f"{large} of {self.place}" if self.place else large

    def left(self: _Row, why: str) -> _Row:
        """This region, which may be in parts, as one that is not because of `why`. Its own reason comes first."""
        whole: dict[str, Any] = {"done": False, "count": 0, "tokens": 0, self.NAMES[2]: 0}
        return replace(self, how=why, **whole) if self.done or not self.how else self

    def __str__(self) -> str:
        return f"{self.region}: {self.how}" if self.done else f"{self.region}: not in {self.NAMES[0]}, {self.how}"


def each_region(
    gm: GraphModule,
    seeds: Callable[[GraphModule], Iterable[Node]],
    divide: Callable[[GraphModule, Node, set[str]], tuple[GraphModule, _Row | None]],
) -> tuple[GraphModule, tuple[_Row, ...]]:
    """`gm` with the regions in parts that begin at `seeds(gm)`, and a row for each that is in parts or left whole.

    `divide`: does that for one seed; returns the graph, perhaps another one, and the row. It adds to the names that it
    gets those of products that begin no other region.
    """
    rows: list[_Row] = []
    tried: set[str] = set()
    while (seed := next((n for n in seeds(gm) if n.name not in tried), None)) is not None:
        tried.add(seed.name)
        gm, row = divide(gm, seed, tried)
        rows += [] if row is None else [row]
    return gm, tuple(rows)


@dataclass(frozen=True)
class TokenRegion:
    """What is computed for some tokens at a time.

    Attributes:
        seed: the product that begins it.
        steps: of the nodes, in order.
        outputs: the nodes that others read.
        tangents: all nodes of the graph that belong to the backward.
        kept: the slices that leave tokens out.
    """

    seed: Node
    steps: Mapping[Node, TokenStep]
    outputs: tuple[Node, ...]
    tangents: Collection[Node]
    kept: tuple[TokenSlice, ...] = ()

    def token_count(self) -> Any:
        return math.prod(self.kept[-1].kept_sizes()) if self.kept else shape_of(self.seed)[0]

    def outputs_of(self, *, backward: bool) -> list[Node]:
        return [n for n in self.outputs if (n in self.tangents) == backward]

    def needed(self, outputs: Iterable[Node]) -> list[Node]:
        """The nodes of the region, in order, that `outputs` are computed from."""
        found = ancestors(outputs, self.steps)
        return [n for n in self.steps if n in found]

    def inputs(self, nodes: Iterable[Node]) -> set[Node]:
        return {n for node in nodes for n in node.all_input_nodes} - self.steps.keys()

    def cut_inputs(self) -> set[Node]:
        """Inputs that have tokens."""
        return {n for step in self.steps.values() for n, read in step.reads.items() if read.cut} - self.steps.keys()


def tangents_of(gm: GraphModule) -> set[Node]:
    """All nodes that belong to the backward."""
    return depends_on(gm.graph.nodes, filter(aot.is_tangent, gm.graph.find_nodes(op="placeholder")))


def depends_on(nodes: Iterable[Node], start: Iterable[Node]) -> set[Node]:
    """`start`, and all of `nodes`, which are in order, that are computed from it."""
    found = set(start)
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def ancestors(
    nodes: Iterable[Node], inside: Collection[Node], follows: Callable[[Node], bool] = lambda _: True
) -> set[Node]:
    """Those of `nodes`, and of all `inside` that they are computed from, as far as `follows` holds."""

    def known(some: Iterable[Node]) -> list[Node]:
        return [n for n in some if n in inside and follows(n)]

    return set(nearest_first(known(nodes), lambda n: known(n.all_input_nodes)))


def seeds_of(gm: GraphModule, tokens: int | None, least_bytes: int, times: int) -> Iterator[Node]:
    """Products of the forward, in order, with more than `times` as many columns as terms: where a region may begin.

    They have more rows than `tokens`; with None, their result in float32 has `least_bytes`.
    """
    of_tangents = tangents_of(gm)
    for node in gm.graph.nodes:
        if target_name(node) not in PRODUCTS or node in of_tangents or not is_tensor(node) or node.meta.get(_IN_PARTS):
            continue
        (count, width), terms = shape_of(node), shape_of(node.args[-2])[1]
        if not isinstance(width, int) or not isinstance(terms, int) or width <= times * terms:
            continue
        large = 4 * hint(count) * width >= least_bytes if tokens is None else hint(count) > tokens
        if large and node.meta["val"].is_floating_point():
            yield node


def known_count(seed: Node) -> int:
    """How many tokens `seed` has in the example. Raises `LeftWhole`."""
    count = shape_of(seed)[0]
    if symbols_of(count) and not hint(count):
        raise LeftWhole(f"the number of tokens, {count}, is made by an operator of the program")
    return hint(count)


def steps_around(
    nodes: Collection[Node], seed: Node, is_large: Callable[[Node], bool], *, sliced: bool = False
) -> dict[Node, TokenStep]:
    """Returns the steps of the region that begins at `seed`, in the order of `nodes`.

    A step computes a large value, or a value between two large ones, or reads a large value.

    `sliced`: slices that leave tokens out are followed, too. Raises `LeftWhole`.
    """
    found = _reached(seed, is_large, sliced)
    order = [n for n in nodes if n in found]
    kept: set[Node] = set()
    for node in reversed(order):
        ends = target_name(node) in PRODUCTS and not is_large(node)
        if found[node] is not None and (is_large(node) or (not ends and not kept.isdisjoint(node.users))):
            kept.add(node)
    large = {n for n in kept if is_large(n)}
    inside = {n: found[n] for n in order if n in kept or not large.isdisjoint(n.all_input_nodes)}
    steps: dict[Node, TokenStep] = {}
    for node, rows in inside.items():  # anew, since all inputs are known now: all must have the same tokens
        step = token_step(node, _known(node, inside), rows, sliced=sliced)
        if step is None or step.out != rows:
            raise LeftWhole(f"{name_and_line(node)} has its tokens elsewhere than what it reads")
        if any(n in inside and inside[n] is None for n in node.all_input_nodes):
            raise LeftWhole(f"{name_and_line(node)} needs a sum over all tokens")
        steps[node] = step
    return steps


def _reached(seed: Node, is_large: Callable[[Node], bool], sliced: bool) -> dict[Node, Rows | None]:
    """What treats the tokens of `seed` alike, up to results of products, and the large values that it is made from.

    Each node has the dimensions of its tokens; None for a sum over them.
    """
    found: dict[Node, Rows | None] = {seed: Rows(0)}
    first = token_step(seed, {}, Rows(0))
    if first is None:
        raise LeftWhole("its weight has tokens too")
    stack = [(seed, first)]
    while stack:
        node, step = stack.pop()
        for source, read in step.reads.items():
            if source in found or not read.cut or read.like or not is_large(source):
                continue
            made = token_step(source, _known(source, found), read.rows, sliced=sliced)
            if made is not None and made.out == read.rows:
                found[source] = made.out
                stack.append((source, made))
        if step.out is None or (target_name(node) in PRODUCTS and not is_large(node)):
            continue
        for user in node.users:
            made = token_step(user, _known(user, found), sliced=sliced) if user not in found else None
            if made is not None:
                found[user] = made.out
                stack.append((user, made))
    return found


def _known(node: Node, found: Mapping[Node, Rows | None]) -> dict[Node, Rows]:
    return {n: rows for n in node.all_input_nodes if (rows := found.get(n)) is not None}


def outputs_of(
    steps: Mapping[Node, TokenStep],
    nodes: Iterable[Node],
    is_large: Callable[[Node], bool],
    why: Callable[[Node, Node], str],
) -> list[Node]:
    """Those of `nodes` that others than `steps` read. Raises `LeftWhole` with `why` if one of them is large."""
    found = []
    for node in nodes:
        if (reader := next((user for user in node.users if user not in steps), None)) is not None:
            if is_large(node) and steps[node].out is not None:
                raise LeftWhole(why(node, reader))
            found.append(node)
    return found


def why_read(node: Node, reader: Node) -> str:
    if reader.op == "output":
        return f"the program returns {type_text(node)} ({name_and_line(node)})"
    return f"{name_and_line(reader)} reads {type_text(node)} and is not known to treat tokens alike"


def mark_in_parts(nodes: Iterable[Node]) -> None:
    """Mark the products among `nodes` as parts of a chunk or tile: no other region may begin there."""
    for node in nodes:
        if target_name(node) in PRODUCTS:
            node.meta[_IN_PARTS] = True
