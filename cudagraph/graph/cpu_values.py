"""Moves values of a graph from the CPU to the device where they need not be on the CPU.

    torch.arange(n).to("cuda")           created on the device
    torch.tensor([1, 2], device="cuda")  a constant: moved when the graph is compiled, not in every call
    x[..., 0] = 3                        a known number: created on the device, too
    x * s   with s a number on the CPU   s is copied before the graph, once, and x * s can be captured

Each rewrite gives the same bits. A number stays on the CPU if it is computed with floats of 16 bits or fewer: a kernel
rounds one on the device to the tensor's type first. `arange` of floats stays, too: the CPU adds up in float64.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..torch_private import cuda as torch_cuda
from .blockers import CPU, attribute_of, tensors_of, value_of

aten = torch.ops.aten

_FACTORIES = {aten.arange.default, aten.arange.start, aten.arange.start_step, aten.eye.default, aten.eye.m}
_FACTORIES |= {aten.full.default, aten.zeros.default, aten.ones.default, aten.scalar_tensor.default}
_FACTORIES |= {aten.tril_indices.default, aten.triu_indices.default}

# Operators that write a number unchanged and compute nothing with it.
_COPYING = {aten.copy.default, aten.copy_.default, aten.fill.Tensor}
_COPYING |= {aten.index_put.default, aten.masked_fill.Tensor, aten.where.self}


def prepare(gm: GraphModule, device: torch.device, *, numbers: bool) -> None:
    """Rewrite `gm` in place for capture on `device`; with `numbers`, also operators that read a number from the CPU."""
    if device.type == "cpu":
        return
    before = list(gm.graph.nodes)
    _create_on_device(gm, device)
    _copy_constants(gm, device)
    _move_numbers(gm, device, unknown=numbers)
    if list(gm.graph.nodes) != before:  # each rewrite adds or erases nodes
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
        gm.recompile()


def _moved_to(node: Node, device: torch.device) -> bool:
    """Whether `node` copies a tensor from the CPU to `device` and changes nothing else about it."""
    if node.target not in (torch_cuda.to_copy, torch.ops.prims.device_put.default):
        return False
    source, result = value_of(node.all_input_nodes[0]), value_of(node)
    if not isinstance(source, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    return source.device == CPU and result.device == device and source.dtype == result.dtype


def _create_on_device(gm: GraphModule, device: torch.device) -> None:
    """Create tensors on the device that are copied there anyway."""
    for node in list(gm.graph.nodes):
        if node.target not in _FACTORIES or not node.users or not all(_moved_to(u, device) for u in node.users):
            continue
        if node.target.overloadpacket is aten.arange and value_of(node).is_floating_point():
            continue
        copies = list(node.users)
        node.kwargs = {**node.kwargs, "device": device, "pin_memory": False}
        node.meta = {**node.meta, "val": copies[0].meta["val"]}
        for copy in copies:
            copy.replace_all_uses_with(node)
            gm.graph.erase_node(copy)


def _constant_behind(node: Node) -> torch.Tensor | None:
    """The constant behind `torch.tensor(...)` in the user's code, which `node` copies; None for other nodes."""
    if node.target is not aten.lift_fresh_copy.default:
        return None
    constant = attribute_of(node.all_input_nodes[0])
    return constant if type(constant) is torch.Tensor else None


def _copy_constants(gm: GraphModule, device: torch.device) -> None:
    """Move constants to the device, once. Each call copies them there, because the user may write to the copy."""
    for node in list(gm.graph.nodes):
        constant = _constant_behind(node.all_input_nodes[0]) if _moved_to(node, device) else None
        if constant is None:
            continue
        name = next(name for i in itertools.count() if not hasattr(gm, name := f"_on_device_{i}"))
        with torch_cuda.without_modes():
            gm.register_buffer(name, constant.to(device), persistent=False)
        with gm.graph.inserting_before(node):
            on_device = gm.graph.get_attr(name)
            fresh = gm.graph.call_function(aten.lift_fresh_copy.default, (on_device,))  # Inductor drops a clone
        on_device.meta = {"val": node.meta["val"]}
        fresh.meta = dict(node.meta)
        node.replace_all_uses_with(fresh)
        gm.graph.erase_node(node)


def _move_numbers(gm: GraphModule, device: torch.device, *, unknown: bool) -> None:
    """Create known numbers on the device, and with `unknown` copy the others, for operators that read them there."""
    for node in list(gm.graph.nodes):
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or value.device != CPU or value.ndim > 0:
            continue
        known = _known(node)
        readers = [user for user in node.users if _reads_the_same_on(device, user)]
        if not readers or (known is None and not unknown):
            continue
        # after the last placeholder, if it is one
        after = gm.graph.find_nodes(op="placeholder")[-1] if node.op == "placeholder" else node
        with gm.graph.inserting_after(after):
            if known is None:
                moved = gm.graph.call_function(torch_cuda.to_copy, (node,), {"device": device, "non_blocking": True})
            else:
                settings: dict[str, Any] = {"dtype": value.dtype, "device": device, "pin_memory": False}
                moved = gm.graph.call_function(aten.full.default, ([], known), settings)
        moved.meta = {k: v for k, v in readers[0].meta.items() if k == "stack_trace"}
        with torch_cuda.fake_mode_of(value):  # `new_empty` would start CUDA, in 2.11
            moved.meta["val"] = torch.empty((), dtype=value.dtype, device=device)
        for reader in readers:
            reader.replace_input_with(node, moved)


def _known(node: Node) -> bool | int | float | complex | None:
    """The number that the tensor of `node` always has; None if unknown."""
    constant = _constant_behind(node)
    if constant is not None:
        with torch_cuda.without_modes():
            return constant.item() if constant.numel() == 1 else None
    number: Any = node.args[-1] if node.target in (aten.full.default, aten.scalar_tensor.default) else None
    return number if isinstance(number, bool | int | float | complex) else None


def _reads_the_same_on(device: torch.device, node: Node) -> bool:
    """Whether an operator gives the same bits for a number on the CPU and on `device`."""
    copies = node.target in _COPYING
    if not copies and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return False
    outputs, inputs = tensors_of(node), tensors_of(*node.all_input_nodes)
    if not outputs or any(t.device != device for t in outputs) or not any(t.device == device for t in inputs):
        return False
    return copies or all(not t.is_floating_point() or t.dtype.itemsize >= 4 for t in (*outputs, *inputs))
