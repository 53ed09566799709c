"""Readers that only compare the saved numbers with constants: their results depend on the outcomes of these tests.

      g = threshold_backward(t, view(h), 0)         tests_of(h) = (Test("le", (0,)),)
      g = avg_pool2d_backward(t, h, ...)            tests_of(h) = (): only the shape is read
      g = mul(t, h)                                 tests_of(h) = None: the numbers are read

lossless.py stores the outcomes in place of the numbers.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ..torch_private import values as torch_values
from .nodes import argument_positions
from .read_tables import ASKS, CONVERSIONS, FLOATS, MOVES, SHAPE_ONLY, Test

__all__ = ["exact_tests", "only_at", "tests_of"]


def tests_of(node: Node, reader: Node | None = None) -> tuple[Test, ...] | None:
    """The tests that decide the results of all readers of `node`, or of one `reader`.

    () if they read the shape only, None if they read the numbers. An operator that only moves data, or converts it to
    a wider format, stands for its own readers.
    """
    value = node.meta["val"]
    if value.dtype not in FLOATS or value.is_neg() or value.device.type not in ("cpu", "cuda"):
        return None
    tests: set[Test] = set()
    stack = [node]
    seen = {node}
    while stack:
        current = stack.pop()
        for user in current.users if reader is None or current is not node else (reader,):
            if _moves_numbers(user, current):
                if user not in seen:
                    seen.add(user)
                    stack.append(user)
                continue
            found = exact_tests(user, current, value.dtype)
            if found is None:
                return None
            tests.update(found)
    return tuple(sorted(tests))


def only_at(user: Node, node: Node, position: int) -> bool:
    """Whether `user` reads `node` as its argument at `position` and nowhere else."""
    return argument_positions(user, node) == [position] and user.args[position] is node


def _moves_numbers(user: Node, node: Node) -> bool:
    name = str(user.target)
    if user.op != "call_function" or not only_at(user, node, 0):
        return False
    if name in MOVES:
        return True
    if name not in CONVERSIONS:
        return False
    before, after = node.meta["val"].dtype, user.meta["val"].dtype
    # a wider format has all numbers of the narrower one, in the same order
    return after in FLOATS and torch.promote_types(before, after) is after


def _tests(user: Node, node: Node) -> tuple[Test, ...] | None:
    name = str(user.target)
    if user.op != "call_function":
        return None
    if name in SHAPE_ONLY:
        return () if only_at(user, node, SHAPE_ONLY[name]) else None
    if name not in ASKS or user.kwargs or not only_at(user, node, ASKS[name][0]):
        return None
    position, read = ASKS[name]
    constants = user.args[position + 1 :]
    if not all(isinstance(c, int | float) and float(c) == c for c in constants):
        return None
    return tuple(
        Test(test.kind, tuple(0.0 if c == 0 else float(c) for c in test.constants)) for test in read(*user.args)
    )


def exact_tests(user: Node, node: Node, dtype: torch.dtype | None = None) -> tuple[Test, ...] | None:
    """The tests that decide the result of `user`, () for the shape only, None if it reads the numbers of `node`.

    None as well if kernels may differ in the outcomes for numbers of `dtype`, by default that of `node`.
    """
    found = _tests(user, node)
    dtype = dtype or node.meta["val"].dtype
    if found is None or dtype not in FLOATS or not all(_exact(c, dtype) for test in found for c in test.constants):
        return None
    return found


def _exact(constant: float, dtype: torch.dtype) -> bool:
    """Whether every kernel compares with `constant` alike: it is a number of the format, and not subnormal.

    Kernels differ in whether they round a constant to the tensor's dtype or the number to theirs, and may take
    subnormal numbers for zero.
    """
    with torch_values.without_modes():
        rounded = torch.tensor(constant, dtype=torch.float64).to(dtype).item()
    return rounded == constant and (constant == 0 or abs(constant) >= 4 * torch.finfo(dtype).tiny)
