"""float8 and int8 as the operators that Inductor compiles as one loop each: their errors are those of the hooks.

Their PTX runs on an emulator in test_ptx.py; here their tensor code runs.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch

import aot_hooks
from aot_hooks.hook import compiled_by, compiling_for
from aot_hooks.library.loops import operators
from aot_hooks.torch_private import inductor_lowering
from aot_hooks.torch_private.inductor_lowering import register_operators

RANGE = {torch.float8_e4m3fn: (416.0, 448.0), torch.float8_e5m2: (49152.0, 57344.0)}


def rows(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(12, 300)
    x[0] = 0
    x[1, 3], x[1, 4] = torch.inf, -torch.inf
    x[2] = torch.nan
    x[3] *= 1e-39  # subnormal
    x[4] *= 1e37
    x[5] = torch.linspace(0.4, 1, 300) * torch.finfo(dtype).max
    x[6, ::2] = -torch.inf
    x[7] = ((torch.arange(300) % 126) + 0.5) * 2048 / 126  # with a largest value of 2048, each is half a step off
    x[7, 0] = 2048
    return x.to(dtype)


def there_and_back(x: torch.Tensor, fmt: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    top, inf = RANGE[fmt]
    bits = operators.amax_bits(x)
    q = operators.to_float8(x, bits, fmt, top, x.dtype)
    return bits, q, operators.from_float8(q, bits, x.dtype, top, inf)


def int8_there_and_back(x: torch.Tensor, power: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = operators.amax_exponent(x) if power else operators.amax_word(x)
    q = operators.to_int8(x, scale, x.dtype, power)
    return scale, q, operators.from_int8(q, scale, x.dtype, power)


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", RANGE, ids=str)
def test_as_tensor_code_they_agree_with_the_hook(dtype, fmt):
    x = rows(dtype)
    hook = aot_hooks.float8(fmt)
    expected = hook.unpack(hook.pack(x)).float()
    _, _, got = there_and_back(x, fmt)
    assert got.dtype is dtype
    finite = x.isfinite()
    assert torch.equal(got[~finite].nan_to_num(7), x[~finite].nan_to_num(7))
    assert torch.equal(got.float()[finite], expected[finite])


@pytest.fixture
def toy_library():
    with torch.library._scoped_library("toy_loops", "DEF") as library:
        yield library


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.parametrize("reduce_last", [None, "amax"])
def test_an_operator_is_one_loop_over_its_first_argument(reduce_last, toy_library, monkeypatch):
    """Broadcasting, dtype and reduction, by a loop that Inductor's C++ can compile, as PTX can't be on a CPU."""

    def scaled(x: torch.Tensor, scale: torch.Tensor, factor: float) -> torch.Tensor:
        y = (x * scale * factor).to(torch.float64)
        return y if reduce_last is None else y.amax(-1, keepdim=True)

    name = f"scaled_{reduce_last}"  # Inductor knows operators by their names
    toy_library.define(f"{name}(Tensor x, Tensor scale, float factor) -> Tensor")
    toy_library.impl(name, lambda *_: pytest.fail("it was called, not compiled"), "CPU")
    toy_library.impl(name, lambda *args: torch.empty_like(scaled(*args)), "Meta")

    def body(ops: Any, x: Any, scale: Any, factor: float) -> Any:
        return ops.to_dtype(ops.mul(ops.mul(x, scale), ops.constant(factor, torch.float32)), torch.float64)

    op = getattr(torch.ops.toy_loops, name).default
    inductor_lowering.lower_to_loop(op, body, lambda *_: torch.float64, reduce_last=reduce_last)
    register_operators()
    monkeypatch.setattr(inductor_lowering, "emits_ptx", lambda device: True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, scale: op(x, scale, 0.5), fullgraph=True)
    for scale in (torch.rand(4, 1, 6), torch.rand(4, 5, 1), torch.rand(4, 5, 6)):
        x = torch.rand(4, 5, 6)
        assert torch.equal(compiled(x, scale), scaled(x, scale, 0.5))


@pytest.mark.core
def test_without_ptx_inductor_calls_the_operators():
    register_operators()
    for fn, option in ((there_and_back, torch.float8_e5m2), (int8_there_and_back, True), (int8_there_and_back, False)):
        torch._dynamo.reset()
        x = rows(torch.bfloat16)
        for got, expected in zip(torch.compile(fn, fullgraph=True)(x, option), fn(x, option), strict=True):
            assert got.dtype is expected.dtype
            torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.core
def test_the_operators_are_for_nvidia_gpus_under_inductor(monkeypatch):
    gpu, cpu = types.SimpleNamespace(device=torch.device("cuda")), torch.empty(2)
    assert not operators.use_operators(gpu)
    with compiling_for("inductor"):
        assert operators.use_operators(gpu) == (torch.version.hip is None)
        assert not operators.use_operators(cpu)
        monkeypatch.setattr(torch.version, "hip", "6.4")
        assert not operators.use_operators(gpu)


@pytest.mark.core
@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_int8_as_tensor_code_keeps_its_bound(dtype, power):
    x = rows(dtype)
    _, q, got = int8_there_and_back(x, power)
    assert (q.dtype, got.dtype) == (torch.uint8, dtype)
    finite = x.isfinite()
    assert torch.equal(got[~finite].nan_to_num(7), x[~finite].nan_to_num(7))
    largest = torch.where(finite, x.double().abs(), 0).amax(-1, keepdim=True)
    bound = (largest / (63 if power else 125) / 2).clamp(min=2.0**-127) + x.double().abs() * torch.finfo(dtype).eps
    assert (((got.double() - x.double()).abs() <= bound) | ~finite).all()
    assert got[5].isfinite().all()  # row 5 holds the dtype's largest number


HOOKS = {f"float8 {s}": aot_hooks.float8(torch.float8_e5m2, s) for s in ("rowwise", "blockwise")}
HOOKS["int8"] = aot_hooks.int8()
HOOKS["int8, power of two"] = aot_hooks.int8(32, power_of_two=True)


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_int8_in_powers_of_two_agrees_with_the_hook(dtype):
    x = rows(dtype)[:, :256]
    hook = aot_hooks.int8(256, power_of_two=True)
    _, _, got = int8_there_and_back(x, power=True)
    finite = x.isfinite()
    finite[5] = False  # the dtype's largest numbers, for which the loops make the step smaller by the last digit
    off, expected = ((y.double() - x.double()).abs()[finite] for y in (got, hook.unpack(hook.pack(x))))
    assert torch.equal(off, expected)  # a value halfway between two codes may go to either


@pytest.mark.core
@pytest.mark.parametrize("power", [False, True])
def test_what_is_rounded_after_its_scale_was_found_stays_a_number(power):
    """Inductor may find the scale of values that it has just computed, and read the same values as stored, rounded."""
    for exponent in (-120, *range(-26, -13), 0, 7, 15, 120):
        x = torch.zeros(1024, 8)
        x[:, 0] = torch.linspace(0.96, 2.1, 1024) * 2.0**exponent
        scale = operators.amax_exponent(x) if power else operators.amax_word(x)
        for dtype in (torch.bfloat16, torch.float16):
            stored = x.to(dtype)
            some = stored[:, 0].isfinite() & (stored[:, 0] > 0)
            code = operators.to_int8(stored, scale, dtype, power)
            assert ((code[some, 0] > 127) & (code[some, 0] < 254)).all()
            back = operators.from_int8(code, scale, dtype, power)[some, 0].double()
            step = (stored[some, 0] / (63 if power else 125)).clamp(min=2.0**-24 if dtype is torch.float16 else 0)
            # half of a step, and half of the last digit twice: when stored, and when unpacked
            bound = step / 2 + back * torch.finfo(dtype).eps + (2.0**-24 if dtype is torch.float16 else 0)
            assert ((back - x[some, 0]).abs() <= bound).all()


@pytest.mark.core
@pytest.mark.parametrize("fmt", RANGE, ids=str)
def test_what_float8_holds_is_no_infinity_when_it_is_rounded_later(fmt):
    top, inf = RANGE[fmt]
    for exponent in (-120, *range(-27, -13), 0, 7, 15):
        x = torch.zeros(1024, 8)
        x[:, 0] = torch.linspace(0.96, 2.1, 1024) * 2.0**exponent
        bits = operators.amax_bits(x)
        for dtype in (torch.bfloat16, torch.float16):
            stored = x.to(dtype)
            stored[stored.isinf()] = 0
            back = operators.from_float8(operators.to_float8(stored, bits, fmt, top, dtype), bits, dtype, top, inf)
            off = (back.double() - stored.double()).abs()
            assert (off <= stored.double().abs() * 2.0 ** (-4 if fmt is torch.float8_e4m3fn else -3)).all()


@pytest.mark.core
@pytest.mark.parametrize("power", [False, True])
def test_multiples_of_the_smallest_float16_come_back_exactly(power):
    x = torch.arange(-125, 126).mul(2.0**-24).half()[None]
    hook = aot_hooks.int8(256, power_of_two=power)
    assert torch.equal(int8_there_and_back(x, power)[2], x)
    assert torch.equal(hook.unpack(hook.pack(x)), x)


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
@pytest.mark.slow
def test_through_the_backend_the_gradient_is_that_of_the_tensor_code(hook, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(2, 6, 4, 130)
    exact, gradients = None, []

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).transpose(1, 2).sin() @ w.exp()  # the product is saved in its memory order, transposed

    for form in ("no hooks", "tensor code", "loops"):
        torch._dynamo.reset()
        if form == "loops":
            monkeypatch.setattr(operators, "use_operators", lambda x: compiled_by() == "inductor")
        w = torch.eye(130).add(0.01).requires_grad_()
        compiled = torch.compile(f, backend="aot_hooks", fullgraph=True)
        with contextlib.nullcontext() if form == "no hooks" else aot_hooks.saved_tensors_hooks(hook):
            out = compiled(x, w)
        out.square().mean().backward()
        if form == "no hooks":
            exact = w.grad
            continue
        (plan,) = aot_hooks.last_plans(compiled)
        assert any(d.hook is hook for d in plan.decisions)
        gradients.append(w.grad)
    by_code, by_loops = ((g - exact).norm() / exact.norm() for g in gradients)
    assert 0 < by_loops < 0.2
    assert by_loops < 1.05 * by_code


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_on_cuda_specials_come_back_and_codes_agree(dtype):
    """Conversions that saturate, which the lowering leaves to the hardware."""
    register_operators()

    x = rows(dtype)
    some = x.isfinite().any(-1)  # a row without finite values may have any scale
    for fn in (
        *(lambda x, p=p: int8_there_and_back(x, p) for p in (False, True)),
        *(lambda x, f=f: there_and_back(x, f) for f in RANGE),
    ):
        torch._dynamo.reset()
        expected = fn(x)
        got = [t.cpu() for t in torch.compile(fn, fullgraph=True)(x.cuda())]
        least = 7 if got[0].dtype is torch.uint8 else 0  # any smaller exponent means the smallest scale
        assert torch.equal(got[0][some].clamp(min=least), expected[0][some].clamp(min=least))
        same = (got[2] == expected[2]) | (got[2].isnan() & expected[2].isnan())
        assert same[~x.isfinite()].all()
        assert same.float().mean() > 0.97
        torch.testing.assert_close(got[2], expected[2], rtol=0.26, atol=1e-38, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("power", [False, True])
def test_on_cuda_every_code_comes_back_where_a_block_holds_one_value_or_lies_across(power):
    register_operators()
    q = torch.arange(256, dtype=torch.uint8).expand(4, 256).contiguous()
    x = torch.randn(4, 256) * 3
    bits = operators.amax_exponent(x) if power else operators.amax_word(x)
    weights = torch.randint(1, 3, (1024, 5000)).float()

    def a_row(q: torch.Tensor, bits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (weights * 0 + operators.from_int8(q, bits, torch.float32, power).view(-1, 1)).amax(-1)

    def across(q: torch.Tensor, bits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return operators.from_int8(q, bits, torch.float32, power).t().contiguous()

    for f in (a_row, across):
        torch._dynamo.reset()
        got = torch.compile(f, fullgraph=True, dynamic=False)(q.cuda(), bits.cuda(), weights.cuda()).cpu()
        torch.testing.assert_close(got, f(q, bits, weights), rtol=0, atol=0, equal_nan=True)
