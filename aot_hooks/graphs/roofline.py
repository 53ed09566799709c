"""Estimates for plans: how long a node takes, how fast a copy is.

      node_ms   max(operations / rate, bytes / rate), from the formulas of `torch.utils.flop_counter`; attention as
                measured, where it can be
      host_ms   kernels * time of a launch: a step of small layers takes the host longer than the device

speeds.py measures the rates. A CPU launches no kernels.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from ..errors import OptionError
from ..torch_private import values as torch_values
from .lifetimes import SPLIT, GraphMemory, fuses, is_loop, reduces
from .nodes import (
    argument_called,
    has_tag,
    is_tensor,
    is_view,
    name_of,
    producer,
    target_name,
    tensor_bytes,
)
from .read_tables import ATTENTION, ATTENTION_BACKWARD
from .speeds import Like, Rates, leaves_of, measured_ms, measured_rates

# Times what `Rates` has, seen on an H200 in steps of 4 and of 16 Llama blocks. Products run at the GPU's power limit. A
# generated kernel moves 1.1 times the bytes of a copy, and takes less power than a product: products beside it are
# faster, so 0.7 of its time counts.
_SUSTAINED, _KERNEL = 0.86, 1.1 / 0.7
# Products take less power for factors of few digits, and so less time. Seen of float8, not of int8, whose codes have as
# many digits as a bfloat16.
SPARED = 0.027
_FEW_DIGITS = ("aot_hooks.from_float8", "aot_hooks.unpack_int4")
# The host's time in a step of Inductor's, in milliseconds: for a kernel, with its share of autograd and of Dynamo; for
# an operator written in Python; to send a tensor, or to fetch it. Hosts of H200s took 30 to 38 us for a kernel. More
# counts, because a host that is about as fast as the device makes it wait: with 34 us the exact plan of a Llama took
# 1.14 of stock's step where 1.06 was predicted, with 46 us 1.07 and 1.07.
LAUNCH_MS, CALL_MS, COPY_MS = 0.046, 0.31, 0.34
_MS_OF_COPIES = {"aot_hooks.offload_start": COPY_MS, "aot_hooks.reload_start": COPY_MS}
_MS_OF_COPIES |= {"aot_hooks.offload_wait": 0.0, "aot_hooks.reload_wait": 0.0}
# Constants, lookups and random numbers. Inductor has no kernel for them where all readers are fused: each reader's
# kernel computes them.
_IN_READERS = frozenset(
    "aten.full aten.scalar_tensor aten.index aten.gather aten.embedding prims.iota prims.inductor_lookup_seed "
    "prims.inductor_random".split()
)
# the share of a plain matrix product's speed that attention and its backward reach on an H100 or H200 with heads of 128
_SHARES = dict.fromkeys(ATTENTION, 0.65) | dict.fromkeys(ATTENTION_BACKWARD, 0.55)


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


def _packet_name(node: Node) -> str:
    """The name of an operator without its overload; "aten.add" of "aten.add.Tensor"."""
    return name_of(_packet(node))


def _name(node: Node) -> str:
    """The name of an operator of ATen without its overload, as in the tables; another operator's name in full."""
    return _packet_name(node).removeprefix("aten.")


def _grouped_operations(a: torch.Tensor, b: torch.Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Those of a product of groups of rows, or of columns, whose ends are known on the device: of all rows together."""
    groups = len(a) if a.ndim == 3 and b.ndim == 2 else 1  # each takes its own columns of b
    return 2 * a.numel() * b.shape[-1] // groups


def _attention_operations(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, out_val: Any = None, **kwargs: Any
) -> int:
    """Two products; several heads of `q` may share one of `k` and `v`."""
    return 2 * q.numel() // q.shape[-1] * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward_operations(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
) -> int:
    """Five products, the first of them the scores once more."""
    return 2 * q.numel() // q.shape[-1] * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


# torch has none for grouped products; for attention on a CPU from 2.15, for heads that share keys from 2.13
_FORMULAS: dict[str, Callable[..., int]] = {
    "_grouped_mm": _grouped_operations,
    **{name: _attention_operations for name in ATTENTION if name.startswith("_scaled")},
    **{name: _attention_backward_operations for name in ATTENTION_BACKWARD if name.startswith("_scaled")},
}


def has_formula(node: Node) -> bool:
    """Whether there is a formula for the operations of `node`: a matrix product, attention, a convolution."""
    return node.op == "call_function" and (_packet(node) in flop_registry or _name(node) in _FORMULAS)


def is_attention(node: Node) -> bool:
    """Whether `node` is a fused attention, or its backward."""
    return _name(node) in ATTENTION or _name(node) in ATTENTION_BACKWARD


def _tensors(node: Node) -> list[torch.Tensor]:
    """The tensors that `node` makes; those of a reduction are of one size."""
    if is_tensor(node):  # as most nodes are: to walk the value takes ten times as long
        return [node.meta["val"]]
    return [x for x in torch_values.pytree.tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]


def _row_length(node: Node) -> int:
    """How many elements a reduction of rows takes for each result; 0: `node` is none."""
    made, source = _tensors(node), next((n.meta.get("val") for n in node.all_input_nodes), None)
    if not reduces(node) or not made or not isinstance(source, torch.Tensor):
        return 0
    sizes, kept = ([torch_values.hint(n) for n in t.shape] for t in (source, made[0]))
    while kept and kept[-1] == 1:
        kept.pop()
    return math.prod(sizes[len(kept) :]) if sizes[: len(kept)] == kept else 0


def _reads_short_numbers(node: Node) -> bool:
    """Whether the factors of a product have at most 16 bits. Its sums may be float32 all the same."""
    sources = [n.meta.get("val") for n in node.all_input_nodes]
    floats = [x for x in sources if isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim > 1]
    return any(x.element_size() <= 2 for x in floats)


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
    gm: GraphModule | GraphMemory, rates: Callable[[torch.device], Rates], fused: bool, *, fuse_loops: bool = False
) -> dict[Node, float]:
    """Milliseconds of each node of `gm`, by the fake values on it; symbolic sizes count as their hints.

    With `fused`, pointwise operators and reductions between two unfused kernels are one kernel, unless they reduce rows
    of different lengths: it reads each input once, and its intermediates cost nothing. `fuse_loops`: the operators of
    library/loops fuse as well. The schedule of offload counts each of them as a kernel, because its estimates were
    measured so. Rates are then those seen in a step.
    """
    memory = GraphMemory.of(gm, fused, fuse_loops=fuse_loops)
    nodes, written, keys, kernels = memory.nodes, memory.counted, memory.keys, memory.kernels
    nbytes = {keys[n]: tensor_bytes(v) for n in nodes if isinstance(v := n.meta.get("val"), torch.Tensor)}
    numbers, _ = _numbered(nodes)
    touched: dict[Any, set[Any]] = defaultdict(set)  # storages that each kernel has read or made
    found = dict.fromkeys(nodes, 0.0)
    for node in nodes:
        if node.op != "call_function" or is_view(node) or node.target is operator.getitem:
            continue
        if not (values := _tensors(node)):
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
        if fuse_loops and is_attention(node) and (alone_ms := measured_ms(node)):
            found[node] = alone_ms
        elif has_formula(node):
            operations = _operation_rate(node, rate, in_step=fuse_loops, on_cuda=values[0].is_cuda)
            found[node] = max(found[node], 1e3 * _operation_count(node) / operations)
    return found


def _operation_rate(node: Node, rate: Rates, *, in_step: bool, on_cuda: bool) -> float:
    """Operations a second of a product; `in_step`: as it is seen in a step, not alone."""
    operations = rate.operations if _reads_short_numbers(node) else rate.operations32
    operations *= _SHARES.get(_name(node), _SUSTAINED if in_step else 1.0)
    sources = (target_name(producer(n)) for n in node.all_input_nodes)
    reads_few_digits = in_step and on_cuda and any(source.startswith(_FEW_DIGITS) for source in sources)
    return operations / (1 - SPARED) if reads_few_digits else operations


def host_ms(gm: GraphModule | GraphMemory, fused: bool) -> float:
    """Milliseconds that the host takes to launch what `gm` runs on a CUDA device.

    Waits for copies count nothing: each belongs to a copy.
    """
    memory = GraphMemory.of(gm, fused)
    if not memory.on_cuda:
        return 0.0
    return _host_ms(memory.nodes, fused, _fused_kernel_count(memory) if fused else 0)


def _most_host_ms(memory: GraphMemory) -> float:
    """What `host_ms` is at most. It takes a fifth of the time, because it counts no kernels."""
    if not memory.on_cuda:
        return 0.0
    loops = sum(not is_view(node) and _runs_fused(node, fuse_loops=True) for node in memory.nodes)
    return _host_ms(memory.nodes, memory.fused, 2 * loops)  # a reduction that is not over rows is two kernels


def _host_ms(nodes: Sequence[Node], fused: bool, kernel_count: int) -> float:
    """`host_ms` of `nodes`, if `kernel_count` fused kernels are among them."""
    total = LAUNCH_MS * kernel_count
    for node in nodes:
        if node.op != "call_function" or is_view(node) or node.target is operator.getitem:
            continue
        packet = _packet_name(node)
        if packet.startswith("aot_hooks.") and not (fused and (is_loop(node) or reduces(node))):
            total += _MS_OF_COPIES.get(packet, CALL_MS)
        elif not fused or not (_runs_fused(node, fuse_loops=True) or _in_readers(node)):
            total += LAUNCH_MS
    return total


def _in_readers(node: Node) -> bool:
    """Whether the kernels of the readers of `node` compute it."""
    fused = (_runs_fused(n, fuse_loops=True) or _packet_name(n) in _IN_READERS for n in node.users)
    return _packet_name(node) in _IN_READERS and all(fused)


def _fused_kernel_count(memory: GraphMemory) -> int:
    """How many kernels Inductor makes of the fused operators of a graph.

    Between two unfused operators, fused operators over equally many elements are one kernel. A reduction runs over the
    elements that it reads, and its kernel also computes what is made of its results. One not over rows is two kernels.
    """
    nodes, written, kernels = memory.nodes, memory.written | memory.outputs, memory.kernels
    numbers, _ = _numbered(nodes)
    loops: set[tuple[int, int]] = set()
    of_results: set[tuple[int, int]] = set()  # loops over results of a reduction
    count = 0
    for node in nodes:
        made = next(iter(_tensors(node)), None)
        if not _runs_fused(node, fuse_loops=True) or is_view(node) or memory.keys[node] not in written or made is None:
            continue
        if all(_packet_name(reader) in _IN_READERS for reader in node.users):
            continue
        number = numbers[kernels.at[node]]
        if reduces(node):
            of_results.add((number, torch_values.hint(made.numel())))
            made = node.all_input_nodes[0].meta["val"]
            count += 0 if _row_length(node) else 2
        if not reduces(node) or _row_length(node):
            loops.add((number, torch_values.hint(made.numel())))
    return count + len(loops - of_results)


def memory_ms(nbytes: int, rates: Rates) -> float:
    """Milliseconds that a step takes longer for generated kernels that move `nbytes`."""
    return 1e3 * nbytes / (rates.memory * _KERNEL)


def link_ms(nbytes: int, rates: Rates) -> float:
    """Milliseconds that a step takes longer if `nbytes` are copied out and back meanwhile.

    The copies slow down the kernels that use the same memory: by 0.4 ms for 1e9 bytes on an H200.
    """
    return 1.6e3 * nbytes / rates.memory if math.isfinite(rates.to_host) else 0.0


def step_ms(
    fw: GraphModule | GraphMemory,
    bw: GraphModule | GraphMemory,
    fused: bool,
    copies: Collection[Any] = (),
    transfers: Iterable[Any] = (),
    *,
    launched: bool = True,
    times: Iterable[Mapping[Node, float]] | None = None,
) -> float:
    """Milliseconds of a forward and its backward, with the copies of `transfers` beside them: of the device, or of the
    host if that takes longer.

    Args:
        copies: the operators that copy; they count no time of their own on the device.
        launched: the host launches each kernel. CUDA graphs take it nearly no time.
        times: `node_ms` of both graphs with loops fused, if it is known.
    """
    both = [GraphMemory.of(gm, fused) for gm in (fw, bw)]
    if times is None:
        times = [node_ms(memory, measured_rates, fused, fuse_loops=True) for memory in both]
    compute = sum(ms for each in times for node, ms in each.items() if node.target not in copies)
    beside = 0.0
    for t in transfers:
        if t.placement.offloaded:
            beside += t.placement.stall_ms + link_ms(t.nbytes, measured_rates(torch.device(t.device)))
    device = compute + beside
    if not launched or sum(map(_most_host_ms, both)) <= device:
        return device
    return max(device, sum(host_ms(memory, fused) for memory in both))


def predicted_ms(*graphs: Any, **settings: Any) -> float:
    """`step_ms`, for a plan's own information: 0.0 on a device whose speed is unknown, or that has no memory left to
    measure it in."""
    try:
        return step_ms(*graphs, **settings)
    except (torch.OutOfMemoryError, OptionError):
        return 0.0


def _operation_count(node: Node) -> int:
    """Additions and multiplications of `node`, by torch's formulas."""
    formula = _FORMULAS.get(_name(node)) or flop_registry[_packet(node)]
    count = _count(formula, *leaves_of((node.args, dict(node.kwargs), node.meta.get("val"))))
    # causal attention skips half of the products, which the formulas count
    return count // 2 if argument_called("is_causal", node) is True else count


@functools.lru_cache(maxsize=1024)  # equal layers have equal products
def _count(formula: Callable[..., int], spec: Any, typed_leaves: tuple[tuple[type, Any], ...]) -> int:
    """The operations that `formula` counts, by what `leaves_of` returns."""

    def tensor(leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Like) else leaf

    with torch_values.without_modes():
        leaves = [tensor(leaf) for _, leaf in typed_leaves]
        args, kwargs, out = torch_values.pytree.tree_unflatten(leaves, spec)
        return int(formula(*args, **kwargs, out_val=out))
