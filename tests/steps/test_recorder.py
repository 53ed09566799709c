"""The recorder of steps: where a step ends, which calls are left out, and what a trace says."""

from __future__ import annotations

import warnings

import pytest

from aot_hooks.errors import UnusedWarning
from aot_hooks.steps import recorder as recorders
from aot_hooks.steps.moments import instants_of
from aot_hooks.steps.recorder import Call, Event, Phase, Recorder, Step, Trace


class Steps:
    """Steps of calls "a", "b", ...; those that have ended are in `ended`."""

    def __init__(self) -> None:
        self.ended: list[Trace] = []
        self.recorder = Recorder("offload()", "they stay", UnusedWarning, lambda step: self.ended.append(step.trace()))

    def forward(self, what: str) -> Call:
        self.recorder.before_call()
        return self.recorder.saves(what)

    def backward(self, call: Call) -> bool:
        """As a budget notes it: when the backward has run, the call holds nothing."""
        found = self.recorder.reads(call)
        if found and self.recorder.step.release(call) and not self.recorder.step.holding:
            self.recorder.end()
        return found

    def train(self, graphs: str) -> None:
        for call in reversed([self.forward(graph) for graph in graphs]):
            self.backward(call)


def words(trace: Trace) -> str:
    """The events of a trace: "a b b' a'"."""
    marks = {Phase.FORWARD: "", Phase.BACKWARD: "'"}
    return " ".join(trace.calls[event.call] + marks[event.phase] for event in trace.events)


def test_a_step_ends_where_nothing_is_held() -> None:
    steps = Steps()
    steps.train("ab")
    assert [words(trace) for trace in steps.ended] == ["a b b' a'"], "at the end of its last backward"
    steps.train("ab")
    steps.train("a")
    assert steps.ended[0] == steps.ended[1] != steps.ended[2]


def test_a_step_that_is_released_by_the_garbage_collector_ends_at_the_next_call() -> None:
    steps = Steps()
    calls = [steps.forward("a"), steps.forward("a")]
    for call in reversed(calls):
        steps.recorder.reads(call)
        steps.recorder.drop(call)
    assert not steps.ended
    last = steps.forward("a")
    assert [words(trace) for trace in steps.ended] == ["a a a' a'"] and steps.ended[0].dropped == ()
    steps.recorder.drop(last)
    steps.forward("b")
    assert steps.ended[1] == Trace(("a",), (Event(Phase.FORWARD, 0),), ((0, 1),)), "no backward came"


def test_kept_calls_are_left_out_with_one_warning() -> None:
    steps = Steps()
    kept = [steps.forward("a"), steps.forward("b")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            steps.train("ab")
    assert not steps.ended
    with pytest.warns(UnusedWarning, match="2 calls of compiled graphs keep what they saved, and 16 others"):
        steps.train("ab")
    assert [words(trace) for trace in steps.ended] == ["a b b' a'"]
    again = steps.forward("a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        for _ in range(3):
            steps.train("ab")
    assert len(steps.ended) == 2, "after two more runs of the kept graph"
    assert kept and again


def test_calls_of_other_kinds_are_part_of_the_step_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "_MOST_AFTER", 50)
    steps = Steps()
    held = steps.forward("generator")
    for _ in range(24):
        steps.train("dd")
    assert not steps.ended and steps.backward(held)
    assert len(steps.ended[0].calls) == 49
    steps.forward("generator")
    with pytest.warns(UnusedWarning, match="1 calls of compiled graphs keep what they saved, and 50 others"):
        for _ in range(26):
            steps.train("dd")


def test_a_backward_of_what_was_left_out_raises_the_limit() -> None:
    steps = Steps()
    held = steps.forward("a")
    with pytest.warns(UnusedWarning, match="keep what they saved"):
        for _ in range(9):
            steps.train("a")
    assert not steps.backward(held) and steps.recorder.step.is_part
    steps.ended.clear()
    held = steps.forward("a")
    for _ in range(9):
        steps.train("a")
    assert not steps.ended and steps.backward(held), "it is of the step now"
    assert len(steps.ended[0].calls) == 10


def test_a_call_that_each_step_replaces_is_left_out() -> None:
    """As the output of an evaluation after each step, of which the last one is kept."""
    steps = Steps()
    kept = steps.forward("a")
    with pytest.warns(UnusedWarning, match="keep what they saved"):
        for _ in range(6):
            steps.train("a")
            last, kept = kept, steps.forward("a")
            steps.recorder.drop(last)
    assert steps.ended


def test_calls_that_are_dropped_together_are_no_end() -> None:
    """As the first stage of a pipeline, which runs once more than its backward, to learn its shapes."""
    steps = Steps()
    extra = [steps.forward("a") for _ in range(3)]
    calls = [steps.forward("a") for _ in range(6)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps.backward(calls.pop(0))
        for call in extra:
            steps.recorder.drop(call)
        calls.append(steps.forward("a"))
        for call in calls:
            steps.backward(call)
    (trace,) = steps.ended
    assert len(trace.calls) == 10 and [number for number, _ in trace.dropped] == [0, 1, 2]


def test_a_step_without_an_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "_MOST_EVENTS", 10)
    steps = Steps()
    with pytest.warns(UnusedWarning, match="keep what they saved"):
        calls = [steps.forward(str(i)) for i in range(25)]
    assert len(steps.recorder.step.events) == 5 and calls


def test_a_warning_that_is_an_error_leaves_a_step_of_its_own() -> None:
    steps = Steps()
    kept = steps.forward("a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UnusedWarning):
            for _ in range(9):
                steps.train("a")
    steps.train("a")
    assert [words(trace) for trace in steps.ended] == ["a a'"] and kept


@pytest.mark.parametrize(
    ("order", "nested"), [("a0 b0 b0' a0'", True), ("a0 b0 a0' b0'", True), ("a0 a1 a0' a1'", False)]
)
def test_a_trace_is_nested_if_each_graph_runs_backward_in_reverse(order: str, nested: bool) -> None:
    steps = Steps()
    calls = {}
    for word in order.split():
        if word.endswith("'"):
            steps.backward(calls[word[:-1]])
        else:
            calls[word] = steps.forward(word[0])
    (trace,) = steps.ended
    assert trace.is_nested(str) is nested


def test_instants_count_the_other_calls_that_hold_something() -> None:
    step = Step()
    recorder = Recorder("", "", UnusedWarning, lambda ended: None, step=step)
    first, dropped, last = (recorder.saves(what) for what in "aba")
    step.release(dropped)
    for call in (last, first):
        recorder.reads(call)
        step.release(call)
    found = instants_of(step.trace(), str, gradient_bytes=[0, 0, 0, 0, 7], gathered_bytes=1)
    assert [(i.phase, i.runs, i.holding) for i in found] == [
        ("forward", "a", {}),
        ("forward", "b", {"a": 1}),
        ("forward", "a", {"a": 1, "b": 1}),
        ("backward", "a", {"a": 1}),
        ("backward", "a", {}),
    ]
    assert [i.gradient_bytes for i in found] == [0, 0, 0, 0, 7] and {i.gathered_bytes for i in found} == {1}
