"""What the backward asks of a saved tensor's numbers.

      g = threshold_backward(t, view(h), 0)         asked_of(h) = (Test("le", (0,)),)
      g = avg_pool2d_backward(t, h, ...)            asked_of(h) = (): it looks at the shape only
      g = mul(t, h)                                 asked_of(h) = None: it may need the number

Read off the graph, without a guard. What is not in the tables below is not known: an operator that is missing costs
memory, one that is wrong costs exactness, so each entry is tested bitwise against its kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from . import _compat

__all__ = ["ASKS", "CONVERSIONS", "FLOATS", "MOVES", "SHAPE_ONLY", "TESTS", "Test", "asked_of", "is_exponentiated"]

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# What a test computes, written so that it takes a tensor or a Python number. NaN fails each but "ne" and "isnan".
TESTS: dict[str, Callable[..., Any]] = {
    "le": lambda x, c: x <= c,
    "lt": lambda x, c: x < c,
    "ge": lambda x, c: x >= c,
    "gt": lambda x, c: x > c,
    "eq": lambda x, c: x == c,
    "ne": lambda x, c: x != c,
    "isnan": lambda x: x != x,
    "outside": lambda x, low, high: (x <= low) | (x >= high),
    "inside": lambda x, low, high: (x > low) & (x < high),
    "within": lambda x, low, high: (x >= low) & (x <= high),
    "signbit": lambda x: torch.signbit(x) if isinstance(x, torch.Tensor) else math.copysign(1.0, x) < 0,
}


@dataclass(frozen=True, order=True)
class Test:
    """A yes-or-no question about one number: a key of `TESTS` and its constants."""

    __test__ = False  # no test case, whatever pytest makes of the name

    kind: str
    constants: tuple[float, ...] = ()

    def __call__(self, x: Any) -> Any:
        """The answer for each number of a tensor, or for a Python number."""
        return TESTS[self.kind](x, *self.constants)

    def __repr__(self) -> str:
        return " ".join([self.kind, *(f"{c:g}" for c in self.constants)])


_NAN = Test("isnan")
_SIGN = (Test("lt", (0.0,)), Test("gt", (0.0,)), _NAN)

# Operator -> (position of the tensor, tests of its call's arguments). The result depends on nothing else of a number.
# NaN is a case of its own where a CPU kernel treats it one way in its vectors and another way in their tails.
ASKS: dict[str, tuple[int, Callable[..., tuple[Test, ...]]]] = {
    **{f"aten.{kind}.Scalar": (0, lambda x, c, kind=kind: (Test(kind, (c,)),)) for kind in TESTS if len(kind) == 2},
    "aten.threshold_backward.default": (1, lambda g, x, c: (Test("le", (c,)),)),
    "aten.hardtanh_backward.default": (1, lambda g, x, low, high: (Test("outside", (low, high)), _NAN)),
    "aten.hardsigmoid_backward.default": (1, lambda g, x: (Test("inside", (-3.0, 3.0)),)),
    "aten.hardshrink_backward.default": (1, lambda g, x, c: (Test("within", (-c, c)), _NAN)),
    "aten.softshrink_backward.default": (1, lambda g, x, c: (Test("within", (-c, c)), _NAN)),
    "aten.leaky_relu_backward.default": (1, lambda g, x, slope, is_result: (Test("gt", (0.0,)),)),
    "aten.sign.default": (0, lambda x: _SIGN),
    "aten.sgn.default": (0, lambda x: _SIGN),
    "aten.signbit.default": (0, lambda x: (Test("signbit"),)),
    "aten.isnan.default": (0, lambda x: (Test("isnan"),)),
    "aten.isinf.default": (0, lambda x: (Test("eq", (math.inf,)), Test("eq", (-math.inf,)))),
    "aten.logical_not.default": (0, lambda x: (Test("eq", (0.0,)),)),
}

# operator -> position of a tensor of which it takes sizes, strides, dtype and device only (on the CPU and on CUDA)
SHAPE_ONLY = {
    "aten.avg_pool2d_backward.default": 1,
    "aten.avg_pool3d_backward.default": 1,
    "aten._adaptive_avg_pool2d_backward.default": 1,
    "aten._adaptive_avg_pool3d_backward.default": 1,
    "aten.max_pool2d_with_indices_backward.default": 1,
    "aten.max_pool3d_with_indices_backward.default": 1,
    "aten.adaptive_max_pool2d_backward.default": 1,
    "aten.adaptive_max_pool3d_backward.default": 1,
    "aten.reflection_pad1d_backward.default": 1,
    "aten.reflection_pad2d_backward.default": 1,
    "aten.reflection_pad3d_backward.default": 1,
    "aten.replication_pad1d_backward.default": 1,
    "aten.replication_pad2d_backward.default": 1,
    "aten.replication_pad3d_backward.default": 1,
    "aten.zeros_like.default": 0,
    "aten.ones_like.default": 0,
    "aten.full_like.default": 0,
    "aten.new_zeros.default": 0,
    "aten.new_ones.default": 0,
    "aten.new_full.default": 0,
    "aten.sym_size.int": 0,
    "aten.sym_stride.int": 0,
    "aten.sym_numel.default": 0,
}

# each number of the result is one of the first argument
MOVES = {
    "aten.alias.default",
    "aten.clone.default",
    "aten.detach.default",
    "aten.expand.default",
    "aten.permute.default",
    "aten.reshape.default",
    "aten.select.int",
    "aten.slice.Tensor",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.t.default",
    "aten.transpose.int",
    "aten.unsqueeze.default",
    "aten._unsafe_view.default",
    "aten.view.default",
}
CONVERSIONS = {"aten._to_copy.default", "prims.convert_element_type.default"}

# Through any operator but these an error of a number is taken for one of the result. What is passed over by mistake
# costs precision (float8 was 25% off on logits that went through a split), what is followed by mistake costs memory.
_ENDS = {
    # many numbers are one, and their errors cancel out
    *(f"aten.{op}.default" for op in ("mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "dot", "addr", "ger")),
    *(f"aten.{op}.default" for op in ("convolution", "_scaled_mm", "_int_mm", "_cdist_forward", "linalg_vector_norm")),
    *(f"aten.{op}" for op in ("var.correction", "var_mean.correction", "std.correction", "std_mean.correction")),
    # the result hardly depends on large numbers
    *(f"aten.{op}.default" for op in ("sigmoid", "erf", "erfc", "sign", "sgn", "sin", "cos", "atan", "hardsigmoid")),
    # a relative error is a small one of the logarithm
    *(f"aten.{op}.default" for op in ("log", "log2", "log10", "log1p")),
    # the exponential of -x**2 is small where the error of x**2 is large
    *("aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor"),
}
_ENDS_IN = ("_backward", "attention")  # parts of names
# likewise where both come from the same tensor, number by number
_PRODUCTS = {*(f"aten.{op}.{kind}" for op in ("mul", "div") for kind in ("Tensor", "Scalar")), "aten.addcmul.default"}
_REDUCTIONS = {
    *(f"aten.{op}" for op in ("sum.dim_IntList", "sum.default", "mean.dim", "mean.default", "logsumexp.default"))
}
_REDUCTIONS |= {
    *(f"aten.{op}" for op in ("amax.default", "amin.default", "max.dim", "min.dim", "max.default", "min.default"))
}
_EXPONENTIALS = {
    *(f"aten.{op}.default" for op in ("exp", "exp2", "expm1", "cosh", "sinh", "_softmax", "logcumsumexp")),
    "aten.pow.Scalar",
}
# What takes an exponential of numbers of any size. Activations (sigmoid, GELU, softplus, ELU) take some inside, too,
# but flatten out where it would matter.
_TAKE_EXPONENTIALS = (
    *("aten.exp.", "aten.exp2.", "expm1", "cosh", "sinh", "pow.Scalar"),
    *("softmax", "logsumexp", "logaddexp", "cross_entropy"),
)


def asked_of(node: Node, reader: Node | None = None) -> tuple[Test, ...] | None:
    """All that the readers of a backward's input `node`, or one `reader`, depend on, number by number, if known.

    Gives the tests whose outcomes decide every reader's result, looking through operators that only move data or
    convert it to a wider format; () if readers look at the shape only; None if one may need the number itself.
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
            if _passes_on(user, current):
                if user not in seen:
                    seen.add(user)
                    stack.append(user)
                continue
            found = _asks(user, current)
            if found is None or not all(_exact(c, value.dtype) for test in found for c in test.constants):
                return None
            tests.update(found)
    return tuple(sorted(tests))


def is_exponentiated(node: Node) -> bool:
    """Whether a backward exponentiates its input `node`, or what it makes of it: an error relative to the number is
    then none relative to the result. Logits are the common case, where Inductor computes a softmax again in the
    backward instead of having it saved."""
    stack = [node]
    derived = {node: False}  # what comes from it, and whether of several numbers at once
    while stack:
        current = stack.pop()
        for user in current.users:
            if user.op != "call_function" or user in derived:
                continue
            name = str(user.target)
            if name in _EXPONENTIALS:
                made_for = str(user.meta.get("original_aten") or name)
                if any(take in made_for for take in _TAKE_EXPONENTIALS):
                    return True
            if _carries(user, current, derived):
                derived[user] = derived[current] or name in _REDUCTIONS
                stack.append(user)
    return False


def _carries(user: Node, node: Node, derived: dict[Node, bool]) -> bool:
    """Whether an error of `node` is one of `user`, which reads it and maybe others that come from the same tensor."""
    name = str(user.target)
    if name in _ENDS or name in SHAPE_ONLY or any(part in name for part in _ENDS_IN):
        return False
    value = user.meta.get("val")
    if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point:
        return False  # a comparison, an index
    if name not in _PRODUCTS:
        return True
    factors = [n for n in user.args if isinstance(n, Node) and n in derived]
    return sum(derived[n] == derived[node] for n in factors) == 1


def _only_at(user: Node, node: Node, position: int) -> bool:
    """Whether `user` reads `node` as its argument at `position` and nowhere else."""
    others = [a for i, a in enumerate(user.args) if i != position]
    inputs: list[Node] = []
    torch.fx.node.map_arg((others, user.kwargs), inputs.append)
    return len(user.args) > position and user.args[position] is node and node not in inputs


def _passes_on(user: Node, node: Node) -> bool:
    name = str(user.target)
    if user.op != "call_function" or not _only_at(user, node, 0):
        return False
    if name in MOVES:
        return True
    if name not in CONVERSIONS:
        return False
    before, after = node.meta["val"].dtype, user.meta["val"].dtype
    # a wider format has all numbers of the narrower one, in the same order
    return after in FLOATS and torch.promote_types(before, after) is after


def _asks(user: Node, node: Node) -> tuple[Test, ...] | None:
    name = str(user.target)
    if user.op != "call_function":
        return None
    if name in SHAPE_ONLY:
        return () if _only_at(user, node, SHAPE_ONLY[name]) else None
    if name not in ASKS or user.kwargs or not _only_at(user, node, ASKS[name][0]):
        return None
    position, read = ASKS[name]
    constants = user.args[position + 1 :]
    if not all(isinstance(c, int | float) and float(c) == c for c in constants):
        return None
    return tuple(
        Test(test.kind, tuple(0.0 if c == 0 else float(c) for c in test.constants)) for test in read(*user.args)
    )


def _exact(constant: float, dtype: torch.dtype) -> bool:
    """Whether comparing with `constant` means the same to every kernel: it is a number of the format, and no subnormal.

    Kernels differ in whether they round a constant to the tensor's dtype or the number to theirs, and may take
    subnormal numbers for zero.
    """
    with _compat.without_modes():
        rounded = torch.tensor(constant, dtype=torch.float64).to(dtype).item()
    return rounded == constant and (constant == 0 or abs(constant) >= 4 * torch.finfo(dtype).tiny)
