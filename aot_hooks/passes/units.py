"""Traced hooks for choices: a `Unit` is a saved value with the graphs that pack and unpack it.

choices --trace_units--> units --choose_positions--> units, each pack with its position --inline--> graphs
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cudagraph.placeholder import results_of

from ..graphs.layout import TracedLayout, expanded_dimensions, fake_in, traced_layout
from ..graphs.lifetimes import alive_bytes, fuses
from ..graphs.nodes import producer, seen_from, storage_bytes, storage_of
from ..graphs.saved import SavedValue
from ..hook import KEEP, Hook, compiling_for
from ..identity.frozen import described
from ..offloading.hook import settings_of
from ..offloading.transfers import offload_wait
from ..torch_private import inductor
from ..torch_private import values as torch_values
from .edits import last_use, log, show
from .plan import UNCOPIED, Choice
from .trace import TracedHook, trace_hook

_WORTH_A_KERNEL = 0.01  # of the peak
Tracer = Callable[[Hook, torch.Tensor, SavedValue], TracedHook]


@dataclass(frozen=True)
class Packing:
    """One hook on one saved value, for some of its readers."""

    hook: Hook
    traced: TracedHook
    readers: tuple[Node, ...]  # nodes of the backward that read the unpacked value
    # pack right after the value is made, in a kernel of its own, because memory is tight at its last use
    pack_at_definition: bool = False
    # Reduce (find the scale) right after the value is made, and pack after its last use. A fusing compiler then finds
    # all scales in one pass over the data and writes all packed values in a second.
    scale_at_definition: bool = False
    leaves: tuple[Node, ...] = ()  # the nodes of the forward that cross; known once the pack is in the graph
    packed_bytes: int = 0  # bytes that cross, likewise

    @property
    def leaf_bytes(self) -> tuple[int, int]:
        """Bytes that pack leaves on the device, and on the host."""
        leaves = results_of(self.traced.pack.graph)
        on_host = [leaf for leaf in leaves if leaf.target is offload_wait]
        return leaf_bytes_of(leaf for leaf in leaves if leaf not in on_host), leaf_bytes_of(on_host)


@dataclass(frozen=True, eq=False)
class Unit:
    """A saved value, its packings, and further values that come back from the first of them."""

    saved: SavedValue
    packings: tuple[Packing, ...]  # empty for a value that is dropped
    # The value itself crosses too, for readers that no hook covers. Packed leaves would only add bytes, so it is packed
    # in the backward.
    keep: bool
    source: Node  # the node of the forward that is packed: the value's own, or one that it is a copy of
    views: tuple[SavedValue, ...] = ()  # views of the same storage, or copies of the value
    # for the backward inputs of copies and views, the nodes that make them from the unpacked value
    replays: Mapping[Node, tuple[Node, ...]] = field(default_factory=dict)
    # The layout that pack was traced with, in a graph that runs operator by operator: there real strides may be others.
    # None for Inductor.
    layout: TracedLayout | None = None

    @property
    def operators(self) -> set[Any]:
        """The operators of its packs and unpacks."""
        graphs = [gm.graph for p in self.packings for gm in (p.traced.pack, p.traced.unpack)]
        return {node.target for graph in graphs for node in graph.nodes if node.op == "call_function"}


def tracer(for_inductor: bool) -> Tracer:
    """A function that traces a hook once for all saved tensors of the same static sizes.

    A budget keeps it for all its attempts. With `for_inductor` hooks are decomposed with Inductor's table.
    """
    decompositions = inductor.decompositions() if for_inductor else None
    known: dict[Any, TracedHook] = {}
    checked: set[Hook] = set()

    def trace(hook: Hook, value: torch.Tensor, saved: SavedValue) -> TracedHook:
        layout = (*value.shape, *value.stride())
        key: Any = None
        if all(isinstance(n, int) for n in layout):
            mode = value.fake_mode  # type: ignore[attr-defined]  # kept, so that no other has its id
            key = (hook, layout, value.is_conj(), value.is_neg(), value.dtype, value.device, mode)
            if key in known:
                return known[key]
        with compiling_for("aten" if decompositions is None else "inductor"):
            where = saved.row.describe()
            twice = hook not in checked and described(hook).own  # hooks of the package have no hidden state
            traced = trace_hook(hook, value, where, decompositions=decompositions, twice=twice)
        checked.add(hook)
        if key is not None:
            known[key] = traced
        show(f"pack of '{hook.name}' for {saved.row.name}", traced.pack)
        show(f"unpack of '{hook.name}' for {saved.row.name}", traced.unpack)
        return traced

    return trace


def trace_units(
    choices: Sequence[Choice], trace: Tracer, *, for_inductor: bool
) -> tuple[tuple[Choice, ...], tuple[Unit, ...]]:
    """A unit for each value that is packed or dropped; `trace` is a `tracer`.

    The choices come back too: a value whose hooks all leave it as it is stays, and so do its views.
    """
    views: dict[SavedValue, list[Choice]] = defaultdict(list)
    for choice in choices:
        if choice.view_of is not None:
            views[choice.view_of].append(choice)
    units: dict[SavedValue, Unit] = {}
    traced: list[Choice] = []
    for choice in choices:
        unit = Unit(choice.value, (), False, choice.value.fw_node) if choice.is_dropped else None
        if choice.packs and choice.view_of is None:
            choice, unit = _traced(choice, views[choice.value], trace, for_inductor=for_inductor)
        if unit is not None:
            units[choice.value] = unit
        traced.append(choice)
    stays = {c.value for c in traced if c.view_of is not None and c.view_of not in units}
    found = (c.kept(f"{c.reason}, which stays") if c.value in stays else c for c in traced)
    return tuple(found), tuple(units.values())


def _traced(choice: Choice, views: list[Choice], trace: Tracer, *, for_inductor: bool) -> tuple[Choice, Unit | None]:
    """The choice, with `KEEP` for hooks that change nothing, and its unit, if a hook is left."""
    source = choice.seen
    value = source.meta["val"]
    layout = None if for_inductor or not choice.packs else _layout_of(source)
    if layout is not None:
        with torch_values.tracing_on_fakes(value.fake_mode):
            value = fake_in(layout, value)
    packings: list[Packing] = []
    uses: list[tuple[Hook, tuple[Node, ...]]] = []
    reason = choice.reason
    for hook, readers in choice.uses:
        if hook is not KEEP:
            traced = trace(hook, value, choice.value)
            if traced.identity and hook is not UNCOPIED:
                hook, reason = KEEP, f"'{hook.name}' leaves it as it is"
            else:
                packings.append(Packing(hook, traced, readers))
        uses.append((hook, readers))
    choice = replace(choice, uses=tuple(uses), reason=reason)
    if not packings:
        return choice, None
    keep = any(hook is KEEP for hook, _ in uses)
    first, *others = packings
    first = replace(first, readers=(*first.readers, *(reader for c in views for reader in c.uses[0][1])))
    replays = {c.value.bw_node: c.replay for c in (choice, *views) if c.replay}
    return choice, Unit(choice.value, (first, *others), keep, source, tuple(c.value for c in views), replays, layout)


def _layout_of(source: Node) -> TracedLayout:
    """The layout to trace hooks with for `source`.

    A stride of 0 is certain if `expand` made it, or the caller did: Dynamo compares the strides of inputs.
    """
    *_, root = seen_from(source)
    certain = root.op == "placeholder" or not expanded_dimensions(root.meta["val"])
    return traced_layout(source.meta["val"], expanded_for_certain=certain)


def choose_positions(units: tuple[Unit, ...], fw: GraphModule, *, early: bool) -> tuple[Unit, ...]:
    """Choose the positions of packs for Inductor's kernels on CUDA; any other pack stands after the value's last use.

    Each scale is found right after the value is made, see `Packing`. If memory is tight at the value's last use, the
    whole pack stands there, in a kernel of its own. Otherwise Inductor fuses packing with the value's last reader. That
    is faster, but the reader's result cannot take the value's memory. Without `early` each pack stays at the value's
    last use: a budget has counted the bytes so, or the peak of the step is elsewhere.
    """
    movable = [u for u in units if not u.keep and len(u.packings) == 1 and u.saved.value.device.type == "cuda"]
    if not movable:
        return units
    alive = alive_bytes(fw, {u.saved.fw_node: _left_on_device(u.packings[0]) for u in movable})
    peak = max(alive.values())
    placed = {}
    for unit in movable:
        node, nbytes = unit.saved.fw_node, storage_bytes(unit.saved.value)
        large = nbytes >= _WORTH_A_KERNEL * peak
        tight = unit.source is node and large and peak - alive[last_use(node)] < nbytes
        if tight and early:
            log.debug("'%s' is packed early and alone: memory is tight at its last use", unit.saved.row.name)
        alone = tight and early and not fuses(producer(node))
        packing = replace(unit.packings[0], scale_at_definition=True, pack_at_definition=alone)
        placed[unit] = replace(unit, packings=(packing,))
    return tuple(placed.get(unit, unit) for unit in units)


def _left_on_device(packing: Packing) -> int:
    """Bytes that may stay on the device. How much `offload` sends is known later: here all stays, unless it may stall.

    If all counted as sent, memory would seem as tight in each layer as in the last.
    """
    on_device, on_host = packing.leaf_bytes
    settings = settings_of(packing.hook)
    return on_device if settings is not None and settings.max_stall_ms else on_device + on_host


def leaf_bytes_of(leaves: Iterable[Node]) -> int:
    """Bytes of the storages behind `leaves`, each once."""
    tensors = [leaf for leaf in leaves if isinstance(leaf.meta["val"], torch.Tensor)]
    return sum({storage_of(leaf): storage_bytes(leaf.meta["val"]) for leaf in tensors}.values())
