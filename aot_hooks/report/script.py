"""Run an unchanged training script, and record the tensors that it saves for backward.

      script.py --runpy--> torch.compile(...) --stance: every backend is ours--> plans of the graphs that ran in the
                   |                                                             last step
                   +-----> each outermost module called eagerly, once: `plan(module, ...)` on its arguments

All by public hooks of torch: `torch.compiler.set_stance(force_backend=...)`, global module hooks and optimizer hooks.
For the script this means: this backend compiles its functions with default mode, whatever backend and options it
chose. Models that it runs eagerly run eagerly. With a policy, compiled graphs do run with hooks.

A script that uses this package keeps its own backends and hooks, which are reported, unless a policy is passed.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..backend import with_options
from ..errors import AotHooksError, unwrapped
from ..passes.plan import Plan, joined
from ..records import CompiledGraph, recorded
from ..torch_private import dynamo
from ..torch_private import values as torch_values
from .dry_run import dry_run


class ScriptError(AotHooksError, RuntimeError):
    """The script does not exist, failed, or saved nothing for backward."""


class _Enough(BaseException):
    """Ends the script after the last step; not an Exception, so that the script does not catch it."""


@dataclass
class Recorded:
    """The record of a script's run."""

    graphs: Sequence[CompiledGraph] = ()  # compiled; filled while it runs
    eager: list[tuple[str, Plan]] = field(default_factory=list)  # modules run eagerly; empty if it compiled anything
    # graphs with a backward in the last step that ran any: the most runs whose backward was outstanding at once
    last_step: dict[CompiledGraph, int] = field(default_factory=dict)
    keeps_own_hooks: bool = False  # the script uses this package, and its own hooks were in force
    hooks_overridden: bool = False  # it does, and the policy passed in replaced its backend's options
    over_budget: list[str] = field(default_factory=list)  # modules whose graphs are, planned one by one
    notes: list[str] = field(default_factory=list)  # modules that could not be planned, with the reason
    step_count: int = 0  # of the optimizer
    # peaks on the CUDA device over the bytes before: forward and backward, gradients included; the optimizer's step
    peak_bytes: int | None = None
    optimizer_bytes: int | None = None

    @property
    def compiled(self) -> list[CompiledGraph]:
        """The graphs that have a backward."""
        return [graph for graph in self.graphs if graph.plans]

    @property
    def reported(self) -> list[CompiledGraph]:
        """The compiled graphs of the last step; all if no optimizer has stepped after one."""
        return [graph for graph in self.compiled if graph in self.last_step or not self.last_step]

    @property
    def plan(self) -> Plan:
        """One plan of the reported graphs, each repeated by the number of its runs that were outstanding at once.

        Layers that are compiled one by one share a graph, and so do the steps of a recurrence: these repeat. Batches
        whose gradients accumulate run it in turn: these don't.
        """
        compiled = [p for g in self.reported for _ in range(self.times(g)) for p in g.plans]
        return joined(compiled or [plan for _, plan in self.eager])

    def times(self, graph: CompiledGraph) -> int:
        """How often a reported graph counts in `plan`."""
        return max(1, self.last_step.get(graph, graph.most_waiting))

    @property
    def others(self) -> Plan:
        """One plan of the compiled graphs that are not reported."""
        reported = set(self.reported)
        return joined([p for g in self.compiled if g not in reported for p in g.plans])


def run_script(path: str, arguments: list[str], options: Mapping[str, Any], steps: int | None = None) -> Recorded:
    """Run the script at `path` as `python path arguments...` would.

    Args:
        options: of the backend, see options.py.
        steps: stop after this number of optimizer steps; None runs the script to its end.

    Raises:
        ScriptError: the script does not exist, raised, exited with an error, or saved nothing for backward.
    """
    _check_exists(path)
    found, cuda = Recorded(), _Cuda()
    uses_package, has_policy = _names_this_package(path), options.get("policy") is not None
    found.keeps_own_hooks, found.hooks_overridden = uses_package and not has_policy, uses_package and has_policy
    with _as_program(path, arguments), warnings.catch_warnings(), ExitStack() as stack:
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
        backend = with_options(options)  # even if unused: it raises for wrong options before the script runs
        if not found.keeps_own_hooks:
            stack.enter_context(torch.compiler.set_stance("default", force_backend=backend))
        found.graphs = stack.enter_context(recorded())
        for handle in (*_watch_modules(found, options, cuda), *_watch_steps(found, steps, cuda)):
            stack.callback(handle.remove)
        try:
            runpy.run_path(path, run_name="__main__")
        except _Enough:
            pass
        except SystemExit as e:
            if e.code not in (None, 0):
                raise ScriptError(f"{path} exited with {e.code!r}") from e
        except Exception as e:
            why = (
                "; it uses aot_hooks itself: leave --hook and --policy out to run it as it is" * found.hooks_overridden
            )
            ours = unwrapped(e)  # Dynamo wraps it
            text = str(e).partition("\n")[0] if ours is None else str(ours)  # the traceback has all lines
            raise ScriptError(f"{path} raised {type(ours or e).__name__}: {text}{why}") from e
    if found.compiled:
        found.eager.clear()
    if not found.plan.decisions:
        if found.notes:
            raise ScriptError(f"{path}: no module could be planned:" + "".join(f"\n  {note}" for note in found.notes))
        raise ScriptError(
            f"{path} saved nothing for backward: no compiled function and no module was called with gradients "
            "enabled; does it train in another process, or only when given arguments (after --)?"
        )
    return found


def run_as_program(path: str, arguments: list[str]) -> None:
    """Run the script at `path` as `python path arguments...` would. What it raises, and its exit, come through.

    Raises `ScriptError` if it does not exist.
    """
    _check_exists(path)
    with _as_program(path, arguments):
        runpy.run_path(path, run_name="__main__")


def _check_exists(path: str) -> None:
    if not Path(path).is_file():
        raise ScriptError(f"no such script: {path}")


def _names_this_package(path: str) -> bool:
    """Whether the script imports this package or has its name as a string; comments do not count."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError):
        return False  # running it will raise the error
    names: list[Any] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                names += [alias.name for alias in aliases]
            case ast.ImportFrom(module=name) | ast.Constant(value=name):
                names.append(name)
    return any(isinstance(name, str) and re.fullmatch(r"aot_hooks(\.\w+)*", name) for name in names)


@contextmanager
def _as_program(path: str, arguments: list[str]) -> Iterator[None]:
    argv, search = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [path, *arguments], [str(Path(path).resolve().parent)]
    dynamo.forget_main()  # runpy puts the script's module in its place
    try:
        yield
    finally:
        dynamo.forget_main()
        sys.argv, sys.path[:] = argv, search


class _Cuda:
    """Peak bytes over the allocation at the step's first module call, gradients excluded from that allocation.

    The gradients of the step before are freed at some point in the step, and its own count as part of its peak.
    """

    def __init__(self) -> None:
        self.base: int | None = None  # bytes allocated when the step began; None between two steps

    def begin(self, module: torch.nn.Module) -> None:
        """Begin a step, unless it has begun; `module` is called now."""
        if self.base is None and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
            grads = [p.grad for p in module.parameters() if p.grad is not None and p.grad.is_cuda]
            self.base = torch.cuda.memory_allocated() - sum(g.untyped_storage().nbytes() for g in grads)

    def end(self) -> None:
        """End the step."""
        self.base = None

    def peak(self) -> int | None:
        """Peak bytes of the step since this was last called; None if it runs elsewhere, or has not begun."""
        if self.base is None:
            return None
        bytes_over = torch.cuda.max_memory_allocated() - self.base
        torch.cuda.reset_peak_memory_stats()
        return bytes_over or None  # a step that allocates nothing there runs on another device


def _watch_modules(found: Recorded, options: Mapping[str, Any], cuda: _Cuda) -> list[Any]:
    """Hooks that plan each outermost module at its first eager call. Returns the handles that remove them."""
    depth = 0
    seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # an id may be reused by another module

    def enter(module: torch.nn.Module, args: Any) -> None:
        nonlocal depth
        if torch.compiler.is_compiling():
            return
        depth += 1
        if depth == 1:
            cuda.begin(module)
            is_new = module not in seen and not found.compiled
            if torch.is_grad_enabled() and is_new and _plan_eager(found, module, options):
                seen.add(module)

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        if not torch.compiler.is_compiling():
            depth -= 1

    return [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]


def _plan_eager(found: Recorded, module: torch.nn.Module, options: Mapping[str, Any]) -> bool:
    """Plan a call of `module` that needs gradients and is not compiled; else returns False."""
    args, kwargs = torch_values.module_call_arguments()
    tensors = [*module.parameters(), *torch_values.pytree.tree_leaves((args, kwargs))]
    trains = any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)
    if not trains or dynamo.compile_wrapper_of(module) is not None:
        return False  # of a compiled module the backend reports the graphs
    name = type(module).__name__
    try:
        plan, over = dry_run(module, args, kwargs, **options)
    except AotHooksError as e:
        found.notes.append(f"{name}: {e}")
    except dynamo.dynamo_error() as e:  # the script does not compile it, and may go on
        found.notes.append(f"{name}: cannot be compiled, so not planned: {str(e).strip().splitlines()[0]}")
    else:
        if plan.live_after:  # a graph has a backward
            found.eager.append((name, plan))
        if over:
            found.over_budget.append(f"{name}: {over}")
    return True


def _watch_steps(found: Recorded, steps: int | None, cuda: _Cuda) -> list[Any]:
    """Hooks around each optimizer step, which ends a step of the script: its peaks, and the graphs that ran in it.

    They raise `_Enough` after `steps` of them. Returns the handles that remove the hooks.
    """
    counted: dict[CompiledGraph, int] = {}  # runs of each graph in all steps so far

    def before(*_: Any) -> None:
        peak = cuda.peak()
        if peak is not None:
            found.peak_bytes = peak  # of the last step: the first one also compiles

    def after(*_: Any) -> None:
        found.optimizer_bytes = cuda.peak()
        cuda.end()
        found.step_count += 1
        ran = [g for g in found.compiled if g.run_count > counted.get(g, 0)]
        if ran:  # a second optimizer of the same step comes after no graph
            found.last_step = {g: g.most_waiting for g in ran}
            for graph in ran:
                graph.most_waiting, counted[graph] = graph.waiting_count, graph.run_count
        if steps is not None and found.step_count >= steps:
            raise _Enough

    untraced: Callable[[Any], Any] = dynamo.untraced
    return [register_optimizer_step_pre_hook(untraced(before)), register_optimizer_step_post_hook(untraced(after))]
