"""Many graphs in a step: what each call sends is decided when it runs, and its copies may end in another graph."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import late_copies
import pytest
import torch
from offloading import Block, copies  # noqa: F401
from torch import nn
from torch.utils.checkpoint import checkpoint

import aot_hooks
from aot_hooks.offloading import at_run_time, placement, transfers

pytestmark = pytest.mark.filterwarnings("error::aot_hooks.errors.UnusedWarning")

# Compute is instant to the plan of a graph alone, so that it sends nothing. A step takes the time of the fixture's
# clock: 1 ms from event to event.
RATES = aot_hooks.Rates(to_host=3e6, to_device=3e6, memory=1e15, operations=1e18, operations32=1e18)
HOOK = aot_hooks.offload(0, rates=RATES, across_graphs=True)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    now = 0.0

    def mark(device: torch.device) -> float:
        nonlocal now
        now += 1e-3
        return now

    monkeypatch.setattr(at_run_time, "_mark", mark)
    yield
    torch._dynamo.reset()
    assert not at_run_time._items and not transfers._kept


def by_blocks(hook: aot_hooks.Hook | None, layers: int = 6, *, inner: str = "aten") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(layers)))
    for block in model:
        block.compile(backend="aot_hooks", options={"inner": inner, "policy": hook})
    return model


def step(model: nn.Sequential, x: torch.Tensor, run: Callable[..., torch.Tensor] | None = None) -> list[torch.Tensor]:
    model.zero_grad()
    loss = (model if run is None else run)(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b) > 1
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def counted(run: Callable[[], Any]) -> tuple[int, int]:
    """Tensors sent and fetched by `run`."""
    before = aot_hooks.offload_stats()
    run()
    after = aot_hooks.offload_stats()
    return after["sent_count"] - before["sent_count"], after["fetched_count"] - before["fetched_count"]


# --- steps that run ---------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("at_wait", [False, True])
@pytest.mark.parametrize("then", [None, aot_hooks.cast(torch.bfloat16)], ids=str)
def test_blocks_have_the_gradients_of_blocks_without(at_wait: bool, then: aot_hooks.Hook | None) -> None:
    late_copies.at_wait = at_wait
    plain, hooked = by_blocks(then), by_blocks(aot_hooks.offload(0, then, rates=RATES, across_graphs=True))
    counts = []
    for _ in range(6):
        x = torch.randn(64, 16)
        expected, before = step(plain, x), aot_hooks.offload_stats()
        assert_equal(step(hooked, x), expected)
        after = aot_hooks.offload_stats()
        sent, fetched = (after[f"{what}_count"] - before[f"{what}_count"] for what in ("sent", "fetched"))
        assert sent == fetched
        counts.append(sent)
    assert counts[0] == counts[1] == counts[2] > counts[3] == counts[5] > 0, "the first steps send all"
    assert after["step_graph_count"] == 6
    assert 0 < after["step_sent_bytes"] < after["step_bytes"], "the last layers stay"


def test_copies_end_in_other_graphs() -> None:
    hooked, x = by_blocks(HOOK), torch.randn(64, 16)
    for _ in range(4):
        step(hooked, x)
    late_copies.log = []
    hooked(x).sum()
    log = late_copies.log
    ends = [i for i, what in enumerate(log) if what == "wait"]
    assert ends and any(log[i - 1] == "start" and "start" in log[i:] for i in ends), log
    assert log.count("start") > 4


@pytest.mark.parametrize(
    ("limit", "value", "max_stall_ms", "inner"),
    [
        *((*limit, ms, "aten") for limit in (("_TOGETHER", 4), ("_PART_BYTES", 1 << 14)) for ms in (0.0, math.inf)),
        pytest.param("_TOGETHER", 4, 0.0, "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_graph_of_many_layers_has_several_operators(
    monkeypatch: pytest.MonkeyPatch, inner: str, max_stall_ms: float, limit: str, value: int
) -> None:
    monkeypatch.setattr(placement, limit, value)
    hook = aot_hooks.offload(0, rates=RATES, across_graphs=True, max_stall_ms=max_stall_ms)
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block() for _ in range(6)))
    hooked = copy.deepcopy(plain)
    run = torch.compile(hooked, backend="aot_hooks", options={"inner": inner, "policy": hook})
    for _ in range(6):
        x = torch.randn(64, 16)
        late_copies.log = []
        for a, b in zip(step(hooked, x, run), step(plain, x), strict=True):
            torch.testing.assert_close(a, b)
        starts = [n for n, what in enumerate(late_copies.log) if what == "start"]
        assert "wait" in late_copies.log[starts[0] : starts[-1]], "the first copies end while the forward runs"
    assert aot_hooks.offload_stats()["step_graph_count"] == 1


def test_the_last_operator_of_a_graph_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_TOGETHER", 1)
    w0, w1 = (torch.randn(16, 16, requires_grad=True) for _ in range(2))

    def both_last_read_by_one_node(x: torch.Tensor) -> torch.Tensor:
        return (torch.atan2(x @ w0, x @ w1) * 1).sum()

    run = torch.compile(both_last_read_by_one_node, backend="aot_hooks", options={"inner": "aten", "policy": HOOK})
    run(torch.randn(4, 16)).backward()
    step = at_run_time.follower_of(torch.device("cpu")).run.step
    ends = [call.what.terms.ends_graph for call in step.calls]
    assert ends == [False, True]


class Saturating(nn.Module):
    """Saves its input and its output, whose memory the program has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.down(torch.sigmoid(self.up(x))))


def test_nothing_is_sent_that_the_plan_of_the_step_does_not_send() -> None:
    slower = aot_hooks.Rates(to_host=3e9, to_device=3e9, memory=1e10, operations=1e18, operations32=1e18)
    torch.manual_seed(0)
    plain = nn.Sequential(*(Saturating() for _ in range(6)))
    hooked = copy.deepcopy(plain)
    hook = aot_hooks.offload(0, rates=slower, across_graphs=True)
    for block in hooked:
        block.compile(backend="aot_hooks", options={"inner": "aten", "policy": hook, "scope": "all"})
    for _ in range(5):
        x = torch.randn(64, 16)
        assert_equal(step(hooked, x), step(plain, x))
    sent, _ = counted(partial(step, hooked, x))
    assert sent == 5, "the hidden values of all blocks but the last, and no input or output"
    stay = [
        t
        for plan in aot_hooks.last_plans(hooked)
        for t in plan.transfers
        if "which the program may" in t.placement.reason
    ]
    assert stay and not any(t.placement.offloaded for t in stay)


def test_the_last_graph_of_the_forward_may_differ() -> None:
    """A skipped layer, another length, an evaluation with gradients: right at once, and planned when it comes again."""
    plain, hooked = by_blocks(None, 8), by_blocks(HOOK, 8)
    ways = [lambda m, x: m(x), lambda m, x: m[:5](x), lambda m, x: m[3:](m[0](x)), lambda m, x: m(m[:2](x))]
    for which in (0, 0, 0, 1, 0, 1, 1, 1, 2, 3, 3, 3, 0, 2, 1, 3, 2, 2):
        x = torch.randn(64, 16)
        assert_equal(*(step(m, x, partial(ways[which], m)) for m in (plain, hooked)))
        with torch.no_grad():
            assert torch.equal(plain(x), hooked(x))
        evaluated = plain(x), hooked(x)  # without a backward
        assert torch.equal(*evaluated)
        del evaluated
    for way in ways:  # all of them are known
        assert counted(partial(step, hooked, x, partial(way, hooked)))[0] > 0


@pytest.mark.parametrize("scope", ["no_static", "all"])
def test_what_is_saved_and_returned_stays_the_callers(scope: str) -> None:
    weight = torch.randn(16, 16, requires_grad=True)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = x @ weight
        return hidden, torch.nn.functional.gelu(hidden) * hidden.tanh()

    compiled = torch.compile(f, backend="aot_hooks", options={"inner": "aten", "policy": HOOK, "scope": scope})

    def run(g: Callable[..., Any]) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 128).view(8, 16)
        for _ in range(3):
            hidden, x = g(x)
        (grad,) = torch.autograd.grad((x * hidden).sum(), weight)
        return [hidden.detach(), x.detach(), grad]

    expected = run(f)
    for _ in range(8):
        assert_equal(run(compiled), expected)


def test_shapes_that_change_are_planned_each() -> None:
    plain, hooked = by_blocks(None), by_blocks(HOOK)
    for i in range(15):
        x = torch.randn((64, 48, 32)[i % 3], 16)
        assert_equal(step(hooked, x), step(plain, x))
    assert counted(lambda: step(hooked, torch.randn(48, 16)))[0] > 0


@pytest.mark.parametrize("order", ["0 1", "1 0"])
def test_two_microbatches_in_flight(order: str) -> None:
    plain, hooked = by_blocks(None), by_blocks(HOOK)

    def both(model: nn.Sequential, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        losses = [model(x).square().mean() for x in xs]
        for n in map(int, order.split()):
            losses[n].backward()
        return [*losses, *(p.grad.clone() for p in model.parameters())]

    counts = []
    for _ in range(5):
        xs = [torch.randn(64, 16) for _ in range(2)]
        counts.append(counted(lambda xs=xs: assert_equal(both(hooked, xs), both(plain, xs)))[0])
    assert counts[0] == counts[2] > counts[3] == counts[4] > 0, counts


def test_one_forward_one_backward_in_turn() -> None:
    plain, hooked = by_blocks(None), by_blocks(HOOK)

    def pipeline(model: nn.Sequential, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        losses = [model(xs[0]).square().mean(), model(xs[1]).square().mean()]
        for n in range(4):
            losses[n].backward()
            if n < 2:
                losses.append(model(xs[n + 2]).square().mean())
        return [*losses, *(p.grad.clone() for p in model.parameters())]

    for _ in range(6):
        xs = [torch.randn(64, 16) for _ in range(4)]
        assert_equal(pipeline(hooked, xs), pipeline(plain, xs))
    assert counted(lambda: pipeline(hooked, xs))[0] > 0


@pytest.mark.parametrize("inner", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
# torch refuses a second backward of what was compiled before without one, because that takes donated buffers
@torch._functorch.config.patch(donated_buffer=False)
def test_retain_graph_gives_the_same_gradients_again(inner: str) -> None:
    plain, hooked = by_blocks(None, 4, inner=inner), by_blocks(HOOK, 4, inner=inner)
    for _ in range(5):
        x = torch.randn(64, 16)
        found = []
        for model in (plain, hooked):
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            first = [p.grad.clone() for p in model.parameters()]
            loss.backward(retain_graph=True)
            loss.backward()
            found.append([*first, *(p.grad.clone() for p in model.parameters())])
            for a, b in zip(first, model.parameters(), strict=True):
                torch.testing.assert_close(3 * a, b.grad)
        assert_equal(*found)


@pytest.mark.slow
def test_inductor_writes_over_no_tensor_that_stays_or_is_on_its_way() -> None:
    late_copies.at_wait = True
    plain, hooked = by_blocks(None, inner="inductor"), by_blocks(HOOK, inner="inductor")
    for _ in range(5):
        x = torch.randn(64, 16)
        for a, b in zip(step(hooked, x), step(plain, x), strict=True):
            torch.testing.assert_close(a, b)
    assert aot_hooks.offload_stats()["sent_count"] > 0


def test_an_exception_half_way_leaves_nothing_behind() -> None:
    plain, hooked = by_blocks(None), by_blocks(HOOK)

    class Boom(Exception):
        pass

    def fails(*_: Any) -> None:
        raise Boom

    for i in range(8):
        x = torch.randn(64, 16)
        broken = hooked[3].register_forward_pre_hook(fails) if i % 2 else None
        if broken is not None:
            with pytest.raises(Boom):
                hooked(x)
            broken.remove()
            y = hooked[:4](x)
            y.register_hook(fails)
            with pytest.raises(Boom):
                hooked[4:](y).sum().backward()
            del y
        assert_equal(step(hooked, x), step(plain, x))
    gc.collect()
    assert aot_hooks.offload_stats()["host_leased_bytes"] == 0
    assert counted(lambda: step(hooked, x))[0] > 0


def test_checkpointed_blocks() -> None:
    plain, hooked = by_blocks(None), by_blocks(HOOK)

    def some(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(model):
            x = checkpoint(block, x, use_reentrant=False) if i % 3 == 1 else block(x)
        return x

    def each(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    x = torch.randn(64, 16)
    assert_equal(step(hooked, x), step(plain, x))
    with pytest.warns(aot_hooks.errors.UnusedWarning, match="nothing for a compiled function that torch"):
        for way in (some, some, some, some, each, each, each, each, some, some):
            x = torch.randn(64, 16)
            assert_equal(*(step(m, x, partial(way, m)) for m in (plain, hooked)))
    assert counted(lambda: step(hooked, x, partial(some, hooked)))[0] > 0


def test_graph_breaks() -> None:
    def forward(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = block(x)
            torch._dynamo.graph_break()
        return x

    found = []
    for hook in (None, HOOK):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(6)))
        run = torch.compile(forward, backend="aot_hooks", options={"inner": "aten", "policy": hook})
        torch.manual_seed(1)
        found.append([step(model, torch.randn(64, 16), partial(run, model)) for _ in range(5)])
    for a, b in zip(*found, strict=True):
        assert_equal(a, b)
    assert aot_hooks.offload_stats()["step_sent_bytes"] > 0


def copying() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x)


def test_hooks_that_copy_what_is_saved_get_no_tensors_of_ours() -> None:
    plain, hooked, x = by_blocks(None), by_blocks(HOOK), torch.randn(64, 16)
    with pytest.warns(aot_hooks.errors.UnusedWarning, match="the innermost one counts alone, which is torch's"):
        for _ in range(2):
            assert_equal(step(plain, x), step(hooked, x))
            with copying():
                assert_equal(step(plain, x), step(hooked, x))


def test_a_hook_that_copies_what_is_saved_in_a_region_ends_in_an_error() -> None:
    model, x = Block(), torch.randn(64, 16)

    @torch.compile(backend="aot_hooks", options={"inner": "aten"})
    def run(x: torch.Tensor) -> torch.Tensor:
        with aot_hooks.saved_tensors_hooks(HOOK):
            return model(x)

    with copying():
        loss = run(x).sum()
    with pytest.raises(RuntimeError, match="A saved-tensor hook around the compiled function has copied it"):
        loss.backward()


def test_a_capture_of_the_backward_alone_reads_nothing_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked, x = by_blocks(HOOK), torch.randn(64, 16)
    loss = hooked(x).sum()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="what a forward outside of it left here"):
        patch.setattr(transfers, "capturing", lambda device: True)
        loss.backward()


def test_a_capture_of_both_follows_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, hooked, x = by_blocks(None), by_blocks(HOOK), torch.randn(64, 16)
    for _ in range(4):
        step(hooked, x)
    before = aot_hooks.offload_stats()["sent_count"]
    step(hooked, x)
    planned = aot_hooks.offload_stats()["sent_count"] - before
    monkeypatch.setattr(transfers, "capturing", lambda device: True)
    assert_equal(step(hooked, x), step(plain, x))
    assert aot_hooks.offload_stats()["sent_count"] - before == 2 * planned > 0
    before = aot_hooks.offload_stats()["sent_count"]
    assert_equal(step(hooked[:3], x), step(plain[:3], x))
    at_most = aot_hooks.offload_stats()["sent_count"] - before
    assert at_most < planned, "what has begun as the planned step, and was another one"


def test_a_capture_without_a_plan_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, hooked, x = by_blocks(None), by_blocks(HOOK), torch.randn(64, 16)
    step(hooked, x)
    before = aot_hooks.offload_stats()["sent_count"]
    monkeypatch.setattr(transfers, "capturing", lambda device: True)
    assert_equal(step(hooked, x), step(plain, x))
    assert aot_hooks.offload_stats()["sent_count"] == before


def test_a_step_that_can_send_nothing_says_so() -> None:
    slow = aot_hooks.Rates(to_host=1e3, to_device=1e3, memory=1e15, operations=1e18, operations32=1e18)
    hooked, x = by_blocks(aot_hooks.offload(0, rates=slow, across_graphs=True)), torch.randn(64, 16)
    for _ in range(3):
        step(hooked, x)
    with pytest.warns(aot_hooks.errors.UnusedWarning, match="a step of 6 calls of compiled graphs sends none of its"):
        step(hooked, x)


def test_memory_on_the_host_is_flat() -> None:
    hooked, x = by_blocks(HOOK), torch.randn(64, 16)
    for _ in range(5):
        step(hooked, x)
    before = aot_hooks.offload_stats()
    for _ in range(20):
        step(hooked, x)
    after = aot_hooks.offload_stats()
    assert (after["host_bytes"], after["host_blocks_made"]) == (before["host_bytes"], before["host_blocks_made"])
    assert after["sent_bytes"] > before["sent_bytes"]


def test_plans_of_a_model_are_those_of_its_blocks() -> None:
    hooked, x = by_blocks(HOOK), torch.randn(64, 16)
    with pytest.raises(aot_hooks.errors.OptionError, match=r"last_plans takes what torch\.compile returned"):
        aot_hooks.last_plans(nn.Sequential(Block()))
    assert aot_hooks.last_plans(hooked) == ()
    for _ in range(6):
        step(hooked, x)
    first, others = aot_hooks.last_plans(hooked)  # the first block's input has no gradient; the others share a graph
    assert {p.host_bytes for p in (first, others)} == {0}, "alone, a graph sends nothing"
    stats = aot_hooks.offload_stats()
    in_step = [sum(t.nbytes for t in plan.transfers) for plan in (first, others)]
    assert stats["step_bytes"] == in_step[0] + 5 * in_step[1]
    assert 0 < stats["step_sent_bytes"] < stats["step_bytes"]
