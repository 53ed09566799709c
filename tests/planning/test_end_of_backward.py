"""When the saved tensors of a compiled graph are released: after its backward, or with its autograd node."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from steps import ATEN, with_backward

from aot_hooks.torch_private.aot import keeps_tangents
from aot_hooks.torch_private.autograd import at_end_of_backward


def block(x):
    return x.sin().exp()


@pytest.fixture
def seen():
    return []


@pytest.fixture
def call(seen):
    """Calls a compiled block, and notes in `seen` how its saved tensors were released."""
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="aot_hooks", options=ATEN)

    def called(x, name):
        y = compiled(x)
        note = functools.partial(seen.append, ("released", name))
        assert at_end_of_backward(y, note, functools.partial(seen.append, ("ran", name)))
        return y

    return called


def test_each_block_has_run_before_the_next_begins_and_the_last_at_the_end(call, seen):
    y = x = torch.randn(4, requires_grad=True)
    for name in "abc":
        y = call(y, name)
        y.register_hook(lambda _, name=name: seen.append(("begins", name)))
    y.sum().backward()
    assert [name for what, name in seen if what == "ran"] == ["c", "b", "a"]
    assert seen.index(("ran", "c")) < seen.index(("begins", "a"))
    assert seen[-1] == ("ran", "a") and x.grad is not None


@pytest.mark.parametrize("returned", ["a buffer", "its input"])
def test_a_block_that_returns_what_it_wrote_to_is_told_of_its_own_backward(returned, seen):
    """AOTAutograd copies the graph's result there, so the block is behind the copy's source."""
    buffer, x = torch.zeros(4), torch.randn(4, requires_grad=True)

    def written(x, into):
        return into.copy_(x.sin().exp())

    torch._dynamo.reset()
    compiled = torch.compile(written, backend="aot_hooks", options=ATEN)
    before = torch.compile(torch.sin, backend="aot_hooks", options=ATEN)(x)
    assert at_end_of_backward(before, functools.partial(seen.append, "before"))
    y = compiled(before.clone(), buffer if returned == "a buffer" else before)
    assert at_end_of_backward(y, functools.partial(seen.append, "written"))
    y.sum().backward()
    assert seen == ["written", "before"] and x.grad is not None


def test_all_that_wait_for_one_block_are_told_after_it(call, seen):
    x = torch.randn(4, requires_grad=True)
    y = call(x, "a")
    for name in ("second", "third"):
        assert at_end_of_backward(y, lambda: None, functools.partial(seen.append, ("ran", name)))
    x.register_hook(lambda _: seen.append("the gradient is there"))
    y.sum().backward()
    assert seen == ["the gradient is there", ("ran", "a"), ("ran", "second"), ("ran", "third")]


def test_what_never_runs_is_released_with_its_output(call, seen):
    y = call(torch.randn(4, requires_grad=True), "a")
    assert seen == []
    del y
    gc.collect()
    assert seen == [("released", "a")]


def test_a_backward_that_runs_again_counts_once(call, seen):
    y = call(torch.randn(4, requires_grad=True), "a")
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    del y
    gc.collect()
    assert seen == [("ran", "a")]


def test_a_backward_that_fails_releases_what_it_has_not_run(call, seen):
    def fail(grad):
        raise ValueError("on purpose")

    x = torch.randn(4, requires_grad=True)
    y = call(call(with_backward(fail)(x), "a"), "b")
    with pytest.raises(ValueError, match="on purpose"):
        y.sum().backward()
    del y
    gc.collect()
    assert seen == [("ran", "b"), ("released", "a")]
    call(x, "c").sum().backward()
    assert seen[-1] == ("ran", "c")


def test_a_backward_inside_of_a_backward_ends_nothing_outside(call, seen):
    def run_another(grad):
        with torch.enable_grad():
            call(torch.randn(4, requires_grad=True), "inner").sum().backward()
        return grad

    x = torch.randn(4, requires_grad=True)
    call(with_backward(run_another)(call(x, "first")), "last").sum().backward()
    assert sorted(name for what, name in seen if what == "ran") == ["first", "inner", "last"]


def test_the_gradient_of_the_output_is_not_held_while_the_backward_runs():
    """Seen by an operator of the backward, after the last one that reads the gradient. torch 2.11 holds it itself."""
    alive: list[weakref.ref[torch.Tensor]] = []
    found: list[bool] = []

    @torch.library.custom_op("aot_hooks_tests::look", mutates_args=())
    def look(grad: torch.Tensor) -> torch.Tensor:
        found.append(alive[0]() is not None)
        return grad.clone()

    look.register_fake(torch.empty_like)

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return torch.ops.aot_hooks_tests.look(grad)

    class Ones(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.sum()

        @staticmethod
        def backward(ctx, grad):
            ones = torch.ones(4)
            alive.append(weakref.ref(ones))
            return ones

    compiled = torch.compile(lambda x: block(Looks.apply(x)), backend="aot_hooks", options=ATEN)
    y = compiled(torch.randn(4, requires_grad=True))
    assert at_end_of_backward(y, lambda: None)
    Ones.apply(y).backward()
    assert found == [keeps_tangents()]
