"""A few programs of `fuzz_offload.py`, with seeds that once failed, and that it notices what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import fuzz_offload
import pytest
import torch

import aot_hooks
from aot_hooks import transfers


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    aot_hooks.reset()


@pytest.mark.parametrize("seed", [30])  # inputs that stay after all were counted twice
def test_random_programs(seed: int) -> None:
    fuzz_offload.check(seed)


@pytest.mark.parametrize("seed", [1, 8])
def test_random_programs_as_cuda_graphs(seed: int) -> None:
    assert fuzz_offload.check(seed, captured=True) > 0
    assert fuzz_offload.replays.pop() > 0


def test_the_fuzzer_notices_a_copy_that_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_join", lambda copy: None)
    with pytest.raises(AssertionError, match=r"compiled: .*not equal"):
        fuzz_offload.check(8)
