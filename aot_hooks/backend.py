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
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from . import cache, context, cudagraphs, unused
from .cache import bypassed, through_cache
from .cache.key import nodes_of, package_digest
from .eager.modules import roots
from .eager.packing import CompiledCall
from .errors import AotHooksError, OptionError
from .identity import described, recording
from .offloading import transfers
from .options import Options, inductor_patches
from .passes.live_bytes import LivePoint, live_bytes
from .passes.plan import Plan, region_of, repeats_across_regions
from .passes.rewrite import rewrite
from .passes.snapshots import save_what_was_read
from .records import at_end_of_backward
from .settings import recompiles
from .settings.names import carry_names, uses_names
from .settings.setting import Setting
from .torch_private import aot, autograd, dynamo, inductor
from .torch_private.aot_cache import without_autograd_cache

if TYPE_CHECKING:
    from cudagraph.backend import Compilation

__all__ = ["Graph", "aot_hooks", "last_plans", "plan_graph", "recorded", "reset", "with_options"]


@dataclass(eq=False)
class Graph:
    """A compiled graph, as `recorded` tells of it.

    Attributes:
        plans: with live bytes; empty if it has no backward, several if Dynamo's graph became several.
        run_count: how often its forward ran.
        held_count: of how many of these runs the backward may still come.
        most_held: the most of them at once, since somebody set it back to `held_count`.
    """

    plans: list[Plan] = field(default_factory=list)
    run_count: int = 0
    held_count: int = 0
    most_held: int = 0

    def ran(self, outputs: Any) -> None:
        """Note a run of the forward and, until its backward has run or nobody can ask for it, what it saved."""
        self.run_count += 1
        if at_end_of_backward(outputs, self._over):
            self.held_count += 1
            self.most_held = max(self.most_held, self.held_count)

    def _over(self) -> None:
        self.held_count -= 1


class _Plans:
    """Plans by the `torch.compile` wrapper that asked for them; weak, so that a dropped function drops its plans."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_wrapper: dict[int, tuple[weakref.ref[Any], list[Plan]]] = {}
        self.record: list[Graph] | None = None  # while `recorded()` listens

    def of(self, wrapper: Any) -> list[Plan]:
        with self.lock:
            known = self.by_wrapper.get(id(wrapper))
            if known is None or known[0]() is not wrapper:
                known = (weakref.ref(wrapper), [])
                self.by_wrapper[id(wrapper)] = known
                weakref.finalize(wrapper, self.by_wrapper.pop, id(wrapper), None)
            return known[1]

    def clear(self) -> None:
        with self.lock:
            for _, plans in self.by_wrapper.values():
                plans.clear()


_plans = _Plans()


def last_plans(compiled: Callable[..., Any]) -> tuple[Plan, ...]:
    """What was decided for each graph with a backward that `compiled` has now, oldest first; compiles nothing.

    Raises `OptionError` if `compiled` was not made by `torch.compile`.
    """
    wrapper = dynamo.compile_wrapper_of(compiled)
    if wrapper is None:
        raise OptionError(f"last_plans takes what torch.compile returned, got {compiled!r}")
    plans = tuple(_plans.of(wrapper))
    if not plans and isinstance(compiled, torch.nn.Module):
        unused.compiled_in_place(compiled)
    return plans


def reset() -> None:
    """Forget plans and interned settings, and give back the host memory of `offload`; compiled functions stay as they
    are. `torch._dynamo.reset()` calls it."""
    _plans.clear()
    cudagraphs.forget()
    transfers.reset()
    context.forget()
    cache.forget()
    unused.forget()


def _regions_of(gm: GraphModule, scope: str) -> dict[str, Setting]:
    """The settings that nodes of `gm` were traced under, in `scope` where they say none."""
    keys = dict.fromkeys(key for node in nodes_of(gm) if (key := region_of(node)) is not None)
    return {key: context.regions[key].setting.in_scope(scope) for key in keys}


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
        return _compile_graph(gm, inputs, mode, Options.parse(options), [])
    try:
        return _compile_graph(gm, inputs, mode, Options.parse(options), _plans.of(wrapper), wrapper)
    except AotHooksError as e:  # wrapped here, so that our message stands first
        failure = dynamo.backend_failure("aot_hooks", e, inspect.currentframe())
        raise failure.with_traceback(e.__traceback__) from None


def with_options(options: Mapping[str, Any] | None) -> Callable[..., Any]:
    """The backend with these options, whatever options it is called with."""
    parsed = Options.parse(options)

    def aot_hooks_with_options(gm: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        return _compile_graph(gm, inputs, None, parsed, [])

    return aot_hooks_with_options


@contextlib.contextmanager
def recorded() -> Iterator[list[Graph]]:
    """Each graph that this backend compiles meanwhile, on any thread, also those that no hook covers.

    `last_plans` tells what it would without it.
    """
    before, _plans.record = _plans.record, []
    try:
        yield _plans.record
    finally:
        _plans.record = before


def _compile_graph(
    gm: GraphModule,
    inputs: Sequence[Any],
    mode: str | None,
    parsed: Options,
    plans: list[Plan],
    wrapper: Any = None,
) -> Callable[..., Any]:
    patches = inductor_patches(parsed, mode)
    setting, alive, regions = _in_force(gm, parsed)
    record, graph = _plans.record, Graph()
    covered = setting is not None or bool(regions)
    asked = cudagraphs.capture_options(parsed.inner, parsed.cudagraphs)
    compilation = cudagraphs.compilation(asked) if asked is not None else None
    if not covered and record is None:
        return _with_eager_hooks(_compile(gm, inputs, parsed, patches, None, _nothing, compilation))

    paths = roots()
    donated: list[bool] = []
    partition = planning_partition(setting, regions, parsed.inner, graph.plans, paths, donated, live=record is not None)

    def compile_graph(compiling: Callable[[], None] = _nothing) -> Callable[..., Any]:
        def before_each_graph() -> None:
            compiling()
            if donated and not donated[-1]:  # or a second backward would raise that doesn't without hooks
                aot.donate_nothing()

        return _compile(gm, inputs, parsed, patches, partition, before_each_graph, compilation)

    with _hooks_not_inlined_by_torch(), recording() as seen:
        if parsed.inner == "aten" and (compilation is not None or not aot.is_stored()):
            compiled = bypassed("inner 'aten' is stored with torch's bundled_autograd_cache only", compile_graph)
        elif record is not None:
            compiled = bypassed("a report needs the graphs", compile_graph)
        elif compilation is not None and (why := compilation.why_not_stored):
            compiled = bypassed(f"captured in CUDA graphs: {why}", compile_graph)
        else:
            options: dict[str, Any] = {"mode": mode, "inductor": patches, "inner": parsed.inner}
            if compilation is not None:  # which of its options are in the key, it says itself
                options["cudagraphs"] = compilation.key(gm)
            compiled = through_cache(
                gm,
                inputs,
                setting,
                regions,
                options=options,
                roots=paths,
                plans=graph.plans,
                compile_graph=compile_graph,
                refused=lambda: compilation.refused if compilation is not None else "",
            )
    if covered:
        plans.extend(graph.plans)
    if record is not None:
        record.append(graph)
        compiled = _counted(compiled, graph)
    asked_for = [s for s in (setting, *regions.values()) if s is not None]
    compiled = unused.judged(compiled, unused.compiled(asked_for, graph.plans))
    for key, region in regions.items():
        made_of = context.regions[key].made_of(seen)
        if wrapper is not None:
            recompiles.note(wrapper, region, made_of)
    if setting is not None and graph.plans and not described(setting.rule).frozen:
        made_of, check = context.made_of(seen, setting, alive)
        if wrapper is not None:
            recompiles.note(wrapper, setting, made_of)
        compiled = _checked(compiled, check)
    if alive is None:
        return _with_eager_hooks(compiled)

    def run(*args: Any) -> Any:
        return autograd.call_without_hooks(compiled, args)

    run._aot_hooks_pair = alive  # type: ignore[attr-defined]  # its id is in Dynamo's guards
    return run


def _checked(compiled: Callable[..., Any], check: Callable[[], None]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        check()
        return compiled(*args)

    return run


def _counted(compiled: Callable[..., Any], graph: Graph) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        outputs = compiled(*args)
        graph.ran(outputs)
        return outputs

    return run


def _in_force(gm: GraphModule, options: Options) -> tuple[Setting | None, Any, dict[str, Setting]]:
    """The setting around this call, what must live as long as the graph, and the regions of `gm`."""
    setting, alive = context.ambient()
    if setting is None and options.policy is not None and not _foreign_hooks():
        setting = Setting(options.policy, options.scope)
    if setting is not None and setting.eager:
        raise OptionError(f"options['policy']: '{setting.rule!r}' is to run eagerly, which a context can ask for only")
    return setting and setting.in_scope(options.scope), alive, _regions_of(gm, options.scope)


aot_hooks.reset = reset  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


def planning_partition(
    setting: Setting | None,
    regions: Mapping[str, Setting],
    inner: str,
    plans: list[Plan],
    paths: Mapping[str, str],
    donated: list[bool],
    *,
    live: bool = False,
) -> Callable[..., tuple[GraphModule, GraphModule]]:
    """torch's min-cut partition, then hooks put in; what was decided is appended to `plans`, with `live` also the bytes
    alive along both graphs before and after. `paths` are modules by Dynamo's names, see `modules.roots`; to `donated`
    goes whether the backward may write over what is saved without hooks, of nested regions first."""

    def partition(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        carry_names(joint.graph)
        apart = bool(regions) and repeats_across_regions(joint.graph)
        fw, bw = aot.min_cut_partition(joint, joint_inputs, merge_repeats=not apart, **kwargs)
        count, static = kwargs["num_fwd_outputs"], tuple(kwargs.get("static_lifetime_input_indices") or ())
        if joint_inputs == [] and any(s.scope == "no_static" for s in (setting, *regions.values()) if s is not None):
            # a nested compiled region: torch doesn't say which inputs are parameters, and the graph around it decides
            static = tuple(range(len(fw.graph.find_nodes(op="placeholder"))))

        def alive() -> tuple[LivePoint, ...]:
            if not live:
                return ()
            fused = inner == "inductor"
            return live_bytes(fw, bw, num_fwd_outputs=count, static_inputs=static, fused=fused, roots=paths)

        donated.append(aot.donates(fw, bw, count))
        save_what_was_read(fw, bw, count)
        before = alive()
        plan = rewrite(
            fw,
            bw,
            num_fwd_outputs=count,
            static_inputs=static,
            ambient=setting,
            regions=regions,
            for_inductor=inner == "inductor",
            roots=paths,
        )
        plans.append(dataclasses.replace(plan, live_before=before, live_after=alive()) if live else plan)
        return fw, bw

    return partition


def partition_without_hooks(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """torch's min-cut partition; only where the forward writes to an input that it saves, another is saved."""
    fw, bw = aot.min_cut_partition(joint, joint_inputs, **kwargs)
    save_what_was_read(fw, bw, kwargs["num_fwd_outputs"])
    return fw, bw


def plan_graph(gm: GraphModule, inputs: Sequence[Any], options: Options) -> list[Plan]:
    """What `aot_hooks(gm, inputs)` would decide, with the live bytes; makes no code. `gm` may be changed."""
    setting, _, regions = _in_force(gm, options)
    plans: list[Plan] = []
    partition = planning_partition(setting, regions, options.inner, plans, roots(), [], live=True)
    with _hooks_not_inlined_by_torch(), without_autograd_cache():
        if options.inner == "aten":
            aot.compile_graph(gm, inputs, partition)
        else:
            patches = dict(options.inductor or {})
            inductor.partition_only(gm, inputs, _partitioned_by(partition, gm, patches))
    return plans


def _partitioned_by(partition: Callable[..., Any], gm: GraphModule, patches: dict[str, Any]) -> dict[str, Any]:
    """Inductor settings by which `partition` splits the joint graph of `gm`, and sees the names in it.

    What torch's keys see of the partition is the package; the hooks are in the key of cache_key.py, and in the graphs.
    """
    names = inductor.first_joint_pass(carry_names, patches) if uses_names(gm) else {}
    return patches | names | inductor.partitioned_by(partition, f"aot_hooks {package_digest()}")


def _hooks_not_inlined_by_torch() -> contextlib.AbstractContextManager[None]:
    """A pair of plain functions over the hooks in force, or torch would inline them a second time.

    Where there are none nothing is pushed: torch.func's transforms trace on an empty stack only.
    """
    return contextlib.nullcontext() if autograd.top_hooks() is None else autograd.hooks_pushed(_as_it_is, _as_it_is)


def _as_it_is(x: Any) -> Any:
    return x


def _nothing() -> None:
    return None


def _foreign_hooks() -> bool:
    return autograd.top_hooks() is not None


def _with_eager_hooks(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Tell hooks that run eagerly around a compiled graph which of its saved tensors are its inputs and outputs."""

    def run(*args: Any) -> Any:
        top = autograd.top_hooks()
        if top is None or not isinstance(top[0], context.EagerPack):
            return compiled(*args)
        with CompiledCall(args) as call:
            out = compiled(*args)
        call.returned(out)
        return out

    return run


def _compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    patches: dict[str, Any],
    partition: Callable[..., Any] | None,
    compiling: Callable[[], None],
    compilation: Compilation | None,
) -> Callable[..., Any]:
    if options.inner == "aten":
        compilers = compilation.aten_compilers() if compilation is not None else None
        stored = partition is not None and aot.is_stored()
        # what runs as it is can be stored with a key of ours only: torch's has no partition
        with contextlib.nullcontext() if stored else without_autograd_cache():
            partition = partition or partition_without_hooks
            return aot.compile_graph(gm, inputs, partition, compilers, compiling, stored=stored)
    capture = compilation.inner_compile if compilation is not None else None
    with compilation.through_cache(gm) if compilation is not None else contextlib.nullcontext():
        if partition is not None:
            patches = _partitioned_by(partition, gm, patches)
            return inductor.compile_with_hooks(gm, inputs, patches, compiling, capture)
        if inductor.custom_partitioner(patches) is None:
            patches = patches | inductor.partitioned_by(
                partition_without_hooks, f"aot_hooks {package_digest()}, no hooks"
            )
        return inductor.compile_stock(gm, inputs, patches, capture)
