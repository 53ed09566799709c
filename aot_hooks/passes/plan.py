"""A `Plan` of `Decision`s, which reports print, and the choices that it comes from. Nothing here touches a graph.

Boundary + settings --decide--> tuple[Choice]  --(trace, inline)-->  Plan
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from cudagraph.graph.snapshots import SNAPSHOT

from ..errors import OptionError
from ..graphs.backward_reads import FoundRead
from ..graphs.layout import in_memory_order, is_contiguous
from ..graphs.nodes import (
    FACTOR,
    MADE_EARLY,
    PACKED,
    REGION,
    annotation,
    producer,
    region_body,
    region_output,
    seen_from,
    target_name,
    view_source,
)
from ..graphs.saved import Boundary, Kind, SavedTensor, SavedValue
from ..hook import KEEP, Hook
from ..library.bitmask import bitmask, bits_instead
from ..library.lossless import compare_hook
from ..offloading.hook import unrounded
from ..settings.setting import POLICY_KEEPS, Setting, out_of_scope, reason_to_keep, reason_to_pack
from ..steps.schedule import Transfer
from ..torch_private.values import expression, hint, same_size
from .live_bytes import LivePoint, joined_points

# operators that make or read the state of a random generator; registered late, so by name (2.11 to 2.15)
_RANDOM_STATE = frozenset(
    "prims.inductor_seeds.default prims.inductor_lookup_seed.default run_and_save_rng_state run_with_rng_state "
    "graphsafe_run_with_rng_state".split()
)
UNCOPIED = Hook("uncopied", lambda x: x, lambda x: x)
"""The hook of a choice whose value is a copy of a smaller tensor, which is saved as it is. Its decision is `KEEP`."""
_RETURNED = "the backward gives it back as it is"


Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Decision:
    """What happens to one saved tensor.

    Attributes:
        hook: how it is stored; `KEEP` leaves it.
        reason: why, in words.
        packed_bytes: bytes kept for it from forward to backward; 0 for a further view of a storage counted elsewhere.
        saved_bytes: bytes that would be kept without hooks; 0 likewise.
        settings: keys of the settings that chose for it: those around its readers in the backward.
        layout: shape, strides and dtype of the tensor that the hooks see, which may be a source of the saved one. Sizes
            that are symbolic have their example values. None where no graph was rewritten.
    """

    saved: SavedTensor
    hook: Hook
    reason: str
    packed_bytes: int
    saved_bytes: int
    settings: tuple[str, ...] = field(default=(), repr=False)
    layout: Layout | None = field(default=None, repr=False)


@dataclass(frozen=True)
class InStep:
    """What a plan knows of the other calls of a step, if a budget is for a step of many. Bytes are predicted.

    Attributes:
        calls: calls of the graph that hold saved tensors at the same time, the one that runs included.
        held_bytes: what each of them holds between its forward and its backward: what it saved, and its outputs.
        other_bytes: most that other graphs hold beside them, with gradients of backwards that have run and parameters
            that are gathered.
        beside_forward, beside_backward: the most of all these bytes beside a forward, and beside a backward. The
            live bytes of the plan include them.
        elsewhere_bytes: most that is alive in the step while another graph runs.
        tight_calls, tight_bytes: the first `tight_calls` of `calls` hold `tight_bytes`, the least, not `held_bytes`.
        stock_bytes: most that is alive in the step if no graph of it has hooks; 0: unknown, the plan is a cached one.
    """

    calls: int
    held_bytes: int
    other_bytes: int = 0
    beside_forward: int = 0
    beside_backward: int = 0
    elsewhere_bytes: int = 0
    tight_calls: int = 0
    tight_bytes: int = 0
    stock_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """All decisions for one pair of graphs, or for several, one after the other.

    Attributes:
        decisions: in the order of the forward's outputs.
        transfers: the copies of `offload` with their times, and the tensors that it leaves on the device.
        live_before, live_after: bytes alive along the step without and with the hooks, if `aot_hooks.plan` made it.
        before_ms, after_ms: predicted time of the step without and with the hooks; 0.0 without a prediction.
        own_stock_bytes, own_peak_bytes: the most of `live_before` and `live_after`, where a compilation without a
            budget has left them out.
        in_step: what is alive beside the graph in a step of many calls; None if it was planned as the whole step.
        recipe: of a budget's plan: what it chose, so that it is made again without a search, see planning/recipe.py.
        chunked: for each last layer, how it is computed in chunks of tokens, or why not; see passes/chunk.py.
        tiled: for each part of a layer that treats tokens alike, how it is computed in tiles, or why not; see
            passes/tile.py.
        sizes: the symbolic sizes that cross to the backward, in order.
    """

    decisions: tuple[Decision, ...]
    transfers: tuple[Transfer, ...] = ()
    live_before: tuple[LivePoint, ...] = field(default=(), compare=False, repr=False)
    live_after: tuple[LivePoint, ...] = field(default=(), compare=False, repr=False)
    before_ms: float = field(default=0.0, compare=False, repr=False)
    after_ms: float = field(default=0.0, compare=False, repr=False)
    own_stock_bytes: int = field(default=0, compare=False, repr=False)
    own_peak_bytes: int = field(default=0, compare=False, repr=False)
    in_step: InStep | None = field(default=None, compare=False, repr=False)
    recipe: Any = field(default=None, compare=False, repr=False)
    chunked: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    tiled: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    sizes: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def peak_bytes(self) -> int:
        """Most bytes that the step takes over what is alive before it, with the hooks, as predicted.

        Other graphs of the step are known to the plans of a budget, and to the plan that `aot_hooks.plan` makes.
        """
        elsewhere = 0 if self.in_step is None else self.in_step.elsewhere_bytes
        return max([elsewhere, self.own_peak_bytes, *(p.live_bytes for p in self.live_after)])

    @property
    def stock_peak_bytes(self) -> int | None:
        """`peak_bytes` of the step without hooks; None if that is unknown."""
        if self.in_step is not None:
            return self.in_step.stock_bytes or None
        return max([self.own_stock_bytes, *(p.live_bytes for p in self.live_before)]) or None

    @property
    def step_ratio(self) -> float:
        """Time of a step with the hooks over that without, as predicted; NaN without a prediction."""
        return self.after_ms / self.before_ms if self.before_ms else math.nan

    @property
    def saved_bytes(self) -> int:
        """Bytes saved for backward without hooks, each storage once; parameters, buffers and inputs count nothing."""
        return sum(d.saved_bytes for d in self.decisions)

    @property
    def packed_bytes(self) -> int:
        """Bytes saved for backward on the device as decided, each storage once."""
        return sum(d.packed_bytes for d in self.decisions)

    @property
    def host_bytes(self) -> int:
        """Bytes that are in host memory between forward and backward."""
        return sum(t.nbytes for t in self.transfers if t.placement.offloaded)


def joined(plans: Sequence[Plan]) -> Plan:
    """The plans of several graphs, which run one after the other, as one plan.

    Numbers of storages are shifted, so that no two graphs share one. Of plans that are each for a step of many calls,
    the one whose calls hold most stands for the step.
    """
    decisions: list[Decision] = []
    offset = 0
    for each in plans:
        decisions += [replace(d, saved=replace(d.saved, storage=d.saved.storage + offset)) for d in each.decisions]
        offset += len({d.saved.storage for d in each.decisions})
    in_step = [p.in_step for p in plans if p.in_step is not None]
    step = max(in_step, key=lambda each: each.calls * each.held_bytes, default=None)
    if step is not None:
        most = {name: max(getattr(each, name) for each in in_step) for name in ("elsewhere_bytes", "stock_bytes")}
        step = replace(step, **most)
    # bytes saved by the graphs before each
    saved, held = (
        [0, *itertools.accumulate(sizes)] for sizes in ((p.saved_bytes for p in plans), (p.packed_bytes for p in plans))
    )
    return Plan(
        tuple(decisions),
        tuple(replace(t, graph=i) for i, p in enumerate(plans) for t in p.transfers),
        live_before=joined_points([p.live_before for p in plans], apart=bool(in_step)),
        live_after=joined_points([p.live_after for p in plans], apart=bool(in_step)),
        before_ms=sum(p.before_ms for p in plans),
        after_ms=sum(p.after_ms for p in plans),
        own_stock_bytes=max((at + p.own_stock_bytes for at, p in zip(saved, plans, strict=False)), default=0),
        own_peak_bytes=max((at + p.own_peak_bytes for at, p in zip(held, plans, strict=False)), default=0),
        in_step=step,
        chunked=tuple(each for p in plans for each in p.chunked),
        tiled=tuple(each for p in plans for each in p.tiled),
    )


@dataclass(frozen=True)
class Choice:
    """What to do with one saved value."""

    value: SavedValue
    uses: tuple[tuple[Hook, tuple[Node, ...]], ...]  # each hook, with the backward nodes that read the value through it
    reason: str  # why, in words
    view_of: SavedValue | None = None  # the value that this one is made from again: as a view, or a copy by `replay`
    source: Node | None = None  # the forward node that is packed in its place; `replay` makes the value from it
    replay: tuple[Node, ...] = ()  # the nodes that make the value from `view_of` or `source`; they only move data
    settings: tuple[str, ...] = ()  # keys of the settings that chose
    answers: tuple[FoundRead, ...] = ()  # decisions of the backward to be made in the forward: a hook rounds the value
    is_answer: bool = False  # the value is such an outcome; without hooks it would not be saved
    was_declined: bool = False  # it stays because no hook that was chosen for it can take it
    is_dropped: bool = False  # nothing reads the value any more, its decisions are answered; it does not cross

    @property
    def seen(self) -> Node:
        """The forward node whose value the hooks see."""
        return self.value.fw_node if self.source is None else self.source

    @property
    def packs(self) -> bool:
        return any(hook is not KEEP for hook, _ in self.uses)

    @property
    def readers(self) -> tuple[Node, ...]:
        return tuple(reader for _, readers in self.uses for reader in readers)

    def kept(self, reason: str) -> Choice:
        """The same choice without a hook."""
        uses = ((KEEP, self.readers),)
        unpacked: dict[str, Any] = {"view_of": None, "source": None, "replay": (), "answers": (), "was_declined": False}
        return replace(self, uses=uses, reason=reason, **unpacked)


@dataclass(frozen=True)
class Unpacked:
    """Saved tensors that stay as they are, whatever the settings choose: those of some kinds, or all.

    Attributes:
        kinds: each with the reason.
        everything: the reason why all stay; "" if they don't.
    """

    kinds: tuple[tuple[Kind, str], ...] = ()
    everything: str = ""

    def why(self, saved: SavedTensor) -> str:
        """Why `saved` stays; "" if the settings decide."""
        return self.everything or dict(self.kinds).get(Kind.of(saved), "")


NOTHING = Unpacked()


def with_reasons(plan: Plan, unpacked: Unpacked) -> Plan:
    """The `plan` of a budget, with the reasons of `unpacked` appended to those of the floating-point tensors that it
    names: the budget rounds none of these."""
    rows = [(d, unpacked.why(d.saved) if d.saved.dtype.is_floating_point else "") for d in plan.decisions]
    return replace(plan, decisions=tuple(replace(d, reason=f"{d.reason}; {why}") if why else d for d, why in rows))


def _never_called(x: Any) -> Any:
    raise AssertionError(f"stands in plans only, but was called with {x!r}")


def stand_in(name: str) -> Hook:
    """A hook that never runs. Plans show it beside a value that is not saved."""
    return Hook(name, _never_called, _never_called)


def with_rows(plan: Plan, rows: Iterable[SavedTensor], hook: Hook, reason: str, instead: Collection[str] = ()) -> Plan:
    """`plan` with `rows` of values that are saved without hooks, and not with them: `hook` stands for the way.

    `instead`: the names of what is saved with hooks only, in their place.
    """
    offset = max((d.saved.storage for d in plan.decisions), default=-1) + 1
    decisions = [replace(d, saved_bytes=0) if d.saved.name in instead else d for d in plan.decisions]
    counted: set[int] = set()
    for row in rows:
        nbytes = 0 if row.storage in counted else row.nbytes
        counted.add(row.storage)
        decisions.append(Decision(replace(row, storage=row.storage + offset), hook, reason, 0, nbytes))
    return replace(plan, decisions=tuple(decisions))


def repeats_across_regions(graph: torch.fx.Graph) -> bool:
    """Whether two nodes of a joint graph are the same operator on the same values, but in different regions.

    The partitioner would merge them, and the merged node would read its inputs by the hook of one region only.
    """
    same: dict[Node, Node] = {}  # node -> the first that computes it
    first: dict[tuple[object, ...], Node] = {}
    for node in graph.nodes:
        same[node] = node
        if node.op == "call_function" and node.all_input_nodes:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), same.__getitem__)
            same[node] = first.setdefault((node.target, repr(args), repr(kwargs)), node)
            if annotation(same[node], REGION) != annotation(node, REGION):
                return True
    return False


def decide(
    boundary: Boundary,
    ambient: Setting | None,
    regions: Mapping[str, Setting],
    unpacked: Unpacked = NOTHING,
    *,
    for_inductor: bool,
) -> tuple[Choice, ...]:
    """Choose a hook for each reader of each saved value. What `unpacked` names stays as it is.

    A reader inside a region of the program follows the region's setting, any other the ambient one. One storage is
    packed once: of several views of it one is packed, and if one must stay all stay. A lossy hook takes a value only if
    the backward's reads of it are smooth, or decisions that answers.py can answer exactly.

    For Inductor, which compares real strides with those of the trace, a view is made by its strides. In a graph that
    runs operator by operator real strides may be others, so the operators that made the view run again.
    """
    choices = [_choose(value, ambient, regions) for value in boundary.tensors]
    if unpacked != NOTHING:
        choices = [c.kept(why) if c.packs and (why := unpacked.why(c.value.row)) else c for c in choices]
    by_storage: dict[int, list[Choice]] = defaultdict(list)
    for choice in choices:
        by_storage[choice.value.row.storage].append(choice)
    numbers = {expression(node.meta["val"]) for node, _ in boundary.symints}
    decided = {
        choice.value: choice
        for views in by_storage.values()
        for choice in _pack_once(views, numbers, by_strides=for_inductor)
    }
    return tuple(decided[choice.value] for choice in choices)


def _choose(value: SavedValue, ambient: Setting | None, regions: Mapping[str, Setting]) -> Choice:
    """The choice for one saved value, as if no other shared its storage."""
    readers = tuple(u for u in value.bw_node.users if u.op != "output")
    if reason := _why_unpackable(value, readers):
        return Choice(value, ((KEEP, readers),), reason)
    uses: dict[Hook, list[Node]] = {}
    reasons: dict[str, None] = {}
    settings: dict[str, None] = {}
    unrounded_hooks = set()
    was_declined = True
    for reader in readers:
        region = annotation(reader, REGION)
        if (setting := regions[region] if region is not None else ambient) is not None:
            settings[setting.key] = None
        hook, reason, declined = _hook_for(setting, value)
        if declined and hook is not KEEP:
            unrounded_hooks.add(hook)
        uses.setdefault(hook, []).append(reader)
        reasons[reason] = None
        was_declined = was_declined and declined
    if KEEP in uses:  # the value stays for one reader: sending it for others as it is gains nothing
        for hook in unrounded_hooks & uses.keys():
            uses[KEEP] += uses.pop(hook)
    returned = any(user.op == "output" for user in value.bw_node.users)
    lossy = {reader for hook, through in uses.items() if hook.lossy for reader in through}
    choice = Choice(
        value,
        tuple((hook, tuple(through)) for hook, through in uses.items()),
        "; ".join(reasons),
        settings=tuple(settings),
        answers=tuple(found for found in value.reads if found.read.answered and found.reader in lossy),
        was_declined=was_declined and uses.keys() == {KEEP} and not returned,
    )
    return choice.kept(_RETURNED) if returned and choice.packs else choice


def _why_unpackable(value: SavedValue, readers: Sequence[Node]) -> str:
    """Why `value` stays whatever the settings choose; "" if they decide."""
    node = value.fw_node
    if not readers:
        return _RETURNED if value.bw_node.users else "not read by the backward"
    if value.value.layout is not torch.strided or value.value.is_quantized:
        return f"layout {value.value.layout}"
    if any(target_name(n) in _RANDOM_STATE for n in (producer(node), *readers)):
        return "random state"
    if any(n.meta.get(MADE_EARLY) for n in (node, producer(node))):
        return "a gradient that the forward made, see docs/chunk.md"
    inside = region_output(node)  # not None, if a nested compiled region saved it for its own backward
    if node.meta.get(PACKED) or (inside is not None and inside.meta.get(PACKED)):
        return "packed in a nested compiled region"
    if node.meta.get(FACTOR):
        return "the backward multiplies another saved tensor by it"
    if node.meta.get(SNAPSHOT):
        return "an input of the graph, as it was before the graph writes to it, or the program does"
    if _read_beside(value):
        return "the backward reads the memory beside it, by as_strided"
    return ""


def _read_beside(value: SavedValue) -> bool:
    """Whether `as_strided` may reach memory of the value's storage that is not the value's: unpacking brings none."""
    x = value.value
    whole = same_size(x.untyped_storage().nbytes(), x.numel() * x.element_size())
    if whole and is_contiguous(in_memory_order(x, keep_rows=False)[0]):
        return False
    views = [value.bw_node]
    for node in views:  # grows
        views += [user for user in node.users if view_source(user) is node]
    bodies = [body for node in views for user in node.users if (body := region_body(user)) is not None]
    readers = [user for node in views for user in node.users] + [node for body in bodies for node in body.graph.nodes]
    return any("as_strided" in target_name(reader) for reader in readers)


def _hook_for(setting: Setting | None, value: SavedValue) -> tuple[Hook, str, bool]:
    """The hook for `value` under `setting`, the reason, and whether the hook that `setting` chose has declined.

    A hook that declines gives way to an exact form of itself where there is one, else to `KEEP`.
    """
    if setting is None:
        return KEEP, "no hook covers it", False
    if out := out_of_scope(value.row, setting.scope):
        return KEEP, out, False
    hook = setting.choose(value.row)
    if hook is KEEP:
        return KEEP, reason_to_keep(setting.rule, value.row) or POLICY_KEEPS, False
    # rounding needs a number of the dtype for each outcome of a decision's tests
    unanswered = (f.read.why() for f in value.reads if f.tests and compare_hook(f.tests, value.row.dtype) is KEEP)
    if declined := hook.why_not(value.row) or (next(unanswered, None) if hook.lossy else None):
        exact = unrounded(hook) or bits_instead(hook, value.row)
        if exact is None or exact.why_not(value.row):
            return KEEP, declined, True
        return exact, f"{declined}; {'a bit each' if exact is bitmask() else 'sent as it is'}", True
    if hook.eager:
        raise OptionError(
            f"hook '{hook.name}' is to run eagerly, but a region inside a compiled function or a policy chose "
            f"it for saved {value.row.describe()}, where only traced hooks can go; put the context around the "
            "compiled call"
        )
    why = reason_to_pack(setting.rule, value.row) or f"scope '{setting.scope}'"
    decisions = [found.read for found in value.reads if found.read.kind == "decision"]
    if decisions and hook.is_own and not hook.lossy:  # a user's own hook, which may round all the same
        why += f"; the backward decides by what unpack gives: {decisions[0]}"
    return hook, why, False


def _pack_once(views: list[Choice], numbers: set[str], *, by_strides: bool) -> list[Choice]:
    """Of several saved views of one storage, pack one that covers the others, or none. The symbolic `numbers` cross."""
    if len(views) == 1:
        return views
    kept = next((c for c in views if not c.packs), None)
    if kept is not None:
        reason = f"shares its storage with '{kept.value.row.name}', which stays"
        return [c.kept(reason) if c.packs else c for c in views]
    hooks = {hook for c in views for hook, _ in c.uses}
    exact = next((other for other in map(unrounded, hooks) if other in hooks), None)
    if len(hooks) == 2 and exact is not None:  # one view must not be rounded, so none is
        views, hooks = [replace(c, uses=((exact, c.readers),), answers=()) for c in views], {exact}
    if len(hooks) != 1:
        return views  # different hooks for different readers or views: each its own packing
    head = next((c for c in views if all(_covers(c.value.value, o.value.value, numbers) for o in views)), None)
    if not by_strides:
        if (packed := _packed_for_all(views, head or views[0])) is not None:
            return packed
        if head is None:
            return views
        reason = "shares its storage with '{}', which it is no view of by operators that can run again"
        return [c.kept(reason.format((views[1] if c is head else head).value.row.name)) for c in views]
    if head is None:
        return views
    hook = head.uses[0][0]
    reason = f"a view of '{head.value.row.name}'"
    return [c if c is head else replace(c, view_of=head.value, uses=((hook, c.readers),), reason=reason) for c in views]


def _packed_for_all(views: list[Choice], like: Choice) -> list[Choice] | None:
    """`views` with one packed, from which operators of the forward make the others again; None if there is none.

    If no saved view is the source of the others, the nearest source of all is packed, unless it has more elements.
    """
    sources = [seen_from(c.value.fw_node) for c in views]
    roots = [node for node in sources[0] if all(node in each for each in sources) and _as_large_as_one(node, views)]
    if not roots:
        return None
    # hooks have a scale for each row: of several sources the nearest whose rows are as long as those of `like`
    length = _row_length(like.value.fw_node)
    root = next((node for node in roots if _row_length(node) >= length), roots[0])
    head = next((c for c in views if c.value.fw_node is root), None)
    if head is None:
        head = next(c for c in views if same_size(c.value.value.numel(), root.meta["val"].numel()))
    hook, reason = head.uses[0][0], f"a view of '{head.value.row.name}'"
    packed = []
    for c, found in zip(views, sources, strict=True):
        replay = found[root]
        if c is not head:
            c = replace(c, view_of=head.value, uses=((hook, c.readers),), replay=replay, reason=reason)
        elif replay:
            c = replace(c, source=root, replay=replay, reason=f"{c.reason}; packed as '{root.name}', which it views")
        packed.append(c)
    return packed


def _as_large_as_one(source: Node, views: list[Choice]) -> bool:
    """Whether `source` is of the kind of all `views`, and has as many elements as one of them."""
    x: torch.Tensor = source.meta["val"]
    values = [c.value.value for c in views]
    kinds = {(v.dtype, v.is_conj(), v.is_neg()) for v in (x, *values)}
    return len(kinds) == 1 and any(v is x or same_size(v.numel(), x.numel()) for v in values)


def _row_length(node: Node) -> int:
    x: torch.Tensor = node.meta["val"]
    return hint(x.shape[-1]) if x.dim() else 0


def same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two views of one storage are the same for certain; leaves no guard."""
    one, other = ((*x.shape, *x.stride(), x.storage_offset()) for x in (a, b))
    return a is b or (a.dim() == b.dim() and all(map(same_size, one, other)))


def _covers(a: torch.Tensor, b: torch.Tensor, numbers: set[str]) -> bool:
    """Whether `b` is a view of exactly the memory of `a`, for certain, that can be made from `a` and `numbers`."""
    if (a.dtype, a.is_conj(), a.is_neg()) != (b.dtype, b.is_conj(), b.is_neg()):
        return False
    if same_view(a, b):
        return True
    if not is_contiguous(in_memory_order(a, keep_rows=False)[0]):
        return False  # not dense: unpacking it does not bring its gaps back
    if has_symbols(a) or has_symbols(b):  # all of it, in another shape
        same = same_size(a.storage_offset(), b.storage_offset()) and same_size(a.numel(), b.numel())
        return same and _symbols(*b.shape) <= numbers and is_contiguous(in_memory_order(b, keep_rows=False)[0])
    low = b.storage_offset() - a.storage_offset()
    high = low + sum((n - 1) * s for n, s in zip(b.shape, b.stride(), strict=True))
    return b.numel() > 0 and low >= 0 and high < a.numel()


def has_symbols(x: torch.Tensor) -> bool:
    """Whether a size, a stride or the offset of `x` is symbolic."""
    return bool(_symbols(*x.shape, *x.stride(), x.storage_offset()))


def _symbols(*sizes: Any) -> set[str]:
    """The expressions of those of `sizes` that are symbolic."""
    return {expression(n) for n in sizes if isinstance(n, torch.SymInt)}
