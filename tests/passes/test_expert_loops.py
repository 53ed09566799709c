"""A loop over experts, whose tokens are counted on the device: one compilation for all routings, right numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import total_error
from torch import Tensor
from torch._dynamo.utils import counters

import aot_hooks
from aot_hooks import KEEP, float8, int8, lossless, offload

TOKENS, WIDTH, EXPERTS, CHOSEN = 32, 64, 2, 1
ROUTINGS = (0.0, 0.3, 100.0, -100.0, 0.1)  # added to one expert's logits: with the large ones another gets no token


def layer(x: Tensor, shift: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = F.gelu(x)
    score, expert = (h @ router + shift).softmax(-1).topk(CHOSEN)
    out = torch.zeros_like(h)
    for i in range(EXPERTS):
        token, place = torch.where(expert == i)
        y = F.silu(h[token] @ up[i]) @ down[i]
        out = out.index_add(0, token, y * score[token, place, None])
    return out


def gradients(fn: Any, done: Callable[[], Any] = lambda: None) -> list[list[Tensor]]:
    """Of the weights, for each routing. Calls `done` after each."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, WIDTH), (WIDTH, EXPERTS), *[(EXPERTS, WIDTH, WIDTH)] * 2)
    x, *weights = ((torch.randn(s, generator=generator) / 8**0.5).requires_grad_() for s in shapes)
    shifts = [torch.tensor([by, 0.0]) for by in ROUTINGS]
    found = []
    for shift in shifts:
        found.append(list(torch.autograd.grad(fn(x, shift, *weights).square().sum(), weights)))
        done()
    return found


@pytest.mark.parametrize("policy", [float8(), int8(), offload(min_bytes=0, max_stall_ms=1e9), lossless()], ids=str)
def test_all_routings_run_one_compiled_graph(policy: Any) -> None:
    exact = gradients(layer)
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(
            layer, backend="aot_hooks", options={"inner": "aten", "policy": policy}, fullgraph=True
        )
        found = gradients(compiled)
    assert counters["stats"]["unique_graphs"] == 1
    bound = {float8(): 0.06, int8(): 0.02}.get(policy, 0.0)
    for a, b in zip(found, exact, strict=True):
        assert total_error(a, b) <= max(bound, 1e-5)  # eager sums may come in another order
    if policy in (float8(), int8()):
        (plan,) = aot_hooks.last_plans(compiled)
        rows = [d for d in plan.decisions if len(d.saved.shape) == 2 and "u" in str(d.saved.shape[0])]
        packed = [d for d in rows if d.hook is not KEEP and WIDTH in d.saved.shape]
        assert len(packed) >= 2 * EXPERTS


@pytest.mark.parametrize("across_graphs", [True, False])
def test_each_call_decides_whether_to_send_the_rows_of_an_expert(across_graphs: bool) -> None:
    """More than half of all rows have `min_bytes`: one expert has as many, or none."""
    exact, nbytes, sent = gradients(layer), TOKENS * WIDTH * 4, [0]
    hook = offload(nbytes // 2 + 1, max_stall_ms=math.inf, across_graphs=across_graphs)
    torch._dynamo.reset()
    aot_hooks.reset()
    counters.clear()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(layer, backend="aot_hooks", options={"inner": "aten", "policy": hook}, fullgraph=True)
        found = gradients(compiled, lambda: sent.append(aot_hooks.offload_stats()["sent_bytes"]))
    assert counters["stats"]["unique_graphs"] == 1
    for a, b in zip(found, exact, strict=True):
        assert total_error(a, b) <= 1e-5
    (plan,) = aot_hooks.last_plans(compiled)
    (reason,) = {d.reason for d in plan.decisions if "u" in str(d.saved.shape[0]) and WIDTH in d.saved.shape}
    each = [b - a for a, b in itertools.pairwise(sent)]
    if across_graphs:  # the input of the router, and three tensors of an expert with more than half of the tokens
        assert each[2:4] == [4 * nbytes] * 2 and {nbytes < n < 4 * nbytes for n in (*each[:2], each[4])} == {True}
        assert "each call decides" in reason
    else:
        assert set(each) == {nbytes} and "its size is known when it runs" in reason
