"""Offload in compiled graphs and eager parts, on the CPU.

A copy is made at its wait there, the latest that a device could be: a value that was let go too soon shows.
"""

from __future__ import annotations

import gc
import math
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from steps import ATEN, assert_same, compiled, packed_count, step
from torch import nn
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks import Rates, policies, transfers

ALL = aot_hooks.offload(0, max_stall_ms=math.inf)
SLOW = Rates(to_host=1e9, to_device=1e9, memory=1e9, operations=1e10, operations32=1e9)  # spreads small graphs out


@pytest.fixture(autouse=True)
def copies() -> Iterator[None]:
    gc.collect()
    aot_hooks.reset()
    transfers.copies.at_wait = True
    yield
    transfers.copies.at_wait, transfers.copies.log = False, None
    gc.collect()
    assert aot_hooks.offload_stats()["host_leased_bytes"] == 0, "host memory is held by nobody who is known"
    assert not transfers._under_way


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def stack(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(layers)))


def sent() -> int:
    return aot_hooks.offload_stats()["sent_count"]


@pytest.mark.core
@pytest.mark.parametrize("at_wait", [False, True])
@pytest.mark.parametrize("rates", [None, SLOW], ids=["instant", "slow"])
def test_gradients_are_those_without_bit_for_bit(rates: Rates | None, at_wait: bool) -> None:
    transfers.copies.at_wait = at_wait
    model, x = stack(), torch.randn(8, 16, requires_grad=True)
    expected = step(compiled(model), x)
    torch._dynamo.reset()
    fn = compiled(model)
    hook = aot_hooks.offload(0, rates=rates)
    for _ in range(3):
        assert_same(step(fn, x, hook=hook), expected)
    (plan,) = aot_hooks.last_plans(fn)
    offloaded = [t for t in plan.transfers if t.placement.offloaded]
    assert len(offloaded) >= 8
    assert plan.host_bytes == sum(t.nbytes for t in offloaded) > 0
    assert plan.packed_bytes < plan.saved_bytes
    stats = aot_hooks.offload_stats()
    assert stats["sent_count"] == stats["fetched_count"] == 3 * len(offloaded)
    assert stats["host_blocks_made"] <= len(offloaded), "the second step makes no new blocks"


@pytest.mark.core
def test_in_the_graph_starts_come_early_and_waits_late() -> None:
    model, x = stack(), torch.randn(8, 16, requires_grad=True)
    fn = compiled(model)
    transfers.copies.log = []
    step(fn, x, hook=aot_hooks.offload(0, rates=SLOW))
    what = [event for event, _ in transfers.copies.log]
    count = what.count("start")
    assert count == what.count("wait") == what.count("reload") == what.count("use") > 8
    forward, backward = what[: 2 * count], what[2 * count :]
    assert set(forward) == {"start", "wait"} and set(backward) == {"reload", "use"}
    # not one after the other, as hooks that know no time would have it
    assert forward[:2] == ["start", "start"] and forward[-1] == "wait" and backward[0] == "reload"


@pytest.mark.core
def test_the_last_layers_stay_on_the_device() -> None:
    model, x = stack(), torch.randn(8, 16, requires_grad=True)
    fn = compiled(model)
    step(fn, x, hook=aot_hooks.offload(0, rates=SLOW))
    (plan,) = aot_hooks.last_plans(fn)
    stays = [t for t in plan.transfers if not t.placement.offloaded]
    assert stays and stays[-1].name == plan.transfers[-1].name
    reasons = ("back on the device too soon to be worth sending", "no compute left to hide its copies")
    assert stays[-1].placement.reason in reasons
    kept = next(d for d in plan.decisions if d.saved.name == stays[-1].name)
    assert kept.hook is aot_hooks.KEEP and kept.packed_bytes == kept.saved_bytes
    assert stays[-1].placement.reason in kept.reason


def test_what_does_not_hide_stays_and_the_report_says_what_it_would_cost() -> None:
    model, x = stack(), torch.randn(8, 16, requires_grad=True)
    slow_link = Rates(to_host=1e8, to_device=1e8, memory=1e9, operations=1e10, operations32=1e9)
    plan = aot_hooks.plan(model, x, inner="aten", policy=aot_hooks.offload(0, rates=slow_link))
    report = aot_hooks.format_report(plan)
    assert "the compute is too short for the rest" in report and "no compute left to hide its copies" in report
    all_of_it = aot_hooks.plan(model, x, inner="aten", policy=aot_hooks.offload(0, rates=slow_link, max_stall_ms=1e9))
    assert all_of_it.host_bytes > plan.host_bytes
    stall = sum(t.placement.stall_ms for t in all_of_it.transfers)
    assert stall == pytest.approx(plan.transfers[0].full_stall_ms) and stall > 0
    assert f"predicted stall {stall:.1f} ms" in aot_hooks.format_report(all_of_it)
    rows = all_of_it.transfers
    assert f"{sum(r.nbytes for r in rows if r.placement.offloaded) / 1024:.2f} of" in aot_hooks.format_report(all_of_it)


def test_predicted_peak_falls() -> None:
    model, x = stack(8), torch.randn(64, 16, requires_grad=True)
    before = aot_hooks.plan(model, x, inner="aten")
    after = aot_hooks.plan(model, x, inner="aten", policy=aot_hooks.offload(0, rates=SLOW))
    peak = lambda points: max(p.live_bytes for p in points)  # noqa: E731
    assert peak(after.live_before) == peak(before.live_before)
    falls = peak(after.live_before) - peak(after.live_after)
    assert 0.5 * after.host_bytes < falls <= after.host_bytes


@pytest.mark.parametrize("then", [aot_hooks.int8(16), aot_hooks.float8(), aot_hooks.cast(torch.bfloat16)], ids=str)
def test_what_another_hook_makes_is_offloaded(then: aot_hooks.Hook) -> None:
    model, x = stack(), torch.randn(8, 16, requires_grad=True)
    expected = step(compiled(model), x, hook=then)
    torch._dynamo.reset()
    fn = compiled(model)
    got = step(fn, x, hook=aot_hooks.offload(0, then=then, max_stall_ms=math.inf))
    assert_same(got, expected)
    (plan,) = aot_hooks.last_plans(fn)
    assert plan.packed_bytes + plan.host_bytes < plan.saved_bytes
    names = {d.hook.name for d in plan.decisions}
    assert f"offload({then.name})" in names


def test_small_parts_of_what_another_hook_makes_stay() -> None:
    fn = compiled(lambda x, w: torch.tanh(torch.tanh(x @ w) @ w) @ w)
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    step(fn, x, w, hook=aot_hooks.offload(2048, then=aot_hooks.int8(64), max_stall_ms=math.inf))
    (plan,) = aot_hooks.last_plans(fn)
    assert {t.nbytes for t in plan.transfers} == {64 * 64}  # the codes, not the scales
    assert plan.packed_bytes % (64 * 4) == 0 and plan.packed_bytes > 0


def test_min_bytes() -> None:
    model, x = stack(2), torch.randn(8, 16, requires_grad=True)
    fn = compiled(model)
    step(fn, x, hook=aot_hooks.offload(1000, max_stall_ms=math.inf))
    (plan,) = aot_hooks.last_plans(fn)
    assert {d.saved.nbytes >= 1000 for d in plan.decisions if d.hook is not aot_hooks.KEEP} == {True}
    assert any("smaller than min_bytes=1000" in d.reason for d in plan.decisions)


# --- values that share memory -----------------------------------------------------------------------------------------


def test_a_storage_crosses_the_link_once() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ w)
        return (h @ w) * h.t().sigmoid() + torch.sin(h.view(-1)).view(64, 64)

    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    expected = step(compiled(f), x, w)
    torch._dynamo.reset()
    fn = compiled(f)
    assert_same(step(fn, x, w, hook=ALL), expected)
    names = [t.name for plan in aot_hooks.last_plans(fn) for t in plan.transfers]
    assert len(names) == len(set(names))
    (plan,) = aot_hooks.last_plans(fn)
    assert plan.host_bytes <= plan.saved_bytes


@pytest.mark.core
def test_a_square_matrix_and_its_transpose_are_not_mixed_up() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ w)
        return (h @ w).sigmoid() @ h.t() @ (h.t() @ h).tanh()

    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    expected = step(compiled(f), x, w)
    torch._dynamo.reset()
    fn = compiled(f)
    assert_same(step(fn, x, w, hook=ALL), expected)
    assert packed_count(fn) > 0
    assert_same(step(f, x, w, hook=ALL), step(f, x, w))  # eager


@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded", "channels_last", "stepped"])
def test_layouts(kind: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x)
        if kind == "transposed":
            h = h.transpose(0, 2)
        elif kind == "sliced":
            h = h[:, 1:3]
        elif kind == "expanded":
            h = h[:, :1].expand(-1, 4, -1, -1)
        elif kind == "channels_last":
            h = h.contiguous(memory_format=torch.channels_last)
        else:
            h = h[..., ::2]
        return torch.sin(h) * h.cos()

    x = torch.randn(2, 4, 6, 8, requires_grad=True)
    expected = step(compiled(f), x)
    torch._dynamo.reset()
    assert_same(step(compiled(f), x, hook=ALL), expected)
    assert_same(step(f, x, hook=ALL), step(f, x))


@pytest.mark.parametrize("rates", [None, SLOW], ids=["instant", "slow"])
def test_attention_gives_several_values_through_views(rates: Rates | None) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.transpose(1, 2) for t in self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(mixed.transpose(1, 2).flatten(2))

    model, x = nn.Sequential(Attention(), Attention()), torch.randn(1, 12, 16, requires_grad=True)
    expected = step(compiled(model), x)
    torch._dynamo.reset()
    fn = compiled(model)
    assert_same(step(fn, x, hook=aot_hooks.offload(0, rates=rates, max_stall_ms=math.inf)), expected)
    assert sum(t.placement.offloaded for t in aot_hooks.last_plans(fn)[0].transfers) > 6


# --- how it composes --------------------------------------------------------------------------------------------------


def test_dynamic_shapes_compile_once() -> None:
    model = stack(3)
    fn = compiled(model, dynamic=True)
    for rows in (8, 11, 3):
        x = torch.randn(rows, 16, requires_grad=True)
        assert_same(step(fn, x, hook=aot_hooks.offload(0, rates=SLOW)), step(model, x), exactly=False)
    assert len(aot_hooks.last_plans(fn)) == 1
    assert sent() > 0


def test_dynamic_shapes_through_views() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.transpose(1, 2) for t in self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2))
            mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
            return x + self.out(mixed.transpose(1, 2).flatten(2)).sigmoid() * x.shape[1]

    model = nn.Sequential(Heads(), Heads())
    fn = compiled(model, dynamic=True)
    for tokens in (8, 11, 5):
        x = torch.randn(2, tokens, 16, requires_grad=True)
        for rates in (None, SLOW):
            hook = aot_hooks.offload(0, rates=rates, max_stall_ms=math.inf)
            assert_same(step(fn, x, hook=hook), step(model, x), exactly=False)
    assert len(aot_hooks.last_plans(fn)) == 2
    assert sent() > 0


def test_policies_choose() -> None:
    model, x = stack(4), torch.randn(8, 16, requires_grad=True)
    fn = compiled(model)
    with aot_hooks.saved_tensors_policy(policies.only_these_modules({"1.*": ALL, "2.*": aot_hooks.int8(16)})):
        out = fn(x)
    out.sum().backward()
    (plan,) = aot_hooks.last_plans(fn)
    assert {d.saved.module_path.split(".")[0] for d in plan.decisions if d.hook.name == "offload"} == {"1"}
    assert {d.saved.module_path.split(".")[0] for d in plan.decisions if "int8" in d.hook.name} == {"2"}


def test_a_region_inside_a_compiled_function() -> None:
    model, x = stack(4), torch.randn(8, 16, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        x = model[1](model[0](x))
        with aot_hooks.saved_tensors_hooks(ALL):
            x = model[2](x)
        return model[3](x)

    fn = compiled(f, fullgraph=True)
    assert_same(step(fn, x), step(f, x), exactly=False)
    (plan,) = aot_hooks.last_plans(fn)
    assert 0 < sum(t.placement.offloaded for t in plan.transfers) < len(plan.decisions)


def test_a_graph_break_offloads_on_both_sides_and_between() -> None:
    model, x = stack(3), torch.randn(8, 16, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        x = model[0](x)
        torch._dynamo.graph_break()
        return model[2](model[1](x))

    fn = compiled(f)
    assert_same(step(fn, x, hook=ALL), step(f, x), exactly=False)
    assert len(aot_hooks.last_plans(fn)) == 2
    stats = aot_hooks.offload_stats()
    assert stats["sent_count"] == stats["fetched_count"] > 0


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

    transfers.copies.log = []
    with aot_hooks.saved_tensors_hooks(aot_hooks.offload(0, in_flight_bytes=1 << 20), scope="all"):
        y = chain(x)
    y.sum().backward()
    what = [event for event, _ in transfers.copies.log]
    assert what.count("start") >= 6
    first_use = what.index("use")
    assert what[:first_use].count("reload") == 1, "nothing is fetched before the backward asks"
    assert what[first_use : first_use + 3] == ["use", "reload", "reload"], "then the next ones are under way at once"


def test_checkpointed_blocks_save_their_inputs_on_the_host() -> None:
    model, x = stack(3), torch.randn(8, 16, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = checkpoint(block, x * 1.5, use_reentrant=False)
        return x

    expected = step(compiled(f), x)
    torch._dynamo.reset()
    assert_same(step(compiled(f), x, hook=ALL), expected)
    assert sent() > 0
    assert_same(step(f, x, hook=ALL), step(f, x))


def test_two_forwards_in_flight_and_their_backwards_in_any_order() -> None:
    model = stack(3)
    inputs = [torch.randn(8, 16) for _ in range(3)]
    fn = compiled(model)

    def grads(f: Any, order: list[int], hook: Any) -> list[torch.Tensor]:
        losses = []
        for x in inputs:
            with aot_hooks.saved_tensors_hooks(hook):
                losses.append(f(x).square().sum())
        for i in order:
            losses[i].backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return found

    same = aot_hooks.Hook("same", lambda x: (x,), lambda p: p[0])
    for order in ([0, 1, 2], [2, 0, 1]):
        assert_same(grads(fn, order, ALL), grads(compiled(lambda x: model(x)), order, same))


def test_retain_graph_fetches_again() -> None:
    model, x = stack(2), torch.randn(8, 16, requires_grad=True)
    fn = compiled(model)
    with aot_hooks.saved_tensors_hooks(ALL):
        loss = fn(x).square().sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    loss.backward()
    assert_same(x.grad, first)
    assert aot_hooks.offload_stats()["fetched_count"] == 2 * sent()


def test_an_exception_in_mid_step_leaves_nothing_behind() -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("in mid-step")

    model, x = stack(3), torch.randn(8, 16, requires_grad=True)
    fn = [compiled(block) for block in model]
    expected = step(lambda x: fn[2](fn[1](fn[0](x))), x)
    with aot_hooks.saved_tensors_hooks(ALL):
        y = fn[2](Raises.apply(fn[1](fn[0](x))))
    with pytest.raises(ValueError, match="in mid-step"):
        y.sum().backward()
    del y
    gc.collect()
    assert aot_hooks.offload_stats()["host_leased_bytes"] == 0
    x.grad = None
    model.zero_grad(set_to_none=True)
    assert_same(step(lambda x: fn[2](fn[1](fn[0](x))), x, hook=ALL), expected)


def test_a_forward_whose_backward_never_runs_gives_its_host_memory_back() -> None:
    model, x = stack(2), torch.randn(8, 16, requires_grad=True)
    fn = compiled(model)
    for _ in range(3):
        with aot_hooks.saved_tensors_hooks(ALL):
            y = fn(x)
        assert aot_hooks.offload_stats()["host_leased_bytes"] > 0
        del y
        assert aot_hooks.offload_stats()["host_leased_bytes"] == 0
    assert aot_hooks.offload_stats()["host_blocks_made"] <= sent() // 3


def test_backward_in_another_thread() -> None:
    model, x = stack(2), torch.randn(8, 16, requires_grad=True)
    expected = step(compiled(model), x)[1]
    torch._dynamo.reset()
    fn = compiled(model)
    step(fn, x, hook=ALL)  # compiled in this thread
    for f in (fn, model):
        leaf = x.detach().clone().requires_grad_()
        with aot_hooks.saved_tensors_hooks(ALL):
            y = f(leaf)
        weights = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).view(y.shape)
        loss = (y.double() * weights).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert_same(leaf.grad, expected[0], exactly=f is fn)
        model.zero_grad(set_to_none=True)


def test_max_host_bytes_keeps_the_rest_on_the_device_and_counts_it() -> None:
    model, x = stack(), torch.randn(64, 16, requires_grad=True)
    expected = step(compiled(model), x)
    torch._dynamo.reset()
    fn = compiled(model)
    hook = aot_hooks.offload(0, max_stall_ms=math.inf, max_host_bytes=40960)
    with pytest.warns(UserWarning, match="the host has no room"):
        got = step(fn, x, hook=hook)
    assert_same(got, expected)
    stats = aot_hooks.offload_stats()
    assert stats["host_peak_bytes"] <= 40960 and stats["kept_on_device_bytes"] > 0
    assert_same(step(fn, x, hook=hook), expected)


def test_what_stays_on_the_device_is_not_written_over_in_place() -> None:
    """Inductor's kernels write over what the graph has given up, and what has no room on the host is given up too."""

    def forward(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        h = x @ a
        for _ in range(6):
            x = x @ b
        return (x * torch.sin(h)) @ c

    values = [(torch.randn(64, 64) / 8).requires_grad_() for _ in range(4)]

    def gradients(fn: Any) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(fn(*values).square().sum(), values)

    expected = gradients(forward)
    fn = torch.compile(forward, backend="aot_hooks")
    slow = aot_hooks.Rates(1e9, 1e9, 1e9, 1e10, 1e9)
    hook = aot_hooks.offload(0, max_stall_ms=math.inf, max_host_bytes=0, rates=slow)
    with warnings.catch_warnings(), aot_hooks.saved_tensors_hooks(hook):
        warnings.simplefilter("ignore")
        got = gradients(fn)
    assert aot_hooks.offload_stats()["kept_on_device_count"] > 0
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def test_a_setting_made_anew_is_the_same_and_another_number_recompiles() -> None:
    model, x = stack(2), torch.randn(8, 16, requires_grad=True)
    fn = compiled(model)
    for _ in range(3):
        step(fn, x, hook=aot_hooks.offload(0, max_stall_ms=math.inf))
    assert len(aot_hooks.last_plans(fn)) == 1
    step(fn, x, hook=aot_hooks.offload(1000, max_stall_ms=math.inf))
    assert len(aot_hooks.last_plans(fn)) == 2


@pytest.mark.core
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"min_bytes": -1}, "min_bytes must not be negative"),
        ({"in_flight_bytes": -1}, "in_flight_bytes must not be negative"),
        ({"max_stall_ms": -0.5}, "max_stall_ms must not be negative"),
        ({"max_host_bytes": -1}, "max_host_bytes must be None or not negative"),
        ({"then": aot_hooks.Hook("e", lambda x: x, lambda x: x, eager=True)}, "then must be a Hook that is traced"),
        ({"then": "int8"}, "then must be a Hook that is traced"),
    ],
    ids=str,
)
def test_wrong_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(aot_hooks.errors.OptionError, match=message):
        aot_hooks.offload(**kwargs)


def test_the_options_of_torch_compile() -> None:
    model, x = stack(2), torch.randn(8, 16, requires_grad=True)
    fn = torch.compile(model, backend="aot_hooks", options={**ATEN, "policy": ALL})
    assert_same(step(fn, x), step(model, x), exactly=False)
    assert sent() > 0


def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that are not done yet when asked, as on a device."""
    monkeypatch.setattr(transfers, "finished", lambda ticket: False)


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
    from aot_hooks.library.offload import tape

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


def test_a_report_of_several_graphs_adds_up() -> None:
    model, x = stack(1), torch.randn(64, 16, requires_grad=True)
    link = Rates(to_host=1e7, to_device=1e7, memory=1e9, operations=1e10, operations32=1e9)
    hook = aot_hooks.offload(0, rates=link, max_stall_ms=1e9)
    fn = compiled(model)
    step(fn, x, hook=hook)
    (one,) = aot_hooks.last_plans(fn)
    stall, compute = sum(t.placement.stall_ms for t in one.transfers), one.transfers[0]
    total = 3 * (compute.forward_ms + compute.backward_ms)
    assert f"predicted stall {3 * stall:.1f} ms of a step of {total:.1f} ms" in aot_hooks.format_report([one] * 3)


@pytest.mark.core
def test_a_capture_without_a_free_block_fails_in_words_that_cudagraph_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudagraph.driver import cuda_driver

    monkeypatch.setattr(transfers, "_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="no pinned block of 400 bytes is free") as raised:
        transfers.send(torch.randn(100), None)
    assert cuda_driver().is_capture_error(raised.value)
