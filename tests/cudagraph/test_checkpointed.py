"""Captured blocks under `torch.utils.checkpoint`: a forward that waits there saves nothing, and its step goes on.

What shows it: outputs whose history no backward has used, and hooks of a checkpoint that something saved still needs.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import fuzz_checkpoint
import pytest
import torch
from fuzz_checkpoint import Block, Machine, Scale
from torch.utils.checkpoint import checkpoint

import cudagraph
from cudagraph.torch_private import cuda as torch_cuda

pytestmark = pytest.mark.core


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    made = Machine(request.param)
    with made.many_graphs():
        yield made


def blocks_of(pattern: str, machine: Machine) -> torch.nn.ModuleList:
    """ "f": a block; "p": one whose first layer is frozen; "z": a frozen one; "s": one that saves nothing it makes."""
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(Scale() if kind == "s" else Block() for kind in pattern).to(machine.device)
    for block, kind in zip(blocks, pattern, strict=True):
        for name, parameter in block.named_parameters():
            parameter.requires_grad_(kind in "fs" or (kind == "p" and name.startswith("down")))
    return blocks


def compiled(blocks: torch.nn.ModuleList, machine: Machine, held: str = "error") -> list[Any]:
    return [torch.compile(block, backend=machine.backends[held], dynamic=False) for block in blocks]


@pytest.mark.parametrize("pattern", ["fpf", "ffpf"])
def test_blocks_of_two_kinds(machine: Machine, pattern: str) -> None:
    for marked, re_entrant, held in itertools.product([False, True], [False, True], ["error", "copy"]):
        cudagraph.reset()
        eager = blocks_of(pattern, machine)
        ours = copy.deepcopy(eager)
        calls = compiled(ours, machine, held)
        for _ in range(4):
            if marked:
                cudagraph.mark_step_begin()
            x = torch.randn(4, fuzz_checkpoint.WIDTH, device=machine.device)
            for blocks in (calls, eager):
                h = x.clone().requires_grad_()
                for block in blocks:
                    h = checkpoint(block, h, use_reentrant=re_entrant)
                h.square().mean().backward()
                del h
            for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad)
                a.grad = b.grad = None
        assert cudagraph.stats()["skips"] == 0 and cudagraph.stats()["replays"] > 0


def test_random_programs(machine: Machine) -> None:
    """Without `Recording.awaits_backward` these differ."""
    assert fuzz_checkpoint.run_seeds([15, 18, 20, 24, 36, 39, 46, 51], machine) == []


@pytest.mark.slow
def test_many_random_programs(machine: Machine) -> None:
    """Seed 147 has two frozen blocks of one code, each under a checkpoint: the second call begins a step, and the
    checkpoint holds the first one's output. It is copied out, unless torch can't move memory on a CPU (before 2.13).
    Then reading it raises. CUDA memory can be moved by each torch."""
    known = [147] if machine.driver is not None and not machine.driver.can_move else []
    assert [seed for seed, _ in fuzz_checkpoint.run_seeds(range(100, 250), machine)] == known


@pytest.mark.parametrize("how", ["plain", "checkpoint", "re-entrant"])
def test_a_loop_that_keeps_its_outputs_records_nothing_more(machine: Machine, how: str) -> None:
    """Their history is used: the step is over, however long they are kept. Nor does their memory grow."""
    cudagraph.reset()
    ours = blocks_of("sfps", machine)
    calls = compiled(ours, machine)
    counts = []
    kept = None
    for _ in range(8):
        h = torch.randn(4, fuzz_checkpoint.WIDTH, device=machine.device, requires_grad=True)
        for call in calls:
            h = call(h) if how == "plain" else checkpoint(call, h, use_reentrant=how == "re-entrant")
        kept = h
        h.square().mean().backward()
        counts.append(cudagraph.stats()["recordings"])
    del kept
    assert counts[3] == counts[-1] and cudagraph.stats()["skips"] == 0, counts


class Shift(Scale):
    """Its forward saves nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down


def test_two_forwards_that_save_nothing(machine: Machine) -> None:
    """The eager loss saves the outputs, which the second forward would overwrite."""
    cudagraph.reset()
    eager = Shift().to(machine.device)
    ours = copy.deepcopy(eager)
    (call,) = compiled(torch.nn.ModuleList([ours]), machine)
    for _ in range(5):
        xs = [torch.randn(4, fuzz_checkpoint.WIDTH, device=machine.device) for _ in range(2)]
        sum(call(x).square().sum() for x in xs).backward()
        sum(eager(x).square().sum() for x in xs).backward()
        torch.testing.assert_close(ours.down.grad, eager.down.grad)
        ours.down.grad = eager.down.grad = None


def test_a_frozen_encoder_whose_outputs_a_checkpoint_holds(machine: Machine) -> None:
    """The outputs have no history, and those of the checkpoint are gone: only its hooks tell."""
    cudagraph.reset()
    encoder, eager = blocks_of("zf", machine)
    ours = copy.deepcopy(eager)
    encode, call = compiled(torch.nn.ModuleList([encoder, ours]), machine)

    def total(encode: Any, decode: Any, xs: list[torch.Tensor]) -> torch.Tensor:
        return sum(checkpoint(lambda h: decode(h * 2), encode(x), use_reentrant=False).sum() for x in xs)

    for _ in range(5):
        xs = [torch.randn(4, fuzz_checkpoint.WIDTH, device=machine.device) for _ in range(2)]
        total(encode, call, xs).backward()
        total(encoder, eager, xs).backward()
        for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
            a.grad = b.grad = None


def test_where_a_history_is_noted() -> None:
    seen: list[bool] = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch_cuda.in_autograd_function())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    y = Function.apply(torch.ones(2, requires_grad=True))
    assert seen == [True] and not torch_cuda.in_autograd_function()
    with torch.no_grad():
        assert not torch_cuda.in_autograd_function()
    with torch.inference_mode():
        assert not torch_cuda.in_autograd_function()
    assert torch_cuda.awaits_backward(weakref.ref(y))
    y.mul_(2).add_(1)
    assert torch_cuda.awaits_backward(weakref.ref(y))
    y.sum().backward()
    assert not torch_cuda.awaits_backward(weakref.ref(y))
    eager = torch.ones(2, requires_grad=True) * 2
    assert not torch_cuda.awaits_backward(weakref.ref(eager))
