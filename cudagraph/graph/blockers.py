"""Finds the operators of a graph that can't be captured.

    node, device --reason_against--> None, or why this operator can't be in a CUDA graph --blocker_of--> Blocker

A replay runs no host code. So an operator can't be captured if it computes on the host, reads a number there, waits for
the device to know a size, or runs on another device. Views, arithmetic on sizes and operators on meta tensors launch
nothing and can be anywhere (`is_free`). If an operator gives an input other memory or another shape (`rebinds`),
nothing of its graph is captured: the input's new memory would belong to the pool.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..placeholder import nearest_first, source_line, trace_of, written_nodes
from ..torch_private import cuda as torch_cuda

CPU = torch.device("cpu")

# Higher-order operators whose branch is chosen on the host.
_CONTROL_FLOW = {"cond", "while_loop", "while_loop_stack_output", "switch"}

# Operators that read a result on the host, for example to raise an error, or use a library that can't be captured.
HOST_READS = set(
    "aten::_linalg_check_errors aten::_linalg_eigh aten::_linalg_svd aten::linalg_eig aten::linalg_lstsq aten::equal "
    "aten::is_nonzero aten::_local_scalar_dense aten::_pin_memory aten::record_stream".split()
)

# Namespaces of operators by which processes talk to each other.
COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")

COPIES = {"aten::_to_copy", "aten::copy_", "aten::copy", "prims::device_put"}

# Reads of sizes, without their overloads.
_SIZES = ("aten.sym_size", "aten.sym_stride", "aten.sym_numel", "aten.sym_storage_offset")

# Checks of sizes, which are part of the edge keys of recordings.
_SIZE_CHECKS = {"aten::_assert_scalar", "aten::sym_constrain_range", "aten::sym_constrain_range_for_size"}

# Operators that change the memory or the shape of a tensor object without the tag `inplace_view`.
_REBIND_WITHOUT_TAG = set(
    "aten::set_data aten::_resize_output_ aten::resize_as_sparse_ inductor::resize_storage_bytes_".split()
)

_host_operators: set[Any] = set()

# Causes of blockers.
REBINDS_INPUT = "rebinds an input"
WRITES_TO_CALLER = "writes to memory of the caller"


@dataclass(frozen=True)
class Blocker:
    """An operator that keeps a graph from being captured whole.

    Attributes:
        reason: why, as the end of a sentence about the operator, such as "runs on the CPU".
        op: the operator, as torch writes it; "" if the reason is no operator.
        node: its name in the graph; "" if the reason is no operator.
        stack_trace: the user's stack where it was called; None if unknown.
        graph: the name of its graph; "" if the blocker is part of that graph's `Analysis`.
        cause: REBINDS_INPUT or WRITES_TO_CALLER, for these two reasons; "" for all others.
    """

    reason: str
    op: str
    node: str
    stack_trace: str | None = None
    graph: str = ""
    cause: str = ""

    @property
    def source_line(self) -> str:
        """The user's line, as "model.py:31: code"; "" if unknown."""
        return source_line(self.stack_trace)

    def __str__(self) -> str:
        where = f" ({self.source_line})" if self.source_line else ""
        return f"{self.op} {self.reason}{where}".strip()


def register_host_operator(op: Any) -> None:
    """Declare that the custom operator `op` can be captured although it takes or returns CPU tensors.

    It must read and write them only by copies in stream order, never on the host. They must be pinned memory that does
    not move as long as a recording of it lives. `op` is an overload, such as `torch.ops.mine.offload.default`.
    """
    _host_operators.add(op)


def is_host_operator(node: Any) -> bool:
    """Whether `node`, a node or an operator, was declared by `register_host_operator`."""
    return (node.target if isinstance(node, Node) else node) in _host_operators


def tensors_of(*nodes: Node) -> list[torch.Tensor]:
    """The tensors in the values of `nodes`."""
    return tensors_in([value_of(node) for node in nodes])


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value of an operator: in a tensor, or lists and tuples of values."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def value_of(node: Node) -> Any:
    """The value of `node` while compiling: a fake tensor, a number, or a list of them; None if unknown."""
    return node.meta["val"] if "val" in node.meta else attribute_of(node)


def attribute_of(node: Node) -> Any:
    """The tensor or subgraph that a `get_attr` node reads; None for other nodes."""
    if node.op != "get_attr":
        return None
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name, None)
    return found


def capture_device(gm: GraphModule, device_type: str) -> torch.device | None:
    """The device of type `device_type` that most operators of `gm` compute on; None if there is none.

    An operator without a result there, such as `.item()` or `.cpu()`, counts for the device of its inputs.
    """
    count: Counter[torch.device] = Counter()
    for node in gm.graph.nodes:
        if not is_free(node):
            written, read = (
                {t.device for t in tensors_of(*nodes) if t.device.type == device_type}
                for nodes in ([node], node.all_input_nodes)
            )
            count.update(written or read)
    return count.most_common(1)[0][0] if count else None


def blocker_of(node: Node, reason: str, cause: str = "") -> Blocker:
    """The blocker for `node`, with the user's stack of it, or of the nearest operator that it was computed from."""
    sources = nearest_first([node], lambda n: reversed(n.all_input_nodes))
    trace = next(filter(None, map(trace_of, sources)), None)
    return Blocker(reason, str(node.target), node.name, trace, cause=cause)


def has_collectives(nodes: Iterable[Node]) -> bool:
    """Whether an operator of `nodes` sends something to other processes."""
    return any(torch_cuda.is_operator(node.target) and node.target.namespace in COLLECTIVES for node in nodes)  # type: ignore[union-attr]


def rebinds(node: Node) -> Node | None:
    """The input or constant to which the operator of `node` gives other memory or another shape; None if there is none.

    A tensor that the graph made itself may be rebound: its tensor object exists only during the capture.
    """
    if not _has_tag(node, torch.Tag.inplace_view) and name_of(node.target) not in _REBIND_WITHOUT_TAG:
        return None
    source = source_of(node.all_input_nodes[0])
    return source if source.op in ("placeholder", "get_attr") else None


def source_of(node: Node) -> Node:
    """The node that `node` is a view of, through views of views; itself if it is no view."""
    while node.op == "call_function" and node.all_input_nodes and _is_view_or_size(node):
        node = node.all_input_nodes[0]
    return node


def is_free(node: Node) -> bool:
    """Whether `node` launches nothing: a view, an item, work with sizes, or an operator on meta tensors alone."""
    return _is_view_or_size(node) or _is_on_meta(node)


def _is_on_meta(node: Node) -> bool:
    """Whether the operator of `node` reads, makes and writes meta tensors only, which have no memory."""
    devices = {t.device.type for t in tensors_of(node, *node.all_input_nodes)}
    made_on: Any = node.kwargs.get("device")
    if value_of(node) is None and made_on is not None:  # Inductor's own operators for meta outputs have no fake value
        devices.add(torch.device(made_on).type)
    return torch_cuda.is_operator(node.target) and devices == {"meta"}


def _is_view_or_size(node: Node) -> bool:
    """Whether `node` is a view, an item of a tuple, arithmetic on sizes or a check of it."""
    target = node.target
    if node.op != "call_function" or target is operator.getitem:
        return True
    if torch_cuda.is_operator(target):
        return torch_cuda.returns_views(target) or name_of(target) in _SIZE_CHECKS or str(target).startswith(_SIZES)
    return not torch_cuda.is_higher_order(target) and not tensors_of(node)


def reason_against(node: Node, device: torch.device) -> str | None:
    """Why the operator of `node` can't be captured on `device`; None if it can, or if it is free."""
    if is_free(node):
        return None
    return _by_layout(node) or _by_operator(node, device) or _by_sizes(node) or _by_device(node, device)


def _by_layout(node: Node) -> str | None:
    tensors = tensors_of(node, *node.all_input_nodes)
    # An mkldnn tensor is a constant that a library packed; it is no input and never changes.
    layouts = {str(t.layout) for t in tensors if t.layout is not torch.strided and not t.is_mkldnn}
    return f"works on a tensor of layout {min(layouts)}" if layouts else None


def _by_operator(node: Node, device: torch.device) -> str | None:
    if torch_cuda.is_higher_order(node.target):
        if str(node.target) in _CONTROL_FLOW:
            return "chooses on the host what runs"
        arguments: list[Any] = [*node.args, *node.kwargs.values()]  # the operators that it calls are among these
        for called in filter(torch_cuda.is_operator, arguments):
            if torch.Tag.cudagraph_unsafe in called.tags:
                return f"calls {called}, which is tagged cudagraph_unsafe"
        subgraphs = (g for g in map(attribute_of, node.all_input_nodes) if isinstance(g, GraphModule))
        for inner in (inner for subgraph in subgraphs for inner in subgraph.graph.nodes):
            if reason := reason_against(inner, device):
                return f"holds {inner.target}, which {reason}"
    elif _has_tag(node, torch.Tag.cudagraph_unsafe):
        return "is tagged cudagraph_unsafe"
    elif name_of(node.target) in HOST_READS or _has_tag(node, torch.Tag.data_dependent_output):
        return "waits for the device and reads its result on the host"
    if torch_cuda.unsafe_by_torch(node):
        return "is an operator that torch does not capture (it reads or allocates on the host)"
    return None


def _by_sizes(node: Node) -> str | None:
    for value in map(value_of, (node, *node.all_input_nodes)):
        is_symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
        symbols = set().union(*map(torch_cuda.data_dependent_sizes, [value] if is_symbolic else tensors_in(value)))
        if symbols:
            return f"has a size that depends on the values of a tensor ({', '.join(sorted(map(str, symbols)))})"
    return None


def _by_device(node: Node, device: torch.device) -> str | None:
    inputs, outputs = tensors_of(*node.all_input_nodes), tensors_of(node)
    if not inputs and not outputs and not torch_cuda.is_higher_order(node.target):
        return "acts on the host only"
    sources, results = _devices(inputs), _devices(outputs)
    others = (sources | results) - {device}
    if not others or (others == {CPU} and is_host_operator(node)):
        return None
    if device not in sources | results:
        return f"runs on {_listed(others)}"
    if name_of(node.target) in COPIES:
        goes_to = {t.device for t in tensors_of(*written_nodes(node))} or results
        return f"copies from {_listed(sources - goes_to)} to {_listed(goes_to)}"
    if results == {device} and others == {CPU} and all(t.ndim == 0 for t in inputs if t.device == CPU):
        return "reads a number from the CPU"
    return f"works on tensors of {_listed(others | {device})}"


def _devices(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """Without meta tensors: they have no memory, and nothing is computed with them."""
    return {t.device for t in tensors if t.device.type != "meta"}


def _listed(devices: set[torch.device]) -> str:
    return " and ".join("the CPU" if d == CPU else str(d) for d in sorted(devices, key=str))


def name_of(target: Any) -> str:
    """The name of an operator without its overload, "aten::add"; "" for other targets."""
    return str(target.name()).split(".")[0] if torch_cuda.is_operator(target) else ""


def _has_tag(node: Node, tag: torch.Tag) -> bool:
    target: Any = node.target
    return torch_cuda.is_operator(target) and tag in target.tags
