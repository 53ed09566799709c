"""What the backward computes once more must come out as it did in the forward: random numbers, and reads of buffers.

      forward                backward                         backward
        r = bernoulli(e)       r = bernoulli(e)   other         m = (saved)
        m = gt(r, 0)           m = gt(r, 0)       numbers  -->  grad_x = mul(tangents, m)
        out = mul(x, m)        grad_x = mul(tangents, m)
        return out, x          ...                              forward: return out, m

Partitions may compute a random operator again without the state of its generator: torch's own with
`activation_memory_budget` below 1, or a user's. Then the value is saved, or what the backward computes from it if that
is smaller. The same is done for what is computed again from a buffer: by then, the program may have written to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from cudagraph.placeholder import results_of

from ..errors import UnsupportedGraphError
from ..graphs.nodes import is_tensor, source_line, storage_bytes, storage_of
from ..graphs.repeats import draw_counts, draws, results, twins
from ..graphs.saved import crossing_pairs, is_size
from ..torch_private import values as torch_values
from .edits import clean_name, set_saved


def save_what_was_drawn(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int, counts: Counter[Any]) -> None:
    """Save the random numbers that `bw` would draw again. Edits both graphs in place.

    `counts`: of the joint graph, before it was partitioned, see `draw_counts`. Raises `UnsupportedGraphError` if an
    operator still stands in both graphs.
    """
    drawn = {(node.name, node.target) for node in fw.graph.nodes if draws(node)}
    again = [node for node in bw.graph.nodes if draws(node) and (node.name, node.target) in drawn]
    if again:
        same = twins(fw, bw, num_fwd_outputs)
        values = [value for node in again if node in same for value in results(node)]
        for value in values:
            if not is_tensor(value):
                _replace_number(bw, value)
            elif value.users and value not in same:  # an item that the forward does not use
                same[value] = _item(same[value.args[0]], value)  # type: ignore[index]
        cut = _cut([v for v in values if v.users], same, set())
        save_instead(fw, bw, num_fwd_outputs, cut, same)
        erase_unused(fw, bw, num_fwd_outputs, {*cut, *values, *again})
    _check_drawn_once(fw, bw, counts)


def save_what_is_computed_from(
    fw: GraphModule, bw: GraphModule, num_fwd_outputs: int, state: Collection[Any]
) -> set[Node]:
    """Save what `bw` computes again from the inputs with the storages `state`, where that is less than the input.

    Edits both graphs in place. Returns the saved inputs of `fw` that are to be copied instead.
    """
    pairs = crossing_pairs(fw, bw, num_fwd_outputs)
    sources = {slot: n for n, slot in pairs if isinstance(n, Node) and storage_of(n) in state}
    if not sources:
        return set()
    same = twins(fw, bw, num_fwd_outputs)
    again = {slot for slot in sources if any(user in same for user in slot.users) and not _is_too_large(slot, same)}
    copied = set()
    for slot in again:
        cut = _cut([slot], same, again)
        if slot in cut:
            copied.add(sources[slot])
        else:
            save_instead(fw, bw, num_fwd_outputs, cut, same)
            erase_unused(fw, bw, num_fwd_outputs, set(cut))
    return copied


def _is_too_large(slot: Node, same: Mapping[Node, Node]) -> bool:
    """Whether `slot` holds quantized weights or the like: whole numbers, no fewer bytes than an eighth of the results.

    A copy would take memory that computing again saves. Masks and positions are far smaller than what they are for.
    """
    value = slot.meta["val"]
    if value.is_floating_point() and value.element_size() > 1:
        return False
    made = sum(storage_bytes(user.meta["val"]) for user in slot.users if user in same and is_tensor(user))
    return 8 * storage_bytes(value) > made


def _cut(start: Iterable[Node], same: Mapping[Node, Node], inputs: Collection[Node]) -> list[Node]:
    """The smallest values found, in nodes of the backward, from which all can be computed that needs those of `start`.

    `inputs`: nodes that the backward gets anyway for readers that the forward has not. From each value the search goes
    on to its readers, as long as bytes don't grow: from random numbers to the mask that is computed from them.
    """

    def beyond(node: Node, current: dict[Node, None]) -> dict[Node, None] | None:
        readers = [user for user in node.users if user in same or node not in inputs]
        if not readers or not all(user in same and is_tensor(user) for user in readers):
            return None
        return {n: None for n in (*current, *readers) if n is not node}

    def nbytes(nodes: Iterable[Node]) -> int:
        return sum({storage_of(same[n]): storage_bytes(n.meta["val"]) for n in nodes}.values())

    current = best = dict.fromkeys(start)
    while True:
        further = (found for node in current if (found := beyond(node, current)) is not None)
        following = next((found for found in further if nbytes(found) <= nbytes(current)), None)
        if following is None:
            return list(best)
        current = following
        if nbytes(current) < nbytes(best):
            best = current


def _item(call: Node, like: Node) -> Node:
    """A new `getitem` of `call`, a node of the forward, with the index of `like`, a `getitem` of the backward."""
    with call.graph.inserting_after(call):
        made = call.graph.call_function(like.target, (call, like.args[1]))  # type: ignore[arg-type]
    made.meta = {key: value for key, value in like.meta.items() if key in ("val", "tensor_meta", "stack_trace")}
    return made


def _replace_number(bw: GraphModule, node: Node) -> None:
    """Have readers of `node`, a number or None, read it elsewhere: a size is an input of `bw` already."""
    value = node.meta["val"]
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        own = type(value), torch_values.expression(value)
        slots = ((slot, slot.meta["val"]) for slot in bw.graph.find_nodes(op="placeholder"))
        value = next((slot for slot, x in slots if type(x) is own[0] and torch_values.expression(x) == own[1]), node)
    for user in list(node.users):
        user.args = map_arg(user.args, lambda n: value if n is node else n)
        user.kwargs = map_arg(user.kwargs, lambda n: value if n is node else n)


def save_instead(
    fw: GraphModule, bw: GraphModule, num_fwd_outputs: int, values: Iterable[Node], same: Mapping[Node, Node]
) -> None:
    """Save the forward's twins of `values`, nodes of `bw`, and have the backward read those."""
    values = list(values)
    slots = slots_of(fw, bw, num_fwd_outputs, [same[value] for value in values])
    for value in values:
        value.replace_all_uses_with(slots[same[value]])


def slots_of(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int, nodes: Iterable[Node]) -> dict[Node, Node]:
    """Have `fw` save `nodes` from now on. Returns the inputs of `bw` for all that `fw` saves, by node of `fw`.

    New saved tensors come first: torch wants those that it does not check for writes at the end.
    """
    pairs = crossing_pairs(fw, bw, num_fwd_outputs)
    slots = {node: slot for node, slot in pairs if isinstance(node, Node)}
    after_sizes = bw.graph.find_nodes(op="placeholder")[sum(is_size(node) for node, _ in pairs)]
    saved: list[Node] = []
    for node in nodes:
        if node not in slots:
            with bw.graph.inserting_before(after_sizes):
                slots[node] = bw.graph.placeholder(clean_name(node.name))
            slots[node].target, slots[node].meta = slots[node].name, {"val": node.meta["val"]}
            saved.append(node)
    set_saved(fw, num_fwd_outputs, [*saved, *results_of(fw.graph)[num_fwd_outputs:]])
    return slots


def erase_unused(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int, ends: Collection[Node]) -> None:
    """Erase the nodes `ends` of `bw`, which nothing reads, and what is computed and saved for them alone."""
    pairs = crossing_pairs(fw, bw, num_fwd_outputs)
    used = {slot for _, slot in pairs if slot.users}
    _erase(bw, ends)
    times = Counter(node for node, _ in pairs)
    unused = [(n, s) for n, s in pairs if s in used and not s.users and is_tensor(s) and times[n] == 1]
    stop_saving(fw, bw, num_fwd_outputs, unused)


def stop_saving(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int, unused: Collection[tuple[Node, Node]]) -> None:
    """Take the saved values `unused`, each with its input of `bw` that nothing reads, out of both graphs."""
    for _, slot in unused:
        bw.graph.erase_node(slot)
    gone = {node for node, _ in unused}
    set_saved(fw, num_fwd_outputs, [n for n in results_of(fw.graph)[num_fwd_outputs:] if n not in gone])
    _erase(fw, gone)


def _erase(gm: GraphModule, ends: Collection[Node]) -> None:
    """Erase `ends` and what only they need, as far as nothing reads it. Random operators of the forward stay."""
    reached = set(ends)
    for node in reversed(gm.graph.nodes):
        if node.op == "call_function" and node in reached and not node.users and (node in ends or not node.is_impure()):
            reached.update(node.all_input_nodes)
            gm.graph.erase_node(node)


def _check_drawn_once(fw: GraphModule, bw: GraphModule, counts: Counter[Any]) -> None:
    """Raise `UnsupportedGraphError` if both graphs draw more often than the joint graph, which had `counts`."""
    found = draw_counts(fw, with_state=True) + draw_counts(bw)
    for target, count in found.items():
        if count > counts[target]:
            where = next((line for n in bw.graph.nodes if n.target == target and (line := source_line(n))), "")
            raise UnsupportedGraphError(
                f"expected each operator that draws random numbers in the forward or in the backward, but both "
                f"together have {count} of {target} where the joint graph has {counts[target]}"
                f"{f' ({where})' if where else ''}: the backward would draw other numbers than the forward. Have the "
                "partitioner save the result, and copy nodes with their names"
            )
