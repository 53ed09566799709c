"""What a snapshot of declared values sees, how it names a change, and that it can be put back."""

from __future__ import annotations

import argparse
import array
import contextvars
import enum
import functools
import sys
import threading
import types
import weakref
from collections import ChainMap, OrderedDict, UserDict, deque

import numpy
import pytest
import torch
from ranks import group_of_one
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from cudagraph.step import host
from cudagraph.step.host import CannotCompare, HostState
from cudagraph.step.users_code import is_users


class Pair(OrderedDict):
    """Can't be made without arguments."""

    def __init__(self, a, b):
        super().__init__(a=a, b=b)


class Slots:
    __slots__ = ("__private", "rate")
    limit = 1


class Config:
    def __init__(self):
        self.rate, self.names, self.queue, self.seen = 0.5, {"{odd}": 1}, deque([1]), {1}
        self.shared, self.inner, self.self = [1, 2], argparse.Namespace(rate=1), self
        self.empty, self.ordered, self.none = {}, OrderedDict(a=1, b=2), None
        self.ordered.rate, self.pair = 1, Pair(1, 2)
        self.slots, self.variable, self.local = Slots(), contextvars.ContextVar("rate"), threading.local()
        self.slots.rate = self.local.rate = 1
        self.variable.set(1)
        self.bytes, self.array, self.every_other = bytearray(2), array.array("d", [1.0]), numpy.zeros(4)[::2]
        self.options, self.kind = types.ModuleType("options"), Slots
        self.options.rate = 1
        self.view, self.number, self.weak = memoryview(self.bytes), numpy.float32(1), weakref.ref(self.inner)

    def method(self, x):
        return x * FACTOR


FACTOR = 2


def closed_over():
    rate = 1

    def change(value):
        nonlocal rate
        rate = value

    def read(x, scale=[1]):  # noqa: B006
        return x * rate

    return read, change


# What changes, the path in the message, and its text.
CHANGES = {
    "an attribute": (lambda c: setattr(c, "rate", 1.5), "config.rate", "0.5 became 1.5"),
    "the type of a number": (lambda c: setattr(c.inner, "rate", True), "config.inner.rate", "1 became True"),
    "the sign of zero": (lambda c: setattr(c, "rate", -0.0), "config.rate", "0.5 became -0.0"),
    "a new attribute": (lambda c: setattr(c, "more", 1), "config.more", "nothing became 1"),
    "a deleted attribute": (lambda c: delattr(c, "rate"), "config.rate", "0.5 became nothing"),
    "a dict": (lambda c: c.names.update({"{odd}": 2}), "config.names['{odd}']", "1 became 2"),
    "an empty dict": (lambda c: c.empty.update(a=1), "config.empty['a']", "nothing became 1"),
    "the order of a dict": (lambda c: c.ordered.move_to_end("a"), "config.ordered, its order", "became"),
    "a dict of one's own": (lambda c: c.pair.move_to_end("a"), "config.pair, its order", "became"),
    "an attribute of a dict": (lambda c: setattr(c.ordered, "rate", 2), "config.ordered.rate", "1 became 2"),
    "an item of a list": (lambda c: c.shared.__setitem__(0, 3), "config.shared[0]", "1 became 3"),
    "all attributes": (lambda c: setattr(c.inner, "__dict__", {"rate": 2}), "config.inner.rate", "1 became 2"),
    "a deque": (lambda c: c.queue.append(2), "config.queue[1]", "nothing became 2"),
    "a set": (lambda c: c.seen.add(2), "config.seen[1]", "nothing became 2"),
    "a longer list": (lambda c: c.shared.append(3), "config.shared[2]", "nothing became 3"),
    "a slot": (lambda c: setattr(c.slots, "rate", 2), "config.slots, rate", "1 became 2"),
    "a slot without a value": (lambda c: delattr(c.slots, "rate"), "config.slots, rate", "1 became nothing"),
    "a context variable": (lambda c: c.variable.set(2), "config.variable, get()", "1 became 2"),
    "a variable of a thread": (lambda c: setattr(c.local, "rate", 2), "config.local.rate", "1 became 2"),
    "a bytearray": (lambda c: c.bytes.__setitem__(0, 2), "config.bytes", "contents"),
    "what a memory view shows": (lambda c: c.bytes.__setitem__(1, 2), "config.view", "contents"),
    "an array": (lambda c: c.array.__setitem__(0, 2.0), "config.array", "contents"),
    "a number of NumPy": (lambda c: setattr(c, "number", numpy.float32(2)), "config.number", "contents"),
    "a module of Python": (lambda c: setattr(c.options, "rate", 2), "config.options, rate", "1 became 2"),
    "an attribute of a class": (lambda c: setattr(Slots, "limit", 2), "config.kind, limit", "1 became 2"),
    "a global": (lambda c: globals().update(FACTOR=3), "step.func, FACTOR", "2 became 3"),
    "another module": (lambda c: setattr(c, "layer", torch.nn.ReLU()), "config.layer", "it is another ReLU now"),
    "an object": (lambda c: setattr(c, "none", Config()), "config.none", "None became a Config"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_named_and_put_back(name, monkeypatch):
    change, path, text = CHANGES[name]
    monkeypatch.setattr(host, "is_users", lambda filename: filename == __file__)
    config = Config()
    config.layer = torch.nn.ReLU()
    roots = {"config": config, "step": config.method}
    before = HostState(roots, "cpu")
    assert before.unchanged() and before.differences(HostState(roots, "cpu")) == {}
    change(config)
    assert not before.unchanged()
    assert text in before.differences(HostState(roots, "cpu"))[path]
    before.restore()
    before.note_versions()
    assert before.unchanged() and before.differences(HostState(roots, "cpu")) == {}


def test_changes_that_are_seen_and_not_put_back():
    """An array with gaps; what a weak reference leads to."""
    config = Config()
    before = HostState({"config": config}, "cpu")
    config.every_other[1] = 3
    assert not before.unchanged()
    assert [*before.differences(HostState({"config": config}, "cpu"))] == ["config.every_other"]
    alone = argparse.Namespace(rate=1)
    before = HostState({"config": weakref.ref(alone)}, "cpu")
    alone.rate = 2
    assert not before.unchanged()
    assert before.differences(HostState({"config": weakref.ref(alone)}, "cpu")) == {"config, ().rate": "1 became 2"}


def test_an_equal_array_in_its_place_is_no_change():
    config = Config()
    before = HostState({"config": config}, "cpu")
    config.array = array.array("d", [1.0])
    assert before.differences(HostState({"config": config}, "cpu")) == {}


@pytest.mark.parametrize("table", [numpy.zeros(1 << 14), numpy.full(2, None)], ids=["large", "of objects"])
def test_large_arrays_and_those_of_objects_are_not_compared(table):
    """The bytes of the second are addresses: `restore` would write those of objects that are gone."""
    before = HostState({"table": table}, "cpu")
    table[0] = 1
    assert before.unchanged()
    before.restore()
    assert table[0] == 1


def test_the_first_arrays_are_compared():
    rows = [numpy.full(3, float(i)) for i in range(host.MOST_ARRAYS + 1)]
    before = HostState({"rows": rows}, "cpu")
    rows[-1][0] = -1.0
    assert before.unchanged()
    rows[host.MOST_ARRAYS - 1][0] = -1.0
    assert not before.unchanged()


def test_a_class_with_attributes_that_cannot_be_set_is_put_back():
    class Color(enum.IntEnum):
        RED = 1

    Color.rate = 1
    before = HostState({"color": Color}, "cpu")
    Color.rate = 2
    assert not before.unchanged()
    before.restore()
    assert Color.rate == 1 and before.unchanged()


def test_closures_defaults_and_partials():
    read, change = closed_over()
    roots = {"step": functools.partial(read, 3, scale=4)}
    before = HostState(roots, "cpu")
    change(5)
    assert not before.unchanged()
    assert before.differences(HostState(roots, "cpu")) == {"step.func, rate": "1 became 5"}
    before.restore()
    assert before.unchanged()
    read.__defaults__[0].append(2)
    assert "step.func, defaults[0][1]" in before.differences(HostState(roots, "cpu"))
    read.__code__ = (lambda x, scale: rate).__code__.replace(co_freevars=("rate",))  # noqa: F821
    assert "step.func" in before.differences(HostState(roots, "cpu"))


def test_another_class_of_an_object():
    class Other(Config):
        pass

    config = Config()
    before = HostState({"config": config}, "cpu")
    config.__class__ = Other
    assert not before.unchanged()
    config.__class__ = Config
    assert before.unchanged()


HOLDERS = {
    "argparse.Namespace": (argparse.Namespace(rate=1), lambda x: setattr(x, "rate", 2)),
    "collections.UserDict": (UserDict(rate=1), lambda x: x.update(rate=2)),
    "collections.ChainMap": (ChainMap({"rate": 1}), lambda x: x.update(rate=2)),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_change_inside_of_a_holder_is_seen_and_put_back(name):
    holder, change = HOLDERS[name]
    before = HostState({"holder": holder}, "cpu")
    change(holder)
    assert not before.unchanged() and before.differences(HostState({"holder": holder}, "cpu"))
    before.restore()
    before.note_versions()
    assert before.unchanged() and before.differences(HostState({"holder": holder}, "cpu")) == {}


@pytest.mark.parametrize(("root", "is_seen"), [("config", False), ("state", True)])
def test_objects_are_looked_at_two_deep_and_declared_state_at_any_depth(root, is_seen):
    deep = types.SimpleNamespace(a=types.SimpleNamespace(b=types.SimpleNamespace(c=types.SimpleNamespace(rate=1.0))))
    roots = {root: deep}
    before = HostState(roots, "cpu")
    deep.a.b.c.rate = 2.0
    assert before.unchanged() is not is_seen
    expected = {f"{root}.a.b.c.rate": "1.0 became 2.0"} if is_seen else {}
    assert before.differences(HostState(roots, "cpu")) == expected
    deep.a.rate = 1.0
    assert before.differences(HostState(roots, "cpu")).keys() == {*expected, f"{root}.a.rate"}


def test_equal_containers_and_functions_made_anew_are_no_change():
    model = torch.nn.Linear(2, 2)
    model.sizes, model.activation = [1, {"a": (2, 3)}], lambda x: x + 1
    before = HostState({"model": model}, "cpu")
    model.sizes, code = [1, {"a": (2, 3)}], model.activation.__code__
    model.activation = types.FunctionType(code, globals())
    assert not before.unchanged() and before.differences(HostState({"model": model}, "cpu")) == {}
    model.weight = torch.nn.Parameter(model.weight.detach())
    after = HostState({"model": model}, "cpu")
    assert before.differences(after)["model._parameters['weight']"] == "it is another Parameter now"


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


def test_what_becomes_of_a_parameter_over_processes_is_seen():
    """It is frozen; then it gets another part, as a module's `to()` gives it."""
    with group_of_one():
        model, mesh = torch.nn.Linear(2, 2), init_device_mesh("cpu", (1,))
        model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh))
        before = HostState({"model": model}, "cpu")
        model.weight.requires_grad_(False)
        assert not before.unchanged() and before.differences(HostState({"model": model}, "cpu"))
        model.weight.requires_grad_(True)
        assert before.unchanged()
        model.double().float()
        assert not before.unchanged() and before.differences(HostState({"model": model}, "cpu"))


def test_another_object_is_named_by_its_kind():
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    root = {"known": [first], "used": first}
    before = HostState({"root": root}, "cuda")
    root["used"] = second
    assert before.differences(HostState({"root": root}, "cuda"))["root['used']"] == "it is another Linear now"


def test_too_many_values_are_refused(monkeypatch):
    monkeypatch.setattr(host, "MOST_VALUES", 100)
    with pytest.raises(CannotCompare, match="depends on more than 100 host values, such as model"):
        HostState({"model": list(range(1000))}, "cpu")


def test_code_of_torch_and_python_is_not_followed():
    import aot_hooks.cache.key as of_ours

    state = HostState({"loss": torch.nn.functional.cross_entropy, "os": sys.modules["os"], "class": Config}, "cpu")
    assert len([path for path in state.leaves if not path.startswith("all modules")]) == 3
    assert not is_users(of_ours.__file__) and not is_users(host.__file__) and is_users(__file__)


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


def test_a_path_is_of_a_root_but_not_of_another_name_that_begins_with_it():
    assert all(host.is_of(path, ["opt"]) for path in ("opt", "opt.lr", "opt['lr']", "opt, its order"))
    assert not any(host.is_of(path, ["opt"]) for path in ("opt_b.lr", "model.opt", "option"))
    assert not host.is_of("opt", [])
