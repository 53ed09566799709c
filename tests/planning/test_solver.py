"""The program that chooses under a peak, held against trying every choice."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest

from aot_hooks.planning.options import in_one_part
from aot_hooks.planning.program import MOST_OVER, Program, integer_solution
from aot_hooks.planning.solver import solve
from aot_hooks.planning.step import KEPT, RECOMPUTE, Moment, Option, Step, Value

MIB = 1 << 20


def brute_force(step: Step, peak: float, max_error: float = math.inf) -> float | None:
    """The shortest time of all choices whose live bytes stay under `peak`; None if there is none.

    Only for steps without sources: then every choice changes its own interval.
    """
    total = sum(v.nbytes for v in step.values)
    best = None
    for options in itertools.product(*([KEPT, *v.options] for v in step.values)):
        live = list(step.live)
        for value, option in zip(step.values, options, strict=True):
            if option is not KEPT:
                for p in range(value.gone, value.first):
                    live[p] -= value.nbytes - option.packed_bytes
        error = math.sqrt(sum(v.nbytes / total * o.error**2 for v, o in zip(step.values, options, strict=True)))
        if max(live) <= peak and error <= max_error:
            ms = step.ms_with(options)
            best = ms if best is None else min(best, ms)
    return best


def random_step(seed: int) -> Step:
    choose = random.Random(seed)
    count, length = choose.randint(1, 5), 24
    values, live = [], [choose.randint(0, 20) * MIB for _ in range(length)]
    for i in range(count):
        gone, first, nbytes = choose.randint(1, 10), choose.randint(12, 22), choose.randint(1, 40) * MIB
        options = [
            Option(f"hook {k}", object(), nbytes // choose.randint(2, 8), choose.random(), choose.random() / 10)
            for k in range(choose.randint(0, 3))
        ]
        if choose.random() < 0.5:
            options.append(Option(RECOMPUTE, ms=choose.random()))
        options = [dataclasses.replace(option, host_ms=choose.random()) for option in options]
        for p in range(gone, first + 1):
            live[p] += nbytes
        segment = choose.randint(11, first)
        values.append(Value((f"v{i}",), nbytes, gone, first, i, segment, tuple(options)))
    return Step(tuple(live), tuple(values), (10.0,), host_ms=choose.choice([0.0, 9.5, 10.0, 11.0]))


@pytest.mark.parametrize("seed", range(40))
def test_it_finds_what_trying_every_choice_finds(seed):
    step = random_step(seed)
    for share in (1.0, 0.8, 0.6, 0.4):
        peak = share * step.peak_bytes
        expected = brute_force(step, peak, max_error=0.05)
        found = solve(step, peak=peak, max_error=0.05)
        assert found.error <= 0.05 + 1e-6
        assert (found.peak_bytes <= peak + 1) == (expected is not None)
        if expected is not None:
            assert found.ms <= expected * 1.002 + 1e-3
        else:  # the least, or little more
            assert found.peak_bytes <= 1.01 * solve(step, peak=None, max_error=0.05).peak_bytes + 1
        # `under` gives up only where nothing, or nothing whole, stays under the peak
        below = solve(step, peak=peak, max_error=0.05, under=True)
        assert below == found if below is not None else expected is None
    assert solve(step, peak=0.7 * step.peak_bytes) == solve(step, peak=0.7 * step.peak_bytes)


def test_without_need_everything_is_kept():
    step = random_step(3)
    assert solve(step, peak=step.peak_bytes).options == (KEPT,) * len(step.values)


def test_of_equal_options_the_exact_one_is_taken():
    options = tuple(Option(name, object(), MIB, 1.0, error) for name, error in (("a", 0.1), ("b", 0.0), ("c", 0.1)))
    value = Value(("v",), 4 * MIB, 1, 3, options=options)
    step = Step((0, 4 * MIB, 4 * MIB, 0, 0), (value,), (1.0,))
    assert solve(step, peak=2 * MIB).options[0].name == "b"


def test_the_time_of_the_host_counts_where_the_device_waits_for_it():
    """Copies cost the device nothing and the host 0.4 ms each, to compute again costs both 0.1."""
    copy = Option("offload()", object(), 0, 0.0, host_ms=0.4)
    again = Option(RECOMPUTE, ms=0.1, host_ms=0.1)
    values = tuple(Value((f"v{i}",), 4 * MIB, 1, 3, i, 3, (copy, again)) for i in range(4))
    step = Step((0, 16 * MIB, 16 * MIB, 0, 0), values, (10.0,))

    def chosen(host_ms, **limits):
        found = solve(dataclasses.replace(step, host_ms=host_ms), peak=0.0, **limits)
        return sum(o is copy for o in found.options), sum(o is again for o in found.options), round(found.ms, 6)

    assert chosen(-math.inf) == chosen(8.4) == (4, 0, 10.0)
    assert chosen(9.2) == (2, 2, 10.2)  # 9.2 + 0.8 + 0.2
    assert chosen(10.0) == (0, 4, 10.4)
    assert dataclasses.replace(step, host_ms=12.0).ms == 12.0 and chosen(12.0) == (0, 4, 12.4)
    assert sum(chosen(12.0, max_ms=12.25)[:2]) == 2  # no time for more


def test_a_recomputation_brings_its_source_back_early():
    """To compute others again, `b` is read at 4, and it is made of `a`. Sent away until 6, `a` is back at 4, too."""
    away, recompute = Option("away", object(), 0, -1.0), Option(RECOMPUTE, ms=-1.0, sources=(0,))
    a = Value(("a",), 8 * MIB, 1, 6, 0, 4, (away,))
    b = Value(("b",), 8 * MIB, 2, 5, 0, 4, (recompute,))
    live = (0, 8 * MIB, 16 * MIB, 16 * MIB, 17 * MIB, 16 * MIB, 8 * MIB, 0)
    both = solve(Step(live, (a, b), (1.0,)), peak=32 * MIB)
    assert both.options == (away, recompute) and both.peak_bytes == 16 * MIB
    recompute = dataclasses.replace(recompute, sources=())
    alone = solve(Step(live, (a, dataclasses.replace(b, options=(recompute,))), (1.0,)), peak=32 * MIB)
    assert alone.options == (away, recompute) and alone.peak_bytes == 8 * MIB


def test_what_is_not_saved_is_saved_to_compute_another_from_it():
    """`small` is saved for `large` only, and costs its bytes; without it `large` can't be computed again."""
    save, again = Option("keep", packed_bytes=MIB), Option(RECOMPUTE, ms=1.0, sources=(1,))
    large = Value(("large",), 8 * MIB, 1, 4, 0, 4, (again,))
    small = Value(("small",), MIB, 1, 4, 0, 4, (save,), saved=False)
    step = Step((0, 8 * MIB, 8 * MIB, 8 * MIB, 8 * MIB, 0), (large, small), (1.0,))
    assert solve(step, peak=8 * MIB).options == (KEPT, KEPT)
    step = dataclasses.replace(step, live=(0, 8 * MIB, 12 * MIB, 8 * MIB, 8 * MIB, 0))
    found = solve(step, peak=9 * MIB)
    assert found.options == (again, save) and found.live == (0, MIB, 5 * MIB, MIB, 8 * MIB, 0)


def rounded_and_computed(exact=()):
    """Two values, where the second can be computed again from the first, which can be rounded."""
    rounded = Option("hook", object(), MIB // 2, 0.1, error=0.04)
    first = Value(("first",), MIB, 1, 6, 0, 5, (rounded,))
    second = Value(("second",), MIB, 1, 6, 0, 5, (Option(RECOMPUTE, ms=0.2, sources=(0,), exact=exact),))
    live = tuple(MIB * count for count in (0, 2, 2, 5, 2, 2, 2))
    return Step(live, (first, second), (10.0,))


def test_what_is_computed_from_a_rounded_value_is_wrong_as_well():
    step = rounded_and_computed()
    together = math.sqrt((0.04**2 + 4 * 0.04**2) / 2)  # each is half of the bytes, the second twice as wrong
    found = solve(step, peak=3.5 * MIB, max_error=together + 1e-6)
    assert [o.name for o in found.options] == ["hook", RECOMPUTE]
    assert found.error == pytest.approx(together)
    less = solve(step, peak=None, max_error=together - 1e-3)
    assert [o.name for o in less.options] == ["keep", RECOMPUTE] and less.error == 0


def test_what_must_be_exact_to_compute_another_from_it_is_not_rounded():
    found = solve(rounded_and_computed(exact=(0,)), peak=None, max_error=1.0)
    assert [o.name for o in found.options] == ["keep", RECOMPUTE]


def test_values_that_a_deep_residual_network_computes_from_each_other():
    count = 400
    rounded = Option("hook", object(), MIB // 2, 0.1, error=0.04)
    again = [Option(RECOMPUTE, ms=0.2, sources=(v - 1, v - 2)) for v in range(2, count)]
    options = [(rounded,), (rounded,), *((rounded, option) for option in again)]
    values = tuple(Value((f"v{v}",), MIB, 1, 6, 0, 5, options[v]) for v in range(count))
    live = tuple(MIB * nbytes for nbytes in (0, count, count, 2 * count, count, count, count))
    found = solve(Step(live, values, (10.0,)), peak=1.5 * count * MIB, max_error=0.05)
    assert found.peak_bytes <= 1.5 * count * MIB + 1 and found.error <= 0.05


def test_a_chain_over_two_segments_is_cut():
    """A source in another segment must be there, so only one of the two is recomputed."""
    recompute = Option(RECOMPUTE, ms=1.0)
    a = Value(("a",), 8 * MIB, 1, 6, 1, 6, (recompute,))
    b = Value(("b",), 8 * MIB, 1, 4, 0, 4, (dataclasses.replace(recompute, sources=(0,)),))
    step = Step((0, 16 * MIB, 16 * MIB, 16 * MIB, 16 * MIB, 8 * MIB, 8 * MIB, 0), (a, b), (1.0,))
    found = solve(step, peak=None)
    assert [o.name for o in found.options].count("recompute") <= 1
    one = in_one_part(step)
    assert [(v.segment, v.begin) for v in one.values] == [(0, 4), (0, 4)], (
        "b may be computed from a, so a is read early"
    )


def test_the_link_bounds_what_is_sent():
    """Four values of 8 MiB are made a millisecond apart, and read again in the opposite order."""
    options = (Option("offload()", object(), 0, 0.0, link_bytes=8 * MIB),)
    values = tuple(Value((f"v{i}",), 8 * MIB, i + 1, 11 - i, options=options) for i in range(4))
    live = (0, *(8 * MIB * n for n in (1, 2, 3, 4, 4, 4, 4, 3, 2, 1)), 0)
    times = (1.0,) * len(live)

    def sent(rate: float, length: int = 12) -> int:
        step = Step(live, values, times[:length], 6, to_host=rate, to_device=rate)
        return sum(o is not KEPT for o in solve(step, peak=None).options)

    # 8 MiB take 0.008, 3 and 8 ms; the peak is 8 MiB as each is made, so one may stay
    assert (sent(1e12), sent(3e9), sent(1e9)) == (3, 1, 0)


def test_bytes_that_wait_for_the_link_are_alive():
    """The link takes 2 ms for the value, which is gone from position 1 on: until 3 a part of it waits."""
    option = Option("offload()", object(), 0, 0.0, link_bytes=8 * MIB)
    value = Value(("v",), 8 * MIB, 1, 9, options=(option,))
    live, rate = tuple(n * MIB for n in (0, 8, 8, 8, 16, 16, 8, 8, 8, 8, 0)), 8 * MIB / 2e-3 / 0.89
    groups = (Value((), 1, p, 9, options=()) for p in (2, 3, 4, 8))  # so that these are looked at
    step = Step(live, (value, *groups), (1.0,) * 11, 6, to_host=rate, to_device=1e12)
    found = solve(step, peak=None)
    assert found.options[0] is option
    assert [round(n / MIB, 3) for n in found.live] == [0, 8, 4, 0, 8, 8, 0, 0, 8, 8, 0]  # back for 9, from 8 on


@pytest.mark.parametrize("live", [(), (0,), (5 * MIB,)])
def test_a_step_that_saves_nothing(live):
    step = Step(live, (), (1.0,))
    assert solve(step, peak=5 * MIB).options == ()
    assert solve(step, peak=4 * MIB).peak_bytes == step.peak_bytes


@pytest.mark.slow
def test_many_equal_layers_that_are_decided_together_are_solved_quickly():
    """Not timed: that it ends at all, with every value decided, is what is asserted."""
    layers, per_layer = 90, 6
    values, live = [], [0] * (2 * layers * per_layer + 2)
    count = layers * per_layer
    for i in range(count):
        gone, first = i + 1, 2 * count - i
        options = tuple(
            Option(n, object(), size * MIB, ms, e)
            for n, size, ms, e in (
                ("float8()", 4, 0.02, 0.032),
                ("int4()", 2, 0.03, 0.165),
                ("lossless()", 6, 0.03, 0.0),
            )
        )
        sources = (i - 1,) if i % per_layer else ()
        values.append(
            Value(
                (f"v{i}",),
                8 * MIB,
                gone,
                first,
                i // per_layer,
                2 * count - (i // per_layer + 1) * per_layer + 1,
                (*options, Option(RECOMPUTE, ms=0.1 + 0.05 * (i % 3), sources=sources)),
            )
        )
        for p in range(gone, first + 1):
            live[p] += 8 * MIB
    step = Step(tuple(live), tuple(values), (100.0,))
    found = solve(step, peak=0.5 * step.peak_bytes, max_error=0.05)
    assert found is not None and found.peak_bytes <= 0.5 * step.peak_bytes + 1


def test_the_lowest_peak_of_a_large_step_is_near_that_of_the_relaxed_program():
    """More than 300 choices: the first whole choice is taken, and the same again."""
    choose, count = random.Random(5), 120
    values, live = [], [0] * (2 * count + 2)
    for i in range(count):
        nbytes = choose.randint(1, 40) * MIB
        options = tuple(
            Option(f"hook {k}", object(), nbytes // divisor, choose.random(), 0.03 * k)
            for k, divisor in enumerate((2, 4, 8))
        )
        values.append(Value((f"v{i}",), nbytes, i + 1, 2 * count - i, options=options))
        for p in range(i + 1, 2 * count - i + 1):
            live[p] += nbytes
    step = Step(tuple(live), tuple(values), (100.0,))
    found = solve(step, peak=None, max_error=0.05)
    smallest = sum(v.nbytes // 8 for v in values)
    assert smallest <= found.peak_bytes < 0.4 * step.peak_bytes and found.error <= 0.05 + 1e-6
    assert found.peak_bytes <= 1.01 * solve(step, peak=found.peak_bytes / 1.01, max_error=0.05).peak_bytes
    assert found == solve(step, peak=None, max_error=0.05)


def test_a_program_of_few_columns_is_solved_whole_once(monkeypatch):
    """Its whole choice is the same each time, however far it is from the relaxed program."""
    program = Program()
    values = [[program.column(0, 1, 1.0)] for _ in range(3)]
    program.over = program.column(0, 0)
    program.row(dict.fromkeys(range(3), 2.0), 3.0, 6.0)  # one and a half of them; two, if they are whole
    calls = []
    monkeypatch.setattr(
        Program, "solved", lambda self, whole, solved=Program.solved: calls.append(whole) or solved(self, whole)
    )
    found = integer_solution(program, [0.5, 0.5, 0.5, 0.0], values, 0.0)
    assert calls == [3] and round(program.objective(found)) == 2


def test_a_large_step_with_values_that_have_no_options():
    """Others are computed again from each of these, as from the mask of a T5's attention."""
    count = 200
    values, live = [], [0] * (2 * count + 2)
    for i in range(count):
        computed = Option(RECOMPUTE, ms=0.1, sources=(i - 1,))
        hooks = [Option(f"hook {k}", object(), 8 * MIB // k, 0.1 * k, 0.01 * k) for k in (2, 4, 8)]
        options = (*hooks, computed) if i % 2 else ()
        values.append(Value((f"v{i}",), 8 * MIB, i + 1, 2 * count - i, i // 2, 2 * count - i - 1, options))
        for p in range(i + 1, 2 * count - i + 1):
            live[p] += 8 * MIB
    step = Step(tuple(live), tuple(values), (100.0,))
    assert step.peak_bytes == count * 8 * MIB
    found = solve(step, peak=0.6 * step.peak_bytes, max_error=0.05)
    assert found is not None and found.peak_bytes <= 0.6 * step.peak_bytes + 1
    assert all(option is KEPT for option in found.options[::2])


@pytest.mark.parametrize("seed", range(3))
def test_large_steps_stay_under_peaks_that_can_be_reached(seed):
    """Hundreds of choices, some with work beside bytes that wait for the link; less time with more bytes."""
    choose, count = random.Random(seed), 100
    values, live = [], [MIB] * (2 * count + 2)
    for i in range(count):
        nbytes, ms = choose.choice((16, 32, 64)) * MIB, choose.uniform(0.01, 0.1)
        half = nbytes // 2
        options = (
            Option("float8()", object(), half, ms, 0.032, work_bytes=nbytes),
            Option("int8()", object(), half + MIB // 2, 2 * ms, 0.01, work_bytes=nbytes + MIB),
            Option("offload(then=float8())", object(), 0, 1.5 * ms, 0.032, link_bytes=half, work_bytes=nbytes + half),
            Option(RECOMPUTE, ms=choose.uniform(0.05, 1.0)),
        )
        values.append(Value((f"v{i}",), nbytes, i + 1, 2 * count - i, i, 2 * count - i, options))
        for p in range(i + 1, 2 * count - i + 1):
            live[p] += nbytes
    step = Step(tuple(live), tuple(values), (1.0,) * len(live), count + 1, to_host=1.5e10, to_device=1.5e10)
    least = solve(step, peak=None, max_error=0.05).peak_bytes
    peaks = [least + share * (step.peak_bytes - least) for share in (0.1, 0.3, 0.6)]
    found = [solve(step, peak=peak, max_error=0.05) for peak in peaks]
    for peak, solution in zip(peaks, found, strict=True):
        assert solution.peak_bytes <= peak + 1 and solution.error <= 0.05 + 1e-6
    first, second, third = (solution.ms for solution in found)
    assert third <= 1.002 * second <= 1.002**2 * first


def test_what_is_fetched_for_a_fused_reader_is_alive_while_that_reads():
    live = [10 * MIB, 40 * MIB, 40 * MIB, 40 * MIB, 40 * MIB, 0]
    sent = Option("offload(then=float8())", object(), 0, link_bytes=20 * MIB, in_registers=True)
    value = Value(("v",), 40 * MIB, 1, 3, 3, 3, (sent,), last=4)
    step = Step(tuple(live), (value,), (1.0,) * 6, 2)
    assert solve(step, peak=None).live[3:] == (20 * MIB, 20 * MIB, 0)


def test_what_waits_to_be_sent_does_not_count_for_other_calls():
    """8 MiB are sent during the last 8 ms of the forward, so they are still there when these begin, for one call."""
    away = Option("offload()", object(), 0, link_bytes=8 * MIB)
    value = Value(("v",), 8 * MIB, 2, 5, begin=5, options=(away,))
    live = (0, 8 * MIB, 10 * MIB, 10 * MIB, 10 * MIB, 8 * MIB)  # the forward leaves 2 MiB more
    step = Step(live, (value,), (1.0, 1.0, 8.0, 4.0, 4.0, 8.0), 3, 2e9, 2e9)
    step = dataclasses.replace(step, moments=(Moment("forward", 9), Moment("backward", 9)))
    found = solve(step, peak=30.0 * MIB)
    assert found.options == (away,)
    assert found.peak_bytes == 9 * 2 * MIB + 10 * MIB  # nine others hold 2 MiB each


def waiting_step(layers: int, per_layer: int, *, copies: bool) -> Step:
    """A step in which the device waits for the host, so that what options cost it hardly counts."""
    choose = random.Random(0)
    alike = [
        (choose.choice((1, 4, 4, 14)), choose.choice((0.0, 0.0, 0.046, 0.092)), choose.sample(range(1, per_layer), 2))
        for _ in range(per_layer)
    ]
    count, values = layers * per_layer, []
    live = [0] * (2 * count + 2)
    for i in range(count):
        layer, k = divmod(i, per_layer)
        size, cast_ms, back = alike[k]
        nbytes, first, begin = size * MIB, 2 * count - i, 2 * count - (layer + 1) * per_layer + 1
        options = [Option("float8()", object(), nbytes // 2, 0.002, 0.03, host_ms=cast_ms)]
        if copies:
            options.append(Option("offload()", object(), 0, 0.005, link_bytes=nbytes, host_ms=0.68))
        if sources := tuple(i - b for b in back if i >= b):
            options.append(Option(RECOMPUTE, ms=0.01, host_ms=0.046, sources=sources))
        values.append(Value((f"v{i}",), nbytes, i + 1, first, layer, begin, tuple(options), last=first))
        for p in range(i + 1, first + 1):
            live[p] += nbytes
    return Step(tuple(live), tuple(values), (8.0 / len(live),) * len(live), count + 1, 5e10, 5e10, host_ms=16.0)


@pytest.mark.slow
def test_more_means_are_no_slower_where_the_device_waits_for_the_host() -> None:
    many, few = (waiting_step(8, 16, copies=copies) for copies in (True, False))
    peak = 0.35 * many.peak_bytes
    more, less = (solve(step, peak=peak, max_error=0.02) for step in (many, few))
    assert max(more.peak_bytes, less.peak_bytes) <= peak + 1
    assert more.ms <= 1.01 * less.ms


def peaks_program(count: int) -> tuple[Program, list[list[int]]]:
    """`count` values of 10 MiB and as many positions, at each of which three of them are alive, 9 MiB over the peak.

    A value may be stored in 8 MiB for 1 ms, or in 5 for 3. A continuous column carries what that saves.
    """
    p = Program()
    choices = [[p.column(0, 1, ms) for ms in (1.0, 3.0)] for _ in range(count)]
    p.over = p.column(cost=1000.0)
    for own in choices:
        p.row(dict.fromkeys(own, 1.0), 0, 1)
    saved = [p.column(-float("inf")) for _ in choices]
    for (small, smaller), delta in zip(choices, saved, strict=True):
        p.row({delta: -1.0, small: -2.0, smaller: -5.0}, 0, 0)
    for k in range(count):
        p.row({saved[(k + i) % count]: 1.0 for i in range(3)} | {p.over: -1.0}, -float("inf"), 21 - 30.0)
    return p, choices


def test_a_peak_that_many_positions_share_is_met() -> None:
    """No part of the values alone lowers the highest of 120 equal positions."""
    p, choices = peaks_program(120)
    columns = [c for own in choices for c in own]
    relaxed = p.solved(0)
    found = integer_solution(p, relaxed, choices, peak=21.0)
    assert found[p.over] <= MOST_OVER
    assert all(abs(found[c] - round(found[c])) < 1e-6 for c in columns)
    assert p.objective(found) <= 1.02 * p.objective(relaxed)
