"""Run a training script as it is, and record what it saves for backward.

      script.py --runpy--> torch.compile(...) --stance: every backend is ours--> plans of its graphs
                   |
                   +-----> an outermost module called eagerly, once each: `plan(module, ...)` on its arguments

All by public hooks of torch: `torch.compiler.set_stance(force_backend=...)`, global module hooks and optimizer hooks.
To the script this means: what it compiles is compiled by this backend with default mode, whatever backend and options
it asked for; models that it runs eagerly run eagerly. With a policy, compiled graphs do run with hooks.
"""

from __future__ import annotations

import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import _compat
from .backend import recording
from .dry_run import plans_of
from .errors import AotHooksError
from .plan import Plan, joined

__all__ = ["Recorded", "ScriptError", "run_script"]


class ScriptError(AotHooksError, RuntimeError):
    """The script is not there, failed, or saved nothing for a backward."""


class _Enough(BaseException):
    """The steps that were asked for are done; not an Exception, so that the script does not catch it."""


@dataclass
class Recorded:
    """What a script did.

    Attributes:
        compiled: plans of its compiled graphs.
        eager: plans of the modules it ran eagerly, by class name; empty if it compiled anything.
        notes: what could not be looked at, and why.
        step_count: optimizer steps.
        peak_bytes: most bytes a forward and backward took on the CUDA device over those before; None without one.
        optimizer_bytes: likewise the optimizer's step.
    """

    compiled: list[Plan] = field(default_factory=list)
    eager: list[tuple[str, Plan]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    step_count: int = 0
    peak_bytes: int | None = None
    optimizer_bytes: int | None = None

    @property
    def plan(self) -> Plan:
        """All graphs as one."""
        return joined(self.compiled or [plan for _, plan in self.eager])


def run_script(path: str, arguments: list[str], options: Mapping[str, Any], steps: int | None = None) -> Recorded:
    """Run the script at `path` as `python path arguments...` would.

    Args:
        options: of the backend, see `backend.Options`.
        steps: stop after so many optimizer steps; None runs it to its end.

    Raises:
        ScriptError: no such script, it raised or exited with an error, or nothing was saved for backward.
    """
    if not Path(path).is_file():
        raise ScriptError(f"no such script: {path}")
    recorded, cuda = Recorded(), _Cuda()
    with _as_program(path, arguments), warnings.catch_warnings(), ExitStack() as stack:
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
        stack.enter_context(torch.compiler.set_stance("default", force_backend=recording(options, recorded.compiled)))
        for handle in (*_watch_modules(recorded, options, cuda), *_watch_steps(recorded, steps, cuda)):
            stack.callback(handle.remove)
        try:
            runpy.run_path(path, run_name="__main__")
        except _Enough:
            pass
        except SystemExit as e:
            if e.code not in (None, 0):
                raise ScriptError(f"{path} exited with {e.code!r}") from e
        except Exception as e:
            raise ScriptError(f"{path} raised {type(e).__name__}: {e}") from e
    if recorded.compiled:
        recorded.eager.clear()
    if not recorded.plan.decisions:
        why = "".join(f"\n  {note}" for note in recorded.notes)
        raise ScriptError(
            f"{path} saved nothing for backward: no compiled function and no module was called with gradients "
            f"enabled; does it train in another process, or only when given arguments (after --)?{why}"
        )
    return recorded


@contextmanager
def _as_program(path: str, arguments: list[str]) -> Iterator[None]:
    argv, search = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [path, *arguments], [str(Path(path).resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, search


class _Cuda:
    """Bytes over those that were allocated when the step's first module was called."""

    def __init__(self) -> None:
        self.base: int | None = None

    def begin(self) -> None:
        if self.base is None and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()

    def peak(self) -> int | None:
        if self.base is None:
            return None
        bytes_over = torch.cuda.max_memory_allocated() - self.base
        torch.cuda.reset_peak_memory_stats()
        return bytes_over


def _watch_modules(recorded: Recorded, options: Mapping[str, Any], cuda: _Cuda) -> list[Any]:
    depth = 0
    seen: set[int] = set()

    def enter(module: torch.nn.Module, args: Any) -> None:
        nonlocal depth
        if torch.compiler.is_compiling():
            return
        depth += 1
        if depth == 1:
            cuda.begin()
            if torch.is_grad_enabled() and id(module) not in seen and not recorded.compiled:
                _plan_eager(recorded, module, options, seen)

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        if not torch.compiler.is_compiling():
            depth -= 1

    return [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]


def _plan_eager(recorded: Recorded, module: torch.nn.Module, options: Mapping[str, Any], seen: set[int]) -> None:
    args, kwargs = _compat.module_call_arguments()
    tensors = [*module.parameters(), *_compat.pytree.tree_leaves((args, kwargs))]
    if _compat.compile_wrapper_of(module) is not None:
        return  # its graphs come by the backend
    if not any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        return
    seen.add(id(module))
    name = type(module).__name__
    try:
        found = plans_of(module, args, kwargs, **options)
    except AotHooksError as e:
        recorded.notes.append(f"{name}: {e}")
        return
    if found:
        recorded.eager.append((name, joined(found)))


def _watch_steps(recorded: Recorded, steps: int | None, cuda: _Cuda) -> list[Any]:
    def before(*_: Any) -> None:
        peak = cuda.peak()
        if peak is not None:
            recorded.peak_bytes = peak  # of the last step: the first one also compiles

    def after(*_: Any) -> None:
        recorded.optimizer_bytes = cuda.peak()
        cuda.base = None
        recorded.step_count += 1
        if steps is not None and recorded.step_count >= steps:
            raise _Enough

    untraced: Callable[[Any], Any] = _compat.untraced
    return [register_optimizer_step_pre_hook(untraced(before)), register_optimizer_step_post_hook(untraced(after))]
