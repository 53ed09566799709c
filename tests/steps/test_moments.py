"""Moments of a step of many calls, and the shares that graphs get: pure functions, beside trying everything."""

from __future__ import annotations

import itertools
import random

import pytest

from aot_hooks.steps.memory import Bytes, Moment
from aot_hooks.steps.moments import Instant, between, latest, moments_of, shares


def trace_of(graphs: str) -> list[Instant]:
    """Forwards of `graphs` in order, then their backwards; each leaves 10 bytes of gradients."""
    held = [{g: graphs[:i].count(g) for g in graphs[:i]} for i in range(len(graphs))]
    events = [Instant("forward", g, h) for g, h in zip(graphs, held, strict=True)]
    left = itertools.count(0, 10)
    return events + [Instant("backward", g, h, next(left)) for g, h in reversed([*zip(graphs, held, strict=True)])]


def test_moments_of_equal_calls_are_those_with_all_others_and_with_all_gradients():
    assert moments_of("b", [trace_of("bbbb")], lambda _: Bytes(0, 0, 0)) == (
        Moment("forward", 3, 0),
        Moment("backward", 0, 30),
        Moment("backward", 3, 0),
    )


def test_moments_have_what_other_graphs_hold_and_work_with():
    sizes = {"a": Bytes(7, 5, 100), "b": Bytes(1, 2, 3)}
    assert moments_of("b", [trace_of("abb")], sizes.__getitem__) == (
        Moment("forward", 1, 5),
        Moment("backward", 0, 15),
        Moment("backward", 1, 5),
    )
    found = moments_of("a", [trace_of("abb")], sizes.__getitem__)
    assert Moment("", 1, 0 + 10 + 3) in found  # the last backward of b but one
    assert Moment("backward", 0, 20) in found


@pytest.mark.parametrize("seed", range(20))
def test_moments_are_the_worst_whatever_a_call_holds(seed):
    chosen = random.Random(seed)
    trace = trace_of("".join(chosen.choice("aabc") for _ in range(12)) + "a")
    sizes = {g: Bytes(*(chosen.randrange(100) for _ in range(3))) for g in "abc"}
    moments = moments_of("a", [trace], sizes.__getitem__)
    for held in (0, 1, 7, 40, 1000):
        own = Bytes(chosen.randrange(100), held, chosen.randrange(100))
        with_own = {**sizes, "a": own}
        ours = (e for e in trace if e.runs == "a" or "a" in e.holding)
        assert own.peak(moments) == max(e.nbytes(with_own.__getitem__) for e in ours)


@pytest.mark.parametrize("peak", [900, 500, 320, 100])
def test_shares_fit_together(peak):
    trace = trace_of("abbbbc")
    least = {"a": Bytes(30, 10, 40), "b": Bytes(30, 10, 50), "c": Bytes(60, 10, 60)}
    most = {"a": Bytes(90, 50, 70), "b": Bytes(110, 100, 140), "c": Bytes(300, 200, 280)}
    share = shares(trace, least, most, peak)

    def taken(share: float) -> float:
        taken = {g: between(least[g], most[g], share) for g in least}
        return max(event.nbytes(taken.__getitem__) for event in trace)

    if share < 0:
        assert taken(0) > peak
    else:
        assert taken(share) <= peak
        assert share == 1 or taken(min(1, share + 0.02)) > peak


def test_beside_calls_that_hold_less_only_the_others_count():
    """Three calls of A, the first of which holds 5 bytes by another plan, and one of B between them."""
    trace = [
        Instant("forward", "A", {}),
        Instant("forward", "A", {"A": 1}),
        Instant("forward", "B", {"A": 2}),
        Instant("forward", "A", {"A": 2, "B": 1}),
        Instant("backward", "A", {"A": 2, "B": 1}),
        Instant("backward", "B", {"A": 2}),
        Instant("backward", "A", {"A": 1}, 100),
        Instant("backward", "A", {}, 1000),
    ]
    found = moments_of("A", [trace], lambda _: Bytes(7, 3, 9), (1, 5))
    # the last backward, beside 1000 bytes, is one of the call that holds less
    assert set(found) == {
        Moment("forward", 1, 8),
        Moment("backward", 0, 105),
        Moment("backward", 1, 8),
        Moment("", 1, 14),
    }


def test_the_latest_traces_have_one_of_each_graph():
    a, ab, b, c, other_c = (trace_of(graphs) for graphs in ("a", "ab", "b", "c", "cc"))
    assert latest([a, ab, b, c, other_c], 2) == [ab, b, c, other_c]
    assert latest([a, ab], 1) == [ab]
    assert latest([a, b, c], 3) == [a, b, c]
    with_loss = [a[0], Instant("", None, {"a": 1}, loss_bytes=1), a[1]]
    assert latest([with_loss, a], 1) == [a], "a loss is no graph"
