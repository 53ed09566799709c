"""What the backward asks of a saved tensor, read off graphs; the tables themselves bitwise against the kernels."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from comparisons import CALLS, decided, numbers, results, same_bits, what_is_asked
from graphs import by_hand

import aot_hooks
from aot_hooks import policies
from aot_hooks.graphs.read_tables import ONLY_TESTS, SHAPE_ONLY, SMOOTH, Test
from aot_hooks.graphs.saved import boundary
from aot_hooks.passes.results import RESULT

aten = torch.ops.aten
LE0 = Test("le", (0.0,))
GT0 = Test("gt", (0.0,))


def asked(backward, x=None, dtype=torch.float32):
    """`backward_asks` of the only saved tensor, h, for the readers in `backward(h, t)`."""
    x = torch.randn(4, 6).to(dtype) if x is None else x
    pair = by_hand(lambda x: (x.exp(), x.sin()), backward, x)
    (value,) = boundary(pair.fw, pair.bw, 1).tensors
    return value.row.backward_asks


READS = {
    "threshold": (lambda h, t: (aten.threshold_backward(t, h, 0),), (LE0,)),
    "decomposed": (lambda h, t: ((~(h <= 0)) * t,), (LE0,)),
    "a view": (lambda h, t: (aten.threshold_backward(t.view(24), h.view(24), 0),), (LE0,)),
    "a transpose": (lambda h, t: (aten.threshold_backward(t.t(), h.t(), 0),), (LE0,)),
    "expanded": (lambda h, t: ((h.unsqueeze(0).expand(3, 4, 6) <= 0) * t,), (LE0,)),
    "a wider format": (lambda h, t: ((h.double() <= 0) * t,), (LE0,)),
    "two readers": (lambda h, t: (aten.threshold_backward(t, h, 0) * (h > 0),), (GT0, LE0)),
    "one constant in two types": (lambda h, t: ((h <= 0) * (h <= 0.0) * t,), (LE0,)),
    "zero's sign": (lambda h, t: ((h <= -0.0) * t,), (LE0,)),
    "relu6": (lambda h, t: (aten.hardtanh_backward(t, h, 0.0, 6.0),), (Test("isnan"), Test("outside", (0.0, 6.0)))),
    "leaky": (lambda h, t: (aten.leaky_relu_backward(t, h, 0.1, True),), (GT0,)),
    "shape only": (lambda h, t: (t + torch.zeros_like(h),), ()),
    "compared, and its shape": (lambda h, t: ((h <= 0) * t + torch.zeros_like(h),), (LE0,)),
}


@pytest.mark.core
@pytest.mark.parametrize(("backward", "expected"), READS.values(), ids=READS)
def test_what_readers_ask(backward, expected):
    assert asked(backward) == expected


NEEDS = {
    "a number": lambda h, t: (t * h,),
    "compared, and a number": lambda h, t: ((h <= 0) * t * h,),
    "a number through a view": lambda h, t: ((h <= 0) * t + h.t().contiguous().t(),),
    "given back": lambda h, t: ((h <= 0) * t, h),
    "a view given back": lambda h, t: ((h <= 0) * t, h.view(24)),
    "compared with a tensor": lambda h, t: ((h <= t) * t,),
    "compared with itself": lambda h, t: ((h <= h.t().t()) * t,),
    "as the gradient": lambda h, t: (aten.threshold_backward(h, t, 0),),
    "as both": lambda h, t: (aten.threshold_backward(h, h, 0),),
    "a narrower format": lambda h, t: ((h.half() <= 0) * t,),
    "its bits": lambda h, t: ((h.view(torch.int32) <= 0) * t,),
    "a sum": lambda h, t: ((h.sum(0) <= 0) * t,),
    "no number of the format": lambda h, t: ((h <= 0.1) * t,),
    "an integer no float32 is": lambda h, t: ((h <= 2**24 + 1) * t,),
    "a subnormal": lambda h, t: ((h <= 1e-40) * t,),
    "NaN": lambda h, t: ((h <= math.nan) * t,),
}


@pytest.mark.core
@pytest.mark.parametrize("backward", NEEDS.values(), ids=NEEDS)
def test_whoever_may_need_the_number_is_noticed(backward):
    assert asked(backward) is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_only_floating_point(dtype):
    assert asked(lambda h, t: ((h == 0) * t,), dtype=torch.complex64 if dtype.is_complex else torch.float32) == (
        None if dtype.is_complex else (Test("eq", (0.0,)),)
    )
    x = torch.ones(4, 6)
    pair = by_hand(lambda x: (x.exp(), x.to(dtype)), lambda h, t: ((h == 0) * t,), x)
    (value,) = boundary(pair.fw, pair.bw, 1).tensors
    assert value.row.backward_asks is None


@pytest.mark.core
def test_views_of_one_storage_ask_together():
    def forward(x):
        h = x.sin()
        return x.exp(), h, h.view(24)

    def rows(backward):
        pair = by_hand(forward, backward, torch.randn(4, 6))
        return [v.row.backward_asks for v in boundary(pair.fw, pair.bw, 1).tensors]

    both = (LE0, Test("lt", (6.0,)))
    assert rows(lambda h, v, t: ((h <= 0) * t, (v < 6) * t.view(24))) == [both, both]
    assert rows(lambda h, v, t: ((h <= 0) * t, v * t.view(24))) == [None, None]


def test_each_operator_has_a_call():
    assert CALLS.keys() == ONLY_TESTS.keys()


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ONLY_TESTS)
def test_answers_decide_the_result_bit_by_bit(name, dtype):
    """Numbers with equal answers are equal to the kernel: any of a class may stand for any other."""
    for constants in CALLS[name]:
        x = numbers(dtype)
        assert decided(x, results(name, x, constants), [t(x) for t in what_is_asked(name, constants)], name, constants)


@pytest.mark.parametrize(
    ("name", "constants", "wrong"),
    [
        ("aten.threshold_backward.default", (0,), [Test("lt", (0.0,))]),
        ("aten.threshold_backward.default", (0,), [Test("signbit")]),
        ("aten.hardtanh_backward.default", (0.0, 6.0), [Test("le", (0.0,))]),
        ("aten.hardtanh_backward.default", (0.0, 6.0), [Test("outside", (0.0, 6.0))]),  # NaN: see ONLY_TESTS
        ("aten.hardshrink_backward.default", (0.5,), [Test("within", (-0.5, 0.5))]),
        ("aten.hardsigmoid_backward.default", (), [Test("within", (-3.0, 3.0))]),
        ("aten.sign.default", (), [Test("gt", (0.0,))]),
        ("aten.leaky_relu_backward.default", (0.01, False), [Test("ge", (0.0,))]),
        ("aten.ge.Scalar", (0,), [Test("lt", (0.0,))]),
        ("aten.isnan.default", (), []),
    ],
)
def test_a_wrong_test_is_noticed(name, constants, wrong):
    x = numbers(torch.float32)
    answers = [t(x) for t in wrong] or [torch.zeros_like(x, dtype=torch.bool)]
    assert not decided(x, results(name, x, constants), answers, name, constants)


def shape_only_calls():
    """Each operator that looks at a shape only, on x of its dimensions."""
    two, three = (2, 2), (2, 2, 2)
    pools = {
        "aten.avg_pool2d_backward.default": lambda g, x: (g, x, two, two, (0, 0), False, True, None),
        "aten.avg_pool3d_backward.default": lambda g, x: (g, x, three, three, (0, 0, 0), False, True, None),
        "aten._adaptive_avg_pool2d_backward.default": lambda g, x: (g, x),
        "aten._adaptive_avg_pool3d_backward.default": lambda g, x: (g, x),
    }
    for name, args in pools.items():
        spatial = 3 if "3d" in name else 2
        yield name, (2, 3, *[4] * spatial), (2, 3, *[2] * spatial), args
    for spatial in (2, 3):
        index = torch.randint(4**spatial, (2, 3, *[2] * spatial), generator=torch.Generator().manual_seed(0))
        sizes, zeros, ones = [2] * spatial, [0] * spatial, [1] * spatial
        yield (
            f"aten.max_pool{spatial}d_with_indices_backward.default",
            (2, 3, *[4] * spatial),
            tuple(index.shape),
            lambda g, x, s=sizes, z=zeros, o=ones, i=index: (g, x, s, s, z, o, False, i),
        )
        yield (
            f"aten.adaptive_max_pool{spatial}d_backward.default",
            (2, 3, *[4] * spatial),
            tuple(index.shape),
            lambda g, x, i=index: (g, x, i),
        )
    for kind in ("reflection", "replication"):
        for spatial in (1, 2, 3):
            yield (
                f"aten.{kind}_pad{spatial}d_backward.default",
                (2, 3, *[4] * spatial),
                (2, 3, *[6] * spatial),
                lambda g, x, p=[1] * 2 * spatial: (g, x, p),
            )
    for name in ("zeros_like", "ones_like"):
        yield f"aten.{name}.default", (2, 3), (2, 3), lambda g, x: (x,)
    yield "aten.full_like.default", (2, 3), (2, 3), lambda g, x: (x, 2.5)
    yield "aten.new_zeros.default", (2, 3), (2, 3), lambda g, x: (x, (4,))
    yield "aten.new_ones.default", (2, 3), (2, 3), lambda g, x: (x, (4,))
    yield "aten.new_full.default", (2, 3), (2, 3), lambda g, x: (x, (4,), 2.5)


SIZES = {"aten.sym_size.int", "aten.sym_stride.int", "aten.sym_numel.default"}  # numbers, made of sizes by definition


def test_each_operator_of_shapes_has_a_call():
    assert {name for name, *_ in shape_only_calls()} == SHAPE_ONLY.keys() - SIZES - ANY_NUMBERS


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("name", "shape", "grad_shape", "args"), list(shape_only_calls()), ids=[name for name, *_ in shape_only_calls()]
)
def test_what_looks_at_shapes_gives_the_same_for_any_numbers(name, shape, grad_shape, args, dtype, channels_last):
    _, packet, overload = name.split(".")
    op = getattr(getattr(aten, packet), overload)
    x = torch.randn(shape).to(dtype)
    if channels_last and len(shape) in (4, 5):
        x = x.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    g = torch.randn(grad_shape).to(dtype)
    expected = op(*args(g, x))
    assert same_bits(op(*args(g, torch.full_like(x, math.nan))), expected)
    assert same_bits(op(*args(g, torch.zeros_like(x))), expected)
    if SHAPE_ONLY[name] == 1:
        assert not same_bits(op(*args(torch.zeros_like(g), x)), expected)


SCORES = {
    "logits, converted": (lambda h, t: F.cross_entropy(h.float(), t), True),
    "logits, divided": (lambda h, t: F.cross_entropy(h / 0.7, t), True),
    "logits, capped": (lambda h, t: F.cross_entropy(torch.tanh(h / 30) * 30, t), True),
    "logits, some rows": (lambda h, t: F.cross_entropy(h[t[:20]], t[:20]), True),
    "in parts": (lambda h, t: sum(a.softmax(-1).square().sum() for a in h.split(64, -1)), True),
    "scores, at least 0": (lambda h, t: (h.relu() * 3).softmax(-1).square().sum(), True),
    "the larger of two": (lambda h, t: torch.maximum(h, h.flip(0)).softmax(-1).square().sum(), True),
    "log-sum-exp": (lambda h, t: h.logsumexp(-1).square().sum(), True),
    "logits, sharpened": (lambda h, t: F.cross_entropy(h * h.detach().std(), t), True),
    "logits, standardized": (
        lambda h, t: F.cross_entropy((h - h.mean(-1, keepdim=True)) / h.std(-1, keepdim=True), t),
        True,
    ),
    "logits, normalized": (lambda h, t: F.cross_entropy(F.normalize(h, dim=-1) * 30, t), True),
    "logits, less their maximum": (lambda h, t: (h - h.amax(-1, keepdim=True)).exp().square().sum(), True),
    "logits, in other places": (
        lambda h, t: F.cross_entropy(h.scatter_add(1, t[:, None], -torch.ones(64, 1)), t),
        True,
    ),
    "distances": (lambda h, t: (-h.abs()).softmax(-1).square().sum(), True),
    "roots": (lambda h, t: (h.relu() + 1).sqrt().softmax(-1).square().sum(), True),
    "sums of decays": (lambda h, t: h.cumsum(-1).exp().square().sum(), True),
    "log-sum-exp up to each": (lambda h, t: h.logcumsumexp(-1).square().sum(), True),
    "gelu by hand": (lambda h, t: (h * 0.5 * (1 + torch.erf(h / 2**0.5))).square().sum(), False),
    "gated by hand": (lambda h, t: (h * torch.sigmoid(1.7 * h)).square().sum(), False),
    "a Gaussian": (lambda h, t: (-h.pow(2) / 2).exp().square().sum(), True),
    "distances to each other": (lambda h, t: (-(h[:8, None] - h[:8]).pow(2).sum(-1)).exp().square().sum(), True),
    "two classes": (lambda h, t: F.binary_cross_entropy_with_logits(h, (h > 0).float()), True),
    "normalized": (lambda h, t: F.rms_norm(h, (128,)).square().sum(), False),
    "gelu": (lambda h, t: F.gelu(h).square().sum(), False),
    "softplus": (lambda h, t: F.softplus(h).square().sum(), True),
    "elu": (lambda h, t: F.elu(h).square().sum(), True),
    "a gate of itself": (lambda h, t: (h.sigmoid() * h).square().sum(), False),
    "exponential of minus a square": (lambda h, t: (-(h * h)).exp().square().sum(), True),
    "exponential of a product with itself": (lambda h, t: (-h * h).exp().square().sum(), True),
    "exponential of a square": (lambda h, t: (h * h / 9).exp().square().sum(), True),
}


@pytest.mark.core
@pytest.mark.parametrize("name", SCORES)
def test_what_is_exponentiated_again_is_known_and_left_alone(name: str) -> None:
    """Inductor has logits saved and computes their softmax again: 3% off a logit of 10 is 30% off a probability."""
    read, expected = SCORES[name]
    x, w = torch.randn(64, 32), torch.randn(32, 128, requires_grad=True)
    target = torch.randint(0, 128, (64,))
    plan = aot_hooks.plan(lambda: read(x @ w, target), policy=policies.everything(aot_hooks.float8()))  # by Inductor
    # the product, parts of it, or what torch saves instead, such as log-probabilities
    found = [d for d in plan.decisions if d.saved.shape[-1:] in ((128,), (64,)) and len(d.saved.shape) == 2]
    found = [d for d in found if not d.saved.is_input]
    if any(d.hook is RESULT for d in plan.decisions):  # the exponential itself is saved, and read in products
        assert expected and all(d.hook in (aot_hooks.KEEP, RESULT) for d in found if "exp" not in d.saved.op)
        return
    assert {d.hook is aot_hooks.KEEP for d in found} == {expected}
    stays = [any(not read.answered for read in d.saved.backward_reads) for d in found if "softmax" not in d.saved.op]
    assert all(reads == expected for reads in stays)


def sampled(t: torch.Tensor, h: torch.Tensor, of_grid: bool) -> list[torch.Tensor]:
    """Gradients of samples of the pixels `h`."""
    g = t.view(1, 1, 4, 6)
    grid = g.new_zeros(1, 4, 6, 2)
    found = aten.grid_sampler_2d_backward(g, h.view(1, 1, 4, 6), grid, 0, 0, False, [True, of_grid])
    return list(found)[: 1 + of_grid]


# backward(h, t) -> the reads of h that are not smooth: (kind, operator, answered)
KINDS = {
    "a product": (lambda h, t: (h * t,), []),
    "a smooth chain": (lambda h, t: ((F.gelu(h.abs()) * 3).relu() * t,), []),
    "a chain that levels off": (
        lambda h, t: ((h.tanh().erf() * 3).atan() * t,),
        [("small", f"{name}.default", False) for name in ("tanh", "erf", "atan")],
    ),
    "gelu by tanh, by hand": (lambda h, t: (h * 0.5 * (1 + (0.8 * (h + 0.04 * h.pow(3))).tanh()) * t,), []),
    "normalized, and then an upper bound": (lambda h, t: (F.layer_norm(h, (6,)).clamp(max=2.0) * t,), []),
    "times the slope of itself": (
        lambda h, t: (aten.tanh_backward(t * h, h.tanh()),),
        [("small", "mul.Tensor", False), ("small", "tanh.default", False)],
    ),
    "times the slope of another": (lambda h, t: (aten.tanh_backward(t * h, t.detach()),), []),
    "a dividend, with those behind it": (
        lambda h, t: ((t * h).flip(0).cumsum(0).flip(0).masked_fill(t > 9, 0.0) / (h.abs() + 1),),
        [("singular", "mul.Tensor", False), ("singular", "add.Tensor", False)],
    ),
    "for many results, behind a product": (
        lambda h, t: ((t[0] * h[0])[:, None].expand(6, 200) / 200,),
        [("singular", "mul.Tensor", False)],
    ),
    "an angle": (lambda h, t: ((h * 3).cos() * t,), [("singular", "cos.default", False)]),
    "a gate": (lambda h, t: (h.sigmoid() * t,), [("singular", "sigmoid.default", False)]),
    "a gate of itself": (lambda h, t: (h * (h * 1.702).sigmoid() * t,), []),
    "an open gate's slope": (
        lambda h, t: (aten.sigmoid_backward(t, h),),
        [("singular", "sigmoid_backward.default", False)],
    ),
    "step sizes": (
        lambda h, t: (aten.softplus_backward(t, h, 1, 20),),
        [("singular", "softplus_backward.default", False)],
    ),
    "a difference from a target": (
        lambda h, t: (aten.mse_loss_backward(t, h, t.new_ones(4, 6), 0),),
        [("singular", "mse_loss_backward.default", False)],
    ),
    "a slope of erf": (lambda h, t: ((-h.pow(2)).exp() * (2 / math.sqrt(math.pi)) * t,), []),
    "a lower bound of 0": (lambda h, t: (h.clamp(min=0) * t,), []),
    "a lower bound alone": (lambda h, t: (h.clamp(min=0.5) * t,), [("small", "clamp.default", False)]),
    "an upper bound alone": (lambda h, t: (h.clamp(max=0.5) * t,), [("small", "clamp.default", False)]),
    "both bounds": (lambda h, t: (h.clamp(-0.5, 0.5) * t,), [("unknown", "clamp.default", False)]),
    "pixels, without the grid's gradient": (lambda h, t: (sampled(t, h, False)[0],), []),
    "pixels, with the grid's gradient": (
        lambda h, t: tuple(sampled(t, h, True)),
        [("singular", "grid_sampler_2d_backward.default", False)],
    ),
    "a sine of its square": (lambda h, t: ((h * h).cos() * t,), [("singular", "cos.default", False)]),
    "a sine of a matrix product": (lambda h, t: ((h @ h.t()).cos() @ t,), [("singular", "cos.default", False)]),
    "a matrix product": (lambda h, t: (torch.mm(h.t(), t),), []),
    "its square": (lambda h, t: (h.pow(2) * t,), []),
    "a norm's root": (
        lambda h, t: (torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * t,),
        [("singular", "mean.dim", False)],
    ),
    "a number less a norm": (
        lambda h, t: (torch.rsqrt(1 - 0.5 * h.pow(2).sum(-1)) * t[:, 0],),
        [("singular", "sum.dim_IntList", False)],
    ),
    "a number and a negative multiple of a norm": (
        lambda h, t: (torch.rsqrt(1 + -0.5 * h.pow(2).sum(-1)) * t[:, 0],),
        [("singular", "sum.dim_IntList", False)],
    ),
    "a norm less a number": (
        lambda h, t: (torch.rsqrt(torch.add(h.pow(2).sum(-1), 0.5, alpha=-1)) * t[:, 0],),
        [("singular", "sum.dim_IntList", False)],
    ),
    "divided by a norm": (
        lambda h, t: (h / h.abs().sum(-1, keepdim=True).clamp_min(1e-6) * t,),
        [("singular", "sum.dim_IntList", False)],
    ),
    "a deviation": (lambda h, t: (t / h.var(-1, keepdim=True).sqrt(),), [("singular", "var.correction", False)]),
    "a constant of its shape": (lambda h, t: (torch.ones_like(h).exp() * t,), []),
    "a dividend": (lambda h, t: (h / t.new_ones(4, 6).sin() * t,), [("singular", "div.Tensor", False)]),
    "a gradient that is divided": (lambda h, t: (h * t / t.new_ones(4, 6).sin(),), [("singular", "mul.Tensor", False)]),
    "divided by numbers a row": (lambda h, t: (h / t.new_ones(4, 1).sin() * t,), []),
    "a difference of neighbours": (lambda h, t: ((h[1:] - h[:-1]) * t[1:],), [("singular", "sub.Tensor", False)]),
    "divided by the mean of numbers of both signs": (
        lambda h, t: (t / h.mean(-1, keepdim=True),),
        [("singular", "mean.dim", False)],
    ),
    "a root": (lambda h, t: (torch.rsqrt(h) * t,), [("singular", "rsqrt.default", False)]),
    "a divisor": (lambda h, t: (t / h,), [("singular", "div.Tensor", False)]),
    "a high power": (lambda h, t: (h.pow(5) * t,), [("singular", "pow.Tensor_Scalar", False)]),
    "a norm's power": (lambda h, t: (h.pow(2).sum(-1).pow(-5) * t[:, 0],), [("singular", "sum.dim_IntList", False)]),
    "a negative power": (lambda h, t: (h.pow(-1.5) * t,), [("singular", "pow.Tensor_Scalar", False)]),
    "a logarithm": (lambda h, t: (h.log() * t,), [("singular", "log.default", False)]),
    "an exponential behind a sort": (lambda h, t: (h.sort(-1)[0].exp() * t,), [("singular", "exp.default", False)]),
    "a softmax": (lambda h, t: (aten._softmax(h, -1, False) * t,), [("singular", "_softmax.default", False)]),
    "added to a gradient": (lambda h, t: ((h + t).exp(),), [("singular", "add.Tensor", False)]),
    "an operator nobody listed": (lambda h, t: (h.nan_to_num() * t,), [("unknown", "nan_to_num.default", False)]),
    "its bits": (lambda h, t: (h.view(torch.int32).float() * t,), [("decision", "view.dtype", False)]),
    "rounded": (lambda h, t: (h.round() * t,), [("decision", "round.default", False)]),
    "compared with itself": (lambda h, t: ((h == h.amax(-1, keepdim=True)) * t,), [("decision", "eq.Tensor", True)]),
    "compared with any constant": (lambda h, t: ((h > 0.1) * t,), [("decision", "gt.Scalar", True)]),
    "compared behind a chain": (lambda h, t: ((h.tanh() > 0.1) * t,), [("decision", "gt.Scalar", True)]),
    "two comparisons": (
        lambda h, t: (((h > 0.1) & (h < 0.3)) * t,),
        [("decision", "gt.Scalar", True), ("decision", "lt.Scalar", True)],
    ),
    "compared, and a product": (lambda h, t: ((h > 0.1) * t * h,), [("decision", "gt.Scalar", True)]),
    "ReLU's backward": (
        lambda h, t: (aten.threshold_backward(t, h, 0),),
        [("decision", "threshold_backward.default", True)],
    ),
    "ReLU's backward behind a chain": (
        lambda h, t: (aten.threshold_backward(t, h.tanh(), 0),),
        [("decision", "threshold_backward.default", True)],
    ),
    "more answers than numbers": (
        lambda h, t: ((h.view(24, 1) > h.view(1, 24)) * t.view(1, 24),),
        [("decision", "gt.Tensor", False)],
    ),
    "an index": (lambda h, t: (t.gather(1, h.argmax(-1, keepdim=True)),), [("decision", "argmax.default", False)]),
    "compared with random numbers": (
        lambda h, t: ((h > torch.rand_like(h)) * t,),
        [("decision", "gt.Tensor", False)],
    ),
    "compared with the gradient": (lambda h, t: ((h > t) * t,), [("decision", "gt.Tensor", False)]),
}


@pytest.mark.core
@pytest.mark.parametrize(("backward", "expected"), KINDS.values(), ids=KINDS)
def test_reads_that_are_not_smooth(backward, expected):
    pair = by_hand(lambda x: (x.exp(), x.sin()), backward, torch.randn(4, 6))
    (value,) = boundary(pair.fw, pair.bw, 1).tensors
    found = [(read.kind, read.op.removeprefix("aten."), read.answered) for read in value.row.backward_reads]
    assert found == expected


@pytest.mark.core
def test_a_statistic_is_not_rounded() -> None:
    """The mean of a row is read for each of its numbers, which would all be off by the same error."""

    def read(size):
        pair = by_hand(
            lambda x: (x.exp(), x.mean(-1, keepdim=True), x.sin()),
            lambda m, h, t: ((h * m) * t,),
            torch.randn(4, size),
        )
        return [v.row.backward_reads for v in boundary(pair.fw, pair.bw, 1).tensors]

    mean, numbers = read(64)
    assert [r.kind for r in mean] == ["singular"] and numbers == ()
    assert read(8) == [(), ()]  # repeated a few times, as keys are for groups of queries


def test_every_smooth_operator_exists_and_reads_tensors_at_its_positions() -> None:
    missing = []
    for name, positions in SMOOTH.items():
        if "." not in name:
            continue  # a higher-order operator
        space, packet, overload = name.split(".")
        operator = getattr(getattr(getattr(torch.ops, space), packet, None), overload, None)
        if operator is None:
            missing.append(name)
            continue
        kinds = [str(a.type) for a in operator._schema.arguments]
        assert all("Tensor" in kinds[p] for p in positions), name
    assert set(missing) <= {
        "prims.fma.default",
        "aten._fused_rms_norm.default",
        "aten._fused_rms_norm_backward.default",
        "transformers.grouped_mm_fallback_backward.default",
    }


# what they give is random or not written, so there is nothing to compare
ANY_NUMBERS = {"aten.empty_like.default", "aten.rand_like.default", "aten.randn_like.default"}


def decided_with(fn, *shapes, hook, dtype=torch.float32):
    """Gradients without hooks and with `hook`, compiled, and the decisions."""
    generator = torch.Generator().manual_seed(0)
    leaves = [(torch.randn(shape, generator=generator) / 4).to(dtype).requires_grad_() for shape in shapes]

    def gradients(call, context):
        for leaf in leaves:
            leaf.grad = None
        with context:
            loss = call(*leaves)
        loss.backward()
        return [leaf.grad.clone() for leaf in leaves]

    torch._dynamo.reset()
    exact = gradients(torch.compile(fn, backend="aot_hooks", options={"inner": "aten"}), contextlib.nullcontext())
    torch._dynamo.reset()
    call = torch.compile(fn, backend="aot_hooks", options={"inner": "aten"})
    got = gradients(call, aot_hooks.saved_tensors_hooks(hook))
    return exact, got, [d for plan in aot_hooks.last_plans(call) for d in plan.decisions]


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_decisions_cross_as_bits_and_gradients_are_bitwise(dtype):
    """Only the mask of the maxima reads h: it crosses as bits, and h does not cross at all."""
    x = torch.randn(8, 64).to(dtype)
    before = by_hand(lambda x: (x.exp(), x.sin()), lambda h, t: ((h.tanh() == h.tanh().amax(-1, keepdim=True)) * t,), x)
    after = before.copy().apply(aot_hooks.int8())
    (exact,), (got,) = before.run(x)[1], after.run(x)[1]
    assert torch.equal(exact, got) and exact.any()
    numbers, mask = after.plan.decisions
    assert (str(mask.hook), mask.packed_bytes, mask.saved_bytes) == ("bitmask", 64, 0)
    assert (str(numbers.hook), numbers.packed_bytes, numbers.saved_bytes) == ("answers", 0, 512 * dtype.itemsize)
    assert [s.meta["val"].dtype for s in after.packed] == [torch.uint8]
    assert "the outcome of aten.eq.Tensor for 'sin'" in mask.reason


@pytest.mark.core
def test_what_is_read_smoothly_too_is_packed_beside_the_answers():
    exact, got, decisions = decided_with(
        lambda x, w: F.gelu(x @ w).amax(1).sum(), (64, 64), (64, 256), hook=aot_hooks.float8()
    )
    assert all(0 < (g - e).norm() / e.norm() < 0.1 for g, e in zip(got, exact, strict=True))
    by_op = {d.saved.op: d for d in decisions if not d.saved.is_input}
    assert by_op["aten.mm.default"].packed_bytes == 64 * 256 + 64 * 4
    assert by_op["aten.eq.Tensor"].packed_bytes == 64 * 256 // 8
    assert "comparisons keep their answers" in by_op["aten.mm.default"].reason


@pytest.mark.core
def test_a_report_names_the_read_that_forbids_rounding():
    def fn(x, w):
        h = torch.softmax(x @ w, -1)
        return (h.log() * h).sum()

    exact, got, decisions = decided_with(fn, (64, 64), (64, 256), hook=aot_hooks.int4(stochastic=False))
    assert all(torch.equal(g, e) for g, e in zip(got, exact, strict=True))
    (kept,) = {d.reason for d in decisions if d.saved.op == "aten._softmax.default"}
    assert "a small error of it may become any error: aten.log.default (test_backward_reads.py" in kept or (
        "aten.div.Tensor (test_backward_reads.py" in kept
    )


def halves(x):
    return x.to(torch.float8_e4m3fn), x.dtype


def back(packed):
    return packed[0].to(packed[1])


@pytest.mark.core
def test_own_functions_are_applied_as_asked_and_the_report_warns_of_decisions():
    x = torch.randn(8, 64)
    before = by_hand(lambda x: (x.exp(), x.sin()), lambda h, t: ((h == h.amax(-1, keepdim=True)) * t,), x)
    (exact,) = before.run(x)[1]
    asked = before.copy().apply(aot_hooks.Hook("own", halves, back))
    assert not torch.equal(asked.run(x)[1][0], exact)
    (warned,) = asked.plan.decisions
    assert "the backward decides by what unpack gives: aten.eq.Tensor" in warned.reason
    protected = before.copy().apply(aot_hooks.Hook("own", halves, back, lossy=True))
    assert torch.equal(protected.run(x)[1][0], exact)


@pytest.mark.core
def test_a_lossy_hook_takes_floating_point_only():
    index = torch.randint(0, 256, (64, 128))
    hook = aot_hooks.Hook("own", lambda x: (x.half(), x.dtype), back, lossy=True)

    def fn(x, w):
        h = x @ w
        return h.gather(1, (index + h.shape[0]) % 256).square().sum()

    _, _, decisions = decided_with(fn, (64, 64), (64, 256), hook=hook)
    assert {d.reason for d in decisions if d.saved.dtype is torch.int64} == {"own rounds: it leaves int64 as it is"}
    assert any(d.hook is hook for d in decisions)
