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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch.fx import GraphModule, Node

from cudagraph.placeholder import nearest_first

from ..graphs.nodes import is_tensor, name_and_line, numel, source_line, target_name, tensor_bytes, type_text
from ..graphs.rows import VIEWS, TokenSlice, TokenStep, is_elementwise, is_linear, is_zero, restores, shape_of
from ..torch_private import aot
from ..torch_private.values import hint
from .chunk_loop import Loop, put_in_place, read_sizes_of_inputs, write_chunks
from .edits import show
from .expand import LOSSES, expand
from .live_bytes import LivePoint
from .regions import (
    PRODUCTS,
    LeftWhole,
    RegionRow,
    TokenRegion,
    depends_on,
    each_region,
    known_count,
    outputs_of,
    seeds_of,
    steps_around,
    tangents_of,
    why_read,
)
from .words_last import words_last

# Tokens of a chunk. Each chunk reads and writes the sums of grad_w once, which takes as long as 240 / n of the three
# products of n tokens at an H200's rates (8.2e14 operations and 3.9e12 bytes a second), and 10 / n on a CPU.
_TOKENS = {"cpu": 256, "cuda": 2048}
# A graph holds each chunk's operators, and compiling takes as much longer.
_MOST_CHUNKS = 32
# Bytes of the logits in float32. Below, a graph is smaller without chunks, and nothing else of its step is.
_LEAST_BYTES = 16 << 20
_EXPONENTIALS = ("aten._log_softmax.default", "aten._softmax.default", "aten.logsumexp.default", "aten.exp.default")


@dataclass(frozen=True, kw_only=True)
class Chunked(RegionRow):
    """What was done with one last layer.

    Attributes:
        logits: their dtype and sizes, "float32[512, 4096]".
        logit_bytes, chunk_bytes: of all logits, and of those of one chunk; 0 if it is not in chunks.
        holds_peak: the step without hooks and chunks takes most where logits are alive, as predicted.
    """

    NAMES: ClassVar = ("chunks", "logits", "chunk_bytes")

    logits: str
    logit_bytes: int = 0
    chunk_bytes: int = 0
    holds_peak: bool = False


_LOSS_OUTSIDE = (
    "the program returns it, and its loss is outside of the compiled function. Compile a function that returns the "
    "loss, or call torch's linear_cross_entropy (torch 2.13) in its place"
)
COULD_BE = "options={'chunk': True} does that, and so does a budget where it pays"


def chunked(joint: GraphModule, tokens: int | None, *, finer: int = 1) -> tuple[GraphModule, tuple[Chunked, ...]]:
    """`joint`, or a graph without gradients, with its last layers in chunks. `joint` itself is not changed.

    Args:
        tokens: of a chunk at most; None: chosen by device, where the logits are worth it.
        finer: chunks have so many times fewer tokens than are chosen by device.
    """
    if not any(map(_has_loss, _layers(joint, tokens))):
        return joint, ()
    gm = aot.edited_copy(joint)
    expand(gm, LOSSES)
    read_sizes_of_inputs(gm.graph)
    words_last(gm.graph, {n for seed in _layers(gm, tokens) if _has_loss(seed) for n in _of_its_size(seed)})

    def divide(gm: GraphModule, seed: Node, tried: set[str]) -> tuple[GraphModule, Chunked | None]:
        place, nbytes = source_line(seed) or seed.name, tensor_bytes(seed.meta["val"])
        note = Chunked(logits=type_text(seed), logit_bytes=nbytes, node=seed.name, place=place)
        attempt, made = _attempt(gm, seed, tokens, finer)
        if isinstance(made, str):
            return gm, note.left(made) if made else None
        tried |= made.names
        done = replace(note, how=made.how, done=True, count=made.chunk_count, tokens=made.tokens)
        return attempt, replace(done, chunk_bytes=made.tokens * nbytes // max(1, hint(shape_of(seed)[0])))

    gm, found = each_region(gm, lambda gm: filter(_has_loss, _layers(gm, tokens)), divide)
    if not any(row.done for row in found):
        return joint, found
    show("joint graph in chunks", gm)
    return gm, found


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
        except LeftWhole as e:
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


def _of_its_size(seed: Node, follows: Callable[[Node], bool] = lambda _: True) -> set[Node]:
    """`seed`, and all that is computed from it without another product and has its size, or half of it."""
    size = numel(seed) // 2

    def is_one(user: Node) -> bool:
        return is_tensor(user) and numel(user) >= size and target_name(user) not in PRODUCTS and follows(user)

    return set(nearest_first([seed], lambda node: filter(is_one, node.users)))


def _has_loss(seed: Node, *, of_sum: bool = False) -> bool:
    """Whether an exponential, or the program, reads such a value. It needs no copy of the graph to tell.

    Exponentials that are not summed are those of a loss too, such as of a binary cross entropy; but not if another
    product of the forward reads what is made of them. That is the SiLU of an MLP, as Inductor decomposes it.

    `of_sum`: `seed` adapts a layer that is no candidate. Then its sum has a loss only if nothing but loops and views
    stands between: the softmax of an attention, whose queries are adapted, is none.
    """
    found = _of_its_size(seed, _is_loop if of_sum else lambda _: True)
    readers = {user for node in found for user in node.users}
    if not of_sum and any(user.op == "output" for user in readers):
        return True
    if any(target_name(user) in _EXPONENTIALS[:-1] for user in readers):
        return True
    exponentials = [node for node in found | readers if target_name(node) == _EXPONENTIALS[-1]]
    if any(map(_is_summed, exponentials)):
        return True
    products = {node for node in readers if target_name(node) in PRODUCTS}
    if not exponentials or not products:
        return bool(exponentials)
    tangents = filter(aot.is_tangent, seed.graph.find_nodes(op="placeholder"))
    return products <= depends_on(seed.graph.nodes, tangents)


def _is_loop(node: Node) -> bool:
    return is_elementwise(node) or target_name(node) in VIEWS or target_name(node) == "aten.slice.Tensor"


def _is_summed(exponential: Node) -> bool:
    """Whether `exponential` is summed as it is, or weighted, as in a softmax."""
    multiples = {exponential}

    def next_of(node: Node) -> list[Node]:
        multiples.add(node)
        return [n for n in node.users if target_name(n) not in PRODUCTS and is_linear(n, multiples.__contains__)]

    read = (user for node in nearest_first([exponential], next_of) for user in node.users)
    return any(target_name(user) in ("aten.sum.dim_IntList", "aten.sum.default") for user in read)


def _layers(gm: GraphModule, tokens: int | None) -> list[Node]:
    """Products of the forward with more columns than they have terms, largest first: where logits may come from."""
    found = list(seeds_of(gm, tokens, _LEAST_BYTES, 2))
    found = [node for node in found if not _adapts_another(node, found) or _has_loss(node, of_sum=True)]
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


def _chunk_one(gm: GraphModule, seed: Node, tokens: int | None, finer: int, *, sliced: bool) -> _Made:
    """Chunk the layer `seed` of `gm`, in place."""
    region = _region(gm, seed, sliced=sliced)
    nodes = list(gm.graph.nodes)
    tangents = region.tangents
    after = depends_on(nodes, region.outputs) - region.steps.keys()  # what is computed from results of the loop
    gradients = [n for n in region.steps if n in tangents]
    rows = hint(region.token_count())
    count = _chunk_count(seed, rows, tokens, finer)
    names = {n.name for n in region.steps if target_name(n) in PRODUCTS}
    loop = Loop(gm, region.steps, seed, count, region.kept)
    forward, backward = (region.outputs_of(backward=which) for which in (False, True))
    if late := region.inputs(region.needed(forward)) & (after | {*tangents}):
        raise LeftWhole(f"the loss of a token needs results of others ({name_and_line(min(late, key=nodes.index))})")
    if late := region.inputs(gradients) & (depends_on(nodes, backward) - region.steps.keys()):
        raise LeftWhole(f"its gradients need results of themselves ({name_and_line(min(late, key=nodes.index))})")
    if not backward:
        loss = write_chunks(loop, region.needed(forward), forward)
        how = f"{count} chunks"
    elif why := (scale := _scale(region, gradients, after))[1]:
        loss = write_chunks(loop, region.needed(forward), forward)
        first = next(n for n in nodes if n in tangents and n in region.inputs(gradients) and is_tensor(n))
        loss |= write_chunks(loop, region.needed(backward), backward, waits_for=first)
        how = f"{count} chunks, logits again in the backward: {why}"
    else:
        loss = write_chunks(loop, list(region.steps), list(region.outputs), scale=scale[0], scaled=backward)
        how = f"{count} chunks, gradients in the forward"
    put_in_place(loop, loss, nodes)
    gm.graph.lint()
    gm.recompile()
    return _Made(how, names, count, rows - rows // count * (count - 1))


def _chunk_count(seed: Node, count: int, tokens: int | None, finer: int) -> int:
    """How many chunks `count` tokens make. Raises `LeftWhole` if it is one. `tokens`, `finer`: see `chunked`."""
    each = tokens if tokens is not None else max(1, _TOKENS.get(seed.meta["val"].device.type, 1024) // finer)
    chunks = min(_MOST_CHUNKS, -(-count // each))
    if chunks < 2:
        raise LeftWhole(f"{count} tokens are one chunk of {each}")
    return chunks


# --- the region -------------------------------------------------------------------------------------------------------


def _region(gm: GraphModule, seed: Node, *, sliced: bool) -> TokenRegion:
    """The region of the logits `seed` and their loss. Raises `LeftWhole` with the reason if they can't be cut.

    `sliced`: slices that leave tokens out belong to it; its chunks are of the tokens that are left.
    """
    nodes = list(gm.graph.nodes)
    size = known_count(seed) * shape_of(seed)[1] // 2  # a part of the vocabulary may be cut off, or some tokens

    def is_big(node: Node) -> bool:
        return is_tensor(node) and hint(node.meta["val"].numel()) >= size

    inside = steps_around(nodes, seed, is_big, sliced=sliced)
    if not any(target_name(n) in _EXPONENTIALS for n in inside):
        if any(user.op == "output" for n in inside if is_big(n) for user in n.users):
            raise LeftWhole(_LOSS_OUTSIDE)
        raise LeftWhole(_why_alone(nodes, seed, inside, is_big))
    from_seed = depends_on(nodes, [seed])
    outputs = outputs_of(inside, [n for n in inside if n in from_seed], is_big, _why_read)
    region = TokenRegion(seed, inside, tuple(outputs), tangents_of(gm))
    # Without large nodes that no output of the region needs.
    steps = {n: inside[n] for n in region.needed(outputs)}
    return replace(region, steps=steps, kept=_kept_tokens(steps, outputs))


def _kept_tokens(steps: Mapping[Node, TokenStep], outputs: Iterable[Node]) -> tuple[TokenSlice, ...]:
    """The slices of the tokens that are in the loop, which are those of all slices.

    A result of more tokens must be zero for those that are not, as gradients are, or a sum of such results.
    """

    def kept_of(step: TokenStep) -> tuple[TokenSlice, ...]:
        rows = step.out or next(read.rows for read in step.reads.values())
        return rows.kept

    kept = max((kept_of(step) for step in steps.values()), key=len)
    zeros: set[Node] = set()  # are zero for all tokens that are not in the loop
    for node, step in steps.items():
        if kept_of(step) != kept[: len(kept_of(step))]:
            raise LeftWhole(f"tokens are sliced in two ways, in {name_and_line(node)} and before it")
        source = restores(step)
        if kept_of(step) == kept or (source in zeros if source is not None else is_linear(node, zeros.__contains__)):
            zeros.add(node)
    for node in outputs:
        if node not in zeros:
            raise LeftWhole(f"{name_and_line(node)} needs all tokens, and its loss some of them")
    return kept


def _why_alone(nodes: list[Node], seed: Node, inside: Mapping[Node, TokenStep], is_big: Any) -> str:
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
    """Why logits that `reader` needs as a whole can't be cut, with a way out."""
    way_out = "; compute what it is for outside of the compiled function, or from the hidden states"
    if reader.op == "output":
        way_out = (
            ". Return the loss alone from the compiled function: with transformers, compile a function that returns "
            "model(...).loss"
        )
    return why_read(node, reader) + way_out


# --- which way --------------------------------------------------------------------------------------------------------


def _scale(
    region: TokenRegion, gradients: Collection[Node], after: Collection[Node]
) -> tuple[tuple[Node, tuple[Node, ...]] | None, str]:
    """The one number that multiplies all gradients, with the nodes between it and the region, in order; or why not."""
    if region.seed.meta["val"].dtype == torch.float16:
        return None, "float16 needs the scale of the gradient before it is rounded"
    tangents = region.tangents
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
