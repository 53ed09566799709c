"""Programs over captured functions, one for each way in which a tree could return wrong numbers; they raise `Wrong`."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from capture_simulator import Simulator
from steps import with_backward
from tree_programs import World, takes_list

from cudagraph import counters
from cudagraph.tree import dispatch
from cudagraph.tree.liveness import STALE
from cudagraph.tree.node import PROBED_CALLS

SIZE = 64


class Wrong(AssertionError):
    """What a program reads is not what eager mode has."""


def expect(world: World, got: torch.Tensor, expected: torch.Tensor) -> None:
    values = world.read(got)
    if values.shape != expected.shape or not torch.allclose(values, expected, rtol=1e-4, atol=1e-4):
        raise Wrong("other numbers than in eager mode")


def expect_stale(world: World, x: torch.Tensor) -> None:
    try:
        world.read(x)
    except RuntimeError as error:
        if STALE in str(error):
            return
        raise
    raise Wrong("memory that was reused reads without an error")


# --- scenarios -------------------------------------------------------------------------------------------------------


def moving_weight(world: World) -> None:
    f = world.function(lambda x, w: [x * w], static=(1,))
    weights = [world.randn(SIZE) for _ in range(2)]
    for i in [0, 0, 0, 1, 0, 1]:
        dispatch.mark_step_begin()
        x = world.randn(SIZE)
        expect(world, f(x, weights[i])[0], x * weights[i])


def buffer_that_is_left(world: World) -> None:
    f = world.function(lambda x: [x * 2])
    buffer = world.randn(SIZE)
    for step in range(PROBED_CALLS + 6):
        dispatch.mark_step_begin()
        x = world.randn(SIZE) if step == PROBED_CALLS + 4 else buffer.copy_(world.randn(SIZE))
        expect(world, f(x)[0], x * 2)


def new_inputs(world: World) -> None:
    f = world.function(lambda x, y: [x - y])
    for _ in range(4):
        dispatch.mark_step_begin()
        x, y = world.randn(SIZE), world.randn(SIZE)
        expect(world, f(x, y)[0], x - y)


def overlapping_input(world: World) -> None:
    f = world.function(lambda x: [x * 2])
    for _ in range(4):
        dispatch.mark_step_begin()
        x = world.randn(8).expand(8, 8)
        expect(world, f(x)[0], x * 2)
    if not counters.stats()["replays"]:
        raise Wrong("it could not be captured")


def other_numbers(world: World) -> None:
    f = world.function(lambda x, n: [x * n])
    for n in [2, 2, 2, 5, 2, 5]:
        dispatch.mark_step_begin()
        x = world.randn(SIZE)
        expect(world, f(x, n)[0], x * n)


def held_for_the_first_time(world: World) -> None:
    """`h` was dead when `g` was recorded, so `g` writes over it."""
    f = world.function(lambda x: [x.sin(), x.cos()])
    g = world.function(lambda c: [(c * 2).exp() + 1, c - 1])
    for hold in [False, False, False, True, True]:
        dispatch.mark_step_begin()
        x = world.randn(SIZE)
        h, c = f(x)
        if not hold:
            del h
        out = g(c)
        expect(world, out[0], (x.cos() * 2).exp() + 1)
        if hold:
            expect(world, h, x.sin())
            del h
        del c, out


@takes_list
def chain_that_reuses(inputs):
    (h,) = inputs
    inputs.clear()
    a = h * 2
    del h
    b = a.exp()
    del a
    return [b + 1, b - 1]


def given_away_then_kept(world: World) -> None:
    """`g` was recorded when nobody else held its input, whose memory it reuses."""
    f = world.function(lambda x: [x.sin()])
    g = world.function(chain_that_reuses)
    for keep in [False, False, False, True, True]:
        dispatch.mark_step_begin()
        x = world.randn(SIZE)
        h = f(x)
        kept = h[0] if keep else None
        out = g.call(h)
        expect(world, out[0], (x.sin() * 2).exp() + 1)
        if kept is not None:
            expect(world, kept, x.sin())
        del out, kept


def kept_while_recorded(world: World) -> None:
    """The input of `g` is held by the caller when `g` is recorded: its memory must not be reused."""
    f = world.function(lambda x: [x.sin()])
    g = world.function(chain_that_reuses)
    for _ in range(4):
        dispatch.mark_step_begin()
        x = world.randn(SIZE)
        (h,) = f(x)
        out = g(h)
        expect(world, out[0], (x.sin() * 2).exp() + 1)
        expect(world, h, x.sin())
        del h, out


def held_over(world: World) -> None:
    """Over 1, 2 and 7 later steps; itself, a view, an alias, a transpose."""
    f = world.function(lambda x: [x.view(8, 8).sin()])
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x,
        lambda x: x[1:],
        torch.Tensor.detach,
        torch.Tensor.t,
    ]
    for way, later in itertools.product(ways, (1, 2, 7)):
        dispatch.mark_step_begin()
        f(world.randn(SIZE))
        dispatch.mark_step_begin()
        kept = way(f(world.randn(SIZE))[0])
        for _ in range(later):
            dispatch.mark_step_begin()
            x = world.randn(SIZE)
            expect(world, f(x)[0], x.view(8, 8).sin())
        expect_stale(world, kept)


def held_over_and_fed_back(world: World) -> None:
    f = world.function(lambda h, x: [(h + x).sin(), (h - x).cos()])
    h = e = world.randn(SIZE)
    for _ in range(6):
        dispatch.mark_step_begin()
        x = world.randn(SIZE)
        h, other = f(h, x)
        expect(world, other, (e - x).cos())
        e = (e + x).sin()
        expect(world, h, e)
        del other


def held_over_as_copies(world: World) -> None:
    f = world.function(lambda x: [x.sin(), x.cos()], options={"held_outputs": "copy"})
    kept = []
    for _ in range(5):
        dispatch.mark_step_begin()
        x = world.randn(SIZE)
        a, b = f(x)
        kept += [(a[1:], x.sin()[1:]), (b, x.cos())]
        del a, b
        for ours, eager in kept:
            expect(world, ours, eager)


def branch_after_replay(world: World) -> None:
    """A second child is recorded after a replay, when the pool has to be as it was at the end of the first node."""
    f = world.function(lambda x: [x.sin(), x.cos()])
    g = world.function(lambda a: [a * 2, a * 3])
    k = world.function(lambda a: [a.exp(), a + 1, a + 2])
    for which in [g, g, g, k, k, g, k]:
        dispatch.mark_step_begin()
        x = world.randn(SIZE)
        a, b = f(x)
        out = which(a)
        expect(world, out[1], x.sin() * 3 if which is g else x.sin() + 1)
        expect(world, b, x.cos())
        expect(world, a, x.sin())
        del a, b, out


def pending_backward(world: World) -> None:
    """Two forwards wait for their backwards; a mark between them does not take away what they saved."""
    f = torch.compile(lambda x, w: torch.tanh(x * w), backend=world.backend())
    w = world.randn(SIZE, requires_grad=True)
    for _ in range(5):
        dispatch.mark_step_begin()
        w.grad = None
        x, y = world.randn(SIZE), world.randn(SIZE)
        first = f(x, w)
        dispatch.mark_step_begin()
        second = f(y, w)
        (first.sum() + 2 * second.sum()).backward()
        expected = (1 - torch.tanh(x * w) ** 2) * x + 2 * (1 - torch.tanh(y * w) ** 2) * y
        expect(world, w.grad, expected.detach())
        del first, second


def step_inside_of_a_backward(world: World) -> None:
    """A backward calls the path's first function again; a gradient of the same backward is still on its way."""
    g = world.function(lambda x: [x * 2, x * 3])

    twice = with_backward(lambda grad: g(grad)[0])
    for _ in range(5):
        x = world.randn(SIZE, requires_grad=True)
        y = twice(twice(x) * twice(x))
        kept = []
        y.register_hook(kept.append)
        (grad,) = torch.autograd.grad(y.sum(), x)
        expect(world, grad, 8 * x.detach())
        del y, grad, kept


def accumulated_gradients(world: World) -> None:
    f = torch.compile(lambda x, w: torch.tanh(x * w), backend=world.backend())
    w = world.randn(SIZE, requires_grad=True)
    expected = torch.zeros(SIZE, device=world.device)
    for i in range(9):
        x = world.randn(SIZE)
        f(x, w).sum().backward()
        expected += ((1 - torch.tanh(x * w) ** 2) * x).detach()
        expect(world, w.grad, expected)
        if i % 3 == 2:
            w.grad = None
            expected.zero_()


def write_to_the_caller(world: World) -> None:
    f = world.function(lambda x, y: [y.add_(x) * 2], mutated=(1,))
    for _ in range(4):
        dispatch.mark_step_begin()
        x, y = world.randn(SIZE), world.randn(SIZE)
        result = x + y
        f(x, y)
        expect(world, y, result)


def kept_by_the_function(world: World) -> None:
    """A tensor that is no output, but that somebody keeps: another recording would be given its memory."""
    leaked: list[torch.Tensor] = []

    def leaking(x):
        leaked.append(x * 3)
        return [x.sin(), leaked[-1] + 1]

    f = world.function(leaking)
    g = world.function(lambda x: [x.cos(), x.exp()])
    for _ in range(5):
        dispatch.mark_step_begin()
        x = world.randn(SIZE)
        out = f(x)
        again = g(out[0])
        expect(world, leaked[-1], x * 3)
        expect(world, out[1], x * 3 + 1)
        expect(world, again[1], x.sin().exp())
        del out, again


def streams(world: World) -> None:
    f = world.function(lambda x: [x.sin()])
    if not isinstance(world.driver, Simulator):
        return
    for stream in [0, 0, 1, 1, 0]:  # the launch that belongs to the recording counts
        world.driver.current_stream = stream
        dispatch.mark_step_begin()
        f(world.randn(SIZE))
    waits = [pair for pair in world.driver.ordered if pair[0] is not None]
    if waits != [(0, 1), (1, 0)]:
        raise Wrong(f"a stream did not wait for the one before it: {waits}")


def conjugated(world: World) -> None:
    f = world.function(lambda x: [(h := x * 2).conj(), h.conj().imag])
    for _ in range(4):
        dispatch.mark_step_begin()
        x = torch.view_as_complex(world.randn(8, 2))
        a, b = f(x)
        expect(world, a, 2 * x.conj())
        expect(world, b, 2 * x.conj().imag)
