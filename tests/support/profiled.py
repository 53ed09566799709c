"""What the allocator saw of a compiled step on the CPU, by torch's profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from steps import ATEN

__all__ = ["measured"]


def measured(fn: Any, x: torch.Tensor, hook: Any, folder: Path) -> tuple[int, int, int]:
    """Bytes after the forward, the forward's peak and the backward's, over what was there before."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="aot_hooks", options={**ATEN, "policy": hook})

    def step() -> Any:
        y = compiled(x)
        with torch.profiler.record_function("the backward"):
            y.backward(torch.ones_like(y))
        return y

    step()
    fn.zero_grad(set_to_none=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        held = step()
    del held
    fn.zero_grad(set_to_none=True)
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    begins = next(e["ts"] for e in events if e.get("name") == "the backward")
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    alive = after = forward = backward = 0
    for when, count in changes:
        alive += count
        if when < begins:
            after, forward = alive, max(forward, alive)
        else:
            backward = max(backward, alive)
    return after, forward, backward
