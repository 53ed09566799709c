"""Which values a backward could compute again, from what, and how long that takes.

      chain   the nodes that compute a value again, back to what is there: inputs, saved values, or a smaller tensor
              that is saved for it (keys before they are repeated)

A chain has only operators that are known to give the same result again.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..graphs.backward_reads import BackwardReads
from ..graphs.lifetimes import fuses, on_cuda
from ..graphs.nodes import once_for_each_target, storage_bytes, storage_of, view_source
from ..graphs.repeats import draws
from ..graphs.roofline import LAUNCH_MS, has_formula
from ..graphs.saved import Boundary, SavedValue
from ..passes.edits import run_on_fakes
from ..torch_private import aot
from ..torch_private.values import is_operator
from .step import RECOMPUTE, Option, Value


def with_recompute(
    values: list[Value],
    groups: Sequence[Sequence[SavedValue]],
    numbers: Mapping[Any, int | None],
    keys: Mapping[Node, Any],
    times: Mapping[Node, float],
    gone: Mapping[Any, int],
) -> list[Value]:
    """`values` with the option to compute them again, from saved values or from a smaller tensor saved for that.

    The smaller tensors come after the values. `keys`: the storage of each node.
    """
    found = list(values)
    numbers = dict(numbers)
    unsaved: set[Any] = set()  # storages that are saved only for this
    position = {node: i for i, node in enumerate(times)}
    for i, group in enumerate(groups):
        ends = [value.fw_node for value in group]
        others = numbers.keys() - {keys[ends[0]]}
        whole = _chain(ends, others - unsaved, keys)
        cut = _cut(ends, values[i].nbytes, whole, others, keys, times, gone)
        for chain in (whole, cut):
            if chain is None:
                continue
            for key, node in {keys[n]: n for n in chain.reads}.items():
                if key not in numbers:
                    numbers[key] = len(found)
                    unsaved.add(key)
                    found.append(_saved_for(values[i], node, gone[key] + 1))
                elif key in unsaved and (number := numbers[key]) is not None:
                    other = found[number]
                    found[number] = dataclasses.replace(other, first=max(other.first, values[i].first))
            option = Option(
                RECOMPUTE,
                ms=sum(times[n] for n in chain.nodes),
                sources=_known(numbers, map(keys.__getitem__, chain.reads)),
                exact=_known(numbers, map(keys.__getitem__, _read_exactly(chain, group, position))),
                again=tuple(n.name for n in chain.nodes),
                reads=tuple(n.name for n in chain.reads),
                host_ms=_host_ms(chain),
            )
            found[i] = dataclasses.replace(found[i], options=(*found[i].options, option))
    return found


def _host_ms(chain: _Chain) -> float:
    """Milliseconds of the host for `chain`: a kernel for each operator that is not fused, and one more."""
    if not on_cuda(chain.nodes):
        return 0.0
    return LAUNCH_MS * (1 + sum(n.target is not operator.getitem and not fuses(n) for n in chain.nodes))


def _known(numbers: Mapping[Any, int | None], storages: Iterable[Any]) -> tuple[int, ...]:
    """The numbers of `storages`, without those that have none."""
    return tuple(sorted({number for key in storages if (number := numbers[key]) is not None}))


def _saved_for(value: Value, node: Node, gone: int) -> Value:
    """`node` as a value that is saved to compute `value` again. Its hooks are guessed to be those of `value`."""
    nbytes = storage_bytes(node.meta["val"])
    share = nbytes / value.nbytes

    def scaled(option: Option) -> Option:
        sizes = (int(share * n) for n in (option.packed_bytes, option.link_bytes, option.work_bytes))
        packed_bytes, link_bytes, work_bytes = sizes
        new = Option(option.name, None, packed_bytes, share * option.ms, option.error, link_bytes, work_bytes)
        return dataclasses.replace(new, host_ms=option.host_ms)

    options = tuple(scaled(option) for option in value.options if option.name != RECOMPUTE)
    return dataclasses.replace(
        value,
        names=(node.name,),
        nbytes=nbytes,
        gone=gone,
        options=(Option("keep", packed_bytes=nbytes), *options),
        saved=False,
        reached_bytes=0,
    )


def exact_order(
    values: Sequence[Value], name: str, min_bytes: int, times: Mapping[str, float]
) -> list[tuple[int, Option]]:
    """Values that may be computed again in place of being sent, with the option to do so: the cheapest first, by the
    time for each byte that is not sent.

    What they are computed from is not rounded, and stays saved. Values of less than `min_bytes` are left out. Of
    several tensors in one storage, a form may round each by itself, which is no option of the storage.

    Args:
        name: of the option for the form in which values are sent; those without it are sent as they are.
        times: the milliseconds of each node of the forward, by its name.
    """
    sent = [next((o.packed_bytes for o in value.options if o.name == name), value.nbytes) for value in values]
    exact = {i for i, value in enumerate(values) if len(value.names) == 1 and not any(o.error for o in value.options)}
    left = {
        i: option
        for i, value in enumerate(values)
        for option in reversed(value.options)
        if option.name == RECOMPUTE and sent[i] >= max(1, min_bytes) and exact.issuperset(option.sources)
    }
    order: list[tuple[int, Option]] = []
    again: set[str] = set()

    def ms_per_byte(i: int) -> float:
        return sum(times[name] for name in left[i].again if name not in again) / sent[i]

    while left:
        i = min(left, key=ms_per_byte)
        order.append((i, option := left.pop(i)))
        again.update(option.again)
        left = {j: o for j, o in left.items() if i not in o.sources and j not in option.sources}
    return order


def marks(
    chosen: Mapping[int, Option], forward: Graph, cross: Boundary, groups: Sequence[Sequence[SavedValue]]
) -> tuple[set[str], set[str]]:
    """The names of the nodes of `forward` to compute again by `chosen` options of values, and of those to save."""
    gone = {storage_of(groups[i][0].fw_node) for i in chosen if i < len(groups)}
    again = {name for option in chosen.values() for name in option.again}
    if not again:
        return set(), set()
    # views as well: torch's partition would save one of them in place of the value
    again |= {n.name for n in forward.nodes if n.op == "call_function" and storage_of(n) in gone}
    kept = {v.fw_node.name for v in cross.tensors if storage_of(v.fw_node) not in gone}
    return again, (kept | {name for option in chosen.values() for name in option.reads}) - again


def of_blocks(
    groups: Sequence[Sequence[SavedValue]], block_of: Mapping[Node, str], keys: Mapping[Node, Any], *, last: bool
) -> tuple[set[str], set[Any], set[str]] | None:
    """What checkpointing computes again: all but what one block gets from another, and what can't be repeated.

    Args:
        block_of: the block of each node of the forward, "" for one in none.
        keys: the storage of each node of the forward.
        last: compute again what nodes in no block get, too, as torch's partition of checkpoints does: what the last
            block returns is not there yet while the backward of the head runs.

    Returns the names of the nodes to compute again, the storages that are saved no more, and the names of the nodes
    that are read for it. None if there is nothing to compute again.
    """

    def crosses(node: Node) -> bool:
        return any(block_of[u] not in ("" if last else None, block_of[node]) for u in node.users if u in block_of)

    stops = {keys[node] for node in block_of if crosses(node) or not block_of[node]}
    stops.discard(None)  # the key of an operator with several results; these have their own
    again: set[str] = set()
    gone: set[Any] = set()
    reads: set[str] = set()
    position = {node: i for i, node in enumerate(block_of)}
    for group in sorted(groups, key=lambda group: position.get(group[0].fw_node, -1)):
        key = keys[group[0].fw_node]
        chain = None if key in stops else _chain([value.fw_node for value in group], stops, keys)
        if chain is None:  # what is computed from it can start there
            stops.add(key)
        else:
            again |= {n.name for n in chain.nodes}
            reads |= {n.name for n in chain.reads}
            gone.add(key)
    return (again, gone, reads) if gone else None


def computed_late(bw: GraphModule, fw: GraphModule, stock: GraphModule) -> GraphModule:
    """A copy of `bw` in which what the backward `stock` computes from saved values stands where it does there.

      stock     (x is saved)                                f = float(x)    gx = mul(g, f)
      bw        x = add(a, b)   f = float(x)   rsqrt(f) ...                 gx = mul(g, f)
      copy      x = add(a, b)   f = float(x)   rsqrt(f) ...   f' = float(x)   gx = mul(g, f')

    So f is not alive in between, and the copy holds no more than checkpointing, which runs the forward again and then
    `stock`. `fw` is the forward of `stock`.
    """
    forward = {n.name for n in fw.graph.nodes if n.op == "call_function"}
    late = {n.name for n in stock.graph.nodes if n.op == "call_function"}
    early: set[Node] = set()  # what stock saves, and what is read for it
    for node in reversed(bw.graph.nodes):
        if node.name in forward and (node.name not in late or any(user in early for user in node.users)):
            early.add(node)
    names = {node.name for node in early}
    gm = aot.copied(bw)
    copies: set[Node] = set()
    for node in [n for n in reversed(gm.graph.nodes) if n.name in names & late and _repeatable(n)]:
        users = [user for user in node.users if user.name not in names]
        if users:
            with gm.graph.inserting_before(min(users)):  # in the order of the graph
                copies.add(copy := gm.graph.node_copy(node, lambda n: n))
            for user in users:
                user.replace_input_with(node, copy)
    for node in gm.graph.nodes:  # copies have memory of their own, and so have views of them
        viewing = view_source(node) is not None or node.target is operator.getitem
        if node in copies or (viewing and not copies.isdisjoint(node.all_input_nodes)):
            run_on_fakes(node)
            copies.add(node)
    return gm


@dataclass(frozen=True)
class _Chain:
    """Nodes that compute some values again, and the nodes that they read. Inputs of the graph are always there."""

    nodes: dict[Node, None]
    reads: dict[Node, None]


def _chain(ends: Iterable[Node], stops: Collection[Any], keys: Mapping[Node, Any]) -> _Chain | None:
    """What computes `ends` again from the storages `stops`. None if an operator in it can't be repeated."""
    nodes: dict[Node, None] = {}
    reads: dict[Node, None] = {}
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node in nodes or node.op == "placeholder":
            continue
        if keys[node] in stops:
            reads[node] = None
        elif not _repeatable(node):
            return None
        else:
            nodes[node] = None
            stack += node.all_input_nodes
    return _Chain(nodes, reads)


def _read_exactly(chain: _Chain, group: Sequence[SavedValue], position: Mapping[Node, int]) -> list[Node]:
    """The nodes that `chain` reads and that must not be rounded."""
    exact = (not v.value.dtype.is_floating_point or any(not f.read.answered for f in v.reads) for v in group)
    if any(exact):
        return list(chain.reads)
    graph = Graph()
    given = dict.fromkeys(n for node in chain.nodes for n in node.all_input_nodes if n not in chain.nodes)
    copies = {node: graph.placeholder(node.name) for node in given}
    for node in sorted(chain.nodes, key=position.__getitem__):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    graph.output(tuple(copies[v.fw_node] for v in group))
    gm = aot.without_code({}, graph)
    reads = BackwardReads(gm, gm, [(copies[n], copies[n]) for n in given])
    return [node for node in chain.reads if reads.of(copies[node])]


def _cut(
    ends: Sequence[Node],
    nbytes: int,
    whole: _Chain | None,
    stops: Collection[Any],
    keys: Mapping[Node, Any],
    times: Mapping[Node, float],
    gone: Mapping[Any, int],
) -> _Chain | None:
    """The fastest chain that starts at a tensor of at most half the bytes, such as keys before they are repeated.

    None if it takes more than half of the time of the `whole` chain.
    """
    own = {keys[n] for n in ends}

    def ms_of(chain: _Chain | None) -> float:
        return math.inf if chain is None else sum(times[n] for n in chain.nodes)

    best, best_ms = None, ms_of(whole) / 2
    if ms_of(known := _chain(ends, stops, keys)) < best_ms:  # what is saved for others already
        best, best_ms = known, ms_of(known)
    seen: set[Any] = set(own)
    stack = list(ends)
    visited: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in visited or node.op == "placeholder" or (key := keys[node]) in stops:
            continue
        visited.add(node)
        value = node.meta.get("val")
        if key not in seen and key in gone and isinstance(value, torch.Tensor):
            seen.add(key)
            if 0 < 2 * storage_bytes(value) <= nbytes and ms_of(chain := _chain(ends, {*stops, key}, keys)) < best_ms:
                best, best_ms = chain, ms_of(chain)
        if key in own or best is None:
            stack += node.all_input_nodes
    return best


# operators that give the same bits again, besides pointwise ones, views, reductions and those with a formula
_REPEATABLE = frozenset(
    "native_layer_norm native_group_norm _fused_rms_norm _softmax _log_softmax var_mean cat clone constant_pad_nd "
    "embedding index_select gather _to_copy max_pool2d_with_indices _native_batch_norm_legit "
    "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training _unsafe_view full iota arange "
    "scalar_tensor".split()
)


def _repeatable(node: Node) -> bool:
    """Whether `node` is known to give the same result again. An unknown operator is never computed again.

    So communication, writes, custom operators, sums in any order on CUDA (`scatter_add`), and what draws random numbers
    are not. Attention without dropout draws none.
    """
    if node.target is operator.getitem:
        return True
    target: Any = node.target
    if node.op != "call_function" or not _is_functional(target) or draws(node):
        return False
    if target is torch.ops.aten.index.Tensor:  # by a mask, the result has a new size each time
        return all(n.meta["val"].dtype in (torch.int32, torch.int64) for n in node.all_input_nodes[1:])
    return _is_known(target) or fuses(node) or has_formula(node)


@once_for_each_target
def _is_functional(target: Any) -> bool:
    return is_operator(target) and target.namespace in ("aten", "prims") and not target._schema.is_mutable


@once_for_each_target
def _is_known(target: Any) -> bool:
    return str(target).split(".")[1] in _REPEATABLE or torch.Tag.reduction in target.tags
