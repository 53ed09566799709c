"""The positions of `offload`'s copies in the two graphs: from a schedule of bytes and times.

      after inline     forward  ... last use of x, start, wait ... output     backward  ... reload, wait, first use ...
      after place      forward  x, start ......... wait ......... output      backward  reload ....... wait, first use

`place(fw, bw, ...)` reads items and times off the graphs, calls `schedule`, and moves the four operators. A tensor that
should stay on the device crosses to the backward itself, in place of its copy. Inductor's scheduler gets dependencies
by which it keeps this order, see `torch_private/inductor_fusion.py`.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from ..graphs.nodes import NO_VERSION_CHECK, PACKED, is_view
from ..graphs.roofline import Rates, has_formula, measured_rates, node_ms
from ..torch_private import values as torch_values
from ..torch_private.inductor_marks import PACKED_ROW
from .hook import OffloadSettings
from .schedule import Item, Limits, Placement, Schedule, Transfer, schedule
from .transfers import offload_start, offload_wait, reload_start, reload_wait

__all__ = ["Leaf", "is_unfused_kernel", "kernel_boundaries", "place"]

_BUILT_IN = ("aten", "prims", "inductor_prims")
_OURS = (offload_start, offload_wait, reload_start, reload_wait)


@dataclass(frozen=True)
class Leaf:
    """The origin of a host tensor: the saved tensor's name, and the settings of the hook that sends it."""

    name: str
    settings: OffloadSettings


@dataclass
class _Crossing:
    """One tensor's operators in both graphs, and the nodes that it is computed from.

    Attributes:
        start, wait: the copy out, in the forward.
        slot, reload, back: the copy's placeholder, and the copy back, in the backward.
        value: the tensor that is copied, contiguous.
        source: the tensor that `value` is a view of.
        views: the nodes that make `value` from the results of steps, in order.
    """

    leaf: Leaf
    start: Node
    wait: Node
    slot: Node
    reload: Node
    back: Node
    value: Node
    source: Node
    views: list[Node]

    @property
    def device(self) -> torch.device:
        device: torch.device = self.value.meta["val"].device
        return device

    @property
    def nbytes(self) -> int:
        value = self.value.meta["val"]
        return torch_values.hint(value.numel()) * int(value.element_size())


class _Steps:
    """The steps of a graph: its nodes that compute, in order, with their estimated times."""

    def __init__(self, gm: GraphModule, rates: Rates, fused: bool) -> None:
        self.nodes = [
            n for n in gm.graph.nodes if n.op == "call_function" and n.target not in _OURS and not _is_free(n)
        ]
        self.index = {node: i for i, node in enumerate(self.nodes)}
        times = node_ms(gm, lambda _: rates, fused)
        self.ms = [times[node] for node in self.nodes]
        self.gaps = kernel_boundaries(self.nodes) if fused else None
        self.output = gm.graph.output_node()

    def after(self, gap: int) -> Node:
        """The node that follows a gap of the schedule."""
        return self.nodes[gap] if gap < len(self.nodes) else self.output


def place(
    fw: GraphModule, bw: GraphModule, *, num_fwd_outputs: int, leaves: Mapping[Node, Leaf], fused: bool
) -> tuple[tuple[Transfer, ...], dict[Node, Node]]:
    """Schedule the copies in both graphs, in place.

    Args:
        leaves: each host tensor of the forward, with its origin.
        fused: the graphs are compiled by a compiler that fuses.

    Returns:
        The transfers, and the `leaves` that stay on the device, each with the node that crosses in its place.
    """
    _remove_copies_in_backward(bw)
    by_device: dict[torch.device, list[_Crossing]] = defaultdict(list)
    for crossing in _crossings(fw, bw, num_fwd_outputs, leaves):
        by_device[crossing.device].append(crossing)
    transfers: list[Transfer] = []
    on_device: dict[Node, Node] = {}
    for device, crossings in by_device.items():
        from_users = (c.leaf.settings.rates for c in crossings)
        rates = next((r for r in from_users if r is not None), None) or measured_rates(device)
        forward, backward = _Steps(fw, rates, fused), _Steps(bw, rates, fused)
        items = [(_item(c, forward, backward), c) for c in crossings]
        items.sort(key=lambda pair: pair[0].made)
        crossings = [c for _, c in items]
        planned = _schedule(crossings, [item for item, _ in items], forward, backward, rates)
        for crossing, placement in zip(crossings, planned.placements, strict=True):
            if not placement.offloaded:
                _keep_on_device(bw, crossing)
                on_device[crossing.wait] = crossing.value
            transfers.append(_transfer(crossing, placement, forward, backward, planned))
        for steps, events in ((forward, planned.forward), (backward, planned.backward)):
            for gap, what, i in events:
                following = steps.after(gap)
                for node in _to_move(crossings[i], what, following):
                    following.prepend(node)
    for gm in (fw, bw):
        gm.graph.lint()
        gm.recompile()
    return tuple(transfers), on_device


def _remove_copies_in_backward(bw: GraphModule) -> None:
    """Remove copies to the host that start in the backward.

    A value that also crosses unpacked, for other readers, is packed in the backward. A copy there saves nothing.
    """
    for start in bw.graph.find_nodes(op="call_function", target=offload_start):
        nodes: list[Node] = [start]
        for target in (offload_wait, reload_start, reload_wait):
            nodes.append(next(u for u in nodes[-1].users if u.target is target))
        nodes[-1].replace_all_uses_with(start.all_input_nodes[0])
        for node in reversed(nodes):
            bw.graph.erase_node(node)


# --- read the graphs --------------------------------------------------------------------------------------------------


def _crossings(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int, leaves: Mapping[Node, Leaf]) -> list[_Crossing]:
    outputs = list(fw.graph.output_node().args[0])[num_fwd_outputs:]  # type: ignore[arg-type]
    slots = bw.graph.find_nodes(op="placeholder")
    numbers = [n for n in outputs if not torch_values.is_opaque_node(n) and not isinstance(n.meta["val"], torch.Tensor)]
    others = [n for n in outputs if n not in numbers]
    slot_of = dict(zip(others, slots[len(numbers) : len(outputs)], strict=True))
    found = []
    for wait in leaves:
        start, slot = wait.args[0], slot_of[wait]
        assert isinstance(start, Node)
        reload = next(u for u in slot.users if u.target is reload_start)
        back = next(u for u in reload.users if u.target is reload_wait)
        value = source = start.all_input_nodes[0]
        while is_view(source) and isinstance(source.args[0], Node):
            source = source.args[0]
        views = [n for n in _views_and_steps(value) if _is_free(n)]
        found.append(_Crossing(leaves[wait], start, wait, slot, reload, back, value, source, views))
    return found


def _is_free(node: Node) -> bool:
    """Whether `node` computes nothing on a device: views, items of a tuple, sizes."""
    free = (
        is_view(node)
        or node.target is operator.getitem
        or not isinstance(node.meta.get("val"), torch.Tensor | tuple | list)
    )
    return node.op == "call_function" and node.target not in _OURS and free


def _views_and_steps(value: Node) -> list[Node]:
    """`value` and its sources: views are followed back to the steps that computed their data. In the graph's order."""
    found: dict[Node, None] = {value: None}
    stack = [value]
    while stack:
        node = stack.pop()
        new = [n for n in node.all_input_nodes if n not in found] if _is_free(node) else []
        found.update(dict.fromkeys(new))
        stack += new
    return _in_order(found, value)


def _in_order(nodes: Iterable[Node], of_graph: Node) -> list[Node]:
    position = {node: i for i, node in enumerate(of_graph.graph.nodes)}
    return sorted(nodes, key=position.__getitem__)


def _first_use(back: Node, steps: _Steps) -> int:
    """The first step that reads `back`, also through views; the last step if none does."""
    readers, stack = [], [back]
    while stack:
        for user in stack.pop().users:
            if user in steps.index:
                readers.append(steps.index[user])
            elif user.op == "call_function":
                stack.append(user)
    return min(readers, default=len(steps.nodes) - 1)


# --- schedule ---------------------------------------------------------------------------------------------------------


def _item(crossing: _Crossing, forward: _Steps, backward: _Steps) -> Item:
    made = max((forward.index.get(n, -1) for n in _views_and_steps(crossing.value)), default=-1)
    return Item(crossing.nbytes, made, _first_use(crossing.back, backward))


def _schedule(
    crossings: list[_Crossing], items: list[Item], forward: _Steps, backward: _Steps, rates: Rates
) -> Schedule:
    """The schedule of one device's items; those that one hook sends share limits."""
    kinds = {settings: kind for kind, settings in enumerate(dict.fromkeys(c.leaf.settings for c in crossings))}
    return schedule(
        [replace(item, kind=kinds[c.leaf.settings]) for c, item in zip(crossings, items, strict=True)],
        forward.ms,
        backward.ms,
        to_host=rates.to_host,
        to_device=rates.to_device,
        limits=[Limits(settings.in_flight_bytes, settings.max_stall_ms) for settings in kinds],
        wait_gaps=forward.gaps,
        reload_gaps=backward.gaps,
    )


def kernel_boundaries(steps: list[Node]) -> list[int]:
    """The gaps before steps that are kernels of their own, where a compiler that fuses the others keeps an operator.

    Not between a product and a sum after it: a compiler may make one kernel of them, which stands where the sum does.
    """
    return [i for i, node in enumerate(steps) if is_unfused_kernel(node)]


def is_unfused_kernel(node: Node) -> bool:
    namespace = getattr(node.target, "namespace", None)
    foreign = namespace is not None and namespace not in _BUILT_IN  # unknown to torch's compilers
    return foreign or has_formula(node) or "scaled_dot_product" in str(node.target)


def _transfer(
    crossing: _Crossing, placement: Placement, forward: _Steps, backward: _Steps, planned: Schedule
) -> Transfer:
    names = ("", "", "", "")
    if placement.offloaded:
        wait = forward.nodes[placement.wait].name if placement.wait < len(forward.nodes) else "(end)"
        reload, use = backward.nodes[placement.reload].name, backward.nodes[placement.use].name
        names = (crossing.source.name, wait, reload, use)
    return Transfer(
        crossing.leaf.name,
        crossing.nbytes,
        placement,
        *names,
        forward_ms=planned.forward_ms,
        backward_ms=planned.backward_ms,
        full_stall_ms=planned.full_stall_ms,
        device=str(crossing.device),
        max_stall_ms=crossing.leaf.settings.max_stall_ms,
    )


# --- move -------------------------------------------------------------------------------------------------------------


def _to_move(crossing: _Crossing, what: str, following: Node) -> list[Node]:
    """The nodes that move in front of `following` for an event of the schedule, in order."""
    if what == "start":
        # a view that stands before it already need not move
        return [*(v for v in crossing.views if not v < following), crossing.start]
    if what in ("wait", "reload"):
        return [crossing.wait if what == "wait" else crossing.reload]
    found, stack = {crossing.back}, [crossing.back]
    while stack:
        for user in stack.pop().users:
            if _is_free(user) and user < following:
                found.add(user)
                stack.append(user)
    return _in_order(found, following)


def _keep_on_device(bw: GraphModule, crossing: _Crossing) -> None:
    """Have the value itself cross in place of its copy on the host."""
    value, wait = crossing.value, crossing.wait
    if value is not crossing.source or PACKED_ROW in crossing.source.meta:  # else the program made it, and marked it
        value.meta.update({key: wait.meta[key] for key in (PACKED, NO_VERSION_CHECK) if key in wait.meta})
    wait.graph.output_node().replace_input_with(wait, value)
    crossing.slot.meta["val"] = value.meta["val"]
    crossing.back.replace_all_uses_with(crossing.slot)
    for graph, nodes in ((bw.graph, (crossing.back, crossing.reload)), (wait.graph, (wait, crossing.start))):
        for node in nodes:
            graph.erase_node(node)
