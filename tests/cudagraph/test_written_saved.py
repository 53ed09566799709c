"""Saved inputs that the forward writes to: gradients are of what the forward read, in replays and warm starts too.

torch's partitioner alone gets these wrong: `test_torch_alone_is_wrong_there` in tests/passes/test_snapshots.py.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable

import pytest
import torch
from capture_simulator import Simulator
from places import Place
from torch import Tensor, nn

import cudagraph


class Written(nn.Module):
    """A saved input that `how` writes to after its last read."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.w = nn.Parameter(torch.randn(8))
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("mean", torch.randn(8))

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        read = {"frozen parameter": self.frozen, "input": given}.get(self.how, self.mean)
        if self.how == "view":
            out = (x[:, :4] - read[4:]) * self.w[:4]
        else:
            out = (x - read) * self.w
        if self.how == "frozen parameter":
            self.frozen.data.mul_(0.9).add_(0.3)
        elif self.how == "input":
            given.mul_(0.5)
        else:
            read.lerp_(x.detach().mean(0), 0.1)
        if self.how == "twice":
            out = out + (x * 2 - read).sin() * self.w
            read.mul_(0.5)
        return out


def compare(place: Place, how: str, step_count: int = 4) -> None:
    """Train with one and with two forwards before the backward; gradients and what was written are as in eager mode."""
    torch.manual_seed(0)
    module = Written(how).to(place.device)
    reference = copy.deepcopy(module)
    compiled = torch.compile(module, backend=place.backend())

    def step(forward: Callable[..., Tensor], owner: nn.Module, xs: list[Tensor], given: Tensor) -> list[Tensor]:
        owner.zero_grad()
        leaves = [x.clone().requires_grad_() for x in xs]
        given = given.clone()
        sum(forward(x, given).square().sum() for x in leaves).backward()
        kept = [given, *owner.state_dict().values(), *(x.grad for x in leaves)]
        return [*(x.clone() for x in kept), owner.w.grad.clone()]

    for i in range(step_count):
        xs = [torch.randn(5, 8, device=place.device) for _ in range(1 + i % 2)]
        given = torch.randn(8, device=place.device)
        torch.testing.assert_close(step(compiled, module, xs, given), step(reference, reference, xs, given))


@pytest.mark.core
@pytest.mark.parametrize("how", ["buffer", "frozen parameter", "input", "view", "twice"])
def test_gradients_are_of_what_the_forward_read(place: Place, how: str) -> None:
    compare(place, how)
    counts = cudagraph.stats()
    if place.inner == "aten" or how != "input":  # Inductor leaves writes to the caller's memory uncaptured
        assert counts["replays"] > 0 and counts["skips"] == 0


@pytest.mark.slow
def test_with_inductor_and_from_its_cache() -> None:
    place = Place(torch.device("cpu"), Simulator(), "inductor")
    # calls of aten: no C++ is built, and the simulator can capture them
    tag = torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex)
    with tag, torch._inductor.config.patch(fallback_by_default=True):
        for hit_count in (0, 1):
            torch._dynamo.reset()
            cudagraph.reset()
            torch._dynamo.utils.counters.clear()
            compare(place, "twice")
            assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] == hit_count
            assert cudagraph.stats()["replays"] > 0 and cudagraph.stats()["skips"] == 0


def test_a_snapshot_is_no_static_input(noted) -> None:  # type: ignore[no-untyped-def]
    """The backward's input has another name than the buffer: a snapshot has new memory in each step."""
    compare(Place(torch.device("cpu"), noted, "aten"), "buffer", 2)
    forward, backward = noted.pieces
    (buffer,) = (forward.placeholders[i].name for i in forward.mutated_inputs)
    names = [info.name for info in backward.placeholders]
    (snapshot,) = (i for i, name in enumerate(names) if name.startswith("clone"))
    assert buffer not in names and snapshot not in backward.static_inputs
