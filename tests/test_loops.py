"""float8 as the operators that Inductor compiles in one loop each: the same numbers as the tensor code.

The lowering is for Triton; here it goes through Inductor's C++, where only e5m2 holds an infinity.
"""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch

import aot_hooks
from aot_hooks import _compat
from aot_hooks.hook import compiled_by
from aot_hooks.library import loops

RANGE = {torch.float8_e4m3fn: (416.0, 448.0), torch.float8_e5m2: (49152.0, 57344.0)}


def rows(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(12, 300)
    x[0] = 0
    x[1, 3], x[1, 4] = torch.inf, -torch.inf
    x[2] = torch.nan
    x[3] *= 1e-39  # subnormal
    x[4] *= 1e37
    x[5] = torch.finfo(dtype).max
    x[6, ::2] = -torch.inf
    return x.to(dtype)


def there_and_back(x: torch.Tensor, fmt: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    top, inf = RANGE[fmt]
    bits = loops.amax_bits(x)
    q = loops.to_float8(x, bits, fmt, top)
    return bits, q, loops.from_float8(q, bits, x.dtype, top, inf)


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", RANGE, ids=str)
def test_as_tensor_code_they_agree_with_the_hook(dtype, fmt):
    x = rows(dtype)
    hook = aot_hooks.float8(fmt)
    expected = hook.unpack(hook.pack(x)).float()
    _, _, got = there_and_back(x, fmt)
    assert got.dtype is dtype
    finite = x.isfinite()
    assert torch.equal(got[~finite].nan_to_num(7), x[~finite].nan_to_num(7))
    # a scale that is rounded another way moves a value that lies between two codes to the other one
    step = x.float().abs() * 2 * {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}[fmt]
    off = (got.float() - expected).abs()[finite]
    assert (off <= step[finite] + 1e-38).all()
    assert (off == 0).float().mean() > 0.98


@pytest.mark.core
def test_the_lowering_computes_what_the_operators_do():
    x = rows(torch.bfloat16)
    _compat.register_loops()
    compiled = torch.compile(there_and_back, fullgraph=True)
    for name, got, expected in zip(
        ("bits", "q", "x"), compiled(x, torch.float8_e5m2), there_and_back(x, torch.float8_e5m2), strict=True
    ):
        assert got.dtype is expected.dtype, name
        same = (got.float() == expected.float()) | (got.float().isnan() & expected.float().isnan())
        assert same.float().mean() > 0.98, name
        if name == "bits":
            assert same.all()
        if name == "x":
            assert torch.equal(got[~x.isfinite()].nan_to_num(7), x[~x.isfinite()].nan_to_num(7))


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "blockwise"])
def test_through_the_backend_the_gradient_is_that_of_the_tensor_code(scaling, monkeypatch):
    hook = aot_hooks.float8(torch.float8_e5m2, scaling)
    torch.manual_seed(0)
    x = torch.randn(2, 6, 4, 130)
    exact, gradients = None, []

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).transpose(1, 2).sin() @ w.exp()  # the product is saved as it lies in memory, transposed

    for form in ("no hooks", "tensor code", "loops"):
        torch._dynamo.reset()
        if form == "loops":
            module = sys.modules["aot_hooks.library.float8"]
            monkeypatch.setattr(module, "_fuses_on_cuda", lambda x: compiled_by() == "inductor")
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
