"""Inputs that come from the same place call after call, although nobody said that they would.

    recorded, its inputs copied --LOOKS calls--> were they where they are in the last half of them?
        yes    recorded once more, reading them there; what comes next on the path likewise, as soon as it comes
        no     copied, for good
    one of them moves later    the recording that copies is still there, and is used from then on

A loop whose allocations repeat, or which fills the same buffers each time, has no copies left after that. Nothing is
taken for granted: the addresses are compared in each call, as those of parameters are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import _compat

if TYPE_CHECKING:
    from .node import Node

__all__ = ["LOOKS", "Look", "lie_still", "model_of"]

LOOKS = 8  # calls after which it is decided, once


class Look:
    """The edge to a recording that copies inputs, until it is decided whether it has to."""

    __slots__ = ("addresses", "calls", "key", "node", "same")

    def __init__(self, node: Node, key: Any) -> None:
        self.node = node
        self.key = key
        self.addresses: list[int] = []
        self.calls = 0
        self.same = 0  # calls in a row whose inputs were where those of the call before were

    def __call__(self, inputs: list[Any]) -> list[Any] | None:
        node = self.node
        if not _compat.pointers_equal(inputs, node.addresses, node.fixed_inputs):
            return None
        self.note(inputs)
        if self.decided:
            assert node.parent is not None
            node.parent.edges[self.key] = node.replay
            if self.same >= LOOKS // 2:
                outputs = node.tree.record_in_place(node, self.key, inputs)
                if outputs is not None:
                    return outputs
        return node.replay(inputs)

    def note(self, inputs: list[Any]) -> None:
        addresses = [inputs[i].data_ptr() for i in self.node.copied_inputs]
        self.calls += 1
        self.same = self.same + 1 if addresses == self.addresses else 0
        self.addresses = addresses

    @property
    def decided(self) -> bool:
        return self.calls >= LOOKS


def model_of(place: Node, key: Any) -> Node | None:
    """What comes next at `place` came at the place that it was recorded in the stead of: the recording there, which was
    looked at long enough."""
    if place.model is None:
        return None
    for node in place.model.children.get(key, ()):
        if node.look is None or node.look.calls >= LOOKS - 1:
            return node
    return None


def lie_still(place: Node, model: Node | None, inputs: list[Any]) -> frozenset[int]:
    """Which of `inputs` are to be read where they are by a recording in the stead of `model`: those that it was found
    to copy from the same place each time, and what a recording of the path reads in place already."""
    known = {address for node in place.path() for address in node.in_place}
    found = {i for i, x in enumerate(inputs) if known and isinstance(x, torch.Tensor) and x.data_ptr() in known}
    look = model.look if model is not None else None
    if look is not None and look.same >= LOOKS // 2 - 1:
        if look.addresses == [inputs[i].data_ptr() for i in look.node.copied_inputs]:
            found.update(look.node.copied_inputs)
    return frozenset(found)
