"""The positions of `offload`'s copies in the two graphs: from a schedule of bytes and times.

      after inline     forward  ... last use of x, start, wait ... output     backward  ... reload, wait, first use ...
      after place      forward  x, start ......... wait ......... output      backward  reload ....... wait, first use

A tensor that should stay on the device crosses to the backward itself, in place of its copy. Inductor's scheduler gets
dependencies by which it keeps this order, see `torch_private/inductor_fusion.py`.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cudagraph.placeholder import nearest_first, results_of

from ..graphs.nodes import NO_VERSION_CHECK, PACKED, input_storages, is_view, storage_of, tensor_bytes
from ..graphs.roofline import Rates, has_formula, is_attention, measured_rates, node_ms
from ..graphs.saved import crossing_pairs
from ..torch_private.inductor_fusion import FROM_HOOK
from .hook import OffloadSettings
from .schedule import Item, Limits, Placement, Schedule, Transfer, schedule
from .steps import Terms
from .transfers import (
    COPIES,
    offload_start,
    offload_together,
    offload_wait,
    reload_start,
    reload_together,
    reload_wait,
)

_BUILT_IN = ("aten", "prims", "inductor_prims")
_MEMORY_OF_OTHERS = "memory of an input or output, which the program may write to: no call can decide to send it"
_CANDIDATE = "aot_hooks_offload"  # meta of a backward's placeholder, for `decide_at_run_time`


@dataclass(frozen=True)
class Leaf:
    """The origin of a host tensor: the saved tensor's name, and the settings of the hook that sends it."""

    name: str
    settings: OffloadSettings


@dataclass
class _Crossing:
    """One tensor's operators in both graphs, and the nodes that it is computed from."""

    leaf: Leaf
    start: Node  # the copy out, in the forward
    wait: Node
    slot: Node  # the copy's placeholder in the backward
    reload: Node  # the copy back
    back: Node
    value: Node  # the tensor that is copied, contiguous
    source: Node  # the tensor that `value` is a view of
    views: list[Node]  # the nodes that make `value` from the results of steps, in order

    @property
    def device(self) -> torch.device:
        device: torch.device = self.value.meta["val"].device
        return device


class _GraphSteps:
    """The steps of a graph: its nodes that compute, in order, with their estimated times."""

    def __init__(self, gm: GraphModule, rates: Rates, fused: bool) -> None:
        calls = [n for n in gm.graph.nodes if n.op == "call_function" and n.target not in COPIES]
        self.nodes = [n for n in calls if not _is_free(n)]
        self.index = {node: i for i, node in enumerate(self.nodes)}
        times = node_ms(gm, lambda _: rates, fused)
        self.ms = [times[node] for node in self.nodes]
        # Where a compiler that fuses keeps an operator: before steps that are kernels of their own. Not between a
        # product and a sum after it: a compiler may make one kernel of them, which stands where the sum does.
        self.gaps = [i for i, node in enumerate(self.nodes) if _is_unfused_kernel(node)] if fused else None
        self.output = gm.graph.output_node()

    def after(self, gap: int) -> Node:
        """The node that follows a gap of the schedule."""
        return self.nodes[gap] if gap < len(self.nodes) else self.output


def place(
    fw: GraphModule,
    bw: GraphModule,
    *,
    num_fwd_outputs: int,
    leaves: Mapping[Node, Leaf],
    fused: bool,
    at_run_time: bool,
) -> tuple[tuple[Transfer, ...], dict[Node, tuple[Node, str]]]:
    """Schedule the copies in both graphs, in place.

    Args:
        leaves: each host tensor of the forward, with its origin.
        fused: the graphs are compiled by a compiler that fuses.
        at_run_time: `decide_at_run_time` follows.

    Returns:
        The transfers, and the `leaves` that stay on the device: the node that crosses instead, and why.
    """
    _remove_copies_in_backward(bw)
    by_device: dict[torch.device, list[_Crossing]] = defaultdict(list)
    for crossing in _crossings(fw, bw, num_fwd_outputs, leaves):
        by_device[crossing.device].append(crossing)
    transfers: list[Transfer] = []
    on_device: dict[Node, tuple[Node, str]] = {}
    has_own_memory = _own_memory(fw)
    for device, crossings in by_device.items():
        own_rates = (c.leaf.settings.rates for c in crossings)
        rates = next((r for r in own_rates if r is not None), None) or measured_rates(device)
        forward, backward = _GraphSteps(fw, rates, fused), _GraphSteps(bw, rates, fused)
        kinds = {settings: kind for kind, settings in enumerate(dict.fromkeys(c.leaf.settings for c in crossings))}
        pairs = [(_item(c, kinds[c.leaf.settings], forward, backward), c) for c in crossings]
        pairs.sort(key=lambda pair: pair[0].made)
        decided = [not at_run_time or not c.leaf.settings.across_graphs or has_own_memory(c.value) for _, c in pairs]
        items = [pair for pair, is_decided in zip(pairs, decided, strict=True) if is_decided]
        planned = schedule(
            [item for item, _ in items],
            forward.ms,
            backward.ms,
            to_host=rates.to_host,
            to_device=rates.to_device,
            limits=[Limits(settings.in_flight_bytes, settings.max_stall_ms) for settings in kinds],
            wait_gaps=forward.gaps,
            reload_gaps=backward.gaps,
        )
        placements = iter(planned.placements)
        for (item, crossing), is_decided in zip(pairs, decided, strict=True):
            placement = next(placements) if is_decided else Placement(False, _MEMORY_OF_OTHERS)
            if crossing.leaf.settings.across_graphs:
                metas = [dict(n.meta) for n in (crossing.start, crossing.wait, crossing.reload, crossing.back)]
                crossing.slot.meta[_CANDIDATE] = crossing.leaf, crossing.start.args[1], device, metas
            if not placement.offloaded:
                _keep_on_device(bw, crossing)
                on_device[crossing.wait] = crossing.value, placement.reason
            transfers.append(_transfer(crossing, item.nbytes, placement, forward, backward, planned))
        for steps, events in ((forward, planned.forward), (backward, planned.backward)):
            for gap, what, i in events:
                following = steps.after(gap)
                for node in _to_move(items[i][1], what, following):
                    following.prepend(node)
    for gm in (fw, bw):
        gm.graph.lint()
        gm.recompile()
    return tuple(transfers), on_device


def decide_at_run_time(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int) -> None:
    """Let the operators of `offload(across_graphs=True)` decide at run time what is sent; see steps.py.

    What `place` sends keeps its operators. What it left on the device gets two for all: at the end of the forward, and
    before the first reader. A tensor that is read after its wait gets a wait at the end, too: a compiler may have the
    last reader write over it. A tensor whose memory the program has, an input or an output, is on the device by
    `place`: the program may write to it, and a copy that its graph waits for would wait for those of all graphs before.
    """
    if not any(_CANDIDATE in slot.meta for slot in bw.graph.find_nodes(op="placeholder")):
        return
    output = fw.graph.output_node()
    tensors = {n: _sent_by(n).args[0] if n.target is offload_wait else n for n in output.all_input_nodes}
    has_own_memory = _own_memory(fw)
    last_reader = {storage_of(n): node for node in fw.graph.nodes if node is not output for n in node.all_input_nodes}
    staying: dict[tuple[Any, ...], list[_Staying]] = defaultdict(list)
    for saved, slot in crossing_pairs(fw, bw, num_fwd_outputs):
        value = tensors.get(saved)
        if _CANDIDATE not in slot.meta or not isinstance(value, Node) or not slot.users or not has_own_memory(value):
            continue
        leaf, limit, device, metas = slot.meta[_CANDIDATE]
        planned, settings = saved.target is offload_wait, leaf.settings
        link = settings.rates and (settings.rates.to_host, settings.rates.to_device)
        terms = str(Terms(planned, settings.in_flight_bytes, settings.max_stall_ms, link))
        if not planned:
            staying[device, limit, terms].append(_Staying(value, slot, metas))
            continue
        _sent_by(saved).args = (value, limit, terms)
        if saved < last_reader[storage_of(value)]:
            output.prepend(saved)
        next(u for u in slot.users if u.target is reload_start).args = (slot, device, True)
    for (device, limit, terms), group in staying.items():
        _pass_together(group, device, limit, terms)
    for gm in (fw, bw):
        gm.graph.lint()
        gm.recompile()


@dataclass(frozen=True)
class _Staying:
    """A tensor that the plan of its graph leaves on the device; the metas of operators that would send it."""

    value: Node
    slot: Node
    metas: Sequence[dict[str, Any]]


def _pass_together(group: Sequence[_Staying], device: torch.device, limit: int, terms: str) -> None:
    """Have the tensors of `group` cross by two operators."""
    forward, backward = group[0].value.graph, group[0].slot.graph
    output, readers = forward.output_node(), {each.slot: sorted(each.slot.users) for each in group}
    with forward.inserting_before(output):
        out = forward.call_function(offload_together, ([each.value for each in group], limit, terms))
        waits = [forward.call_function(operator.getitem, (out, i)) for i in range(len(group))]
    with backward.inserting_before(min(found[0] for found in readers.values())):
        reload = backward.call_function(reload_together, ([each.slot for each in group], device))
        backs = [backward.call_function(operator.getitem, (reload, i)) for i in range(len(group))]
    for each, wait, back in zip(group, waits, backs, strict=True):
        for node, meta in ((wait, each.metas[1]), (back, each.metas[3])):
            node.meta.update(meta)
        for mark in (PACKED, NO_VERSION_CHECK):
            wait.meta.pop(mark, None)
            wait.meta.update({mark: each.value.meta[mark]} if mark in each.value.meta else {})
        output.replace_input_with(each.value, wait)
        for reader in readers[each.slot]:
            reader.replace_input_with(each.slot, back)
        each.slot.meta["val"] = wait.meta["val"]
    for node, parts, meta in ((out, waits, group[0].metas[0]), (reload, backs, group[0].metas[2])):
        node.meta.update(meta | {"val": [part.meta["val"] for part in parts]})


def _own_memory(fw: GraphModule) -> Callable[[Node], bool]:
    """Tells of a node of the forward whether it is in memory of its own: of no input, and of no other output."""
    outputs = [n for n in results_of(fw.graph) if isinstance(n, Node)]  # what is saved and returned is there twice
    tensors = (_sent_by(n).args[0] if n.target is offload_wait else n for n in outputs)
    inputs, count = input_storages(fw.graph), Counter(storage_of(n) for n in tensors if isinstance(n, Node))
    return lambda node: storage_of(node) not in inputs and count[storage_of(node)] == 1


def _sent_by(wait: Node) -> Node:
    start = wait.args[0]
    assert isinstance(start, Node)
    return start


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


def _crossings(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int, leaves: Mapping[Node, Leaf]) -> list[_Crossing]:
    slot_of = dict(crossing_pairs(fw, bw, num_fwd_outputs))
    found = []
    for wait, leaf in leaves.items():
        start, slot = _sent_by(wait), slot_of[wait]
        reload = next(u for u in slot.users if u.target is reload_start)
        back = next(u for u in reload.users if u.target is reload_wait)
        value = source = start.all_input_nodes[0]
        while is_view(source) and isinstance(source.args[0], Node):
            source = source.args[0]
        views = sorted(n for n in nearest_first(value, _sources_of_view) if _is_free(n))
        found.append(_Crossing(leaf, start, wait, slot, reload, back, value, source, views))
    return found


def _is_free(node: Node) -> bool:
    """Whether `node` computes nothing on a device: views, items of a tuple, sizes."""
    if node.op != "call_function" or node.target in COPIES:
        return False
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor | tuple | list)
    return is_view(node) or node.target is operator.getitem or not is_tensor


def _sources_of_view(node: Node) -> list[Node]:
    """What `node` reads if it computes nothing, as a view does; [] if it computes."""
    return node.all_input_nodes if _is_free(node) else []


def _item(crossing: _Crossing, kind: int, forward: _GraphSteps, backward: _GraphSteps) -> Item:
    nbytes = tensor_bytes(crossing.value.meta["val"])
    made = max(forward.index.get(n, -1) for n in nearest_first(crossing.value, _sources_of_view))

    def users_of_view(node: Node) -> list[Node]:
        return [] if node in backward.index else [u for u in node.users if u.op == "call_function"]

    readers = [backward.index[n] for n in nearest_first(crossing.back, users_of_view) if n in backward.index]
    return Item(nbytes, made, min(readers, default=len(backward.nodes) - 1), kind)


def _is_unfused_kernel(node: Node) -> bool:
    namespace = getattr(node.target, "namespace", None)
    foreign = namespace is not None and namespace not in _BUILT_IN  # unknown to torch's compilers
    return foreign or has_formula(node) or is_attention(node)


def _transfer(
    crossing: _Crossing,
    nbytes: int,
    placement: Placement,
    forward: _GraphSteps,
    backward: _GraphSteps,
    planned: Schedule,
) -> Transfer:
    names = ("", "", "", "")
    if placement.offloaded:
        wait = forward.nodes[placement.wait].name if placement.wait < len(forward.nodes) else "(end)"
        reload, use = backward.nodes[placement.reload].name, backward.nodes[placement.use].name
        names = (crossing.source.name, wait, reload, use)
    times = planned.forward_ms, planned.backward_ms, planned.full_stall_ms
    settings = crossing.leaf.settings
    return Transfer(crossing.leaf.name, nbytes, placement, *names, *times, str(crossing.device), settings.max_stall_ms)


def _to_move(crossing: _Crossing, what: str, following: Node) -> list[Node]:
    """The nodes that move in front of `following` for an event of the schedule, in order."""
    if what == "start":
        # a view that stands before it already need not move
        return [*(v for v in crossing.views if not v < following), crossing.start]
    if what in ("wait", "reload"):
        return [crossing.wait if what == "wait" else crossing.reload]
    return sorted(nearest_first(crossing.back, lambda n: [u for u in n.users if _is_free(u) and u < following]))


def _keep_on_device(bw: GraphModule, crossing: _Crossing) -> None:
    """Have the value itself cross in place of its copy on the host."""
    value, wait = crossing.value, crossing.wait
    if value is not crossing.source or FROM_HOOK in crossing.source.meta:  # else the program made it, and marked it
        value.meta.update({key: wait.meta[key] for key in (PACKED, NO_VERSION_CHECK) if key in wait.meta})
    wait.graph.output_node().replace_input_with(wait, value)
    crossing.slot.meta["val"] = value.meta["val"]
    crossing.back.replace_all_uses_with(crossing.slot)
    for node in (crossing.back, crossing.reload, wait, crossing.start):
        node.graph.erase_node(node)
