"""The unrolled loop over chunks of tokens: writes the nodes of a region once for each chunk, and joins the results.

      h --slice--> h_0, h_1, h_2         logits_0 ... grad_h_0      join_rows(grad_h_0, grad_h_1, grad_h_2)
                                                      grad_w = mm(t(grad_0), h_0)
                   wait_for(h_1, ...)    logits_1 ... grad_w = add_product(grad_w, t(grad_1), h_1)

Sums over tokens are in float32, whatever the dtype of the result. So are the products that make gradients before the
scale of the loss's gradient is known: they are rounded once, after it. Large sums are several tensors, each of some
rows.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from ..graphs.lifetimes import fuses
from ..graphs.nodes import MADE_EARLY, has_tag, is_tensor, is_view, target_name
from ..graphs.read_tables import CONVERSIONS
from ..graphs.rows import Rows, TokenRead, TokenSlice, TokenStep, shape_of
from ..torch_private import aot
from ..torch_private.values import computed_from, expression, is_operator, symbols_of
from .chunk_order import OntoLogits, join_rows, onto_logits, wait_for, wait_for_all
from .chunk_sums import add_product
from .edits import run_on_fakes
from .regions import PRODUCTS, LeftWhole, mark_in_parts

_aten, _convert = torch.ops.aten, torch.ops.prims.convert_element_type.default
_LOW = (torch.bfloat16, torch.float16)
# Sums in float32 whose result is in low precision are this many tensors at most, each of so many bytes at least. They
# are rounded one by one, so one of them and its result are alive beside the others. More of them would spare less than
# a chunk's logits take, and each is a product of its own in each chunk.
_MOST_PARTS, _PART_BYTES = 4, 256 << 20
_SUM = "aot_hooks_sum"  # in the `meta` of what is computed from a finished sum over chunks, until it has its place
_MOVES = (
    "aten.slice_backward.default",
    "aten.view.default",
    "aten.permute.default",
    "aten.t.default",
    "aten.transpose.int",
    "aten.detach.default",
)


@dataclass
class Loop:
    """Where and how a region is written.

    Attributes:
        count: the number of chunks. All have `tokens // count` tokens but the last, which has what remains.
        kept: the slices that leave tokens out. The chunks are of the tokens that are left.
        sizes: of the chunks: numbers, or nodes.
        starts: the first token of each chunk.
    """

    gm: GraphModule
    steps: Mapping[Node, TokenStep]
    seed: Node
    count: int
    kept: tuple[TokenSlice, ...] = ()
    sizes: list[Any] = field(init=False)
    starts: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        rows = math.prod(self.kept[-1].kept_sizes()) if self.kept else shape_of(self.seed)[0]
        if isinstance(rows, int):
            size = rows // self.count
            self.sizes = [size] * (self.count - 1) + [rows - size * (self.count - 1)]
            self.starts = [size * i for i in range(self.count)]
            return
        assert rows >= self.count, "the example has as many tokens as chunks"  # a guard: fewer compile another graph
        hidden: Any = self.seed.args[-2]
        tokens = self.add(_aten.sym_size.int, self.kept_of(hidden, Rows(0)), 0)
        each = self.add(operator.floordiv, tokens, self.count)
        self.starts = [0, *(self.add(operator.mul, each, i) for i in range(1, self.count))]
        self.sizes = [each] * (self.count - 1) + [self.add(operator.sub, tokens, self.starts[-1])]

    @property
    def graph(self) -> Graph:
        return self.gm.graph

    def add(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A node at the end of the graph; `put_in_place` moves it."""
        with self.graph.inserting_before(self.graph.output_node()):
            node = self.graph.call_function(target, args, kwargs)
        computes_sizes = not is_operator(target) and target is not operator.getitem
        run_on_fakes(node, None if computes_sizes else self.seed.meta["val"].fake_mode)
        return node

    def kept_of(self, source: Node, rows: Rows) -> Node:
        """The tokens of `source`, which are at `rows`, that are left by all slices, in one dimension."""
        shape = list(shape_of(source))
        before, after = shape[: rows.first], shape[rows.first + rows.count :]
        count = rows.count
        for kept in self.kept[len(rows.kept) :]:
            if len(kept.sizes) != count:
                sizes = [*before, *kept.sizes, *after]
                source = self.add(_aten.reshape.default, source, [_size(self, s) for s in sizes])
            end = -kept.after if kept.after else sys.maxsize
            source = self.add(_aten.slice.Tensor, source, rows.first + kept.dim, kept.before, end)
            count = len(kept.sizes)
        if count > 1:
            flat = [*before, -1, *after]
            source = self.add(_aten.reshape.default, source, [_size(self, s) for s in flat])
        return source

    def restored(self, value: Node, rows: Rows) -> Node:
        """`value`, of the tokens that are left, in one dimension, with zeros for those that slices leave out."""
        for kept in reversed(self.kept[len(rows.kept) :]):
            before, after = shape_of(value)[: rows.first], shape_of(value)[rows.first + 1 :]
            sizes = [_size(self, s) for s in kept.sizes]
            dropped = kept.before + kept.after
            size = sizes[kept.dim]
            sizes[kept.dim] = size - dropped if isinstance(size, int) else self.add(operator.sub, size, dropped)
            outside = [_size(self, s) for s in before], [_size(self, s) for s in after]
            if len(sizes) > 1:
                value = self.add(_aten.reshape.default, value, [*outside[0], *sizes, *outside[1]])
            inner = len(sizes) - 1 - kept.dim + len(after)  # dimensions behind
            value = self.add(_aten.constant_pad_nd.default, value, [0, 0] * inner + [kept.before, kept.after], 0)
            if len(sizes) > 1:
                value = self.add(_aten.reshape.default, value, [*outside[0], -1, *outside[1]])
        return value


@dataclass
class _LoopDraft:
    """One loop while it is written.

    Attributes:
        wide: gradients that are made before their scale is known, and stay in float32 until then.
        stand_ins: nodes outside of the region that stand for others in the loop.
        waits_for_inputs: each input of a chunk waits for the chunk before it.
        rows, sums: results so far, by node of the region: a node for each chunk; the parts of a sum over chunks.
        cuts: inputs of the region in pieces, one for each chunk.
        casts: inputs of products in float32, by the input.
    """

    loop: Loop
    wide: Collection[Node]
    stand_ins: Mapping[Node, Node]
    waits_for_inputs: bool
    rows: dict[Node, list[Node]] = field(default_factory=dict)
    sums: dict[Node, list[Node]] = field(default_factory=dict)
    cuts: dict[tuple[Node, TokenRead], list[Node]] = field(default_factory=dict)
    casts: dict[Node, Node] = field(default_factory=dict)


def write_chunks(
    loop: Loop,
    nodes: Sequence[Node],
    outputs: Sequence[Node],
    *,
    waits_for: Node | None = None,
    waits_for_inputs: bool = False,
    scale: tuple[Node, tuple[Node, ...]] | None = None,
    scaled: Collection[Node] = (),
) -> dict[Node, Node]:
    """Write the loop for `nodes`, which are in order. Returns the node that has the value of each of `outputs`.

    Args:
        waits_for: a tensor that the loop must not start before.
        waits_for_inputs: a chunk waits for the one before it wherever it reads an input, not in products alone.
        scale: a node with a number that multiplies the outputs `scaled`, and the views and casts by which the region
            reads it. The loop is written as if the number were 1; each of `scaled` is multiplied after it.
    """
    stand_ins = {} if scale is None else _with_one(loop, *scale)
    draft = _LoopDraft(loop, scaled if scale is not None else (), stand_ins, waits_for_inputs)
    before_chunk = [] if waits_for is None else [waits_for]
    order = None if waits_for_inputs else onto_logits(loop.steps, nodes, outputs)
    for i in range(loop.count):
        before_chunk = _chunk(draft, nodes, outputs, i, before_chunk, order)
    found = {}
    for node in outputs:
        number = scale[0] if scale is not None and node in scaled else None
        before = set(loop.graph.nodes)
        found[node] = _joined(draft, node, number)
        if loop.steps[node].out is None:
            for made in set(loop.graph.nodes) - before:
                made.meta[_SUM] = True
    return found


def _with_one(loop: Loop, scale: Node, between: Iterable[Node]) -> dict[Node, Node]:
    """What the region reads of `scale`, computed as if it were 1."""
    value = scale.meta["val"]
    shape = list(map(int, value.shape))  # one number
    one = loop.add(_aten.full.default, shape, 1.0, dtype=value.dtype, device=value.device)
    found = {scale: one}
    for node in between:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: found.get(n, n))
        found[node] = loop.add(node.target, *args, **kwargs)
    return found


@dataclass
class _Chunk:
    """Chunk `i` while it is written.

    Attributes:
        outputs: the nodes whose values the loop returns.
        waits_for: results of the chunk before, which this one waits for.
        env: the chunk's node for each node of the region.
        waiting: the chunk's inputs behind a `wait_for`, by the input.
        outside: the inputs that gradients of logits read, behind the `wait_for_all` of this chunk.
    """

    draft: _LoopDraft
    outputs: Collection[Node]
    i: int
    waits_for: list[Node]
    env: dict[Node, Node] = field(default_factory=dict)
    waiting: dict[Node, Node] = field(default_factory=dict)
    outside: dict[tuple[Node, TokenRead], Node] = field(default_factory=dict)

    def input_of(self, node: Node, step: TokenStep) -> Node:
        """The node of this chunk for `node`, which a node with `step` reads."""
        if node in self.env:
            return self.env[node]
        read = step.reads.get(node)
        if read is not None and (node, read) in self.outside:
            return self.outside[node, read]
        return self.draft.stand_ins.get(node, node) if read is None else _cut(self.draft, node, read)[self.i]

    def write(self, node: Node) -> None:
        """Write `node` of the region for this chunk, or add its value to a sum over chunks."""
        draft, loop, env = self.draft, self.draft.loop, self.env
        step = loop.steps[node]
        if step.out is None and node in self.outputs:
            _add_to_sum(draft, node, step, env, lambda n: self.input_of(n, step))
            return
        waits = self.waits_for and (draft.waits_for_inputs or str(node.target) in PRODUCTS)

        def input_in_turn(n: Node) -> Node:
            found = self.input_of(n, step)
            if waits and n not in env and n in step.reads:
                if found not in self.waiting:
                    self.waiting[found] = loop.add(wait_for, found, self.waits_for)
                return self.waiting[found]
            return found

        if node in draft.wide and str(node.target) == "aten.mm.default" and node.meta["val"].dtype in _LOW:
            env[node] = _wide_product(loop, *_factors(draft, node, env, lambda n: self.input_of(n, step)))
        else:
            target, args, kwargs = step.build(lambda values: map_arg(values, input_in_turn), loop.sizes[self.i])
            env[node] = loop.add(target, *args, **kwargs)
            env[node].meta.update(
                {k: v for k, v in node.meta.items() if k in ("custom", "stack_trace", "nn_module_stack")}
            )
        if node in self.outputs:
            draft.rows.setdefault(node, []).append(env[node])

    def wait(self, order: OntoLogits) -> None:
        """Have what gradients of logits read wait until nothing else has to read logits."""
        loop = self.draft.loop
        numbers = [self.env[n] for n in order.numbers] + [_cut(self.draft, *each)[self.i] for each in order.outside]
        waited = loop.add(wait_for_all, numbers, self.results(order.results))
        made = [loop.add(operator.getitem, waited, j) for j in range(len(numbers))]
        self.env.update(zip(order.numbers, made, strict=False))
        self.outside.update(zip(order.outside, made[len(order.numbers) :], strict=True))

    def results(self, outputs: Iterable[Node]) -> list[Node]:
        """The nodes that have the values of `outputs` of the region in this chunk, or the sums so far."""
        parts = (self.draft.sums[n] if n not in self.env else [self.env[n]] for n in outputs)
        return [node for part in parts for node in part]


def _chunk(
    draft: _LoopDraft,
    nodes: Sequence[Node],
    outputs: Sequence[Node],
    i: int,
    waits_for: list[Node],
    order: OntoLogits | None,
) -> list[Node]:
    """Write chunk `i`, which waits for the results `waits_for`. Returns the nodes that have its own."""
    chunk = _Chunk(draft, outputs, i, waits_for)
    for node in nodes if order is None else order.before:
        chunk.write(node)
    if order is not None:
        chunk.wait(order)
        for node in order.after:
            chunk.write(node)
    return chunk.results(outputs)


def _cut(draft: _LoopDraft, node: Node, read: TokenRead) -> list[Node]:
    """The pieces of `node`, an input of the region, one for each chunk; all of it for each if it has no tokens."""
    if (node, read) in draft.cuts:
        return draft.cuts[node, read]
    loop = draft.loop
    source = draft.stand_ins.get(node, node)
    shape = shape_of(source)
    rows = read.rows
    if read.like:
        lacking = len(read.like) - rows.count
        sizes = [_size(loop, s) for s in (*shape[: rows.first], *read.like, *shape[rows.first + rows.count :])]
        source = loop.add(_aten.expand.default, source, sizes)
        rows = rows.at(rows.first, rows.count + lacking)
        shape = shape_of(source)
    if read.cut:
        source = loop.kept_of(source, rows)
    elif rows.count > 1:
        source = loop.add(_aten.reshape.default, source, [_size(loop, s) for s in rows.flat(shape, 1)])
    if not read.cut:
        found = [source] * loop.count
    else:
        # slices, which torch's partition computes again, as it does not with a split
        ends = [*loop.starts[1:], sys.maxsize]
        found = [loop.add(_aten.slice.Tensor, source, rows.first, *at) for at in zip(loop.starts, ends, strict=True)]
    draft.cuts[node, read] = found
    return found


def _size(loop: Loop, size: Any) -> Any:
    """`size` as an argument of a node: a number, or a node that has it."""
    if not symbols_of(size):
        return int(size)
    found = size_of_inputs(loop.graph, size, loop.add)
    assert found is not None, f"no input of the graph has size {size}"
    return found


def size_of_inputs(graph: Graph, size: Any, add: Callable[..., Node]) -> Node | None:
    """A node that has the symbolic `size`, made from the sizes of inputs; None if it can't be.

    `add`: makes a node.
    """

    def known(text: str) -> Node | None:
        found = None
        for node in graph.find_nodes(op="placeholder"):
            if aot.is_tangent(node):  # the forward can't read it
                continue
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and expression(value) == text:
                return node  # type: ignore[no-any-return]
            # a dimension is taken only if no input is that size itself
            dims = value.shape if is_tensor(node) and found is None else ()
            found = next(((node, d) for d, own in enumerate(dims) if expression(own) == text), found)
        return None if found is None else add(_aten.sym_size.int, *found)

    found: Node | None = computed_from(size, known, lambda name, a, b: add(getattr(operator, name), a, b))
    return found


def read_sizes_of_inputs(graph: Graph) -> None:
    """Have sizes that are read from a result computed from the sizes of inputs, as far as possible, in place."""
    for node in graph.find_nodes(op="call_function", target=_aten.sym_size.int):
        if node.args[0].op == "placeholder" or not symbols_of(node.meta["val"]):
            continue

        def add(target: Any, *args: Any, before: Node = node) -> Node:
            with graph.inserting_before(before):
                made = graph.call_function(target, args)
            run_on_fakes(made, None)
            return made

        if (found := size_of_inputs(graph, node.meta["val"], add)) is not None:
            node.replace_all_uses_with(found)
            graph.erase_node(node)


def _add_to_sum(draft: _LoopDraft, node: Node, step: TokenStep, env: Mapping[Node, Node], input_of: Any) -> None:
    """Compute a sum over the tokens of one chunk, and add it to the sum over the chunks before, if there are any."""
    loop, before = draft.loop, draft.sums.get(node)
    if str(node.target) != "aten.mm.default":
        target, args, kwargs = step.build(lambda values: map_arg(values, input_of), None)
        made = loop.add(target, *args, **kwargs)
        draft.sums[node] = [made if before is None else loop.add(_aten.add.Tensor, before[0], made)]
        return
    a, b = _factors(draft, node, env, input_of)
    lefts = [a]
    if (size := _rows_of_part(node)) is not None:
        count = shape_of(a)[0]
        lefts = [loop.add(_aten.slice.Tensor, a, 0, i, min(i + size, count)) for i in range(0, count, size)]
    if before is None:
        draft.sums[node] = [_wide_product(loop, left, b) for left in lefts]
    else:
        pairs = zip(before, lefts, strict=True)
        draft.sums[node] = [loop.add(add_product, total, left, b) for total, left in pairs]


def _rows_of_part(node: Node) -> int | None:
    """How many rows of a sum of products are one tensor; None: all. Parts are rounded one after the other."""
    value = node.meta["val"]
    rows, columns = value.shape
    if value.dtype not in _LOW or not isinstance(rows, int) or not isinstance(columns, int):
        return None
    parts = min(_MOST_PARTS, rows, 4 * rows * columns // _PART_BYTES)
    return -(-rows // parts) if parts > 1 else None


def _wide_product(loop: Loop, a: Node, b: Node) -> Node:
    """A product whose result is in float32, also of factors in low precision."""
    if a.meta["val"].dtype in _LOW:
        return loop.add(_aten.mm.dtype, a, b, torch.float32)
    return loop.add(_aten.mm.default, a, b)


def _factors(draft: _LoopDraft, node: Node, env: Mapping[Node, Node], input_of: Any) -> tuple[Node, Node]:
    """The factors of `mm`. On a CPU, which has no product of low precision with a result in float32, in float32."""
    a, b = node.args
    low = node.meta["val"].dtype in _LOW
    if not low or node.meta["val"].device.type != "cpu":
        return input_of(a), input_of(b)
    return _widened(draft, a, env, input_of), _widened(draft, b, env, input_of)


def _widened(draft: _LoopDraft, node: Any, env: Mapping[Node, Node], input_of: Any) -> Node:
    """`node` in float32: as it was before it was rounded, if the loop has rounded it."""
    loop = draft.loop
    moves: list[Node] = []
    source = node
    while source in env and str(source.target) in _MOVES:
        moves.insert(0, source)
        source = source.args[0]
    if source in env and target_name(source) in CONVERSIONS and source.args[0] in env:
        before = env[source.args[0]]
        if before.meta["val"].dtype == torch.float32:
            made = {source: before}
            for move in moves:
                again = loop.steps[move].build(
                    lambda v: map_arg(v, lambda n: made.get(n, n)), _tokens_of(move, env, loop)
                )
                made[move] = loop.add(again[0], *again[1], **again[2])
            return made[moves[-1]] if moves else before
    found = input_of(node)
    whole = node not in env and found is draft.stand_ins.get(node, node)
    if whole and found in draft.casts:
        return draft.casts[found]
    made_wide = loop.add(_convert, found, torch.float32)
    if whole:
        draft.casts[found] = made_wide
    return made_wide


def _tokens_of(node: Node, env: Mapping[Node, Node], loop: Loop) -> Any:
    """The tokens of the chunk that `env` is of."""
    rows = loop.steps[node].out
    size = shape_of(env[node])[rows.first]  # type: ignore[union-attr]
    return next(s for s in loop.sizes if (s.meta["val"] if isinstance(s, Node) else s) == size)


def _joined(draft: _LoopDraft, node: Node, scale: Node | None) -> Node:
    """The value of `node` from its chunks, times `scale`, in its dtype and shape."""
    loop, dtype = draft.loop, node.meta["val"].dtype
    rows = loop.steps[node].out
    parts = draft.sums[node] if rows is None else draft.rows[node]
    if scale is None:
        parts = parts if rows is None else [loop.add(_aten.cat.default, parts, rows.first)]
        finished = [_finished(loop, part, None, dtype) for part in parts]
    else:  # they cross to the backward as they are: to join them, the forward would hold them twice
        for part in parts:
            part.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            part.meta[MADE_EARLY] = True
        finished = _scaled(loop, parts, scale, dtype, waits=rows is None)
    found = finished[0]
    if len(finished) > 1:
        found = loop.add(join_rows, finished) if rows is None else loop.add(_aten.cat.default, finished, rows.first)
    if rows is not None:
        found = loop.restored(found, rows)
    shape = shape_of(node)
    if len(shape_of(found)) != len(shape):  # the tokens are in several dimensions
        found = loop.add(_aten.reshape.default, found, [_size(loop, s) for s in shape])
    found.meta.update({k: v for k, v in node.meta.items() if k not in ("val", "recompute", MADE_EARLY)})
    return found


def _scaled(loop: Loop, parts: Sequence[Node], scale: Node, dtype: torch.dtype, *, waits: bool) -> list[Node]:
    """Each of `parts` times `scale`, in `dtype`. `waits`: one after the other."""
    number = scale if not shape_of(scale) else loop.add(_aten.reshape.default, scale, [])
    found: list[Node] = []
    for part in parts:
        if found and waits:
            number = loop.add(wait_for, number, found[-1:])
        found.append(_finished(loop, part, number, dtype))
    return found


def _finished(loop: Loop, part: Node, scale: Node | None, dtype: torch.dtype) -> Node:
    """`part` times `scale`, in `dtype`."""
    if scale is not None:
        wide = part.meta["val"].dtype
        if scale.meta["val"].dtype != wide:
            scale = loop.add(_convert, scale, wide)
        part = loop.add(_aten.mul.Tensor, part, scale)
    return part if part.meta["val"].dtype == dtype else loop.add(_convert, part, dtype)


def put_in_place(loop: Loop, made: Mapping[Node, Node], nodes: Sequence[Node]) -> None:
    """Have others read the results `made` in place of those of the region, in the graph that had `nodes` before."""
    for node, result in made.items():
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in loop.steps)
    mark_in_parts(set(loop.graph.nodes) - set(nodes))
    for node in reversed(nodes):  # those that had readers and have none any more
        if node.op == "call_function" and not node.users and not node.is_impure():
            loop.graph.erase_node(node)
    _place_in_order(loop.graph)


def _place_in_order(graph: Graph) -> None:
    """Move each node behind its inputs: those at the end of the graph to their first readers, sums' to their inputs.

    Only the output reads a weight's gradient. At the end of the graph its sum in float32 would wait for it there.
    What is written to inputs comes last, so that nodes at the end of the graph read what was there before.
    Raises `LeftWhole` if a node needs its own result.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        graph.output_node().prepend(node)
    placed: set[Node] = set(graph.find_nodes(op="placeholder"))
    order: list[Node] = []
    for node in list(graph.nodes):
        stack, entered = [node], set[Node]()
        while stack:
            top = stack[-1]
            waiting = [n for n in top.all_input_nodes if n not in placed]
            if top in placed:
                stack.pop()
            elif waiting:
                if not entered.isdisjoint(waiting):
                    raise LeftWhole(f"its parts need each other's results ({top.name})")
                entered.add(top)
                stack += reversed(waiting)
            else:
                stack.pop()
                entered.discard(top)
                placed.add(top)
                order.append(top)
    last = None
    for node in _with_early_sums(order):
        if last is not None:
            last.append(node)
        last = node


def _with_early_sums(order: Sequence[Node]) -> list[Node]:
    """`order`, with what is computed from finished sums right behind its inputs, and so the last terms of these sums.

    A term's factor may be computed for it alone, as the input of the last product of an MLP is in its backward.
    """
    early = {node for node in order if node.meta.pop(_SUM, False)}
    for node in reversed(order):
        moves = node.target is add_product or is_view(node) or fuses(node)
        moves = moves and not has_tag(node, torch.Tag.nondeterministic_seeded)  # draws stay in their order
        if moves and node.users and early.issuperset(node.users):
            early.add(node)
    position: dict[Node, tuple[int, int]] = {}  # of the input that it stands behind, and its own among those there
    for i, node in enumerate(order):
        if node in early:
            position[node] = max((position.get(n, (-1, 0)) for n in node.all_input_nodes), default=(-1, 0))[0], 1 + i
        else:
            position[node] = i, 0
    return sorted(order, key=position.__getitem__)
