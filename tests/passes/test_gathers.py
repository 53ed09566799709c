"""Rows gathered from a saved tensor by saved indices don't cross: the backward gathers them again, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import capture
from oracle import total_error
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks import KEEP, bitmask, float8, int8, lossless, offload
from aot_hooks.passes.gathers import GATHERED
from aot_hooks.passes.plan import Plan
from aot_hooks.policies import first_match, only_these_ops
from aot_hooks.torch_private.inductor_fusion import WRITTEN

TOKENS, WIDTH, EXPERTS, CHOSEN = 48, 64, 4, 2
aten = torch.ops.aten

Gather = Callable[[Tensor, Tensor], Tensor]


def routed(gather: Gather) -> Callable[..., Tensor]:
    """A layer whose router reads each token once, and whose gate and up projection read it once for each expert."""

    def layer(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, w: Tensor) -> Tensor:
        h = F.gelu(x)
        score, expert = (h @ router).softmax(-1).topk(CHOSEN)
        token = expert.reshape(-1).argsort(stable=True) // CHOSEN
        rows = gather(h, token)
        out = (F.silu(rows @ gate) * (rows @ up)) @ w
        return torch.zeros_like(h).index_add(0, token, out * score.reshape(-1, 1))

    return layer


GATHERS: dict[str, Gather] = {
    "index": lambda h, token: h[token],
    "index_select": lambda h, token: h.index_select(0, token),
    "gather": lambda h, token: h.gather(0, token[:, None].expand(-1, WIDTH)),
    "of a reshaped view": lambda h, token: h.view(TOKENS, 2, WIDTH // 2)[token].flatten(1),
}


def arguments() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, WIDTH), (WIDTH, EXPERTS), *[(WIDTH, WIDTH)] * 3)
    return [(torch.randn(s, generator=generator) / 4).requires_grad_() for s in shapes]


def step(fn: Callable[..., Tensor], policy: Any) -> tuple[list[Tensor], Plan]:
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="aot_hooks", options={"inner": "aten", "policy": policy})
    args = arguments()
    grads = torch.autograd.grad(compiled(*args).square().sum(), args)
    return list(grads), aot_hooks.last_plans(compiled)[0]


def gathered(plan: Plan) -> list[tuple[int, ...]]:
    return [d.saved.shape for d in plan.decisions if d.hook == GATHERED]


@pytest.mark.parametrize("name", GATHERS)
def test_gathered_rows_do_not_cross(name: str) -> None:
    fn = routed(GATHERS[name])
    exact, stock = step(fn, KEEP)
    found, plan = step(fn, float8())

    rows = CHOSEN * TOKENS * WIDTH * 4
    assert gathered(stock) == []
    assert sum(d.saved.nbytes for d in plan.decisions if d.hook == GATHERED) == rows
    # the report counts them as saved without hooks, and as nothing now; their order may cross to gather their gradients
    assert plan.saved_bytes - stock.saved_bytes in (0, CHOSEN * TOKENS * 8)
    assert sum(d.packed_bytes for d in plan.decisions if d.hook == GATHERED) == 0
    assert total_error(found, exact) <= 0.06
    # the gate's and the up projection's input is one packed value, that of the router
    inputs = [d for d in plan.decisions if d.saved.op == "aten.gelu.default" and d.hook == float8()]
    assert len(inputs) == 1


def test_rows_cross_as_their_order() -> None:
    """No reader of the backward takes the tokens of rows, so only the order of the rows crosses."""

    def layer(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, w: Tensor) -> Tensor:
        h = F.gelu(x)
        score, expert = (h @ router).softmax(-1).topk(CHOSEN)
        order = expert.reshape(-1).argsort()
        rows = h[order // CHOSEN]
        out = (F.silu(rows @ gate) * (rows @ up)) @ w
        return (out[order.argsort()].unflatten(0, (-1, CHOSEN)) * score[..., None]).sum(1)

    exact, _ = step(layer, KEEP)
    found, plan = step(layer, float8())
    assert sum(d.saved.nbytes for d in plan.decisions if d.hook == GATHERED) == CHOSEN * TOKENS * WIDTH * 4
    assert total_error(found, exact) <= 0.06

    _, packed = capture(layer, *arguments(), hook=float8())
    rows = [n for n in packed.bw.graph.nodes if n.target is aten.index.Tensor and n.meta.get(WRITTEN)]
    assert len(rows) == 1  # the gate's and the up projection's gradients read them, in memory once


def test_exact_means_give_the_same_bits_and_no_rows() -> None:
    fn = routed(GATHERS["index"])
    exact, _ = step(fn, KEEP)
    for policy in (offload(min_bytes=0, max_stall_ms=1e9), lossless()):
        found, plan = step(fn, policy)
        assert len(gathered(plan)) == 1
        assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))


def test_rows_with_a_hook_of_their_own_cross() -> None:
    """The policy asked for another rounding of the rows than of what they are gathered from."""
    fn = routed(GATHERS["index"])
    own = first_match(only_these_ops({aten.index.Tensor: int8()}), only_these_ops({aten.gelu.default: float8()}))
    _, plan = step(fn, own)
    hooks = {d.saved.op: d.hook for d in plan.decisions}
    assert gathered(plan) == []
    assert hooks["aten.index.Tensor"] == int8()
    assert hooks["aten.gelu.default"] == float8()


def test_rows_of_an_unpacked_tensor_are_gathered_from_it() -> None:
    fn = routed(GATHERS["index"])
    exact, _ = step(fn, KEEP)
    found, plan = step(fn, only_these_ops({aten.index.Tensor: float8()}))
    assert len(gathered(plan)) == 1
    assert total_error(found, exact) <= 1e-6  # not rounded; a policy that may round also changes the order of sums


def test_functions_of_a_user_are_applied_to_gathered_rows() -> None:
    """As asked: they need not do to rows what they do to the tensor that the rows come from."""

    def pack(x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True) if x.is_floating_point() else x

    centered = aot_hooks.Hook("centered", pack, lambda p: p)
    _, plan = step(routed(GATHERS["index"]), centered)
    assert gathered(plan) == []
    assert any(d.saved.op == "aten.index.Tensor" and d.hook == centered for d in plan.decisions)


def test_rows_chosen_by_a_mask_cross() -> None:
    """How many there are is known from the mask's values only."""

    def layer(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, w: Tensor) -> Tensor:
        h = F.gelu(x)
        rows = h[(h @ router)[:, 0] > 0]
        return (F.silu(rows @ gate) @ w).sum() + (h @ up).sum() + (h @ router).sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        exact, _ = step(layer, KEEP)
        found, _ = step(layer, float8())
    assert total_error(found, exact) <= 0.06


def test_nothing_is_gathered_again_where_no_hook_packs() -> None:
    _, plan = step(routed(GATHERS["index"]), bitmask())
    assert gathered(plan) == []


def test_rows_are_gathered_again_beside_checkpoints_that_draw_numbers() -> None:
    """The nodes that save a random state have several results, none of them a view."""
    experts = routed(GATHERS["index"])

    def layer(x: Tensor, *weights: Tensor) -> Tensor:
        return experts(checkpoint(lambda x: F.dropout(x.sin(), 0.5), x, use_reentrant=False), *weights)

    torch.manual_seed(3)
    exact, _ = step(layer, KEEP)
    torch.manual_seed(3)
    found, plan = step(layer, lossless())
    assert len(gathered(plan)) == 1
    assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))
