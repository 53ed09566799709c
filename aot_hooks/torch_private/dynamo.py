"""Dynamo around a compiled function: functions that it leaves to Python, and the way from `torch.compile` to a backend.

`dynamo_trace.py` reads the function that Dynamo is tracing, `dynamo_guards.py` the guards of a probe (2.11 to 2.15).
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.fx import GraphModule

from cudagraph.torch_private import compilers

from ..errors import is_library_file
from .symbols import need


def left_to_python() -> dict[str, int]:
    """How often Dynamo has met each thing that it does not trace in this process, by its explanation."""
    counters = need("torch._dynamo.utils.counters")
    return {**counters["graph_break"], **counters["unimplemented"]}


def reset_with_dynamo(backend: Any) -> None:
    """Have the next `torch._dynamo.reset()` call `backend.reset()`, as those of backends that functions are made with.

    Dynamo forgets its list of backends with each reset, and under `enable` it does not know this one.
    """
    need("torch._dynamo.eval_frame.cached_backends").setdefault(id(backend), backend)


comptime = need("torch._dynamo.comptime.comptime")
assume_constant_result = need("torch._dynamo.assume_constant_result")
_set_eval_frame = need("torch._C._dynamo.eval_frame.set_eval_frame")
# returns the base of Dynamo's errors, also of those that wrap an error on fake tensors
dynamo_error: Callable[[], type[Exception]] = functools.partial(need, "torch._dynamo.exc.TorchDynamoException")
_F = TypeVar("_F", bound=Callable[..., Any])
_IN_PYTHON = (
    "saved-tensor hooks of aot_hooks run in Python here. If this is compiled autograd, leave fullgraph=True out of its "
    "torch.compile"
)


def untraced(fn: _F) -> _F:
    """Has Dynamo leave `fn` to Python, with all that it calls. With `fullgraph=True` its error has the reason."""
    return torch.compiler.disable(fn, reason=_IN_PYTHON)


def outermost_runs_in_python(fn: _F) -> _F:
    """Has Dynamo inline `fn` where it traces the caller, and else leave it to Python."""
    need("torch._dynamo.eval_frame.skip_code")(fn.__code__)
    return fn


def in_python(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` without Dynamo, in a tenth of the time of `untraced`."""
    before = _set_eval_frame(None)
    try:
        return fn(*args)
    finally:
        _set_eval_frame(before)


def backend_failure(backend: str, error: Exception) -> Exception:
    """`error` wrapped as Dynamo wraps errors of backends, but with its own message first.

    Dynamo calls any other error that is raised while it traces an internal error, and drops the cause. The traceback
    that users see ends where Dynamo was called. The frames of the compilation would push the message off the screen;
    TORCHDYNAMO_VERBOSE=1 shows them, and `inner_exception` keeps them.
    """

    def name() -> None: ...

    name.__name__ = backend
    failure: Exception = need("torch._dynamo.exc.BackendCompilerFailed")(name, error, None)
    failure.args = (f"{type(error).__name__}: {error}\n\nRaised by backend={backend!r}.", *failure.args[1:])
    if need("torch._dynamo.config").verbose:
        return failure.with_traceback(error.__traceback__)

    def without_frames() -> Exception:
        del failure.remove_dynamo_frames  # type: ignore[attr-defined]  # a local function can't be pickled
        return failure.with_traceback(None)

    failure.remove_dynamo_frames = without_frames  # type: ignore[attr-defined]
    return failure


def leave_out_library_frames(error: BaseException) -> None:
    """Take the frames of torch and of this package out of the traceback of a `backend_failure`, but for the first."""
    frames = error.__traceback__
    if need("torch._dynamo.config").verbose or not hasattr(error, "remove_dynamo_frames"):
        return
    while frames is not None and frames.tb_next is not None:
        if is_library_file(frames.tb_next.tb_frame.f_code.co_filename):
            frames.tb_next = frames.tb_next.tb_next
        else:
            frames = frames.tb_next


def forget_main() -> None:
    """Have Dynamo look up `__main__` anew. It caches the module, there and in globals of the modules that it traced."""
    need("torch._dynamo.symbolic_convert._import_module").cache_clear()
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            vars(module).pop("__import___main__", None)


# --- from a compiled function to its backend and back ---


def _frame_of(path: str) -> types.FrameType | None:
    """The innermost frame of this thread that runs the function at `path`."""
    code = need(path).__code__
    return next((frame for frame, _ in traceback.walk_stack(inspect.currentframe()) if frame.f_code is code), None)


def calling_compile_wrapper() -> Any:
    """The `torch.compile` wrapper object that is calling the backend, or None (a backend called by hand)."""
    frame = _frame_of("torch._TorchCompileWrapper.__call__")
    return None if frame is None else frame.f_locals["self"]


def code_being_compiled() -> types.CodeType | None:
    """The code that Dynamo is compiling; None outside Dynamo."""
    frame = _frame_of("torch._dynamo.convert_frame._compile")
    return None if frame is None else cast(types.CodeType, frame.f_locals["code"])


def why_not_anew(code: types.CodeType) -> str:
    """Why `compile_anew(code, while_running=True)` would do nothing; "" if it would work."""
    if need("torch._dynamo.eval_frame._stance").stance != "default":
        return "torch.compiler.set_stance forbids it"
    if need("torch._dynamo.config").enable_compiler_collectives and process_count() > 1:
        return "torch._dynamo.config.enable_compiler_collectives makes each compilation wait for all processes"
    return BUSY if _busy_with(code)[0] else ""


def process_count() -> int:
    """How many processes the default group of torch.distributed has; 1 without one."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def compile_anew(code: types.CodeType, *, while_running: bool = False) -> bool:
    """Remove all compiled versions of `code`, so that its next call compiles. Returns whether it will.

    It will not, and nothing is removed, for the reasons of `why_not_anew`, or if some thread runs `code`. With
    `while_running`, versions of code that runs are invalidated instead: no later call takes them, and they count
    against the recompile limit.
    """
    if why_not_anew(code):
        return False
    _, runs = _busy_with(code)
    if runs:
        if while_running:
            invalidate(code, "a budget needs another plan")
        return while_running
    need("torch._C._dynamo.eval_frame.reset_code")(code)
    return True


BUSY = "a thread was compiling them"  # of `why_not_anew`; passes by itself


def _busy_with(code: types.CodeType) -> tuple[bool, bool]:
    """Whether a thread compiles `code`, and whether one runs it or what Dynamo made of it."""
    place = operator.attrgetter("co_name", "co_filename", "co_firstlineno")  # Dynamo's code has those of the original
    compiling = need("torch._dynamo.convert_frame._compile").__code__
    frames = [frame for newest in sys._current_frames().values() for frame, _ in traceback.walk_stack(newest)]
    try:
        compiles = any(frame.f_code is compiling and frame.f_locals.get("code") is code for frame in frames)
        return compiles, any(place(frame.f_code) == place(code) for frame in frames)
    finally:
        frames.clear()  # this function's frame is among them, and would keep all alive, gradients in a hook too


def entries_of(code: types.CodeType) -> Any:
    """The compiled versions of `code`."""
    return need("torch._C._dynamo.eval_frame._debug_get_cache_entry_list")(code)


def limit_reached() -> int | None:
    """The recompile limit, if the code that Dynamo is compiling now has as many versions then; else None.

    Calls that need another version run eagerly from then on. With `fullgraph=True` or `fail_on_recompile_limit_hit`
    they raise, and this returns None. So it does for a limit of 1: the first version of each function is the last.
    """
    frame = _frame_of("torch._dynamo.convert_frame._compile")
    if frame is None or frame.f_locals.get("one_graph"):
        return None
    config = need("torch._dynamo.config")
    limit: int = config.recompile_limit
    if limit == 1 or config.fail_on_recompile_limit_hit:
        return None
    before = frame.f_locals["cache_size"].num_cache_entries_with_same_id_matched_objs
    return limit if before + 1 >= limit else None


def may_recompile(code: types.CodeType | None) -> bool:
    """Whether half of the versions that Dynamo may make of `code` are still free. It runs eagerly if there are more."""
    limit = need("torch._dynamo.config").recompile_limit
    return code is None or 2 * len(entries_of(code)) < limit


def invalidate(code: types.CodeType, why: str, backend: str | None = None) -> None:
    """Invalidate the compiled versions of `code`, or only those of the backend `backend`: no call takes them any more.

    Dynamo does this itself when an object dies that a version guards, also while that version runs.
    """
    deleted = need("torch._dynamo.guards.DeletedGuardManagerWrapper")
    for entry in entries_of(code):
        ours = backend is None or getattr(entry.backend, "compiler_name", "") == backend
        if ours and (state := entry.guard_manager.extra_state) is not None:
            state.invalidate(entry, deleted(why))


def names_of_inputs(gm: GraphModule) -> list[str]:
    """What each input of a graph of Dynamo is called in the program: "layers.0.weight" for an attribute of a module.

    Dynamo notes where it found an input: `L['self']._modules['layers']._modules['0']._parameters['weight']`.
    """
    names = []
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(getattr(node, "_dynamo_source", None), "name", node.name)
        text = source if isinstance(source, str) else source()  # a method before 2.13
        text = re.sub(r"(?:\._(?:modules|parameters|buffers))?\['?([^'\]]*)'?\]", r".\1", re.sub(r"^[LG]", "", text))
        parts = [part for part in text.split(".") if part not in ("", "_orig_mod")]
        names.append(".".join(parts[1:] or parts))  # the first one is a variable
    return names


def frame_being_compiled() -> tuple[dict[str, Any], Any]:
    """Locals of the frame that Dynamo is compiling, and the frame that called it; ({}, None) outside Dynamo."""
    # several of Dynamo's wrappers hand the frame on; this one is the one that the interpreter called
    frame = _frame_of("torch._dynamo.convert_frame.CatchErrorsWrapper.__call__")
    return ({}, None) if frame is None else (dict(frame.f_locals["frame"].f_locals), frame.f_back)


def compile_wrapper_of(compiled: Any, *, inductor_too: bool = False) -> Any:
    """The `torch.compile` wrapper object behind `compiled`, or None if it was not made by `torch.compile`.

    Functions for torch's own backend "inductor" have a wrapper of another class, which only `inductor_too` returns.
    """
    if isinstance(compiled, torch.nn.Module):
        context = getattr(compiled, "dynamo_ctx", None)
        if context is None:
            compiled = getattr(compiled, "_compiled_call_impl", None)
            return None if compiled is None else compile_wrapper_of(compiled, inductor_too=inductor_too)
        backend = getattr(context, "callback", None)
    else:
        fn = inspect.unwrap(compiled, stop=lambda f: hasattr(f, "_torchdynamo_orig_callable"))
        cells = getattr(fn, "__closure__", None) or ()
        names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
        closure = {n: c.cell_contents for n, c in zip(names, cells, strict=True) if c.cell_contents is not None}
        backend = closure.get("callback") or getattr(closure.get("self"), "callback", None)
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    known = ["torch._TorchCompileWrapper", *["torch._TorchCompileInductorWrapper"] * inductor_too]
    return backend if type(backend) in map(need, known) else None


def uncompiled(fn: Any) -> tuple[Any, Any]:
    """The function or module that was compiled to `fn`, and its wrapper; `fn` and None if it was not compiled."""
    wrapper = compile_wrapper_of(fn) if callable(fn) else None
    return (fn if wrapper is None else compilers.uncompiled(fn)), wrapper


def options_of(wrapper: Any) -> dict[str, Any] | None:
    """The options of a `torch.compile` wrapper for our backend; None if it is another backend's."""
    if wrapper.compiler_name != "aot_hooks" and getattr(wrapper.compiler_fn, "__name__", "") != "aot_hooks":
        return None
    return dict(wrapper.kwargs.get("options") or {})


def eval_frame_file() -> str:
    """The file whose frames call compiled functions."""
    return str(sys.modules["torch._dynamo.eval_frame"].__file__)
