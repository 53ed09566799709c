"""The pass: partitioned graphs in, graphs with hooks out, and the `Plan` of what was decided.

      (fw, bw) --boundary--> rows --decide--> choices --trace_hook--> units --inline--> (fw', bw') + Plan

Everything it sees and makes goes to the logger "aot_hooks" (`TORCH_LOGS="+aot_hooks"`) and to torch's structured trace.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..graphs.fusion_memory import alive_bytes, fuses
from ..graphs.nodes import producer, storage_of
from ..graphs.saved import SavedValue, boundary
from ..hook import KEEP, Hook, compiling_for
from ..offloading.hook import settings_of
from ..offloading.placement import Leaf, place
from ..offloading.schedule import Transfer
from ..offloading.transfers import offload_wait
from ..settings.setting import Setting
from ..torch_private import inductor
from ..torch_private import values as torch_values
from .answers import ANSWERS, add_answers
from .dedup_copies import look_through
from .inline import Packing, Unit, inline, last_use, lift_constants, packed_bytes
from .plan import Choice, Decision, Plan, decide
from .trace import TracedHook, trace_hook

__all__ = ["rewrite"]

log = logging.getLogger("aot_hooks")

_WORTH_A_KERNEL = 0.01  # of the peak


def rewrite(
    fw: GraphModule,
    bw: GraphModule,
    *,
    num_fwd_outputs: int,
    static_inputs: Iterable[int],
    ambient: Setting | None,
    regions: Mapping[str, Setting],
    for_inductor: bool,
    roots: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """Put the hooks of `ambient` and `regions` into both graphs, in place.

    Args:
        num_fwd_outputs: how many of the forward's outputs are the user's.
        static_inputs: indices of the forward's inputs that are parameters or buffers.
        regions: settings by the key that nodes carry in `meta["custom"]["aot_hooks"]`.
        for_inductor: decompose what is traced as Inductor wants it.
        roots: modules by Dynamo's names for them, see `modules.roots`.

    Raises:
        HookContractError, HookTraceError, PolicyError, UnsupportedGraphError.
    """
    _show("forward before", fw)
    _show("backward before", bw)
    cross = boundary(fw, bw, num_fwd_outputs, static_inputs, roots)
    choices = decide(cross, ambient, regions)
    choices = add_answers(fw, bw, cross, choices, for_inductor=for_inductor)
    look_through(choices, cross.kept_storages)
    tracer = _Tracer(inductor.decompositions() if for_inductor else None)
    units: dict[int, Unit] = {}
    for choice in choices:
        if choice.packs and choice.view_of is None:
            unit = _unit(choice, tracer)
            if unit is not None:
                units[id(choice.value)] = unit
        elif choice.is_dropped:
            units[id(choice.value)] = Unit(choice.value, [], False, choice.value.fw_node)
    for choice in choices:
        unit = units.get(id(choice.view_of)) if choice.view_of is not None else None
        if unit is not None:
            unit.views.append(choice.value)
            unit.packings[0].readers += choice.uses[0][1]
            if choice.replay:
                unit.replays[choice.value.bw_node] = choice.replay
        elif choice.view_of is not None:  # what was to bring it back stays as it is, so it does too
            choice.uses, choice.reason = [(KEEP, choice.uses[0][1])], f"{choice.reason}, which stays"
            choice.view_of = None
    transfers: tuple[Transfer, ...] = ()
    if units:
        if for_inductor:
            _place_for_cuda(fw, units.values())
        targets = inline(fw, bw, cross, units.values())
        if for_inductor:
            lift_constants(fw)
            lift_constants(bw)
        if for_inductor and any("rand" in str(t) for t in targets):
            inductor.replace_random(fw)
            inductor.replace_random(bw)
        if offload_wait in targets:
            transfers = _place_transfers(fw, bw, num_fwd_outputs, choices, units, for_inductor)
        _show("forward after", fw)
        _show("backward after", bw)
    plan = _plan(choices, units, transfers)
    log.debug("plan: %d saved tensors, %d packed", len(plan.decisions), sum(d.hook is not KEEP for d in plan.decisions))
    return plan


class _Tracer:
    """Traces a hook once for all saved tensors of the same static sizes."""

    def __init__(self, decompositions: dict[Any, Any] | None) -> None:
        self.decompositions = decompositions
        self.known: dict[Any, TracedHook] = {}
        self.checked: set[Hook] = set()

    def __call__(self, hook: Hook, value: torch.Tensor, saved: SavedValue) -> TracedHook:
        numbers = (*value.shape, *value.stride())
        key: Any = None
        if all(isinstance(n, int) for n in numbers):
            layout = (tuple(value.shape), value.stride(), value.is_conj(), value.is_neg())
            key = (hook, layout, value.dtype, value.device)
            if key in self.known:
                return self.known[key]
        with compiling_for("aten" if self.decompositions is None else "inductor"):
            traced = trace_hook(
                hook, value, saved.row.describe(), decompositions=self.decompositions, twice=hook not in self.checked
            )
        self.checked.add(hook)
        if key is not None:
            self.known[key] = traced
        _show(f"pack of '{hook.name}' for {saved.row.name}", traced.pack)
        _show(f"unpack of '{hook.name}' for {saved.row.name}", traced.unpack)
        return traced


def _unit(choice: Choice, tracer: _Tracer) -> Unit | None:
    keep = any(hook is KEEP for hook, _ in choice.uses)
    source = choice.value.fw_node if choice.source is None else choice.source
    packings: list[Packing] = []
    uses: list[tuple[Hook, list[Any]]] = []
    for hook, readers in choice.uses:
        traced = tracer(hook, source.meta["val"], choice.value) if hook is not KEEP else None
        if traced is None or traced.identity:
            if traced is not None:
                choice.reason = f"'{hook.name}' leaves it as it is"
            keep = True
            uses.append((KEEP, readers))
        else:
            packings.append(Packing(traced, readers))
            uses.append((hook, readers))
    choice.uses = uses
    for packing in packings:
        packing.in_backward = keep  # it crosses unpacked for other readers anyway: packing it too would only add bytes
    unit = Unit(choice.value, packings, keep, source)
    if choice.source is not None:
        unit.replays[choice.value.bw_node] = choice.replay
    return unit if packings else None


def _place_for_cuda(fw: GraphModule, units: Iterable[Unit]) -> None:
    """Place packings for Inductor's kernels on CUDA; elsewhere they stand right after the value's last use.

    Every packing's scale is found where the value is made, see `Packing`. What is more, mark what is packed there as a
    whole, in a kernel of its own, because memory is tight at its last use.

    Inductor fuses packing with the value's last reader, which saves a pass over the value but keeps the reader's result
    from taking its memory: three 14336-wide tensors of an MLP where two would do. That counts where the forward is at
    its peak, in a deep model the last layer. Elsewhere fusing is better: a kernel between two matrix products made them
    5% slower on an H200.
    """
    units = [u for u in units if not u.keep and len(u.packings) == 1 and u.saved.value.device.type == "cuda"]
    if not units:
        return
    for unit in units:
        unit.packings[0].reduce_first = True
    alive = alive_bytes(fw, {u.saved.fw_node: _leaf_bytes(u) for u in units})
    peak = max(alive.values())
    for unit in units:
        size = torch_values.hint(unit.saved.value.untyped_storage().nbytes())
        if (
            unit.source is unit.saved.fw_node
            and size >= _WORTH_A_KERNEL * peak
            and peak - alive[last_use(unit.saved.fw_node)] < size
        ):
            unit.packings[0].early = not fuses(producer(unit.saved.fw_node))
            log.debug("'%s' is packed early and alone: memory is tight at its last use", unit.saved.row.name)


def _leaf_bytes(unit: Unit) -> int:
    leaves = unit.packings[0].traced.pack.graph.output_node().args[0]
    values = [
        n.meta["val"]
        for n in leaves  # type: ignore[union-attr]
        if isinstance(n, Node) and n.target is not offload_wait
    ]
    return sum(torch_values.hint(v.untyped_storage().nbytes()) for v in values if isinstance(v, torch.Tensor))


def _place_transfers(
    fw: GraphModule, bw: GraphModule, num_fwd_outputs: int, choices: list[Choice], units: dict[int, Unit], fused: bool
) -> tuple[Transfer, ...]:
    """Schedule the copies of `offload`; the choices tell then of what stays on the device after all."""
    sent: list[tuple[Choice, Packing, Hook, bool]] = []
    leaves: dict[Node, Leaf] = {}
    for choice in choices:
        unit = units.get(id(choice.value))
        hooks = [hook for hook, _ in choice.uses if hook is not KEEP]
        for hook, packing in zip(hooks, unit.packings if unit is not None else (), strict=unit is not None):
            settings = settings_of(hook)
            if settings is not None:
                sent.append((choice, packing, hook, settings.exact))
                hosts = [leaf for leaf in packing.leaves if leaf.target is offload_wait]
                leaves.update((leaf, Leaf(choice.value.row.name, settings)) for leaf in hosts)
    transfers, stay = place(fw, bw, num_fwd_outputs=num_fwd_outputs, leaves=leaves, fused=fused)
    anyway = {storage_of(node) for node in fw.graph.find_nodes(op="placeholder")}
    why = {(t.name, t.nbytes): t.placement.reason for t in transfers if not t.placement.offloaded}
    for choice, packing, hook, exact in sent:
        on_device = [stay.get(leaf, leaf) for leaf in packing.leaves if leaf not in leaves or leaf in stay]
        packing.packed_bytes = packed_bytes(leaf for leaf in on_device if storage_of(leaf) not in anyway)
        staying = [leaf for leaf in packing.leaves if leaf in stay]
        if staying:
            reasons = dict.fromkeys(r for (name, _), r in why.items() if name == choice.value.row.name)
            choice.reason = f"{choice.reason}; {', '.join(reasons)}"
        if packing.leaves and len(staying) == len(packing.leaves) and exact:
            # nothing is packed: it and its views are as they were
            for other in choices:
                if other is choice or other.view_of is choice.value:
                    other.uses = [(KEEP, readers) if h == hook else (h, readers) for h, readers in other.uses]
    return transfers


def _plan(choices: list[Choice], units: dict[int, Unit], transfers: tuple[Transfer, ...]) -> Plan:
    decisions = []
    counted: set[int] = set()
    for choice in choices:
        row = choice.value.row
        alive_anyway = row.is_input or row.is_static or row.storage in counted
        counted.add(row.storage)
        unpacked = 0 if alive_anyway else row.nbytes
        unit = units.get(id(choice.value))
        hook = ANSWERS if choice.is_dropped else next((h for h, _ in choice.uses if h is not KEEP), KEEP)
        packed = unpacked
        if unit is not None:
            packed = (unpacked if unit.keep else 0) + sum(p.packed_bytes for p in unit.packings)
        elif choice.view_of is not None:
            packed = 0
        saved_bytes = 0 if choice.is_answer else unpacked
        decisions.append(Decision(row, hook, choice.reason, packed, saved_bytes, choice.settings))
    return Plan(tuple(decisions), transfers)


def _show(title: str, gm: GraphModule) -> None:
    def text() -> str:
        return str(gm.print_readable(print_output=False))

    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s\n%s", title, text())
    torch_values.trace_structured("aot_hooks_" + title.replace(" ", "_").replace("'", ""), text)
