"""Offload on CUDA: exact, asynchronous, really free, also captured in CUDA graphs and with a stressed allocator."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import aot_hooks
import cudagraph
from aot_hooks.offloading import transfers
from cudagraph.tree import moves

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty_pool() -> Iterator[None]:
    gc.collect()
    aot_hooks.reset()
    yield
    gc.collect()
    aot_hooks.reset()


def roundtrip(x: torch.Tensor) -> torch.Tensor:
    host = transfers.claim(transfers.send(x, None))
    assert host.device.type == "cpu" and host.is_pinned()
    return transfers.claim(transfers.fetch(host, x.device))


def mlp(layers: int = 6, width: int = 512) -> torch.nn.Sequential:
    parts: list[torch.nn.Module] = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)]
    return torch.nn.Sequential(*parts).cuda()


def gradients(fn: Any, model: torch.nn.Module, x: torch.Tensor, hook: Any) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    if hook is None:
        y = fn(x)
    else:
        with aot_hooks.saved_tensors_hooks(hook):
            y = fn(x)
    y.square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_packed_rows_that_are_no_whole_blocks_are_sent_as_they_are() -> None:
    """The scores of attention over 1025 tokens. In a whole ViT their scales came back wrong, or NaN, when they were
    padded; this model was right even so."""
    torch.manual_seed(0)
    tokens, heads, width = 1025, 4, 256
    layers = [torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)]
    model = torch.nn.ModuleList(layers).cuda().to(torch.bfloat16)

    def attend(x: torch.Tensor) -> torch.Tensor:
        qkv = model[0](x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        scores = torch.softmax((qkv[0] @ qkv[1].mT).float(), -1).to(x.dtype)
        return x + model[1]((scores @ qkv[2]).transpose(1, 2).flatten(2))

    x = torch.randn(4, tokens, width, device="cuda", dtype=torch.bfloat16)
    int8 = aot_hooks.int8(128, power_of_two=True)
    found = []
    for hook in (None, int8, aot_hooks.offload(then=int8, max_stall_ms=math.inf)):
        torch._dynamo.reset()
        fn = torch.compile(lambda x: attend(attend(x)), backend="aot_hooks")
        found.append(torch.cat([g.flatten() for g in gradients(fn, model, x, hook)]).double())
    exact, packed, sent = found
    assert aot_hooks.offload_stats()["sent_bytes"] > 0
    assert packed.isfinite().all() and sent.isfinite().all()
    assert (packed - exact).norm() > 0
    assert (sent - exact).norm() <= 1.05 * (packed - exact).norm()


def test_roundtrip_is_exact_and_pinned() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.bool):
        x = torch.randn(1000, 37, device="cuda").to(dtype)
        assert torch.equal(roundtrip(x), x)


def test_a_copy_does_not_block_the_host_nor_the_compute_stream() -> None:
    x = torch.randn(64 * MIB, device="cuda")  # 256 MiB: about 5 ms
    roundtrip(x)  # pins
    torch.cuda.synchronize()
    ticket = transfers.send(x, None)
    assert not transfers.is_finished(ticket)
    torch.cuda.current_stream().synchronize()  # the compute stream is done, the copy goes on
    assert not transfers.is_finished(ticket)
    host = transfers.claim(ticket)
    torch.cuda.synchronize()
    assert torch.equal(host, x.cpu())


def test_a_copy_starts_after_what_the_current_stream_has_queued() -> None:
    x = torch.zeros(16 * MIB, device="cuda")
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            x.fill_(3.0)
            y = roundtrip(x)
            assert bool((y == 3.0).all())
            x.zero_()
        stream.synchronize()


def test_memory_on_the_device_is_free_after_the_wait() -> None:
    x = torch.randn(16 * MIB, device="cuda")
    before = torch.cuda.memory_allocated()
    ticket = transfers.send(x, None)
    host = transfers.claim(ticket)
    del x
    assert torch.cuda.memory_allocated() == before - 64 * MIB
    y = torch.full((16 * MIB,), 7.0, device="cuda")  # reuses the memory at once: the stream has waited
    torch.cuda.synchronize()
    assert not bool((host == 7.0).any())
    del y


def test_an_unclaimed_fetch_does_not_write_into_memory_of_others() -> None:
    x = torch.randn(64 * MIB, device="cuda")
    host = transfers.claim(transfers.send(x, None))
    torch.cuda.synchronize()
    for _ in range(5):
        ticket = transfers.fetch(host, x.device)
        del ticket  # an exception between start and wait
        other = torch.full((64 * MIB,), 5.0, device="cuda")
        torch.cuda.synchronize()
        assert bool((other == 5.0).all())
        del other


def test_pinning_that_fails_leaves_no_error_behind() -> None:
    from aot_hooks.offloading.pinned_pool import _pin

    ticket = transfers.send(torch.randn(MIB, device="cuda"), None)
    (copy,) = transfers._in_flight.values()
    block = transfers.pool.block_of(copy.target)
    assert block is not None
    assert not _pin(block.address, block.capacity)  # pinned already
    (torch.ones(4, device="cuda") * 2).sum().item()
    transfers.claim(ticket)


def test_no_room_on_the_host_keeps_it_on_the_device() -> None:
    x = torch.randn(MIB, device="cuda")
    with pytest.warns(UserWarning, match="the host has no room"):
        ticket = transfers.send(x, 1000)
    host = transfers.claim(ticket)
    for _ in range(2):
        assert torch.equal(transfers.claim(transfers.fetch(host, x.device)), x)
    assert aot_hooks.offload_stats()["kept_on_device_bytes"] == x.nbytes


@pytest.mark.parametrize("cudagraphs", [False, True])
@pytest.mark.parametrize("inner", ["aten", "inductor"])
def test_gradients_are_bitwise_the_same_over_steps_with_a_stressed_allocator(inner: str, cudagraphs: bool) -> None:
    torch.manual_seed(0)
    model = mlp()
    hook = aot_hooks.offload(min_bytes=1, max_stall_ms=math.inf)
    same = aot_hooks.Hook("same", lambda x: (x,), lambda p: p[0])  # packs nothing, and has the same kernels
    plain = torch.compile(lambda x: model(x), backend="aot_hooks", options={"inner": inner})
    ours = torch.compile(lambda x: model(x), backend="aot_hooks", options={"inner": inner, "cudagraphs": cudagraphs})
    junk: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(1)
    for step in range(200):
        x = torch.randn(256, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        expected = gradients(plain, model, x, same)
        junk = [t for t in junk if torch.rand((), generator=generator) < 0.5]
        sizes = torch.randint(1, MIB, (4,), generator=generator).tolist()
        junk += [torch.full((n,), float("nan"), device="cuda") for n in sizes]
        if step % 20 == 0:
            torch.cuda.empty_cache()
        for got, want in zip(gradients(ours, model, x, hook), expected, strict=True):
            assert torch.equal(got, want), f"step {step}"
    stats = aot_hooks.offload_stats()
    assert stats["sent_count"] == stats["fetched_count"]
    if cudagraphs:  # replays run no operator
        assert cudagraph.stats()["replays"] > 300
        assert 0 < stats["sent_count"] < 200
    else:
        assert stats["sent_bytes"] > 200 * MIB
        assert stats["host_blocks_made"] <= 2 * stats["sent_count"] // 200


def test_eager_parts_overlap_and_are_exact() -> None:
    torch.manual_seed(0)
    model = mlp()
    x = torch.randn(256, 512, device="cuda")
    expected = gradients(model, model, x, None)
    for in_flight in (0, 1 << 20, 1 << 30):
        hook = aot_hooks.offload(min_bytes=1, in_flight_bytes=in_flight)
        for _ in range(3):
            for got, want in zip(gradients(model, model, x, hook), expected, strict=True):
                assert torch.equal(got, want)
    assert aot_hooks.offload_stats()["sent_count"] > 0


def test_a_whole_step_is_captured_in_a_cuda_graph_and_replayed() -> None:
    torch.manual_seed(0)
    model = mlp(3)
    x = torch.randn(256, 512, device="cuda")
    hook = aot_hooks.offload(min_bytes=1, max_stall_ms=math.inf)
    step = torch.compile(lambda x: model(x), backend="aot_hooks", options={"inner": "aten"})

    def run() -> torch.Tensor:
        with aot_hooks.saved_tensors_hooks(hook):
            y = step(x)
        loss = y.square().mean()
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            run()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    held = aot_hooks.offload_stats()["host_bytes"]
    for seed in range(5):
        value = torch.randn(256, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        x.copy_(value)
        for p in model.parameters():
            p.grad.zero_()
        # other users of the pool meanwhile
        noise = torch.randn(256, 1024, device="cuda")
        assert torch.equal(roundtrip(noise), noise)
        graph.replay()
        torch.cuda.synchronize()
        got = [p.grad.clone() for p in model.parameters()]
        grads = [p.grad for p in model.parameters()]
        expected = gradients(model, model, x, None)
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = g
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)
    assert aot_hooks.offload_stats()["host_bytes"] >= held


def captured(model: torch.nn.Module, **kwargs: Any) -> Any:
    return torch.compile(
        lambda x: model(x), backend="aot_hooks", options={"inner": "aten", "cudagraphs": True}, **kwargs
    )


def test_recordings_share_blocks_and_give_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "EARNED", 1)  # one replay is enough for another recording
    torch.manual_seed(0)
    model = mlp(3)
    hook = aot_hooks.offload(min_bytes=1, max_stall_ms=math.inf)
    step = captured(model)
    sizes, held = [], []
    for i in range(12):
        x = torch.randn(256, 512, device="cuda")
        expected = gradients(model, model, x, None)
        for _ in range(2):
            for a, b in zip(gradients(step, model, x, hook), expected, strict=True):
                torch.testing.assert_close(a, b)
        sizes.append(aot_hooks.offload_stats()["host_bytes"])
        if i > 2:  # parameters move: another recording each time, and the former stay
            held.append([p.data for p in model.parameters()])
            for p in model.parameters():
                p.data = p.data.clone()
    assert cudagraph.stats()["rerecordings"] >= 8
    assert len(set(sizes[2:])) == 1, sizes
    cudagraph.reset()
    assert aot_hooks.offload_stats()["host_leased_bytes"] == 0
    made = aot_hooks.offload_stats()["host_blocks_made"]
    x = torch.randn(256, 512, device="cuda")
    for a, b in zip(gradients(step, model, x, hook), gradients(model, model, x, None), strict=True):
        torch.testing.assert_close(a, b)
    assert aot_hooks.offload_stats()["host_blocks_made"] == made


def test_a_size_without_blocks_warms_up_once_more_and_is_captured() -> None:
    torch.manual_seed(0)
    model = mlp(3)
    hook = aot_hooks.offload(min_bytes=1, max_stall_ms=math.inf)
    step = captured(model, dynamic=True)
    for rows in (64, 64, 64, 512, 512, 512, 512, 64):
        x = torch.randn(rows, 512, device="cuda")
        for a, b in zip(gradients(step, model, x, hook), gradients(model, model, x, None), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    counts = cudagraph.stats()
    assert (counts["warmups"], counts["recordings"], counts["skips"]) == (4, 4, 0)


def test_a_capture_that_finds_no_block_ends_and_leaves_the_device_usable() -> None:
    x = torch.randn(MIB, device="cuda")
    roundtrip(x)  # one block is free
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="no pinned block of"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        first = transfers.send(x, None)  # in flight, and never waited for
        transfers.send(x, None)
    del first
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    graph.replay()
    assert torch.equal(y, x * 2) and torch.equal(roundtrip(x), x)


def test_backward_in_another_thread_on_another_stream() -> None:
    torch.manual_seed(0)
    model = mlp(3)
    x = torch.randn(256, 512, device="cuda")
    expected = gradients(model, model, x, None)
    step = torch.compile(lambda x: model(x), backend="aot_hooks", options={"inner": "aten"})
    model.zero_grad(set_to_none=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), aot_hooks.saved_tensors_hooks(aot_hooks.offload(1, max_stall_ms=math.inf)):
        loss = step(x).square().mean()
    thread = threading.Thread(target=lambda: loss.backward())
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    for p, want in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, want)


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


@pytest.mark.parametrize("inner", ["aten", "inductor"])
def test_blocks_of_one_graph_send_as_a_step(inner: str) -> None:
    """Exact over many steps; the device frees what is sent, and nothing grows."""

    def blocks(hook: aot_hooks.Hook | None) -> torch.nn.Sequential:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Block(2048) for _ in range(12))).cuda().bfloat16()
        for block in model:
            block.compile(backend="aot_hooks", options={"inner": inner, "policy": hook})
        return model

    def step(model: torch.nn.Sequential, x: torch.Tensor) -> tuple[list[torch.Tensor], int]:
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x).float().square().mean().backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        return [p.grad.clone() for p in model.parameters()], peak

    same = aot_hooks.Hook("same", lambda x: (x,), lambda p: p[0])  # packs nothing, and has the same kernels
    plain, hooked = blocks(same), blocks(aot_hooks.offload(across_graphs=True))
    allocated = []
    for _ in range(36):
        x = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16)
        (expected, plain_peak), (got, peak) = step(plain, x), step(hooked, x)
        assert all(map(torch.equal, got, expected))
        del expected, got, x
        allocated.append(torch.cuda.memory_allocated())
    stats = aot_hooks.offload_stats()
    assert stats["step_graph_count"] == 12 and stats["step_sent_bytes"] >= 64 * MIB, stats
    assert plain_peak - peak >= stats["step_sent_bytes"] // 2, (plain_peak, peak, stats)
    assert allocated[-1] == allocated[8] and stats["host_leased_bytes"] == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_in_one_process() -> None:
    for index in (0, 1, 0):
        x = torch.randn(MIB, device=f"cuda:{index}")
        assert torch.equal(roundtrip(x), x)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("inner", ["aten", "inductor"])
def test_one_graph_sends_from_two_devices(inner: str) -> None:
    torch.manual_seed(0)
    first, second = mlp(2), mlp(2).to("cuda:1")
    model = torch.nn.Sequential(first, second)
    x = torch.randn(256, 512, device="cuda:0")

    def forward(x: torch.Tensor) -> torch.Tensor:
        return second(first(x).to("cuda:1"))

    same = aot_hooks.Hook("same", lambda x: (x,), lambda p: p[0])  # packs nothing, and has the same kernels
    fn = torch.compile(forward, backend="aot_hooks", options={"inner": inner})
    expected = gradients(fn, model, x, same)
    torch._dynamo.reset()
    fn = torch.compile(forward, backend="aot_hooks", options={"inner": inner})
    for _ in range(3):
        got = gradients(fn, model, x, aot_hooks.offload(1, max_stall_ms=math.inf))
        assert all(map(torch.equal, got, expected))
    (plan,) = aot_hooks.last_plans(fn)
    assert {t.device for t in plan.transfers if t.placement.offloaded} == {"cuda:0", "cuda:1"}
