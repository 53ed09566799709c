"""`check_gradients(fn, *args, policy=...)`: the effect of hooks on the gradients of one step, for each parameter.

      fn, args --compiled, nothing packed--> outputs --backward, random cotangents--> g0
               --compiled, with hooks------> outputs --the same cotangents----------> g     |g - g0| / |g0|, finite?

Both runs start from the same random state, so dropout is the same. Hooks that draw random numbers themselves would
shift it: then the first run packs too, but restores the exact tensors. Gradients, buffers, random state and arguments
are restored at the end; other side effects of `fn` happen in each run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..backend import with_options
from ..check.comparison import Deviation, deviations, relative_error
from ..context.entering import saved_tensors_policy
from ..context.pairs import ambient
from ..errors import OptionError
from ..hook import KEEP, Hook
from ..passes.plan import Plan, joined
from ..planning.assignment import Assignment
from ..planning.budget import Budget
from ..records import recorded
from ..settings.setting import Setting
from ..torch_private import autograd, dynamo
from ..torch_private import dry_run as torch_dry_run
from ..torch_private import values as torch_values
from .dry_run import check_arguments
from .trial import reachable_values, signature_of, trial, unwrap_compiled

_SAME, _ROUNDED = 1e-6, 1e-2  # error of outputs: equal up to rounding; low precision and another fusion
_SHOWN = 40  # rows of a printed report


@dataclass(frozen=True)
class GradientRow:
    """The gradient of one parameter or input.

    Attributes:
        name: as `named_parameters()` gives it, or "argument x".
        shape, dtype: of the gradient.
        norm: |g0|, of the gradient without hooks.
        error: |g - g0| / |g0|; 0 if both are zero, infinite if g0 alone is, NaN if one of them is not finite.
        finite: whether the gradient with hooks is finite everywhere.
        finite_without: likewise without hooks.
        vanishes: g0 is zero but for rounding, compared with all gradients together (a bias before a BatchNorm): the
            error means nothing then.
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
        rows: the worst first: gradients that only the hooks make infinite, then by error, vanishing ones last.
        error: |g - g0| / |g0| of all gradients together, without those that are not finite without hooks.
        output_error: likewise of the outputs. Hooks don't change these, so it is rounding.
        same_random_numbers: whether dropout and the like drew the same numbers; if not, the errors mean nothing.
        plan: the decisions of the hooks in compiled graphs.
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
            lines.append(
                "the two runs took different random numbers: use model.eval(), hooks with stochastic=False, or a "
                "budget whose allow has no 'int4'"
            )
        lines.append(f"{'error':>10} {'norm':>10}  gradient")
        for row in self.rows[:_SHOWN]:
            dtype = str(row.dtype).removeprefix("torch.")
            remark = "  zero but for rounding without hooks" if row.vanishes else ""
            if not row.finite:
                remark = "  not finite" if row.finite_without else "  not finite, without hooks either"
            lines.append(f"{row.error:10.3g} {row.norm:10.3g}  {row.name} {dtype}{list(row.shape)}{remark}")
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
        fn: a module or function; a result of `torch.compile(..., backend="aot_hooks")` brings its options.
        args, kwargs: its arguments. Gradients are those of the parameters of modules that `fn` is, belongs to or
            reads, and of arguments that require grad. The backward starts from random cotangents, from 1 for a scalar.
        policy: a policy or `Hook`. None: the context around this call, or else the policy in the options of `fn`.
        scope: the scope of `policy`; the default is that of a context.
        inner: "inductor" (the default) or "aten".

    Raises:
        OptionError: there are no hooks to check, or `fn` has no gradients, writes to its parameters or steps an
            optimizer.
        HookContractError, HookTraceError, PolicyError: as compiling does.
    """
    fn, options, dynamic = unwrap_compiled("check_gradients", fn)
    check_arguments("check_gradients", fn, args, kwargs, ("policy", "scope", "inner"))
    options |= {"inner": inner or options.get("inner", "inductor"), "cudagraphs": False, "check": False}
    own_policy = options.pop("policy", None)
    if policy is None and autograd.top_hooks() is None:
        if own_policy is None:
            raise OptionError(
                "check_gradients: no hooks to check; give policy=aot_hooks.float8(), say, or call it inside a context"
            )
        policy, scope = own_policy, scope or options.get("scope", "donated")
    backend = with_options(options)
    hooks = None if policy is None else saved_tensors_policy(policy, scope=scope)
    modules = _modules(fn, args, kwargs)
    run = partial(_run, fn, args, kwargs, backend, dynamic, modules)
    reference, found = run(saved_tensors_policy(KEEP)), run(hooks or contextlib.nullcontext())
    if reference.random_states != found.random_states and _output_error(reference, found) > _SAME:
        setting = hooks.setting if hooks is not None else ambient()[0]
        if setting is not None and not setting.eager:
            # A run that packs, and restores exact tensors, draws the same random numbers, unless Inductor orders the
            # operators differently: take the closer one of the two.
            rule = setting.rule
            packing_policy: Any = _PackButRestore(setting)
            if isinstance(rule, Budget):
                packing_policy = Assignment.of(rule, around=_exact)
            packing = run(saved_tensors_policy(packing_policy, scope=setting.scope))
            reference = min((reference, packing), key=lambda other: _output_error(other, found))
    names = [name for name, g0 in reference.grads.items() if g0 is not None]
    gradients, others = ([run.grads[name] for name in names] for run in (reference, found))
    dtypes = {decision.saved.dtype for decision in reference.plan.decisions}
    compared = deviations([(name, True) for name in names], gradients, others, dtypes)
    finite = [each for each in compared if math.isfinite(each.norm2)]
    total_norm = math.sqrt(sum(each.norm2 for each in finite))
    rows = sorted(map(partial(_row, total_norm), compared, gradients, others), key=_worst_first)
    output_error = _output_error(reference, found)
    same_random_numbers = reference.random_states == found.random_states or output_error < _ROUNDED
    return GradientReport(tuple(rows), relative_error(finite), output_error, same_random_numbers, found.plan)


@dataclass(frozen=True)
class _PackButRestore:
    """A policy that packs as `setting` does, and so draws as many random numbers, but restores the exact tensor."""

    setting: Setting

    def __call__(self, saved: Any) -> Hook:
        hook = self.setting.choose(saved)
        return KEEP if hook is KEEP else _exact(hook)


def _exact(hook: Hook) -> Hook:
    """A hook that packs as `hook` does, but restores the exact tensor."""
    return replace(hook, name=f"{hook.name}, exact", pack=_PackBoth(hook), unpack=_last, cache_hash=None)


@dataclass(frozen=True)
class _PackBoth:
    """A pack function that stores what `hook` packs, and the exact tensor beside it."""

    hook: Hook

    def __call__(self, x: torch.Tensor) -> Any:
        return self.hook.pack(x), x


def _last(packed: Any) -> torch.Tensor:
    """The unpack of `_PackBoth`: the exact tensor."""
    saved: torch.Tensor = packed[-1]
    return saved


@dataclass
class _Run:
    outputs: list[torch.Tensor]
    grads: dict[str, torch.Tensor | None]  # by the name of the parameter or argument
    random_states: list[bytes]  # of the generators, after the forward
    plan: Plan


def _run(
    fn: Any, args: Any, kwargs: Any, backend: Any, dynamic: Any, modules: dict[str, torch.nn.Module], hooks: Any
) -> _Run:
    copies: dict[int, torch.Tensor] = {}

    def copy(t: torch.Tensor) -> torch.Tensor:
        if id(t) in parameter_ids:
            return t
        return copies.setdefault(id(t), t.detach().clone().requires_grad_(t.requires_grad))

    parameters = {name: p for name, p in _parameters(modules) if p.requires_grad}
    parameter_ids = {id(p) for p in parameters.values()}
    args, kwargs = torch_values.pytree.tree_map_only(torch.Tensor, copy, (args, kwargs))
    sources = parameters | {name: t for name, t in _inputs(fn, args, kwargs) if id(t) not in parameter_ids}
    if not sources:
        raise OptionError(
            "check_gradients: no parameter of the function's modules requires grad, and no argument; call "
            "requires_grad_() on what should have a gradient"
        )
    with trial("check_gradients", fn, backend, dynamic) as compiled, _restored(modules), torch.enable_grad():
        with hooks, recorded() as graphs:
            out = compiled(*args, **kwargs)
        outputs = [t for t in torch_values.pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
        if not outputs:
            raise OptionError(
                "check_gradients: no output of the function requires grad; return the loss or what it is made of, "
                "undetached"
            )
        random_states = torch_dry_run.random_states()
        cotangents = [_cotangent(t) for t in outputs]
        grads = torch.autograd.grad(outputs, list(sources.values()), cotangents, allow_unused=True)
    plan = joined([plan for graph in graphs for plan in graph.plans])
    return _Run([t.detach() for t in outputs], dict(zip(sources, grads, strict=True)), random_states, plan)


def _cotangent(output: torch.Tensor) -> torch.Tensor:
    """The gradient of `output` that the backward starts from: 1 for a scalar, else random numbers of a fixed seed."""
    if output.dim() == 0:
        return torch.ones_like(output)
    generator = torch.Generator(output.device).manual_seed(0)
    return torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)


def _row(total_norm: float, compared: Deviation, g0: Any, g: Any) -> GradientRow:
    norm, finite = math.sqrt(compared.norm2), (True if g is None else bool(torch.isfinite(g).all()))
    finite_without = math.isfinite(compared.norm2)
    error = compared.error if finite and finite_without else math.nan
    vanishes = norm < compared.smallest * total_norm
    return GradientRow(compared.name, tuple(g0.shape), g0.dtype, norm, error, finite, finite_without, vanishes)


def _worst_first(row: GradientRow) -> tuple[bool, bool, bool, float]:
    """The key of a row to sort by: False comes before True.

    First gradients that only the hooks make infinite, then those that are not finite without hooks, then the others by
    error, then those that vanish.
    """
    error = math.inf if math.isnan(row.error) else row.error
    return row.finite or not row.finite_without, not row.finite_without, row.vanishes, -error


def _output_error(reference: _Run, found: _Run) -> float:
    names = [(str(i), False) for i, _ in enumerate(found.outputs)]
    return relative_error(deviations(names, reference.outputs, found.outputs))


def _modules(fn: Any, args: Any, kwargs: Any) -> dict[str, torch.nn.Module]:
    """The outermost modules that `fn` is, belongs to, names, or takes as arguments, by name."""
    leaves = torch_values.pytree.tree_leaves((args, kwargs))
    values = reachable_values(fn) | {f"argument {i}": a for i, a in enumerate(leaves)}
    found: dict[str, torch.nn.Module] = {}
    for name, value in values.items():
        module = dynamo.uncompiled(value)[0] if isinstance(value, torch.nn.Module) else value
        if isinstance(module, torch.nn.Module) and not any(module in m.modules() for m in found.values()):
            found[name] = module
    return found


def _parameters(modules: dict[str, torch.nn.Module]) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for prefix, module in modules.items() for name, p in module.named_parameters(prefix=prefix)]


def _inputs(fn: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The arguments that require grad, by the names of the parameters of `fn`."""
    try:
        named = signature_of(fn).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # a function of C, or wrong arguments, which the call will name
        named = {str(i): a for i, a in enumerate(args)} | kwargs
    for name, value in named.items():
        for i, t in enumerate(t for t in torch_values.pytree.tree_leaves(value) if isinstance(t, torch.Tensor)):
            if t.requires_grad:
                yield f"argument {name}" + (f"[{i}]" if t is not value else ""), t


@contextlib.contextmanager
def _restored(modules: dict[str, torch.nn.Module]) -> Iterator[None]:
    """Restores gradients and buffers at the end. Raises `OptionError` if a parameter has changed."""
    before = [(name, p, p.grad, p._version) for name, p in _parameters(modules)]
    owners = [m for module in modules.values() for m in module.modules()]
    buffers = [(m, name, b, b.clone()) for m in owners for name, b in m.named_buffers(recurse=False)]
    try:
        yield
    finally:
        for _, p, grad, _ in before:
            p.grad = grad
        with torch.no_grad():
            for module, name, buffer, copy in buffers:
                buffer.copy_(copy)
                setattr(module, name, buffer)
    changed = [name for name, p, _, version in before if p._version != version]
    if changed:
        raise OptionError(
            f"check_gradients: the function writes to its parameter '{changed[0]}', so its second run is another one; "
            "take the write out of it (it is done: restore the parameters)"
        )
