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

from dataclasses import dataclass, field, replace

from torch.fx import GraphModule, Node

from ..graphs.nodes import source_line, tensor_bytes, type_text
from ..graphs.rows import is_tensor, shape_of
from ..torch_private import aot
from ..torch_private.values import hint
from .chunk_loop import Loop, put_in_place, read_sizes_of_inputs, write_chunks
from .edits import show
from .expand import SPLITS, expand
from .regions import LeftWhole, seeds_of
from .tile_part import Part, keeps_memory, part_of

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
    if not any(seeds_of(joint, tokens, _LEAST_BYTES, 1)):
        return joint, ()
    gm = aot.edited_copy(joint)
    read_sizes_of_inputs(gm.graph)
    expand(gm, SPLITS)
    found: list[Tiled] = []
    tried: set[str] = set()
    changed = False
    while (seed := next((n for n in seeds_of(gm, tokens, _LEAST_BYTES, 1) if n.name not in tried), None)) is not None:
        tried.add(seed.name)
        place = source_line(seed) or seed.name
        note = Tiled(type_text(seed), "", False, node=seed.name, place=place)
        try:
            part = part_of(gm, seed, tried, again=again)
            note = _sized(note, part, tokens, finer)
            _write(gm, part, note.count)
        except LeftWhole as e:
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


# --- how many tiles ---------------------------------------------------------------------------------------------------


def _sized(note: Tiled, part: Part, tokens: int | None, finer: int) -> Tiled:
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
        count = min(_MOST_TILES, rows // least, finer * -(-working // border_bytes))
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
    base: dict[Node, Node] = {}
    last: dict[Node, int] = {}
    for i, node in enumerate(nodes):
        source = node.all_input_nodes[0] if keeps_memory(node) else node
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
