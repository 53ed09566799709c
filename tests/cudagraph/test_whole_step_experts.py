"""A step of experts by `grouped_mm` in one graph: it holds what the routing uses, and replays other routings right."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from capture_simulator import Simulator
from torch import Tensor, nn
from whole_steps import on_simulator

import cudagraph

TOKENS, WIDTH, HIDDEN, EXPERTS, CHOSEN = 64, 64, 32, 8, 2


class Experts(nn.Module):
    """A router without dropped tokens, and its experts. `bias` moves its choices; `load` is the tokens of each."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter((torch.randn(EXPERTS, WIDTH, HIDDEN) / 8).bfloat16())
        self.down = nn.Parameter((torch.randn(EXPERTS, HIDDEN, WIDTH) / 6).bfloat16())
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        expert = (p + self.bias).topk(CHOSEN).indices
        flat = expert.reshape(-1)
        order = flat.argsort(stable=True)
        self.load.copy_(torch.zeros_like(self.load).scatter_add(0, flat, torch.ones_like(flat)))
        ends = self.load.cumsum(0).to(torch.int32)
        rows = x.bfloat16()[order // CHOSEN]
        y = F.grouped_mm(F.silu(F.grouped_mm(rows, self.up, offs=ends)), self.down, offs=ends)
        y = y * p.gather(-1, expert).reshape(-1)[order][:, None]
        return x + torch.zeros_like(x).index_add(0, order // CHOSEN, y.to(x.dtype))


class Between:
    """Bytes that the recording has allocated between forward and backward. A queue is no state of a step."""

    simulator: Simulator
    nbytes: queue.SimpleQueue[int]

    @staticmethod
    def measure() -> None:
        for pool in Between.simulator.pools:
            pool.poll()
            Between.nbytes.put(sum(pool.blocks.values()))


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that autograd saves, each storage once, beside parameters and inputs."""
    found: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        found[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        loss = model(x).square().mean()
    for tensor in (*model.parameters(), x):
        found.pop(tensor.untyped_storage().data_ptr(), None)
    del loss
    return sum(found.values())


def biased(model: nn.Module, by: Callable[[int], float]) -> None:
    for layer in model:
        layer.bias.copy_(torch.tensor([by(i) for i in range(EXPERTS)]))


@pytest.mark.parametrize("skew", [0.0, 0.2], ids=["uniform", "skewed"])
def test_a_recording_saves_what_its_routing_uses(monkeypatch: pytest.MonkeyPatch, skew: float) -> None:
    Between.simulator, Between.nbytes = on_simulator(monkeypatch), queue.SimpleQueue()
    torch.manual_seed(0)
    ours, x = nn.Sequential(Experts(), Experts()), torch.randn(TOKENS, WIDTH)
    biased(ours, lambda i: skew * (i == 0))
    eager = copy.deepcopy(ours)

    def step() -> Tensor:
        loss = ours(x).square().mean()
        Between.measure()
        loss.backward()
        return loss.detach()

    step = cudagraph.whole_step(step)
    for _ in range(4):
        step()
    assert not step.refused and Between.simulator.pools[-1].launches
    used = saved_bytes(eager, x)
    share = float(ours[0].load[0]) * EXPERTS / float(ours[0].load.sum())
    assert (share >= 3) is (skew > 0), share
    while not Between.nbytes.empty():
        between = Between.nbytes.get()
    assert used > 60_000 and used <= between <= 1.1 * used

    def few(i: int) -> float:  # all tokens at `CHOSEN` experts
        return 9.0 * (i < CHOSEN)

    for by in (few, lambda i: 0.1 * i, lambda i: 0.0):
        for model in (ours, eager):
            biased(model, by)
        eager.zero_grad()
        for p in ours.parameters():
            p.grad.zero_()  # in place: a replay adds to the memory that it was recorded with
        replayed = step()
        loss = eager(x).square().mean()
        loss.backward()
        assert torch.equal(replayed, loss)
        assert torch.equal(ours[1].load, eager[1].load), "decisions"
        for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
