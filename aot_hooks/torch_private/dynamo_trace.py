"""The function that Dynamo is tracing: values of its variables, guards on them, what it has changed (2.11 to 2.15).

def f(x):
    with saved_tensors_hooks(pack, ...):     `Traced`: the Python value of `pack`, guarded by its content
                                             `pending_changes`: side effects that Dynamo has not replayed yet
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

from cudagraph.torch_private.cuda import storage_key

from .symbols import need
from .values import FakeTensor

_Build = Callable[[list[Any]], Any]  # the values of parts that come from outside -> the whole value
_Parts = list[tuple[Any, Any]]  # (source, value) of each part


def _built(context: Any, variable: Any, parts: _Parts) -> _Build:
    """A function that builds the Python value behind `variable`. Appends its parts from outside to `parts`.

    A tuple, dataclass, method, partial or function that the compiled function makes is built of its own parts.
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
        return lambda values: values[at]
    if issubclass(variable.python_type(), torch.Tensor):
        raise TypeError("a tensor that the compiled function makes")
    if variable.python_type() in (tuple, list):
        kind, items = variable.python_type(), [_built(context, item, parts) for item in variable.items]
        return _called(lambda *values: kind(values), items)
    kind = type(getattr(variable, "value", None))
    if dataclasses.is_dataclass(kind):
        tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        read = getattr(variable, "var_getattr", None) or variable.tp_getattro_impl  # 2.15 renamed it
        fields = {f.name: _built(context, read(tx, f.name), parts) for f in dataclasses.fields(kind) if f.init}
        return _called(kind, [], fields)
    owner = _owner(variable)
    if owner is not None:
        return _called(functools.partial(types.MethodType, variable.fn), [_built(context, owner, parts)])
    if hasattr(variable, "closure") and hasattr(variable, "f_globals"):
        return _closed_over(context, variable, parts)
    if variable.python_type() is functools.partial and hasattr(variable, "keywords"):
        arguments = [_built(context, item, parts) for item in (variable.func, *variable.args)]
        named = {name: _built(context, item, parts) for name, item in variable.keywords.items()}
        return _called(functools.partial, arguments, named)
    if type(getattr(variable, "mutation_type", None)).__name__ == "AttributeMutationNew":
        raise TypeError(f"a {variable.python_type().__name__} that the compiled function makes")
    constant = _value_of(variable)
    return lambda _: constant


def _called(make: Callable[..., Any], arguments: Iterable[_Build], named: Mapping[str, _Build] | None = None) -> _Build:
    """A function that calls `make` with what `arguments` and `named` build."""
    return lambda values: make(*(a(values) for a in arguments), **{n: a(values) for n, a in (named or {}).items()})


def _from_outside(context: Any, variable: Any) -> Any:
    owner = _owner(variable)
    if owner is not None:
        return types.MethodType(variable.fn, _from_outside(context, owner))
    if _has_changed_items(variable, output_graph(context).side_effects):
        raise TypeError(f"a {variable.python_type().__name__} that the compiled function has changed before")
    if issubclass(variable.python_type(), torch.Tensor):
        raise TypeError("a tensor by itself, and not as an attribute of an object (`self.table`)")
    return _value_of(variable)


def _has_changed_items(variable: Any, side_effects: Any) -> bool:
    """Whether the compiled function has changed the items of `variable`, a container or partial, or of one in it.

    The value of such a variable is a new container with the new items, and `pending_changes` knows the old one only.
    """
    variable = variable.realize() if hasattr(variable, "realize") else variable
    items = vars(variable).get("items")
    if variable.python_type() is functools.partial and hasattr(variable, "keywords"):
        items = (variable.func, *variable.args, *variable.keywords.values())
    if not isinstance(items, (list, tuple, dict)):
        return False
    if getattr(variable, "mutation_type", None) is not None and side_effects.is_modified(variable):
        return True
    values = items.values() if isinstance(items, dict) else items
    return any(_has_changed_items(item, side_effects) for item in values)


class PendingMutations(NamedTuple):
    """Side effects of the function that Dynamo traces, which Dynamo has not replayed yet."""

    objects: dict[int, frozenset[str] | None]  # by id: the attributes that change, None for any; also of cells
    names: frozenset[str]  # globals that change, of `scope`
    scope: dict[str, Any]
    storages: frozenset[int | None]  # of tensors that are written to

    def affects(self, value: Any, parts: frozenset[str]) -> bool:
        """Whether one of these changes is to `value`, in one of the attributes `parts`."""
        if isinstance(value, types.ModuleType) and vars(value) is self.scope and self.names & parts:
            return True
        changed = self.objects.get(id(value), frozenset())
        if changed is None or changed & parts:
            return True
        return isinstance(value, torch.Tensor) and storage_key(value) in self.storages


def bodies(context: Any) -> list[str]:
    """The names of the operators whose bodies Dynamo is tracing, the outermost first, as in `cond`."""
    return [str(target) for _, target in output_graph(context).current_tracer.source_fn_stack]


def pending_changes(context: Any) -> PendingMutations:
    """The side effects up to a `comptime` call.

    Tensors that are written to are found by the versions of the graph's fake inputs, which begin at 0.
    """
    output = output_graph(context)
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
    written = []
    for node in output.root_tracer.graph.find_nodes(op="placeholder"):
        fake = getattr(node.meta.get("grapharg"), "fake_tensor", None)
        if isinstance(fake, FakeTensor) and fake._version > 0:
            written.append(node.meta["grapharg"].example)
    storages = {storage_key(example) for example in written if isinstance(example, torch.Tensor)} - {None}
    return PendingMutations(objects, frozenset(names), output.global_scope, frozenset(storages))


def _owner(variable: Any) -> Any:
    """The variable of the object that a bound method is bound to; None for anything else."""
    owner = getattr(variable, "im_self", None) or getattr(variable, "obj", None)  # 2.15 renamed it
    return owner if isinstance(getattr(variable, "fn", None), types.FunctionType) else None


def _value_of(variable: Any) -> Any:
    """The constant or the object behind `variable`. Raises `TypeError` if there is neither.

    A number that Dynamo made symbolic, because it changed, gets a guard on its present value: another number makes
    another hook, and recompiles. Dynamo has no constant for a partial or container that holds one.
    """
    variable = variable.realize() if hasattr(variable, "realize") else variable
    number = getattr(variable, "sym_num", None)
    try:
        return variable.as_python_constant() if number is None else guard_scalar(number)
    except Exception as e:
        kind = variable.python_type()
        if kind is functools.partial:
            named = {name: _value_of(item) for name, item in variable.keywords.items()}
            return functools.partial(_value_of(variable.func), *map(_value_of, variable.args), **named)
        items = getattr(variable, "items", None)
        if kind is dict and isinstance(items, dict):
            return {key.vt.as_python_constant(): _value_of(item) for key, item in items.items()}
        make = kind if kind in (list, tuple) else getattr(kind, "_make", None)  # of a named tuple
        if make is not None and isinstance(items, list | tuple):
            return make(map(_value_of, items))
        if not hasattr(variable, "value"):
            raise TypeError(f"{type(variable).__name__}: {e}") from e
        return variable.value


def _closed_over(context: Any, variable: Any, parts: _Parts) -> _Build:
    """`_built` for a function that is made inside the compiled one.

    Dynamo has no constant for a function that closes over a symbolic number or an object.
    """
    closure = variable.closure.items if variable.closure is not None else ()
    contents = [output_graph(context).side_effects.load_cell(cell) for cell in closure]
    if variable in contents:
        constant = variable.as_python_constant()  # a recursive function
        return lambda _: constant
    code, name = variable.get_code(), variable.fn_name.as_python_constant()
    cells = [_built(context, content, parts) for content in contents]
    defaults = _defaults(context, getattr(variable, "defaults", None), parts)
    named = _defaults(context, getattr(variable, "kwdefaults", None), parts)

    def function(defaults: Any, named: Any, *contents: Any) -> Any:
        made = types.FunctionType(code, variable.f_globals, name, defaults, tuple(map(types.CellType, contents)))
        made.__kwdefaults__ = named
        return made

    return _called(function, [defaults, named, *cells])


def _defaults(context: Any, variable: Any, parts: _Parts) -> _Build:
    if variable is None:
        return lambda _: None
    if variable.python_type() is tuple:
        return _called(lambda *values: values, [_built(context, item, parts) for item in variable.items])
    named = {k.vt.as_python_constant(): _built(context, v, parts) for k, v in variable.items.items()}
    return _called(lambda **values: values or None, [], named)


class Traced:
    """The values of local variables in the function that Dynamo traces, and how to build them again.

    `values` are the present ones. A variable without a value at compile time raises `failure(name, why)`.
    """

    def __init__(self, context: Any, names: Iterable[str], failure: Callable[[str, Exception], Exception]) -> None:
        self.parts: _Parts = []
        self.build: list[_Build] = []
        for name in names:
            try:
                self.build.append(_built(context, local_variable(context, name), self.parts))
            except (TypeError, NotImplementedError) as e:
                raise failure(name, e) from e
        values = [value for _, value in self.parts]
        self.values = [build(values) for build in self.build]

    def guard(self, holds: Callable[..., bool]) -> None:
        """Recompile when `holds(*values)` is false for the values that are built of the parts then.

        Dynamo guards functions by identity or by code alone. Modules and tensors are referenced weakly: a guard must
        not keep a program alive. Goes when Dynamo guards the contents of functions.
        """
        references = [_weakly(value) for _, value in self.parts]
        build = self.build

        def check(number: int, now: Any) -> bool:
            """Whether `holds` with `now` as part `number`, and with the other parts as they are."""
            parts = [value() for value in references]
            parts[number] = now
            return not any(part is None for part in parts) and holds(*(each(parts) for each in build))

        for number, (source, _) in enumerate(self.parts):
            name = source.name if isinstance(source.name, str) else source.name()  # a method before 2.13
            _install(source, functools.partial(check, number), f"{name} is the same hook or policy")
        if not self.parts:  # the values are made of constants
            guard_state(lambda: holds(*(each([]) for each in build)), "what is made inside is the same hook or policy")


def guard_state(holds: Callable[[], bool], text: str) -> None:
    """Recompile the function that Dynamo is compiling when `holds()` is false, which its log calls `text`.

    Outside of Dynamo it does nothing.
    """
    if need("torch._guards.TracingContext").try_get() is not None:
        _install(need("torch._dynamo.source.GlobalStateSource")(), lambda _: holds(), text)


def _install(source: Any, check: Callable[[Any], bool], text: str) -> None:
    """Have Dynamo guard that `check` is true for the value of `source`."""

    def create(builder: Any, guard: Any) -> None:
        builder.get_guard_manager(guard).add_lambda_guard(check, [f"aot_hooks: {text}"], guard.user_stack)

    need("torch._dynamo.guards.install_guard")(source.make_guard(create))


def _weakly(value: Any) -> Callable[[], Any]:
    if isinstance(value, torch.nn.Module | torch.Tensor):
        return weakref.ref(value)
    if isinstance(value, types.MethodType):
        fn, owner = value.__func__, _weakly(value.__self__)
        return lambda: None if (at := owner()) is None else types.MethodType(fn, at)
    return lambda: value


def output_graph(context: Any) -> Any:
    """Dynamo's `OutputGraph` at a `comptime` call."""
    return context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output


def local_variable(context: Any, name: str) -> Any:
    """Dynamo's variable tracker of local `name` at a `comptime` call."""
    return context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
