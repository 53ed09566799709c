"""The range of the whole numbers in a saved tensor, by the operator that made it.

      idx = argmax(x, 1)                 x f32[n, 10]                  value_range(idx) = (0, 9)
      _, idx = max_pool2d(x, 2)          x f32[n, c, 56, 56]           (0, 3135)
      _, idx = sort(x, 0)                x f32[s, 8], s symbolic       None, or what the graph admits for s

`lossless()` and answers.py store such a tensor in as few bits as the range needs. This is for the indices of pooling:
with Inductor a VGG-like network saves 8% fewer bytes by it and a small ResNet 2%; on top of int8, 28% and 5% of what
is left. GPT, Llama, ViT and state-space models save none of these. So the table has indices and signs, and does no
arithmetic. Ranges are read off the graph, without a guard.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from ..torch_private.values import upper_bound
from .nodes import argument_called, target_name
from .read_tables import CONVERSIONS, FLOATS, MOVES_BY_INDEX

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_Range = tuple[int, int] | None


def value_range(node: Node) -> _Range:
    """(smallest, largest) number that the forward's `node` can hold, all of them whole and none -0.0; None if the
    operators prove no more than the dtype."""
    found = _range(node)
    return None if found == _of_dtype(node.meta["val"].dtype) else found


def _range(node: Node) -> _Range:
    """The range of `node` by its operators, or that of its dtype."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    call, name = node, target_name(node)
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        call, name = node.args[0], f"{node.args[0].target}[{node.args[1]}]"
    if name in MOVES_BY_INDEX | CONVERSIONS and isinstance(node.args[0], Node):
        found = _range(node.args[0])
    else:
        found = _RANGES[name](call) if name in _RANGES else None
    # floating-point: small numbers only, which every format has
    low, high = (-256, 256) if value.dtype in FLOATS else _of_dtype(value.dtype) or (0, -1)
    fits = found is not None and low <= found[0] and found[1] <= high  # else an integer may wrap around
    return found if fits else _of_dtype(value.dtype)


def _of_dtype(dtype: torch.dtype) -> _Range:
    if dtype is torch.bool:
        return 0, 1
    return (torch.iinfo(dtype).min, torch.iinfo(dtype).max) if dtype in _INTEGERS else None


def _below(*sizes: Any) -> _Range:
    """0 <= i < the product of `sizes`; a symbolic size counts as the largest that the graph admits, without a guard."""
    bounds: list[Any] = [upper_bound(size) if isinstance(size, torch.SymInt) else size for size in sizes]
    count = 0 if None in bounds else math.prod(bounds)
    return (0, count - 1) if count > 0 else None


def _shape(call: Any) -> Any:
    return call.args[0].meta["val"].shape


def _index(call: Any) -> _Range:
    """Positions along the dimension `dim` of an operator; over the whole tensor if that is None."""
    shape, dim = _shape(call), argument_called("dim", call)
    return _below(*shape) if dim is None or not shape else _below(shape[dim])


def _window(call: Any, spatial: int) -> _Range:
    """Positions in the plane or volume that a max pooling runs over."""
    steps = argument_called("dilation", call) or 1
    steps = list(steps) if isinstance(steps, list | tuple) else [steps]
    end = 1
    for size, step in zip(_shape(call)[-spatial:], steps * spatial if len(steps) == 1 else steps, strict=True):
        along = _below(size)
        if along is None:
            return None
        # a window that starts in the padding starts at most dilation - 1 inside, which may be past the end
        end = (end - 1) * (along[1] + 1) + max(along[1] + 1, int(step))
    return _below(end)


_RANGES: dict[str, Callable[[Any], _Range]] = {  # by operator; "operator[i]" for one of its results
    **dict.fromkeys(("aten.argmax.default", "aten.argmin.default", "aten.max.dim[1]", "aten.min.dim[1]"), _index),
    **dict.fromkeys(("aten.median.dim[1]", "aten.nanmedian.dim[1]", "aten.mode.default[1]"), _index),
    **dict.fromkeys(("aten.cummax.default[1]", "aten.cummin.default[1]", "aten.sort.default[1]"), _index),
    **dict.fromkeys(("aten.sort.stable[1]", "aten.topk.default[1]", "aten.kthvalue.default[1]"), _index),
    "aten.max_pool2d_with_indices.default[1]": partial(_window, spatial=2),
    "aten.max_pool3d_with_indices.default[1]": partial(_window, spatial=3),
    "aten.adaptive_max_pool2d.default[1]": lambda call: _below(*_shape(call)[-2:]),
    "aten.adaptive_max_pool3d.default[1]": lambda call: _below(*_shape(call)[-3:]),
    "prims._low_memory_max_pool_with_offsets.default[1]": lambda call: _below(*call.args[1]),  # the kernel's sizes
    # (0 < x) - (x < 0): of NaN and of -0.0 it is 0.0
    **dict.fromkeys(("aten.sign.default", "aten.sgn.default"), lambda call: (-1, 1)),
}
