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

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from torch.fx import GraphModule, Node

from ..graphs.lifetimes import alive_along
from ..graphs.nodes import is_tensor, source_line, storages, tensor_bytes, type_text
from ..graphs.rows import shape_of
from ..torch_private import aot
from ..torch_private.values import hint
from .chunk_loop import Loop, put_in_place, read_sizes_of_inputs, write_chunks
from .edits import show
from .expand import SPLITS, expand
from .regions import LeftWhole, RegionRow, each_region, seeds_of
from .tile_part import Part, note_terms, part_of, terms_of

# Tokens of a tile at least. Each tile reads and writes the sums of the weights' gradients once, see chunk.py.
_LEAST_TOKENS = {"cpu": 256, "cuda": 2048}
# A graph holds each tile's operators, for each layer, and compiling takes as much longer.
_MOST_TILES = 16
# Bytes of a wide value in float32. A part has about eight of them. Below, a graph is smaller without tiles.
_LEAST_BYTES = 4 << 20
_CHECKPOINTED = ("recompute", "ac_graph_id")  # torch's marks of what a checkpoint computes again


@dataclass(frozen=True, kw_only=True)
class Tiled(RegionRow):
    """What was done with one part.

    Attributes:
        wide: dtype and sizes of its first wide value, "bfloat16[8192, 14336]".
        working_bytes, tile_bytes: of all values of tokens that are alive at once inside of the part, and of one tile.
        border_bytes: of the values of tokens that the part reads and makes.
    """

    NAMES: ClassVar = ("tiles", "wide", "tile_bytes")

    wide: str
    working_bytes: int = 0
    tile_bytes: int = 0
    border_bytes: int = 0


def tiled(joint: GraphModule, tokens: int | None, *, again: bool = True) -> tuple[GraphModule, tuple[Tiled, ...]]:
    """`joint`, or a graph without gradients, with parts in tiles of tokens. `joint` itself is not changed.

    Args:
        tokens: of a tile at most; None: so many tiles that the values of one take no more than the part's inputs and
            outputs, where it is worth it.
        again: whether the backward computes wide values again. Otherwise they stay saved.
    """
    if not any(_seeds(joint, tokens)):
        return joint, ()
    gm = aot.edited_copy(joint)
    read_sizes_of_inputs(gm.graph)
    expand(gm, SPLITS)
    note_terms(gm)

    def divide(gm: GraphModule, seed: Node, tried: set[str]) -> tuple[GraphModule, Tiled | None]:
        note = Tiled(wide=type_text(seed), node=seed.name, place=source_line(seed) or seed.name)
        try:
            part = part_of(gm, seed, tried, again=again)
            note = _sized(note, part, tokens)
            _write(gm, part, note.count)
        except LeftWhole as e:
            return gm, note.left(str(e)) if str(e) else None
        return gm, note

    gm, found = each_region(gm, lambda gm: _seeds(gm, tokens), divide)
    if not any(row.done for row in found):
        return joint, found
    gm.graph.lint()
    gm.recompile()
    show("joint graph in tiles", gm)
    return gm, found


def _seeds(gm: GraphModule, tokens: int | None) -> Iterator[Node]:
    return (n for n in seeds_of(gm, tokens, _LEAST_BYTES, 1) if shape_of(n)[1] > terms_of(n))


# --- how many tiles ---------------------------------------------------------------------------------------------------


def _sized(note: Tiled, part: Part, tokens: int | None) -> Tiled:
    """`note` with the number of tiles, and the bytes of one. Raises `LeftWhole` if tiles are of no use."""
    rows = hint(shape_of(part.seed)[0])
    passes = [part.outputs_of(backward=backward) for backward in (False, True)]
    working = max(_alive_bytes(part, part.needed(outputs)) for outputs in passes if outputs)
    border = {*part.cut_inputs(), *(n for n in part.outputs if part.steps[n].out is not None)}
    border_bytes = sum(tensor_bytes(n.meta["val"]) for n in border if not part.is_wide(n))  # others are there anyway
    if tokens is not None:
        count = -(-rows // tokens)
        while rows - rows // count * (count - 1) > tokens:  # the last tile has the rest
            count += 1
    else:
        least = _LEAST_TOKENS.get(part.seed.meta["val"].device.type, 1024)
        count = min(_MOST_TILES, rows // least, -(-working // border_bytes))
        if rows < 2 * least:
            raise LeftWhole(f"{rows} tokens are one tile of {least}")
        if count < 2:
            raise LeftWhole(f"its values take {working} bytes, and what it reads and makes {border_bytes}")
        if (sums := _sum_bytes(part)) >= working - working // count:
            raise LeftWhole(f"sums of weights' gradients in float32 take {sums} bytes, and its values {working}")
    how = f"{count} tiles" + ("" if any(n in part.tangents for n in part.outputs) else " of the forward")
    if len([outputs for outputs in passes if outputs]) == 2:
        how += ", wide values again in the backward"
    elif passes[1]:
        how += " of the backward, products stay saved"
    size = rows - rows // count * (count - 1)
    tile = working * size // max(1, rows)
    note = replace(note, how=how, done=True, count=count, tokens=size)
    return replace(note, working_bytes=working, tile_bytes=tile, border_bytes=border_bytes)


def _alive_bytes(part: Part, nodes: list[Node]) -> int:
    """The most bytes of values of tokens, made by `nodes`, that are alive at once."""
    position = {node: i for i, node in enumerate(nodes)}
    last = {n: max((position[user] for user in n.users if user in position), default=i) for n, i in position.items()}
    counted = storages(n for n in nodes if part.steps[n].out is not None) - storages(part.inputs(nodes))
    return max(alive_along(nodes, counted, to_end=(), last_reader=last, nbytes=lambda n: tensor_bytes(n.meta["val"])))


def _sum_bytes(part: Part) -> int:
    """Bytes that sums in float32 take over those of the weights' gradients themselves."""
    sums = [n.meta["val"] for n, step in part.steps.items() if step.out is None]
    return sum(4 * hint(value.numel()) for value in sums if value.element_size() < 4)


# --- the loops --------------------------------------------------------------------------------------------------------


def _write(gm: GraphModule, part: Part, count: int) -> None:
    """Compute `part` in `count` tiles, in place."""
    nodes = list(gm.graph.nodes)
    loop = Loop(gm, part.steps, part.seed, count)
    forward, backward = (part.outputs_of(backward=which) for which in (False, True))
    made: dict[Node, Node] = {}
    if forward:
        made |= write_chunks(loop, part.needed(forward), forward, waits_for_inputs=True)
        marks = {key: part.seed.meta[key] for key in _CHECKPOINTED if key in part.seed.meta}
        for node in {*gm.graph.nodes} - {*nodes}:
            node.meta.update(marks)
    if backward:
        needed = part.needed(backward)
        inputs = part.inputs(needed)
        first = next(n for n in nodes if n in part.tangents and n in inputs and is_tensor(n))
        made |= write_chunks(loop, needed, backward, waits_for=first, waits_for_inputs=True)
    put_in_place(loop, made, nodes)
