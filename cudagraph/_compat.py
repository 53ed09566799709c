"""The only file of this package that touches `torch._*`.

Each shim names what it stands on, the torch versions it was read and run on, and what would delete it. A missing symbol
raises `UnsupportedTorchError` where it is needed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .errors import UnsupportedTorchError

TESTED = ("2.11.0", "2.13.0", "2.15.0")


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


@functools.cache
def need(path: str) -> Any:
    """The private symbol at `path`; raises `UnsupportedTorchError` naming it if this torch has none."""
    try:
        return _resolve(path)
    except (ImportError, AttributeError):
        raise UnsupportedTorchError(
            f"torch {torch.__version__} has no {path}, which cudagraph needs; tested with torch {', '.join(TESTED)}: "
            "install one of them, or report this version"
        ) from None


def has(path: str) -> bool:
    """Whether this torch has the private symbol at `path`."""
    try:
        _resolve(path)
    except (ImportError, AttributeError):
        return False
    return True


# --- graphs: what operators are, and what they do (2.11 to 2.15) ---


def is_operator(target: Any) -> bool:
    return isinstance(target, need("torch._ops.OpOverload"))


def is_higher_order(target: Any) -> bool:
    return isinstance(target, need("torch._ops.HigherOrderOperator"))


def written_arguments(target: Any) -> list[tuple[int, str]]:
    """(position, name) of each argument that an operator's schema says it writes to."""
    return [
        (i, argument.name)
        for i, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def returns_views(target: Any) -> bool:
    """Whether each result of an operator is, by its schema, a view of an argument that is not written to."""
    returned = target._schema.returns
    return bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)


def unsafe_by_torch(node: Node) -> bool:
    """Whether torch's own list says that the operator of `node` can't be captured: forbidden by name, tagged
    `cudagraph_unsafe`, writing through a boolean index, or giving sparse tensors."""
    return bool(need("torch._inductor.utils.is_cudagraph_unsafe_fx_node")(node))


def data_dependent_sizes(value: Any) -> set[Any]:
    """The symbols in the sizes of `value` that come from a tensor's values ("unbacked")."""
    return set(need("torch.fx.experimental.symbolic_shapes.free_unbacked_symbols")(value))


def storage_key(x: torch.Tensor) -> int | None:
    """Identity of the storage of `x`, also for fake tensors, as long as `x` lives; None if it has none (sparse)."""
    if x.layout is not torch.strided:
        return None
    return int(x.untyped_storage()._cdata)


# --- AOTAutograd (2.11 to 2.15) ---


def static_inputs_of_forward() -> tuple[int, ...]:
    """While AOTAutograd compiles a forward: its inputs that are parameters or buffers, which stay where they are."""
    context = need("torch._guards.TracingContext").try_get()
    if context is None or context.fw_metadata is None:
        return ()
    return tuple(context.fw_metadata.static_input_indices or ())


def min_cut_partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    partition = need("torch._functorch.partitioners.min_cut_rematerialization_partition")
    out: tuple[GraphModule, GraphModule] = partition(joint, inputs, **kwargs)
    return out


def compile_aten(
    gm: GraphModule,
    inputs: Sequence[Any],
    *,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    inference: Callable[..., Any],
    partition: Callable[..., Any],
) -> Callable[..., Any]:
    """AOTAutograd with a compiler for each kind of graph; mutations of inputs stay in inference graphs."""
    compiled: Callable[..., Any] = need("torch._dynamo.backends.common.aot_autograd")(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )(gm, inputs)
    return compiled


def set_boxed(gm: GraphModule) -> None:
    """Have `gm.forward` take one list, which it empties, so that what it was given can be freed early."""
    gm.graph.set_codegen(need("torch.fx.graph._BoxedCodeGen")())
    gm.recompile()
