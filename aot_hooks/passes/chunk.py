"""The last linear layer and its loss, in chunks of tokens: a joint graph in, a joint graph out, and what was done.

      logits = mm(h, w)                                [N, V]
      ... casts, softcap, log_softmax, loss ...        for each chunk of n tokens:
      grad = ... of the loss ...                 -->       the same on [n, V]
      grad_h = mm(grad, w)                                 grad_h of these tokens, grad_w += mm(t(grad), h)
      grad_w = mm(t(grad), h)

What depends on logits and has their size is computed for one chunk at a time, and so is what lies between. It is found
by data flow (`graphs/rows.py`), so the loss may be any function that treats tokens alike. Two ways:

- gradients in the forward: all of the above is one loop. The gradient of the loss is one number, which multiplies
  grad_h and grad_w afterwards. These two cross to the backward.
- logits twice: a loop for the loss in the forward, and one for the gradients in the backward, which computes logits
  again. One more product; it is taken where the first way would be wrong, see `_why_twice`.

The loops are unrolled into plain operators. So the partition, hooks, plans, caches and CUDA graphs need to know nothing
of them, and sizes may be symbolic. `wait_for` keeps compilers from mixing two chunks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from ..graphs.nodes import name_and_line, source_line, target_name, tensor_bytes, type_text
from ..graphs.rows import Kept, Rows, Step, is_linear, is_tensor, is_zero, restores, shape_of, step_of
from ..torch_private import aot
from ..torch_private.values import hint, symbols_of
from .chunk_loop import Loop, place_in_order, read_sizes_of_inputs, write_chunks
from .chunk_order import PRODUCTS, depends_on
from .edits import show
from .expand_losses import expand_losses
from .live_bytes import LivePoint
from .words_last import words_last

# Tokens of a chunk. Each chunk reads and writes the sums of grad_w once, which takes as long as 240 / n of the three
# products of n tokens at an H200's rates (8.2e14 operations and 3.9e12 bytes a second), and 10 / n on a CPU.
_TOKENS = {"cpu": 256, "cuda": 2048}
# A graph holds each chunk's operators, and compiling takes as much longer.
_MOST_CHUNKS = 32
# Bytes of the logits in float32. Below, a graph is smaller without chunks, and nothing else of its step is.
_LEAST_BYTES = 16 << 20
_EXPONENTIALS = ("aten._log_softmax.default", "aten._softmax.default", "aten.logsumexp.default", "aten.exp.default")


@dataclass(frozen=True)
class Chunked:
    """What was done with one last layer.

    Attributes:
        logits: their dtype and sizes, "float32[512, 4096]".
        how: in which way it is computed in chunks; or why it is not.
        done: whether it is in chunks.
        count, tokens: the number of chunks, and the most tokens of one; 0 if it is not in chunks.
        logit_bytes, chunk_bytes: of all logits, and of those of one chunk.
        holds_peak: the step without hooks and chunks takes most where logits are alive, as predicted.
        node: the name of the product in the joint graph.
        place: its line, "model.py:31". Not stored in caches: another program may take the entry.
    """

    logits: str
    how: str
    done: bool
    count: int = 0
    tokens: int = 0
    logit_bytes: int = 0
    chunk_bytes: int = 0
    holds_peak: bool = False
    node: str = field(default="", compare=False, repr=False)
    place: str = field(default="", compare=False)

    @property
    def layer(self) -> str:
        return f"{self.logits} of {self.place}" if self.place else self.logits

    def left(self, why: str) -> Chunked:
        """This layer, which may be in chunks, as one that is not because of `why`. Its own reason comes first."""
        return replace(self, how=why, done=False, count=0, tokens=0, chunk_bytes=0) if self.done else self

    def __str__(self) -> str:
        return f"{self.layer}: {self.how}" if self.done else f"{self.layer}: not in chunks, {self.how}"


@dataclass(frozen=True)
class _Region:
    """What is computed in chunks.

    Attributes:
        steps: of the nodes, in order.
        outputs: the nodes that others read.
        kept: the slices that leave tokens out.
    """

    seed: Node
    steps: Mapping[Node, Step]
    outputs: tuple[Node, ...]
    kept: tuple[Kept, ...] = ()

    def token_count(self) -> Any:
        return math.prod(self.kept[-1].kept_sizes()) if self.kept else shape_of(self.seed)[0]

    def inputs(self, nodes: Iterable[Node]) -> set[Node]:
        return {n for node in nodes for n in node.all_input_nodes} - self.steps.keys()


_LOSS_OUTSIDE = (
    "the program returns it, and its loss is outside of the compiled function. Compile a function that returns the "
    "loss, or call torch's linear_cross_entropy (torch 2.13) in its place"
)


COULD_BE = "options={'chunk': True} does that, and so does a budget where it pays"


class _NotChunked(Exception):
    """Why a layer is left as it is."""


def chunked(joint: GraphModule, tokens: int | None, *, finer: int = 1) -> tuple[GraphModule, tuple[Chunked, ...]]:
    """`joint`, or a graph without gradients, with its last layers in chunks. `joint` itself is not changed.

    Args:
        tokens: of a chunk at most; None: chosen by device, where the logits are worth it.
        finer: chunks have so many times fewer tokens than are chosen by device.
    """
    if not any(map(_has_loss, _layers(joint, tokens))):
        return joint, ()
    found: list[Chunked] = []
    gm = aot.edited_copy(joint)
    expand_losses(gm.graph)
    read_sizes_of_inputs(gm.graph)
    words_last(gm.graph, {n for seed in _layers(gm, tokens) if _has_loss(seed) for n in _of_its_size(seed)})
    tried: set[str] = set()
    changed = False
    while layers := [node for node in _layers(gm, tokens) if node.name not in tried]:
        seed = layers[0]
        tried.add(seed.name)
        if not _has_loss(seed):
            continue
        place = source_line(seed) or seed.name
        note = Chunked(
            type_text(seed), "", False, logit_bytes=tensor_bytes(seed.meta["val"]), node=seed.name, place=place
        )
        attempt, made = _attempt(gm, seed, tokens, finer)
        if isinstance(made, str):
            if not made:
                continue
            found.append(replace(note, how=made))
        else:
            tried |= made.names
            nbytes = made.tokens * note.logit_bytes // max(1, hint(shape_of(seed)[0]))
            found.append(
                replace(note, how=made.how, done=True, count=made.chunk_count, tokens=made.tokens, chunk_bytes=nbytes)
            )
            gm, changed = attempt, True
    if not changed:
        return joint, tuple(found)
    show("joint graph in chunks", gm)
    return gm, tuple(found)


class _Made(NamedTuple):
    """A layer in chunks: how, the names of the layers that are in the same chunks, their number, tokens of one."""

    how: str
    names: set[str]
    chunk_count: int
    tokens: int


def _attempt(gm: GraphModule, seed: Node, tokens: int | None, finer: int) -> tuple[GraphModule, _Made | str]:
    """A copy of `gm` with the layer `seed` in chunks; or why it is not, "" if it has no loss.

    Slices that leave tokens out are followed only if it can't be done otherwise: then the chunks are of the tokens that
    are left, and results of all tokens, before the slice, can't be had.
    """
    why = ""
    for sliced in (False, True):
        attempt = aot.edited_copy(gm)
        node = next(n for n in attempt.graph.nodes if n.name == seed.name)
        try:
            return attempt, _chunk_one(attempt, node, tokens, finer, sliced=sliced)
        except _NotChunked as e:
            why = str(e) or why
        if not any(target_name(user) == "aten.slice.Tensor" for n in _of_its_size(seed) for user in n.users):
            break
    return gm, why


def logits_at_peak(joint: GraphModule, points: Sequence[LivePoint]) -> tuple[Chunked, ...]:
    """The last layers of `joint`, which has none in chunks, whose logits hold the peak of the live bytes `points`."""
    if not points:
        return ()
    found = with_peak(joint, chunked(joint, None)[1], max(points, key=lambda point: point.live_bytes).node)
    return tuple(each.left(COULD_BE) for each in found if each.holds_peak)


def with_peak(joint: GraphModule, found: Sequence[Chunked], peak_node: str) -> tuple[Chunked, ...]:
    """`found`, whose layers are those of `joint`, with whether logits hold the peak: it stands at node `peak_node`."""
    nodes = {node.name: node for node in joint.graph.nodes}
    at = nodes.get(peak_node)
    near = set() if at is None else {at, *at.all_input_nodes}

    def holds(seed: Node) -> bool:
        return not near.isdisjoint(_of_its_size(seed))

    return tuple(replace(each, holds_peak=each.node in nodes and holds(nodes[each.node])) for each in found)


def _of_its_size(seed: Node) -> set[Node]:
    """`seed`, and all that is computed from it without another product and has its size, or half of it."""
    size = hint(seed.meta["val"].numel()) // 2
    stack, found = [seed], {seed}
    while stack:
        for user in stack.pop().users:
            big = is_tensor(user) and hint(user.meta["val"].numel()) >= size
            if big and user not in found and target_name(user) not in PRODUCTS:
                found.add(user)
                stack.append(user)
    return found


def _has_loss(seed: Node) -> bool:
    """Whether an exponential, or the program, reads such a value. It needs no copy of the graph to tell.

    Exponentials that are not summed are those of a loss too, such as of a binary cross entropy; but not if another
    product of the forward reads what is made of them. That is the SiLU of an MLP, as Inductor decomposes it.
    """
    found = _of_its_size(seed)
    readers = {user for node in found for user in node.users}
    if any(user.op == "output" or target_name(user) in _EXPONENTIALS[:-1] for user in readers):
        return True
    exponentials = [node for node in found | readers if target_name(node) == _EXPONENTIALS[-1]]
    if any(map(_is_summed, exponentials)):
        return True
    products = {node for node in readers if target_name(node) in PRODUCTS}
    if not exponentials or not products:
        return bool(exponentials)
    tangents = filter(aot.is_tangent, seed.graph.find_nodes(op="placeholder"))
    return products <= depends_on(seed.graph.nodes, tangents)


def _is_summed(exponential: Node) -> bool:
    """Whether `exponential` is summed as it is, or weighted, as in a softmax."""
    stack, seen = [exponential], {exponential}
    while stack:
        for user in stack.pop().users:
            if target_name(user) in ("aten.sum.dim_IntList", "aten.sum.default"):
                return True
            if user not in seen and target_name(user) not in PRODUCTS and is_linear(user, seen.__contains__):
                seen.add(user)
                stack.append(user)
    return False


def _layers(gm: GraphModule, tokens: int | None) -> list[Node]:
    """Products of the forward with more columns than they have terms, largest first: where logits may come from."""
    of_tangents = depends_on(gm.graph.nodes, filter(aot.is_tangent, gm.graph.find_nodes(op="placeholder")))
    found = []
    for node in gm.graph.nodes:
        if target_name(node) not in PRODUCTS or node in of_tangents or not is_tensor(node):
            continue
        (count, words), terms = shape_of(node), shape_of(node.args[-2])[1]
        if not isinstance(words, int) or not isinstance(terms, int) or words <= 2 * terms or node.meta.get(IN_CHUNK):
            continue
        large = 4 * hint(count) * words >= _LEAST_BYTES if tokens is None else hint(count) > tokens
        if large and node.meta["val"].is_floating_point():
            found.append(node)
    found = [node for node in found if not _adapts_another(node, found)]
    return sorted(found, key=lambda node: -tensor_bytes(node.meta["val"]))


def _adapts_another(product: Node, layers: Collection[Node]) -> bool:
    """Whether `product` is of few terms as an adapter's (LoRA), and added to a product that is none of `layers`."""
    stack = [product]
    while stack:
        node = stack.pop()
        for user in node.users:
            others = [n for n in user.all_input_nodes if n is not node]
            if target_name(user) == "aten.add.Tensor":
                if any((made := _product_of(n)) is not None and made not in layers for n in others):
                    return True
            elif not others and _product_of(user) is product:  # in another shape or dtype, or times a number
                stack.append(user)
    return False


def _product_of(node: Node) -> Node | None:
    """The product that `node` is, in another shape or dtype."""
    while target_name(node) not in PRODUCTS:
        inputs = node.all_input_nodes
        if len(inputs) != 1 or not is_tensor(node) or node.meta["val"].numel() != inputs[0].meta["val"].numel():
            return None
        node = inputs[0]
    return node


IN_CHUNK = "aot_hooks_chunk"


def _chunk_one(gm: GraphModule, seed: Node, tokens: int | None, finer: int, *, sliced: bool) -> _Made:
    """Chunk the layer `seed` of `gm`, in place."""
    region = _region(gm, seed, sliced=sliced)
    nodes = list(gm.graph.nodes)
    tangents = depends_on(nodes, filter(aot.is_tangent, gm.graph.find_nodes(op="placeholder")))
    after = depends_on(nodes, region.outputs) - region.steps.keys()  # what is computed from results of the loop
    gradients = [n for n in region.steps if n in tangents]
    rows = hint(region.token_count())
    count = _chunks(seed, rows, tokens, finer)
    names = {n.name for n in region.steps if target_name(n) in PRODUCTS}
    loop = Loop(gm, region.steps, seed, count, region.kept)
    forward = [n for n in region.outputs if n not in tangents]
    backward = [n for n in region.outputs if n in tangents]
    if late := region.inputs(_needed(region, forward)) & (after | tangents):
        raise _NotChunked(f"the loss of a token needs results of others ({name_and_line(min(late, key=nodes.index))})")
    if late := region.inputs(gradients) & (depends_on(nodes, backward) - region.steps.keys()):
        raise _NotChunked(f"its gradients need results of themselves ({name_and_line(min(late, key=nodes.index))})")
    if not backward:
        loss = write_chunks(loop, _needed(region, forward), forward)
        how = f"{count} chunks"
    elif why := (scale := _scale(region, gradients, tangents, after))[1]:
        loss = write_chunks(loop, _needed(region, forward), forward)
        first = next(n for n in nodes if n in tangents and n in region.inputs(gradients) and is_tensor(n))
        loss |= write_chunks(loop, _needed(region, backward), backward, waits_for=first)
        how = f"{count} chunks, logits again in the backward: {why}"
    else:
        loss = write_chunks(loop, list(region.steps), list(region.outputs), scale=scale[0], scaled=backward)
        how = f"{count} chunks, gradients in the forward"
    for node, result in loss.items():
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in region.steps)
    erase_unread(gm, nodes)
    try:
        place_in_order(gm)
    except ValueError as e:
        raise _NotChunked(f"its parts need each other's results ({e})") from e
    for node in gm.graph.nodes:
        if target_name(node) in PRODUCTS and node.name not in {n.name for n in nodes}:
            node.meta[IN_CHUNK] = True
    gm.graph.lint()
    gm.recompile()
    return _Made(how, names, count, rows - rows // count * (count - 1))


def erase_unread(gm: GraphModule, nodes: Iterable[Node]) -> None:
    """Erase those of `nodes`, which are in order, that had readers and have none any more."""
    for node in reversed(list(nodes)):
        if node.op == "call_function" and not node.users and not node.is_impure():
            gm.graph.erase_node(node)


def _chunks(seed: Node, count: int, tokens: int | None, finer: int) -> int:
    each = tokens if tokens is not None else max(1, _TOKENS.get(seed.meta["val"].device.type, 1024) // finer)
    chunks = min(_MOST_CHUNKS, -(-count // each))
    if chunks < 2:
        raise _NotChunked(f"{count} tokens are one chunk of {each}")
    return chunks


# --- the region -------------------------------------------------------------------------------------------------------


def _region(gm: GraphModule, seed: Node, *, sliced: bool) -> _Region:
    nodes = list(gm.graph.nodes)
    count, words = shape_of(seed)
    if symbols_of(count) and not hint(count):
        raise _NotChunked(f"the number of tokens, {count}, is made by an operator of the program")
    size = hint(count) * words // 2  # a part of the vocabulary may be cut off, or some tokens

    def is_big(node: Node) -> bool:
        return is_tensor(node) and hint(node.meta["val"].numel()) >= size

    steps, rows = _rowwise(nodes, seed, is_big, sliced=sliced)
    kept = _kept(nodes, steps, rows, is_big)
    big = {n for n in kept if is_big(n)}
    inside = {n: steps[n] for n in nodes if n in steps and (n in kept or not big.isdisjoint(n.all_input_nodes))}
    if not any(target_name(n) in _EXPONENTIALS for n in inside):
        if any(user.op == "output" for n in inside if is_big(n) for user in n.users):
            raise _NotChunked(_LOSS_OUTSIDE)
        raise _NotChunked(_why_alone(nodes, seed, inside, is_big))
    from_seed = depends_on(nodes, [seed])
    outputs = []
    for node in inside:
        readers = [user for user in node.users if user not in inside]
        if not readers or node not in from_seed:
            continue
        if is_big(node) and steps[node].out is not None:
            raise _NotChunked(_why_read(node, readers[0]))
        outputs.append(node)
    # adopted nodes that only others' results need
    needed = set(_ancestors(outputs, inside))
    found = {n: s for n, s in inside.items() if n in needed}
    return _Region(seed, found, tuple(outputs), _kept_tokens(found, outputs))


def _kept_tokens(steps: Mapping[Node, Step], outputs: Iterable[Node]) -> tuple[Kept, ...]:
    """The slices of the tokens that are in the loop, which are those of all slices.

    A result of more tokens must be zero for those that are not, as gradients are, or a sum of such results.
    """

    def kept_of(step: Step) -> tuple[Kept, ...]:
        rows = step.out or next(read.rows for read in step.reads.values())
        return rows.kept

    kept = max((kept_of(step) for step in steps.values()), key=len)
    zeros: set[Node] = set()  # are zero for all tokens that are not in the loop
    for node, step in steps.items():
        if kept_of(step) != kept[: len(kept_of(step))]:
            raise _NotChunked(f"tokens are sliced in two ways, in {name_and_line(node)} and before it")
        source = restores(step)
        if kept_of(step) == kept or (source in zeros if source is not None else is_linear(node, zeros.__contains__)):
            zeros.add(node)
    for node in outputs:
        if node not in zeros:
            raise _NotChunked(f"{name_and_line(node)} needs all tokens, and its loss some of them")
    return kept


def _why_alone(nodes: list[Node], seed: Node, inside: Mapping[Node, Step], is_big: Any) -> str:
    """Why no loss is found behind `seed`; "" if there is none, as behind most layers."""
    behind = {seed}
    for node in nodes:
        if target_name(node) not in PRODUCTS and not behind.isdisjoint(node.all_input_nodes) and node.op != "output":
            behind.add(node)
    if not any(target_name(n) in _EXPONENTIALS and is_big(n) for n in behind):
        return ""
    readers = ((n, user) for n in inside if is_big(n) for user in n.users if user not in inside)
    return next((_why_read(*each) for each in readers), "")


def _why_read(node: Node, reader: Node) -> str:
    if reader.op == "output":
        return (
            f"the program returns {type_text(node)} ({name_and_line(node)}). Return the loss alone from the compiled "
            "function: with transformers, compile a function that returns model(...).loss"
        )
    return (
        f"{name_and_line(reader)} reads {type_text(node)} and is not known to treat tokens alike; "
        "compute what it is for outside of the compiled function, or from the hidden states"
    )


def _rowwise(nodes: list[Node], seed: Node, is_big: Any, *, sliced: bool) -> tuple[dict[Node, Step], dict[Node, Rows]]:
    """All that treats the tokens of `seed` alike, up to results of products, and what of their size it is made from."""
    rows: dict[Node, Rows] = {seed: Rows(0)}
    first = step_of(seed, {}, Rows(0))
    if first is None:
        raise _NotChunked("its weight has tokens too")
    steps = {seed: first}
    ends: set[Node] = set()  # products that take the logits' size away: what reads them is outside
    from_seed = depends_on(nodes, [seed])

    def adopt(step: Step) -> bool:
        """Take in what `step` reads that has the size of logits but is not made of them: a teacher's logits."""
        for source, read in step.reads.items():
            if source in rows or not read.cut or read.like or source in from_seed or not is_big(source):
                continue
            made = step_of(source, rows, read.rows, sliced=sliced)
            if made is not None and made.out == read.rows and adopt(made):
                rows[source], steps[source] = read.rows, made
        return True

    adopt(first)
    before = 0
    while before != len(steps):
        before = len(steps)
        for node in nodes:
            if node in steps:
                continue
            known = {n: rows[n] for n in node.all_input_nodes if n in rows and n not in ends}
            step = step_of(node, known, sliced=sliced) if known else None
            if step is None:
                continue
            adopt(step)
            steps[node] = step
            if step.out is not None:
                rows[node] = step.out
                if target_name(node) in PRODUCTS and not is_big(node):
                    ends.add(node)
    return steps, rows


def _kept(nodes: list[Node], steps: Mapping[Node, Step], rows: Mapping[Node, Rows], is_big: Any) -> set[Node]:
    """Nodes of the size of logits, and small ones between them."""
    kept: set[Node] = set()
    for node in reversed(nodes):
        if node in rows and (is_big(node) or not kept.isdisjoint(node.users)):
            kept.add(node)
    return kept


def _ancestors(nodes: Iterable[Node], inside: Collection[Node]) -> list[Node]:
    found: dict[Node, None] = {}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in inside and node not in found:
            found[node] = None
            stack += node.all_input_nodes
    return list(found)


def _needed(region: _Region, outputs: Iterable[Node]) -> list[Node]:
    """The nodes of the region, in order, that `outputs` are computed from."""
    found = set(_ancestors(outputs, region.steps))
    return [node for node in region.steps if node in found]


# --- which way --------------------------------------------------------------------------------------------------------


def _scale(
    region: _Region, gradients: Collection[Node], tangents: Collection[Node], after: Collection[Node]
) -> tuple[tuple[Node, tuple[Node, ...]] | None, str]:
    """The one number that multiplies all gradients, with the nodes between it and the region, in order; or why not."""
    if region.seed.meta["val"].dtype == torch.float16:
        return None, "float16 needs the scale of the gradient before it is rounded"
    position = {node: i for i, node in enumerate(region.seed.graph.nodes)}
    start = [n for n in region.inputs(gradients) if n in tangents]
    frontier, path = set(start), set(start)
    best: Node | None = None
    while frontier:
        last = max(frontier, key=position.__getitem__)
        if len(frontier) == 1 and is_tensor(last) and hint(last.meta["val"].numel()) == 1:
            best = last
        sources = [n for n in last.all_input_nodes if n in tangents]
        if not sources:
            break
        frontier.remove(last)
        frontier |= set(sources)
        path |= set(sources)
    if best is None:
        return None, "each token has a gradient of its own"
    between = [n for n in sorted(path, key=position.__getitem__) if position[n] > position[best]]
    linear = {best}
    for node in itertools.chain(between, gradients):
        if not is_zero(node) and not is_linear(node, linear.__contains__):
            return None, f"{name_and_line(node)} is not known to be linear in the loss's gradient"
        linear.add(node)
    read = region.inputs(region.steps) | {n for node in between for n in node.all_input_nodes} | set(between)
    if late := (read & set(after)):
        return None, f"the gradient depends on the loss ({name_and_line(min(late, key=position.__getitem__))})"
    return (best, tuple(between)), ""
