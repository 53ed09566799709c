"""Changes that a replay must not miss: of order, of names that come later, in base classes, of hooks for all."""

from __future__ import annotations

import argparse
import importlib
import types
import weakref
from collections import OrderedDict, defaultdict

import numpy
import pytest
import torch
from torch import nn

import cudagraph

register_hook_of_all = importlib.import_module("torch.optim.optimizer").register_optimizer_step_post_hook


class Twice:
    scale = 2.0


class Config(Twice):
    other = 1


class Meta(type):
    @property
    def scale(cls):
        return SCALE  # noqa: F821


class WithMeta(metaclass=Meta):
    pass


class Named(str):
    pass


class Dunder:
    __scale__ = 2.0


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * SCALE  # noqa: F821

    @staticmethod
    def backward(ctx, g):
        return g * SCALE  # noqa: F821


class Inherits(Doubles):
    pass


class Negative(nn.Module):
    def forward(self, x):
        return -x


class AddThree(nn.Module):
    def forward(self, x):
        return x + 3


@pytest.fixture
def x(device):
    return torch.ones(4, device=device)


def late_global(value):
    return lambda x: x * (LATE if "LATE" in globals() else 2.0), lambda: globals().update(LATE=value)  # noqa: F821


def late_closure():
    def step(x):
        try:
            return x * late
        except NameError:
            return x * 2

    def change():
        nonlocal late
        late = 3.0

    late = 0.0
    del late
    return step, change


def order_of(layers, change):
    """A step that is (1 + 3 or -1) and then the other, so -2 or 4; the order is `change`d."""

    def step(x):
        x = -x
        for layer in layers.values():
            x = layer(x)
        return x

    return step, change


def module_dict():
    layers = nn.ModuleDict({"add": AddThree(), "negative": Negative()})
    return order_of(layers, lambda: layers.update({"add": layers.pop("add")}))


def moved_to_end():
    layers = OrderedDict(add=lambda x: x + 3, negative=lambda x: -x)
    return order_of(layers, lambda: layers.move_to_end("add"))


def other_dict():
    config = {"layers": {"add": lambda x: x + 3, "negative": lambda x: -x}}

    def step(x):
        return order_of(config["layers"], None)[0](x)

    return step, lambda: config.update(layers=dict(reversed(config["layers"].items())))


def attribute_of_the_step():
    def run(x):
        return x * W * step.scale  # noqa: F821

    step = cudagraph.whole_step(run)
    step.scale = 2.0
    return step, lambda: setattr(step, "scale", 3.0)


def on(holder, get=lambda holder: holder.scale, change=lambda holder: setattr(holder, "scale", 3.0)):
    return lambda x: x * get(holder), lambda: change(holder)


def users_module():
    module = types.ModuleType("users_module")
    module.__file__, module.scale = __file__, 2.0
    return module


def in_a_string():
    module = users_module()
    return lambda x: x * getattr(module, "scale"), lambda: setattr(module, "scale", 3.0)  # noqa: B009


def weak():
    holder = argparse.Namespace(scale=2.0)
    parent, ref = [holder], weakref.ref(holder)
    return lambda x: x * ref().scale, lambda: setattr(parent[0], "scale", 3.0)


def named():
    text = Named("a")
    text.scale = 2.0
    return on(text)


def factory():
    numbers = defaultdict(lambda: 2.0)

    def step(x):
        y = x * numbers["missing"]
        del numbers["missing"]
        return y

    return step, lambda: setattr(numbers, "default_factory", lambda: 3.0)


def new_names():
    """`__dict__` as a whole, as in `args.__dict__ = json.load(file)`."""
    return on(argparse.Namespace(scale=2.0), change=lambda args: setattr(args, "__dict__", {"scale": 3.0}))


CHANGES = {
    "the order of a ModuleDict": (module_dict, 4),
    "OrderedDict.move_to_end": (moved_to_end, 4),
    "a dict in another order": (other_dict, 4),
    "a base of a class": (lambda: (lambda x: x * Config.scale, lambda: setattr(Twice, "scale", 3.0)), 3),
    "a metaclass": (lambda: (lambda x: x * WithMeta.scale, lambda: globals().update(SCALE=3.0)), 3),
    "a base of an autograd function": (lambda: (Inherits.apply, lambda: globals().update(SCALE=3.0)), 3),
    "all attributes": (new_names, 3),
    "a name in a string": (in_a_string, 3),
    "a name in globals()": (lambda: (lambda x: x * globals()["SCALE"], lambda: globals().update(SCALE=3.0)), 3),
    "a global that comes later": (lambda: late_global(3.0), 3),
    "a builtin's name": (lambda: (lambda x: abs(x * 2), lambda: globals().update(abs=lambda x: x * 1.5)), 3),
    "a variable that comes later": (late_closure, 3),
    "an attribute of the step": (attribute_of_the_step, 3),
    "a weak reference": (weak, 3),
    "an attribute of a text": (named, 3),
    "a name that looks like one of Python's": (
        lambda: (lambda x: x * Dunder.__scale__, lambda: setattr(Dunder, "__scale__", 3.0)), 3,
    ),
    "a default": (factory, 3),
    "the shape of an array": (
        lambda: on(numpy.arange(6.0).reshape(2, 3), lambda a: a.shape[0], lambda a: setattr(a, "shape", (3, 2))), 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(device, x, name, monkeypatch):
    make, expected = CHANGES[name]
    w = torch.ones(4, device=device, requires_grad=True)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    monkeypatch.setitem(globals(), "W", w)
    for late in ("LATE", "abs"):
        monkeypatch.setitem(globals(), late, None)
        monkeypatch.delitem(globals(), late)
    for cls, attribute in ((Twice, "scale"), (Dunder, "__scale__")):
        monkeypatch.setattr(cls, attribute, 2.0)
    run, change = make()
    step = run if hasattr(run, "refused") else cudagraph.whole_step(lambda x: run(x * w))
    for _ in range(4):
        assert step(x)[0] == (-2 if expected == 4 else 2)
    if name != "a default":  # such a step changes a dict
        assert cudagraph.stats()["replays"] > 0, step.refused
    change()
    assert step(x)[0] == expected


def test_hooks_of_all_optimizers(device, x):
    w = torch.ones(4, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([w], 1.0)

    @cudagraph.whole_step
    def step(x):
        optimizer.zero_grad()
        (w * x).sum().backward()
        optimizer.step()

    for _ in range(4):
        step(x)
    assert w[0] == -3 and cudagraph.stats()["replays"] > 0, step.refused
    handle = register_hook_of_all(lambda *_: w.data.zero_())
    try:
        step(x)
        assert w[0] == 0
    finally:
        handle.remove()


def test_anomaly_mode_finds_a_nan_after_the_step_was_recorded(device, x):
    w = torch.ones(4, device=device, requires_grad=True)
    step = cudagraph.whole_step(lambda x: torch.autograd.grad((w * 0 + x).sqrt().sum(), w)[0])
    for _ in range(4):
        step(x)
    assert cudagraph.stats()["replays"] > 0, step.refused
    with (
        pytest.warns(UserWarning),  # of anomaly mode itself
        pytest.raises(RuntimeError, match="SqrtBackward0' returned nan"),
        torch.autograd.detect_anomaly(),
    ):
        step(x - 2)


def test_the_rate_of_a_scheduler_is_that_of_now(device, x):
    w = torch.ones(4, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([w], 0.5, capturable=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    @cudagraph.whole_step
    def step(x):
        optimizer.zero_grad()
        (w * x).sum().backward()
        optimizer.step()
        return x * scheduler.get_last_lr()[0]

    for _ in range(8):
        assert step(x)[0] == scheduler.get_last_lr()[0]
        scheduler.step()


def test_what_a_step_replaces_is_put_back_after_a_capture_that_fails(device, x):
    w = torch.ones(4, device=device, requires_grad=True)
    args = argparse.Namespace(scale=2.0)
    own = args.__dict__

    @cudagraph.whole_step
    def step(x):
        args.__dict__ = {"scale": args.scale + 1}
        return x * w * args.scale

    for i in range(5):
        assert step(x)[0] == 3 + i
    assert step.refused and own == {"scale": 2.0}
