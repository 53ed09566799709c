"""Sharp edges of hooks that are as in torch, see docs/footguns.md: each is shown to be there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from aot_hooks import saved_tensors_hooks

# --- event loops ------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("stock", [True, False])
def test_a_task_that_awaits_inside_a_context_covers_other_tasks(stock: bool) -> None:
    """As in torch: hooks are of a thread, and all tasks of an event loop run on one."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def context() -> Any:
        kind = torch.autograd.graph.saved_tensors_hooks if stock else saved_tensors_hooks
        return kind(double, lambda x: x)

    async def awaits_inside() -> None:
        with context():
            await asyncio.sleep(0)

    async def other() -> torch.Tensor:
        x = torch.ones(2, requires_grad=True)
        y = x.exp()
        y.sin().sum().backward()
        assert x.grad is not None
        return x.grad

    async def awaits_before() -> None:
        await asyncio.sleep(0)
        with context():
            pass

    async def both(first: Any) -> torch.Tensor:
        _, gradient = await asyncio.gather(first(), other())
        return gradient

    expected = torch.ones(2).exp() * torch.ones(2).exp().cos()
    assert not torch.allclose(asyncio.run(both(awaits_inside)), expected)
    assert torch.allclose(asyncio.run(both(awaits_before)), expected)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
