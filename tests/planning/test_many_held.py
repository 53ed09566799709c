"""Steps under a budget whose calls hold nothing, in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import many_blocks
import pytest
import torch
from many_blocks import Block, assert_equal, compile_blocks, gradients, model_of, peak_of, train
from torch import nn
from torch.utils.checkpoint import checkpoint

from aot_hooks import budget
from aot_hooks.errors import BudgetError, unwrapped

x, compiled_kinds = many_blocks.x, many_blocks.compiled_kinds  # fixtures


# --- checkpoints ------------------------------------------------------------------------------------------------------


def checkpointed(model: nn.Sequential, x: torch.Tensor, every: Callable[[int], bool], *, reentrant: bool) -> None:
    """A step in which those blocks are checkpointed for whose number `every` is true."""
    y = x
    for i, block in enumerate(model):
        y = checkpoint(block, y, use_reentrant=reentrant) if every(i) else block(y)
    y.sin().sum().backward()


@pytest.mark.core
@pytest.mark.parametrize("first", [0, 1])
def test_blocks_beside_checkpointed_ones_are_planned(x, compiled_kinds, first):
    """Whichever is compiled first, at each of the budget's own compilations."""
    model = model_of(*[Block] * 8)
    expected, peak = gradients(model, x), peak_of(model[:4], x, 0.8)
    compile_blocks(model, budget(peak, max_error=0))
    for _ in range(4):
        found = train(model, x, lambda: checkpointed(model, x, lambda i: i % 2 == first, reentrant=False))
        assert_equal(found, expected)
    assert compiled_kinds == ["alone", "least", "planned"]


def test_a_budget_that_cannot_be_met_raises_beside_checkpointed_blocks(x):
    model = model_of(*[Block] * 8)
    compile_blocks(model, budget(peak_of(model[:4], x, 0.1), max_error=0))
    with pytest.raises(Exception, match="expected a step under") as caught:
        for _ in range(3):
            checkpointed(model, x, lambda i: i % 2 == 0, reentrant=False)
    assert isinstance(unwrapped(caught.value), BudgetError)
