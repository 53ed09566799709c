"""The rewrite: hooks into the forward and backward graphs. Chooses nothing; does what it is told.

      forward                                   backward
        x = mul(a, b)                             q, s = placeholders        # where x was
        y = exp(x)        # last use of x         g1 = mm(tangents_1, w)
        q, s = pack(x)    # right after it        x' = unpack(q, s)          # right before
        ...                                       g2 = mul(g1, x')           # the first use
        return y, q, s    # where x was

`inline(fw, bw, boundary, units)` edits both graphs in place, lints and recompiles them. New symbolic ints go to the end
of the forward's outputs and before the first tensor of the backward's inputs; one expression crosses once. AOTAutograd
counts symints and looks for donated buffers after this, on `meta["val"]`, so every node that is put in gets a value of
its own, propagated from the node it stands on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..graphs.saved import Boundary, SavedValue
from ..torch_private import values as torch_values
from ..torch_private.inductor_marks import PACKED_ROW, mark_alone
from .trace import TracedHook

__all__ = ["Packing", "Unit", "inline", "last_use", "lift_constants", "packed_bytes"]


@dataclass
class Packing:
    """One hook on one saved value, for some of its readers.

    Attributes:
        traced: the two graphs.
        readers: nodes of the backward that read the unpacked value.
        in_backward: pack in the backward too, from the value that crosses unpacked anyway for other readers.
        early: pack where the value is made, in a kernel of its own, because memory is tight at its last use.
        reduce_first: put what the pack reduces (a scale) where the value is made, the rest after its last use. A fusing
            compiler then finds all scales in one pass over the data and writes all packed values in a second one.
        packed_bytes: bytes that cross; known once it is put in.
        leaves: the nodes of the forward that cross, likewise.
    """

    traced: TracedHook
    readers: list[Node]
    in_backward: bool = False
    early: bool = False
    reduce_first: bool = False
    packed_bytes: int = 0
    leaves: list[Node] = field(default_factory=list)


@dataclass
class Unit:
    """A saved value, what is packed of it, and further values that come back from the same packing.

    Attributes:
        source: the node of the forward that is packed: the value's own, or one that it is a copy of.
        keep: the value itself crosses too, for readers that no hook covers.
        views: values that are views of the same storage, or copies of the value.
        replays: for the backward inputs of values that are copies, the nodes that make them from what is unpacked.
    """

    saved: SavedValue
    packings: list[Packing]
    keep: bool
    source: Node
    views: list[SavedValue] = field(default_factory=list)
    replays: dict[Node, tuple[Node, ...]] = field(default_factory=dict)


def inline(fw: GraphModule, bw: GraphModule, boundary: Boundary, units: Iterable[Unit]) -> set[Any]:
    """Rewrite both graphs; gives the operators that were put in."""
    units = list(units)
    fw_place, bw_place = _places(fw.graph), _places(bw.graph)
    crossing: dict[Node, list[tuple[Node, Node]]] = {}  # old backward placeholder -> (forward node, placeholder)
    added: list[tuple[Node, Node]] = list(boundary.symints)
    targets: set[Any] = set()
    doomed: list[Node] = []
    for unit in units:
        value, slot = unit.saved, unit.saved.bw_node
        pairs: list[tuple[Node, Node]] = [(value.fw_node, slot)] if unit.keep else []
        # a source other than the value itself is read where the copy is made, so as not to keep it for longer
        own = unit.source is value.fw_node
        anchor = _after_inputs(last_use(value.fw_node, fw_place) if own else value.fw_node)
        for packing in unit.packings:
            first = min(packing.readers, key=bw_place.__getitem__)
            if packing.in_backward:
                with bw.graph.inserting_before(first):
                    inputs = _copy_in(packing.traced.pack, bw, [slot], targets, f"{value.row.name}_pack")
            else:
                made = _after_inputs(unit.source)
                places = (made if packing.early or packing.reduce_first else anchor, made if packing.early else anchor)
                leaves = _copy_pack(packing.traced.pack, fw, unit, places, targets)
                if packing.early:
                    mark_alone(_made_from(unit.source, leaves), value.row.name)
                packing.leaves, packing.packed_bytes = leaves, packed_bytes(leaves)
                inputs = [_cross(bw, value, i, leaf, pairs, added) for i, leaf in enumerate(leaves)]
            with bw.graph.inserting_before(first):
                (out,) = _copy_in(packing.traced.unpack, bw, inputs, targets, f"{value.row.name}_unpack")
            _read_from(bw, out, packing.readers, unit, first)
        crossing[slot] = pairs
        crossing.update((v.bw_node, []) for v in unit.views)
        doomed += [s.bw_node for s in ([] if unit.keep else [value]) + unit.views]
    _set_outputs(fw, boundary, crossing, added)
    for node in doomed:
        bw.graph.erase_node(node)
    for gm in (fw, bw):
        gm.graph.lint()
        gm.recompile()
    return targets


def _places(graph: Graph) -> dict[Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def last_use(node: Node, place: Mapping[Node, int] | None = None) -> Node:
    """The last node of the forward that reads the storage of `node`, through views as well; not the output."""
    place = _places(node.graph) if place is None else place
    key = torch_values.storage_key(node.meta["val"])
    last, stack = node, [node]
    while stack:
        current = stack.pop()
        for user in current.users:
            if user.op == "output" or user not in place:
                continue
            if place[user] > place[last]:
                last = user
            val = user.meta.get("val")
            if isinstance(val, torch.Tensor) and val.layout is torch.strided and torch_values.storage_key(val) == key:
                stack.append(user)
    return last


def _after_inputs(node: Node) -> Node:
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node


def _made_from(source: Node, leaves: list[Node]) -> list[Node]:
    """The nodes between `source` and `leaves`."""
    found: dict[Node, None] = {}
    stack = list(leaves)
    while stack:
        node = stack.pop()
        if node is not source and node not in found:
            found[node] = None
            stack += node.all_input_nodes
    return list(found)


def _copy_pack(
    pack: GraphModule, fw: GraphModule, unit: Unit, places: tuple[Node, Node], targets: set[Any]
) -> list[Node]:
    """Copy `pack` into the forward: what its reductions need after the first place, the rest after the second."""
    name = f"{unit.saved.row.name}_pack"
    env: dict[Node, Any] = {}
    if places[0] is not places[1]:
        first = {n for n in pack.graph.nodes if torch.Tag.reduction in getattr(n.target, "tags", ())}
        stack = list(first)
        while stack:
            new = [n for n in stack.pop().all_input_nodes if n not in first]
            first.update(new)
            stack += new
        with fw.graph.inserting_before(places[0].next):
            _copy_in(pack, fw, [unit.source], targets, name, env, first)
    with fw.graph.inserting_before(places[1].next):
        return _copy_in(pack, fw, [unit.source], targets, name, env)


def _copy_in(
    source: GraphModule,
    into: GraphModule,
    inputs: list[Node],
    targets: set[Any],
    name: str,
    env: dict[Node, Any] | None = None,
    only: set[Node] | None = None,
) -> list[Node]:
    """Copy nodes of `source` to the insertion point of `into.graph`, with values propagated; gives its outputs.

    Args:
        env: what has been copied before, and then too.
        only: the nodes to copy now, all if None.
    """
    env = {} if env is None else env
    env.update(zip(source.graph.find_nodes(op="placeholder"), inputs, strict=True))
    fake_mode = next(n.meta["val"].fake_mode for n in _tensors([*into.graph.nodes]))
    graph = into.graph

    def value_of(a: Any) -> Any:
        return torch.fx.node.map_arg(a, lambda n: n.meta["val"])

    with torch_values.tracing_on_fakes(fake_mode), torch_values.python_dispatcher():
        for node in source.graph.nodes:
            if node.op == "placeholder" or node in env or (only is not None and node not in only):
                continue
            if node.op == "output":
                return [env[n] for n in node.args[0]]
            if node.op == "get_attr":
                env[node] = _constant(into, getattr(source, str(node.target)), fake_mode)
                continue
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            new = graph.create_node(node.op, node.target, args, kwargs, name=_clean_name(f"{name}_{node.name}"))
            new.meta = {k: v for k, v in node.meta.items() if k in ("stack_trace", "original_aten")}
            if isinstance(node.target, torch_values.HigherOrderOperator):
                new.meta["val"] = node.meta["val"]  # its operands are graphs: nothing to run them on here
            else:
                new.meta["val"] = node.target(*value_of(args), **value_of(kwargs))
            new.meta[PACKED_ROW] = True
            targets.add(node.target)
            env[node] = new
    return []


def _tensors(nodes: list[Node]) -> Iterable[Node]:
    return (n for n in nodes if isinstance(n.meta.get("val"), torch_values.FakeTensor))


_CONSTANT = "_aot_hooks_constant_"


def _constant(into: GraphModule, constant: Any, fake_mode: Any) -> Node:
    """A `get_attr` node for `constant`, one attribute for one object."""
    names = {id(v): k for k, v in vars(into).items() if k.startswith(_CONSTANT)}
    names |= {id(v): k for k, v in into.named_buffers(recurse=False) if k.startswith(_CONSTANT)}
    name = names.get(id(constant))
    if name is None:
        name = f"{_CONSTANT}{len(names)}"
        if isinstance(constant, torch.Tensor):
            into.register_buffer(name, constant)
        else:
            setattr(into, name, constant)
    node = into.graph.get_attr(name)
    if isinstance(constant, torch.Tensor):
        node.meta["val"] = fake_mode.from_tensor(constant, static_shapes=True)
    return node


def lift_constants(gm: GraphModule) -> None:
    """Read the constants of hooks as Inductor takes them: by `lift_fresh_copy`, the one operator that may be given a
    real tensor among fake ones. It becomes a load in the kernel that reads it."""
    for node in gm.graph.find_nodes(op="get_attr"):
        if not str(node.target).startswith(_CONSTANT) or "val" not in node.meta:
            continue
        with gm.graph.inserting_after(node):
            lifted = gm.graph.call_function(torch.ops.aten.lift_fresh_copy.default, (node,))
        lifted.meta.update(node.meta)
        node.replace_all_uses_with(lifted, lambda user, lifted=lifted: user is not lifted)
    gm.graph.lint()
    gm.recompile()


def _clean_name(name: str) -> str:
    return name.replace("tangents", "tan").replace("primals", "prim")  # AOTAutograd tells inputs apart by these words


def _cross(
    bw: GraphModule,
    value: SavedValue,
    i: int,
    leaf: Node,
    pairs: list[tuple[Node, Node]],
    added: list[tuple[Node, Node]],
) -> Node:
    """The backward's input for a forward node: the one that has it already, or a new one at its place."""
    val = leaf.meta["val"]
    symbolic = not isinstance(val, torch.Tensor)
    for node, placeholder in added if symbolic else pairs:
        if node is leaf or (symbolic and _expr(node.meta["val"]) == _expr(val)):
            return placeholder
    before = value.bw_node
    if symbolic:
        known = {p for _, p in added}
        before = next(p for p in bw.graph.find_nodes(op="placeholder") if p not in known)
    with bw.graph.inserting_before(before):
        placeholder = bw.graph.placeholder(_clean_name(f"{value.row.name}_packed_{i}"))
    placeholder.target = placeholder.name  # the argument's name in the code; two packings of one value need two
    placeholder.meta = {"val": val}
    if "desc" in value.bw_node.meta:
        placeholder.meta["desc"] = value.bw_node.meta["desc"]
    leaf.meta["aot_hooks_packed"] = True  # an outer graph that saves it again must not pack it again
    if value.fw_node.meta.get("saved_tensor_with_no_vc_check"):
        leaf.meta["saved_tensor_with_no_vc_check"] = True
    (added if symbolic else pairs).append((leaf, placeholder))
    return placeholder


def _expr(value: Any) -> str:
    return str(value.node.expr) if hasattr(value, "node") else str(value)


def _read_from(bw: GraphModule, out: Node, readers: list[Node], unit: Unit, first: Node) -> None:
    """Make `readers` read the unpacked `out`, or what is made from it, instead of the placeholders of `unit`."""
    head = unit.saved
    wanted = set(readers)
    base: Node | None = None
    for member in [head, *unit.views]:
        source = out
        with bw.graph.inserting_before(first):
            if member.bw_node in unit.replays:
                for node in unit.replays[member.bw_node]:
                    source = _call(bw.graph, node.target, (source, *node.args[1:]), dict(node.kwargs))
            elif not _same_view(head.value, member.value):
                if base is None:
                    # a copy of its own: as_strided counts from the start of the storage
                    dense = {"memory_format": torch.preserve_format}
                    base = _call(bw.graph, torch.ops.aten.clone.default, (out,), dense)
                like = member.value
                offset = like.storage_offset() - head.value.storage_offset()
                layout = (list(like.shape), list(like.stride()), offset)
                source = _call(bw.graph, torch.ops.aten.as_strided.default, (base, *layout), {})
        for reader in list(member.bw_node.users):
            if reader in wanted:
                reader.replace_input_with(member.bw_node, source)


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()


def _call(graph: Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    node = graph.call_function(target, args, kwargs)
    vals = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    with torch_values.tracing_on_fakes(args[0].meta["val"].fake_mode):
        node.meta["val"] = target(*vals, **kwargs)
    return node


def _set_outputs(
    fw: GraphModule,
    boundary: Boundary,
    crossing: dict[Node, list[tuple[Node, Node]]],
    symints: list[tuple[Node, Node]],
) -> None:
    output = fw.graph.output_node()
    old = list(output.args[0])  # type: ignore[arg-type]
    descs = output.meta.get("desc") or []
    by_node: dict[Any, Any] = dict(zip(old, descs, strict=True)) if len(descs) == len(old) else {}
    saved: list[Any] = []
    for value in boundary.tensors:
        saved += [node for node, _ in crossing.get(value.bw_node, [(value.fw_node, value.bw_node)])]
        by_node.update(
            (node, by_node.get(value.fw_node)) for node, _ in crossing.get(value.bw_node, []) if node not in by_node
        )
    saved += [node for node, _ in boundary.opaque]
    saved += [node for node, _ in symints]
    output.args = (tuple(boundary.user_outputs + saved),)
    if by_node:
        output.meta["desc"] = [*descs[: len(boundary.user_outputs)], *(by_node.get(n) for n in saved)]


def packed_bytes(leaves: Iterable[Node]) -> int:
    """Bytes of the storages behind `leaves`, each once."""
    storages = {}
    for leaf in leaves:
        val = leaf.meta["val"]
        if isinstance(val, torch.Tensor):
            storages[torch_values.storage_key(val)] = torch_values.hint(val.untyped_storage().nbytes())
    return sum(storages.values())
