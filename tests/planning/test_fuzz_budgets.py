"""Random steps at the peaks of ways that are typed: more run with `python tests/support/fuzz_budgets.py`."""

from __future__ import annotations

from types import ModuleType

import pytest

import aot_hooks
from aot_hooks.graphs import speeds
from aot_hooks.offloading import at_run_time
from aot_hooks.planning import candidates


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the fuzzer, with the rates of an H200 until the test ends."""
    import fuzz_budgets

    for module, name in (
        (speeds, "INSTANT"),
        (at_run_time, "_mark"),
        *((candidates, name) for name in ("_link", "_MIN_BYTES", "ways")),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    fuzz_budgets.as_on_an_h200()
    return fuzz_budgets


@pytest.mark.parametrize(
    ("seed", "way"),
    [
        (15, ""),  # one graph
        (8, "lossless, again"),  # blocks that are compiled one by one
        (5000, "lossless, again"),  # a first block without a gradient of its input, which holds little
        (5033, "lossless, again"),  # a way that is faster by half a percent
        (16, "checkpoint"),  # a block that is called twice
        (5090, "lossless"),  # a sum that torch's partition computes again from its terms
        (5043, "checkpoint"),  # the head takes most while the last block's output waits
        (5011, "checkpoint"),  # a norm with statistics of the batch alone
    ],
)
def test_budgets_are_not_beaten(fuzz: ModuleType, seed: int, way: str) -> None:
    (row,) = fuzz.compared(fuzz.made(seed), seed, [way])
    assert not row.wrong, row


@pytest.mark.slow
def test_the_least_of_graphs_is_whole_blocks_where_these_hold_less(fuzz: ModuleType) -> None:
    """Eight gated blocks that are compiled one by one: without whole blocks the least took 4.35 MiB, now 2.65."""
    program = fuzz.made(21)
    exact = fuzz.run(program, aot_hooks.KEEP)
    found = fuzz.run(program, aot_hooks.budget("2.8MiB", max_error=0))
    assert found.peak_bytes <= 2.8 * 2**20 + 65536  # buffers of threads, which no plan counts
    assert fuzz._equal(found.gradients, exact.gradients)


def test_what_is_wrong_is_found(fuzz: ModuleType) -> None:
    def wrong(max_error: float = 0.0, **named: float) -> str:
        row = fuzz.Row(0, "", "", 100, 1.0, **{"budget_peak_bytes": 100, "budget_ms": 1.0, **named})
        return "; ".join(fuzz._wrong(row, max_error, exact=not named.get("error")))

    assert not wrong() and not wrong(0.05, error=0.04)
    assert wrong(budget_peak_bytes=70_000).startswith("over the peak by") and wrong(budget_ms=1.006).startswith(
        "slower"
    )
    assert wrong(error=1e-6).startswith("other gradients") and wrong(0.05, error=0.06).startswith("an error of")
