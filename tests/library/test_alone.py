"""Operators of the hooks compute what their tensor code does: compiled by Inductor on a CPU, and on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from roundtrip import data, mask, product, specials_come_back, through_graph
from steps import compiled
from torch.fx.experimental.proxy_tensor import make_fx

import aot_hooks
from aot_hooks.hook import compiling_for
from aot_hooks.library import alone
from aot_hooks.library.bitmask import pack_bits
from aot_hooks.library.integer import pack_int8, unpack_int8

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOOKS = [
    aot_hooks.float8(),
    aot_hooks.float8(torch.float8_e5m2, "blockwise"),
    aot_hooks.int8(),
    aot_hooks.int8(32, power_of_two=True),
    aot_hooks.int8(stochastic=True),
    aot_hooks.int4(),
    aot_hooks.int4(stochastic=False),
]


def both(code: Any, *args: Any) -> None:
    """Asserts that the operator and its code give the same."""
    expected, got = code(*args), alone._operators[code](*args)
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, expected)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.core
@pytest.mark.slow
def test_operators_are_compiled_once_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One compilation for each length of rows and dtype. A single row has one of its own."""
    compile_alone, sizes = alone.compile_alone, []

    def counting(code: Any, examples: Any) -> Any:
        sizes.append([tuple(x.shape) for x in examples])
        return compile_alone(code, examples)

    monkeypatch.setattr(alone, "compile_alone", counting)
    seed = torch.tensor([(1 << 61) + 12345])
    for shape in ((2, 3, 64), (7, 64), (5, 1, 64), (1, 64)):
        both(pack_int8, torch.randn(shape).half(), 32, True, seed)
    assert sizes == [[(6, 64), (1,)], [(1, 64), (1,)]]
    for count in (17, 1000, 40):
        both(pack_bits, torch.rand(count) < 0.5)
    assert sizes[2:] == [[(17,)]]
    for count in (3, 9):
        q, scale = torch.randint(-128, 128, (count, 64), dtype=torch.int8), torch.rand(count, 1).bfloat16()
        both(unpack_int8, q, scale, 64, torch.float32)
    assert sizes[3:] == [[(3, 64), (3, 1)]]


@pytest.mark.core
@pytest.mark.parametrize("hook", [aot_hooks.int8(), aot_hooks.float8(), aot_hooks.int4()], ids=repr)
def test_a_graph_that_nothing_fuses_holds_one_operator(hook, monkeypatch):
    x = torch.randn(4, 64)
    assert not alone.runs_alone(x)
    monkeypatch.setattr(alone, "runs_alone", lambda x, dtype=None, *, beats_inductor=False: True)
    with compiling_for("aten"):
        gm = make_fx(lambda x: hook.unpack(hook.pack(x)), tracing_mode="symbolic")(x)
    ours = [n for n in gm.graph.nodes if "aot_hooks" in str(n.target)]
    others = [n for n in gm.graph.nodes if n.op == "call_function" and n not in ours]
    costless = ("sym_size", "randint", "getitem")
    assert len(ours) == 2 and all(any(w in str(n.target) for w in costless) for n in others), others


@pytest.mark.core
def test_random_numbers_are_uniform_and_differ_by_value_row_and_seed():
    x = torch.zeros(400, 300)
    seeds = [torch.tensor([s]) for s in (1, 1, 2, 1 + (1 << 40))]
    first, same, *others = (aot_hooks.library.integer._noise(x, seed) for seed in seeds)
    assert torch.equal(first, same) and not any(torch.equal(first, other) for other in others)
    assert first.abs().max() < 0.5 and abs(first.mean()) < 1e-3 and abs(first.std() - 12**-0.5) < 1e-3
    for a, b in ((first[1:], first[:-1]), (first[:, 1:], first[:, :-1]), *((first, other) for other in others)):
        assert abs((a * b).mean()) < 2e-3


@pytest.mark.core
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch comes without triton")
@pytest.mark.slow
def test_the_kernels_of_int4_equal_its_tensor_code_when_interpreted():
    environment = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join([str(ROOT), str(SUPPORT)]))
    command = [sys.executable, str(SUPPORT / "interpreted.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "24\n"


# --- on a device -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_kernels_of_int4_equal_its_tensor_code_on_cuda():
    import interpreted

    assert interpreted.to_the_nearest("cuda", DTYPES, (4096, 200, 33)) == 54
    interpreted.at_random("cuda", DTYPES)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hook", HOOKS, ids=repr)
def test_the_error_on_cuda_is_that_of_the_tensor_code(hook, dtype):
    for columns in (4096, 200, 33):
        for kind in ("mixed", "normal"):
            x = data(kind, dtype, 64, columns)
            y, expected = (hook.unpack(hook.pack(t)).cpu() for t in (x.cuda(), x))
            finite = specials_come_back(x, y)
            off, stated = ((t - x)[finite].double().norm() for t in (y, expected))
            assert off <= 1.05 * stated


@pytest.mark.gpu
@pytest.mark.parametrize("hook", HOOKS, ids=repr)
def test_a_graph_gives_what_eager_mode_gives(hook):
    x = data("mixed", torch.bfloat16, 64, 200).cuda()
    torch.manual_seed(1)
    y = through_graph(x, hook, compiled(product))
    specials_come_back(x, y)
    torch.manual_seed(1)
    torch.testing.assert_close(y, hook.unpack(hook.pack(x)), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_bits_in_a_graph():
    x = torch.rand(33, 77, device="cuda") < 0.5
    assert torch.equal(through_graph(x, aot_hooks.bitmask(), compiled(mask)), x.float())


@pytest.mark.gpu
@pytest.mark.parametrize("hook", [aot_hooks.int4(), aot_hooks.int8()], ids=repr)
def test_operators_can_be_captured(hook):
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    hook.unpack(hook.pack(x))  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = hook.unpack(hook.pack(x))
    graph.replay()
    first = y.clone()
    graph.replay()
    assert torch.equal(first, y) != hook.pack.stochastic  # fresh in each replay
    assert ((y - x).abs() <= x.abs().amax() / 6).all()
