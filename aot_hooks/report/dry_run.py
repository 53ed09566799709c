"""`aot_hooks.plan`: which tensors would be saved, and how, without a run on real tensors.

      fn, args --Dynamo--> graph --plan_graph--> Plan         for each graph, in order; no code is made
                             |
                             +--> runs on fake tensors --> the code after a graph break goes on with them

No kernel runs and no memory is taken for activations. Parameters, buffers, gradients, attributes of modules and random
state stay unchanged. Other Python side effects happen, on fake tensors. A program that branches on values between its
graphs raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ..backend import plan_graph
from ..errors import BudgetWarning, OptionError, UnsupportedGraphError, UnusedWarning, did_you_mean, warn_user
from ..graphs.saved import SavedTensor
from ..options import Options
from ..passes.plan import Plan, joined
from ..planning.assignment import Assignment
from ..planning.budget import Budget, mib
from ..torch_private import aot
from ..torch_private import dry_run as torch_dry_run
from ..torch_private.values import data_dependent_errors, pytree, without_modes
from .trial import reachable_values, signature_of, trial, unwrap_compiled


def plan(
    fn: Callable[..., Any],
    *args: Any,
    policy: Any = None,
    scope: str | None = None,
    inner: str | None = None,
    **kwargs: Any,
) -> Plan:
    """Which tensors `fn(*args, **kwargs)` would save for backward under `torch.compile(fn, backend="aot_hooks")`, and
    how each would be stored. Nothing runs on real tensors, is changed or stays compiled.

    Args:
        fn: a module or function; a result of `torch.compile(..., backend="aot_hooks")` brings its options.
        args, kwargs: its arguments; real or fake tensors. Some of its parameters or inputs must require grad.
        policy: a policy or `Hook`, used where no context is in force around this call.
        scope: the scope of `policy`; "donated" by default.
        inner: "inductor" (the default) or "aten", see `Options`: they decompose, and so save, differently.

    Returns:
        One `Plan` for all graphs, in order, with the bytes alive along the step. A budget plans each alone here, and a
        `BudgetWarning` says if they are over it together.

    Raises:
        OptionError: for a wrong option, for tensors on the device "meta", or if `fn` steps an optimizer.
        UnsupportedGraphError: if `fn` reads a tensor's value outside of its compiled graphs.
        HookContractError, HookTraceError, PolicyError: as compiling does.
    """
    found, over = dry_run(fn, args, kwargs, policy=policy, scope=scope, inner=inner)
    if not found.decisions and not torch.is_grad_enabled():
        warn_user("aot_hooks.plan: gradients are disabled here (torch.no_grad), so nothing is saved", UnusedWarning)
    if over:
        warn_user(f"aot_hooks: {over}", BudgetWarning)
    return found


def saved_tensors(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[SavedTensor, ...]:
    """The tensors that `fn(*args, **kwargs)` saves for backward when it is compiled; else as `plan`."""
    return tuple(d.saved for d in plan(fn, *args, **kwargs).decisions)


def dry_run(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    explore: Callable[[Plan, Callable[[Budget], Plan]], None] | None = None,
    **overrides: Any,
) -> tuple[Plan, str]:
    """The plan of all graphs, and what to say if they are over their budget together; "" if not.

    `overrides` come before the options of `fn`. `explore`: see `plan_graph`.
    """
    fn, own_options, dynamic = unwrap_compiled("aot_hooks.plan", fn)
    check_arguments("aot_hooks.plan", fn, args, kwargs, overrides)
    options = Options.parse(own_options | {name: value for name, value in overrides.items() if value is not None})
    plans: list[Plan] = []
    budgets: list[Assignment | None] = []  # of each graph of Dynamo with a plan; None for another policy
    reachable = reachable_values(fn)
    module = reachable[""]
    state = [*module.parameters(), *module.buffers()] if isinstance(module, torch.nn.Module) else []
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    if any(t.is_meta for t in (*leaves, *state)):
        raise OptionError(
            "aot_hooks.plan: expected real or fake tensors, got some of device 'meta', whose operators torch does not "
            "trace; make the model and its inputs on the device they will be on, under FakeTensorMode (docs/reports.md)"
        )
    mode = torch_dry_run.fake_mode_for([*leaves, *state])

    def planner(gm: GraphModule, inputs: Any) -> Callable[..., Any]:
        program = aot.copied(gm)  # because Inductor's passes change `gm`
        with without_modes():
            found, budget = plan_graph(gm, inputs, options, explore)
        plans.extend(found)
        if found:
            budgets.append(budget)

        def run(*values: Any) -> Any:
            with mode:
                return program(*torch_dry_run.to_fake(mode, values))

        return run

    roots = pytree.tree_leaves((reachable, args, kwargs))
    try:
        with (
            _put_back([*leaves, *state], roots),
            trial("aot_hooks.plan", fn, planner, dynamic) as compiled,
            mode,
        ):
            compiled(*args, **kwargs)
    except data_dependent_errors() as e:
        raise UnsupportedGraphError(
            f"expected a function that can be followed without its tensors' values, but outside of the compiled graphs "
            f"one is read ({str(e).splitlines()[0]}); move what reads it (.item(), print, if) out of the function, or "
            "compile and run it, and take aot_hooks.last_plans(compiled)"
        ) from e
    planned = joined(plans)
    return planned, _over_budget(planned, budgets)


@contextlib.contextmanager
def _put_back(tensors: Iterable[torch.Tensor], roots: Iterable[Any]) -> Iterator[None]:
    """Put gradients of `tensors` and attributes of modules among `roots` back at the end: new ones are fake."""
    grads = [(t, t.grad) for t in tensors if t.is_leaf]
    modules = {inner for root in roots if isinstance(root, torch.nn.Module) for inner in root.modules()}
    own = [vars(module) for module in modules]
    tables = [*own, *(table.get(name) for table in own for name in ("_parameters", "_buffers", "_modules"))]
    attributes = [(table, dict(table)) for table in tables if type(table) is dict]
    try:
        yield
    finally:
        for tensor, grad in grads:
            tensor.grad = grad
        for table, before in attributes:
            if table.keys() != before.keys() or any(table[name] is not value for name, value in before.items()):
                table.clear()
                table.update(before)


def _over_budget(planned: Plan, budgets: Sequence[Assignment | None]) -> str:
    """What to say if graphs that share a budget are over it together; "" if they are not."""
    budget = budgets[0] if len(budgets) > 1 and len(set(budgets)) == 1 else None
    peak = None if budget is None else budget.peak_bytes
    if peak is None or planned.peak_bytes <= peak:
        return ""
    return (
        f"{budget!r}: expected a step under {mib(peak)}, but its {len(budgets)} graphs are planned one by one here, "
        f"and take {mib(planned.peak_bytes)} together. In training a budget plans them as one step after the first "
        "steps: look at aot_hooks.last_plans(compiled) then"
    )


def check_arguments(
    caller: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], own: Iterable[str]
) -> None:
    """Raises `OptionError` for a keyword that is neither one of `fn` nor our `own`, or if arguments are missing."""
    try:
        signature = signature_of(fn)
    except (TypeError, ValueError):  # a function of C
        return
    parameters = signature.parameters
    name = getattr(fn, "__name__", type(fn).__name__)
    wrong = [name for name in kwargs if name not in parameters]
    if wrong and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        valid = [*own, *parameters]
        raise OptionError(
            f"{caller}: no argument {wrong[0]!r}{did_you_mean(wrong[0], valid) or ';'} its own are "
            f"{', '.join(own)}; others go to {name}({', '.join(parameters)})"
        )
    if getattr(fn, "_forward_pre_hooks", None):  # hooks of a module may add arguments
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as e:
        shown = ", ".join(parameters)
        raise OptionError(
            f"{caller}: {name}({shown}) can't be called so: {e}. Give its arguments after it: "
            f"{caller}({', '.join([name, *parameters])}, ...)"
        ) from None
