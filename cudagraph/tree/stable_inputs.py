"""Inputs that come from the same place call after call, although nobody said that they would.

    recorded, its inputs copied --LOOKS calls--> were they where they are in the last half of them?
        yes    recorded once more, reading them there
        no     copied, for good
    one of them moves later    the recording that copies is still there, and is used from then on

A loop whose allocations repeat, or which fills the same buffers each time, has no copies left after that. Nothing is
taken for granted: the addresses are compared in each call, as those of parameters are.

Only of what runs without gradients, and where nothing followed on the path: a forward's copy of an input is what tells
that its backward is still to come, no guard of a backward's compares whether a tangent is conjugated, and what follows
would have to be recorded again as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..torch_private import cuda as torch_cuda

if TYPE_CHECKING:
    from .node import Node

__all__ = ["LOOKS", "Look"]

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
        if not torch_cuda.pointers_equal(inputs, node.addresses, node.fixed_inputs):
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
