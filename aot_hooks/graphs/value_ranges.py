"""What the forward can have made: the range of a saved tensor's whole numbers, by the operators that made it.

      idx = argmax(x, 1)                 x f32[n, 10]                  value_range(idx) = (0, 9)
      _, idx = max_pool2d(x, 2)          x f32[n, c, 56, 56]           (0, 3135)
      _, idx = sort(x, 0)                x f32[s, 8], s symbolic       None, or what the graph admits for s
      idx = remainder(tokens, 100)       tokens int64[n]               (0, 99)

Read off the graph, without a guard. An operator that is not in the table is not known.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Node

from .read_tables import CONVERSIONS, FLOATS, MOVES

__all__ = ["value_range"]

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_Range = tuple[int, int] | None
_Look = Callable[[Any], _Range]
_Rule = Callable[[Node, _Look], _Range]
_LOOKED_AT = 200  # how many nodes are looked at for one range


def value_range(node: Node) -> _Range:
    """(smallest, largest) that a number of the forward's `node` can be, all of them whole and none -0.0, by what made
    it; None if nothing is known that its dtype does not say."""
    known: dict[Node, _Range] = {}

    def look(a: Any) -> _Range:
        if isinstance(a, int):  # True and False too
            return int(a), int(a)
        if isinstance(a, float):
            return (int(a), int(a)) if a.is_integer() and (a or math.copysign(1.0, a) > 0) else None
        value = a.meta.get("val") if isinstance(a, Node) else None
        if not isinstance(value, torch.Tensor):
            return None
        if a not in known and len(known) < _LOOKED_AT:
            known[a] = None
            known[a] = _of_node(a, value.dtype, look)
        return known.get(a) or _of_dtype(value.dtype)

    found = look(node)
    return None if found == _of_dtype(node.meta["val"].dtype) else found


def _of_dtype(dtype: torch.dtype) -> _Range:
    if dtype is torch.bool:
        return 0, 1
    return (torch.iinfo(dtype).min, torch.iinfo(dtype).max) if dtype in _INTEGERS else None


def _of_node(node: Node, dtype: torch.dtype, look: _Look) -> _Range:
    rule = _RANGES.get(_name(node)) if node.op == "call_function" else None
    found = rule(node, look) if rule is not None else None
    if found is None:
        return None
    if dtype in FLOATS:
        low, high = -256, 256  # small whole numbers only, which every format has
    else:
        low, high = _of_dtype(dtype) or (0, -1)
    return found if low <= found[0] and found[1] <= high else None  # an integer may wrap around


def _name(node: Node) -> str:
    """The operator; for a part of what one gave, "operator[i]"."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return f"{node.args[0].target}[{node.args[1]}]"
    return str(node.target)


def _argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _largest(size: Any) -> int | None:
    """The largest that a size can be in any run of the graph, without a guard; None if there is no bound."""
    if isinstance(size, int):
        return size
    if not isinstance(size, torch.SymInt):
        return None
    bound = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(bound) if bound.is_Integer else None


def _below(*sizes: Any) -> _Range:
    """0 <= i < the product of `sizes`; a symbolic size counts as the largest that the graph admits."""
    product = 1
    for size in sizes:
        bound = _largest(size)
        if bound is None:
            return None
        product *= bound
    return (0, product - 1) if product > 0 else None


def _of_call(part: bool, position: int, default: Any = None) -> _Rule:
    """Positions along the dimension that an argument names; over the whole tensor if it is None."""

    def rule(node: Node, look: _Look) -> _Range:
        call: Any = node.args[0] if part else node
        shape = call.args[0].meta["val"].shape
        dim = _argument(call, position, "dim", default)
        if dim is None or not shape:
            return _below(*shape)
        return _below(shape[dim])

    return rule


def _max_pool(spatial: int) -> _Rule:
    def rule(node: Node, look: _Look) -> _Range:
        call: Any = node.args[0]
        shape = call.args[0].meta["val"].shape[-spatial:]
        dilation = _argument(call, 4, "dilation", 1) or 1
        steps = list(dilation) if isinstance(dilation, list | tuple) else [dilation]
        steps = steps * spatial if len(steps) == 1 else steps
        # a window that starts in the padding starts at most dilation - 1 inside, which may be past the end
        largest = [_largest(size) for size in shape]
        if any(size is None for size in largest):
            return None
        last = 0
        for size, step in zip(largest, steps, strict=True):
            last = last * int(size or 0) + max(int(size or 0), int(step)) - 1
        return 0, last

    return rule


def _plane(spatial: int) -> _Rule:
    return lambda node, look: _below(*node.args[0].args[0].meta["val"].shape[-spatial:])  # type: ignore[union-attr]


def _offsets(node: Node, look: _Look) -> _Range:
    kernel: Any = node.args[0].args[1]  # type: ignore[union-attr]
    return _below(*kernel)


def _same(node: Node, look: _Look) -> _Range:
    return look(node.args[0])


def _union(ranges: Iterable[_Range]) -> _Range:
    known = list(ranges)
    if not known or any(r is None for r in known):
        return None
    return min(r[0] for r in known if r), max(r[1] for r in known if r)


def _integer(node: Node) -> bool:
    return node.meta["val"].dtype in _INTEGERS


def _arithmetic(combine: Callable[[Any, Any], int]) -> _Rule:
    """For functions that are monotone in each argument: the extremes are at the corners."""

    def rule(node: Node, look: _Look) -> _Range:
        a, b = look(node.args[0]), look(node.args[1])
        if a is None or b is None or node.kwargs or not _integer(node):
            return None
        corners = [combine(x, y) for x in a for y in b]
        return min(corners), max(corners)

    return rule


def _clamp(low: int | None, high: int | None) -> _Rule:
    """`clamp` and its halves; `low`, `high`: where their bounds stand."""

    def rule(node: Node, look: _Look) -> _Range:
        known = look(node.args[0])
        at_least = _argument(node, low, "min") if low is not None else None
        at_most = _argument(node, high, "max") if high is not None else None
        if known is None or not _integer(node) or any(isinstance(b, Node | float) for b in (at_least, at_most)):
            return None
        if at_least is not None:
            known = max(known[0], at_least), max(known[1], at_least)
        if at_most is not None:
            known = min(known[0], at_most), min(known[1], at_most)
        return known

    return rule


def _remainder(node: Node, look: _Look) -> _Range:
    n = node.args[1]
    if not isinstance(n, int) or n == 0 or not _integer(node):
        return None
    return (0, n - 1) if n > 0 else (n + 1, 0)


def _bitwise_and(node: Node, look: _Look) -> _Range:
    masks = [r for r in (look(a) for a in node.args[:2]) if r is not None and r[0] >= 0]
    return (0, min(r[1] for r in masks)) if masks and _integer(node) else None


def _random_integers(low: Any, high: Any) -> _Range:
    return (low, high - 1) if isinstance(low, int) and isinstance(high, int) and low < high else None


def _steps(start: Any, length: Any, step: Any) -> _Range:
    if not isinstance(start, int) or not isinstance(step, int):
        return None
    most = _largest(length)
    if not most:
        return None
    last = start + (most - 1) * step
    return min(start, last), max(start, last)


def _arange(node: Node, look: _Look) -> _Range:
    if not _integer(node):
        return None
    (length,) = node.meta["val"].shape
    start, step = (0, 1) if str(node.target) == "aten.arange.default" else (node.args[0], _argument(node, 2, "step", 1))
    return _steps(start, length, step)


def _iota(node: Node, look: _Look) -> _Range:
    return _steps(node.kwargs.get("start"), node.args[0], node.kwargs.get("step"))


def _of_places(position: int) -> _Rule:
    """Where a number goes among the sorted ones of an argument's last dimension: also after the last."""

    def rule(node: Node, look: _Look) -> _Range:
        value = node.args[position].meta["val"]  # type: ignore[union-attr]
        most = _largest(value.shape[-1]) if value.dim() else None
        return None if most is None else (0, most)

    return rule


def _triangle(node: Node, look: _Look) -> _Range:
    return _union((look(node.args[0]), (0, 0)))


def _constant(position: int) -> _Rule:
    return lambda node, look: look(node.args[position])


_RANGES: dict[str, _Rule] = {
    **dict.fromkeys(MOVES | CONVERSIONS, _same),
    **dict.fromkeys(("aten.gather.default", "aten.index.Tensor", "aten.index_select.default"), _same),
    **dict.fromkeys(("aten.flip.default", "aten.repeat.default", "aten.roll.default"), _same),
    "aten.cat.default": lambda node, look: _union(look(a) for a in node.args[0]),  # type: ignore[union-attr]
    "aten.where.self": lambda node, look: _union(look(a) for a in node.args[1:]),
    "aten.argmax.default": _of_call(False, 1),
    "aten.argmin.default": _of_call(False, 1),
    "aten.max.dim[1]": _of_call(True, 1),
    "aten.min.dim[1]": _of_call(True, 1),
    "aten.median.dim[1]": _of_call(True, 1),
    "aten.nanmedian.dim[1]": _of_call(True, 1),
    "aten.cummax.default[1]": _of_call(True, 1),
    "aten.cummin.default[1]": _of_call(True, 1),
    "aten.mode.default[1]": _of_call(True, 1, -1),
    "aten.sort.default[1]": _of_call(True, 1, -1),
    "aten.sort.stable[1]": _of_call(True, 2, -1),
    "aten.topk.default[1]": _of_call(True, 2, -1),
    "aten.kthvalue.default[1]": _of_call(True, 2, -1),
    "aten.max_pool2d_with_indices.default[1]": _max_pool(2),
    "aten.max_pool3d_with_indices.default[1]": _max_pool(3),
    "aten.adaptive_max_pool2d.default[1]": _plane(2),
    "aten.adaptive_max_pool3d.default[1]": _plane(3),
    "prims._low_memory_max_pool_with_offsets.default[1]": _offsets,
    "aten.add.Tensor": _arithmetic(operator.add),
    "aten.sub.Tensor": _arithmetic(operator.sub),
    "aten.mul.Tensor": _arithmetic(operator.mul),
    "aten.clamp.default": _clamp(1, 2),
    "aten.clamp_min.default": _clamp(1, None),
    "aten.clamp_max.default": _clamp(None, 1),
    "aten.remainder.Scalar": _remainder,
    "aten.bitwise_and.Scalar": _bitwise_and,
    "aten.bitwise_and.Tensor": _bitwise_and,
    "aten.randint.default": lambda node, look: _random_integers(0, node.args[0]) if _integer(node) else None,
    "aten.randint.low": lambda node, look: _random_integers(*node.args[:2]) if _integer(node) else None,
    "prims.inductor_randint.default": lambda node, look: _random_integers(*node.args[:2]),
    "aten.bernoulli.default": lambda node, look: (0, 1),
    "aten.bernoulli.p": lambda node, look: (0, 1),
    "aten.arange.default": _arange,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    "prims.iota.default": _iota,
    "aten.full.default": _constant(1),
    "aten.full_like.default": _constant(1),
    **dict.fromkeys(
        ("aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default"), lambda n, look: (0, 0)
    ),
    **dict.fromkeys(("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default"), lambda n, look: (1, 1)),
    # (0 < x) - (x < 0): of NaN and of -0.0 it is 0.0
    **dict.fromkeys(("aten.sign.default", "aten.sgn.default"), lambda n, look: (-1, 1)),
    **dict.fromkeys(("aten.tril.default", "aten.triu.default"), _triangle),
    "aten.bucketize.Tensor": _of_places(1),
    "aten.searchsorted.Tensor": _of_places(0),
}
