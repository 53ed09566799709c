"""The bounds of `SMOOTH`, computed: how an error of 6% of the numbers that an operator reads becomes one of its result.

Linear rows are tested to be linear. Of the others the error is measured over all numbers of bfloat16 and float16 and
float32's whole range, in populations of one sign within a factor of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import reads_table
import torch

from aot_hooks.graphs.read_tables import ACTIVATION, LINEAR, MOST_POWER, SATURATING, SMOOTH, STEPS, UNIT

aten = torch.ops.aten
R = 2.0**-4  # float8's relative rounding

Function = Callable[[torch.Tensor], torch.Tensor]


def every_number() -> torch.Tensor:
    """All numbers of both 16-bit formats but zero, and 8 an octave of float32's, in float64."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    octaves = 2.0 ** torch.arange(-149, 128, 1 / 8, dtype=torch.float64)
    x = torch.cat([bits.view(torch.bfloat16).double(), bits.view(torch.float16).double(), octaves, -octaves])
    return x[x.isfinite() & (x != 0)]


NUMBERS = every_number()


def growth(f: Function, x: torch.Tensor = NUMBERS, unit: float = 0.0) -> float:
    """The largest error of f's results over `R` times the results, or `unit`: root mean squares over a population.

    A population is the numbers of one sign within a factor of two; they begin at each half octave.
    """
    y = f(x)
    half_octaves = (2 * x.abs().log2()).floor().long() * 2 + (x > 0)
    _, group = half_octaves.unique(return_inverse=True)
    worst = 0.0
    for sign in (1, -1):
        off = f(x * (1 + sign * R)) - y
        of_result = y.isfinite()
        off, size = (torch.where(of_result, t, torch.zeros_like(t)) for t in (off, y))
        count, squared, total = (
            torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add(0, group, t)
            for t in (of_result.double(), off.square(), size.square())
        )
        # groups of both signs alternate: the next one of the same sign is two further
        count, squared, total = (t + torch.nn.functional.pad(t[2:], (0, 2)) for t in (count, squared, total))
        error, against = ((t / count.clamp_min(1)).sqrt() for t in (squared, total))
        ratio = error / R / against.clamp_min(max(unit, 1e-300))
        worst = max(worst, math.inf if ratio.isnan().any() else ratio.max().item())
    return worst


def jump_at_zero(f: Function) -> float:
    """The largest |f(x) - f(0)| / |x|: a number that is small beside its row may come back as zero."""
    x = NUMBERS[(NUMBERS.abs() <= 1) & (NUMBERS.abs() >= 2.0**-40)]
    jump = (f(x) - f(torch.zeros_like(x))).abs() / x.abs()
    return math.inf if jump.isnan().any() else jump.max().item()


def holds(f: Function, factor: float, unit: float = 0.0, x: torch.Tensor = NUMBERS) -> bool:
    """Whether `f` has a bound; the powers of 1 + R beyond the first add a little to it."""
    at_zero = max(4.0, factor) if bool((x.abs() < 1e-6).any()) else math.inf
    return growth(f, x, unit) <= factor * (1 + R) ** factor and jump_at_zero(f) <= at_zero


ONES = torch.ones_like(NUMBERS)
IN_ONE = NUMBERS[NUMBERS.abs() <= 1 / (1 + R)]
# operator -> its result as a function of the numbers that may be rounded, by position
POINTWISE: dict[tuple[str, int], Function] = {
    ("abs", 0): torch.abs,
    ("relu", 0): torch.relu,
    ("clamp_min", 0): lambda x: aten.clamp_min(x, -0.5),
    ("clamp_max", 0): lambda x: aten.clamp_max(x, 3.0),
    ("hardtanh", 0): lambda x: aten.hardtanh(x, -1.0, 6.0),
    ("leaky_relu", 0): lambda x: aten.leaky_relu(x, 0.1),
    ("tanh", 0): torch.tanh,
    ("erf", 0): torch.erf,
    ("atan", 0): torch.atan,
    ("maximum", 0): lambda x: torch.maximum(x, 2 * ONES[: len(x)]),
    ("maximum", 1): lambda x: torch.maximum(-ONES[: len(x)], x),
    ("minimum", 0): lambda x: torch.minimum(x, 2 * ONES[: len(x)]),
    ("minimum", 1): lambda x: torch.minimum(-ONES[: len(x)], x),
    ("clamp_min.Tensor", 0): lambda x: aten.clamp_min(x, ONES[: len(x)]),
    ("clamp_min.Tensor", 1): lambda x: aten.clamp_min(-ONES[: len(x)], x),
    ("clamp_max.Tensor", 0): lambda x: aten.clamp_max(x, ONES[: len(x)]),
    ("clamp_max.Tensor", 1): lambda x: aten.clamp_max(-ONES[: len(x)], x),
    ("gelu", 0): aten.gelu,
    ("silu", 0): aten.silu,
    ("mish", 0): aten.mish,
    ("hardswish", 0): aten.hardswish,
    ("gelu_backward", 1): lambda x: aten.gelu_backward(ONES[: len(x)], x),
    ("silu_backward", 1): lambda x: aten.silu_backward(ONES[: len(x)], x),
    ("mish_backward", 1): lambda x: aten.mish_backward(ONES[: len(x)], x),
    ("tanh_backward", 1): lambda x: aten.tanh_backward(ONES[: len(x)], x),
}


# --- numbers that share a scale: each is off by a share of the largest ------------------------------------------------

OF_BLOCK = 2.0**-7  # the rounding of int8, of the largest number
BEYOND = 8.0  # times `OF_BLOCK` of the result: what is above it has lost its small numbers
SIZES = [10.0**e for e in range(-4, 5)]


def of_block(f: Function, size: float, sign: float | None) -> float:
    """The error of f's results, where each number of a block is off by `OF_BLOCK` of the largest, as a share of both.

    Numbers are normal, of `size`; with a `sign` all have that one.
    """
    x = torch.randn(4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * size
    x = x if sign is None else x.abs() * sign
    off = torch.rand(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    y = f(x)
    if not y.any():  # ReLU of negative numbers
        return 0.0
    error = (f(x + off * OF_BLOCK * x.abs().max()) - y).square().mean().sqrt()
    return (error / OF_BLOCK / y.square().mean().sqrt()).item()


@pytest.mark.core
@pytest.mark.parametrize("name", sorted({name for name, _ in POINTWISE if not name.endswith("_backward")}))
def test_results_that_level_off_are_lost_where_numbers_share_a_scale(name: str) -> None:
    """tanh(0.5) is, beside a number of 1,000 in a block of int8. Rows for which this holds are `SATURATING`.

    Activations are held to numbers on both sides of zero, as above.
    """
    positions = [p for other, p in POINTWISE if other == name]
    signs = [None] if SMOOTH[full(name)][positions[0]] is ACTIVATION else [None, 1.0, -1.0]
    worst = max(of_block(POINTWISE[name, p], size, sign) for p in positions for size in SIZES for sign in signs)
    assert (worst > BEYOND) == (full(name) in SATURATING), worst


@pytest.mark.core
@pytest.mark.parametrize("name", ["amax", "amin", "max", "min", "max.dim", "min.dim", "kthvalue", "linalg_vector_norm"])
def test_a_number_chosen_from_a_row_may_be_its_smallest(name: str) -> None:
    GENERATOR.manual_seed(0)
    x = (1e3 * torch.randn(64, 64, dtype=torch.float64, generator=GENERATOR)).abs()
    x[:, 0] = 0.5
    choose = {"kthvalue": (1, 1), "linalg_vector_norm": (2, [1]), "max": (), "min": ()}.get(name, (1,))
    lost = []
    for numbers in (x, -x):
        near = (
            numbers + (torch.rand(x.shape, dtype=torch.float64, generator=GENERATOR) - 0.5) * OF_BLOCK * x.abs().max()
        )
        y, off = (results(full(name), [t, *choose]) for t in (numbers, near))
        lost.append(((off - y).norm() / OF_BLOCK / y.norm()).item() > BEYOND)
    assert any(lost) == (full(name) in SATURATING)


def full(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


@pytest.mark.core
@pytest.mark.parametrize(("name", "position"), POINTWISE, ids=lambda p: str(p))
def test_the_bound_of_an_elementwise_row_holds_for_every_number(name: str, position: int) -> None:
    bound = SMOOTH[full(name)][position]
    assert bound in (STEPS, ACTIVATION)
    domain = IN_ONE if name == "tanh_backward" else NUMBERS
    assert holds(POINTWISE[name, position], bound.factor, UNIT if bound is ACTIVATION else 0.0, domain)


@pytest.mark.core
@pytest.mark.parametrize("exponent", [1, 1.5, 2, 3, MOST_POWER])
def test_a_power_has_its_exponent_as_bound(exponent: float) -> None:
    x = NUMBERS[(NUMBERS.abs() > 1e-30) & (NUMBERS.abs() < 1e30) & ((NUMBERS > 0) | (exponent == int(exponent)))]
    assert growth(lambda x: x**exponent, x) == pytest.approx(((1 + R) ** exponent - 1) / R)


CLAIMS_TOO_MUCH = {
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "sinc": torch.sinc,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "erfc": torch.erfc,
    "sigmoid": torch.sigmoid,
    "softplus": torch.nn.functional.softplus,
    "log_sigmoid": torch.nn.functional.logsigmoid,
    "hardsigmoid": torch.nn.functional.hardsigmoid,
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
    "frac": torch.frac,
    "remainder": lambda x: torch.remainder(x, 1.0),
    "cosh": torch.cosh,
    "digamma": torch.digamma,
    "high power": lambda x: x**5,
    "a difference": lambda x: x - 100.0,
    "sigmoid_backward": lambda x: aten.sigmoid_backward(torch.ones_like(x), x),
    "softplus_backward": lambda x: aten.softplus_backward(torch.ones_like(x), x, 1.0, 20.0),
    "log_sigmoid_backward": lambda x: aten.log_sigmoid_backward(torch.ones_like(x), x, (-x.abs()).exp()),
    "silu": aten.silu,  # as a row without a unit
}


@pytest.mark.core
@pytest.mark.parametrize("name", CLAIMS_TOO_MUCH)
def test_a_row_that_claims_too_much_is_found(name: str) -> None:
    assert not holds(CLAIMS_TOO_MUCH[name], MOST_POWER)


@pytest.mark.core
@pytest.mark.parametrize("name", ["sin", "cos", "tan", "exp", "log", "reciprocal", "rsqrt", "a difference"])
def test_a_unit_excuses_no_row_whose_error_grows_with_the_numbers(name: str) -> None:
    assert not holds(CLAIMS_TOO_MUCH[name], ACTIVATION.factor, UNIT)


def test_a_gate_that_is_nearly_closed_or_open_is_no_activation() -> None:
    """What the unit would hide: softplus of Mamba's step sizes, and a gate near one."""
    closed, open_ = NUMBERS[(NUMBERS > -8) & (NUMBERS < -4)], NUMBERS[(NUMBERS > 0.9) & (NUMBERS < 0.94)]
    assert growth(CLAIMS_TOO_MUCH["softplus_backward"], closed) > MOST_POWER
    assert growth(CLAIMS_TOO_MUCH["sigmoid_backward"], open_) > MOST_POWER


# --- rows that are linear, or a reduction -----------------------------------------------------------------------------


def m(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (6, 6), dtype=torch.float64, generator=GENERATOR)


GENERATOR = torch.Generator()
INDEX = torch.tensor([[3, 1, 0, 2, 5, 4]] * 6)
CONVOLUTION = ([1], [1], [1], False, [0], 1)
# operators -> arguments of a call; those that may be rounded are made anew
CALLS: dict[str, Callable[[], tuple[object, ...]]] = {
    "mul.Tensor add.Tensor sub.Tensor rsub.Tensor mm copy": lambda: (m(), m()),
    "maximum minimum clamp_min.Tensor clamp_max.Tensor": lambda: (m(), m()),
    "cat stack": lambda: ([m(), m()], 1),
    "lerp.Scalar": lambda: (m(), m(), 0.3),
    "outer dot": lambda: (m(6), m(6)),
    "vdot": lambda: (m(6), m(6)),
    "mv": lambda: (m(), m(6)),
    "bmm": lambda: (m(2, 3, 4), m(2, 4, 5)),
    "mul.Scalar add.Scalar sub.Scalar rsub.Scalar div.Scalar": lambda: (m(), 0.7),
    "masked_fill.Scalar": lambda: (m(), INDEX > 2, 0.5),
    "masked_fill.Tensor": lambda: (m(), INDEX > 2, m(1)[0]),
    "div.Tensor": lambda: (m(), m().abs() + 1),
    "where.self": lambda: (INDEX > 2, m(), m()),
    "addcdiv": lambda: (m(), m(), m().abs() + 1),
    "addcmul lerp.Tensor addmm prims.fma.default aot_hooks.add_product.default": lambda: (m(), m(), m()),
    "aot_hooks.wait_for.default": lambda: (m(), [m()]),
    "baddbmm": lambda: (m(2, 3, 5), m(2, 3, 4), m(2, 4, 5)),
    "addbmm": lambda: (m(3, 5), m(2, 3, 4), m(2, 4, 5)),
    "addmv": lambda: (m(6), m(), m(6)),
    "addr": lambda: (m(), m(6), m(6)),
    "convolution": lambda: (m(2, 3, 8), m(4, 3, 3), None, *CONVOLUTION),
    "convolution_backward": lambda: (m(2, 4, 8), m(2, 3, 8), m(4, 3, 3), [4], *CONVOLUTION, [True, True, True]),
    "neg sum mean alias clone detach t tril triu diagonal amax amin sort abs relu": lambda: (m(),),
    "max min linalg_vector_norm": lambda: (m(),),
    "sum.dim_IntList mean.dim squeeze.dims flip": lambda: (m(), [1]),
    "cumsum unsqueeze squeeze.dim max.dim min.dim unbind.int": lambda: (m(), 1),
    "select.int": lambda: (m(), 1, 2),
    "expand view reshape _unsafe_view": lambda: (m(), [6, 6]),
    "permute": lambda: (m(), [1, 0]),
    "squeeze": lambda: (m(),),
    "slice.Tensor": lambda: (m(), 1, 1, 4),
    "transpose.int": lambda: (m(), 0, 1),
    "gather": lambda: (m(), 1, INDEX),
    "index.Tensor": lambda: (m(), [INDEX[0]]),
    "index_select": lambda: (m(), 0, INDEX[0]),
    "split.Tensor": lambda: (m(), 3),
    "split_with_sizes": lambda: (m(), [2, 4]),
    "embedding": lambda: (m(), INDEX),
    "repeat": lambda: (m(), [2, 1]),
    "roll": lambda: (m(), [1]),
    "constant_pad_nd": lambda: (m(), [1, 1], 0.5),
    "as_strided": lambda: (m(), [3, 3], [6, 1]),
    "unfold": lambda: (m(), 1, 2, 1),
    "im2col": lambda: (m(1, 2, 6, 6), [2, 2], [1, 1], [0, 0], [1, 1]),
    "col2im": lambda: (m(1, 8, 25), [6, 6], [2, 2], [1, 1], [0, 0], [1, 1]),
    "pixel_shuffle pixel_unshuffle": lambda: (m(1, 4, 4, 4), 2),
    "avg_pool2d": lambda: (m(1, 2, 6, 6), [2, 2]),
    "upsample_nearest2d": lambda: (m(1, 2, 4, 4), [8, 8]),
    "upsample_bilinear2d": lambda: (m(1, 2, 4, 4), [8, 8], False),
    "fill.Tensor": lambda: (m(), m(1)[0]),
    "select_scatter": lambda: (m(), m(6), 0, 1),
    "slice_scatter": lambda: (m(), m(2, 6), 0, 1, 3),
    "_to_copy": lambda: (m(),),
    "prims.convert_element_type.default": lambda: (m(), torch.float64),
    "topk kthvalue": lambda: (m(), 2),
    "gelu_backward silu_backward mish_backward tanh_backward sigmoid_backward": lambda: (m(), m().tanh()),
    "softplus_backward": lambda: (m(), m(), 1.0, 20.0),
    "log_sigmoid_backward": lambda: (m(), m(), m().abs().neg().exp()),
    "glu_backward": lambda: (m(6, 3), m(), 1),
    "mse_loss_backward": lambda: (m(), m(), m(), 1),
    "_scaled_dot_product_flash_attention_for_cpu": lambda: (m(1, 2, 8, 4), m(1, 2, 8, 4), m(1, 2, 8, 4)),
}


def attention_backward() -> tuple[object, ...]:
    q, k, v = (m(1, 2, 8, 4) for _ in range(3))
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return m(1, 2, 8, 4), q, k, v, out, logsumexp, 0.0, False


CALLS["_scaled_dot_product_flash_attention_for_cpu_backward"] = attention_backward
BY_NAME = {full(name) if name.count(".") < 2 else name: call for names, call in CALLS.items() for name in names.split()}
if not hasattr(torch.ops.prims, "fma"):  # a newer torch has it
    del BY_NAME["prims.fma.default"]
# rows without a call on a CPU, or whose arguments are made by hand below
WITHOUT_A_CALL = {
    "aten._grouped_mm.default": "takes bfloat16",
    "aten.sort.stable": "is sort",
    "prims.fma.default": "not every torch has it",
    "transformers.grouped_mm_fallback_backward.default": "transformers has it",
    "aten._thnn_fused_lstm_cell_backward_impl.default": "a kernel of CUDA",
    "flex_attention": "a higher-order operator",
    "flex_attention_backward": "a higher-order operator",
}
KERNELS_OF_CUDA = ("_attention", "c10d", "cudnn_batch_norm", "miopen_batch_norm")
NORMS = ("layer_norm", "group_norm", "rms_norm", "batch_norm", "_softmax_backward_data", "var.correction", "var_mean")


def results(name: str, arguments: list[object]) -> torch.Tensor:
    space, packet, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, space), packet), overload)(*arguments)
    found = found if isinstance(found, tuple | list) else (found,)
    return torch.cat([t.flatten() for t in found if t is not None and t.is_floating_point()])


def rows_of(*bounds: object) -> list[tuple[str, int]]:
    rows = [(name, position) for name, row in SMOOTH.items() for position, bound in row.items() if bound in bounds]
    return [(name, position) for name, position in rows if name in BY_NAME]


def test_each_row_has_a_call_or_a_reason() -> None:
    elementwise = {full(name) for name, _ in POINTWISE}
    left = SMOOTH.keys() - BY_NAME.keys() - elementwise - WITHOUT_A_CALL.keys()
    assert not [name for name in left if not any(part in name for part in KERNELS_OF_CUDA + NORMS)]


@pytest.mark.core
@pytest.mark.parametrize(("name", "position"), rows_of(LINEAR), ids=lambda p: str(p))
def test_a_linear_row_is_linear(name: str, position: int) -> None:
    """Of a number halfway between two the result is halfway, so an error of the numbers is one of the terms."""
    GENERATOR.manual_seed(0)
    arguments = list(BY_NAME[name]())

    def at(x: torch.Tensor) -> torch.Tensor:
        given = arguments[position]
        changed = [x, *given[1:]] if isinstance(given, list) else x
        return results(name, [*arguments[:position], changed, *arguments[position + 1 :]])

    given = arguments[position]
    x = given[0] if isinstance(given, list) else given
    y = torch.randn(x.shape, dtype=x.dtype, generator=GENERATOR)
    torch.testing.assert_close(at((x + y) / 2), (at(x) + at(y)) / 2)


@pytest.mark.core
@pytest.mark.parametrize(("name", "position"), rows_of(STEPS), ids=lambda p: str(p))
def test_a_step_is_in_proportion_at_every_magnitude(name: str, position: int) -> None:
    GENERATOR.manual_seed(0)
    arguments = list(BY_NAME[name]())
    for exponent in range(-40, 41, 8):
        x = (1 + torch.rand(arguments[position].shape, dtype=torch.float64, generator=GENERATOR)) * 2.0**exponent
        near = x * (1 + R * (torch.randint(2, x.shape, generator=GENERATOR) * 2 - 1))
        found, off = (results(name, [*arguments[:position], t, *arguments[position + 1 :]]) for t in (x, near))
        assert (off - found).norm() <= R * found.norm() * (1 + 1e-9)


def weighed(terms: torch.Tensor, found: torch.Tensor, off: torch.Tensor) -> float:
    return ((off - found).norm() / R / terms.norm()).item()


@pytest.mark.core
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e4])
def test_the_bounds_of_norms_and_of_softmax(spread: float) -> None:
    """Terms of a norm: |x| and |mean|, over the deviation. Of softmax: |y| * (|g| + sum |g * y|)."""
    GENERATOR.manual_seed(0)
    g, x = m(8, 64), m(8, 64) * spread
    near = x * (1 + R * (torch.randint(2, x.shape, generator=GENERATOR) * 2 - 1))
    mean, rstd = x.mean(-1, keepdim=True), (x.var(-1, keepdim=True, correction=0) + 1e-12).rsqrt()
    layer = lambda t: aten.native_layer_norm_backward(g, t, [64], mean, rstd, None, None, [True, False, False])[0]  # noqa: E731
    assert weighed(layer(x), layer(x), layer(near)) <= SMOOTH["aten.native_layer_norm_backward.default"][1].factor
    normed = lambda t: aten.native_layer_norm(t, [64], None, None, 1e-12)[0]  # noqa: E731
    assert weighed(normed(x), normed(x), normed(near)) <= SMOOTH["aten.native_layer_norm.default"][0].factor
    variance = lambda t: aten.var(t, [1])  # noqa: E731
    assert weighed(variance(x), variance(x), variance(near)) <= SMOOTH["aten.var.correction"][0].factor
    y = torch.softmax(x, -1)
    rounded = y * (near / x)
    softmax = lambda t: aten._softmax_backward_data(g, t, -1, torch.float64)  # noqa: E731
    terms = y * (g.abs() + (g * y).abs().sum(-1, keepdim=True))
    assert weighed(terms, softmax(y), softmax(rounded)) <= SMOOTH["aten._softmax_backward_data.default"][1].factor


def test_the_page_has_the_table() -> None:
    _, found, _ = reads_table.parts(reads_table.PAGE.read_text())
    assert found == reads_table.table(), "python tests/support/reads_table.py writes it"
