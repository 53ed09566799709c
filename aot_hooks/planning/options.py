"""Reads a `Step` off a forward and its backward: the bytes of each saved tensor, and what else can be done with it.

Bytes are those of passes/live_bytes.py, times those of graphs/roofline.py. Which hook may take which value is decided
by passes/plan.py, as without a budget: lossy hooks take only what the backward reads smoothly.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cudagraph.graph.snapshots import SNAPSHOT

from ..graphs.lifetimes import GraphMemory, alive_along, fuses, is_loop, last_readers, on_cuda, written_storages
from ..graphs.nodes import REGION, annotation, input_storages, is_view, output_storages, producer, storage_of
from ..graphs.roofline import (
    LAUNCH_MS,
    SPARED,
    has_formula,
    host_ms,
    link_ms,
    memory_ms,
    node_ms,
    row_lengths,
    step_ms,
)
from ..graphs.saved import Boundary, SavedValue, boundary
from ..graphs.speeds import Rates, measured_rates
from ..hook import Hook
from ..library.float8 import float8
from ..library.integer import int4, int8
from ..library.lossless import lossless
from ..offloading.hook import offload, settings_of
from ..offloading.transfers import COPIES
from ..passes.live_bytes import LivePoint, live_bytes
from ..passes.plan import NOTHING, Plan, Unpacked, decide
from ..passes.trace import TracedHook
from ..passes.units import Tracer, trace_units
from ..settings.setting import Setting, out_of_scope
from ..steps.schedule import Transfer
from ..torch_private import aot
from ..torch_private.values import hint
from .in_step import bytes_of
from .kernels import multiplied_early
from .recomputation import computed_late, with_recompute
from .step import Bytes, Option, Step, Value

_FEW_DIGITS = 4  # significant binary digits of numbers whose products take less power, see `SPARED`
_MOST = 4  # times the limit on the gradient's error that a single value's may be
_SEGMENT = 8  # most storages of a part of the backward
_LAYER = 4  # storages, on average, of modules that count as layers without a number in their names


@dataclass(frozen=True)
class Graphs:
    """A partitioned graph, and how to read it."""

    fw: GraphModule
    bw: GraphModule
    num_fwd_outputs: int
    static_inputs: tuple[int, ...]
    roots: Mapping[str, str]
    fused: bool
    trace: Tracer
    launched: bool = True  # the host launches each kernel, not a CUDA graph
    unpacked: Unpacked = NOTHING  # saved tensors that no hook may round
    drops_others: bool = False  # the user keeps no output but the loss, see passes/live_bytes.py
    steps: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)  # see `step_of`

    @functools.cached_property
    def without_others(self) -> Graphs:
        """These, if the user keeps no output but the loss."""
        return dataclasses.replace(self, drops_others=True)

    @functools.cached_property
    def multiplied_early(self) -> Graphs:
        """These, or on a GPU such with each product computed where it stands, see `kernels.multiplied_early`."""
        bw = multiplied_early(self.bw) if self.fused and on_cuda(self.bw.graph.nodes) else self.bw
        return self if bw is self.bw else dataclasses.replace(self, bw=bw)

    @functools.cached_property
    def boundary(self) -> Boundary:
        """What crosses; read once, so the graphs must not change after that."""
        return boundary(self.fw, self.bw, self.num_fwd_outputs, self.static_inputs, self.roots)

    @functools.cached_property
    def memory(self) -> tuple[GraphMemory, GraphMemory]:
        """What both graphs write to memory; read once, so the graphs must not change after that."""
        return GraphMemory(self.fw, self.fused), GraphMemory(self.bw, self.fused)

    def live(self, *, planned: bool = True) -> tuple[LivePoint, ...]:
        parts: dict[str, Any] = {"num_fwd_outputs": self.num_fwd_outputs, "fused": self.fused, "roots": self.roots}
        return live_bytes(*self.memory, planned=planned, drops_others=self.drops_others, **parts)

    @functools.cached_property
    def times(self) -> tuple[dict[Node, float], dict[Node, float]]:
        """The milliseconds of each node of both graphs; read once, so the graphs must not change after that."""
        fw, bw = (node_ms(memory, measured_rates, self.fused, fuse_loops=True) for memory in self.memory)
        return fw, bw

    def ms(self, transfers: Iterable[Transfer] = ()) -> float:
        return step_ms(*self.memory, self.fused, COPIES, transfers, launched=self.launched, times=self.times)


@dataclass(frozen=True)
class Joint:
    """A joint graph, and how it becomes two graphs with hooks.

    Attributes:
        gm: the joint graph. Marks on it say what is computed again.
        split: partitions `gm`; called again after marks have changed.
        without_hooks: the live bytes and the milliseconds of the graphs as torch partitions them, once `split` ran.
        rewrite: puts the hooks of a setting into two graphs, in place.
        setting: what the user asked for.
        parts: further arguments of `Graphs`.
        made: the graphs that were made, by the marks; several plans of `gm` share them.
        drops_others: the user keeps no output but the loss.
    """

    gm: GraphModule
    split: Callable[[], tuple[GraphModule, GraphModule]]
    without_hooks: Callable[[], tuple[tuple[LivePoint, ...], float]]
    rewrite: Callable[[GraphModule, GraphModule, Setting, Tracer | None, bool], Plan]
    setting: Setting
    parts: Mapping[str, Any]
    made: dict[Any, Graphs] = dataclasses.field(default_factory=dict)
    drops_others: bool = False

    def graphs(self) -> Graphs:
        """The graphs of the marks that `gm` has now. They are shared, so nothing may change them."""
        marks = aot.partition_marks(self.gm)
        if marks not in self.made:
            self.made[marks] = Graphs(*self.split(), **self.parts)
        return self.made[marks].without_others if self.drops_others else self.made[marks]

    def computing_again(self, again: set[str], kept: set[str], stock: Graphs, fits: Callable[[Bytes], bool]) -> Graphs:
        """The graphs whose backward computes the nodes `again` from what they read and from `kept`.

        Where they don't fit, they compute less early if that holds less, see `recomputation.computed_late`. It takes
        longer: 1.5% of a step of four layers. The graphs `stock` compute nothing again.
        """
        with aot.recomputed(self.gm, again, kept):
            graphs, key = self.graphs(), (aot.partition_marks(self.gm), self.drops_others)
        if fits(bytes_of(graphs.live())):
            return graphs
        if key not in self.made:
            late = dataclasses.replace(graphs, bw=computed_late(graphs.bw, stock.fw, stock.bw))
            self.made[key] = min(graphs, late, key=lambda each: bytes_of(each.live()).backward)
        return self.made[key]

    def hooked(
        self,
        graphs: Graphs,
        rule: Any,
        trace: Tracer | None = None,
        scope: str | None = None,
        *,
        packs_early: bool = True,
    ) -> tuple[Graphs, Plan]:
        """A copy of `graphs` with the hooks that `rule` asks for, and their plan.

        Args:
            trace: None for what a user can type, which is rewritten as it is without a budget.
            scope: in place of that of the setting.
            packs_early: see `RewriteOptions`.
        """
        found = dataclasses.replace(graphs, fw=aot.copied(graphs.fw), bw=aot.copied(graphs.bw))
        setting = Setting(rule, scope or self.setting.scope)
        return found, self.rewrite(found.fw, found.bw, setting, trace, packs_early)


def step_of(
    graphs: Graphs, scope: str | None, allow: Iterable[Any], max_error: float, reached: Mapping[Any, int] | None = None
) -> tuple[Step, list[list[SavedValue]]]:
    """The step of one graph, and the graph's saved values by storage, in the order of the step's values.

    Further values of the step come after these: tensors that aren't saved, but that others could be computed from.
    `reached` has for each storage the bytes of all that is computed again from it. Read once for equal arguments, so
    the graphs must not change after that.
    """
    allow = tuple(allow)
    key = scope, allow, max_error, frozenset((reached or {}).items())
    if key not in graphs.steps:
        graphs.steps[key] = _step_of(graphs, scope, allow, max_error, reached)
    found: tuple[Step, list[list[SavedValue]]] = graphs.steps[key]
    return found


def _step_of(
    graphs: Graphs, scope: str | None, allow: Sequence[Any], max_error: float, reached: Mapping[Any, int] | None
) -> tuple[Step, list[list[SavedValue]]]:
    cross = graphs.boundary
    points = graphs.live()
    groups = storages_in_scope(cross, scope)
    devices = [group[0].row.device for group in groups]
    rates = measured_rates(next((d for d in devices if d.type == "cuda"), torch.device("cpu")))
    both, times = graphs.memory, graphs.times
    hooks = _hook_options(graphs, groups, scope, allow, max_error, rates, times[1])
    sends = any(option.link_bytes for options in hooks for option in options)
    copies = [node_ms(memory, lambda _: rates, graphs.fused) for memory in both] if sends else []
    gone = _gone(both[0])
    forward_count = sum(n.op != "placeholder" for n in both[0].nodes)
    firsts, lasts = _first_and_last_reads(both[1], groups, forward_count)
    order = sorted(range(len(groups)), key=firsts.__getitem__)
    segment_of = dict(zip(order, _segments([groups[i] for i in order]), strict=True))
    values = []
    for i, group in enumerate(groups):
        row = group[0].row
        values.append(
            Value(
                tuple(v.row.name for v in group),
                row.nbytes,
                gone.get(storage_of(group[0].fw_node), forward_count - 1) + 1,
                firsts[i],
                segment_of[i],
                firsts[i],
                tuple(hooks[i]),
                row.module_path or row.source_line,
                reached_bytes=row.nbytes + (reached or {}).get(storage_of(group[0].fw_node), 0),
                last=lasts[i],
            )
        )
    if "recompute" in allow:
        numbers: dict[Any, int | None] = {storage_of(v.fw_node): None for v in cross.tensors}  # None: no value
        numbers |= {storage_of(group[0].fw_node): i for i, group in enumerate(groups)}
        values = _with_begins(with_recompute(values, groups, numbers, both[0].keys, times[0], gone))
    step = Step(
        tuple(p.live_bytes for p in points),
        tuple(values),
        _in_order(times),
        forward_count,
        rates.to_host,
        rates.to_device,
        tuple(f"{p.phase} {p.node}" for p in points),
        tuple(p.module_path for p in points),
        copies_ms=_in_order(copies),
        host_ms=sum(host_ms(memory, graphs.fused) for memory in both) if graphs.launched else -math.inf,
    )
    return step, groups


def _in_order(times: Sequence[Mapping[Node, float]]) -> tuple[float, ...]:
    return tuple(ms for each in times for node, ms in each.items() if node.op != "placeholder")


def _first_and_last_reads(
    bw: GraphMemory, groups: Sequence[Sequence[SavedValue]], forward_count: int
) -> tuple[list[int], list[int]]:
    """For each storage the position in the step of its first reader in the backward, and of its last one."""
    readers = last_readers(bw.nodes, bw.counted, bw.kernels, bw.keys.__getitem__)
    begins = bw.kernels.begins(n for n in bw.nodes if on_cuda([n]) and bw.keys[n] in bw.counted)
    shift = forward_count - sum(node.op == "placeholder" for node in bw.nodes)
    position = {node: shift + i for i, node in enumerate(bw.nodes)}
    firsts, lasts = [], []
    for group in groups:
        read = [position[u] for v in group for u in v.bw_node.users if u.op != "output"]
        begun = [shift + begins[key] for v in group if (key := bw.keys[v.bw_node]) in begins]
        firsts.append(min(read + begun))
        lasts.append(max(shift + readers[v.bw_node] for v in group))
    return firsts, lasts


def storages_in_scope(cross: Boundary, scope: str | None) -> list[list[SavedValue]]:
    """The saved values that the budget decides for, by storage."""
    groups: dict[int, list[SavedValue]] = defaultdict(list)
    for value in cross.tensors:
        groups[value.row.storage].append(value)

    def ours(value: SavedValue) -> bool:
        readers = [u for u in value.bw_node.users if u.op != "output"]
        inside = any(annotation(u, REGION) is not None for u in readers)
        frees = storage_of(value.fw_node) not in cross.kept_storages and not value.fw_node.meta.get(SNAPSHOT)
        return (
            bool(readers) and not inside and frees and out_of_scope(value.row, scope) is None and value.row.nbytes > 0
        )

    return [group for group in groups.values() if all(map(ours, group))]


def _gone(fw: GraphMemory) -> dict[Any, int]:
    """By storage, the position of the forward's last kernel that reads it."""
    nodes = [n for n in fw.nodes if n.op != "placeholder"]
    found: dict[Any, int] = {}
    for node, last in last_readers(nodes, fw.written | fw.outputs, key_of=fw.keys.__getitem__).items():
        found[fw.keys[node]] = max(last, found.get(fw.keys[node], 0))
    return found


# --- hooks ------------------------------------------------------------------------------------------------------------


def _hook_options(
    graphs: Graphs,
    groups: Sequence[Sequence[SavedValue]],
    scope: str | None,
    allow: Iterable[Any],
    max_error: float,
    rates: Rates,
    bw_ms: Mapping[Node, float],
) -> list[list[Option]]:
    """For each storage the hooks that can take it, with their bytes and times."""
    lengths = row_lengths(graphs.fw)
    lengths_of, only_loops = functools.cache(row_lengths), functools.cache(_only_loops)  # of traced hooks
    cost = functools.cache(functools.partial(_cost, rates, graphs.fused))  # equal layers share what was traced
    found: list[list[Option]] = [[] for _ in groups]
    on_gpu = [group[0].row.device.type == "cuda" for group in groups]
    means = [name for name in allow if name != "offload" or any(on_gpu)]  # a CPU's copies free nothing
    ours = dataclasses.replace(graphs.boundary, tensors=[value for group in groups for value in group])
    for name, rule in _rules(means, max_error).items():
        error = error_of(rule)
        unpacked = graphs.unpacked if error else NOTHING
        sends = isinstance(rule, Hook) and settings_of(rule) is not None
        choices = decide(ours, Setting(rule, scope), {}, unpacked, for_inductor=graphs.fused)
        choices, units = trace_units(choices, graphs.trace, for_inductor=graphs.fused)
        packed = {choice.value: choice for choice in choices if choice.packs}
        unit_of = {unit.saved: unit for unit in units}
        for i, group in enumerate(groups):
            if not all(value in packed for value in group) or (sends and not on_gpu[i]):
                continue
            own = [packing for value in group if value in unit_of for packing in unit_of[value].packings]
            if len(own) != 1 or any(unit_of[value].keep for value in group if value in unit_of):
                continue
            hook, traced, on_device, on_host = own[0].hook, own[0].traced, *own[0].leaf_bytes
            nbytes = on_device + sum(len(packed[v].answers) * hint(v.value.numel()) // 8 for v in group)
            if nbytes >= group[0].row.nbytes:
                continue
            readers = [u for v in group for u in _readers_of(v.bw_node)]
            registers = graphs.fused and all(map(fuses, readers)) and only_loops(traced.unpack)
            in_passing = graphs.fused and any(
                _passes(value.fw_node, traced.pack, lengths, lengths_of) for value in group
            )
            ms, work, by_host = cost(group[0].row.nbytes, in_passing, registers, traced)
            ms += link_ms(on_host, rates)
            if on_gpu[i] and hook.digits is not None and hook.digits <= _FEW_DIGITS:
                ms -= min(ms, SPARED * sum(bw_ms[n] for n in readers if has_formula(n)))
            in_registers = registers and on_gpu[i]
            found[i].append(Option(name, hook, nbytes, ms, error, on_host, work, in_registers, host_ms=by_host))
    return found


def _cost(
    rates: Rates, fused: bool, nbytes: int, in_passing: bool, registers: bool, traced: TracedHook
) -> tuple[float, int, float]:
    """Milliseconds of the device, bytes, and milliseconds of the host, to pack and unpack `nbytes`.

    `in_passing`: pack is in a kernel that has the value in registers. `registers`: unpack is in the kernels of the
    readers, which would otherwise read the value from memory.
    """
    both = (traced.pack, traced.unpack)
    work = max(_work_bytes(gm, fused) for gm in both)
    by_host = sum(host_ms(gm, fused) for gm in both) - LAUNCH_MS * (in_passing + registers)
    times = [node_ms(gm, lambda _: rates, fused, fuse_loops=True) for gm in both]
    pack, unpack = (sum(ms for node, ms in each.items() if node.target not in COPIES) for each in times)
    pass_ms = memory_ms(nbytes, rates)
    ms = max(0.0, pack - pass_ms * in_passing) + max(0.0, unpack - 2 * pass_ms * registers)
    return ms, work, max(0.0, by_host)


def _readers_of(node: Node) -> list[Node]:
    """The readers of `node`, or of a view of it."""
    return [u for user in node.users for u in (_readers_of(user) if is_view(user) else [user]) if u.op != "output"]


def _passes(
    node: Node,
    pack: GraphModule,
    lengths: Mapping[Node, int],
    lengths_of: Callable[[GraphModule], Mapping[Node, int]],
) -> bool:
    """Whether `pack` can be in a kernel that has `node` in registers: one that makes or reads it, and that reduces rows
    of the same length or none. `lengths`: those of the forward's kernels; `lengths_of`: `row_lengths`."""
    inputs = [reader for x in pack.graph.find_nodes(op="placeholder") for reader in _readers_of(x)]
    own = lengths_of(pack)
    if not all(reader in own for reader in inputs):
        return False
    row_length = max(own.values(), default=0)
    makes = producer(node)
    beside = (n for n in (makes, *_readers_of(makes)) if n in lengths)
    return any(not row_length or lengths[n] in (0, row_length) for n in beside)


def _only_loops(gm: GraphModule) -> bool:
    nodes = (n for n in gm.graph.nodes if n.op == "call_function" and n.target not in COPIES)
    found = [fuses(n) or is_loop(n) for n in nodes]
    return bool(found) and all(found)


def _rules(allow: Sequence[Any], max_error: float) -> dict[str, Any]:
    """The hooks and policies of `allow`, by name, without those whose error is far above `max_error`."""
    rules: dict[str, Any] = {repr(means): means for means in allow if not isinstance(means, str)}
    own = {name: rule for name, rule in rules.items() if isinstance(rule, Hook) and settings_of(rule) is None}
    if "lossless" in allow:
        rules["lossless()"] = lossless()
    lossy = {"float8": float8(), "int8": int8(128, power_of_two=True), "int4": int4()}
    rounded = {f"{name}()": hook for name, hook in lossy.items() if name in allow}
    rules |= rounded
    if "offload" in allow:
        # the schedule must not drop a copy of the plan: the peak would be higher than planned
        rules["offload()"] = offload(max_stall_ms=math.inf)
        forms = rounded | own
        rules |= {f"offload(then={name})": offload(then=h, max_stall_ms=math.inf) for name, h in forms.items()}
    return {name: rule for name, rule in rules.items() if error_of(rule) <= _MOST * max_error}


def error_of(rule: Any) -> float:
    """The relative error of values that a hook or policy stores; infinite, so above any limit, if it states none."""
    error = getattr(rule, "error", None)
    return math.inf if error is None else float(error)


def _work_bytes(gm: GraphModule, fused: bool) -> int:
    """The most bytes alive in a traced pack or unpack. Its result counts, its input does not."""
    nodes = list(gm.graph.nodes)
    outputs = output_storages(gm.graph)
    counted = written_storages(nodes, fuse_loops=True) | outputs if fused else {storage_of(n) for n in nodes}
    counted = counted - input_storages(gm.graph) - {None}
    return max(alive_along(nodes, counted, to_end=outputs, last_reader=last_readers(nodes, counted)), default=0)


def _with_begins(values: Sequence[Value]) -> list[Value]:
    """`values` with `begin`: the earliest position that reads a value, in its first reader or in a recomputation of
    another value of its segment."""
    begins = [value.first for value in values]
    waiting = list(range(len(values)))
    while waiting:
        v = waiting.pop()
        for u in {u for option in values[v].options for u in option.sources}:
            if values[u].segment == values[v].segment and begins[u] > begins[v]:
                begins[u] = begins[v]
                waiting.append(u)
    return [dataclasses.replace(value, begin=begin) for value, begin in zip(values, begins, strict=True)]


# --- parts of the backward --------------------------------------------------------------------------------------------


def _segments(groups: Sequence[Sequence[SavedValue]]) -> list[int]:
    """The segment of each storage, numbered in the order of the backward: parts of a layer, or runs of a few storages.

    A storage of one layer may be read in the middle of another layer. It then belongs to the segments of that layer.
    """
    runs = itertools.groupby(layers_of([group[0].row.module_path for group in groups]))
    layers = [layer or n for n, (layer, run) in enumerate(runs) for _ in run]  # n: in no layer
    last = {layer: i for i, layer in enumerate(layers)}
    numbers: list[int] = []
    number, begin, end = -1, 0, -1
    for i, layer in enumerate(layers):
        if i > end:
            begin, end = i, last[layer]
        number += (i - begin) % _SEGMENT == 0
        numbers.append(number)
    return numbers


def in_one_part(step: Step) -> Step:
    """`step` with the whole backward as one part, so that any value may be computed again from any other."""
    return dataclasses.replace(
        step, values=tuple(_with_begins([dataclasses.replace(v, segment=0) for v in step.values]))
    )


def layers_of(paths: Sequence[str]) -> list[str]:
    """The layer of each module path: the path up to its first number, "model.layers.3" of "model.layers.3.mlp.up".

    Where no path has a number, the children of their common parent, if these are large enough. "" is no layer.
    """
    split = [path.split(".") for path in paths]
    ends = [next((i + 1 for i, part in enumerate(parts) if part.isdigit()), 0) for parts in split]
    if not any(ends):
        shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*split, strict=False))
        above = len(list(shared)) + 1
        children = {tuple(parts[:above]) for parts in split if len(parts) >= above}
        ends = [above if len(split) >= _LAYER * len(children) and len(parts) >= above else 0 for parts in split]
    return [".".join(parts[:end]) for parts, end in zip(split, ends, strict=True)]
