"""Steps of the user's own as `whole_step`s: their gradients, which somebody may hold, their options and host values."""

from __future__ import annotations

import copy
import gc
import types
import weakref

import pytest
import torch
from torch.nn import functional as F
from whole_steps import adamw, assert_equal, batches, eager_step, pair, sgd

import cudagraph
from cudagraph.torch_private import cuda as torch_cuda


def make(device, zero_first=True, set_to_none=True):
    def make_step(model, optimizer):
        def step(x, y):
            if zero_first:
                optimizer.zero_grad(set_to_none=set_to_none)
            out = model(x)
            loss = F.mse_loss(out, y)
            loss.backward()
            optimizer.step()
            if not zero_first:
                optimizer.zero_grad(set_to_none=set_to_none)
            return loss.detach(), {"out": out.detach()}

        return step

    ours, optimizer, eager, eager_optimizer = pair(device, adamw)
    return make_step(ours, optimizer), make_step(eager, eager_optimizer), ours, eager


@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_as_in_eager_mode(device, zero_first, set_to_none):
    mine, expected, ours, eager = make(device, zero_first, set_to_none)
    step = cudagraph.whole_step(mine)
    for x, y in batches(device, 20):
        (loss, more), (expected_loss, expected_more) = step(x, y), expected(x, y)
        assert torch.equal(loss, expected_loss) and torch.equal(more["out"], expected_more["out"])
        for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
            assert torch.equal(a, b)
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.equal(a.grad, b.grad)
    assert step.refused == "" and cudagraph.stats()["replays"] >= 17


def test_held_gradients_and_another_shape(device):
    """The recording of the first shape has temporary values where the other one put its gradients."""
    mine, expected, ours, eager = make(device)
    step = cudagraph.whole_step(mine)
    held = []
    for size in (6, 6, 6, 5, 5, 5, 0, 6, 6, 5, 6, 5):
        if size == 0:
            held = [[x.grad.view(-1) for x in model.parameters()] for model in (ours, eager)]
            continue
        x, y = next(batches(device, 1, size))
        assert torch.equal(step(x, y)[0], expected(x, y)[0])
        for a, b in zip(*held, strict=True) if held else ():
            assert torch.equal(a, b)
    assert step.refused == ""


def test_held_gradients_of_a_recording_that_is_gone(device):
    """The state was replaced, so the recording is freed, and another one made beside what is held."""
    mine, expected, ours, eager = make(device)
    step = cudagraph.whole_step(mine)
    data = list(batches(device, 12))
    for x, y in data[:5]:
        step(x, y), expected(x, y)
    held = [(model.last.weight.grad.view(-1), model.last.weight.grad.clone().view(-1)) for model in (ours, eager)]
    for model in (ours, eager):
        model.norm.running_mean = torch.zeros_like(model.norm.running_mean)
    for x, y in data[5:]:
        assert torch.equal(step(x, y)[0], expected(x, y)[0])
    assert torch.equal(held[0][0], held[1][0]) and torch.equal(held[0][0], held[0][1])
    assert step.refused == "" and cudagraph.stats()["recordings"] == 2


def test_a_step_that_returns_its_gradients_says_why_it_is_no_graph(device):
    mine, expected, ours, eager = make(device)
    step = cudagraph.whole_step(lambda x, y: (mine(x, y)[0], [p.grad for p in ours.parameters()]))
    for x, y in batches(device, 5):
        assert torch.equal(step(x, y)[0], expected(x, y)[0])
        assert all(
            a.grad is not None and torch.equal(a.grad, b.grad)
            for a, b in zip(ours.parameters(), eager.parameters(), strict=True)
        )
    assert "returns or stores its gradients, which replays overwrite; use clones of them" in step.refused


def test_gradients_that_add_up_over_calls(device):
    ours, optimizer, eager, eager_optimizer = pair(device, sgd)

    def make_step(model, optimizer):
        def step(x, y):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return step

    step, expected = cudagraph.whole_step(make_step(ours, None)), make_step(eager, None)
    for i, (x, y) in enumerate(batches(device, 24)):
        assert torch.equal(step(x, y), expected(x, y).detach())
        for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        if i % 4 == 3:
            for each in (optimizer, eager_optimizer):
                each.step()
                each.zero_grad()
    assert_equal(ours, eager)


def accumulating(model, optimizer, state, set_to_none, rounds):
    def step(x, y, updates=None):
        loss = F.mse_loss(model(x), y) / rounds
        loss.backward()
        if state.updates if updates is None else updates:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return loss

    return step


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("said_by", ["an argument", "a flag"])
@pytest.mark.parametrize("rounds", [2, 3])
def test_calls_whose_gradients_add_up_to_one_update(device, rounds, said_by, set_to_none):
    """The graph of the first call makes gradients that the graphs of the others use, each round anew."""
    ours, optimizer, eager, eager_optimizer = pair(device, sgd)
    state, held = types.SimpleNamespace(updates=False), []
    step = cudagraph.whole_step(accumulating(ours, optimizer, state, set_to_none, rounds), state=state)
    expected = accumulating(eager, eager_optimizer, state, set_to_none, rounds)
    for i, (x, y) in enumerate(batches(device, 36)):
        state.updates = i % rounds == rounds - 1
        said = (state.updates,) if said_by == "an argument" else ()
        assert torch.equal(step(x, y, *said), expected(x, y, *said).detach())
        assert_equal(ours, eager)
        for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad))
        if i == 20:
            held = [[x.grad.view(-1) for x in each.parameters() if x.grad is not None] for each in (ours, eager)]
        for a, b in zip(*held, strict=True) if held else ():
            assert torch.equal(a, b)
    assert step.refused == ""
    # A replay of the first call moves gradients that are held, which torch can do twice from 2.13 on.
    assert cudagraph.stats()["replays"] >= (33 if torch_cuda.can_swap() or not set_to_none else 25)


def backward_and_update(device):
    """A backward in each call, and an update as a step of its own."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2).to(device)
    optimizer = sgd(model)

    def backward(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    def update(x, y):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return x

    return [model], [backward, backward, update]


def generator_and_critic(device, wrap=lambda model: model):
    """The generator's loss leaves gradients on the critic, which drops them. The critic leaves those of the other."""
    torch.manual_seed(1)
    models = torch.nn.Linear(4, 4).to(device), torch.nn.Linear(4, 1).to(device)
    optimizers = [*map(sgd, models)]
    generator, critic = map(wrap, models)

    def train_critic(x, y):
        optimizers[1].zero_grad()
        loss = F.softplus(-critic(x)).mean() + F.softplus(critic(generator(x).detach())).mean()
        loss.backward()
        optimizers[1].step()
        return loss

    def train_generator(x, y):
        optimizers[0].zero_grad()
        loss = F.softplus(-critic(generator(x))).mean()
        loss.backward()
        optimizers[0].step()
        return loss

    return models, [train_critic, train_generator]


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_generator_and_critic(device):
    """Nobody watches such steps, and one both drops gradients and adds to others."""
    return generator_and_critic(device, compiled)


@pytest.mark.parametrize("make", [backward_and_update, generator_and_critic, compiled_generator_and_critic])
def test_steps_that_leave_each_other_gradients(device, make):
    models, functions = make(device)
    eager, expected = make(device)
    steps = {f: cudagraph.whole_step(f) for f in functions}
    data = [*batches(device, 30)]
    for i, (x, y) in enumerate(data):
        for step, other in zip([steps[f] for f in functions], expected, strict=True):
            assert torch.equal(step(x, y), other(x, y)), i
            for ours, theirs in zip(models, eager, strict=True):
                assert_equal(ours, theirs)
                for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                    assert (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad)), i
    assert not any(step.refused for step in steps.values())
    stats = cudagraph.stats()
    if torch_cuda.can_swap() or torch.device(device).type == "cuda":  # else replays give out copies of gradients
        assert stats["recordings"] <= 4 and stats["replays"] >= len(data) * len(functions) - 4, stats


def test_compiled_calls_of_which_the_first_drops_gradients(device):
    """Nobody watches, so the first call is recorded with stand-ins even if another one reads gradients."""
    ours, optimizer, eager, eager_optimizer = pair(device, sgd)

    def make_step(model, optimizer, called):
        def step(x, y, is_first, is_last):
            if is_first:
                optimizer.zero_grad()
            loss = F.mse_loss(called(x), y)
            loss.backward()
            if is_last:
                optimizer.step()
            return loss

        return step

    step = cudagraph.whole_step(make_step(ours, optimizer, compiled(ours)))
    expected = make_step(eager, eager_optimizer, eager)
    for i, (x, y) in enumerate(batches(device, 36)):
        assert torch.equal(step(x, y, i % 3 == 0, i % 3 == 2), expected(x, y, i % 3 == 0, i % 3 == 2).detach())
        assert_equal(ours, eager)
        for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    stats = cudagraph.stats()
    assert step.refused == "" and stats["skips"] == 0
    if torch_cuda.can_swap() or torch.device(device).type == "cuda":  # else replays give out copies of gradients
        assert stats["recordings"] <= 4, stats


def test_old_state_of_an_optimizer_is_freed(device):
    """The first calls update nothing. What is known of them must not keep the state that was loaded over."""
    ours, optimizer, _, _ = pair(device, sgd)
    state = types.SimpleNamespace(updates=False)
    step, old = cudagraph.whole_step(accumulating(ours, optimizer, state, True, 3), state=state), []
    for i, (x, y) in enumerate(batches(device, 24)):
        if i == 12:
            old = [weakref.ref(each["momentum_buffer"]) for each in optimizer.state.values()]
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        state.updates = i % 3 == 2
        step(x, y)
    gc.collect()
    assert step.refused == "" and old and not any(each() is not None for each in old)


def test_an_input_where_a_gradient_was_once(device):
    """The first recording was made with a gradient at that address; the second one with another, which is there now."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2, bias=False).to(device)
    x, first, second = (torch.randn(2, 4, device=device) for _ in range(3))

    @cudagraph.whole_step
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for grad in (first, first, first, second, second, first):
        model.weight.grad = grad.zero_()
        expected = step(x)
    assert cudagraph.stats()["recordings"] == 2
    model.weight.grad = second.zero_()
    assert torch.equal(step(first.copy_(x)), expected)
    assert step.refused == "" and cudagraph.stats()["skips"] == 0
    model.weight.grad = first
    assert torch.equal(step(first), expected) and cudagraph.stats()["skips"] == 1


def test_weights_that_are_frozen_in_each_second_call(device):
    ours, optimizer, eager, eager_optimizer = pair(device, sgd)
    step = cudagraph.whole_step(ours, F.mse_loss, optimizer)
    expected = eager_step(eager, F.mse_loss, eager_optimizer)
    for i, (x, y) in enumerate(batches(device, 16)):
        for model in (ours, eager):
            model.first.requires_grad_(i % 2 == 0)
        assert torch.equal(step(x, y), expected(x, y))
        assert_equal(ours, eager)
    assert step.refused == "" and cudagraph.stats()["recordings"] == 2 and cudagraph.stats()["replays"] == 14


def test_a_flag_that_the_step_itself_sets_is_set_by_replays(device):
    ours, optimizer, eager, eager_optimizer = pair(device, sgd)

    def make_step(model, optimizer):
        model.is_odd = False

        def step(x, y):
            model.is_odd = not model.is_odd
            loss = F.mse_loss(model(x), y) * (0.5 if model.is_odd else 2.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    step, expected = cudagraph.whole_step(make_step(ours, optimizer)), make_step(eager, eager_optimizer)
    for i, (x, y) in enumerate(batches(device, 16)):
        if i == 9:
            ours.is_odd = eager.is_odd = False  # as in the call before
        assert torch.equal(step(x, y), expected(x, y).detach()) and ours.is_odd is eager.is_odd
        assert_equal(ours, eager)
    assert step.refused == "" and cudagraph.stats()["recordings"] == 2 and cudagraph.stats()["replays"] >= 12


def test_a_flag_in_a_dict_that_the_step_makes_anew(device):
    """A replay can't set it in the dict of before: somebody may hold that."""
    found = []
    for wrap in (cudagraph.whole_step, lambda f: f):
        model, optimizer, *_ = pair(device, sgd)
        model.status = {"is_odd": False}

        @wrap
        def step(x, y, model=model, optimizer=optimizer):
            model.status = {"is_odd": not model.status["is_odd"]}
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        held = []
        for x, y in batches(device, 8):
            step(x, y)
            held.append(model.status)
        found.append(held)
        if isinstance(step, cudagraph.step.whole.WholeStep):
            assert "status['is_odd'] each time" in step.refused
    assert found[0] == found[1]


def test_a_decorator_with_options(device):
    ours, optimizer, _, _ = pair(device, adamw)

    @cudagraph.whole_step(options={"size_limit": 1})
    def train(x, y, scale=1.0):
        "Trains."
        loss = F.mse_loss(ours(x), y) * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    assert train.__name__ == "train" and train.__doc__ == "Trains."
    for x, y in batches(device, 4):
        train(x, y, scale=2.0)
    assert cudagraph.stats()["replays"] == 3


def test_a_value_that_the_step_itself_changes_is_named(device, caplog):
    ours, optimizer, _, _ = pair(device, sgd)
    calls = {"log": ""}

    @cudagraph.whole_step
    def train(x, y):
        calls["log"] += "x"
        loss = F.mse_loss(ours(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for x, y in batches(device, 6):
        train(x, y)
    assert calls["log"] == "xxxxxx"  # the capture that failed left no trace
    assert "train, calls['log'] each time, which a replay would not: 'x' became 'xx'" in train.refused
    assert caplog.text.count("runs without a CUDA graph") == 1
