"""The positions of `offload`'s copies in the two graphs: from a schedule of bytes and times.

      after inline     forward  ... last use of x, start, wait ... output     backward  ... reload, wait, first use ...
      after place      forward  x, start ......... wait ......... output      backward  reload ....... wait, first use

A tensor that should stay on the device crosses to the backward itself, in place of its copy. Inductor's scheduler gets
dependencies by which it keeps this order, see `torch_private/inductor_fusion.py`.
"""

from __future__ import annotations

import bisect
import functools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cudagraph.placeholder import nearest_first, results_of

from ..graphs.lifetimes import fuses, is_loop, last_readers, reduces, written_storages
from ..graphs.nodes import NO_VERSION_CHECK, PACKED, input_storages, is_view, output_storages, storage_of, tensor_bytes
from ..graphs.roofline import has_formula, is_attention, node_ms
from ..graphs.saved import crossing_pairs
from ..graphs.speeds import Rates, measured_rates
from ..steps.plan import Terms
from ..steps.schedule import DECIDED_LATER, Item, Limits, Placement, Schedule, Transfer, schedule
from ..torch_private.inductor_fusion import ALONE, FROM_HOOK, WRITTEN
from .at_run_time import layouts_of, offload_together, reload_together
from .hook import OffloadSettings
from .transfers import COPIES, offload_start, offload_wait, reload_start, reload_wait

_MAY_BE_DROPPED = frozenset(  # those of Inductor's passes, 2.11 to 2.15
    "slice slice_scatter repeat constant_pad_nd convert_element_type device_put ceil floor round trunc pow cat copy "
    "alias clone _to_copy lift_fresh_copy".split()
)
_BUILT_IN = ("aten", "prims", "inductor_prims")
_MEMORY_OF_OTHERS = "memory of an input or output, which the program may write to: no call can decide to send it"
_TOGETHER = 16  # at most so many tensors an operator
_PART_BYTES = 64 << 20  # an operator of this many takes no tensor that is read later: its copies take a millisecond
_Pairs = list[tuple[Node, Node]]  # values of the forward with their placeholders in the backward
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
    views: list[Node]  # the nodes that make `value` from the results of steps, in the graph's order; nodes compare so


_Planned = tuple[Item, _Crossing]


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
        self.fused = fused

    def after(self, gap: int) -> Node:
        """The node that follows a gap of the schedule."""
        return self.nodes[gap] if gap < len(self.nodes) else self.output

    def in_kernel_of_last_reader(self, packed: Node, made: int, copy_ms: float) -> int:
        """The step that makes `packed` if its packing waits to be part of the kernel that reads its source last.

        Example: silu(a) * b, where a product makes b after silu(a): one kernel reads a and b, and can pack both. A
        copy of a that starts before that product would need a kernel of its own for the packing.

        `made` if the copy, of `copy_ms`, would be done by the time that the last reader runs; if the packing is not
        fused with its source's readers; or if it computes nothing.
        """
        packing = [n for n in nearest_first([packed], _sources_in_hook) if FROM_HOOK in n.meta]
        computed = [n for n in packing if isinstance(n.meta.get("val"), torch.Tensor) and not is_view(n)]
        if not computed or any(ALONE in n.meta or not (fuses(n) or reduces(n) or is_loop(n)) for n in computed):
            return made
        sources = {n for each in packing for n in each.all_input_nodes if FROM_HOOK not in n.meta}
        last = max((self._last_readers[n] for n in sources), default=-1)
        step = bisect.bisect_right(self._positions, last) - 1
        return step if made < step and sum(self.ms[made + 1 : step]) < copy_ms else made

    @functools.cached_property
    def _last_readers(self) -> dict[Node, int]:
        nodes = list(self.output.graph.nodes)
        return last_readers(nodes, written_storages(nodes, fuse_loops=True) | output_storages(self.output.graph))

    @functools.cached_property
    def _positions(self) -> list[int]:
        """The positions of the steps among all nodes of the graph."""
        return [i for i, node in enumerate(self.output.graph.nodes) if node in self.index]


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
        by_device[crossing.value.meta["val"].device].append(crossing)
    transfers: list[Transfer] = []
    on_device: dict[Node, tuple[Node, str]] = {}
    has_own_memory = _own_memory(fw)
    for device, crossings in by_device.items():
        own_rates = (c.leaf.settings.rates for c in crossings)
        rates = next((r for r in own_rates if r is not None), None) or measured_rates(device)
        forward, backward = _GraphSteps(fw, rates, fused), _GraphSteps(bw, rates, fused)
        pairs, planned_now, planned = _scheduled(crossings, forward, backward, rates, at_run_time=at_run_time)
        placements = {c.wait: p for (_, c), p in zip(planned_now, planned.placements, strict=True)}
        for item, crossing in pairs:
            placement = placements.get(crossing.wait)
            if placement is None:
                placement = Placement(False, DECIDED_LATER if has_own_memory(crossing.value) else _MEMORY_OF_OTHERS)
                metas = [dict(node.meta) for node in (crossing.start, crossing.reload, crossing.back)]
                made = (forward.nodes[item.made] if item.made >= 0 else crossing.source).name
                crossing.slot.meta[_CANDIDATE] = crossing.leaf.settings, crossing.start.args[1], device, made, metas
            sent = placement.offloaded or placement.reason == DECIDED_LATER
            if sent and fused and fuses(crossing.source):  # Inductor would choose strides, and each call copy it
                crossing.source.meta[WRITTEN] = True
            if not placement.offloaded:
                _keep_on_device(crossing)
                on_device[crossing.wait] = crossing.value, placement.reason
            leaf, names = crossing.leaf, _names_of(crossing, placement, forward, backward)
            times = planned.forward_ms, planned.backward_ms, planned.full_stall_ms
            transfers.append(Transfer(leaf.name, item.nbytes, placement, *names, *times, str(device)))
        for steps, events in ((forward, planned.forward), (backward, planned.backward)):
            for gap, what, i in events:
                following = steps.after(gap)
                for node in _to_move(planned_now[i][1], what, following):
                    following.prepend(node)
    return tuple(transfers), on_device


def _scheduled(
    crossings: Sequence[_Crossing], forward: _GraphSteps, backward: _GraphSteps, rates: Rates, *, at_run_time: bool
) -> tuple[list[_Planned], list[_Planned], Schedule]:
    """Each of `crossings` with its item, in the order in which they are made; those of a schedule, and the schedule."""
    kinds = {settings: kind for kind, settings in enumerate(dict.fromkeys(c.leaf.settings for c in crossings))}
    of_value: Counter[str] = Counter()  # a value's codes and scales start together
    for c in crossings:
        of_value[c.leaf.name] += tensor_bytes(c.value.meta["val"])
    copy_ms = {name: nbytes / rates.to_host * 1e3 for name, nbytes in of_value.items()}
    later = {c.leaf.name: math.inf for c in crossings if at_run_time and c.leaf.settings.across_graphs}
    copy_ms |= later  # other graphs' copies may be under way: a start that is a kernel earlier gains nothing
    pairs = [(_item(c, kinds[c.leaf.settings], forward, backward, copy_ms[c.leaf.name]), c) for c in crossings]
    pairs.sort(key=lambda pair: pair[0].made)
    planned_now = [(item, c) for item, c in pairs if c.leaf.name not in later]
    planned = schedule(
        [item for item, _ in planned_now],
        forward.ms,
        backward.ms,
        to_host=rates.to_host,
        to_device=rates.to_device,
        limits=[Limits(settings.in_flight_bytes, settings.max_stall_ms) for settings in kinds],
        gaps=(forward.gaps, backward.gaps),
    )
    return pairs, planned_now, planned


def decide_at_run_time(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int) -> None:
    """Give the tensors of `offload(across_graphs=True)` the operators that decide when they run, see at_run_time.py.

    One operator takes several tensors, after the last reader of each: a compiler pass may let that reader write over
    the tensor; and after the kernel that packs it. Inputs and outputs stay as they are: the program has their memory,
    and may write to it.
    """
    if not any(_CANDIDATE in slot.meta for slot in bw.graph.find_nodes(op="placeholder")):
        return
    output, has_own_memory = fw.graph.output_node(), _own_memory(fw)
    named = {node.name: node for node in fw.graph.nodes}
    last_reader = {storage_of(n): node for node in fw.graph.nodes if node is not output for n in node.all_input_nodes}

    def place_of(pair: tuple[Node, Node]) -> Node:
        value, slot = pair
        *_, made, _ = slot.meta[_CANDIDATE]
        last: Node = max(last_reader.get(storage_of(value), value), named.get(made, value))
        return last

    kinds: dict[tuple[Any, ...], _Pairs] = defaultdict(list)
    for value, slot in crossing_pairs(fw, bw, num_fwd_outputs):
        if _CANDIDATE in slot.meta and slot.users and isinstance(value, Node) and has_own_memory(value):
            settings, limit, device, *_ = slot.meta[_CANDIDATE]
            link = (settings.rates.to_host, settings.rates.to_device) if settings.rates else (0.0, 0.0)
            terms = Terms(settings.in_flight_bytes, settings.max_stall_ms, *link)
            terms = terms._replace(min_bytes=settings.min_bytes, room=settings.room)
            # torch saves those without a check of versions after the others
            kinds[device, limit, terms, value.meta.get(NO_VERSION_CHECK)].append((value, slot))
    groups = []
    for (device, limit, terms, _), found in kinds.items():
        found.sort(key=place_of)
        for part in _parts(found, place_of, terms.in_flight_bytes):
            groups.append((part, device, limit, terms))
    groups.sort(key=lambda group: place_of(group[0][-1]))
    for i, (found, device, limit, terms) in reversed([*enumerate(groups)]):  # of two behind one node the first is first
        terms = terms._replace(ends_graph=i == len(groups) - 1)
        _cross_together(fw, bw, place_of(found[-1]), found, device, limit, terms)


def _parts(pairs: _Pairs, place_of: Callable[[tuple[Node, Node]], Node], most_bytes: int) -> list[_Pairs]:
    """`pairs`, which are in the order of their places, in one part for each operator.

    At most `_TOGETHER` are a part, and of at most `most_bytes` if they are more than one. Copies of a large layer begin
    and end while it runs: a part of `_PART_BYTES` has no pairs of later places. Symbolic sizes count as they were when
    the graph was compiled.
    """
    parts: list[_Pairs] = [[]]
    nbytes = 0
    for pair in pairs:
        own, part = tensor_bytes(pair[0].meta["val"]), parts[-1]
        is_later = bool(part) and nbytes >= _PART_BYTES and place_of(pair) is not place_of(part[-1])
        if part and (is_later or len(part) == _TOGETHER or nbytes + own > most_bytes):
            parts.append([])
            nbytes = 0
        parts[-1].append(pair)
        nbytes += own
    return parts


def _cross_together(
    fw: GraphModule, bw: GraphModule, after: Node, pairs: _Pairs, device: torch.device, limit: int, terms: Terms
) -> None:
    """Have the values of `pairs` cross by one operator in each graph: in `fw` behind `after`, in `bw` at the first use.

      fw   ticket, *carried = offload_together([v0, v1, ...])      bw   [v0', v1', ...] = reload_together(ticket, ...)

    The ticket crosses in place of all values. For one with symbolic sizes a tensor of these sizes, with one number in
    memory, crosses beside it (`carried`): the backward needs the sizes.
    """
    values, slots = [value for value, _ in pairs], [slot for _, slot in pairs]
    fakes = [value.meta["val"] for value in values]
    carried = [i for i, fake in enumerate(fakes) if not all(isinstance(n, int) for n in fake.shape)]
    numbers = terms._replace(is_symbolic=bool(carried)).numbers()
    with fw.graph.inserting_after(after):
        out = fw.graph.call_function(offload_together, (values, limit, numbers, carried))
    with fw.graph.inserting_after(out):
        crossing = [fw.graph.call_function(operator.getitem, (out, i)) for i in range(1 + len(carried))]
    *_, (out_meta, reload_meta, back_meta) = slots[0].meta[_CANDIDATE]
    out.meta = {**out_meta, "val": offload_together(fakes, limit, numbers, carried)}
    for node, fake in zip(crossing, out.meta["val"], strict=True):
        version_check = {key: values[0].meta[key] for key in (NO_VERSION_CHECK,) if key in values[0].meta}
        node.meta = {PACKED: True, "val": fake, **version_check}
    ticket, carriers = crossing[0], {values[i]: node for i, node in zip(carried, crossing[1:], strict=True)}
    first = min(slots)
    with bw.graph.inserting_before(first):
        slot = bw.graph.placeholder(f"{slots[0].name}_ticket")
    slot.target, slot.meta = slot.name, {"val": ticket.meta["val"]}
    slot.meta |= {key: slots[0].meta[key] for key in ("desc",) if key in slots[0].meta}
    carrying = [slots[i] for i in carried]
    with bw.graph.inserting_before(min(reader for each in slots for reader in each.users)):
        reload = bw.graph.call_function(reload_together, (slot, carrying, device, layouts_of(fakes)))
        backs = [bw.graph.call_function(operator.getitem, (reload, i)) for i in range(len(values))]
    reload.meta = {**reload_meta, "val": fakes}
    for each, back, value, fake in zip(slots, backs, values, fakes, strict=True):
        back.meta = {**back_meta, "val": fake}
        each.replace_all_uses_with(back, delete_user_cb=lambda user: user is not reload)
        if value in carriers:
            each.meta["val"] = carriers[value].meta["val"]
        else:
            bw.graph.erase_node(each)
    saved: list[Any] = []
    for value in results_of(fw.graph):
        saved += [ticket] if value is values[slots.index(first)] else []
        saved += [carriers[value]] if value in carriers else [] if value in values else [value]
    fw.graph.output_node().args = (tuple(saved),)


def _own_memory(fw: GraphModule) -> Callable[[Node], bool]:
    """A function that tells whether a node of the forward shares memory with no input and with no other output."""
    outputs = [n for n in results_of(fw.graph) if isinstance(n, Node)]  # twice, if it is saved and the user's as well
    tensors = (n.args[1] if n.target is offload_wait else n for n in outputs)
    inputs, count = input_storages(fw.graph), Counter(m for n in tensors if isinstance(n, Node) for m in _memories(n))
    return lambda node: all(memory not in inputs and count[memory] == 1 for memory in _memories(node))


def _memories(node: Node) -> set[Any]:
    """The storages that `node` may be in.

    A compiler may drop operators that copy all of their input, and have the parts of a `cat` written where it is.
    """
    found = {storage_of(node)}
    name = str(getattr(node.target, "overloadpacket", "")).removeprefix("aten.").removeprefix("prims.")
    if node.op == "call_function" and (is_view(node) or name in _MAY_BE_DROPPED):
        value = node.meta["val"]
        for source in node.all_input_nodes:
            other: Any = source.meta.get("val")
            same = isinstance(other, torch.Tensor) and other.dtype == value.dtype
            if same and isinstance(other.numel(), int) and isinstance(value.numel(), int):  # else they may be equal
                same = other.numel() == value.numel()
            if same or name == "cat":
                found |= _memories(source)
    return found


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
    """For each of `leaves`, the nodes of its copies out and back, and the value that is copied."""
    slot_of = dict(crossing_pairs(fw, bw, num_fwd_outputs))
    found = []
    for wait, leaf in leaves.items():
        start, slot = wait.all_input_nodes[0], slot_of[wait]
        reload = next(u for u in slot.users if u.target is reload_start)
        back = next(u for u in reload.users if u.target is reload_wait)
        value = source = start.all_input_nodes[0]
        while is_view(source) and isinstance(source.args[0], Node):
            source = source.args[0]
        views = sorted(n for n in nearest_first([value], _sources_of_view) if _is_free(n))
        found.append(_Crossing(leaf, start, wait, slot, reload, back, value, source, views))
    return found


def _is_free(node: Node) -> bool:
    """Whether `node` computes nothing on a device: views, items of a tuple, sizes."""
    if node.op != "call_function" or node.target in COPIES:
        return False
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor | tuple | list)
    return is_view(node) or node.target is operator.getitem or not is_tensor


def _sources_of_view(node: Node) -> list[Node]:
    """The nodes that `node` reads, if it computes nothing, as a view does; else []."""
    return node.all_input_nodes if _is_free(node) else []


def _sources_in_hook(node: Node) -> list[Node]:
    """The nodes of the same hook that `node` reads."""
    return [n for n in node.all_input_nodes if FROM_HOOK in n.meta and n.op == "call_function"]


def _item(crossing: _Crossing, kind: int, forward: _GraphSteps, backward: _GraphSteps, copy_ms: float) -> Item:
    """The copies as the schedule takes them: bytes, the step that makes the value, and the one that reads it first."""
    nbytes = tensor_bytes(crossing.value.meta["val"])
    made = max(forward.index.get(n, -1) for n in nearest_first([crossing.value], _sources_of_view))
    if forward.fused:
        made = forward.in_kernel_of_last_reader(crossing.value, made, copy_ms)

    def users_of_view(node: Node) -> list[Node]:
        return [] if node in backward.index else [u for u in node.users if u.op == "call_function"]

    readers = [backward.index[n] for n in nearest_first([crossing.back], users_of_view) if n in backward.index]
    return Item(nbytes, made, min(readers, default=len(backward.nodes) - 1), kind)


def _is_unfused_kernel(node: Node) -> bool:
    """Whether a compiler runs `node` as a kernel of its own: products, attention, operators that it does not know."""
    namespace = getattr(node.target, "namespace", None)
    foreign = namespace is not None and namespace not in _BUILT_IN  # unknown to torch's compilers
    return foreign or has_formula(node) or is_attention(node)


def _names_of(c: _Crossing, p: Placement, forward: _GraphSteps, backward: _GraphSteps) -> tuple[str, str, str, str]:
    """The names for `Transfer` of the nodes where the four operators stand."""
    if not p.offloaded:
        return "", "", "", ""
    wait = forward.nodes[p.wait].name if p.wait < len(forward.nodes) else "(end)"
    start = forward.nodes[p.start - 1].name if p.start else c.source.name
    return start, wait, backward.nodes[p.reload].name, backward.nodes[p.use].name


def _to_move(crossing: _Crossing, what: str, following: Node) -> list[Node]:
    """The nodes that move in front of `following` for an event of the schedule, in order."""
    if what == "start":
        # a view that stands before it already need not move
        return [*(v for v in crossing.views if not v < following), crossing.start]
    if what in ("wait", "reload"):
        return [crossing.wait if what == "wait" else crossing.reload]
    return sorted(nearest_first([crossing.back], lambda n: [u for u in n.users if _is_free(u) and u < following]))


def _keep_on_device(crossing: _Crossing) -> None:
    """Have the value itself cross in place of its copy on the host."""
    value, wait = crossing.value, crossing.wait
    if value is not crossing.source or FROM_HOOK in crossing.source.meta:  # else the program made it, and marked it
        value.meta.update({key: wait.meta[key] for key in (PACKED, NO_VERSION_CHECK) if key in wait.meta})
    wait.graph.output_node().replace_input_with(wait, value)
    crossing.slot.meta["val"] = value.meta["val"]
    crossing.back.replace_all_uses_with(crossing.slot)
    for node in (crossing.back, crossing.reload, wait, crossing.start):
        node.graph.erase_node(node)
