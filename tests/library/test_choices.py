"""The block sizes of a kernel that finds a row's scale and reads the row again: our heuristics, without a GPU."""

from __future__ import annotations

import types
from typing import Any

import pytest
import sympy
import torch
import torch._inductor.config as config
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V

import aot_hooks
from aot_hooks.library.loops import operators
from aot_hooks.torch_private.inductor_fusion import FROM_HOOK, choices

LONG = {"XBLOCK": 1, "R0_BLOCK": 4096, "num_warps": 16, "num_stages": 1}
MIDDLE = {"XBLOCK": 1, "R0_BLOCK": 2048, "num_warps": 8, "num_stages": 1}
SHORT = {"XBLOCK": 1, "R0_BLOCK": 1024, "num_warps": 4, "num_stages": 1}


def kernel_of(
    length: Any,
    reductions: int = 2,
    rows: int = 16384,
    hint: str = "INNER",
    op: Any = operators.amax_bits,
    unpacks: bool = False,
) -> Any:
    """The features of a kernel that the heuristics read: `reductions` over rows of `length` by `op`, which is a hook's,
    or the program's own if the kernel also unpacks a value."""
    origins = [types.SimpleNamespace(target=op, meta={} if unpacks else {FROM_HOOK: "x"})]
    if unpacks:
        origins.append(types.SimpleNamespace(target=operators.from_float8, meta={FROM_HOOK: "x"}))
    nodes = [types.SimpleNamespace(node=types.SimpleNamespace(origins=origins))] * reductions
    return types.SimpleNamespace(
        numel=sympy.Integer(rows),
        reduction_numel=sympy.sympify(length),
        get_reduction_hint=lambda *_: ReductionHint[hint],
        reduction_nodes=lambda: nodes,
        strict_reduction_rblock=lambda: None,
    )


def fixed(features: Any, **kernel_kwargs: Any) -> Any:
    groups = [{"x": features.numel, "r0_": features.reduction_numel}]
    with V.set_graph_handler(types.SimpleNamespace(sizevars=SizeVarAllocator())):
        kwargs = choices().triton_kernel_kwargs(None, features, groups, kernel_kwargs)
    return getattr(kwargs.get("fixed_config"), "config", None)


@pytest.mark.core
@pytest.mark.parametrize(
    ("length", "reductions", "expected"),
    [(3072, 2, SHORT), (4096, 3, MIDDLE), (6144, 2, MIDDLE), (8192, 1, LONG), (14336, 3, LONG), (14336, 1, LONG)],
)
def test_a_row_that_is_read_twice_is_read_16_bytes_a_thread(length, reductions, expected):
    assert fixed(kernel_of(length, reductions)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "expected"), [(3072, SHORT), (4096, MIDDLE), (14336, LONG)])
def test_inductor_asks_for_it(length, expected):
    x = torch.randn(8192, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(64, length, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with aot_hooks.saved_tensors_hooks(aot_hooks.float8()):
            return torch.nn.functional.gelu(x @ w) @ w.t()

    torch._dynamo.reset()
    _, codes = run_and_get_code(lambda: torch.compile(f, backend="aot_hooks", fullgraph=True)(x, w).sum().backward())
    assert f"config={expected}" in codes[0]


@pytest.mark.core
@pytest.mark.parametrize(
    "features",
    [
        kernel_of(1024),
        kernel_of(4096, reductions=1),  # both stay in registers
        kernel_of(3072, hint="OUTER"),
        kernel_of(3072, rows=8),
        kernel_of(3072, op=torch.ops.aten.amax.default),
        kernel_of(sympy.Symbol("s0", integer=True, positive=True)),
    ],
    ids=["persistent", "alone", "columns", "few rows", "not ours", "dynamic"],
)
def test_all_else_is_left_to_inductor(features):
    assert fixed(features) is None


@pytest.mark.core
@pytest.mark.parametrize(
    "said",
    [
        {"override_persistent_reduction": True, "mix_order_reduction": True},  # also sums over columns
        {"override_cooperative_reduction": True},
        {"override_cooperative_reduction": False},  # one reduction in another
    ],
    ids=str,
)
def test_a_kernel_that_inductor_has_decided_on_is_left_to_it(said):
    assert fixed(kernel_of(3072), **said) is None
    assert fixed(kernel_of(3072), override_persistent_reduction=False) == SHORT


@pytest.mark.core
@pytest.mark.parametrize("name", ["max_autotune", "max_autotune_pointwise", "coordinate_descent_tuning"])
def test_who_asks_inductor_to_search_gets_a_search(name):
    with config.patch({name: True}):
        assert fixed(kernel_of(3072)) is None
    with config.patch({"triton.multi_kernel": 1}):
        assert fixed(kernel_of(3072)) is None


@pytest.mark.core
def test_rows_stay_in_registers_for_a_scale_of_ours_alone():
    def stays(features: Any) -> bool:
        with V.set_graph_handler(types.SimpleNamespace(sizevars=SizeVarAllocator())):
            return choices().should_use_persistent_reduction(features, False)

    assert stays(kernel_of(2048, reductions=1))
    assert not stays(kernel_of(2048, reductions=1, op=torch.ops.aten.amax.default, unpacks=True))
