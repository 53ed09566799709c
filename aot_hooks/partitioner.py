"""The partition functions that AOTAutograd calls with a joint graph.

joint --in_parts--> the loss in chunks and layers in tiles, if the options say so
        |
        |-- PlanningPartition --+-- no budget: torch's partition, mended, then rewrite(fw, bw) --> fw, bw
        |                       '-- a budget: the same for each choice that it tries ---------> fw, bw of the best
        |
        '-- partition_without_hooks: torch's partition or the user's, mended ----------------> fw, bw
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from cudagraph.placeholder import results_of

from . import unused
from .cache.key import PACKAGE_DIGEST, nodes_of
from .cache.lookup import without_collections
from .errors import OptionError
from .graphs.nodes import calls_graphs, crosses_twice, donates
from .graphs.repeats import draws
from .graphs.roofline import node_ms, predicted_ms
from .graphs.saved import SavedTensor
from .graphs.speeds import measured_rates
from .hook import KEEP, Hook
from .offloading import transfers
from .offloading.placement import decide_at_run_time
from .options import Options
from .passes.casts import recast, with_casts
from .passes.chunk import Chunked, chunked, logits_at_peak
from .passes.early import compute_early
from .passes.edits import finished, log
from .passes.live_bytes import LivePoint, live_bytes
from .passes.partition import parameters_of, partitioned, state_of
from .passes.permutations import gather_gradients
from .passes.plan import NOTHING, Plan, Unpacked, repeats_across_regions, with_reasons
from .passes.regions import RegionRow
from .passes.results import save_results
from .passes.rewrite import RewriteOptions, form_of, rewrite
from .passes.row_scales import scale_gradients
from .passes.shared_heads import share_heads
from .passes.tile import Tiled, tiled
from .passes.units import Tracer, tracer
from .planning.assignment import Assignment
from .planning.chunks import CHUNK, TILE, with_chunks
from .planning.kernels import split_and_hold
from .planning.options import Graphs, Joint
from .planning.planner import Planner, is_budget
from .planning.trials import Planned
from .settings.names import carry_names, name_given
from .settings.setting import Setting, SettingsOfGraph
from .torch_private import aot, inductor
from .torch_private.values import expression, pytree

_Pair = tuple[GraphModule, GraphModule]  # forward and backward


class _Stock(NamedTuple):
    """A graph as torch partitions it, and what is saved in another way before any hook chooses."""

    live: tuple[LivePoint, ...]
    ms: float
    casts: tuple[SavedTensor, ...]  # values that are cast again in the backward, see passes/casts.py
    donates: bool  # whether the backward may reuse the memory of saved tensors


@dataclass(frozen=True)
class Shared:
    """What several plans of a graph share, so that it is made once.

    Attributes:
        stocks, made: by joint graph; a budget also plans one with its loss in chunks. `made`: see `Joint`.
        forms: joint graphs in chunks and tiles, see `with_chunks`.
    """

    fused: bool
    stocks: dict[GraphModule, _Stock] = dataclasses.field(default_factory=dict)
    made: dict[GraphModule, dict[Any, Graphs]] = dataclasses.field(default_factory=lambda: defaultdict(dict))
    forms: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def trace(self) -> Tracer:
        return tracer(self.fused)


def _call(function: Callable[[], _Pair]) -> _Pair:
    return function()


# Calls a function with memory for the frames of all that it calls. CPython has frames in chunks of 16 KB: at the depth
# where one ends, each call maps a new chunk and unmaps it again. A pass over a graph may be at that depth, and had 3
# page faults a node: a fifth of the time of planning 80 layers. A frame of 512 KiB takes a chunk of 1 MiB.
_with_room: Callable[[Callable[[], _Pair]], _Pair] = types.FunctionType(
    _call.__code__.replace(co_stacksize=(1 << 16) + 1), {}
)


@dataclass(frozen=True, eq=False)
class PlanningPartition:
    """A partition function for AOTAutograd: torch's min-cut partition, then the rewrite.

    Attributes:
        hooks: the settings in force.
        plans: the plan of each graph is appended.
        paths: modules by Dynamo's names, see `modules.roots`.
        donated: for each graph, nested regions first, whether the backward may reuse the memory of saved tensors when
            there are no hooks.
        parameters: their positions among the inputs of Dynamo's graph.
        live: plans have the bytes alive along both graphs, before and after the rewrite.
        at_run_time: the host runs each kernel, so `offload` decides then what it sends; a budget has decided already.
        unpacked: saved tensors that stay as they are; a budget rounds none of them.
        twin_of: save what a graph with hooks of these settings saves, to compare with it.
        shared: with plans of other budgets for the same graph; None: with none.
    """

    hooks: SettingsOfGraph
    options: Options
    plans: list[Plan]
    paths: Mapping[str, str]
    donated: list[bool]
    _: dataclasses.KW_ONLY
    parameters: Collection[int]
    live: bool
    at_run_time: bool = False
    unpacked: Unpacked = NOTHING
    twin_of: SettingsOfGraph | None = None
    shared: Shared | None = None

    def __call__(self, joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> _Pair:
        """The forward and the backward of `joint`, with hooks; arguments as of torch's partition functions."""
        carry_names(joint.graph)
        keeps_repeats = bool(self.hooks.regions) and repeats_across_regions(joint.graph)
        nested = is_nested(joint_inputs)
        notes: list[RegionRow] = []
        hooks = self.twin_of or self.hooks
        if any(setting.rule is not KEEP for setting in hooks.settings):  # else all is as torch has it
            rounding = may_round(hooks)
            gather_gradients(joint, sums=rounding)
            if rounding:
                share_heads(joint, fused=self.options.inner == "inductor")
                free = is_budget(hooks.setting) or self.options.recompute_pointwise
                scale_gradients(joint, saves_input=not free)
        if not nested:
            joint = in_parts(self.options, joint, notes)
        static = aot.static_inputs(joint, kwargs.get("static_lifetime_input_indices") or ())
        if nested and any(s.scope == "no_static" for s in self.hooks.settings):
            # torch doesn't say which inputs are parameters, and the graph around it decides
            static = tuple(range(len(joint.graph.find_nodes(op="placeholder"))))
        shared = self.shared or Shared(self.options.inner == "inductor")
        number = len(self.donated)
        one = _Partitioning(self, joint, joint_inputs, kwargs, nested, keeps_repeats, static, notes, shared, number)
        return _with_room(one.within_budget if one.has_budget else one.with_hooks)


@dataclass(frozen=True, eq=False)
class _Partitioning:
    """One joint graph that `PlanningPartition` was called with, on its way to a forward and a backward with hooks.

    Attributes:
        asked: what is the same for all graphs of one compilation.
        joint: in chunks and tiles, if the options say so. A budget may take another one with more of them.
        joint_inputs, kwargs: of the call.
        nested: `joint` is a nested compiled region, which is partitioned before the graph around it.
        keeps_repeats: regions compute the same thing under different settings, so nothing that repeats is merged.
        static: the inputs that are parameters or buffers, by index.
        notes: what was done with the last layers and with parts of layers, or why not.
        number: the position of this graph in `asked.donated`.
    """

    asked: PlanningPartition
    joint: GraphModule
    joint_inputs: Any
    kwargs: Mapping[str, Any]
    nested: bool
    keeps_repeats: bool
    static: tuple[int, ...]
    notes: list[RegionRow]
    shared: Shared
    number: int

    @property
    def hooks(self) -> SettingsOfGraph:
        return self.asked.hooks

    @property
    def fused(self) -> bool:
        return self.asked.options.inner == "inductor"

    @property
    def num_fwd_outputs(self) -> int:
        return int(self.kwargs["num_fwd_outputs"])

    @property
    def outputs(self) -> dict[str, Any]:
        """Arguments by which passes read what crosses."""
        return {"num_fwd_outputs": self.num_fwd_outputs, "roots": self.asked.paths}

    @property
    def packs(self) -> bool:
        return any(setting.rule is not KEEP for setting in self.hooks.settings)

    @property
    def has_budget(self) -> bool:
        """A nested region has none: its memory is that of the graph around it."""
        return is_budget(self.hooks.setting) and not self.nested

    @functools.cached_property
    def state(self) -> list[int]:
        """Buffers among the inputs, by index, where the backward computes again what reads them.

        The program may write to a buffer between forward and backward. A nested region does not know which of its
        inputs are buffers.
        """
        if not (self.asked.options.recompute_pointwise or is_budget(self.hooks.setting)):
            return []
        return state_of(self.joint, () if self.nested else self.static, self.asked.parameters)

    # --- both ways to hooks -------------------------------------------------------------------------------------------

    def split(self, gm: GraphModule) -> _Pair:
        """Partitions `gm`, a joint graph, with no hooks so far.

        A budget splits a graph once for each set of values that it computes again. The first split has no such values,
        so what torch would do is read off it, to compare with.
        """
        is_first = gm not in self.shared.stocks
        merges = not self.keeps_repeats and is_first  # the first split has merged what repeats in `gm` itself
        min_cut = partial(aot.min_cut_partition, gm, self.joint_inputs, draws, merge_repeats=merges, **self.kwargs)
        fw, bw = partitioned(gm, min_cut, self.num_fwd_outputs, self.state)
        if self.has_budget:  # a sum takes no more bytes than its terms, and less time in the backward
            save_results(fw, bw, **self.outputs)
        donating = donates(fw, bw, self.num_fwd_outputs)  # as it is without hooks
        if self.fused and self.packs:
            compute_early(fw, self.num_fwd_outputs)
        live: tuple[LivePoint, ...] = ()
        ms = 0.0
        if is_first and (self.asked.live or self.has_budget or self.asked.twin_of is None):
            live = live_bytes(fw, bw, fused=self.fused, **self.outputs)
        if is_first and self.asked.twin_of is None:
            ms = predicted_ms(fw, bw, self.fused, launched=self.asked.at_run_time)
        casts = self._recast(fw, bw)
        self.shared.stocks.setdefault(gm, _Stock(live, ms, casts, donating))
        return fw, bw

    def _recast(self, fw: GraphModule, bw: GraphModule) -> tuple[SavedTensor, ...]:
        """Has the backward cast parameters again, which are in memory anyway; returns the casts that were saved."""
        if not self.packs or self.nested:
            return ()
        alive = parameters_of(fw, self.static, self.asked.parameters)
        wanted = self.hooks.allows_recast
        return recast(fw, bw, parameters=alive, is_wanted=wanted, fused=self.fused, **self.outputs)

    def rewritten(
        self,
        fw: GraphModule,
        bw: GraphModule,
        setting: Setting | None,
        trace: Tracer | None = None,
        packs_early: bool = True,
    ) -> Plan:
        """Puts hooks into two graphs, in place, and notes whether the backward may still reuse what is saved."""
        asked = self.asked
        options = RewriteOptions(
            for_inductor=self.fused,
            trace=trace,
            packs_early=packs_early,
            at_run_time=asked.at_run_time,
            unpacked=asked.unpacked if trace is None else NOTHING,  # a budget has heeded it
            as_if=None if asked.twin_of is None else form_of(asked.twin_of),
        )
        settings = SettingsOfGraph(setting, self.hooks.regions)
        parameters = () if self.nested else parameters_of(fw, self.static, asked.parameters)
        plan = rewrite(fw, bw, settings, options, static_inputs=self.static, parameters=parameters, **self.outputs)
        if len(asked.donated) == self.number:
            asked.donated.append(self.shared.stocks[self.joint].donates)
        keeps_memory = calls_graphs(bw) or crosses_twice(fw, self.num_fwd_outputs)
        asked.donated[self.number] = asked.donated[self.number] and not keeps_memory
        return plan

    def _finished(self, fw: GraphModule, bw: GraphModule, plan: Plan) -> _Pair:
        saved = [n.meta.get("val") for n in results_of(fw.graph)[self.num_fwd_outputs :] if isinstance(n, Node)]
        sizes = tuple(expression(value) for value in saved if isinstance(value, torch.SymInt))
        self.asked.plans.append(dataclasses.replace(plan, sizes=sizes))
        if self.asked.at_run_time and plan.transfers:
            decide_at_run_time(fw, bw, self.num_fwd_outputs)
        return finished(fw, bw)

    # --- hooks that a setting names -----------------------------------------------------------------------------------

    def with_hooks(self) -> _Pair:
        """The graphs with the hooks that settings choose tensor by tensor, or with none."""
        fw, bw = self.split(self.joint)
        plan = with_casts(self.rewritten(fw, bw, self.hooks.setting), self.shared.stocks[self.joint].casts)
        if self.fused and self.asked.options.recompute_pointwise and self.hooks.settings:
            split_and_hold(fw, bw, **self.outputs)
        if self.asked.live or self.asked.twin_of is None:
            plan = self._compared(fw, bw, plan)
        return self._finished(fw, bw, dataclasses.replace(plan, **_rows(self.notes)))

    def _compared(self, fw: GraphModule, bw: GraphModule, plan: Plan) -> Plan:
        """`plan` with time and memory of the graphs, and of those without hooks: what the hooks cost and save."""
        launched, live_before = self.asked.at_run_time, self.shared.stocks[self.joint].live
        after_ms = predicted_ms(fw, bw, self.fused, transfers.COPIES, plan.transfers, launched=launched)
        after = live_bytes(fw, bw, fused=self.fused, **self.outputs)
        plan = dataclasses.replace(plan, before_ms=self.shared.stocks[self.joint].ms, after_ms=after_ms)
        if not self.asked.live:
            most = [max(point.live_bytes for point in points) for points in (live_before, after)]
            return dataclasses.replace(plan, own_stock_bytes=most[0], own_peak_bytes=most[1])
        if not self.asked.options.chunk and not self.nested:
            self.notes.extend(logits_at_peak(self.joint, live_before))
        return dataclasses.replace(plan, live_before=live_before, live_after=after)

    # --- hooks that a budget chooses ----------------------------------------------------------------------------------

    def within_budget(self) -> _Pair:
        """The graphs of the best plan within the budget, in chunks and tiles if that is better."""
        setting: Any = self.hooks.setting
        with without_collections():
            chosen = [name for name in (CHUNK, TILE) if getattr(self.asked.options, name)]
            ways = self.planned, self.form_without_hooks, self.ms_of_nodes
            fw, bw, plan = with_chunks(setting.rule, self.joint, *ways, chosen, self.shared.forms)
            plan = dataclasses.replace(plan, **_rows([*self.notes, *plan.chunked, *plan.tiled]))
        return self._finished(fw, bw, plan)

    def planned(
        self, gm: GraphModule, lenient: bool, follows: bool | None = None, has_tighter: bool = False
    ) -> Planned:
        """`gm`, one form of the joint graph, as the budget plans it; arguments as of `partition_within`."""
        found = Planner.partition(self.joint_of(gm), lenient=lenient, follows=follows, has_tighter=has_tighter)
        plan = with_casts(with_reasons(found.plan, self.asked.unpacked), self.shared.stocks[gm].casts)
        return found._replace(plan=plan)

    def joint_of(self, gm: GraphModule) -> Joint:
        """What the budget plans: `gm`, with the ways to split it and to put hooks into it.

        Graphs without hooks are those of the joint graph as it came, so that all its forms are compared with the same.
        """
        setting: Any = self.hooks.setting
        parts = {
            "fused": self.fused,
            "launched": self.asked.at_run_time,
            "unpacked": self.asked.unpacked,
            "trace": self.shared.trace,
            "static_inputs": self.static,
            **self.outputs,
        }
        return Joint(
            gm, partial(self.split, gm), self.without_hooks, self.rewritten, setting, parts, self.shared.made[gm]
        )

    def without_hooks(self) -> tuple[tuple[LivePoint, ...], float]:
        """Live bytes and milliseconds of the joint graph as it came."""
        stock = self.shared.stocks[self.joint]
        return stock.live, stock.ms

    def form_without_hooks(self, gm: GraphModule) -> tuple[LivePoint, ...]:
        """The live bytes of `gm`, one form of the joint graph. They tell what chunks and tiles gain."""
        self.joint_of(gm).graphs()
        return self.shared.stocks[gm].live

    def ms_of_nodes(self, gm: GraphModule) -> float:
        """The time of the nodes of `gm`, one form of the joint graph. It tells what chunks and tiles cost."""
        return sum(node_ms(gm, measured_rates, self.fused, fuse_loops=True).values())


def is_nested(joint_inputs: Any) -> bool:
    """Whether AOTAutograd partitions a nested compiled region, for which it passes no inputs."""
    return bool(joint_inputs == [])


def may_round(settings: SettingsOfGraph) -> bool:
    """Whether a hook of `settings` says that it may round a saved tensor."""
    return any(_may_round(setting.rule) for setting in settings.settings)


def _may_round(rule: Any) -> bool:
    """Whether `rule`, a hook or policy, says that it may round a saved tensor. A plain function says nothing."""
    if isinstance(rule, Hook):
        return bool(rule.lossy or rule.error)
    if isinstance(rule, Assignment):
        return bool(rule.max_error) and rule.exact != rule.allow
    parts = pytree.tree_leaves(list(vars(rule).values())) if dataclasses.is_dataclass(rule) else ()
    return any(map(_may_round, parts))


def partition_without_hooks(
    joint: GraphModule, joint_inputs: Any, *, options: Options | None = None, **kwargs: Any
) -> _Pair:
    """torch's min-cut partition, mended, see passes/partition.py; of a graph in parts, if the options say so."""
    return _mended(aot.min_cut_partition, options or Options(), joint, joint_inputs, **kwargs)


def _mended(
    partition: Callable[..., _Pair], options: Options, joint: GraphModule, joint_inputs: Any, **kwargs: Any
) -> _Pair:
    if not is_nested(joint_inputs):
        joint = in_parts(options, joint)
    return finished(*partitioned(joint, lambda: partition(joint, joint_inputs, **kwargs), kwargs["num_fwd_outputs"]))


def in_parts(options: Options, gm: GraphModule, notes: list[RegionRow] | None = None) -> GraphModule:
    """`gm` with its loss in chunks and its layers in tiles, if the options say so.

    `notes`: what was done with each, or why not, is appended.
    """
    rows: list[tuple[str, tuple[RegionRow, ...]]] = []
    if options.chunk:
        gm, chunks = chunked(gm, None if options.chunk is True else options.chunk)
        rows.append(("chunk", chunks))
    if options.tile:
        tokens = options.tile if type(options.tile) is int else None
        gm, tiles = tiled(gm, tokens, again=options.tile != "backward")
        rows.append(("tile", tiles))
    for name, found in rows:
        unused.left_whole(name, found)
        for each in found:
            log.info("%s: %s", name, each)
        if notes is not None:
            notes += found
    return gm


def _rows(notes: Sequence[RegionRow]) -> dict[str, Any]:
    """Fields of a plan."""
    kinds = (("chunked", Chunked), ("tiled", Tiled))
    return {name: tuple(each for each in notes if isinstance(each, kind)) for name, kind in kinds}


def partitioned_by(partition: Callable[..., Any], gm: GraphModule, patches: dict[str, Any]) -> dict[str, Any]:
    """Inductor settings by which `partition` splits the joint graph of `gm`, and sees the names in it.

    In torch's cache keys the partition is the digest of the package. The hooks are in our key, see cache/key.py.
    """
    if inductor.custom_partitioner(patches) is not None:
        raise OptionError(inductor.TWO_PARTITIONERS)
    named = any(name_given(node) is not None for node in nodes_of(gm))
    names = inductor.first_joint_pass(carry_names, patches) if named else {}
    return patches | names | inductor.partitioned_by(partition, f"aot_hooks {PACKAGE_DIGEST}")


def partitioned_without_hooks(options: Options, patches: dict[str, Any]) -> dict[str, Any]:
    """Inductor settings by which a graph without hooks is split: by torch's partition or the user's, mended."""
    name = f"aot_hooks {PACKAGE_DIGEST}, no hooks, chunk={options.chunk!r}, tile={options.tile!r}"
    users = inductor.custom_partitioner(patches)
    mended = partial(_mended, users or aot.min_cut_partition, options)
    return patches | inductor.partitioned_by(mended, name, users)
