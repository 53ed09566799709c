"""What the integrations share, without a framework: batches, and what ran in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import aot_hooks
from aot_hooks.errors import OptionError, UnusedWarning
from aot_hooks.integrations.training import Training


@pytest.fixture
def compiled() -> Any:
    torch._dynamo.reset()
    return torch.compile(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).forward)


def batch(training: Training, compiled: Any, asks_first: bool) -> None:
    """`next_batch` comes before the forward, or after the backward, as in torchtitan's trainer of Flux."""
    if asks_first:
        training.next_batch()
    compiled(torch.randn(8, 64)).sum().backward()
    if not asks_first:
        training.next_batch()
    training.batch_done(or_before=True)


@pytest.mark.parametrize("asks_first", [True, False])
def test_each_batch_has_the_numbers_of_its_own_runs(compiled: Any, asks_first: bool) -> None:
    training = Training(aot_hooks.int8(), options={"inner": "aten"})
    training.start()
    seen = []
    for _ in range(3):
        batch(training, compiled, asks_first)
        seen.append(training.metrics()["aot_hooks/saved_mib"])
    training.stop()
    assert seen[0] > 0 and seen == [seen[0]] * 3


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_batch_that_no_policy_covers_is_a_warning(compiled: Any, asks_first: bool) -> None:
    training = Training(None, options={"inner": "aten"})
    training.start()
    with pytest.warns(UnusedWarning, match="no policy, .* no context covers"):
        batch(training, compiled, asks_first)
    training.stop()


def test_without_the_flag_what_ran_before_does_not_count(compiled: Any) -> None:
    training = Training(aot_hooks.int8(), options={"inner": "aten"})
    training.start()
    compiled(torch.randn(8, 64)).sum().backward()
    training.next_batch()
    with pytest.raises(OptionError, match="no function that"):
        training.batch_done()
