"""Two programs of `fuzz_offload.py`, and that it notices what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import fuzz_offload
import pytest
import torch

import aot_hooks
from aot_hooks.offloading import copies


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    aot_hooks.reset()


def test_a_random_program() -> None:
    assert fuzz_offload.check(1) > 0


def test_a_random_step_of_several_graphs() -> None:
    assert fuzz_offload.check(20, across=True) > 0  # it returns what it saves


def test_a_random_program_as_cuda_graphs() -> None:
    assert fuzz_offload.check(8, captured=True) > 0
    assert fuzz_offload.replays.pop() > 0


def test_the_fuzzer_notices_a_copy_that_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "join", lambda copy: None)
    with pytest.raises(AssertionError, match=r"compiled: .*not equal"):
        fuzz_offload.check(8)
