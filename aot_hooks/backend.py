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
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from cudagraph.compile.compilation import Compilation

from . import cudagraphs, records, unused
from .cache import lookup, plan_files
from .cache.key import PACKAGE_DIGEST, nodes_of
from .cache.lookup import bypassed, through_cache, without_collections
from .check import first_step
from .context import pairs, region
from .eager.modules import roots
from .eager.packing import call_compiled
from .errors import AotHooksError, OptionError
from .graphs.nodes import REGION, annotation, crosses_twice, donates
from .graphs.roofline import predicted_ms
from .graphs.saved import SavedTensor
from .hook import KEEP
from .identity import probes
from .identity.frozen import described
from .identity.records import Recording, recording
from .offloading import stats as offload_stats
from .offloading import transfers
from .offloading.placement import decide_at_run_time
from .options import Options, check_limit, inductor_patches
from .passes.casts import cast_again, with_casts
from .passes.chunk import Chunked, chunked, logits_at_peak
from .passes.chunk_sums import add_in_place
from .passes.early import compute_early
from .passes.edits import finished, log
from .passes.live_bytes import LivePoint, live_bytes
from .passes.partition import parameters_among, parameters_of, partitioned, state_of
from .passes.plan import NOTHING, Plan, Unpacked, repeats_across_regions, with_reasons
from .passes.rewrite import rewrite
from .passes.tile import Tiled, tiled
from .passes.units import Trace, tracer
from .planning import planner as planning
from .planning.assignment import Assignment, fitted
from .planning.budget import Budget
from .planning.chunks import CHUNK, TILE, with_chunks
from .planning.kernels import split_and_hold
from .planning.options import Graphs, Joint
from .planning.planner import Planner, is_budget
from .planning.stored import Program
from .planning.trials import Planned
from .settings import recompiles
from .settings.names import carry_names, name_given
from .settings.setting import SCOPE, Setting
from .torch_private import aot, autograd, dynamo, dynamo_trace, inductor
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
        raise OptionError(f"last_plans takes what torch.compile returned, got {compiled!r}")
    plans = tuple(plan for each in wrappers for plan in records.plans_of(each))
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
        raise dynamo.backend_failure(backend, e, inspect.currentframe()) from None


def with_options(options: Mapping[str, Any] | None) -> Callable[..., Any]:
    """The backend with these options; it ignores those that it is called with."""
    parsed = Options.parse(options)

    def aot_hooks_with_options(gm: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        return _compile_graph(gm, inputs, None, parsed)

    return aot_hooks_with_options


aot_hooks.reset = reset  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


@dataclass(frozen=True)
class _InForce:
    setting: Setting | None  # of the context around the call, or of the options
    pair: Any  # the object on torch's stack of hooks that stands for the context; None for the options
    regions: dict[str, Setting]  # of the contexts inside the graph, by key
    enabled: pairs.Pair | None  # of `enable`, if `setting` is its policy

    @property
    def settings(self) -> list[Setting]:
        return [s for s in (self.setting, *self.regions.values()) if s is not None]

    def casts_again(self, reader: Node) -> bool:
        """Whether `reader`, of the backward, may read a cast of a parameter that is made again.

        Not where nothing is in force or all is kept, as that is what torch does. Scope "all" asks for each copy.
        """
        key = annotation(reader, REGION)
        setting = self.setting if key is None else self.regions.get(key)
        return setting is not None and setting.rule is not KEEP and setting.scope != "all"


class _Stock(NamedTuple):
    """A graph as torch partitions it, and what is saved in another way before any hook chooses."""

    live: tuple[LivePoint, ...]
    ms: float
    casts: tuple[SavedTensor, ...]  # values that are cast again in the backward, see passes/casts.py
    donates: bool  # whether the backward may reuse the memory of saved tensors


@dataclass(frozen=True)
class _Shared:
    """What several plans of a graph share, so that it is made once.

    Attributes:
        stocks, made: by joint graph; a budget also plans one with its loss in chunks. `made`: see `Joint`.
    """

    fused: bool
    stocks: dict[GraphModule, _Stock] = dataclasses.field(default_factory=dict)
    made: dict[GraphModule, dict[Any, Graphs]] = dataclasses.field(default_factory=lambda: defaultdict(dict))

    @functools.cached_property
    def trace(self) -> Trace:
        return tracer(self.fused)


def _in_force(gm: GraphModule, inputs: Sequence[Any], options: Options, enabled: pairs.Pair | None) -> _InForce:
    setting, pair = pairs.ambient()
    if setting is None and options.policy is not None and autograd.top_hooks() is None:
        setting = Setting(options.policy, options.scope)
        recompiles.warn_of_limit(dynamo.code_being_compiled(), setting)
    else:
        enabled = None
    if setting is None and options.policy is not None and autograd.is_checkpointed():
        unused.checkpointed(Setting(options.policy, options.scope))
    if setting is not None and setting.eager:
        raise OptionError(f"options['policy']: '{setting.rule!r}' is to run eagerly, which a context can ask for only")
    if setting is not None and isinstance(setting.rule, Budget):
        setting = Setting(
            fitted(setting.rule, (x.device for x in inputs if isinstance(x, torch.Tensor)), inputs), setting.scope
        )
    keys = dict.fromkeys(key for node in nodes_of(gm) if (key := annotation(node, REGION)) is not None)
    regions = {key: region.regions[key].setting.in_scope(options.scope) for key in keys}
    for inside in regions.values():
        if isinstance(inside.rule, Budget):
            raise OptionError(f"{inside.title} is for whole compiled functions; put its context around the call")
    return _InForce(setting and setting.in_scope(options.scope), pair, regions, enabled)


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
    hooks = asked = _in_force(gm, inputs, options, enabled)
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
        compilation = cudagraphs.compilation(capture) if capture is not None else None
        with again:
            compile_it = functools.partial(_compile, gm, inputs, options, patches, None, lambda: None, compilation)
            return _with_eager_hooks(lookup.without_hooks(gm, inputs, compile_it))

    paths, live = roots(), listed is not None
    at_run_time = capture is None and not inductor.copies_are_static(patches)

    def compiled_with(gm: GraphModule, hooks: _InForce, plans: list[Plan], *, repeats: bool = False) -> _Compiled:
        """`repeats`: it runs without hooks, beside the graph with hooks, and its backward may run several times."""
        compilation = cudagraphs.compilation(capture) if capture is not None and not repeats else None
        donated: list[bool] = []
        run: dict[str, Any] = {"parameters": parameters_among(inputs), "live": live, "at_run_time": at_run_time}
        unpacked = NOTHING if repeats else left
        run["as_if_lossy"] = repeats and not planner.has_budget
        partition = planning_partition(hooks, options, plans, paths, donated, unpacked=unpacked, **run)

        def compile_graph(compiling: Callable[[], None] = lambda: None) -> _Compiled:
            def before_each_graph() -> None:
                compiling()
                if repeats or (
                    donated and not donated[-1]
                ):  # else a second backward would raise, which it doesn't without hooks
                    aot.donate_nothing()

            return _compile(gm, inputs, options, patches, partition, before_each_graph, compilation)

        if why := _why_not_stored(options, compilation, reported=live):
            return bypassed(why, compile_graph)
        in_key = {
            "mode": mode,
            "inductor": patches,
            "inner": options.inner,
            "chunk": options.chunk,
            "tile": options.tile,
            **planner.key(),
        }
        if compilation is not None:
            in_key["cudagraphs"] = compilation.key(gm)
        if repeats or unpacked != NOTHING:
            in_key["check"] = "without hooks" if repeats else unpacked
        # fmt: off
        return through_cache(
            gm, inputs, hooks.setting, hooks.regions, options=in_key, roots=paths, plans=plans,
            compile_graph=compile_graph, refused=lambda: compilation.refused if compilation is not None else "",
        )
        # fmt: on

    def compiled_to(gm: GraphModule, setting: Setting | None, plans: list[Plan]) -> _Compiled:
        return compiled_with(gm, dataclasses.replace(hooks, setting=setting), plans)

    graph = records.Graph()
    with again, autograd.covered_hooks(), recording() as seen:
        checked = None if limit is None else _Without(gm)
        compiled = planner.compile(gm, graph.plans, compiled_to)
        if checked is not None:
            checked.compile(compiled_with, [*graph.plans, *planner.tight_plans])
    known = records.plans_of(wrapper) if hooks.settings and wrapper is not None else None
    compiled = planner.by_call(compiled, graph.plans, known)
    if checked is not None and limit is not None:
        compiled = checked.beside(compiled, limit, asked.settings, known, left)
    if known is not None:
        known.extend(graph.plans)
    if listed is not None:
        listed.append(graph)
    checkpoints = any(node.target is torch.ops.higher_order.tag_activation_checkpoint for node in nodes_of(gm))
    return _wrapped(compiled, graph, hooks, seen, wrapper, planner, checkpoints=checkpoints, counted=live)


def _program(
    gm: GraphModule,
    inputs: Sequence[Any],
    hooks: _InForce,
    mode: str | None,
    options: Options,
    patches: Mapping[str, Any],
    unpacked: Unpacked,
) -> Program | None:
    """What the plan of a budget depends on; None without a budget."""
    if not is_budget(hooks.setting):
        return None
    made_with = {
        "mode": mode,
        "inductor": patches,
        "inner": options.inner,
        "chunk": options.chunk,
        "tile": options.tile,
        "check": unpacked,
    }
    made_with["cudagraphs"] = bool(options.cudagraphs)
    return plan_files.program_of(gm, inputs, hooks.setting, hooks.regions, options=made_with, roots=roots())


class _Without:
    """A graph of Dynamo that is compiled without hooks too, so that gradients can be compared: `options["check"]`."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm, self.code = aot.twin(gm), dynamo.code_being_compiled()
        self.names = dynamo.names_of_inputs(gm)
        self.plans: list[Plan] = []
        self.run: _Compiled | None = None
        self.written: tuple[int, ...] = ()

    def compile(self, compiled_with: Callable[..., _Compiled], plans: list[Plan]) -> None:
        """Call it when the graph is compiled with hooks, to `plans`. Does nothing if these pack nothing."""
        if not any(d.hook is not KEEP for plan in plans for d in plan.decisions):
            return
        if why := first_step.why_not(self.gm):
            return first_step.not_compared(why)
        self.written = aot.written_inputs()
        plans_without: list[Plan] = []
        keep = _InForce(Setting(KEEP, SCOPE), None, {}, None)
        try:
            with aot.second_compilation():
                run = compiled_with(self.gm, keep, plans_without, repeats=True)
        except RuntimeError as e:  # the graph with hooks is fine
            return first_step.not_compared(f"it can't be compiled without hooks ({type(e).__name__}: {e})")
        if plans_without:
            self.run, self.plans = run, [*plans, plans_without[-1]]

    def beside(
        self,
        compiled: _Compiled,
        limit: float,
        settings: Sequence[Setting],
        listed: list[Plan] | None,
        left: Unpacked,
    ) -> _Compiled:
        """`compiled`, whose first gradients are compared with those without hooks."""
        if self.run is None:
            return compiled
        *plans, plan = self.plans
        checked = first_step.Checked(
            limit, settings, self.code, plans, listed, (self.run, plan), self.names, set(self.written), left
        )
        return functools.partial(checked, compiled)


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


def _wrapped(
    compiled: _Compiled,
    graph: records.Graph,
    hooks: _InForce,
    seen: Recording,
    wrapper: Any,
    planner: Planner,
    *,
    checkpoints: bool,
    counted: bool,
) -> _Compiled:
    """`compiled` in the wrappers that apply, the innermost first; notes what the graph was made of."""
    suspects = unused.compiled(hooks.settings, graph.plans, checkpoints=checkpoints)
    for key, setting in hooks.regions.items():
        recompiles.note(wrapper, setting, region.regions[key].record_for(seen))
    rule = hooks.setting.rule if hooks.setting is not None and graph.plans else None
    check: Callable[[], None] | None = None
    if hooks.setting is not None and rule is not None and not described(rule).frozen:
        record, check = pairs.record_for(seen, hooks.setting, hooks.pair, hooks.enabled)
        recompiles.note(wrapper, hooks.setting, record)
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
    partition: Callable[..., Any] | None,
    compiling: Callable[[], None],
    compilation: Compilation | None,
) -> _Compiled:
    """Compile by the inner compiler, with `partition`, or as stock torch does if it is None."""
    in_parts = partial(_in_parts, options)
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
                without_gradients=lambda graph: add_in_place(in_parts(graph)),
            )
    capture = compilation.inner_compile if compilation is not None else None
    with compilation.through_cache(gm) if compilation is not None else contextlib.nullcontext():
        if partition is not None:
            patches = _partitioned_by(partition, gm, patches)
            return inductor.compile_with_hooks(gm, inputs, patches, compiling, capture, in_parts)
        name = f"aot_hooks {PACKAGE_DIGEST}, no hooks, chunk={options.chunk!r}, tile={options.tile!r}"
        users = inductor.custom_partitioner(patches)
        mended = partial(_mended, users or aot.min_cut_partition, options)
        patches = patches | inductor.partitioned_by(mended, name, users)
        return inductor.compile_stock(gm, inputs, patches, capture, without_gradients=in_parts)


def planning_partition(
    hooks: _InForce,
    options: Options,
    plans: list[Plan],
    paths: Mapping[str, str],
    donated: list[bool],
    *,
    parameters: Collection[int],
    live: bool,
    at_run_time: bool = False,
    unpacked: Unpacked = NOTHING,
    as_if_lossy: bool = False,
    shared: _Shared | None = None,
) -> Callable[..., tuple[GraphModule, GraphModule]]:
    """A partition function for AOTAutograd: torch's min-cut partition, then the rewrite.

    Args:
        plans: the plan of each graph is appended.
        paths: modules by Dynamo's names, see `modules.roots`.
        donated: for each graph, nested regions first, whether the backward may reuse the memory of saved tensors when
            there are no hooks.
        parameters: their positions among the inputs of Dynamo's graph.
        live: plans have the bytes alive along both graphs, before and after the rewrite.
        at_run_time: the host runs each kernel, so `offload` decides then what it sends; a budget has decided already.
        unpacked: saved tensors that stay as they are; a budget rounds none of them.
        as_if_lossy: save what a graph with lossy hooks saves, to compare with it.
        shared: with plans of other budgets for the same graph; None: with none.
    """

    computes_again = options.recompute_pointwise or is_budget(hooks.setting)

    def partition(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        carry_names(joint.graph)
        apart = bool(hooks.regions) and repeats_across_regions(joint.graph)
        static = tuple(kwargs.get("static_lifetime_input_indices") or ())
        nested = joint_inputs == []  # a nested compiled region
        notes: list[Chunked | Tiled] = []
        if not nested:
            joint = _in_parts(options, joint, notes)
        if nested and any(s.scope == "no_static" for s in hooks.settings):
            # torch doesn't say which inputs are parameters, and the graph around it decides
            static = tuple(range(len(joint.graph.find_nodes(op="placeholder"))))
        fused, number = options.inner == "inductor", len(donated)
        # what is computed again reads these in the backward; a nested region does not know which of its inputs they are
        state = state_of(joint, () if nested else static, parameters) if computes_again else []
        outputs: dict[str, Any] = {"num_fwd_outputs": kwargs["num_fwd_outputs"], "roots": paths}
        parts = outputs | {"static_inputs": static}
        budgeted = is_budget(hooks.setting) and not nested
        shares = shared or _Shared(fused)
        stocks = shares.stocks  # of the first split of each joint graph

        def split(joint: GraphModule) -> tuple[GraphModule, GraphModule]:
            merges = not apart and joint not in stocks  # the first split has merged what repeats in `joint` itself
            min_cut = partial(aot.min_cut_partition, joint, joint_inputs, merge_repeats=merges, **kwargs)
            fw, bw = partitioned(joint, min_cut, kwargs["num_fwd_outputs"], state)
            donating = donates(fw, bw, kwargs["num_fwd_outputs"])  # as it is without hooks
            packs = any(setting.rule is not KEEP for setting in hooks.settings)
            if fused and packs:
                compute_early(fw, kwargs["num_fwd_outputs"])
            live_before: tuple[LivePoint, ...] = ()
            before_ms = 0.0
            if joint not in stocks and (live or budgeted):
                live_before = live_bytes(fw, bw, fused=fused, **outputs)
            if joint not in stocks and not as_if_lossy:
                before_ms = predicted_ms(fw, bw, fused, launched=at_run_time)
            casts: tuple[SavedTensor, ...] = ()
            if packs and not nested:
                alive = parameters_of(fw, static, parameters)
                casts = cast_again(fw, bw, parameters=alive, is_wanted=hooks.casts_again, fused=fused, **outputs)
            stocks.setdefault(joint, _Stock(live_before, before_ms, casts, donating))
            return fw, bw

        def rewritten(fw: GraphModule, bw: GraphModule, setting: Setting | None, trace: Trace | None = None) -> Plan:
            settings: dict[str, Any] = {"ambient": setting, "regions": hooks.regions}
            settings["unpacked"] = unpacked if trace is None else NOTHING  # a budget has heeded it
            settings["as_if_lossy"] = as_if_lossy
            plan = rewrite(fw, bw, for_inductor=fused, trace=trace, at_run_time=at_run_time, **settings, **parts)
            if len(donated) == number:
                donated.append(stocks[joint].donates)
            donated[number] = donated[number] and not crosses_twice(fw, kwargs["num_fwd_outputs"])
            return plan

        if hooks.setting is not None and budgeted:
            own: dict[str, Any] = {"fused": fused, "launched": at_run_time, "unpacked": unpacked, "trace": shares.trace}
            setting: Any = hooks.setting
            as_it_is = joint

            def without_hooks() -> tuple[tuple[LivePoint, ...], float]:
                return stocks[as_it_is].live, stocks[as_it_is].ms

            def joint_of(gm: GraphModule) -> Joint:
                ways = partial(split, gm), without_hooks, rewritten
                return Joint(gm, *ways, setting, own | parts, shares.made[gm])

            def within(gm: GraphModule, lenient: bool, follows: bool | None = None) -> Planned:
                found = Planner.partition(joint_of(gm), lenient=lenient, follows=follows)
                return found._replace(plan=with_casts(with_reasons(found.plan, unpacked), stocks[gm].casts))

            def stock(gm: GraphModule) -> tuple[LivePoint, ...]:
                joint_of(gm).graphs()
                return stocks[gm].live

            with without_collections():
                chosen = [name for name in (CHUNK, TILE) if getattr(options, name)]
                fw, bw, plan = with_chunks(setting.rule, joint, within, stock, chosen)
                plan = dataclasses.replace(plan, **_rows([*notes, *plan.chunked, *plan.tiled]))
            plans.append(plan)
            if at_run_time and plan.transfers:
                decide_at_run_time(fw, bw, kwargs["num_fwd_outputs"])
            return finished(fw, bw)
        fw, bw = split(joint)
        plan = with_casts(rewritten(fw, bw, hooks.setting), stocks[joint].casts)
        if fused and options.recompute_pointwise and hooks.settings:
            split_and_hold(fw, bw, **outputs)
        if live or not as_if_lossy:
            after_ms = predicted_ms(fw, bw, fused, transfers.COPIES, plan.transfers, launched=at_run_time)
            after = live_bytes(fw, bw, fused=fused, **outputs)
            plan = dataclasses.replace(plan, before_ms=stocks[joint].ms, after_ms=after_ms)
            if live:
                plan = dataclasses.replace(plan, live_before=stocks[joint].live, live_after=after)
            else:
                plan = dataclasses.replace(plan, own_peak_bytes=max(point.live_bytes for point in after))
            if live and not options.chunk and not nested:
                notes += logits_at_peak(joint, plan.live_before)
        plans.append(dataclasses.replace(plan, **_rows(notes)))
        if at_run_time and plan.transfers:
            decide_at_run_time(fw, bw, kwargs["num_fwd_outputs"])
        return finished(fw, bw)

    return partition


def partition_without_hooks(
    joint: GraphModule, joint_inputs: Any, *, options: Options | None = None, **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """torch's min-cut partition, mended, see passes/partition.py; of a graph in parts, if the options say so."""
    return _mended(aot.min_cut_partition, options or Options(), joint, joint_inputs, **kwargs)


def _in_parts(options: Options, gm: GraphModule, notes: list[Chunked | Tiled] | None = None) -> GraphModule:
    """`gm` with its loss in chunks and its layers in tiles, if the options say so.

    `notes`: what was done with each, or why not, is appended.
    """
    chunks: tuple[Chunked, ...] = ()
    tiles: tuple[Tiled, ...] = ()
    if options.chunk:
        gm, chunks = chunked(gm, None if options.chunk is True else options.chunk)
        unused.not_chunked(chunks)
    if options.tile:
        tokens = options.tile if type(options.tile) is int else None
        gm, tiles = tiled(gm, tokens, again=options.tile != "backward")
        unused.not_tiled(tiles)
    for name, rows in (("chunk", chunks), ("tile", tiles)):
        for each in rows:
            log.info("%s: %s", name, each)
    if notes is not None:
        notes += [*chunks, *tiles]
    return gm


def _rows(notes: Sequence[Chunked | Tiled]) -> dict[str, Any]:
    """Fields of a plan."""
    kinds = (("chunked", Chunked), ("tiled", Tiled))
    return {name: tuple(each for each in notes if isinstance(each, kind)) for name, kind in kinds}


def _mended(
    partition: Callable[..., tuple[GraphModule, GraphModule]],
    options: Options,
    joint: GraphModule,
    joint_inputs: Any,
    **kwargs: Any,
) -> tuple[GraphModule, GraphModule]:
    if joint_inputs != []:  # no nested compiled region
        joint = _in_parts(options, joint)
    return finished(*partitioned(joint, lambda: partition(joint, joint_inputs, **kwargs), kwargs["num_fwd_outputs"]))


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
    hooks = _in_force(gm, inputs, options, None)
    run: dict[str, Any] = {"parameters": parameters_among(inputs), "live": True, "at_run_time": at_run_time}
    paths = roots()
    partition = planned = planning_partition(hooks, options, plans, paths, [], **run)
    shared = _Shared(options.inner == "inductor")

    def explored(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        def plan_with(rule: Budget) -> Plan:
            found: list[Plan] = []
            own = dataclasses.replace(options, policy=rule)
            in_force = dataclasses.replace(_in_force(gm, inputs, own, None), regions=hooks.regions)
            planning_partition(in_force, own, found, paths, [], shared=shared, **run)(joint, joint_inputs, **kwargs)
            return found[-1]

        graphs = planned(joint, joint_inputs, **kwargs)
        if explore is not None and joint_inputs != []:  # no nested compiled region
            explore(plans[-1], plan_with)
        return graphs

    if explore is not None and hooks.setting is not None and hooks.pair is None and not options.recompute_pointwise:
        partition = explored
    rule = None if hooks.setting is None else hooks.setting.rule
    again = aot.recomputing_pointwise(options.recompute_pointwise and not isinstance(rule, Budget))
    with again, autograd.covered_hooks(), without_autograd_cache():
        if options.inner == "aten":
            aot.compile_graph(gm, inputs, partition, without_gradients=partial(_in_parts, options))
        else:
            inductor.partition_only(gm, inputs, _partitioned_by(partition, gm, dict(options.inductor or {})))
    return plans, rule if isinstance(rule, Assignment) else None


def _partitioned_by(partition: Callable[..., Any], gm: GraphModule, patches: dict[str, Any]) -> dict[str, Any]:
    """Inductor settings by which `partition` splits the joint graph of `gm`, and sees the names in it.

    In torch's cache keys the partition is the digest of the package. The hooks are in our key, see cache/key.py.
    """
    if inductor.custom_partitioner(patches) is not None:
        raise OptionError(inductor.TWO_PARTITIONERS)
    named = any(name_given(node) is not None for node in nodes_of(gm))
    names = inductor.first_joint_pass(carry_names, patches) if named else {}
    return patches | names | inductor.partitioned_by(partition, f"aot_hooks {PACKAGE_DIGEST}")
