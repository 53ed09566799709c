"""The ways that a user can type, as candidates of a budget: a budget must not be slower than one of them.

      a way      what is computed again    nothing | pointwise results, as `recompute_pointwise` | blocks
                 form of what is saved     as it is | lossless, float8, int8, int4, a hook of the user's
                 sends                     it stays on the device | it waits on the host
         |
         +-- computed_again    the joint graph, split so that its backward computes that again
         +-- the graph is the whole step          `promising`: bounds say whether it may be better. Then it is put into
         |                                        the graphs, and judged as any plan is
         '-- many calls of a step run the graph   `Simulation`: it is put into the graphs, and the step around its calls
                                                  is simulated, with its copies

Blocks computed again are checkpointing's way: of a block only its inputs are saved, with what can't be repeated and
with its statistics. Then the inputs can be in float8, and on the host. So can inputs that another call of the graph has
returned, if nothing else holds them. Of whole blocks no statistics are saved, nor what the last one returns, which is
what checkpointing does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from cudagraph.placeholder import results_of

from ..graphs.nodes import storage_bytes, storage_of
from ..graphs.roofline import has_formula
from ..graphs.saved import SavedTensor, module_calls
from ..graphs.speeds import Rates, measured_rates
from ..hook import KEEP, Hook
from ..library.float8 import float8
from ..library.integer import int4, int8
from ..library.lossless import lossless
from ..offloading.hook import offload, offload_in_room, settings_of
from ..offloading.transfers import COPIES
from ..passes.live_bytes import LivePoint
from ..passes.plan import Plan
from ..settings.setting import choose
from ..steps.schedule import DECIDED_LATER
from ..torch_private import aot
from ..torch_private.values import hint
from .in_step import bytes_of
from .kernels import split_and_hold
from .options import Graphs, Joint, error_of, layers_of, step_of, storages_in_scope
from .recomputation import exact_order, marks, of_blocks
from .simulated import Call, Predicted, Whole, predicted, room_of
from .step import ALONE, COMPUTED, KEPT, RECOMPUTE, Bytes, Moment, Option, Step

# what is computed again
NOTHING, POINTWISE, BLOCKS, WHOLE_BLOCKS = "", "recompute_pointwise", "blocks computed again", "whole blocks"
_WITH_MORE = f"{POINTWISE}, values in place of copies: "  # and how many, see `Simulation._sending_less`
WHOLE_GRAPH = "the whole graph computed again"  # of a block that is compiled by itself, whatever modules it has

GAIN = 0.002
"""The share of the time by which a way must be able to beat what was found, to be tried.

Predictions of times differ by more than that from one partition to another.
"""
_LESS = 0.05
"""By this share of the bytes the graphs of a way may take less than its bound.

Kernels then reuse memory that they don't without hooks (0.011 was seen, of int8 in a small network on a CPU), and a
result is saved in place of terms (0.018).
"""
_OFF = 0.1  # By this share the bytes that a hook sends may be off, and those that the link can send.
ERROR = 0.9  # The share of `max_error` that a plan may have by its estimate, for what errors add up to beyond it.
_STATISTIC = 64  # A value with fewer than one in so many of the forward's most elements is a statistic.
_MASKS = "lossless()"

_MIN_BYTES = 1 << 20  # Smaller tensors stay on the device, as in `offload()`.
_IN_FLIGHT_SHARE = 0.125  # Of a budget, for the inputs of blocks: their copies are planned for each graph.
_IN_FLIGHT = 768 << 20  # Bytes of copies that are started and not waited for, at most; measured with 16 blocks of 8B.


@dataclass(frozen=True)
class Way:
    """A way that a user can type.

    Attributes:
        again: what is computed again: `NOTHING`, `POINTWISE`, `BLOCKS`, `WHOLE_BLOCKS` or `WHOLE_GRAPH`.
        form: the hook, or `lossless()`, for the form in which tensors are saved; None: as they are.
        sends: whether they wait on the host.
    """

    again: str
    form: Any = None
    sends: bool = False

    @property
    def name(self) -> str:
        """How it stores values, by the name of the options of a `Step` that do the same; "" if it keeps them."""
        form = "" if self.form is None else repr(self.form)
        return f"offload({form and f'then={form}'})" if self.sends else form

    @property
    def rounds(self) -> bool:
        return isinstance(self.form, Hook) and error_of(self.form) > 0

    def rule(self, **limits: Any) -> Any:
        """The hook or policy. `limits`: arguments of `offload`."""
        if not self.sends:
            return KEEP if self.form is None else self.form
        if self.again == BLOCKS:  # what is left on the device is little, and all of it is to go
            limits = {"max_stall_ms": math.inf} | limits
        return offload(then=self.form, **limits)

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.name, self.again)))


def ways(allow: Sequence[Any], max_error: float) -> list[Way]:
    """The ways that `allow` has the means for."""
    exact: list[Any] = [None, lossless()] if "lossless" in allow else [None]
    library = {"float8": float8(), "int8": int8(), "int4": int4()}
    own = [means for means in allow if isinstance(means, Hook)]
    rounded = [h for h in (*(h for name, h in library.items() if name in allow), *own) if error_of(h) <= max_error]
    sent = [None, *(hook for hook in rounded if settings_of(hook) is None)] if "offload" in allow else []
    found = []
    for again in (NOTHING, POINTWISE, BLOCKS) if "recompute" in allow else (NOTHING,):
        found += [Way(again, form) for form in ([None] if again == BLOCKS else exact) + rounded if form or again]
        found += [Way(again, form, True) for form in sent]
    return [*found, Way(WHOLE_BLOCKS)] if "recompute" in allow else found


def error_within(plan: Plan, way: Way, stock: Graphs) -> float:
    """The relative error of the gradient, estimated from bytes: of what the backward reads, a part is rounded, and a
    part is computed from it again, which may be twice as wrong. `stock`: the graphs without anything computed again."""
    rows = {d.saved.storage: d for d in plan.decisions if d.hook.name != RECOMPUTE}
    crossing = {v.row.storage: v.row for v in stock.boundary.tensors if not v.row.is_input}
    rounded = sum(d.saved.nbytes for d in rows.values() if d.hook is not KEEP and d.hook.lossy)
    if not rounded:
        return 0.0
    saved = sum(d.saved.nbytes for d in rows.values() if not d.saved.is_input or d.hook is not KEEP)
    all_bytes = max(saved, sum(row.nbytes for row in crossing.values()))
    again = rounded / saved * (all_bytes - saved)
    return error_of(way.form) * math.sqrt((rounded + COMPUTED * again) / all_bytes)


# --- graphs that compute something again ------------------------------------------------------------------------------


def computed_again(
    again: str,
    joint: Joint,
    stock: Graphs,
    fits: Callable[[Bytes], bool],
    most_ms: float = math.inf,
    *,
    one_block: bool = False,
) -> Graphs | None:
    """Graphs whose backward computes again what `again` says. The graphs `stock` compute nothing again.

    None if there is nothing like that, or if products alone take `most_ms`: a split takes as long as a compilation's.
    `fits`: whether a call may take so many bytes. `one_block`: the graph is a block.
    """
    if again not in (BLOCKS, WHOLE_BLOCKS, WHOLE_GRAPH):
        with aot.recomputing_pointwise(again == POINTWISE):
            return joint.graphs()
    whole = again != BLOCKS
    blocks = _blocks(stock, one_block=one_block or again == WHOLE_GRAPH, statistics=whole)
    groups = storages_in_scope(stock.boundary, joint.setting.scope)
    found = of_blocks(groups, blocks, stock.memory[0].keys, last=whole)
    if found is None:
        return None
    names, gone, reads = found
    forward, backward = ({n.name: ms for n, ms in each.items() if has_formula(n)} for each in stock.times)
    twice = sum(ms for name, ms in forward.items() if name in names)
    if sum(forward.values()) + sum(backward.values()) + twice >= most_ms:
        return None
    kept = {v.fw_node.name for v in stock.boundary.tensors if storage_of(v.fw_node) not in gone}
    return joint.computing_again(names, (kept | reads) - names, stock, fits)


def _blocks(stock: Graphs, *, one_block: bool, statistics: bool) -> dict[Node, str]:
    """The block of each node of the forward, "" for what is saved: nodes in no block, and without `statistics` these.

    Statistics are saved because inputs that are rounded must not be read for them.
    """
    nodes = [n for n in stock.fw.graph.nodes if n.op == "call_function"]
    layers = _layers(nodes, stock.roots)
    sizes = {n: hint(value.numel()) for n in nodes if isinstance(value := n.meta.get("val"), torch.Tensor)}
    small = {n for n, size in sizes.items() if 1 < _STATISTIC * size < max(sizes.values())}
    saved = {n for n in small if n.all_input_nodes and small.issuperset(n.all_input_nodes)} if not statistics else ()
    block = (lambda layer: "block") if one_block else (lambda layer: layer)
    return {n: "" if n in saved else block(layer) for n, layer in zip(nodes, layers, strict=True)}


def _layers(nodes: Sequence[Node], roots: Mapping[str, str]) -> list[str]:
    """The layer of each node, "" for none. Each call of a layer that is called several times counts as a layer.

    Of such a layer the modules inside have the names of the first call, so the outermost name with a number counts.
    """
    stacks = [module_calls(n, roots) for n in nodes]
    numbered = ([path for path, _ in stack if any(map(str.isdigit, path.split(".")))] for stack in stacks)
    layers = layers_of(
        [next(iter([*found, *(p for p, _ in stack[-1:])]), "") for found, stack in zip(numbered, stacks, strict=True)]
    )
    called = (dict(stack).get(layer) for layer, stack in zip(layers, stacks, strict=True))
    return [f"{layer}@{call}" if call else layer for layer, call in zip(layers, called, strict=True)]


# --- for a graph that is the whole step -------------------------------------------------------------------------------


def promising(own: Step, found: Iterable[Way], peak: float, most_ms: float) -> Iterator[Way]:
    """Those of `found` that may be under `peak` and take less than `most_ms`, the fastest first.

    `own`: the step of graphs that compute again what these ways compute again, with options for all other means.
    """
    bounds = {way: _bounds(own, way, most_ms) for way in found}
    able = [way for way in bounds if bounds[way][0] < most_ms and (1 - _LESS) * bounds[way][1] <= peak]
    yield from sorted(able, key=lambda way: bounds[way][0])


def _bounds(own: Step, way: Way, most_ms: float) -> tuple[float, int]:
    """The least that a step can take whose values are all stored as by `way`: milliseconds, and bytes.

    Copies to the host may wait, and less may be sent. Both takes bytes, and neither saves time. Where the graph is the
    whole step, of at most `most_ms`, what the link can't send in the forward stays on the device up to its end.

    Hooks that round store masks as `lossless()` does. They may pack a part of a storage, which no option does: queries,
    keys and values of one projection. So a value without options counts as gone.
    """
    rounds = way.form is not None and way.name != _MASKS
    change = [0] * (len(own.live) + 1)
    chosen: list[Option] = []
    for value in own.values:
        options = {o.name: o for o in value.options}
        option = options.get(way.name) or (options.get(_MASKS, KEPT) if way.name else KEPT)
        end = value.last + 1 if option.in_registers else value.first
        if option is not KEPT and value.saved and end > value.gone:
            chosen.append(option)
            change[value.gone] += option.packed_bytes - value.nbytes
            change[end] -= option.packed_bytes - value.nbytes
        elif rounds and value.saved and not value.options and value.first > value.gone:
            change[value.gone] -= value.nbytes
            change[value.first] += value.nbytes
    live = [nbytes + more for nbytes, more in zip(own.live, itertools.accumulate(change), strict=False)]
    if own.moments == ALONE and 0 < own.forward_count < len(live):
        forward_ms = most_ms - sum(own.node_ms[own.forward_count :])
        sent = (1 + _OFF) * 1e-3 * own.to_host * forward_ms
        unsent = (1 - _OFF) * sum(option.link_bytes for option in chosen) - sent
        live[own.forward_count - 1] += max(0, int(unsent)) if math.isfinite(sent) else 0
    # a hook may send less than all: then it packs less, too
    ms = own.ms if any(option.link_bytes for option in chosen) else own.ms_with(chosen)
    return ms, own.bytes_of(live).peak(own.moments)


# --- for a graph that many calls of a step run ------------------------------------------------------------------------


class Typed(NamedTuple):
    """A graph that is compiled in a way that a user can type. `across`: copies are decided for the whole step."""

    way: Way
    fw: GraphModule
    bw: GraphModule
    plan: Plan
    live: tuple[LivePoint, ...]
    call: Call
    step: Predicted
    across: bool


@dataclass(frozen=True)
class Simulation:
    """The steps that a graph runs in, with the graph compiled in a way that a user can type.

    What is solved for one graph hides the copies of a call in that call's own compute. `offload(across_graphs=True)`
    hides them in the whole step: each call decides when it runs what it sends.

    Attributes:
        wholes: the steps. Each must stay under its peak; the time of the last one counts.
        allow, max_error: of the budget.
        stock: the graph without anything computed again.
        moments: what is alive beside a call.
    """

    wholes: tuple[Whole, ...]
    moments: tuple[Moment, ...]
    allow: tuple[Any, ...]
    max_error: float
    joint: Joint
    stock: Graphs

    def fastest(self, most_ms: float, only: tuple[str, str] | None = None) -> Typed | None:
        """The fastest way of those that take less than `most_ms` a call; None if there is none.

        `only`: what the one way to look at computes again, and its name; None: all.
        """
        best: Typed | None = None
        rates = _link(self.stock) if "offload" in self.allow and self.stock.launched else None
        for again, found in itertools.groupby(self._ways(), lambda way: way.again):
            able = [way for way in found if (rates or not way.sends) and only in (None, (again, way.name))]
            now_ms = most_ms if best is None else best.step.call_ms
            if not able:
                continue
            graphs = computed_again(again, self.joint, self.stock, self._fits, now_ms, one_block=True)
            if graphs is None or graphs.ms() >= now_ms:
                continue
            for way in able if only or again == BLOCKS else self._promising(graphs, able, now_ms):
                now_ms = most_ms if best is None else best.step.call_ms
                best = self._typed(graphs, way, rates if way.sends else None, now_ms) or best
        if only is not None and only[0].startswith(_WITH_MORE):
            return self._as_before(only, rates, most_ms)
        return best if best is None or only or not best.across else self._sending_less(best, rates)

    def _as_before(self, only: tuple[str, str], rates: Rates | None, most_ms: float) -> Typed | None:
        """The way that a recipe once got from `_sending_less`; None if this graph has no such way."""
        way = next((way for way in self._ways() if (way.again, way.name) == (POINTWISE, only[1])), None)
        graphs = None if rates is None or way is None else self._with_more(way, int(only[0].split()[-1]))
        if graphs is None or way is None:
            return None
        return self._typed(graphs, replace(way, again=only[0]), rates, most_ms)

    def _sending_less(self, best: Typed, rates: Rates | None) -> Typed:
        """`best`, or the same way with some values computed again and not sent.

        It takes one value more as long as computing that takes less time than copies stall the step.
        """
        way = replace(best.way, again=POINTWISE)
        before = self._with_more(way, 0)
        for count in itertools.count(1):
            graphs = self._with_more(way, count)
            call_ms = best.call.forward_ms + best.call.backward_ms
            if before is None or graphs is None or graphs.ms() - before.ms() >= best.step.call_ms - call_ms:
                return best
            found = self._typed(graphs, replace(way, again=f"{_WITH_MORE}{count}"), rates, best.step.call_ms)
            if found is None:
                return best
            before, best = graphs, found
        raise AssertionError

    def _with_more(self, way: Way, count: int) -> Graphs | None:
        """Graphs that compute pointwise results again, and the first `count` of `exact_order`; None if it has fewer."""
        pointwise = computed_again(POINTWISE, self.joint, self.stock, self._fits)
        if pointwise is None or not count:
            return pointwise
        step, groups = step_of(pointwise, self.joint.setting.scope, self.allow, self.max_error)
        times = {n.name: ms for n, ms in pointwise.times[0].items()}
        order = exact_order(step.values[: len(groups)], repr(way.form), _MIN_BYTES, times)
        if len(order) < count:
            return None
        names, kept = marks(dict(order[:count]), pointwise.fw.graph, pointwise.boundary, groups)
        with aot.recomputing_pointwise(True), aot.recomputed(self.joint.gm, names, kept):
            return self.joint.graphs()

    def _fits(self, nbytes: Bytes) -> bool:
        return nbytes.peak(self.moments) <= min(whole.peak for whole in self.wholes)

    def _promising(self, graphs: Graphs, found: Sequence[Way], most_ms: float) -> list[Way]:
        """Those of `found` that bounds don't rule out, in their order. Putting a way into the graphs takes longer."""
        step, _ = step_of(graphs, self.joint.setting.scope, self.allow, self.max_error)
        peak = max(whole.peak for whole in self.wholes)
        able = {*promising(replace(step, moments=self.moments), found, peak, most_ms)}
        sends = any(option.link_bytes for value in step.values for option in value.options)
        return [way for way in found if way in able or (way.sends and not sends)]

    def _ways(self) -> list[Way]:
        """The ways to try. Of forms that round the first is enough: it is the fastest."""
        found = ways(self.allow, self.max_error)
        rounded = [way.form for way in found if way.rounds]
        return [way for way in found if way.form is rounded[0] or way.form not in rounded] if rounded else found

    def _typed(
        self, graphs: Graphs, way: Way, rates: Rates | None, most_ms: float, *, packs_early: bool = False
    ) -> Typed | None:
        """One way, with as few copies as its peak needs; None if it is over the peak, or a call takes `most_ms`.

        `packs_early` holds less in the forward and takes longer, see `choose_positions`. So it comes second, and only
        if a forward holds the most.
        """
        across = way.sends and way.again != BLOCKS  # inputs of blocks are few bytes: every call sends all of them
        limits: dict[str, Any] = {"in_flight_bytes": _IN_FLIGHT, "min_bytes": _MIN_BYTES, "rates": rates}
        if across:
            limits["across_graphs"] = True
        else:
            limits["in_flight_bytes"] = min(_IN_FLIGHT, *(int(_IN_FLIGHT_SHARE * whole.peak) for whole in self.wholes))
        hook = way.rule(**limits)
        found, plan, live, inputs_bytes = self._rewritten(graphs, way, hook, packs_early=packs_early)
        if way.again == BLOCKS and error_within(plan, way, self.stock) > ERROR * self.max_error:
            return None
        call = _call(found, plan, live)
        # What one call returns is gone once the next one has run, and counts there meanwhile. That of the last stays.
        call = call._replace(nbytes=call.nbytes._replace(held=call.nbytes.held - 2 * inputs_bytes))
        wholes = [replace(whole, peak=whole.peak - inputs_bytes) for whole in self.wholes]
        steps = [predicted(whole, call, rates) for whole in wholes]
        if any(step.peak > whole.peak for step, whole in zip(steps, wholes, strict=True)):
            early = graphs.fused and not packs_early and call.nbytes.forward > call.nbytes.backward
            return self._typed(graphs, way, rates, most_ms, packs_early=True) if early else None
        if steps[-1].call_ms >= most_ms:
            return None
        if across:  # the room is known only now
            hook = offload_in_room(hook, room_of(wholes, call))
            found, plan, live, _ = self._rewritten(graphs, way, hook, packs_early=packs_early)
        step = steps[-1]._replace(peak=steps[-1].peak + inputs_bytes)
        return Typed(way, found.fw, found.bw, plan, live, call, step, across)

    def _rewritten(
        self, graphs: Graphs, way: Way, hook: Any, *, packs_early: bool
    ) -> tuple[Graphs, Plan, tuple[LivePoint, ...], int]:
        """A copy of `graphs` with a hook for all, as the backend makes it for users who type it.

        Also the bytes of inputs that it saves in another form. They count as alive in the forward that reads them.
        """
        inputs = self._returned_inputs(graphs, way)
        scope = "no_static" if inputs and self.joint.setting.scope != "all" else None
        rule = _AlsoInputs(hook, frozenset(inputs)) if inputs else hook
        found, plan = self.joint.hooked(graphs, rule, scope=scope, packs_early=packs_early)
        if way.again and graphs.fused:
            split_and_hold(found.fw, found.bw, num_fwd_outputs=graphs.num_fwd_outputs, roots=graphs.roots)
        more = sum(inputs.get(d.saved.name, 0) for d in plan.decisions if d.hook is not KEEP)
        live = (replace(p, live_bytes=p.live_bytes + more * (p.phase == "forward")) for p in found.live())
        return found, plan, tuple(live), more

    def _returned_inputs(self, graphs: Graphs, way: Way) -> dict[str, int]:
        """The bytes of the inputs that the call before has returned, by name, if the way may send them.

        These are inputs with a gradient, beside parameters, and the graph returns as many bytes.
        """
        if not way.sends or way.again.startswith(_WITH_MORE) or not all(whole.frees_inputs for whole in self.wholes):
            return {}
        outputs = [n for n in results_of(graphs.fw.graph)[: graphs.num_fwd_outputs] if isinstance(n, Node)]
        returned = sum(storage_bytes(n.meta["val"]) for n in outputs if isinstance(n.meta["val"], torch.Tensor))
        gradients = results_of(graphs.bw.graph)
        inputs = graphs.fw.graph.find_nodes(op="placeholder")[: len(gradients)]
        has_gradient = {n for n, gradient in zip(inputs, gradients, strict=False) if isinstance(gradient, Node)}
        rows = [v.row for v in graphs.boundary.tensors if v.row.is_input and v.fw_node in has_gradient]
        found = {row.name: row.nbytes for row in rows if not row.is_static}
        return found if sum(found.values()) <= returned else {}


@dataclass(frozen=True)
class _AlsoInputs:
    """A policy: `hook` for what is made in the graph, and for these of its inputs."""

    hook: Any
    names: frozenset[str]

    def __call__(self, saved: SavedTensor) -> Hook:
        takes = saved.name in self.names if saved.is_input else not saved.is_output
        return choose(self.hook, saved) if takes else KEEP


def _call(graphs: Graphs, plan: Plan, live: Sequence[LivePoint]) -> Call:
    items = tuple(t.nbytes for t in plan.transfers if t.placement.reason == DECIDED_LATER)
    forward, backward = (sum(ms for n, ms in each.items() if n.target not in COPIES) for each in graphs.times)
    longer = graphs.ms(plan.transfers) / (forward + backward) if forward + backward else 1.0  # if the host takes longer
    return Call(bytes_of(live), items, longer * forward, longer * backward)


def _link(graphs: Graphs) -> Rates | None:
    """The rates of the one CUDA device of a graph; None: its copies would not run beside its compute."""
    devices = {value.row.device for value in graphs.boundary.tensors if value.row.device.type == "cuda"}
    return measured_rates(devices.pop()) if len(devices) == 1 else None
