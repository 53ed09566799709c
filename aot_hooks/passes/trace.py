"""A hook on one saved tensor: two flat, functional graphs.

      saved tensor x                         leaves of pack's result            a tensor like x
           |                                  (tensors, symbolic ints)                ^
           +--[compact]--pack--[flatten]-->  q f8[n, m], s f32[n, 1]  --[unflatten]--unpack--[expand, restride]

Both functions are retraced on the fake tensor that AOTAutograd holds for the value, so their Python control flow sees
the true shape, dtype and device. Leaves that are neither tensors nor symbolic (dtypes, numbers, None) and constant
tensors become constants of unpack. Dimensions of stride 0 are packed once, not expanded. The result has the memory
order of the saved tensor, whatever unpack returned. The contract is checked here, see `HookContractError`.

Source: retracing for each saved tensor is the idea of torch's `saved_tensors_hooks` inlining (pytorch/pytorch#150032).
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from cudagraph.placeholder import written_nodes

from ..contract import check_packed, check_unpacked, function_named, input_mutated
from ..errors import AotHooksError, HookContractError, HookTraceError
from ..graphs.layout import expanded_dimensions, restride
from ..graphs.nodes import is_view
from ..hook import Hook
from ..identity.canonical import canonical
from ..identity.records import note_trace
from ..identity.tensors import is_plain, tensor_digest
from ..torch_private import values as torch_values

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CROSSES = (torch.Tensor, *_SYMBOLIC)
_copies: weakref.WeakValueDictionary[tuple[str, tuple[int, ...]], torch.Tensor] = weakref.WeakValueDictionary()
_EAGERLY = "run the hook eagerly with Hook(..., eager=True)"
_READS_VALUE = (
    "reads a value of the tensor (`.item()`, `if tensor`, a size that depends on values); expected control flow on "
    f"shape, dtype, device and size alone. Use torch.where, or {_EAGERLY}"
)


@dataclass(frozen=True)
class TracedHook:
    """A hook's two graphs for one saved tensor."""

    pack: GraphModule  # from the tensor to a tuple of the leaves that cross to the backward
    unpack: GraphModule  # from these leaves to a tuple of one tensor
    identity: bool  # both return their argument, so the hook leaves the tensor as it is


def trace_hook(
    hook: Hook, value: torch.Tensor, where: str, *, decompositions: dict[Any, Any] | None, twice: bool = False
) -> TracedHook:
    """Trace `hook` on `value`, a strided fake tensor.

    Args:
        where: the saved tensor in words, for messages.
        decompositions: Inductor's table of decompositions, or None.
        twice: trace again and compare, to find hidden state. A trace may add guards on sizes (`x.numel() == 15`), and
            the next then has numbers in place of symbols; so the last two are compared.

    Raises:
        HookContractError, HookTraceError: with the hook, the saved tensor and the way out.
    """
    fake_mode = value.fake_mode  # type: ignore[attr-defined]
    at = f"hook '{hook.name}' on saved {where}"
    note_trace(hook, value, where, torch_values.hint)

    with torch_values.dropping_new_unbacked(fake_mode) as made_unbacked, torch_values.tracing_on_fakes(fake_mode):
        traced = _trace(hook, value, at, decompositions)
        _check(hook, traced, at, made_unbacked)
        if twice:
            before, traced = traced, _trace(hook, value, at, decompositions)
            if not _equal(before, traced):
                before, traced = traced, _trace(hook, value, at, decompositions)
                _check(hook, traced, at, made_unbacked)
            if not _equal(before, traced):
                raise HookContractError(
                    f"{at}: two traces of it differ, so it depends on hidden state (a counter, Python's random, the "
                    "time); expected pure functions of the tensor. Use torch's random functions, pass state as a "
                    f"tensor, or {_EAGERLY}"
                )
    return traced


def _check(hook: Hook, traced: TracedHook, at: str, made_unbacked: Callable[[], Any]) -> None:
    """Refuse a hook that reads values, holds what no graph can, or has sizes that depend on values."""
    for part, fn, gm in (("pack", hook.pack, traced.pack), ("unpack", hook.unpack, traced.unpack)):
        if torch_values.reads_values(gm):
            raise HookContractError(f"{at}: {function_named(part, fn)} {_READS_VALUE}")
        held = (getattr(gm, str(node.target)) for node in gm.graph.find_nodes(op="get_attr"))
        if others := [type(v).__name__ for v in held if not isinstance(v, torch.Tensor | GraphModule)]:
            raise HookTraceError(
                f"{at}: {function_named(part, fn)} calls an operator on a {others[0]} that it holds; "
                f"expected tensors and numbers, which a graph can hold. Use torch's own random state, or {_EAGERLY}"
            )
    if made_unbacked() or torch_values.makes_unbacked(traced.pack) or torch_values.makes_unbacked(traced.unpack):
        raise HookContractError(
            f"{at}: a size depends on the values (as `nonzero` or `x[mask]` makes); expected sizes that follow "
            f"from the saved tensor's shape. Pack into a fixed size, or {_EAGERLY}"
        )


def _equal(a: TracedHook, b: TracedHook) -> bool:
    return (canonical(a.pack), canonical(a.unpack)) == (canonical(b.pack), canonical(b.unpack))


def _trace(hook: Hook, value: torch.Tensor, at: str, decompositions: dict[Any, Any] | None) -> TracedHook:
    """The graphs of pack and unpack of `hook` for `value`, traced one after the other."""
    at_pack, at_unpack = (f"{at}: {function_named(n, fn)}" for n, fn in (("pack", hook.pack), ("unpack", hook.unpack)))
    # a fresh tensor with the same sizes: a hook that mutates its argument must not reach the graph's own value
    sample = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    sample = sample.conj() if value.is_conj() else sample
    expanded = expanded_dimensions(value)  # packed as one row
    # from `pack` to `unpack`: the leaves, the function that rebuilds the pytree, and what unpack must return. In a list
    # because make_fx returns the graph alone
    calls: list[tuple[list[Any], Any, tuple[torch.Size, torch.dtype, torch.device]]] = []

    def pack(x: torch.Tensor) -> list[Any]:
        rows = x
        for d in expanded:
            rows = rows.narrow(d, 0, 1)
        argument = rows.resolve_conj().resolve_neg()  # a hook sees numbers, not a promise to conjugate or negate them
        version = argument._version
        like = (argument.shape, argument.dtype, argument.device)
        packed = _call(hook.pack, argument, at_pack)
        if argument._version != version:
            raise input_mutated(at_pack)
        check_packed(packed, lambda: at_pack)
        own, rebuild = _flatten(packed)
        leaves = [*own, *(x.shape[d] for d in expanded)]
        calls.append((leaves, rebuild, like))
        return [a for a in leaves if isinstance(a, _CROSSES)]

    pack_graph = _functional(pack, (sample,), decompositions, at_pack)
    leaves, rebuild, like = calls[-1]
    crossing = _keep_constants(pack_graph, leaves)

    def unpack(*crossed: Any) -> list[torch.Tensor]:
        flat = list(leaves)
        for i, a in zip(crossing, crossed, strict=True):
            flat[i] = a
        sizes = [flat.pop() for _ in expanded][::-1]
        out = _call(hook.unpack, rebuild(flat), at_unpack)
        check_unpacked(out, *like, lambda: at_unpack, plain=True)
        if expanded:
            shape = list(out.shape)
            for d, size in zip(expanded, sizes, strict=True):
                shape[d] = size
            out = out.expand(shape)
        return [restride(out, value)]

    unpack_graph = _functional(unpack, tuple(leaves[i] for i in crossing), decompositions)
    _clean(unpack_graph)
    if decompositions is not None:
        _refuse_scans(pack_graph, at_pack)
        _refuse_scans(unpack_graph, at_unpack)
    for node in unpack_graph.graph.find_nodes(op="get_attr"):
        held = getattr(unpack_graph, str(node.target))  # a tensor, or the body of a `cond` or loop
        if isinstance(held, torch.Tensor) and torch_values.is_traced_value(held):
            raise HookContractError(
                f"{at_unpack} uses a tensor that pack did not return, or that is hidden in an object that is no "
                "pytree; return every tensor in tuples, lists or dicts, or register the class as a pytree by "
                "torch.utils._pytree.register_pytree_node"
            )
    return TracedHook(pack_graph, unpack_graph, _is_identity(pack_graph) and _is_identity(unpack_graph))


def _keep_constants(pack: GraphModule, leaves: list[Any]) -> list[int]:
    """Move constants from the outputs of `pack` into `leaves`; returns the positions of the leaves that cross."""
    output = pack.graph.output_node()
    crossing: dict[int, Node] = {}
    positions = [i for i, a in enumerate(leaves) if isinstance(a, _CROSSES)]
    for i, node in zip(positions, torch_values.pytree.tree_leaves(output.args[0]), strict=True):
        if isinstance(node, Node) and node.op != "get_attr":
            crossing[i] = node
        else:  # a tensor, or a number
            leaves[i] = getattr(pack, str(node.target)) if isinstance(node, Node) else node
    output.args = (tuple(crossing.values()),)
    _clean(pack)
    return list(crossing)


def _call(fn: Any, argument: Any, at: str) -> Any:
    """Call a function of a hook. Its errors become ours, with its line."""
    try:
        return fn(argument)
    except AotHooksError:
        raise
    except Exception as e:
        message = (str(e).strip() or type(e).__name__).splitlines()[0]
        if isinstance(e, torch_values.data_dependent_errors()):
            raise HookContractError(f"{at} {_READS_VALUE}. Torch said: {message}") from e
        raise HookTraceError(
            f"{at} raised {type(e).__name__}: {message} ({_line_in(fn, e)}); expected functions that can be "
            f"traced on this tensor. Mend it, exclude the tensor with a policy, or {_EAGERLY}"
        ) from e


def _line_in(fn: Any, e: BaseException) -> str:
    """The innermost line of the traceback in the hook's own file."""
    code = getattr(fn, "__code__", None) or getattr(getattr(fn, "forward", None), "__code__", None)
    file = getattr(code, "co_filename", None)
    lines = [line for frame, line in traceback.walk_tb(e.__traceback__) if frame.f_code.co_filename == file]
    return f"{file.rsplit('/', 1)[-1]}:{lines[-1]}" if file and lines else f"in {fn!r}"


def _flatten(packed: Any) -> tuple[list[Any], Any]:
    """The leaves of a pytree, with tensor subclasses taken apart, and a function that rebuilds the pytree."""
    tops, spec = torch_values.pytree.tree_flatten(packed)
    parts = [_flatten_subclass(a) for a in tops]
    leaves = [a for part, _ in parts for a in part]

    def rebuild(flat: list[Any]) -> Any:
        it = iter(flat)
        return torch_values.pytree.tree_unflatten([make([next(it) for _ in part]) for part, make in parts], spec)

    return leaves, rebuild


def _flatten_subclass(a: Any) -> tuple[list[Any], Any]:
    """The leaves of a tensor subclass, and a function that rebuilds it; any other value is its own leaf."""
    if not (isinstance(a, torch.Tensor) and torch_values.is_traceable_subclass(a)):
        return [a], lambda flat: flat[0]
    names, context = a.__tensor_flatten__()  # type: ignore[attr-defined]
    leaves, rebuild = _flatten([getattr(a, name) for name in names])
    cls, size, stride = type(a), a.shape, a.stride()

    def make(flat: list[Any]) -> Any:
        inner = dict(zip(names, rebuild(flat), strict=True))
        return cls.__tensor_unflatten__(inner, context, size, stride)  # type: ignore[attr-defined]

    return leaves, make


def _functional(
    fn: Any, args: tuple[Any, ...], decompositions: dict[Any, Any] | None, pure_at: str | None = None
) -> GraphModule:
    """`fn` as a functional graph. With `pure_at`, raises `HookContractError` at that place if `fn` writes to `args`."""
    with torch_values.python_dispatcher():
        gm = make_fx(fn, decomposition_table=decompositions)(*args)
        if pure_at is not None and _writes_to_inputs(gm):  # past autograd's versions: `x.data.add_(1)`
            raise input_mutated(pure_at)
        if any(getattr(torch_values.schema_of(n.target), "is_mutable", False) for n in gm.graph.nodes):
            # mutations of temporaries are removed in a second trace, below any tensor subclass
            again = torch.func.functionalize(Interpreter(gm).run, remove="mutations")
            gm = make_fx(again, decomposition_table=decompositions)(*args)
    return gm


def _writes_to_inputs(gm: GraphModule) -> bool:
    """Whether an operator writes to a placeholder, or to a view of one."""
    inputs = set(gm.graph.find_nodes(op="placeholder"))  # and nodes that share memory with one
    for node in gm.graph.nodes:
        if not inputs.isdisjoint(written_nodes(node)):
            return True
        if is_view(node) and node.args[0] in inputs:
            inputs.add(node)
    return False


def _clean(gm: GraphModule) -> None:
    """Drop `detach` and `alias`, which mean nothing here, and nodes without users; random operators in use stay."""
    aten = torch.ops.aten
    meaningless = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)
    for node in list(gm.graph.nodes):
        if node.target in meaningless and isinstance(node.args[0], Node):
            node.replace_all_uses_with(node.args[0])
    for node in gm.graph.find_nodes(op="get_attr"):
        # `torch.tensor(3.0)` is traced as a fake constant, which holds the real tensor
        constant = _copy_by_value(torch_values.real_constant(getattr(gm, str(node.target))))
        delattr(gm, str(node.target))  # a parameter's name takes no plain tensor
        setattr(gm, str(node.target), constant)
    for node in reversed(list(gm.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            gm.graph.erase_node(node)
    _give_numbers_to_bodies(gm)
    gm.graph.lint()
    gm.recompile()


_SCANS = ("scan", "map_impl")


def _refuse_scans(gm: GraphModule, at: str) -> None:
    """Raise for an operator that Inductor makes a `while_loop` of, in a trace that a graph of fixed sizes is not ready
    for (`DataDependentOutputException`, torch 2.11 to 2.15)."""
    for graph in (each.graph for each in gm.modules() if isinstance(each, GraphModule)):
        for node in graph.nodes:
            if isinstance(node.target, torch_values.HigherOrderOperator) and node.target.name() in _SCANS:
                raise HookTraceError(
                    f"{at} calls {node.target.name().removesuffix('_impl')}, which Inductor can't compile in a hook; "
                    "expected operators on whole tensors, torch.cond or while_loop. Or compile with "
                    "options={'inner': 'aten'}, or run the hook eagerly with Hook(..., eager=True)"
                )


def _give_numbers_to_bodies(gm: GraphModule) -> None:
    """Write numbers that `cond` and loops pass to their bodies into the bodies: Inductor passes tensors only."""
    for node in gm.graph.nodes:
        if not isinstance(node.target, torch_values.HigherOrderOperator):
            continue
        held = [getattr(gm, str(a.target)) if isinstance(a, Node) and a.op == "get_attr" else None for a in node.args]
        graphs = {i: body for i, body in enumerate(held) if isinstance(body, GraphModule)}
        after = max(graphs, default=len(held)) + 1
        operands = torch_values.pytree.tree_leaves(node.args[after:])
        for body in graphs.values():
            for placeholder, a in zip(body.graph.find_nodes(op="placeholder"), operands, strict=False):
                if isinstance(a, int | float):
                    placeholder.replace_all_uses_with(a)
                    body.graph.erase_node(placeholder)
            body.recompile()
        node.args = (*node.args[:after], *map(_without_numbers, node.args[after:]))


def _without_numbers(operands: Any) -> Any:
    if not isinstance(operands, tuple | list):
        return operands
    return type(operands)(each for each in operands if not isinstance(each, int | float))


def _copy_by_value(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` for a graph, which must not see later changes of `x`; one copy for all equal tensors."""
    if not is_plain(x) or torch_values.is_traced_value(x):
        return x
    with torch_values.without_modes():
        key = (tensor_digest(x), x.stride())
        copy = _copies.get(key)
        if copy is None:
            copy = _copies[key] = x.detach().clone()
    return copy


def _is_identity(gm: GraphModule) -> bool:
    first, *others = gm.graph.nodes
    leaves = torch_values.pytree.tree_leaves(gm.graph.output_node().args)
    return len(others) == 1 and first.op == "placeholder" and leaves == [first]
