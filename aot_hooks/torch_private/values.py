"""The values of a trace: fake tensors and symbolic sizes, operators by name, modules being called.

Versions 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule

from cudagraph.torch_private import cuda
from cudagraph.torch_private.symbols import late

from .symbols import need

# --- modules that are being called ------------------------------------------------------------------------------------

MODULE_CALL = need("torch.nn.Module._call_impl").__code__  # frames of this code are modules being called


def module_call_arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the module whose forward pre-hook is running; torch gives its global hooks no keywords."""
    frame = next(frame for frame, _ in traceback.walk_stack(None) if frame.f_code is MODULE_CALL)
    return frame.f_locals["args"], frame.f_locals["kwargs"]


# --- tracing hooks ---------------------------------------------------------------------------------------------------

pytree = need("torch.utils._pytree")
FakeTensor = need("torch._subclasses.fake_tensor.FakeTensor")
HigherOrderOperator = need("torch._ops.HigherOrderOperator")
without_modes = cuda.without_modes
is_traceable_subclass: Callable[[Any], bool] = late("torch.utils._python_dispatch.is_traceable_wrapper_subclass")
# a context: decompositions in Python, which symbolic sizes need
python_dispatcher: Callable[[], Any] = late("torch._dispatch.python.enable_python_dispatcher")
no_autocast: Callable[[], Any] = late("torch._C._DisableAutocast")  # a context


def is_traced_value(x: torch.Tensor) -> bool:
    """Whether `x` is a tracer's stand-in, not a tensor with data."""
    return isinstance(x, FakeTensor) or torch._is_functional_tensor(x) or type(x).__name__ == "FunctionalTensor"


@contextlib.contextmanager
def tracing_on_fakes(fake_mode: Any) -> Iterator[None]:
    """Run hooks on the fake tensors of `fake_mode`: no autograd, no autocast, real constants allowed.

    `allow_non_fake_inputs` is switched because a hook may hold a constant (a codebook).
    """
    before = fake_mode.allow_non_fake_inputs
    fake_mode.allow_non_fake_inputs = True
    try:
        with torch.no_grad(), no_autocast(), fake_mode:
            yield
    finally:
        fake_mode.allow_non_fake_inputs = before


@contextlib.contextmanager
def dropping_new_unbacked(fake_mode: Any) -> Iterator[Callable[[], bool]]:
    """Drops the unbacked sizes that are made inside. Yields a function that returns whether there are any so far."""
    pending = getattr(fake_mode.shape_env, "pending_fresh_unbacked_symbols", [])
    start = len(pending)
    try:
        yield lambda: len(pending) > start
    finally:
        del pending[start:]


@contextlib.contextmanager
def fake_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, strides: Sequence[int] | None = None
) -> Iterator[torch.Tensor]:
    """A fake tensor of static sizes, dense without `strides`, in the fake mode of the current compilation."""
    mode = getattr(need("torch._guards.TracingContext").try_get(), "fake_mode", None)
    if mode is None:
        mode = need("torch._subclasses.fake_tensor.FakeTensorMode")(allow_non_fake_inputs=True)
    with without_modes():
        with mode:
            value = torch.empty(shape, dtype=dtype, device=device)
            value = value if strides is None else torch.empty_strided(shape, strides, dtype=dtype, device=device)
        yield value


def pytree_specs(gm: GraphModule) -> str:
    """How a graph that `torch.export` made takes and returns trees of values; its nodes don't show it."""
    return f"{vars(gm).get('_in_spec')} {vars(gm).get('_out_spec')}"


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


def same_size(a: Any, b: Any, *, guard: bool = False) -> bool:
    """Whether two sizes are equal for certain; with `guard`, whether they are equal now, which the graph then requires.

    A trace in progress records nothing of the comparison.
    """
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    with need("torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing")():
        equal = a == b
        known = need("torch.fx.experimental.symbolic_shapes.statically_known_true")(equal)
        return known or (guard and bool(equal))


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
    """The example value of a symbolic size, without a guard; 0 for one that has none (unbacked) and no `examples`."""
    if isinstance(size, int):
        return size
    try:
        if size.node.has_hint():
            return int(size.node.hint or 0)
    except Exception:  # an unbacked size has no hint, and how it says so differs between 2.11 and 2.15
        pass
    if not (known := _examples.get()):
        return 0
    found = size.node.expr.xreplace({s: known[s.name] for s in size.node.expr.free_symbols if s.name in known})
    return int(found) if isinstance(found, int) or found.is_number else 0


_examples: ContextVar[Mapping[str, int]] = ContextVar("values of the symbols of sizes", default=MappingProxyType({}))


@contextlib.contextmanager
def examples(of_symbols: Mapping[str, int]) -> Iterator[None]:
    """Meanwhile `hint` takes these values for symbols, by name, where torch has none: for sizes of data."""
    token = _examples.set(of_symbols)
    try:
        yield
    finally:
        _examples.reset(token)


def expression(size: Any) -> str:
    return str(size.node.expr) if isinstance(size, torch.SymInt) else str(size)


def symbols_of(size: Any) -> frozenset[Any]:
    """The symbols in a size; none if it is an int."""
    return frozenset(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else frozenset()


def difference(a: Any, b: Any) -> int | None:
    """`a - b` for two sizes, if it is the same number for all values of their symbols."""
    left, right = (size.node.expr if isinstance(size, torch.SymInt) else size for size in (a, b))
    found = left - right
    return int(found) if isinstance(found, int) or found.is_Integer else None


def computed_from(size: Any, known: Callable[[str], Any], combine: Callable[[str, Any, Any], Any]) -> Any:
    """A symbolic size made from known ones by sums and products; None if it can't be.

    Args:
        known: what stands for an expression, None if nothing does.
        combine: returns the "add" or "mul" of two such things, or of one and a number.
    """

    def made(expr: Any) -> Any:
        if expr.is_Integer:
            return int(expr)
        if (found := known(str(expr))) is not None or not (expr.is_Add or expr.is_Mul):
            return found
        total: Any = None
        for each in sorted(expr.args, key=lambda arg: bool(arg.is_Integer)):  # a number comes last
            if (part := made(each)) is None:
                return None
            total = part if total is None else combine("add" if expr.is_Add else "mul", total, part)
        return total

    return made(size.node.expr)


def upper_bound(size: torch.SymInt) -> int | None:
    """The largest number that a symbolic size can be in any run of the graph, without a guard; None without a bound."""
    bound = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(bound) if bound.is_Integer else None


def bounds_of_data(size: Any) -> dict[str, int]:
    """The symbols in a size that have no example value (unbacked), each with its upper bound, 0 without one."""
    if not isinstance(size, torch.SymInt):
        return {}
    known = {s.name: size.node.shape_env.bound_sympy(s).upper for s in cuda.data_dependent_sizes(size)}
    return {name: int(bound) if bound.is_Integer and bound < _NO_BOUND else 0 for name, bound in known.items()}


_NO_BOUND = 1 << 48  # torch gives a size of data that it knows nothing of the largest int, or one less


def trace_structured(name: str, text: Callable[[], str]) -> None:
    """Writes `text()` as artifact `name` to torch's structured trace, for tlparse, if that trace is on."""
    need("torch._logging.trace_structured")(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text
    )


# --- names of sizes ---------------------------------------------------------------------------------------------------


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
        for size in (s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else (v,))):
            for symbol in cuda.symbol_of(size):
                if symbol not in self.names and re.fullmatch(r"s\d+", symbol.name):
                    self.names[symbol] = symbol.func(
                        f"size{len(self.names)}", integer=True, positive=symbol.is_positive
                    )

    def text(self, value: Any) -> str:
        """A size, or a number computed from sizes, with the symbols numbered; `str(value)` of anything else."""
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return str(value)
        return str(value.node.expr.xreplace(self.names))


# --- operators by name ------------------------------------------------------------------------------------------------

operator_names: Callable[[], list[str]] = late("torch._C._dispatch_get_all_op_names")  # as "aten::add.Tensor"
_OPERATORS = (need("torch._ops.OpOverload"), need("torch._ops.OpOverloadPacket"))


def is_operator(op: Any) -> bool:
    """Whether `op` is `torch.ops.<space>.<name>`, with or without an overload."""
    return isinstance(op, _OPERATORS)


def schema_of(op: Any) -> Any:
    """The schema of an operator: its arguments and results, and which of them share memory; None of anything else."""
    return getattr(op, "_schema", None)


def is_composite(name: str) -> bool:
    """Whether operator `name` is always decomposed, so that autograd and AOTAutograd never see it."""
    return bool(need("torch._C._dispatch_has_kernel_for_dispatch_key")(name, "CompositeImplicitAutograd"))
