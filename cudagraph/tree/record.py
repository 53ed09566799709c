"""Captures a function after a node of a path.

inputs --+-- numbers, None, generators                 part of the key: another value is another recording
         +-- meta tensors                              no memory: passed on
         +-- static                                    read where they are; another address is another recording
         +-- managed: on memory of an earlier output   likewise; their memory may be reused while the graph runs
         +-- others                                    copied to memory of the pool before each launch

plan -> restore the pool to the end of the parent -> stage copies -> capture -> which output lies on which slot
     -> checkpoint the pool, free all of it -> connect to the tree

Whatever is raised on the way, everything is as before: inputs, generators, the pool, the tree.
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
    destinations_of,
    layout_of,
    on_slots,
    slots_in_use,
    tensor_on,
)
from .node import EdgeKey, InputLayout, Node, OutputLayout, Recording, Template


class Snapshot:
    """The caller's tensors and generators, so that a failed capture can put them back. It holds the tensors' memory.

    Kernels do not run in a capture, so the contents of memory stay. Host code does run: it may give a tensor object
    other memory (`set_`, `.data =`) or another shape (`t_`), or advance a generator.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], generators: Sequence[torch.Generator]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.tensors = [(x, x.detach(), _memory_of(x)) for x in tensors if x.layout is torch.strided]
        self.generators = generators
        self.states = [generator.get_state() for generator in generators]

    def rebound(self) -> list[torch.Tensor]:
        """The tensors whose memory or layout has changed since."""
        return [x for x, _, memory in self.tensors if _memory_of(x) != memory]

    def restore(self) -> None:
        """Put tensors and generators back."""
        for x, alias, memory in self.tensors:
            if _memory_of(x) != memory:
                with torch.inference_mode(x.is_inference()):
                    x.data = alias
        for generator, state in zip(self.generators, self.states, strict=True):
            generator.set_state(state)


def _memory_of(x: torch.Tensor) -> tuple[int, int, Layout] | None:
    """A tensor's storage, its size in bytes, and the tensor's layout on it; None for a sparse one."""
    if x.layout is not torch.strided:
        return None
    storage = x.untyped_storage()
    return torch_cuda.identity(storage), storage.nbytes(), layout_of(x)


@dataclass(frozen=True, eq=False)
class CapturePlan:
    """How a recording treats its inputs, by position, and the slots of the path."""

    addresses: list[int | None]  # of each tensor; None for other inputs
    static: list[int]  # tensors that are read where they are
    copied: list[int]  # tensors that are copied to the pool
    managed: dict[int, Slot]  # slots of the tensors on slots of the path
    layouts: dict[int, Layout]  # layouts of the managed tensors on their slots
    held: list[Slot]  # slots of the path that somebody else holds
    donated: list[Slot]  # those that only the inputs held: the graph may reuse their memory after its last read
    dead: list[Slot]  # those that nobody holds


def _plan(parent: Node, function: Function, inputs: list[Any], in_place: frozenset[int]) -> CapturePlan:
    """Decides how to treat each input. Takes the managed tensors out of `inputs`."""
    piece = function.piece
    addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else None for x in inputs]
    managed = {i: slot for i, slot in on_slots(inputs, parent.live).items() if i not in piece.unread_inputs}
    skipped = {*managed, *piece.unread_inputs}
    tensors = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and not x.is_meta and i not in skipped]
    fixed = function.static_inputs | in_place.difference(piece.mutated_inputs)
    static = [i for i in tensors if i in fixed]
    copied = [i for i in tensors if i not in fixed]
    reason = function.reason_against(inputs, copied, static)
    if reason is not None:
        raise CannotCapture(reason)
    layouts = {i: layout_of(inputs[i]) for i in managed}
    for i in managed:
        inputs[i] = None  # without the call's own references, a slot that is held is held by somebody else
    held_slots = slots_in_use(parent.live)
    donated = [slot for slot in dict.fromkeys(managed.values()) if slot not in held_slots]
    dead = [slot for slot in parent.live if slot not in held_slots and slot not in donated]
    return CapturePlan(addresses, static, copied, managed, layouts, held_slots, donated, dead)


def record(
    pool: Pool, parent: Node, key: EdgeKey, inputs: list[Any], in_place: frozenset[int] = frozenset()
) -> Recording:
    """Capture the function of `key` after `parent` and move the path there. `Recording.run` launches the graph.

    The inputs at `in_place` are read where they are, like static ones; see `StableInputProbe`.

    Raises `CannotCapture` with a reason against the capture, or the capture's own error. Then `inputs` and the tree are
    as before.
    """
    function: Function = key[0]
    plan = _plan(parent, function, inputs, in_place)
    copied = {i: inputs[i] for i in plan.copied}
    before: Snapshot | None = None
    recording: Recording | None = None
    try:
        generators = [x for x in inputs if isinstance(x, torch.Generator)]
        before = Snapshot([*(inputs[i] for i in plan.static), *function.piece.constants], generators)
        recording = _capture(pool, parent, key, plan, inputs, before)
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
        pool.broken = was_broken or not pool.live_blocks_are(set())
        raise
    del before
    for i, x in copied.items():  # outputs that are views of an input are views of the caller's tensor
        inputs[i] = x
    del copied
    _connect(recording, plan)
    return recording


def _capture(
    pool: Pool, parent: Node, key: EdgeKey, plan: CapturePlan, inputs: list[Any], before: Snapshot
) -> Recording:
    """Capture the graph. In `inputs`, it replaces what is copied by the copies, which keep no memory of the pool."""
    function: Function = key[0]
    piece = function.piece
    kept = [*plan.held, *plan.donated]
    own = {slot: torch_cuda.storage_at(slot.address, piece.device, slot.nbytes) for slot in kept if not slot.host}
    if parent.state is not None:
        pool.restore(parent.state, list(own.values()), [slot.address for slot in plan.dead if not slot.host])

    arguments = list(inputs)
    with pool.staging():
        for i in plan.copied:
            arguments[i] = copy_preserving_layout(inputs[i])
    for i in plan.copied:
        inputs[i] = _unowned(arguments[i])
    destinations, flat_copies = destinations_of([inputs[i] for i in plan.copied])
    for i, slot in plan.managed.items():
        is_donated = slot in plan.donated and not slot.host
        arguments[i] = tensor_on(own[slot] if is_donated else slot.storage, plan.layouts[i])
    staged = {i: StorageWeakRef(arguments[i].untyped_storage()) for i in plan.copied}
    owners = {slot: StorageWeakRef(own[slot]) for slot in plan.donated if not slot.host}
    for slot in owners:
        del own[slot]  # from here on only the arguments own it
    assert pool.owner is not None
    capture = Capture(pool.owner, (slot.address for slot in kept if slot.host))
    with under_way(capture):
        graph, returned = pool.capture(lambda: list(piece.run(arguments)), before.generators)
    try:
        arguments.clear()
        for x in before.rebound():
            names = [function.input_name(i) for i in plan.static if inputs[i] is x]
            raise CannotCapture(f"{function.name} gives {names[0] if names else 'a constant of it'} {REBINDS}")

        reused = [slot for slot, owner in owners.items() if owner.expired()]
        alive = [*plan.held, *(slot for slot in plan.donated if slot not in reused)]
        on_path = {slot.cdata: slot for slot in alive}
        on_path |= {owner.cdata: slot for slot, owner in owners.items() if slot not in reused}
        # An output that is a view of a copied input is given out as a view of the caller's tensor. Not for backwards:
        # autograd takes over a gradient that nobody else has. Nor where the graph may have written an output there.
        views = {i: copy for i, copy in staged.items() if piece.is_inference and i not in piece.reusable_inputs}
        passed_on = {copy.cdata: i for i, copy in views.items() if not copy.expired()}
        outputs = _Outputs(function, inputs, plan.static, on_path, passed_on, capture.lent).layout(returned, pool)
        for k, *_ in outputs.input_aliases:
            returned[k] = None  # frees the copy of an input; all other memory has to be in the checkpoint
        state = pool.checkpoint()
        for slot in outputs.live:
            if slot not in alive and not slot.host:
                pool.disown(slot.storage)
        layout = _input_layout(function, plan, reused, destinations, flat_copies)
        return Recording(parent, key, graph, layout, outputs, state)
    except BaseException:
        graph.reset()
        raise


def _input_layout(
    function: Function,
    plan: CapturePlan,
    reused: list[Slot],
    destinations: list[torch.Tensor],
    flat_copies: list[tuple[int, int]],
) -> InputLayout:
    """How a replay takes its inputs. `reused`: slots whose memory the graph takes, because nothing else holds it."""
    copied = plan.copied
    is_range = bool(copied) and copied[-1] - copied[0] == len(copied) - 1
    return InputLayout(
        addresses=plan.addresses,
        fixed=sorted([*plan.static, *plan.managed]),
        reads_in_place=not function.static_inputs.issuperset(plan.static),
        copied=copied,
        copied_range=slice(copied[0], copied[-1] + 1) if is_range else None,
        flat_copies=flat_copies,
        destinations=destinations,
        consumed=[(i, slot, plan.layouts[i]) for i, slot in plan.managed.items() if slot in reused],
        must_be_dead=(*plan.dead, *reused),
    )


def _unowned(x: torch.Tensor) -> torch.Tensor:
    """`x`, but it keeps no memory of the pool."""
    storage = x.untyped_storage()
    return tensor_on(torch_cuda.storage_at(storage.data_ptr(), x.device, storage.nbytes()), layout_of(x))


class _Outputs:
    """Finds how a replay makes the outputs of a capture. Memory that the capture allocated or was lent gets slots.

    Args:
        static: positions of the inputs that are read where they are.
        on_path: slots of the path that are alive, by storage.
        passed_on: positions of copied inputs whose views are given out, by the storage of the copy.
        lent: addresses of host memory that was lent to the capture; see capture.py.
    """

    def __init__(
        self,
        function: Function,
        inputs: list[Any],
        static: list[int],
        on_path: dict[int, Slot],
        passed_on: dict[int, int],
        lent: set[int],
    ) -> None:
        self.function, self.inputs, self.static = function, inputs, static
        self.on_path, self.passed_on, self.lent = on_path, passed_on, lent
        self.repeats: list[tuple[int, int]] = []  # tensors that were returned before, with the first position
        self.input_aliases: list[tuple[int, int, int, Layout]] = []  # views of inputs: input, offset in bytes, layout
        self.templated: dict[int, torch.Tensor] = {}  # all others
        self.slots = dict(on_path)  # and the memory of `templated`, by storage
        self.blocks: set[int] = set()  # addresses of copied inputs whose views are given out

    def layout(self, returned: Sequence[Any], pool: Pool) -> OutputLayout:
        """How a replay makes what the function `returned`. Raises `CannotCapture` if other new memory of the pool is
        still allocated."""
        by_tensor = {id(self.inputs[i]): i for i in self.static}
        tensors = {k: x for k, x in enumerate(returned) if isinstance(x, torch.Tensor)}
        self._sort({k: x for k, x in tensors.items() if id(x) not in by_tensor})
        slots = self._slots_of(pool)
        templates = self._templates(slots)
        saved = self.function.piece.saved_outputs
        if saved is not None:  # an output that is returned twice has its template at the first position only
            saved = (*saved, *(first for k, first in self.repeats if k in saved))
        may_be_saved = [t.slot for t in templates if t.slot is not None and (saved is None or t.position in saved)]
        return OutputLayout(
            skeleton=[None if isinstance(x, torch.Tensor) else x for x in returned],
            templates=templates,
            same_inputs=[(k, by_tensor[id(x)]) for k, x in tensors.items() if id(x) in by_tensor],
            input_aliases=self.input_aliases,
            repeats=self.repeats,
            saved=list(dict.fromkeys(may_be_saved)),
            live=tuple(dict.fromkeys(slots.values())),
        )

    def _sort(self, tensors: dict[int, torch.Tensor]) -> None:
        """Sort outputs that are no inputs themselves."""
        function, inputs = self.function, self.inputs
        by_input = {torch_cuda.identity(inputs[i].untyped_storage()): i for i in self.static} | self.passed_on
        first_position: dict[int, int] = {}
        for k, x in tensors.items():
            reason = function.reason_against_output(k, x)
            if reason is not None:
                raise CannotCapture(reason)
            storage = x.untyped_storage()
            cdata = torch_cuda.identity(storage)
            first = first_position.setdefault(id(x), k)
            if first != k:
                self.repeats.append((k, first))
            elif cdata in by_input:
                i = by_input[cdata]
                self.input_aliases.append((k, i, x.data_ptr() - inputs[i].data_ptr(), layout_of(x)))
                if cdata in self.passed_on:
                    self.blocks.add(storage.data_ptr())
            else:
                self.templated[k] = x
                if cdata not in self.slots and storage.nbytes() and cdata not in function.constants and not x.is_meta:
                    on_host = storage.device != function.piece.device or storage.data_ptr() in self.lent
                    slot = Slot(storage, function.origin(k), copies=function.copies_held, host=on_host)
                    self.slots[cdata] = slot

    def _slots_of(self, pool: Pool) -> dict[int, Slot]:
        """The slots in the pool, on the path or on the host. Raises `CannotCapture` if other memory is allocated."""
        allowed = self.blocks | {slot.address for slot in self.slots.values() if not slot.host}
        if pool.live_blocks_are(allowed):
            return self.slots
        live = pool.live_blocks()
        if leaked := live - allowed:
            raise CannotCapture(
                f"{self.function.name} keeps {len(leaked)} tensors that were made while it was captured and are no "
                "outputs"
            )
        # The other outputs lie in memory from before the capture, such as a tensor that the graph owns.
        known = self.slots.items()
        return {cdata: slot for cdata, slot in known if cdata in self.on_path or slot.host or slot.address in live}

    def _templates(self, slots: dict[int, Slot]) -> list[Template]:
        """How each of these outputs is made; one that overlaps an earlier one of its storage has that as its base."""
        templates: list[Template] = []
        in_storage: dict[int, list[int]] = {}  # outputs so far, by the storage
        for k, x in self.templated.items():
            storage = x.untyped_storage()
            slot = slots.get(torch_cuda.identity(storage))
            earlier = in_storage.setdefault(torch_cuda.identity(storage), [])
            base = next((i for i in earlier if _overlap(x, self.templated[i])), None)
            earlier.append(k)
            templates.append(Template(k, layout_of(x), slot, storage if slot is None else None, base))
        return templates


def _overlap(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage reach into the same bytes."""
    (first, end), (other_first, other_end) = map(_bytes_reached, (x, other))
    return first < other_end and other_first < end


def _bytes_reached(x: torch.Tensor) -> tuple[int, int]:
    reached = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.data_ptr(), x.data_ptr() + reached * x.element_size()


def _connect(recording: Recording, plan: CapturePlan) -> None:
    """Put `recording` into the tree as its parent's next one, and move the path there."""
    parent, function = recording.parent, recording.function
    recording.pending = parent.pending
    if function.piece.is_backward:
        # Its forward is the one whose outputs it reads. A backward that reads nothing of the path belongs to a warm-up.
        read = set(plan.managed.values())
        recording.pending = tuple(forward for forward in parent.pending if not read.intersection(forward.outputs.saved))
    elif not function.piece.is_inference:
        recording.pending = (*parent.pending, recording)
    # A recording that reads in place is tried first: where it applies, the one that copies would apply, too.
    children = parent.children.setdefault(recording.key, [])
    children.insert(0 if recording.inputs.reads_in_place else len(children), recording)
    parent.edges[recording.key] = recording.edge
    recording.cursor.current = recording
