"""A hook on one saved tensor: two flat, functional graphs.

      saved tensor x                         leaves of pack's result            a tensor like x
           |                                  (tensors, symbolic ints)                ^
           +--[compact]--pack--[flatten]-->  q f8[n, m], s f32[n, 1]  --[unflatten]--unpack--[expand, restride]

`trace_hook(hook, value, ...)` retraces both functions on the fake tensor that AOTAutograd holds for the value, so their
Python control flow sees the true shape, dtype and device. What is neither a tensor nor symbolic (dtypes, numbers, None,
constant tensors) is burned into unpack. Dimensions of stride 0 are packed once, not expanded. Strides of the saved
tensor come back whatever unpack made.

The contract is checked here: see `HookContractError`. Source: the idea of retracing for each saved tensor is that of
torch's `saved_tensors_hooks` inlining (pytorch/pytorch#150032); the form is our own.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ..contract import check_packed, check_unpacked, function_named, input_mutated
from ..errors import AotHooksError, HookContractError, HookTraceError
from ..hook import Hook
from ..identity import is_plain, note_trace, tensor_digest
from ..torch_private import values as torch_values

__all__ = ["TracedHook", "canonical", "has_gaps", "restride", "trace_hook"]


@dataclass(frozen=True)
class TracedHook:
    """A hook's two graphs for one saved tensor.

    `pack` maps the tensor to a tuple of the leaves that cross to the backward; `unpack` maps those leaves to a tuple of
    one tensor. `identity` says that both give back what they were given: nothing to do.
    """

    pack: GraphModule
    unpack: GraphModule
    identity: bool


def trace_hook(
    hook: Hook, value: torch.Tensor, where: str, *, decompositions: dict[Any, Any] | None, twice: bool = False
) -> TracedHook:
    """Trace `hook` on `value`, a strided fake tensor.

    Args:
        where: the saved tensor in words, for messages.
        decompositions: what ops are decomposed to (Inductor's table), or None to leave them.
        twice: trace again and compare, to find hidden state.

    Raises:
        HookContractError, HookTraceError: with the hook, the saved tensor and the way out.
    """
    fake_mode = value.fake_mode  # type: ignore[attr-defined]
    at = f"hook '{hook.name}' on saved {where}"
    note_trace(hook, value, where, torch_values.hint)
    with torch_values.no_new_unbacked(fake_mode) as made_unbacked, torch_values.tracing_on_fakes(fake_mode):
        traced = _trace(hook, value, at, decompositions, fake_mode)
        for part, fn, gm in (("pack", hook.pack, traced.pack), ("unpack", hook.unpack, traced.unpack)):
            if torch_values.reads_values(gm):
                raise HookContractError(_reads_value(f"{at}: {function_named(part, fn)}"))
            if (held := _other_than_tensors(gm)) is not None:
                raise HookTraceError(
                    f"{at}: {function_named(part, fn)} calls an operator on a {held} that it holds; expected tensors "
                    "and numbers, which a graph can hold. Use torch's own random state, or run the hook eagerly with "
                    "Hook(..., eager=True)"
                )
        if made_unbacked() or torch_values.makes_unbacked(traced.pack) or torch_values.makes_unbacked(traced.unpack):
            raise HookContractError(
                f"{at}: a size depends on the values (as `nonzero` or `x[mask]` makes); expected sizes that follow "
                "from the saved tensor's shape. Pack into a fixed size, or run the hook eagerly with "
                "Hook(..., eager=True)"
            )
        if twice:
            again = _trace(hook, value, at, decompositions, fake_mode)
            if (canonical(again.pack), canonical(again.unpack)) != (canonical(traced.pack), canonical(traced.unpack)):
                raise HookContractError(
                    f"{at}: two traces of it differ, so it depends on hidden state (a counter, Python's random, the "
                    "time); expected pure functions of the tensor. Use torch's random functions, pass state as a "
                    "tensor, or run the hook eagerly with Hook(..., eager=True)"
                )
    return traced


def canonical(gm: GraphModule) -> str:
    """The graph as text without names: equal for graphs that compute the same in the same order.

    A symbolic size counts as its expression: by which of several ways torch reads it off differs from trace to trace.
    """
    position: dict[Node, str] = {}
    lines: list[str] = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if _is_symbolic(value):
            position[node] = torch_values.expression(value)
        else:
            position[node] = f"%{len(lines)}"
        if _is_symbolic(value) and node.op == "call_function":
            continue
        target = "" if node.op in ("placeholder", "output", "get_attr") else str(node.target)
        if node.op == "get_attr":
            target = _constant_text(getattr(gm, str(node.target)))
        args, kwargs = torch_values.pytree.tree_map_only(Node, position.__getitem__, (node.args, node.kwargs))
        lines.append(f"{position[node]} = {node.op} {target} {args} {kwargs}")
    return "\n".join(lines)


def _other_than_tensors(gm: GraphModule) -> str | None:
    """The class of an attribute of the graph that is neither a tensor nor a graph; None if there is none."""
    held = (getattr(gm, str(node.target)) for node in gm.graph.find_nodes(op="get_attr"))
    return next((type(value).__name__ for value in held if not isinstance(value, torch.Tensor | GraphModule)), None)


def _constant_text(value: Any) -> str:
    return tensor_digest(value) if isinstance(value, torch.Tensor) else repr(value)


def _trace(
    hook: Hook, value: torch.Tensor, at: str, decompositions: dict[Any, Any] | None, fake_mode: Any
) -> TracedHook:
    # a fresh tensor with the same sizes: a hook that mutates its argument must not reach the graph's own value
    sample = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    sample = sample.conj() if value.is_conj() else sample
    expanded = [
        d
        for d in range(value.dim())
        if torch_values.same_size(value.stride(d), 0) and not torch_values.same_size(value.shape[d], 1)
    ]
    # Inductor's loops take value by value, and what rounds anyway needs no memory for gaps
    gaps = decompositions is None and not hook.lossy and has_gaps(sample)
    result: dict[str, Any] = {}

    def compact(x: torch.Tensor) -> torch.Tensor:
        for d in expanded:
            x = x.narrow(d, 0, 1)  # a dimension of stride 0 holds one row
        # a hook sees numbers, not a promise to conjugate or negate them
        return x.resolve_conj().resolve_neg()

    def pack(x: torch.Tensor) -> list[Any]:
        given = compact(x)
        version = given._version
        result["like"] = (given.shape, given.dtype, given.device)
        packed = _call(hook.pack, given, at_pack)
        if given._version != version:
            raise input_mutated(at_pack)
        check_packed(packed, lambda: at_pack)
        leaves, result["rebuild"] = _flatten(packed)
        leaves += [x.shape[d] for d in expanded]
        if gaps:
            leaves += x.stride()
        crossing = [a for a in leaves if isinstance(a, torch.Tensor) or _is_symbolic(a)]
        result["leaves"] = leaves
        return crossing

    at_pack, at_unpack = (f"{at}: {function_named(n, fn)}" for n, fn in (("pack", hook.pack), ("unpack", hook.unpack)))
    pack_gm = _functional(pack, (sample,), decompositions, at_pack)
    crossing_nodes = list(torch_values.pytree.tree_leaves(pack_gm.graph.output_node().args[0]))
    leaves = list(result["leaves"])
    slots: list[int] = []  # positions in `leaves` of what crosses
    kept_nodes = []
    at_leaf = [i for i, a in enumerate(leaves) if isinstance(a, torch.Tensor) or _is_symbolic(a)]
    for i, node in zip(at_leaf, crossing_nodes, strict=True):
        if not isinstance(node, Node):
            leaves[i] = node  # tracing found a number
        elif node.op == "get_attr":
            leaves[i] = getattr(pack_gm, str(node.target))  # a constant needs no room between the graphs
        else:
            slots.append(i)
            kept_nodes.append(node)
    pack_gm.graph.output_node().args = (tuple(kept_nodes),)
    _clean(pack_gm)

    def unpack(*crossed: Any) -> list[torch.Tensor]:
        full = list(leaves)
        for i, a in zip(slots, crossed, strict=True):
            full[i] = a
        stride = [full.pop() for _ in range(value.dim())][::-1] if gaps else None
        sizes = [full.pop() for _ in expanded][::-1]
        packed = result["rebuild"](full)
        out = _call(hook.unpack, packed, at_unpack)
        shape, dtype, device = result["like"]
        check_unpacked(out, shape, dtype, device, lambda: at_unpack, plain=True)
        if expanded:
            full_shape = list(out.shape)
            for d, size in zip(expanded, sizes, strict=True):
                full_shape[d] = size
            out = out.expand(full_shape)
        return [restride(out, value, stride)]

    samples = tuple(leaves[i] for i in slots)
    unpack_gm = _functional(unpack, samples, decompositions)
    _clean(unpack_gm)
    for node in unpack_gm.graph.find_nodes(op="get_attr"):
        if torch_values.is_traced_value(getattr(unpack_gm, str(node.target))):
            raise HookContractError(
                f"{at_unpack} uses a tensor that pack did not return, or that is hidden in an object that is no "
                "pytree; return every tensor in tuples, lists or dicts, or register the class as a pytree by "
                "torch.utils._pytree.register_pytree_node"
            )
    identity = _is_identity(pack_gm) and _is_identity(unpack_gm)
    return TracedHook(pack_gm, unpack_gm, identity)


def _call(fn: Any, argument: Any, at: str) -> Any:
    try:
        return fn(argument)
    except AotHooksError:
        raise
    except torch_values.data_dependent_errors() as e:
        raise HookContractError(f"{_reads_value(at)}. Torch said: {_first_line(e)}") from e
    except Exception as e:
        raise HookTraceError(
            f"{at} raised {type(e).__name__}: {_first_line(e)} ({_line_in(fn, e)}); expected functions that can be "
            "traced on this tensor. Mend it, exclude the tensor with a policy, or run the hook eagerly with "
            "Hook(..., eager=True)"
        ) from e


def _reads_value(at: str) -> str:
    return (
        f"{at} reads a value of the tensor (`.item()`, `if tensor`, a size that depends on values); expected control "
        "flow on shape, dtype, device and size alone. Use torch.where, or run the hook eagerly with "
        "Hook(..., eager=True)"
    )


def _first_line(e: BaseException) -> str:
    return (str(e).strip() or type(e).__name__).splitlines()[0]


def _line_in(fn: Any, e: BaseException) -> str:
    """The innermost line of the traceback that stands in the hook's own file."""
    code = getattr(fn, "__code__", None) or getattr(getattr(fn, "forward", None), "__code__", None)
    file, tb, line = getattr(code, "co_filename", None), e.__traceback__, 0
    while tb is not None:
        if tb.tb_frame.f_code.co_filename == file:
            line = tb.tb_lineno
        tb = tb.tb_next
    return f"{file.rsplit('/', 1)[-1]}:{line}" if file and line else f"in {fn!r}"


def _flatten(packed: Any) -> tuple[list[Any], Any]:
    """Leaves of a pytree, tensor subclasses taken apart, and a function that puts them together."""
    tops, spec = torch_values.pytree.tree_flatten(packed)
    parts = [_flatten_subclass(a) for a in tops]
    leaves = [a for part, _ in parts for a in part]

    def rebuild(flat: list[Any]) -> Any:
        it = iter(flat)
        return torch_values.pytree.tree_unflatten([make([next(it) for _ in part]) for part, make in parts], spec)

    return leaves, rebuild


def _flatten_subclass(a: Any) -> tuple[list[Any], Any]:
    if not (isinstance(a, torch.Tensor) and torch_values.is_traceable_subclass(a)):
        return [a], lambda flat: flat[0]
    names, context = a.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = [_flatten_subclass(getattr(a, name)) for name in names]
    cls, size, stride = type(a), a.shape, a.stride()

    def make(flat: list[Any]) -> Any:
        it = iter(flat)
        inner = {n: build([next(it) for _ in part]) for n, (part, build) in zip(names, parts, strict=True)}
        return cls.__tensor_unflatten__(inner, context, size, stride)  # type: ignore[attr-defined]

    return [x for part, _ in parts for x in part], make


def _functional(
    fn: Any, args: tuple[Any, ...], decompositions: dict[Any, Any] | None, pure_at: str | None = None
) -> GraphModule:
    """`fn` as a functional graph. With `pure_at`, raises `HookContractError` at that place if `fn` writes to `args`."""
    with torch_values.python_dispatcher():
        gm = make_fx(fn, decomposition_table=decompositions)(*args)
        if pure_at is not None and _writes_to_inputs(gm):  # past autograd's versions: `x.data.add_(1)`
            raise input_mutated(pure_at)
        if any(_mutates(n) for n in gm.graph.nodes):
            # what mutates its own temporaries is made functional in a second trace, below any tensor subclass
            again = torch.func.functionalize(Interpreter(gm).run, remove="mutations")
            gm = make_fx(again, decomposition_table=decompositions)(*args)
    return gm


def _writes_to_inputs(gm: GraphModule) -> bool:
    """Whether a placeholder, or a view of one, is written to."""
    memory: dict[Node, bool] = {}  # node -> whether it shares the memory of a placeholder
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        memory[node] = node.op == "placeholder"
        if node.op != "call_function" or schema is None:
            continue
        for i, argument in enumerate(schema.arguments):
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            held = [n for n in torch_values.pytree.tree_leaves(given) if isinstance(n, Node) and memory[n]]
            if argument.alias_info is not None and held:
                if argument.alias_info.is_write:
                    return True
                memory[node] = True
    return False


def _mutates(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh_copy.default)


def _clean(gm: GraphModule) -> None:
    """Drop what has no meaning here (detach, alias) and what nobody uses; random ops that are used stay."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in _ALIASES and isinstance(node.args[0], Node):
            node.replace_all_uses_with(node.args[0])
    for node in gm.graph.find_nodes(op="get_attr"):
        # a number that was written into a tensor was traced as a fake constant that knows it
        constant = _copy_by_value(torch_values.real_constant(getattr(gm, str(node.target))))
        delattr(gm, str(node.target))  # a parameter's name takes no plain tensor
        setattr(gm, str(node.target), constant)
    for node in reversed(list(gm.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()


def _copy_by_value(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` for a graph to keep, one for all that are equal: the graph must not see what becomes of `x`."""
    if not is_plain(x) or torch_values.is_traced_value(x):
        return x
    with torch_values.without_modes():
        key = (tensor_digest(x), x.stride())
        copy = _copies.get(key)
        if copy is None:
            copy = _copies[key] = x.detach().clone()
    return copy


_copies: weakref.WeakValueDictionary[tuple[str, tuple[int, ...]], torch.Tensor] = weakref.WeakValueDictionary()


def _is_identity(gm: GraphModule) -> bool:
    nodes = list(gm.graph.nodes)
    return (
        len(nodes) == 2
        and nodes[0].op == "placeholder"
        and torch_values.pytree.tree_leaves(nodes[1].args) == [nodes[0]]
    )


def _is_symbolic(a: Any) -> bool:
    return isinstance(a, torch.SymInt | torch.SymFloat | torch.SymBool)


def restride(out: torch.Tensor, like: torch.Tensor, gaps: Sequence[Any] | None) -> torch.Tensor:
    """`out` with the memory order of `like`, which the backward's views were built on; with `gaps`, the strides of
    `like`, which has some, also with gaps.

    A kernel of ATen may take a row by itself or all rows at once, by the gaps between them, and round otherwise.
    """
    if all(torch_values.same_size(a, b) for a, b in zip(out.stride(), like.stride(), strict=True)):
        return out
    if gaps is not None:
        return _with_gaps(out, like, gaps)
    dims = _dimensions(like)
    if not dims or torch_values.same_size(like.numel(), 0):
        return out
    order = sorted(range(like.dim()), key=lambda d: (-torch_values.hint(like.stride(d)), d))
    back = [order.index(d) for d in range(like.dim())]
    if order == list(range(like.dim())):
        return out.contiguous()
    return out.permute(order).contiguous().permute(back)


def has_gaps(like: torch.Tensor) -> bool:
    """Whether memory between the values of `like` is not its own; False where they overlap."""
    dense, reached = True, 1
    expected: Any = 1
    for d in sorted(_dimensions(like), key=lambda d: (torch_values.hint(like.stride(d)), -d)):
        if torch_values.hint(like.stride(d)) < reached:
            return False
        reached += (torch_values.hint(like.shape[d]) - 1) * torch_values.hint(like.stride(d))
        dense = dense and torch_values.same_size(like.stride(d), expected)
        expected = expected * like.shape[d]
    return not dense and not torch_values.same_size(like.numel(), 0)


def _dimensions(like: torch.Tensor) -> list[int]:
    """The dimensions by which a stride says where a value lies."""
    return [
        d
        for d in range(like.dim())
        if not torch_values.same_size(like.stride(d), 0) and not torch_values.same_size(like.shape[d], 1)
    ]


def _with_gaps(out: torch.Tensor, like: torch.Tensor, stride: Sequence[Any]) -> torch.Tensor:
    """`out` with `stride`, that of `like`, in memory of its own; what stands in the gaps nobody reads."""
    rows = out
    span: Any = 1
    for d in range(like.dim()):
        if torch_values.same_size(like.stride(d), 0):
            rows = rows.narrow(d, 0, 1)
    for d in _dimensions(like):
        span = span + (out.shape[d] - 1) * stride[d]
    memory = torch.as_strided_scatter(out.new_empty((span,)), rows, rows.shape, stride, 0)
    return memory.as_strided(out.shape, stride, 0)
