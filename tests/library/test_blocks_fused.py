"""The loop that packs a value in blocks is fused with those that make and read it, though their dimensions differ."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch._inductor.dependencies import MemoryDep
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V

import aot_hooks
from aot_hooks.library.loops import ptx
from aot_hooks.torch_private import inductor_fusion
from aot_hooks.torch_private.inductor_fusion import FROM_HOOK

BLOCKS = (16, 112, 128)


def reads(*sizes: int, strides: tuple[int, ...] | None = None) -> MemoryDep:
    names = sympy.symbols(f"d:{len(sizes)}", integer=True, nonnegative=True)
    if strides is None:
        strides = tuple(int(torch.Size(sizes[i + 1 :]).numel()) for i in range(len(sizes)))
    return MemoryDep("x", sum(n * s for n, s in zip(names, strides, strict=True)), tuple(names), sizes)


def merged(*deps: MemoryDep, packs: bool = True, other: MemoryDep) -> bool:
    """Whether the dependencies of a node that reads `deps` are merged, in a graph with a node that reads `other`."""
    calls: list[dict[str, Any]] = []

    def node(ours: bool, *deps: MemoryDep) -> Any:
        origins = [types.SimpleNamespace(meta={FROM_HOOK: "x"} if ours else {})]
        return types.SimpleNamespace(
            node=types.SimpleNamespace(origins=origins),
            read_writes=types.SimpleNamespace(reads_and_writes=lambda: deps),
            refresh_dependencies=lambda **kwargs: calls.append(kwargs),
        )

    class Node(types.SimpleNamespace):
        __hash__ = object.__hash__

    nodes = [Node(**vars(node(packs, *deps))), Node(**vars(node(False, other)))]
    with V.set_graph_handler(types.SimpleNamespace(sizevars=SizeVarAllocator())):
        inductor_fusion._merge_dependencies_of_blocks(nodes)
    assert calls in ([], [{"normalize": True, "need_clear_tiling_cache": False}])
    return bool(calls)


@pytest.mark.core
def test_loops_as_deep_over_the_same_values_are_merged():
    assert merged(reads(*BLOCKS), other=reads(2, 8, 14336))
    assert merged(reads(9), reads(*BLOCKS), other=reads(4, 4, 14336))


@pytest.mark.core
def test_others_are_left_as_they_are():
    assert not merged(reads(*BLOCKS), other=reads(16, 14336))  # of other depths, Inductor merges them
    assert not merged(reads(*BLOCKS), other=reads(*BLOCKS))
    assert not merged(reads(*BLOCKS), packs=False, other=reads(2, 8, 14336))
    # In another order they differ once merged, and Inductor may still reorder these loops.
    assert not merged(reads(*BLOCKS), other=reads(112, 16, 128, strides=(128, 14336, 1)))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch comes without triton")
@pytest.mark.slow
def test_a_product_and_its_packings_are_one_kernel():
    """Counted in the code that Inductor generates for a GPU, which need not exist."""
    script = Path(__file__).parents[1] / "support" / "triton_code.py"
    done = subprocess.run(
        [sys.executable, script, "8", "64", "1024"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {block: [[3, 3], [1, 1]] for block in ("8", "64", "1024")}


@pytest.mark.gpu
@pytest.mark.parametrize("block", [8, 64, 128, 1024])
def test_on_cuda_a_product_and_its_packings_are_one_kernel(block):
    torch.manual_seed(0)
    wide = torch.nn.ParameterList(torch.randn(256, 2048, device="cuda") / 16 for _ in range(6))
    narrow = torch.nn.ParameterList(torch.randn(2048, 256, device="cuda") / 45 for _ in range(3))
    x = torch.randn(2, 512, 256, device="cuda")

    def f(x: torch.Tensor) -> torch.Tensor:
        for i, w in enumerate(narrow):
            x = x + (torch.nn.functional.silu(x @ wide[2 * i]) * (x @ wide[2 * i + 1])) @ w
        return x

    torch._dynamo.reset()
    compiled = torch.compile(f, backend="aot_hooks", fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True), aot_hooks.saved_tensors_hooks(aot_hooks.int8(block)):
        y, (code, *_) = run_and_get_code(compiled, x)
    # the last layer's packings may be a kernel of their own, because memory is tight there
    assert max(kernel.count(ptx._TO_INT8) for kernel in code.split("async_compile.triton")) == 3
    y.sum().backward()
    got = wide[0].grad
    wide[0].grad = None
    f(x).sum().backward()
    assert 0 < (got - wide[0].grad).norm() / wide[0].grad.norm() < 0.03
