"""Sharp edges of CUDA graphs, as a table: what is an error, and what is right, with eager mode as the judge.

    ERRORS   the program gets a clear error: which output, from which line, what to do
    RIGHT    the program may look risky; its numbers are those of eager mode

Nothing else happens: no case reads other data. Each runs on the simulator, and on CUDA with the same code.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import cudagraph
from cudagraph import counters
from cudagraph.tree.liveness import STALE


def close(world, x, expected):
    torch.testing.assert_close(world.read(x), expected, rtol=1e-5, atol=1e-5)


def loop(world, f, hold, *, later=1, marked=True):
    """Hold on to something of a replay, and go `later` steps on."""
    for _ in range(3):
        if marked:
            cudagraph.mark_step_begin()
        out = f(world.randn(4, 4))
    kept = hold(out)
    del out
    for _ in range(later):
        if marked:
            cudagraph.mark_step_begin()
        f(world.randn(4, 4))
    return kept


# --- errors


def held_output(world, **kw):
    f = torch.compile(lambda x: (x.sin(), x.cos()), backend=world.backend())
    return loop(world, f, lambda out: out[0], **kw)


def held_view(world):
    f = torch.compile(lambda x: x.sin(), backend=world.backend())
    return loop(world, f, lambda out: out[1:])


def held_detached_alias(world):
    f = torch.compile(lambda x: x.sin(), backend=world.backend())
    return loop(world, f, torch.Tensor.detach)


def held_transpose(world):
    f = torch.compile(lambda x: x.sin(), backend=world.backend())
    return loop(world, f, torch.Tensor.t)


def held_storage(world):
    f = torch.compile(lambda x: x.sin(), backend=world.backend())
    storage = loop(world, f, torch.Tensor.untyped_storage)
    return torch.empty(0, device=world.device).set_(storage, 0, (4, 4), (4, 1))


def collected_in_a_list(world):
    f = torch.compile(lambda x: x.sin(), backend=world.backend())
    f(world.randn(4, 4))
    outputs = [f(world.randn(4, 4)) for _ in range(4)]
    return outputs[0]


def saved_by_eager_code(world):
    """Eager autograd saved an output for the exponential; then the output's step was over."""
    f = torch.compile(lambda x: x.sin(), backend=world.backend())
    w = world.randn(4, 4, requires_grad=True)
    loss = loop(world, f, lambda out: (out * w).sum())
    return torch.autograd.grad(loss, w)[0]


def backward_a_second_time(world):
    f = torch.compile(lambda x, w: torch.tanh(x * w), backend=world.backend())
    w = world.randn(4, 4, requires_grad=True)
    for _ in range(4):
        cudagraph.mark_step_begin()
        loss = f(world.randn(4, 4), w).sum()
        loss.backward(retain_graph=True)
    cudagraph.mark_step_begin()
    f(world.randn(4, 4), w)
    loss.backward()
    return w.grad


STALE_READS = [
    held_output,
    lambda world: held_output(world, later=2),
    lambda world: held_output(world, later=7),
    lambda world: held_output(world, marked=False),
    held_view,
    held_detached_alias,
    held_transpose,
    held_storage,
    collected_in_a_list,
    saved_by_eager_code,
    backward_a_second_time,
]
NAMES = [
    "later_1",
    "later_2",
    "later_7",
    "not_marked",
    "view",
    "alias",
    "transpose",
    "storage",
    "list",
    "saved",
    "again",
]


@pytest.mark.core
@pytest.mark.parametrize("case", STALE_READS, ids=NAMES)
def test_error_on_access(world, case):
    if not world.raises_on_access and case in (saved_by_eager_code, backward_a_second_time):
        pytest.skip("only the tests can notice such a read in this build of torch")
    with pytest.raises(RuntimeError, match=STALE) as caught:
        world.read(case(world))
    message = str(caught.value)
    assert "test_footguns.py" in message or "forward" in message or "inference" in message
    assert "clone it" in message and "held_outputs" in message


# --- right


def test_right_validation_without_no_grad(world):
    """Each forward could have a backward. None comes, and what it saved is dropped one call later."""
    f = torch.compile(lambda x, w: torch.tanh(x * w), backend=world.backend())
    w = world.randn(4, 4, requires_grad=True)
    for marked in (False, True):
        for _ in range(40):
            if marked:
                cudagraph.mark_step_begin()
            x = world.randn(4, 4)
            out = f(x, w)
            close(world, out, torch.tanh(x * w).detach())
        assert counters.stats()["recordings"] < 30


def test_right_one_of_many_backwards(world):
    """A loss whose backward never comes does not keep the next steps from being replayed."""
    f = torch.compile(lambda x, w: torch.tanh(x * w), backend=world.backend())
    w = world.randn(4, 4, requires_grad=True)
    for i in range(12):
        cudagraph.mark_step_begin()
        w.grad = None
        x = world.randn(4, 4)
        loss = f(x, w).sum()
        if i % 4 == 3:
            del loss
            continue
        loss.backward()
        close(world, w.grad, ((1 - torch.tanh(x * w) ** 2) * x).detach())
        del loss
    assert counters.stats()["replays"] > 12


def test_right_two_threads_with_steps_of_their_own(world):
    f = world.function(lambda x: [x.sin(), x.cos()])
    turn = threading.Barrier(2)
    inputs = [[world.randn(8) for _ in range(6)] for _ in range(2)]  # torch draws none beside a capture

    def work(own):
        try:
            with torch.no_grad():
                for x in own:
                    turn.wait()  # both call at once, and one reads what the other may still call for
                    a, b = f(x)
                    close(world, a, x.sin())
                    close(world, b, x.cos())
                    del a, b
        except BaseException:
            turn.abort()  # the other thread would wait for ever
            raise

    with ThreadPoolExecutor(2) as pool:
        works = [pool.submit(work, own) for own in inputs]
    errors = [error for error in (one.exception() for one in works) if error is not None]
    assert not [error for error in errors if not isinstance(error, threading.BrokenBarrierError)], errors


def test_right_marks_of_another_thread(world):
    """A thread's mark is of its own steps: it does not take away what another one holds."""
    f = world.function(lambda x: [x.sin()])
    with torch.no_grad():
        for _ in range(3):
            x = world.randn(4)
            (h,) = f(x)

    def other():
        for _ in range(3):
            cudagraph.mark_step_begin()
            f(world.randn(4))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    g = world.function(lambda h: [h + 1])
    close(world, g(h)[0], x.sin() + 1)
    close(world, h, x.sin())


@pytest.mark.core
def test_right_torch_marks_steps_too(world):
    f = world.function(lambda x: [x.sin()])
    g = world.function(lambda x: [x + 1])
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        x = world.randn(4)
        (h,) = f(x)
        close(world, g(h)[0], x.sin() + 1)
        (h,) = f(x + 1)  # in a marked step the first function may come again
        close(world, g(h)[0], (x + 1).sin() + 1)
    assert counters.stats()["recordings"] == 4 and counters.stats()["held_outputs"] > 0


def test_right_random_numbers_after_a_refusal(world):
    """Writing to the caller's memory is refused before anything was drawn."""
    f = world.function(lambda x, y: [y.add_(torch.rand_like(x))], mutated=(1,))
    for _ in range(4):
        cudagraph.mark_step_begin()
        y, eager = torch.zeros(4, device=world.device), torch.zeros(4, device=world.device)
        torch.manual_seed(2)
        f(y, y)
        torch.manual_seed(2)
        close(world, y, eager.add_(torch.rand_like(eager)))


def test_right_constants(world):
    table = world.randn(4, 4)
    f = world.function(lambda x: [x @ table, table, table[1:]], constants=(table,))
    for _ in range(4):
        cudagraph.mark_step_begin()
        x = world.randn(3, 4)
        out = f(x)
        for ours, eager in zip(out, [x @ table, table, table[1:]], strict=True):
            close(world, ours, eager)
    assert counters.stats()["held_outputs"] == 2  # of two steps one output each, not the constants
