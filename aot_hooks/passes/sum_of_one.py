"""The backward divides rounded results of softmax by their sum; graphs/probabilities.py says why."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

from torch.fx import GraphModule, Node

from ..graphs.probabilities import as_probabilities, is_division_by_sum, summed_dimension
from ..graphs.saved import SavedValue
from .edits import computed, with_inputs


def with_sum_of_one(
    bw: GraphModule,
    out: Node,
    saved: SavedValue,
    views: Iterable[SavedValue],
    readers: Collection[Node],
    *,
    decompositions: Mapping[Any, Any] | None,
    keeps_exact: bool = False,
) -> Node:
    """`out` scaled so that each row sums to one, if it stands for `saved`, a result of softmax; else `out` as it is.

    If it is the exponentials of a softmax, the quotients that `readers` make of it, or of `views`, are scaled instead.
    `keeps_exact`: numbers that were not rounded keep their bits.
    """
    dimension = summed_dimension(saved.fw_node)
    if dimension is None:
        return out
    scaled = partial(as_probabilities, dimension=dimension, keeps_exact=keeps_exact)
    members = [value.bw_node for value in (saved, *views)]
    quotients = [r for r in readers if any(is_division_by_sum(r, member) for member in members)]
    for quotient in quotients:
        with bw.graph.inserting_before(quotient.next):
            made = computed(bw.graph, scaled, quotient, decompositions=decompositions)
        own = with_inputs([made], {quotient}.__contains__)
        for reader in [user for user in quotient.users if user not in own]:
            reader.replace_input_with(quotient, made)
    is_result = str(saved.fw_node.target) != "aten.exp.default"
    return computed(bw.graph, scaled, out, decompositions=decompositions) if is_result and not quotients else out


def sum_to_one_if_rounded(
    bw: GraphModule, values: Iterable[SavedValue], decompositions: Mapping[Any, Any] | None
) -> None:
    """Divide results of softmax among `values` by their sums, in place, where they were rounded before `bw` runs.

    Exact ones keep their bits.
    """
    for value in values:
        slot = value.bw_node
        readers = [user for user in slot.users if user.op != "output"]
        if readers and value.value.dtype.is_floating_point:
            with bw.graph.inserting_before(min(readers)):
                made = with_sum_of_one(bw, slot, value, (), readers, decompositions=decompositions, keeps_exact=True)
            for reader in readers if made is not slot else ():
                reader.replace_input_with(slot, made)
