"""The backend that `torch.compile(model, backend="aot_hooks")` finds by entry point.

      gm, inputs --+-- no setting, no region -----------------------> the inner compiler, as stock torch calls it
                   |
                   +-- ambient setting, regions, options["policy"] --> the inner compiler with a partition of our own:
                           min-cut partition, then rewrite(fw, bw)     and, at run time, torch's hooks out of sight

Two inner compilers: "inductor", and "aten", which runs AOTAutograd's graphs as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

import cudagraph
from cudagraph.compile.compilation import Compilation

from . import cudagraphs, records, unused
from .cache import lookup, plan_files
from .cache.key import nodes_of
from .cache.lookup import bypassed, through_cache
from .check import first_step
from .context import pairs, region
from .context.in_force import InForce, in_force
from .eager.modules import roots
from .eager.packing import call_compiled
from .errors import AotHooksError, OptionError, in_a_line
from .hook import KEEP
from .identity import probes
from .identity.frozen import described
from .identity.records import Recording, recording
from .offloading import stats as offload_stats
from .options import Options, check_limit, inductor_patches
from .partitioner import (
    PlanningPartition,
    Shared,
    in_parts,
    is_nested,
    may_round,
    partition_without_hooks,
    partitioned_by,
    partitioned_without_hooks,
)
from .passes.chunk_sums import add_in_place
from .passes.partition import parameters_among
from .passes.plan import NOTHING, Plan, Unpacked
from .passes.rewrite import form_of
from .planning import planner as planning
from .planning.assignment import Assignment
from .planning.budget import Budget
from .planning.planner import Planner, is_budget
from .planning.stored import Program
from .settings import recompiles
from .settings.setting import SCOPE, Setting, SettingsOfGraph
from .torch_private import aot, autograd, dynamo, dynamo_trace, inductor, values
from .torch_private.aot_cache import without_autograd_cache

_Compiled = Callable[..., Any]


def last_plans(compiled: Callable[..., Any]) -> tuple[Plan, ...]:
    """The decisions for each graph with a backward that `compiled` has now, oldest first; compiles nothing.

    For a module with compiled blocks: the plans of all blocks. Blocks that share a graph have its plan once.

    Raises `OptionError` if neither `compiled` nor a module in it was made by `torch.compile`.
    """
    wrapper = dynamo.compile_wrapper_of(compiled, inductor_too=True)
    inside = compiled.modules() if wrapper is None and isinstance(compiled, torch.nn.Module) else ()
    found = [wrapper, *(dynamo.compile_wrapper_of(module, inductor_too=True) for module in inside)]
    wrappers = [each for each in found if each is not None]
    if not wrappers:
        raise OptionError(f"last_plans takes what torch.compile returned, got {in_a_line(compiled)}")
    plans = records.Plans(plan for each in wrappers for plan in records.plans_of(each))
    if not plans and isinstance(compiled, torch.nn.Module) and wrapper is not None:
        unused.compiled_in_place(compiled)
    return plans


def reset() -> None:
    """Forget plans and interned settings, and free the host memory of `offload`. Compiled functions stay as they are.

    `torch._dynamo.reset()` calls it.
    """
    records.forget()
    probes.forget()
    cudagraphs.forget()
    offload_stats.reset()
    pairs.forget()
    region.forget()
    lookup.forget()
    first_step.forget()
    planning.forget()
    unused.forget()


def aot_hooks(
    gm: GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile `gm` with the saved-tensor hooks in force inlined.

    Args:
        gm, inputs: what Dynamo hands a backend.
        mode: passed on to Inductor, as in `torch.compile(mode=...)`.
        options: see `Options`.

    Raises:
        OptionError: an unknown option or mode.
        HookContractError, HookTraceError, PolicyError: from the rewrite; Dynamo wraps them.
    """
    wrapper = dynamo.calling_compile_wrapper()
    if wrapper is None:
        return _compile_graph(gm, inputs, mode, Options.parse(options))
    return compile_for(wrapper, gm, inputs, mode, options, "aot_hooks")


def compile_for(
    wrapper: Any,
    gm: GraphModule,
    inputs: Sequence[Any],
    mode: str | None,
    options: Options | Mapping[str, Any] | None,
    backend: str,
    enabled: pairs.Pair | None = None,
) -> _Compiled:
    """Compile `gm` for a function whose `torch.compile` wrapper is `wrapper`; errors are wrapped as of `backend`.

    `enabled`: the pair of an `enable` whose policy may change. It then stands for the policy of the options.
    """
    try:
        parsed = options if isinstance(options, Options) else Options.parse(options)
        return _compile_graph(gm, inputs, mode, parsed, wrapper, enabled)
    except AotHooksError as e:
        # wrapped here, so that our message stands first
        raise dynamo.backend_failure(backend, e) from None


def with_options(options: Mapping[str, Any] | None) -> Callable[..., Any]:
    """The backend with these options; it ignores those that it is called with."""
    parsed = Options.parse(options)

    def aot_hooks_with_options(gm: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        return _compile_graph(gm, inputs, None, parsed)

    return aot_hooks_with_options


aot_hooks.reset = reset  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


def _compile_graph(
    gm: GraphModule,
    inputs: Sequence[Any],
    mode: str | None,
    options: Options,
    wrapper: Any = None,
    enabled: pairs.Pair | None = None,
) -> _Compiled:
    """Compile a graph of Dynamo, and append its plans to those of `wrapper`, which `torch.compile` returned.

    Guards protect the compiled graph at run time:

    - a context around the call: Dynamo guards on the id of its pair, so the graph keeps the pair alive;
    - a context inside of the graph: Dynamo guards on the objects that its functions read;
    - functions of the user's, around the call or in the options: `_checked` compares them with the traced ones;
    - a policy in the options: `_guard_hooks_of_others` keeps it from calls under these, and these from its graphs;
    - hooks on torch's stack: `_without_hooks` hides those that are inlined, `_with_eager_hooks` is for the others.
    """
    dynamo.reset_with_dynamo(aot_hooks)
    patches = inductor_patches(options, mode)
    hooks = asked = in_force(gm, inputs, options, enabled)
    if options.policy is not None and hooks.pair is None:
        _guard_hooks_of_others()
    limit = check_limit(options.check) if hooks.settings else None
    left = NOTHING if limit is None else first_step.unpacked(dynamo.code_being_compiled(), asked.settings)
    program = _program(gm, inputs, asked, mode, options, patches, left)
    planner = Planner(hooks.setting, gm, inputs, wrapper, program, partial(plan_files.why_not_loaded, program))
    hooks = dataclasses.replace(hooks, setting=planner.setting())
    if planner.has_budget and options.inner == "inductor":
        patches = inductor.IN_PLANNED_ORDER | patches
    capture = cudagraphs.capture_options(options.inner, options.cudagraphs)
    listed = records.recording_graphs()
    again = aot.recomputing_pointwise(options.recompute_pointwise and not planner.has_budget)
    if not hooks.settings and listed is None:
        with again:
            return _compile_as_stock(gm, inputs, options, patches, capture)

    def compile_version(gm: GraphModule, setting: Setting | None, plans: list[Plan]) -> _Compiled:
        """`gm` with `setting`, which a budget has made of that in `hooks`."""
        return versions.compile(gm, dataclasses.replace(hooks, setting=setting), plans)

    versions = _Versions(inputs, mode, options, patches, capture, planner, left, roots(), listed is not None)
    graph = records.CompiledGraph()
    with again, autograd.covered_hooks(), recording() as seen:
        twin = None if limit is None else aot.twin(gm)
        compiled = planner.compile(gm, graph.plans, compile_version)
        plans = [*graph.plans, *planner.tight_plans]
        without = None if twin is None else _compiled_without(twin, versions, hooks, plans)
    known = records.plans_of(wrapper) if hooks.settings and wrapper is not None else None
    compiled = planner.by_call(compiled, graph.plans, known)
    if without is not None and limit is not None:
        checked = first_step.Checked(limit=limit, settings=asked.settings, listed=known, left=left, **without)
        compiled = partial(checked, compiled)
    if known is not None:
        known.extend(graph.plans)
    if listed is not None:
        listed.append(graph)
    checkpointed = _checkpointed_bytes(gm)
    counted = listed is not None
    return _wrapped(compiled, graph, hooks, seen, wrapper, planner, checkpointed=checkpointed, counted=counted)


def _compile_as_stock(
    gm: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    patches: dict[str, Any],
    capture: cudagraph.Options | None,
) -> _Compiled:
    """Compile a graph without hooks as stock torch would: torch's cache knows it by torch's own key."""
    compilation = cudagraphs.compilation(capture) if capture is not None else None
    compile_it = partial(_compile, gm, inputs, options, patches, compilation)
    return _with_eager_hooks(lookup.without_hooks(gm, inputs, compile_it))


@dataclass(frozen=True, eq=False)
class _Versions:
    """Compiles the versions of one graph of Dynamo: with its hooks, tighter ones for some calls, one without hooks.

    Attributes:
        inputs, mode, options: what Dynamo hands a backend.
        patches: settings of Inductor.
        capture: options of `cudagraph`; None: nothing is captured.
        unpacked: saved tensors that stay as they are, because packing them made gradients wrong.
        paths: modules by Dynamo's names, see `modules.roots`.
        live: plans have the bytes alive along both graphs, for a report.
    """

    inputs: Sequence[Any]
    mode: str | None
    options: Options
    patches: dict[str, Any]
    capture: cudagraph.Options | None
    planner: Planner
    unpacked: Unpacked
    paths: Mapping[str, str]
    live: bool

    def compile(
        self,
        gm: GraphModule,
        hooks: SettingsOfGraph,
        plans: list[Plan],
        *,
        twin_of: SettingsOfGraph | None = None,
    ) -> _Compiled:
        """The version with `hooks`, from torch's cache if that has it. Its plans are appended to `plans`.

        `twin_of`: `gm` is the twin of the graph with these settings, to compare gradients with. Nothing of it is
        captured, all is saved unpacked, and its backward may run several times.
        """
        is_twin = twin_of is not None
        compilation = cudagraphs.compilation(self.capture) if self.capture is not None and not is_twin else None
        donated: list[bool] = []
        unpacked = NOTHING if is_twin else self.unpacked
        partition = PlanningPartition(
            hooks,
            self.options,
            plans,
            self.paths,
            donated,
            parameters=parameters_among(self.inputs),
            live=self.live,
            at_run_time=self.capture is None and not inductor.copies_are_static(self.patches),
            unpacked=unpacked,
            twin_of=None if self.planner.has_budget else twin_of,
        )

        def compile_graph(compiling: Callable[[], None] = lambda: None) -> _Compiled:
            announced = _with_donations(compiling, donated, repeats=is_twin)
            return _compile(gm, self.inputs, self.options, self.patches, compilation, partition, announced)

        if why := _why_not_stored(self.options, compilation, reported=self.live):
            return bypassed(why, compile_graph)
        return through_cache(
            gm,
            self.inputs,
            hooks,
            options=self._in_key(gm, compilation, unpacked, twin_of),
            roots=self.paths,
            plans=plans,
            compile_graph=compile_graph,
            refused=lambda: compilation.refused if compilation is not None else "",
        )

    def _in_key(
        self, gm: GraphModule, compilation: Compilation | None, unpacked: Unpacked, twin_of: SettingsOfGraph | None
    ) -> dict[str, Any]:
        """What the compiled code depends on beside the graph and its settings."""
        in_key = _made_with(self.mode, self.options, self.patches) | self.planner.key()
        if compilation is not None:
            in_key["cudagraphs"] = compilation.key(gm)
        if twin_of is not None:
            in_key["check"] = "without hooks", *form_of(twin_of), may_round(twin_of)
        elif unpacked != NOTHING:
            in_key["check"] = unpacked
        return in_key


def _with_donations(compiling: Callable[[], None], donated: Sequence[bool], *, repeats: bool) -> Callable[[], None]:
    """A function to call before each graph is compiled: it calls `compiling`, and takes donations back where it must.

    A backward that reuses the memory of saved tensors raises if it runs a second time. So it may do so only where it
    would without hooks. `donated`: see `PlanningPartition`. `repeats`: the backward may run several times in any case.
    """

    def before_each_graph() -> None:
        compiling()
        if repeats or (donated and not donated[-1]):
            aot.donate_nothing()

    return before_each_graph


def _made_with(mode: str | None, options: Options, patches: Mapping[str, Any]) -> dict[str, Any]:
    """The options that decide what the code computes, as keys of caches and of saved plans have them."""
    return {
        "mode": mode,
        "inductor": patches,
        "inner": options.inner,
        "chunk": options.chunk,
        "tile": options.tile,
    }


def _program(
    gm: GraphModule,
    inputs: Sequence[Any],
    hooks: InForce,
    mode: str | None,
    options: Options,
    patches: Mapping[str, Any],
    unpacked: Unpacked,
) -> Program | None:
    """What the plan of a budget depends on; None without a budget."""
    if not is_budget(hooks.setting):
        return None
    made_with = _made_with(mode, options, patches) | {"check": unpacked, "cudagraphs": bool(options.cudagraphs)}
    return plan_files.program_of(gm, inputs, hooks.setting, hooks.regions, options=made_with, roots=roots())


def _compiled_without(
    gm: GraphModule, versions: _Versions, hooks: SettingsOfGraph, plans: list[Plan]
) -> dict[str, Any] | None:
    """Fields of `first_step.Checked`, for `options["check"]`: `gm`, a twin of a graph, is compiled without hooks.

    `plans`: those of the graph with `hooks`. None if they pack nothing, or if the graphs can't be compared.
    """
    if not any(d.hook is not KEEP for plan in plans for d in plan.decisions):
        return None
    if why := first_step.why_not(gm):
        first_step.warn_not_compared(why)
        return None
    found: dict[str, Any] = {"plans": plans, "names": dynamo.names_of_inputs(gm), "written": set(aot.written_inputs())}
    plans_without: list[Plan] = []
    keep = SettingsOfGraph(Setting(KEEP, SCOPE), dict.fromkeys(hooks.regions, Setting(KEEP, SCOPE)))
    try:
        with aot.second_compilation():
            run = versions.compile(gm, keep, plans_without, twin_of=hooks)
    except RuntimeError as e:  # the graph with hooks is fine
        first_step.warn_not_compared(f"it can't be compiled without hooks ({type(e).__name__}: {e})")
        return None
    if not plans_without:
        return None
    return found | {"without": (run, plans_without[-1]), "code": dynamo.code_being_compiled()}


def _guard_hooks_of_others() -> None:
    """Guard that calls inside of eager saved-tensor hooks, such as torch's checkpoint, use graphs of their own.

    Dynamo does not guard such hooks. As the innermost setting, they keep the policy of the options away.
    """
    around = autograd.top_hooks() is not None
    what = f"{'eager' if around else 'no eager'} saved-tensor hooks are around the call"
    dynamo_trace.guard_state(lambda: (autograd.top_hooks() is not None) == around, what)


def _why_not_stored(options: Options, compilation: Compilation | None, *, reported: bool) -> str:
    """Why a graph with hooks bypasses torch's cache; "" if it does not."""
    if options.inner == "aten" and (compilation is not None or not aot.is_stored()):
        return "inner 'aten' is stored with torch's bundled_autograd_cache only"
    if reported:
        return "a report needs the graphs"
    if compilation is not None and (why := compilation.why_not_stored):
        return f"captured in CUDA graphs: {why}"
    return ""


def _checkpointed_bytes(gm: GraphModule) -> int:
    """Bytes of what is computed inside of the user's checkpoints in `gm`, each storage once, at example sizes."""
    calls = [node for node in nodes_of(gm) if node.target is torch.ops.higher_order.tag_activation_checkpoint]
    nbytes: dict[int, int] = {}
    for call in calls:
        body: Any = call.graph.owning_module.get_submodule(call.args[0].target)  # type: ignore[union-attr, arg-type]
        found = [(node.op, node.meta.get("example_value")) for node in body.graph.nodes]
        tensors = [(op, value) for op, value in found if isinstance(value, torch.Tensor)]
        given = {values.storage_key(value) for op, value in tensors if op == "placeholder"}
        computed = {values.storage_key(value): value for _, value in tensors}
        nbytes |= {key: values.hint(x.untyped_storage().nbytes()) for key, x in computed.items() if key not in given}
    return sum(nbytes.values())


def _wrapped(
    compiled: _Compiled,
    graph: records.CompiledGraph,
    hooks: InForce,
    seen: Recording,
    wrapper: Any,
    planner: Planner,
    *,
    checkpointed: int,
    counted: bool,
) -> _Compiled:
    """`compiled` in the wrappers that apply, the innermost first; notes what the graph was made of."""
    suspects = unused.compiled(hooks.settings, graph.plans, checkpointed)
    for key, setting in hooks.regions.items():
        recompiles.note_compilation(wrapper, setting, region.regions[key].record_for(seen))
    rule = hooks.setting.rule if hooks.setting is not None and graph.plans else None
    check: Callable[[], None] | None = None
    if hooks.setting is not None and rule is not None and not described(rule).frozen:
        record, check = pairs.record_for(seen, hooks.setting, hooks.pair, hooks.enabled)
        recompiles.note_compilation(wrapper, hooks.setting, record)
    if counted:  # counts the runs, for a report
        compiled = graph.counted(compiled)
    compiled = unused.warning_if_unused(compiled, suspects)
    compiled = planner.wrap(compiled, graph.plans)
    if check is not None:  # raises if a user's function has changed since
        compiled = _checked(compiled, check)
    return _with_eager_hooks(compiled) if hooks.pair is None else _without_hooks(compiled, hooks.pair)


def _checked(compiled: _Compiled, check: Callable[[], None]) -> _Compiled:
    def run(*args: Any) -> Any:
        check()
        return compiled(*args)

    return run


def _without_hooks(compiled: _Compiled, pair: Any) -> _Compiled:
    """`compiled`, run with torch's stack of hooks out of sight; keeps `pair`, whose id is in Dynamo's guards."""

    def run(*args: Any) -> Any:
        return autograd.call_without_hooks(compiled, args)

    run._aot_hooks_pair = pair  # type: ignore[attr-defined]
    return run


def _with_eager_hooks(compiled: _Compiled) -> _Compiled:
    """`compiled`, which tells eager hooks around it which of its saved tensors are its inputs and outputs.

    A context that `torch.utils.checkpoint` covers has a warning here: Dynamo does not guard these hooks, so nothing may
    be compiled for the call.
    """

    def run(*args: Any) -> Any:
        top = autograd.top_hooks()
        if top is not None and isinstance(top[0], pairs.EagerPack):
            return call_compiled(compiled, args)
        if top is not None and pairs.open_contexts.stack and autograd.is_checkpointed():
            unused.checkpointed(pairs.open_contexts.stack[-1][0].setting)
        return compiled(*args)

    return run


def _compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    patches: dict[str, Any],
    compilation: Compilation | None,
    partition: Callable[..., Any] | None = None,
    compiling: Callable[[], None] = lambda: None,
) -> _Compiled:
    """Compile by the inner compiler, with `partition`, or as stock torch does if it is None."""
    whole_or_in_parts = partial(in_parts, options)
    if options.inner == "aten":
        compilers = compilation.aten_compilers() if compilation is not None else None
        stored = partition is not None and aot.is_stored()
        # what runs as it is can be stored with a key of ours only: torch's has no partition
        with contextlib.nullcontext() if stored else without_autograd_cache():
            partition = partition or partial(partition_without_hooks, options=options)
            return aot.compile_graph(
                gm,
                inputs,
                lambda *args, **kwargs: tuple(map(add_in_place, partition(*args, **kwargs))),
                compilers,
                compiling,
                stored=stored,
                without_gradients=lambda graph: add_in_place(whole_or_in_parts(graph)),
            )
    capture = compilation.inner_compile if compilation is not None else None
    with compilation.through_cache(gm) if compilation is not None else contextlib.nullcontext():
        if partition is not None:
            patches = partitioned_by(partition, gm, patches)
            return inductor.compile_with_hooks(gm, inputs, patches, compiling, capture, whole_or_in_parts)
        patches = partitioned_without_hooks(options, patches)
        return inductor.compile_stock(gm, inputs, patches, capture, without_gradients=whole_or_in_parts)


def plan_graph(
    gm: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    explore: Callable[[Plan, Callable[[Budget], Plan]], None] | None = None,
) -> tuple[list[Plan], Assignment | None]:
    """What `aot_hooks(gm, inputs)` would decide, with the live bytes, and the budget that decides if there is one.

    Makes no code. `gm` may be changed. `explore` is called with each plan, and with a function that plans the same
    graph for a budget: the graph is traced once for all of them, and what they have in common is made once. Not where
    a context or `recompute_pointwise` decides.
    """
    plans: list[Plan] = []
    at_run_time = not options.cudagraphs and not inductor.copies_are_static(options.inductor or {})
    hooks = in_force(gm, inputs, options, None)
    run: dict[str, Any] = {"parameters": parameters_among(inputs), "live": True, "at_run_time": at_run_time}
    paths = roots()
    planned = PlanningPartition(hooks, options, plans, paths, [], **run)
    partition: Callable[..., tuple[GraphModule, GraphModule]] = planned
    shared = Shared(options.inner == "inductor")

    def explored(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        """`planned`, which then passes the plan to `explore`. A nested region is planned with the graph around it."""

        def plan_with(rule: Budget) -> Plan:
            found: list[Plan] = []
            own = dataclasses.replace(options, policy=rule)
            budgeted = dataclasses.replace(in_force(gm, inputs, own, None), regions=hooks.regions)
            PlanningPartition(budgeted, own, found, paths, [], shared=shared, **run)(joint, joint_inputs, **kwargs)
            return found[-1]

        graphs = planned(joint, joint_inputs, **kwargs)
        if explore is not None and not is_nested(joint_inputs):
            explore(plans[-1], plan_with)
        return graphs

    if explore is not None and hooks.setting is not None and hooks.pair is None and not options.recompute_pointwise:
        partition = explored
    rule = None if hooks.setting is None else hooks.setting.rule
    again = aot.recomputing_pointwise(options.recompute_pointwise and not isinstance(rule, Budget))
    with again, autograd.covered_hooks(), without_autograd_cache():
        if options.inner == "aten":
            aot.compile_graph(gm, inputs, partition, without_gradients=partial(in_parts, options))
        else:
            inductor.partition_only(gm, inputs, partitioned_by(partition, gm, dict(options.inductor or {})))
    return plans, rule if isinstance(rule, Assignment) else None
