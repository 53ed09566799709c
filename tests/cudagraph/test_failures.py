"""A failed capture leaves no trace: whatever raises, and wherever, the program's state is as before.

A step of a program that has it all runs with a fault at each point that a capture comes to; the same program runs in
eager mode beside it. Everything is compared bitwise: when the call runs as it is instead, and step by step afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from failing_captures import POINTS, FailingDriver, Fault, Interrupt
from tree_programs import World, takes_list

from cudagraph import counters
from cudagraph.errors import NotCapturableError
from cudagraph.torch_private import cuda as torch_cuda
from cudagraph.tree import dispatch, record
from cudagraph.tree.capture import capturing

ERRORS = ("an error", "no memory", "not allowed in a capture", "an interrupt")


def error_of(kind: str, driver: FailingDriver) -> BaseException:
    return {
        "an error": ValueError("of the test"),
        "no memory": torch.OutOfMemoryError("of the test"),
        "not allowed in a capture": driver.not_permitted(),
        "an interrupt": Interrupt(),
    }[kind]


@pytest.fixture
def failing(world: World) -> World:
    world.driver = FailingDriver(world.driver)
    return world


def state_of(tensors: Sequence[torch.Tensor], world: World) -> list[Any]:
    """The state that a failed capture must not change: addresses, layouts and bits of `tensors`, and random states."""
    found: list[Any] = []
    for x in tensors:
        storage = x.untyped_storage()
        found.append((torch_cuda.identity(storage), storage.data_ptr(), storage.nbytes(), x.shape, x.stride(), x.dtype))
        found.append((x.storage_offset(), x.requires_grad, x.is_leaf))
        found.append(world.read(x).contiguous().view(torch.uint8).tolist())
    found.append(torch.get_rng_state().tolist())
    if world.kind == "cuda":
        found.append(torch.cuda.get_rng_state().tolist())
    return found


class Program:
    """Two functions a step. The second one reads what the first gave out, held and given away, a weight, an input that
    is copied and one that is expanded. It writes to a buffer and to what an optimizer keeps, and draws random numbers.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.weight = world.randn(6, requires_grad=True)
        self.buffer, self.momentum = world.randn(6), world.randn(4, 6)
        self.eager = [x.detach().clone() for x in (self.buffer, self.momentum)]
        self.generator = torch.Generator(world.device)
        self.eager_generator = torch.Generator(world.device)
        for generator in (self.generator, self.eager_generator):
            generator.manual_seed(3)
        self.kept = self.reachable = None
        self.before: list[Any] | None = None
        self.first = world.function(first)
        self.call = world.capture(
            self.run, static_inputs=(3, 4, 5), mutated_inputs=(4, 5), name="the function", is_inference=True
        )

    def run(self, inputs: list[Any]) -> list[torch.Tensor]:
        if self.before is not None and not self.world.driver.capturing:
            # what failed has left nothing behind
            assert self.before == self.noted(inputs)
            self.before = None
        return second(inputs)

    def step(self, fault: Fault | None = None, *, fails: bool = False) -> None:
        """One step; with a fault, its capture fails. `fails`: the capture fails without a fault, too."""
        dispatch.mark_step_begin()
        world = self.world
        x, row = world.randn(4, 6), world.randn(6).expand(4, 6)
        held, given = self.first(x)
        view = held[1:]
        self.reachable = [x, row, held, view, self.weight, self.buffer, self.momentum]
        expected_held, expected_given = first(x)
        inputs = [x, held, given, self.weight.detach(), self.buffer, self.momentum, row, self.generator]
        inputs[3] = self.weight
        del given
        random = torch.get_rng_state(), torch.cuda.get_rng_state() if world.kind == "cuda" else None
        if fault is not None or fails:
            self.before = self.noted(inputs)
            world.driver.armed(fault)
        arguments = list(inputs)
        inputs.clear()
        try:
            outputs = self.call(arguments)
        except Interrupt:
            assert fault is not None and fault.happened
            assert self.before == self.noted(arguments)
            self.before = None
            assert len(arguments) == 8  # whole: the caller may try again
            outputs = self.call(arguments)
        finally:
            world.driver.armed(None)
        torch.set_rng_state(random[0])
        if random[1] is not None:
            torch.cuda.set_rng_state(random[1])
        expected = second([x, expected_held, expected_given, self.weight, *self.eager, row, self.eager_generator])
        self.same(
            [*outputs, held, view, self.buffer, self.momentum],
            [*expected, expected_held, expected_held[1:], *self.eager],
        )
        assert torch.equal(self.generator.get_state(), self.eager_generator.get_state())

    def noted(self, inputs: list[Any]) -> list[Any]:
        given = [x for x in inputs if isinstance(x, torch.Tensor)]
        return [*state_of([*self.reachable, *given], self.world), self.generator.get_state().tolist()]

    def same(self, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(
                self.world.read(a).contiguous().view(torch.uint8), b.detach().contiguous().view(torch.uint8)
            )


def first(x):
    return [x.sin(), x.cos()]


@takes_list
def second(inputs):
    x, held, given, weight, buffer, momentum, row, generator = inputs
    inputs.clear()
    weight = weight.detach()
    y = x * weight + held
    y = y + given * 0.5
    del given
    buffer.mul_(0.9).add_(y.sum(0))
    noise = torch.rand(y.shape, generator=generator, device=y.device)
    momentum.add_(y * buffer)
    return [torch.nn.functional.dropout(y, 0.5) + momentum, noise + row, y[1:], x.view(-1)]


def programs(world: World) -> Iterator[Program]:
    """A program that is about to be captured, again and again."""
    while True:
        dispatch.reset()
        program = Program(world)
        program.step()
        yield program


@pytest.mark.core
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("point", POINTS)
def test_whatever_fails_all_is_as_before(failing, point, kind):
    """The fault is raised at each time that a capture comes to the point. The program goes on, captured or not."""
    world, nth = failing, 0
    for program in programs(world):
        fault = Fault(point, nth, error_of(kind, world.driver))
        program.step(fault)
        if not fault.happened:
            break
        for _ in range(5):
            program.step()
        counts = counters.stats()
        captured = [node.function.name for node in mine(world).root.recordings()]
        if kind == "not allowed in a capture":
            assert "the function" not in captured and counts["skips"] >= 5, counts
        else:
            assert "the function" in captured, counts
        nth += 1
    assert nth > 0, "no capture came to that point"


class Refused(Program):
    """A program whose capture does something that is found only during the capture."""

    def __init__(self, world: World, why: str) -> None:
        super().__init__(world)
        self.why = why
        self.leaked: list[torch.Tensor] = []

    def run(self, inputs: list[Any]) -> list[torch.Tensor]:
        outputs = super().run(inputs)
        if not self.world.driver.capturing:
            return outputs
        if self.why == "keeps a tensor":
            self.leaked.append(outputs[0] * 2)
        elif self.why == "gives out a parameter":
            outputs[0] = torch.nn.Parameter(outputs[0])
        elif self.why == "is never warm":
            raise capturing().not_warm("of the test")
        elif self.why == "asks for a number":
            outputs[0].sum().item()
        return outputs


@pytest.mark.core
@pytest.mark.parametrize("why", ["keeps a tensor", "gives out a parameter", "is never warm", "asks for a number"])
def test_what_is_refused_in_a_capture_leaves_no_trace(failing, why):
    program = Refused(failing, why)
    program.step()
    for _ in range(6):
        program.step(fails=True)
    counts = counters.stats()
    recorded = [node.function.name for node in mine(failing).root.recordings()]
    assert "the function" not in recorded and counts["skips"] >= 4, counts


def mine(world):
    (found,) = [t for t in dispatch.local.trees.values() if t.driver == world.driver]
    return found


@pytest.mark.parametrize("point", [point for point in POINTS if point != "restore"])  # which the root does not need
def test_a_failure_leaves_no_memory(failing, point):
    """Neither in the pool nor outside of it."""
    world = failing

    def f(x, w):
        h = x * w
        return [h.sin(), h.cos().sum(0)]

    g = world.function(f, static=(1,))
    w = world.randn(1 << 10)
    for _ in range(2):
        x = world.randn(4, 1 << 10)
        g(x, w)
        tree = mine(world)
        tree.pool = tree.pool or world.driver.open_pool(tree.device)  # it is opened now: a part of it stays
        before = torch.cuda.memory_allocated() if world.kind == "cuda" else 0
        world.driver.armed(fault := Fault(point, 0, Interrupt()))
        with pytest.raises(Interrupt):
            dispatch.mark_step_begin()
            g(x, w)
        assert fault.happened and not mine(world).root.children
        if world.kind == "cuda":
            assert torch.cuda.memory_allocated() <= before
        else:
            assert all(not pool.live_blocks() for pool in world.driver.pools)
        assert not mine(world).is_broken
        world.driver.armed(None)
        dispatch.reset()


def rebinding(kind, w):
    if kind == "memory":
        w.data = w.data * 2
    elif kind == "shape":
        w.t_()
    elif kind == "set":
        w.set_(w * 2)
    return [w * 3, w.sum(1)]


@pytest.mark.core
@pytest.mark.parametrize("kind", ["memory", "shape", "set"])
@pytest.mark.parametrize("how", ["static", "copied"])
def test_what_gives_an_input_other_memory_is_put_back_and_refused(world, kind, how, caplog):
    """A custom operator may rebind an input without declaring it, so that only the capture finds it."""
    f = world.function(
        lambda x, w: [x + 1, *rebinding(kind, w)], static=(1,) if how == "static" else (), name="the binder"
    )
    w = world.randn(3, 4)
    reference = w.clone()
    memory = w.untyped_storage()  # kept, so that no other memory gets its address
    with caplog.at_level(logging.WARNING, logger="cudagraph"):
        for _ in range(5):
            dispatch.mark_step_begin()
            x = world.randn(4)
            expected = rebinding(kind, reference)
            got = f(x, w)
            if how == "static":  # copied, it is the copy that is changed, which nobody sees
                for a, b in zip(got, [x + 1, *expected], strict=True):
                    assert torch.equal(world.read(a), b)
                assert torch.equal(w, reference) and w.stride() == reference.stride()
    if how == "static":
        assert counters.stats()["skips"] == 4 and (memory.data_ptr() == w.data_ptr()) == (kind == "shape")
        (told,) = [r.getMessage() for r in caplog.records if "the binder" in r.getMessage()]
        assert "gives input 1 other memory or another shape" in told


def test_or_error_says_what_failed(failing):
    world = failing
    f = world.function(lambda x: [x.sin()], options={"or_error": True}, name="the function")
    x = world.randn(4)
    f(x)
    dispatch.mark_step_begin()
    world.driver.armed(Fault("operator", 0, ValueError("of the test")))
    with pytest.raises(NotCapturableError, match="capturing it raised ValueError: of the test"):
        f(x)
    for _ in range(3):
        dispatch.mark_step_begin()
        same = f(x)
        assert torch.equal(world.read(same[0]), x.sin())
    assert counters.stats()["recordings"] == 1


@pytest.mark.parametrize("deleted", ["inputs are put back", "what was made is dropped"])
def test_a_trace_is_noticed(deleted, monkeypatch, caplog):
    dispatch.reset()
    world = World("simulator")
    with pytest.raises((AssertionError, RuntimeError)):
        if deleted == "inputs are put back":
            monkeypatch.setattr(record.Snapshot, "restore", lambda self: None)
            test_what_gives_an_input_other_memory_is_put_back_and_refused(world, "memory", "static", caplog)
        else:
            monkeypatch.setattr(record.traceback, "clear_frames", lambda traceback: None)
            world.driver = FailingDriver(world.driver)
            test_a_failure_leaves_no_memory(world, "checkpoint")
    monkeypatch.undo()
    for trees in dispatch.every_thread:
        trees.clear()  # what was deleted may have left anything behind
    dispatch.reset()
