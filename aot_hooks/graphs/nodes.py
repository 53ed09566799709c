"""Questions about one node of a graph: its storage, its views, its operator, the user's line; and the keys of its meta.

Inductor's scheduler reads two more keys, see torch_private/inductor_fusion.py.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node

from cudagraph.placeholder import results_of
from cudagraph.placeholder import source_line as line_outside_torch

from ..errors import PACKAGE
from ..torch_private import values as torch_values
from .layout import in_layout, laid_out

_T = TypeVar("_T")
_OWN_FRAME = re.compile(rf'File "{re.escape(PACKAGE)}[^"]*", line \d+, in .*\n\s*.*')

# keys of node.meta
FACTOR = "aot_hooks_factor"  # the backward multiplies by this value, see passes/multiples.py; no hook packs it
PACKED = "aot_hooks_packed"  # a hook made this value; an outer graph that saves it must not pack it again
MADE_EARLY = "aot_hooks_gradient"  # a gradient that the forward made, see passes/chunk.py
NO_VERSION_CHECK = "saved_tensor_with_no_vc_check"  # torch's own: save it without the check of autograd's versions
# keys of node.meta["custom"], which torch carries from the user's program to the joint graph
REGION = "aot_hooks"  # the key of the setting that the operator was called under
NAMES = "aot_hooks_names"  # the value's names, see settings/names.py


def is_tensor(value: Any) -> bool:
    """Whether `value` is a node that has one tensor."""
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)


def is_float(value: Any) -> bool:
    """Whether `value` is a node that has one tensor of real floating-point numbers."""
    return is_tensor(value) and bool(value.meta["val"].is_floating_point())


def numel(node: Node) -> float:
    """How many numbers the tensor of `node` has, by the hints of symbolic sizes; 0 if it has none."""
    return float(torch_values.hint(node.meta["val"].numel())) if is_tensor(node) else 0.0


def annotation(node: Node, key: str) -> Any:
    """`node.meta["custom"][key]`; None without it."""
    custom = node.meta.get("custom")
    return custom.get(key) if isinstance(custom, dict) else None


def storage_of(node: Node) -> Any:
    """Identity of the storage of a node's value, by its fake value; None if it is no tensor.

    The result of a higher-order operator has a storage of its own: torch caches the fake values of nested regions, so
    those of two calls are the same objects. An output of a nested region may share memory with another output, or with
    an operand of the region; then it has that one's storage.
    """
    root = node
    while is_view(root) and isinstance(source := root.args[0], Node):
        root = source
    value = root.meta.get("val")  # not the view's own, whose source an edit may have replaced
    if not isinstance(value, torch.Tensor):
        return None
    call = root.args[0] if root.target is operator.getitem else None
    if isinstance(call, Node) and isinstance(call.target, torch_values.HigherOrderOperator):
        return _storage_in_region(root)
    # a tensor without a storage (sparse) shares it with nobody
    return torch_values.storage_key(value) if value.layout is torch.strided else id(value)


def storages(nodes: Iterable[Any]) -> set[Any]:
    """The storages of the tensors among `nodes`; anything else there is skipped."""
    return {storage_of(n) for n in nodes if isinstance(n, Node)} - {None}


def input_storages(graph: torch.fx.Graph) -> set[Any]:
    return storages(graph.find_nodes(op="placeholder"))


def output_storages(graph: torch.fx.Graph) -> set[Any]:
    return storages(torch_values.pytree.tree_leaves(graph.output_node().args))


def lasting_storages(fw: GraphModule, num_fwd_outputs: int) -> set[Any]:
    """Storages that outlive the forward whatever it saves: those of its inputs and of the user's outputs."""
    return input_storages(fw.graph) | storages(results_of(fw.graph)[:num_fwd_outputs])


def donates(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int) -> bool:
    """Whether the backward may write over a saved tensor, one that is no input or output.

    torch then refuses a second backward (`retain_graph=True`).
    """
    others = lasting_storages(fw, num_fwd_outputs) | output_storages(bw.graph)
    return not storages(results_of(fw.graph)[num_fwd_outputs:]) <= others


def crosses_twice(fw: GraphModule, num_fwd_outputs: int) -> bool:
    """Whether something that a hook has packed shares its memory with another saved tensor.

    Then the backward must write over neither: Inductor takes each for free after its own last reader.
    """
    outputs = [node for node in results_of(fw.graph)[num_fwd_outputs:] if isinstance(node, Node)]
    count = Counter(map(storage_of, outputs))
    return any(node.meta.get(PACKED) and count[storage_of(node)] > 1 for node in outputs)


def calls_graphs(bw: GraphModule) -> bool:
    """Whether the backward has the body of a `cond`, a loop or a nested region.

    Then it must write over no saved tensor: Inductor (2.11 to 2.15) takes arguments of a body at the positions of the
    backward's donated ones for donated as well, and the body writes over what is read after it.
    """
    return any(isinstance(child, GraphModule) for child in bw.children())


def storage_bytes(value: torch.Tensor) -> int:
    """Bytes of the storage behind a fake tensor, by the hints of symbolic sizes."""
    if value.layout is not torch.strided:
        return tensor_bytes(value)
    return torch_values.hint(value.untyped_storage().nbytes())


def tensor_bytes(value: torch.Tensor) -> int:
    """Bytes of the elements of a fake tensor, by the hints of symbolic sizes."""
    return torch_values.hint(value.numel()) * value.element_size()


def _storage_in_region(node: Node) -> Any:
    """The storage of a result of a nested region: that of the operand that it shares memory with, or one of its own."""
    if (out := region_output(node)) is None:
        return node
    call: Any = node.args[0]
    key = storage_of(out)
    inputs = out.graph.find_nodes(op="placeholder")
    for inside, outside in zip(inputs, call.args[len(call.args) - len(inputs) :], strict=True):
        if isinstance(outside, Node) and storage_of(inside) == key:
            return storage_of(outside)
    return call, key


def region_body(call: Node) -> GraphModule | None:
    """The graph that `call` of `invoke_subgraph` runs; None for any other node."""
    if call.target is not torch.ops.higher_order.invoke_subgraph:
        return None
    body = call.args[0]
    name = str(body.target) if isinstance(body, Node) and body.op == "get_attr" else ""
    inner = getattr(call.graph.owning_module, name, None)
    return inner if isinstance(inner, GraphModule) else None


def region_output(node: Node) -> Node | None:
    """The node in the body of a nested compiled region whose value `node` is; None if unknown."""
    if node.target is not operator.getitem:
        return None
    call, index = node.args
    inner = region_body(call) if isinstance(call, Node) and isinstance(index, int) else None
    out = results_of(inner.graph)[index] if inner is not None else None  # type: ignore[index]
    return out if isinstance(out, Node) else None


def once_for_each_target(answer: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """`answer`, a function of what a node calls, with its answers for operators kept; these are few.

    `functools.cache` hashes an operator, for which torch runs Python code: 3% of the time of planning.
    """
    known: dict[int, tuple[Any, _T]] = {}  # with the target, so that its id stays its own

    def look_up(target: Any) -> _T:
        if (found := known.get(id(target))) is not None:
            return found[1]
        if not torch_values.is_operator(target):
            return answer(target)
        known[id(target)] = found = target, answer(target)
        return found[1]

    return look_up


def target_name(node: Node) -> str:
    """The name of what `node` calls: "aten.add.Tensor"."""
    return name_of(node.target)


def name_of(target: Any) -> str:
    """`str(target)`. Torch takes 9 us to make the name of an operator; a look-up takes 0.2 us."""
    return _name_of(target)


_name_of = once_for_each_target(str)


def has_tag(node: Node, tag: torch.Tag) -> bool:
    """Whether torch tags the operator of `node` with `tag`."""
    return is_tagged(node.target, tag)


def is_tagged(target: Any, tag: torch.Tag) -> bool:
    return tag in _tags_of(target)


@once_for_each_target
def _tags_of(target: Any) -> frozenset[torch.Tag]:
    return frozenset(getattr(target, "tags", ()))


def is_view(node: Node) -> bool:
    """Whether the result of `node` shares the storage of its first argument, or is one of several that do.

    `laid_out` and `in_layout` count as views: they copy only where a kernel gave a layout that torch did not predict.
    """
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        call = node.args[0]
        return isinstance(call, Node) and is_view(call)
    return returns_view(node.target)


@once_for_each_target
def returns_view(target: Any) -> bool:
    if target in (torch.ops.aten.detach.default, laid_out, in_layout):
        return True
    schema = torch_values.schema_of(target)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def view_source(node: Node) -> Node | None:
    """The node that `node` is a view of, else None. `_unsafe_view` is one, too, though its schema says nothing."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, Node):
        return None
    if node.target is operator.getitem:
        return view_source(source)
    # by name, because torch_private alone names private operators
    return source if is_view(node) or target_name(node) == "aten._unsafe_view.default" else None


# views that count from the start of the storage: of another storage they are other views
_OF_STORAGE = ("aten.as_strided.default", "aten._reshape_alias.default")


def seen_from(node: Node) -> dict[Node, tuple[Node, ...]]:
    """`node` and all tensors that it is a view of, the nearest first; each with the nodes that make `node` from it."""
    found: dict[Node, tuple[Node, ...]] = {node: ()}
    while (source := view_source(node)) is not None:
        call: Any = node.args[0]
        steps = (call, node) if node.target is operator.getitem else (node,)
        inputs = {n for step in steps for n in step.all_input_nodes} - {source, *steps}
        if any(target_name(step) in _OF_STORAGE for step in steps):
            break
        if any(isinstance(n.meta.get("val"), torch.Tensor) for n in inputs):
            break
        found[source] = (*steps, *found[node])
        node = source
    return found


def producer(node: Node) -> Node:
    """The node whose operator made the value, looking through views and tuples."""
    while (source := view_source(node)) is not None:
        node = source
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return node.args[0]
    return node


def argument_positions(user: Node, node: Node) -> list[int]:
    """The positions of the arguments of `user` that are, or hold, `node`; [] if a keyword does."""

    def holds(argument: Any) -> bool:
        found: list[Node] = []
        torch.fx.node.map_arg(argument, found.append)
        return node in found

    return [] if holds(user.kwargs) else [i for i, a in enumerate(user.args) if holds(a)]


def argument_called(name: str, node: Node) -> Any:
    """The argument of that name in the schema of the operator, or its default; None if there is none."""
    schema = torch_values.schema_of(node.target)
    for i, argument in enumerate(() if schema is None else schema.arguments):
        if argument.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def op_name(node: Node) -> str:
    """The operator as the program called it, whatever Inductor decomposed it to."""
    if node.op == "call_function":
        return str(node.meta.get("original_aten") or node.target)
    return "input" if node.op == "placeholder" else node.op


def source_line(node: Node) -> str:
    """The user's line that called the operator ("model.py:31: h = gelu(x)"); "" if unknown."""
    return _line_in(node.meta.get("stack_trace") or "")


def name_and_line(node: Node) -> str:
    """For messages: "'mm_3', model.py:31: h = up(x)"."""
    return f"'{node.name}', {line}" if (line := source_line(node)) else f"'{node.name}'"


def type_text(node: Node) -> str:
    """Dtype and sizes of a tensor: "bfloat16[8192, 14336]"."""
    value = node.meta["val"]
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


@functools.lru_cache(maxsize=4096)
def _line_in(stack_trace: str) -> str:
    return line_outside_torch(_OWN_FRAME.sub("", stack_trace))
