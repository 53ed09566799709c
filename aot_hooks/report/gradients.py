"""`check_gradients(fn, *args, policy=...)`: what hooks do to the gradients of one step, parameter by parameter.

      fn, args --compiled, nothing packed--> outputs --backward, random cotangents--> g0
               --compiled, with hooks------> outputs --the same cotangents----------> g     |g - g0| / |g0|, finite?

Both run from the same random state, so dropout is the same. Hooks that draw random numbers themselves would shift it:
then the first run packs too, and gives back what was saved. Gradients, buffers, random state and the arguments are
afterwards as they were; what else `fn` does in Python it does in each run.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import random
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..backend import with_options
from ..context import ambient, saved_tensors_policy
from ..errors import AotHooksError, OptionError
from ..hook import KEEP, Hook
from ..options import Options
from ..passes.plan import Plan, joined
from ..records import recorded
from ..settings.setting import Setting
from ..torch_private import autograd, dynamo
from ..torch_private import dry_run as torch_dry_run
from ..torch_private import values as torch_values

__all__ = ["GradientReport", "GradientRow", "check_gradients"]

_ALIKE, _ROUNDED = 1e-6, 1e-2  # how far outputs are off: not at all, or with low precision and fused otherwise
_SHOWN = 40  # rows of a printed report
_ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-7, torch.float16: 1e-4, torch.bfloat16: 1e-4}


@dataclass(frozen=True)
class GradientRow:
    """The gradient of one parameter or input.

    Attributes:
        name: as `named_parameters()` gives it, or "argument x".
        shape, dtype: of the gradient.
        norm: |g0|, of the gradient without hooks.
        error: |g - g0| / |g0|; 0 if both are zero, infinite if g0 alone is, NaN if one of them is not finite.
        finite: whether all of the gradient with hooks is.
        finite_without: likewise without hooks.
        vanishes: g0 is zero but for rounding, beside all gradients together (a bias before a BatchNorm): the error says
            nothing then.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    norm: float
    error: float
    finite: bool
    finite_without: bool
    vanishes: bool


@dataclass(frozen=True)
class GradientReport:
    """Gradients with hooks against those without; `str()` is a table.

    Attributes:
        rows: the worst first: what is finite without hooks only, then by error, last what vanishes.
        error: of all gradients together, |g - g0| / |g0|; those that are not finite without hooks left out.
        output_error: likewise of the outputs, which hooks don't change: what is left is rounding.
        same_random_numbers: whether dropout and the like took the same numbers; if not, nothing here can be compared.
        plan: what the hooks packed in compiled graphs.
    """

    rows: tuple[GradientRow, ...]
    error: float
    output_error: float
    same_random_numbers: bool
    plan: Plan

    @property
    def finite(self) -> bool:
        """Whether each gradient that is finite without hooks is finite with them."""
        return all(row.finite or not row.finite_without for row in self.rows)

    def __str__(self) -> str:
        plan = self.plan
        packed = sum(d.hook is not KEEP for d in plan.decisions)
        lines = [
            f"gradients with hooks against without: {self.error:.3g} off as a whole, "
            f"{'all finite' if self.finite else 'NOT ALL FINITE'}; {packed} of {len(plan.decisions)} saved tensors "
            f"packed, {plan.saved_bytes} -> {plan.packed_bytes} bytes"
        ]
        if not self.same_random_numbers:
            lines.append("the two runs took different random numbers: use model.eval(), or hooks with stochastic=False")
        lines.append(f"{'error':>10} {'norm':>10}  gradient")
        for row in self.rows[:_SHOWN]:
            dtype = str(row.dtype).removeprefix("torch.")
            told = "  zero but for rounding without hooks" if row.vanishes else ""
            if not row.finite:
                told = "  not finite" if row.finite_without else "  not finite, without hooks either"
            lines.append(f"{row.error:10.3g} {row.norm:10.3g}  {row.name} {dtype}{list(row.shape)}{told}")
        if len(self.rows) > _SHOWN:
            lines.append(f"{len(self.rows) - _SHOWN} more, no worse: see .rows")
        return "\n".join(lines)


def check_gradients(
    fn: Callable[..., Any],
    *args: Any,
    policy: Any = None,
    scope: str | None = None,
    inner: str | None = None,
    **kwargs: Any,
) -> GradientReport:
    """Run `fn(*args, **kwargs)` and its backward twice, without hooks and with them, and compare the gradients.

    Args:
        fn: a module or function; what `torch.compile(..., backend="aot_hooks")` returned brings its options.
        args, kwargs: what it is called with. Gradients are of the parameters of the module that `fn` is, belongs to or
            reads, and of those arguments that require grad. A scalar output's gradient is taken as it is, others by
            random cotangents.
        policy: a policy or `Hook`; if not given the context in force around this call, or that of the options of `fn`.
        scope: scope of `policy`; as of a context if not given.
        inner: "inductor" (if not given) or "aten".

    Raises:
        OptionError: no hooks are given or in force, or `fn` has no gradients, writes to its parameters or steps an
            optimizer.
        HookContractError, HookTraceError, PolicyError: as compiling does.
    """
    fn, wrapper = dynamo.uncompiled(fn)
    if not callable(fn):
        raise OptionError(f"check_gradients: expected a module or function, got {fn!r}")
    options = dict((dynamo.options_of(wrapper) if wrapper is not None else None) or {})
    options |= {"inner": inner or options.get("inner", "inductor"), "cudagraphs": False}
    chosen = options.pop("policy", None)
    scopes = {} if scope is None else {"scope": scope}
    if policy is None and autograd.top_hooks() is None:
        if chosen is None:
            raise OptionError(
                "check_gradients: no hooks to check; give policy=aot_hooks.float8(), say, or call it inside a context"
            )
        policy, scopes = chosen, {"scope": scope or options.get("scope", "donated")}
    Options.parse(options)
    hooks = contextlib.nullcontext() if policy is None else saved_tensors_policy(policy, **scopes)
    modules = _modules(fn, args, kwargs)
    dynamic = getattr(wrapper, "dynamic", None)

    def run(context: Any) -> _Run:
        return _run(fn, args, kwargs, options, dynamic, modules, context)

    reference, found = run(saved_tensors_policy(KEEP)), run(hooks)
    if reference.drawn != found.drawn and _off(reference, found) > _ALIKE:
        setting = hooks.setting() if isinstance(hooks, saved_tensors_policy) else ambient()[0]
        if setting is not None and not setting.eager:
            # the order in which Inductor has them drawn may be another one even so
            packing = run(saved_tensors_policy(_GivingBack(setting), scope=setting.scope))
            reference = min((reference, packing), key=lambda other: _off(other, found))
    gradients = list(zip(reference.names, reference.grads, found.grads, strict=True))
    whole = _norm([g0 for _, g0, _ in gradients if g0 is not None and bool(torch.isfinite(g0).all())])
    rows = [_row(name, g0, g, whole) for name, g0, g in gradients if g0 is not None]
    rows.sort(key=_goodness)
    known = [(g0, g) for _, g0, g in gradients if g0 is not None and bool(torch.isfinite(g0).all())]
    off = _off(reference, found)
    same = reference.drawn == found.drawn or off < _ROUNDED
    return GradientReport(tuple(rows), _error(known), off, same, found.plan)


@dataclass(frozen=True)
class _GivingBack:
    """A policy that packs as `setting` does, so that hooks draw as many random numbers, and gives back what was
    saved."""

    setting: Setting

    def __call__(self, saved: Any) -> Hook:
        hook = self.setting.choose(saved)
        if hook is KEEP:
            return KEEP
        return replace(hook, name=f"{hook.name}, exact", pack=_PackBoth(hook), unpack=_last, cache_hash=None)


@dataclass(frozen=True)
class _PackBoth:
    hook: Hook

    def __call__(self, x: torch.Tensor) -> Any:
        return self.hook.pack(x), x


def _last(packed: Any) -> torch.Tensor:
    saved: torch.Tensor = packed[-1]
    return saved


@dataclass
class _Run:
    names: list[str]
    outputs: list[torch.Tensor]
    grads: list[torch.Tensor | None]
    drawn: list[bytes]  # the generators' states afterwards
    plan: Plan


def _run(
    fn: Any, args: Any, kwargs: Any, options: dict[str, Any], dynamic: Any, modules: dict[str, Any], hooks: Any
) -> _Run:
    def program(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    copies: dict[int, torch.Tensor] = {}

    def copy(t: torch.Tensor) -> torch.Tensor:
        if any(t is p for p in parameters.values()):
            return t
        return copies.setdefault(id(t), t.detach().clone().requires_grad_(t.requires_grad))

    parameters = {name: p for name, p in _parameters(modules) if p.requires_grad}
    args, kwargs = torch_values.pytree.tree_map_only(torch.Tensor, copy, (args, kwargs))
    given = {id(p) for p in parameters.values()}
    wanted = parameters | {name: t for name, t in _inputs(fn, args, kwargs) if id(t) not in given}
    if not wanted:
        raise OptionError(
            "check_gradients: no parameter of the function's modules requires grad, and no argument; call "
            "requires_grad_() on what should have a gradient"
        )
    backend, traces = with_options(options), torch_dry_run.DynamoTraces()

    def noting(gm: GraphModule, inputs: Any) -> Callable[..., Any]:
        traces.note()
        compiled: Callable[..., Any] = backend(gm, inputs)
        return compiled

    # neither the graphs of another check nor entries that count against Dynamo's limit
    noting.__name__ = torch_dry_run.PLANNER
    traces.forget(program)
    pythons = random.getstate()
    try:
        with _as_before(modules), torch_dry_run.random_state_kept(), torch.enable_grad():
            with torch.compiler.set_stance("default"), hooks, traces, recorded() as graphs:
                out = torch.compile(program, backend=noting, dynamic=dynamic)(*args, **kwargs)
            outputs = [
                t for t in torch_values.pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad
            ]
            if not outputs:
                raise OptionError(
                    "check_gradients: no output of the function requires grad; return the loss or what it is made of, "
                    "undetached"
                )
            cotangents = [_cotangent(t) for t in outputs]
            drawn = torch_dry_run.random_states()
            grads = torch.autograd.grad(outputs, list(wanted.values()), cotangents, allow_unused=True)
    except Exception as e:
        ours = getattr(e, "inner_exception", None) or e.__cause__
        if isinstance(ours, AotHooksError):
            raise ours from None
        raise
    finally:
        random.setstate(pythons)
    plan = joined([plan for graph in graphs for plan in graph.plans])
    return _Run(list(wanted), [t.detach() for t in outputs], list(grads), drawn, plan)


def _cotangent(output: torch.Tensor) -> torch.Tensor:
    if output.dim() == 0:
        return torch.ones_like(output)
    generator = torch.Generator(output.device).manual_seed(0)
    return torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)


def _row(name: str, g0: torch.Tensor, g: torch.Tensor | None, whole: float) -> GradientRow:
    g = torch.zeros_like(g0) if g is None else g
    finite, without = bool(torch.isfinite(g).all()), bool(torch.isfinite(g0).all())
    norm = _norm([g0])
    vanishes = norm < _ROUNDING.get(g0.dtype, 0.0) * whole
    return GradientRow(name, tuple(g0.shape), g0.dtype, norm, _error([(g0, g)]), finite, without, vanishes)


def _off(reference: _Run, found: _Run) -> float:
    """How far the outputs are off."""
    return _error(list(zip(reference.outputs, found.outputs, strict=True)))


def _goodness(row: GradientRow) -> tuple[bool, bool, bool, float]:
    """Ascending from the worst row."""
    error = math.inf if math.isnan(row.error) else row.error
    return row.finite or not row.finite_without, not row.finite_without, row.vanishes, -error


def _error(pairs: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> float:
    off = _norm([(torch.zeros_like(a) if b is None else b).to(_wide(a)) - a.to(_wide(a)) for a, b in pairs])
    norm = _norm([a for a, _ in pairs])
    return off / norm if norm else math.inf if off else 0.0


def _norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(t, dtype=_wide(t))) ** 2 for t in tensors))


def _wide(t: torch.Tensor) -> torch.dtype:
    return torch.complex128 if t.is_complex() else torch.float64


# --- parameters, inputs, and how they were ----------------------------------------------------------------------------


def _modules(fn: Any, args: Any, kwargs: Any) -> dict[str, torch.nn.Module]:
    """The modules that `fn` is, belongs to, closes over or names as globals, and those it is given, by name."""
    function = getattr(fn, "__func__", fn)
    held: dict[str, Any] = {"": fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)}
    if isinstance(function, types.FunctionType):
        held |= {name: function.__globals__.get(name) for name in function.__code__.co_names}
        held |= inspect.getclosurevars(function).nonlocals
    held |= {f"argument {i}": a for i, a in enumerate(torch_values.pytree.tree_leaves((args, kwargs)))}
    found: dict[str, torch.nn.Module] = {}
    for name, value in held.items():
        inner = dynamo.uncompiled(value)[0] if isinstance(value, torch.nn.Module) else value
        if isinstance(inner, torch.nn.Module) and not any(inner in m.modules() for m in found.values()):
            found[name] = inner
    return found


def _parameters(modules: dict[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for prefix, module in modules.items():
        yield from module.named_parameters(prefix=prefix)


def _inputs(fn: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The arguments that require grad, by the names of the parameters of `fn`."""
    try:
        target = fn.forward if isinstance(fn, torch.nn.Module) else fn
        named = inspect.signature(target).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a function of C, or a call that will say what is wrong with it
        named = {str(i): a for i, a in enumerate(args)} | kwargs
    for name, value in named.items():
        leaves = [t for t in torch_values.pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
        for i, t in enumerate(leaves):
            if t.requires_grad:
                yield f"argument {name}" + (f"[{i}]" if t is not value else ""), t


@contextlib.contextmanager
def _as_before(modules: dict[str, torch.nn.Module]) -> Iterator[None]:
    """Gradients and buffers as they were, at the end; refuses what changes parameters."""
    parameters = dict(_parameters(modules))
    versions = {name: (p, p.grad, p._version) for name, p in parameters.items()}
    owners = [m for module in modules.values() for m in module.modules()]
    buffers = [(m, name, b, b.clone()) for m in owners for name, b in m.named_buffers(recurse=False)]
    no_step = register_optimizer_step_pre_hook(_refuse_step)
    try:
        yield
    finally:
        no_step.remove()
        for p, grad, _ in versions.values():
            p.grad = grad
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                buffer.copy_(before)
                setattr(module, name, buffer)
    changed = [name for name, (p, _, version) in versions.items() if p._version != version]
    if changed:
        raise OptionError(
            f"check_gradients: the function writes to its parameter '{changed[0]}', so its second run is another one; "
            "take the write out of it (it is done: restore the parameters)"
        )


def _refuse_step(optimizer: Any, *_: Any) -> None:
    raise OptionError(
        f"check_gradients got a function that steps an optimizer ({type(optimizer).__name__}); give it the model or "
        "the loss function"
    )
