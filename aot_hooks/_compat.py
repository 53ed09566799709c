"""The only file of this package that touches `torch._*`.

Each shim names what it stands on, the torch versions it was run on, and what would delete it. A missing symbol raises
`UnsupportedTorchError` where it is needed; `probe()` tells for all of them (printed by `python -m aot_hooks env`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import importlib
import inspect
import os
import pickle
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import guard_scalar

from .errors import UnsupportedTorchError
from .reached import Reached

TESTED = ("2.11.0", "2.13.0", "2.15.0")

# symbol -> what needs it
SYMBOLS = {
    "torch._C._autograd._push_saved_tensors_default_hooks": "entering a context",
    "torch._C._autograd._pop_saved_tensors_default_hooks": "leaving a context",
    "torch._C._autograd._top_saved_tensors_default_hooks": "reading the innermost context",
    "torch._C._autograd._saved_tensors_hooks_disable": "running a graph whose hooks are inlined",
    "torch._C._autograd._saved_tensors_hooks_enable": "running a graph whose hooks are inlined",
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message": "running a graph whose hooks are inlined",
    "torch._C._autograd._get_sequence_nr": "policies by module in eager parts",
    "torch._C._DisableAutocast": "tracing hooks without the caller's autocast",
    "torch._dynamo.comptime.comptime": "contexts inside a compiled function",
    "torch._dynamo.assume_constant_result": "contexts inside a compiled function",
    "torch._dynamo.exc.BackendCompilerFailed": "errors of contexts inside a compiled function",
    "torch._dynamo.exc.Unsupported": "numbers that change in hooks of a context inside a compiled function",
    "torch._dynamo.exc.TorchDynamoException": "reports of scripts with a module that cannot be planned",
    "torch._dynamo.source.Source": "contexts inside a compiled function",
    "torch._dynamo.source.GlobalStateSource": "globals of hooks made inside a compiled function",
    "torch._dynamo.guards.install_guard": "recompiling when a hook inside a compiled function changes",
    "torch._dynamo.eval_frame.skip_code": "names given by code that Dynamo left to Python",
    "torch._C._dispatch_get_all_op_names": "policies by operator",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "policies by operator",
    "torch._dynamo.backends.common.aot_autograd": "options['inner'] = 'aten'",
    "torch._functorch.partitioners.min_cut_rematerialization_partition": "the partition that is rewritten",
    "torch._functorch.config.cse": "regions that compute the same",
    "torch._functorch.config.enable_autograd_cache": "keeping torch's cache away from graphs it has no key for",
    "torch._functorch._aot_autograd.autograd_cache.autograd_cache_key": "caching graphs with hooks",
    "torch._functorch._aot_autograd.autograd_cache.AOTAutogradCache._lookup": "caching graphs with hooks",
    "torch._functorch._aot_autograd.autograd_cache.should_use_local_autograd_cache": "caching graphs with hooks",
    "torch._functorch._aot_autograd.autograd_cache.should_use_remote_autograd_cache": "caching graphs with hooks",
    "torch._guards.TracingContext": "caching graphs with hooks",
    "torch._inductor.codecache.torch_key": "caching graphs with hooks",
    "torch._inductor.runtime.triton_compat.triton_key": "caching graphs with hooks",
    "torch._inductor.runtime.runtime_utils.cache_dir": "saying why a graph was not in the cache",
    "torch._inductor.compile_fx.compile_fx": "options['inner'] = 'inductor'",
    "torch._inductor.config.custom_partitioner_fn": "options['inner'] = 'inductor'",
    "torch._inductor.custom_graph_pass.CustomPartitionerFn": "options['inner'] = 'inductor'",
    "torch._inductor.compile_fx.compile_fx_inner": "options['inner'] = 'inductor'",
    "torch._inductor.choices.InductorChoices": "kernels that pack without holding memory",
    "torch._inductor.virtualized.V": "kernels that pack without holding memory",
    "torch._inductor.codegen.triton.FixedTritonConfig": "kernels that pack in time",
    "torch._inductor.config._pre_fusion_custom_pass": "keeping copies of offload where they were planned",
    "torch._inductor.dependencies.WeakDep": "keeping copies of offload where they were planned",
    "torch._inductor.ir.Pointwise": "operators that Inductor compiles as one loop",
    "torch._inductor.lowering.register_lowering": "operators that Inductor compiles as one loop",
    "torch._inductor.list_mode_options": "mode=",
    "torch._inductor.decomposition.select_decomp_table": "tracing hooks for Inductor",
    "torch._inductor.fx_passes.replace_random.replace_random_passes": "random hooks under Inductor",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "hooks that pack into tensor subclasses",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "telling a hook that reads values",
    "torch._dispatch.python.enable_python_dispatcher": "tracing hooks on symbolic sizes",
    "torch.utils._python_dispatch._disable_current_modes": "digests of constants",
    "torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing": "comparing sizes while tracing",
    "torch._ops.OpOverload": "policies by operator",
    "torch._ops.OpOverloadPacket": "policies by operator",
    "torch._inductor.custom_graph_pass.CustomGraphPass": "names given by checkpoint_name under Inductor",
    "torch._inductor.config.joint_custom_pre_pass": "names given by checkpoint_name under Inductor",
    "torch._ops.HigherOrderOperator": "hooks that hold higher-order ops",
    "torch.utils._pytree": "what pack may return",
    "torch._logging.trace_structured": "graphs in torch's structured trace",
    "torch._subclasses.fake_tensor.FakeTensor": "telling fake tensors from real ones",
    "torch.fx.graph._BoxedCodeGen": "options['inner'] = 'aten'",
    "torch.fx.graph_module._forward_from_src": "storing graphs of options['inner'] = 'aten'",
    "torch._functorch._aot_autograd.schemas.SerializableAOTDispatchCompiler": "storing graphs of inner 'aten'",
    "torch._inductor.output_code.OutputCode": "storing graphs of options['inner'] = 'aten'",
    "torch._subclasses.fake_tensor.FakeTensorMode": "aot_hooks.plan",
    "torch._dynamo.pgo.get_code_state": "aot_hooks.plan",
    "torch._dynamo.guards.DeletedGuardManagerWrapper": "aot_hooks.plan",
    "torch._C._dynamo.eval_frame._debug_get_cache_entry_list": "aot_hooks.plan",
    "torch._C._dynamo.eval_frame.reset_code": "aot_hooks.plan",
}


def _resolve(path: str) -> Any:
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            obj = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for name in parts[cut:]:
            obj = getattr(obj, name)
        return obj
    raise ImportError(path)


def probe() -> dict[str, bool]:
    """Which private symbols this torch has: `{symbol: present}`."""
    found = {}
    for path in SYMBOLS:
        try:
            _resolve(path)
            found[path] = True
        except (ImportError, AttributeError):
            found[path] = False
    return found


def need(path: str) -> Any:
    """The private symbol at `path`, or an `UnsupportedTorchError` that names it and what needs it."""
    try:
        return _resolve(path)
    except (ImportError, AttributeError):
        raise UnsupportedTorchError(
            f"torch {torch.__version__} has no {path}, which aot_hooks needs for {SYMBOLS.get(path, 'its work')}; "
            f"tested with torch {', '.join(TESTED)}: install one of them, or report this version"
        ) from None


# --- the stack of saved-tensor hooks (2.11 to 2.15; goes when torch has a public reader of the stack) -----------------


def push_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_hooks() -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()


def top_hooks() -> tuple[Any, Any] | None:
    """The innermost hook pair of this thread, also while tracing."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


_disabled_message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
_disable = torch._C._autograd._saved_tensors_hooks_disable
_enable = torch._C._autograd._saved_tensors_hooks_enable


@contextlib.contextmanager
def hooks_pushed(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Iterator[None]:
    """The pair on top, also inside `torch.autograd.graph.disable_saved_tensors_hooks`, where torch refuses a push."""
    before = _disabled_message()
    _enable()
    try:
        push_hooks(pack, unpack)
        try:
            yield
        finally:
            pop_hooks()
    finally:
        if before is not None:
            _disable(before, False)


def allow_hooks() -> None:
    """Undo a `disable_saved_tensors_hooks` whose end an exception has skipped.

    Dynamo leaves hooks disabled for the thread when it can't trace a torch.func transform inside a context, and from
    then on torch refuses every hook, activation checkpointing's too. Goes when Dynamo puts this back itself.
    """
    if _disabled_message() is not None:
        _enable()


def call_without_hooks(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """`fn(*args)` with the hooks of this thread out of sight; written flat because it stands on every call."""
    before = _disabled_message()
    _disable("aot_hooks: the hooks of this region are inlined in its graphs", False)
    try:
        return fn(*args)
    finally:
        if before is None:
            _enable()
        else:
            _disable(before, False)


@contextlib.contextmanager
def hooks_hidden() -> Iterator[None]:
    """No hooks for what runs inside: a hook's own operators save nothing."""
    before = _disabled_message()
    _disable("aot_hooks: inside a hook", False)
    try:
        yield
    finally:
        if before is None:
            _enable()
        else:
            _disable(before, False)


def no_autocast() -> Any:
    return torch._C._DisableAutocast()


# --- Dynamo: hooks inside a compiled function ------------------------------------------------------------------------


_F = TypeVar("_F", bound=Callable[..., Any])


def untraced(fn: _F) -> _F:
    """`fn`, which Dynamo leaves to Python, with all that it calls."""
    disabled: _F = torch.compiler.disable(fn)
    return disabled


def outermost_runs_in_python(fn: _F) -> _F:
    """`fn`, which Dynamo inlines where it traces the caller and otherwise doesn't compile by itself; 2.11 to 2.15."""
    need("torch._dynamo.eval_frame.skip_code")(fn.__code__)
    return fn


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


def backend_failure(backend: str, error: Exception) -> Exception:
    """`error` as Dynamo wraps what a backend raises; anything else is called an internal error and loses its cause."""

    def name() -> None: ...

    name.__name__ = backend
    failure: Exception = need("torch._dynamo.exc.BackendCompilerFailed")(name, error, None)
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


MODULE_CALL = torch.nn.Module._call_impl.__code__  # frames of this code are modules being called


def module_call_arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the module was called with whose forward pre-hook is running; torch's global ones are not given keywords."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not MODULE_CALL:
        frame = frame.f_back
    assert frame is not None, "not in a module's hook"
    return frame.f_locals["args"], frame.f_locals["kwargs"]


comptime = need("torch._dynamo.comptime.comptime")
assume_constant_result = need("torch._dynamo.assume_constant_result")


def next_sequence_number() -> int:
    """The number that autograd will give to its next node on this thread; 2.11 to 2.15."""
    return int(need("torch._C._autograd._get_sequence_nr")())


def sequence_number(node: Any) -> int:
    """The number of a node of autograd's graph, ascending in the order in which a thread's operators ran."""
    return int(node._sequence_nr())


# --- tracing hooks ---------------------------------------------------------------------------------------------------

pytree = need("torch.utils._pytree")
FakeTensor = need("torch._subclasses.fake_tensor.FakeTensor")
HigherOrderOperator = need("torch._ops.HigherOrderOperator")


def is_traced_value(x: torch.Tensor) -> bool:
    """Whether `x` is a tracer's stand-in, not a tensor with data."""
    return isinstance(x, FakeTensor) or torch._is_functional_tensor(x) or type(x).__name__ == "FunctionalTensor"


@contextlib.contextmanager
def tracing_on_fakes(fake_mode: Any) -> Iterator[None]:
    """Run hooks on the fake tensors of `fake_mode`: no autograd, no autocast, real constants allowed.

    `allow_non_fake_inputs` is switched because a hook may hold a constant (a codebook); 2.11 to 2.15.
    """
    before = fake_mode.allow_non_fake_inputs
    fake_mode.allow_non_fake_inputs = True
    try:
        with torch.no_grad(), no_autocast(), fake_mode:
            yield
    finally:
        fake_mode.allow_non_fake_inputs = before


@contextlib.contextmanager
def no_new_unbacked(fake_mode: Any) -> Iterator[Callable[[], bool]]:
    """Forgets unbacked sizes that were made inside; yields a function that tells whether there were any."""
    env = fake_mode.shape_env
    if env is None:
        yield lambda: False
        return
    pending = getattr(env, "pending_fresh_unbacked_symbols", None)
    start = len(pending) if pending is not None else 0
    try:
        yield lambda: pending is not None and len(pending) > start
    finally:
        if pending is not None:
            del pending[start:]


def reads_values(gm: GraphModule) -> bool:
    """Whether `gm` makes a number out of a tensor (`.item()`)."""
    return bool(gm.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default))


def makes_unbacked(gm: GraphModule) -> bool:
    """Whether an operator of `gm` makes a size out of a tensor's values."""
    free = need("torch.fx.experimental.symbolic_shapes.free_unbacked_symbols")
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    given: set[Any] = set().union(*(free(n.meta.get("val")) for n in gm.graph.find_nodes(op="placeholder")))
    return any(free(n.meta["val"]) - given for n in nodes if n.meta.get("val") is not None)


def real_constant(x: Any) -> Any:
    """The tensor behind a fake constant; anything else as it is."""
    constant = getattr(x, "constant", None) if isinstance(x, FakeTensor) else None
    return x if constant is None else constant


def without_modes() -> Any:
    """Real operators, whatever fake or tracing mode is on."""
    return need("torch.utils._python_dispatch._disable_current_modes")()


def python_dispatcher() -> Any:
    """Decompositions in Python, which symbolic sizes need."""
    return need("torch._dispatch.python.enable_python_dispatcher")()


def same_size(a: Any, b: Any, *, guard: bool = False) -> bool:
    """Whether two sizes are equal for certain; with `guard` also if they are now, and then the graph depends on it.

    Also while tracing: the comparison is about sizes the trace may not know, and leaves nothing in it.
    """
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    with need("torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing")():
        equal = a == b
        if need("torch.fx.experimental.symbolic_shapes.statically_known_true")(equal):
            return True
        return bool(equal) if guard else False


def is_traceable_subclass(x: Any) -> bool:
    return bool(need("torch.utils._python_dispatch.is_traceable_wrapper_subclass")(x))


def storage_key(x: torch.Tensor) -> int:
    """Identity of the storage of `x`, also for fake tensors, as long as `x` lives."""
    return int(x.untyped_storage()._cdata)


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """What a fake tensor raises when its value is asked for (`.item()`, `if tensor`)."""
    fake = need("torch._subclasses.fake_tensor.DataDependentOutputException")
    symbolic = need("torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode")
    dynamic = need("torch._subclasses.fake_tensor.DynamicOutputShapeException")
    return (fake, symbolic, dynamic)


def dynamo_error() -> type[Exception]:
    """What Dynamo raises when it cannot go on, and where what it runs raises on fake tensors."""
    error: type[Exception] = need("torch._dynamo.exc.TorchDynamoException")
    return error


def hint(size: Any) -> int:
    """The example value of a symbolic size, without a guard; 0 for one that has none (unbacked)."""
    if isinstance(size, int):
        return size
    node = size.node
    try:
        value = node.hint if node.has_hint() else None
    except Exception:  # an unbacked size has no hint, and how it says so differs between 2.11 and 2.15
        value = None
    return int(value) if value is not None else 0


def expression(size: Any) -> str:
    return str(size.node.expr) if isinstance(size, torch.SymInt) else str(size)


def is_opaque_node(node: Node) -> bool:
    """Neither a tensor nor a number: opaque objects, script objects, backward state."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


# --- operators by name (2.11 to 2.15) ---------------------------------------------------------------------------------


def operator_names() -> list[str]:
    """All operators that are registered now, as "aten::add.Tensor"."""
    return list(need("torch._C._dispatch_get_all_op_names")())


def is_operator(op: Any) -> bool:
    """Whether `op` is `torch.ops.<space>.<name>`, with or without an overload."""
    return isinstance(op, (need("torch._ops.OpOverload"), need("torch._ops.OpOverloadPacket")))


def is_composite(name: str) -> bool:
    """Whether operator `name` is always taken apart, so that autograd and AOTAutograd see what it is made of only."""
    return bool(need("torch._C._dispatch_has_kernel_for_dispatch_key")(name, "CompositeImplicitAutograd"))


# --- the inner compilers ---------------------------------------------------------------------------------------------


def min_cut_partition(
    joint: GraphModule, inputs: Any, *, merge_repeats: bool = True, **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """torch's own; with `merge_repeats` what is computed twice is computed once, as torch is set to."""
    partition = need("torch._functorch.partitioners.min_cut_rematerialization_partition")
    config = need("torch._functorch.config")
    with config.patch(cse=config.cse and merge_repeats):
        out: tuple[GraphModule, GraphModule] = partition(joint, inputs, **kwargs)
    return out


@functools.cache
def _partitioner_class() -> type:
    base = need("torch._inductor.custom_graph_pass.CustomPartitionerFn")

    class Partitioner(base):  # type: ignore[misc, valid-type]
        def __init__(self, fn: Callable[..., Any], key: str) -> None:
            self.fn, self.key = fn, key

        def __call__(self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
            return self.fn(gm, joint_inputs, **kwargs)

        def uuid(self) -> str:
            return self.key

        def __reduce__(self) -> Any:
            return str, (self.key,)  # torch's caches pickle it into their keys: the key is all there is to know

    return Partitioner


def inductor_partitioner(fn: Callable[..., Any], key: str) -> Any:
    """`fn` as Inductor's custom partitioner; `key` is its whole identity for torch's caches."""
    return _partitioner_class()(fn, key)


@functools.cache
def _joint_pass_class() -> type:
    base = need("torch._inductor.custom_graph_pass.CustomGraphPass")

    class JointPass(base):  # type: ignore[misc, valid-type]
        def __init__(self, fn: Callable[[Any], None], before: tuple[Any, ...]) -> None:
            self.fn, self.before = fn, before

        def __call__(self, graph: Any) -> None:
            for each in (self.fn, *self.before):
                each(graph)

        def uuid(self) -> Any:
            # `fn` reads the graph only, so the graph says it all; what was there says what it says
            known = [each.uuid() if isinstance(each, base) else None for each in self.before]
            return None if None in known else ("aot_hooks names", *map(str, known))

        def __reduce__(self) -> Any:
            return str, (str(self.uuid()),)

    return JointPass


def first_joint_pass(fn: Callable[[Any], None], patches: dict[str, Any]) -> dict[str, Any]:
    """Inductor settings by which `fn(graph)`, which changes no node, sees the joint graph before Inductor's own passes.

    A pass that the user set there runs after it; 2.11 to 2.15.
    """
    name = "joint_custom_pre_pass"
    before = patches.get(name, need(f"torch._inductor.config.{name}"))
    before = before if isinstance(before, (list, tuple)) else () if before is None else (before,)
    return {name: _joint_pass_class()(fn, tuple(before))}


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor's settings for `torch.compile(mode=...)`. Raises `RuntimeError` for an unknown mode."""
    if mode is None or mode == "default":
        return {}
    return dict(need("torch._inductor.list_mode_options")(mode))


def inductor_config_keys() -> set[str]:
    return set(need("torch._inductor.config").get_config_copy())


Capture = Callable[[Callable[..., Any]], Callable[..., Any]]  # from an inner compile to one that captures


def compile_inductor(
    gm: GraphModule, inputs: Sequence[Any], patches: dict[str, Any], capture: Capture | None = None
) -> Callable[..., Any]:
    """What stock torch calls, with the same arguments; with `capture` what it compiles is captured."""
    compile_fx = need("torch._inductor.compile_fx.compile_fx")
    if capture is not None:
        return _compile_captured(gm, inputs, patches, need("torch._inductor.compile_fx.compile_fx_inner"), capture)
    compiled: Callable[..., Any] = compile_fx(gm, inputs, config_patches=patches or None)
    return compiled


def _compile_captured(
    gm: GraphModule, inputs: Sequence[Any], patches: dict[str, Any], inner: Callable[..., Any], capture: Capture
) -> Callable[..., Any]:
    """Without Inductor's own CUDA graphs. To be called inside `through_cache` of what captures, because AOTAutograd's
    cache by itself answers with a graph that is not captured."""
    compile_fx = need("torch._inductor.compile_fx.compile_fx")
    patches = patches | {"triton.cudagraphs": False}
    compiled: Callable[..., Any] = compile_fx(gm, inputs, inner_compile=capture(inner), config_patches=patches)
    return compiled


def compile_inductor_with_hooks(
    gm: GraphModule,
    inputs: Sequence[Any],
    patches: dict[str, Any],
    compiling: Callable[[], None],
    capture: Capture | None = None,
) -> Callable[..., Any]:
    """Inductor with its heuristics adapted to graphs that pack, see `_choices`. Stock heuristics without them.

    `compiling()` is called before each graph is compiled, of the backward maybe at its first run; not if torch's cache
    has them.
    """
    compile_fx = need("torch._inductor.compile_fx.compile_fx")
    inner = need("torch._inductor.compile_fx.compile_fx_inner")
    handler = need("torch._inductor.virtualized.V").set_choices_handler

    register_loops()

    def inner_compile(graph: GraphModule, *args: Any, **kwargs: Any) -> Any:
        compiling()
        # our marks on nodes say how to fuse, and a node's meta is in no key of torch's: the graph's attributes are
        vars(graph)["_aot_hooks_marks"] = _marks(graph)
        with handler(_choices()):
            return inner(graph, *args, **kwargs)

    # a buffer that waits for its reuse is a buffer that is alive: the backward of a transformer block held 0.4 GiB
    ours: dict[str, Any] = {"allow_buffer_reuse": False, "dynamic_scale_rblock": False}
    if not patches.get("triton.cudagraphs", need("torch._inductor.config").triton.cudagraphs):
        ours["graph_partition"] = False  # its pieces are for CUDA graphs; looking for them is 4% of compiling
    patches = ours | patches | _order_pass(patches)
    if capture is not None:
        return _compile_captured(gm, inputs, patches, inner_compile, capture)
    compiled: Callable[..., Any] = compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=patches)
    return compiled


def _marks(graph: GraphModule) -> str:
    marks = [(i, n.meta.get(_ALONE), PACKED_ROW in n.meta) for i, n in enumerate(graph.graph.nodes)]
    return repr([mark for mark in marks if any(mark[1:])])


_ALONE = "aot_hooks_alone"
_PERSISTENT_ROWS = ((1, 4096), (8, 1024))  # up to so many reductions in a kernel, rows up to so long


def mark_alone(nodes: Sequence[Node], name: str) -> None:
    """Keep Inductor from fusing `nodes` with any but each other."""
    for node in nodes:
        node.meta[_ALONE] = name


def _group(scheduler_node: Any) -> str | None:
    """The mark of the graph nodes behind a scheduler node; kept on it, as each is asked for with many others."""
    known = scheduler_node.__dict__
    if _ALONE not in known:
        parts = scheduler_node.get_nodes()
        origins = (o for part in parts for o in getattr(getattr(part, "node", None), "origins", ()))
        known[_ALONE] = next((str(o.meta[_ALONE]) for o in origins if _ALONE in o.meta), None)
    mark: str | None = known[_ALONE]
    return mark


def _is_ours(scheduler_node: Any) -> bool:
    origins = getattr(getattr(scheduler_node, "node", None), "origins", ())
    return any(PACKED_ROW in origin.meta for origin in origins)


def _packs(features: Any) -> bool:
    return any(map(_is_ours, features.scheduler_nodes()))


def _reads_rows_twice(features: Any) -> bool:
    """Whether a kernel looks for the scale of a row, and then reads the row again to pack it."""
    return any(
        str(origin.target).startswith("aot_hooks.amax_")
        for node in features.reduction_nodes()
        for origin in getattr(getattr(node, "node", None), "origins", ())
    )


PACKED_ROW = "aot_hooks_node"  # on nodes that a hook put into the graph


@functools.cache
def _choices() -> Any:
    """Inductor's heuristics (`InductorChoices` is torch's place to override them), changed where hooks stand.

    - What is marked alone is fused with its own kind only.
    - A row that is reduced for its scale and then read again stays in registers where that was faster on an H200: also
      rows that do not lie in one piece, and up to 4096 where it is the only one; not two of 3072, not one of 14336.
    - A row that does not is read 16 bytes a thread at a time, in pieces of 1024, or 2048 if it is longer than 8192. By
      Inductor's own choice (2048 in 16 warps, 8 bytes) a GELU of 3072 and its two packings took 340 us instead of 208,
      of 11008 449 instead of 394; silu(a) * b with three packings of 4096 221 instead of 175, of 14336 654 and 660.
    """
    base = need("torch._inductor.choices.InductorChoices")

    class Choices(base):  # type: ignore[misc, valid-type]
        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            if _group(node1) != _group(node2):
                return False
            return bool(base.can_fuse(scheduler, node1, node2, shared_data_score))

        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            if base.should_use_persistent_reduction(features, cooperative_reduction):
                return True
            hint_name = getattr(features.get_reduction_hint(), "name", "")
            if cooperative_reduction or hint_name not in ("INNER", "DEFAULT") or not _packs(features):
                return False
            sizes = need("torch._inductor.virtualized.V").graph.sizevars
            count = len(features.reduction_nodes())
            longest = max((numel for most, numel in _PERSISTENT_ROWS if count <= most), default=0)
            return bool(sizes.statically_known_leq(features.reduction_numel, longest))

        def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: Any) -> Any:
            kwargs = super().triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
            settings, sizes = need("torch._inductor.config"), need("torch._inductor.virtualized.V").graph.sizevars
            others_choose = settings.max_autotune or settings.max_autotune_pointwise
            others_choose |= settings.coordinate_descent_tuning or bool(settings.triton.multi_kernel)
            if (
                others_choose
                or kwargs.get("fixed_config") is not None
                # Inductor has decided, as where sums over columns are taken along: those blocks are called otherwise.
                # Of a reduction in a reduction, which 2.15 has, there are some that are too small
                or kwargs.get("override_persistent_reduction")
                or "override_cooperative_reduction" in kwargs
                or [set(tiling) for tiling in groups] != [{"x", "r0_"}]
                or not _reads_rows_twice(features)
                or getattr(features, "strict_reduction_rblock", lambda: None)() is not None  # 2.15: the block is fixed
                or getattr(features.get_reduction_hint(), "name", "") != "INNER"
                or not sizes.statically_known_leq(32, features.numel)  # fewer rows may be split over programs
                or settings.triton.force_cooperative_reductions
                or not sizes.statically_known_leq(1024, features.reduction_numel)
                or self.should_use_persistent_reduction(features, False)
            ):
                return kwargs
            block, warps = (1024, 4) if sizes.statically_known_leq(features.reduction_numel, 8192) else (2048, 8)
            config = {"XBLOCK": 1, "R0_BLOCK": block, "num_warps": warps, "num_stages": 1}
            return {**kwargs, "fixed_config": need("torch._inductor.codegen.triton.FixedTritonConfig")(config)}

        def uuid(self) -> str:
            return "aot_hooks choices 2"

    return Choices()


_OFFLOAD = tuple(f"aot_hooks.{part}" for part in ("offload_start", "offload_wait", "reload_start", "reload_wait"))


def _hold_order(nodes: list[Any]) -> list[Any]:
    """Give Inductor's scheduler the dependencies that keep each operator of offload between the same kernels.

    Before fusion the scheduler has its nodes in the order of the graph. Of those, each kernel that is fused with none
    (products, attention, other operators) and follows an operator of offload comes to depend on it, and it on every one
    since the operator before it. These are dependencies of order alone (`is_fake`), which hold no memory.
    """
    is_ours = {n: str(getattr(n.node, "op_overload", "")).startswith(_OFFLOAD) for n in nodes}
    if not any(is_ours.values()):
        return nodes
    placed = [n for n in nodes if is_ours[n] or n.is_extern() or n.is_template()]
    weak = need("torch._inductor.dependencies.WeakDep")

    def order(first: Any, then: Any) -> None:
        then.add_fake_dep(weak(next(iter(first.get_buffer_names())), then.get_name(), is_fake=True))

    before: Any = None
    since: list[Any] = []
    for node in placed:
        for each in (*((before,) if before is not None else ()), *(since if is_ours[node] else ())):
            order(each, node)
        if is_ours[node]:
            before, since = node, []
        else:
            since.append(node)
    scheduler = nodes[0].scheduler
    scheduler.nodes = scheduler.topological_sort_schedule(nodes)
    scheduler.compute_ancestors()  # what fusion looks at to make no circles
    return list(scheduler.nodes)


def _bound_size_hints(graph: Any) -> None:
    """Let Inductor count for what is read of an input of `graph` no more than the input has.

    It counts the loop that reads: a scale read beside each value of its block counted as much as those in float32. To
    its search for the order with the least memory, unpacking all that was saved at once then freed more than it took:
    four Llama blocks with int8 in blocks of 64 peaked at 8.8 GiB, now 5.8. Goes when it is bounded in
    (`torch._inductor.memory.get_freeable_input_buf`; 2.11 to 2.15).
    """
    hint, whole = graph.get_dep_size_hint, need("torch._inductor.dependencies.StarDep")

    def bounded(dep: Any, count_bytes: bool = True) -> int:
        size: int = hint(dep, count_bytes)
        if size > 1 and dep.name in graph.graph_inputs:
            size = min(size, hint(whole(dep.name), count_bytes))
        return size

    graph.get_dep_size_hint = bounded


def _merge_dependencies_of_blocks(nodes: list[Any]) -> None:
    """Let what packs a value in blocks be fused with what else makes or reads it.

    Inductor compares what two loops read as they stand if they are as deep, after merging them if not: it found
    [rows, blocks, 128] and [batch, tokens, width] to share nothing, and made four kernels of silu(a) * b and its three
    packings with int8. What such packings read is merged here, and they are no longer as deep. Goes with torch 2.11:
    from 2.13 on Inductor finds them.
    """
    memory = need("torch._inductor.dependencies.MemoryDep")

    def dependencies(node: Any) -> list[Any]:
        return [d for d in node.read_writes.reads_and_writes() if isinstance(d, memory) and d.num_vars > 1]

    ours = {node: hasattr(node, "refresh_dependencies") and _is_ours(node) for node in nodes}
    others: dict[str, list[Any]] = {}
    for node in nodes:
        if not ours[node]:
            for d in dependencies(node):
                others.setdefault(d.name, []).append(d)

    def differ(a: Any, b: Any) -> bool:
        return bool(a.num_vars == b.num_vars and a.size != b.size and a.normalize() == b.normalize())

    for node in nodes:
        if ours[node] and any(differ(d, other) for d in dependencies(node) for other in others.get(d.name, ())):
            node.refresh_dependencies(normalize=True, need_clear_tiling_cache=False)


def _before_fusion(nodes: list[Any]) -> list[Any]:
    _bound_size_hints(need("torch._inductor.virtualized.V").graph)
    _merge_dependencies_of_blocks(nodes)
    return _hold_order(nodes)


@functools.cache
def _order_pass_class() -> type:
    module = need("torch._inductor.custom_graph_pass")
    base = getattr(module, "CustomSchedulerPass", module.CustomGraphPass)  # 2.11 has the second only

    class OrderPass(base):  # type: ignore[misc, valid-type]
        def __init__(self, after: Any) -> None:
            self.after = after

        def __call__(self, nodes: list[Any]) -> list[Any]:
            nodes = _before_fusion(nodes)
            return self.after(nodes) if self.after is not None else nodes

        def uuid(self) -> Any:
            after = self.after.uuid() if self.after is not None else ""
            return None if after is None else f"aot_hooks order 2 {after}"

        def __reduce__(self) -> Any:
            return str, (str(self.uuid()),)

    return OrderPass


def _order_pass(patches: dict[str, Any]) -> dict[str, Any]:
    """Inductor settings by which `_before_fusion` runs before fusion, and a pass of the user's after it; 2.11 to 2.15.

    Goes when order can be kept publicly.
    """
    name = "_pre_fusion_custom_pass"
    after = patches.get(name, getattr(need("torch._inductor.config"), name))
    if after is not None and not hasattr(after, "uuid"):
        return {name: lambda nodes: after(_before_fusion(nodes))}  # torch caches nothing of what has no identity
    return {name: _order_pass_class()(after)}


_loops: list[tuple[Any, Callable[..., Any], Callable[..., Any] | None, Callable[..., torch.dtype], str | None]] = []


def lower_to_loop(
    op: Any,
    body: Callable[..., Any],
    dtype_of: Callable[..., torch.dtype],
    *,
    nvidia: Callable[..., Any] | None = None,
    reduce_last: str | None = None,
) -> None:
    """Have Inductor compile `op` as one loop over its first argument, from when it is first asked to compile hooks.

    Args:
        body: `(ops, element of each tensor argument, other arguments) -> element`, in Inductor's `ops`. Tensors
            broadcast against the first, dimensions of size 1 only.
        dtype_of: dtype of the result, from the operator's arguments.
        nvidia: a body that takes the place of `body` where PTX can be emitted.
        reduce_last: reduce the result over the last dimension, kept as 1, with this ATen operator.

    Goes when a tensor operator can be lowered as one node publicly.
    """
    _loops.append((op, body, nvidia, dtype_of, reduce_last))


@dataclasses.dataclass(frozen=True)
class PackedAsm:
    """Inline assembly of four elements at once, for Triton, and of one for a block that holds fewer than four.

    Inductor's `ops.inline_asm_elementwise` has nothing for the latter in 2.11, where such a block does not compile, and
    from 2.13 on takes each input for as large as the first. So code for this is made by ours, called through it.

    Attributes:
        dtype: of the result.
        four, four_constraints: 8-bit elements are in one register, others in a register each.
        one, one_constraints: 8-bit elements are in a register each.
    """

    dtype: torch.dtype
    four: str
    four_constraints: str
    one: str
    one_constraints: str

    def __call__(self, ops: Any, *inputs: Any) -> Any:
        _packed_asm[self.four] = self
        return ops.inline_asm_elementwise(
            *inputs, asm=self.four, constraints=self.four_constraints, dtype=self.dtype, is_pure=True, pack=4
        )

    def code(self, *inputs: Any) -> str:
        """As an expression of Triton's language; which of the two is known when that is compiled."""
        byte, dtype = self.dtype.itemsize == 1, str(self.dtype).removeprefix("torch.")
        words = [f"{x}.to(tl.int32)" if x.dtype.itemsize == 1 else str(x) for x in inputs]
        four = (
            f"tl.inline_asm_elementwise('{self.four}', '{self.four_constraints}', [{', '.join(map(str, inputs))}], "
            f"dtype=tl.{dtype}, is_pure=True, pack=4)"
        )
        one = (
            f"tl.inline_asm_elementwise('{self.one}', '{self.one_constraints}', [{', '.join(words)}], "
            f"dtype=tl.{'int32' if byte else dtype}, is_pure=True, pack=1)" + (f".to(tl.{dtype})" if byte else "")
        )
        return f"({four} if {inputs[0]}.numel >= 4 else {one})"


_packed_asm: dict[str, PackedAsm] = {}


@functools.cache
def _register_packed_asm() -> None:
    overrides = need("torch._inductor.codegen.triton.TritonOverrides")
    stock = overrides.inline_asm_elementwise

    def inline_asm_elementwise(*inputs: Any, asm: str, **named: Any) -> Any:
        ours = _packed_asm.get(asm)
        return stock(*inputs, asm=asm, **named) if ours is None else ours.code(*inputs)

    overrides.inline_asm_elementwise = staticmethod(inline_asm_elementwise)


def register_loops() -> None:
    """Register what `lower_to_loop` was given with Inductor."""
    _register_packed_asm()
    register = need("torch._inductor.lowering.register_lowering")
    while _loops:
        op, body, nvidia, dtype_of, reduce_last = _loops.pop()
        register(op, type_promotion_kind=None)(_lowering(body, nvidia, dtype_of, reduce_last))


def _lowering(
    body: Callable[..., Any],
    nvidia: Callable[..., Any] | None,
    dtype_of: Callable[..., torch.dtype],
    reduce_last: str | None,
) -> Callable[..., Any]:
    lowerings = need("torch._inductor.lowering.lowerings")
    pointwise, box = need("torch._inductor.ir.Pointwise"), need("torch._inductor.ir.TensorBox")
    graph, ops = need("torch._inductor.virtualized.V"), need("torch._inductor.virtualized.ops")

    def lower(*args: Any) -> Any:
        tensors = [a for a in args if isinstance(a, box)]
        others = args[len(tensors) :]
        sizes = tensors[0].get_size()
        known = graph.graph.sizevars.statically_known_equals
        loaders = []
        for t in tensors:
            spread = [known(own, 1) and not known(size, 1) for own, size in zip(t.get_size(), sizes, strict=True)]
            loaders.append((t.make_loader(), spread))

        device = tensors[0].get_device()
        element = nvidia if nvidia is not None and device.type == "cuda" and torch.version.hip is None else body

        def inner(index: Any) -> Any:
            at = [[0 if s else i for i, s in zip(index, spread, strict=True)] for _, spread in loaders]
            # Scales first: where two layouts of a block in threads meet, Triton takes that of what was loaded last, and
            # a scale's is one element a thread at a time. A norm's backward that unpacks then takes 662 instructions
            # for sm_90 instead of 745, without moving codes through shared memory a byte at a time.
            elements = [load(i) for (load, _), i in zip(reversed(loaders), reversed(at), strict=True)]
            return element(ops, *reversed(elements), *others)

        out = pointwise.create(device=device, dtype=dtype_of(*args), inner_fn=inner, ranges=list(sizes))
        if reduce_last is None:
            return out
        return lowerings[getattr(torch.ops.aten, reduce_last).default](out, [-1], True)

    return lower


def compile_aten(
    gm: GraphModule,
    inputs: Sequence[Any],
    partition: Callable[..., Any],
    compilers: dict[str, Callable[..., Any]] | None = None,
    compiling: Callable[[], None] | None = None,
) -> Callable[..., Any]:
    """AOTAutograd's graphs as they are: generated Python, arguments in a list that is emptied, so memory goes early.

    `compilers` are others for "forward", "backward" and "inference" graphs. With `compiling`, which is called before
    each graph is compiled, torch's cache of AOTAutograd's results is used: only inside of `autograd_cache`, because
    `partition` is in no key of torch's.
    """
    aot_autograd = need("torch._dynamo.backends.common.aot_autograd")
    codegen = need("torch.fx.graph._BoxedCodeGen")

    def boxed(graph_module: GraphModule, _inputs: Any) -> Callable[..., Any]:
        graph_module.graph.set_codegen(codegen())
        graph_module.recompile()
        forward = graph_module.forward

        def run(args: list[Any]) -> Any:
            return forward(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def storable(graph_module: GraphModule, _inputs: Any) -> Any:
        if compiling is not None:
            compiling()
        return _aten_code_class()(boxed(graph_module, _inputs), graph_module)

    given = compilers or {"forward": boxed, "backward": boxed, "inference": boxed}
    if compiling is not None and compilers is None:
        serializable = need("torch._functorch._aot_autograd.schemas.SerializableAOTDispatchCompiler")
        given = {name: serializable(_aten_code_class(), storable) for name in given}
    with _storing_aten() if compiling is not None else contextlib.nullcontext():
        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=given["forward"],
            bw_compiler=given["backward"],
            inference_compiler=given["inference"],
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )(gm, inputs)
    return compiled


@functools.cache
def _aten_code_class() -> type:
    """What torch's cache stores of a graph that runs as it is: generated Python, and the constants it holds."""
    output_code = need("torch._inductor.output_code.OutputCode")

    class AtenCode(output_code):  # type: ignore[misc, valid-type]
        def __init__(self, run: Callable[[list[Any]], Any], graph_module: GraphModule | None) -> None:
            super().__init__()
            self.run = run
            self.graph_module: Any = graph_module
            self.stored: Any = None
            self._boxed_call = True

        def __call__(self, inputs: list[Any]) -> Any:
            return self.run(inputs)

        def __copy__(self) -> Any:
            return AtenCode(self.run, self.graph_module)

        def prepare_for_serialization(self) -> None:
            self.stored = _aten_as_data(self.graph_module)

        def __reduce__(self) -> Any:
            return _aten_from_data, self.stored

        def post_compile(self, *_args: Any, **_kwargs: Any) -> None: ...

        def set_triton_bundle(self, triton_bundle: Any) -> None: ...

    return AtenCode


def _aten_as_data(gm: GraphModule) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, str]]:
    """Source, constants, globals, and those that are modules. Makes torch store nothing if a part is no plain data."""
    bypass = need("torch._functorch._aot_autograd.autograd_cache.BypassAOTAutogradCache")
    constants = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = getattr(gm, str(node.target), None)
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                raise bypass(f"'{node.target}' of the graph is a {type(value).__qualname__}")
            constants[str(node.target)] = value
        elif node.op in ("call_module", "call_method") or isinstance(node.target, HigherOrderOperator):
            raise bypass(f"the graph calls {node.target}")
    code = gm.graph.python_code("self")
    modules = {name: value.__name__ for name, value in code.globals.items() if inspect.ismodule(value)}
    others = {name: value for name, value in code.globals.items() if name not in modules}
    try:
        pickle.dumps(others)
    except (pickle.PicklingError, TypeError, AttributeError) as e:
        raise bypass(f"a global of the graph's code cannot be stored: {e}") from e
    return code.src, constants, others, modules


def _aten_from_data(src: str, constants: dict[str, Any], others: dict[str, Any], modules: dict[str, str]) -> Any:
    space = {name: importlib.import_module(module) for name, module in modules.items()} | others
    forward = need("torch.fx.graph_module._forward_from_src")(src, space)
    owner = types.SimpleNamespace(**constants)
    return _aten_code_class()(functools.partial(forward, owner), None)


def partition_for_inductor(gm: GraphModule, inputs: Sequence[Any], patches: dict[str, Any]) -> None:
    """Inductor up to its partition, with its decompositions and joint-graph passes; nothing is generated."""
    compile_fx = need("torch._inductor.compile_fx.compile_fx")

    def nothing(*_args: Any, **_kwargs: Any) -> Callable[..., Any]:
        def run(_inputs: list[Any]) -> Any:
            raise AssertionError("a graph that was only planned was called")

        return run

    compile_fx(gm, inputs, inner_compile=nothing, config_patches=patches)


def aten_is_stored() -> bool:
    """Whether torch's configuration has graphs that run as they are stored too, as torch 2.13 does for `aot_eager`."""
    config = need("torch._functorch.config")
    return bool(config.bundled_autograd_cache or getattr(config, "force_autograd_cache", False))


def _storing_aten() -> Any:
    """Entries hold the graphs themselves, and are made when the forward is compiled."""
    patches = {"bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True}
    return need("torch._functorch.config").patch(patches)


def without_autograd_cache() -> Any:
    """torch's cache of AOTAutograd's results off, see cache.py for when; Inductor's own stays on."""
    return need("torch._functorch.config").patch({"enable_autograd_cache": False})


def inductor_decompositions() -> dict[Any, Any]:
    return dict(need("torch._inductor.decomposition.select_decomp_table")())


def replace_random_for_inductor(gm: GraphModule) -> int:
    """Inductor's own rewrite of random ops (it runs on joint graphs only, before hooks stand in them)."""
    if need("torch._inductor.config").fallback_random:
        return 0
    return int(need("torch._inductor.fx_passes.replace_random.replace_random_passes")(gm) or 0)


def trace_structured(name: str, text: Callable[[], str]) -> None:
    """`text()` as artifact `name` in torch's structured trace, where tlparse finds it; nothing if nobody listens."""
    need("torch._logging.trace_structured")(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )


# --- torch's caches of compiled graphs (2.11 to 2.15) ----------------------------------------------------------------


def rename_node(node: Node, name: str, target: Any) -> None:
    """Name and target of `node`, past the listeners and tables that a Node's own setter keeps: none goes by them."""
    object.__setattr__(node, "name", name)
    object.__setattr__(node, "target", target)
    names = node.graph._graph_namespace
    if node in names._obj_to_name:
        names._rename_object(node, name)
    else:
        names._used_names.add(name)
        names.associate_name_with_obj(name, node)


@contextlib.contextmanager
def fresh_namespace(graph: torch.fx.Graph) -> Iterator[None]:
    """Names inside are those of the nodes alone; the graph's own bookkeeping of names comes back untouched."""
    before = graph._graph_namespace
    graph._graph_namespace = type(before)()
    for node in graph.nodes:
        graph._graph_namespace._used_names.add(node.name)
        graph._graph_namespace.associate_name_with_obj(node.name, node)
    try:
        yield
    finally:
        graph._graph_namespace = before


@dataclasses.dataclass
class CacheEvent:
    """What torch's cache of AOTAutograd's results did in one compilation.

    Attributes:
        key: of the entry, "" if none was looked for.
        lines: what torch's part of the key is made of, if torch says it (only with its logger at debug).
        bypass: why torch made no key, or nothing is to be stored.
        found: entries were there; and `refused` why the last of them was not taken, "" if it was.
        guards_failed: entries were there, for other sizes.
        compiled: something was compiled.
    """

    key: str = ""
    lines: tuple[str, ...] = ()
    bypass: str = ""
    found: bool = False
    refused: str = ""
    guards_failed: bool = False
    compiled: bool = False


_keying = threading.RLock()


@functools.cache
def _triton_hash(pid: int) -> futures.Future[Any]:
    """torch's hash of Triton's files, which is in all of its keys, on its way in a thread.

    A process makes it once, at its first key: 0.4 s, nearly all of it to read and to hash one library of 400 MB, for
    which the interpreter is free to import the compiler. The hash of torch's own files is not made so: it is thousands
    of short calls, and a thread waits after each until the one that imports lets go of the interpreter.

    Whoever forks meanwhile has no such thread, hence `pid`. A hash that fails is made again by torch, which knows what
    to say. Goes when torch has it in a file, as it has inside Meta.
    """
    threads = futures.ThreadPoolExecutor(1, "aot_hooks_hash")
    hashed = threads.submit(need("torch._inductor.runtime.triton_compat.triton_key"))
    threads.shutdown(wait=False)
    # torch makes it under a lock, which a child would inherit taken
    os.register_at_fork(before=lambda: hashed.exception(timeout=10))
    return hashed


@contextlib.contextmanager
def autograd_cache(
    digest: str,
    normalized: Callable[[GraphModule], contextlib.AbstractContextManager[None]],
    refuse: Callable[[bytes | None, bool], str],
    give_up: Callable[[int], str],
    missed: Callable[[], None] = lambda: None,
) -> Iterator[CacheEvent]:
    """What is compiled inside, on this thread, goes through torch's cache of AOTAutograd's results by a key of ours.

    Functions of `torch._functorch._aot_autograd.autograd_cache` are called through ours and put back on exit:

    - `autograd_cache_key`: torch's key, made under `normalized(graph)`, with symbols by `SizeNumbers` and without the
      names in the sources of arguments (kept everywhere else: AOTAutograd writes guards with them), and `digest`.
    - `AOTAutogradCache._lookup`: an entry is passed over if `refuse(attached, has_backward)` says why; `attached` is
      what `attach` put into it, None if nothing. Then the next one of the key is looked at. If all were refused,
      `give_up(how_many)` says why nothing is to be stored beside them, "" if the new one is.

    `missed()` is called as soon as it is known that there is no key or no entry.

    Goes when torch takes a part of its key, and data to store with an entry, from a backend.
    """
    module = need("torch._functorch._aot_autograd.autograd_cache")
    cache = module.AOTAutogradCache
    make_key, own_lookup = module.autograd_cache_key, cache.__dict__["_lookup"]
    event, thread = CacheEvent(), threading.get_ident()
    hashed = _triton_hash(os.getpid())

    def keyed(mod: Any, inputs: Any, config: Any, *rest: Any, **named: Any) -> Any:
        if threading.get_ident() != thread:
            return make_key(mod, inputs, config, *rest, **named)
        sources = config.aot_autograd_arg_pos_to_source
        if sources is not None:
            config = dataclasses.replace(config, aot_autograd_arg_pos_to_source=[source_shape(s) for s in sources])
        try:
            need("torch._inductor.codecache.torch_key")()  # torch keeps it for what follows; Triton's goes on meanwhile
            futures.wait((hashed,))
            with normalized(mod if isinstance(mod, GraphModule) else mod.gm), _sizes_by_number(module, inputs):
                key, lines = make_key(mod, inputs, config, *rest, **named)
        except Exception as e:  # torch goes on without its cache, whatever it is; we only say so
            event.bypass = str(e).splitlines()[0] if str(e) else type(e).__name__
            missed()
            raise
        # both in torch's own key since 2.13
        static = sorted(getattr(config, "static_input_indices", None) or ())
        autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
        own = hashlib.sha256(f"{digest} {static} {autocast}".encode()).hexdigest()[: len(digest)]
        event.key = f"{key}_{own}"
        event.lines = (*map(str, lines), f"static inputs: {static}", f"autocast: {autocast}")
        return event.key, lines

    refused: set[bytes] = set()  # entries as they are stored
    candidates = cache.iterate_over_candidates

    def others(*args: Any, **named: Any) -> Iterator[Any]:
        for candidate in candidates(*args, **named):
            if candidate[1] not in refused:
                yield candidate

    def lookup(*args: Any, **named: Any) -> Any:
        result = own_lookup.__func__(*args, **named)
        if threading.get_ident() != thread:
            return result
        while result is not None:
            event.found = True
            event.refused = refuse(_attached(result[0]), result[0].compiled_bw is not None)
            if not event.refused:
                return result
            refused.add(result[1])
            result = own_lookup.__func__(*args, **named)
        missed()
        if refused and (why := give_up(len(refused))):
            event.bypass = why
            raise module.BypassAOTAutogradCache(why)
        info = named.get("cache_info", args[4] if len(args) > 4 else {})
        event.guards_failed = info.get("cache_status_detailed") == "guard_miss"
        return None

    with _keying:
        module.autograd_cache_key, cache._lookup = keyed, staticmethod(lookup)
        cache.iterate_over_candidates = staticmethod(others)
        try:
            yield event
        finally:
            module.autograd_cache_key, cache._lookup = make_key, own_lookup
            del cache.iterate_over_candidates  # inherited


class SizeNumbers:
    """Symbols of sizes by where the inputs of a graph show them first; torch calls them after names in the user's code.

    Symbols that no input shows by themselves, and all of a graph with tensor subclasses, which hold sizes that nothing
    here looks at, keep the names that torch gave them.
    """

    def __init__(self, inputs: Iterable[Any]) -> None:
        values = list(inputs)
        self.names: dict[Any, Any] = {}
        if any(isinstance(value, torch.Tensor) and is_traceable_subclass(value) for value in values):
            return
        sizes = [s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else (v,))]
        for size in sizes:
            expr = size.node.expr if isinstance(size, torch.SymInt) else None
            if expr is not None and expr.is_symbol and expr not in self.names and re.fullmatch(r"s\d+", expr.name):
                self.names[expr] = expr.func(f"size{len(self.names)}", integer=True, positive=expr.is_positive)

    def text(self, value: Any) -> str:
        """`value`, a size or what is computed from sizes; what is no symbol as `str` has it."""
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return str(value)
        return str(value.node.expr.xreplace(self.names))


@contextlib.contextmanager
def _sizes_by_number(module: Any, inputs: Sequence[Any]) -> Iterator[None]:
    """torch's pickler of keys writes symbolic sizes by number. torch 2.15 does so for those that are a symbol alone."""
    pickler, numbers, thread = module.AOTAutogradCachePickler, SizeNumbers(inputs), threading.get_ident()

    class Numbering(pickler):  # type: ignore[misc, valid-type]
        def _reduce_symint(self, size: Any) -> Any:
            return str, (numbers.text(size) if threading.get_ident() == thread else str(size),)

        _reduce_symbool = _reduce_symint

    module.AOTAutogradCachePickler = Numbering
    try:
        yield
    finally:
        module.AOTAutogradCachePickler = pickler


def source_shape(source: Any) -> tuple[str, ...]:
    """How an argument is reached (a local, an item of an attribute of a module, ...), without names."""
    steps = []
    while source is not None:
        steps.append(type(source).__name__)
        source = getattr(source, "base", None)
    return tuple(steps)


_ATTACHED = "aot_hooks"


def attach(data: bytes) -> None:
    """Have AOTAutograd store `data` in the entry of the graph that is being compiled.

    In its metadata of the forward, which goes into the entry as it is, also when that is made at the first backward.
    """
    context = need("torch._guards.TracingContext").try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is not None:
        setattr(metadata, _ATTACHED, data)


def _attached(entry: Any) -> bytes | None:
    inner = getattr(getattr(entry, "maybe_subclass_meta", None), "fw_metadata", None)
    found: bytes | None = getattr(entry.runtime_metadata, _ATTACHED, None) or getattr(inner, _ATTACHED, None)
    return found


@contextlib.contextmanager
def fake_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Iterator[torch.Tensor]:
    """A dense fake tensor of static sizes, in the fake mode of the compilation that is going on."""
    context = need("torch._guards.TracingContext").try_get()
    mode = context.fake_mode if context is not None else None
    if mode is None:
        mode = need("torch._subclasses.fake_tensor.FakeTensorMode")(allow_non_fake_inputs=True)
    with without_modes():
        with mode:
            value = torch.empty(shape, dtype=dtype, device=device)
        yield value


def autograd_cache_is_on() -> bool:
    module = need("torch._functorch._aot_autograd.autograd_cache")
    return bool(module.should_use_local_autograd_cache() or module.should_use_remote_autograd_cache())


def cache_dir() -> str:
    """Where torch keeps what it compiled (`TORCHINDUCTOR_CACHE_DIR`)."""
    return str(need("torch._inductor.runtime.runtime_utils.cache_dir")())


def settings_of_torch() -> dict[str, str]:
    """The configuration that torch's key holds, as text, for comparing."""
    found = {}
    for name in ("torch._inductor.config", "torch._functorch.config"):
        found.update({f"{name}.{k}": repr(v) for k, v in need(name).get_config_copy().items()})
    return found


# --- from a compiled function to its backend and back -----------------------------------------------------------------


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


# --- planning: the program on fake tensors ----------------------------------------------------------------------------


@functools.cache
def _all_fake_class() -> type:
    base = need("torch._subclasses.fake_tensor.FakeTensorMode")

    class AllFake(base):  # type: ignore[misc, valid-type]
        """A fake mode in which no operator runs, also none on real tensors alone: a buffer stays what it is."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            args, kwargs = to_fake(self, (args, kwargs or {}))
            return super().__torch_dispatch__(func, (FakeTensor,), args, kwargs)

    return AllFake


def to_fake(mode: Any, tree: Any) -> Any:
    """`tree` with each real tensor as its stand-in in `mode`, always the same one."""
    convert = lambda t: t if is_traced_value(t) else mode.from_tensor(t)  # noqa: E731
    return pytree.tree_map_only(torch.Tensor, convert, tree)


def fake_mode_for(tensors: Sequence[torch.Tensor]) -> Any:
    """The mode of those of `tensors` that are fake; if none is, a new one in which nothing runs."""
    for t in tensors:
        if isinstance(t, FakeTensor):
            return t.fake_mode
    return _all_fake_class()(allow_non_fake_inputs=True)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """The random state of the CPU, and of each CUDA device if there is one in use, as it was."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(list(devices)):
        yield


class DynamoTraces:
    """Removes what Dynamo stored while it was in force: entries of the codes it compiled, and the sizes it saw, by
    which it would take a size for a dynamic one. Where a code had entries of others, ours are made dead instead, and
    count against the recompile limit. Dynamo has no call for one function (2.11 to 2.15); goes when it has."""

    def __init__(self) -> None:
        self.codes: dict[Any, bool] = {}  # code -> whether it had entries before

    def __enter__(self) -> DynamoTraces:
        self.sizes = copy.deepcopy(dict(need("torch._dynamo.pgo.get_code_state")()))
        return self

    def forget(self, fn: Callable[..., Any]) -> None:
        """All that is stored for the code of `fn` is to go."""
        self.codes[fn.__code__] = False

    def note(self) -> None:
        """To be called by the backend: remembers the code that Dynamo is compiling."""
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code.co_name == "_compile" and "code" in frame.f_locals:
                code = frame.f_locals["code"]
                entries = need("torch._C._dynamo.eval_frame._debug_get_cache_entry_list")(code)
                self.codes.setdefault(code, bool(entries))
                return
            frame = frame.f_back

    def __exit__(self, *exc: object) -> None:
        state = need("torch._dynamo.pgo.get_code_state")()
        state.clear()
        state.update(self.sizes)
        for code, others in self.codes.items():
            if others:
                self._invalidate(code)
            else:
                need("torch._C._dynamo.eval_frame.reset_code")(code)

    def _invalidate(self, code: Any) -> None:
        deleted = need("torch._dynamo.guards.DeletedGuardManagerWrapper")
        for entry in need("torch._C._dynamo.eval_frame._debug_get_cache_entry_list")(code):
            manager = entry.guard_manager
            if getattr(entry.backend, "compiler_name", "") == PLANNER and manager.extra_state is not None:
                manager.extra_state.invalidate(entry, deleted("aot_hooks.plan is done"))


PLANNER = "aot_hooks_planner"  # the name of the backend that only plans


def eval_frame_file() -> str:
    """The file whose frames are the outside of a compiled function."""
    return str(sys.modules["torch._dynamo.eval_frame"].__file__)
