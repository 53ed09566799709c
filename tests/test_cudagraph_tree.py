"""The tree against eager: warm up, record, replay, paths, steps. On the simulator, and with the same code on CUDA."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from tree_programs import World, takes_list

from cudagraph import _compat, counters, tree
from cudagraph.errors import NotCapturableError, OptionError, StaleOutputError
from cudagraph.options import Options


@pytest.fixture(params=["simulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request):
    tree.reset()
    yield World(request.param)
    tree.reset()


def same(world, got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
            torch.testing.assert_close(world.read(a), b, rtol=1e-5, atol=1e-5)
        else:
            assert a == b


def steps(world, f, eager, arguments, count=4):
    """Call `f` in `count` steps, nothing held from one to the next."""
    for _ in range(count):
        tree.mark_step_begin()
        xs = arguments()
        same(world, f(*xs), eager(*xs))


@pytest.mark.core
def test_warm_up_record_replay(world):
    w = world.randn(4, 4)

    def fn(x, w):
        h = torch.tanh(x @ w)
        return [h, h @ w]

    f = world.function(fn, static=(1,))
    steps(world, f, fn, lambda: (world.randn(3, 4), w))
    counts = tree.stats()
    assert (counts["warmups"], counts["recordings"], counts["replays"]) == (1, 1, 2)
    assert counts["copies"] == 2  # one input a replay; the weight is read where it is


@pytest.mark.core
def test_a_chain_of_graphs_copies_nothing_between_them(world):
    f = world.function(lambda x: [x.sin()])
    g = world.function(lambda h: [h.cos(), h + 1])
    for _ in range(4):
        tree.mark_step_begin()
        x = world.randn(5)
        h = f(x)[0]
        same(world, g(h), [x.sin().cos(), x.sin() + 1])
        same(world, [h], [x.sin()])
    counts = tree.stats()
    assert (counts["recordings"], counts["replays"], counts["copies"]) == (2, 4, 2)


def test_outputs_of_every_kind(world):
    w = world.randn(4, 4)

    def fn(x, w, n, nothing):
        h = x + 1
        return [h, None, n, h[1:], h.t(), h, w, w[2:], x, x.new_empty(0, 3), h.sum()]

    f = world.function(fn, static=(1,))
    for _ in range(4):
        tree.mark_step_begin()
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
        tree.mark_step_begin()
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
        tree.mark_step_begin()
        x = world.randn(5)
        h = f(x)[0]
        same(world, (k if branch else g)(h), [x.sin().exp(), x.sin()] if branch else [x.sin() * 2])
    assert tree.stats()["recordings"] == 3


def test_liveness_makes_another_recording(world):
    """Whether `h` is still held when `g` runs decides whether its memory may be reused."""
    f = world.function(lambda x: [x.sin(), x.cos()])
    g = world.function(lambda c: [(c * 2).exp() + 1, c - 1])
    for hold in [True, True, False, False, True, False, True]:
        tree.mark_step_begin()
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
    """The memory of `h` is reused inside of the graph when it is given away, and not when it is kept."""

    @takes_list
    def consume(inputs):
        (h,) = inputs
        inputs.clear()
        a = h * 2
        del h
        b = a.exp()
        del a
        c = b + 1
        del b
        return [c * 3]

    f = world.function(lambda x: [x.sin()])
    g = world.function(consume)
    for keep in [False, False, False, True, True, False, True]:
        tree.mark_step_begin()
        x = world.randn(64)
        h = f(x)
        expected = ((x.sin() * 2).exp() + 1) * 3
        kept = h[0] if keep else None
        out = g.call(h)
        same(world, out, [expected])
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
            tree.mark_step_begin()
            x = world.randn(3, 4)
            same(world, f(x, weights[i]), [x @ weights[i]])
    counts = tree.stats()
    assert (counts["recordings"], counts["rerecordings"], counts["replays"]) == (2, 1, 4)
    moved = [r.getMessage() for r in caplog.records if "moved" in r.getMessage()]
    assert len(moved) == 1
    for part in ("the function", "input 1", *(f"0x{w.data_ptr():x}" for w in weights)):
        assert part in moved[0]


def test_too_many_addresses(world, caplog):
    f = world.function(lambda x, w: [x @ w], static=(1,), options={"rerecord_limit": 2})
    weights = [world.randn(4, 4) for _ in range(5)]
    with caplog.at_level(logging.WARNING, logger="cudagraph"):
        for i in [0, 0, 1, 2, 3, 4, 3, 0, 1, 2]:
            tree.mark_step_begin()
            x = world.randn(3, 4)
            same(world, f(x, weights[i]), [x @ weights[i]])
    counts = tree.stats()
    assert (counts["recordings"], counts["replays"], counts["skips"]) == (3, 3, 3)
    assert len([r for r in caplog.records if "rerecord_limit" in r.getMessage()]) == 1


def test_sizes(world, caplog):
    f = world.function(lambda x, n: [x.sum() + n, n], options={"size_limit": 3})
    with caplog.at_level(logging.WARNING, logger="cudagraph"):
        for n in [2, 2, 3, 2, 4, 5, 6, 3, 4]:
            tree.mark_step_begin()
            x = world.randn(n)
            same(world, f(x, n), [x.sum() + n, n])
    counts = tree.stats()
    assert (counts["recordings"], counts["skips"]) == (3, 2)
    assert len([r for r in caplog.records if "size_limit" in r.getMessage()]) == 1


@pytest.mark.parametrize("kind", ["expanded", "overlapping", "gaps", "transposed", "offset", "conjugate"])
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
        }[kind]()

    fn = lambda x: [x * 2, x]  # noqa: E731
    f = world.function(lambda x: [x * 2])
    for _ in range(4):
        tree.mark_step_begin()
        x = make()
        torch.testing.assert_close(world.read(f(x)[0]), fn(x)[0])


@pytest.mark.core
def test_mutated_inputs(world, caplog):
    """Static and managed ones are captured, the caller's own is not."""

    def add_to(x, target):
        target.add_(x)
        return [target * 2]

    buffer = world.randn(4)
    expected = buffer.clone()
    static = world.function(add_to, static=(1,), mutated=(1,))
    for _ in range(4):
        tree.mark_step_begin()
        x = world.randn(4)
        expected += x
        same(world, [*static(x, buffer), buffer], [expected * 2, expected])
    assert tree.stats()["skips"] == 0

    produce = world.function(lambda x: [x.sin()])
    managed = world.function(add_to, mutated=(1,))
    for _ in range(4):
        tree.mark_step_begin()
        x = world.randn(4)
        (h,) = produce(x)
        (out,) = managed(x, h)
        same(world, [h, out], [x.sin() + x, (x.sin() + x) * 2])
    assert tree.stats()["skips"] == 0

    own = world.function(add_to, mutated=(1,), name="the writer")
    with caplog.at_level(logging.WARNING, logger="cudagraph"):
        for _ in range(4):
            tree.mark_step_begin()
            x, target = world.randn(4), world.randn(4)
            result = target + x
            same(world, [*own(x, target), target], [result * 2, result])
    assert tree.stats()["skips"] == 3  # the first call was a warm-up
    told = [r.getMessage() for r in caplog.records if "the writer" in r.getMessage()]
    assert len(told) == 1 and "mutates input 1" in told[0]


def test_or_error(world):
    f = world.function(lambda x: [x.add_(1)], mutated=(0,), options={"or_error": True}, name="the writer")
    f(world.randn(3))
    tree.mark_step_begin()
    with pytest.raises(NotCapturableError, match=r"the writer can't run as a CUDA graph.*mutates input 0"):
        f(world.randn(3))


@pytest.mark.core
def test_random_numbers_are_fresh_and_follow_the_seed(world):
    def fn(x):
        return [torch.nn.functional.dropout(x, 0.5), torch.rand_like(x)]

    f = world.function(fn)
    x = torch.ones(64, device=world.device)
    f(x)
    tree.mark_step_begin()
    f(x)
    seen = []
    for _ in range(2):
        torch.manual_seed(3)
        for _ in range(3):
            tree.mark_step_begin()
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
        tree.mark_step_begin()
        x = world.randn(16)
        same(world, f(x, mine), fn(x, reference))
    assert tree.stats()["replays"] >= 3


def test_inference_mode(world):
    f = world.function(lambda x: [x * 2])
    for i in range(6):
        tree.mark_step_begin()
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
        tree.mark_step_begin()
        x = world.randn(4, requires_grad=True)
        (y,) = f(x)
        assert not y.requires_grad
        torch.testing.assert_close(world.read(y), x.detach() * 2)
        del y


def test_outputs_are_new_tensors(world):
    """What a caller does to an output is not there in the next step."""
    f = world.function(lambda x: [x * 2])
    for _ in range(4):
        tree.mark_step_begin()
        (y,) = f(world.randn(2, 3))
        assert y.shape == (2, 3) and not y.requires_grad and not hasattr(y, "note")
        y.note = 1
        y.requires_grad_()
        y.detach().zero_().t_()
        del y


@pytest.mark.core
def test_an_error_in_a_capture_leaves_nothing_behind(world):
    trouble = [None]

    def fn(x):
        y = x * 2
        if trouble[0] is not None and tree_is_capturing(world):
            error, trouble[0] = trouble[0], None
            raise error
        return [y + torch.rand_like(y) * 0]

    f = world.function(fn)
    before = world.function(lambda x: [x + 1])
    for error in (None, ValueError("mine"), MemoryError("none left"), None, None):
        tree.mark_step_begin()
        trouble[0] = error
        x = world.randn(4)
        (h,) = before(x)
        if error is None:
            same(world, f(h), [(x + 1) * 2])
        else:
            with pytest.raises(type(error), match=str(error)):
                f(h)
            same(world, [h], [x + 1])
    counts = tree.stats()
    assert (counts["recordings"], counts["skips"]) == (2, 0)
    # and random numbers go on as in eager
    torch.manual_seed(0)
    a = torch.rand(3, device=world.device)
    torch.manual_seed(0)
    assert torch.equal(a, torch.rand(3, device=world.device))


def tree_is_capturing(world):
    if world.kind == "cuda":
        return torch.cuda.is_current_stream_capturing()
    return any(pool.tape is not None for pool in world.driver.pools)


@pytest.mark.core
def test_what_cannot_be_captured_runs_as_it_is(world, caplog):
    """An operator that asks for a value: found at the capture, told once, not tried again."""

    def fn(x):
        return [x * 2 if x.sum().item() > 0 else x * 3, torch.rand_like(x) * 0]

    f = world.function(fn, name="the asker")
    with caplog.at_level(logging.WARNING, logger="cudagraph"):
        for _ in range(5):
            tree.mark_step_begin()
            x = world.randn(6)
            same(world, f(x), fn(x))
    assert tree.stats()["skips"] == 4 and tree.stats()["recordings"] == 0
    assert len([r for r in caplog.records if "the asker" in r.getMessage()]) == 1
    g = world.function(lambda x: [x + torch.rand_like(x) * 0])
    steps(world, g, lambda x: [x], lambda: (world.randn(6),))
    assert tree.stats()["recordings"] == 1


def test_memory_does_not_grow(world):
    f = world.function(lambda x: [x.sin(), x.cos()])
    g = world.function(lambda a, b: [a * b])
    last = None
    for i in range(200):
        tree.mark_step_begin()
        x = world.randn(8)
        last = g(*f(x))[0]
        if i == 20:
            recordings = tree.stats()["recordings"]
            gc.collect()
            objects = len(gc.get_objects())
    gc.collect()
    assert tree.stats()["recordings"] == recordings
    assert len(gc.get_objects()) - objects < 50
    assert last is not None


def test_reset_gives_everything_back(world):
    f = world.function(lambda x: [x.sin()])
    for _ in range(3):
        tree.mark_step_begin()
        x = world.randn(1 << 10)
        (kept,) = f(x)
    if world.kind == "simulator":
        tree.reset()
        assert all(pool.released for pool in world.driver.pools)
    else:
        reserved = torch.cuda.memory_reserved()
        tree.reset()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() < reserved
    with pytest.raises(RuntimeError, match="memory has been reused"):
        world.read(kept)
    steps(world, f, lambda x: [x.sin()], lambda: (world.randn(1 << 10),))
    assert tree.stats()["recordings"] == 1


def test_the_last_function_takes_the_tree_with_it(world):
    f = world.function(lambda x: [x.sin()])
    steps(world, f, lambda x: [x.sin()], lambda: (world.randn(8),))
    trees = [t for per_thread in tree.every_thread for t in per_thread.values() if t.driver is world.driver]
    (mine,) = [t for t in trees if t.root.children]
    del f
    gc.collect()
    assert not mine.root.children and not mine.functions


@pytest.mark.core
def test_options():
    assert Options.parse({}) == Options()
    for wrong in (
        {"no": 1},
        {"inner": "x"},
        {"or_error": 1},
        {"held_outputs": "x"},
        {"warmup_steps": 0},
        {"size_limit": 1.5},
    ):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            Options.parse(wrong)


@pytest.mark.core
@pytest.mark.parametrize("variable", ["CUDAGRAPH_OR_ERROR", "TORCHINDUCTOR_CUDAGRAPH_OR_ERROR"])
def test_or_error_from_the_environment(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert Options.parse().or_error
    assert not Options.parse({"or_error": False}).or_error
    monkeypatch.setenv(variable, "0")
    assert not Options.parse().or_error


def test_warmup_steps(world):
    f = world.function(lambda x: [x + 1], options={"warmup_steps": 3})
    steps(world, f, lambda x: [x + 1], lambda: (world.randn(4),), count=5)
    counts = tree.stats()
    assert (counts["warmups"], counts["recordings"], counts["replays"]) == (3, 1, 1)
    assert set(counts) == set(counters.COUNTERS)


def test_a_stale_input_is_an_error(world):
    if not world.raises_on_access:
        pytest.skip("this build of torch can't make reads fail")
    f = world.function(lambda x: [x.sin()])
    g = world.function(lambda h: [h + 1])
    for _ in range(3):
        tree.mark_step_begin()
        (h,) = f(world.randn(4))
        g(h)
    tree.mark_step_begin()
    f(world.randn(4))
    with pytest.raises(StaleOutputError, match="output 0 of graph"):
        g(h)
    steps(world, f, lambda x: [x.sin()], lambda: (world.randn(4),))


@pytest.mark.skipif(not _compat.can_swap(), reason="this torch can't point a storage elsewhere")
def test_copies_where_torch_moves_only_what_it_allocated():
    """Before torch 2.13 a storage can be moved once. Afterwards such an output is copied when it is given out."""
    tree.reset()
    world = World("simulator", moves="made")
    f = world.function(lambda x: [x.sin(), x.cos()], options={"held_outputs": "copy"})
    g = world.function(lambda a, b: [a * b])
    kept = []
    for i in range(10):
        tree.mark_step_begin()
        x = world.randn(6)
        a, b = f(x)
        same(world, g(a, b), [x.sin() * x.cos()])
        if i % 3 != 2:
            kept.append((a, x.sin()))
        del a, b
        for ours, eager in kept:
            same(world, [ours], [eager])
    assert world.driver.copied_out == 1
    tree.reset()
    for ours, eager in kept:
        same(world, [ours], [eager])


@pytest.mark.gpu
def test_out_of_memory_in_a_capture():
    tree.reset()
    world = World("cuda")
    free, _ = torch.cuda.mem_get_info()
    huge = [False]

    def fn(x):
        y = x.repeat(free // 2) if huge[0] and torch.cuda.is_current_stream_capturing() else x
        return [y[:4] + torch.rand_like(x) * 0]

    f = world.function(fn)
    g = world.function(lambda x: [x * 2])
    x = world.randn(4)
    f(x), g(x)
    for _ in range(2):
        huge[0] = True
        tree.mark_step_begin()
        (h,) = g(x)
        with pytest.raises(torch.OutOfMemoryError):
            f(h)
        same(world, [h], [x * 2])
    huge[0] = False
    torch.cuda.empty_cache()
    for _ in range(3):
        tree.mark_step_begin()
        same(world, f(g(x)[0]), [x * 2])
    assert tree.stats()["recordings"] == 2 and tree.stats()["skips"] == 0
    assert torch.cuda.memory_reserved() < free // 4
    tree.reset()


@pytest.mark.gpu
def test_offloaded_outputs():
    """A forward that leaves a tensor in pinned memory of the host, and a backward that fetches it."""
    tree.reset()
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
        tree.mark_step_begin()
        x, g = world.randn(1 << 16), world.randn(1 << 16)
        y, packed = f(x)
        if i % 3 == 2:  # a second one in flight
            tree.mark_step_begin()
            z, packed_again = f(x + 1)
            same(world, b(packed_again, g), [(x + 1).sin() * g])
            del z, packed_again
        same(world, [y, *b(packed, g)], [x * 2, x.sin() * g])
        del y, packed
    counts = tree.stats()
    assert counts["skips"] == 0 and counts["rerecordings"] == 0
    tree.reset()


@pytest.mark.gpu
def test_a_chain_needs_little_more_memory_than_eager():
    """Forward and backward of 8 functions in a row, their saved tensors alive in between."""
    tree.reset()
    torch.cuda.empty_cache()
    world = World("cuda")
    size = 1 << 20
    parameters = [world.randn(size, requires_grad=True) for _ in range(8)]

    def layer(x, w):
        h = torch.tanh(x * w)
        return torch.sin(h * h + x)

    def step(f):
        x = world.randn(size)
        for w in parameters:
            x = f(x, w)
        x.sum().backward()
        for w in parameters:
            w.grad = None

    def peak(f):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        begin = torch.cuda.memory_reserved()
        step(f)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved() - begin, torch.cuda.max_memory_allocated()

    step(layer)
    eager, _ = peak(layer)
    before = torch.cuda.memory_reserved()
    f = torch.compile(layer, backend=world.backend())
    for _ in range(4):
        tree.mark_step_begin()
        step(f)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    ours = torch.cuda.memory_reserved() - before
    reserved = []
    for _ in range(1000):
        tree.mark_step_begin()
        step(f)
        reserved.append(torch.cuda.memory_reserved())
    assert ours <= 1.1 * eager, f"{ours / eager:.3f} of eager's peak"
    assert len(set(reserved[10:])) == 1
    tree.reset()


@pytest.mark.core
@pytest.mark.parametrize("how", ["asks", "leaks"])
def test_a_failed_capture_takes_nothing_away_from_its_step(world, how):
    """What the step gave out before stays, a pending backward has what was saved, and the program settles."""
    leaked = []

    def fails(x):
        if how == "asks":
            return [x * 2 if x.sum().item() > -1e9 else x]
        leaked.append(x * 3)
        return [x * 2]

    before = world.function(lambda x: [x.sin()])
    middle = world.function(fails)
    after = world.function(lambda x: [x + 1])
    layer = torch.compile(lambda x, w: torch.tanh(x * w), backend=world.backend())
    w = world.randn(6, requires_grad=True)
    for step in range(8):
        tree.mark_step_begin()
        w.grad = None
        x = world.randn(6)
        (a,) = before(x)
        y = layer(x, w)
        (c,) = middle(a)
        same(world, after(c), [x.sin() * 2 + 1])
        same(world, [a, c], [x.sin(), x.sin() * 2])
        y.sum().backward()
        same(world, [w.grad], [((1 - torch.tanh(x * w) ** 2) * x).detach()])
        del a, c, y
        if step == 4:
            settled = tree.stats()
    counts = tree.stats()
    assert counts["warmups"] == settled["warmups"] and counts["recordings"] == settled["recordings"]
    assert counts["replays"] > settled["replays"]


def test_numbers_that_compare_equal_are_not_the_same(world):
    f = world.function(lambda x, n: [x / n])
    g = world.function(lambda x, n: [x * n])
    k = world.function(lambda x, y: [x if y is None else x + y])
    x = world.randn(4)
    for n in [0.0, 0.0, 0.0, -0.0, 0.0]:
        tree.mark_step_begin()
        same(world, f(x, n), [x / n])
    i = torch.ones(3, dtype=torch.int64, device=world.device)
    for n in [2, 2, 2, 2.0, True, 2]:
        tree.mark_step_begin()
        same(world, g(i, n), [i * n])
    for y in [None, None, None, x, x, None]:
        tree.mark_step_begin()
        same(world, k(x, y), [x if y is None else x + y])


def test_held_inputs_keep_their_layout(world):
    seen = set()

    def fn(x):
        seen.add(x.stride())
        return [x * 2, x.view(-1) if x.is_contiguous() else x + 1]

    f = world.function(lambda x: [x.sin()])
    g = world.function(fn)
    for _ in range(5):
        tree.mark_step_begin()
        x = world.randn(4, 6)
        (h,) = f(x)
        kept = h[:, ::2]
        del h
        tree.mark_step_begin()
        same(world, g(kept)[:1], [(x.sin() * 2)[:, ::2].clone(memory_format=torch.preserve_format)])
        del kept
    assert seen == {(6, 2)}


@pytest.mark.parametrize("moves", ["all", "made"])
def test_fed_back_and_written_to_again_and_again(moves):
    if not _compat.can_swap():
        pytest.skip("this torch can't point a storage elsewhere")
    tree.reset()
    world = World("simulator", moves=moves)
    produce = world.function(lambda x: [x.sin()])
    accumulate = world.function(lambda state, x: [state.add_(x) * 2], mutated=(0,))
    for _ in range(5):
        tree.mark_step_begin()
        x = world.randn(6)
        (state,) = produce(x)
        expected = x.sin()
        for _ in range(2):
            tree.mark_step_begin()
            x = world.randn(6)
            expected = expected + x
            same(world, [*accumulate(state, x), state], [expected * 2, expected])
        del state
    tree.reset()


def test_a_mark_between_two_backwards(world):
    f = torch.compile(lambda x, w: torch.tanh(x * w), backend=world.backend())
    w = world.randn(6, requires_grad=True)
    for first in [0, 1, 0, 1, 0]:
        w.grad = None
        tree.mark_step_begin()
        xs = [world.randn(6), world.randn(6)]
        losses = [f(x, w).sum() for x in xs]
        losses[first].backward()
        tree.mark_step_begin()
        f(world.randn(6), w.detach())
        losses[1 - first].backward()
        same(world, [w.grad], [sum((1 - torch.tanh(x * w) ** 2) * x for x in xs).detach()])
        del losses


def test_a_step_that_never_ends_stops_recording(world):
    """What the first function gave out is held all the time, and the second one is called again and again."""
    f = world.function(lambda x: [x.sin()])
    g = world.function(lambda x: [x.cos()])
    for _ in range(2):
        x = world.randn(4)
        (first,) = f(x)
        g(x)
    tree.forget_marks()
    for _ in range(80):
        y = world.randn(4)
        same(world, g(y), [y.cos()])
    same(world, [first], [x.sin()])
    counts = tree.stats()
    assert counts["recordings"] < 30 and counts["skips"] > 40
