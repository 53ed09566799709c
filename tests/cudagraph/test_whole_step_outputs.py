"""Tensors that a step stores on modules and objects: each replay refreshes them, in memory of their own."""

from __future__ import annotations

import queue

import pytest
import torch
from torch.nn import functional as F
from whole_steps import Net, adamw, assert_equal, batches, copied

import cudagraph


class Trainer:
    """Keeps what `keep(self, loss, out)` stores."""

    def __init__(self, device, keep):
        torch.manual_seed(1)
        self.net, self.keep = Net().to(device), keep
        self.optimizer = adamw(self.net)
        self.kept, self.losses, self.of_layers = None, [], {}
        self.net.last_loss = None

    def step(self, x, y):
        self.optimizer.zero_grad()
        out = self.net(x)
        loss = F.mse_loss(out, y)
        self.keep(self, loss, out)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def stored(self):
        of_weight = getattr(self.net.last.weight, "last_loss", None)
        return self.kept, [*self.losses], dict(self.of_layers), self.net.last_loss, of_weight


def on_an_object(t, loss, out):
    t.kept = loss  # with its history


def on_a_module(t, loss, out):
    t.net.last_loss = loss.detach()


def on_a_parameter(t, loss, out):
    t.net.last.weight.last_loss = loss.detach()


def in_a_dict(t, loss, out):
    t.of_layers["last"] = out.detach()
    t.of_layers["both"] = (out.detach() * 2, {"loss": loss.detach(), "n": 3})


def in_a_new_list(t, loss, out):
    t.kept = [loss.detach(), *out.detach().unbind(0)]


def in_the_same_list(t, loss, out):
    t.losses.clear()
    t.losses += [loss.detach(), out.detach()]


def one_tensor_in_two_places(t, loss, out):
    t.kept = t.net.last_loss = loss.detach()


def what_it_returns_and_an_input_to_a_hook(t, loss, out):
    t.kept = [loss, out[1:]]


WAYS = (on_an_object, on_a_module, on_a_parameter, in_a_dict, in_a_new_list, in_the_same_list, one_tensor_in_two_places)


@pytest.mark.parametrize("keep", [*WAYS, what_it_returns_and_an_input_to_a_hook])
def test_they_are_those_of_eager_mode(device, keep):
    ours, eager = Trainer(device, keep), Trainer(device, keep)
    step, held = cudagraph.whole_step(ours.step), []
    for i, size in enumerate((6, 6, 6, 4, 4, 6, 4, 6, 6)):
        x, y = next(batches(device, 1, size))
        assert torch.equal(step(x + i, y), eager.step(x + i, y))
        stored, expected = copied(ours.stored()), copied(eager.stored())
        torch.testing.assert_close(stored, expected, rtol=0, atol=0)
        held.append((ours.stored(), expected))
    for stored, expected in held:  # each is memory of its own
        torch.testing.assert_close(copied(stored), expected, rtol=0, atol=0)
    assert_equal(ours.net, eager.net)
    assert step.refused == "" and cudagraph.stats()["recordings"] == 2 and cudagraph.stats()["replays"] >= 7


def test_what_a_hook_of_a_module_keeps(device):
    """As probes do: the dict is a variable of the hook."""
    seen, trainer = {}, Trainer(device, lambda *_: None)
    trainer.net.first.register_forward_hook(lambda module, args, out: seen.update(first=out.detach()))
    step = cudagraph.whole_step(trainer.step)
    for x, y in batches(device, 6):
        expected = F.linear(x, trainer.net.first.weight).detach().clone()
        step(x, y)
        assert torch.equal(seen["first"], expected)
    assert step.refused == "" and cudagraph.stats()["replays"] == 5


def test_a_stored_view_of_a_parameter_stays_one(device):
    ours = Trainer(device, lambda t, loss, out: setattr(t, "kept", t.net.last.bias.detach()))
    step = cudagraph.whole_step(ours.step)
    for x, y in batches(device, 6):
        step(x, y)
        assert ours.kept.data_ptr() == ours.net.last.bias.data_ptr()
    assert step.refused == "" and cudagraph.stats()["replays"] == 5


def test_what_the_host_sets_in_between(device):
    """None is another value than a tensor, so it may decide; another tensor is none of the step's business."""
    ours, eager = Trainer(device, on_an_object), Trainer(device, on_an_object)
    step = cudagraph.whole_step(ours.step)
    for i, (x, y) in enumerate(batches(device, 12)):
        for each in (ours, eager):
            each.kept = [each.kept, None, torch.zeros(2, device=device)][i % 3 if i > 3 else 0]
        assert torch.equal(step(x, y), eager.step(x, y)) and torch.equal(ours.kept, eager.kept)
    assert step.refused == "" and cudagraph.stats()["recordings"] == 2


def reads(t, loss, out):
    t.kept = loss.detach() if t.kept is None else 0.5 * t.kept + loss.detach()


def grows(t, loss, out):
    t.losses.append(loss.detach())


def passes_on(t, loss, out):
    t.of_layers["before"], t.of_layers["now"] = t.of_layers.get("now", loss.detach()), loss.detach()


REFUSED = {
    reads: "reads step.self.kept, which it has stored in the step before",
    grows: "keeps in step.self.losses[:] what it has stored in the step before",
    passes_on: "keeps in step.self.of_layers['before'] what it has stored in the step before",
}


@pytest.mark.parametrize("keep", REFUSED)
def test_a_step_that_needs_what_it_has_stored_runs_as_it_is(device, keep):
    ours, eager = Trainer(device, keep), Trainer(device, keep)
    step = cudagraph.whole_step(ours.step)
    for x, y in batches(device, 8):
        assert torch.equal(step(x, y), eager.step(x, y))
        torch.testing.assert_close(copied(ours.stored()), copied(eager.stored()), rtol=0, atol=0)
    assert REFUSED[keep] in step.refused and cudagraph.stats()["recordings"] == 0


def test_nothing_is_left_of_a_capture_that_fails(device):
    """Neither stand-ins nor tensors of the capture: all is what the step before has left."""

    def keep(t, loss, out):
        in_a_dict(t, loss, out)
        in_the_same_list(t, loss, out)
        if t.step_is_captured():
            left.put(t.of_layers["last"])
            raise torch.OutOfMemoryError("planted")

    ours, left = Trainer(device, keep), queue.SimpleQueue()
    step = cudagraph.whole_step(ours.step)
    ours.step_is_captured = lambda: step.cursor is not None and step.driver.is_capturing() and left.empty()
    data = [*batches(device, 4)]
    step(*data[0])
    before = torch.utils._pytree.tree_leaves(ours.stored())
    seen = []
    warm_up, step._warm_up = step._warm_up, lambda *args: (seen.append(ours.stored()), warm_up(*args))[1]
    step(*data[1])
    assert left.qsize() == 1 and [*map(id, torch.utils._pytree.tree_leaves(seen[0]))] == [*map(id, before)]
    step(*data[2])
    step(*data[3])
    assert step.refused == "" and cudagraph.stats()["replays"] >= 1


def test_a_list_with_something_else_than_tensors_is_named_with_it(device):
    """And not one of its tensors, which a step may store."""
    w, kept = torch.ones(4, device=device, requires_grad=True), {}

    @cudagraph.whole_step
    def step(x):
        kept["loss"] = [(x * w).sum(), object()]
        return x * w

    for _ in range(3):
        step(torch.ones(4, device=device))
    assert step.refused.startswith("stores a list in step, kept['loss'] that holds more than tensors")
    assert "(object)" in step.refused
