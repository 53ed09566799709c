"""Estimates of how long a node takes and how fast a copy is, for plans.

      Rates     bytes a second over the link each way and in the device's memory, multiplications and additions a second
      node_ms   max(operations / rate, bytes / rate), from the formulas of `torch.utils.flop_counter`

Rates are measured once per device, in a few milliseconds, or come from the user. In a fused graph a value between two
pointwise operators costs nothing, as in fusion_memory.py. A CPU has no copy engine: its copies count as instant.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from ..torch_private import values as torch_values
from .fusion_memory import fuses, written_storages
from .nodes import is_view, output_storages, storage_of, storages

__all__ = ["INSTANT", "Rates", "has_formula", "measured_rates", "node_ms", "step_ms"]


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
# the share of a plain matrix product's speed that attention and its backward reach on an H100 or H200
_ATTENTION = 0.65
_ATTENTION_BACKWARD = 0.55


def has_formula(node: Node) -> bool:
    """Whether torch has a formula for the operations of `node`: a matrix product, attention, a convolution."""
    return node.op == "call_function" and _packet(node) in flop_registry


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


def node_ms(gm: GraphModule, rates: Callable[[torch.device], Rates], fused: bool) -> dict[Node, float]:
    """Milliseconds of each node of `gm`, by the fake values on it; symbolic sizes count as their hints.

    With `fused`, pointwise operators and reductions between two unfused kernels are one kernel: it reads each input
    once, and its intermediates cost nothing.
    """
    nodes = list(gm.graph.nodes)
    written = written_storages(nodes) if fused else {storage_of(n) for n in nodes}
    written |= storages(gm.graph.find_nodes(op="placeholder")) | output_storages(gm.graph)
    found: dict[Node, float] = {}
    in_kernel: set[Any] = set()  # storages that the fused kernel has read or made
    for node in nodes:
        found[node] = 0.0
        values = [v for v in torch_values.pytree.tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
        if node.op != "call_function" or is_view(node) or node.target is operator.getitem or not values:
            continue
        unfused = not fused or not (fuses(node) or torch.Tag.reduction in getattr(node.target, "tags", ()))
        if unfused:
            in_kernel = set()
        rate = rates(values[0].device)
        moved = sum(_bytes(v) for v in values) if unfused or storage_of(node) in written else 0
        for key, source in {storage_of(n): n for n in node.all_input_nodes}.items():
            value = source.meta.get("val")
            if isinstance(value, torch.Tensor) and key in written and key not in in_kernel:
                moved += _bytes(value)
            if not unfused:
                in_kernel.add(key)
        if not unfused:
            in_kernel.add(storage_of(node))
        found[node] = 1e3 * moved / rate.memory
        if has_formula(node):
            found[node] = max(found[node], 1e3 * _operation_count(node) / _rate(node, values[0], rate))
    return found


def step_ms(fw: GraphModule, bw: GraphModule, fused: bool) -> float:
    """Milliseconds of a forward and its backward, without waits for copies."""
    return sum(sum(node_ms(gm, measured_rates, fused).values()) for gm in (fw, bw))


def _bytes(value: torch.Tensor) -> int:
    return torch_values.hint(value.numel()) * value.element_size()


def _rate(node: Node, value: torch.Tensor, rates: Rates) -> float:
    rate = rates.operations if value.element_size() <= 2 else rates.operations32
    if "attention" in str(node.target):
        rate *= _ATTENTION_BACKWARD if "backward" in str(node.target) else _ATTENTION
    return rate


def _operation_count(node: Node) -> int:
    def plain(value: Any) -> Any:
        """Sizes as numbers: a formula must leave no guard."""
        value = value.meta.get("val") if isinstance(value, Node) else value
        if isinstance(value, torch.Tensor):
            return torch.empty([torch_values.hint(n) for n in value.shape], dtype=value.dtype, device="meta")
        return torch_values.hint(value) if isinstance(value, torch.SymInt) else value

    with torch_values.without_modes():
        args, kwargs, out = torch_values.pytree.tree_map(plain, (node.args, dict(node.kwargs), node.meta.get("val")))
        count = int(flop_registry[_packet(node)](*args, **kwargs, out_val=out))
    return count // 2 if _causal(node) else count


def _causal(node: Node) -> bool:
    """Whether attention skips half of the products, which the formulas count."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return given.get("is_causal") is True


# --- measuring --------------------------------------------------------------------------------------------------------


def measured_rates(device: torch.device) -> Rates:
    """The rates of `device`, measured on the first call in some ten milliseconds; `INSTANT` for a CPU."""
    if device.type != "cuda":
        return INSTANT
    return _measured(device.index or 0)


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


def _seconds(work: Callable[[], Any], repeats: int = 6) -> float:
    """The time of the fastest of a few runs, by the device's clock."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    work()
    for mark in marks:
        mark.record()
        if mark is not marks[-1]:
            work()
    marks[-1].synchronize()
    return float(min(a.elapsed_time(b) for a, b in itertools.pairwise(marks))) / 1e3
