"""Where the copies of `offload` stand in the two graphs: by a schedule from bytes and times, and held there.

      after inline     forward  ... last use of x, start, wait ... output     backward  ... reload, wait, first use ...
      after place      forward  x, start ......... wait ......... output      backward  reload ....... wait, first use

`place(fw, bw, ...)` reads items and times off the graphs, asks `schedule`, and moves the operators; what is to stay on
the device crosses as it is instead. Inductor's scheduler is given dependencies by which it keeps this order, see
`aot_hooks/inductor/`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ..graphs.nodes import is_view
from ..graphs.roofline import Rates, has_formula, measured_rates, node_ms
from ..torch_private import values as torch_values
from ..torch_private.inductor_marks import PACKED_ROW
from .hook import OffloadSettings
from .schedule import Item, Limits, Transfer, schedule
from .transfers import offload_start, offload_wait, reload_start, reload_wait

__all__ = ["Leaf", "place"]

_BUILT_IN = ("aten", "prims", "inductor_prims")
_OURS = (offload_start, offload_wait, reload_start, reload_wait)


@dataclass(frozen=True)
class Leaf:
    """What a host tensor is part of: the saved tensor's name, and the settings of the hook that sends it."""

    name: str
    settings: OffloadSettings


@dataclass
class _Crossing:
    """One tensor's operators on both sides, and what it is made from."""

    leaf: Leaf
    start: Node
    wait: Node
    slot: Node
    reload: Node
    back: Node
    value: Node  # what is copied, contiguous
    source: Node  # what that is a view of
    views: list[Node]  # what makes the value from results of steps, in order

    @property
    def device(self) -> torch.device:
        device: torch.device = self.value.meta["val"].device
        return device

    @property
    def nbytes(self) -> int:
        value = self.value.meta["val"]
        return torch_values.hint(value.numel()) * int(value.element_size())


def place(
    fw: GraphModule, bw: GraphModule, *, num_fwd_outputs: int, leaves: Mapping[Node, Leaf], fused: bool
) -> tuple[tuple[Transfer, ...], dict[Node, Node]]:
    """Schedule the copies in both graphs, in place.

    Args:
        leaves: for each host tensor of the forward, what it is part of.
        fused: the graphs are compiled by a compiler that fuses.

    Returns:
        The transfers, and those of `leaves` that stay on the device, with the nodes that cross in their place.
    """
    _leave_backward_alone(bw)
    found = _crossings(fw, bw, num_fwd_outputs, leaves)
    transfers: list[Transfer] = []
    stay: dict[Node, Node] = {}
    by_device: dict[torch.device, list[_Crossing]] = defaultdict(list)
    for crossing in found:
        by_device[crossing.device].append(crossing)
    for device, crossings in by_device.items():
        given = (c.leaf.settings.rates for c in crossings)
        rates = next((r for r in given if r is not None), None) or measured_rates(device)
        transfers += _place(fw, bw, crossings, rates, fused, stay)
    for gm in (fw, bw):
        gm.graph.lint()
        gm.recompile()
    return tuple(transfers), stay


def _leave_backward_alone(bw: GraphModule) -> None:
    """A value that crosses unpacked for other readers is packed in the backward: for a copy there is no use."""
    for start in bw.graph.find_nodes(op="call_function", target=offload_start):
        nodes: list[Node] = [start]
        for target in (offload_wait, reload_start, reload_wait):
            nodes.append(next(u for u in nodes[-1].users if u.target is target))
        nodes[-1].replace_all_uses_with(start.all_input_nodes[0])
        for node in reversed(nodes):
            bw.graph.erase_node(node)


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
        views = [n for n in _free_before(value) if _is_free(n)]
        found.append(_Crossing(leaves[wait], start, wait, slot, reload, back, value, source, views))
    return found


def _is_free(node: Node) -> bool:
    """Whether `node` computes nothing on a device: views, items of a tuple, sizes."""
    free = (
        is_view(node)
        or "getitem" in str(node.target)
        or not isinstance(node.meta.get("val"), torch.Tensor | tuple | list)
    )
    return node.op == "call_function" and node.target not in _OURS and free


def _free_before(value: Node) -> list[Node]:
    """What stands between `value` and the steps that it is made by, both included, in order."""
    found: dict[Node, None] = {value: None}
    stack = [value]
    while stack:
        node = stack.pop()
        new = [n for n in node.all_input_nodes if n not in found] if _is_free(node) else []
        found.update(dict.fromkeys(new))
        stack += new
    order = {node: i for i, node in enumerate(value.graph.nodes)}
    return sorted(found, key=order.__getitem__)


def _steps(gm: GraphModule) -> list[Node]:
    """The nodes that compute."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.target not in _OURS and not _is_free(n)]


def _place(
    fw: GraphModule,
    bw: GraphModule,
    crossings: list[_Crossing],
    rates: Rates,
    fused: bool,
    stay: dict[Node, Node],
) -> list[Transfer]:
    ahead, behind = _steps(fw), _steps(bw)
    forward_place = {node: i for i, node in enumerate(ahead)}
    made = {id(c): max((forward_place.get(n, -1) for n in _free_before(c.value)), default=-1) for c in crossings}
    crossings = sorted(crossings, key=lambda c: made[id(c)])
    backward_place = {node: i for i, node in enumerate(behind)}
    forward, backward = (node_ms(gm, lambda _: rates, fused) for gm in (fw, bw))
    kinds = {settings: kind for kind, settings in enumerate(dict.fromkeys(c.leaf.settings for c in crossings))}
    last = len(behind) - 1
    planned = schedule(
        [
            Item(c.nbytes, made[id(c)], _first_use(c.back, backward_place, last), kinds[c.leaf.settings])
            for c in crossings
        ],
        [forward[n] for n in ahead],
        [backward[n] for n in behind],
        to_host=rates.to_host,
        to_device=rates.to_device,
        limits=[Limits(settings.in_flight_bytes, settings.max_stall_ms) for settings in kinds],
        wait_gaps=_held(ahead) if fused else None,
        reload_gaps=_held(behind) if fused else None,
    )
    transfers = []
    for c, p in zip(crossings, planned.placements, strict=True):
        names = {"start": "", "wait": "", "reload": "", "use": ""}
        if p.offloaded:
            names = {
                "start": c.source.name,
                "wait": ahead[p.wait].name if p.wait < len(ahead) else "(end)",
                "reload": behind[p.reload].name,
                "use": behind[p.use].name,
            }
        else:
            _stay(bw, c)
            stay[c.wait] = c.value
        transfers.append(
            Transfer(
                c.leaf.name,
                c.nbytes,
                p,
                start=names["start"],
                wait=names["wait"],
                reload=names["reload"],
                use=names["use"],
                forward_ms=planned.forward_ms,
                backward_ms=planned.backward_ms,
                full_stall_ms=planned.full_stall_ms,
                device=str(c.device),
                max_stall_ms=c.leaf.settings.max_stall_ms,
            )
        )
    for steps, events in ((ahead, planned.forward), (behind, planned.backward)):
        for gap, what, i in events:
            before = steps[gap] if gap < len(steps) else fw.graph.output_node()
            for node in _to_move(crossings[i], what, before):
                before.prepend(node)
    return transfers


def _held(steps: list[Node]) -> list[int]:
    """The gaps before steps that are kernels of their own: there a compiler that fuses the others keeps an operator.

    Not between a product and a sum after it, which it may make one: the sum, with the product in it, comes later.
    """
    return [i for i, node in enumerate(steps) if _alone(node)]


def _alone(node: Node) -> bool:
    namespace = getattr(node.target, "namespace", None)
    foreign = namespace is not None and namespace not in _BUILT_IN  # what torch's compilers know nothing about
    return foreign or has_formula(node) or "scaled_dot_product" in str(node.target)


def _to_move(c: _Crossing, what: str, before: Node) -> list[Node]:
    """The nodes that go before `before` when `what` happens, in order."""
    if what == "start":
        return [*(v for v in c.views if not v < before), c.start]  # a view that stands before it already may stay
    if what in ("wait", "reload"):
        return [c.wait if what == "wait" else c.reload]
    found, stack = {c.back}, [c.back]
    while stack:
        for user in stack.pop().users:
            if _is_free(user) and user < before:
                found.add(user)
                stack.append(user)
    order = {node: i for i, node in enumerate(before.graph.nodes)}
    return sorted(found, key=order.__getitem__)


def _first_use(back: Node, place: Mapping[Node, int], default: int) -> int:
    """The first step that reads `back`, also through views."""
    readers, stack = [], [back]
    while stack:
        for user in stack.pop().users:
            if user in place:
                readers.append(place[user])
            elif user.op == "call_function":
                stack.append(user)
    return min(readers, default=default)


def _stay(bw: GraphModule, c: _Crossing) -> None:
    """Have the value itself cross in place of its copy on the host."""
    output = c.wait.graph.output_node()
    if c.value is not c.source or PACKED_ROW in c.source.meta:  # else the program made it, and marked it
        marks = ("aot_hooks_packed", "saved_tensor_with_no_vc_check")
        c.value.meta.update({key: c.wait.meta[key] for key in marks if key in c.wait.meta})
    output.replace_input_with(c.wait, c.value)
    c.slot.meta["val"] = c.value.meta["val"]
    c.back.replace_all_uses_with(c.slot)
    for graph, nodes in ((bw.graph, (c.back, c.reload)), (c.wait.graph, (c.wait, c.start))):
        for node in nodes:
            graph.erase_node(node)
