"""Steps of several sizes under a budget, with graphs of their own for each."""

from __future__ import annotations

import many_blocks
import torch
from many_blocks import Block, assert_equal, gradients, model_of, peak_of, train
from steps import ATEN

from aot_hooks import budget
from aot_hooks.planning import many

x, compiled_kinds = many_blocks.x, many_blocks.compiled_kinds  # fixtures


def test_more_sizes_than_steps_are_remembered(x, compiled_kinds):
    """The graphs of each size wait for their second step, after those of all others have been planned."""
    model = model_of(*[Block] * 4)
    sizes = [len(x) - 8 * i for i in range(many._MOST_TRACES + 3)]
    batches = [x[:size].detach().requires_grad_() for size in sizes]
    expected = [gradients(model, batch) for batch in batches]
    peak = peak_of(model, x, 0.6)
    for block in model:
        options = {**ATEN, "policy": budget(peak, max_error=0)}
        block.compile(backend="aot_hooks", dynamic=False, options=options)
    with torch._dynamo.config.patch(recompile_limit=64):
        for _ in range(4):
            for batch, right in zip(batches, expected, strict=True):
                assert_equal(train(model, batch), right)
        count = len(compiled_kinds)
        assert compiled_kinds.count("planned") >= 3
        train(model, batches[0])
    assert len(compiled_kinds) == count
