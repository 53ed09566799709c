"""The guards of a probe: a function that Dynamo compiles to find out which values a hook reads (2.11 to 2.15).

probe(pack, unpack) --compiled, `in_same_state`--> Dynamo's guards --`guarded_values`--> source, expression, value
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import autograd
from .dynamo_trace import output_graph, pending_changes
from .symbols import need

# returns the error of Dynamo's recompile limit
limit_error: Callable[[], type[Exception]] = functools.partial(need, "torch._dynamo.exc.FailOnRecompileLimitHit")
_no_functions = need("torch._C.DisableTorchFunction")
_set_grad_enabled = need("torch._C._set_grad_enabled")
_AUTOCAST = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")}


def compiled_whole(fn: Callable[..., Any], backend: Callable[..., Any], **limit: int) -> Callable[..., Any]:
    """`torch.compile(fn, fullgraph=True)`, for calls from several threads.

    With `fullgraph=True` each call counts the frames that are compiled until it returns, in a number that all threads
    share. Meanwhile frames of another thread ran eagerly. Graph breaks are errors without that, too.
    """
    context = need("torch._dynamo.optimize_assert")(backend, **limit)
    context.fullgraph = False
    compiled: Callable[..., Any] = context(fn)
    return compiled


def in_same_state(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` in the same state of the thread at every call: Dynamo guards that state too.

    No gradients, no autocast, no torch functions of subclasses: Dynamo evaluates its own new guards without these.
    Plain functions cover the saved-tensor hooks in force, which Dynamo guards by identity. Written flat: every entry of
    a context runs it.
    """
    if torch.is_inference_mode_enabled() or any(map(torch.is_autocast_enabled, _AUTOCAST)):
        with _plain_modes():
            return in_same_state(fn, *args)
    disabled, grad = autograd.show_hooks(), torch.is_grad_enabled()
    _set_grad_enabled(False)
    try:
        with _no_functions():
            return fn(*args)
    finally:
        _set_grad_enabled(grad)
        autograd.hide_hooks(disabled)


@contextlib.contextmanager
def _plain_modes() -> Iterator[None]:
    """Inside, autocast is off and has its default dtypes; inference mode is off."""
    with contextlib.ExitStack() as stack:
        for kind, dtype in _AUTOCAST.items():
            stack.enter_context(torch.autocast(kind, dtype, enabled=False))
        stack.enter_context(torch.inference_mode(False))
        yield


def own_scope(fn: Any) -> dict[str, Any] | None:
    """The globals of a function, if they are not its module's (`exec`): Dynamo looks for them in the caller."""
    fn = getattr(fn, "__func__", fn)
    scope, module = getattr(fn, "__globals__", None), sys.modules.get(getattr(fn, "__module__", None) or "")
    return None if module is not None and vars(module) is scope else scope


def more_recompiles() -> Any:
    """Inside, functions may be compiled 512 times."""
    return need("torch._dynamo.config").patch(recompile_limit=512, accumulated_recompile_limit=4096)


def reason_of(e: BaseException) -> str:
    """Why Dynamo could not trace a function: the head of its message and the explanation, in a line."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    explained = [line for line in lines if line.startswith("Explanation:")]
    text = " ".join([*lines[:1], *explained[:1]]) or type(e).__name__
    return text if isinstance(e, need("torch._dynamo.exc.Unsupported")) else f"{type(e).__name__}: {text}"


class Compiling:
    """Dynamo's settings and counters from the first traced instruction of a probe until `end`.

    Each number is a constant; Dynamo would make one that changes a symbol. `end` puts back Dynamo's counters, because a
    probe is none of the user's graphs.
    """

    def __init__(self) -> None:
        self.counters = need("torch._dynamo.utils.counters")
        self.before = {kind: dict(self.counters[kind]) for kind in ("stats", "frames")}
        self.numbers = need("torch._dynamo.config").patch(automatic_dynamic_shapes=False, assume_static_by_default=True)
        self.numbers.__enter__()

    def end(self) -> None:
        self.numbers.__exit__(None, None, None)
        self.before["frames"]["total"] = self.before["frames"].get("total", 1) - 1  # counted before it is traced
        for kind, counts in self.before.items():
            self.counters[kind].clear()
            self.counters[kind].update({name: n for name, n in counts.items() if n})


def side_effects(context: Any) -> str | None:
    """A side effect of the function that is traced, in words; None if there is none."""
    objects, names, _, storages = pending_changes(context)
    if names:
        return f"global '{min(names)}'"
    if storages:
        return "a tensor that it reads"
    output = output_graph(context)
    if getattr(output, "random_calls", None):
        return "Python's random state"
    return "an object, list or variable that it reaches" if objects else None


def global_scope(context: Any) -> dict[str, Any]:
    """The globals that Dynamo's sources of the traced function refer to."""
    return output_graph(context).global_scope


def classes(context: Any) -> list[tuple[str, type]]:
    """The classes that the traced function has reached, with the expressions of their sources."""
    built = output_graph(context).variable_tracker_cache
    values = [(_source_name(source), vars(variable).get("value")) for source, variable in built.items()]  # builds none
    return [(name, value) for name, value in values if isinstance(value, type)]


def guarded_values(variables: dict[str, Any], scope: dict[str, Any]) -> list[tuple[Any, str, Any]]:
    """(source, expression, value) of each value that Dynamo guards for the function that it is compiling.

    Call it in the backend. `variables` are the arguments, `scope` the globals.
    """
    context = need("torch._guards.TracingContext").try_get()
    found = []
    for guard in () if context is None else context.guards_context.dynamo_guards:
        name = _source_name(guard.originating_source)
        known, value = _evaluated(name, variables, scope)
        if known:
            found.append((guard.originating_source, name, value))
    return sorted(found, key=lambda item: item[1])


def defaults(fn: Any) -> list[tuple[str, Any]]:
    """The default arguments of a function, by name. Dynamo 2.11 doesn't guard them."""
    fn = getattr(fn, "__func__", fn)
    if not isinstance(fn, types.FunctionType):
        return []
    values, code = fn.__defaults__ or (), fn.__code__
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return [*zip(names, values, strict=True), *(fn.__kwdefaults__ or {}).items()]


def input_names(gm: torch.fx.GraphModule) -> list[str]:
    """The expressions of the sources of a graph's inputs."""
    graphargs = [node.meta.get("grapharg") for node in gm.graph.find_nodes(op="placeholder")]
    return ["" if arg is None else _source_name(arg.source) for arg in graphargs]


def _evaluated(name: str, variables: dict[str, Any], scope: dict[str, Any]) -> tuple[bool, Any]:
    """Whether a source's expression has a value, and the value."""
    try:
        return True, eval(name, {"L": variables, "G": scope, "torch": torch})
    except Exception:  # some call helpers of Dynamo's
        return False, None


def _source_name(source: Any) -> str:
    name = str(source.name if isinstance(source.name, str) else source.name())  # a method before 2.13
    # 2.11 traces a closure through a function of its own, `inner(*args)`
    return name.replace("L['args'][0]", "L['pack']").replace("L['args'][1]", "L['unpack']")


def user_name(source: str, functions: dict[str, Any]) -> str:
    """A source's expression in the user's names: `q.k` for attribute `k` of a variable `q` in a closure."""
    for label, fn in functions.items():
        fn = getattr(fn, "__func__", fn)
        code = getattr(fn, "__code__", None)
        if isinstance(code, types.CodeType):
            free, arguments = code.co_freevars, code.co_varnames[: code.co_argcount]
            here = re.escape(f"L['{label}']") + r"(\.__func__)?"
            source = re.sub(here + r"\.__closure__\[(\d+)\]\.cell_contents", lambda m: free[int(m[2])], source)  # noqa: B023
            defaults = arguments[len(arguments) - len(fn.__defaults__ or ()) :]
            source = re.sub(here + r"\.__defaults__\[(\d+)\]", lambda m: defaults[int(m[2])], source)  # noqa: B023
            source = source.replace(f"L['{label}'].__self__", arguments[0] if arguments else label)
        source = source.replace(f"L['{label}']", label)
    source = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", source)
    return re.sub(r"G\['(?:__import_)?(\w+)'\]\.?", "", source) if source.startswith("G[") else source


def objects_on_path(source: Any, variables: dict[str, Any], scope: dict[str, Any]) -> list[tuple[Any, frozenset[str]]]:
    """The objects on the path of a source, each with the names and indices that follow it."""
    found, after = [], frozenset[str]()
    while source is not None:
        known, value = _evaluated(_source_name(source), variables, scope)
        if known:
            found.append((value, after))
        after |= {str(part) for part in (getattr(source, "member", None), getattr(source, "index", None)) if part}
        after |= {str(source.global_name)} if hasattr(source, "global_name") else frozenset()
        source = getattr(source, "base", None)
    return found
