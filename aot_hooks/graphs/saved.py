"""The values that cross from the forward to the backward graph, read off the two graphs.

      forward outputs:  user outputs | saved tensors | opaque objects | saved symints
                                          |  by position, never by name        |
      backward inputs:  saved symints | saved tensors | opaque objects | tangents | ...

A `Boundary` has the nodes on both sides of each saved value, and its `SavedTensor`, which policies and reports see. No
guard is added. Source: the calling convention of `torch._functorch.partitioners`, the same in torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cudagraph.placeholder import results_of

from ..errors import UnsupportedGraphError
from ..torch_private import values as torch_values
from .backward_reads import BackwardReads, FoundRead, Read, tests_of
from .nodes import NAMES, annotation, op_name, producer, source_line, storage_bytes, storage_of, storages, view_source
from .read_tables import Test
from .value_ranges import value_range


class Dim(int):
    """A size that is symbolic in the graph: an int (its example value) that prints as its expression."""

    expression: str

    def __new__(cls, value: int, expression: str) -> Dim:
        self = super().__new__(cls, value)
        self.expression = expression
        return self

    def __getnewargs__(self) -> tuple[int, str]:  # type: ignore[override]  # for pickle; int's own lacks the expression
        return int(self), self.expression

    def __repr__(self) -> str:
        return self.expression


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that autograd saves for backward.

    Attributes:
        name: its name in the forward graph.
        op: the operator that made it, before decompositions, looking through views ("aten.gelu.default"), or "input".
        shape: sizes; a symbolic one is a `Dim`.
        nbytes: bytes of its storage, which is what saving it keeps alive; views of one storage have the same.
        storage: number of its storage within the graph; equal for views of one storage.
        module_path: where in the model it was made ("layers.0.mlp"), "" if unknown.
        source_line: the user's line that made it ("model.py:31: h = gelu(x)"), "" if unknown.
        backward_ops: the operators of the backward that read it, before decompositions and looking through views.
        is_input, is_output, is_static: its storage is that of a graph input, a user's output, a parameter or buffer.
        backward_asks: the yes-or-no tests, such as `x <= 0`, by which alone the backward uses the numbers of its
            storage. () if the backward reads the shape only, None if it may need the numbers themselves.
        value_range: (smallest, largest) number that it can hold, if the forward proves it and all are whole.
        checkpoint_names: the names that `aot_hooks.checkpoint_name` gave it, or the tensor that it is a view of.
        backward_reads: reads of the backward that are not smooth and need the exact number; () in eager code, where
            they are known only after the policy has chosen.
    """

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    storage: int
    module_path: str
    source_line: str
    backward_ops: tuple[str, ...]
    is_input: bool
    is_output: bool
    is_static: bool
    backward_asks: tuple[Test, ...] | None = None
    value_range: tuple[int, int] | None = None
    checkpoint_names: tuple[str, ...] = field(default_factory=tuple)  # a factory: rows of eager tensors read it late
    backward_reads: tuple[Read, ...] = ()

    def describe(self) -> str:
        """One line for messages: name, dtype, shape and the user's line."""
        dtype = str(self.dtype).removeprefix("torch.")
        where = f" ({self.source_line})" if self.source_line else ""
        return f"'{self.name}' {dtype}[{', '.join(map(str, self.shape))}]{where}"


@dataclass(frozen=True)
class Kind:
    """What equal layers have in common for a saved tensor: all of its row but sizes and the numbers of the layers."""

    op: str
    module_path: str  # "layers.*.mlp"
    source_line: str
    dtype: torch.dtype
    dim: int
    backward_ops: tuple[str, ...]

    @staticmethod
    def of(saved: SavedTensor) -> Kind:
        path = ".".join("*" if part.isdigit() else part for part in saved.module_path.split("."))
        return Kind(saved.op, path, saved.source_line, saved.dtype, len(saved.shape), saved.backward_ops)


@dataclass(eq=False)
class SavedValue:
    """A saved tensor: its forward node, its backward placeholder, its row, and its reads that are not smooth."""

    fw_node: Node
    bw_node: Node
    row: SavedTensor
    reads: tuple[FoundRead, ...] = ()

    @property
    def value(self) -> torch.Tensor:
        val: torch.Tensor = self.fw_node.meta["val"]
        return val


@dataclass(frozen=True, eq=False)
class Boundary:
    """All that crosses. A value comes with its forward node and its backward placeholder."""

    user_outputs: list[Any]  # the forward's outputs that the user gets
    tensors: list[SavedValue]
    opaque: list[tuple[Any, Node]]
    symints: list[tuple[Node, Node]]
    kept_storages: set[Any]  # of the forward's inputs and of the user's outputs, which are alive without hooks too
    reads: BackwardReads


def boundary(
    fw: GraphModule,
    bw: GraphModule,
    num_fwd_outputs: int,
    static_inputs: Iterable[int] = (),
    roots: Mapping[str, str] = MappingProxyType({}),
) -> Boundary:
    """Read the boundary of `fw` and `bw`; `roots` are modules by Dynamo's names, see `modules.roots`.

    Raises `UnsupportedGraphError` if the graphs don't follow AOTAutograd's calling convention.
    """
    user = list(results_of(fw.graph)[:num_fwd_outputs])
    crossing = crossing_pairs(fw, bw, num_fwd_outputs)
    symints = [(node, slot) for node, slot in crossing if is_size(node)]
    pairs = [(node, slot) for node, slot in crossing if not is_size(node)]
    inputs = fw.graph.find_nodes(op="placeholder")
    static = set(static_inputs)
    input_storages = storages(inputs)
    static_storages = storages(n for i, n in enumerate(inputs) if i in static)
    output_storages = storages(user)
    numbers: dict[Any, int] = {}
    tensors, opaque = [], []
    reads = BackwardReads(fw, bw, [*symints, *pairs])
    for fw_node, bw_node in pairs:
        value = fw_node.meta.get("val") if isinstance(fw_node, Node) else None
        if not isinstance(value, torch.Tensor):
            opaque.append((fw_node, bw_node))
            continue
        other = bw_node.meta.get("val")
        if not isinstance(other, torch.Tensor) or other.dtype != value.dtype or other.dim() != value.dim():
            raise UnsupportedGraphError(
                f"saved tensor '{fw_node.name}' ({value.dtype}, {value.dim()}-d) meets backward input "
                f"'{bw_node.name}' ({other!r}); expected the same tensor at the same position"
            )
        key = storage_of(fw_node)
        found = tuple(reads.of(bw_node)) if value.dtype.is_floating_point else ()
        row = replace(
            row_of(fw_node, bw_node, numbers.setdefault(key, len(numbers)), roots),
            is_input=key in input_storages,
            is_output=key in output_storages,
            is_static=key in static_storages,
            backward_asks=tests_of(bw_node),
            value_range=value_range(fw_node),
            backward_reads=tuple(dict.fromkeys(f.read for f in found)),
        )
        tensors.append(SavedValue(fw_node, bw_node, row, found))
    _share_tests(tensors)
    return Boundary(user, tensors, opaque, symints, input_storages | output_storages, reads)


def row_of(fw_node: Node, bw_node: Node, storage: int, roots: Mapping[str, str]) -> SavedTensor:
    """The row of an intermediate of the forward that crosses to the backward's input `bw_node`.

    `storage`: its number. How the backward reads it is left open.
    """
    value = fw_node.meta["val"]
    return SavedTensor(
        name=fw_node.name,
        op=op_name(producer(fw_node)),
        shape=sizes_of(value),
        dtype=value.dtype,
        device=value.device,
        nbytes=storage_bytes(value),
        storage=storage,
        module_path=_first_text(lambda n: _module_path(n, roots), fw_node, bw_node) or roots.get("", ""),
        source_line=_first_text(source_line, fw_node, bw_node),
        backward_ops=tuple(dict.fromkeys(map(op_name, _readers(bw_node)))),
        is_input=False,
        is_output=False,
        is_static=False,
        checkpoint_names=_names(fw_node),
    )


def rows_of(pairs: Iterable[tuple[Node, Node]], roots: Mapping[str, str]) -> list[SavedTensor]:
    """The rows of intermediates, each with its input of the backward. Their storages are numbered from 0."""
    numbers: dict[Any, int] = {}
    return [row_of(n, slot, numbers.setdefault(storage_of(n), len(numbers)), roots) for n, slot in pairs]


def is_size(value: Any) -> bool:
    """Whether `value`, an output of the forward, is the node of a size: torch passes these before tensors."""
    val = value.meta.get("val") if isinstance(value, Node) else None
    return isinstance(val, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def crossing_pairs(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int) -> list[tuple[Any, Node]]:
    """Each value that `fw` saves, with the input of `bw` that it becomes, in the order of the inputs: sizes first.

    Raises `UnsupportedGraphError` if `bw` has fewer inputs.
    """
    saved = results_of(fw.graph)[num_fwd_outputs:]
    slots = bw.graph.find_nodes(op="placeholder")
    if len(slots) < len(saved):
        raise UnsupportedGraphError(
            f"the forward saves {len(saved)} values but the backward takes {len(slots)} inputs; "
            "expected one backward input for each"
        )
    return list(zip(sorted(saved, key=lambda value: not is_size(value)), slots, strict=False))


def crossing_nodes(fw: GraphModule, bw: GraphModule, num_fwd_outputs: int) -> list[tuple[Node, Node]]:
    """`crossing_pairs` without constants, such as numbers and None."""
    return [(n, slot) for n, slot in crossing_pairs(fw, bw, num_fwd_outputs) if isinstance(n, Node)]


def _share_tests(tensors: list[SavedValue]) -> None:
    """Give all views of one storage the union of their `backward_asks`: they are packed once, for the readers of all.

    None if the numbers of one of them are needed, or if a view has another dtype.
    """
    groups: dict[int, list[SavedValue]] = defaultdict(list)
    for value in tensors:
        groups[value.row.storage].append(value)
    for views in groups.values():
        if len(views) > 1:
            union: set[Test] | None = set()
            for view in views:
                asks = view.row.backward_asks if view.row.dtype == views[0].row.dtype else None
                union = None if union is None or asks is None else union.union(asks)
            for view in views:
                view.row = replace(view.row, backward_asks=None if union is None else tuple(sorted(union)))


def sizes_of(value: torch.Tensor) -> tuple[int, ...]:
    """The sizes of `value`; symbolic ones as `Dim`s."""
    sizes: tuple[Any, ...] = value.shape
    return tuple(s if isinstance(s, int) else Dim(torch_values.hint(s), torch_values.expression(s)) for s in sizes)


def _readers(node: Node) -> list[Node]:
    """The readers of `node` and of its views; a view without readers counts as one."""
    found: list[Node] = []
    for user in node.users:
        inside = _readers(user) if view_source(user) is not None else []
        found += [n for n in inside if n.op != "output"] or [user]
    return found


def _names(node: Node) -> tuple[str, ...]:
    """The names that the user gave `node`, or a tensor that it is a view of."""
    names: dict[str, None] = {}
    value: Node | None = node
    while value is not None:
        names.update(dict.fromkeys(annotation(value, NAMES) or ()))
        value = view_source(value)
    return tuple(names)


def _first_text(read: Callable[[Node], str], fw_node: Node, bw_node: Node) -> str:
    """The text that `read` finds in the operator of a saved value, or in its own node; for an input, in its readers."""
    maker = producer(fw_node)
    for node in (maker, fw_node) if maker.op != "placeholder" or fw_node is not maker else bw_node.users:
        if found := read(node):
            return found
    return ""


def place_of(node: Node, roots: Mapping[str, str] = MappingProxyType({})) -> tuple[str, str]:
    """Where `node` was made: the module's path and the user's line, each "" if unknown; `roots` as in `boundary`."""
    line = source_line(node)
    return _module_path(node, roots) or (roots.get("", "") if line else ""), line


def module_stack(node: Node) -> list[str]:
    """Dynamo's paths of the modules that `node` was made in, outermost first."""
    return [path for path, _ in _stack(node).values()]


def module_calls(node: Node, roots: Mapping[str, str]) -> list[tuple[str, str]]:
    """The modules that `node` was made in, outermost first: the path of each, and the number of its call.

    Dynamo's keys end in "@1" where a module is called for the second time; the first call's number is "".
    """
    found = _stack(node)
    first = next(iter(found.values()), ("", None))[0]
    known = tuple(roots.items())
    return [(_relative(first, path, known), key.partition("@")[2]) for key, (path, _) in found.items()]


def _stack(node: Node) -> Mapping[str, Any]:
    return node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}


def _module_path(node: Node, roots: Mapping[str, str]) -> str:
    """The module's path as the user writes it: `L['self']._modules['layers']._modules['0']` -> `layers.0`.

    The path is relative to the outermost module that runs: the one in `roots`, or else Dynamo's own.
    """
    stack = module_stack(node)
    return _relative(stack[0], stack[-1], tuple(roots.items())) if stack else ""


@functools.lru_cache(maxsize=4096)
def _relative(outermost: str, raw: str, roots: tuple[tuple[str, str], ...]) -> str:
    """Dynamo's path `raw` of a module as the user writes it, below the module of `roots`, or below `outermost`."""
    outermost, raw = _without_getattr(outermost), _without_getattr(raw)
    root = re.match(r"^[LG]\['[^']*'\]", raw)
    base = dict(roots).get(root[0], "") if root is not None else ""
    start = root.end() if root is not None else 0
    if not roots and outermost and raw.startswith(outermost):
        start = len(outermost)
    path = re.sub(r"(?:\._modules)?\[\'?([^\'\]]*)\'?\]", r".\1", raw[start:])
    # torch.compile(model) is a module around the model
    return ".".join(name for name in f"{base}.{path}".split(".") if name not in ("", "_orig_mod"))


def _without_getattr(raw: str) -> str:
    """`getattr(G['model'].layers, '0')`, which `torch.func.functional_call` leads to, as `G['model'].layers.0`."""
    simpler = re.sub(r"getattr\(([^()]*), '([^']*)'\)", r"\1.\2", raw)
    return raw if simpler == raw else _without_getattr(simpler)
