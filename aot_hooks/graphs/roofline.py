"""Estimates for plans: bytes alive along a graph, how long a node takes, how fast a copy is.

      position        0    1    2    3   ...          alive[i]: bytes of intermediates alive while node i runs
      v1              |---------|                     a storage lives from its first node to its last reader
      v2 (saved)           |---------------------     saved as it is: to the end
      v3 (packed)          |----|.................    packed: to its last reader, then its packed bytes to the end

A fusing compiler writes a value to memory if it is an output, or if an operator that is not pointwise makes or reads
it. A value between two pointwise operators stays in registers. Inputs count nothing.

      Rates     bytes a second over the link each way and in the device's memory, multiplications and additions a second
      node_ms   max(operations / rate, bytes / rate), from the formulas of `torch.utils.flop_counter`

Rates are measured once per device, in some ten milliseconds, or come from the user. A CPU has no copy engine: its
copies count as instant.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from cudagraph.placeholder import nearest_first

from ..torch_private import values as torch_values
from .nodes import (
    argument_called,
    has_tag,
    input_storages,
    is_view,
    output_storages,
    producer,
    storage_bytes,
    storage_of,
    storages,
    tensor_bytes,
)
from .read_tables import ATTENTION, ATTENTION_BACKWARD


def fuses(node: Node) -> bool:
    """Whether a compiler fuses `node` with its neighbours: pointwise operators, views and some concatenations."""
    return node.op == "call_function" and (_is_pointwise(node.target) or is_view(node) or _is_pointwise_cat(node))


@functools.cache  # operators are few
def _is_pointwise(target: Any) -> bool:
    tagged = torch.Tag.pointwise in getattr(target, "tags", ())
    return tagged or str(target) == "prims.convert_element_type.default"  # has no tag


def _is_pointwise_cat(node: Node) -> bool:
    """Whether Inductor computes `node` element by element: on CUDA, a concatenation of few tensors, each of which is
    computed for it alone, element by element and of no reduction. Rotary embeddings are such."""
    if node.target is not torch.ops.aten.cat.default or not on_cuda([node]):
        return False
    parts = node.all_input_nodes
    if not 2 <= len(parts) <= _MOST_JOINED or any(not _is_pointwise(n.target) or len(n.users) > 1 for n in parts):
        return False
    fused = nearest_first(node, lambda n: n.all_input_nodes if n is node or fuses(n) else ())
    return not any(map(_reduces, fused))


def alive_bytes(gm: GraphModule, packed: Mapping[Node, int]) -> dict[Node, int]:
    """Bytes alive while each node of the forward runs; `packed`: packed bytes of the nodes that will be packed."""
    nodes = list(gm.graph.nodes)
    outputs = output_storages(gm.graph)
    written = written_storages(nodes) | outputs
    counted = written - input_storages(gm.graph)
    last = last_readers(nodes, written)
    alive = alive_along(nodes, counted, to_end=outputs - storages(packed), last_reader=last, packed=packed)
    return dict(zip(nodes, alive, strict=True))


def alive_along(
    nodes: Sequence[Node],
    counted: Collection[Any],
    *,
    to_end: Collection[Any],
    last_reader: Mapping[Node, int],
    nbytes: Callable[[Node], int] = lambda node: storage_bytes(node.meta["val"]),
    packed: Mapping[Node, int] = MappingProxyType({}),
    kernels: Kernels | None = None,
) -> list[int]:
    """The bytes of the `counted` storages that are alive at each of `nodes`.

    A storage has the `nbytes` of its first node. It lives to the position of its `last_reader`, or to the end if it is
    in `to_end`. From its last reader on, a node in `packed` counts the bytes given there. With `kernels` a storage
    lives from its kernel on, and a kernel may write over one tensor that it reads last.
    """
    first, last = lifetimes(nodes, counted, to_end=to_end, last_reader=last_reader, nbytes=nbytes, kernels=kernels)
    for key, over in ({} if kernels is None else kernels.reuses(first, last)).items():
        last[over] = first[key][0] - 1
    change = [0] * (len(nodes) + 2)
    for key, (start, count, _) in first.items():
        change[start] += count
        change[last[key] + 1] -= count
    for node, count in packed.items():
        change[last.get(storage_of(node), 0)] += count
    return list(itertools.accumulate(change))[: len(nodes)]


def lifetimes(
    nodes: Sequence[Node],
    counted: Collection[Any],
    *,
    to_end: Collection[Any],
    last_reader: Mapping[Node, int],
    nbytes: Callable[[Node], int],
    kernels: Kernels | None,
) -> tuple[dict[Any, tuple[int, int, Node]], dict[Any, int]]:
    """Two dicts by storage: (first position, bytes, first node), and the last reader's position. See `alive_along`.

    All results of an operator are there from where it runs.
    """
    first: dict[Any, tuple[int, int, Node]] = {}
    last: dict[Any, int] = {}
    position = {node: i for i, node in enumerate(nodes)} if kernels is None else kernels.at
    for i, node in enumerate(nodes):
        if (key := storage_of(node)) is not None and key in counted:
            if key not in first:
                made: Any = node.args[0] if node.target is operator.getitem else node
                first[key] = (position[made], nbytes(node), node)
            last[key] = len(nodes) if key in to_end else max(last.get(key, i), last_reader[node])
    return first, last


def last_readers(nodes: Sequence[Node], written: Collection[Any], kernels: Kernels | None = None) -> dict[Node, int]:
    """For each node the position of the last kernel that reads it.

    `written`: the storages that kernels write to memory. A reader's value that is in none of them stays in registers.
    Then the kernels that read this value read the node as well.
    """
    position = {node: i for i, node in enumerate(nodes)} if kernels is None else kernels.at
    last: dict[Node, int] = {}
    read: dict[Node, int] = {}  # the position of the kernel that reads what `node` reads
    for node in reversed(nodes):
        last[node] = max((read[u] for u in node.users if u.op != "output"), default=position[node])
        read[node] = last[node] if is_view(node) or storage_of(node) not in written else position[node]
    return last


def on_cuda(nodes: Iterable[Node]) -> bool:
    """Whether a tensor of `nodes` is on a CUDA device."""
    values = (node.meta.get("val") for node in nodes)
    return any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)


SPLIT = "aot_hooks_split"  # in the `meta` of nodes that are not in the kernel of those before them


@dataclass(frozen=True)
class Kernels:
    """Where a fusing compiler runs nodes, and what the kernel of each reads from memory.

    Pointwise nodes of one size that read the same tensors are one kernel, at the position of the first: the gradients
    of both factors of a product, say.
    """

    at: Mapping[Node, int]  # the position at which its kernel runs
    reads: Mapping[Node, Collection[Any]]  # the storages that its kernel reads for it
    joined: Collection[Node]  # those computed from a concatenation: they read elsewhere than they write

    @staticmethod
    def of(nodes: Sequence[Node], written: Collection[Any], ready_early: Collection[Node] = ()) -> Kernels:
        """`ready_early`: nodes whose results count as if they were there from the start."""
        at: dict[Node, int] = {}
        reads: dict[Node, set[Any]] = {}
        ready: dict[Any, int] = {}  # when each storage is written
        sizes: dict[Any, int] = {}
        kernels: dict[Any, list[tuple[int, int]]] = {}  # by storage, those that read it: position and size
        joined: set[Node] = set()
        keys = {node: storage_of(node) for node in nodes}
        for i, node in enumerate(nodes):
            key = keys[node]
            own: set[Any] = set()
            if _is_pointwise_cat(node):
                joined.add(node)
            for n in node.all_input_nodes:
                own |= {keys[n]} if keys[n] in ready else reads[n]
                if n in joined and keys[n] not in ready:
                    joined.add(node)
            own.discard(None)
            at[node], reads[node] = i, own
            if key is None or key in ready or (key not in written and node.op != "placeholder"):
                continue
            value = node.meta["val"]
            sizes[key] = tensor_bytes(value)
            if (fuses(node) or is_loop(node)) and SPLIT not in node.meta:
                count = torch_values.hint(value.numel())
                from_on = max((ready[s] for s in own), default=-1)
                shared = [s for s in own if 2 * sizes[s] >= sizes[key]]
                at[node] = min(
                    (p for s in shared for p, n in kernels.get(s, ()) if p >= from_on and n == count), default=i
                )
                for s in own:
                    kernels.setdefault(s, []).append((at[node], count))
            ready[key] = -1 if node in ready_early else at[node]
        return Kernels(at, reads, joined)

    def begins(self, readers: Iterable[Node]) -> dict[Any, int]:
        """By storage, the position of the first kernel that reads it to compute one of `readers`."""
        found: dict[Any, int] = {}
        for node in readers:
            for key in self.reads[node]:
                found[key] = min(found.get(key, self.at[node]), self.at[node])
        return found

    def reuses(self, first: Mapping[Any, tuple[int, int, Node]], last: Mapping[Any, int]) -> dict[Any, Any]:
        """Storages that are written over others, by Inductor's rules: each with the one whose memory it takes.

        A kernel takes over the memory of one storage at most, with as many bytes and of the same dtype. It reads that
        storage last, and by no node but the one that writes there. `first` and `last` are those of `lifetimes`.
        """
        found: dict[Any, Any] = {}
        used: set[int] = set()
        made = {node: key for key, (_, _, node) in first.items() if node.op != "placeholder"}
        readers: dict[tuple[int, Any], int] = defaultdict(int)
        for node in made:
            for s in self.reads[node]:
                readers[self.at[node], s] += 1
        for node, key in made.items():
            position, nbytes, _ = first[key]
            if position in used or not fuses(node) or node in self.joined:
                continue
            for s in self.reads[node]:
                if s not in first or s == key or readers[position, s] > 1:
                    continue
                same = first[s][1] == nbytes and first[s][2].meta["val"].dtype == node.meta["val"].dtype
                if same and last[s] == position > first[s][0]:
                    found[key] = s
                    used.add(position)
                    break
        return found


def written_storages(nodes: Sequence[Node], *, fuse_loops: bool = False) -> set[Any]:
    """The storages that unfused operators make or read, and None if one makes a tuple. A fusing compiler writes them.

    What a reduction reads is computed in its kernel, so it alone is no reason to write that. What has several readers
    and reads more than `_MOST_READ` storages itself is written, as Inductor does it.
    `fuse_loops`: the operators of library/loops are fused, as Inductor compiles them.
    """
    kernels = [node for node in nodes if not fuses(node) and node.op != "output"]
    if fuse_loops:
        kernels = [node for node in kernels if not is_loop(node)]
    written = {storage_of(n) for node in kernels for n in (node, *(() if _reduces(node) else node.all_input_nodes))}
    reads: dict[Any, set[Any]] = {}  # by storage that stays in registers, those that are read to compute it
    for node in nodes:
        key = storage_of(node)
        if key is None or key in written or key in reads or node.op != "call_function":
            continue
        reads[key] = set()
        for source in map(storage_of, node.all_input_nodes):
            reads[key] |= reads.get(source, {source})
        if len(reads[key]) > _MOST_READ and len(node.users) > 1:
            written.add(key)
            del reads[key]
    return written


# --- time -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """Speeds to plan copies with.

    Attributes:
        to_host, to_device: bytes a second over the link, each way.
        memory: bytes a second that a kernel reads and writes on the device.
        operations: operations a second of a large product of 16-bit matrices; a multiplication and an addition are two.
        operations32: the same for 32-bit matrices.
    """

    to_host: float
    to_device: float
    memory: float
    operations: float
    operations32: float


INSTANT = Rates(math.inf, math.inf, 2e10, 1e11, 1e11)  # for a CPU
# Times what `Rates` has, seen on an H200 in steps of 4 and of 16 Llama blocks. Products run at the GPU's power limit. A
# generated kernel moves 1.1 times the bytes of a copy, and takes less power than a product: products beside it are
# faster, so 0.7 of its time counts.
_SUSTAINED, _KERNEL = 0.86, 1.1 / 0.7
# Products take less power for factors of few digits, and so less time. Seen of float8, not of int8, whose codes have as
# many digits as a bfloat16.
SPARED = 0.027
_FEW_DIGITS = ("aot_hooks.from_float8", "aot_hooks.unpack_int4")
# the share of a plain matrix product's speed that attention and its backward reach on an H100 or H200
_SHARES = dict.fromkeys(ATTENTION, 0.65) | dict.fromkeys(ATTENTION_BACKWARD, 0.55)


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


def _name(node: Node) -> str:
    """The name of an operator of ATen without its overload, as in the tables; another operator's name in full."""
    return str(_packet(node)).removeprefix("aten.")


def has_formula(node: Node) -> bool:
    """Whether torch has a formula for the operations of `node`: a matrix product, attention, a convolution."""
    return node.op == "call_function" and _packet(node) in flop_registry


def is_attention(node: Node) -> bool:
    """Whether `node` is a fused attention, or its backward."""
    return _name(node) in ATTENTION or _name(node) in ATTENTION_BACKWARD


_MOST_JOINED = 8  # max_complex_pointwise_cat_inputs
_MOST_READ = 4  # torch._inductor.config.realize_reads_threshold
_REDUCTIONS = ("aot_hooks.amax_word", "aot_hooks.amax_exponent")


def _reduces(node: Node) -> bool:
    return has_tag(node, torch.Tag.reduction) or str(node.target).startswith(_REDUCTIONS)


def _row_length(node: Node) -> int:
    """How many elements a reduction of rows takes for each result; 0: `node` is none."""
    source, made = (n.meta.get("val") for n in (*node.all_input_nodes[:1], node))
    if not _reduces(node) or not isinstance(made, torch.Tensor) or not isinstance(source, torch.Tensor):
        return 0
    sizes, kept = ([torch_values.hint(n) for n in t.shape] for t in (source, made))
    while kept and kept[-1] == 1:
        kept.pop()
    return math.prod(sizes[len(kept) :]) if sizes[: len(kept)] == kept else 0


# operators of library/loops, which Inductor fuses like pointwise ones on NVIDIA GPUs
_LOOPS = ("aot_hooks.to_float8", "aot_hooks.from_float8", "aot_hooks.to_int8", "aot_hooks.from_int8")


def is_loop(node: Node) -> bool:
    return node.op == "call_function" and _is_loop(node.target)


@functools.cache
def _is_loop(target: Any) -> bool:
    return str(target).startswith(_LOOPS)


def _runs_fused(node: Node, fuse_loops: bool) -> bool:
    return fuses(node) or has_tag(node, torch.Tag.reduction) or (fuse_loops and is_loop(node))


def _numbered(nodes: Sequence[Node]) -> tuple[list[int], list[int]]:
    """The number of the kernel that each node stands in, and the length of each kernel's rows, 0 if it sums none up.

    A kernel ends at an operator that is not fused, and at a reduction of rows of another length.
    """
    numbers, lengths, in_split = [], [0], False
    for node in nodes:
        runs = node.op == "call_function" and not is_view(node) and node.target is not operator.getitem
        fused = runs and _runs_fused(node, fuse_loops=True)
        length = _row_length(node) if fused else 0
        if runs and (not fused or (SPLIT in node.meta) != in_split or (length and lengths[-1] not in (0, length))):
            lengths.append(0)
        numbers.append(len(lengths) - 1)
        lengths[-1] = length or lengths[-1]
        if runs and not fused:
            lengths.append(0)
        in_split = SPLIT in node.meta if runs else in_split
    return numbers, lengths


def row_lengths(gm: GraphModule) -> dict[Node, int]:
    """For each fused node of `gm` the length of the rows that its kernel sums up, or finds the largest of; 0: none."""
    nodes = list(gm.graph.nodes)
    numbers, lengths = _numbered(nodes)
    return {n: lengths[i] for n, i in zip(nodes, numbers, strict=True) if _runs_fused(n, fuse_loops=True)}


def node_ms(
    gm: GraphModule, rates: Callable[[torch.device], Rates], fused: bool, *, fuse_loops: bool = False
) -> dict[Node, float]:
    """Milliseconds of each node of `gm`, by the fake values on it; symbolic sizes count as their hints.

    With `fused`, pointwise operators and reductions between two unfused kernels are one kernel, unless they reduce rows
    of different lengths: it reads each input once, and its intermediates cost nothing. `fuse_loops`: the operators of
    library/loops fuse as well. The schedule of offload counts each of them as a kernel, because its estimates were
    measured so. Rates are then those seen in a step.
    """
    nodes = list(gm.graph.nodes)
    written = written_storages(nodes, fuse_loops=fuse_loops) if fused else {storage_of(n) for n in nodes}
    written |= input_storages(gm.graph) | output_storages(gm.graph)
    keys = {node: storage_of(node) for node in nodes}
    nbytes = {keys[n]: tensor_bytes(v) for n in nodes if isinstance(v := n.meta.get("val"), torch.Tensor)}
    kernels, (numbers, _) = Kernels.of(nodes, written), _numbered(nodes)
    touched: dict[Any, set[Any]] = defaultdict(set)  # storages that each kernel has read or made
    found = dict.fromkeys(nodes, 0.0)
    for node in nodes:
        if node.op != "call_function" or is_view(node) or node.target is operator.getitem:
            continue
        made = node.meta.get("val")
        leaves = [made] if isinstance(made, torch.Tensor) else torch_values.pytree.tree_leaves(made)
        values = [v for v in leaves if isinstance(v, torch.Tensor)]
        if not values:
            continue
        alone = not fused or not _runs_fused(node, fuse_loops)
        moved = 0
        if alone or keys[node] in written:
            reads = {keys[n] for n in node.all_input_nodes} if alone else {*kernels.reads[node]}
            seen = set() if alone else touched[numbers[kernels.at[node]]]
            moved = sum(map(tensor_bytes, values)) + sum(nbytes.get(key, 0) for key in reads - seen)
            seen |= {*reads, keys[node]}
        rate = rates(values[0].device)
        found[node] = memory_ms(moved, rate) if fuse_loops else 1e3 * moved / rate.memory
        if has_formula(node):
            operations = rate.operations if values[0].element_size() <= 2 else rate.operations32
            operations *= _SHARES.get(_name(node), _SUSTAINED if fuse_loops else 1.0)
            sources = [str(producer(n).target) for n in node.all_input_nodes]
            if fuse_loops and values[0].is_cuda and any(source.startswith(_FEW_DIGITS) for source in sources):
                operations /= 1 - SPARED
            found[node] = max(found[node], 1e3 * _operation_count(node) / operations)
    return found


def memory_ms(nbytes: int, rates: Rates) -> float:
    """Milliseconds that a step takes longer for generated kernels that move `nbytes`."""
    return 1e3 * nbytes / (rates.memory * _KERNEL)


def link_ms(nbytes: int, rates: Rates) -> float:
    """Milliseconds that a step takes longer if `nbytes` are copied out and back meanwhile.

    The copies slow down the kernels that use the same memory: by 0.4 ms for 1e9 bytes on an H200.
    """
    return 1.6e3 * nbytes / rates.memory if math.isfinite(rates.to_host) else 0.0


def step_ms(
    fw: GraphModule, bw: GraphModule, fused: bool, copies: Collection[Any] = (), transfers: Iterable[Any] = ()
) -> float:
    """Milliseconds of a forward and its backward, with the copies of `transfers` beside them.

    Args:
        copies: the operators that copy; they count no time of their own.
    """
    found = (node_ms(gm, measured_rates, fused, fuse_loops=True) for gm in (fw, bw))
    compute = sum(ms for times in found for node, ms in times.items() if node.target not in copies)
    beside = 0.0
    for t in transfers:
        if t.placement.offloaded:
            beside += t.placement.stall_ms + link_ms(t.nbytes, measured_rates(torch.device(t.device)))
    return compute + beside


def workspace_bytes(node: Node) -> int:
    """Bytes that the operator of `node` takes while it runs, where that is known: the backward of fused attention on
    CUDA sums the gradient of the queries in float32, and has a float32 for each of their rows. Measured on an H200 for
    cuDNN's, flash and memory-efficient attention."""
    value = node.args[1].meta.get("val") if len(node.args) > 1 and isinstance(node.args[1], Node) else None
    if _name(node) not in ATTENTION_BACKWARD or not isinstance(value, torch.Tensor) or value.device.type != "cuda":
        return 0
    count = torch_values.hint(value.numel())
    return 4 * (count + count // max(1, torch_values.hint(value.shape[-1])))


def _operation_count(node: Node) -> int:
    values = (node.args, dict(node.kwargs), node.meta.get("val"))
    leaves, spec = torch_values.pytree.tree_flatten(values)
    sizes = map(_plain, leaves)
    count = _count(flop_registry[_packet(node)], spec, tuple((type(size), size) for size in sizes))
    # causal attention skips half of the products, which the formulas count
    return count // 2 if argument_called("is_causal", node) is True else count


@dataclass(frozen=True)
class _Sizes:
    """A tensor, as formulas see it; sizes are numbers, because a formula must leave no guard."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _plain(value: Any) -> Any:
    value = value.meta.get("val") if isinstance(value, Node) else value
    if isinstance(value, torch.Tensor):
        return _Sizes(tuple(torch_values.hint(n) for n in value.shape), value.dtype)
    return torch_values.hint(value) if isinstance(value, torch.SymInt) else value


@functools.lru_cache(maxsize=1024)  # equal layers have equal products
def _count(formula: Callable[..., int], spec: Any, typed_leaves: tuple[tuple[type, Any], ...]) -> int:
    """What `formula` gives for leaves with their types, because `1 == True`."""

    def tensor(leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, _Sizes) else leaf

    with torch_values.without_modes():
        leaves = [tensor(leaf) for _, leaf in typed_leaves]
        args, kwargs, out = torch_values.pytree.tree_unflatten(leaves, spec)
        return int(formula(*args, **kwargs, out_val=out))


def measured_rates(device: torch.device) -> Rates:
    """The rates of `device`, measured on the first call; `INSTANT` for a CPU."""
    return _measured(device.index or 0) if device.type == "cuda" else INSTANT


@functools.cache
def _measured(index: int) -> Rates:
    device = torch.device("cuda", index)
    copied = 64 << 20
    with torch_values.without_modes(), torch.no_grad(), torch.cuda.device(device):
        block = torch.empty(copied, dtype=torch.uint8, device=device)
        other = torch.empty_like(block)
        host = torch.empty(copied, dtype=torch.uint8, pin_memory=True)
        a = torch.randn(4096, 4096, device=device, dtype=torch.float32)
        h = a.bfloat16() if torch.cuda.is_bf16_supported() else a.half()
        speeds = {
            "to_host": copied / _seconds(lambda: host.copy_(block, non_blocking=True)),
            "to_device": copied / _seconds(lambda: block.copy_(host, non_blocking=True)),
            "memory": 2 * copied / _seconds(lambda: other.copy_(block)),
            "operations": 2 * 4096**3 / _seconds(lambda: h @ h),
            "operations32": 2 * 4096**3 / _seconds(lambda: a @ a),
        }
    return Rates(**speeds)


def _seconds(work: Callable[[], Any]) -> float:
    """The time of the fastest of six runs, by the device's clock."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(7)]
    work()
    for mark in marks:
        mark.record()
        if mark is not marks[-1]:
            work()
    marks[-1].synchronize()
    return float(min(a.elapsed_time(b) for a, b in itertools.pairwise(marks))) / 1e3
