"""Capturing a function at a place of a path.

inputs --+-- numbers, None, generators           part of the key: another value is another recording
         +-- meta tensors                        they have no memory: given on as they are
         +-- static                              read where they are; another address is another recording
         +-- managed: they lie on a slot of the path   likewise; their memory may be reused while the graph runs
         +-- others                              copied to memory of the pool before each launch

plan -> restore the pool to the end of the parent -> stage copies -> capture -> which output lies on which slot
     -> checkpoint the pool, free all of it -> launch

Whatever is raised on the way, all is as it was: inputs, generators, the pool, the tree; see `snapshot`.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import REBINDS
from ..torch_private import cuda as torch_cuda
from .capture import CannotCapture, Capture, under_way
from .liveness import Layout, Slot, Watch, copy_as_it_lies, held, layout_of, on_slots, overlapping, span_of, tensor_on
from .node import Node
from .snapshot import Snapshot
from .stable_inputs import Look

if TYPE_CHECKING:
    from .function import Function

__all__ = ["CannotCapture", "record"]


@dataclass
class Plan:
    """What the inputs of a recording are.

    Attributes:
        static: positions of tensors that are read where they are.
        managed: positions of tensors on slots of the path.
        layouts: how those lie on their slots.
        copied: positions of tensors that are copied to the pool.
        kept: slots that somebody else holds.
        taken: slots that only the inputs held; the graph may reuse their memory once it is done with them.
        free: slots that nobody holds any more.
    """

    static: list[int]
    managed: dict[int, Slot]
    layouts: dict[int, Layout]
    copied: list[int]
    kept: list[Slot]
    taken: list[Slot]
    free: list[Slot]


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
        inputs[i] = None  # the references of the call go: who holds the memory after that is somebody else
    kept = held(parent.live)
    taken = [slot for slot in dict.fromkeys(managed.values()) if slot not in kept]
    free = [slot for slot in parent.live if slot not in kept and slot not in taken]
    return Plan(static, managed, layouts, copied, kept, taken, free)


def record(
    parent: Node,
    function: Function,
    key: Any,
    inputs: list[Any],
    in_place: frozenset[int] = frozenset(),
) -> Node:
    """Capture `function` after `parent`. Returns the new node, where the path is now; `Node.run` launches it.

    It reads the inputs `in_place` where they are, as the static ones; see `settled`.

    Raises `CannotCapture` if something speaks against it, and what the capture raises. `inputs` is whole then, and the
    tree as it was before.
    """
    tree = parent.tree
    addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else None for x in inputs]
    plan = _plan(parent, function, inputs, in_place)
    given = {i: inputs[i] for i in plan.copied}
    node = Node(tree, parent, function)
    node.addresses = addresses
    node.fixed_inputs = sorted([*plan.static, *plan.managed])
    node.in_place = frozenset(x.data_ptr() for i in plan.static if i not in function.static_inputs for x in [inputs[i]])
    before: Snapshot | None = None
    try:
        before = Snapshot(
            [*(inputs[i] for i in plan.static), *function.piece.constants],
            [x for x in inputs if isinstance(x, torch.Generator)],
        )
        _capture(node, plan, inputs, before)
        node.launch = tree.driver.launcher(node.graph)
    except BaseException as error:
        was_tainted, tree.tainted = tree.tainted, True  # unless what follows comes to its end
        traceback.clear_frames(error.__traceback__)  # they hold blocks of the pool
        if before is not None:
            before.restore()
        for i, slot in plan.managed.items():
            inputs[i] = tensor_on(slot.storage, plan.layouts[i])
        for i, x in given.items():  # in their place are copies in the pool, which the next recording overwrites
            inputs[i] = x
        node.close()  # slots of the path may know it
        # Whoever keeps a block of the pool would see it handed out again: such a pool is not used any longer.
        tree.tainted = was_tainted or tree.pool.broken or not tree.pool.live_blocks_are(set())
        raise
    del before
    for i, x in given.items():  # the graph's own copy is none of the caller's business
        inputs[i] = x
    del given
    _connect(node, plan, key)
    return node


def _capture(node: Node, plan: Plan, inputs: list[Any], before: Snapshot) -> None:
    """Record the graph of `node`. `inputs` is left with tensors that read the same but keep no memory of the pool."""
    assert node.parent is not None and node.function is not None
    tree, piece = node.tree, node.function.piece
    pool = tree.pool
    own = {
        slot: torch_cuda.storage_at(slot.address, piece.device, slot.nbytes)
        for slot in [*plan.kept, *plan.taken]
        if not slot.host
    }
    if node.parent.state is not None:
        pool.restore(node.parent.state, list(own.values()), [slot.address for slot in plan.free if not slot.host])

    arguments = list(inputs)
    with pool.staging():
        for i in plan.copied:
            arguments[i] = copy_as_it_lies(inputs[i])
    for position, i in enumerate(plan.copied):
        storage = arguments[i].untyped_storage()
        unowned = torch_cuda.storage_at(storage.data_ptr(), piece.device, storage.nbytes())
        node.copied_inputs.append(i)
        if overlapping(inputs[i]):
            node.flat_copies.append((position, span_of(inputs[i])))
            flat = Layout((span_of(inputs[i]),), (1,), 0, inputs[i].dtype)
            node.destinations.append(tensor_on(unowned, flat))
        inputs[i] = tensor_on(unowned, layout_of(arguments[i]))
        if len(node.destinations) == position:
            node.destinations.append(inputs[i])
        del storage
    for i, slot in plan.managed.items():
        storage = own[slot] if slot in plan.taken and not slot.host else slot.storage
        arguments[i] = tensor_on(storage, plan.layouts[i])
        del storage

    staged = {i: StorageWeakRef(arguments[i].untyped_storage()) for i in plan.copied}
    owners = {slot: StorageWeakRef(own[slot]) for slot in plan.taken if not slot.host}
    for slot in owners:
        del own[slot]  # from here on only the arguments own it
    generators = [x for x in arguments if isinstance(x, torch.Generator)]
    capture = Capture(tree.owner, (slot.address for slot in [*plan.kept, *plan.taken] if slot.host))
    with under_way(capture):
        node.graph, returned = pool.capture(lambda: list(piece.run(arguments)), generators)
    arguments.clear()
    for x in before.rebound():
        names = [node.function.input_name(i) for i in plan.static if inputs[i] is x]
        raise CannotCapture(f"{node.function.name} gives {names[0] if names else 'a constant of it'} {REBINDS}")

    gone = [slot for slot, owner in owners.items() if owner.expired()]
    alive = [*plan.kept, *(slot for slot in plan.taken if slot not in gone)]
    on_known = {slot.cdata: slot for slot in alive}
    on_known |= {owner.cdata: slot for slot, owner in owners.items() if slot not in gone}
    known_blocks = {slot.address for slot in alive if not slot.host}
    passed_on = {staged[i].cdata: i for i in staged if not staged[i].expired()}
    new = _outputs(node, returned, on_known, known_blocks, capture.lent, inputs, passed_on)
    for k, *_ in node.input_aliases:
        returned[k] = None  # and with it the copy of an input that was passed on; other memory stays for the checkpoint
    node.state = pool.checkpoint()
    for slot in new:
        if not slot.host:
            pool.disown(slot.storage)
    node.live = (*alive, *new)
    node.consumed = [(i, slot, plan.layouts[i]) for i, slot in plan.managed.items() if slot in gone]
    node.watch_dead = Watch([*plan.free, *gone])


def _outputs(
    node: Node,
    returned: Sequence[Any],
    on_known: dict[int, Slot],
    known_blocks: set[int],
    lent: set[int],
    inputs: list[Any],
    passed_on: dict[int, int],
) -> list[Slot]:
    """Prepare what a replay gives out for `returned`; the slots that are new. `lent`: host memory, see `current`.

    `passed_on`: copied inputs, by the storages of their copies."""
    assert node.function is not None
    function, tree = node.function, node.tree
    tensors = {k: x for k, x in enumerate(returned) if isinstance(x, torch.Tensor)}
    node.metas = [(k, tensors.pop(k)) for k, x in list(tensors.items()) if x.is_meta]
    fixed = {id(inputs[i]): i for i in node.fixed_inputs if inputs[i] is not None}
    node.same_inputs = [(k, fixed[id(x)]) for k, x in tensors.items() if id(x) in fixed]
    for k, _ in node.same_inputs:
        del tensors[k]
    for k, x in tensors.items():
        reason = function.reason_against_output(k, x)
        if reason is not None:
            raise CannotCapture(reason)
    by_input = {
        torch_cuda.identity(inputs[i].untyped_storage()): i
        for i in node.fixed_inputs
        if isinstance(inputs[i], torch.Tensor)
    }
    if function.piece.is_inference:
        # A view of an input is one of the caller's tensor, not of the copy that the graph reads. Not of what a backward
        # gets: autograd takes over a gradient that nobody else has.
        by_input |= passed_on
    storages = {torch_cuda.identity(x.untyped_storage()): x.untyped_storage() for x in tensors.values()}
    fresh = {
        cdata: storage
        for cdata, storage in storages.items()
        if cdata not in on_known and cdata not in by_input and storage.nbytes() and not function.is_constant(cdata)
    }
    on_host = {
        cdata
        for cdata, storage in fresh.items()
        if storage.device != function.piece.device or storage.data_ptr() in lent
    }
    blocks = {storage.data_ptr() for cdata, storage in fresh.items() if cdata not in on_host}
    staged = {storages[cdata].data_ptr() for cdata in by_input.keys() & passed_on.keys() & storages.keys()}
    if not tree.pool.live_blocks_are(known_blocks | blocks | staged):
        live = tree.pool.live_blocks()
        leaked = live - known_blocks - blocks - staged
        if leaked:
            raise CannotCapture(
                f"{function.name} keeps {len(leaked)} tensors that were made while it was captured and are no outputs"
            )
        foreign = blocks - live  # memory that was there before, such as a tensor the graph has of its own
        fresh = {cdata: storage for cdata, storage in fresh.items() if storage.data_ptr() not in foreign}

    slots: dict[int, Slot] = {}
    position_of: dict[int, int] = {}
    node.skeleton = [None if isinstance(x, torch.Tensor) else x for x in returned]
    for k, x in tensors.items():
        if id(x) in position_of:
            node.repeats.append((k, position_of[id(x)]))
            continue
        position_of[id(x)] = k
        storage = x.untyped_storage()
        cdata, layout = torch_cuda.identity(storage), layout_of(x)
        if cdata in by_input:
            i = by_input[cdata]
            node.input_aliases.append((k, i, x.data_ptr() - inputs[i].data_ptr(), layout))
            continue
        slot = on_known.get(cdata) or slots.get(cdata)
        if slot is None and cdata in fresh:
            slot = Slot(storage, function.origin(k), copies=function.copies_held, host=cdata in on_host)
            slots[cdata] = slot
        node.template_positions.append(k)
        node.template_slots.append(slot)
        if slot is None:
            node.templates.append(tensor_on(storage, layout))
        else:
            slot.add_template(node.templates, layout)
    saved = function.piece.saved_outputs
    if saved is not None:  # an output that is returned twice has its slot at the first position only
        saved = (*saved, *(first for k, first in node.repeats if k in saved))
    backward_needs = [
        slot
        for k, slot in zip(node.template_positions, node.template_slots, strict=True)
        if slot is not None and (saved is None or k in saved)
    ]
    node.saved = Watch(dict.fromkeys(backward_needs))
    node.settle()
    return list(slots.values())


def _connect(node: Node, plan: Plan, key: Any) -> None:
    """Put `node` into the tree as what comes next at its parent."""
    parent, function = node.parent, node.function
    assert parent is not None and function is not None
    node.pending = parent.pending
    if function.piece.is_backward:
        # Whose backward it is shows in what it reads: one that reads nothing of the path belongs to a warm-up.
        read = set(plan.managed.values())
        node.pending = tuple(forward for forward in parent.pending if not read.intersection(forward.saved.slots))
    elif not function.piece.is_inference:
        node.pending = (*parent.pending, node)
    node.watch_live = Watch(node.live)
    if function.piece.is_inference and node.copied_inputs and not node.in_place:
        node.look = Look(node, key)
    # one that copies always applies where one that reads in place does: it is asked later
    known = parent.children.setdefault(key, [])
    known.insert(0 if node.in_place else len(known), node)
    parent.edges[key] = node.edge
    node.tree.current = node
