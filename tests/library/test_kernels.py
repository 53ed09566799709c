"""The Triton kernels compute the same as the plain code: interpreted on any machine, compiled where there is CUDA."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from roundtrip import data, mask, product, specials_come_back, through_graph
from steps import compiled

import aot_hooks
from aot_hooks.hook import compiling_for
from aot_hooks.library.triton import ops

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"


@pytest.mark.core
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch comes without triton")
@pytest.mark.slow
def test_kernels_equal_plain_code_when_interpreted():
    environment = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join([str(ROOT), str(SUPPORT)]))
    command = [sys.executable, str(SUPPORT / "interpreted.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["integers", "24", "random", "3", "bits", "6", "float8", "38"]


@pytest.mark.core
def test_fake_results_are_like_the_plain_ones():
    """The shapes, dtypes and strides that tracing gives an operator's results are those of the plain code."""
    meta = torch.empty(3, 5, 33, device="meta", dtype=torch.bfloat16)
    x = torch.randn(3, 5, 33).bfloat16()
    for bits, block, power in ((8, 128, False), (8, 16, True), (4, 32, False), (4, 8, False)):
        hook = aot_hooks.int8(block, power_of_two=power) if bits == 8 else aot_hooks.int4(block, stochastic=False)
        q, scale, *_ = hook.pack(x)
        got = ops.pack_int8(meta, block, power, None) if bits == 8 else ops.pack_int4(meta, block, None)
        assert [(t.shape, t.dtype, t.stride()) for t in got] == [(t.shape, t.dtype, t.stride()) for t in (q, scale)]
    assert ops.unpack8(got[0], got[1], 8, torch.float16).dtype is torch.float16
    assert ops.unpack_int4(got[0], got[1], 33, 8, torch.float16).shape == x.shape
    assert [t.shape[-1] for t in ops.pack_float8(meta, 0, torch.float8_e5m2)] == [33, 1]
    bits = ops.pack_bits(torch.empty(3, 5, device="meta", dtype=torch.bool))
    assert bits.shape == (2,) and ops.unpack_bits(bits, [3, 5]).shape == (3, 5)


@pytest.mark.core
def test_kernels_are_for_cuda_that_nothing_fuses():
    assert not ops.has_kernel(torch.empty(2))
    with compiling_for("inductor"):
        assert not ops.has_kernel(torch.empty(2))


# --- on a device -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_kernels_equal_plain_code_on_cuda():
    import interpreted

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    assert interpreted.integers("cuda", dtypes, (4096, 200, 33)) == 54
    assert interpreted.rounding_at_random("cuda", dtypes) and interpreted.bits("cuda")
    assert interpreted.float8s("cuda", dtypes, exact=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "hook",
    [aot_hooks.int8(), aot_hooks.int8(power_of_two=True), aot_hooks.int4(), aot_hooks.int8(stochastic=True)],
    ids=repr,
)
def test_a_graph_holds_one_operator(hook):
    x = data("mixed", torch.bfloat16, 64, 200).cuda()
    with compiling_for("aten"):
        assert ops.has_kernel(x)
    torch.manual_seed(1)
    y = through_graph(x, hook, compiled(product))
    specials_come_back(x, y)
    torch.manual_seed(1)
    eager = hook.unpack(hook.pack(x))
    torch.testing.assert_close(y, eager, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_bits_in_a_graph():
    x = torch.rand(33, 77, device="cuda") < 0.5
    assert torch.equal(through_graph(x, aot_hooks.bitmask(), compiled(mask)), x.float())


@pytest.mark.gpu
@pytest.mark.parametrize("hook", [aot_hooks.int4(), aot_hooks.int8()], ids=repr)
def test_kernels_can_be_captured(hook):
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
