"""Operators by how their result depends on a number that they read. Data only; backward_reads.py applies it.

      SMOOTH       mul, mm, gelu_backward, ...   a small error of the number is a small error of the result
      MOVES        view, select, clone, ...      each number of the result is one of the argument
      SHAPE_ONLY   avg_pool2d_backward, ...      takes sizes, strides, dtype and device only
      ONLY_TESTS   threshold_backward, ...       compares each number with constants; a `Test`'s outcome is one bit
      SINGULAR     log, exp, rsqrt, ...          a small error may become any error
      DECIDES      round, sign, sort, ...        jumps; an operator whose result is bool or int always does

An operator in no table is unknown, and the tensors that it reads are not rounded. So a missing entry costs memory, and
a wrong one costs exactness: ONLY_TESTS and SHAPE_ONLY are tested bitwise against the kernels, SMOOTH by torch's own
operator database (tests/support/op_db.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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

# Operator -> the position of the tensor that it reads, and a function from the call's arguments to tests. The result
# depends on each number of the tensor only by the outcomes of these tests: `x <= 0` is all that ReLU's backward needs.
# NaN has a test of its own where a CPU kernel treats it one way in its vectors and another way in their tails.
ONLY_TESTS: dict[str, tuple[int, Callable[..., tuple[Test, ...]]]] = {
    **{f"aten.{kind}.Scalar": (0, lambda x, c, kind=kind: (Test(kind, (c,)),)) for kind in TESTS if len(kind) == 2},
    "aten.threshold_backward.default": (1, lambda g, x, c: (Test("le", (c,)),)),
    "aten.hardtanh_backward.default": (1, lambda g, x, low, high: (Test("outside", (low, high)), _NAN)),
    "aten.hardsigmoid_backward.default": (1, lambda g, x: (Test("inside", (-3.0, 3.0)),)),
    "aten.hardshrink_backward.default": (1, lambda g, x, c: (Test("within", (-c, c)), _NAN)),
    "aten.softshrink_backward.default": (1, lambda g, x, c: (Test("within", (-c, c)), _NAN)),
    "aten.leaky_relu_backward.default": (1, lambda g, x, slope, is_result: (Test("gt", (0.0,)),)),
    **dict.fromkeys(("aten.sign.default", "aten.sgn.default"), (0, lambda x: _SIGN)),
    "aten.signbit.default": (0, lambda x: (Test("signbit"),)),
    "aten.isnan.default": (0, lambda x: (Test("isnan"),)),
    "aten.isinf.default": (0, lambda x: (Test("eq", (math.inf,)), Test("eq", (-math.inf,)))),
    "aten.logical_not.default": (0, lambda x: (Test("eq", (0.0,)),)),
}


def _names(*groups: str) -> frozenset[str]:
    return frozenset(" ".join(groups).split())


def _ops(*groups: str) -> frozenset[str]:
    """Full names of operators: "gelu" is aten.gelu.default, "mul.Tensor" is aten.mul.Tensor."""
    overloads = [name if "." in name else f"{name}.default" for name in _names(*groups)]
    return frozenset(name if name.count(".") > 1 else f"aten.{name}" for name in overloads)


def _at(names: str, *positions: int) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(sorted(_ops(names)), positions)


_MAKES_LIKE = _ops(
    "zeros_like empty_like rand_like randn_like ones_like full_like new_zeros new_ones new_full",
    "sym_size.int sym_stride.int sym_numel",
)
_POOLS_OR_PADS = _ops(
    "avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward",
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
    "adaptive_max_pool2d_backward adaptive_max_pool3d_backward",
    "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward",
    "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward",
)
# operator -> position of a tensor; it reads the tensor's sizes, strides, dtype and device only (on the CPU and on CUDA)
SHAPE_ONLY: dict[str, int] = dict.fromkeys(sorted(_MAKES_LIKE), 0) | dict.fromkeys(sorted(_POOLS_OR_PADS), 1)

# each number of the result is one of the first argument
MOVES = _ops(
    "alias clone detach expand permute reshape select.int slice.Tensor squeeze squeeze.dim squeeze.dims t",
    "transpose.int unsqueeze _unsafe_view view",
)
MOVES_BY_INDEX = MOVES | _ops("gather index.Tensor index_select")
CONVERSIONS = _ops("_to_copy prims.convert_element_type.default")
# Floats with fewer than three mantissa bits. A number that is off by a sixteenth may come out a whole step off there: a
# quarter in e5m2, a factor of two in e8m0. So a conversion to them decides, as one to whole numbers does.
COARSE = {torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2}

# what the forward may compute once more to answer a decision, beside pointwise operators and views
CHEAP = (MOVES | CONVERSIONS) | _ops(
    "argmax argmin max.dim min.dim amax amin max min sum.dim_IntList sum mean.dim any.dim any all.dim all sort",
    "sort.stable topk full scalar_tensor arange.start_step arange arange.start prims.iota.default zeros ones",
    "full_like zeros_like gather index.Tensor searchsorted.Tensor bucketize.Tensor",
)

# They read the second tensor by its shape only, if they are not asked for the gradient of the grid.
GRID_SAMPLERS_BACKWARD = _ops("grid_sampler_2d_backward grid_sampler_3d_backward")

# --- smooth reads: operator -> the positions of the arguments that may be rounded, each with its bound ----------------


@dataclass(frozen=True)
class Bound:
    """How large an error of a result is, by a relative error r of the numbers that an operator reads.

    The error of the results is at most `factor * r` times what `against` says. Both are root mean squares over a
    population: numbers of one sign within a factor of two, wherever in the range of a format they are. So a bound holds
    for a tensor whose numbers are all large, or all far below zero. Example: 2x has the factor 1, x squared 2; sin(x)
    has none, because 6% of an angle of 1000 is ten turns.

    Attributes:
        against: "results": the results. "terms": the same operator on absolute numbers; its result is a sum of
            products, and terms may cancel. "unit": the results, but `UNIT` where these are smaller.
    """

    factor: float
    against: str

    def __str__(self) -> str:
        return f"{self.factor:g} x {self.against}"


# The size of an activation's larger results, and of its derivative's: both are about 1. Far below zero, silu(x) is
# x * exp(x), which no factor bounds; there it is small beside the unit, and layers have numbers on both sides of zero.
UNIT = 1.0
LINEAR = Bound(1.0, "terms")  # in one argument, the others fixed
SQUARE = Bound(2.0, "terms")  # a product of two factors that are made of the argument
STEPS = Bound(1.0, "results")  # each number of the result is one of the argument's, a constant, or nearer to zero
ACTIVATION = Bound(2.0, "unit")


# Of these the gradient may be rounded, not the numbers: gates, as above, and a difference, whose terms may cancel.
GRADIENTS_ONLY = _ops("sigmoid_backward softplus_backward log_sigmoid_backward glu_backward mse_loss_backward")


def _rows(bound: Bound, names: str, *positions: int) -> dict[str, dict[int, Bound]]:
    return {name: dict.fromkeys(positions, bound) for name in sorted(_ops(names))}


SMOOTH: dict[str, dict[int, Bound]] = {
    # Linear in each argument. Derivatives of products and sums: torch's tools/autograd/derivatives.yaml.
    **_rows(LINEAR, "mul.Tensor add.Tensor sub.Tensor rsub.Tensor lerp.Scalar outer", 0, 1),
    **_rows(LINEAR, "mul.Scalar add.Scalar sub.Scalar rsub.Scalar div.Scalar masked_fill.Scalar neg", 0),
    **_rows(LINEAR, "div.Tensor", 0),  # not the divisor
    **_rows(LINEAR, "masked_fill.Tensor", 0, 2),
    **_rows(LINEAR, "where.self", 1, 2),
    **_rows(LINEAR, "addcdiv mm bmm mv dot vdot convolution _grouped_mm", 0, 1),
    **_rows(LINEAR, "transformers.grouped_mm_fallback_backward.default", 0, 1, 3),
    **_rows(
        LINEAR, "addcmul addmm baddbmm addbmm addmv addr convolution_backward lerp.Tensor prims.fma.default", 0, 1, 2
    ),
    **_rows(LINEAR, "sum sum.dim_IntList mean mean.dim cumsum", 0),
    # No steeper than the argument, in proportion. As values; comparisons ask where they jump. Not `clamp` on both
    # sides: a range much smaller than the numbers makes the same error a large one.
    **_rows(STEPS, "abs relu clamp_min clamp_max hardtanh leaky_relu amax amin tanh erf atan", 0),
    **_rows(STEPS, "max.dim min.dim max min sort sort.stable topk kthvalue linalg_vector_norm", 0),
    **_rows(STEPS, "maximum minimum clamp_min.Tensor clamp_max.Tensor", 0, 1),
    # Activations whose derivative has no jump (Elfwing et al. 2018; Hendrycks and Gimpel 2016; Misra 2019), and theirs.
    # Not sigmoid, softplus and what is made of them for another tensor (glu, log_sigmoid): these are step sizes, decay
    # rates and gates, whose numbers may all be far from zero. There they are exponentials.
    **_rows(ACTIVATION, "gelu silu mish hardswish", 0),
    **{
        name: {0: LINEAR, 1: ACTIVATION}  # of the gradient, and of the numbers
        for name in sorted(_ops("gelu_backward silu_backward mish_backward tanh_backward"))
    },
    **{name: {0: LINEAR} for name in sorted(GRADIENTS_ONLY)},
    **_rows(SQUARE, "_softmax_backward_data", 0, 1),  # y * (g - sum(g * y)) of the probabilities y
    # Norms: the numbers that are normalized; not their statistics. Ba et al. 2016; Zhang and Sennrich 2019. The terms
    # are the number and the mean: where the mean is much larger than the deviation, so is the error.
    **{
        name: {0: LINEAR, 1: SQUARE}  # of the gradient, and of the numbers
        for name in sorted(
            _ops(
                "native_layer_norm_backward native_group_norm_backward _fused_rms_norm_backward batch_norm_backward",
                "native_batch_norm_backward cudnn_batch_norm_backward miopen_batch_norm_backward",
            )
        )
    },
    **_rows(SQUARE, "native_layer_norm native_group_norm _fused_rms_norm var.correction var_mean.correction", 0),
    # Attention: values and the result. Not queries and keys: the backward computes exp(queries @ keys - logsumexp) with
    # the logarithm that the forward saved. An error of a score multiplies a probability, and scores grow in training.
    # Dao, FlashAttention-2 (2023), algorithm 2.
    **_rows(LINEAR, "_scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention", 2),
    **_rows(LINEAR, "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention", 2),
    **_rows(LINEAR, "_scaled_dot_product_fused_attention_overrideable", 2),
    **_rows(
        LINEAR, "_scaled_dot_product_flash_attention_backward _scaled_dot_product_cudnn_attention_backward", 0, 3, 4
    ),
    **_rows(LINEAR, "_scaled_dot_product_flash_attention_for_cpu_backward _flash_attention_backward", 0, 3, 4),
    **_rows(LINEAR, "_scaled_dot_product_efficient_attention_backward _efficient_attention_backward", 0, 3, 5),
    **_rows(LINEAR, "_scaled_dot_product_fused_attention_overrideable_backward", 0, 3, 6),
    "flex_attention": {2: LINEAR},
    "flex_attention_backward": {2: LINEAR, 3: LINEAR},
    # Recurrent cells: gradients, the cell before, and after. Not the gates, which are sigmoids.
    "aten._thnn_fused_lstm_cell_backward_impl.default": {0: LINEAR, 1: LINEAR, 2: LINEAR, 3: ACTIVATION},
    # Collectives: sums and moves.
    **_rows(LINEAR, "_c10d_functional.all_reduce.default _c10d_functional.all_gather_into_tensor.default", 0),
    **_rows(LINEAR, "_c10d_functional.reduce_scatter_tensor.default _c10d_functional.all_to_all_single.default", 0),
    **_rows(LINEAR, "_c10d_functional.wait_tensor.default", 0),
    # Of chunks and tiles: a piece of a value that waits for another, and a sum plus a product.
    "aot_hooks.wait_for.default": {0: LINEAR},
    "aot_hooks.add_product.default": {0: LINEAR, 1: LINEAR, 2: LINEAR},
    # Moves of more than one tensor, or by indices.
    **_rows(LINEAR, "cat stack split.Tensor split_with_sizes unbind.int embedding repeat flip roll constant_pad_nd", 0),
    **_rows(LINEAR, "tril triu diagonal as_strided unfold im2col col2im pixel_shuffle pixel_unshuffle avg_pool2d", 0),
    **_rows(LINEAR, "upsample_nearest2d upsample_bilinear2d", 0),
    **_rows(LINEAR, "copy fill.Tensor select_scatter slice_scatter", 0, 1),
    **{name: {0: LINEAR} for name in sorted(CONVERSIONS | MOVES_BY_INDEX)},
}
MOST_POWER = 4  # x ** n has n times the relative error of x; no other bound is above it

# --- reads of the small numbers of a row alone, see small_numbers.py ------------------------------------------------

# Their results are no larger where the numbers are: one that is small beside its block counts as much as the largest.
# tests/graphs/test_bounds.py computes which rows of `SMOOTH` these are. A bound of 0 keeps the larger half: ReLU.
SATURATING = _ops(
    "tanh erf atan hardtanh clamp_min clamp_max maximum minimum clamp_min.Tensor clamp_max.Tensor",
    "amax amin max min max.dim min.dim kthvalue",
)
# A gradient times a slope that is zero where the number is large, whatever its sign.
SLOPES_NEAR_ZERO = _ops("sigmoid_backward tanh_backward hardtanh_backward hardsigmoid_backward")
CHOOSE = _ops("topk argmax max.dim sort sort.stable")  # of a router's probabilities
# What moves gradients, masks them, or adds up those of a row; each stays about as large as it was.
LOCAL = MOVES_BY_INDEX | CONVERSIONS | _ops("flip roll cumsum masked_fill.Scalar where.self neg mul.Scalar div.Scalar")
# Solutions, whose numbers grow from row to row. Their derivative is cut to a triangle, which leaves the smallest alone.
SOLUTIONS = _ops("linalg_solve_triangular triangular_solve linalg_lu_solve")

# The positions of arguments that are added to the others, or put beside them; not of factors.
ADDENDS: dict[str, tuple[int, ...]] = {
    **_at("add.Tensor sub.Tensor rsub.Tensor lerp.Scalar maximum minimum clamp_min.Tensor clamp_max.Tensor", 0, 1),
    **_at("copy fill.Tensor select_scatter slice_scatter", 0, 1),
    **_at("lerp.Tensor", 0, 1, 2),
    **_at("masked_fill.Tensor", 0, 2),
    **_at("where.self", 1, 2),
    **_at("addcdiv addcmul addmm baddbmm addbmm addmv addr cat stack", 0),
    **_at("prims.fma.default", 2),
}

# Sums whose terms may cancel: of two or three operands, and of the numbers of one. See cancellation.py.
SUMS = _ops(
    "add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar lerp.Scalar lerp.Tensor addcmul addcdiv"
)
TOTALS = _ops(
    "sum sum.dim_IntList mean mean.dim cumsum", "var.correction var_mean.correction std.correction std_mean.correction"
)
AT_MOST_ONE = _ops("tanh sigmoid erf")  # their results come near 1 or -1 where x is large, and stay there
# Norms in the forward, whose pieces center numbers as their backward does in eager mode.
NORMS = _ops(
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit.no_stats _native_batch_norm_legit_functional",
    "_batch_norm_with_update _batch_norm_with_update_functional cudnn_batch_norm miopen_batch_norm",
)

# The results of these have about the same size, whatever they read.
NORMALIZE = NORMS | _ops("native_layer_norm native_group_norm _fused_rms_norm")
# Roundings of float32 that the mean of equal numbers may be off by, relative to the mean: 2**-20, 8 of them. A spread
# below it is noise, since a hook rounds to steps that are wider.
NOISE = 2.0**-20

# Operators of which a piece may be a sum that cancels, as in eager mode: there they read the same rounded numbers.
WHOLES = (SMOOTH.keys() | NORMS) - GRADIENTS_ONLY

# Operators whose decompositions in Inductor have pieces that jump or explode, though the whole does not: silu is
# x / (1 + exp(-x)).
SMOOTH_INSIDE = _ops("gelu gelu_backward silu silu_backward tanh tanh_backward mish mish_backward")

OF_NUMBERS = _ops("mul.Tensor div.Tensor mul.Scalar div.Scalar")  # multiples, if the other argument is a number
# with one bound, the operator is another one: that of a lower bound, that of an upper bound
ONE_SIDED = {
    "aten.clamp.default": ("aten.clamp_min.default", "aten.clamp_max.default"),
    "aten.clamp.Tensor": ("aten.clamp_min.Tensor", "aten.clamp_max.Tensor"),
}

# Attention as one operator. Names have no overload.
ATTENTION = _names(
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward _efficient_attention_forward _cudnn_attention_forward flex_attention",
)
ATTENTION_BACKWARD = frozenset(f"{name.removesuffix('_forward')}_backward" for name in ATTENTION)

# How reports call these reads; with or without an entry they are not rounded. Names have no overload.
SINGULAR = (ATTENTION | ATTENTION_BACKWARD) | _names(
    "log log2 log10 log1p exp exp2 expm1 rsqrt reciprocal sqrt pow div tan acos asin acosh atanh cosh sinh logit",
    "_softmax _log_softmax _log_softmax_backward_data logsumexp logaddexp logaddexp2 logcumsumexp prod cumprod xlogy",
    "digamma polygamma lgamma erfinv erfc sin cos sinc polar",
    "sigmoid sigmoid_backward softplus softplus_backward log_sigmoid_forward log_sigmoid_backward glu glu_backward",
    "hardsigmoid mse_loss_backward grid_sampler_2d grid_sampler_3d grid_sampler_2d_backward grid_sampler_3d_backward",
    "_thnn_fused_lstm_cell_backward_impl",
)
DECIDES = _names(
    "round floor ceil trunc frac sign sgn remainder fmod heaviside median nanmedian mode cummax cummin",
    "threshold_backward hardtanh_backward hardsigmoid_backward hardshrink_backward softshrink_backward",
    "leaky_relu_backward elu_backward hardswish_backward smooth_l1_loss_backward huber_loss_backward",
)
