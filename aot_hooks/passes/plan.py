"""What was decided: a `Plan` of `Decision`s, the one thing that reports print.

      Boundary + settings --decide--> tuple[Choice]  --(trace, inline)-->  Plan

*Decide, then rewrite*: nothing in this file touches a graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from ..errors import OptionError
from ..graphs.backward_reads import FoundRead
from ..graphs.nodes import producer, region_output
from ..graphs.saved import Boundary, SavedTensor, SavedValue
from ..hook import KEEP, Hook
from ..library.lossless import compare_hook
from ..offloading.schedule import Transfer
from ..settings.setting import Setting, out_of_scope
from .live_bytes import LivePoint, join
from .snapshots import SNAPSHOT

__all__ = ["Choice", "Decision", "Plan", "decide", "joined", "region_of", "repeats_across_regions"]

_RANDOM_STATE = ("inductor_seeds", "inductor_lookup_seed", "rng_state")
REGION = "aot_hooks"  # the key under meta["custom"] by which nodes of a region are known


@dataclass(frozen=True)
class Decision:
    """What happens to one saved tensor.

    Attributes:
        saved: the tensor.
        hook: how it is stored; `KEEP` leaves it.
        reason: why, in words.
        packed_bytes: bytes kept for it from forward to backward; 0 for a further view of a storage that is counted at
            another row.
        saved_bytes: bytes that would be kept without hooks; 0 likewise.
        settings: keys of the settings that were asked about it, those that the backward's readers of it are under.
    """

    saved: SavedTensor
    hook: Hook
    reason: str
    packed_bytes: int
    saved_bytes: int
    settings: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Plan:
    """All decisions for one pair of graphs, or for several, one after the other.

    Attributes:
        decisions: in the order of the forward's outputs.
        transfers: what `offload` copies to the host and back and when, and what it leaves on the device.
        live_before, live_after: bytes alive along the step without and with the hooks; only `aot_hooks.plan` finds
            them, a compilation does not.
    """

    decisions: tuple[Decision, ...]
    transfers: tuple[Transfer, ...] = ()
    live_before: tuple[LivePoint, ...] = field(default=(), compare=False, repr=False)
    live_after: tuple[LivePoint, ...] = field(default=(), compare=False, repr=False)

    @property
    def saved_bytes(self) -> int:
        """Bytes saved for backward without hooks, each storage once; parameters, buffers and graph inputs, which are
        alive anyway, count nothing."""
        return sum(d.saved_bytes for d in self.decisions)

    @property
    def packed_bytes(self) -> int:
        """Bytes saved for backward on the device as decided, each storage once."""
        return sum(d.packed_bytes for d in self.decisions)

    @property
    def host_bytes(self) -> int:
        """Bytes that wait in host memory."""
        return sum(t.nbytes for t in self.transfers if t.placement.offloaded)


def joined(plans: Sequence[Plan]) -> Plan:
    """Several graphs as one plan; storages are numbered through."""
    decisions: list[Decision] = []
    offset = 0
    for each in plans:
        for d in each.decisions:
            row = replace(d.saved, storage=d.saved.storage + offset)
            decisions.append(replace(d, saved=row))
        offset += len({d.saved.storage for d in each.decisions})
    return Plan(
        tuple(decisions),
        tuple(replace(t, graph=i) for i, p in enumerate(plans) for t in p.transfers),
        live_before=join([p.live_before for p in plans]),
        live_after=join([p.live_after for p in plans]),
    )


@dataclass
class Choice:
    """What to do with one saved value.

    Attributes:
        uses: for each hook, the backward nodes that read through it.
        reason: why, in words.
        view_of: another value that brings this one back, by being of the same storage or through `replay`.
        source: what is packed in its place, a node of the forward from which `replay` makes it.
        replay: the nodes that make it from `view_of` or `source`; they only move data.
        settings: keys of the settings that were asked.
        answers: the decisions of the backward that need an exact outcome, because `uses` rounds the value.
        is_answer: the value is such an outcome; without hooks it would not be saved.
        is_dropped: nothing reads the value any more, because its decisions are answered; it does not cross.
    """

    value: SavedValue
    uses: list[tuple[Hook, list[Node]]]
    reason: str
    view_of: SavedValue | None = None
    source: Node | None = None
    replay: tuple[Node, ...] = ()
    settings: tuple[str, ...] = ()
    answers: tuple[FoundRead, ...] = ()
    is_answer: bool = False
    is_dropped: bool = False
    had_readers: bool = field(init=False)

    def __post_init__(self) -> None:
        self.had_readers = any(readers for _, readers in self.uses)

    @property
    def packs(self) -> bool:
        return any(hook is not KEEP for hook, _ in self.uses)


def region_of(node: Node) -> str | None:
    """The key of the region that the operator of `node` was called in; backward nodes have their forward's."""
    custom = node.meta.get("custom")
    return custom.get(REGION) if isinstance(custom, dict) else None


def repeats_across_regions(graph: torch.fx.Graph) -> bool:
    """Whether two nodes of a joint graph are the same operator on the same values, but in different regions.

    As one, which the partitioner makes of them, they would read what they both read by the hook of one of them.
    """
    same: dict[Node, Node] = {}  # node -> the first that computes it
    first: dict[tuple[object, ...], Node] = {}
    for node in graph.nodes:
        same[node] = node
        if node.op == "call_function" and node.all_input_nodes:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), same.__getitem__)
            same[node] = first.setdefault((node.target, repr(args), repr(kwargs)), node)
            if region_of(same[node]) != region_of(node):
                return True
    return False


def decide(boundary: Boundary, ambient: Setting | None, regions: Mapping[str, Setting]) -> list[Choice]:
    """Which hook for which reader of which saved value.

    A reader inside a region of the program follows the region's setting, any other the ambient one. One storage is
    packed once: of several views of it one is packed, and if one must stay all stay. A lossy hook takes a value only if
    the backward's reads of it are smooth, or decisions that answers.py can answer exactly.
    """
    choices = [_choose(value, ambient, regions) for value in boundary.tensors]
    by_storage: dict[int, list[Choice]] = defaultdict(list)
    for choice in choices:
        by_storage[choice.value.row.storage].append(choice)
    for group in by_storage.values():
        if len(group) > 1:
            _one_packing(group)
    return choices


def _choose(value: SavedValue, ambient: Setting | None, regions: Mapping[str, Setting]) -> Choice:
    readers = [u for u in value.bw_node.users if u.op != "output"]
    keep = Choice(value, [(KEEP, readers)], "")
    if not readers:
        keep.reason = "the backward gives it back as it is" if value.bw_node.users else "not read by the backward"
        return keep
    if value.value.layout is not torch.strided or value.value.is_quantized:
        keep.reason = f"layout {value.value.layout}"
        return keep
    ops = [str(node.target) for node in (producer(value.fw_node), *readers)]
    if any(name in op for name in _RANDOM_STATE for op in ops):
        keep.reason = "random state"
        return keep
    if value.fw_node.meta.get("aot_hooks_packed") or _packed_in_a_nested_region(value.fw_node):
        keep.reason = "packed in a nested compiled region"
        return keep
    if value.fw_node.meta.get(SNAPSHOT):
        keep.reason = "an input of the graph, as it was before the graph writes to it"
        return keep
    uses: dict[Hook, list[Node]] = {}
    reasons: list[str] = []
    settings: dict[str, None] = {}
    for reader in readers:
        region = region_of(reader)
        setting = regions[region] if region is not None else ambient
        hook, reason = KEEP, "no hook covers it"
        if setting is not None:
            settings[setting.key] = None
            out = out_of_scope(value.row, setting.scope)
            hook = KEEP if out else setting.choose(value.row)
            reason = out or (setting.why_kept(value.row) if hook is KEEP else setting.why_packed(value.row))
            declined = hook.why_not(value.row) or _no_answer(hook, value)
            if declined:
                hook, reason = KEEP, declined
            elif not hook.lossy and hook.is_own:
                reason += _warning(value)
            if hook.eager:
                raise OptionError(
                    f"hook '{hook.name}' is to run eagerly, but a region inside a compiled function or a policy chose "
                    f"it for saved {value.row.describe()}, where only traced hooks can go; put the context around the "
                    "compiled call"
                )
        uses.setdefault(hook, []).append(reader)
        reasons.append(reason)
    keep.settings = tuple(settings)
    if any(u.op == "output" for u in value.bw_node.users) and any(h is not KEEP for h in uses):
        keep.reason = "the backward gives it back as it is"
        return keep
    lossy = {reader for hook, rs in uses.items() if hook.lossy for reader in rs}
    answers = tuple(found for found in value.reads if found.read.answered and found.reader in lossy)
    reason = "; ".join(dict.fromkeys(reasons))
    return Choice(value, list(uses.items()), reason, settings=tuple(settings), answers=answers)


def _no_answer(hook: Hook, value: SavedValue) -> str | None:
    """Why the decisions that are read from `value` cannot be stored as outcomes of tests, if lossy `hook` takes it."""
    for found in value.reads if hook.lossy else ():
        if found.tests and compare_hook(found.tests, value.row.dtype) is KEEP:
            return found.read.why()
    return None


def _warning(value: SavedValue) -> str:
    """What to say of a user's own hook that may round what the backward decides by."""
    reads = [found.read for found in value.reads if found.read.kind == "decision"]
    return f"; the backward decides by what unpack gives: {reads[0]}" if reads else ""


def _packed_in_a_nested_region(node: Node) -> bool:
    """Whether `node` is what a nested compiled region (`invoke_subgraph`) saved for its own backward, packed there."""
    out = region_output(node)
    return out is not None and bool(out.meta.get("aot_hooks_packed"))


def _one_packing(group: list[Choice]) -> None:
    """Of several saved views of one storage, pack one that covers the others, or none."""
    kept = [c for c in group if not c.packs]
    if kept:
        for choice in group:
            if choice.packs:
                choice.reason = f"shares its storage with '{kept[0].value.row.name}', which stays"
                choice.uses = [(KEEP, [r for _, readers in choice.uses for r in readers])]
        return
    if any(len(c.uses) != 1 for c in group):
        return  # different hooks for different readers: each its own packing
    head = next((c for c in group if all(_covers(c.value.value, o.value.value) for o in group)), None)
    if head is None:
        return
    for choice in group:
        if choice is not head:
            choice.view_of = head.value
            choice.uses = [(head.uses[0][0], choice.uses[0][1])]
            choice.reason = f"a view of '{head.value.row.name}'"


def _covers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `b` is a view of exactly the memory of `a`, for certain."""
    if (a.dtype, a.is_conj(), a.is_neg()) != (b.dtype, b.is_conj(), b.is_neg()):
        return False
    if a is b or (a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()):
        return True
    numbers = [*a.shape, *a.stride(), a.storage_offset(), *b.shape, *b.stride(), b.storage_offset()]
    if not all(isinstance(n, int) for n in numbers):
        return False
    spread = 1
    for stride, size in sorted(zip(a.stride(), a.shape, strict=True)):
        if size != 1:
            if stride != spread:
                return False  # not dense: unpacking it does not bring its gaps back
            spread *= size
    low = b.storage_offset() - a.storage_offset()
    high = low + sum((n - 1) * s for n, s in zip(b.shape, b.stride(), strict=True))
    return b.numel() > 0 and low >= 0 and high < a.numel()
