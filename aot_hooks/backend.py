"""The backend that `torch.compile(model, backend="aot_hooks")` finds by entry point.

      gm, inputs --+-- no setting, no region -----------------------> the inner compiler, as stock torch calls it
                   |
                   +-- ambient setting, regions, options["policy"] --> the inner compiler with a partition of our own:
                           min-cut partition, then rewrite(fw, bw)     and, at run time, torch's hooks out of sight

Two inner compilers: "inductor", and "aten", which runs AOTAutograd's graphs as they are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from . import _compat, context
from .content import content
from .eager import CompiledCall
from .errors import OptionError
from .hook import Hook
from .modules import roots
from .names import carry_names, uses_names
from .plan import Plan, region_of
from .policy import SCOPES, Setting
from .rewrite import rewrite

__all__ = ["Options", "aot_hooks", "last_plans", "reset"]


@dataclass(frozen=True)
class Options:
    """`torch.compile(..., options={...})`.

    Attributes:
        inner: "inductor" or "aten".
        cudagraphs: hand the compiled graphs to the `cudagraph` package.
        policy: a policy or `Hook` for saved tensors that no context covers.
        scope: scope of `policy`.
        inductor: config patches for Inductor.
    """

    inner: str = "inductor"
    cudagraphs: bool = False
    policy: Any = None
    scope: str = "donated"
    inductor: Mapping[str, Any] | None = None

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None) -> Options:
        """Raises `OptionError` naming what is unknown and listing what is valid."""
        given = dict(options or {})
        valid = list(cls.__dataclass_fields__)
        unknown = [k for k in given if k not in valid]
        if unknown:
            raise OptionError(f"unknown option {unknown[0]!r}; valid options: {', '.join(valid)}")
        parsed = cls(**given)
        if parsed.inner not in ("inductor", "aten"):
            raise OptionError(f"options['inner'] must be 'inductor' or 'aten', got {parsed.inner!r}")
        if parsed.scope not in SCOPES:
            raise OptionError(f"options['scope'] must be one of {', '.join(map(repr, SCOPES))}, got {parsed.scope!r}")
        if not isinstance(parsed.cudagraphs, bool):
            raise OptionError(f"options['cudagraphs'] must be True or False, got {parsed.cudagraphs!r}")
        if parsed.policy is not None and not isinstance(parsed.policy, Hook) and not callable(parsed.policy):
            raise OptionError(f"options['policy'] must be a policy or a Hook, got {parsed.policy!r}")
        if parsed.inductor is not None:
            if not isinstance(parsed.inductor, Mapping):
                raise OptionError(f"options['inductor'] must be a dict of Inductor settings, got {parsed.inductor!r}")
            wrong = [k for k in parsed.inductor if k not in _compat.inductor_config_keys()]
            if wrong:
                raise OptionError(f"options['inductor']: Inductor has no setting {wrong[0]!r}")
        return parsed


class _Plans:
    """Plans by the `torch.compile` wrapper that asked for them; weak, so that a dropped function drops its plans."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_wrapper: dict[int, tuple[weakref.ref[Any], list[Plan]]] = {}

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
    wrapper = _compat.compile_wrapper_of(compiled)
    if wrapper is None:
        raise OptionError(f"last_plans takes what torch.compile returned, got {compiled!r}")
    return tuple(_plans.of(wrapper))


def reset() -> None:
    """Forget plans and interned settings; compiled functions stay as they are. `torch._dynamo.reset()` calls it."""
    _plans.clear()
    context.forget()


def _regions_of(gm: GraphModule) -> tuple[dict[str, Setting], str]:
    """The settings that nodes of `gm` were traced under, and a digest of which node is under which."""
    found: dict[str, Setting] = {}
    places = []
    for module in gm.modules():
        if isinstance(module, GraphModule):
            for i, node in enumerate(module.graph.nodes):
                key = region_of(node)
                if key is not None:
                    found[key] = context.regions[key]
                    places.append((i, key))
    return found, content(tuple(places))


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
    wrapper = _compat.calling_compile_wrapper()
    parsed = Options.parse(options)
    if parsed.cudagraphs:
        raise OptionError(
            "options['cudagraphs'] is not available yet; use mode='reduce-overhead' for torch's own trees"
        )
    patches = _inductor_patches(parsed, mode)
    setting, alive = context.ambient()
    inlined_here = alive is not None
    if setting is None and parsed.policy is not None and not _foreign_hooks():
        setting = Setting(parsed.policy, parsed.scope)
    regions, places = _regions_of(gm)
    if setting is not None and setting.eager:
        raise OptionError(f"options['policy']: '{setting.rule!r}' is to run eagerly, which a context can ask for only")
    if setting is None and not regions:
        return _with_eager_hooks(_compile(gm, inputs, parsed, patches, None, ""))

    paths = roots()
    plans = _plans.of(wrapper) if wrapper is not None else []

    def partition(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        carry_names(joint.graph)
        fw, bw = _compat.min_cut_partition(joint, joint_inputs, **kwargs)
        plans.append(
            rewrite(
                fw,
                bw,
                num_fwd_outputs=kwargs["num_fwd_outputs"],
                static_inputs=kwargs.get("static_lifetime_input_indices") or (),
                ambient=setting,
                regions=regions,
                for_inductor=parsed.inner == "inductor",
                roots=paths,
            )
        )
        return fw, bw

    if parsed.inner == "inductor" and uses_names(gm):
        patches |= _compat.first_joint_pass(carry_names, patches)
    key = content(setting.key if setting else "", tuple(sorted(regions)), places)
    # a pair of plain functions on top keeps torch from inlining the hooks a second time
    with _compat.hooks_pushed(_as_it_is, _as_it_is), _compat.without_autograd_cache():
        compiled = _compile(gm, inputs, parsed, patches, partition, key)
    if not inlined_here:
        return _with_eager_hooks(compiled)

    def run(*args: Any) -> Any:
        return _compat.call_without_hooks(compiled, args)

    run._aot_hooks_pair = alive  # type: ignore[attr-defined]  # its id is in Dynamo's guards
    return run


aot_hooks.reset = reset  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


def _as_it_is(x: Any) -> Any:
    return x


def _foreign_hooks() -> bool:
    return _compat.top_hooks() is not None


def _with_eager_hooks(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Tell hooks that run eagerly around a compiled graph which of its saved tensors are its inputs and outputs."""

    def run(*args: Any) -> Any:
        top = _compat.top_hooks()
        if top is None or not isinstance(top[0], context.EagerPack):
            return compiled(*args)
        with CompiledCall(args) as call:
            out = compiled(*args)
        call.returned(out)
        return out

    return run


def _inductor_patches(options: Options, mode: str | None) -> dict[str, Any]:
    if options.inner != "inductor":
        if options.inductor:
            raise OptionError("options['inductor'] needs options['inner'] = 'inductor'")
        return {}
    try:
        patches = _compat.mode_options(mode)
    except RuntimeError as e:
        raise OptionError(f"mode={mode!r}: {e}") from e
    return patches | dict(options.inductor or {})


def _compile(
    gm: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    patches: dict[str, Any],
    partition: Callable[..., Any] | None,
    key: str,
) -> Callable[..., Any]:
    if options.inner == "aten":
        return _compat.compile_aten(gm, inputs, partition or _compat.min_cut_partition)
    if partition is not None:
        patches = patches | {"custom_partitioner_fn": _compat.inductor_partitioner(partition, f"aot_hooks {key}")}
        return _compat.compile_inductor_with_hooks(gm, inputs, patches)
    return _compat.compile_inductor(gm, inputs, patches)
