"""One recording at one place of a path, and how it is replayed.

    Node.replay(inputs):  addresses as recorded? -> what had died by then is dead? -> one foreach copy -> launch
                          -> new tensors over the outputs

What can be known when it is recorded (record.py) is prepared: a replay decides nothing but whether it applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .. import counters
from ..torch_private import cuda as torch_cuda
from .liveness import Layout, Slot, Watch, bytes_of, copy_as_it_lies, layout_of, tensor_on

if TYPE_CHECKING:
    from .function import Function
    from .stable_inputs import Look
    from .tree import Tree

__all__ = ["Edge", "Node"]

Edge = Callable[[list[Any]], "list[Any] | None"]

# So many copies are cheaper with autograd passed by, although that has to be switched off: without gradients it takes
# 0.07 us a tensor to find that there is nothing to record.
MANY = 16


class Node:
    """A place in the tree: the recording that leads there, and what is known there.

    Attributes:
        function: what was recorded; None at the root.
        first: the first function of the path.
        edges: for a function and its numbers, what to call with its inputs when it comes next. It gives the outputs, or
            None if something is not as it was when recorded; the inputs are whole then.
        children: all recordings of a function and its numbers at this place.
        live: slots of the path that may be held here.
        pending: forwards of the path that wait for a backward.
        saved: of a forward, what its backward may need.
        in_place: addresses of inputs that nobody called static but that are read where they are, see `settled`. A
            recording that has any was made for that alone, and does not count as recorded again.
        look: how inputs that are copied are looked at; None if they are not.
    """

    def __init__(self, tree: Tree, parent: Node | None, function: Function | None) -> None:
        self.tree = tree
        self.parent = parent
        self.function = function
        self.first: Function | None = function if parent is None or parent.first is None else parent.first
        self.edges: dict[Any, Edge] = {}
        self.children: dict[Any, list[Node]] = {}
        self.live: tuple[Slot, ...] = ()
        self.watch_live = Watch(())
        self.pending: tuple[Node, ...] = ()
        self.saved = Watch(())
        self.state: Any = None  # which blocks of the pool are allocated at the end of the recording
        self.in_place: frozenset[int] = frozenset()
        self.look: Look | None = None
        # inputs
        self.addresses: list[int | None] = []
        self.fixed_inputs: list[int] = []
        self.consumed: list[tuple[int, Slot, Layout]] = []
        self.watch_dead = Watch(())
        self.copied_inputs: list[int] = []
        self.copied_range: slice | None = None  # the same, where they stand in a row
        self.flat_copies: list[tuple[int, int]] = []
        self.destinations: list[torch.Tensor] = []
        # outputs
        self.skeleton: list[Any] = []
        self.templates: list[torch.Tensor] = []
        self.template_positions: list[int] = []
        self.template_slots: list[Slot | None] = []
        self.same_inputs: list[tuple[int, int]] = []
        self.input_aliases: list[tuple[int, int, int, Layout]] = []
        self.repeats: list[tuple[int, int]] = []
        self.metas: list[tuple[int, torch.Tensor]] = []
        self.is_plain = False
        self.gives_copies = False
        # the graph
        self.graph: Any = None
        self.launch: Callable[[], None] = _no_graph

    @property
    def edge(self) -> Edge:
        """What leads here from the parent."""
        return self.replay if self.look is None or self.look.decided else self.look

    def replay(self, inputs: list[Any]) -> list[Any] | None:
        """Run the graph on `inputs`, which it empties, and give new tensors over its outputs."""
        if not torch_cuda.pointers_equal(inputs, self.addresses, self.fixed_inputs):
            return None
        if self.watch_dead.slots:
            for i, _, _ in self.consumed:
                inputs[i] = None  # nobody but the list may hold it: its memory is reused while the graph runs
            if not self.watch_dead.none_held():
                for i, slot, layout in self.consumed:
                    inputs[i] = tensor_on(slot.storage, layout)
                return None
        tree = self.tree
        if tree.stream_now() != tree.stream:
            tree.change_stream()
        if self.copied_inputs:
            sources = (
                [inputs[i] for i in self.copied_inputs] if self.copied_range is None else inputs[self.copied_range]
            )
            for position, span in self.flat_copies:
                sources[position] = sources[position].as_strided((span,), (1,))
            if len(sources) >= MANY or torch.is_grad_enabled():
                with torch_cuda.below_autograd():
                    torch_cuda.foreach_copy(self.destinations, sources)
            else:
                torch_cuda.foreach_copy(self.destinations, sources)
            counters.counts["copies"] += len(sources)
        self.launch()
        tree.current = self
        counters.counts["replays"] += 1
        if self.is_plain:
            inputs.clear()
            return [template.data for template in self.templates]
        return self.outputs(inputs)

    def run(self, inputs: list[Any]) -> list[Any]:
        """Launch the graph for the inputs it was just recorded with, which it empties; the outputs."""
        self.launch()
        return self.outputs(inputs)

    def outputs(self, inputs: list[Any]) -> list[Any]:
        """What the function returned, over the same memory; empties `inputs`."""
        given = self.skeleton.copy()
        for position, template in zip(self.template_positions, self.templates, strict=True):
            given[position] = template.data
        if self.gives_copies:
            self._copy(given)
        for position, index in self.same_inputs:
            given[position] = inputs[index]
        for position, index, shift, layout in self.input_aliases:
            given[position] = _alias(inputs[index], shift, layout)
        for position, meta in self.metas:
            given[position] = meta.data
        for position, first in self.repeats:
            given[position] = given[first]
        inputs.clear()
        return given

    def _copy(self, given: list[Any]) -> None:
        """Let outputs be copies that are to be; those that alias one another share one."""
        copies: dict[Slot, torch.UntypedStorage] = {}
        for position, template, slot in zip(self.template_positions, self.templates, self.template_slots, strict=True):
            if slot is not None and slot.given_as_copies:
                if slot not in copies:
                    copies[slot] = bytes_of(slot.storage).clone().untyped_storage()
                given[position] = tensor_on(copies[slot], layout_of(template))

    def settle(self) -> None:
        """See what can be done the short way: inputs in a row; outputs that are templates, in order."""
        first, last = min(self.copied_inputs, default=0), max(self.copied_inputs, default=-1)
        if self.copied_inputs == list(range(first, last + 1)):
            self.copied_range = slice(first, last + 1)
        self.gives_copies = any(slot is not None and slot.given_as_copies for slot in self.template_slots)
        self.is_plain = self.template_positions == list(range(len(self.skeleton))) and not self.gives_copies

    def path(self) -> list[Node]:
        """The nodes from the first recording to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.function is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def subtree(self) -> Iterator[Node]:
        """This node and all recordings after it."""
        yield self
        for children in self.children.values():
            for child in children:
                yield from child.subtree()

    def close(self) -> None:
        """Give back the graphs from here on, and let go of slots."""
        for children in self.children.values():
            for child in children:
                child.close()
        for watch in (self.watch_dead, self.watch_live, self.saved):
            watch.close()
        for slot in {id(slot): slot for slot in self.template_slots if slot is not None}.values():
            slot.forget(self.templates)
        if self.graph is not None:
            self.graph.reset()
        self.edges.clear()
        self.children.clear()
        self.templates, self.template_slots, self.live = [], [], ()
        self.watch_dead = self.watch_live = self.saved = Watch(())
        self.destinations, self.consumed = [], []
        self.pending = ()  # it is in there itself
        self.look = None
        self.graph, self.launch, self.state = None, _no_graph, None


def _no_graph() -> None:
    raise AssertionError("there is no graph here")


def _alias(source: torch.Tensor, shift: int, layout: Layout) -> torch.Tensor:
    """A tensor `shift` bytes after the first element of `source`, on its storage."""
    if source.is_conj() or source.is_neg():  # what lies there is not what the graph read
        source = copy_as_it_lies(source)
    storage = source.untyped_storage()
    offset = (source.data_ptr() + shift - storage.data_ptr()) // layout.dtype.itemsize
    return tensor_on(storage, layout._replace(offset=offset))
