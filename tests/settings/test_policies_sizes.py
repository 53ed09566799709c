"""Policies by size where sizes are symbolic: decided when compiled, without a guard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sentinel import compiled, graph_count
from steps import HALF
from torch import nn

import aot_hooks
from aot_hooks import KEEP, saved_tensors_policy
from aot_hooks.policies import first_match, larger_than, only_these_dtypes


@pytest.mark.core
@pytest.mark.parametrize("how", ["mark_dynamic", "dynamic=True"])
@pytest.mark.parametrize(
    "policy",
    [
        larger_than(1000, HALF),
        first_match(only_these_dtypes({torch.float32: larger_than(1000, HALF)}), KEEP),
        lambda saved: HALF if saved.shape[0] > 10 and saved.nbytes // saved.shape[0] == 64 else KEEP,
    ],
    ids=["larger_than", "nested", "function"],
)
def test_sizes_neither_specialize_nor_recompile(policy: Any, how: str) -> None:
    lin = nn.Linear(16, 16)
    call = compiled(lambda x: lin(lin(x).sigmoid()).sum(), dynamic=True if how == "dynamic=True" else None)
    before = graph_count()
    with saved_tensors_policy(policy):
        for rows in (20, 8, 40, 2, 100):  # 512 bytes and less at 8 and at 2
            x = torch.randn(rows, 16)
            if how == "mark_dynamic":
                torch._dynamo.mark_dynamic(x, 0)  # raises if a guard makes it a constant
            call(x).backward()
    assert graph_count() - before == 1
    (plan,) = aot_hooks.last_plans(call)
    (decision,) = [d for d in plan.decisions if d.hook is not KEEP]
    assert decision.saved.op == "aten.sigmoid.default" and decision.saved.nbytes == 20 * 16 * 4
    assert str(decision.saved.shape[0]).startswith("s")


def test_that_detector_fails_for_a_size_that_is_guarded() -> None:
    lin = nn.Linear(16, 16)
    call = compiled(lambda x: lin(lin(x).sigmoid()).sum() if x.shape[0] > 10 else lin(x).sum(), dynamic=True)
    before = graph_count()
    for rows in (20, 8):
        call(torch.randn(rows, 16)).backward()
    assert graph_count() - before == 2


def test_the_size_at_compile_time_decides() -> None:
    lin = nn.Linear(16, 16)
    packed = []
    for first in (20, 8):
        torch._dynamo.reset()
        call = compiled(lambda x: lin(lin(x).sigmoid()).sum(), dynamic=True)
        with saved_tensors_policy(larger_than(1000, HALF)):
            for rows in (first, 14, 30):
                call(torch.randn(rows, 16)).backward()
        (plan,) = aot_hooks.last_plans(call)
        packed.append(sum(d.hook is not KEEP for d in plan.decisions))
    assert packed == [1, 0]
