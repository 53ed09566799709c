"""The tree against eager: warm up, record, replay, paths, steps. On the simulator, and with the same code on CUDA."""

from __future__ import annotations

import logging

import pytest
import torch
from tree_programs import World, same, steps
from tree_scenarios import chain_that_reuses

from cudagraph import counters
from cudagraph.tree import dispatch


@pytest.mark.core
def test_warm_up_record_replay(world):
    w = world.randn(4, 4)

    def fn(x, w):
        h = torch.tanh(x @ w)
        return [h, h @ w]

    f = world.function(fn, static=(1,))
    steps(world, f, fn, lambda: (world.randn(3, 4), w))
    counts = counters.stats()
    assert (counts["warmups"], counts["recordings"], counts["replays"]) == (1, 1, 2)
    assert counts["copies"] == 2  # one input a replay; the weight is read where it is


@pytest.mark.core
def test_a_chain_of_graphs_copies_nothing_between_them(world):
    f = world.function(lambda x: [x.sin()])
    g = world.function(lambda h: [h.cos(), h + 1])
    for _ in range(4):
        dispatch.mark_step_begin()
        x = world.randn(5)
        h = f(x)[0]
        same(world, g(h), [x.sin().cos(), x.sin() + 1])
        same(world, [h], [x.sin()])
    counts = counters.stats()
    assert (counts["recordings"], counts["replays"], counts["copies"]) == (2, 4, 2)


def test_outputs_of_every_kind(world):
    w = world.randn(4, 4)

    def fn(x, w, n, nothing):
        h = x + 1
        return [h, None, n, h[1:], h.t(), h, w, w[2:], x, x.new_empty(0, 3), h.sum()]

    f = world.function(fn, static=(1,))
    for _ in range(4):
        dispatch.mark_step_begin()
        x = world.randn(4, 4)
        out = f(x, w, 7, None)
        expected = fn(x, w, 7, None)
        same(world, out, expected)
        assert out[5] is out[0] and out[6] is w
        assert out[3].untyped_storage().data_ptr() == out[0].untyped_storage().data_ptr()
        assert out[7].untyped_storage().data_ptr() == w.untyped_storage().data_ptr()
        del out


def test_an_output_of_a_prior_graph_passes_through(world):
    f = world.function(lambda x: [x * 2, x * 3])
    g = world.function(lambda a, b: [a[1:], a + b])
    for _ in range(4):
        dispatch.mark_step_begin()
        x = world.randn(6)
        a, b = f(x)
        view, total = g(a, b)
        same(world, [view, total, a], [(x * 2)[1:], x * 5, x * 2])
        assert view.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()
        del a, b, view, total


@pytest.mark.core
def test_branches(world):
    f = world.function(lambda x: [x.sin()])
    g = world.function(lambda h: [h * 2])
    k = world.function(lambda h: [h.exp(), h])
    order = [0, 1, 0, 1, 1, 0, 0, 1]
    for branch in order:
        dispatch.mark_step_begin()
        x = world.randn(5)
        h = f(x)[0]
        same(world, (k if branch else g)(h), [x.sin().exp(), x.sin()] if branch else [x.sin() * 2])
    assert counters.stats()["recordings"] == 3


def test_liveness_makes_another_recording(world):
    """Whether `h` is still held when `g` runs decides whether its memory may be reused."""
    f = world.function(lambda x: [x.sin(), x.cos()])
    g = world.function(lambda c: [(c * 2).exp() + 1, c - 1])
    for hold in [True, True, False, False, True, False, True]:
        dispatch.mark_step_begin()
        x = world.randn(64)
        h, c = f(x)
        if not hold:
            del h
        out = g(c)
        same(world, [*out, c], [(x.cos() * 2).exp() + 1, x.cos() - 1, x.cos()])
        if hold:
            same(world, [h], [x.sin()])
            del h
        del out, c


def test_an_input_that_only_the_call_holds_lends_its_memory(world):
    """The graph reuses the memory of `h` if the call had the only reference, and not if the caller holds one."""

    f = world.function(lambda x: [x.sin()])
    g = world.function(chain_that_reuses)
    for keep in [False, False, False, True, True, False, True]:
        dispatch.mark_step_begin()
        x = world.randn(64)
        h = f(x)
        expected = (x.sin() * 2).exp()
        kept = h[0] if keep else None
        out = g.call(h)
        same(world, out, [expected + 1, expected - 1])
        if keep:
            same(world, [kept], [x.sin()])
        del out, kept


@pytest.mark.core
def test_a_static_input_moves_and_comes_back(world, caplog):
    fn = lambda x, w: [x @ w]  # noqa: E731
    f = world.function(fn, static=(1,), name="the function")
    weights = [world.randn(4, 4) for _ in range(2)]
    with caplog.at_level(logging.INFO, logger="cudagraph"):
        for i in [0, 0, 0, 1, 0, 1, 1]:
            dispatch.mark_step_begin()
            x = world.randn(3, 4)
            same(world, f(x, weights[i]), [x @ weights[i]])
    counts = counters.stats()
    assert (counts["recordings"], counts["rerecordings"], counts["replays"]) == (2, 1, 4)
    moved = [r.getMessage() for r in caplog.records if "moved" in r.getMessage()]
    assert len(moved) == 1
    for part in ("the function", "input 1", *(f"0x{w.data_ptr():x}" for w in weights)):
        assert part in moved[0]


@pytest.mark.parametrize("kind", ["expanded", "overlapping", "gaps", "transposed", "offset", "conjugate", "empty"])
def test_inputs_lie_as_they_lie(world, kind):
    def make():
        x = world.randn(24)
        return {
            "expanded": lambda: x[:4].view(1, 4).expand(3, 4),
            "overlapping": lambda: x.as_strided((4, 4), (2, 1)),
            "gaps": lambda: x.view(4, 6)[:, ::2],
            "transposed": lambda: x.view(4, 6).t(),
            "offset": lambda: x[5:].view(19),
            "conjugate": lambda: torch.view_as_complex(x.view(12, 2)).conj(),
            "empty": lambda: x[:0].view(0, 8)[:, :1].expand(0, 4),
        }[kind]()

    fn = lambda x: [x * 2, x]  # noqa: E731
    f = world.function(lambda x: [x * 2])
    for _ in range(4):
        dispatch.mark_step_begin()
        x = make()
        torch.testing.assert_close(world.read(f(x)[0]), fn(x)[0])


@pytest.mark.core
def test_random_numbers_are_fresh_and_follow_the_seed(world):
    def fn(x):
        return [torch.nn.functional.dropout(x, 0.5), torch.rand_like(x)]

    f = world.function(fn)
    x = torch.ones(64, device=world.device)
    f(x)
    dispatch.mark_step_begin()
    f(x)
    seen = []
    for _ in range(2):
        torch.manual_seed(3)
        for _ in range(3):
            dispatch.mark_step_begin()
            seen.append([world.read(y) for y in f(x)])
    torch.manual_seed(3)
    for got in seen[:3]:
        same(world, got, fn(x))
    for got, again in zip(seen[:3], seen[3:], strict=True):
        same(world, got, again)
    assert not torch.equal(seen[0][0], seen[1][0])


def test_generator_inputs(world):
    mine = torch.Generator(world.device)
    reference = torch.Generator(world.device)
    fn = lambda x, g: [x + torch.rand(x.shape, generator=g, device=x.device)]  # noqa: E731
    f = world.function(fn)
    for generator in (mine, reference):
        generator.manual_seed(5)
    for _ in range(5):
        dispatch.mark_step_begin()
        x = world.randn(16)
        same(world, f(x, mine), fn(x, reference))
    assert counters.stats()["replays"] >= 3


def test_inference_mode(world):
    f = world.function(lambda x: [x * 2])
    for i in range(6):
        dispatch.mark_step_begin()
        with torch.inference_mode(i % 2 == 0):
            x = world.randn(4)
            (y,) = f(x)
            torch.testing.assert_close(world.read(y), x * 2)
        if i > 0:  # what a replay gives may be used in autograd whatever the mode was
            w = torch.ones(4, device=world.device, requires_grad=True)
            (w * y).sum().backward()
        del y


def test_requires_grad_inputs_leave_no_history(world):
    f = world.function(lambda x: [x.detach() * 2])
    for _ in range(4):
        dispatch.mark_step_begin()
        x = world.randn(4, requires_grad=True)
        (y,) = f(x)
        assert not y.requires_grad
        torch.testing.assert_close(world.read(y), x.detach() * 2)
        del y


def test_outputs_are_new_tensors(world):
    """A caller's change to an output does not show in the next step."""
    f = world.function(lambda x: [x * 2])
    for _ in range(4):
        dispatch.mark_step_begin()
        (y,) = f(world.randn(2, 3))
        assert y.shape == (2, 3) and not y.requires_grad and not hasattr(y, "note")
        y.note = 1
        y.requires_grad_()
        y.detach().zero_().t_()
        del y


def test_warmup_steps(world):
    f = world.function(lambda x: [x + 1], options={"warmup_steps": 3})
    steps(world, f, lambda x: [x + 1], lambda: (world.randn(4),), count=5)
    counts = counters.stats()
    assert (counts["warmups"], counts["recordings"], counts["replays"]) == (3, 1, 1)
    assert set(counts) == set(counters.COUNTERS)


@pytest.mark.gpu
def test_offloaded_outputs():
    """A forward that leaves a tensor in pinned memory of the host, and a backward that fetches it."""
    dispatch.reset()
    world = World("cuda")

    def forward(x):
        packed = torch.empty(x.shape, pin_memory=True)
        packed.copy_(x.sin(), non_blocking=True)
        return [x * 2, packed]

    def backward(packed, g):
        return [packed.to(g.device, non_blocking=True) * g]

    f = world.function(forward, is_inference=False, saved_outputs=(1,))
    b = world.function(backward, static=(0,), is_inference=False, is_backward=True)
    for i in range(8):
        dispatch.mark_step_begin()
        x, g = world.randn(1 << 16), world.randn(1 << 16)
        y, packed = f(x)
        if i % 3 == 2:  # a second one in flight
            dispatch.mark_step_begin()
            z, packed_again = f(x + 1)
            same(world, b(packed_again, g), [(x + 1).sin() * g])
            del z, packed_again
        same(world, [y, *b(packed, g)], [x * 2, x.sin() * g])
        del y, packed
    counts = counters.stats()
    assert counts["skips"] == 0 and counts["rerecordings"] == 0
    dispatch.reset()


def test_numbers_that_compare_equal_are_not_the_same(world):
    f = world.function(lambda x, n: [x / n])
    g = world.function(lambda x, n: [x * n])
    k = world.function(lambda x, y: [x if y is None else x + y])
    x = world.randn(4)
    for n in [0.0, 0.0, 0.0, -0.0, 0.0]:
        dispatch.mark_step_begin()
        same(world, f(x, n), [x / n])
    i = torch.ones(3, dtype=torch.int64, device=world.device)
    for n in [2, 2, 2, 2.0, True, 2]:
        dispatch.mark_step_begin()
        same(world, g(i, n), [i * n])
    for y in [None, None, None, x, x, None]:
        dispatch.mark_step_begin()
        same(world, k(x, y), [x if y is None else x + y])
