"""What begins a step: `next_of`, asked for each call that does not follow the path as it was recorded.

The paragraph for users is in docs/cuda_graphs.md, "Steps, paths and memory".
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import torch

from ..torch_private import cuda as torch_cuda
from .liveness import held, on_slots

if TYPE_CHECKING:
    from .function import Function
    from .node import Node
    from .tree import Tree

__all__ = ["REPEATS", "Next", "next_of"]

# Runs of one function on the same parameters in one step that are no reason to begin another, where there is evidence
# that the step goes on. More of them are a loop that is one call to Dynamo, or a recurrence.
REPEATS = 16


class Next(enum.Enum):
    """What a call does: begin a step, go on with the one there is, or go on because it reads what that gave out."""

    BEGINS = "begins"
    GOES_ON = "goes on"
    READS_ON = "reads on"


def next_of(tree: Tree, place: Node, function: Function, inputs: list[Any]) -> Next:
    """Whether a call of `function` at `place` begins a step, so that what the path gave out may be overwritten.

    The first row that is so decides:

    ============================================================================  =========
    nothing is held that the step gave out, and `function` ran in it              begins
    the thread marks its steps                                                    goes on
    `function` did not run in this step                                           goes on
    a forward waits for its backward, or a backward runs                          goes on
    the call writes to what the step gave out                                     goes on
    one call of a compiled function ran the last graph too (it has graph breaks)  goes on *
    the call reads what this torch can't copy out a second time (before 2.13)     goes on *
    the call reads what another function gave out, and more of that is held       reads on *
    `function` is the first of the step                                           begins
    what is held was given out by `function`, is read by the call, or is copied   begins
    anything else                                                                 goes on
    ============================================================================  =========

    \\* as long as `function` ran less than `REPEATS` times on the same parameters.

    What the call that begins a step reads is copied out first. After "reads on" by the first function of the step, the
    next one counts as the first: the call before a loop is no part of it.
    """
    ran = [node for node in place.path() if node.function is function]
    if place.watch_live.none_held():
        return Next.BEGINS if ran or tree.aside is not None else Next.GOES_ON
    if tree.marked or not ran or tree.waits(place) or torch_cuda.graph_task_id() != -1:
        return Next.GOES_ON
    on_path = on_slots(inputs, place.live)
    if any(i in on_path for i in function.piece.mutated_inputs):
        return Next.GOES_ON
    if any(i in on_path and not tree.can_move(on_path[i]) for i in function.piece.written_later):
        return Next.GOES_ON
    own = {slot for node in ran for slot in node.template_slots}
    read = set(on_path.values())
    others = [slot for slot in held(place.live) if slot not in read and not slot.copies]
    if sum(on_the_same(node, inputs) for node in ran) < REPEATS:
        if tree.in_one_call(function) or not all(map(tree.can_move, read)):
            return Next.GOES_ON
        if read - own and not own.issuperset(others):
            return Next.READS_ON
    if place.first is function:
        return Next.BEGINS
    last = {slot for slot in ran[-1].template_slots}
    return Next.BEGINS if all(slot in last for slot in others) else Next.GOES_ON


def on_the_same(node: Node, inputs: list[Any]) -> bool:
    """Whether `node` was recorded on the parameters and buffers in `inputs`."""
    assert node.function is not None
    return all(
        inputs[i].data_ptr() == node.addresses[i]
        for i in node.function.static_inputs
        if isinstance(inputs[i], torch.Tensor)
    )
