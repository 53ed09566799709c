"""How fast a device is: rates, and attention alone, each measured once in a process, and once for all ranks of a job.

Fused attention is measured for its sizes, because its speed hangs on the size of the heads, on masks and on dropout: by
a factor of three on an H100, where a product of matrices is within a tenth of what the rate says. A CPU has no copy
engine: its copies count as instant.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..errors import OptionError
from ..torch_private import ranks
from ..torch_private import values as torch_values
from .nodes import argument_called

log = logging.getLogger("aot_hooks")
_ENOUGH = 32 << 20  # bytes of queries that fill a device: the time of more grows with their number
_LEAST_MS = 0.05  # a shorter time is the host's, to launch the kernel
_MEET_S = 0.5  # seconds that a rank waits for the others of its host at most; not measured
_TOGETHER_S = 0.05  # seconds for which the ranks copy: if one comes 20 ms late, all copy at once for most of it
_MEASURED = "aten._scaled_dot_product_"  # other attention takes lengths or functions, which can't be made up


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


def measured_rates(device: torch.device) -> Rates:
    """The rates of `device`, measured on the first call; `INSTANT` for a CPU.

    Raises `OptionError` for a device that nothing here can measure, such as "xpu".
    """
    if device.type not in ("cuda", "cpu", "meta"):
        raise OptionError(
            f"expected tensors on a CUDA or ROCm device, whose speed budgets measure, or on the CPU; got device "
            f"'{device}'. Choose a hook or policy yourself there"
        )
    return _measured(device.index or 0) if device.type == "cuda" else INSTANT


def _cuda(index: int) -> torch.device:
    return torch.device("cuda", index)


@functools.cache
def _measured(index: int) -> Rates:
    """The rates of a CUDA device, measured once. Ranks of a job with equal devices agree on them."""
    device = _cuda(index)
    copied = 64 << 20
    with torch_values.without_modes(), torch.no_grad(), torch.cuda.device(device), torch.random.fork_rng([index]):
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
    # two digits, so that another process finds the same plan
    own = " ".join(f"{rate:.1e}" for rate in speeds.values())
    found = ranks.agreed(f"rates of {torch.cuda.get_device_name(index)}", own)
    return Rates(**dict(zip(speeds, map(float, found.split()), strict=True)))


def link_share(device: torch.device) -> float:
    """The share of its speed that the link of a CUDA device has while all ranks of its host copy to the host.

    The GPUs of a host may share a path to its memory: four H200s have 33 to 37 GB/s each at once, 55 one by one.
    Measured on the first call, and rounded to tenths, from 0.1 to 1.0; ranks agree on it. 1.0 if there is no other
    rank, or if one does not come to measure.
    """
    return _link_share(device.index or 0) if device.type == "cuda" else 1.0


@functools.cache
def _link_share(index: int) -> float:
    name = "link of all ranks of a host"
    own = round(_copied_together(index) / _measured(index).to_host, 1) if ranks.meet(name, _MEET_S) else 1.0
    return float(ranks.agreed(name, repr(min(1.0, max(0.1, own)))))


def _copied_together(index: int) -> float:
    """Bytes a second that are copied to the host for `_TOGETHER_S`."""
    device, copied = _cuda(index), 64 << 20
    with torch_values.without_modes(), torch.no_grad(), torch.cuda.device(device):
        block = torch.empty(copied, dtype=torch.uint8, device=device)
        host = torch.empty(copied, dtype=torch.uint8, pin_memory=True)
        count = math.ceil(_TOGETHER_S * _measured(index).to_host / copied)
        return copied / _seconds(lambda: host.copy_(block, non_blocking=True), count, statistics.median)


def _seconds(work: Callable[[], Any], runs: int = 6, of: Callable[[Iterable[float]], float] = min) -> float:
    """The time of the fastest of several `runs`, by the device's clock; or another statistic `of` their times."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    work()
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    marks[-1].synchronize()
    return float(of(a.elapsed_time(b) for a, b in itertools.pairwise(marks))) / 1e3


class Like(NamedTuple):
    """A tensor without its content."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self, whole: tuple[int, ...], part: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Such a tensor with random content, for a `part` of the `whole` numbers of samples and of heads."""
        sizes = self.shape
        if len(sizes) > 2 and sizes[0] == whole[0]:
            sizes = (part[0], part[1] if sizes[1] == whole[1] else sizes[1], *sizes[2:])
        own = [1 if step == 0 else n for n, step in zip(sizes, self.stride, strict=True)]
        x = torch.empty_strided(own, self.stride, dtype=self.dtype, device=device)
        return (x.normal_(generator=torch.Generator(device)) if x.is_floating_point() else x.zero_()).expand(sizes)


def leaves_of(values: Any) -> tuple[Any, tuple[tuple[type, Any], ...]]:
    """The spec and the leaves of a pytree for caches, without guards: symbolic sizes count as their hints.

    Nodes stand for their values, tensors become `Like`s. Each leaf comes with its type, because `1 == True`.
    """

    def plain(value: Any) -> Any:
        value = value.meta.get("val") if isinstance(value, Node) else value
        if isinstance(value, torch.Tensor):
            stride = value.stride() if value.layout is torch.strided else ()
            return Like(tuple(map(torch_values.hint, value.shape)), tuple(map(torch_values.hint, stride)), value.dtype)
        return torch_values.hint(value) if isinstance(value, torch.SymInt) else value

    leaves, spec = torch_values.pytree.tree_flatten(values)
    return spec, tuple((type(leaf), leaf) for leaf in map(plain, leaves))


def measured_ms(node: Node) -> float | None:
    """Milliseconds of the operator of `node`, a fused attention or its backward, alone on the device of its tensors.

    None where it is not measured: another form of attention, such as one of sequences of different lengths, or a
    backward that may have dropout, which reads where random numbers came from (cuDNN's does so on the device).
    Rounded to two digits, so that another process makes the same plan.
    """
    values = (n.meta.get("val") for n in node.all_input_nodes)
    device = next((v.device for v in values if isinstance(v, torch.Tensor) and v.is_cuda), None)
    name = str(getattr(node.target, "overloadpacket", ""))
    unsafe = "backward" in name and "cudnn" not in name and argument_called("dropout_p", node) != 0
    if device is None or not name.startswith(_MEASURED) or unsafe or not torch.cuda.is_available():
        return None
    try:
        return _alone_ms(node.target, *leaves_of((node.args, dict(node.kwargs))), device.index or 0)
    except torch.OutOfMemoryError:  # later there may be memory
        return None


@functools.lru_cache(maxsize=1024)
def _alone_ms(target: Any, spec: Any, typed_leaves: tuple[tuple[type, Any], ...], index: int) -> float | None:
    """The operator `target` with random tensors, and with as many samples and heads as fill the device."""
    device = _cuda(index)
    leaves = [x for _, x in typed_leaves]
    queries = [x for x in leaves if isinstance(x, Like) and len(x.shape) == 4]
    if not queries or any(0 in x.shape for x in queries):
        return None
    whole = queries[0].shape[:2]
    of_head = math.prod(queries[0].shape[2:]) * queries[0].dtype.itemsize
    samples = min(whole[0], max(1, _ENOUGH // (of_head * whole[1])))
    grouped = any(x.shape[1] not in (1, whole[1]) for x in queries)  # heads that share keys
    heads = whole[1] if samples > 1 or grouped else min(whole[1], max(1, _ENOUGH // of_head))
    with torch_values.without_modes(), torch.no_grad(), torch.cuda.device(device), torch.random.fork_rng([index]):
        try:
            made = [x.made(whole, (samples, heads), device) if isinstance(x, Like) else x for x in leaves]
            args, kwargs = torch_values.pytree.tree_unflatten(made, spec)
            ms = 1e3 * _seconds(lambda: target(*args, **kwargs))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # an estimate must not break a compilation
            log.info("%s was not measured: %s", target, error)
            return None
    own = f"{ms * whole[0] * whole[1] / (samples * heads):.1e}" if ms >= _LEAST_MS else ""
    found = ranks.agreed(f"ms of {target} of {leaves} as {spec} on {torch.cuda.get_device_name(index)}", own)
    return float(found) if found else None
