"""int8 and int4: the stated bound on data that is hard to store, what comes back exactly, and randomness."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from roundtrip import KINDS, LEFT_ALONE, data, product, specials_come_back, through_graph
from steps import assert_same, compiled, packed_count, step

import aot_hooks
from aot_hooks.graphs.layout import in_memory_order
from aot_hooks.library import integer

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NEAREST = [aot_hooks.int8(), aot_hooks.int8(32, power_of_two=True), aot_hooks.int4(stochastic=False)]
RANDOM = [aot_hooks.int8(stochastic=True), aot_hooks.int8(64, stochastic=True, power_of_two=True), aot_hooks.int4()]
HOOKS = [*NEAREST, *RANDOM, aot_hooks.int8(16), aot_hooks.int4(256)]
SMALLEST = 2.0**-126


def step_of_block(x: torch.Tensor, hook: aot_hooks.Hook) -> torch.Tensor:
    """For each element, the largest step that is stated for its block; row by row, in float64."""
    bits, block = hook.pack.bits, hook.pack.block
    step = torch.zeros_like(x, dtype=torch.float64)
    for start in range(0, x.shape[-1], block):
        part = x[..., start : start + block].double()
        finite = torch.where(part.isfinite(), part, 0)
        above, below = (side.amax(-1, keepdim=True).clamp(min=0) for side in (finite, -finite))
        amax = torch.maximum(above, below)
        if bits == 8:
            largest = (amax / (63 if hook.pack.power else 125)).clamp(min=SMALLEST)
        else:
            plain = part.isfinite().all(-1, keepdim=True)
            largest = torch.where(plain, (above + below) / 14, amax / 6).clamp(min=SMALLEST) * (1 + 2**-4 + 2**-18)
        step[..., start : start + block] = largest
    return step


def check(x: torch.Tensor, y: torch.Tensor, hook: aot_hooks.Hook) -> None:
    finite = specials_come_back(x, y)
    rounding = torch.finfo(x.dtype).eps / 2
    x, y = x.double(), y.double()
    step = step_of_block(x, hook)
    bound = (step if hook.pack.stochastic else step / 2) * (1 + rounding) + rounding * x.abs() + 2.0**-149
    if rounding == 2.0**-11:
        bound += 2.0**-25  # half of float16's smallest number
    assert ((x - y).abs() <= bound)[finite].all(), ((x - y).abs() / bound)[finite].max()
    assert (x * y >= 0)[finite].all()  # nothing changes its sign


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hook", HOOKS, ids=repr)
def test_the_stated_bound_holds(hook, kind, dtype):
    x = data(kind, dtype)
    check(x, hook.unpack(hook.pack(x)), hook)


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hook", HOOKS, ids=repr)
def test_the_largest_numbers_beside_what_is_not_finite(hook, dtype):
    x = data("largest", dtype)
    x[3, ::9], x[4, 5], x[5, 5] = torch.nan, torch.inf, -torch.inf
    check(x, hook.unpack(hook.pack(x)), hook)


@pytest.mark.core
@pytest.mark.parametrize("hook", [aot_hooks.int4(), aot_hooks.int4(stochastic=False)], ids=repr)
def test_numbers_have_the_codes_wherever_they_lie(hook):
    x = torch.linspace(0, 13.9, 32)  # so that a step is 1
    for row in (x, -x, x - 7, x - 1.5, x + 0.09):
        y = hook.unpack(hook.pack(row[None]))[0]
        assert ((y - row).abs() <= (1 if hook.pack.stochastic else 0.5)).all()
        assert torch.equal(y, y.round()) and len(y.unique()) >= 14


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stochastic", [False, True])
def test_powers_of_two_are_the_least_that_hold_a_block(stochastic, dtype):
    hook = aot_hooks.int8(8, stochastic, power_of_two=True)
    for times, power in ((125.5, 1.0), (126.0, 2.0), (63.0, 1.0), (125.0 * 2.0**-9, 2.0**-9)):
        x = torch.tensor([[times, 0, 1.4 * power, -2.6 * power, 0, 0, 0, 0]]).to(dtype)
        y = hook.unpack(hook.pack(x))
        assert torch.equal(y / power, (y / power).round())
        if not stochastic:
            assert y.double()[0, 2:4].tolist() == [round(float(v) / power) * power for v in x.double()[0, 2:4]]
        check(x, y, hook)


@pytest.mark.parametrize("hook", HOOKS, ids=repr)
def test_what_is_rounded_after_its_scale_was_found_stays_a_number(hook, monkeypatch):
    """Inductor may find the scale of values that it has just computed, and the codes of the same values as stored."""
    block = hook.pack.block
    for dtype, exponents in ((torch.bfloat16, (-100, 0, 100)), (torch.float16, (*range(-25, -13), 0, 13))):
        x = torch.zeros(3000, block)
        x[:, 0] = torch.linspace(1, 2, 3000)
        x[:, 1] = -x[:, 0]
        x[::2, 2] = torch.inf  # for which int4 has codes of their own
        for exponent in exponents:
            unrounded = (x * 2.0**exponent).unflatten(-1, (1, block))
            monkeypatch.setattr(integer, "in_blocks", lambda x, block, unrounded=unrounded: unrounded)
            stored = unrounded.flatten(-2).to(dtype)
            got = hook.unpack(hook.pack(stored))
            assert torch.equal(got.isinf(), stored.isinf()) and not got.isnan().any()
            assert (got.double() * stored.double() >= 0)[stored.isfinite()].all()


def test_the_check_can_fail():
    x, hook = data("normal", torch.float32), aot_hooks.int8()
    with pytest.raises(AssertionError):
        check(x, x + 0.6 * step_of_block(x, hook), hook)
    with pytest.raises(AssertionError):
        check(x, hook.unpack(hook.pack(x)).index_fill(0, torch.tensor(3), torch.inf), hook)


@pytest.mark.core
@pytest.mark.parametrize("hook", HOOKS, ids=repr)
def test_zeros_are_exact_beside_other_blocks_too(hook):
    assert not hook.unpack(hook.pack(torch.zeros(3, 200))).any()
    block = hook.pack.block
    x = torch.zeros(2, 3 * block)  # a block of zeros, one that is not, and one with a single value
    x[:, block : 2 * block] = torch.randn(2, block)
    x[:, -1] = 1.5
    y = hook.unpack(hook.pack(x))
    assert not y[:, :block].any() and not y[:, 2 * block : -1].any()


@st.composite
def tensors(draw):
    """A float tensor of any shape and stride, with a value here and there that isn't finite."""
    sizes = draw(st.lists(st.integers(1, 5), max_size=3)) + [draw(st.integers(1, 150))]
    x = torch.randn(sizes).to(draw(st.sampled_from(DTYPES)))
    for value in draw(st.lists(st.sampled_from([torch.inf, -torch.inf, torch.nan]), max_size=3)):
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = value
    x = x.permute(draw(st.permutations(range(x.dim()))))
    if draw(st.booleans()):
        x = torch.stack([x, x + 1], -1)[..., draw(st.integers(0, 1))]
    return x


@settings(max_examples=60, deadline=None)
@given(tensors(), st.sampled_from(HOOKS))
def test_any_shape_stride_and_dtype(x, hook):
    check(x, hook.unpack(hook.pack(x)), hook)


@pytest.mark.core
@pytest.mark.parametrize("hook", NEAREST, ids=repr)
def test_values_are_stored_as_they_lie_in_memory(hook):
    x = torch.randn(2, 5, 3, 64).transpose(1, 2)
    q, scale, *_ = packed = hook.pack(x)
    assert q.shape[:3] == scale.shape[:3] == (2, 5, 3) and q.is_contiguous() and scale.is_contiguous()
    y = hook.unpack(packed)
    assert y.stride() == x.stride()
    check(x, y, hook)


@pytest.mark.core
@pytest.mark.parametrize("columns", [64, 130, 33])
def test_bytes_are_those_of_the_row(columns):
    x = torch.randn(4, columns)
    q, scale, *_ = aot_hooks.int8().pack(x)
    assert (q.nbytes, scale.nbytes) == (4 * columns, 4 * 2 * -(-columns // 64))
    q, scale, *_ = aot_hooks.int8(32, power_of_two=True).pack(x)
    assert (q.nbytes, scale.nbytes) == (4 * columns, 4 * -(-columns // 32))
    q, scale, *_ = aot_hooks.int4().pack(x)
    assert (q.nbytes, scale.nbytes) == (4 * -(-columns // 2), 4 * 2 * -(-columns // 32))


# --- stochastic rounding ---------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("kind", ["normal", "heavy"])
@pytest.mark.parametrize("hook", RANDOM, ids=repr)
def test_the_expected_value_is_what_was_saved(hook, kind):
    draws = 2000
    x = data(kind, torch.float32, 4, 64)
    mean = torch.stack([hook.unpack(hook.pack(x)).double() for _ in range(draws)]).mean(0)
    step = step_of_block(x, hook)
    # Each draw is within one step: by Hoeffding's bound a mean is off by more than this once in 1e9
    bound = step * (torch.tensor(2 / 1e-9).log() / (2 * draws)).sqrt()
    assert ((mean - x).abs() <= bound).all()
    # and all together are off by far less than rounding to the nearest, which is off by a quarter of a step
    off = ((mean - x) / step).mean().abs()
    assert off < 5 * 0.5 / (draws * x.numel()) ** 0.5


def test_rounding_to_the_nearest_is_biased():
    """The test above notices a bias: all small values in a block with a large one become zero."""
    x = torch.full((1, 32), 0.4)
    x[0, 0] = 14.0
    y = aot_hooks.int4(stochastic=False)
    assert not y.unpack(y.pack(x))[0, 1:].any()
    y = aot_hooks.int4()
    assert y.unpack(y.pack(x.expand(200, 32)))[:, 1:].mean().sub(0.4).abs() < 5 * 0.5 / (200 * 31) ** 0.5


@pytest.mark.core
@pytest.mark.parametrize("inner", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_rounding_is_fresh_each_step_and_follows_the_seed(inner):
    x, call = torch.randn(8, 64), compiled(product, inner)
    got = []
    for seed in (1, 1, None, 2):
        if seed is not None:
            torch.manual_seed(seed)
        got.append(through_graph(x, aot_hooks.int4(), call))
        check(x, got[-1], aot_hooks.int4())
    assert torch.equal(got[0], got[1])
    assert not torch.equal(got[1], got[2]) and not torch.equal(got[2], got[3])


# --- in graphs -------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("hook", HOOKS, ids=repr)
@pytest.mark.parametrize("kind", ["largest", "mixed"])
def test_round_trip_through_a_graph(hook, kind):
    x = data(kind, torch.bfloat16, 16, 200)
    y = through_graph(x, hook, compiled(product))
    check(x, y, hook)
    if hook in NEAREST:
        assert_same(y, hook.unpack(hook.pack(x)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "dtype"),
    [*((hook, torch.bfloat16) for hook in (*NEAREST, aot_hooks.int4())), (aot_hooks.int8(), torch.float32)],
    ids=str,
)
def test_round_trip_through_inductor(hook, dtype):
    x = torch.cat([data("mixed", dtype, columns=200), data("largest", dtype, columns=200)])
    check(x, through_graph(x, hook, compiled(product, "inductor")), hook)


@pytest.mark.core
@pytest.mark.parametrize("hook", NEAREST, ids=repr)
def test_one_graph_serves_all_lengths(hook):
    call = compiled(product, dynamic=True)
    for rows, columns in [(4, 200), (6, 256), (3, 131), (5, 384)]:
        x = torch.randn(rows, columns)
        y = through_graph(x, hook, call)
        assert_same(y, hook.unpack(hook.pack(x)))
    assert len(aot_hooks.last_plans(call)) == 1


@pytest.mark.slow
def test_one_inductor_graph_serves_all_lengths():
    call = compiled(product, "inductor", dynamic=True)
    hook = aot_hooks.int8()
    for rows, columns in [(4, 200), (6, 256), (3, 131)]:
        x = torch.randn(rows, columns)
        check(x, through_graph(x, hook, call), hook)
    assert len(aot_hooks.last_plans(call)) == 1


class Attention(torch.nn.Module):
    """Saves transposed queries, views of one storage and a transposed matrix."""

    def __init__(self, heads: int = 2, width: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.inner = torch.nn.Linear(width, 3 * width)
        self.outer = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.inner(x).tanh().chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) / 8).softmax(-1)
        return F.gelu(self.outer((weights @ v).transpose(1, 2).flatten(-2)))


@pytest.mark.core
@pytest.mark.parametrize("hook", NEAREST, ids=repr)
def test_gradients_are_near_those_without_hooks(hook):
    model, x = Attention(), torch.randn(2, 40, 64, requires_grad=True)
    _, exact = step(model, x)
    call = compiled(model)
    _, got = step(call, x, hook=hook)
    _, eager = step(model, x, hook=hook)
    assert packed_count(call) >= 4
    tolerance = {8: 0.03, 4: 0.3}[hook.pack.bits]
    for a, b, c in zip(exact, got, eager, strict=True):
        assert 0 < (a - b).norm() / a.norm() < tolerance
        assert (a - c).norm() / a.norm() < tolerance


# --- what is left alone ----------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("x", LEFT_ALONE.values(), ids=LEFT_ALONE)
@pytest.mark.parametrize("hook", HOOKS, ids=repr)
def test_what_it_cannot_hold_is_left_alone(hook, x):
    assert hook.pack(x) is x
    assert hook.unpack(x) is x


def reasons(fn, *args, hook):
    call = compiled(fn)
    step(call, *args, hook=hook, scope="all")
    return {d.reason for plan in aot_hooks.last_plans(call) for d in plan.decisions if d.hook is aot_hooks.KEEP}


@pytest.mark.core
def test_reports_say_what_is_left_alone():
    x = torch.randn(4, 64, requires_grad=True)
    index = torch.randint(0, 64, (4, 3))
    assert "int8 leaves int64 as it is" in reasons(lambda x: x.gather(1, index) * 2, x, hook=aot_hooks.int8())
    y = torch.randn(5, 1, requires_grad=True)
    assert "int8 would save too little on rows this short" in reasons(lambda y: y.sin(), y, hook=aot_hooks.int8())
    assert "int4 would save too little on rows this short" in reasons(lambda y: y.sin(), y, hook=aot_hooks.int4())
    statistic = "int8 leaves logarithms that the backward exponentiates as they are"
    assert statistic in reasons(lambda x: x.log_softmax(-1).sin(), x, hook=aot_hooks.int8())


@pytest.mark.core
@pytest.mark.parametrize("hook", [*HOOKS, aot_hooks.float8()], ids=repr)
def test_one_number_a_row_is_left_alone(hook):
    """A norm's reciprocal is such a number: an error of a hundredth is one of the whole row's gradient."""
    x = torch.randn(64, 1, requires_grad=True)
    call = compiled(lambda x: x.sin())
    step(call, x, hook=hook, scope="all")
    decisions = [d for plan in aot_hooks.last_plans(call) for d in plan.decisions]
    assert decisions and {d.hook for d in decisions} == {aot_hooks.KEEP}


@pytest.mark.core
def test_one_factory_call_is_one_hook():
    assert aot_hooks.int8() is aot_hooks.int8() is aot_hooks.int8(64) is aot_hooks.int8(block_size=64)
    others = (aot_hooks.int8(128), aot_hooks.int8(stochastic=True), aot_hooks.int8(power_of_two=True), aot_hooks.int4())
    assert len({aot_hooks.int8(), *others}) == 5


@pytest.mark.parametrize("block_size", [0, 4, 48, 2048, 32.0, "32"])
def test_bad_block_sizes(block_size):
    with pytest.raises(aot_hooks.errors.OptionError, match="int8: block_size must be a power of two from 8 to 1024"):
        aot_hooks.int8(block_size)


@pytest.mark.parametrize(
    ("factory", "wrong"),
    [
        (aot_hooks.int8, {"stochastic": 1}),
        (aot_hooks.int8, {"power_of_two": 1}),
        (aot_hooks.int4, {"stochastic": "no"}),
    ],
    ids=["int8", "int8, scales", "int4, rounding"],
)
def test_what_is_true_or_false_is_nothing_else(factory, wrong):
    (option, value), *_ = wrong.items()
    for right in (True, False):  # hooks cached for these must not answer for the wrong one
        factory(**{option: right})
    with pytest.raises(aot_hooks.errors.OptionError, match=f"{option} must be True or False, got {value!r}"):
        factory(**wrong)


def test_memory_order_is_that_of_layout():
    x = torch.randn(2, 5, 3, 64).transpose(1, 2)
    assert aot_hooks.int8().pack(x)[-1] == in_memory_order(x)[1] == (0, 2, 1, 3)


@pytest.mark.core
@pytest.mark.parametrize(
    "hook", [aot_hooks.int4(stochastic=False), aot_hooks.int8(), aot_hooks.float8(scaling="blockwise")], ids=repr
)
def test_rows_across_memory_of_any_length(hook):
    """A pad of 0 keeps the strides, and the trace for all lengths cannot know whether it is 0."""

    def f(x):
        h = (x * 2).tanh().t().exp().tanh()
        return (h * h.sin()).sum()

    def gradient(call, x):
        return torch.autograd.grad(call(x), x)

    dynamic = torch.compile(f, backend="aot_hooks", dynamic=True, options={"inner": "aten", "policy": hook})
    for length in (200, 131):
        x = torch.randn(length, 96, requires_grad=True)
        torch._dynamo.mark_static(x, 1)
        static = torch.compile(f, backend="aot_hooks", dynamic=False, options={"inner": "aten", "policy": hook})
        torch.testing.assert_close(gradient(dynamic, x), gradient(static, x), rtol=1e-5, atol=1e-6)
