"""Captures a function after a node of a path.

inputs --+-- numbers, None, generators                 part of the key: another value is another recording
         +-- meta tensors                              no memory: passed on
         +-- static                                    read where they are; another address is another recording
         +-- managed: on memory of an earlier output   likewise; their memory may be reused while the graph runs
         +-- others                                    copied to memory of the pool before each launch

plan -> restore the pool to the end of the parent -> stage copies -> capture -> which output lies on which slot
     -> checkpoint the pool, free all of it -> connect to the tree

Whatever is raised on the way, everything is as before: inputs, generators, the pool, the tree; see snapshot.py.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import REBINDS
from ..torch_private import cuda as torch_cuda
from .capture import CannotCapture, Capture, under_way
from .driver import Pool
from .function import Function
from .liveness import (
    Layout,
    Slot,
    copy_preserving_layout,
    held,
    layout_of,
    on_slots,
    overlapping,
    span_of,
    tensor_on,
)
from .node import EdgeKey, InputLayout, Node, OutputLayout, Recording, Template
from .pool import SharedPool
from .snapshot import Snapshot

__all__ = ["CannotCapture", "record"]


@dataclass(frozen=True, eq=False)
class Plan:
    """How a recording treats its inputs, and the slots of the path.

    Attributes:
        static: positions of tensors that are read where they are.
        managed: slots of the tensors on slots of the path, by position.
        layouts: how those tensors lie on their slots.
        copied: positions of tensors that are copied to the pool.
        held: slots that somebody else holds.
        donated: slots that only the inputs held; the graph may reuse their memory once it is done with them.
        dead: slots that nobody holds.
    """

    static: list[int]
    managed: dict[int, Slot]
    layouts: dict[int, Layout]
    copied: list[int]
    held: list[Slot]
    donated: list[Slot]
    dead: list[Slot]


def _plan(parent: Node, function: Function, inputs: list[Any], in_place: frozenset[int]) -> Plan:
    """Takes the managed tensors out of `inputs`."""
    unread = function.piece.unread_inputs
    managed = {i: slot for i, slot in on_slots(inputs, parent.live).items() if i not in unread}
    tensors = [
        i
        for i, x in enumerate(inputs)
        if isinstance(x, torch.Tensor) and not x.is_meta and i not in managed and i not in unread
    ]
    fixed = function.static_inputs | in_place.difference(function.piece.mutated_inputs)
    static = [i for i in tensors if i in fixed]
    copied = [i for i in tensors if i not in fixed]
    reason = function.reason_against(inputs, copied, static)
    if reason is not None:
        raise CannotCapture(reason)
    layouts = {i: layout_of(inputs[i]) for i in managed}
    for i in managed:
        inputs[i] = None  # without the call's own references, a slot that is held is held by somebody else
    held_slots = held(parent.live)
    donated = [slot for slot in dict.fromkeys(managed.values()) if slot not in held_slots]
    dead = [slot for slot in parent.live if slot not in held_slots and slot not in donated]
    return Plan(static, managed, layouts, copied, held_slots, donated, dead)


def record(
    pool: SharedPool,
    parent: Node,
    function: Function,
    key: EdgeKey,
    inputs: list[Any],
    in_place: frozenset[int] = frozenset(),
) -> Recording:
    """Capture `function` after `parent` and move the path there. `Recording.run` launches the graph.

    The inputs at `in_place` are read where they are, like static ones; see stable_inputs.py.

    Raises `CannotCapture` if something speaks against a capture, and the capture's own errors. `inputs` is whole then,
    and the tree as before.
    """
    addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else None for x in inputs]
    plan = _plan(parent, function, inputs, in_place)
    copied = {i: inputs[i] for i in plan.copied}
    before: Snapshot | None = None
    recording: Recording | None = None
    try:
        before = Snapshot(
            [*(inputs[i] for i in plan.static), *function.piece.constants],
            [x for x in inputs if isinstance(x, torch.Generator)],
        )
        recording = _capture(pool, parent, function, key, plan, addresses, inputs, before)
        recording.attach_to_slots()
    except BaseException as error:
        was_broken, pool.broken = pool.broken, True  # until the clean-up has succeeded
        traceback.clear_frames(error.__traceback__)  # they hold blocks of the pool
        if before is not None:
            before.restore()
        for i, slot in plan.managed.items():
            inputs[i] = tensor_on(slot.storage, plan.layouts[i])
        for i, x in copied.items():  # in their place are copies in the pool, which the next recording overwrites
            inputs[i] = x
        if recording is not None:
            recording.close()
        # Whoever keeps a block of the pool would see it handed out again: nothing more is recorded in such a pool.
        pool.broken = was_broken or pool.opened.broken or not pool.opened.live_blocks_are(set())
        raise
    del before
    for i, x in copied.items():  # outputs that are views of an input are views of the caller's tensor
        inputs[i] = x
    del copied
    _connect(recording, plan)
    return recording


def _capture(
    shared: SharedPool,
    parent: Node,
    function: Function,
    key: EdgeKey,
    plan: Plan,
    addresses: list[int | None],
    inputs: list[Any],
    before: Snapshot,
) -> Recording:
    """Capture the graph. `inputs` is left with tensors that read the same but keep no memory of the pool."""
    piece, pool = function.piece, shared.opened
    own = {
        slot: torch_cuda.storage_at(slot.address, piece.device, slot.nbytes)
        for slot in [*plan.held, *plan.donated]
        if not slot.host
    }
    if parent.state is not None:
        pool.restore(parent.state, list(own.values()), [slot.address for slot in plan.dead if not slot.host])

    arguments = list(inputs)
    with pool.staging():
        for i in plan.copied:
            arguments[i] = copy_preserving_layout(inputs[i])
    destinations, flat_copies = _destinations(plan.copied, arguments, inputs, piece.device)
    for i, slot in plan.managed.items():
        storage = own[slot] if slot in plan.donated and not slot.host else slot.storage
        arguments[i] = tensor_on(storage, plan.layouts[i])
        del storage

    staged = {i: StorageWeakRef(arguments[i].untyped_storage()) for i in plan.copied}
    owners = {slot: StorageWeakRef(own[slot]) for slot in plan.donated if not slot.host}
    for slot in owners:
        del own[slot]  # from here on only the arguments own it
    generators = [x for x in arguments if isinstance(x, torch.Generator)]
    capture = Capture(shared.owner, (slot.address for slot in [*plan.held, *plan.donated] if slot.host))
    with under_way(capture):
        graph, returned = pool.capture(lambda: list(piece.run(arguments)), generators)
    try:
        arguments.clear()
        for x in before.rebound():
            names = [function.input_name(i) for i in plan.static if inputs[i] is x]
            raise CannotCapture(f"{function.name} gives {names[0] if names else 'a constant of it'} {REBINDS}")

        reused = [slot for slot, owner in owners.items() if owner.expired()]
        alive = [*plan.held, *(slot for slot in plan.donated if slot not in reused)]
        known = {slot.cdata: slot for slot in alive}
        known |= {owner.cdata: slot for slot, owner in owners.items() if slot not in reused}
        # A view of an input is one of the caller's tensor, not of the copy that the graph reads. Not for backwards:
        # autograd takes over a gradient that nobody else has. Nor where the graph may have written an output there.
        views = {i: copy for i, copy in staged.items() if piece.is_inference and i not in piece.reusable_inputs}
        passed_on = {copy.cdata: i for i, copy in views.items() if not copy.expired()}
        fixed = sorted([*plan.static, *plan.managed])
        outputs, new = _outputs(function, pool, returned, inputs, fixed, known, passed_on, capture.lent)
        for k, *_ in outputs.input_aliases:
            returned[k] = None  # and with it the copy of an input; other memory stays for the checkpoint
        state = pool.checkpoint()
        for slot in new:
            if not slot.host:
                pool.disown(slot.storage)
        return Recording(
            parent,
            function,
            key,
            graph=graph,
            launch=shared.driver.launcher(graph),
            inputs=InputLayout(
                addresses=addresses,
                fixed=fixed,
                in_place=frozenset(inputs[i].data_ptr() for i in plan.static if i not in function.static_inputs),
                copied=plan.copied,
                copied_range=_as_range(plan.copied),
                flat_copies=flat_copies,
                destinations=destinations,
                consumed=[(i, slot, plan.layouts[i]) for i, slot in plan.managed.items() if slot in reused],
            ),
            outputs=outputs,
            live=(*alive, *new),
            must_be_dead=(*plan.dead, *reused),
            state=state,
        )
    except BaseException:
        graph.reset()
        raise


def _destinations(
    copied: list[int], arguments: list[Any], inputs: list[Any], device: torch.device
) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """Tensors over the staged copies that own nothing, which replays copy to; and which of them are copied flat.

    Replaces the copied `inputs` by such tensors.
    """
    destinations: list[torch.Tensor] = []
    flat_copies: list[tuple[int, int]] = []
    for position, i in enumerate(copied):
        x = inputs[i]
        storage = arguments[i].untyped_storage()
        unowned = torch_cuda.storage_at(storage.data_ptr(), device, storage.nbytes())
        inputs[i] = tensor_on(unowned, layout_of(arguments[i]))
        if overlapping(x):
            span = span_of(x)
            flat_copies.append((position, span))
            destinations.append(tensor_on(unowned, Layout((span,), (1,), 0, x.dtype)))
        else:
            destinations.append(inputs[i])
    return destinations, flat_copies


def _as_range(positions: list[int]) -> slice | None:
    first, last = min(positions, default=0), max(positions, default=-1)
    return slice(first, last + 1) if positions == list(range(first, last + 1)) else None


def _outputs(
    function: Function,
    pool: Pool,
    returned: Sequence[Any],
    inputs: list[Any],
    fixed: list[int],
    known: dict[int, Slot],
    passed_on: dict[int, int],
    lent: set[int],
) -> tuple[OutputLayout, list[Slot]]:
    """How a replay makes the outputs that the function `returned`, and the slots that are new.

    fixed: positions of inputs that are read where they are.
    known: slots of the path that are alive, by storage.
    passed_on: positions of copied inputs whose views are given out, by the storage of the copy.
    lent: addresses of host memory that was lent to the capture; see capture.py.
    """
    tensors = {k: x for k, x in enumerate(returned) if isinstance(x, torch.Tensor)}
    metas = [(k, tensors.pop(k)) for k, x in list(tensors.items()) if x.is_meta]
    by_tensor = {id(inputs[i]): i for i in fixed if inputs[i] is not None}
    same_inputs = [(k, by_tensor[id(x)]) for k, x in tensors.items() if id(x) in by_tensor]
    for k, _ in same_inputs:
        del tensors[k]
    for k, x in tensors.items():
        reason = function.reason_against_output(k, x)
        if reason is not None:
            raise CannotCapture(reason)
    by_input = {
        torch_cuda.identity(inputs[i].untyped_storage()): i for i in fixed if isinstance(inputs[i], torch.Tensor)
    } | passed_on
    slots = _new_slots(function, pool, tensors, known, by_input, passed_on, lent)

    first_position: dict[int, int] = {}
    templates: list[Template] = []
    input_aliases: list[tuple[int, int, int, Layout]] = []
    repeats: list[tuple[int, int]] = []
    for k, x in tensors.items():
        if id(x) in first_position:
            repeats.append((k, first_position[id(x)]))
            continue
        first_position[id(x)] = k
        storage, layout = x.untyped_storage(), layout_of(x)
        cdata = torch_cuda.identity(storage)
        if cdata in by_input:
            i = by_input[cdata]
            input_aliases.append((k, i, x.data_ptr() - inputs[i].data_ptr(), layout))
        else:
            slot = known.get(cdata) or slots.get(cdata)
            templates.append(Template(k, layout, slot, storage if slot is None else None))
    saved = function.piece.saved_outputs
    if saved is not None:  # an output that is returned twice has its template at the first position only
        saved = (*saved, *(first for k, first in repeats if k in saved))
    made = OutputLayout(
        skeleton=[None if isinstance(x, torch.Tensor) else x for x in returned],
        templates=templates,
        same_inputs=same_inputs,
        input_aliases=input_aliases,
        repeats=repeats,
        metas=metas,
        saved=list(
            dict.fromkeys(t.slot for t in templates if t.slot is not None and (saved is None or t.position in saved))
        ),
    )
    return made, list(slots.values())


def _new_slots(
    function: Function,
    pool: Pool,
    tensors: dict[int, torch.Tensor],
    known: dict[int, Slot],
    by_input: dict[int, int],
    passed_on: dict[int, int],
    lent: set[int],
) -> dict[int, Slot]:
    """Slots for the memory of `tensors` that the capture allocated or was lent, by storage.

    Raises `CannotCapture` if other new memory of the pool is still allocated.
    """
    storages = {torch_cuda.identity(x.untyped_storage()): x.untyped_storage() for x in tensors.values()}
    first_output: dict[int, int] = {}
    for k, x in tensors.items():
        first_output.setdefault(torch_cuda.identity(x.untyped_storage()), k)
    fresh = {
        cdata: storage
        for cdata, storage in storages.items()
        if cdata not in known and cdata not in by_input and storage.nbytes() and not function.is_constant(cdata)
    }
    on_host = {
        cdata
        for cdata, storage in fresh.items()
        if storage.device != function.piece.device or storage.data_ptr() in lent
    }
    blocks = {storage.data_ptr() for cdata, storage in fresh.items() if cdata not in on_host}
    expected = blocks | {slot.address for slot in known.values() if not slot.host}
    expected |= {storages[cdata].data_ptr() for cdata in passed_on.keys() & storages.keys()}
    if not pool.live_blocks_are(expected):
        live = pool.live_blocks()
        leaked = live - expected
        if leaked:
            raise CannotCapture(
                f"{function.name} keeps {len(leaked)} tensors that were made while it was captured and are no outputs"
            )
        foreign = blocks - live  # memory that was there before, such as a tensor the graph has of its own
        fresh = {cdata: storage for cdata, storage in fresh.items() if storage.data_ptr() not in foreign}
    return {
        cdata: Slot(storage, function.origin(first_output[cdata]), copies=function.copies_held, host=cdata in on_host)
        for cdata, storage in fresh.items()
    }


def _connect(recording: Recording, plan: Plan) -> None:
    """Put `recording` into the tree as its parent's next one, and move the path there."""
    parent, function = recording.parent, recording.function
    recording.pending = parent.pending
    if function.piece.is_backward:
        # Its forward is the one whose outputs it reads. A backward that reads nothing of the path belongs to a warm-up.
        read = set(plan.managed.values())
        recording.pending = tuple(forward for forward in parent.pending if not read.intersection(forward.outputs.saved))
    elif not function.piece.is_inference:
        recording.pending = (*parent.pending, recording)
    # One that reads in place is tried first: wherever it applies, one that copies applies, too.
    children = parent.children.setdefault(recording.key, [])
    children.insert(0 if recording.inputs.in_place else len(children), recording)
    parent.edges[recording.key] = recording.edge
    recording.cursor.current = recording
