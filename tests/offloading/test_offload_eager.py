"""Offload in eager mode: copies that go on, changes in place, the order they are fetched in, threads."""

from __future__ import annotations

import sys
import threading
import warnings

import late_copies
import pytest
import torch
from offloading import ALL, copies, sent, stack  # noqa: F401
from steps import assert_same, step

import aot_hooks
from aot_hooks.offloading import transfers
from aot_hooks.offloading.hook import tape


@pytest.mark.parametrize("in_flight_bytes", [0, 2000, 1 << 30])
def test_eager_is_exact_whatever_may_be_under_way(in_flight_bytes: int) -> None:
    model, x = stack(), torch.randn(8, 16, requires_grad=True)
    hook = aot_hooks.offload(0, in_flight_bytes=in_flight_bytes)
    expected = step(model, x)
    for _ in range(3):
        assert_same(step(model, x, hook=hook), expected)
    stats = aot_hooks.offload_stats()
    assert stats["sent_count"] > 8
    assert stats["host_blocks"] <= stats["sent_count"] // 3 + 1


def test_eager_fetches_ahead_in_the_order_of_the_backward() -> None:
    x = torch.randn(100, requires_grad=True)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for n in range(6):
            x = torch.sin(x) * (n + 1)
        return x

    late_copies.log = []
    with aot_hooks.saved_tensors_hooks(aot_hooks.offload(0, in_flight_bytes=1 << 20), scope="all"):
        y = chain(x)
    y.sum().backward()
    what = late_copies.log
    assert what.count("start") >= 6
    first_use = what.index("use")
    assert what[:first_use].count("reload") == 1, "nothing is fetched before the backward asks"
    assert what[first_use : first_use + 3] == ["use", "reload", "reload"], "then the next ones are under way at once"


def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that are never reported as done, as on a slow device."""
    monkeypatch.setattr(transfers, "is_finished", lambda ticket: False)


@pytest.mark.parametrize("in_flight_bytes", [1 << 20, 0], ids=["in flight", "released"])
def test_eager_the_error_of_a_change_in_place_has_the_shape(
    monkeypatch: pytest.MonkeyPatch, in_flight_bytes: int
) -> None:
    late(monkeypatch)
    x = torch.randn(8, 4, requires_grad=True)
    with aot_hooks.saved_tensors_hooks(aot_hooks.offload(0, in_flight_bytes=1 << 20), scope="all"):
        h = (x * 1.5).t()
        y = torch.sin(h)
        h.mul_(-3)
    tape().release_copied(in_flight_bytes)
    with pytest.raises(RuntimeError, match=r"copied to the host: \[4, 8\];"):
        y.sum().backward()


@pytest.mark.parametrize("max_host_bytes", [None, 0])
def test_eager_a_change_in_place_while_it_is_copied_is_an_error(
    monkeypatch: pytest.MonkeyPatch, max_host_bytes: int | None
) -> None:
    late(monkeypatch)
    x = torch.randn(100, requires_grad=True)
    hook = aot_hooks.offload(0, max_host_bytes=max_host_bytes)
    with aot_hooks.saved_tensors_hooks(hook, scope="all"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        h = x * 1.5
        y = torch.sin(h)
        h.mul_(-3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    del y, h


def test_eager_pipelines_do_not_grow_the_tape() -> None:
    model = stack(2)
    pending: list[torch.Tensor] = []
    sizes = []
    for _ in range(8):
        with aot_hooks.saved_tensors_hooks(ALL):
            pending.append(model(torch.randn(8, 16)).sum())
        if len(pending) > 1:  # the next forward runs before this backward
            pending.pop(0).backward()
        sizes.append(len(tape().sent))
    assert max(sizes[2:]) == sizes[2]
    pending.clear()
    assert not tape().sent


def test_eager_backwards_in_two_threads_share_a_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    late(monkeypatch)
    model = stack(2)
    errors: list[BaseException] = []

    def backward(loss: torch.Tensor) -> None:
        try:
            loss.backward()
        except BaseException as e:
            errors.append(e)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(10):
            losses = []
            for _ in range(2):
                with aot_hooks.saved_tensors_hooks(aot_hooks.offload(0, in_flight_bytes=4096)):
                    losses.append(model(torch.randn(8, 16)).square().sum())
            threads = [threading.Thread(target=backward, args=(loss,)) for loss in losses]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            losses.clear()
    finally:
        sys.setswitchinterval(before)
    assert not errors
