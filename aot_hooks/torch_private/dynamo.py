"""What this package knows of Dynamo.

def f(x):                                 a function that is being traced: the value behind a variable, guarded
    with saved_tensors_hooks(pack, ...):  by its content, and what the function has changed before

torch.compile(f, backend="aot_hooks")     from the backend that is called to who asked for it, and back
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

from . import autograd
from .symbols import needing
from .values import FakeTensor, storage_key

# symbol -> what needs it
SYMBOLS = {
    "torch._dynamo.comptime.comptime": "contexts inside a compiled function",
    "torch._dynamo.assume_constant_result": "contexts inside a compiled function",
    "torch._dynamo.exc.BackendCompilerFailed": "errors of contexts inside a compiled function",
    "torch._dynamo.exc.TorchDynamoException": "reports of scripts with a module that cannot be planned",
    "torch._dynamo.source.GlobalStateSource": "globals of hooks made inside a compiled function",
    "torch._dynamo.guards.install_guard": "recompiling when a hook inside a compiled function changes",
    "torch._dynamo.eval_frame.skip_code": "names given by code that Dynamo left to Python",
    "torch._C._set_grad_enabled": "telling when a hook changes",
    "torch._C.DisableTorchFunction": "telling when a hook changes",
    "torch._dynamo.exc.FailOnRecompileLimitHit": "telling when a hook changes",
    "torch._dynamo.exc.Unsupported": "saying why a hook cannot be traced",
    "torch._dynamo.config": "telling when a hook changes",
    "torch._C._dynamo.eval_frame.set_eval_frame": "entering a context where Dynamo would compile that",
    "torch._dynamo.utils.counters": "leaving probes out of Dynamo's counts",
    "torch._guards.TracingContext": "telling what a hook reads",
}

need = needing(SYMBOLS)


comptime = need("torch._dynamo.comptime.comptime")
assume_constant_result = need("torch._dynamo.assume_constant_result")
_F = TypeVar("_F", bound=Callable[..., Any])


def untraced(fn: _F) -> _F:
    """`fn`, which Dynamo leaves to Python, with all that it calls."""
    disabled: _F = torch.compiler.disable(fn)
    return disabled


def outermost_runs_in_python(fn: _F) -> _F:
    """`fn`, which Dynamo inlines where it traces the caller and otherwise doesn't compile by itself; 2.11 to 2.15."""
    need("torch._dynamo.eval_frame.skip_code")(fn.__code__)
    return fn


_set_eval_frame = need("torch._C._dynamo.eval_frame.set_eval_frame")


def in_python(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, of which Dynamo compiles nothing; a tenth of the time of `untraced`. 2.11 to 2.15."""
    before = _set_eval_frame(None)
    try:
        return fn(*args)
    finally:
        _set_eval_frame(before)


def dynamo_error() -> type[Exception]:
    """What Dynamo raises when it cannot go on, and where what it runs raises on fake tensors."""
    error: type[Exception] = need("torch._dynamo.exc.TorchDynamoException")
    return error


# --- the function that is being traced: values, guards, changes -------------------------------------------------------


_Build = Callable[[list[Any]], Any]  # parts that come from outside -> the value
_Parts = list[tuple[Any, Any]]  # source, the value there


def _built(context: Any, variable: Any, parts: _Parts) -> _Build:
    """How the Python value behind `variable` is made of `parts`, to which those are added that come from outside.

    A tuple, dataclass, method, partial or function made in the compiled function is put together.
    """
    source = getattr(variable, "source", None)
    variable = variable.realize() if hasattr(variable, "realize") else variable
    source = source or getattr(variable, "source", None)
    if source is not None:
        value = _from_outside(context, variable)
        if value is None or isinstance(value, bool | int | float | str):  # those Dynamo guards itself
            return lambda _: value
        at = len(parts)
        parts.append((source, value))
        return lambda given: given[at]
    if issubclass(variable.python_type(), torch.Tensor):
        raise TypeError("a tensor that the compiled function makes")
    if variable.python_type() in (tuple, list):
        kind, items = variable.python_type(), [_built(context, item, parts) for item in variable.items]
        return lambda given: kind(item(given) for item in items)
    kind = type(getattr(variable, "value", None))
    tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    if dataclasses.is_dataclass(kind):
        # 2.15 renamed it
        read = getattr(variable, "var_getattr", None) or variable.tp_getattro_impl
        fields = {f.name: _built(context, read(tx, f.name), parts) for f in dataclasses.fields(kind) if f.init}
        return lambda given: kind(**{name: field(given) for name, field in fields.items()})
    owner = _owner(variable)
    if owner is not None:
        fn, owner = variable.fn, _built(context, owner, parts)
        return lambda given: types.MethodType(fn, owner(given))
    if hasattr(variable, "closure") and hasattr(variable, "f_globals"):
        return _closed_over(context, variable, parts)
    if variable.python_type() is functools.partial and hasattr(variable, "keywords"):
        called = _built(context, variable.func, parts)
        arguments = [_built(context, item, parts) for item in variable.args]
        named = {name: _built(context, item, parts) for name, item in variable.keywords.items()}
        return lambda given: functools.partial(
            called(given), *(a(given) for a in arguments), **{name: a(given) for name, a in named.items()}
        )
    if type(getattr(variable, "mutation_type", None)).__name__ == "AttributeMutationNew":
        raise TypeError(f"a {variable.python_type().__name__} that the compiled function makes")
    constant = _value_of(variable)
    return lambda _: constant


def _from_outside(context: Any, variable: Any) -> Any:
    owner = _owner(variable)
    if owner is not None:
        return types.MethodType(variable.fn, _from_outside(context, owner))
    tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    if _items_change(variable, tx.output.side_effects):
        raise TypeError(f"a {variable.python_type().__name__} that the compiled function has changed before")
    if issubclass(variable.python_type(), torch.Tensor):
        raise TypeError("a tensor by itself, and not as an attribute of an object (`self.table`)")
    return _value_of(variable)


def _items_change(variable: Any, side_effects: Any) -> bool:
    """Whether `variable` is a container that was changed, or holds one: its value is put together of what is in it now,
    and no longer the object that `pending_changes` knows."""
    items = vars(variable).get("items")
    if not isinstance(items, (list, tuple, dict)):
        return False
    if getattr(variable, "mutation_type", None) is not None and side_effects.is_modified(variable):
        return True
    return any(_items_change(item, side_effects) for item in (items.values() if isinstance(items, dict) else items))


class Pending(NamedTuple):
    """What the function that Dynamo traces has changed of what it did not make, and is not carried out yet.

    `objects` have the names of the attributes that change by id, None for any; cells as well. `names` are globals in
    `scope`. `storages` are those of tensors that are written to.
    """

    objects: dict[int, frozenset[str] | None]
    names: frozenset[str]
    scope: dict[str, Any]
    storages: frozenset[int]

    def has(self, value: Any, parts: frozenset[str]) -> bool:
        """Whether `value` changes, of which these parts are read."""
        if isinstance(value, types.ModuleType) and vars(value) is self.scope and self.names & parts:
            return True
        changed = self.objects.get(id(value), frozenset())
        if changed is None or changed & parts:
            return True
        strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
        return strided and storage_key(value) in self.storages


def pending_changes(context: Any) -> Pending:
    """What has been changed up to a `comptime` call.

    Stands on `side_effects` and on the graph's fake inputs, whose versions begin at 0; 2.11 to 2.15.
    """
    output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    effects = output.side_effects
    objects: dict[int, frozenset[str] | None] = {}
    names: set[str] = set()
    for at, variable in effects.id_to_variable.items():
        existed = type(getattr(variable, "mutation_type", None)).__name__.endswith("Existing")
        if not existed or not effects.is_modified(variable):
            continue
        attributes = effects.store_attr_mutations.get(variable)
        if type(variable).__name__ == "NewGlobalVariable":
            names.update(attributes or ())
        elif type(variable).__name__ == "CellVariable" or not attributes:
            objects[at] = None
        else:
            objects[at] = frozenset(attributes)
    # of the whole function, also where a higher-order operator has a part of it traced by itself
    inputs = output.root_tracer.graph.find_nodes(op="placeholder")
    given = [a for a in (node.meta.get("grapharg") for node in inputs) if _written(a)]
    tensors = [a.example for a in given if isinstance(a.example, torch.Tensor) and a.example.layout is torch.strided]
    return Pending(objects, frozenset(names), output.global_scope, frozenset(map(storage_key, tensors)))


def _written(grapharg: Any) -> bool:
    fake = getattr(grapharg, "fake_tensor", None)
    return isinstance(fake, FakeTensor) and fake._version > 0


def _owner(variable: Any) -> Any:
    """Dynamo's variable of the object that a bound method is bound to; None for anything else.

    Stands on `fn` and `obj`, or `im_self`; 2.11 to 2.15.
    """
    owner = getattr(variable, "im_self", None) or getattr(variable, "obj", None)  # 2.15 renamed it
    return owner if isinstance(getattr(variable, "fn", None), types.FunctionType) else None


def _value_of(variable: Any) -> Any:
    """The constant or the object behind `variable`. Raises `TypeError` if there is neither."""
    try:
        return _number(variable)
    except Exception as e:
        if not hasattr(variable, "value"):
            raise TypeError(f"{type(variable).__name__}: {e}") from e
        return variable.value


def _number(variable: Any) -> Any:
    """The constant behind `variable`; a number that Dynamo made symbolic when it changed is pinned to what it is now,
    because a hook says one number: another recompiles."""
    number = getattr(variable, "sym_num", None)
    return variable.as_python_constant() if number is None else guard_scalar(number)


def _closed_over(context: Any, variable: Any, parts: _Parts) -> _Build:
    """A function that was made in the compiled one, with what it closes over.

    Dynamo has no constant for a function over a symbolic number or an object. Stands on `closure`, `f_globals` and
    `load_cell`; 2.11 to 2.15.
    """
    tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    closure = variable.closure.items if variable.closure is not None else ()
    contents = [tx.output.side_effects.load_cell(cell) for cell in closure]
    if variable in contents:
        constant = variable.as_python_constant()  # what calls itself
        return lambda _: constant
    code, name = variable.get_code(), variable.fn_name.as_python_constant()
    cells = [_built(context, content, parts) for content in contents]
    defaults = _defaults(context, getattr(variable, "defaults", None), parts)
    named = _defaults(context, getattr(variable, "kwdefaults", None), parts)

    def build(given: list[Any]) -> Any:
        closed = tuple(types.CellType(cell(given)) for cell in cells)
        made = types.FunctionType(code, variable.f_globals, name, defaults(given), closed)
        made.__kwdefaults__ = named(given)
        return made

    return build


def _defaults(context: Any, given: Any, parts: _Parts) -> _Build:
    if given is None:
        return lambda _: None
    if given.python_type() is tuple:
        items = [_built(context, item, parts) for item in given.items]
        return lambda now: tuple(item(now) for item in items)
    named = {k.vt.as_python_constant(): _built(context, v, parts) for k, v in given.items.items()}
    return lambda now: {k: v(now) for k, v in named.items()} or None


def backend_failure(backend: str, error: Exception, frame: types.FrameType | None = None) -> Exception:
    """`error` as Dynamo wraps what a backend raises, with the error's own message first; Dynamo lets it through.

    `frame` is where the traceback that users see begins. Where Dynamo traces, anything else is called an internal error
    and loses its cause.
    """

    def name() -> None: ...

    name.__name__ = backend
    failure: Exception = need("torch._dynamo.exc.BackendCompilerFailed")(name, error, frame)
    failure.args = (f"{type(error).__name__}: {error}\n\nRaised by backend={backend!r}.", *failure.args[1:])
    return failure


class Traced:
    """Values of the function that Dynamo traces, by the names of its variables, and how they are made.

    `values` are what they are now. For what has no value while compiling `failure(name, why)` is raised.
    """

    def __init__(self, context: Any, names: Iterable[str], failure: Callable[[str, Exception], Exception]) -> None:
        self.parts: _Parts = []
        self.build: list[_Build] = []
        for name in names:
            try:
                self.build.append(_built(context, local_variable(context, name), self.parts))
            except (TypeError, NotImplementedError) as e:
                raise failure(name, e) from e
        self.values = _made(self.build, [value for _, value in self.parts])

    def guard(self, holds: Callable[..., bool]) -> None:
        """Recompile where `holds(*values)` is false for what comes from outside now.

        Dynamo guards functions by identity or by code alone. Modules and tensors are held weakly: a guard must not keep
        a program alive. Goes when Dynamo guards the contents of functions.
        """
        held = [_weakly(value) for _, value in self.parts]
        build = self.build

        def install(at: int, source: Any) -> None:
            def check(now: Any) -> bool:
                parts = [value() for value in held]
                parts[at] = now
                return not any(part is None for part in parts) and holds(*_made(build, parts))

            def create(builder: Any, guard: Any) -> None:
                manager = builder.get_guard_manager(guard)
                name = guard.name if isinstance(guard.name, str) else guard.name()
                manager.add_lambda_guard(check, [f"aot_hooks: {name} is the same hook or policy"], guard.user_stack)

            need("torch._dynamo.guards.install_guard")(source.make_guard(create))

        for at, (source, _) in enumerate(self.parts):
            install(at, source)
        if not self.parts:  # made of constants: of the globals that it names
            install_on = need("torch._dynamo.source.GlobalStateSource")()

            def create(builder: Any, guard: Any) -> None:
                manager = builder.get_guard_manager(guard)
                text = ["aot_hooks: what is made inside is the same hook or policy"]
                manager.add_lambda_guard(lambda _: holds(*_made(build, [])), text, guard.user_stack)

            need("torch._dynamo.guards.install_guard")(install_on.make_guard(create))


def _made(build: list[_Build], parts: list[Any]) -> list[Any]:
    return [each(parts) for each in build]


def _weakly(value: Any) -> Callable[[], Any]:
    if isinstance(value, torch.nn.Module | torch.Tensor):
        return weakref.ref(value)
    if isinstance(value, types.MethodType):
        fn, owner = value.__func__, _weakly(value.__self__)
        return lambda: None if (at := owner()) is None else types.MethodType(fn, at)
    return lambda: value


def local_variable(context: Any, name: str) -> Any:
    """Dynamo's variable tracker of local `name` at a `comptime` call."""
    return context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()


# --- the guards of a probe --------------------------------------------------------------------------------------------


def in_same_state(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` where the thread's state that Dynamo guards beside what a function reads is the same at every call.

    No gradients, no autocast, no torch functions of subclasses: Dynamo evaluates its own new guards without these.
    Plain functions stand over the saved-tensor hooks in force, which Dynamo guards by identity. Written flat: it
    stands on every entry of a context.
    """
    if torch.is_inference_mode_enabled() or any(map(torch.is_autocast_enabled, _AUTOCAST)):
        with _plain_modes():
            return in_same_state(fn, *args)
    disabled, grad = autograd.show_plain_hooks(), torch.is_grad_enabled()
    _set_grad_enabled(False)
    try:
        with _no_functions():
            return fn(*args)
    finally:
        _set_grad_enabled(grad)
        autograd.hide_plain_hooks(disabled)


_AUTOCAST = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")}
_no_functions = need("torch._C.DisableTorchFunction")
_set_grad_enabled = need("torch._C._set_grad_enabled")


@contextlib.contextmanager
def _plain_modes() -> Iterator[None]:
    before = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST]
    try:
        for kind, dtype in _AUTOCAST.items():
            torch.set_autocast_enabled(kind, False)
            torch.set_autocast_dtype(kind, dtype)
        with torch.inference_mode(False):
            yield
    finally:
        for kind, enabled, dtype in before:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


def own_scope(fn: Any) -> dict[str, Any] | None:
    """The globals of a function, if they are not its module's (`exec`): Dynamo finds such only as the caller's."""
    fn = getattr(fn, "__func__", fn)
    scope, module = getattr(fn, "__globals__", None), sys.modules.get(getattr(fn, "__module__", None) or "")
    return None if module is not None and vars(module) is scope else scope


def more_recompiles() -> Any:
    """Inside, functions may be compiled 512 times."""
    config = need("torch._dynamo.config")
    return config.patch(recompile_limit=512, accumulated_recompile_limit=4096)


def limit_error() -> type[Exception]:
    """What Dynamo raises when a function has been compiled as often as it may be."""
    error: type[Exception] = need("torch._dynamo.exc.FailOnRecompileLimitHit")
    return error


def reason_of(e: BaseException) -> str:
    """Why Dynamo could not trace a function, in a line; of its messages the head and the explanation."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    explained = [line for line in lines if line.startswith("Explanation:")]
    text = " ".join([*lines[:1], *explained[:1]]) or type(e).__name__
    return text if isinstance(e, need("torch._dynamo.exc.Unsupported")) else f"{type(e).__name__}: {text}"


class Compiling:
    """From the first instruction of a probe that Dynamo traces to the end of the call: every number counts as it is.

    Dynamo would take a number that changes for a symbol. On exit its counters are as if the probe had not been
    compiled, which is none of the user's graphs.
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
    """What the function that is traced has changed of what it did not make, in words; None if nothing."""
    objects, names, _, storages = pending_changes(context)
    if names:
        return f"global '{min(names)}'"
    if storages:
        return "a tensor that it reads"
    output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    if getattr(output, "random_calls", None):
        return "Python's random state"
    return "an object, list or variable that it reaches" if objects else None


def global_scope(context: Any) -> dict[str, Any]:
    """The globals by which Dynamo's sources go, of the function that it traces."""
    scope: dict[str, Any] = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.global_scope
    return scope


def classes(context: Any) -> list[tuple[str, type]]:
    """The classes that the function that is traced has reached: the expression of the source, and the class."""
    built = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.variable_tracker_cache
    values = [(_source_name(source), vars(variable).get("value")) for source, variable in built.items()]  # builds none
    return [(name, value) for name, value in values if isinstance(value, type)]


def guarded_values(variables: dict[str, Any], scope: dict[str, Any]) -> list[tuple[Any, str, Any]]:
    """What Dynamo guards of the function that it compiles now: source, its expression, the value there.

    To be called by the backend. `variables` are the arguments, `scope` the globals. Stands on Dynamo's sources, which
    are expressions; 2.11 to 2.15.
    """
    context = need("torch._guards.TracingContext").try_get()
    found = []
    for guard in () if context is None else context.guards_context.dynamo_guards:
        name = _source_name(guard.originating_source)
        known, value = evaluated(name, variables, scope)
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
    """The expressions of the sources that the inputs of a graph of Dynamo come from; 2.11 to 2.15."""
    given = [node.meta.get("grapharg") for node in gm.graph.find_nodes(op="placeholder")]
    return ["" if arg is None else _source_name(arg.source) for arg in given]


def evaluated(name: str, variables: dict[str, Any], scope: dict[str, Any]) -> tuple[bool, Any]:
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
    """A source's expression by the names of the user's functions: `q.k` for what a closure over `q` reads of it."""
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


def on_the_way(source: Any, variables: dict[str, Any], scope: dict[str, Any]) -> list[tuple[Any, frozenset[str]]]:
    """The objects that a source goes through, each with the names and indices that come after it."""
    found, after = [], frozenset[str]()
    while source is not None:
        known, value = evaluated(_source_name(source), variables, scope)
        if known:
            found.append((value, after))
        after |= {str(part) for part in (getattr(source, "member", None), getattr(source, "index", None)) if part}
        after |= {str(source.global_name)} if hasattr(source, "global_name") else frozenset()
        source = getattr(source, "base", None)
    return found


# --- from a compiled function to its backend and back (2.11 to 2.15) --------------------------------------------------


def calling_compile_wrapper() -> Any:
    """The `torch.compile` wrapper object that is calling the backend, or None (a backend called by hand)."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "__call__" and "self" in frame.f_locals:
            owner = frame.f_locals["self"]
            if type(owner).__name__ == "_TorchCompileWrapper":
                return owner
        frame = frame.f_back
    return None


def frame_being_compiled() -> tuple[dict[str, Any], Any]:
    """Locals of the frame that Dynamo is compiling, and the frame that called it; ({}, None) outside Dynamo."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "__call__" and "frame" in frame.f_locals:
            # several of Dynamo's wrappers hand the frame on; the outermost is the one that the interpreter called
            if type(frame.f_locals.get("self")).__name__ == "CatchErrorsWrapper":
                return dict(frame.f_locals["frame"].f_locals), frame.f_back
        frame = frame.f_back
    return {}, None


def compile_wrapper_of(compiled: Any) -> Any:
    """The `torch.compile` wrapper object behind `compiled`, or None if it was not made by `torch.compile`."""
    if isinstance(compiled, torch.nn.Module):
        context = getattr(compiled, "dynamo_ctx", None)
        if context is None:
            compiled = getattr(compiled, "_compiled_call_impl", None)
            return None if compiled is None else compile_wrapper_of(compiled)
        backend = getattr(context, "callback", None)
    else:
        fn = inspect.unwrap(compiled, stop=lambda f: hasattr(f, "_torchdynamo_orig_callable"))
        cells = getattr(fn, "__closure__", None) or ()
        names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
        closure = {n: c.cell_contents for n, c in zip(names, cells, strict=True) if c.cell_contents is not None}
        backend = closure.get("callback") or getattr(closure.get("self"), "callback", None)
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return backend if type(backend).__name__ == "_TorchCompileWrapper" else None


def uncompiled(fn: Any) -> tuple[Any, Any]:
    """What `torch.compile` was given to make `fn`, and its wrapper; `fn` itself and None if it was not made so."""
    wrapper = compile_wrapper_of(fn) if callable(fn) else None
    if wrapper is None:
        return fn, None
    inner = getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", None)
    return (fn if inner is None else inner), wrapper  # Module.compile() leaves the module as it is


def options_of(wrapper: Any) -> dict[str, Any] | None:
    """The options of a `torch.compile` wrapper for our backend; None if it is another backend's."""
    if wrapper.compiler_name != "aot_hooks" and getattr(wrapper.compiler_fn, "__name__", "") != "aot_hooks":
        return None
    return dict(wrapper.kwargs.get("options") or {})


def eval_frame_file() -> str:
    """The file whose frames are the outside of a compiled function."""
    return str(sys.modules["torch._dynamo.eval_frame"].__file__)
