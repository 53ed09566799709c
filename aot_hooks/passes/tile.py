"""Parts of layers in tiles of tokens: a joint graph in, a joint graph out, and what was done.

      g = mm(x, w)                   [N, F]
      h = silu(g) * mm(x, v)         [N, F]       forward, for each tile:    o of these tokens
      o = mm(h, u)                   [N, D]  -->
      grad_h = mm(grad_o, t(u))      [N, F]       backward, for each tile:   g, h again; grad_x of these tokens;
      grad_u = mm(t(h), grad_o)      [F, D]                                  grad_u += mm(t(h), grad_o)
      grad_x = mm(..., t(w)) + ...   [N, D]

A part treats each token alone. It begins with a product that makes tokens wider than its input. It follows all values
that are as wide, forward and backward, up to products and sums that make them narrow. It is found by data flow
(`graphs/rows.py`), and needs a second product of the forward, which makes tokens narrow again. So of a layer's own
working set one tile is alive, and only narrow values cross the borders of the part.

- With recomputation the part saves what it reads. The backward computes wide values of a tile again.
- Without, the forward stays as it is and its products stay saved. The backward alone runs over tiles.

The loops are unrolled like those of a loss in chunks, see chunk.py and chunk_loop.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graphs.nodes import has_tag, is_view, source_line, target_name, tensor_bytes
from ..graphs.rows import VIEWS, Rows, Step, is_elementwise, is_tensor, shape_of, step_of
from ..torch_private import aot
from ..torch_private.values import hint, symbols_of
from .chunk import IN_CHUNK, PRODUCTS, depends_on, erase_unread
from .chunk_loop import Loop, place_in_order, read_sizes_of_inputs, write_chunks
from .edits import run_on_fakes, show

# Tokens of a tile at least. Each tile reads and writes the sums of the weights' gradients once, see chunk.py.
_LEAST_TOKENS = {"cpu": 256, "cuda": 2048}
# A graph holds each tile's operators, for each layer, and compiling takes as much longer.
_MOST_TILES = 16
# Bytes of a wide value in float32. A part has about eight of them. Below, a graph is smaller without tiles.
_LEAST_BYTES = 4 << 20
_CHECKPOINTED = ("recompute", "ac_graph_id")  # torch's marks of what a checkpoint computes again


@dataclass(frozen=True)
class Tiled:
    """What was done with one part.

    Attributes:
        wide: dtype and sizes of its first wide value, "bfloat16[8192, 14336]".
        how: in which way it is computed in tiles; or why it is not.
        done: whether it is in tiles.
        count, tokens: the number of tiles, and the most tokens of one; 0 if it is not in tiles.
        working_bytes, tile_bytes: of all values of tokens that are alive at once inside of the part, and of one tile.
        border_bytes: of the values of tokens that the part reads and makes.
        node: the name of the first product in the joint graph.
        place: its line, "model.py:31". Not stored in caches: another program may take the entry.
    """

    wide: str
    how: str
    done: bool
    count: int = 0
    tokens: int = 0
    working_bytes: int = 0
    tile_bytes: int = 0
    border_bytes: int = 0
    node: str = field(default="", compare=False, repr=False)
    place: str = field(default="", compare=False)

    @property
    def part(self) -> str:
        return f"{self.wide} of {self.place}" if self.place else self.wide

    def left(self, why: str) -> Tiled:
        """This part, which may be in tiles, as one that is not because of `why`. Its own reason comes first."""
        return replace(self, how=why, done=False, count=0, tokens=0, tile_bytes=0) if self.done else self

    def __str__(self) -> str:
        return f"{self.part}: {self.how}" if self.done else f"{self.part}: not in tiles, {self.how}"


class _NotTiled(Exception):
    """Why a part is left as it is; "" if it is none."""


@dataclass(frozen=True)
class _Part:
    """What is computed in tiles.

    Attributes:
        steps: of the nodes, in order.
        outputs: the nodes that others read.
        tangents: all nodes of the graph that belong to the backward.
        is_wide: whether a node has more numbers than the input of the first product.
    """

    seed: Node
    steps: Mapping[Node, Step]
    outputs: tuple[Node, ...]
    tangents: Collection[Node]
    is_wide: Callable[[Node], bool]

    def outputs_of(self, *, backward: bool) -> list[Node]:
        return [n for n in self.outputs if (n in self.tangents) == backward]

    def needed(self, outputs: Iterable[Node]) -> list[Node]:
        """The nodes of the part, in order, that `outputs` are computed from."""
        found: set[Node] = set()
        stack = list(outputs)
        while stack:
            node = stack.pop()
            if node in self.steps and node not in found:
                found.add(node)
                stack += node.all_input_nodes
        return [n for n in self.steps if n in found]

    def inputs(self, nodes: Iterable[Node]) -> set[Node]:
        return {n for node in nodes for n in node.all_input_nodes} - self.steps.keys()

    def cut_inputs(self, nodes: Iterable[Node]) -> set[Node]:
        """Inputs that have tokens."""
        return {n for node in nodes for n, read in self.steps[node].reads.items() if read.cut and n not in self.steps}


def tiled(
    joint: GraphModule, tokens: int | None, *, again: bool = True, finer: int = 1
) -> tuple[GraphModule, tuple[Tiled, ...]]:
    """`joint`, or a graph without gradients, with parts in tiles of tokens. `joint` itself is not changed.

    Args:
        tokens: of a tile at most; None: so many tiles that the values of one take no more than the part's inputs and
            outputs, where it is worth it.
        again: whether the backward computes wide values again. Otherwise they stay saved.
        finer: there are so many times more tiles than are chosen.
    """
    if not any(_seeds(joint, tokens)):
        return joint, ()
    gm = aot.edited_copy(joint)
    read_sizes_of_inputs(gm.graph)
    _slice_for_split(gm)
    found: list[Tiled] = []
    tried: set[str] = set()
    changed = False
    while (seed := next((n for n in _seeds(gm, tokens) if n.name not in tried), None)) is not None:
        tried.add(seed.name)
        place = source_line(seed) or seed.name
        note = Tiled(_text(seed), "", False, node=seed.name, place=place)
        try:
            part = _part(gm, seed, tried, again=again)
            note = _sized(note, part, tokens, finer)
            _write(gm, part, note.count)
        except _NotTiled as e:
            if str(e):
                found.append(note.left(str(e)) if note.done else replace(note, how=str(e)))
            continue
        found.append(note)
        changed = True
    if not changed:
        return joint, tuple(found)
    gm.graph.lint()
    gm.recompile()
    show("joint graph in tiles", gm)
    return gm, tuple(found)


def _slice_for_split(gm: GraphModule) -> None:
    """Have slices in place of `split`, whose result is no tensor, in place: products of gate and up in one."""
    for node in list(gm.graph.nodes):
        if target_name(node) not in ("aten.split.Tensor", "aten.split_with_sizes.default"):
            continue
        source, sizes, *rest = node.args
        dim, shape = (rest[0] if rest else 0), shape_of(source)
        width = shape[-1]
        known = all(isinstance(n, int) for n in (width, *(sizes if isinstance(sizes, list | tuple) else (sizes,))))
        if dim % len(shape) != len(shape) - 1 or not known:
            continue
        ends = [*range(sizes, width, sizes), width] if isinstance(sizes, int) else [*itertools.accumulate(sizes)]
        for user in list(node.users):
            i: Any = user.args[1]
            with gm.graph.inserting_before(user):
                made = gm.graph.call_function(
                    torch.ops.aten.slice.Tensor, (source, dim, ends[i - 1] if i else 0, ends[i])
                )
            run_on_fakes(made)
            made.meta |= {k: v for k, v in user.meta.items() if k not in made.meta}
            user.replace_all_uses_with(made)
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)


def _text(node: Node) -> str:
    value = node.meta["val"]
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


def _seeds(gm: GraphModule, tokens: int | None) -> Iterator[Node]:
    """Products of the forward that make tokens wider, in order: where a part may begin."""
    of_tangents = depends_on(gm.graph.nodes, filter(aot.is_tangent, gm.graph.find_nodes(op="placeholder")))
    for node in gm.graph.nodes:
        if target_name(node) not in PRODUCTS or node in of_tangents or not is_tensor(node) or node.meta.get(IN_CHUNK):
            continue
        (count, width), terms = shape_of(node), shape_of(node.args[-2])[1]
        if not isinstance(width, int) or not isinstance(terms, int) or width <= terms:
            continue
        large = 4 * hint(count) * width >= _LEAST_BYTES if tokens is None else hint(count) > tokens
        if large and node.meta["val"].is_floating_point():
            yield node


# --- the part ---------------------------------------------------------------------------------------------------------


def _part(gm: GraphModule, seed: Node, tried: set[str], *, again: bool) -> _Part:
    """The part that begins with `seed`. The names of its products are added to `tried`. Raises `_NotTiled`."""
    count = shape_of(seed)[0]
    if symbols_of(count) and not hint(count):
        raise _NotTiled(f"the number of tokens, {count}, is made by an operator of the program")
    narrow = hint(count) * shape_of(seed.args[-2])[1]  # type: ignore[arg-type]

    def is_wide(node: Node) -> bool:
        return is_tensor(node) and hint(node.meta["val"].numel()) > narrow

    nodes = list(gm.graph.nodes)
    tangents = depends_on(nodes, filter(aot.is_tangent, gm.graph.find_nodes(op="placeholder")))
    grown = _grown(seed, is_wide)
    tried |= {n.name for n in grown if target_name(n) in PRODUCTS}
    steps = _confirmed(nodes, grown, is_wide)
    if sum(target_name(n) in PRODUCTS and n not in tangents for n in steps) < 2:
        raise _NotTiled(_why_alone(seed, steps, is_wide))
    if not again:  # products of the forward stay saved
        steps = _without_forward(steps, tangents)
    steps = _with_sums_of_results(nodes, steps)
    outputs = []
    for node in steps:
        reader = next((user for user in node.users if user not in steps), None)
        if reader is None or (not again and node not in tangents):
            continue
        if is_wide(node) and steps[node].out is not None:
            raise _NotTiled(_why_read(node, reader))
        outputs.append(node)
    part = _Part(seed, steps, tuple(outputs), tangents, is_wide)
    part = replace(part, steps={n: steps[n] for n in part.needed(outputs)})
    _check_inputs(part, again=again)
    _check_order(nodes, part)
    return part


def _grown(seed: Node, is_wide: Callable[[Node], bool]) -> dict[Node, Rows | None]:
    """What treats the tokens of `seed` alike, up to results of products, and the wide values that it is made from.

    Each node has the dimensions of its tokens; None for a sum over them.
    """
    found: dict[Node, Rows | None] = {seed: Rows(0)}
    first = step_of(seed, {}, Rows(0))
    if first is None:
        raise _NotTiled("its weight has tokens too")
    stack = [(seed, first)]
    while stack:
        node, step = stack.pop()
        for source, read in step.reads.items():
            if source in found or not read.cut or read.like or not is_wide(source):
                continue
            made = step_of(source, _known(source, found), read.rows)
            if made is not None and made.out == read.rows:
                found[source] = made.out
                stack.append((source, made))
        if step.out is None or (target_name(node) in PRODUCTS and not is_wide(node)):
            continue
        for user in node.users:
            made = step_of(user, _known(user, found)) if user not in found else None
            if made is not None:
                found[user] = made.out
                stack.append((user, made))
    return found


def _known(node: Node, found: Mapping[Node, Rows | None]) -> dict[Node, Rows]:
    return {n: rows for n in node.all_input_nodes if (rows := found.get(n)) is not None}


def _confirmed(
    nodes: Iterable[Node], found: Mapping[Node, Rows | None], is_wide: Callable[[Node], bool]
) -> dict[Node, Step]:
    """The steps of wide values, of what lies between them, and of what reads them. In order.

    A step is made anew once all of its inputs are known: all must have the same tokens.
    """
    nodes = [n for n in nodes if n in found]
    kept: set[Node] = set()
    for node in reversed(nodes):
        product = target_name(node) in PRODUCTS and not is_wide(node)
        if found[node] is not None and (is_wide(node) or (not product and not kept.isdisjoint(node.users))):
            kept.add(node)
    wide = {n for n in kept if is_wide(n)}
    inside = {n: found[n] for n in nodes if n in kept or not wide.isdisjoint(n.all_input_nodes)}
    steps: dict[Node, Step] = {}
    for node, rows in inside.items():
        step = step_of(node, _known(node, inside), rows)
        if step is None or step.out != rows:
            raise _NotTiled(f"{_name(node)} has its tokens elsewhere than what it reads")
        if any(n in inside and inside[n] is None for n in node.all_input_nodes):
            raise _NotTiled(f"{_name(node)} needs a sum over all tokens")
        steps[node] = step
    return steps


def _without_forward(steps: Mapping[Node, Step], tangents: Collection[Node]) -> dict[Node, Step]:
    """`steps` without products of the forward, and what can't be computed again from their results."""
    found: dict[Node, Step] = {}
    for node, step in steps.items():
        if node in tangents or is_elementwise(node) or _is_view(node):
            found[node] = step
    return found


def _with_sums_of_results(nodes: Iterable[Node], steps: Mapping[Node, Step]) -> dict[Node, Step]:
    """`steps` with additions whose inputs are all results of tokens: grad_x is a sum of two products, in two views."""
    known = {n: step.out for n, step in steps.items() if step.out is not None}
    views: dict[Node, Step] = {}
    more: dict[Node, Step] = {}
    for node in nodes:
        if node in steps or not is_tensor(node):
            continue
        adds = target_name(node) == "aten.add.Tensor" and len(node.all_input_nodes) == 2
        if not (adds or _is_view(node)) or not all(n in known for n in node.all_input_nodes):
            continue
        step = step_of(node, {n: known[n] for n in node.all_input_nodes})
        if step is None or step.out is None:
            continue
        known[node] = step.out
        if not adds:
            views[node] = step
            continue
        more[node] = step
        stack = list(node.all_input_nodes)
        while stack:
            source = stack.pop()
            if source in views:
                more[source] = views.pop(source)
                stack += source.all_input_nodes
    found = {**steps, **more}
    return {n: found[n] for n in nodes if n in found}


def _check_inputs(part: _Part, *, again: bool) -> None:
    """What the part reads must be narrow, or an input of the graph, or saved anyway."""
    if not part.outputs:
        raise _NotTiled("nothing of it is read")
    for node in part.cut_inputs(part.steps):
        if not part.is_wide(node) or node.op == "placeholder":
            continue
        if has_tag(node, torch.Tag.nondeterministic_seeded):
            raise _NotTiled(f"its random numbers are drawn for all tokens at once ({_name(node)})")
        if again or node in part.tangents:
            raise _NotTiled(f"it reads {_text(node)} ({_name(node)}), which is not known to treat tokens alike")


def _check_order(nodes: list[Node], part: _Part) -> None:
    """No token may need another token's result in the same loop."""
    for backward in (False, True):
        outputs = part.outputs_of(backward=backward)
        after = depends_on(nodes, outputs) - part.steps.keys()
        late = part.inputs(part.needed(outputs)) & (after if backward else after | set(part.tangents))
        if late:
            raise _NotTiled(f"a token needs results of others ({_name(min(late, key=nodes.index))})")


def _why_alone(seed: Node, steps: Mapping[Node, Step], is_wide: Callable[[Node], bool]) -> str:
    """Why a part with one product has no second one; "" if none follows, as behind most products."""
    stack, seen = [seed], {seed}
    while stack:
        for user in stack.pop().users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            if target_name(user) not in PRODUCTS and (is_wide(user) or not is_tensor(user)):
                stack.append(user)
    if not any(target_name(n) in PRODUCTS and n is not seed for n in seen):
        return ""
    readers = ((n, user) for n in steps if is_wide(n) for user in n.users if user not in steps and user in seen)
    return next((_why_read(*each) for each in readers), "")


def _why_read(node: Node, reader: Node) -> str:
    if reader.op == "output":
        return f"the program returns {_text(node)} ({_name(node)})"
    return f"{_name(reader)} reads {_text(node)} and is not known to treat tokens alike"


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and (is_view(node) or target_name(node) in VIEWS)


def _name(node: Node) -> str:
    return f"'{node.name}', {line}" if (line := source_line(node)) else f"'{node.name}'"


# --- how many tiles ---------------------------------------------------------------------------------------------------


def _sized(note: Tiled, part: _Part, tokens: int | None, finer: int) -> Tiled:
    """`note` with the number of tiles, and the bytes of one. Raises `_NotTiled` if tiles are of no use."""
    rows = hint(shape_of(part.seed)[0])
    passes = [part.outputs_of(backward=backward) for backward in (False, True)]
    working = max(_alive_bytes(part, part.needed(outputs)) for outputs in passes if outputs)
    border = {*part.cut_inputs(part.steps), *(n for n in part.outputs if part.steps[n].out is not None)}
    border_bytes = sum(tensor_bytes(n.meta["val"]) for n in border if not part.is_wide(n))  # others are there anyway
    if tokens is not None:
        count = -(-rows // tokens)
        while rows - rows // count * (count - 1) > tokens:  # the last tile has the rest
            count += 1
    else:
        least = _LEAST_TOKENS.get(part.seed.meta["val"].device.type, 1024)
        count = min(_MOST_TILES, rows // least, finer * -(-working // border_bytes))
        if rows < 2 * least:
            raise _NotTiled(f"{rows} tokens are one tile of {least}")
        if count < 2:
            raise _NotTiled(f"its values take {working} bytes, and what it reads and makes {border_bytes}")
        if (sums := _sum_bytes(part)) >= working - working // count:
            raise _NotTiled(f"sums of weights' gradients in float32 take {sums} bytes, and its values {working}")
    how = f"{count} tiles" + ("" if any(n in part.tangents for n in part.outputs) else " of the forward")
    if len([outputs for outputs in passes if outputs]) == 2:
        how += ", wide values again in the backward"
    elif passes[1]:
        how += " of the backward, products stay saved"
    size = rows - rows // count * (count - 1)
    tile = working * size // max(1, rows)
    note = replace(note, how=how, done=True, count=count, tokens=size)
    return replace(note, working_bytes=working, tile_bytes=tile, border_bytes=border_bytes)


def _alive_bytes(part: _Part, nodes: list[Node]) -> int:
    """The most bytes of values of tokens, made by `nodes`, that are alive at once."""
    base: dict[Node, Node] = {}
    last: dict[Node, int] = {}
    for i, node in enumerate(nodes):
        source = node.all_input_nodes[0] if _is_view(node) else node
        base[node] = base.get(source, source)
        for each in (node, *node.all_input_nodes):
            last[base.get(each, each)] = i
    alive = most = 0
    ends: dict[int, int] = {}
    for i, node in enumerate(nodes):
        if base[node] is node and part.steps[node].out is not None:
            nbytes = tensor_bytes(node.meta["val"])
            alive += nbytes
            ends[last[node]] = ends.get(last[node], 0) + nbytes
        most = max(most, alive)
        alive -= ends.get(i, 0)
    return most


def _sum_bytes(part: _Part) -> int:
    """Bytes that sums in float32 take over those of the weights' gradients themselves."""
    sums = [n.meta["val"] for n, step in part.steps.items() if step.out is None]
    return sum(4 * hint(value.numel()) for value in sums if value.element_size() < 4)


# --- the loops --------------------------------------------------------------------------------------------------------


def _write(gm: GraphModule, part: _Part, count: int) -> None:
    """Compute `part` in `count` tiles, in place."""
    nodes = list(gm.graph.nodes)
    loop = Loop(gm, part.steps, part.seed, count)
    forward, backward = (part.outputs_of(backward=which) for which in (False, True))
    made: dict[Node, Node] = {}
    if forward:
        made |= write_chunks(loop, part.needed(forward), forward, waits_for_inputs=True)
        marks = {key: part.seed.meta[key] for key in _CHECKPOINTED if key in part.seed.meta}
        for node in _new(gm, nodes):
            node.meta.update(marks)
    if backward:
        needed = part.needed(backward)
        inputs = part.inputs(needed)
        first = next(n for n in nodes if n in part.tangents and n in inputs and is_tensor(n))
        made |= write_chunks(loop, needed, backward, waits_for=first, waits_for_inputs=True)
    for node, result in made.items():
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in part.steps)
    for node in _new(gm, nodes):
        if target_name(node) in PRODUCTS:
            node.meta[IN_CHUNK] = True
    erase_unread(gm, nodes)
    place_in_order(gm)


def _new(gm: GraphModule, nodes: Collection[Node]) -> list[Node]:
    known = set(nodes)
    return [n for n in gm.graph.nodes if n not in known]
