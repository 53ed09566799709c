"""Partitioned graphs in, graphs with hooks out, and the `Plan` of the decisions.

      (fw, bw) --boundary--> saved values --decide--> choices --trace_units--> units --inline--> (fw', bw') + Plan

A `Choice` is data and is never changed: each pass returns new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from ..graphs.lifetimes import is_packed_alone, random_masks
from ..graphs.nodes import input_storages, storage_of
from ..graphs.saved import Boundary, SavedTensor, SavedValue, boundary, crossing_pairs
from ..hook import KEEP, Hook
from ..library.lossless import Lossless
from ..offloading.hook import settings_of
from ..offloading.placement import Leaf, place
from ..offloading.transfers import offload_wait
from ..settings.setting import SCOPE, SettingsOfGraph
from ..steps.schedule import Transfer
from ..torch_private import inductor
from ..torch_private.inductor_fusion import WRITTEN
from ..torch_private.values import hint
from .answers import ANSWERS, add_answers
from .dedup_copies import dedup_copies
from .edits import log, show
from .gathers import regather, with_gathers
from .inline import inline, lift_constants
from .multiples import multiply_anew, with_multiples
from .norm_inputs import all_norms, norms_of_rounded, restore_norm_inputs
from .plan import NOTHING, UNCOPIED, Choice, Decision, Plan, Unpacked, decide
from .results import save_results, with_results
from .split import split_decisions
from .sum_of_one import sum_to_one_if_rounded
from .units import Packing, Tracer, Unit, choose_positions, leaf_bytes_of, trace_units, tracer
from .view_regions import label_views


class Form(NamedTuple):
    """What hooks ask of the graphs that they are put into.

    Attributes:
        lossy: one may round, so decisions are split off the values that they read.
        relative: all are off by a share of each number, so multiples need not be saved.
    """

    lossy: bool
    relative: bool


@dataclass(frozen=True, kw_only=True)
class RewriteOptions:
    """How hooks are put into two graphs, whatever the hooks are.

    Attributes:
        for_inductor: decompose the traced hooks with Inductor's table, and form them for its kernels.
        trace: the `tracer` of a budget, which plans positions and bytes; None: a new one, without a budget.
        packs_early: without a budget, pack a value in a kernel of its own where memory is tight (`choose_positions`).
        at_run_time: calls of the graphs decide what `offload(across_graphs=True)` sends.
        unpacked: saved tensors that stay as they are.
        as_if: save the values that hooks of this form would get, whatever the settings are.
    """

    for_inductor: bool
    trace: Tracer | None = None
    packs_early: bool = True
    at_run_time: bool = False
    unpacked: Unpacked = NOTHING
    as_if: Form | None = None


def rewrite(
    fw: GraphModule,
    bw: GraphModule,
    settings: SettingsOfGraph,
    options: RewriteOptions,
    *,
    num_fwd_outputs: int,
    static_inputs: Iterable[int],
    parameters: Collection[Node] = (),
    roots: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """Put the hooks of `settings` into both graphs, in place.

    Args:
        num_fwd_outputs: how many of the forward's outputs are the user's.
        static_inputs: indices of the forward's inputs that are parameters or buffers.
        parameters: the forward's inputs that are parameters.
        roots: modules by Dynamo's names for them, see `modules.roots`.

    Raises HookContractError, HookTraceError, PolicyError, UnsupportedGraphError.
    """
    show("forward before", fw)
    show("backward before", bw)
    if settings.regions:
        label_views(bw.graph)
    replaced: tuple[Collection[SavedTensor], Collection[str]] = ((), ())
    multiples: tuple[Collection[SavedTensor], Collection[str]] = ((), ())
    form = options.as_if or form_of(settings)
    if form.lossy:
        _split_what_crosses(fw, bw, num_fwd_outputs, settings)
        if options.trace is None:  # a budget chooses itself what is saved and what is computed again
            replaced = save_results(fw, bw, num_fwd_outputs, roots)
        if form.relative:
            multiples = multiply_anew(fw, bw, num_fwd_outputs, parameters=parameters, roots=roots)
    read_boundary = partial(boundary, fw, bw, num_fwd_outputs, static_inputs, roots)
    cross, choices, gathered = _chosen(fw, bw, num_fwd_outputs, settings, options, read_boundary)
    decompositions = inductor.decompositions() if options.for_inductor else None
    if options.as_if is not None and form.lossy:
        _bear_rounding(bw, cross, decompositions)
    trace = options.trace or tracer(options.for_inductor)
    choices, units = trace_units(choices, trace, for_inductor=options.for_inductor)
    transfers: tuple[Transfer, ...] = ()
    if units:
        if options.for_inductor:
            units = choose_positions(units, fw, early=options.packs_early and options.trace is None)
        norms = norms_of_rounded(bw, cross, units)
        units = inline(fw, bw, cross, units, decompositions)
        restore_norm_inputs(bw, norms, decompositions=decompositions)
        if options.for_inductor:
            _form_for_inductor(fw, bw, units)
        choices, units, transfers = _place_transfers(
            fw, bw, num_fwd_outputs, choices, units, fused=options.for_inductor, at_run_time=options.at_run_time
        )
        show("forward after", fw)
        show("backward after", bw)
    plan = with_gathers(with_results(_as_plan(choices, units, transfers), *replaced), gathered)
    plan = with_multiples(plan, *multiples)
    log.debug("plan: %d saved tensors, %d packed", len(plan.decisions), sum(d.hook is not KEEP for d in plan.decisions))
    return plan


def _bear_rounding(bw: GraphModule, cross: Boundary, decompositions: Mapping[Any, Any] | None) -> None:
    """Restore inputs of norms and results of softmax in `bw`, in place, as a graph with hooks does.

    A check rounds saved tensors of this graph when it runs. Those that it does not round keep their bits.
    """
    norms = all_norms(bw, cross)
    sum_to_one_if_rounded(bw, cross.tensors, decompositions)
    restore_norm_inputs(bw, norms, decompositions=decompositions, keeps_exact=True)


def form_of(settings: SettingsOfGraph) -> Form:
    """The form of the hooks of `settings`. An exact hook needs no parts."""
    lossy = any(getattr(setting.rule, "lossy", True) for setting in settings.settings)
    return Form(lossy, lossy and _is_relative(settings))


def _is_relative(settings: SettingsOfGraph) -> bool:
    """Whether one hook rounds all that is no input, by a share of each number.

    Not in float16: below 6e-5 its numbers are off by more, where their multiples need not be.
    """
    setting = settings.setting
    if settings.regions or setting is None or setting.scope not in (None, SCOPE):
        return False
    rule = setting.rule
    is_half = getattr(getattr(rule, "pack", None), "dtype", None) is torch.float16
    return isinstance(rule, Hook) and rule.lossy and rule.relative and not is_half


def _split_what_crosses(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int, settings: SettingsOfGraph) -> None:
    """Split decisions off the readers of saved tensors; of inputs too, where a scope lets settings pack them."""
    inputs_too = any(setting.scope != "donated" for setting in settings.settings)
    pairs = crossing_pairs(fw, bw, num_fwd_outputs)
    saved = [(n, slot) for n, slot in pairs if isinstance(n, Node) and (inputs_too or n.op != "placeholder")]
    split_decisions(bw, [slot for _, slot in saved])


def _chosen(
    fw: GraphModule,
    bw: GraphModule,
    num_fwd_outputs: int,
    settings: SettingsOfGraph,
    options: RewriteOptions,
    read_boundary: Callable[[], Boundary],
) -> tuple[Boundary, tuple[Choice, ...], tuple[Choice, ...]]:
    """What crosses, the choice for each saved tensor, and the choices of what is gathered again in the backward."""
    ambient, regions = settings.setting, settings.regions
    cross = read_boundary()
    choices = decide(cross, ambient, regions, options.unpacked, for_inductor=options.for_inductor)
    gathered: tuple[Choice, ...] = ()
    exact = ambient is not None and isinstance(ambient.rule, Lossless)
    if options.trace is None and (gathered := regather(fw, bw, num_fwd_outputs, choices, also_kept=exact)):
        cross = read_boundary()
        choices = decide(cross, ambient, regions, options.unpacked, for_inductor=options.for_inductor)
    cross, choices = add_answers(fw, bw, cross, choices, for_inductor=options.for_inductor)
    return cross, dedup_copies(choices, cross.kept_storages), gathered


def _form_for_inductor(fw: GraphModule, bw: GraphModule, units: Sequence[Unit]) -> None:
    """Constants and random operators of hooks, in the forms that Inductor takes; masks that are written to memory."""
    tags = {tag for unit in units for operator in unit.operators for tag in getattr(operator, "tags", ())}
    for gm in (fw, bw):
        lift_constants(gm)
        if torch.Tag.nondeterministic_seeded in tags:
            inductor.replace_random(gm)
    for mask in filter(is_packed_alone, random_masks(fw.graph.nodes)):
        mask.meta[WRITTEN] = True


def _place_transfers(
    fw: GraphModule,
    bw: GraphModule,
    num_fwd_outputs: int,
    choices: Sequence[Choice],
    units: Sequence[Unit],
    *,
    fused: bool,
    at_run_time: bool,
) -> tuple[tuple[Choice, ...], tuple[Unit, ...], tuple[Transfer, ...]]:
    """Places the copies of `offload` in both graphs. Returns the choices and units as they are then, and the copies.

    `place` may leave a tensor on the device. Then its choice has the reason, and its unit the bytes.
    """
    if not any(offload_wait in unit.operators for unit in units):
        return tuple(choices), tuple(units), ()
    leaves: dict[Node, Leaf] = {}
    for unit in units:
        for packing in unit.packings:
            if (settings := settings_of(packing.hook)) is not None:
                hosts = [leaf for leaf in packing.leaves if leaf.target is offload_wait]
                leaves.update((leaf, Leaf(unit.saved.row.name, settings)) for leaf in hosts)
    transfers, stay = place(
        fw, bw, num_fwd_outputs=num_fwd_outputs, leaves=leaves, fused=fused, at_run_time=at_run_time
    )
    inputs = input_storages(fw.graph)
    current = {choice.value: choice for choice in choices}

    def placed(unit: Unit, packing: Packing) -> Packing:
        """`packing` with the bytes that it has on the device; the choices in `current` get the reasons."""
        if (settings := settings_of(packing.hook)) is None:
            return packing
        staying = [stay[leaf] for leaf in packing.leaves if leaf in stay]
        on_device = [*(node for node, _ in staying), *(leaf for leaf in packing.leaves if leaf not in leaves)]
        if staying:
            choice = current[unit.saved]
            reasons = ", ".join(dict.fromkeys(why for _, why in staying))
            current[unit.saved] = replace(choice, reason=f"{choice.reason}; {reasons}")
        if staying and len(staying) == len(packing.leaves) and settings.exact:
            # nothing is packed: the value and its views are as they were
            for saved in (unit.saved, *unit.views):
                uses = tuple((KEEP if h == packing.hook else h, rs) for h, rs in current[saved].uses)
                current[saved] = replace(current[saved], uses=uses)
        new = (node for node in on_device if storage_of(node) not in inputs)
        return replace(packing, packed_bytes=leaf_bytes_of(new))

    after = [replace(unit, packings=tuple(placed(unit, packing) for packing in unit.packings)) for unit in units]
    return tuple(current.values()), tuple(after), transfers


def _as_plan(choices: Sequence[Choice], units: Sequence[Unit], transfers: tuple[Transfer, ...]) -> Plan:
    unit_of: dict[SavedValue, Unit] = {unit.saved: unit for unit in units}
    decisions = []
    counted: set[int] = set()
    for choice in choices:
        row = choice.value.row
        alive_anyway = row.is_input or row.is_static or row.storage in counted
        counted.add(row.storage)
        unpacked = 0 if alive_anyway else row.nbytes
        packed = unpacked if choice.view_of is None else 0
        if (unit := unit_of.get(choice.value)) is not None:
            packed = (unpacked if unit.keep else 0) + sum(p.packed_bytes for p in unit.packings)
        hook = ANSWERS if choice.is_dropped else next((h for h, _ in choice.uses if h not in (KEEP, UNCOPIED)), KEEP)
        saved_bytes = 0 if choice.is_answer else unpacked
        seen, layout = choice.seen.meta["val"], None
        if isinstance(seen, torch.Tensor) and seen.layout is torch.strided:
            layout = tuple(map(hint, seen.shape)), tuple(map(hint, seen.stride())), seen.dtype
        decisions.append(Decision(row, hook, choice.reason, packed, saved_bytes, choice.settings, layout))
    return Plan(tuple(decisions), transfers)
