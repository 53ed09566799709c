"""lossless() on single tensors: exact for the kernels that read them; the tensors that it keeps, and why."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from comparisons import CALLS, numbers, results, same_bits, what_is_asked
from hypothesis import given, settings
from hypothesis import strategies as st

import aot_hooks
from aot_hooks import KEEP, lossless
from aot_hooks.graphs.read_tables import ONLY_TESTS, TESTS, Test
from aot_hooks.library.lossless import classes

aten = torch.ops.aten
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [*HALVES, torch.float32, torch.float64]


def row(shape=(4, 6), dtype=torch.float32, asks=None, values=None, nbytes=None):
    numel = math.prod(shape)
    return aot_hooks.SavedTensor(
        name="h",
        op="aten.relu.default",
        shape=shape,
        dtype=dtype,
        device=torch.device("cpu"),
        nbytes=numel * dtype.itemsize if nbytes is None else nbytes,
        storage=0,
        module_path="",
        source_line="",
        backward_ops=(),
        is_input=False,
        is_output=False,
        is_static=False,
        backward_asks=asks,
        value_range=values,
    )


def packed_bytes(value) -> int:
    return sum(t.nbytes for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor))


# --- a value ----------------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_it_is_a_value():
    assert repr(lossless()) == "lossless()"
    assert lossless() == lossless() and hash(lossless()) == hash(lossless())
    assert pickle.loads(pickle.dumps(lossless())) == lossless()
    asks = (Test("le", (0.0,)),)
    assert lossless()(row(asks=asks)) is lossless()(row(asks=asks))


# --- comparisons ------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ONLY_TESTS)
def test_the_kernel_gives_the_same_bits_for_what_comes_back(name, dtype):
    for constants in CALLS[name]:
        x = numbers(dtype)
        asks = tuple(sorted(set(what_is_asked(name, constants))))
        hook = lossless()(row(tuple(x.shape), dtype, asks))
        packed = hook.pack(x)
        y = hook.unpack(packed)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert same_bits(results(name, y, constants), results(name, x, constants))
        told_apart = set(zip(*(test(x).tolist() for test in asks), strict=True))
        bits = math.ceil(math.log2(len(told_apart)))
        assert packed_bytes(packed) == bits * math.ceil(x.numel() / 8)


@pytest.mark.parametrize("kind", ["lt", "signbit", "ge"])
def test_a_wrong_rule_is_noticed(monkeypatch, kind):
    """The test above fails when the stored answer is that of another comparison than the kernel's."""
    name = "aten.threshold_backward.default"
    x = numbers(torch.float32)
    (right,) = what_is_asked(name, (0,))
    hook = lossless()(row(tuple(x.shape), asks=(right,)))
    wrong = TESTS[kind]
    monkeypatch.setitem(TESTS, right.kind, lambda x, c: wrong(x) if kind == "signbit" else wrong(x, c))
    assert not same_bits(results(name, hook.unpack(hook.pack(x)), (0,)), results(name, x, (0,)))


def test_a_wrong_representative_is_noticed():
    from aot_hooks.hook import Hook

    name = "aten.threshold_backward.default"
    x = numbers(torch.float32)
    right = lossless()(row(tuple(x.shape), asks=what_is_asked(name, (0,))))
    numbers_back = right.unpack.numbers
    for wrong in ((-1.0, -1.0), (1.0, 1.0), numbers_back[::-1], (0.0, 0.0), (math.nan, 1.0)):
        hook = Hook("wrong", right.pack, type(right.unpack)(wrong))
        assert not same_bits(results(name, hook.unpack(hook.pack(x)), (0,)), results(name, x, (0,))), wrong


def every_number(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def a_test(constants: st.SearchStrategy[float]) -> st.SearchStrategy[Test]:
    one = [st.builds(Test, st.just(k), st.tuples(constants)) for k in ("le", "lt", "ge", "gt", "eq", "ne")]
    two = [st.builds(Test, st.just(k), st.tuples(constants, constants)) for k in ("outside", "inside", "within")]
    none = [st.builds(Test, st.just(k)) for k in ("isnan", "signbit")]
    return st.one_of(one + two + none)


@pytest.mark.core
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_classes_cover_every_number_of_a_format(dtype, data):
    """Each of all 65536 numbers is in a class, and comes back as a number with the same answers."""
    x = every_number(dtype)
    normal = x[x.isfinite() & ((x.abs() >= 4 * torch.finfo(dtype).tiny) | (x == 0))]
    constants = st.one_of(
        st.sampled_from([0.0, 1.0, -1.0, 6.0, math.inf, -math.inf, torch.finfo(dtype).max, torch.finfo(dtype).min]),
        st.integers(0, normal.numel() - 1).map(lambda i: normal[i].item() + 0.0),
    )
    asks = tuple(sorted(set(data.draw(st.lists(a_test(constants), min_size=0, max_size=3)))))
    hook = lossless()(row((2**15, 2), dtype, asks))
    if hook is KEEP:
        assert Test("signbit") in asks and len(asks) > 1  # a NaN with its sign set may be a class of its own
        return
    y = hook.unpack(hook.pack(x.view(2**15, 2))).view(-1)
    for test in asks:
        assert torch.equal(test(y), test(x)), test


def test_neighbours_have_nothing_between_them():
    """A representative between two constants must not be one of them."""
    one, next_one = 1.0, 1.0078125  # adjacent in bfloat16
    asks = (Test("gt", (one,)), Test("lt", (next_one,)))
    assert (True, True) not in dict(classes(asks, torch.bfloat16))
    assert dict(classes(asks, torch.float16))[True, True] not in (one, next_one)


@pytest.mark.parametrize("shape", [(2,), (7, 3), (2, 3, 5, 4), (1, 9)])
def test_layouts_come_back(shape):
    x = torch.randn(shape)
    if len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    for asks in ((), (Test("le", (0.0,)),), (Test("isnan"), Test("lt", (0.0,)), Test("gt", (0.0,)))):
        hook = lossless()(row(shape, asks=asks))
        y = hook.unpack(hook.pack(x))
        assert (y.shape, y.stride()) == (x.shape, x.stride())
        assert torch.equal(torch.sign(y), torch.sign(x)) or len(asks) < 3


# --- whole numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize(
    ("low", "high", "dtype", "name", "bits"),
    [
        (5, 5, torch.int64, "narrow(0 bits)", 0),
        (0, 1, torch.int64, "narrow(1 bits)", 1),
        (0, 1, torch.bfloat16, "narrow(1 bits)", 1),
        (-1, 2, torch.int8, "narrow(2 bits)", 2),
        (-1, 2, torch.float32, "narrow(2 bits)", 2),
        (0, 8, torch.int8, "narrow(4 bits)", 4),
        (-7, 8, torch.int32, "narrow(4 bits)", 4),
        (0, 16, torch.int64, "narrow(uint8)", 8),
        (0, 255, torch.int16, "narrow(uint8)", 8),
        (-128, 127, torch.int64, "narrow(int8)", 8),
        (-1, 128, torch.int64, "narrow(int16)", 16),
        (0, 32767, torch.int32, "narrow(int16)", 16),
        (0, 32768, torch.int64, "narrow(int32)", 32),
        (-(2**31), 2**31 - 1, torch.int64, "narrow(int32)", 32),
        (0, 2**31, torch.int64, "keep", 64),
        (0, 16, torch.uint8, "keep", 8),
        (0, 32768, torch.int32, "keep", 32),
    ],
)
def test_whole_numbers_of_a_range(low, high, dtype, name, bits):
    every = torch.arange(low, high + 1, max(1, (high - low) // 1000))
    x = torch.cat([every, torch.tensor([low, high] * 50)]).to(dtype)
    hook = lossless()(row(tuple(x.shape), dtype, values=(low, high)))
    assert hook.name == name
    packed = hook.pack(x)
    if hook is not KEEP:
        assert packed_bytes(packed) == math.ceil(x.numel() / 8) * bits if bits < 8 else x.numel() * bits // 8
        assert same_bits(hook.unpack(packed), x)


@pytest.mark.core
@pytest.mark.parametrize(
    ("saved", "reason"),
    [
        (row(), "the backward may need its numbers"),
        (row(dtype=torch.complex64), "the backward may need its numbers"),
        (row(dtype=torch.int64), "the graph does not prove a smaller range"),
        (row((), asks=()), "too few elements"),
        (row((1, 1), asks=(Test("le", (0.0,)),)), "too few elements"),
        (row((0, 4), torch.bool), "too few elements"),
        (row((1,), torch.bool), "too few elements"),
        (row((1000,), torch.bool, nbytes=1), "too few elements"),  # an expanded one
        (row((2,), torch.int16, values=(0, 1000)), "as small as it gets"),
    ],
)
def test_why_it_keeps(saved, reason):
    assert lossless()(saved) is KEEP
    assert lossless().why_kept(saved) == f"lossless: {reason}" or reason in lossless().why_kept(saved)


@pytest.mark.parametrize("numel", range(1, 20))
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.int64], ids=str)
def test_what_it_packs_is_smaller(numel, dtype):
    asks = (Test("isnan"), Test("lt", (0.0,)), Test("gt", (0.0,))) if dtype.is_floating_point else None
    saved = row((numel,), dtype, asks, None if asks or dtype is torch.bool else (0, 5))
    hook = lossless()(saved)
    x = torch.arange(numel).remainder(6).to(dtype)
    assert (hook is KEEP) == (numel == 1 or (dtype is torch.int8 and numel <= 3))
    if hook is not KEEP:
        assert packed_bytes(hook.pack(x)) < x.nbytes
