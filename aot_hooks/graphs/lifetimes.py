"""What a fusing compiler writes to memory, in which kernel, and how long it lives there.

      position        0    1    2    3   ...          alive[i]: bytes of intermediates alive while node i runs
      v1              |---------|                     a storage lives from its first node to its last reader
      v2 (saved)           |---------------------     saved as it is: to the end
      v3 (packed)          |----|.................    packed: to its last reader, then its packed bytes to the end

A fusing compiler writes a value to memory if it is an output, or if an operator that is not pointwise makes or reads
it. A value between two pointwise operators stays in registers. Inputs count nothing.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from cudagraph.placeholder import nearest_first

from ..torch_private import aot
from ..torch_private import values as torch_values
from .layout import in_layout, laid_out
from .nodes import (
    has_tag,
    input_storages,
    is_view,
    name_of,
    once_for_each_target,
    output_storages,
    returns_view,
    storage_bytes,
    storage_of,
    storages,
    target_name,
    tensor_bytes,
)

SPLIT = "aot_hooks_split"  # in the `meta` of nodes that are not in the kernel of those before them
_MOST_JOINED = 8  # max_complex_pointwise_cat_inputs
_MOST_READ = 4  # torch._inductor.config.realize_reads_threshold
_LONG_ROW = 1024  # torch._inductor.config.padding_stride_threshold
_FAR = 8  # products between a product and the sum that it is added to: more than a layer's gradients have
_INTO_LARGER = ("aten.slice_scatter.default", "aten.select_scatter.default", "aten.constant_pad_nd.default")
CONSTANTS = ("aten.full.default", "aten.scalar_tensor.default", "prims.iota.default")
# Inductor computes what these look up in their own kernel, as much as is looked up: float32 logits, for the loss
_LOOKUPS = ("aten.gather.default", "aten.index.Tensor", "aten.embedding.default")
# Inductor writes the first argument of these, if it is a constant, into the memory of the result
_INTO_COPY = (
    "aten.index_put.default",
    "aten._unsafe_index_put.default",
    "aten._unsafe_masked_index_put_accumulate.default",
    "aten.scatter.src",
    "aten.scatter.value",
    "aten.scatter_add.default",
    "aten.scatter_reduce.two",
)
_EXCHANGES = "_c10d_functional."  # of ranks
# Inductor calls `all_reduce_` if nothing else reads the argument, and waits for the argument itself
_IN_PLACE = ("_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default")
# operators of library/loops, which Inductor fuses like pointwise ones on NVIDIA GPUs
_LOOPS = ("aot_hooks.to_float8", "aot_hooks.from_float8", "aot_hooks.to_int8", "aot_hooks.from_int8")


def fuses(node: Node) -> bool:
    """Whether a compiler fuses `node` with its neighbours: pointwise operators, views and some concatenations."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node)
    return _fuses_always(node.target) or _is_pointwise_cat(node)


@once_for_each_target
def _fuses_always(target: Any) -> bool:
    """Whether `fuses` holds for an operator, whatever it reads."""
    return (
        _is_pointwise(target)
        or target in (laid_out, in_layout)
        or returns_view(target)
        or name_of(target) in _INTO_LARGER
    )


@once_for_each_target
def _is_pointwise(target: Any) -> bool:
    tagged = torch.Tag.pointwise in getattr(target, "tags", ())
    return tagged or str(target) == "prims.convert_element_type.default"  # has no tag


def _shifts(node: Node) -> bool:
    """Whether `node` is pointwise but reads elsewhere than it writes: it puts tensors into a larger one."""
    return target_name(node) in _INTO_LARGER or _is_pointwise_cat(node)


def _is_pointwise_cat(node: Node) -> bool:
    """Whether `node` is a concatenation that Inductor computes element by element, as in a rotary embedding.

    It does so on CUDA, for few tensors, if all of them are computed for `node` alone, element by element and without a
    reduction; or if one of them is, and all that reads `node` is pointwise.
    """
    if node.target is not torch.ops.aten.cat.default or not on_cuda([node]):
        return False
    parts = node.all_input_nodes
    if not 2 <= len(parts) <= _MOST_JOINED:
        return False
    computed = [_is_pointwise(n.target) and len(n.users) == 1 for n in parts]
    if any(computed) and all(map(_reads_pointwise, node.users)):
        return True
    fused = nearest_first([node], lambda n: n.all_input_nodes if n is node or fuses(n) else ())
    return all(computed) and not any(map(reduces, fused))


def _reads_pointwise(reader: Node) -> bool:
    """Whether Inductor counts `reader`, or the readers of a view, as pointwise where it lowers a concatenation."""
    if is_view(reader):
        return all(map(_reads_pointwise, reader.users))
    joins = reader.target in (torch.ops.aten.cat.default, torch.ops.aten.constant_pad_nd.default)
    return joins or has_tag(reader, torch.Tag.pointwise)


def reduces(node: Node) -> bool:
    return has_tag(node, torch.Tag.reduction) or _finds_scales(node)


def _finds_scales(node: Node) -> bool:
    """Whether `node` finds the scales of rows for a hook. Inductor fuses it with other kernels that read these rows."""
    return node.op == "call_function" and _is_amax(node.target)


@once_for_each_target
def _is_amax(target: Any) -> bool:
    return name_of(target).startswith("aot_hooks.amax_")


def _pads_rows(node: Node) -> bool:
    """Whether Inductor makes rows of the result longer, so that each begins at a multiple of 128 bytes."""
    value = node.meta["val"]
    if not (fuses(node) or reduces(node) or is_loop(node)) or value.device.type != "cuda":
        return False
    align = max(1, 128 // value.element_size())
    return any(isinstance(n, int) and n > _LONG_ROW and n % align for n in value.stride())


def is_loop(node: Node) -> bool:
    return node.op == "call_function" and _loops(node.target)


@once_for_each_target
def _loops(target: Any) -> bool:
    return name_of(target).startswith(_LOOPS)


def alive_bytes(gm: GraphModule, packed: Mapping[Node, int]) -> dict[Node, int]:
    """Bytes alive while each node of the forward runs; `packed`: packed bytes of the nodes that will be packed."""
    nodes = list(gm.graph.nodes)
    outputs = output_storages(gm.graph)
    written = written_storages(nodes) | outputs
    counted = written - input_storages(gm.graph)
    last = last_readers(nodes, written)
    alive = alive_along(nodes, counted, to_end=outputs - storages(packed), last_reader=last, packed=packed)
    return dict(zip(nodes, alive, strict=True))


class Begin(NamedTuple):
    """Where the life of a storage begins."""

    position: int
    nbytes: int
    node: Node  # the first one that has the storage


def alive_along(
    nodes: Sequence[Node],
    counted: Collection[Any],
    *,
    to_end: Collection[Any],
    last_reader: Mapping[Node, int],
    nbytes: Callable[[Node], int] = lambda node: storage_bytes(node.meta["val"]),
    packed: Mapping[Node, int] = MappingProxyType({}),
    kernels: Kernels | None = None,
    key_of: Callable[[Node], Any] = storage_of,
) -> list[int]:
    """The bytes of the `counted` storages that are alive at each of `nodes`.

    A storage has the `nbytes` of its first node. It lives to the position of its `last_reader`, or to the end if it is
    in `to_end`. From its last reader on, a node in `packed` counts the bytes given there. With `kernels` a storage
    lives from its kernel on, and a kernel may write over one tensor that it reads last.
    """
    first, last = lifetimes(
        nodes, counted, to_end=to_end, last_reader=last_reader, nbytes=nbytes, kernels=kernels, key_of=key_of
    )
    reused = {} if kernels is None else kernels.reuses(first, last)
    for key, taken in (reused | _sums_in_place(nodes, first, last)).items():
        last[taken] = first[key].position - 1
    change = [0] * (len(nodes) + 2)
    for key, begin in first.items():
        change[begin.position] += begin.nbytes
        change[last[key] + 1] -= begin.nbytes
    for node, count in packed.items():
        change[last.get(storage_of(node), 0)] += count
    return list(itertools.accumulate(change))[: len(nodes)]


def _sums_in_place(nodes: Sequence[Node], first: Mapping[Any, Begin], last: Mapping[Any, int]) -> dict[Any, Any]:
    """Storages of sums of chunks that are written over the sum before, see passes/chunk_sums.py: each with that."""
    found = {}
    for node in nodes:
        if target_name(node).startswith("aot_hooks.add_product.") and (key := storage_of(node)) in first:
            before = storage_of(node.all_input_nodes[0])
            if before in first and first[before].node.op == "call_function" and last[before] == first[key].position:
                found[key] = before
    return found


def lifetimes(
    nodes: Sequence[Node],
    counted: Collection[Any],
    *,
    to_end: Collection[Any],
    last_reader: Mapping[Node, int],
    nbytes: Callable[[Node], int],
    kernels: Kernels | None,
    key_of: Callable[[Node], Any] = storage_of,
) -> tuple[dict[Any, Begin], dict[Any, int]]:
    """By storage, where its life begins, and the position of its last reader. For the arguments see `alive_along`.

    All results of an operator are there from where it runs.
    """
    first: dict[Any, Begin] = {}
    last: dict[Any, int] = {}
    position = {node: i for i, node in enumerate(nodes)} if kernels is None else kernels.at
    for i, node in enumerate(nodes):
        if (key := key_of(node)) is not None and key in counted:
            if key not in first:
                made: Any = node.args[0] if node.target is operator.getitem else node
                first[key] = Begin(position[made], nbytes(node), node)
            last[key] = len(nodes) if key in to_end else max(last.get(key, i), last_reader[node])
    return first, last


def last_readers(
    nodes: Sequence[Node],
    written: Collection[Any],
    kernels: Kernels | None = None,
    key_of: Callable[[Node], Any] = storage_of,
) -> dict[Node, int]:
    """For each node the position of the last kernel that reads it.

    `written`: the storages that kernels write to memory. A reader's value that is in none of them stays in registers.
    Then the kernels that read this value read the node as well.
    """
    position = {node: i for i, node in enumerate(nodes)} if kernels is None else kernels.at
    last: dict[Node, int] = {}
    read: dict[Node, int] = {}  # the position of the kernel that reads what `node` reads
    for node in reversed(nodes):
        last[node] = max((read[u] for u in node.users if u.op != "output"), default=position[node])
        read[node] = last[node] if is_view(node) or key_of(node) not in written else position[node]
    return last


def on_cuda(nodes: Iterable[Node]) -> bool:
    """Whether a tensor of `nodes` is on a CUDA device."""
    values = (node.meta.get("val") for node in nodes)
    return any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)


@dataclass(frozen=True)
class Kernels:
    """Where a fusing compiler runs nodes, and what the kernel of each reads from memory.

    Pointwise nodes of one size that read the same tensors are one kernel, at the position of the first. Example: the
    gradients of both factors of a product. Nodes that read the rows whose scales a hook finds join its kernel.
    """

    at: Mapping[Node, int]  # the position at which its kernel runs
    reads: Mapping[Node, Collection[Any]]  # the storages that its kernel reads for it
    joined: Collection[Node]  # nodes that read elsewhere than they write, see `_shifts`, and nodes fused with them
    pads_rows: bool  # Inductor does so unless it is told not to, see torch_private/inductor.py
    lent: Collection[Any] = ()  # storages that are the user's as well, so nothing takes their memory

    @staticmethod
    def of(
        nodes: Sequence[Node],
        written: Collection[Any],
        ready_early: Collection[Node] = (),
        *,
        keys: Mapping[Node, Any] | None = None,
        pads_rows: bool = False,
    ) -> Kernels:
        """`ready_early`: nodes whose results count as if they were there from the start. `keys`: the storages."""
        at: dict[Node, int] = {}
        reads: dict[Node, set[Any]] = {}
        ready: dict[Any, int] = {}  # when each storage is written
        sizes: dict[Any, int] = {}
        readers: dict[Any, list[tuple[int, int]]] = defaultdict(list)  # of each storage: kernels by position and size
        joined: set[Node] = set()
        keys = {node: storage_of(node) for node in nodes} if keys is None else keys
        for i, node in enumerate(nodes):
            key = keys[node]
            in_registers = [n for n in node.all_input_nodes if keys[n] not in ready]
            read = {keys[n] for n in node.all_input_nodes if keys[n] in ready}.union(*(reads[n] for n in in_registers))
            read.discard(None)
            if (node.op == "call_function" and _shifts(node)) or not joined.isdisjoint(in_registers):
                joined.add(node)
            at[node], reads[node] = i, read
            if key is None or key in ready or (key not in written and node.op != "placeholder"):
                continue
            value = node.meta["val"]
            sizes[key] = tensor_bytes(value)
            if _finds_scales(node):
                count = torch_values.hint(node.all_input_nodes[0].meta["val"].numel())
                for s in read:
                    readers[s].append((i, count))
            if (fuses(node) or is_loop(node)) and SPLIT not in node.meta:
                count = torch_values.hint(value.numel())
                earliest = max((ready[s] for s in read), default=-1)
                large = [s for s in read if 2 * sizes[s] >= sizes[key]]  # those that are worth reading together
                at[node] = min((p for s in large for p, n in readers[s] if p >= earliest and n == count), default=i)
                for s in read:
                    readers[s].append((at[node], count))
            ready[key] = -1 if node in ready_early else at[node]
        return Kernels(at, reads, joined, pads_rows)

    def begins(self, readers: Iterable[Node]) -> dict[Any, int]:
        """By storage, the position of the first kernel that reads it to compute one of `readers`."""
        found: dict[Any, int] = {}
        for node in readers:
            for key in self.reads[node]:
                found[key] = min(found.get(key, self.at[node]), self.at[node])
        return found

    def reuses(self, first: Mapping[Any, Begin], last: Mapping[Any, int]) -> dict[Any, Any]:
        """Storages that are written over others, by Inductor's rules: each with the one whose memory it takes.

        A kernel takes over the memory of one storage at most, with as many bytes and of the same dtype. It reads that
        storage last, and by no node but the one that writes there. The gradients of outputs are not the graph's own, so
        nothing takes their memory, nor that of what ranks exchange. Ranks sum up in place, and wait in place. Padded
        rows take over memory of the same strides only. Inductor pads no outputs of the program; here they count as
        padded too, which is safe. `first` and `last` are those of `lifetimes`.
        """
        padded: dict[Any, Any] = {}
        if self.pads_rows:
            padded = {key: x.node.meta["val"].stride() for key, x in first.items() if _pads_rows(x.node)}
        found: dict[Any, Any] = {}
        used: set[int] = set()
        made = {begin.node: key for key, begin in first.items() if begin.node.op != "placeholder"}
        readers: dict[tuple[int, Any], int] = defaultdict(int)
        for node in made:
            for s in self.reads[node]:
                readers[self.at[node], s] += 1
        for node, key in made.items():
            position, nbytes, _ = first[key]  # when `node` writes its storage
            in_place = target_name(node) in _IN_PLACE
            if position in used or not (fuses(node) or in_place) or node in self.joined:
                continue
            for s in self.reads[node]:
                if s not in first or s == key or readers[position, s] > 1:
                    continue
                begin, source_bytes, source = first[s]
                if s in self.lent or aot.is_tangent(source):
                    continue
                if target_name(source).startswith(_EXCHANGES) and not in_place:
                    continue
                same = source_bytes == nbytes and source.meta["val"].dtype == node.meta["val"].dtype
                if same and padded.get(s) == padded.get(key) and last[s] == position > begin:
                    found[key] = s
                    used.add(position)
                    break
        return found


class GraphMemory:
    """What a compiler writes to memory in a graph, and in which kernels. Each is found once, when it is asked for.

    The graph must not change meanwhile, except that nodes move and kernels are split: call `changed_order` after that.

    Attributes:
        fused: the compiler fuses; otherwise it writes every value.
        fuse_loops: see `written_storages`.
    """

    def __init__(self, gm: GraphModule, fused: bool = True, *, fuse_loops: bool = True) -> None:
        self.gm, self.fused = gm, fused
        self.nodes = list(gm.graph.nodes)
        self.fuse_loops = fuse_loops or not any(map(is_loop, self.nodes))

    @staticmethod
    def of(graph: GraphModule | GraphMemory, fused: bool = True, *, fuse_loops: bool = True) -> GraphMemory:
        """That of `graph`, which may be one already."""
        if not isinstance(graph, GraphMemory):
            return GraphMemory(graph, fused, fuse_loops=fuse_loops)
        same = graph.fuse_loops == fuse_loops or not any(map(is_loop, graph.nodes))
        return graph if same else GraphMemory(graph.gm, graph.fused, fuse_loops=fuse_loops)

    def changed_order(self) -> None:
        """Read the order of nodes, and their kernels, again."""
        self.nodes = list(self.gm.graph.nodes)
        vars(self).pop("kernels", None)

    @functools.cached_property
    def keys(self) -> dict[Node, Any]:
        """The storage of each node, see `storage_of`."""
        return {node: storage_of(node) for node in self.nodes}

    @functools.cached_property
    def inputs(self) -> set[Any]:
        return {self.keys[node] for node in self.nodes if node.op == "placeholder"} - {None}

    @functools.cached_property
    def outputs(self) -> set[Any]:
        return {self.keys[node] for node in self.gm.graph.output_node().all_input_nodes} - {None}

    @functools.cached_property
    def written(self) -> set[Any]:
        """The storages that kernels write, and None."""
        if not self.fused:
            return set(self.keys.values())
        return written_storages(self.nodes, fuse_loops=self.fuse_loops, key_of=self.keys.__getitem__)

    @functools.cached_property
    def counted(self) -> set[Any]:
        """All storages that are in memory."""
        return self.written | self.outputs | self.inputs

    @functools.cached_property
    def kernels(self) -> Kernels:
        return Kernels.of(self.nodes, self.counted, keys=self.keys)

    @functools.cached_property
    def on_cuda(self) -> bool:
        return on_cuda(self.nodes)


def late_products(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Products that Inductor computes as late as a sum far behind them, as one `addmm`: each with that sum.

    The inputs of such a product live until the sum. Example: tied weights, whose gradient is a product at the start of
    the backward and a sum at its end. Sums near their product are left out: they change the peak little.
    """
    products = list(itertools.accumulate(node.target is torch.ops.aten.mm.default for node in nodes))
    count = dict(zip(nodes, products, strict=True))
    found: dict[Node, Node] = {}
    for node in nodes:
        if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(node.all_input_nodes) < 2:
            continue
        for other, product in (node.args, node.args[::-1]):  # in the order that Inductor tries them
            if isinstance(product, Node) and isinstance(other, Node) and _is_addmm(node, product, other):
                if count[node] - count[product] > _FAR:
                    found[product] = node
                break
    return found


def _is_addmm(node: Node, product: Node, other: Node) -> bool:
    """Whether Inductor computes `node`, the sum of both, as one `addmm`; not if it fuses the sum with its readers."""
    if product.target is not torch.ops.aten.mm.default or len(product.users) > 1:
        return False
    value, added = product.meta["val"], other.meta["val"]
    sizes = (*value.shape, *added.shape)
    if not all(isinstance(n, int) for n in sizes):  # to compare symbolic sizes would leave a guard
        return False
    return (
        added.dtype == value.dtype
        and added.shape == value.shape
        and not all(user.op == "call_function" and fuses(user) for user in node.users)
    )


def random_masks(nodes: Iterable[Node]) -> dict[Node, Node]:
    """Comparisons of random numbers that nothing else reads, as in dropout: each with the node that draws these."""
    drawn = [node for node in nodes if target_name(node) == "prims.inductor_random.default"]
    return {mask: node for node in drawn if (mask := _only_mask(node)) is not None}


def _only_mask(drawn: Node) -> Node | None:
    """The comparison that alone reads the random numbers `drawn`; None if something else does."""
    node = drawn
    for _ in range(2):  # at most behind a conversion
        if len(node.users) != 1 or not fuses(node := next(iter(node.users))):
            return None
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype is torch.bool:
            return node
    return None


def is_packed_alone(mask: Node) -> bool:
    """Whether a kernel reads `mask`, one of `random_masks`, without computing it: a kernel that packs bits, say.

    If the mask were not written, Inductor would write the random numbers for it, four times as many bytes.
    """
    return any(is_view(user) or not fuses(user) for user in mask.users if user.op != "output")


def written_storages(
    nodes: Sequence[Node], *, fuse_loops: bool = False, key_of: Callable[[Node], Any] | None = None
) -> set[Any]:
    """The storages that unfused operators make or read, and None if one makes a tuple. A fusing compiler writes them.

    - Constants are computed where they are read, except for an unfused operator.
    - A reduction or a lookup computes its inputs in its own kernel, so it alone does not cause a write.
    - What only fused operators read of a lookup, they look up themselves.
    - A value is written that has several readers and is computed from more than `_MOST_READ` storages.
    - Random numbers are not, if only a mask is made from them (`random_masks`).
    - A product that waits for a sum far behind it (`late_products`) is not; its inputs are, and the sum is.

    `fuse_loops`: the operators of library/loops are fused, as Inductor compiles them. `key_of`: `storage_of`, kept.
    """
    late = late_products(nodes)
    kernels = [node for node in nodes if not fuses(node) and node.op != "output" and target_name(node) not in CONSTANTS]
    if fuse_loops:
        kernels = [node for node in kernels if not is_loop(node)]
    masks = random_masks(nodes)
    drawn = set(masks.values())
    kernels = [n for n in kernels if n not in late and n not in drawn and not _is_looked_up_by_readers(n)]
    kernels += late.values()
    key_of = key_of or functools.cache(storage_of)
    written = {key_of(n) for node in kernels for n in (node, *_read_from_memory(node))}
    written |= {key_of(mask) for mask in masks if is_packed_alone(mask)}
    for product in late:
        written = written - {key_of(product)} | {key_of(n) for n in product.all_input_nodes}
    reads: dict[Any, set[Any]] = {}  # by storage that stays in registers, those that are read to compute it
    for node in nodes:
        key = key_of(node)
        if key is None or key in written or key in reads or node.op != "call_function":
            continue
        reads[key] = set()
        for source in map(key_of, node.all_input_nodes):
            reads[key] |= reads.get(source, {source})
        if len(reads[key]) > _MOST_READ and len(node.users) > 1:
            written.add(key)
            del reads[key]
    return written


def _is_looked_up_by_readers(node: Node) -> bool:
    return target_name(node) in _LOOKUPS and all(fuses(user) or reduces(user) for user in node.users)


def _read_from_memory(node: Node) -> list[Node]:
    """The inputs of `node`, an operator that is not fused, that a fusing compiler has to write for it."""
    if reduces(node) or target_name(node) in _LOOKUPS:
        return []
    copied = node.args[0] if target_name(node) in _INTO_COPY else None
    return [n for n in node.all_input_nodes if n is not copied or target_name(n) not in CONSTANTS]
