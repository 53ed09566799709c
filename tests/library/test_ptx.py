"""The PTX of int8 and float8, emulated, against the operators' own tensor code, bit for bit."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from emulated_ptx import prmt, run

from aot_hooks.library.loops import operators, ptx


class Emulated:
    """Inductor's `ops` for a loop over `[n]` values in which a thread holds four at a time."""

    def to_dtype(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (x.clamp(-448, 448) if dtype is torch.float8_e4m3fn else x).to(dtype)  # as Triton does

    mul, minimum, maximum = staticmethod(torch.mul), staticmethod(torch.minimum), staticmethod(torch.maximum)

    def constant(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype)

    def inline_asm_elementwise(
        self, *inputs: torch.Tensor, asm: str, constraints: str, dtype: torch.dtype, is_pure: bool, pack: int
    ) -> torch.Tensor:
        registers: list[Any] = []
        for x in inputs:
            step = 4 // x.element_size()  # elements in a register
            registers += [x.reshape(-1, pack)[:, i : i + step].contiguous().numpy() for i in range(0, pack, step)]
        outputs = constraints.count("=")
        assert len(constraints.split(",")) == outputs + len(registers)
        got = run(asm, outputs, *(r.view(np.uint32).reshape(-1) for r in registers))
        return torch.from_numpy(np.stack(got, 1)).view(dtype).reshape(-1)


def values() -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(40, 128)
    x[0] = 0
    x[1, 3], x[1, 4], x[1, 5] = torch.inf, -torch.inf, torch.nan
    x[2] = torch.nan
    x[3] *= 1e-39  # subnormal
    x[4] *= 1e37
    x[5] = torch.finfo(torch.float32).max
    x[6, ::2] = -torch.inf
    x[7] = torch.inf
    x[8, 0] = 126.0  # a step of 1: ties
    x[8, 1:] = torch.arange(127) - 62.5
    x[9] = -0.0
    return x


def scales(x: torch.Tensor, power: bool) -> torch.Tensor:
    return operators.amax_exponent(x) if power else operators.amax_word(x)


@pytest.mark.core
@pytest.mark.parametrize("power", [False, True])
def test_packing_gives_the_codes_of_the_tensor_code(power):
    x = values()
    x[10:13, 0] = torch.tensor([126.0, 252.0, 63.0 * 2.0**-100])  # at these the next power of two begins
    x[13:16, 0] = x[10:13, 0].nextafter(torch.tensor(0.0))
    scale, some = scales(x, power), x.isfinite().any(-1)  # a row without finite values may have any scale
    own = (ptx.amax_exponent if power else ptx.amax_word)(Emulated(), x.reshape(-1)).view_as(x).amax(-1, keepdim=True)
    assert torch.equal(own[some], scale[some].int())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = ptx.to_int8(Emulated(), x.reshape(-1), scale.expand_as(x).reshape(-1), dtype, power)
        expected = operators.to_int8(x, scale, dtype, power)
        assert got.dtype is expected.dtype
        assert torch.equal(got.view_as(x), expected)
        assert {0, 254, 255} < set(expected.unique().tolist())


@pytest.mark.core
@pytest.mark.parametrize("power", [False, True])
def test_every_code_comes_back_as_by_the_tensor_code(power):
    q = torch.arange(256, dtype=torch.uint8).expand(40, 256)
    x = values()
    x[10:12, 0] = torch.tensor([torch.finfo(torch.float16).max, torch.finfo(torch.bfloat16).max])
    scale = scales(x, power)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = ptx.from_int8(Emulated(), q.reshape(-1), scale.expand_as(q).reshape(-1), dtype, power)
        expected = operators.from_int8(q, scale, dtype, power)
        torch.testing.assert_close(got.view(40, 256), expected, rtol=0, atol=0, equal_nan=True)
        assert (expected.isnan().sum(), expected[10].isinf().sum()) == (40, 2 + power * (dtype is torch.float16) * 124)


FORMATS = {torch.float8_e4m3fn: (416.0, 448.0), torch.float8_e5m2: (49152.0, 57344.0)}


@pytest.mark.core
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_float8_is_that_of_the_tensor_code(fmt):
    top, inf = FORMATS[fmt]
    x = values()
    x[10:16, 0] = torch.tensor([-1, 1, 1, 1, 1, 1]) * top * 2.0 ** torch.tensor([0, 112, -5, -150, -134, 10])
    x[12:14] = x[12:14].nextafter(torch.tensor(torch.inf))  # just above a change of the scale
    bits = operators.amax_bits(x)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = ptx.to_float8(Emulated(), x.reshape(-1), bits.expand_as(x).reshape(-1), fmt, top, dtype)
        expected = operators.to_float8(x, bits, fmt, top, dtype)
        torch.testing.assert_close(got.view_as(x).float(), expected.float(), rtol=0, atol=0, equal_nan=True)
    q = torch.arange(256, dtype=torch.uint8).view(fmt).expand(40, 256)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = ptx.from_float8(Emulated(), q.reshape(-1), bits.expand(40, 256).reshape(-1), dtype, top, inf)
        expected = operators.from_float8(q, bits, dtype, top, inf)
        assert got.dtype is dtype
        torch.testing.assert_close(got.view(40, 256), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.core
def test_an_instruction_that_is_not_known_is_an_error():
    with pytest.raises(KeyError):
        run("{ popc.b32 $0, $1; }", 1, np.zeros(1, np.uint32))
    one = np.array([0x80FF7F01], np.uint32)
    assert prmt(one, one, np.array([0xFB40], np.uint32))[0] == 0xFFFF0101


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch comes without triton")
@pytest.mark.parametrize("size", [1, 128])
def test_it_assembles_for_a_block_of_any_size(size, tmp_path):
    """Triton and ptxas accept it, for a GPU that need not exist."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = tmp_path / f"blocks_of_{size}.py"
    source.write_text(f"""
import triton
import triton.language as tl

@triton.jit
def there_and_back(x_ptr, s_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, s = tl.load(x_ptr + at), tl.load(s_ptr + at)
    q = tl.inline_asm_elementwise('{ptx._TO_INT8}', '=r,f,f', [x, s], dtype=tl.int32, is_pure=True, pack=1)
    q = q.to(tl.uint8).to(tl.int32)
    y = tl.inline_asm_elementwise('{ptx._FROM_INT8}', '=f,r,f', [q, s], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(out_ptr + at, y)
""")
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    signature = {"x_ptr": "*fp32", "s_ptr": "*fp32", "out_ptr": "*fp32", "SIZE": "constexpr"}
    made = ASTSource(module.there_and_back, signature, {"SIZE": size})
    assert triton.compile(made, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
