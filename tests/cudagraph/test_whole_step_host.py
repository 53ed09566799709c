"""What a snapshot of host values sees, how it names a change, and that it can be put back."""

from __future__ import annotations

import argparse
import array
import functools
import sys
import types
from collections import ChainMap, OrderedDict, UserDict, deque

import numpy
import pytest
import torch

from cudagraph.step import host
from cudagraph.step.host import CannotCompare, HostState
from cudagraph.step.users_code import is_users


class Slotted:
    __slots__ = ("rate",)


class Config:
    shared = [1, 2]  # noqa: RUF012

    def __init__(self):
        self.rate, self.names, self.queue, self.seen = 0.5, {"{odd}": 1}, deque([1]), {1}
        self.slotted, self.self = Slotted(), self
        self.slotted.rate = 1
        self.empty, self.ordered = {}, OrderedDict(a=1, b=2)

    def method(self, x):
        return x * FACTOR * settings.factor


FACTOR = 2
settings = types.ModuleType("settings")
settings.__file__ = __file__
settings.factor = 1


def closed_over():
    rate = 1

    def change(value):
        nonlocal rate
        rate = value

    def read(x, scale=[1]):  # noqa: B006
        return x * rate

    return read, change


CHANGES = {
    "an attribute": (lambda c: setattr(c, "rate", 1.5), "config.rate"),
    "the type of a number": (lambda c: setattr(c.slotted, "rate", True), "config.slotted"),
    "the sign of zero": (lambda c: setattr(c, "rate", -0.0), "config.rate"),
    "a new attribute": (lambda c: setattr(c, "more", 1), "config.more"),
    "a deleted attribute": (lambda c: delattr(c, "rate"), "config.rate"),
    "a dict": (lambda c: c.names.update({"{odd}": 2}), "config.names['{odd}']"),
    "an empty dict": (lambda c: c.empty.update(a=1), "config.empty['a']"),
    "the order of a dict": (lambda c: c.ordered.move_to_end("a"), "config.ordered, its order"),
    "an item of a list": (lambda c: Config.shared.__setitem__(0, 3), "Config, shared[0]"),
    "a deque": (lambda c: c.queue.append(2), "config.queue[1]"),
    "a set": (lambda c: c.seen.add(2), "config.seen[1]"),
    "a slot": (lambda c: setattr(c.slotted, "rate", 2), "config.slotted, rate"),
    "a class": (lambda c: Config.shared.append(3), "Config, shared[2]"),
    "a global": (lambda c: globals().update(FACTOR=3), "FACTOR"),
    "a module of the user's": (lambda c: setattr(settings, "factor", 3), "factor"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_named_and_put_back(name, monkeypatch):
    change, path = CHANGES[name]
    monkeypatch.setattr(host, "is_users", lambda filename: filename == __file__)
    config = Config()
    roots = {"config": config, "step": config.method}
    before = HostState(roots, "cpu")
    assert before.unchanged() and before.differences(HostState(roots, "cpu")) == {}
    change(config)
    assert not before.unchanged()
    assert any(path in found for found in before.differences(HostState(roots, "cpu")))
    before.restore()
    before.note_versions()
    assert before.unchanged() and before.differences(HostState(roots, "cpu")) == {}


def test_closures_defaults_and_partials():
    read, change = closed_over()
    roots = {"step": functools.partial(read, 3, scale=4)}
    before = HostState(roots, "cpu")
    change(5)
    assert not before.unchanged()
    assert [*before.differences(HostState(roots, "cpu")).items()] == [("step.func, rate", "1 became 5")]
    before.restore()
    assert before.unchanged()
    read.__defaults__[0].append(2)
    assert "step.func.__defaults__[0][1]" in before.differences(HostState(roots, "cpu"))


def test_another_class_of_an_object():
    class Other(Config):
        pass

    config = Config()
    before = HostState({"config": config}, "cpu")
    config.__class__ = Other
    assert not before.unchanged()
    assert any("Other" in path for path in before.differences(HostState({"config": config}, "cpu")))
    config.__class__ = Config
    assert before.unchanged()


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("__code__", (lambda x, scale: x).__code__), ("__defaults__", (2,)), ("__kwdefaults__", {"more": 2})],
)
def test_another_code_and_other_defaults_of_a_function(attribute, value):
    def step(x, scale=1, *, more=1):
        return x * scale * more

    before, old = HostState({"step": step}, "cpu"), getattr(step, attribute)
    setattr(step, attribute, value)
    assert not before.unchanged() and before.differences(HostState({"step": step}, "cpu"))
    setattr(step, attribute, old)
    assert before.unchanged()


def test_a_name_that_a_module_of_the_users_gets_later(monkeypatch):
    """It is no name of the snapshot, so only the number of names shows it."""

    def step(x):
        return x * (settings.later if hasattr(settings, "later") else 1)

    monkeypatch.setattr(host, "is_users", lambda filename: filename == __file__)
    before = HostState({"step": step}, "cpu")
    assert before.unchanged()
    monkeypatch.setattr(settings, "later", 2, raising=False)
    assert not before.unchanged()
    (found,) = before.differences(HostState({"step": step}, "cpu")).items()
    assert found == ("step, settings, later", "nothing became 2")
    monkeypatch.undo()
    assert before.unchanged()


HOLDERS = {
    "argparse.Namespace": (argparse.Namespace(rate=1), lambda x: setattr(x, "rate", 2)),
    "types.SimpleNamespace": (types.SimpleNamespace(rate=1), lambda x: setattr(x, "rate", 2)),
    "collections.UserDict": (UserDict(rate=1), lambda x: x.update(rate=2)),
    "collections.ChainMap": (ChainMap({"rate": 1}), lambda x: x.update(rate=2)),
    "a NumPy array": (numpy.ones((2, 3)), lambda x: x.__setitem__((1, 2), 2.0)),
    "a NumPy array of no dimensions": (numpy.array(1.0), lambda x: x.fill(2.0)),
    "bytearray": (bytearray(b"ab"), lambda x: x.__setitem__(0, 1)),
    "array.array": (array.array("d", [1.0]), lambda x: x.__setitem__(0, 2.0)),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_change_inside_of_a_holder_is_seen_and_put_back(name):
    holder, change = HOLDERS[name]
    before = HostState({"holder": holder}, "cpu")
    assert before.unchanged()
    change(holder)
    assert not before.unchanged() and before.differences(HostState({"holder": holder}, "cpu"))
    before.restore()
    before.note_versions()
    assert before.unchanged() and before.differences(HostState({"holder": holder}, "cpu")) == {}


def test_a_large_array_is_refused():
    with pytest.raises(CannotCompare, match="data is an array of 8000000 bytes, too many to compare"):
        HostState({"data": numpy.zeros(1_000_000)}, "cpu")


def test_a_read_only_view_of_a_dict():
    rates = {"a": 1}
    before = HostState({"rates": types.MappingProxyType(rates)}, "cpu")
    assert before.unchanged()
    rates["a"] = 2
    assert not before.unchanged() and before.differences(HostState({"rates": types.MappingProxyType(rates)}, "cpu"))


def test_equal_containers_and_functions_made_anew_are_no_change():
    model = torch.nn.Linear(2, 2)
    model.sizes, model.activation = [1, {"a": (2, 3)}], lambda x: x + 1
    before = HostState({"model": model}, "cpu")
    model.sizes, code = [1, {"a": (2, 3)}], model.activation.__code__
    model.activation = types.FunctionType(code, globals())
    assert not before.unchanged() and before.differences(HostState({"model": model}, "cpu")) == {}
    model.weight = torch.nn.Parameter(model.weight.detach())
    assert next(iter(before.differences(HostState({"model": model}, "cpu")))) == "model._parameters['weight']"


def test_a_tensor_on_the_cpu_of_a_step_on_a_device_is_a_value():
    model = torch.nn.Linear(2, 2)
    model.rate = torch.tensor(1.0)
    before = HostState({"model": model}, "cuda")
    model.rate.fill_(2.0)
    assert not before.unchanged() and "model.rate" in before.differences(HostState({"model": model}, "cuda"))


def test_hooks_of_a_parameter_are_seen():
    model = torch.nn.Linear(2, 2)
    before = HostState({"model": model}, "cpu")
    handle = model.weight.register_post_accumulate_grad_hook(lambda p: None)
    assert not before.unchanged() and before.differences(HostState({"model": model}, "cpu"))
    handle.remove()


def test_too_many_values_are_refused(monkeypatch):
    monkeypatch.setattr(host, "MOST_VALUES", 100)
    with pytest.raises(CannotCompare, match="reaches more than 100 host values, such as model"):
        HostState({"model": list(range(1000))}, "cpu")


def test_code_of_torch_and_python_is_not_followed():
    state = HostState({"loss": torch.nn.functional.cross_entropy, "os": sys.modules["os"]}, "cpu")
    assert len([path for path in state.leaves if not path.startswith("all modules")]) == 2


def test_a_set_that_did_not_change_keeps_its_order():
    """A copy has room for fewer entries, and so another order: put back, it would look like a change."""
    large = set(range(100))
    for number in range(100):
        if number not in (3, 64):
            large.discard(number)
    assert [*large] != [*large.copy()]
    state = HostState({"large": large}, "cuda")
    state.restore()
    assert [*large] == [3, 64] and state.unchanged() and not state.differences(HostState({"large": large}, "cuda"))
    large.discard(3)
    assert not state.unchanged()
    state.restore()
    assert large == {3, 64}


def test_the_packages_own_functions_are_not_followed():
    import aot_hooks.cache.key as of_ours

    assert not is_users(of_ours.__file__) and not is_users(host.__file__) and is_users(__file__)
