"""For tests of offload on the CPU: a model, hooks, and a fixture that makes each copy at its wait.

That is the latest that a device could be: a value that was let go too soon shows. `simulate` has graphs captured on the
simulator.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator

import capture_simulator
import late_copies
import pytest
import torch
from torch import nn

import aot_hooks
import cudagraph
from aot_hooks import Rates, cudagraphs
from aot_hooks.offloading import transfers
from cudagraph.compile import pieces
from cudagraph.compile.compilation import Compilation

ALL = aot_hooks.offload(0, max_stall_ms=math.inf)
SLOW = Rates(to_host=1e9, to_device=1e9, memory=1e9, operations=1e10, operations32=1e9)  # spreads small graphs out


@pytest.fixture(autouse=True)
def copies() -> Iterator[None]:
    gc.collect()
    aot_hooks.reset()
    late_copies.at_wait = True
    yield
    late_copies.at_wait, late_copies.log = False, None
    gc.collect()
    assert aot_hooks.offload_stats()["host_leased_bytes"] == 0, "host memory is held by nobody who is known"
    assert not transfers._in_flight


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def stack(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(layers)))


def sent() -> int:
    return aot_hooks.offload_stats()["sent_count"]


def simulate(monkeypatch: pytest.MonkeyPatch, arena_bytes: int = 1 << 20) -> None:
    """Have `options={"cudagraphs": True}` capture on the simulator, with copies at their waits."""
    driver = capture_simulator.Simulator(arena_bytes)
    operators = {
        transfers.offload_start: transfers._offload_start,
        transfers.offload_wait: lambda ticket, x: transfers.claim(ticket),
        transfers.reload_start: transfers.fetch,
        transfers.reload_wait: lambda ticket, host, device: transfers.claim(ticket),
    }

    def on_the_host(placeholders: list[torch.fx.Node], device: torch.device) -> set[int]:
        """Inputs that are on the host, which the simulator's device is, too."""
        return {i for i, n in enumerate(placeholders) if any(u.target is transfers.reload_start for u in n.users)}

    monkeypatch.setattr(capture_simulator, "host_operators", operators)
    monkeypatch.setattr(pieces, "host_inputs", on_the_host)
    monkeypatch.setattr(transfers, "capture_under_way", cudagraph.capturing)
    monkeypatch.setattr(cudagraphs, "compilation", lambda options: Compilation(options, driver))
    monkeypatch.setattr(late_copies, "at_wait", True)
