"""What begins a step: programs that must just work, and the rows of the table in steps.py.

Eager code reads what graphs gave out. On a torch that can't make such a read fail, the simulator's memory is garbage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from capture_simulator import Simulator
from places import backend_with
from tree_programs import same

import cudagraph
from cudagraph import counters
from cudagraph.torch_private import cuda as torch_cuda
from cudagraph.tree import dispatch
from cudagraph.tree.liveness import STALE
from cudagraph.tree.steps import REPEATS

NEEDS_MOVING = pytest.mark.skipif(
    not torch_cuda.can_swap(), reason="this torch can't point a storage elsewhere on the CPU"
)


def needs_moving(place):
    """Skips if outputs that a later step reads can't be copied out; on CUDA every torch can."""
    if place.driver is not None and not place.driver.can_move:
        pytest.skip("this torch can't move a storage on the CPU")


@dataclasses.dataclass
class Place:
    device: torch.device
    driver: Any
    inner: str

    def compiled(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return torch.compile(fn, backend=backend_with(self.driver, {"inner": self.inner, **options}))

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device=self.device)


@pytest.fixture(
    params=[
        "simulator",
        pytest.param("cuda aten", marks=pytest.mark.gpu),
        pytest.param("cuda inductor", marks=[pytest.mark.gpu, pytest.mark.slow]),
    ]
)
def place(request) -> Iterator[Place]:
    cudagraph.reset()
    if request.param == "simulator":
        yield Place(torch.device("cpu"), Simulator(), "aten")
    else:
        yield Place(torch.device("cuda"), None, request.param.split()[1])
    cudagraph.reset()


def cube(x):
    torch._dynamo.graph_break()
    return x * x * x


def chained(x):
    y = cube(x)
    return y + cube(y)


def two_outputs(x):
    torch._dynamo.graph_break()
    return x.sin(), x.cos()


def chained_with_more(x):
    a, b = two_outputs(x)
    c, d = two_outputs(a)
    return a + b + c + d


def siamese(x):
    return cube(x) * cube(x + 1) * cube(x + 2)


def in_a_loop(x):
    total = x
    for _ in range(5):
        total = total + cube(x.cos())
    return total


FRAMES = [chained, chained_with_more, siamese, in_a_loop]


@pytest.mark.core
@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("grad", [False, True])
def test_a_frame_with_graph_breaks_calls_one_function_again(place, frame, grad):
    compiled = place.compiled(frame)
    for _ in range(8):
        x = place.randn(4, 4).requires_grad_(grad)
        expected = frame(x)
        got = compiled(x)
        torch.testing.assert_close(got, expected)
        if grad:
            (wanted,) = torch.autograd.grad(expected.sum(), x)
            (found,) = torch.autograd.grad(got.sum(), x)
            torch.testing.assert_close(found, wanted)
    counts = cudagraph.stats()
    assert counts["skips"] == 0 and counts["replays"] >= counts["recordings"], counts


def test_calls_of_one_frame_are_one_path(place):
    """As torch's trees have it: nothing is copied between them."""
    compiled = place.compiled(chained)
    with torch.no_grad():
        for _ in range(6):
            x = place.randn(4, 4)
            torch.testing.assert_close(compiled(x), chained(x))
    (mine,) = [t for t in dispatch.local.trees.values() if t.root.children]
    (first,) = [node for children in mine.root.children.values() for node in children]
    path = [first, *first.recordings()]
    assert len(path) == 3 and path[0].function is path[1].function is not path[2].function
    assert cudagraph.stats()["held_outputs"] == 0


@pytest.mark.parametrize("marked_first", [False, True])
def test_eager_code_calls_one_function_again(place, marked_first):
    """Each call begins a step, and its inputs from the step before stay valid for good."""
    needs_moving(place)
    if marked_first:
        cudagraph.mark_step_begin()
        cudagraph.reset()  # which forgets that
    f = place.compiled(lambda x: x * x * x)
    kept = []
    with torch.no_grad():
        for _ in range(6):
            x = place.randn(4)
            y = f(x)
            z = f(y)
            kept.append((y, x**3))
            torch.testing.assert_close(y + z, x**3 + x**9)
            for ours, eager in kept:
                torch.testing.assert_close(ours + 0, eager)
            del z
    assert cudagraph.stats()["recordings"] == 1


@pytest.mark.core
@pytest.mark.parametrize("before", ["f", "g"])
def test_views_and_siblings_of_what_a_call_reads(place, before):
    """The function before the loop is also the loop's second one, or its first. No output is stale in its own step."""
    needs_moving(place)
    f = place.compiled(lambda x: (x.sin(), x.cos()))
    g = place.compiled(lambda h: h.exp() + 1)
    with torch.no_grad():
        x = place.randn(2, 3)
        _ = g(x) if before == "g" else f(x)
        for _ in range(3 * REPEATS):
            x = place.randn(2, 3)
            h, sibling = f(x)
            out = g(h)
            torch.testing.assert_close(h.view(-1) + 0, x.sin().view(-1))
            torch.testing.assert_close(sibling + out, x.cos() + x.sin().exp() + 1)
    counts = cudagraph.stats()
    assert counts["skips"] == 0 and counts["recordings"] <= 6 and counts["warmups"] <= 4, counts


def test_a_function_that_is_compiled_in_the_middle_of_a_loop(place):
    """It warms up in the step of the function before it, which still begins the next one."""
    needs_moving(place)
    f = place.compiled(lambda x: (x.sin(), x.cos()))
    g = None
    with torch.no_grad():
        for step in range(12):
            x = place.randn(2, 3)
            h, sibling = f(x)
            if step >= 4:
                g = g or place.compiled(lambda h: h.exp() + 1)
                torch.testing.assert_close(g(h) + sibling + h, x.sin().exp() + 1 + x.cos() + x.sin())
    (mine,) = [t for t in dispatch.local.trees.values() if t.root.children]
    assert len(mine.root.children) == 1 and cudagraph.stats()["recordings"] == 2


def test_a_loop_that_begins_with_a_new_function(place):
    """Nothing shows that it belongs to the step before: when it comes again, it begins a step."""
    f = place.compiled(lambda x: x.sin())
    g = place.compiled(lambda x: x.cos())
    h = place.compiled(lambda x: x.exp())
    with torch.no_grad():
        for _ in range(4):
            a, b = f(place.randn(3)), g(place.randn(3))
            a = a + b
        for _ in range(6):
            x, y = place.randn(3), place.randn(3)
            a = h(x)
            b = f(y)
            torch.testing.assert_close(a + b, x.exp() + y.sin())


def test_a_loop_inside_of_one_compiled_call_is_captured(place):
    """For Dynamo it is one call, however long. After some repetitions each turn of its loop is a step."""
    needs_moving(place)

    def body(x):
        torch._dynamo.graph_break()
        return x.sin() * 2

    def loop(xs, check):
        for x in xs:
            out = body(x)
            check(out, x.sin() * 2)

    compiled = place.compiled(loop)
    with torch.no_grad():
        compiled([place.randn(3) for _ in range(200)], torch.compiler.disable(torch.testing.assert_close))
    counts = cudagraph.stats()
    assert counts["skips"] == 0 and counts["recordings"] <= REPEATS and counts["replays"] > 150, counts


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        torch._dynamo.graph_break()
        return torch.tanh(x @ self.weight)


def test_layers_of_one_shape_in_one_compiled_call():
    """One graph and more sets of parameters than the repetitions that make a loop."""
    cudagraph.reset()
    driver = Simulator()
    layers = torch.nn.ModuleList(Block() for _ in range(2 * REPEATS))

    def run(x):
        skipped = []
        for layer in layers:
            x = layer(x)
            skipped.append(x)
        return torch.stack(skipped)

    compiled = torch.compile(run, backend=backend_with(driver))
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(2, 4)
            torch.testing.assert_close(driver.read(compiled(x)), run(x))
    assert cudagraph.stats()["skips"] == 0 and cudagraph.stats()["replays"] >= 3 * len(layers)
    cudagraph.reset()


# --- the rows of the table ---


def expect_stale(world, x):
    with pytest.raises(RuntimeError, match=STALE):
        world.read(x)


@pytest.mark.parametrize("row", ["nothing held", "first", "other functions only", "another, all its own"])
def test_a_function_that_comes_again(simulated, row):
    world = simulated
    f, g = world.function(lambda x: [x.sin()]), world.function(lambda x: [x.cos()])
    for _ in range(4):
        x = world.randn(4)
        (a,) = f(x)
        (b,) = g(x)
        if row == "nothing held":
            del a, b
            same(world, f(x), [x.sin()])
        elif row == "first":
            same(world, f(x), [x.sin()])
            if _ > 1:
                expect_stale(world, a), expect_stale(world, b)
        elif row == "other functions only":
            for _ in range(3):  # `a` is no output of `g`, and is not taken away by it
                same(world, g(x), [x.cos()])
            same(world, [a], [x.sin()])
        else:
            del a
            same(world, g(x), [x.cos()])
        a = b = None


@NEEDS_MOVING
@pytest.mark.parametrize("feeds", ["itself", "another"])
def test_a_recurrence_is_recorded_once_a_function(simulated, feeds):
    world = simulated
    f = world.function(lambda h, x: [torch.tanh(h + x)])
    g = world.function(lambda h: [h * 2 - 1])
    h = e = world.randn(4)
    for _ in range(4 * REPEATS):
        x = world.randn(4)
        (h,) = f(h, x)
        e = torch.tanh(e + x)
        if feeds == "another":
            (h,) = g(h)
            e = e * 2 - 1
        same(world, [h], [e])
    counts = counters.stats()
    assert counts["recordings"] <= 4 and counts["skips"] == 0, counts


@NEEDS_MOVING
def test_what_every_call_reads_is_moved_out_once(simulated):
    """An encoder runs once, a decoder again and again: steps begin with the decoder, and read ordinary memory."""
    world = simulated
    encode, decode = world.function(lambda x: [x.sin()]), world.function(lambda e, t: [e * t])
    for _ in range(2):
        x = world.randn(4)
        (e,) = encode(x)
        for _ in range(3 * REPEATS):
            t = world.randn(4)
            same(world, [*decode(e, t), e], [x.sin() * t, x.sin()])
    counts = counters.stats()
    assert counts["recordings"] <= 6 and counts["skips"] == 0, counts
