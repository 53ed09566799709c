"""Offload in recordings of `cudagraph`, on the capture simulator: gradients, and the owners of host blocks."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import capture_simulator
import pytest
import torch
from offloading import ALL, simulate

import aot_hooks
import cudagraph
from aot_hooks.offloading import transfers
from cudagraph.tree import moves

PAGE = 4096


@pytest.fixture(autouse=True)
def simulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.collect()
    aot_hooks.reset()
    simulate(monkeypatch)
    yield
    torch._dynamo.reset()
    aot_hooks.reset()
    gc.collect()
    stats = aot_hooks.offload_stats()
    assert (stats["host_leased_bytes"], stats["host_bytes"]) == (0, 0), "a recording is gone and its blocks are not"


def stack(layers: int = 3) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(layers)))


def compiled(f: Any, **options: Any) -> Any:
    return torch.compile(f, backend="aot_hooks", options={"inner": "aten", "cudagraphs": options or True})


def gradients(fn: Any, model: torch.nn.Module, x: torch.Tensor, hook: Any = None) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    with aot_hooks.saved_tensors_hooks(hook if hook is not None else aot_hooks.KEEP):
        y = fn(leaf)
    (y.square().sum() * 0.01).backward()
    grads = [leaf.grad.clone(), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad(set_to_none=True)
    return grads


def check(fn: Any, model: torch.nn.Module, x: torch.Tensor, hook: Any = ALL) -> None:
    torch.testing.assert_close(gradients(fn, model, x, hook), gradients(model, model, x))


def host_bytes() -> int:
    return aot_hooks.offload_stats()["host_bytes"]


def test_recordings_send_and_fetch_in_each_replay() -> None:
    model = stack()
    fn = compiled(model)
    for _ in range(6):
        check(fn, model, torch.randn(8, 16))
    counts, stats = cudagraph.stats(), aot_hooks.offload_stats()
    assert (counts["warmups"], counts["recordings"], counts["replays"]) == (2, 2, 8)
    assert stats["sent_count"] == stats["fetched_count"] > 4, "the operators run in the warm-up and in the capture"
    assert stats["host_blocks_made"] == stats["sent_count"] // 2, "the capture takes the blocks of the warm-up"


def test_recording_again_takes_no_more_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that moves makes another recording each time, and the former ones stay: they take turns."""
    model = stack()
    fn = compiled(model)
    held = []
    x = torch.randn(8, 16)
    for _ in range(3):
        check(fn, model, x)
    first = host_bytes()
    monkeypatch.setattr(moves, "EARNED", 1)  # one replay is enough for another recording
    for _ in range(10):
        for p in model.parameters():
            held.append(p.data)
            p.data = p.data.clone()
        check(fn, model, x)
        check(fn, model, torch.randn(8, 16))
    assert cudagraph.stats()["rerecordings"] >= 10
    assert host_bytes() == first > 0
    for p, old in zip(model.parameters(), held, strict=False):
        p.data = old
    replays = cudagraph.stats()["replays"]
    check(fn, model, torch.randn(8, 16))  # the first recording is right still
    assert cudagraph.stats()["replays"] == replays + 2


def test_forwards_in_flight_have_blocks_of_their_own() -> None:
    model = stack()
    fn = compiled(model)
    for _ in range(5):
        xs = [torch.randn(8, 16) for _ in range(3)]
        losses = []
        for x in xs:
            with aot_hooks.saved_tensors_hooks(ALL):
                losses.append(fn(x).square().sum() * 0.01)
        got = []
        for loss in (losses.pop(), *losses):
            loss.backward()
            got.append([p.grad.clone() for p in model.parameters()])
            model.zero_grad(set_to_none=True)
        del loss, losses
        for x, grads in zip((xs[2], xs[0], xs[1]), got, strict=True):
            torch.testing.assert_close(grads, gradients(model, model, x)[1:])
    assert cudagraph.stats()["replays"] > 0


def test_recordings_that_are_dropped_give_blocks_back() -> None:
    model = stack()
    fn = compiled(model)
    sizes = []
    for _ in range(4):
        for _ in range(3):
            check(fn, model, torch.randn(8, 16))
        assert cudagraph.stats()["replays"] == 2 and aot_hooks.offload_stats()["host_leased_bytes"] > 0
        cudagraph.reset()
        stats = aot_hooks.offload_stats()
        assert stats["host_leased_bytes"] == 0
        sizes.append(stats["host_bytes"])
    assert sizes == sizes[:1] * 4 and stats["host_blocks_made"] == sizes[0] // PAGE


def test_a_capture_without_free_blocks_comes_after_another_warm_up() -> None:
    model = stack()
    fn = torch.compile(model, backend="aot_hooks", options={"inner": "aten", "cudagraphs": True}, dynamic=True)
    for rows in (8, 8, 8):
        check(fn, model, torch.randn(rows, 16))
    before = cudagraph.stats()
    assert before["recordings"] == 2
    for _ in range(4):  # larger than all blocks of the warm-up
        check(fn, model, torch.randn(300, 16))
    after = cudagraph.stats()
    assert after["warmups"] == before["warmups"] + 2, "one more step as it is"
    assert (after["recordings"], after["replays"] - before["replays"]) == (4, 4)
    assert after["skips"] == 0


def test_a_capture_that_never_finds_blocks_runs_without_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    model = stack()
    fn = compiled(model)
    hook = aot_hooks.offload(0, max_stall_ms=math.inf, max_host_bytes=PAGE)
    with pytest.warns(UserWarning, match="no room"):
        for _ in range(5):
            check(fn, model, torch.randn(80, 16), hook)
    counts = cudagraph.stats()
    assert counts["recordings"] == 0 < counts["skips"]
    assert "raise max_host_bytes" in caplog.text


def test_a_capture_that_fails_half_way_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = stack()
    fn = compiled(model)
    check(fn, model, torch.randn(8, 16))
    starts: list[int] = []
    send = transfers._offload_start

    def fails(x: torch.Tensor, limit: int) -> torch.Tensor:
        starts.append(1)
        if len(starts) == 3:
            raise capture_simulator.CaptureError("not permitted when stream is capturing")
        return send(x, limit)

    monkeypatch.setitem(capture_simulator.host_operators, transfers.offload_start, fails)
    for _ in range(3):
        check(fn, model, torch.randn(8, 16))
    assert len(starts) >= 3 and "not permitted when stream is capturing" in caplog.text
    cudagraph.reset()
    assert aot_hooks.offload_stats()["host_leased_bytes"] == 0
    made = aot_hooks.offload_stats()["host_blocks_made"]
    check(fn, model, torch.randn(8, 16))
    assert aot_hooks.offload_stats()["host_blocks_made"] == made, "the blocks of the failed capture are leased again"
