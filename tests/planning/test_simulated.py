"""A step around the calls of one graph, simulated: its peak, its time, and what calls hold on average."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import aot_hooks
from aot_hooks.planning.simulated import Call, Whole, held_on_average, predicted, whole_of
from aot_hooks.steps.memory import Bytes
from aot_hooks.steps.moments import Instant

FAST = aot_hooks.Rates(to_host=1e9, to_device=1e9, memory=1e12, operations=1e15, operations32=1e15)


def instants_of(graphs: str) -> list[Instant]:
    """Forwards of `graphs` in order, then their backwards; each leaves 10 bytes of gradients."""
    held = [{g: graphs[:i].count(g) for g in graphs[:i]} for i in range(len(graphs))]
    events = [Instant("forward", g, h, call=i) for i, (g, h) in enumerate(zip(graphs, held, strict=True))]
    return events + [replace(e, phase="backward", gradient_bytes=10 * i) for i, e in enumerate(reversed(events))]


def whole(graphs: str, sizes: dict[str, Bytes], peak: int = 1 << 40) -> Whole:
    found = whole_of("a", instants_of(graphs), sizes.__getitem__, lambda graph, phase: 1.0, peak, 1.0)
    assert found is not None
    return found


def random_whole(seed: int) -> tuple[Whole, str, dict[str, Bytes]]:
    """A step of 11 calls of two graphs, which calls they are, and the bytes of each graph's call."""
    chosen = random.Random(seed)
    graphs = "".join(chosen.choice("aab") for _ in range(10)) + "a"
    sizes = {g: Bytes(*(chosen.randrange(1, 100) for _ in range(3))) for g in "ab"}
    return whole(graphs, sizes), graphs, sizes


@pytest.mark.parametrize("seed", range(20))
def test_without_copies_a_step_takes_what_its_instants_say(seed: int) -> None:
    own, graphs, sizes = random_whole(seed)
    items = (sizes["a"].held // 2, sizes["a"].held // 3)
    found = predicted(own, Call(sizes["a"], items, 2.0, 3.0), None)
    assert found.peak == max(instant.nbytes(sizes.__getitem__) for instant in instants_of(graphs))
    assert (found.call_ms, found.stall_ms) == (5.0, 0.0) and own.calls == graphs.count("a")


def test_the_whole_step_hides_the_copies_of_its_first_calls() -> None:
    """A call of 2 + 4 ms makes 3 MB, whose copies take 3.2 ms each way: alone it hides none, 12 calls hide most."""
    sizes = {"a": Bytes(4_000_000, 3_000_000, 5_000_000)}
    call = Call(sizes["a"], (1_000_000,) * 3, 2.0, 4.0)
    alone = predicted(whole("a", sizes), call, FAST)
    assert alone.peak == 5_000_000 and alone.call_ms == pytest.approx(6.0)
    all_kept = 11 * 3_000_000 + 5_000_000
    steps = [predicted(whole("a" * 12, sizes, int(share * all_kept)), call, FAST) for share in (0.7, 0.55, 0.3)]
    assert all(step.peak <= share * all_kept for step, share in zip(steps, (0.7, 0.55, 0.3), strict=True))
    assert steps[0].call_ms == pytest.approx(6.0, rel=0.01), "all copies are hidden"
    assert steps[0].call_ms <= steps[1].call_ms < steps[2].call_ms, "less room, more copies, more stalls"
    assert predicted(whole("a" * 12, sizes, all_kept), call, FAST).stall_ms == 0.0, "nothing needs to be sent"


def test_copies_share_the_link_with_those_of_other_graphs() -> None:
    sizes = {"a": Bytes(4_000_000, 3_000_000, 5_000_000)}
    call, own = Call(sizes["a"], (1_000_000,) * 3, 2.0, 4.0), whole("a" * 12, sizes, 20_000_000)
    shared = Whole(own.points, own.peak, link_share=0.5)
    assert predicted(own, call, FAST).stall_ms < predicted(shared, call, FAST).stall_ms


@pytest.mark.parametrize("seed", range(20))
def test_calls_that_count_alike_stay_under_the_peak_of_those_that_do_not(seed: int) -> None:
    own, graphs, sizes = random_whole(seed)
    call = Call(sizes["a"], (sizes["a"].held,), 2.0, 3.0)
    peak = max(predicted(replace(own, peak=150), call, FAST).peak, 150)
    alike = {**sizes, "a": sizes["a"]._replace(held=held_on_average(own, sizes["a"], peak))}
    beside = [i.nbytes({**sizes, "a": Bytes(0, 0, 0)}.__getitem__) for i in instants_of(graphs) if i.runs == "b"]
    highest = max(instant.nbytes(alike.__getitem__) for instant in instants_of(graphs))
    assert highest <= max(peak, *beside, max(sizes["a"].forward, sizes["a"].backward) + 10 * len(graphs) + 1000)
    if alike["a"].held not in (0, sizes["a"].held):
        assert highest <= peak


def test_a_backward_without_its_forward_is_no_step() -> None:
    sizes = {"a": Bytes(1, 1, 1)}
    instants = instants_of("aa")[1:]
    assert whole_of("a", instants, sizes.__getitem__, lambda graph, phase: 0.0, 10, 1.0) is None
