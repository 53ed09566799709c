"""Blocks of host memory and copies on the CPU: reused, bounded, returned, and freed whatever goes wrong."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator

import late_copies
import pytest
import torch

import aot_hooks
from aot_hooks.offloading import transfers
from aot_hooks.offloading.pinned_pool import HostPool
from cudagraph.tree.capture import Capture, Owner

pytestmark = pytest.mark.core
PAGE = 4096


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    gc.collect()
    aot_hooks.reset()
    yield
    late_copies.at_wait, late_copies.log = False, None
    gc.collect()
    aot_hooks.reset()
    assert not transfers._in_flight, "a copy was neither waited for nor released"


def lease(pool: HostPool, nbytes: int, limit: int | None = None) -> torch.Tensor:
    found = pool.lease(nbytes, pinned=False, limit=limit)
    assert found is not None
    return found


def test_a_block_comes_back_with_the_last_view_of_it_and_is_leased_again() -> None:
    pool = HostPool()
    first = lease(pool, 5000)
    address = first.data_ptr()
    view = first.view(torch.int8)[10:].detach()
    del first
    assert (pool.leased_bytes, pool.total_bytes, pool.block_count) == (2 * PAGE, 2 * PAGE, 1)
    del view
    assert (pool.leased_bytes, pool.total_bytes) == (0, 2 * PAGE)
    assert lease(pool, 2 * PAGE).data_ptr() == address
    assert (pool.made_count, pool.peak_bytes) == (1, 2 * PAGE)


def test_blocks_are_disjoint_and_keep_what_is_written() -> None:
    pool = HostPool()
    leases = [lease(pool, n) for n in (1, PAGE, 3 * PAGE, 100_000)]
    for i, block in enumerate(leases):
        block.fill_(i + 1)
    assert all(bool((block == i + 1).all()) for i, block in enumerate(leases))


def test_a_much_larger_block_is_not_taken_while_another_can_be_made() -> None:
    pool = HostPool()
    del_later = lease(pool, 100 * PAGE)
    del del_later
    lease(pool, 10 * PAGE)
    assert pool.made_count == 2
    pool = HostPool()
    del_later = lease(pool, 100 * PAGE)
    del del_later
    kept = lease(pool, 10 * PAGE, limit=105 * PAGE)  # frees the larger one to make room
    assert (pool.total_bytes, pool.block_count) == (10 * PAGE, 1)
    del kept


def test_a_limit_counts_what_is_leased_and_refuses() -> None:
    pool = HostPool()
    held = lease(pool, 3 * PAGE, limit=4 * PAGE)
    assert pool.lease(2 * PAGE, pinned=False, limit=4 * PAGE) is None
    assert lease(pool, PAGE, limit=4 * PAGE).numel() == PAGE
    del held
    assert pool.lease(2 * PAGE, pinned=False, limit=4 * PAGE) is not None
    assert pool.lease(5 * PAGE, pinned=False, limit=4 * PAGE) is None
    assert pool.lease(1, pinned=False, limit=0) is None


@pytest.mark.parametrize(("limit", "few"), [(None, 0.1), (12 << 20, 10)])
def test_varying_sizes_do_not_pile_up_and_are_seldom_made_anew(limit: int | None, few: float) -> None:
    """Steps of random length, 20 tensors each, all held at once."""
    pool, rng, most = HostPool(), random.Random(0), 0
    for step in range(200):
        if step == 100:
            made = pool.made_count
        length = rng.randint(64, 1024)
        sizes = [length * (256 if i % 3 else 1024) for i in range(20)]
        held = [lease(pool, n, limit) for n in sizes]
        most = max(most, sum(-(-n // PAGE) * PAGE for n in sizes))
        assert pool.total_bytes <= (1.6 * most if limit is None else limit)
        held.clear()
    assert pool.made_count - made <= few * 100


def test_reset_gives_back_what_is_free_now_and_what_is_leased_later() -> None:
    pool = HostPool()
    held, other = lease(pool, PAGE), lease(pool, PAGE)
    del other
    held.fill_(7)
    pool.reset()
    assert (pool.total_bytes, pool.leased_bytes) == (PAGE, PAGE)
    assert bool((held == 7).all())
    del held
    assert (pool.total_bytes, pool.block_count) == (0, 0)


def test_what_a_capture_leased_is_not_leased_again_until_reset() -> None:
    pool = HostPool()
    assert pool.lease(PAGE, pinned=False, captured=True) is None, "nothing is made during a capture"
    warm = lease(pool, PAGE)
    del warm
    captured = pool.lease(PAGE, pinned=False, captured=True)
    assert captured is not None
    address = captured.data_ptr()
    del captured
    assert lease(pool, PAGE).data_ptr() != address
    pool.reset()
    assert pool.total_bytes == 0


def test_blocks_of_a_tree_are_its_own_until_its_recordings_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, owner, other = HostPool(), Owner(), Owner()
    waited: list[int] = []
    monkeypatch.setattr(pool, "_await_replays", lambda block: waited.append(block.address) if block.replayed else None)

    def captured(owner: Owner, held: tuple[int, ...] = ()) -> int | None:
        block = pool.lease(PAGE, pinned=False, captured=True, capture=Capture(owner, held))
        return None if block is None else block.data_ptr()

    del_later = lease(pool, PAGE), lease(pool, PAGE)
    del del_later
    first = captured(owner)
    assert first is not None and captured(owner) == first, "recordings take turns"
    second = captured(owner, (first,))
    assert second not in (None, first), "but not with what the path holds"
    assert captured(other) is None and captured(owner, (first, second)) is None
    assert (pool.made_count, pool.leased_bytes, pool.total_bytes) == (2, 0, 2 * PAGE)
    del owner
    assert captured(other) is None, "a replay may run still, and a capture can't wait for it"
    assert not waited
    assert lease(pool, PAGE).data_ptr() == waited[0]
    assert pool.made_count == 2


def test_leases_from_many_threads() -> None:
    pool = HostPool()
    wrong: list[int] = []

    def work(seed: int) -> None:
        for i in range(200):
            block = lease(pool, 1 + (seed * 131 + i * 17) % 20_000)
            block.fill_(seed)
            if not bool((block == seed).all()):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and pool.leased_bytes == 0


@pytest.mark.parametrize("at_wait", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_a_roundtrip_is_exact(dtype: torch.dtype, at_wait: bool) -> None:
    late_copies.at_wait = at_wait
    x = (torch.randn(3, 5, 7) * 3).to(dtype)
    ticket = transfers.offload_start(x, transfers.NO_LIMIT)
    host = transfers.offload_wait(ticket, x)
    back = transfers.reload_wait(transfers.reload_start(host, x.device), host, x.device)
    assert back.data_ptr() not in (x.data_ptr(), host.data_ptr())
    assert (back.dtype, back.shape) == (x.dtype, x.shape)
    assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))


def test_empty_and_0d_tensors() -> None:
    for x in (torch.empty(0, 3), torch.tensor(2.5)):
        host = transfers.claim(transfers.send(x, None))
        assert torch.equal(transfers.claim(transfers.fetch(host, x.device)), x)


def test_a_copy_at_the_wait_shows_a_value_that_was_let_go_too_soon() -> None:
    late_copies.at_wait = True  # the test of the tests that run in this mode
    x = torch.ones(4)
    ticket = transfers.send(x, None)
    x.zero_()
    assert not bool(transfers.claim(ticket).any())


def test_each_wait_takes_its_own_copy_in_any_order() -> None:
    values = [torch.randn(10) for _ in range(5)]
    tickets = [transfers.send(v, None) for v in values]
    hosts = {i: transfers.claim(tickets[i]) for i in (3, 0, 4, 1, 2)}
    assert all(torch.equal(hosts[i], v) for i, v in enumerate(values))
    with pytest.raises(RuntimeError, match="waited for before"):
        transfers.claim(tickets[0])


def test_what_is_never_waited_for_is_let_go_with_its_ticket() -> None:
    x = torch.randn(1000)
    ticket = transfers.send(x, None)
    assert aot_hooks.offload_stats()["host_leased_bytes"] > 0
    del ticket
    assert aot_hooks.offload_stats()["host_leased_bytes"] == 0


def test_without_room_a_tensor_stays_where_it_is_and_is_counted() -> None:
    x = torch.randn(5000)
    with pytest.warns(UserWarning, match="no room for 20000 more bytes .max_host_bytes=8192"):
        host = transfers.claim(transfers.send(x, 8192))
    assert (host.shape, host.dtype, host.device.type) == (x.shape, x.dtype, "cpu")
    for _ in range(2):  # each reader gets a copy of its own
        back = transfers.claim(transfers.fetch(host, x.device))
        assert torch.equal(back, x)
        back.zero_()
    stats = aot_hooks.offload_stats()
    assert (stats["kept_on_device_count"], stats["kept_on_device_bytes"], stats["host_bytes"]) == (1, 20000, 0)
    assert len(transfers._kept) == 1
    del host
    assert not transfers._kept


def test_stats_count_and_reset_starts_anew() -> None:
    x = torch.randn(1024)
    for _ in range(3):
        host = transfers.claim(transfers.send(x, None))
        transfers.claim(transfers.fetch(host, x.device))
        del host
    stats = aot_hooks.offload_stats()
    assert (stats["sent_count"], stats["sent_bytes"]) == (3, 3 * 4096)
    assert (stats["fetched_count"], stats["fetched_bytes"]) == (3, 3 * 4096)
    assert (stats["host_blocks_made"], stats["host_bytes"], stats["host_leased_bytes"]) == (1, 4096, 0)
    aot_hooks.reset()
    assert set(aot_hooks.offload_stats().values()) == {0}
