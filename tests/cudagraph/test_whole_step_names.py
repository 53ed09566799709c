"""Changes that a replay must not miss: of order, of names that come later, in base classes, of hooks for all."""

from __future__ import annotations

import argparse
import importlib
import types
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


def replaced_global():
    globals()["abs"] = 1

    def change():
        del globals()["abs"]
        globals()["LATE"] = 3.0

    return late_global(3.0)[0], change


class Slotted:
    __slots__ = ("scale",)


def late_slot():
    return on(Slotted(), lambda holder: getattr(holder, "scale", 2.0))


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
    "a global in place of another one": (replaced_global, 3),
    "a slot that has no value yet": (late_slot, 3),
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
    assert step.refused


class Trainer:
    def __init__(self, w):
        self.w, self.optimizer = w, torch.optim.Adam([w], 0.5, capturable=True)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def rate(self):
        return self.scheduler.get_last_lr()[0]

    @cudagraph.whole_step
    def step(self, x):
        self.optimizer.zero_grad()
        (self.w * x).sum().backward()
        self.optimizer.step()


def test_a_rate_that_is_read_outside_of_the_step_is_no_matter(device, x):
    trainer = Trainer(torch.ones(4, device=device, requires_grad=True))
    for i in range(12):
        trainer.step(x)
        assert trainer.rate() == 0.5 * 0.5**i
        trainer.scheduler.step()
    assert not trainer.step.refused and cudagraph.stats()["replays"] >= 8


SCRIPT = """
import types
@whole_step
def step(x):
    "train"
    out = types.SimpleNamespace(loss=x * w)
    return {"loss": out.loss}

for epoch in range(12):
    train = torch.zeros(())
    x = torch.ones(4, device=w.device)
    loss = step(x)["loss"]
"""


def test_names_of_a_script_that_the_step_has_as_strings_or_attributes_are_no_matter(device):
    w = torch.ones(4, device=device, requires_grad=True)
    space = {"w": w, "torch": torch, "whole_step": cudagraph.whole_step}
    exec(compile(SCRIPT, __file__, "exec"), space)
    assert not space["step"].refused and cudagraph.stats()["replays"] >= 8


def test_a_step_that_reads_another_tensor_in_each_call_is_refused(device, x):
    w, holder = torch.ones(4, device=device, requires_grad=True), argparse.Namespace()

    @cudagraph.whole_step
    def step(x):
        return x * w * holder.mask

    for i in range(12):
        holder.mask = torch.full((4,), float(i), device=device)
        assert step(x)[0] == i
    assert "holder.mask is another tensor in each call" in step.refused


class Odd:
    """Makes its `__dict__` anew, as proxies do."""

    __slots__ = ()
    __dict__ = property(lambda self: {})

    def __setattr__(self, name, value):
        raise RuntimeError("locked")


def test_objects_whose_dict_can_not_be_set_are_no_matter(device, x):
    w, odd = torch.ones(4, device=device, requires_grad=True), Odd()
    step = cudagraph.whole_step(lambda x: x * w * len(vars(odd) or "a"))
    for _ in range(6):
        assert step(x)[0] == 1
    assert not step.refused and cudagraph.stats()["replays"] >= 3


class Raises:
    __dict__ = property(lambda self: 1 // 0)

    def __eq__(self, other):
        raise ValueError("not comparable")


class RaisesKey(str):
    def __repr__(self):
        raise ValueError("no repr")


@pytest.mark.parametrize("make", [Raises, lambda: {RaisesKey("a"): 1, RaisesKey("b"): 2}])
def test_a_step_that_reaches_what_raises_runs_as_it_is(device, x, make):
    w, odd = torch.ones(4, device=device, requires_grad=True), make()
    step = cudagraph.whole_step(lambda x: x * w * (2 if odd is not None else 3))
    for _ in range(4):
        assert step(x)[0] == 2
    assert "which raises" in step.refused


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
