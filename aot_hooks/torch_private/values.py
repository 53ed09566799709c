"""The values of a trace: fake tensors and symbolic sizes, names of nodes, operators by name, modules being called."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cudagraph.torch_private import cuda
from cudagraph.torch_private.symbols import Protocols, Symbols

from .symbols import needing

SYMBOLS: Symbols = {
    "torch._is_functional_tensor": "telling fake tensors from real ones",
    "torch.nn.Module._call_impl": "telling modules that are being called",
    "torch._C._DisableAutocast": "tracing hooks without the caller's autocast",
    "torch._C._dispatch_get_all_op_names": "policies by operator",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "policies by operator",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "hooks that pack into tensor subclasses",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "telling a hook that reads values",
    "torch._dispatch.python.enable_python_dispatcher": "tracing hooks on symbolic sizes",
    "torch.utils._python_dispatch._disable_current_modes": "digests of constants",
    "torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing": "comparing sizes while tracing",
    "torch._guards.TracingContext": "tracing a hook for a key",
    "torch._subclasses.fake_tensor.FakeTensorMode": "tracing a hook for a key",
    "torch._ops.OpOverload": "policies by operator",
    "torch._ops.OpOverloadPacket": "policies by operator",
    "torch._ops.HigherOrderOperator": "hooks that hold higher-order ops",
    "torch.utils._pytree": "what pack may return",
    "torch._logging.trace_structured": "graphs in torch's structured trace",
    "torch._subclasses.fake_tensor.FakeTensor": "telling fake tensors from real ones",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": "telling a hook that reads values",
    "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode": "telling a hook that reads values",
    "torch.fx.experimental.symbolic_shapes.free_unbacked_symbols": "telling a hook that makes sizes of values",
    "torch.fx.experimental.symbolic_shapes.statically_known_true": "comparing sizes while tracing",
}
PROTOCOLS: Protocols = {
    "hooks that make sizes of values": {
        "torch.fx.experimental.symbolic_shapes.ShapeEnv": "pending_fresh_unbacked_symbols",
    },
    "rows with symbolic sizes": {
        "torch.fx.experimental.sym_node.SymNode": "expr hint has_hint",
    },
    "keys without names": {
        "torch.fx.graph.Graph": "_graph_namespace",
        "torch.fx.graph._Namespace": "_obj_to_name _rename_object _used_names associate_name_with_obj",
    },
    "telling who shares memory": {
        "torch.UntypedStorage": "_cdata",
    },
    "tracing a hook for a key": {
        "torch._guards.TracingContext": "try_get fake_mode",
        "torch._subclasses.fake_tensor.FakeTensor": "constant",
        "torch._subclasses.fake_tensor.FakeTensorMode": "allow_non_fake_inputs shape_env",
    },
}

need = needing(SYMBOLS)


# --- modules that are being called ------------------------------------------------------------------------------------


MODULE_CALL = need("torch.nn.Module._call_impl").__code__  # frames of this code are modules being called


def module_call_arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the module whose forward pre-hook is running; torch gives its global hooks no keywords."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not MODULE_CALL:
        frame = frame.f_back
    assert frame is not None, "not in a module's hook"
    return frame.f_locals["args"], frame.f_locals["kwargs"]


# --- tracing hooks ---------------------------------------------------------------------------------------------------


pytree = need("torch.utils._pytree")
FakeTensor = need("torch._subclasses.fake_tensor.FakeTensor")
HigherOrderOperator = need("torch._ops.HigherOrderOperator")


def is_traced_value(x: torch.Tensor) -> bool:
    """Whether `x` is a tracer's stand-in, not a tensor with data."""
    return isinstance(x, FakeTensor) or torch._is_functional_tensor(x) or type(x).__name__ == "FunctionalTensor"


def no_autocast() -> Any:
    return need("torch._C._DisableAutocast")()


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
    """Forgets unbacked sizes that are made inside; yields a function that returns whether there are any."""
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


@contextlib.contextmanager
def fake_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Iterator[torch.Tensor]:
    """A dense fake tensor of static sizes, in the fake mode of the current compilation."""
    context = need("torch._guards.TracingContext").try_get()
    mode = context.fake_mode if context is not None else None
    if mode is None:
        mode = need("torch._subclasses.fake_tensor.FakeTensorMode")(allow_non_fake_inputs=True)
    with without_modes():
        with mode:
            value = torch.empty(shape, dtype=dtype, device=device)
        yield value


def reads_values(gm: GraphModule) -> bool:
    """Whether `gm` makes a number out of a tensor (`.item()`)."""
    return bool(gm.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default))


def makes_unbacked(gm: GraphModule) -> bool:
    """Whether an operator of `gm` makes a size out of a tensor's values."""
    free = need("torch.fx.experimental.symbolic_shapes.free_unbacked_symbols")
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    inputs: set[Any] = set().union(*(free(n.meta.get("val")) for n in gm.graph.find_nodes(op="placeholder")))
    return any(free(n.meta["val"]) - inputs for n in nodes if n.meta.get("val") is not None)


def real_constant(x: Any) -> Any:
    """The tensor behind a fake constant; anything else as it is."""
    constant = getattr(x, "constant", None) if isinstance(x, FakeTensor) else None
    return x if constant is None else constant


without_modes = functools.partial(cuda.without_modes, need=need)


def python_dispatcher() -> Any:
    """Decompositions in Python, which symbolic sizes need."""
    return need("torch._dispatch.python.enable_python_dispatcher")()


def same_size(a: Any, b: Any, *, guard: bool = False) -> bool:
    """Whether two sizes are equal for certain; with `guard`, whether they are equal now, which the graph then requires.

    A trace in progress records nothing of the comparison.
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
    return cuda.identity(x.untyped_storage())


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """The errors of a fake tensor whose value is read (`.item()`, `if tensor`)."""
    fake = need("torch._subclasses.fake_tensor.DataDependentOutputException")
    symbolic = need("torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode")
    dynamic = need("torch._subclasses.fake_tensor.DynamicOutputShapeException")
    return (fake, symbolic, dynamic)


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


def trace_structured(name: str, text: Callable[[], str]) -> None:
    """Writes `text()` as artifact `name` to torch's structured trace, for tlparse, if that trace is on."""
    need("torch._logging.trace_structured")(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )


# --- names in graphs, and of sizes (2.11 to 2.15) --------------------------------------------------------------------


def rename_node(node: Node, name: str, target: Any) -> None:
    """Set name and target of `node` without the listeners that a Node's own setter calls."""
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
    """Inside, only the names of the nodes are in use; the graph's own table of names comes back untouched."""
    before = graph._graph_namespace
    graph._graph_namespace = type(before)()
    for node in graph.nodes:
        graph._graph_namespace._used_names.add(node.name)
        graph._graph_namespace.associate_name_with_obj(node.name, node)
    try:
        yield
    finally:
        graph._graph_namespace = before


class SizeNumbers:
    """Numbers for the symbols of sizes, by their first use in a graph's inputs; torch names them after the user's.

    A symbol that is no input's size by itself keeps torch's name. So do all symbols of a graph with tensor subclasses,
    whose inner sizes are not read here.
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
        """A size, or a number computed from sizes, with the symbols numbered; `str(value)` of anything else."""
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return str(value)
        return str(value.node.expr.xreplace(self.names))


# --- operators by name (2.11 to 2.15) ---------------------------------------------------------------------------------


def operator_names() -> list[str]:
    """All operators that are registered now, as "aten::add.Tensor"."""
    return list(need("torch._C._dispatch_get_all_op_names")())


def is_operator(op: Any) -> bool:
    """Whether `op` is `torch.ops.<space>.<name>`, with or without an overload."""
    return isinstance(op, _OPERATORS)


_OPERATORS = (need("torch._ops.OpOverload"), need("torch._ops.OpOverloadPacket"))


def is_composite(name: str) -> bool:
    """Whether operator `name` is always decomposed, so that autograd and AOTAutograd never see it."""
    return bool(need("torch._C._dispatch_has_kernel_for_dispatch_key")(name, "CompositeImplicitAutograd"))
