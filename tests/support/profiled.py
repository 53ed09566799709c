"""What the allocator saw of a compiled step on the CPU, by torch's profiler."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from steps import ATEN

__all__ = ["measured", "most_allocated"]


class Sum(torch.autograd.Function):
    """The sum, with a gradient that only autograd holds: `backward(ones)` would hold it to the end of the backward."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        ctx.shape = y.shape
        return y.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.ones(ctx.shape)


def measured(fn: Any, x: torch.Tensor, hook: Any, folder: Path) -> tuple[int, int, int]:
    """Bytes after the forward, the forward's peak and the backward's, over what was there before."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="aot_hooks", options={**ATEN, "policy": hook})

    def step() -> Any:
        y = compiled(x)
        with torch.profiler.record_function("the backward"):
            Sum.apply(y).backward()
        return y

    step()
    fn.zero_grad(set_to_none=True)
    events = _events(step, folder)
    fn.zero_grad(set_to_none=True)
    begins = next(e["ts"] for e in events if e.get("name") == "the backward")
    alive = after = forward = backward = 0
    for when, count in _changes(events):
        alive += count
        if when < begins:
            after, forward = alive, max(forward, alive)
        else:
            backward = max(backward, alive)
    return after, forward, backward


def most_allocated(step: Callable[[], Any], folder: Path) -> int:
    """The most bytes that `step` has allocated at once, over what was there before."""
    alive = most = 0
    for _, count in _changes(_events(step, folder)):
        alive += count
        most = max(most, alive)
    return most


def _events(step: Callable[[], Any], folder: Path) -> list[dict[str, Any]]:
    gc.collect()  # tensors of before that are freed meanwhile would hide what the step allocates
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        held = step()
    del held
    profile.export_chrome_trace(str(folder / "trace.json"))
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def _changes(events: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """When how many bytes were allocated, or freed if negative."""
    return sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
