"""bitmask and cast: exact to the bit, and within the rounding of the narrower type."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from roundtrip import KINDS, data, mask, product, specials_come_back, through_graph
from steps import assert_same, compiled, packed_count, step

import aot_hooks

BITMASK = aot_hooks.bitmask()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 2**32 - 1), st.randoms(use_true_random=False)
)
def test_any_mask_comes_back(sizes, seed, random):
    x = torch.rand(sizes, generator=torch.Generator().manual_seed(seed)) < 0.5
    order = list(range(x.dim()))
    random.shuffle(order)
    x = x.permute(order)
    bits, *_ = packed = BITMASK.pack(x)
    assert bits.dtype is torch.uint8 and bits.numel() == -(-x.numel() // 8)
    assert torch.equal(BITMASK.unpack(packed), x)


@pytest.mark.core
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 63, 64, 65, 1000])
def test_every_element_has_its_bit(count):
    """One True at a time: no two elements share a bit, and none is lost."""
    seen = set()
    for i in range(0, count, max(count // 20, 1)):
        x = torch.zeros(count, dtype=torch.bool)
        x[i] = True
        packed = BITMASK.pack(x)
        seen.add(tuple(packed[0].tolist()))
        assert packed[0][i // 8] == 1 << i % 8 and packed[0].count_nonzero() == 1
        assert torch.equal(BITMASK.unpack(packed), x)
    assert len(seen) == len(range(0, count, max(count // 20, 1)))
    assert BITMASK.unpack(BITMASK.pack(torch.ones(count, dtype=torch.bool))).all()


@pytest.mark.core
def test_masks_are_stored_as_they_lie_in_memory():
    x = (torch.rand(2, 3, 5, 64) < 0.5).transpose(1, 2)
    y = BITMASK.unpack(BITMASK.pack(x))
    assert torch.equal(y, x) and y.stride() == x.stride()


@pytest.mark.core
@pytest.mark.parametrize("inner", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_graph_serves_all_lengths(inner):
    call = compiled(mask, inner, dynamic=True)
    for rows, columns in [(3, 5), (4, 64), (7, 9)]:
        x = torch.rand(rows, columns) < 0.5
        assert torch.equal(through_graph(x, BITMASK, call), x.float())
    assert len(aot_hooks.last_plans(call)) == 1


@pytest.mark.core
@pytest.mark.parametrize("inner", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradients_are_those_without_hooks(inner):
    def fn(x, w):
        h = (x @ w).transpose(0, 1)
        return w @ torch.where(h > 0, h * 2, h / 3)

    x, w = torch.randn(9, 17, requires_grad=True), torch.randn(17, 17, requires_grad=True)
    call = compiled(fn, inner)
    _, got = step(call, x, w, hook=BITMASK)
    if inner == "aten":  # Inductor makes the mask again
        assert packed_count(call) == 1
    assert_same(got, step(fn, x, w)[1], exactly=False)
    assert_same(step(fn, x, w, hook=BITMASK)[1], step(fn, x, w)[1])


@pytest.mark.core
@pytest.mark.parametrize("hook", [BITMASK, aot_hooks.cast(torch.bfloat16)], ids=repr)
@pytest.mark.parametrize(
    "x",
    [torch.arange(12), torch.tensor(True), torch.empty(0, 8, dtype=torch.bool), torch.tensor([0.1, -2, 3]).half()],
    ids=["int", "0-d", "empty", "half"],
)
def test_what_it_cannot_hold_is_left_alone(hook, x):
    assert hook.pack(x) is x and hook.unpack(x) is x


# --- cast ------------------------------------------------------------------------------------------------------------

WIDTHS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
    (torch.float64, torch.bfloat16),
]


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("wide", "narrow"), WIDTHS, ids=str)
def test_cast_keeps_the_stated_bound(wide, narrow, kind):
    hook, x = aot_hooks.cast(narrow), data(kind, wide)
    check(x, hook.unpack(hook.pack(x)), narrow)


@pytest.mark.core
@pytest.mark.parametrize("inner", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
def test_cast_through_a_graph(inner):
    x = torch.cat([data("mixed", torch.float32), data("largest", torch.float32)])
    check(x, through_graph(x, aot_hooks.cast(torch.float16), compiled(product, inner)), torch.float16)


def check(x: torch.Tensor, y: torch.Tensor, narrow: torch.dtype) -> None:
    finite = specials_come_back(x, y)
    limits = torch.finfo(narrow)
    within = finite & (x.double().abs() <= limits.max)
    bound = x.double().abs() * limits.eps / 2 + limits.smallest_normal * limits.eps / 2
    assert ((x.double() - y.double()).abs() <= bound)[within].all()
    assert (y.double().abs() == limits.max)[finite & ~within].all() and (x.sign() == y.sign())[finite & ~within].all()


@pytest.mark.core
def test_cast_leaves_alone_what_it_would_not_make_smaller():
    def reasons(hook, x):
        call = compiled(lambda x: x.tanh().square())
        step(call, x.requires_grad_(), hook=hook, scope="all")
        return {d.reason for plan in aot_hooks.last_plans(call) for d in plan.decisions if d.hook is aot_hooks.KEEP}

    assert reasons(aot_hooks.cast(torch.bfloat16), torch.randn(4, 8)) == set()
    for hook, dtype in [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.bfloat16), (torch.float32,) * 2]:
        name = str(dtype).removeprefix("torch.")
        (reason,) = reasons(aot_hooks.cast(hook), torch.randn(4, 8, dtype=dtype))
        assert reason == f"{aot_hooks.cast(hook).name} leaves {name} as it is"


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_cast_to_something_else(dtype):
    with pytest.raises(aot_hooks.errors.OptionError, match="cast: dtype must be one of"):
        aot_hooks.cast(dtype)


@pytest.mark.core
def test_a_lossy_hook_stores_masks_as_bits() -> None:
    """A comparison's: the same gradient as without a hook."""
    x, w = torch.randn(64, 128), torch.eye(128).requires_grad_()

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = x @ w
        return torch.where(h > 0.5, h, 0.1 * h).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_hooks", options={"inner": "aten", "policy": aot_hooks.float8()})
    (expected,) = torch.autograd.grad(loss(x, w), w)
    (found,) = torch.autograd.grad(compiled(x, w), w)
    assert torch.equal(found, expected)
    (mask,) = (d for d in aot_hooks.last_plans(compiled)[0].decisions if d.saved.dtype is torch.bool)
    assert (str(mask.hook), mask.packed_bytes, mask.saved_bytes) == ("bitmask", 64 * 128 // 8, 64 * 128)
    assert mask.reason.endswith("leaves bool as it is; a bit each")
