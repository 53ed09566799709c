"""Kinds of routers and of experts: gradients within each hook's bound, decisions exact, exact hooks bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import total_error
from torch import Tensor

import aot_hooks
from aot_hooks import KEEP, budget, float8, int8, lossless, offload

TOKENS, WIDTH, HIDDEN, EXPERTS, CHOSEN = 64, 64, 32, 4, 2
CAPACITY = TOKENS * CHOSEN // EXPERTS  # rows of an expert; some expert has more tokens
ROUNDING = {float8(): 0.06, int8(): 0.02}
EXACT = (lossless(), offload(min_bytes=0, max_stall_ms=1e9))
SHARE = 0.95  # of the peak without hooks, for budgets

Router = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Rows = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

# --- routers: logits and a bias of each expert to scores and numbers of the chosen experts


def softmax(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    score, expert = logits.softmax(-1).topk(CHOSEN)
    return score, expert


def normalized(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    score, expert = softmax(logits, bias)
    return score / score.sum(-1, keepdim=True), expert


def of_the_chosen(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """As in GPT-OSS."""
    score, expert = (logits + bias).topk(CHOSEN)
    return score.softmax(-1), expert


def sigmoid(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """As in DeepSeek-V3: the bias moves choices only."""
    p = logits.sigmoid()
    expert = (p + bias).topk(CHOSEN).indices
    score = p.gather(-1, expert)
    return 2.5 * score / (score.sum(-1, keepdim=True) + 1e-20), expert


# --- experts: tokens, scores and choices to their sum


def dropless(x: Tensor, score: Tensor, expert: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    order = expert.reshape(-1).argsort(stable=True)
    ends = F.one_hot(expert.reshape(-1), EXPERTS).sum(0).cumsum(0).to(torch.int32)
    rows = x[order // CHOSEN].bfloat16()
    gate, up, down = (w.bfloat16() for w in (gate, up, down))
    y = F.silu(F.grouped_mm(rows, gate, offs=ends)) * F.grouped_mm(rows, up, offs=ends)
    y = F.grouped_mm(y, down, offs=ends).to(x.dtype) * score.reshape(-1)[order][:, None]
    return torch.zeros_like(x).index_add(0, order // CHOSEN, y)


def scored_before(x: Tensor, score: Tensor, expert: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """As in torchtitan: rows are gathered by numbers of elements, and scaled before their products."""
    order = expert.reshape(-1).argsort(stable=True)
    ends = F.one_hot(expert.reshape(-1), EXPERTS).sum(0).cumsum(0).to(torch.int32)
    token = (order // CHOSEN)[:, None].expand(-1, WIDTH)
    rows = (x.gather(0, token) * score.reshape(-1)[order][:, None]).bfloat16()
    gate, up, down = (w.bfloat16() for w in (gate, up, down))
    y = F.silu(F.grouped_mm(rows, gate, offs=ends)) * F.grouped_mm(rows, up, offs=ends)
    return torch.zeros_like(x).scatter_add(0, token, F.grouped_mm(y, down, offs=ends).to(x.dtype))


def with_capacity(x: Tensor, score: Tensor, expert: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """An expert takes its first rows, and drops those beyond its capacity."""
    chosen = F.one_hot(expert.reshape(-1), EXPERTS)
    place = (chosen.cumsum(0) * chosen).sum(-1) - 1
    slot = torch.where(place < CAPACITY, expert.reshape(-1) * CAPACITY + place, EXPERTS * CAPACITY)
    rows = x.repeat_interleave(CHOSEN, 0)
    buffer = x.new_zeros(EXPERTS * CAPACITY + 1, WIDTH).index_copy(0, slot, rows)[:-1].view(EXPERTS, CAPACITY, WIDTH)
    y = (F.silu(buffer @ gate) * (buffer @ up)) @ down
    y = torch.cat((y.flatten(0, 1), x.new_zeros(1, WIDTH)))[slot] * score.reshape(-1, 1)
    return y.unflatten(0, (-1, CHOSEN)).sum(1)


def layer(router: Router, rows: Rows) -> Callable[..., tuple[Tensor, Tensor]]:
    """A norm, a router with a balancing and a z-loss, its experts and a shared one; the loss and the choices."""

    def forward(x: Tensor, bias: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        before, choose, gate, up, down, own = weights
        h = F.rms_norm(x + F.gelu(x @ before), (WIDTH,))
        logits = h @ choose
        score, expert = router(logits, bias)
        y = x + rows(h, score, expert, gate, up, down) + F.gelu(h @ own)
        load = F.one_hot(expert.reshape(-1), EXPERTS).sum(0) / expert.numel()
        losses = 0.1 * EXPERTS * (load * logits.softmax(-1).mean(0)).sum() + 0.01 * logits.logsumexp(-1).square().mean()
        return y.square().mean() + losses, expert

    return forward


def arguments() -> tuple[Tensor, Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    up = (EXPERTS, WIDTH, HIDDEN)
    shapes = [(WIDTH, WIDTH), (WIDTH, EXPERTS), up, up, (EXPERTS, HIDDEN, WIDTH), (WIDTH, WIDTH)]
    weights = [torch.randn(s, generator=generator).div(s[-2] ** 0.5).requires_grad_() for s in shapes]
    bias = torch.tensor([0.3, 0.0, 0.0, -0.1])
    return torch.randn(TOKENS, WIDTH, generator=generator), bias, weights


def step(fn: Callable[..., tuple[Tensor, Tensor]], policy: Any) -> tuple[list[Tensor], Tensor]:
    x, bias, weights = arguments()
    torch._dynamo.reset()
    run = torch.compile(fn, backend="aot_hooks", options={"inner": "aten", "policy": policy})
    loss, expert = run(x, bias, *weights)
    return [*torch.autograd.grad(loss, weights), loss.detach()], expert


QUICK = ((normalized, dropless), (sigmoid, with_capacity), (sigmoid, scored_before))
CASES = [
    (router, rows) for router in (softmax, normalized, of_the_chosen, sigmoid) for rows in (dropless, with_capacity)
]
CASES.append((sigmoid, scored_before))


@pytest.mark.parametrize(
    ("router", "rows"), [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_gradients_and_decisions_of_a_router(router: Router, rows: Rows) -> None:
    fn = layer(router, rows)
    exact, chosen = step(fn, KEEP)
    assert int(F.one_hot(chosen.reshape(-1), EXPERTS).sum(0).max()) > CAPACITY, "some tokens are dropped"
    of_stock = aot_hooks.plan(fn, *arguments()[:2], *arguments()[2], policy=budget("1GiB"), inner="aten").peak_bytes
    peak = f"{int(SHARE * of_stock)}B"
    for policy in (*EXACT, budget(peak, max_error=0)):
        found, expert = step(fn, policy)
        assert torch.equal(expert, chosen) and all(map(torch.equal, found, exact)), policy
    for policy, bound in (ROUNDING | {budget(peak, allow=("float8", "recompute")): 0.06}).items():
        found, expert = step(fn, policy)
        assert torch.equal(expert, chosen) and torch.equal(found[-1], exact[-1]), policy
        assert total_error(found[:-1], exact[:-1]) <= bound, policy
    plan = aot_hooks.plan(fn, *arguments()[:2], *arguments()[2], policy=float8(), inner="aten")
    counts = [d for d in plan.decisions if not d.saved.dtype.is_floating_point]
    assert counts and not any(d.hook.lossy for d in counts), "permutations and counts are not rounded"
