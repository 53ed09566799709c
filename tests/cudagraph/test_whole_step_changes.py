"""What the host changes between calls of a `whole_step`, such as a learning rate: numbers stay those of eager mode."""

from __future__ import annotations

import copy
import dataclasses
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from whole_steps import OPTIMIZERS, Net, adamw, assert_equal, batches, eager_step, pair, run, sgd, steps

import cudagraph
from cudagraph import settling
from cudagraph.step import whole


class TestWhatTheHostChanges:
    """Each is noticed at the next call, and numbers stay those of eager mode."""

    def both(self, device, change, make=adamw, *, count=24, at=(7, 15), **kw):
        step, expected, models, optimizers = steps(device, make, **kw)

        def between(i):
            if i in at:
                for model, optimizer in zip(models, optimizers, strict=True):
                    change(model, optimizer, i)

        run(step, expected, models, batches(device, count), between)
        assert_equal(*optimizers)
        assert step.refused == "" and cudagraph.stats()["replays"] > count // 2
        return step

    def test_train_and_eval(self, device):
        self.both(device, lambda m, o, i: m.train(i == 15))
        assert cudagraph.stats()["recordings"] == 2  # the first is used again

    def test_requires_grad(self, device):
        self.both(device, lambda m, o, i: m.first.requires_grad_(i == 15))

    def test_an_attribute_of_the_model(self, device):
        self.both(device, lambda m, o, i: setattr(m, "scale", float(i)))

    @pytest.mark.parametrize("name", ["weight_decay", "eps", "betas", "maximize"])
    def test_an_option_of_the_optimizer(self, device, name):
        values = {"weight_decay": 0.3, "eps": 0.1, "betas": (0.5, 0.6), "maximize": True}
        self.both(device, lambda m, o, i: o.param_groups[0].update({name: values[name]}), at=(7,))

    def test_momentum(self, device):
        self.both(device, lambda m, o, i: o.param_groups[0].update(momentum=0.1 * i), sgd, at=(7,))

    def test_an_added_group(self, device):
        def make(model):
            return torch.optim.SGD([*model.first.parameters(), *model.norm.parameters()], lr=0.1)

        self.both(device, lambda m, o, i: o.add_param_group({"params": m.last.parameters(), "lr": 0.3}), make, at=(9,))

    def test_a_replaced_parameter(self, device):
        def change(model, optimizer, i):
            old = model.last.weight
            model.last.weight = nn.Parameter(old.detach() * 0.5)
            optimizer.param_groups[0]["params"] = list(model.parameters())
            optimizer.state.pop(old, None)

        self.both(device, change, sgd)

    def test_other_memory_of_a_parameter(self, device):
        self.both(device, lambda m, o, i: setattr(m.last.weight, "data", m.last.weight.data.clone()))
        assert cudagraph.stats()["recordings"] == 3

    def test_other_strides_of_a_parameter(self, device):
        def change(model, optimizer, i):
            weight = model.square
            weight.data = weight.data.t()

        class Square(Net):
            def __init__(self):
                super().__init__()
                self.square = nn.Parameter(torch.arange(16.0).view(4, 4) / 16)

            def forward(self, x):
                return super().forward(x @ self.square)

        self.both(device, change, sgd, model=Square)

    def test_a_gradient_that_the_user_sets(self, device):
        def change(model, optimizer, i):
            model.last.weight.grad = torch.ones_like(model.last.weight)

        self.both(device, change)
        assert cudagraph.stats()["skips"] == 2

    def test_state_that_is_loaded(self, device):
        def change(model, optimizer, i):
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            model.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in model.state_dict().items()})

        self.both(device, change)

    def test_a_buffer_and_a_hook(self, device):
        def change(model, optimizer, i):
            model.norm.running_mean = torch.zeros_like(model.norm.running_mean)
            model.norm.register_forward_hook(lambda module, args, out: out * 0.5)

        self.both(device, change)

    def test_a_hook_of_a_parameter(self, device):
        self.both(device, lambda m, o, i: m.last.weight.register_hook(lambda g: g * 0.1))

    def test_the_loss(self, device):
        weights = {"l1": 0.5}

        def loss_fn(out, y):
            return F.mse_loss(out, y) + weights["l1"] * out.abs().mean()

        def between(i):
            if i == 6:
                weights["l1"] = 2.0

        step, expected, models, _ = steps(device, adamw, loss_fn)
        run(step, expected, models, batches(device, 12), between)
        assert cudagraph.stats()["recordings"] == 2

    def test_a_global(self, device, monkeypatch):
        step, expected, models, _ = steps(device, adamw, scaled_loss)

        def between(i):
            monkeypatch.setitem(globals(), "FACTOR", 1 + i // 6)

        run(step, expected, models, batches(device, 18), between)
        assert cudagraph.stats()["recordings"] == 3

    def test_settings_of_torch(self, device):
        def change(model, optimizer, i):
            torch.backends.cuda.enable_flash_sdp(i != 7)

        try:
            self.both(device, change)
        finally:
            torch.backends.cuda.enable_flash_sdp(True)
        assert cudagraph.stats()["recordings"] == 2

    def test_the_seed(self, device):
        step, expected, models, _ = steps(device, dropout=0.5)
        losses = []
        for i, (x, y) in enumerate(batches(device, 12)):
            for f in (step, expected):
                torch.manual_seed(i)
                losses.append(f(x, y).item())
        assert losses[::2] == losses[1::2]
        assert_equal(*models)


FACTOR = 1


def scaled_loss(out, y):
    return F.mse_loss(out, y) * FACTOR


@pytest.mark.parametrize("limit", [16, 2])
def test_an_option_that_a_fused_optimizer_reads_on_the_host_is_recorded_for_each_number(device, limit):
    """Up to `rerecord_limit`; then it runs outside of the graph."""
    ours, optimizer, eager, eager_optimizer = pair(device, OPTIMIZERS["sgd, fused"])
    step = cudagraph.whole_step(ours, F.mse_loss, optimizer, options={"rerecord_limit": limit})

    def between(i):
        for each in (optimizer, eager_optimizer):
            each.param_groups[0]["momentum"] = 0.9 - (i // 6) / 16

    run(step, eager_step(eager, F.mse_loss, eager_optimizer), (ours, eager), batches(device, 42), between)
    assert ("['momentum']" in step.update_refused) is (limit == 2) and step.refused == ""
    assert cudagraph.stats()["replays"] > 28


def test_a_learning_rate_after_state_was_loaded(device):
    """`load_state_dict` makes other groups; the rate that the graph reads is that of the new ones."""
    step, expected, models, optimizers = steps(device, lambda m: torch.optim.SGD(m.parameters(), 0.5, fused=True))

    def between(i):
        for each in optimizers:
            if i in (2, 4, 8, 10):
                each.param_groups[0]["lr"] = 0.5**i
            if i in (6, 12):
                each.load_state_dict(copy.deepcopy(each.state_dict()))

    run(step, expected, models, batches(device, 16), between)
    assert step.refused == step.update_refused == ""


def sgd_with_a_rate_on_the_device(model):
    rate = torch.tensor(0.05, device=model.last.weight.device)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=True)


@pytest.mark.parametrize("make", [OPTIMIZERS["adamw, learning rate on the device"], sgd_with_a_rate_on_the_device])
def test_a_learning_rate_on_the_device_is_bitwise_that_of_eager_mode(device, make):
    """Also for a fused optimizer, whose kernel has the rate in float64."""
    step, expected, models, optimizers = steps(device, make)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 50) for o in optimizers]
    run(step, expected, models, batches(device, 50), lambda i: [each.step() for each in schedules])
    assert cudagraph.stats()["replays"] == 49


def test_a_number_that_is_another_one_in_each_call_is_named(device: torch.device) -> None:
    model = torch.nn.Linear(4, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    step = cudagraph.whole_step(model, lambda y, n: y.square().mean() * n, optimizer, options={"size_limit": 3})
    x = torch.randn(2, 4, device=device)
    for n in range(6):
        step(x, n)
    assert step.refused == "input 1 is another int in each call, and a recording is for one number; give it as a tensor"
    step = cudagraph.whole_step(model, lambda y, n: y.square().mean() * n, optimizer, options={"size_limit": 3})
    for n in (1, 1, 1, 2, 3, 4, 1):  # one that comes again keeps its recording
        step(x, n)
    assert step.refused == "" and cudagraph.stats()["replays"] >= 1
    step = cudagraph.whole_step(model, lambda y: y.square().mean(), optimizer, options={"size_limit": 3})
    for n in range(1, 6):
        step(torch.randn(n, 4, device=device))
    assert step.refused == ""


class TestWhatMayStillChange:
    """A recording would repeat for ever what was compiled, or planned, in the first calls."""

    def recorded(self, device, monkeypatch, count, calls, warmup_steps=1):
        """How often a step was recorded before each call, if something changes in the first `count` uncaptured ones."""
        uncaptured, before = [], []
        monkeypatch.setattr(settling, "unsettled_counts", [lambda: min(len(uncaptured), count)])
        step, expected, models, _ = steps(device, sgd)
        step.options = dataclasses.replace(step.options, warmup_steps=warmup_steps)
        warm_up = step._warm_up

        def noted(*args):
            uncaptured.append(args)
            return warm_up(*args)

        def counted(x, y):
            before.append(cudagraph.stats()["recordings"])
            return step(x, y)

        monkeypatch.setattr(step, "_warm_up", noted)
        run(counted, expected, models, batches(device, calls))
        return before

    def test_a_step_is_recorded_after_a_call_in_which_nothing_changed(self, device, monkeypatch):
        assert self.recorded(device, monkeypatch, 4, 8) == [0, 0, 0, 0, 0, 0, 1, 1]

    def test_a_step_that_never_settles_is_recorded_all_the_same(self, device, monkeypatch):
        monkeypatch.setattr(whole, "MOST_UNSETTLED_CALLS", 3)
        assert self.recorded(device, monkeypatch, 99, 7) == [0, 0, 0, 0, 0, 1, 1]

    def test_so_is_one_with_two_warm_ups_and_the_log_says_it(self, device, monkeypatch, caplog):
        caplog.set_level(logging.INFO, "cudagraph")
        monkeypatch.setattr(whole, "MOST_UNSETTLED_CALLS", 3)
        assert self.recorded(device, monkeypatch, 99, 8, warmup_steps=2) == [0, 0, 0, 0, 0, 0, 1, 1]
        assert "compiles or tries plans in each of 3 calls: what it does now is recorded" in caplog.text


OTHERS = {
    "two numbers": lambda x, i: (x, i, -i),
    "a number and a shape": lambda x, i: (x[: 1 + i % 3], i),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_number_that_never_comes_again_is_named_and_not_the_shapes(device, name):
    w = torch.ones(4, device=device, requires_grad=True)
    step = cudagraph.whole_step(lambda x, *numbers: (x * w).sum() * numbers[0], options={"size_limit": 6})
    x = torch.ones(4, 4, device=device)
    for i in range(8):
        inputs = OTHERS[name](x, i)
        assert step(*inputs) == inputs[0].numel() * i
    assert step.refused == "input 1 is another int in each call, and a recording is for one number; give it as a tensor"


def test_shapes_alone_are_no_reason_for_good(device):
    w = torch.ones(4, device=device, requires_grad=True)
    step = cudagraph.whole_step(lambda x, n: (x * w).sum() * n, options={"size_limit": 6})
    for i in range(8):
        step(torch.ones(1 + i, 4, device=device), 2)
    assert step.refused == ""
