"""Which groups of a norm's input came back as they were."""

from __future__ import annotations

import pytest
import torch

from aot_hooks.graphs.norms import Statistics, is_as_saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_numbers_that_a_hook_has_rounded_are_not_as_saved(dtype: torch.dtype) -> None:
    """Rows of 1.03 that came back as 1.0, as e4m3 has them, and rows whose mean the norm has rounded."""
    saved = torch.tensor([1.03, 1.03, -2.7]).to(dtype)
    came = torch.tensor([1.0, float(saved[1]), -2.7])
    none = torch.zeros(3)
    found = is_as_saved(Statistics(none, came), Statistics(none, saved.float()), torch.finfo(dtype).eps)
    assert found.tolist() == [False, True, True]
