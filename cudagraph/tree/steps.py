"""Decides when a step begins: `next_of`. For users: docs/cuda_graphs.md, "Steps, paths and memory"."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from ..torch_private import cuda as torch_cuda
from .function import Function
from .liveness import Slot, on_slots, slots_in_use
from .node import Node, Recording
from .uncaptured import Cause, UncapturedStep, weak_storages_of

# So often may a function run on the same parameters in one step, where other evidence says that the step goes on. More
# runs are a loop within one call of Dynamo, or a recurrence: then the evidence does not count.
REPEATS = 16
WARMUP_REPEATS = 64  # calls of one function in a step that warms up, after which another step begins in any case


# What a call does to the step. READS_ON: the step goes on, because the call reads an output of the path.
Next = enum.Enum("Next", ["BEGINS", "GOES_ON", "READS_ON", "WARMS_UP"])


@dataclass(frozen=True, eq=False)
class Call:
    """A call for which the current node has no edge that applies."""

    function: Function
    inputs: list[Any]
    node: Node  # where the path is; during an uncaptured step, where it was left
    uncaptured: UncapturedStep | None  # set while the rest of the step runs uncaptured
    is_marked: bool  # the thread marks its steps
    in_one_call: bool  # the last graph ran in the same call of a compiled function, which has graph breaks
    can_move: Callable[[Slot], bool]  # whether the tensors on a slot can be copied out
    also_read: Collection[Slot] = ()  # those of the path that later parts of the same cut graph may read


def next_of(call: Call) -> Next:
    """Whether `call` begins a step, so that outputs of the path may be overwritten.

    The first row that is true decides:

    ===================================================================  =================================
    at the root, and nothing of the step is uncaptured                   goes on
    the step is uncaptured because marks were ignored, a forward waits   goes on
    ... and no forward waits                                             begins
    the step warms up, and the warm-up goes on, see `_warmup_is_over`    warms up
    ... and it is over, at the root                                      begins
    in all other cases                                                   the memory of the path decides,
                                                                         see `_next_by_memory`
    ===================================================================  =================================

    A forward waits for its backward while something is held that it saved. Under `torch.utils.checkpoint` it saves
    nothing of the path: there it waits while an output is held whose history no backward has used, or while the hooks
    of the checkpoint are held, see `Node.waits_for_backward`.

    The inputs of a call that begins a step are copied out first; of a cut graph, all its inputs. If the first function
    of the step "reads on", it is the call before a loop and no part of it: the function that ran next counts as the
    first. If the warm-up is over and the path goes on, it does so from where it was left. A mark begins a step unless a
    forward waits for its backward.
    """
    step, node = call.uncaptured, call.node
    if step is None:
        if not isinstance(node, Recording):
            return Next.GOES_ON
    elif step.cause is Cause.IGNORED_MARKS:
        return Next.GOES_ON if node.waits_for_backward() else Next.BEGINS
    elif step.cause is Cause.WARMUP:
        if not _warmup_is_over(call, step):
            return Next.WARMS_UP
        if not isinstance(node, Recording):
            return Next.BEGINS
    return _next_by_memory(call)


def _next_by_memory(call: Call) -> Next:
    """What the outputs that are held say. "Given out" means: an output of a recording of this step.

    The first row that is true decides:

    ============================================================================  ==========
    nothing is held that was given out, and `function` ran in the step            begins
    the thread marks its steps                                                    goes on
    `function` did not run in this step                                           goes on
    a forward waits for its backward, or a backward runs                          goes on
    the call writes to memory that was given out                                  goes on
    one call of a compiled function ran the last graph too (it has graph breaks)  goes on *
    the call reads memory that can't be copied out a second time (torch < 2.13)   goes on *
    the call reads another function's output, and more of those are held          reads on *
    `function` is the first of the step                                           begins
    each held output is one of `function`, or read by the call, or copied out     begins
    in all other cases                                                            goes on
    ============================================================================  ==========

    \\* as long as `function` ran less than `REPEATS` times on the same parameters.
    """
    function, inputs, node = call.function, call.inputs, call.node
    ran = [recording for recording in node.path() if recording.function is function]
    if node.watch_live.none_held():
        return Next.BEGINS if ran or call.uncaptured is not None else Next.GOES_ON
    if call.is_marked or not ran or node.waits_for_backward() or torch_cuda.graph_task_id() != -1:
        return Next.GOES_ON
    on_path = on_slots(inputs, node.live)
    if any(i in on_path for i in function.piece.mutated_inputs):
        return Next.GOES_ON
    own = {slot for recording in ran for slot in recording.slots}
    read = {*on_path.values(), *call.also_read}
    others = [slot for slot in slots_in_use(node.live) if slot not in read and not slot.copies]
    if sum(_on_same_parameters(recording, inputs) for recording in ran) < REPEATS:
        if call.in_one_call or not all(map(call.can_move, read)):
            return Next.GOES_ON
        if read - own and not own.issuperset(others):
            return Next.READS_ON
    if node.first is function or set(ran[-1].slots).issuperset(others):
        return Next.BEGINS
    return Next.GOES_ON


def _warmup_is_over(call: Call, step: UncapturedStep) -> bool:
    """Whether the warm-up has ended. It holds no memory of the pool.

    A wrong answer never gives wrong numbers, but it decides where later steps begin.

    The first row that is true decides:

    ============================================================================  ==========
    `function` ran `WARMUP_REPEATS` times                                         is over
    `function` did not run in it                                                  goes on **
    the thread marks its steps                                                    goes on
    one call of a compiled function ran the last graph too                        goes on *
    a forward waits for its backward, or a backward runs                          goes on
    `function` ran at most once, and the call reads another function's output     goes on
    `function` ran last, is not the first of the step, and another function's
    output is held that the call does not read                                    goes on *
    in all other cases                                                            is over
    ============================================================================  ==========

    \\* as long as `function` ran less than `REPEATS` times.
    \\*\\* except for the first function of the step, where the warm-up continues the path.
    """
    function = call.function
    count = step.call_counts[function]
    if count >= WARMUP_REPEATS:
        return True
    if count == 0 and not (step.continues_path and function is step.first):
        return False
    if call.is_marked or (call.in_one_call and count < REPEATS) or step.in_a_backward() or step.waits_for_backward():
        return False
    read = {storage.cdata for storage in weak_storages_of(call.inputs)}
    others = [
        storage.cdata
        for giver, storage in step.made
        if giver is not function and not giver.copies_held and not storage.expired()
    ]
    if count <= 1 and not read.isdisjoint(others):
        return False
    # If other functions ran in between, the step is a loop over several functions.
    is_repeat = function is step.last and function is not step.first and count < REPEATS
    return not is_repeat or read.issuperset(others)


def never_ends(call: Call, node: Node) -> bool:
    """Whether the step repeats `function` and does not end by itself, because an output of another function is held.

    Such calls run uncaptured until that output is dropped. `node`: where the path is.
    """
    ran = [recording for recording in node.path() if recording.function is call.function]
    dead = [each for each in ran if _on_same_parameters(each, call.inputs) and not slots_in_use(each.slots)]
    return len(dead) > REPEATS and not call.is_marked


def _on_same_parameters(recording: Recording, inputs: list[Any]) -> bool:
    """Whether `recording` was made with the parameters and buffers in `inputs`."""
    static = [i for i in recording.function.piece.static_inputs if isinstance(inputs[i], torch.Tensor)]
    return all(inputs[i].data_ptr() == recording.inputs.addresses[i] for i in static)
