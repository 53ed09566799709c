"""Memory of recordings: how much they use, and when it is freed."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from tree_programs import World, layer, same, steps

from cudagraph import counters
from cudagraph.torch_private import cuda as torch_cuda
from cudagraph.tree import dispatch, record, tree


@pytest.fixture(autouse=True, scope="module")
def nothing_of_other_files(young_heap):
    """Collect what earlier files left, frozen or not: on CUDA their functions would be in the trees looked at here."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def test_memory_does_not_grow(world):
    f = world.function(lambda x: [x.sin(), x.cos()])
    g = world.function(lambda a, b: [a * b])
    last = None
    for i in range(200):
        dispatch.mark_step_begin()
        x = world.randn(8)
        last = g(*f(x))[0]
        if i == 20:
            recordings = counters.stats()["recordings"]
            gc.collect()
            objects = len(gc.get_objects())
    gc.collect()
    assert counters.stats()["recordings"] == recordings
    assert len(gc.get_objects()) - objects < 50
    assert last is not None


def test_reset_gives_everything_back(world):
    f = world.function(lambda x: [x.sin()])
    for _ in range(3):
        dispatch.mark_step_begin()
        x = world.randn(1 << 10)
        (kept,) = f(x)
    if world.kind == "simulator":
        dispatch.reset()
        assert all(pool.released for pool in world.driver.pools)
    else:
        reserved = torch.cuda.memory_reserved()
        dispatch.reset()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() < reserved
    with pytest.raises(RuntimeError, match="memory has been reused"):
        world.read(kept)
    steps(world, f, lambda x: [x.sin()], lambda: (world.randn(1 << 10),))
    assert counters.stats()["recordings"] == 1


@pytest.mark.parametrize("mark_last", [False, True])
def test_steps_begin_by_themselves_after_a_reset(world, mark_last):
    """The thread's tree outlives a reset. If it waited for marks, a program without marks would only warm up."""
    f = world.function(lambda x: [x.sin()])
    for _ in range(3):
        dispatch.mark_step_begin()
        f(world.randn(4))
    if mark_last:  # no call has seen it
        dispatch.mark_step_begin()
    (mine,) = [tree for tree in dispatch.local.trees.values() if tree.driver is world.driver]
    dispatch.reset()
    g = world.function(lambda x: [x.cos()])
    for _ in range(4):
        x = world.randn(4)
        same(world, g(x), [x.cos()])
    assert [counters.stats()[count] for count in ("warmups", "recordings", "replays")] == [1, 1, 2]
    assert mine in [t for trees in dispatch.every_thread for t in trees.values()] and not mine.is_marked
    dispatch.mark_step_begin()
    g(world.randn(4))
    assert mine.is_marked


def test_the_last_function_takes_the_tree_with_it(world):
    f = world.function(lambda x: [x.sin()])
    steps(world, f, lambda x: [x.sin()], lambda: (world.randn(8),))
    trees = [t for per_thread in dispatch.every_thread for t in per_thread.values() if t.driver is world.driver]
    (mine,) = [t for t in trees if t.root.children]
    del f
    gc.collect()
    assert not mine.root.children and not mine.functions


def tree_of(world):
    (mine,) = [tree for tree in dispatch.local.trees.values() if tree.driver is world.driver]
    return mine


def recordings(world):
    return list(tree_of(world).root.recordings())


def test_recordings_of_a_dropped_function_go(world):
    """One function stays; others are compiled, run and dropped, as in a notebook."""
    stays = world.function(lambda x: [x.sin()])
    refused_there = world.function(lambda x: [x.mul_(2)], mutated=(0,))

    def session(number):
        constant = world.randn(8)
        f = world.function(lambda x: [(x + number).cos() * constant], constants=(constant,))
        after = world.function(lambda y: [y * 2])
        refused = world.function(lambda x: [x.add_(1)], mutated=(0,))
        for _ in range(4):
            dispatch.mark_step_begin()
            x = world.randn(16, 8)
            same(world, refused(x.clone()), [x + 1])
            same(world, after(*f(x)), [(x + number).cos() * constant * 2])
            same(world, refused_there(x.clone()), [x * 2])
            same(world, stays(x), [x.sin()])
        return weakref.ref(constant)

    seen = []
    for number in range(5):
        constant = session(number)
        steps(world, stays, lambda x: [x.sin()], lambda: (world.randn(16, 8),))
        mine = tree_of(world)
        refusals = [key for node in (mine.off_path, mine.root, *mine.root.recordings()) for key in node.refusals]
        tables = (mine.functions, mine.states, refusals)
        used = mine.pool.peak if world.kind == "simulator" else torch.cuda.memory_reserved()
        seen.append((len(recordings(world)), *map(len, tables), used))
        assert constant() is None
    assert seen[0][:-1] == (1, 2, 2, 0)
    assert len({found[:-1] for found in seen}) == 1
    assert seen[-1][-1] <= seen[1][-1]
    if world.kind == "simulator":
        assert len(world.driver.pools) == 2  # the first time, all that was recorded came after what was dropped


def test_a_function_that_is_dropped_on_the_path_goes_later(world):
    """Its recordings go at the first call after its step, without marks and although nothing else is dropped."""
    stays = world.function(lambda x: [x.sin()])
    goes = world.function(lambda x: [x.cos()])
    for _ in range(4):
        x = world.randn(8)
        same(world, [*stays(x), *goes(x)], [x.sin(), x.cos()])
    del goes
    gc.collect()
    for count in (2, 1, 1):
        x = world.randn(8)
        same(world, stays(x), [x.sin()])
        assert len(recordings(world)) == count
    assert len(tree_of(world).states) == 1


def test_an_alias_that_a_dropped_function_gave_out_is_not_looked_for(world):
    """Its own handle on another function's output does not count as a holder, and is gone."""
    stays = world.function(lambda x: [x.sin()])
    alias = world.function(lambda y: [y.view(-1), y.cos()])
    for _ in range(4):
        dispatch.mark_step_begin()
        x = world.randn(16, 8)
        same(world, alias(*stays(x)), [x.sin().view(-1), x.sin().cos()])
    del alias
    gc.collect()
    steps(world, stays, lambda x: [x.sin()], lambda: (world.randn(16, 8),))
    (node,) = recordings(world)
    assert node.watch_live.none_held() and not node.watch_live.slots[0].held()
    outputs = stays(world.randn(16, 8))
    assert outputs and not node.watch_live.none_held() and node.watch_live.slots[0].held()


def test_a_dropped_function_stays_until_its_step_has_ended(world):
    stays = world.function(lambda x: [x + 1])
    w = world.randn(6, requires_grad=True)
    layer = torch.compile(lambda x, w: torch.tanh(x * w), backend=world.backend())
    for step in range(5):
        dispatch.mark_step_begin()
        w.grad = None
        x = world.randn(6)
        y = layer(x, w)
        if step == 4:
            del layer
            torch._dynamo.reset()
            gc.collect()
            dispatch.mark_step_begin()  # the backward is still to come
        same(world, stays(x), [x + 1])
        same(world, [y], [torch.tanh(x * w).detach()])
        y.sum().backward()
        same(world, [w.grad], [((1 - torch.tanh(x * w) ** 2) * x).detach()])
        del y
    assert len(recordings(world)) >= 3
    gc.collect()
    steps(world, stays, lambda x: [x + 1], lambda: (world.randn(6),))
    assert {node.function.name for node in recordings(world)} == {recordings(world)[0].function.name}


class Cycle:
    """Only the garbage collector finds it."""

    def __init__(self, kept):
        self.kept, self.itself = kept, self


def held_of_a_dropped_function():
    """A captured function that the garbage collector may take, and an output of it that is held."""
    world = World("simulator")
    f = world.function(lambda x: [x.sin()], options={"held_outputs": "copy"})
    for _ in range(3):
        dispatch.mark_step_begin()
        x = world.randn(6)
        (y,) = f(x)
    Cycle(f)
    return world, y, x.sin()


def closed_while_another_is_captured():
    gc.collect()
    other, y, expected = held_of_a_dropped_function()

    def fn(x):
        gc.collect()
        return [x * 2]

    world = World("simulator")
    g = world.function(fn)
    gc.disable()
    try:
        with tree.one_capture():  # the warm-up collects, too
            g(world.randn(4))
            steps(world, g, lambda x: [x * 2], lambda: (world.randn(4),))
            waits = not other.driver.pools[0].released
    finally:
        gc.enable()
    same(other, [y], [expected])
    assert waits and other.driver.pools[0].released


def closed_under_a_fake_mode():
    gc.collect()
    other, y, expected = held_of_a_dropped_function()
    with FakeTensorMode():
        gc.collect()
    same(other, [y], [expected])
    assert other.driver.pools[0].released


@pytest.mark.skipif(not torch_cuda.can_swap(), reason="this torch can't point a storage elsewhere")
@pytest.mark.parametrize("case", [closed_while_another_is_captured, closed_under_a_fake_mode])
@pytest.mark.parametrize("deleted", [False, True])
def test_the_garbage_collector_closes_trees_in_order(case, deleted, monkeypatch):
    dispatch.reset()
    if not deleted:
        case()
        return
    monkeypatch.setattr(tree, "close_pending", close_at_once)
    monkeypatch.setattr("sys.unraisablehook", lambda args: None)  # what a finalizer raises
    with pytest.raises((AssertionError, RuntimeError)):
        case()
    tree.to_close.clear()


def close_at_once():
    while tree.to_close:
        tree.to_close.popleft().close()


def test_nothing_is_closed_inside_of_a_capture_of_the_callers_own(monkeypatch):
    dispatch.reset()
    world = World("simulator")
    f = world.function(lambda x: [x.sin()])
    steps(world, f, lambda x: [x.sin()], lambda: (world.randn(4),))
    with monkeypatch.context() as patched:
        patched.setattr(world.driver, "is_capturing", lambda: True)
        del f
        gc.collect()
        dispatch.mark_step_begin()
        assert not world.driver.pools[0].released
    dispatch.mark_step_begin()
    assert world.driver.pools[0].released


def test_trees_of_threads_that_are_gone_go(world):
    f = world.function(lambda x: [x.sin()])
    before = len(dispatch.every_thread)
    for _ in range(4):
        thread = threading.Thread(target=steps, args=(world, f, lambda x: [x.sin()], lambda: (world.randn(4),)))
        thread.start()
        thread.join()
        del thread
    gc.collect()
    assert len(dispatch.every_thread) == before


class Alive(TorchDispatchMode):
    """Bytes of the tensors that operators made and somebody holds, and their peak."""

    def __init__(self):
        super().__init__()
        self.made = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]:
            storage = x.untyped_storage()
            self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.made = {cdata: entry for cdata, entry in self.made.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.made.values()))
        return out


class Uncaptured(World):
    """Graphs run uncaptured, and the live bytes in them are counted."""

    def __init__(self):
        super().__init__("simulator")
        self.alive = Alive()

    def capture(self, run, options=None, **piece):
        def call(inputs):
            with self.alive:
                return run(inputs)

        call._boxed_call = True
        return call


def chain_of(world, layer, parameters):
    def step(f):
        x = world.randn(1 << 8)
        for w in parameters:
            x = f(x, w)
        x.sum().backward()
        del x
        for w in parameters:
            w.grad = None

    return step


@pytest.mark.core
@pytest.mark.parametrize("forgets", [False, True])
def test_a_chain_needs_little_more_than_what_is_alive(forgets, monkeypatch):
    """Forward and backward of 8 functions. The test is shown to notice a backward that holds its inputs to the end."""
    dispatch.reset()
    world = World("simulator")
    parameters = [world.randn(1 << 8, requires_grad=True) for _ in range(8)]
    for w in parameters:
        torch._dynamo.mark_static_address(w, guard=False)  # as the parameters of a module

    step = chain_of(world, layer, parameters)
    uncaptured = Uncaptured()
    step(torch.compile(layer, backend=uncaptured.backend()))
    torch._dynamo.reset()
    if forgets:

        def plan(*args, original=record._plan):
            made = original(*args)
            return dataclasses.replace(made, held=[*made.held, *made.donated], donated=[])

        monkeypatch.setattr(record, "_plan", plan)
    f = torch.compile(layer, backend=world.backend())
    for _ in range(4):
        dispatch.mark_step_begin()
        step(f)
    counts = counters.stats()
    assert (counts["recordings"], counts["skips"], counts["held_outputs"]) == (16, 0, 0)
    assert (world.driver.pools[0].extent <= 1.1 * uncaptured.alive.peak) is not forgets
    dispatch.reset()


@pytest.mark.gpu
def test_the_pool_of_several_paths_comes_back():
    """Pools are restored to earlier states in between."""
    dispatch.reset()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    world = World("cuda")
    f = world.function(lambda x: [x.sin(), x.cos() * 2])
    g = world.function(lambda a, b: [(a * b).repeat(3), a + b])
    h = world.function(lambda a: [a.exp().repeat(5)])
    for step in range(12):
        dispatch.mark_step_begin()
        x = world.randn(1 << 20)
        a, b = f(x)
        if step % 3 != 1:
            same(world, g(a, b), [(x.sin() * x.cos() * 2).repeat(3), x.sin() + x.cos() * 2])
        if step % 3 != 0:
            same(world, h(b), [(x.cos() * 2).exp().repeat(5)])
        same(world, [a, b], [x.sin(), x.cos() * 2])
    assert counters.stats()["recordings"] >= 4 and not counters.stats()["skips"]
    del a, b, x
    dispatch.reset()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


@pytest.mark.gpu
def test_a_chain_needs_little_more_memory_than_eager():
    """Forward and backward of 8 functions in a row, their saved tensors alive in between."""
    dispatch.reset()
    torch.cuda.empty_cache()
    world = World("cuda")
    size = 1 << 20
    parameters = [world.randn(size, requires_grad=True) for _ in range(8)]

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
        dispatch.mark_step_begin()
        step(f)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    ours = torch.cuda.memory_reserved() - before
    reserved = []
    for _ in range(1000):
        dispatch.mark_step_begin()
        step(f)
        reserved.append(torch.cuda.memory_reserved())
    assert ours <= 1.1 * eager, f"{ours / eager:.3f} of eager's peak"
    assert len(set(reserved[10:])) == 1
    dispatch.reset()


def test_a_tree_that_could_not_be_closed_is_closed_later():
    """A finalizer may run while torch imports a module that closing needs."""
    import types

    from cudagraph.tree import tree

    closed = []

    def close():
        closed.append(len(closed))
        if len(closed) == 1:
            raise ImportError("partially initialized")

    driver = types.SimpleNamespace(is_capturing=lambda: False)
    with pytest.raises(ImportError):
        tree.close_later(types.SimpleNamespace(driver=driver, functions=set(), close=close))
    tree.close_pending()
    assert closed == [0, 1] and not tree.to_close
