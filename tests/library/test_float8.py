"""float8: its error bound, and the values that it must leave as they are."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import pytest
import torch
from roundtrip import LEFT_ALONE

import aot_hooks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# format -> relative error of a value, half the smallest step in units of the scale
BOUND = {torch.float8_e4m3fn: (2**-4, 2**-10), torch.float8_e5m2: (2**-3, 2**-17)}
TOP = {torch.float8_e4m3fn: 416, torch.float8_e5m2: 49152}


def through_graph(x: torch.Tensor, hook: aot_hooks.Hook, inner: str) -> torch.Tensor:
    """The tensor that a backward reads for the saved tensor `x`, with `hook` inlined by our backend.

    `x * w` saves x; with a gradient of ones, the gradient of w is x as it came back.
    """
    w = torch.ones_like(x, requires_grad=True)
    compiled = torch.compile(lambda x, w: x * w, backend="aot_hooks", fullgraph=True, options={"inner": inner})
    with aot_hooks.saved_tensors_hooks(hook, scope="all"):
        out = compiled(x, w)
    out.backward(torch.ones_like(out))
    (plan,) = aot_hooks.last_plans(compiled)
    assert hook in [d.hook for d in plan.decisions]
    return w.grad


def with_specials(dtype: torch.dtype, device: str, rows: int = 64, columns: int = 256) -> torch.Tensor:
    x = torch.randn(rows, columns, dtype=torch.float32)
    x[0] = 0
    x[1, 3] = math.inf
    x[2, 5] = -math.inf
    x[3, 7] = math.nan
    x[4] = math.nan
    x[5] = -math.inf
    x[6] *= 1e-30
    x[3] *= 1e4
    x[7] = torch.linspace(0.4, 1, columns) * torch.finfo(dtype).max  # rounded up, these must not become infinite
    x[8, ::2] = -math.inf  # a row of an attention mask
    return x.to(device, dtype)


@pytest.mark.core
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("fmt", BOUND, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_finite_values_keep_the_stated_bound_and_others_come_back(device, scaling, fmt, dtype):
    hook = aot_hooks.float8(fmt, scaling)
    x = with_specials(dtype, device)
    if scaling == "tensorwise":
        x = x[8:].contiguous()
    check(x, hook.unpack(hook.pack(x)), scaling, fmt)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inner", ["inductor", "aten"])
@pytest.mark.parametrize("fmt", BOUND, ids=str)
def test_the_bound_holds_when_compiled(device, inner, fmt):
    x = with_specials(torch.bfloat16, device)
    check(x, through_graph(x, aot_hooks.float8(fmt), inner), "rowwise", fmt)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [64, 1000, 4096, 14336])
def test_inductor_agrees_with_eager_on_cuda(columns):
    x = with_specials(torch.bfloat16, "cuda", 512, columns)
    hook = aot_hooks.float8()
    got, expected = through_graph(x, hook, "inductor"), hook.unpack(hook.pack(x))
    finite = expected.isfinite()
    assert torch.equal(got[~finite].nan_to_num(1, 2, 3), expected[~finite].nan_to_num(1, 2, 3))
    assert torch.equal(got[finite], expected[finite])  # scales are powers of two: only the format rounds


def check(x: torch.Tensor, y: torch.Tensor, scaling: str, fmt: torch.dtype) -> None:
    assert y.dtype == x.dtype and y.shape == x.shape
    dtype, x, y = x.dtype, x.double().cpu(), y.double().cpu()
    finite = x.isfinite()
    assert torch.equal(x[~finite].nan_to_num(1, 2, 3), y[~finite].nan_to_num(1, 2, 3))
    clean = torch.where(finite, x, 0).abs()
    amax = {
        "tensorwise": lambda: clean.amax().expand_as(clean),
        "rowwise": lambda: clean.amax(-1, keepdim=True).expand_as(clean),
        "blockwise": lambda: (
            clean.unflatten(-1, (-1, 128)).amax(-1, keepdim=True).expand(*clean.shape[:-1], -1, 128).flatten(-2)
        ),
    }[scaling]()
    relative, step = BOUND[fmt]
    scale = power_of_two(amax, TOP[fmt])
    at_the_end = amax > 3 / 4 * torch.finfo(dtype).max  # the stored scale is less than a power of two there
    step = torch.where(at_the_end, step * (1 + 2**-4), step)
    assert ((x - y).abs()[finite] <= torch.maximum(relative * clean, step * scale)[finite]).all()


def power_of_two(amax: torch.Tensor, top: float) -> torch.Tensor:
    """The least 2**k with amax / 2**k <= top, at least 2**-126; float64."""
    fraction, exponent = torch.frexp(amax / top)
    return torch.ldexp((amax > 0).double(), exponent - (fraction == 0.5).int()).clamp(min=2.0**-126)


@pytest.mark.core
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("fmt", BOUND, ids=str)
def test_values_come_back_with_no_more_mantissa_bits_than_they_were_stored_with(device, scaling, fmt):
    x = torch.randn(16, 256, device=device) * 1.37
    mantissa, _ = torch.frexp(aot_hooks.float8(fmt, scaling).unpack(aot_hooks.float8(fmt, scaling).pack(x)))
    bits = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 3}[fmt]
    assert torch.equal(mantissa * 2**bits, (mantissa * 2**bits).round())
    assert not torch.equal(mantissa * 2 ** (bits - 1), (mantissa * 2 ** (bits - 1)).round())


@pytest.mark.core
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", BOUND, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_finite_value_comes_back_infinite(device, fmt, dtype):
    largest = torch.finfo(dtype).max
    x = torch.linspace(0.4, 1, 4096, dtype=torch.float64).mul(largest).to(device, dtype)
    x = (x * x.new_tensor([1, -1]).repeat(2048)).view(64, 64)  # each row has another largest value
    smallest = 2.0 ** (math.frexp(largest)[1] - {torch.float8_e4m3fn: 8 + 9, torch.float8_e5m2: 15 + 16}[fmt])
    # codes, and numbers halfway between two
    x[::2, 2:] = (torch.arange(62, dtype=torch.float64) / 2 * smallest).to(x)
    hook = aot_hooks.float8(fmt)
    y = hook.unpack(hook.pack(x))
    assert y.isfinite().all()
    check(x, y, "rowwise", fmt)


@pytest.mark.core
@pytest.mark.parametrize("x", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_it_cannot_hold_is_left_alone(x):
    hook = aot_hooks.float8()
    assert hook.pack(x) is x
    assert hook.unpack(x) is x


@pytest.mark.core
@pytest.mark.parametrize("shape", [(5,), (3, 200), (2, 3, 130), (7, 128)])
def test_blocks_of_any_length(shape):
    hook = aot_hooks.float8(scaling="blockwise")
    x = torch.randn(shape)
    y = hook.unpack(hook.pack(x))
    assert y.shape == x.shape
    torch.testing.assert_close(y, x, rtol=2**-4, atol=1e-2)


@pytest.mark.core
def test_one_factory_call_is_one_hook():
    assert aot_hooks.float8() is aot_hooks.float8()
    assert aot_hooks.float8() != aot_hooks.float8(torch.float8_e5m2)


@pytest.mark.parametrize("arguments", [{"dtype": torch.float16}, {"scaling": "columnwise"}])
def test_bad_arguments(arguments):
    with pytest.raises(aot_hooks.errors.OptionError, match=r"float8: (dtype|scaling) must be one of"):
        aot_hooks.float8(**arguments)


@pytest.mark.core
@pytest.mark.parametrize("fmt", BOUND, ids=str)
def test_dynamo_has_nothing_to_warn_of(fmt):
    hook, x = aot_hooks.float8(fmt), torch.randn(8, 64)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = torch.compile(lambda x: hook.unpack(hook.pack(x)), backend="eager", fullgraph=True)(x)
    assert torch.equal(y, hook.unpack(hook.pack(x)))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "make", [aot_hooks.float8, aot_hooks.int8, functools.partial(aot_hooks.int4, stochastic=False)]
)
def test_float16_that_overflows_in_a_fused_kernel(make: Any, device: str) -> None:
    """Inductor computes 300 * 30000 in float32; as float16 it is infinite, and sets no scale."""

    def multiplied(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return x.amax(0) * 300 * v

    x = torch.ones(16, 4, 128, dtype=torch.float16, device=device)
    x[:, :, 5] = 30000
    v = torch.ones(4, 128, dtype=torch.float16, device=device, requires_grad=True)
    torch.compile(multiplied, backend="aot_hooks", options={"policy": make()})(x, v).backward(torch.ones_like(v))
    finite = v.grad.isfinite()
    assert finite.sum() == finite.numel() - 4
    assert v.grad[:, 5].isinf().all()
    torch.testing.assert_close(v.grad[finite], torch.full_like(v.grad[finite], 300), rtol=1 / 16, atol=0)
