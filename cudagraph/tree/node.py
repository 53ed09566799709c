"""One recording after a node of a path, and how it is replayed.

    Recording.replay(inputs):  addresses as recorded? -> memory that it reuses is dead? -> one foreach copy -> launch
                               -> new tensors over the outputs

record.py prepares all that is known when a graph is captured. A replay only decides whether the recording applies.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .. import counters
from ..torch_private import cuda as torch_cuda
from .driver import CaptureDriver
from .function import Function
from .liveness import (
    Layout,
    Slot,
    Watch,
    alias_sharing_versions,
    as_bytes,
    copy_preserving_layout,
    layout_of,
    tensor_on,
)

Edge = Callable[[list[Any]], "list[Any] | None"]
EdgeKey = tuple[Any, ...]  # the function, then its inputs that are no tensors

# From this many copies on, switching autograd off around the foreach copy pays: without gradients it takes 0.07 us a
# tensor to find that there is nothing to record.
MANY_COPIES = 16
PROBED_CALLS = 8  # see `StableInputProbe`


@dataclass(frozen=True, eq=False, slots=True)
class InputLayout:
    """Where a recording finds each input. Inputs are named by position."""

    addresses: list[int | None]  # of each tensor when it was recorded; None for other inputs
    fixed: list[int]  # those that are read where they are; their addresses are compared before each replay
    reads_in_place: bool  # whether other inputs than parameters and buffers are read where they are; `StableInputProbe`
    copied: list[int]  # those that are copied to `destinations` before each launch
    # `copied` as a slice, if its positions are consecutive: for 100 inputs it takes 1 us, a list comprehension 10 us.
    copied_range: slice | None
    flat_copies: list[tuple[int, int]]  # inputs whose elements overlap: position among `copied`, number of elements
    destinations: list[torch.Tensor]
    consumed: list[tuple[int, Slot, Layout]]  # those whose memory the graph reuses
    must_be_dead: tuple[Slot, ...]  # all slots whose memory it reuses


class Template(NamedTuple):
    """An output that is given out as an alias of one tensor of the recording."""

    position: int
    layout: Layout
    slot: Slot | None  # its memory in the pool or on the host
    storage: torch.UntypedStorage | None  # if there is no slot: other memory, such as a constant's, or a meta tensor's
    base: int | None = None  # an earlier output in the same memory: autograd sees a write to one of them in both


@dataclass(frozen=True, eq=False, slots=True)
class OutputLayout:
    """How a replay makes each output. Each tensor is in one of the lists; positions are those of outputs and inputs."""

    skeleton: list[Any]  # the outputs that are no tensors, in their positions
    templates: list[Template]
    same_inputs: list[tuple[int, int]]  # output, input: an input itself
    input_aliases: list[tuple[int, int, int, Layout]]  # output, input, distance in bytes, layout: a view of an input
    repeats: list[tuple[int, int]]  # output, earlier output: the same tensor object again
    saved: list[Slot]  # those that a backward may need
    live: tuple[Slot, ...]  # slots of the path that may be held after it


class Cursor:
    """What recordings know of their tree: where the program is, and the stream that it uses."""

    current: Node  # the next call follows one of its edges; a replay moves it

    def __init__(self, driver: CaptureDriver, device: torch.device) -> None:
        self.driver, self.device = driver, device
        self.stream_now = driver.stream(device)  # returns the number of the current stream
        self.stream: int | None = None  # number of the stream that the last replay was launched on
        self.stream_object: Any = None

    def follow_stream(self) -> None:
        if self.stream_now() != self.stream:
            self.change_stream()

    def change_stream(self) -> None:
        """Let the caller's new stream wait for the work that was launched on the old one."""
        self.stream = self.stream_now()
        self.stream_object = self.driver.order_streams(self.device, self.stream_object)


class Node:
    """A position in the tree, and what may come next there. The root is one; all others are recordings."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.first: Function | None = None  # the function that began the path; its next call begins a step
        # A callable for each function that may come next. It takes the inputs and returns the outputs. If it no longer
        # applies it returns None, with the inputs whole.
        self.edges: dict[EdgeKey, Edge] = {}
        self.children: dict[EdgeKey, list[Recording]] = {}  # all recordings at this node
        self.refusals: dict[EdgeKey, str] = {}  # why functions run without a graph at this node
        self.live: tuple[Slot, ...] = ()  # slots of the path that may be held here
        self.watch_live = Watch(())
        self.pending: tuple[Recording, ...] = ()  # forwards of the path that wait for a backward
        self.state: Any = None  # which blocks of the pool are allocated here; None at the root

    def waits_for_backward(self) -> bool:
        """Whether a backward may still need an output of the path, because something that a forward saved is held.

        A checkpoint saves no outputs, and holds what it starts from: then an output whose history no backward has used
        yet, or something else that was saved under the checkpoint, shows that its backward is still to come.
        """
        if any(not forward.watch_saved.none_held() for forward in self.pending):
            return True
        return not self.watch_live.none_held() and any(recording.awaits_backward() for recording in self.path())

    def path(self) -> list[Recording]:
        """The recordings from the first of the step to this one."""
        recordings: list[Recording] = []
        node: Node = self
        while isinstance(node, Recording):
            recordings.append(node)
            node = node.parent
        return recordings[::-1]

    def recordings(self) -> Iterator[Recording]:
        """All recordings after this node."""
        for child in itertools.chain(*self.children.values()):
            yield child
            yield from child.recordings()

    def close(self) -> None:
        """Give back the graphs after this node, and drop its references to slots."""
        for child in itertools.chain(*self.children.values()):
            child.close()
        self.watch_live.close()
        self.edges, self.children, self.refusals = {}, {}, {}
        self.live, self.state = (), None
        self.pending = ()  # breaks a cycle: a forward is in its own tuple


class Recording(Node):
    """A captured graph of a function after `parent`."""

    def __init__(
        self, parent: Node, key: EdgeKey, graph: Any, inputs: InputLayout, outputs: OutputLayout, state: Any
    ) -> None:
        super().__init__(parent.cursor)
        self.parent, self.key = parent, key
        self.function: Function = key[0]
        self.first = parent.first or self.function
        self.graph, self.launch = graph, parent.cursor.driver.launcher(graph)
        self.inputs, self.outputs = inputs, outputs
        self.replay_count = 0
        piece = self.function.piece
        self.is_forward = not piece.is_backward and not piece.is_inference
        self.saves_nothing = not outputs.saved
        # Outputs that may get a history. If it is unknown which are saved, `watch_saved` has all of them.
        saved = () if piece.is_inference else piece.saved_outputs
        told = not piece.is_backward and saved is not None
        on_slots = [template.position for template in outputs.templates if template.slot is not None]
        self.with_history = [position for position in on_slots if told and position not in (saved or ())]
        self.live, self.state = outputs.live, state
        # The memory of its outputs, which earlier recordings may have made.
        self.slots = tuple(dict.fromkeys(t.slot for t in outputs.templates if t.slot is not None))
        self.templates: list[torch.Tensor] = []  # their aliases are given out; a slot that is renewed replaces them
        self.watch_dead = self.watch_saved = Watch(())
        # The outputs of the last run that may have a history, and the checkpoint around it; see `note_history`.
        self.outputs_with_history: Sequence[weakref.ref[torch.Tensor]] = ()
        self.checkpoint: weakref.ref[Any] | None = None
        self.has_noted = False  # whether the last run has set these two
        self.edge: Edge = self.replay  # leads here from the parent; or a `StableInputProbe`
        self.choose_output_path()

    def attach_to_slots(self) -> None:
        """Make templates and watches. Slots count them, so `close` has to follow even if this raises."""
        for template in self.outputs.templates:
            if template.slot is not None:
                template.slot.add_template(self.templates, template.layout)
            else:
                assert template.storage is not None
                self.templates.append(tensor_on(template.storage, template.layout))
        self.watch_live = Watch(self.live)
        self.watch_dead = Watch(self.inputs.must_be_dead)
        self.watch_saved = Watch(self.outputs.saved)

    def replay(self, inputs: list[Any]) -> list[Any] | None:
        """Run the graph on `inputs` and return new tensors over its outputs; None if the recording does not apply.

        Empties `inputs`, unless it returns None.
        """
        layout = self.inputs
        if not torch_cuda.pointers_equal(inputs, layout.addresses, layout.fixed):
            return None
        if self.watch_dead.slots:
            for i, _, _ in layout.consumed:
                inputs[i] = None  # nobody but the list may hold it: its memory is reused while the graph runs
            if not self.watch_dead.none_held():
                for i, slot, where in layout.consumed:
                    inputs[i] = tensor_on(slot.storage, where)
                return None
        cursor = self.cursor
        if cursor.stream_now() != cursor.stream:
            cursor.change_stream()
        if layout.copied:
            sources = [inputs[i] for i in layout.copied] if layout.copied_range is None else inputs[layout.copied_range]
            for position, span in layout.flat_copies:
                sources[position] = sources[position].as_strided((span,), (1,))
            if len(sources) >= MANY_COPIES or torch.is_grad_enabled():
                with torch_cuda.below_autograd():
                    torch_cuda.foreach_copy(layout.destinations, sources)
            else:
                torch_cuda.foreach_copy(layout.destinations, sources)
            counters.counts["copies"] += len(sources)
        self.launch()
        cursor.current = self
        counters.counts["replays"] += 1
        self.replay_count += 1
        if self.is_plain:
            inputs.clear()
            outputs = [template.data for template in self.templates]
        else:
            outputs = self.make_outputs(inputs)
        if self.is_forward:
            if self.has_noted or self.saves_nothing or torch_cuda.top_saved_tensor_hooks(False) is not None:
                self.note_history(outputs)
        elif self.with_history and not torch_cuda.forward_mode():
            self.note_history(outputs)
        return outputs

    def run(self, inputs: list[Any]) -> list[Any]:
        """Launch the graph for the inputs it was just recorded with, which it empties; returns the outputs."""
        self.launch()
        outputs = self.make_outputs(inputs)
        if self.is_forward or self.with_history:
            self.note_history(outputs)
        return outputs

    def note_history(self, outputs: list[Any]) -> None:
        """Note the outputs of this run by which `awaits_backward` tells later whether a backward is still to come.

        A forward is noted only if it saves nothing, or under hooks on saved tensors. Otherwise autograd holds what it
        saves until its backward has run, so `watch_saved` is enough; a note takes 1 us for each output. Any other
        function is noted in the forward of an `autograd.Function`, as under a re-entrant checkpoint.

        The outputs have no history yet: they get it when this run returns.
        """
        hooks = torch_cuda.top_saved_tensor_hooks(False)
        if self.is_forward:
            self.has_noted = self.saves_nothing or hooks is not None
        else:
            self.has_noted = torch_cuda.in_autograd_function()
        noted = self.with_history if self.has_noted else ()
        self.outputs_with_history = [weakref.ref(outputs[position]) for position in noted]
        self.checkpoint = torch_cuda.checkpoint_around(hooks) if self.has_noted else None

    def awaits_backward(self) -> bool:
        if self.checkpoint is not None and self.checkpoint() is not None:
            return True
        return any(map(torch_cuda.awaits_backward, self.outputs_with_history))

    def make_outputs(self, inputs: list[Any]) -> list[Any]:
        """What the function returned, over the same memory, or over one copy of a slot that asks for it. Empties
        `inputs`."""
        layout = self.outputs
        made = layout.skeleton.copy()
        copies: dict[Slot, torch.UntypedStorage] = {}
        for (position, where, slot, _, base), tensor in zip(layout.templates, self.templates, strict=True):
            if base is not None:
                made[position] = alias_sharing_versions(made[base], where)
                continue
            if slot is None or not slot.given_as_copies:
                made[position] = tensor.data
                continue
            if slot not in copies:
                copies[slot] = as_bytes(slot.storage).clone().untyped_storage()
            made[position] = tensor_on(copies[slot], layout_of(tensor))
        for position, index in layout.same_inputs:
            made[position] = inputs[index]
        for position, index, distance, where in layout.input_aliases:
            made[position] = _alias(inputs[index], distance, where)
        for position, first in layout.repeats:
            made[position] = made[first]
        inputs.clear()
        return made

    def choose_output_path(self) -> None:
        """Find out whether the outputs are aliases of the templates, in order: then a replay takes the short way."""
        gives_copies = any(slot.given_as_copies for slot in self.slots)
        positions = [template.position for template in self.outputs.templates if template.base is None]
        self.is_plain = positions == list(range(len(self.outputs.skeleton))) and not gives_copies

    def close(self) -> None:
        super().close()
        self.watch_dead.close()
        self.watch_saved.close()
        for slot in self.slots:
            slot.forget_templates(self.templates)
        self.graph.reset()
        self.graph, self.launch, self.edge = None, _closed, _closed
        self.templates, self.slots, self.first, self.outputs_with_history = [], (), None, ()
        # moves.py keeps closed recordings for their counts: they must not keep the functions of their parents alive
        del self.inputs, self.outputs, self.parent


def _closed(*inputs: Any) -> Any:
    raise AssertionError("this recording was closed")


def _alias(source: torch.Tensor, distance: int, layout: Layout) -> torch.Tensor:
    """A tensor on the storage of `source`, `distance` bytes after its first element."""
    if source.is_conj() or source.is_neg():  # its bytes are not the values that the graph read
        source = copy_preserving_layout(source)
    storage = source.untyped_storage()
    offset = (source.data_ptr() + distance - storage.data_ptr()) // layout.dtype.itemsize
    return alias_sharing_versions(source, layout._replace(offset=offset))


@dataclass(eq=False)
class StableInputProbe:
    """The edge to a recording that copies inputs, for its first `PROBED_CALLS` calls.

    If the addresses of the inputs stay the same in the last half of these calls, `record_in_place` records the function
    once more, so that the graph reads the inputs where they are. It returns the outputs, or None if it can't. Each
    replay compares the addresses. If an input moves later, the recording that copies is used again.

    Only for inference functions: a forward's copy of an input shows that its backward is still to come, and no guard of
    a backward compares whether a tangent is conjugated. Only at the end of a path: recordings after this one would have
    to be made again.
    """

    recording: Recording
    record_in_place: Callable[[Recording, list[Any]], list[Any] | None]
    seen: list[list[int]] = field(default_factory=list)  # the addresses of the copied inputs in each call

    def __call__(self, inputs: list[Any]) -> list[Any] | None:
        recording = self.recording
        layout = recording.inputs
        if not torch_cuda.pointers_equal(inputs, layout.addresses, layout.fixed):
            return None
        self.seen.append([inputs[i].data_ptr() for i in layout.copied])
        if len(self.seen) >= PROBED_CALLS:
            recording.edge = recording.parent.edges[recording.key] = recording.replay
            is_stable = all(addresses == self.seen[-1] for addresses in self.seen[PROBED_CALLS // 2 - 1 :])
            outputs = self.record_in_place(recording, inputs) if is_stable else None
            if outputs is not None:
                return outputs
        return recording.replay(inputs)
