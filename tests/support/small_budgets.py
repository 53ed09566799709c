"""`aot_hooks.budget` for models of tests, whose steps take less than 1 MiB, the least that a bare number may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from steps import ATEN
from torch import nn

import aot_hooks


def budget(peak: Any = None, **arguments: Any) -> Any:
    """`aot_hooks.budget(peak, **arguments)`; a whole number of bytes may be as small as the test likes."""
    return aot_hooks.budget(f"{peak}B" if type(peak) is int else peak, **arguments)


def trained(
    model: nn.Module, x: torch.Tensor, policy: Any, plans: Path | None = None
) -> tuple[list[torch.Tensor], aot_hooks.Plan, Any]:
    """The loss `model(x)` and its gradients, the plan, and the compiled model. `plans`: a file to load."""
    torch._dynamo.reset()
    if plans is not None:
        assert aot_hooks.load_plans(plans) == 1
    model.zero_grad(set_to_none=True)
    run = torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": policy})
    loss = run(x)
    loss.backward()
    (plan,) = aot_hooks.last_plans(run)
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())], plan, run
