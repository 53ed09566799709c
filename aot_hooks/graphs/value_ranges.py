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
from .read_tables import CONVERSIONS, FLOATS, MOVES_BY_INDEX

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_Range = tuple[int, int] | None


def value_range(node: Node) -> _Range:
    """(smallest, largest) number that the forward's `node` can hold, all of them whole and none -0.0; None if the
    operators prove no more than the dtype."""
    found = _range(node)
    return None if found == _of_dtype(node.meta["val"].dtype) else found


def _range(node: Node) -> _Range:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    found: _Range = None
    if node.op == "call_function":
        call, name = node, str(node.target)
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            call, name = node.args[0], f"{node.args[0].target}[{node.args[1]}]"
        if name in MOVES_BY_INDEX | CONVERSIONS and isinstance(node.args[0], Node):
            found = _range(node.args[0])
        elif name in _RANGES:
            found = _RANGES[name](call)
    # floating-point: small numbers only, which every format has
    low, high = (-256, 256) if value.dtype in FLOATS else _of_dtype(value.dtype) or (0, -1)
    fits = found is not None and low <= found[0] and found[1] <= high  # else an integer may wrap around
    return found if fits else _of_dtype(value.dtype)


def _of_dtype(dtype: torch.dtype) -> _Range:
    if dtype is torch.bool:
        return 0, 1
    return (torch.iinfo(dtype).min, torch.iinfo(dtype).max) if dtype in _INTEGERS else None


def _argument(node: Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _largest(size: Any) -> int | None:
    """The largest that a size can be in any run of the graph, without a guard; None if there is no bound."""
    if isinstance(size, int):
        return size
    return upper_bound(size) if isinstance(size, torch.SymInt) else None


def _positions(*sizes: Any) -> _Range:
    """0 <= i < the product of `sizes`; a symbolic size counts as the largest that the graph admits."""
    bounds = [_largest(size) for size in sizes]
    known = [bound for bound in bounds if bound is not None]
    product = math.prod(known)
    return (0, product - 1) if len(known) == len(bounds) and product > 0 else None


def _shape(call: Any) -> Any:
    return call.args[0].meta["val"].shape


def _index(call: Any, position: int, default: Any = None) -> _Range:
    """Positions along the dimension that the argument at `position` names; over the whole tensor if it is None."""
    shape = _shape(call)
    dim = _argument(call, position, "dim", default)
    return _positions(*shape) if dim is None or not shape else _positions(shape[dim])


def _window(call: Any, spatial: int) -> _Range:
    """Positions in the plane or volume that a max pooling runs over."""
    dilation = _argument(call, 4, "dilation", 1) or 1
    steps = list(dilation) if isinstance(dilation, list | tuple) else [dilation]
    steps = steps * spatial if len(steps) == 1 else steps
    last = 0
    for size, step in zip(map(_largest, _shape(call)[-spatial:]), steps, strict=True):
        if size is None:
            return None
        # a window that starts in the padding starts at most dilation - 1 inside, which may be past the end
        last = last * size + max(size, int(step)) - 1
    return 0, last


_RANGES: dict[str, Callable[[Any], _Range]] = {  # by operator; "operator[i]" for one of its results
    **dict.fromkeys(("aten.argmax.default", "aten.argmin.default"), partial(_index, position=1)),
    **dict.fromkeys(("aten.max.dim[1]", "aten.min.dim[1]"), partial(_index, position=1)),
    **dict.fromkeys(("aten.median.dim[1]", "aten.nanmedian.dim[1]"), partial(_index, position=1)),
    **dict.fromkeys(("aten.cummax.default[1]", "aten.cummin.default[1]"), partial(_index, position=1)),
    **dict.fromkeys(("aten.mode.default[1]", "aten.sort.default[1]"), partial(_index, position=1, default=-1)),
    **dict.fromkeys(("aten.sort.stable[1]", "aten.topk.default[1]"), partial(_index, position=2, default=-1)),
    "aten.kthvalue.default[1]": partial(_index, position=2, default=-1),
    "aten.max_pool2d_with_indices.default[1]": partial(_window, spatial=2),
    "aten.max_pool3d_with_indices.default[1]": partial(_window, spatial=3),
    "aten.adaptive_max_pool2d.default[1]": lambda call: _positions(*_shape(call)[-2:]),
    "aten.adaptive_max_pool3d.default[1]": lambda call: _positions(*_shape(call)[-3:]),
    "prims._low_memory_max_pool_with_offsets.default[1]": lambda call: _positions(*call.args[1]),  # the kernel's sizes
    # (0 < x) - (x < 0): of NaN and of -0.0 it is 0.0
    **dict.fromkeys(("aten.sign.default", "aten.sgn.default"), lambda call: (-1, 1)),
}
