"""Hooks go into the forward and backward graphs, as units and their packings say; nothing is chosen here.

      forward                                   backward
        x = mul(a, b)                             q, s = placeholders        # where x was
        y = exp(x)        # last use of x         g1 = mm(tangents_1, w)
        q, s = pack(x)    # right after it        x' = unpack(q, s)          # right before
        ...                                       g2 = mul(g1, x')           # the first use
        return y, q, s    # where x was

New symbolic ints go to the end of the forward's outputs and before the first tensor of the backward's inputs; one
expression crosses once. AOTAutograd counts symints and finds donated buffers afterwards, by `meta["val"]`. So each new
node gets a value of its own: its operator runs on fake tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from cudagraph.placeholder import after_inputs

from ..graphs.layout import fake_in, in_layout, in_memory_order, laid_out, layout_of
from ..graphs.nodes import PACKED, has_tag, storage_of
from ..graphs.saved import Boundary, SavedValue
from ..torch_private import values as torch_values
from ..torch_private.inductor_fusion import FROM_HOOK, mark_alone
from .edits import call, clean_name, insert_backward_input, last_use, set_saved, with_inputs
from .plan import has_symbols, same_view
from .sum_of_one import with_sum_of_one
from .units import Packing, Unit, leaf_bytes_of

_CONSTANT = "_aot_hooks_constant_"  # attributes of the graphs
_Pairs = list[tuple[Node, Node]]  # forward nodes that cross, each with its backward placeholder


def inline(
    fw: GraphModule,
    bw: GraphModule,
    boundary: Boundary,
    units: Iterable[Unit],
    decompositions: Mapping[Any, Any] | None = None,
) -> tuple[Unit, ...]:
    """Put the packings of `units` into both graphs, in place; returns the units with the leaves that cross."""
    units = tuple(units)
    ends = [after_inputs(_last_use(unit)) for unit in units]
    crossing: dict[Node, _Pairs] = {}  # by the old backward placeholder
    numbers: _Pairs = list(boundary.symints)
    inlined: list[Unit] = []
    for unit, end in zip(units, ends, strict=True):
        slot = unit.saved.bw_node
        crossing[slot] = [(unit.saved.fw_node, slot)] if unit.keep else []
        crossing.update((v.bw_node, []) for v in unit.views)
        packings = []
        for packing in unit.packings:
            if unit.keep:
                leaves, strides = _pack_in_backward(bw, unit, packing)
            else:
                packing, leaves, strides = _pack_in_forward(fw, bw, unit, packing, end, crossing[slot], numbers)
            _unpack(bw, unit, packing, leaves, strides, numbers, decompositions)
            packings.append(packing)
        inlined.append(replace(unit, packings=tuple(packings)))
    _set_outputs(fw, boundary, crossing, numbers)
    for unit in inlined:
        for saved in (*(() if unit.keep else (unit.saved,)), *unit.views):
            bw.graph.erase_node(saved.bw_node)
    return tuple(inlined)


def _pack_in_backward(bw: GraphModule, unit: Unit, packing: Packing) -> tuple[list[Node], list[Node]]:
    """Pack a value that crosses as it is, before its first reader. Returns the packed leaves, and its real strides."""
    slot = unit.saved.bw_node
    with bw.graph.inserting_before(min(packing.readers)):
        name = f"{unit.saved.row.name}_pack"
        leaves = _copy_in(packing.traced.pack, bw, [_laid_out(bw, slot, unit)], name)
        return leaves, _layout_of(bw, slot, unit, packing)


def _pack_in_forward(
    fw: GraphModule, bw: GraphModule, unit: Unit, packing: Packing, end: Node, pairs: _Pairs, numbers: _Pairs
) -> tuple[Packing, list[Node], list[Node]]:
    """Pack a value in the forward and have the result cross.

    Returns `packing` with the leaves of the forward, and the inputs of the backward for these leaves and for the real
    strides of the value. `end`: see `_pack`. `pairs`, `numbers`: see `_cross`.
    """
    leaves = _pack(fw, unit, packing, end)
    with fw.graph.inserting_after(max([end, *leaves])):
        strides = _layout_of(fw, unit.source, unit, packing)
    crossed = [_cross(bw, unit.saved, i, leaf, pairs, numbers) for i, leaf in enumerate((*leaves, *strides))]
    packing = replace(packing, leaves=tuple(leaves), packed_bytes=leaf_bytes_of(leaves))
    return packing, crossed[: len(leaves)], crossed[len(leaves) :]


def _unpack(
    bw: GraphModule,
    unit: Unit,
    packing: Packing,
    leaves: list[Node],
    strides: list[Node],
    numbers: _Pairs,
    decompositions: Mapping[Any, Any] | None,
) -> None:
    """Unpack `leaves` before the first reader of `packing`, and have its readers read the result."""
    with bw.graph.inserting_before(min(packing.readers)):
        (out,) = _copy_in(packing.traced.unpack, bw, leaves, f"{unit.saved.row.name}_unpack")
        for layout in strides:
            with_gaps = not packing.hook.lossy  # the numbers are rounded anyway, and gaps take memory
            out = _from_hook(bw, in_layout, out, layout, with_gaps, value=unit.source.meta["val"])
        if packing.hook.lossy:
            out = with_sum_of_one(bw, out, unit.saved, unit.views, packing.readers, decompositions=decompositions)
        _read_from(bw, out, packing.readers, unit, numbers)


def _last_use(unit: Unit) -> Node:
    """The node of the forward after which `unit` is packed: the last that reads its source.

    A source with memory of its own is read where the copy of it is made, so as not to keep it for longer. Inductor's
    kernels make a transpose where it is read, so its source is packed there, too.
    """
    value = unit.saved.fw_node
    same = unit.source is value or (unit.layout is not None and storage_of(unit.source) == storage_of(value))
    return last_use(unit.source) if same else value


def _laid_out(gm: GraphModule, source: Node, unit: Unit) -> Node:
    """`source` in the layout that the hooks of `unit` were traced with."""
    if unit.layout is None:
        return source
    value = source.meta["val"]
    with torch_values.tracing_on_fakes(value.fake_mode):
        value = fake_in(unit.layout, value)
    return _from_hook(gm, laid_out, source, unit.layout.order, unit.layout.strides, value=value)


def _layout_of(gm: GraphModule, source: Node, unit: Unit, packing: Packing) -> list[Node]:
    """The real strides of `source`, if what `packing` gives back is to have them."""
    if unit.layout is None or packing.traced.identity:
        return []
    value = source.meta["val"]
    with torch_values.tracing_on_fakes(value.fake_mode):
        value = layout_of(value)
    return [_from_hook(gm, layout_of, source, value=value)]


def _from_hook(gm: GraphModule, target: Any, *args: Any, value: torch.Tensor) -> Node:
    """A call of a function of `layout.py`, with its fake value. Run on fake tensors, it would guard on strides."""
    node = gm.graph.call_function(target, args)
    node.meta.update({"val": value, FROM_HOOK: True})
    return node


def _pack(fw: GraphModule, unit: Unit, packing: Packing, end: Node) -> list[Node]:
    """Copy the pack into the forward at the positions that `packing` asks for, by default after `end`."""
    pack, name = packing.traced.pack, f"{unit.saved.row.name}_pack"
    definition = after_inputs(unit.source)
    env: dict[Node, Node] = {}
    if packing.pack_at_definition:
        end = definition
    elif packing.scale_at_definition and definition is not end:
        reductions = [n for n in pack.graph.nodes if has_tag(n, torch.Tag.reduction)]
        with fw.graph.inserting_before(definition.next):
            _copy_in(pack, fw, [unit.source], name, env, only=with_inputs(reductions))
    with fw.graph.inserting_before(end.next):
        source = unit.source if packing.traced.identity else _laid_out(fw, unit.source, unit)
        leaves = _copy_in(pack, fw, [source], name, env)
    if packing.pack_at_definition:
        mark_alone(list(with_inputs(leaves, {unit.source}.__contains__)), unit.saved.row.name)
    return leaves


def _copy_in(
    source: GraphModule,
    into: GraphModule,
    inputs: Sequence[Node],
    name: str,
    env: dict[Node, Node] | None = None,
    only: Collection[Node] | None = None,
) -> list[Node]:
    """Copy nodes of `source`, or those in `only`, to the insertion point of `into.graph`; returns the outputs.

    `env` has the copies of nodes that are copied already; the new ones are added. Copies get values.
    """
    env = {} if env is None else env
    env.update(zip(source.graph.find_nodes(op="placeholder"), inputs, strict=True))
    values = (n.meta.get("val") for n in into.graph.nodes)
    fake_mode = next(v.fake_mode for v in values if isinstance(v, torch_values.FakeTensor))

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
            new = into.graph.create_node(node.op, node.target, args, kwargs, name=clean_name(f"{name}_{node.name}"))
            new.meta = {k: v for k, v in node.meta.items() if k in ("stack_trace", "original_aten")}
            if isinstance(node.target, torch_values.HigherOrderOperator):
                new.meta["val"] = node.meta["val"]  # its operands are graphs: nothing to run them on here
            else:
                new.meta["val"] = node.target(*value_of(args), **value_of(kwargs))
            new.meta[FROM_HOOK] = True
            env[node] = new
    return []


def _constant(into: GraphModule, constant: Any, fake_mode: Any) -> Node:
    """A `get_attr` node for `constant`, one attribute for one object."""
    held = (*vars(into).items(), *into.named_buffers(recurse=False), *into.named_children())  # graphs are children
    names = {id(v): k for k, v in held if k.startswith(_CONSTANT)}
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
    """Put a `lift_fresh_copy` behind each constant of a hook, for Inductor: the one operator that takes a real tensor
    among fake ones. It becomes a load in the kernel that reads it."""
    for node in gm.graph.find_nodes(op="get_attr"):
        if not str(node.target).startswith(_CONSTANT) or "val" not in node.meta:
            continue
        with gm.graph.inserting_after(node):
            lifted = gm.graph.call_function(torch.ops.aten.lift_fresh_copy.default, (node,))
        lifted.meta.update(node.meta)
        node.replace_all_uses_with(lifted, lambda user, lifted=lifted: user is not lifted)


def _cross(bw: GraphModule, value: SavedValue, i: int, leaf: Node, pairs: _Pairs, numbers: _Pairs) -> Node:
    """The backward's input for `leaf`, the `i`-th of a pack. `pairs` (`numbers` for sizes) has those made so far."""
    val = leaf.meta["val"]
    symbolic = not isinstance(val, torch.Tensor)
    for node, placeholder in numbers if symbolic else pairs:
        if node is leaf or (symbolic and torch_values.expression(node.meta["val"]) == torch_values.expression(val)):
            return placeholder
    before = value.bw_node
    if symbolic:
        known = {p for _, p in numbers}
        before = next(p for p in bw.graph.find_nodes(op="placeholder") if p not in known)
    placeholder = insert_backward_input(bw, before, f"{value.row.name}_packed_{i}", leaf, value)
    leaf.meta[PACKED] = True
    (numbers if symbolic else pairs).append((leaf, placeholder))
    return placeholder


def _read_from(bw: GraphModule, out: Node, readers: Collection[Node], unit: Unit, numbers: _Pairs) -> None:
    """Make `readers` read the unpacked `out`, or a value made from it, instead of the placeholders of `unit`."""
    head = unit.saved
    dense: Node | None = None
    for member in (head, *unit.views):
        source = out
        if member.bw_node in unit.replays:
            for node in unit.replays[member.bw_node]:
                args, kwargs = (_in_backward(bw, a, head, numbers) for a in (node.args[1:], node.kwargs))
                source = call(bw.graph, node.target, source, *args, **kwargs)
        elif same_view(head.value, member.value):
            pass
        elif has_symbols(head.value) or has_symbols(member.value):
            source = _in_shape_of(bw, out, head.value, member.value, numbers)
        else:
            if dense is None:  # as_strided counts from the start of the storage
                dense = call(bw.graph, torch.ops.aten.clone.default, out, memory_format=torch.preserve_format)
            like = member.value
            offset = like.storage_offset() - head.value.storage_offset()
            layout = (list(like.shape), list(like.stride()), offset)
            source = call(bw.graph, torch.ops.aten.as_strided.default, dense, *layout)
        for reader in list(member.bw_node.users):
            if reader in readers:
                reader.replace_input_with(member.bw_node, source)


def _in_backward(bw: GraphModule, arguments: Any, value: SavedValue, numbers: _Pairs) -> Any:
    """`arguments` of a node of the forward for one of the backward: sizes that are no constants cross."""
    return torch.fx.node.map_arg(arguments, lambda size: _cross(bw, value, 0, size, [], numbers))


def _in_shape_of(bw: GraphModule, out: Node, like: torch.Tensor, view: torch.Tensor, numbers: _Pairs) -> Node:
    """The `view` of all memory of `out`, which has the layout of `like`. Its sizes are inputs of the backward."""
    sizes: dict[str, Any] = {torch_values.expression(node.meta["val"]): placeholder for node, placeholder in numbers}
    memory, order = in_memory_order(view, keep_rows=False)
    shape = [sizes.get(torch_values.expression(n), n) for n in memory.shape]  # the others are plain numbers
    if (permutation := in_memory_order(like, keep_rows=False)[1]) is not None:
        out = call(bw.graph, torch.ops.aten.permute.default, out, list(permutation))
    out = call(bw.graph, torch.ops.aten.view.default, out, shape)
    if order is None:
        return out
    return call(bw.graph, torch.ops.aten.permute.default, out, sorted(range(len(order)), key=order.__getitem__))


def _set_outputs(fw: GraphModule, boundary: Boundary, crossing: dict[Node, _Pairs], numbers: _Pairs) -> None:
    """Have the forward save what hooks have packed: `crossing`, by the backward's inputs that were saved before."""
    saved: list[Any] = []
    like: dict[Any, Any] = {}
    for value in boundary.tensors:
        packed = [node for node, _ in crossing.get(value.bw_node, ())]
        saved += packed if value.bw_node in crossing else [value.fw_node]
        for node in packed:
            like.setdefault(node, value.fw_node)
    saved += [node for node, _ in (*boundary.opaque, *numbers)]
    set_saved(fw, len(boundary.user_outputs), saved, like)
