"""What would be saved, and how, without running anything.

      fn, args --Dynamo--> graph --plan_graph--> Plan         for each graph, in order; no code is made
                             |
                             +--> runs on fake tensors --> what comes after a graph break goes on with them

No kernel runs, no memory is taken for activations, and parameters, buffers, gradients, attributes of modules and random
state stay as they are. Other Python side effects happen: what the program appends to a list is there, and is fake. A
program that branches on values between its graphs cannot be followed so: that raises.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..backend import plan_graph
from ..errors import AotHooksError, OptionError, UnsupportedGraphError, did_you_mean
from ..graphs.saved import SavedTensor
from ..options import Options
from ..passes.plan import Plan, joined
from ..torch_private import dry_run as torch_dry_run
from ..torch_private import dynamo
from ..torch_private.values import data_dependent_errors, pytree, without_modes

__all__ = ["plan", "plans_of", "saved_tensors"]


def plan(
    fn: Callable[..., Any],
    *args: Any,
    policy: Any = None,
    scope: str | None = None,
    inner: str | None = None,
    **kwargs: Any,
) -> Plan:
    """Which tensors `fn(*args, **kwargs)` would save for backward under `torch.compile(fn, backend="aot_hooks")`, and
    how each would be stored. Nothing is run, changed or compiled for good.

    Args:
        fn: a module or function; what `torch.compile(..., backend="aot_hooks")` returned brings its options.
        args, kwargs: what it is called with; real or fake tensors. Some of its parameters or inputs must require grad.
        policy: a policy or `Hook`, used where no context is in force around this call.
        scope: scope of `policy`; "donated" if not given.
        inner: "inductor" (if not given) or "aten", see `Options`: they decompose, and so save, differently.

    Returns:
        One `Plan` for all graphs, in order, with the bytes alive along the step.

    Raises:
        OptionError: for a wrong option, or if `fn` steps an optimizer.
        UnsupportedGraphError: if `fn` reads a tensor's value outside of its compiled graphs.
        HookContractError, HookTraceError, PolicyError: as compiling does.
    """
    return joined(plans_of(fn, args, kwargs, policy=policy, scope=scope, inner=inner))


def saved_tensors(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[SavedTensor, ...]:
    """The tensors that `fn(*args, **kwargs)` saves for backward when it is compiled; else as `plan`."""
    return tuple(d.saved for d in plan(fn, *args, **kwargs).decisions)


def plans_of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **said: Any) -> list[Plan]:
    """A plan for each graph with a backward; `said` overrides the options of `fn`."""
    fn, wrapper = dynamo.uncompiled(fn)
    if not callable(fn):
        raise OptionError(f"expected a module or function, got {fn!r}")
    _check_keywords(fn, kwargs, said)
    given = (dynamo.options_of(wrapper) if wrapper is not None else None) or {}
    options = Options.parse(given | {name: value for name, value in said.items() if value is not None})
    plans: list[Plan] = []
    module = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    state = [*module.parameters(), *module.buffers()] if isinstance(module, torch.nn.Module) else []
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    mode = torch_dry_run.fake_mode_for([*leaves, *state])
    traces = torch_dry_run.DynamoTraces()

    def planner(gm: GraphModule, inputs: Any) -> Callable[..., Any]:
        traces.note()
        program = _copy(gm)  # Inductor's passes change the one they get
        with without_modes():
            plans.extend(plan_graph(gm, inputs, options))

        def run(*values: Any) -> Any:
            with mode:
                return program(*torch_dry_run.to_fake(mode, values))

        return run

    def program(*args: Any, **kwargs: Any) -> Any:
        # a frame of our own on top: what Dynamo stores for `fn`, or decides to skip, is stored here and forgotten
        return fn(*args, **kwargs)

    planner.__name__ = torch_dry_run.PLANNER
    traces.forget(program)
    grads = [(t, t.grad) for t in (*leaves, *state) if t.is_leaf]
    attributes = [(place, dict(place)) for m in _modules_in(fn, args, kwargs) for place in _places(m)]
    no_step = register_optimizer_step_pre_hook(_refuse_step)
    drawn = random.getstate()  # of Python's generator, which layer drop and the like draw from
    try:
        with torch.compiler.set_stance("default"), traces, torch_dry_run.random_state_kept(), mode:
            torch.compile(program, backend=planner, dynamic=getattr(wrapper, "dynamic", None))(*args, **kwargs)
    except data_dependent_errors() as e:
        raise UnsupportedGraphError(
            f"expected a function that can be followed without its tensors' values, but outside of the compiled graphs "
            f"one is read ({str(e).splitlines()[0]}); move what reads it (.item(), print, if) out of the function, or "
            "compile and run it, and take aot_hooks.last_plans(compiled)"
        ) from e
    except Exception as e:
        ours = getattr(e, "inner_exception", None) or e.__cause__
        if isinstance(ours, AotHooksError):
            raise ours from None
        raise
    finally:
        no_step.remove()
        random.setstate(drawn)
        for tensor, grad in grads:
            tensor.grad = grad
        for place, before in attributes:
            if place.keys() != before.keys() or any(place[name] is not value for name, value in before.items()):
                place.clear()  # what was assigned meanwhile is fake
                place.update(before)
    return plans


def _check_keywords(fn: Callable[..., Any], kwargs: dict[str, Any], said: dict[str, Any]) -> None:
    """Raises `OptionError` for a keyword that is neither ours nor one of `fn`, which would get it."""
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters
    except (TypeError, ValueError):  # a function of C
        return
    wrong = [name for name in kwargs if name not in parameters]
    if wrong and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        name = getattr(fn, "__name__", type(fn).__name__)
        valid = [*said, *parameters]
        raise OptionError(
            f"aot_hooks.plan: no argument {wrong[0]!r}{did_you_mean(wrong[0], valid) or ';'} its own are "
            f"{', '.join(said)}; others go to {name}({', '.join(parameters)})"
        )


def _modules_in(fn: Any, args: Any, kwargs: Any) -> set[torch.nn.Module]:
    """The modules that `fn` is, belongs to, closes over, names as globals, or is given, with those inside them."""
    function = getattr(fn, "__func__", fn)
    held: list[Any] = [fn, getattr(fn, "__self__", None)]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty one
            held.append(cell.cell_contents)
    if isinstance(function, types.FunctionType):
        held += [function.__globals__.get(name) for name in function.__code__.co_names]
    roots = pytree.tree_leaves((held, args, kwargs))
    return {inner for root in roots if isinstance(root, torch.nn.Module) for inner in root.modules()}


def _places(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Where the attributes of `module` are, its parameters and buffers among them."""
    own = vars(module)
    return [own, *(place for name in ("_parameters", "_buffers", "_modules") if type(place := own.get(name)) is dict)]


def _refuse_step(optimizer: Any, *_: Any) -> None:
    raise OptionError(
        f"aot_hooks.plan got a function that steps an optimizer ({type(optimizer).__name__}); give it the part of the "
        "step that is compiled: the model or the loss function"
    )


def _copy(gm: GraphModule) -> GraphModule:
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return GraphModule(gm, graph)
