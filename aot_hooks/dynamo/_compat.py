"""What this package knows of Dynamo.

      def f(x):                                 a function that is being traced: the value behind a variable, guarded
          with saved_tensors_hooks(pack, ...):  by its content, and what the function has changed before

      torch.compile(f, backend="aot_hooks")     from the backend that is called to who asked for it, and back

See `aot_hooks/_compat.py` for the rules of such files.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

from .._compat import FakeTensor, needing, storage_key
from ..reached import Reached

# symbol -> what needs it
SYMBOLS = {
    "torch._dynamo.comptime.comptime": "contexts inside a compiled function",
    "torch._dynamo.assume_constant_result": "contexts inside a compiled function",
    "torch._dynamo.exc.BackendCompilerFailed": "errors of contexts inside a compiled function",
    "torch._dynamo.exc.TorchDynamoException": "reports of scripts with a module that cannot be planned",
    "torch._dynamo.source.GlobalStateSource": "globals of hooks made inside a compiled function",
    "torch._dynamo.guards.install_guard": "recompiling when a hook inside a compiled function changes",
    "torch._dynamo.eval_frame.skip_code": "names given by code that Dynamo left to Python",
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


def dynamo_error() -> type[Exception]:
    """What Dynamo raises when it cannot go on, and where what it runs raises on fake tensors."""
    error: type[Exception] = need("torch._dynamo.exc.TorchDynamoException")
    return error


# --- the function that is being traced: values, guards, changes -------------------------------------------------------


_Guard = Callable[[Any, Any, Callable[[Any], Any]], None]  # source, the value there, what of it counts


def _constant_of(context: Any, variable: Any, guard: _Guard, counts: Callable[[Any], Any] | None = None) -> Any:
    """The Python value behind `variable`, guarded where it comes from outside of the compiled function.

    A tuple, dataclass, method or function made in the function is put together.
    """
    source = getattr(variable, "source", None)
    variable = variable.realize() if hasattr(variable, "realize") else variable
    source = source or getattr(variable, "source", None)
    if source is not None:
        value = _from_outside(context, variable)
        if value is not None and not isinstance(value, bool | int | float | str):  # those Dynamo guards itself
            guard(source, value, counts or (lambda now: now))
        return value
    if issubclass(variable.python_type(), torch.Tensor):
        raise TypeError("a tensor that the compiled function makes")
    if variable.python_type() in (tuple, list):
        return variable.python_type()([_constant_of(context, item, guard) for item in variable.items])
    kind = type(getattr(variable, "value", None))
    tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    if dataclasses.is_dataclass(kind):
        fields = [f.name for f in dataclasses.fields(kind) if f.init]
        # 2.15 renamed it
        read = getattr(variable, "var_getattr", None) or variable.tp_getattro_impl
        return kind(**{name: _constant_of(context, read(tx, name), guard) for name in fields})
    owner = _owner(variable)
    if owner is not None:
        fn = variable.fn  # of the function alone: a guard must not hold the owner
        return types.MethodType(fn, _constant_of(context, owner, guard, lambda now: types.MethodType(fn, now)))
    if hasattr(variable, "closure") and hasattr(variable, "f_globals"):
        return _closed_over(context, variable, guard)
    if variable.python_type() is functools.partial and hasattr(variable, "keywords"):
        arguments = [_constant_of(context, item, guard) for item in variable.args]
        named = {name: _constant_of(context, item, guard) for name, item in variable.keywords.items()}
        return functools.partial(_constant_of(context, variable.func, guard), *arguments, **named)
    if type(getattr(variable, "mutation_type", None)).__name__ == "AttributeMutationNew":
        raise TypeError(f"a {variable.python_type().__name__} that the compiled function makes")
    return _value_of(variable)


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


def pending_changes(context: Any) -> tuple[Any, ...]:
    """What the function that Dynamo traces has changed up to a `comptime` call, which is not carried out yet.

    Objects and cells by id with the names of their attributes (None: any), names of globals and the globals that they
    are in, storages of tensors. Stands on `side_effects` and on the graph's fake inputs, whose versions begin at 0;
    2.11 to 2.15.
    """
    output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    effects = output.side_effects
    objects: dict[int, frozenset[str] | None] = {}
    names: set[str] = set()
    for at, variable in effects.id_to_variable.items():
        if getattr(variable, "mutation_type", None) is None or not effects.is_modified(variable):
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
    return objects, frozenset(names), output.global_scope, frozenset(map(storage_key, tensors))


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


def _closed_over(context: Any, variable: Any, guard: _Guard) -> Any:
    """A function that was made in the compiled one, with what it closes over.

    Dynamo has no constant for a function over a symbolic number or an object, and guards no contents. Stands on
    `closure`, `f_globals` and `load_cell`; 2.11 to 2.15.
    """
    tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    closure = variable.closure.items if variable.closure is not None else ()
    contents = [tx.output.side_effects.load_cell(cell) for cell in closure]
    code = variable.get_code()
    # Dynamo does not trace it, so it guards no global that it names
    named = types.FunctionType(code, variable.f_globals, None, None, tuple(types.CellType() for _ in contents))
    guard(need("torch._dynamo.source.GlobalStateSource")(), named, lambda _: named)
    if variable in contents:
        return variable.as_python_constant()  # what calls itself
    cells = []
    for cell, content in zip(code.co_freevars, contents, strict=True):

        def counts(now: Any, name: str = cell) -> Any:
            return Reached(now, code, name)

        cells.append(types.CellType(_constant_of(context, content, guard, counts)))
    name = variable.fn_name.as_python_constant()
    made = types.FunctionType(code, variable.f_globals, name, None, tuple(cells))
    for kind in ("defaults", "kwdefaults"):
        given = getattr(variable, kind, None)
        if given is not None:
            setattr(made, f"__{kind}__", _defaults(context, given, guard))
    return made


def _defaults(context: Any, given: Any, guard: _Guard) -> Any:
    if given.python_type() is tuple:
        return tuple(_constant_of(context, item, guard) for item in given.items)
    items = {k.vt.as_python_constant(): v for k, v in given.items.items()}
    return {k: _constant_of(context, v, guard) for k, v in items.items()} or None


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


def constant_with_guards(context: Any, variable: Any, digest_of: Callable[[Any], str]) -> Any:
    """The Python value behind Dynamo's `variable`, guarded by content.

    Dynamo guards functions by identity or by code alone; here a guard recomputes `digest_of(value)`, so that an equal
    function made anew passes and a changed closure recompiles. What was made inside the compiled function is guarded
    where its parts come from. Raises `TypeError` for what has no value while compiling.
    Goes when Dynamo guards the contents of functions.
    """

    def guard(source: Any, value: Any, counts: Callable[[Any], Any]) -> None:
        expected = digest_of(counts(value))

        def create(builder: Any, guard: Any) -> None:
            manager = builder.get_guard_manager(guard)
            text = [f"aot_hooks content of {guard.name if isinstance(guard.name, str) else guard.name()} == {expected}"]
            manager.add_lambda_guard(lambda now: digest_of(counts(now)) == expected, text, guard.user_stack)

        need("torch._dynamo.guards.install_guard")(source.make_guard(create))

    return _constant_of(context, variable, guard)


def local_variable(context: Any, name: str) -> Any:
    """Dynamo's variable tracker of local `name` at a `comptime` call."""
    return context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()


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
